# Fetch the pinned target and read its head -> target/{model/, manifest.json, head.safetensors}
rule fetch_target:
    input:
        code=settings.sources("fetch_target"),
    output:
        manifest=f"{RESULTS}/target/manifest.json",
        sidecar=f"{RESULTS}/target/manifest.json.sha256",
        head=f"{RESULTS}/target/head.safetensors",
        head_sidecar=f"{RESULTS}/target/head.safetensors.sha256",
    log:
        f"{LOGS}/fetch_target.log",
    benchmark:
        f"{BENCHMARKS}/fetch_target.tsv"
    conda:
        "../envs/host.yaml"
    params:
        flags=settings.flags(config["target"], "source", "name", "version", "sha256", "member", "num_hidden_layers"),
        dtype=settings.flags(config["server"], "dtype"),
        cache=config["cache_dir"],
        folder=lambda wildcards, output: os.path.dirname(output.manifest),
    message:
        "Fetching the target"
    shell:
        "python scripts/fetch_target.py {params.flags} {params.dtype}"
        " --cache-dir {params.cache}"
        " --output {params.folder}"
        " 2>&1 | tee {log}"
