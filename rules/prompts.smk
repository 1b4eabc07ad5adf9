# Write the prompts of one chunk: a list, or what the target writes itself -> prompts/{chunk}.jsonl
rule write_prompts:
    input:
        code=settings.sources("write_prompts"),
        sif_sidecar=rules.build_image.output.sidecar,
        sif=ancient(str(rules.build_image.output.sif)),
        target=rules.fetch_target.output.sidecar,
        listed=[config["prompts"]["file"]] if config["prompts"]["source"] == "jsonl" else [],
    output:
        prompts=f"{RESULTS}/prompts/{{chunk}}.jsonl",
        sidecar=f"{RESULTS}/prompts/{{chunk}}.jsonl.sha256",
    log:
        f"{LOGS}/write_prompts/{{chunk}}.log",
    benchmark:
        f"{BENCHMARKS}/write_prompts/{{chunk}}.tsv"
    container:
        SIF
    threads: config["server"]["threads"]
    resources:
        gpu=GPUS if config["prompts"]["source"] == "self" else 0,
    params:
        flags=settings.flags(
            config["prompts"],
            *("source", "file", "name", "version", "rows_per_chunk", "count", "held_out_fraction"),
            *("drawn_tokens", "max_new_tokens"),
        ),
        number=lambda wildcards: int(wildcards.chunk),
        server=SERVER,
        cache=config["cache_dir"],
        server_log=f"{LOGS}/write_prompts/{{chunk}}.server.log",
    message:
        "Writing the prompts of chunk {wildcards.chunk}"
    shell:
        "python scripts/write_prompts.py {params.flags}"
        " --chunk {params.number}"
        " --cache-dir {params.cache}"
        " --server-log {params.server_log}"
        " --output {output.prompts}"
        " {params.server}"
        " 2>&1 | tee {log}"
