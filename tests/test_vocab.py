"""vocab and build_vocab: the choice by hand, special tokens, coverage, refusals."""

import pytest
import torch
from safetensors.torch import save_file

import build_vocab
import drafting
from aerie import artifact, vocab
from aerie.vocab import VocabularyError

#                       0  1  2  3  4  5  6  7
COUNTS = torch.tensor([0, 5, 0, 9, 5, 0, 1, 0])


def test_tokens_are_chosen_by_count_then_id_and_sorted():
    chosen, filled = vocab.choose(COUNTS, 3, [])
    assert chosen.tolist() == [1, 3, 4] and filled == 0
    chosen, _ = vocab.choose(COUNTS, 2, [])
    assert chosen.tolist() == [1, 3]  # 1 and 4 are equally frequent: the lower id wins


def test_special_tokens_are_in_whatever_their_count():
    chosen, filled = vocab.choose(COUNTS, 3, [7, 0, 7])
    assert chosen.tolist() == [0, 3, 7] and filled == 0


def test_the_rest_is_filled_with_the_lowest_unused_ids_and_counted():
    chosen, filled = vocab.choose(COUNTS, 7, [7])
    assert chosen.tolist() == [0, 1, 2, 3, 4, 6, 7] and filled == 2
    assert vocab.choose(COUNTS, 8, [])[0].tolist() == list(range(8))


def test_offsets_lead_back_to_the_target_ids():
    chosen, _ = vocab.choose(COUNTS, 4, [])
    assert vocab.offsets_of(chosen).tolist() == [1, 2, 2, 3]
    assert (vocab.offsets_of(chosen) + torch.arange(4)).tolist() == chosen.tolist()


def test_coverage_is_the_share_of_the_counted_tokens():
    assert vocab.coverage(COUNTS, torch.tensor([1, 3])) == 14 / 20
    assert vocab.coverage(torch.zeros(8), torch.tensor([1, 3])) is None


@pytest.mark.parametrize(
    ("size", "special", "message"),
    [
        (9, [], "draft_vocab_size is 9; the target has 8 tokens, so choose 1 to 8"),
        (0, [], "draft_vocab_size is 0"),
        (2, [0, 1, 2], "3 special tokens must be in; raise it"),
        (4, [8], r"special token ids \[8\] outside the target's 8 tokens"),
    ],
)
def test_a_size_that_cannot_be_met_is_refused(size, special, message):
    with pytest.raises(VocabularyError, match=message):
        vocab.choose(COUNTS, size, special)


def test_only_what_the_assistant_produced_counts():
    counts = vocab.count_assistant_tokens(torch.tensor([3, 1, 3, 2]), torch.tensor([1, 0, 1, 1]), 5)
    assert counts.tolist() == [0, 0, 1, 2, 0]
    with pytest.raises(VocabularyError, match="from 2 to 9, but the target's vocabulary has 5 tokens"):
        vocab.count_assistant_tokens(torch.tensor([9, 2]), torch.tensor([1, 1]), 5)


def test_special_tokens_are_eos_those_marked_special_and_those_the_template_writes(tmp_path):
    drafting.write_target(tmp_path)
    model = tmp_path / "target" / "model"
    assert vocab.special_tokens(model) == [1, 2]  # <turn> and <end>, not <unused>
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    (model / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"7": {"content": "<x>", "special": true}}}')
    assert vocab.special_tokens(model) == [1, 2, 7, 9]


def arguments(results, **changes):
    flags = {
        "tokens": results / "tokens", "chunks": 2, "target": results / "target" / "manifest.json",
        "draft_vocab_size": 20, "output": results / "drafter" / "built.safetensors", **changes,
    }  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_the_built_file_counts_training_conversations_only_and_says_what_it_counted(tmp_path):
    manifest = drafting.write_run(tmp_path)
    build_vocab.main(arguments(tmp_path))
    built = vocab.read(tmp_path / "drafter" / "built.safetensors")
    assert len(built.target_ids) == 20 and built.members.sum() == 20
    assert {1, 2} <= set(built.target_ids.tolist())
    metadata = built.metadata
    assert metadata["chunks"]["00001"] == artifact.read_sidecar(tmp_path / "tokens" / "00001.safetensors")
    assert metadata["conversations"] == {"train": 12, "held_out": 3}
    training = [drafting.cyclic_sample(f"train-{i}", 12 + i % 7, False) for i in range(12)]
    produced = torch.cat([sample.input_ids[sample.loss_mask.bool()] for sample in training]).long()
    assert metadata["tokens"]["train"] == len(produced)
    assert metadata["coverage"]["train"] == built.members[produced].double().mean().item()
    assert 0 < metadata["coverage"]["held_out"] < 1
    assert metadata["target_digest"] == manifest["target_digest"]


def test_two_builds_are_equal_byte_for_byte(tmp_path):
    drafting.write_run(tmp_path)
    digests = []
    for _ in range(2):
        build_vocab.main(arguments(tmp_path))
        digests.append(artifact.check(tmp_path / "drafter" / "built.safetensors"))
    assert digests[0] == digests[1]


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    foreign = drafting.write_target(tmp_path) | {"tokenizer_digest": "0" * 64}
    drafting.write_chunk(tmp_path, foreign, 0, [drafting.cyclic_sample("a", 9, False)])
    with pytest.raises(VocabularyError, match="another tokenizer than .*00000.safetensors; make them anew with"):
        build_vocab.main(arguments(tmp_path, chunks=1))


def test_tokens_without_a_training_answer_are_refused(tmp_path):
    drafting.write_chunk(tmp_path, drafting.write_target(tmp_path), 0, [drafting.cyclic_sample("a", 9, True)])
    with pytest.raises(VocabularyError, match="no assistant token in any training conversation"):
        build_vocab.main(arguments(tmp_path, chunks=1))


def test_absolute_ids_in_place_of_offsets_are_refused(tmp_path):
    path = tmp_path / "vocab.safetensors"
    members = torch.zeros(8, dtype=torch.bool)
    members[[1, 3, 4]] = True
    with artifact.publish(path) as temporary:
        save_file({"d2t": torch.tensor([1, 3, 4]), "t2d": members}, temporary, {"aerie": "{}"})
    with pytest.raises(VocabularyError, match="d2t must hold offsets, not ids"):
        vocab.read(path)
