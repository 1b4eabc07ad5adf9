"""arms: known timings give known figures; parity and intervals come from the records."""

import pytest

from aerie import arms
from aerie.arms import ArmError


def request(prompt_id, ids, latency_s, verifications=None, first_token_s=0.1):
    body = {
        "output_ids": ids,
        "meta_info": {
            "completion_tokens": len(ids),
            "finish_reason": {"type": "stop"},
            **({"spec_verify_ct": verifications} if verifications else {}),
        },
    }
    return arms.request_record(prompt_id, body, latency_s, first_token_s)


def arm(name, passes):
    record = {"arm": name, "passes": [{"wall_s": wall, "requests": requests} for wall, requests in passes]}
    return record | {"summary": arms.summarise(record["passes"])}


BASELINE = arm("baseline", [(w, [request("a", [1, 2, 3, 4], 1.0), request("b", [5, 6], 1.0)]) for w in (2.0, 3.0, 1.0)])


def test_tokens_per_second_is_the_median_of_the_passes_with_its_spread():
    summary = BASELINE["summary"]
    assert (summary["tok_per_s"], summary["tok_per_s_lowest"], summary["tok_per_s_highest"]) == (3.0, 2.0, 6.0)
    assert summary["accept_length"] is None and summary["completion_tokens"] == 18
    assert summary["inter_token_s"]["p50"] == pytest.approx((0.3 + 0.9) / 2)


def test_accept_length_divides_sums_not_means():
    requests = [request("a", [1] * 9, 1.0, verifications=3), request("b", [1], 1.0, verifications=1)]
    assert arms.accept_length(requests) == 10 / 4


def test_speed_up_greedy_share_and_first_differences_against_the_baseline():
    other = arm("eagle3", [(1.0, [request("a", [1, 2, 9, 4], 0.5, 2), request("b", [5, 6], 0.5, 1)])] * 3)
    result = arms.compare(BASELINE, other)
    assert result["speed_up"] == pytest.approx(6.0 / 3.0)
    assert result["greedy_equal"] == 0.5 and result["first_differences"] == {"a": 2}
    assert result["prompt_speed_ups"] == pytest.approx({"a": 2.0, "b": 2.0})
    low, high = result["speed_up_interval"]
    assert low == pytest.approx(2.0) and high == pytest.approx(2.0)  # every prompt is exactly twice as fast


def test_an_answer_that_only_ended_earlier_differs_where_it_ends():
    other = arm("eagle3", [(1.0, [request("a", [1, 2], 0.5, 2), request("b", [5, 6], 0.5, 1)])] * 3)
    assert arms.compare(BASELINE, other)["first_differences"] == {"a": 2}


def test_arms_of_other_prompts_are_not_compared():
    other = arm("eagle3", [(1.0, [request("c", [1], 0.5, 1)])])
    with pytest.raises(ArmError, match="measured other prompts"):
        arms.compare(BASELINE, other)


def test_gates_fail_on_the_wrong_algorithm_a_failed_request_and_a_drafter_nobody_accepts():
    gates = arms.gates(True, "EAGLE", 1, {"accept_length": 1.0}, 1.05)
    assert {name: gate["passed"] for name, gate in gates.items()} == {
        "failed_requests": False,
        "algorithm": False,
        "accept_length": False,
    }
    assert all(gate["passed"] for gate in arms.gates(True, "EAGLE3", 0, {"accept_length": 2.0}, 1.05).values())
    assert not arms.gates(False, "EAGLE3", 0, {"accept_length": None}, 1.05)["algorithm"]["passed"]


def test_parity_compares_the_same_prompts_only():
    served = arm("eagle3", [(1.0, [request("a", [1] * 12, 1.0, 4), request("x", [1] * 99, 1.0, 1)])])
    offline = {"a": {"tokens": 12, "rounds": 5}, "z": {"tokens": 1, "rounds": 1}}
    result = arms.parity(offline, served, limit=0.1)
    assert result["prompts"] == ["a"]
    assert (result["served_accept_length"], result["offline_accept_length"]) == (3.0, 2.4)
    assert result["gates"]["acceptance_parity"] == {"value": 0.25, "limit": 0.1, "passed": False}
    with pytest.raises(ArmError, match="held-out prompts"):
        arms.parity({"q": {"tokens": 1, "rounds": 1}}, served, 0.1)


def test_percentiles_interpolate():
    assert arms.percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert arms.percentile([7.0], 0.95) == 7.0


def test_the_bootstrap_interval_holds_the_figure_and_repeats_itself():
    pairs = [(float(n), 1.0) for n in range(1, 30)]
    low, high = arms.bootstrap(pairs, lambda drawn: sum(p[0] for p in drawn) / sum(p[1] for p in drawn))
    assert low < 15.0 < high
    assert [low, high] == arms.bootstrap(pairs, lambda drawn: sum(p[0] for p in drawn) / sum(p[1] for p in drawn))
