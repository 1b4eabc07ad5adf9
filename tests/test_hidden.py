"""hidden: golden bytes, preallocation and resume, a reader that refuses what is not whole."""

import hashlib
import json
import struct

import pytest
import torch

from aerie import artifact, hidden
from aerie.artifact import ArtifactError
from aerie.hidden import PartialShard

LENGTHS = [2, 1, 3]
LAYERS, WIDTH = 2, 4


def make_shard(folder, dtype="float32", ids=None, metadata=None):
    ids = ids or [torch.arange(10 * i, 10 * i + n, dtype=torch.int32) for i, n in enumerate(LENGTHS)]
    return PartialShard(
        folder=folder, number=0, samples=[0, 1, 2], lengths=LENGTHS, input_ids=ids,
        loss_mask=[torch.ones(n, dtype=torch.uint8) for n in LENGTHS],
        layers=LAYERS, width=WIDTH, dtype=dtype, metadata=metadata or {"layers": [1, 2]},
    )  # fmt: skip


def fill(shard, sample, seed=0, journal=True):
    """Write one sample's rows as the server does: at the offsets of the control record, then the journal."""
    control = shard.control("run")
    generator = torch.Generator().manual_seed(seed + sample)
    entry = control["samples"][sample]
    digest = hashlib.sha256()
    with open(control["path"], "r+b") as file:
        for tensor in control["tensors"].values():
            data = torch.rand(entry["tokens"] * tensor["row_bytes"] // 4, generator=generator, dtype=torch.float32)
            raw = hidden.tensor_bytes(data)
            file.seek(tensor["offset"] + entry["row"] * tensor["row_bytes"])
            file.write(raw)
            digest.update(raw)
    if journal:
        line = {"sample": sample, "tokens": entry["tokens"], "ids_sha256": entry["sha256"], "rows_sha256": digest.hexdigest()}  # fmt: skip
        with open(control["journal"], "a") as file:
            file.write(json.dumps(line) + "\n")


def publish(shard, root, held_out=(False, True, False)):
    """Publish a filled shard as a chunk of one shard, as capture_hidden does."""
    manifest = root / "hidden" / "00000.json"
    folder = manifest.with_suffix("")
    folder.mkdir(parents=True)
    size = shard.path.stat().st_size
    digest = artifact.seal(shard.path, folder / shard.path.name)
    metadata = dict.fromkeys(hidden.IDENTITY, "x") | {"layers": [1, 2]}
    samples = [
        {"id": f"s{i}", "held_out": held_out[i], "shard": 0, "position": i, "tokens": n} for i, n in enumerate(LENGTHS)
    ]
    shards = [{"name": shard.path.name, "sha256": digest, "bytes": size, "tokens": sum(LENGTHS)}]
    artifact.write_json(manifest, {"metadata": metadata, "shards": shards, "samples": samples, "gates": {}})
    return manifest


def test_a_two_token_shard_has_exactly_these_bytes():
    found = hidden.layout([2], 1, 1, "bfloat16", {"a": 1})
    header = (
        b'{"__metadata__":{"aerie":"{\\"a\\":1}"},'
        b'"cu_seqlens":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},'
        b'"input_ids":{"dtype":"I32","shape":[2],"data_offsets":[16,24]},'
        b'"aux":{"dtype":"BF16","shape":[2,1,1],"data_offsets":[24,28]},'
        b'"final":{"dtype":"BF16","shape":[2,1],"data_offsets":[28,32]},'
        b'"loss_mask":{"dtype":"U8","shape":[2],"data_offsets":[32,34]}}'
    )
    assert found.header == struct.pack("<Q", 4088) + header + b" " * (4088 - len(header))
    assert found.offsets == {"cu_seqlens": 4096, "input_ids": 4112, "aux": 4120, "final": 4124, "loss_mask": 4128}
    assert found.total_bytes == 4130


def test_a_filled_shard_reads_back_sample_by_sample(tmp_path):
    shard = make_shard(tmp_path / "p")
    assert shard.prepare() == {}
    for sample in (2, 0, 1):
        fill(shard, sample)
    assert sorted(shard.durable()) == [0, 1, 2]
    chunk = hidden.open_chunk(publish(shard, tmp_path))
    samples = list(chunk)
    assert [s.id for s in samples] == ["s0", "s1", "s2"] and [s.held_out for s in samples] == [False, True, False]
    assert [len(s.input_ids) for s in samples] == LENGTHS
    assert samples[2].input_ids.tolist() == [20, 21, 22]
    assert samples[2].aux.shape == (3, LAYERS, WIDTH) and samples[2].final.shape == (3, WIDTH)
    expected = torch.rand(3 * LAYERS * WIDTH, generator=torch.Generator().manual_seed(2))
    assert torch.equal(samples[2].aux.flatten(), expected)


def test_a_second_run_takes_up_what_the_journal_proves_and_nothing_else(tmp_path):
    shard = make_shard(tmp_path / "p")
    shard.prepare()
    fill(shard, 0)
    fill(shard, 1, journal=False)  # rows on disk without a journal line prove nothing
    with open(shard.journal, "a") as file:
        file.write('{"sample": 2, "tok')  # a kill cut this line short
    again = make_shard(tmp_path / "p")
    assert list(again.prepare()) == [0]
    assert len(again.journal.read_text().splitlines()) == 1  # so the torn line cannot run into the next one


def test_a_journal_line_whose_rows_changed_on_disk_is_not_taken_up(tmp_path):
    shard = make_shard(tmp_path / "p")
    shard.prepare()
    fill(shard, 0)
    with open(shard.path, "r+b") as file:
        file.seek(shard.control("run")["tensors"]["aux"]["offset"])
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    assert make_shard(tmp_path / "p").prepare() == {}


@pytest.mark.parametrize("change", ["ids", "metadata", "size"])
def test_an_unfinished_shard_of_another_capture_is_laid_out_anew(tmp_path, change):
    shard = make_shard(tmp_path / "p")
    shard.prepare()
    fill(shard, 0)
    if change == "ids":
        other = make_shard(tmp_path / "p", ids=[torch.full((n,), 7, dtype=torch.int32) for n in LENGTHS])
    elif change == "metadata":
        other = make_shard(tmp_path / "p", metadata={"layers": [1, 3]})
    else:
        with open(shard.path, "ab") as file:
            file.write(b"x")
        other = make_shard(tmp_path / "p")
    assert other.prepare() == {}
    assert not other.journal.exists()


def test_a_shard_cut_short_is_refused_by_name_and_command(tmp_path):
    shard = make_shard(tmp_path / "p")
    shard.prepare()
    manifest = publish(shard, tmp_path)
    path = manifest.with_suffix("") / "shard-00000.safetensors"
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 10)
    with pytest.raises(ArtifactError, match=r"cut short or grown.*hidden/00000\.json\.sha256"):
        hidden.open_chunk(manifest)


