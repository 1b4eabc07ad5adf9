# Let the target answer the prompts of one chunk -> conversations/{chunk}.jsonl
rule generate_conversations:
    input:
        code=settings.sources("generate_conversations"),
        sif_sidecar=rules.build_image.output.sidecar,
        sif=ancient(str(rules.build_image.output.sif)),
        target=rules.fetch_target.output.sidecar,
        prompts_sidecar=rules.write_prompts.output.sidecar,
        prompts=ancient(str(rules.write_prompts.output.prompts)),
    output:
        conversations=f"{RESULTS}/conversations/{{chunk}}.jsonl",
        sidecar=f"{RESULTS}/conversations/{{chunk}}.jsonl.sha256",
    log:
        f"{LOGS}/generate_conversations/{{chunk}}.log",
    benchmark:
        f"{BENCHMARKS}/generate_conversations/{{chunk}}.tsv"
    container:
        SIF
    threads: config["server"]["threads"]
    resources:
        gpu=GPUS if config["conversations"]["regenerate"] else 0,
    params:
        flags=settings.flags(
            config["conversations"], "regenerate", "max_new_tokens", "temperature", "top_p", "concurrency"
        ),
        server=SERVER,
        server_log=f"{LOGS}/generate_conversations/{{chunk}}.server.log",
    message:
        "Answering the prompts of chunk {wildcards.chunk}"
    shell:
        "python scripts/generate_conversations.py {params.flags}"
        " --prompts {input.prompts}"
        " --server-log {params.server_log}"
        " --output {output.conversations}"
        " {params.server}"
        " 2>&1 | tee {log}"
