"""Compare served acceptance with the offline figure on the same prompts: → results/arms/parity.json.

    python scripts/check_acceptance.py --metrics results/drafter/metrics.json --arm results/arms/eagle3.json \
        --max-difference 0.1 --output results/arms/parity.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from aerie import arms, artifact
from aerie.progress import say

CAUSES = (
    "usual causes: layer indices one off between capture and serving, another chat template or system prompt, "
    "token ids instead of offsets in d2t, a final norm applied on one side only, answers sampled in one and greedy in the "
    "other, a different number of draft steps"
)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--arm", type=Path, required=True)
    parser.add_argument("--max-difference", type=float, required=True, help="|served / offline - 1|")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    metrics, arm = artifact.read_json(arguments.metrics), artifact.read_json(arguments.arm)
    result = arms.parity(metrics["final"]["walk"]["documents"], arm, arguments.max_difference)
    gate = result["gates"]["acceptance_parity"]
    line = (
        f"accept length served {result['served_accept_length']:.3f}, offline {result['offline_accept_length']:.3f} "
        f"on {len(result['prompts'])} prompts: {gate['value']:.1%} apart (limit {gate['limit']:.0%})"
    )
    if not gate["passed"]:
        raise arms.ArmError(f"{arguments.arm}: {line}; {CAUSES}")
    artifact.write_json(arguments.output, result)
    say(line)


if __name__ == "__main__":
    main()