def test_a_byte_flipped_in_a_shard_is_refused(tmp_path):
    shard = make_shard(tmp_path / "p")
    shard.prepare()
    manifest = publish(shard, tmp_path)
    path = manifest.with_suffix("") / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="changed since it was captured"):
        hidden.open_chunk(manifest)


def test_chunks_of_different_captures_are_refused_with_every_difference(tmp_path):
    chunks = {}
    for name, layers in (("a", [1, 2]), ("b", [1, 3]), ("c", [1, 2])):
        metadata = dict.fromkeys(hidden.IDENTITY, "x") | {"layers": layers}
        if name == "c":
            metadata["target_digest"] = "other"
        chunks[f"{name}.json"] = hidden.Chunk({"metadata": metadata, "samples": [], "shards": []}, [])
    with pytest.raises(ArtifactError) as error:
        hidden.require_one_identity(chunks)
    assert "b.json: layers is [1, 3], but a.json has [1, 2]" in str(error.value)
    assert "c.json: target_digest is 'other'" in str(error.value)


def test_samples_are_never_split_over_shards():
    assert hidden.split_into_shards([3, 3, 10, 1, 1], token_bytes=10, shard_bytes=60) == [[0, 1], [2], [3, 4]]


@pytest.mark.parametrize(
    "asked, layers",
    [
        ("auto", [2, 15, 27]),
        ([1, 29], [1, 29]),
        ([0, 3], None),
        ([3, 30], None),
        ([4, 3], None),
        ([3, 3], None),
        ([], None),
    ],
)
def test_layer_indices_are_resolved_or_refused_with_the_allowed_range(asked, layers):
    if layers:
        assert hidden.resolve_layers(asked, 30) == layers
    else:
        with pytest.raises(ValueError, match="from 1 to 29"):
            hidden.resolve_layers(asked, 30)


def test_the_log_probability_check_sees_a_shifted_row():
    torch.manual_seed(0)
    head = hidden.Head(torch.randn(50, 8), torch.ones(8), 1e-6)
    final = torch.randn(2, 8)
    logits = head.logits(final, "post_norm")
    top = [[value.item(), token.item()] for value, token in zip(*torch.log_softmax(logits[0], -1).topk(5), strict=True)]
    assert hidden.logprob_difference(logits[0], top) < 1e-5
    assert hidden.logprob_difference(logits[1], top) > 0.1


def test_a_pre_norm_state_goes_through_the_norm_before_the_head():
    head = hidden.Head(torch.eye(4), torch.full((4,), 2.0), 0.0)
    state = torch.tensor([[1.0, 1.0, 1.0, 1.0]]) * 5
    assert torch.allclose(head.logits(state, "pre_norm"), torch.full((1, 4), 2.0))
    assert torch.allclose(head.logits(state, "post_norm"), state)


def test_greedy_agreement_counts_rows_whose_argmax_follows():
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert hidden.greedy_agreement(logits, torch.tensor([1, 1, 1])) == 2


def test_ids_are_hashed_as_little_endian_int32():
    assert hidden.ids_sha256(torch.tensor([1, 258])) == hashlib.sha256(b"\1\0\0\0\2\1\0\0").hexdigest()
