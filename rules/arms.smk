# Measure one served configuration on held-out prompts -> arms/{arm}.json
rule run_arm:
    input:
        code=settings.sources("run_arm"),
        sif_sidecar=rules.build_image.output.sidecar,
        sif=ancient(str(rules.build_image.output.sif)),
        target=rules.fetch_target.output.sidecar,
        conversations_sidecar=expand(str(rules.generate_conversations.output.sidecar), chunk=CHUNKS),
        conversations=ancient(expand(str(rules.generate_conversations.output.conversations), chunk=CHUNKS)),
        drafter=lambda wildcards: settings.drafter_inputs(config, wildcards.arm),
    output:
        arm=f"{RESULTS}/arms/{{arm}}.json",
        sidecar=f"{RESULTS}/arms/{{arm}}.json.sha256",
    log:
        f"{LOGS}/run_arm/{{arm}}.log",
    benchmark:
        f"{BENCHMARKS}/run_arm/{{arm}}.tsv"
    container:
        SIF
    threads: config["server"]["threads"]
    resources:
        gpu=GPUS,
        measuring=1,
    params:
        flags=settings.flags(
            config["arms"], "max_prompts", "max_new_tokens", "concurrency", "repeats", "min_accept_length"
        ),
        speculation=lambda wildcards: settings.speculation_flags(config, wildcards.arm),
        pin=settings.flags(config["container"], "sglang_version"),
        conversations=lambda wildcards, input: os.path.dirname(input.conversations[0]),
        chunks=len(CHUNKS),
        server=SERVER,
        server_log=f"{LOGS}/run_arm/{{arm}}.server.log",
    message:
        "Measuring arm {wildcards.arm}"
    shell:
        "python scripts/run_arm.py {params.flags} {params.pin}"
        " --arm {wildcards.arm} {params.speculation}"
        " --conversations {params.conversations}"
        " --chunks {params.chunks}"
        " --server-log {params.server_log}"
        " --output {output.arm}"
        " {params.server}"
        " 2>&1 | tee {log}"


# Compare served with offline acceptance on the same prompts -> arms/parity.json
rule check_acceptance:
    input:
        code=settings.sources("check_acceptance"),
        sif_sidecar=rules.build_image.output.sidecar,
        sif=ancient(str(rules.build_image.output.sif)),
        metrics_sidecar=rules.train_drafter.output.metrics_sidecar,
        metrics=ancient(str(rules.train_drafter.output.metrics)),
        arm_sidecar=f"{RESULTS}/arms/{config['arms']['parity']}.json.sha256",
        arm=ancient(f"{RESULTS}/arms/{config['arms']['parity']}.json"),
    output:
        parity=f"{RESULTS}/arms/parity.json",
        sidecar=f"{RESULTS}/arms/parity.json.sha256",
    log:
        f"{LOGS}/check_acceptance.log",
    container:
        SIF
    params:
        limit=config["arms"]["max_parity_difference"],
    message:
        "Comparing served with offline acceptance"
    shell:
        "python scripts/check_acceptance.py"
        " --metrics {input.metrics}"
        " --arm {input.arm}"
        " --max-difference {params.limit}"
        " --output {output.parity}"
        " 2>&1 | tee {log}"
