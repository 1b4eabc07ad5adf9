# Capture the hidden states of one chunk from inside the server -> hidden/{chunk}/ and hidden/{chunk}.json
rule capture_hidden:
    input:
        code=settings.sources("capture_hidden"),
        sif_sidecar=rules.build_image.output.sidecar,
        sif=ancient(str(rules.build_image.output.sif)),
        target=rules.fetch_target.output.sidecar,
        head_sidecar=rules.fetch_target.output.head_sidecar,
        head=ancient(str(rules.fetch_target.output.head)),
        tokens_sidecar=rules.tokenize_conversations.output.sidecar,
        tokens=ancient(str(rules.tokenize_conversations.output.tokens)),
    output:
        # The other shards of a chunk are known when it is captured; the first one stands for all of them here.
        shard=f"{RESULTS}/hidden/{{chunk}}/shard-00000.safetensors",
        manifest=f"{RESULTS}/hidden/{{chunk}}.json",
        sidecar=f"{RESULTS}/hidden/{{chunk}}.json.sha256",
    log:
        f"{LOGS}/capture_hidden/{{chunk}}.log",
    benchmark:
        f"{BENCHMARKS}/capture_hidden/{{chunk}}.tsv"
    container:
        SIF
    threads: config["server"]["threads"]
    resources:
        gpu=GPUS,
    params:
        flags=settings.flags(
            config["hidden"],
            *("layers", "final", "state_dtype", "shard_bytes", "concurrency"),
            *("max_logprob_difference", "min_greedy_agreement", "checked_rows"),
        ),
        pin=settings.flags(config["container"], "sglang_version"),
        server=SERVER,
        server_log=f"{LOGS}/capture_hidden/{{chunk}}.server.log",
    message:
        "Capturing the hidden states of chunk {wildcards.chunk}"
    shell:
        "python scripts/capture_hidden.py {params.flags} {params.pin}"
        " --tokens {input.tokens}"
        " --head {input.head}"
        " --server-log {params.server_log}"
        " --output {output.manifest}"
        " {params.server}"
        " 2>&1 | tee {log}"
