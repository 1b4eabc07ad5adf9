"""Write everything measured as one page: results/** → results/report/index.html, and a short table on stdout.

    python scripts/write_report.py --results results/demo --chunks 3 --arms baseline eagle3 \
        --output results/demo/report/index.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from aerie import artifact, report


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of the run")
    parser.add_argument("--chunks", type=int, required=True, help="chunks of the run")
    parser.add_argument("--arms", nargs="+", required=True, help="names of the arms, one of them the baseline")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    chunk_ids = [artifact.chunk_id(number) for number in range(arguments.chunks)]
    run = report.read_run(arguments.results, chunk_ids, arguments.arms)
    artifact.write_text(arguments.output, report.html(run))
    print(report.summary(run, arguments.output))


if __name__ == "__main__":
    main()
