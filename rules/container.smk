# Build the SGLang image: definition + hash lock + capture patch -> container/sglang.sif
rule build_image:
    input:
        code=settings.sources("build_image"),
        definition="containers/sglang.def",
        lock=f"containers/{config['container']['variant']}.lock",
        torch_locks=["envs/torch-cpu.lock", "envs/torch-cuda.lock"],
        patch=settings.patch_sources(config),
    output:
        sif=SIF,
        sidecar=f"{SIF}.sha256",
        record=f"{RESULTS}/container/image.json",
        record_sidecar=f"{RESULTS}/container/image.json.sha256",
    log:
        f"{LOGS}/build_image.log",
    benchmark:
        f"{BENCHMARKS}/build_image.tsv"
    conda:
        "../envs/host.yaml"
    threads: config["server"]["threads"]
    params:
        flags=settings.flags(config["container"], "sglang_version", "variant", "base"),
        cache=config["cache_dir"],
    message:
        "Building the SGLang image"
    shell:
        "python scripts/build_image.py {params.flags}"
        " --definition {input.definition}"
        " --lock {input.lock}"
        " --cache-dir {params.cache}"
        " --record {output.record}"
        " --output {output.sif}"
        " 2>&1 | tee {log}"
