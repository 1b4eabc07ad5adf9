# Choose the draft vocabulary from the training answers -> drafter/vocab.safetensors
rule build_vocab:
    input:
        code=settings.sources("build_vocab"),
        sif_sidecar=rules.build_image.output.sidecar,
        sif=ancient(str(rules.build_image.output.sif)),
        target_sidecar=rules.fetch_target.output.sidecar,
        target=ancient(str(rules.fetch_target.output.manifest)),
        tokens_sidecar=expand(str(rules.tokenize_conversations.output.sidecar), chunk=CHUNKS),
        tokens=ancient(expand(str(rules.tokenize_conversations.output.tokens), chunk=CHUNKS)),
    output:
        vocab=f"{RESULTS}/drafter/vocab.safetensors",
        sidecar=f"{RESULTS}/drafter/vocab.safetensors.sha256",
    log:
        f"{LOGS}/build_vocab.log",
    benchmark:
        f"{BENCHMARKS}/build_vocab.tsv"
    container:
        SIF
    params:
        flags=settings.flags(config["drafter"], "draft_vocab_size"),
        tokens=lambda wildcards, input: os.path.dirname(input.tokens[0]),
        chunks=len(CHUNKS),
    message:
        "Choosing the draft vocabulary"
    shell:
        "python scripts/build_vocab.py {params.flags}"
        " --tokens {params.tokens}"
        " --chunks {params.chunks}"
        " --target {input.target}"
        " --output {output.vocab}"
        " 2>&1 | tee {log}"


# Train the drafter on the captured states -> drafter/trained.safetensors and metrics.json; checkpoints survive a kill
rule train_drafter:
    input:
        code=settings.sources("train_drafter"),
        sif_sidecar=rules.build_image.output.sidecar,
        sif=ancient(str(rules.build_image.output.sif)),
        target_sidecar=rules.fetch_target.output.sidecar,
        target=ancient(str(rules.fetch_target.output.manifest)),
        head_sidecar=rules.fetch_target.output.head_sidecar,
        head=ancient(str(rules.fetch_target.output.head)),
        vocab_sidecar=rules.build_vocab.output.sidecar,
        vocab=ancient(str(rules.build_vocab.output.vocab)),
        hidden_sidecar=expand(str(rules.capture_hidden.output.sidecar), chunk=CHUNKS),
        hidden=ancient(expand(str(rules.capture_hidden.output.manifest), chunk=CHUNKS)),
        shards=ancient(expand(str(rules.capture_hidden.output.shard), chunk=CHUNKS)),
    output:
        trained=f"{RESULTS}/drafter/trained.safetensors",
        sidecar=f"{RESULTS}/drafter/trained.safetensors.sha256",
        metrics=f"{RESULTS}/drafter/metrics.json",
        metrics_sidecar=f"{RESULTS}/drafter/metrics.json.sha256",
    log:
        f"{LOGS}/train_drafter.log",
    benchmark:
        f"{BENCHMARKS}/train_drafter.tsv"
    container:
        SIF
    threads: config["drafter"]["threads"]
    resources:
        gpu=1 if config["drafter"]["device"] == "cuda" else 0,
    params:
        flags=settings.flags(
            config["drafter"],
            *("intermediate_size", "num_attention_heads", "num_key_value_heads", "ttt_steps", "step_decay"),
            *("mask_rule", "epochs", "tokens_per_batch", "learning_rate", "warmup_ratio", "weight_decay"),
            *("max_grad_norm", "dtype", "device", "eval_every_steps", "save_every_steps", "keep_checkpoints"),
            "seed",
        ),
        served_steps=settings.served_steps(config),
        hidden=lambda wildcards, input: os.path.dirname(input.hidden[0]),
        chunks=len(CHUNKS),
        checkpoints=f"{RESULTS}/drafter/checkpoints",
    message:
        "Training the drafter"
    shell:
        "python scripts/train_drafter.py {params.flags}"
        " --served-steps {params.served_steps}"
        " --threads {threads}"
        " --hidden {params.hidden}"
        " --chunks {params.chunks}"
        " --vocab {input.vocab}"
        " --target {input.target}"
        " --head {input.head}"
        " --checkpoints {params.checkpoints}"
        " --metrics {output.metrics}"
        " --output {output.trained}"
        " 2>&1 | tee {log}"


