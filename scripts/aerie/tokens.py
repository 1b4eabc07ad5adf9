"""Conversations as token ids and a loss mask.

    results/tokens/{chunk}.safetensors
        input_ids  int32 [T]   loss_mask  uint8 [T]   cu_seqlens  int64 [N+1]

T tokens of the chunk, N conversations; conversation i owns the rows cu_seqlens[i] to cu_seqlens[i+1]-1.
loss_mask[j] is 1 exactly where the assistant produced token j, its end-of-turn token included. It is not
shifted: a consumer that predicts token j looks at loss_mask[j].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from aerie import artifact
from aerie.conversations import ConversationError, Tokenizer, ids_of, render


def mask_of_turns(turns: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Return (ids, mask) of a conversation whose answers the server generated.

    Each turn's `prompt_ids` must continue the ids of the turn before; raises ConversationError naming the turn.
    """
    ids: list[int] = []
    mask: list[int] = []
    for number, turn in enumerate(turns):
        prompt, output = turn["prompt_ids"], turn["output_ids"]
        if prompt[: len(ids)] != ids:
            raise ConversationError(f"turn {number}: its prompt does not continue the turns before it")
        if not output:
            raise ConversationError(f"turn {number}: the answer is empty")
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(output)
        ids = [*prompt, *output]
    return ids, mask


def mask_of_boundaries(
    tokenizer: Tokenizer, messages: Sequence[dict[str, str]], eos_ids: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return (ids, mask) of a conversation whose answers were given, from the template's render boundaries.

    An assistant turn k begins where the rendering of messages[:k] (with an opened assistant turn) and that of
    messages[:k+1] stop sharing tokens, and ends with the last end-of-turn token of its part, or with its part where
    there is none. Raises ConversationError naming the turn where the template is not prefix-stable: where a later
    message changes the tokens of an earlier one.
    """
    ids = ids_of(tokenizer, render(tokenizer, messages, answer_next=False))
    mask = [0] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = ids_of(tokenizer, render(tokenizer, messages[:number], answer_next=True))
        closed_before = len(ids_of(tokenizer, render(tokenizer, messages[:number], answer_next=False)))
        closed = ids_of(tokenizer, render(tokenizer, messages[: number + 1], answer_next=False))
        begin = common_prefix(opened, closed)
        if ids[: len(closed)] != closed or begin < closed_before:
            raise ConversationError(
                f"turn {number} (assistant): the chat template is not prefix-stable, a later message changes the "
                "tokens of this turn; set conversations.regenerate: true so that the server's own ids are used"
            )
        ends = [position + 1 for position in range(begin, len(closed)) if closed[position] in eos_ids]
        end = ends[-1] if ends else len(closed)
        mask[begin:end] = [1] * (end - begin)
    return ids, mask


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many leading elements two sequences share."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def was_truncated(conversation: dict[str, Any]) -> bool:
    """Return whether an answer ended because it reached the length limit."""
    return any(turn["finish_reason"] == "length" for turn in conversation["turns"])


def write(output: Path, ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], metadata: dict[str, Any]) -> None:
    """Publish a tokens file; `metadata` must hold `ids` and `held_out`, one entry per conversation."""
    starts = [0]
    for sequence in ids:
        starts.append(starts[-1] + len(sequence))
    tensors = {
        "input_ids": torch.tensor([token for sequence in ids for token in sequence], dtype=torch.int32),
        "loss_mask": torch.tensor([value for mask in masks for value in mask], dtype=torch.uint8),
        "cu_seqlens": torch.tensor(starts, dtype=torch.int64),
    }
    with artifact.publish(output) as temporary:
        save_file(tensors, temporary, artifact.metadata_entry(metadata))


def read(path: Path | str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Check and read a tokens file; return its tensors and its metadata."""
    artifact.check(path)
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["aerie"])
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
