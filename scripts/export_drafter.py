"""Write the trained drafter as a folder SGLang serves → results/drafter/export/{config.json, model.safetensors, README.md}.

    python scripts/export_drafter.py --trained results/drafter/trained.safetensors \
        --vocab results/drafter/vocab.safetensors --target results/target/manifest.json \
        --metrics results/drafter/metrics.json --sglang-version 0.5.20 --output results/drafter/export

The layer ids in config.json are spelled for the SGLang version and the target's family; README.md is the model
card with the numbers of this run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from aerie import artifact, export, vocab
from aerie.drafter import DrafterConfig
from aerie.progress import say


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", type=Path, required=True)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True, help="results/target/manifest.json")
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--sglang-version", required=True, help="version that will serve the folder")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: that of the states")
    parser.add_argument("--output", type=Path, required=True, help="folder")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    trained_digest = artifact.check(arguments.trained)
    with safe_open(arguments.trained, framework="pt") as file:
        description = json.loads(file.metadata()["aerie"])
        trained = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    vocabulary = vocab.read(arguments.vocab)
    manifest, metrics = artifact.read_json(arguments.target), artifact.read_json(arguments.metrics)
    capture = description["capture"]
    defects = [
        f"{path}: {key} is {found[:12]}, {arguments.trained} was trained with {expected[:12]}"
        for path, key, found, expected in (
            (arguments.vocab, "digest", vocabulary.digest, description["inputs"]["vocab"]),
            (arguments.target, "target_digest", manifest["target_digest"], capture["target_digest"]),
            (arguments.metrics, "identity", metrics["identity"], description["identity"]),
        )
        if found != expected
    ]
    if defects:
        raise export.ExportError("\n".join([*defects, "train again, so that all files are of one run"]))

    config = DrafterConfig(**description["config"])
    dtype = arguments.dtype or capture["dtype"]
    tensors = export.exported_tensors(trained, vocabulary.offsets, vocabulary.members, config, getattr(torch, dtype))
    layer_ids = export.served_layer_ids(capture["layers"], manifest["facts"]["architecture"], arguments.sglang_version)
    served = export.served_config(
        config,
        layer_ids,
        dtype,
        {
            "layers": capture["layers"],
            "sglang_version": arguments.sglang_version,
            "trained_sha256": trained_digest,
            **{key: capture[key] for key in ("final", "target_digest", "tokenizer_digest", "template_digest")},
        },
    )
    with artifact.publish(arguments.output / "model.safetensors") as temporary:
        save_file(tensors, temporary, {"format": "pt"})
    artifact.write_json(arguments.output / "config.json", served)
    name = manifest["source"].get("name") or manifest["facts"]["architecture"]
    artifact.write_text(arguments.output / "README.md", export.model_card(served, metrics, name))
    say(
        f"{arguments.output}: {len(tensors)} tensors, {dtype}; captured layers {capture['layers']}, "
        f"for SGLang {arguments.sglang_version} spelled {layer_ids}"
    )


if __name__ == "__main__":
    main()
