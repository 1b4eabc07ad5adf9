"""Measurements of one served configuration, and what they say beside another.

    results/arms/{arm}.json

An arm is server flags + prompts + concurrency. It holds one record per request of every measured pass; all figures
are derived from those records here, so that a reader can derive them again. Times are seconds.

Accept length is SGLang's: completion tokens / verifications, the bonus token included (a drafter that is never
accepted has 1.0), summed over requests before dividing.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

BOOTSTRAP_DRAWS = 2000
INTERVAL = (0.025, 0.975)  # of the bootstrap distribution: a 95 % interval
SEED = 0


class ArmError(RuntimeError):
    """An arm whose figures must not be used; the message names every reason."""


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie, by linear interpolation."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def request_record(prompt_id: str, body: dict[str, Any], latency_s: float, first_token_s: float) -> dict[str, Any]:
    """Return what is kept of one answer of /generate."""
    meta = body["meta_info"]
    return {
        "id": prompt_id,
        "output_ids": body["output_ids"],
        "completion_tokens": meta["completion_tokens"],
        "verifications": meta.get("spec_verify_ct"),
        "finish_reason": meta["finish_reason"]["type"],
        "latency_s": latency_s,
        "first_token_s": first_token_s,
    }


def accept_length(requests: Sequence[dict[str, Any]]) -> float | None:
    """Return tokens per verification over requests, None without speculation."""
    verifications = sum(request["verifications"] or 0 for request in requests)
    return sum(r["completion_tokens"] for r in requests) / verifications if verifications else None


def _inter_token_s(request: dict[str, Any]) -> float | None:
    tokens = request["completion_tokens"] - 1
    return (request["latency_s"] - request["first_token_s"]) / tokens if tokens > 0 else None


def summarise(passes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of an arm from its passes, each {"wall_s", "requests"}: medians with their spread."""
    rates = [sum(r["completion_tokens"] for r in one["requests"]) / one["wall_s"] for one in passes]
    requests = [request for one in passes for request in one["requests"]]
    first = [request["first_token_s"] for request in requests]
    between = [value for request in requests if (value := _inter_token_s(request)) is not None]
    return {
        "tok_per_s": statistics.median(rates),
        "tok_per_s_lowest": min(rates),
        "tok_per_s_highest": max(rates),
        "accept_length": accept_length(requests),
        "requests": len(requests),
        "completion_tokens": sum(request["completion_tokens"] for request in requests),
        "first_token_s": {name: percentile(first, share) for name, share in (("p50", 0.5), ("p95", 0.95))},
        "inter_token_s": {
            name: percentile(between, share) if between else None for name, share in (("p50", 0.5), ("p95", 0.95))
        },
    }


def gates(
    speculates: bool, algorithm: str | None, failed: int, summary: dict[str, Any], minimum: float
) -> dict[str, Any]:
    """Return the gates of an arm: {name: {"value", "limit", "passed"}}."""
    wanted = "EAGLE3" if speculates else None
    result = {
        "failed_requests": {"value": failed, "limit": 0, "passed": failed == 0},
        "algorithm": {"value": algorithm, "limit": wanted, "passed": algorithm == wanted},
    }
    if speculates:
        value = summary["accept_length"] or 0.0
        result["accept_length"] = {"value": round(value, 4), "limit": minimum, "passed": value >= minimum}
    return result


def _per_prompt(arm: dict[str, Any]) -> dict[str, tuple[float, int]]:
    """Return {prompt id: (median seconds over the passes, tokens of the first pass)}."""
    seconds: dict[str, list[float]] = {}
    for one in arm["passes"]:
        for request in one["requests"]:
            seconds.setdefault(request["id"], []).append(request["latency_s"])
    tokens = {request["id"]: request["completion_tokens"] for request in arm["passes"][0]["requests"]}
    return {prompt_id: (statistics.median(values), tokens[prompt_id]) for prompt_id, values in seconds.items()}


