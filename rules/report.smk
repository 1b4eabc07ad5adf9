# Write everything measured as one page -> report/index.html
rule write_report:
    input:
        code=settings.sources("write_report"),
        template="scripts/aerie/report.html.jinja",
        tokens=expand(str(rules.tokenize_conversations.output.sidecar), chunk=CHUNKS),
        image=rules.build_image.output.record_sidecar,
        target=rules.fetch_target.output.sidecar,
        hidden=expand(str(rules.capture_hidden.output.sidecar), chunk=CHUNKS),
        metrics=rules.train_drafter.output.metrics_sidecar,
        check=rules.check_export.output.sidecar,
        arms=expand(str(rules.run_arm.output.sidecar), arm=ARMS),
        parity=rules.check_acceptance.output.sidecar,
    output:
        page=report(
            f"{RESULTS}/report/index.html",
            category="Aerie",
            caption="../docs/report-caption.rst",
        ),
        sidecar=f"{RESULTS}/report/index.html.sha256",
    log:
        f"{LOGS}/write_report.log",
    conda:
        "../envs/host.yaml"
    params:
        results=lambda wildcards, output: os.path.dirname(os.path.dirname(output.page)),
        chunks=len(CHUNKS),
        arms=" ".join(ARMS),
    message:
        "Writing the report"
    shell:
        "python scripts/write_report.py"
        " --results {params.results}"
        " --chunks {params.chunks}"
        " --arms {params.arms}"
        " --output {output.page}"
        " 2>&1 | tee {log}"


# List every artifact with its digest -> MANIFEST.sha256
rule write_manifest:
    input:
        code=settings.sources("write_manifest"),
        page=rules.write_report.output.sidecar,
        drafter=rules.export_drafter.output.sidecars,
    output:
        manifest=f"{RESULTS}/MANIFEST.sha256",
    log:
        f"{LOGS}/write_manifest.log",
    conda:
        "../envs/host.yaml"
    params:
        results=lambda wildcards, output: os.path.dirname(output.manifest),
    message:
        "Listing every artifact"
    shell:
        "python scripts/write_manifest.py --results {params.results} 2>&1 | tee {log}"


# Rehash everything the manifest lists; no input, so that it looks at what is there and rebuilds nothing
rule verify:
    log:
        f"{LOGS}/verify.log",
    conda:
        "../envs/host.yaml"
    threads: 2
    params:
        results=RESULTS,
    message:
        "Rehashing every artifact"
    shell:
        "python scripts/verify.py --results {params.results} --threads {threads} 2>&1 | tee {log}"
