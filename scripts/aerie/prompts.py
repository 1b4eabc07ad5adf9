"""The ordered prompt list, its chunks, and which rows are held out.

    results/prompts/{chunk}.jsonl    one {"id", "messages", "held_out"} per line

Chunk k holds the rows k*R to (k+1)*R-1 of the list, so adding rows never changes an earlier chunk. A row is
held out (measured, never trained on) by the hash of its id alone, so this never changes either.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

SHOWN_DEFECTS = 20  # a broken file of a million lines must not print a million lines
ROLES = ("system", "user", "assistant", "tool")


class PromptError(ValueError):
    """A prompt list that cannot be used; the message lists the defects with file and line."""


def is_held_out(prompt_id: str, fraction: float) -> bool:
    """Return whether a prompt is held out: its id hashes into the first `fraction` of the range."""
    value = int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big")
    return value < fraction * 2**64


def _defect(record: Any) -> str | None:
    """Return what is wrong with one parsed line, None where nothing is."""
    if not isinstance(record, dict):
        return f"expected a JSON object, found {type(record).__name__}"
    if ("prompt" in record) == ("messages" in record):
        return "expected exactly one of the fields 'prompt' and 'messages'"
    if "prompt" in record:
        if not isinstance(record["prompt"], str) or not record["prompt"].strip():
            return "empty prompt"
        return None
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        return "'messages' is empty"
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"message {number}: expected a role among {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"message {number}: 'content' is not a text"
        if message["role"] == "user" and not message["content"].strip():
            return f"message {number}: empty prompt"
    if not any(message["role"] == "user" for message in messages):
        return "no message of the user"
    return None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the prompts of a JSON-lines file (plain or .gz) as {"id", "messages"}, in file order.

    A line holds `prompt` (a text) or `messages`, and may hold `id`; without one the id is `row-<number>`.
    Raises PromptError with file, line and reason of every defect (the first 20 are shown).
    """
    opener = gzip.open if path.suffix == ".gz" else open
    prompts, defects, first_seen = [], [], {}
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                defect = _defect(record)
            except json.JSONDecodeError as error:
                defect = f"not JSON ({error.msg} at column {error.colno})"
            if defect is None:
                prompt_id = str(record.get("id", f"row-{number:08d}"))
                if prompt_id in first_seen:
                    defect = f"duplicate id {prompt_id!r}, first used in line {first_seen[prompt_id]}"
                first_seen.setdefault(prompt_id, number)
            if defect is not None:
                defects.append(f"{path}:{number}: {defect}")
                continue
            messages = record.get("messages") or [{"role": "user", "content": record["prompt"]}]
            prompts.append({"id": prompt_id, "messages": messages})
    if defects:
        more = f"\n... and {len(defects) - SHOWN_DEFECTS} more" if len(defects) > SHOWN_DEFECTS else ""
        raise PromptError("\n".join(defects[:SHOWN_DEFECTS]) + more)
    return prompts


def rows_of_chunk(chunk: int, rows_per_chunk: int, count: int) -> range:
    """Return the row numbers of a chunk; the last chunk may be shorter."""
    return range(chunk * rows_per_chunk, min((chunk + 1) * rows_per_chunk, count))


def user_turn_opening(render: Any) -> str:
    """Return the text that opens a user turn in the target's chat template.

    `render(messages)` applies the template as text. A model that continues this opening writes a user turn of
    its own (the idea of Magpie, arXiv 2406.08464).
    """
    marker = "\u2063aerie-marker\u2063"
    before, found, _ = render([{"role": "user", "content": marker}]).partition(marker)
    if not found or not before:
        raise PromptError(
            "prompts.source: self needs a chat template that prints the user's text after an opening of its own; "
            "this target's does not, so give prompts.source: jsonl"
        )
    return before
