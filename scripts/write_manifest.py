"""List every artifact of a run: results/** → results/MANIFEST.sha256 (`cd results && sha256sum -c MANIFEST.sha256`).

python scripts/write_manifest.py --results results/demo
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from aerie import artifact
from aerie.progress import say


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    results = parse_args(argv).results
    files = artifact.read_json(results / "target" / "manifest.json")["files"]
    target_files = {f"target/model/{name}": entry["sha256"] for name, entry in files.items()}
    lines = artifact.manifest_lines(results, target_files)
    manifest = results / artifact.MANIFEST
    # The manifest speaks of all others and of no one else: it has no sidecar, but is written as they are.
    temporary = manifest.with_name(f".{manifest.name}{artifact.PARTIAL}")
    with open(temporary, "w") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(manifest)
    artifact.fsync_folder(results)
    say(f"{manifest}: {len(lines)} files")


if __name__ == "__main__":
    main()
