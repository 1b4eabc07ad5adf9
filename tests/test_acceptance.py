"""acceptance: hits against the naive chain, rates and the walk by hand, the walk against naive serving."""

import pytest
import torch

import drafting
from aerie import acceptance
from aerie.drafter import pack
from aerie.training import ttt_loss
from drafting import naive_of, random_drafter, random_sample
from naive_eagle3 import naive_rounds

torch.set_num_threads(1)


def test_hits_are_those_of_the_naive_chain_row_by_row_and_step_by_step():
    module, teacher = random_drafter()
    samples = [random_sample("a", 26, 5), random_sample("b", 15, 6)]
    # Half learned by heart, so that right and wrong proposals both occur; every third favourite is another token.
    for sample in samples:
        wanted = (torch.roll(sample.input_ids, -1) + (torch.arange(len(sample.input_ids)) % 3 == 0)).long() % drafting.V
        sample.final.copy_(teacher.head[wanted])
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    for _ in range(40):
        optimizer.zero_grad()
        ttt_loss(module, teacher, pack(samples, torch.float32), 3, 1.0).loss.backward()
        optimizer.step()
    hits = acceptance.draft_hits(module, teacher, pack(samples, torch.float32), 3)
    naive = naive_of(module, module.embed_tokens)
    found = {"true": 0, "teacher": 0, "pairs": 0}
    for sample, start in zip(samples, (0, 26), strict=True):
        ids, mask, T = sample.input_ids.tolist(), sample.loss_mask.tolist(), len(sample.input_ids)
        for row in range(T):
            alive, computed = True, 0
            for t, logits in enumerate(naive.chain(ids, sample.aux, row, 3)):
                alive = alive and row + 2 + t < T and mask[row + 2 + t] == 1
                if alive:
                    computed += 1
                    proposed = int(teacher.target_ids[logits.argmax()])
                    favourite = int((teacher.head @ sample.final[row + 1 + t]).argmax())
                    assert bool(hits.true_token[start + row, t]) == (proposed == ids[row + 2 + t])
                    assert bool(hits.teacher[start + row, t]) == (proposed == favourite)
                    found["pairs"] += 1
                    found["true"] += proposed == ids[row + 2 + t]
                    found["teacher"] += proposed == favourite
                else:
                    assert not hits.true_token[start + row, t] and not hits.teacher[start + row, t]
            assert bool(hits.in_all_steps[start + row]) == (computed == 3)
    assert 0 < found["true"] < found["pairs"] and 0 < found["teacher"] < found["pairs"]
    assert not torch.equal(hits.true_token, hits.teacher)


def test_rates_by_position_of_four_rows_by_hand():
    hits = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]], dtype=torch.bool)
    assert acceptance.by_position(hits) == {
        "accept_length": 1 + 3 / 4 + 2 / 4 + 1 / 4,
        "cumulative": [3 / 4, 2 / 4, 1 / 4],
        "conditional": [3 / 4, 2 / 3, 1 / 2],
    }
    never = acceptance.by_position(torch.zeros(2, 2, dtype=torch.bool))
    assert never == {"accept_length": 1.0, "cumulative": [0.0, 0.0], "conditional": [0.0, None]}
    nothing = acceptance.by_position(torch.zeros(0, 2, dtype=torch.bool))
    assert nothing == {"accept_length": None, "cumulative": [None] * 2, "conditional": [None] * 2}


def test_the_last_answer_is_the_last_run_of_the_mask():
    assert acceptance.last_answer([0, 1, 1, 0, 0, 1, 1, 1, 0]) == (5, 7)
    assert acceptance.last_answer([1, 1]) == (0, 1)
    assert acceptance.last_answer([0, 0]) is None


def test_the_walk_of_a_hand_made_answer():
    # tokens 3..10 are the answer (8 tokens, an earlier answer before it); prefill of tokens 0..2 gives token 3
    mask = [1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    hits = [[False, False]] * 11
    hits[2] = [True, True]  # round 1 at row 2: tokens 4, 5 accepted, 6 added    -> next row 5
    hits[5] = [False, True]  # round 2 at row 5: nothing accepted, 7 added       -> next row 6
    hits[6] = [True, False]  # round 3 at row 6: token 8 accepted, 9 added       -> next row 8
    hits[8] = [True, True]  # round 4 at row 8: token 10 is the last there is
    assert acceptance.walk("x", mask, hits, 2) == acceptance.Walk("x", 3, 8, 4, [1, 2, 1])


def test_there_is_no_round_without_a_prompt_or_with_a_single_token():
    right = [[True]] * 4
    assert acceptance.walk("x", [1, 1, 1, 0], right, 1) is None
    assert acceptance.walk("x", [0, 0, 0, 1], right, 1) is None
    assert acceptance.walk("x", [0, 0, 0, 0], right, 1) is None
    assert acceptance.walk("x", [0, 0, 1, 1], right, 1) == acceptance.Walk("x", 2, 2, 1, [0, 1])


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_the_walk_counts_the_rounds_of_naive_serving(steps):
    generator = torch.Generator().manual_seed(steps)
    for length in range(2, 40):
        prompt = 1 + length % 3
        mask = [False] * prompt + [True] * (length - prompt)
        hits = (torch.rand(length, steps, generator=generator) < 0.6).tolist()
        walked = acceptance.walk("x", mask, hits, steps)
        rounds = naive_rounds(lambda row, t, h=hits: h[row][t], prompt - 1, length - 1, steps)
        assert (walked.rounds if walked else 0) == rounds
        if walked:
            assert walked.tokens == length - prompt and sum(walked.histogram) == rounds


def evaluate(samples, served_steps=3, should_stop=lambda: False):
    module, teacher = random_drafter()
    return acceptance.evaluate(module, teacher, samples, served_steps, torch.float32, "cpu", should_stop)


def test_figures_do_not_depend_on_how_documents_are_packed():
    documents = [drafting.cyclic_sample(f"s{i}", 12 + i, True) for i in range(4)]
    alone, together = evaluate([[document] for document in documents]), evaluate([documents])
    assert alone == together
    assert together["walk"]["tokens"] == sum(12 + i - drafting.PROMPT_TOKENS for i in range(4))
    assert together["walk"]["accept_length"] == together["walk"]["tokens"] / together["walk"]["rounds"]
    assert set(together["walk"]["documents"]) == {"s0", "s1", "s2", "s3"}
    # rows with valid predictions at all three steps: all but the last two of each answer's valid rows
    assert together["positions"] == sum(12 + i - drafting.PROMPT_TOKENS - 2 for i in range(4))


def test_without_held_out_documents_there_are_no_figures():
    nothing = evaluate([])
    assert nothing["positions"] == 0 and nothing["true_token"]["accept_length"] is None
    assert nothing["walk"] == {"accept_length": None, "tokens": 0, "rounds": 0, "without_round": 0, "documents": {}}


def test_an_evaluation_stops_between_batches_when_asked():
    documents = [[drafting.cyclic_sample("a", 12, True)], [drafting.cyclic_sample("b", 12, True)]]
    answers = iter([False, True])
    with pytest.raises(acceptance.Interrupted):
        evaluate(documents, should_stop=lambda: next(answers))
