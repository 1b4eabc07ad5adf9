"""training: equal to the naive second implementation, packed as alone, masks by hand, batches and schedule."""

import math
from dataclasses import replace

import pytest
import torch

import drafting
from aerie import hidden, training
from aerie.drafter import DrafterError, pack
from aerie.training import ttt_loss
from drafting import naive_of, random_drafter, random_sample
from naive_eagle3 import naive_loss

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other

SAMPLES = [random_sample("a", 13, 1), random_sample("b", 3, 2), random_sample("c", 1, 3), random_sample("d", 10, 4)]


def documents(samples):
    return [(s.input_ids.tolist(), s.loss_mask.tolist(), s.aux, s.final) for s in samples]


def gradients(module, teacher, samples, steps=7, rule="target"):
    module.zero_grad()
    result = ttt_loss(module, teacher, pack(samples, torch.float32), steps, 0.8, rule)
    result.loss.backward()
    return result, {name: p.grad.clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("rule", ["target", "peers"])
def test_loss_and_gradients_equal_the_naive_implementation_on_packed_documents_over_7_steps(rule):
    module, teacher = random_drafter()
    result, found = gradients(module, teacher, SAMPLES, rule=rule)
    naive = naive_of(module, module.embed_tokens)
    loss, step_losses, step_accuracies, rows = naive_loss(
        naive, documents(SAMPLES), teacher.head, teacher.target_ids.tolist(), 7, 0.8, rule
    )
    loss.backward()
    assert result.step_rows.tolist() == rows and min(rows) > 0
    assert abs(result.loss.item() - loss.item()) <= 1e-5 * loss.item()
    torch.testing.assert_close(result.step_loss, torch.stack(step_losses).detach(), atol=1e-5, rtol=1e-6)
    assert result.step_accuracy.tolist() == pytest.approx(step_accuracies)
    for name, gradient in found.items():
        assert gradient.abs().max() > 1e-3, f"{name} gets no gradient worth comparing"
        torch.testing.assert_close(
            gradient, naive.w[name].grad, atol=1e-5, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_loss_is_the_same_for_any_size_of_the_logit_chunks(monkeypatch):
    module, teacher = random_drafter()
    whole, expected = gradients(module, teacher, SAMPLES)
    monkeypatch.setattr(training, "LOGIT_CHUNK_VALUES", 3 * drafting.R)
    parts, found = gradients(module, teacher, SAMPLES)
    torch.testing.assert_close(parts.loss, whole.loss)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)


def test_a_document_sees_nothing_of_its_neighbours_in_the_batch():
    module, teacher = random_drafter()
    own = replace(SAMPLES[0], loss_mask=torch.zeros(13, dtype=torch.uint8))
    alone, expected = gradients(module, teacher, [SAMPLES[3]])
    packed, found = gradients(module, teacher, [own, SAMPLES[3]])
    torch.testing.assert_close(packed.loss, alone.loss)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)


def test_valid_pairs_of_a_hand_made_conversation():
    # tokens      0 1 2 3 4 5 6 7 8   two turns: tokens 2..4 and 7..8 are the assistant's
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    ends = torch.full((9,), 9)
    found = training.valid_pairs(mask, ends, 3, "target")
    # Row i at step t predicts token i+2+t: row 1 (the last of the prompt) predicts the first drafted token, 3.
    assert found.int().tolist() == [
        [1, 1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 1, 0, 0, 0, 0],
    ]
    peers = training.valid_pairs(mask, ends, 2, "peers")
    # They look at token i+t, and at the last row of a document never.
    assert peers.int().tolist() == [[0, 0, 1, 1, 1, 0, 0, 1, 0], [0, 1, 1, 1, 0, 0, 1, 0, 0]]


def test_valid_pairs_end_with_their_document():
    mask = torch.ones(5, dtype=torch.bool)
    found = training.valid_pairs(mask, torch.tensor([3, 3, 3, 5, 5]), 2, "target")
    assert found.int().tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("rule", ["target", "peers"])
def test_a_batch_without_valid_rows_has_a_zero_loss_that_reaches_every_parameter(rule):
    module, teacher = random_drafter()
    nothing = replace(SAMPLES[0], loss_mask=torch.zeros(13, dtype=torch.uint8))
    result, found = gradients(module, teacher, [nothing], rule=rule)
    assert result.loss.item() == 0 and result.step_rows.tolist() == [0] * 7
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found.values())


def test_a_nan_in_one_state_makes_the_loss_nan():
    module, teacher = random_drafter()
    broken = replace(SAMPLES[0], states=SAMPLES[0].states.clone())
    broken.final.fill_(math.nan)
    assert math.isnan(gradients(module, teacher, [broken])[0].loss.item())


def test_pre_norm_states_are_normed_before_the_head():
    head = {
        "lm_head.weight": drafting.drawn(drafting.V, drafting.D, seed=1),
        "norm.weight": drafting.drawn(drafting.D, seed=2),
    }
    ids = torch.arange(drafting.R)
    members = torch.arange(drafting.V) < drafting.R
    facts = {"model_type": "llama", "rms_norm_eps": 1e-5}
    state = drafting.drawn(3, drafting.D, seed=3)
    teacher = training.make_teacher(head, ids, members, "pre_norm", facts)
    expected = state / (state.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * head["norm.weight"]
    torch.testing.assert_close(teacher.states(state), expected)
    assert torch.equal(training.make_teacher(head, ids, members, "post_norm", facts).states(state), state)
    with pytest.raises(DrafterError, match="gemma3.*capture with hidden.final: post_norm"):
        training.make_teacher(head, ids, members, "pre_norm", facts | {"model_type": "gemma3_text"})
    with pytest.raises(DrafterError, match="'mixed', expected post_norm or pre_norm"):
        training.make_teacher(head, ids, members, "mixed", facts)


# ---- batches and schedule


def test_batches_keep_every_document_once_and_the_budget():
    lengths = [7, 3, 5, 8, 2, 6, 4]
    batches = hidden.epoch_batches(lengths, 10, seed=3, epoch=0)
    assert sorted(number for batch in batches for number in batch) == list(range(7))
    assert all(sum(lengths[number] for number in batch) <= 10 for batch in batches)
    assert batches == hidden.epoch_batches(lengths, 10, seed=3, epoch=0)
    assert batches != hidden.epoch_batches(lengths, 10, seed=3, epoch=1)
    assert batches != hidden.epoch_batches(lengths, 10, seed=4, epoch=0)
    assert hidden.epoch_batches([], 10, 0, 0) == []


def test_documents_longer_than_the_budget_are_refused_by_name_with_the_budget_they_need():
    training.require_within_budget(SAMPLES, 13)
    with pytest.raises(DrafterError, match=r"2 of 4 .*batch 9: a \(13\), d \(10\); .*tokens_per_batch to 13 or more"):
        training.require_within_budget(SAMPLES, 9)
    with pytest.raises(DrafterError, match=r"longer than --tokens-per-batch 1: .*s9 \(2\) \.\.\.; raise"):
        training.require_within_budget([random_sample(f"s{i}", 2, i) for i in range(12)], 1)


def test_the_learning_rate_warms_up_and_falls_to_nearly_zero():
    rates = [training.learning_rate_at(step, 100, 1.0, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0 and rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert 0 < rates[99] < 0.001
    assert training.learning_rate_at(0, 10, 2.0, 0.0) == 2.0
    assert training.learning_rate_at(9, 10, 2.0, 1.0) == 2.0
