"""The target's answers, turn by turn, with the ids it used.

    results/conversations/{chunk}.jsonl
        {"id", "held_out", "messages", "turns": [{"prompt_ids", "output_ids", "finish_reason"}],
         "temperature", "target_digest"}

`messages` is the whole conversation as text; `turns` holds, for every assistant turn, the exact ids the server
was given and returned. They are never re-tokenised: a text may have several tokenisations, and the drafter must
learn the one that serving produces. A conversation whose answers were given, not generated, has no turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ConversationError(ValueError):
    """A conversation that cannot be used; the message names its id, the turn and the reason."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def apply_chat_template(self, conversation: Sequence[dict[str, str]], **arguments: Any) -> Any: ...

    def __call__(self, text: str, **arguments: Any) -> Any: ...

    def decode(self, ids: Sequence[int], **arguments: Any) -> str: ...


def render(tokenizer: Tokenizer, messages: Sequence[dict[str, str]], answer_next: bool) -> str:
    """Return the text of the messages in the target's chat template; `answer_next` opens an assistant turn."""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_next)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a rendered text. The template wrote the special tokens; none are added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def asked_turns(messages: Sequence[dict[str, str]]) -> list[int]:
    """Return the positions of the user messages that the target is to answer."""
    return [number for number, message in enumerate(messages) if message["role"] == "user"]


def next_prompt_ids(
    tokenizer: Tokenizer,
    asked: Sequence[dict[str, str]],
    answered: Sequence[dict[str, str]],
    turns: Sequence[dict[str, Any]],
    eos_ids: Sequence[int],
) -> list[int]:
    """Return the ids to send for the next turn.

    First turn: the rendered messages. Later turns: the ids of the turn before with its answer, kept as they were,
    plus the ids of what the template adds for the new message. `asked` are the messages with which the last turn was
    asked, `answered` all messages up to and with the new user message.
    Raises ConversationError where the template rewrites what it printed before (then no prefix can be kept).
    """
    text = render(tokenizer, answered, answer_next=True)
    if not turns:
        return ids_of(tokenizer, text)
    last = turns[-1]
    answer = answered[len(asked)]["content"]
    before = render(tokenizer, asked, answer_next=True) + answer
    if not text.startswith(before):
        raise ConversationError(
            f"turn {len(turns)}: the chat template changes earlier turns when a new one follows, so the ids the "
            "server used cannot be continued; ask single turns for this target"
        )
    added = ids_of(tokenizer, text[len(before) :])
    kept = [*last["prompt_ids"], *last["output_ids"]]
    if last["output_ids"] and last["output_ids"][-1] in eos_ids and added and added[0] == last["output_ids"][-1]:
        added = added[1:]  # the server returned the end-of-turn token that the template prints again
    return kept + added


def answer_text(tokenizer: Tokenizer, output_ids: Sequence[int], eos_ids: Sequence[int]) -> str:
    """Return the text of an answer without its end-of-turn token."""
    ids = list(output_ids)
    if ids and ids[-1] in eos_ids:
        ids.pop()
    return tokenizer.decode(ids, skip_special_tokens=False)
