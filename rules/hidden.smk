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
        # Not a parameter: another idle time is no reason to capture a chunk again.
        warm_idle_s=config["server"]["warm_idle_s"],
    params:
        flags=settings.flags(
            config["hidden"],
            *("layers", "final", "state_dtype", "shard_bytes", "concurrency", "writer_threads"),
            *("deterministic", "repeated_samples"),
            *("max_logprob_difference", "min_greedy_agreement", "checked_rows"),
        ),
        pin=settings.flags(config["container"], "sglang_version"),
        server=SERVER,
        warm_folder=WARM,
        server_log=f"{LOGS}/capture_hidden/{{chunk}}.server.log",
    message:
        "Capturing the hidden states of chunk {wildcards.chunk}"
    shell:
        "python scripts/capture_hidden.py {params.flags} {params.pin}"
        " --tokens {input.tokens}"
        " --head {input.head}"
        " --server-log {params.server_log}"
        " --warm-idle-s {resources.warm_idle_s}"
        " --warm-folder {params.warm_folder}"
        " --output {output.manifest}"
        " {params.server}"
        " 2>&1 | tee {log}"


# Write the states in the format of another trainer; only when asked for -> exports/{format}/ and exports/{format}.json
rule convert_hidden:
    input:
        code=settings.sources("convert_hidden"),
        hidden_sidecar=lambda wildcards: settings.export_inputs(config, wildcards.format),
        hidden=ancient(expand(str(rules.capture_hidden.output.manifest), chunk=CHUNKS)),
        shards=ancient(expand(str(rules.capture_hidden.output.shard), chunk=CHUNKS)),
    output:
        # Its files and their digests stand in the manifest, whose sidecar is what a consumer depends on.
        folder=directory(f"{RESULTS}/exports/{{format}}"),
        manifest=f"{RESULTS}/exports/{{format}}.json",
        sidecar=f"{RESULTS}/exports/{{format}}.json.sha256",
    log:
        f"{LOGS}/convert_hidden/{{format}}.log",
    benchmark:
        f"{BENCHMARKS}/convert_hidden/{{format}}.tsv"
    conda:
        "../envs/host.yaml"
    threads: 2
    params:
        hidden=lambda wildcards, input: os.path.dirname(input.hidden[0]),
        chunks=len(CHUNKS),
    message:
        "Converting the hidden states to {wildcards.format}"
    shell:
        "python scripts/convert_hidden.py"
        " --hidden {params.hidden}"
        " --count {params.chunks}"
        " --format {wildcards.format}"
        " --threads {threads}"
        " --output {output.folder}"
        " 2>&1 | tee {log}"
