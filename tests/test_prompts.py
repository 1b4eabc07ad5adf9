"""prompts: rows keep their chunk, the held-out side follows the id, every broken line is named."""

import gzip
import json

import pytest

from aerie import prompts
from aerie.prompts import PromptError


def write_lines(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def test_prompts_and_messages_are_read_in_file_order_with_given_or_made_ids(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "one"}, {"id": "x", "messages": turns})
    assert prompts.read_json_lines(path) == [
        {"id": "row-00000001", "messages": [{"role": "user", "content": "one"}]},
        {"id": "x", "messages": turns},
    ]


def test_a_compressed_list_reads_like_a_plain_one(tmp_path):
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as file:
        file.write('{"prompt": "hello"}\n')
    assert prompts.read_json_lines(tmp_path / "p.jsonl.gz")[0]["messages"][0]["content"] == "hello"


def test_every_broken_line_is_reported_with_file_and_line(tmp_path):
    path = write_lines(
        tmp_path / "p.jsonl",
        {"id": "a", "prompt": "fine"},
        "{not json",
        {"prompt": "  "},
        {"id": "a", "prompt": "again"},
        {"id": "b"},
        {"id": "c", "messages": []},
        {"id": "d", "messages": [{"role": "robot", "content": "x"}]},
        {"id": "e", "messages": [{"role": "user", "content": ""}]},
        {"id": "f", "messages": [{"role": "system", "content": "x"}]},
        "[1]",
    )
    with pytest.raises(PromptError) as error:
        prompts.read_json_lines(path)
    lines = str(error.value).splitlines()
    assert len(lines) == 9
    for line, (number, words) in zip(
        lines,
        [(2, "not JSON"), (3, "empty prompt"), (4, "duplicate id 'a', first used in line 1"),
         (5, "exactly one of"), (6, "'messages' is empty"), (7, "expected a role"), (8, "empty prompt"),
         (9, "no message of the user"), (10, "expected a JSON object")],
        strict=True,
    ):  # fmt: skip
        assert line.startswith(f"{path}:{number}: ") and words in line


def test_a_long_list_of_defects_is_cut_and_counted(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", *["nonsense"] * 50)
    with pytest.raises(PromptError, match=r"\.\.\. and 30 more"):
        prompts.read_json_lines(path)


def test_adding_rows_never_changes_an_earlier_chunk():
    for count in (8, 9, 100):
        assert list(prompts.rows_of_chunk(1, 4, count)) == [4, 5, 6, 7]
    assert list(prompts.rows_of_chunk(2, 4, 9)) == [8]


def test_the_held_out_side_depends_on_the_id_alone_and_keeps_its_share():
    ids = [f"row-{number:08d}" for number in range(10_000)]
    held = [prompt_id for prompt_id in ids if prompts.is_held_out(prompt_id, 0.1)]
    assert 900 < len(held) < 1100
    assert held == [prompt_id for prompt_id in ids if prompts.is_held_out(prompt_id, 0.1)]
    assert set(held) <= {prompt_id for prompt_id in ids if prompts.is_held_out(prompt_id, 0.2)}


def test_the_opening_of_a_user_turn_is_what_the_template_prints_before_the_text():
    def render(messages):
        return f"<s>user\n{messages[0]['content']}<e>\n"

    assert prompts.user_turn_opening(render) == "<s>user\n"
    with pytest.raises(PromptError, match="prompts.source: jsonl"):
        prompts.user_turn_opening(lambda messages: messages[0]["content"])
