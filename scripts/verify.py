"""Rehash a run against its manifest: results/MANIFEST.sha256 → exit status 0, or every defect and 1.

python scripts/verify.py --results results/demo --threads 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from aerie import artifact
from aerie.progress import say


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    try:
        listed = artifact.read_manifest(arguments.results)
        defects = artifact.audit(arguments.results, arguments.threads)
    except artifact.ArtifactError as error:
        sys.exit(str(error))
    if defects:
        sys.exit("\n".join([*map(str, defects), f"{len(defects)} of {len(listed)} files are not as published"]))
    say(f"{arguments.results}: {len(listed)} files are as published")


if __name__ == "__main__":
    main()
