# Turn the conversations of one chunk into ids and a loss mask -> tokens/{chunk}.safetensors
rule tokenize_conversations:
    input:
        code=settings.sources("tokenize_conversations"),
        sif_sidecar=rules.build_image.output.sidecar,
        sif=ancient(str(rules.build_image.output.sif)),
        target_sidecar=rules.fetch_target.output.sidecar,
        target=ancient(str(rules.fetch_target.output.manifest)),
        conversations_sidecar=rules.generate_conversations.output.sidecar,
        conversations=ancient(str(rules.generate_conversations.output.conversations)),
    output:
        tokens=f"{RESULTS}/tokens/{{chunk}}.safetensors",
        sidecar=f"{RESULTS}/tokens/{{chunk}}.safetensors.sha256",
    log:
        f"{LOGS}/tokenize_conversations/{{chunk}}.log",
    benchmark:
        f"{BENCHMARKS}/tokenize_conversations/{{chunk}}.tsv"
    container:
        SIF
    params:
        flags=settings.flags(config["tokens"], "truncated"),
        context=settings.flags(config["server"], "context_tokens"),
    message:
        "Tokenizing the conversations of chunk {wildcards.chunk}"
    shell:
        "python scripts/tokenize_conversations.py {params.flags} {params.context}"
        " --conversations {input.conversations}"
        " --target {input.target}"
        " --output {output.tokens}"
        " 2>&1 | tee {log}"
