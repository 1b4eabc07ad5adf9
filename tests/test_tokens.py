"""tokens and conversations: hand-made golden cases of ids and loss masks, two-turn ones included."""

import pytest
import torch

from aerie import conversations, tokens
from aerie.artifact import ArtifactError
from aerie.conversations import ConversationError

EOS = 1


class LetterTokenizer:
    """One id per letter; `<` and `>` are the template's own, `>` ends a turn. `merge` joins two letters into id 99."""

    def __init__(self, template="{role[0]}<{content}>", merge=None, strip_history=False):
        self.template, self.merge, self.strip_history = template, merge, strip_history

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        text = ""
        for number, message in enumerate(messages):
            content = message["content"]
            if self.strip_history and number < len(messages) - 1 and message["role"] == "assistant":
                content = content.replace("t", "")  # as templates do that drop earlier thinking
            text += self.template.format(role=message["role"], content=content)
        return text + ("a<" if add_generation_prompt else "")

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        ids, position = [], 0
        while position < len(text):
            if self.merge and text.startswith(self.merge, position):
                ids.append(99)
                position += len(self.merge)
            else:
                ids.append({"<": 0, ">": EOS}.get(text[position], ord(text[position]) - 95))
                position += 1
        return {"input_ids": ids}

    def decode(self, ids, skip_special_tokens):
        return "".join({0: "<", EOS: ">"}.get(i, chr(i + 95)) for i in ids)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_one_generated_turn_masks_the_answer_with_its_end_of_turn():
    ids, mask = tokens.mask_of_turns([{"prompt_ids": [7, 8, 9], "output_ids": [4, 5, EOS]}])
    assert ids == [7, 8, 9, 4, 5, EOS]
    assert mask == [0, 0, 0, 1, 1, 1]


def test_two_generated_turns_mask_both_answers_and_nothing_between():
    first = {"prompt_ids": [7, 8], "output_ids": [4, EOS]}
    second = {"prompt_ids": [7, 8, 4, EOS, 6, 6], "output_ids": [5, 5]}
    ids, mask = tokens.mask_of_turns([first, second])
    assert ids == [7, 8, 4, EOS, 6, 6, 5, 5]
    assert mask == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_turn_that_does_not_continue_the_one_before_is_refused_by_number():
    turns = [{"prompt_ids": [7], "output_ids": [4]}, {"prompt_ids": [7, 5, 6], "output_ids": [4]}]
    with pytest.raises(ConversationError, match="turn 1"):
        tokens.mask_of_turns(turns)


def test_an_empty_answer_is_refused():
    with pytest.raises(ConversationError, match="answer is empty"):
        tokens.mask_of_turns([{"prompt_ids": [7], "output_ids": []}])


def test_given_answers_are_masked_from_the_opened_turn_to_the_end_of_turn():
    #        u  <  h  i  >  a  <  y  o  >  u  <  k  >  a  <  o  k  >
    golden = [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    messages = [user("hi"), assistant("yo"), user("k"), assistant("ok")]
    ids, mask = tokens.mask_of_boundaries(LetterTokenizer(), messages, [EOS])
    assert mask == golden
    assert LetterTokenizer().decode(ids, True) == "u<hi>a<yo>u<k>a<ok>"


def test_what_the_template_prints_after_the_end_of_turn_is_not_masked():
    #        u  <  h  >  n  a  <  y  >  n      (n: the template's line end)
    golden = [0, 0, 0, 0, 0, 0, 0, 1, 1, 0]
    tokenizer = LetterTokenizer(template="{role[0]}<{content}>n")
    assert tokens.mask_of_boundaries(tokenizer, [user("h"), assistant("y")], [EOS])[1] == golden


def test_a_token_merged_over_the_boundary_belongs_to_the_answer():
    # "<y" is one token (99), so the opened turn "...a<" shares one token less with the closed one.
    tokenizer = LetterTokenizer(merge="<y")
    ids, mask = tokens.mask_of_boundaries(tokenizer, [user("h"), assistant("yo")], [EOS])
    assert ids[5] == 99 and mask == [0, 0, 0, 0, 0, 1, 1, 1]


def test_a_template_that_rewrites_earlier_turns_is_refused_by_turn():
    tokenizer = LetterTokenizer(strip_history=True)
    messages = [user("h"), assistant("thought"), user("k"), assistant("o")]
    with pytest.raises(ConversationError, match=r"turn 1 \(assistant\).*regenerate: true"):
        tokens.mask_of_boundaries(tokenizer, messages, [EOS])


def test_the_next_turn_keeps_the_ids_the_server_used_and_adds_the_new_message():
    tokenizer = LetterTokenizer()
    asked = [user("h")]
    first = conversations.next_prompt_ids(tokenizer, [], asked, [], [EOS])
    assert tokenizer.decode(first, True) == "u<h>a<"
    # 77 stands for an id the tokenizer itself would never choose: it must survive.
    turn = {"prompt_ids": first, "output_ids": [77, EOS], "finish_reason": "stop"}
    answered = [*asked, assistant("y"), user("k")]
    second = conversations.next_prompt_ids(tokenizer, asked, answered, [turn], [EOS])
    assert second == [*first, 77, EOS, *tokenizer("u<k>a<", add_special_tokens=False)["input_ids"]]


def test_a_truncated_answer_gets_the_templates_end_of_turn_which_nobody_generated():
    tokenizer = LetterTokenizer()
    asked = [user("h")]
    first = conversations.next_prompt_ids(tokenizer, [], asked, [], [EOS])
    turn = {"prompt_ids": first, "output_ids": [77], "finish_reason": "length"}
    second = conversations.next_prompt_ids(tokenizer, asked, [*asked, assistant("y"), user("k")], [turn], [EOS])
    assert second[: len(first) + 2] == [*first, 77, EOS]
    _, mask = tokens.mask_of_turns([turn, {"prompt_ids": second, "output_ids": [5]}])
    assert mask[len(first) : len(first) + 2] == [1, 0]


def test_a_later_turn_is_refused_where_the_template_rewrites_history():
    tokenizer = LetterTokenizer(strip_history=True)
    asked = [user("h")]
    first = conversations.next_prompt_ids(tokenizer, [], asked, [], [EOS])
    turn = {"prompt_ids": first, "output_ids": [5, EOS], "finish_reason": "stop"}
    with pytest.raises(ConversationError, match="turn 1.*single turns"):
        conversations.next_prompt_ids(tokenizer, asked, [*asked, assistant("tt"), user("k")], [turn], [EOS])


def test_tokens_round_trip_and_a_flipped_byte_is_refused(tmp_path):
    path = tmp_path / "00000.safetensors"
    tokens.write(path, [[5, 6, 7], [8]], [[0, 1, 1], [1]], {"ids": ["a", "b"], "held_out": [False, True]})
    tensors, metadata = tokens.read(path)
    assert tensors["input_ids"].dtype == torch.int32 and tensors["input_ids"].tolist() == [5, 6, 7, 8]
    assert tensors["loss_mask"].dtype == torch.uint8 and tensors["loss_mask"].tolist() == [0, 1, 1, 1]
    assert tensors["cu_seqlens"].dtype == torch.int64 and tensors["cu_seqlens"].tolist() == [0, 3, 4]
    assert metadata["ids"] == ["a", "b"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="changed since it was published"):
        tokens.read(path)
