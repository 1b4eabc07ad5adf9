"""Measure one served configuration: held-out prompts + server → results/arms/{arm}.json.

    python scripts/run_arm.py --arm eagle3 --drafter results/drafter/export --num-steps 3 --eagle-topk 1 \
        --num-draft-tokens 4 --conversations results/conversations --chunks 3 --max-prompts 12 --max-new-tokens 96 \
        --concurrency 1 --repeats 3 --min-accept-length 1.05 --sglang-version 0.5.20 --server-log results/logs/arm.log \
        --output results/arms/eagle3.json --model results/target/model --device cpu ...

Without --drafter it is the baseline. Both get the same image, flags, prompts, ids and temperature 0; a few warm-up
requests are dropped. The last line on stdout is the summary as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from aerie import arms, artifact, server, target
from aerie.progress import progress, say

SIMULATION = "SGLANG_SIMULATE_ACC_LEN"  # fakes acceptance inside SGLang: must never reach a measured arm


def held_out_prompts(folder: Path, chunks: int, limit: int) -> list[tuple[str, list[int]]]:
    """Return (id, prompt ids of the last turn) of held-out conversations, ordered by id, each id once."""
    found = {}
    for path in artifact.chunk_paths(folder, chunks, ".jsonl"):
        for record in artifact.read_json_lines(path):
            if record["held_out"] and record["turns"]:
                found[record["id"]] = record["turns"][-1]["prompt_ids"]
    if not found:
        raise arms.ArmError(
            f"{folder}: no held-out conversation with answers of the target; raise prompts.count or "
            "prompts.held_out_fraction"
        )
    return sorted(found.items())[:limit]


def one_pass(engine: server.Server, prompts: list[tuple[str, list[int]]], arguments: argparse.Namespace, counter: Any) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """Return ({"wall_s", "requests"}, failures) of one pass over all prompts."""
    records: list[dict[str, Any]] = []
    failures: list[str] = []

    def on_reply(prompt_id: str, reply: server.Reply) -> None:
        counter.update()
        reason = reply.body["meta_info"]["finish_reason"]["type"] if reply.status == 200 else reply.body
        if reply.status != 200 or reason not in ("stop", "length"):
            failures.append(f"{prompt_id}: HTTP {reply.status}: {reason}")
        else:
            records.append(arms.request_record(prompt_id, reply.body, reply.latency_s, reply.first_token_s))

    sampling = {"max_new_tokens": arguments.max_new_tokens, "temperature": 0}
    requests = ((prompt_id, {"input_ids": ids, "sampling_params": sampling}) for prompt_id, ids in prompts)
    began = time.perf_counter()
    engine.ask_all(requests, arguments.concurrency, on_reply, stream=True)
    wall_s = time.perf_counter() - began
    return {"wall_s": wall_s, "requests": sorted(records, key=lambda record: record["id"])}, failures


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", required=True, help="name")
    server.add_speculation_arguments(parser, required=False)
    parser.add_argument("--conversations", type=Path, required=True, help="folder of the conversations")
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--max-prompts", type=int, required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--min-accept-length", type=float, required=True)
    parser.add_argument("--sglang-version", required=True)
    parser.add_argument("--server-log", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    server.add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    if SIMULATION in os.environ:
        raise arms.ArmError(
            f"{SIMULATION} is set: it fakes acceptance, so nothing measured here would be true; unset it"
        )
    manifest = target.check_model(Path(arguments.model).parent / "manifest.json")
    drafter_digest = None
    if arguments.drafter:
        artifact.check(arguments.drafter / "config.json")
        drafter_digest = artifact.check(arguments.drafter / "model.safetensors")
    prompts = held_out_prompts(arguments.conversations, arguments.chunks, arguments.max_prompts)
    flags = [*server.ARM_FLAGS, *server.speculation_flags(arguments)]
    settings = server.settings_of(arguments)
    warm_up = prompts[: arguments.concurrency + 1]
    total = len(warm_up) + len(prompts) * arguments.repeats
    counter = progress(total, f"measuring {arguments.arm}", "requests")
    with server.Server(settings, flags, {}, arguments.server_log) as engine:
        served = engine.get("/server_info")
        one_pass(engine, warm_up, arguments, counter)  # dropped
        measured = [one_pass(engine, prompts, arguments, counter) for _ in range(arguments.repeats)]
    counter.close()
    failures = [failure for _, failed in measured for failure in failed]
    if failures:
        raise arms.ArmError(f"{arguments.arm}: {len(failures)} requests failed:\n" + "\n".join(failures[:20]))
    passes = [one for one, _ in measured]
    summary = arms.summarise(passes)
    record = {
        "arm": arguments.arm,
        "flags": [*settings.flags(), *flags],
        "sglang_version": served["version"],
        "algorithm": served.get("speculative_algorithm"),
        "speculation": {key: getattr(arguments, key) for key in ("num_steps", "eagle_topk", "num_draft_tokens")},
        "target_digest": manifest["target_digest"],
        "drafter_sha256": drafter_digest,
        "concurrency": arguments.concurrency,
        "max_new_tokens": arguments.max_new_tokens,
        "passes": passes,
        "summary": summary,
        "gates": arms.gates(
            bool(arguments.drafter),
            served.get("speculative_algorithm"),
            len(failures),
            summary,
            arguments.min_accept_length,
        ),
    }
    failed = [
        f"{name}: {gate['value']} (limit {gate['limit']})"
        for name, gate in record["gates"].items()
        if not gate["passed"]
    ]
    if record["sglang_version"] != arguments.sglang_version:
        failed.append(f"sglang_version: {record['sglang_version']} (pin {arguments.sglang_version}); rebuild the image")
    if failed:
        refused = arguments.output.with_name(f"{arguments.output.stem}.refused{artifact.PARTIAL}.json")
        artifact.write_json(refused, record)
        raise arms.ArmError(
            f"{arguments.arm}: gates failed: {'; '.join(failed)}. Usual causes: the drafter was trained on other layers "
            f"than it is served with, a wrong algorithm, too little training. The records are in {refused}"
        )
    artifact.write_json(arguments.output, record)
    accepted = f", accept length {summary['accept_length']:.2f}" if summary["accept_length"] else ""
    say(f"{arguments.output}: {summary['tok_per_s']:,.1f} tok/s{accepted}")
    print(json.dumps({"arm": arguments.arm, **summary}))


if __name__ == "__main__":
    main()