# Write the trained drafter as a folder SGLang serves -> drafter/export/
rule export_drafter:
    input:
        code=settings.sources("export_drafter"),
        sif_sidecar=rules.build_image.output.sidecar,
        sif=ancient(str(rules.build_image.output.sif)),
        target_sidecar=rules.fetch_target.output.sidecar,
        target=ancient(str(rules.fetch_target.output.manifest)),
        vocab_sidecar=rules.build_vocab.output.sidecar,
        vocab=ancient(str(rules.build_vocab.output.vocab)),
        trained_sidecar=rules.train_drafter.output.sidecar,
        trained=ancient(str(rules.train_drafter.output.trained)),
        metrics=ancient(str(rules.train_drafter.output.metrics)),
    output:
        files=expand(f"{RESULTS}/drafter/export/{{name}}", name=["config.json", "model.safetensors", "README.md"]),
        sidecars=expand(
            f"{RESULTS}/drafter/export/{{name}}.sha256", name=["config.json", "model.safetensors", "README.md"]
        ),
    log:
        f"{LOGS}/export_drafter.log",
    container:
        SIF
    params:
        pin=settings.flags(config["container"], "sglang_version"),
        folder=lambda wildcards, output: os.path.dirname(output.files[0]),
    message:
        "Exporting the drafter"
    shell:
        "python scripts/export_drafter.py {params.pin}"
        " --trained {input.trained}"
        " --vocab {input.vocab}"
        " --target {input.target}"
        " --metrics {input.metrics}"
        " --output {params.folder}"
        " 2>&1 | tee {log}"


# Let SGLang load the export and compare what it serves with what was trained -> drafter/check.json
rule check_export:
    input:
        code=settings.sources("check_export"),
        sif_sidecar=rules.build_image.output.sidecar,
        sif=ancient(str(rules.build_image.output.sif)),
        head_sidecar=rules.fetch_target.output.head_sidecar,
        head=ancient(str(rules.fetch_target.output.head)),
        trained_sidecar=rules.train_drafter.output.sidecar,
        trained=ancient(str(rules.train_drafter.output.trained)),
        export=rules.export_drafter.output.sidecars,
        hidden_sidecar=f"{RESULTS}/hidden/{CHUNKS[0]}.json.sha256",
        hidden=ancient(f"{RESULTS}/hidden/{CHUNKS[0]}.json"),
        shard=ancient(f"{RESULTS}/hidden/{CHUNKS[0]}/shard-00000.safetensors"),
    output:
        check=f"{RESULTS}/drafter/check.json",
        sidecar=f"{RESULTS}/drafter/check.json.sha256",
    log:
        f"{LOGS}/check_export.log",
    benchmark:
        f"{BENCHMARKS}/check_export.tsv"
    container:
        SIF
    threads: config["server"]["threads"]
    resources:
        gpu=GPUS,
    params:
        speculation=settings.speculation_flags(config, config["arms"]["parity"]),
        pin=settings.flags(config["container"], "sglang_version"),
        server=SERVER,
        server_log=f"{LOGS}/check_export.server.log",
    message:
        "Checking that the served drafter is the trained drafter"
    shell:
        "python scripts/check_export.py {params.speculation} {params.pin}"
        " --trained {input.trained}"
        " --head {input.head}"
        " --hidden {input.hidden}"
        " --server-log {params.server_log}"
        " --output {output.check}"
        " {params.server}"
        " 2>&1 | tee {log}"
