"""How many tokens a drafter's proposals would bring, computed without a server.

    held-out documents with their states  →  hit rates per position, accept length, the serving walk

Two figures, on purpose:
* by position: over the rows that have a valid prediction at every one of the S served steps (one fixed set),
  how often the first, the first two, ... the first S proposals are right. Accept length 1 + their sum: what a
  round yields from a random place of an answer.
* the walk: greedy chain serving as SGLang does it, round by round, over the last answer of every document.
  Rounds begin where the round before ended, not at random, so this is what the server's own
  completion_tokens / verify_ct must equal, prompt by prompt.

Both are exact for greedy serving up to numerics: tokens are teacher-forced, and a wrong token ends the
chain anyway.

Shapes: T tokens of a batch, S served steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from aerie.drafter import Batch, Drafter, pack
from aerie.hidden import Sample
from aerie.training import PREDICTS, Teacher, valid_pairs


class Interrupted(Exception):
    """Raised inside `evaluate` when the caller asks to stop; nothing was changed."""


@dataclass(frozen=True)
class Hits:
    """Proposals of one batch: bool [T, S]; a pair that is not computed is False everywhere."""

    true_token: Tensor  # the proposal is the document's next token
    teacher: Tensor  # the proposal is the target's favourite over its full vocabulary
    in_all_steps: Tensor  # bool [T]: rows with a valid prediction at every served step


@dataclass(frozen=True)
class Walk:
    """Greedy chain serving of one document's last answer."""

    id: str
    prompt_tokens: int  # tokens before the answer
    tokens: int  # of the answer, the first of them from the target's prefill
    rounds: int  # verify calls, 1 or more
    histogram: list[int]  # rounds that accepted 0, 1, ... S proposals within the answer


@torch.no_grad()
def draft_hits(drafter: Drafter, teacher: Teacher, batch: Batch, served_steps: int) -> Hits:
    """Return which proposals of the first `served_steps` steps are right.

    A (row, step) pair is computed where it and all steps before it predict a token of the assistant.
    """
    T = len(batch.input_ids)
    valid = valid_pairs(batch.loss_mask, batch.ends, served_steps, "target")
    chained = valid.cumprod(0).bool()  # (S, T)
    true_token = torch.zeros(T, served_steps, dtype=torch.bool, device=valid.device)
    favourite = torch.zeros_like(true_token)
    rows_of_step = [rows.nonzero().flatten() for rows in chained if rows.any()]
    tops = torch.full((T,), -1, device=valid.device)
    if rows_of_step:
        taught_by = torch.cat([rows + 1 + t for t, rows in enumerate(rows_of_step)]).unique()  # (U,)
        tops[taught_by] = teacher.top_tokens(batch.final[taught_by])
    for t, h in enumerate(drafter.unroll(batch, rows_of_step)):
        rows = rows_of_step[t]
        proposed = teacher.target_ids[drafter.logits(h).float().argmax(-1)]  # (N,)
        true_token[rows, t] = proposed == batch.input_ids[rows + PREDICTS + t]
        favourite[rows, t] = proposed == tops[rows + 1 + t]
    return Hits(true_token, favourite, valid.all(0))


def by_position(hits: Tensor) -> dict[str, Any]:
    """Return the rates of `hits` [rows, S] of one fixed set of rows, and 1 + Σ_k mean(Π_{j≤k} hit_j).

    `cumulative[k]`: share of rows whose proposals 0..k are all right. `conditional[k]`: the same among the
    rows whose proposals 0..k-1 are; None where there are none. No rows give no figures.
    """
    rows, steps = hits.shape
    if not rows:
        return {"accept_length": None, "cumulative": [None] * steps, "conditional": [None] * steps}
    right = hits.cumprod(1).sum(0).tolist()  # (S,)
    before = [rows, *right[:-1]]
    return {
        "accept_length": 1 + sum(right) / rows,
        "cumulative": [count / rows for count in right],
        "conditional": [count / base if base else None for count, base in zip(right, before, strict=True)],
    }


def last_answer(loss_mask: Sequence[bool]) -> tuple[int, int] | None:
    """Return (first, last) token of the last run of assistant tokens; None where there is none."""
    last = len(loss_mask) - 1
    while last >= 0 and not loss_mask[last]:
        last -= 1
    if last < 0:
        return None
    first = last
    while first > 0 and loss_mask[first - 1]:
        first -= 1
    return first, last


def walk(sample_id: str, loss_mask: Sequence[bool], hits: Sequence[Sequence[bool]], served_steps: int) -> Walk | None:
    """Return the rounds of greedy chain serving over a document's last answer; `hits` [T][S].

    The prefill of the prompt (tokens 0..P-1) yields token P; the first round starts at row P-1. A round at
    row i accepts k proposals, the consecutive hits among S steps, and yields k+1 tokens or what is left of
    the answer; the next one starts at row i+k+1. None where there is no round: no answer, one without a
    prompt, or one of a single token.
    """
    answer = last_answer(loss_mask)
    if answer is None or answer[0] == 0 or answer[0] == answer[1]:
        return None
    first, last = answer
    produced, row, histogram = 1, first - 1, [0] * (served_steps + 1)
    total = last - first + 1
    while produced < total:
        left = total - produced
        accepted = 0
        while accepted < min(served_steps, left) and hits[row][accepted]:
            accepted += 1
        histogram[accepted] += 1
        produced += min(accepted + 1, left)
        row += accepted + 1
    return Walk(sample_id, first, total, sum(histogram), histogram)


def evaluate(
    drafter: Drafter,
    teacher: Teacher,
    batches: Sequence[Sequence[Sample]],
    served_steps: int,
    dtype: torch.dtype,
    device: torch.device | str,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Return the offline acceptance of held-out documents, as JSON values.

    `batches`: documents to pack together. `should_stop` is asked between batches; Interrupted if it says so.
    """
    true_token, favourite = [], []
    walks: list[Walk] = []
    without_round = 0
    for samples in batches:
        if should_stop():
            raise Interrupted
        batch = pack(samples, dtype, device)
        hits = draft_hits(drafter, teacher, batch, served_steps)
        true_token.append(hits.true_token[hits.in_all_steps].cpu())
        favourite.append(hits.teacher[hits.in_all_steps].cpu())
        lengths = batch.starts.diff().tolist()
        for sample, rows in zip(samples, hits.true_token.cpu().split(lengths), strict=True):
            walked = walk(sample.id, sample.loss_mask.tolist(), rows.tolist(), served_steps)
            walks += [walked] if walked else []
            without_round += walked is None
    nothing = [torch.zeros(0, served_steps, dtype=torch.bool)]
    rounds = sum(one.rounds for one in walks)
    tokens = sum(one.tokens for one in walks)
    return {
        "served_steps": served_steps,
        "positions": sum(len(part) for part in true_token),
        "true_token": by_position(torch.cat(true_token or nothing)),
        "teacher_argmax": by_position(torch.cat(favourite or nothing)),
        "walk": {
            "accept_length": tokens / rounds if rounds else None,
            "tokens": tokens,
            "rounds": rounds,
            "without_round": without_round,
            "documents": {one.id: _without_id(one) for one in walks},
        },
    }


def _without_id(walked: Walk) -> dict[str, Any]:
    record = asdict(walked)
    del record["id"]
    return record
