"""conversations: turn by turn with the server's own ids; a prompt that does not fit is refused before any server starts."""

import argparse

import pytest

import generate_conversations
from aerie import server
from aerie.conversations import ConversationError, answer_text
from test_tokens import EOS, LetterTokenizer, assistant, user


def generation(context_tokens=40, max_new_tokens=8):
    arguments = argparse.Namespace(
        context_tokens=context_tokens, max_new_tokens=max_new_tokens, temperature=0.0, top_p=1.0
    )
    return generate_conversations.Generation(arguments, LetterTokenizer(), [EOS])


def state(prompt_id, *messages):
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    return {
        "id": prompt_id, "held_out": False, "given": list(messages), "taken": 0, "asked": asked, "asked_with": [],
        "messages": [], "turns": [],
    }  # fmt: skip


def reply(ids, reason="stop"):
    body = {"output_ids": ids, "meta_info": {"finish_reason": {"type": reason}}}
    return server.Reply(200, body, 0.1)


def test_two_user_turns_are_asked_one_after_the_other_with_the_ids_kept():
    work, one = generation(), state("a", user("h"), user("k"))
    first = work.payloads([one], 0)
    assert LetterTokenizer().decode(first[0]["input_ids"], True) == "u<h>a<"
    work.record(one, first[0], reply([77, EOS]))
    second = work.payloads([one], 1)
    kept = [*first[0]["input_ids"], 77, EOS]
    assert second[0]["input_ids"][: len(kept)] == kept
    work.record(one, second[0], reply([78, EOS]))
    assert [message["role"] for message in one["messages"]] == ["user", "assistant", "user", "assistant"]
    assert work.payloads([one], 2) == {}


def test_given_answers_are_replaced_by_the_targets_own():
    work, one = generation(), state("a", user("h"), assistant("given"), user("k"))
    work.record(one, work.payloads([one], 0)[0], reply([ord("y") - 95, EOS]))
    work.payloads([one], 1)
    assert [message["content"] for message in one["messages"]] == ["h", "y", "k"]


def test_prompts_longer_than_the_context_are_all_named_with_their_lengths():
    states = [state("short", user("h")), state("long", user("x" * 40)), state("longer", user("x" * 50))]
    with pytest.raises(ConversationError) as error:
        generation().payloads(states, 0)
    text = str(error.value)
    assert (
        "long, turn 0: 45 tokens" in text
        and "longer, turn 0: 55 tokens" in text
        and "short" not in text.split("\n")[0][:5]
    )
    assert "leaves room for 32" in text


@pytest.mark.parametrize(
    "answer", [reply([5], "abort"), reply([], "stop"), server.Reply(400, {"error": "too long"}, 0.1)]
)
def test_an_answer_that_is_none_ends_the_job_with_its_id(answer):
    work, one = generation(), state("a", user("h"))
    with pytest.raises(server.ServerError, match="^a: "):
        work.record(one, work.payloads([one], 0)[0], answer)


def test_given_answers_are_kept_where_every_user_turn_has_one():
    prompts = [{"id": "a", "held_out": True, "messages": [user("h"), assistant("y")]}]
    (record,) = generate_conversations.kept(prompts, "digest")
    assert record["turns"] == [] and record["target_digest"] == "digest" and record["held_out"]
    prompts.append({"id": "b", "held_out": False, "messages": [user("h")]})
    with pytest.raises(ConversationError, match="b: not every user turn has an answer"):
        generate_conversations.kept(prompts, "digest")


def test_the_text_of_an_answer_has_no_end_of_turn():
    assert answer_text(LetterTokenizer(), [2, 3, EOS], [EOS]) == "ab"
    assert answer_text(LetterTokenizer(), [2, 3], [EOS]) == "ab"
