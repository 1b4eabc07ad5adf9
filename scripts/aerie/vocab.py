"""The draft vocabulary: which R of the target's V tokens the drafter can propose.

    results/tokens/*.safetensors  →  results/drafter/vocab.safetensors
        d2t  int64 [R]  offsets: draft token k is the target's token k + d2t[k]
        t2d  bool  [V]  whether the drafter can propose a target token

R draft vocabulary, V target vocabulary, T tokens of one chunk, N conversations.

The choice: special tokens first, then the tokens that the assistant produced most often in the training
conversations, by (count descending, id ascending); sorted ascending in the end, so that the offsets never
fall. The file says which tokens it was counted on (`chunks`: the digest of each tokens file), so that a trainer
whose states belong to other tokens refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from aerie import artifact, target

FORMAT = 1


class VocabularyError(ValueError):
    """A draft vocabulary that cannot be built or used; the message says what to change."""


@dataclass(frozen=True)
class DraftVocabulary:
    """A draft vocabulary as the drafter, the exporter and the server use it."""

    target_ids: torch.Tensor  # int64 [R], ascending: the target's id of each draft token
    members: torch.Tensor  # bool [V]
    metadata: dict[str, Any]
    digest: str  # sha256 of the file

    @property
    def offsets(self) -> torch.Tensor:
        """Return d2t, int64 [R]."""
        return offsets_of(self.target_ids)


def count_assistant_tokens(input_ids: torch.Tensor, loss_mask: torch.Tensor, vocabulary_size: int) -> torch.Tensor:
    """Return how often each target token was produced by the assistant, int64 [V].

    `input_ids` int [T], `loss_mask` [T] (1 = produced by the assistant). Raises VocabularyError for an id
    outside the vocabulary.
    """
    produced = input_ids[loss_mask.bool()].to(torch.int64)
    if len(produced) and not 0 <= int(produced.min()) <= int(produced.max()) < vocabulary_size:
        raise VocabularyError(
            f"token ids from {int(produced.min())} to {int(produced.max())}, but the target's vocabulary "
            f"has {vocabulary_size:,} tokens: these tokens belong to another target"
        )
    return torch.bincount(produced, minlength=vocabulary_size)


def choose(counts: torch.Tensor, size: int, special_ids: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Return (the target ids of the draft vocabulary, int64 [R] ascending; how many of them are filling).

    `counts` int64 [V]. Special ids are always in; then (count descending, id ascending). Where fewer than
    `size` tokens were seen, the lowest unused ids fill the rest. Raises VocabularyError where `size` is
    larger than V, smaller than 1 or smaller than the number of special tokens.
    """
    (V,) = counts.shape
    special = sorted(set(special_ids))
    if not 1 <= size <= V:
        raise VocabularyError(
            f"drafter.draft_vocab_size is {size:,}; the target has {V:,} tokens, so choose 1 to {V:,}"
        )
    if special and not 0 <= special[0] <= special[-1] < V:
        raise VocabularyError(
            f"special token ids {[i for i in special if not 0 <= i < V]} outside the target's "
            f"{V:,} tokens: this tokenizer belongs to another target"
        )
    if len(special) > size:
        raise VocabularyError(
            f"drafter.draft_vocab_size is {size:,}, but {len(special):,} special tokens must be in; raise it"
        )
    first = counts.to(torch.int64).clone()
    first[special] = torch.iinfo(torch.int64).max
    # A stable sort keeps equal counts in the order of their ids, unseen tokens included: these come last
    # and lowest id first, which is the filling.
    chosen = torch.argsort(first, descending=True, stable=True)[:size]  # (R,)
    filled = int((first[chosen] == 0).sum())
    return chosen.sort().values, filled


def offsets_of(target_ids: torch.Tensor) -> torch.Tensor:
    """Return d2t, int64 [R]: what to add to a draft id to get the target's id."""
    return target_ids - torch.arange(len(target_ids))


def coverage(counts: torch.Tensor, target_ids: torch.Tensor) -> float | None:
    """Return the share of the assistant's tokens that the drafter can propose; None where there are none."""
    total = int(counts.sum())
    return int(counts[target_ids].sum()) / total if total else None


def special_tokens(model: Path) -> list[int]:
    """Return the ids that must be in: EOS, special tokens, and added tokens that the chat template writes.

    Read from the JSON files of a Hugging Face folder; no tokenizer is loaded.
    """

    def read(name: str) -> dict[str, Any]:
        path = model / name
        return json.loads(path.read_text()) if path.is_file() else {}

    tokenizer, settings = read("tokenizer.json"), read("tokenizer_config.json")
    added = {entry["id"]: entry for entry in tokenizer.get("added_tokens", [])}
    added |= {int(i): entry for i, entry in settings.get("added_tokens_decoder", {}).items()}
    template = target.chat_template(model)
    chosen = {i for i, entry in added.items() if entry.get("special") or entry["content"] in template}
    config = target.text_config(read("config.json"))
    for eos in (config.get("eos_token_id"), read("generation_config.json").get("eos_token_id")):
        chosen |= {eos} if isinstance(eos, int) else set(eos or ())
    return sorted(chosen)


def write(output: Path, target_ids: torch.Tensor, vocabulary_size: int, metadata: dict[str, Any]) -> None:
    """Publish a draft vocabulary. `target_ids` int64 [R] ascending, V = `vocabulary_size`."""
    members = torch.zeros(vocabulary_size, dtype=torch.bool)
    members[target_ids] = True
    tensors = {"d2t": offsets_of(target_ids), "t2d": members}
    with artifact.publish(output) as temporary:
        save_file(tensors, temporary, artifact.metadata_entry({"format": FORMAT, **metadata}))


def read(path: Path | str) -> DraftVocabulary:
    """Check and read a draft vocabulary; raise VocabularyError where its two tensors contradict each other."""
    digest = artifact.check(path)
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["aerie"])
        offsets, members = file.get_tensor("d2t"), file.get_tensor("t2d")
    target_ids = offsets + torch.arange(len(offsets))
    if not torch.equal(members.nonzero().flatten(), target_ids):
        raise VocabularyError(
            f"{path}: d2t and t2d name different tokens (d2t must hold offsets, not ids); "
            f"make it anew with: {artifact.rebuild_command(path)}"
        )
    return DraftVocabulary(target_ids, members, metadata, digest)