def _ratio_of_rates(pairs: Sequence[tuple[tuple[float, int], tuple[float, int]]]) -> float:
    """Return tokens per second of the second over that of the first; a pair holds (seconds, tokens) of both."""
    (theirs_s, theirs), (ours_s, ours) = (
        (sum(pair[side][0] for pair in pairs), sum(pair[side][1] for pair in pairs)) for side in (0, 1)
    )
    return (ours / ours_s) / (theirs / theirs_s)


def bootstrap(values: Sequence[Any], figure: Callable[[Sequence[Any]], float]) -> list[float]:
    """Return the 95 % interval of `figure` under resampling of the values (seeded)."""
    generator = random.Random(SEED)
    draws = [figure(generator.choices(values, k=len(values))) for _ in range(BOOTSTRAP_DRAWS)]
    return [percentile(draws, share) for share in INTERVAL]


def compare(baseline: dict[str, Any], arm: dict[str, Any]) -> dict[str, Any]:
    """Return an arm beside the baseline on the same prompts.

    `speed_up` is the ratio of the medians of output tokens/s; `speed_up_interval` comes from resampling the prompts,
    each with its median seconds and its tokens in both arms; `prompt_speed_ups` is that ratio prompt by prompt.
    `greedy_equal` is the share of prompts whose ids equal the baseline's; `first_differences` gives the position of
    the first other id for the rest.
    """
    ours, theirs = _per_prompt(arm), _per_prompt(baseline)
    if sorted(ours) != sorted(theirs):
        raise ArmError(f"{arm['arm']} and {baseline['arm']} measured other prompts; measure both again")
    pairs = {prompt_id: (theirs[prompt_id], ours[prompt_id]) for prompt_id in sorted(ours)}
    reference = {request["id"]: request["output_ids"] for request in baseline["passes"][0]["requests"]}
    differences = {}
    for request in arm["passes"][0]["requests"]:
        expected, found = reference[request["id"]], request["output_ids"]
        if expected != found:
            shared = zip(expected, found, strict=False)
            differences[request["id"]] = next(
                (position for position, (one, other) in enumerate(shared) if one != other),
                min(len(expected), len(found)),
            )
    return {
        "arm": arm["arm"],
        "speed_up": arm["summary"]["tok_per_s"] / baseline["summary"]["tok_per_s"],
        "speed_up_interval": bootstrap(list(pairs.values()), _ratio_of_rates),
        "prompt_speed_ups": {prompt_id: _ratio_of_rates([pair]) for prompt_id, pair in pairs.items()},
        "greedy_equal": 1 - len(differences) / len(reference),
        "first_differences": differences,
    }


def parity(offline: dict[str, dict[str, int]], arm: dict[str, Any], limit: float) -> dict[str, Any]:
    """Return served acceptance beside the offline figure on the prompts both have.

    `offline` {id: {"tokens", "rounds"}} from the walk over the captured states (aerie.drafter); the served side is
    the arm's first pass. Both divide tokens by verifications.
    """
    served = {request["id"]: request for request in arm["passes"][0]["requests"]}
    shared = sorted(set(offline) & set(served))
    if not shared:
        raise ArmError(
            f"{arm['arm']}: none of its prompts has offline figures; the arm must measure held-out prompts of this run"
        )
    expected = sum(offline[i]["tokens"] for i in shared) / sum(offline[i]["rounds"] for i in shared)
    found = accept_length([served[i] for i in shared]) or 0.0
    difference = abs(found / expected - 1)
    return {
        "arm": arm["arm"],
        "prompts": shared,
        "offline_accept_length": expected,
        "served_accept_length": found,
        "per_prompt": {
            i: {
                "offline": offline[i]["tokens"] / offline[i]["rounds"],
                "served": accept_length([served[i]]),
            }
            for i in shared
        },
        "gates": {"acceptance_parity": {"value": round(difference, 4), "limit": limit, "passed": difference <= limit}},
    }
