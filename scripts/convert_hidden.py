"""Write captured states in the format of another trainer: results/hidden/{chunk}.json → a folder and its manifest.

    python scripts/convert_hidden.py --chunks results/hidden/00000.json results/hidden/00001.json \
        --format speculators_v1 --output results/exports/speculators_v1

Formats: speculators_v1 (data_{i}.pt), speculators (hs_{i}.safetensors and Arrow), specforge (rows_*/data_{i}.ckpt);
docs/converters.md says what reads them. `<output>.json` lists the samples and the sha256 of every file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from aerie import artifact, convert
from aerie.progress import say


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--chunks", type=Path, nargs="+", metavar="MANIFEST", help="results/hidden/{chunk}.json, in order"
    )
    source.add_argument("--hidden", type=Path, help="their folder, with --count: more chunks than a command line holds")
    parser.add_argument("--count", type=int, help="with --hidden: chunks 0 to COUNT - 1")
    parser.add_argument("--format", required=True, help=", ".join(convert.FORMATS))
    parser.add_argument("--part", choices=convert.PARTS, default="train",
                        help="which samples; those held out are what drafters are measured on (default: train)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="files written at a time")
    parser.add_argument("--output", type=Path, required=True, help="folder that does not exist yet")
    arguments = parser.parse_args(argv)
    if (arguments.hidden is None) != (arguments.count is None):
        parser.error("--hidden and --count go together")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    chunks = arguments.chunks or artifact.chunk_paths(arguments.hidden, arguments.count, ".json")
    manifest = convert.convert(chunks, arguments.format, arguments.output, arguments.part, arguments.threads)
    tokens = sum(sample["tokens"] for sample in manifest["samples"])
    size = sum(file["bytes"] for file in manifest["files"].values())
    say(
        f"{arguments.output}: {len(manifest['samples']):,} samples ({manifest['part']}), {tokens:,} tokens, "
        f"{size / 1e9:.3g} GB as {arguments.format}"
    )


if __name__ == "__main__":
    main()
