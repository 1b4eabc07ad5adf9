"""Training a drafter, all but the loop: which rows, which batches, which rate, the teacher and the loss.

    captured states of packed documents  →  loss of the training-time test (arXiv 2503.01840)

The drafter is unrolled over S steps as it will be served, and each step is taught the target's own
distribution of the token it predicts. Three facts keep the work small, all of them exact:
* only the keys and values of step 0 are read by other rows, so a row that has no valid prediction at step
  t or later is not computed from step t on (`needed_rows`);
* the teacher's distribution of a token is the same for every step that predicts it, so it is computed once;
* the gradient of a soft cross-entropy is q - p, so the [rows, R] logits are used up where they are made
  and never kept (`SoftCrossEntropy`).

Shapes: T tokens of a batch (documents packed, nothing padded), D target width, H drafter width (= D),
V target vocabulary, R draft vocabulary, S steps, M valid (row, step) pairs, U teacher rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aerie.drafter import Batch, Drafter, DrafterError, rms_norm
from aerie.hidden import Sample

# Row i predicts token i + 2 + t at step t: it has read the states of token i and the embedding of token i+1.
PREDICTS = 2
# The (row, step) pair is trained where the mask of this token is 1. `target`: the predicted token, i+2+t.
# `peers`: SpecForge, TorchSpec and EAGLE look at token i+t, which trains the two rows that predict past the
# end of a turn and never trains the first token drafted after a prefill; kept for comparisons only.
MASK_OFFSET = {"target": PREDICTS, "peers": 0}
LOGIT_CHUNK_VALUES = 1 << 24  # logits held at once: 64 MiB in fp32; the result depends on it by rounding only
NAMED_AT_MOST = 10  # conversations in an error message
# Targets whose norms multiply by 1 + weight: a `pre_norm` state of theirs needs another norm than ours.
OFFSET_NORM_MODELS = ("gemma", "qwen3_next", "qwen3_5")


# ----------------------------------------------------------------------------------------------------
# Rows, batches, learning rate


def valid_pairs(loss_mask: Tensor, ends: Tensor, steps: int, mask_rule: str) -> Tensor:
    """Return which (step, row) pairs are trained, bool [S, T].

    `loss_mask` bool [T], `ends` int64 [T] (the row behind each row's document). A pair is trained where the
    mask of token i + MASK_OFFSET + t is 1 and the teacher's row, i + 1 + t, is in the same document; for the
    rule `target` also the predicted token, i + 2 + t, is. The peers exclude some pairs more, see `ttt_loss`.
    """
    (T,) = loss_mask.shape
    offset = MASK_OFFSET[mask_rule]
    rows = torch.arange(T, device=loss_mask.device)
    looked_at = rows + offset + torch.arange(steps, device=rows.device)[:, None]  # (S, T)
    furthest = looked_at if mask_rule == "target" else looked_at + 1
    return loss_mask[looked_at.clamp(max=T - 1)] & (furthest < ends)


def needed_rows(valid: Tensor) -> list[Tensor]:
    """Return for each step the rows to compute, ascending: those valid at this step or a later one.

    `valid` bool [S, T]. Ends with the last step that has any row, so the list may be shorter than S.
    """
    later = valid.flip(0).cumsum(0).flip(0) > 0  # (S, T)
    return [rows.nonzero().flatten() for rows in later if rows.any()]


def require_within_budget(samples: Sequence[Sample], tokens_per_batch: int) -> None:
    """Raise DrafterError naming the documents that are longer than a batch may be."""
    too_long = {sample.id: len(sample.input_ids) for sample in samples if len(sample.input_ids) > tokens_per_batch}
    if too_long:
        longest = max(too_long.values())
        named = [f"{name} ({tokens:,})" for name, tokens in list(too_long.items())[:NAMED_AT_MOST]]
        raise DrafterError(
            f"{len(too_long):,} of {len(samples):,} conversations are longer than --tokens-per-batch "
            f"{tokens_per_batch:,}: {', '.join(named)}{' ...' if len(too_long) > len(named) else ''}; "
            f"raise drafter.tokens_per_batch to {longest:,} or more"
        )


def learning_rate_at(step: int, total_steps: int, peak: float, warmup_ratio: float) -> float:
    """Return the learning rate of step 0..total_steps-1: linear warm-up, then a cosine towards 0."""
    warmup_steps = math.ceil(warmup_ratio * total_steps)
    # 1) warm-up: the first step already moves, the peak is reached with its last step
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    # 2) cosine: 1 at the first step behind the warm-up, above 0 at the last one
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


# ----------------------------------------------------------------------------------------------------
# Loss


@dataclass(frozen=True)
class Teacher:
    """The target's frozen head: what it would have said at each row."""

    head: Tensor  # [V, D]
    draft_head: Tensor  # float32 [R, D]: the head's rows of the draft vocabulary
    target_ids: Tensor  # int64 [R]
    members: Tensor  # bool [V]
    norm: tuple[Tensor, float] | None  # the target's final norm, where the captured state lies before it

    def states(self, final: Tensor) -> Tensor:
        """Return the lm_head input [U, D] of captured final states [U, D]."""
        return final if self.norm is None else rms_norm(final, *self.norm)

    def top_tokens(self, final: Tensor) -> Tensor:
        """Return the target's most likely next token over its full vocabulary, int64 [U]."""
        head = self.head.float()  # (V, D)
        chunk = max(1, LOGIT_CHUNK_VALUES // len(head))
        tops = [
            (self.states(final[first : first + chunk]).float() @ head.T).argmax(-1)
            for first in range(0, len(final), chunk)
        ]
        return torch.cat(tops) if tops else final.new_zeros(0, dtype=torch.int64)  # (U,)


def make_teacher(
    head: dict[str, Tensor],
    target_ids: Tensor,
    members: Tensor,
    final: str,
    facts: dict[str, Any],
    device: torch.device | str = "cpu",
) -> Teacher:
    """Return the teacher of a target's `head.safetensors` for states captured with convention `final`.

    Raises DrafterError where `pre_norm` states belong to a family whose norm is not a plain RMSNorm.
    """
    norm = None
    if final == "pre_norm":
        if any(facts["model_type"].startswith(name) for name in OFFSET_NORM_MODELS):
            raise DrafterError(
                f"hidden.final is pre_norm, but the norm of {facts['model_type']} is not a plain RMSNorm; "
                "capture with hidden.final: post_norm"
            )
        norm = (head["norm.weight"].to(device), facts["rms_norm_eps"])
    elif final != "post_norm":
        raise DrafterError(f"captured final state is {final!r}, expected post_norm or pre_norm")
    lm_head = head["lm_head.weight"].to(device)
    ids = target_ids.to(device)
    return Teacher(lm_head, lm_head[ids].float(), ids, members.to(device), norm)


class SoftCrossEntropy(torch.autograd.Function):
    """Σ_m weight_m · −Σ_v p(v) log q(v), with p the teacher's and q the drafter's distribution over R tokens.

    The gradient of one term by the drafter's logits is weight · (q − p), so it is computed beside the loss,
    chunk by chunk: the [M, R] logits never exist as a whole and are never computed twice.
    """

    @staticmethod
    def forward(ctx, states, head, teacher_states, teacher_rows, teacher_head, weights):
        """Return (loss, loss of each pair float32 [M], most likely draft token of each pair int64 [M]).

        `states` [M, H], `head` [R, H], `teacher_states` [U, D], `teacher_rows` int64 [M] ascending,
        `teacher_head` float32 [R, D], `weights` float32 [M].
        """
        M = len(states)
        chunk = max(1, LOGIT_CHUNK_VALUES // len(head))
        with_gradient = any(ctx.needs_input_grad[:2])
        losses = weights.new_empty(M)
        top = torch.empty(M, dtype=torch.int64, device=states.device)
        if with_gradient:
            states_gradient = torch.empty_like(states)
            head_gradient = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        for first in range(0, M, chunk):
            pairs = slice(first, first + chunk)
            rows, pair_of_row = torch.unique_consecutive(teacher_rows[pairs], return_inverse=True)
            teacher_logits = teacher_states[rows].float() @ teacher_head.T  # (rows, R)
            p = torch.softmax(teacher_logits, -1)[pair_of_row]  # (chunk, R)
            log_q = torch.log_softmax((states[pairs] @ head.T).float(), -1)  # (chunk, R)
            losses[pairs] = -(p * log_q).sum(-1)
            top[pairs] = log_q.argmax(-1)
            if with_gradient:
                gradient = (log_q.exp_().sub_(p) * weights[pairs, None]).to(states.dtype)  # (chunk, R)
                states_gradient[pairs] = gradient @ head
                head_gradient += gradient.T @ states[pairs]
        if with_gradient:
            ctx.save_for_backward(states_gradient, head_gradient.to(head.dtype))
        ctx.mark_non_differentiable(losses, top)
        return (losses * weights).sum(), losses, top

    @staticmethod
    def backward(ctx, gradient, *_):
        states_gradient, head_gradient = ctx.saved_tensors
        return gradient * states_gradient, gradient * head_gradient, None, None, None, None


@dataclass(frozen=True)
class Loss:
    """The loss of one batch and what it consists of."""

    loss: Tensor  # scalar, differentiable
    step_loss: Tensor  # float32 [S]: mean over the valid rows of each step; 0 where there are none
    step_accuracy: Tensor  # float32 [S]: share of the valid rows that propose the true next token
    step_rows: Tensor  # int64 [S]: valid rows


def ttt_loss(
    drafter: Drafter, teacher: Teacher, batch: Batch, steps: int, decay: float, mask_rule: str = "target"
) -> Loss:
    """Return Σ_t decay^t · mean over valid rows of −Σ_v p(v) log q_t(v) (arXiv 2503.01840, section 3).

    p is the target's distribution of token i+2+t, restricted to the draft vocabulary and renormalised.
    A true next token outside the draft vocabulary counts as a miss in the accuracy. With the rule `peers` a
    pair also needs the teacher's favourite over the full vocabulary to be in the draft vocabulary. A batch
    without valid rows gives a zero loss that still reaches every parameter.
    """
    valid = valid_pairs(batch.loss_mask, batch.ends, steps, mask_rule)  # (S, T)
    if mask_rule == "peers":
        favourite_in = teacher.members[teacher.top_tokens(batch.final)]  # (T,)
        ahead = torch.arange(len(favourite_in), device=valid.device) + 1
        ahead = (ahead + torch.arange(steps, device=valid.device)[:, None]).clamp(max=len(favourite_in) - 1)
        valid &= favourite_in[ahead]  # (S, T)
    step_rows = valid.sum(1)  # (S,)
    rows_of_step = needed_rows(valid)
    if not rows_of_step:
        zero = sum((parameter.flatten()[0] * 0 for parameter in drafter.parameters()), torch.zeros(()))
        return Loss(zero, step_rows.float(), step_rows.float(), step_rows)

    states, rows, steps_of = [], [], []
    for t, h in enumerate(drafter.unroll(batch, rows_of_step)):
        trained = valid[t, rows_of_step[t]]
        states.append(h[trained])
        rows.append(rows_of_step[t][trained])
        steps_of.append(torch.full_like(rows[-1], t))
    row, step = torch.cat(rows), torch.cat(steps_of)  # (M,)
    order = torch.argsort(row + step, stable=True)  # by the teacher's row, i + 1 + t
    row, step = row[order], step[order]
    teacher_rows, unique_row = torch.unique_consecutive(row + 1 + step, return_inverse=True)
    weights = (decay ** step.float()) / step_rows[step]
    loss, losses, top = SoftCrossEntropy.apply(
        drafter.norm(torch.cat(states)[order]),  # (M, H)
        drafter.lm_head.weight,
        teacher.states(batch.final[teacher_rows]),  # (U, D)
        unique_row,
        teacher.draft_head,
        weights,
    )
    predicted = row + PREDICTS + step
    true = batch.input_ids[predicted.clamp(max=len(batch.input_ids) - 1)]  # (M,)
    hits = (teacher.target_ids[top] == true) & (predicted < batch.ends[row])
    at_least_one = step_rows.clamp(min=1)
    total = losses.new_zeros(steps).index_add_(0, step, losses)
    correct = losses.new_zeros(steps).index_add_(0, step, hits.float())
    return Loss(loss, total / at_least_one, correct / at_least_one, step_rows)
