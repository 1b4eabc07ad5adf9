"""hidden: golden bytes, preallocation and resume, a reader that refuses what is not whole."""

import errno
import hashlib
import json
import os
import struct

import pytest
import torch
import xxhash

import drafting
from aerie import artifact, hidden
from aerie.artifact import ArtifactError
from aerie.hidden import PartialShard
from drafting import fill

LENGTHS = [2, 1, 3]
LAYERS, WIDTH = 2, 4


def make_shard(folder, dtype="float32", ids=None, metadata=None):
    ids = ids or [torch.arange(10 * i, 10 * i + n, dtype=torch.int32) for i, n in enumerate(LENGTHS)]
    facts = {"ids": [f"s{i}" for i in range(len(LENGTHS))], "held_out": [False, True, False]}
    return PartialShard(
        folder=folder, number=0, samples=[0, 1, 2], lengths=LENGTHS, input_ids=ids,
        loss_mask=[torch.ones(n, dtype=torch.uint8) for n in LENGTHS],
        layers=LAYERS, width=WIDTH, dtype=dtype, metadata={**facts, **(metadata or {"layers": [1, 2]})},
    )  # fmt: skip


def states_of(sample):
    """The states of a sample, [T, K+1, D]."""
    generator = torch.Generator().manual_seed(sample)
    return torch.rand(LENGTHS[sample], LAYERS + 1, WIDTH, generator=generator) + 0.5


def filled(folder, dtype="float32", samples=(0, 1, 2)):
    """A shard with the rows and the journal lines of `samples`."""
    shard = make_shard(folder, dtype)
    assert shard.prepare() == hidden.Journal()
    for sample in samples:
        fill(shard, sample, states_of(sample))
    return shard


def publish(shard, root):
    """Publish a filled shard as a chunk of one shard, as capture_hidden does."""
    journal = shard.prepare()
    assert sorted(journal.durable) == [0, 1, 2]
    manifest = root / "hidden" / "00000.json"
    folder = manifest.with_suffix("")
    folder.mkdir(parents=True)
    size = shard.path.stat().st_size
    digest = artifact.seal(shard.path, folder / shard.path.name)
    metadata = dict.fromkeys(hidden.IDENTITY, "x") | {
        "format": hidden.FORMAT, "layers": [1, 2], "dtype": shard.dtype,
        "computed_dtype": "bfloat16" if shard.dtype == "bfloat16" else "float32",
    }  # fmt: skip
    shards = [{"name": shard.path.name, "sha256": digest, "bytes": size, "tokens": sum(LENGTHS)}]
    samples = shard.entries(journal)
    artifact.write_json(manifest, {"metadata": metadata, "shards": shards, "samples": samples, "gates": {}})
    return manifest


def flip(path, position, bit=0):
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def append(shard, *lines):
    with open(shard.journal, "a") as file:
        file.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize(
    ("dtype", "fields", "offsets", "size"),
    [
        (
            "bfloat16",
            b'"states":{"dtype":"BF16","shape":[2,2,1],"data_offsets":[24,32]},'
            b'"loss_mask":{"dtype":"U8","shape":[2],"data_offsets":[32,34]}}',
            {"states": 4120, "loss_mask": 4128},
            4130,
        ),
        (
            "float32",
            b'"states":{"dtype":"F32","shape":[2,2,1],"data_offsets":[24,40]},'
            b'"loss_mask":{"dtype":"U8","shape":[2],"data_offsets":[40,42]}}',
            {"states": 4120, "loss_mask": 4136},
            4138,
        ),
        (
            "float8_e4m3",
            b'"states":{"dtype":"F8_E4M3","shape":[2,2,1],"data_offsets":[24,28]},'
            b'"scales":{"dtype":"F32","shape":[2,2],"data_offsets":[28,44]},'
            b'"loss_mask":{"dtype":"U8","shape":[2],"data_offsets":[44,46]}}',
            {"states": 4120, "scales": 4124, "loss_mask": 4140},
            4142,
        ),
    ],
    ids=["bfloat16", "float32", "float8_e4m3"],
)
def test_the_header_of_a_two_token_shard_has_exactly_these_bytes(dtype, fields, offsets, size):
    found = hidden.layout([2], 1, 1, dtype, {"a": 1})
    header = (
        b'{"__metadata__":{"aerie":"{\\"a\\":1}"},'
        b'"cu_seqlens":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},'
        b'"input_ids":{"dtype":"I32","shape":[2],"data_offsets":[16,24]},' + fields
    )
    assert found.header == struct.pack("<Q", 4088) + header + b" " * (4088 - len(header))
    assert found.offsets == {"cu_seqlens": 4096, "input_ids": 4112, **offsets}
    assert found.total_bytes == size


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", 40), ("float32", 80), ("float8_e4m3", 20 + 16)])
def test_a_token_takes_its_states_and_their_scales(dtype, expected):
    assert hidden.token_bytes(3, 5, dtype) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
def test_a_filled_shard_reads_back_sample_by_sample(tmp_path, dtype):
    shard = filled(tmp_path / "p", dtype, (2, 0, 1))
    chunk = hidden.open_chunk(publish(shard, tmp_path))
    samples = list(chunk)
    assert [s.id for s in samples] == ["s0", "s1", "s2"] and [s.held_out for s in samples] == [False, True, False]
    assert [len(s.input_ids) for s in samples] == LENGTHS
    assert samples[2].input_ids.tolist() == [20, 21, 22]
    assert samples[2].aux.shape == (3, LAYERS, WIDTH) and samples[2].final.shape == (3, WIDTH)
    for number, sample in enumerate(samples):
        expected = states_of(number)
        assert sample.states.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        assert torch.equal(sample.aux, sample.states[:, :-1]) and torch.equal(sample.final, sample.states[:, -1])
        if dtype == "float8_e4m3":
            assert ((sample.states - expected).abs() <= expected / 8).all()
            assert not torch.equal(sample.states, expected)
        else:
            assert torch.equal(sample.states, expected.to(sample.states.dtype))


def test_float8_states_are_restored_in_float32_and_rounded_once():
    states = torch.tensor([[[1.0, -0.5]]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0 + 2**-9]])
    found = hidden.restored(states, scales, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.tensor([[[1.0 + 2**-9, -0.5 - 2**-10]]]).bfloat16())
    assert hidden.restored(states, None, torch.bfloat16) is states


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3"])
def test_a_checksum_is_over_the_states_then_the_scales(tmp_path, dtype):
    shard = filled(tmp_path / "p", dtype)
    rows = hidden.rows_of(shard.tensors(), shard.starts[2], shard.starts[3])
    assert len(rows) == (2 if dtype == "float8_e4m3" else 1)
    joined = b"".join(map(hidden.tensor_bytes, rows))
    assert shard.prepare().durable[2].rows_xxh3 == hidden.checksum(*rows) == xxhash.xxh3_128(joined).hexdigest()


def test_a_second_run_takes_up_what_the_journal_proves_and_nothing_else(tmp_path):
    shard = filled(tmp_path / "p", samples=(0,))
    lines = shard.journal.read_text()
    fill(shard, 1, states_of(1))
    shard.journal.write_text(lines)  # rows on disk without a journal line prove nothing
    append(shard, {"sample": 2, "refused": "not finite"}, '{"sample": 2, "tok')  # a kill cut this line short
    again = make_shard(tmp_path / "p")
    journal = again.prepare()
    assert list(journal.durable) == [0] and journal.refused == {} and journal.shard_sha256 is None
    assert len(again.journal.read_text().splitlines()) == 1  # so the torn line cannot run into the next one


def test_the_journal_of_a_float8_shard_keeps_its_errors(tmp_path):
    filled(tmp_path / "p", "float8_e4m3")
    first = make_shard(tmp_path / "p", "float8_e4m3").prepare()
    second = make_shard(tmp_path / "p", "float8_e4m3").prepare()
    assert first == second and all(0 < entry.float8_error < 2**-3 for entry in first.durable.values())


@pytest.mark.parametrize(
    ("dtype", "tensor"), [("float32", "states"), ("float8_e4m3", "states"), ("float8_e4m3", "scales")]
)
@pytest.mark.parametrize("sample", [0, 1, 2])
def test_rows_that_changed_on_disk_are_captured_again(tmp_path, dtype, tensor, sample):
    shard = filled(tmp_path / "p", dtype)
    append(shard, {"shard_sha256": artifact.sha256_file(shard.path)})
    control = shard.control("run")
    assert make_shard(tmp_path / "p", dtype).prepare().shard_sha256 == artifact.sha256_file(shard.path)
    last = control["samples"][sample]["row"] + LENGTHS[sample]
    flip(shard.path, control[tensor]["offset"] + last * control[tensor]["row_bytes"] - 1)
    journal = make_shard(tmp_path / "p", dtype).prepare()
    assert sorted(journal.durable) == sorted({0, 1, 2} - {sample})
    assert journal.shard_sha256 is None
    assert "shard_sha256" not in shard.journal.read_text()  # the next server must not find it either


@pytest.mark.parametrize("field", ["tokens", "ids_sha256", "rows_xxh3"])
def test_a_line_that_does_not_fit_its_sample_is_not_taken_up(tmp_path, field):
    shard = filled(tmp_path / "p")
    lines = [json.loads(line) for line in shard.journal.read_text().splitlines()]
    lines[1][field] = lines[0][field]
    shard.journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(make_shard(tmp_path / "p").prepare().durable) == [0, 2]


@pytest.mark.parametrize("samples", [(), (0,), (0, 1)])
def test_a_digest_that_stands_before_all_samples_are_there_is_not_trusted(tmp_path, samples):
    shard = filled(tmp_path / "p", samples=samples)
    append(shard, {"shard_sha256": artifact.sha256_file(shard.path)})
    journal = make_shard(tmp_path / "p").prepare()
    assert list(journal.durable) == list(samples) and journal.shard_sha256 is None
    assert "shard_sha256" not in shard.journal.read_text()


def test_the_samples_and_the_digest_of_a_whole_journal_are_kept(tmp_path):
    shard = filled(tmp_path / "p")
    append(shard, {"shard_sha256": artifact.sha256_file(shard.path)})
    for _ in range(2):
        journal = make_shard(tmp_path / "p").prepare()
        assert sorted(journal.durable) == [0, 1, 2] and journal.shard_sha256 == artifact.sha256_file(shard.path)


@pytest.mark.parametrize("line", ['{"sample": 0}', '{"sample": 0, "tok', '{"tokens": 2}', '{"sample": 0, "rows": 1}'])
def test_a_line_that_is_none_of_a_journal_is_a_value_error(line):
    with pytest.raises(ValueError):
        hidden.Journal().add(line)


@pytest.mark.parametrize("line", ["null", "1", "[]", '"sample"', "true", '{"refused": "x"}', "", "\xff"])
def test_a_line_that_is_no_record_of_a_sample_is_passed_over(tmp_path, line):
    shard = filled(tmp_path / "p", samples=(0, 1))
    append(shard, line + "\n")
    fill(shard, 2, states_of(2))
    journal = make_shard(tmp_path / "p").prepare()
    assert list(journal.durable) == [0, 1, 2] and journal.refused == {}
    assert len(shard.journal.read_text().splitlines()) == 3
    with pytest.raises(ValueError):
        hidden.Journal().add(line)


@pytest.mark.parametrize("sample", [3, 99, -1, -3])
def test_a_line_of_a_sample_that_the_shard_has_not_is_passed_over(tmp_path, sample):
    shard = filled(tmp_path / "p", samples=(0, 1))
    last = json.loads(shard.journal.read_text().splitlines()[1])
    append(shard, {**last, "sample": sample})
    journal = make_shard(tmp_path / "p").prepare()
    assert list(journal.durable) == [0, 1]
    assert [json.loads(line)["sample"] for line in shard.journal.read_text().splitlines()] == [0, 1]


def test_a_sample_behind_the_digest_voids_it(tmp_path):
    shard = filled(tmp_path / "p", samples=(0, 1))
    append(shard, {"shard_sha256": "0" * 64})
    fill(shard, 2, states_of(2))
    journal = make_shard(tmp_path / "p").prepare()
    assert sorted(journal.durable) == [0, 1, 2] and journal.shard_sha256 is None
    assert "shard_sha256" not in shard.journal.read_text()


def test_an_entry_has_what_a_reader_checks(tmp_path):
    shard = filled(tmp_path / "p")
    journal = shard.prepare()
    ids = torch.tensor([20, 21, 22], dtype=torch.int32)
    assert shard.entries(journal)[2] == {
        "id": "s2", "held_out": False, "shard": 0, "position": 2, "tokens": 3,
        "ids_sha256": hashlib.sha256(struct.pack("<3i", *ids)).hexdigest(),
        "mask_xxh3": xxhash.xxh3_128(b"\1\1\1").hexdigest(),
        "rows_xxh3": xxhash.xxh3_128(hidden.tensor_bytes(states_of(2))).hexdigest(),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3"])
def test_the_control_record_tells_where_the_rows_belong(tmp_path, dtype):
    shard = make_shard(tmp_path / "p", dtype)
    record = shard.control("run")
    scaled = dtype == "float8_e4m3"
    row_bytes = (LAYERS + 1) * WIDTH * (1 if scaled else 4)
    assert record["states"] == {"offset": shard.layout.offsets["states"], "row_bytes": row_bytes}
    scales = {"offset": record["states"]["offset"] + 6 * row_bytes, "row_bytes": (LAYERS + 1) * 4}
    assert record["scales"] == (scales if scaled else None)
    assert [(entry["row"], entry["tokens"]) for entry in record["samples"]] == [(0, 2), (2, 1), (3, 3)]
    assert record["total_bytes"] == shard.layout.total_bytes


@pytest.mark.parametrize("change", ["ids", "metadata", "size"])
def test_an_unfinished_shard_of_another_capture_is_laid_out_anew(tmp_path, change):
    shard = filled(tmp_path / "p", samples=(0,))
    if change == "ids":
        other = make_shard(tmp_path / "p", ids=[torch.full((n,), 7, dtype=torch.int32) for n in LENGTHS])
    elif change == "metadata":
        other = make_shard(tmp_path / "p", metadata={"layers": [1, 3]})
    else:
        with open(shard.path, "ab") as file:
            file.write(b"x")
        other = make_shard(tmp_path / "p")
    assert other.prepare() == hidden.Journal()
    assert other.journal.read_text() == ""
    assert other.path.stat().st_size == other.layout.total_bytes
    assert other.tensors()["states"].count_nonzero() == 0
    assert torch.equal(other.tensors()["input_ids"], torch.cat(other.input_ids))


def test_a_mask_that_differs_on_disk_is_laid_out_anew(tmp_path):
    shard = filled(tmp_path / "p")
    flip(shard.path, shard.layout.offsets["loss_mask"] + 3)
    again = make_shard(tmp_path / "p")
    assert again.prepare() == hidden.Journal() and again.journal.read_text() == ""
    assert torch.equal(again.tensors()["loss_mask"], torch.cat(again.loss_mask))
    assert again.tensors()["states"].count_nonzero() == 0


@pytest.mark.parametrize("step", ["posix_fallocate", "fsync", "replace"])
def test_a_kill_during_layout_leaves_no_shard_that_could_be_taken_up(tmp_path, monkeypatch, step):
    class Killed(BaseException):
        pass

    def kill(*arguments):
        raise Killed

    shard = make_shard(tmp_path / "p")
    with monkeypatch.context() as patch:
        patch.setattr(os, step, kill)
        with pytest.raises(Killed):
            shard.prepare()
    (left,) = (tmp_path / "p").iterdir()
    assert left.name.startswith("shard-00000") and left.suffix == ".new"
    left.write_bytes(b"x" * (shard.layout.total_bytes + 100))  # whatever it holds, and however much
    assert make_shard(tmp_path / "p").prepare() == hidden.Journal()
    assert shard.path.stat().st_size == shard.layout.total_bytes and not left.exists()
    assert torch.equal(shard.tensors()["loss_mask"], torch.cat(shard.loss_mask))
    assert torch.equal(shard.tensors()["input_ids"], torch.cat(shard.input_ids))


def test_a_kill_while_a_shard_is_laid_out_anew_leaves_nothing_of_the_old_one_durable(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*arguments):
        raise Killed

    other_ids = [torch.full((n,), 7, dtype=torch.int32) for n in LENGTHS]
    filled(tmp_path / "p")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        with pytest.raises(Killed):
            make_shard(tmp_path / "p", ids=other_ids).prepare()
    assert make_shard(tmp_path / "p", ids=other_ids).prepare() == hidden.Journal()


def test_a_layout_is_a_new_file_so_that_late_rows_of_an_old_server_cannot_reach_it(tmp_path):
    shard = filled(tmp_path / "p")
    with open(shard.path, "r+b") as late:
        other = make_shard(tmp_path / "p", metadata={"layers": [1, 3]})
        other.prepare()
        late.seek(shard.layout.offsets["states"])
        late.write(b"x" * 16)
    assert other.tensors()["states"].count_nonzero() == 0


def test_no_room_for_a_shard_shows_before_anything_is_captured(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device"):
        make_shard(tmp_path / "p").prepare()


def test_a_shard_cut_short_is_refused_by_name_and_command(tmp_path):
    manifest = publish(filled(tmp_path / "p"), tmp_path)
    path = manifest.with_suffix("") / "shard-00000.safetensors"
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 10)
    with pytest.raises(ArtifactError, match=r"cut short or grown.*hidden/00000\.json\.sha256"):
        hidden.open_chunk(manifest)


def test_a_missing_shard_is_refused_by_name_and_command(tmp_path):
    manifest = publish(filled(tmp_path / "p"), tmp_path)
    (manifest.with_suffix("") / "shard-00000.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"shard-00000\.safetensors: missing.*hidden/00000\.json\.sha256"):
        hidden.open_chunk(manifest)


@pytest.mark.parametrize("found", [1, 3, None])
def test_a_chunk_of_another_format_is_refused(tmp_path, found):
    manifest = publish(filled(tmp_path / "p"), tmp_path)
    record = json.loads(manifest.read_text())
    record["metadata"]["format"] = found
    artifact.write_json(manifest, record)
    with pytest.raises(ArtifactError, match=f"format {found}, this Aerie reads {hidden.FORMAT}; make it anew with"):
        hidden.open_chunk(manifest)


@pytest.mark.parametrize("sample", [0, 1, 2])
@pytest.mark.parametrize(
    ("dtype", "tensor", "bytes_of_a_token"),
    [
        ("float32", "states", (LAYERS + 1) * WIDTH * 4),
        ("float8_e4m3", "states", (LAYERS + 1) * WIDTH),
        ("float8_e4m3", "scales", (LAYERS + 1) * 4),
        ("float32", "loss_mask", 1),
        ("float32", "input_ids", 4),
    ],
)
@pytest.mark.parametrize("last", [False, True], ids=["first byte", "last byte"])
def test_a_flipped_byte_is_refused_at_the_first_read_of_its_sample(
    tmp_path, dtype, tensor, bytes_of_a_token, sample, last
):
    shard = filled(tmp_path / "p", dtype)
    manifest = publish(shard, tmp_path)
    token = shard.starts[sample + 1] if last else shard.starts[sample]
    path = manifest.with_suffix("") / "shard-00000.safetensors"
    flip(path, shard.layout.offsets[tensor] + token * bytes_of_a_token - last)
    chunk = hidden.open_chunk(manifest)  # opening reads no sample
    for number in range(3):
        if number == sample:
            message = rf"{path}: sample s{number} changed since it was captured.*hidden/00000\.json\.sha256"
            for _ in range(2):  # it is not taken for checked afterwards
                with pytest.raises(ArtifactError, match=message):
                    chunk.sample(number)
        else:
            chunk.sample(number)


def test_a_flipped_byte_in_the_sample_starts_is_refused(tmp_path):
    shard = filled(tmp_path / "p")
    manifest = publish(shard, tmp_path)
    flip(manifest.with_suffix("") / "shard-00000.safetensors", shard.layout.offsets["cu_seqlens"] + 8)  # 2 → 3
    chunk = hidden.open_chunk(manifest)
    for number in (0, 1):
        with pytest.raises(ArtifactError, match=f"sample s{number} changed since it was captured"):
            chunk.sample(number)
    assert torch.equal(chunk.sample(2).states, states_of(2))


def test_a_torn_header_is_refused_by_name_and_command(tmp_path):
    manifest = publish(filled(tmp_path / "p"), tmp_path)
    path = manifest.with_suffix("") / "shard-00000.safetensors"
    flip(path, 8)  # the brace
    with pytest.raises(ArtifactError, match=r"not a readable shard.*hidden/00000\.json\.sha256"):
        hidden.open_chunk(manifest).sample(0)


def test_a_sample_is_checked_once(tmp_path, monkeypatch):
    chunk = hidden.open_chunk(publish(filled(tmp_path / "p"), tmp_path))
    calls, original = [], hidden.checksum
    monkeypatch.setattr(hidden, "checksum", lambda *tensors: (calls.append(1), original(*tensors))[1])
    chunk.sample(1)
    assert len(calls) == 2  # its mask and its rows
    chunk.sample(1)
    assert len(calls) == 2


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
    assert hidden.split_into_shards([3, 3, 10, 1, 1], bytes_per_token=10, shard_bytes=60) == [[0, 1], [2], [3, 4]]


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


def many_chunks(folder, count, samples=50, tokens=1000):
    """Manifests of `count` chunks whose shards have the right size and nothing in them: whoever reads one fails."""
    manifests = []
    for number in range(count):
        path = folder / "hidden" / f"{number:05d}.json"
        shard = path.with_suffix("") / "shard-00000.safetensors"
        shard.parent.mkdir(parents=True)
        with open(shard, "wb") as file:
            file.truncate(1 << 20)
        entries = [
            {"id": f"{number}-{i}", "held_out": i % 10 == 0, "shard": 0, "position": i, "tokens": tokens + i, "ids_sha256": "",
             "mask_xxh3": "", "rows_xxh3": ""} for i in range(samples)
        ]  # fmt: skip
        shards = [{"name": shard.name, "sha256": "", "bytes": 1 << 20, "tokens": 0}]
        artifact.write_json(path, {"metadata": {"format": hidden.FORMAT}, "shards": shards, "samples": entries})
        manifests.append(path)
    return manifests


def test_opening_many_chunks_reads_no_shard(tmp_path):
    chunks = [hidden.open_chunk(path) for path in many_chunks(tmp_path, 100)]
    batches = hidden.PackedBatches(chunks, tokens_per_batch=8000, seed=1)  # needs the lengths only
    assert sum(len(chunk) for chunk in chunks) == 5000 and batches.position == {"epoch": 0, "batch": 0}
    with pytest.raises(ArtifactError, match="not a readable shard"):
        next(iter(batches))


def test_packed_batches_hold_each_training_sample_once_an_epoch_and_go_on_where_they_were(tmp_path):
    drafting.write_run(tmp_path)
    chunks = [hidden.open_chunk(tmp_path / "hidden" / f"{number:05d}.json") for number in range(2)]
    expected = sorted(sample.id for chunk in chunks for sample in chunk if not sample.held_out)

    def ids(batch):
        return [sample.id for sample in batch]

    batches = hidden.PackedBatches(chunks, tokens_per_batch=48, seed=3)
    seen, positions = [], []
    for batch in batches:
        assert sum(len(sample.input_ids) for sample in batch) <= 48
        seen.append(ids(batch))
        positions.append(batches.position)
        if batches.position["epoch"] == 2:
            break
    first = [batch for batch, position in zip(seen, positions, strict=True) if position["epoch"] == 0]
    second = [batch for batch, position in zip(seen, positions, strict=True) if position["epoch"] == 1]
    for epoch in (first, second):
        assert sorted(name for batch in epoch for name in batch) == expected
    assert first != second
    for number in (0, len(first) - 1, len(first) + 1):
        resumed = iter(hidden.PackedBatches(chunks, tokens_per_batch=48, seed=3, position=positions[number]))
        assert [ids(next(resumed)) for _ in range(3)] == seen[number + 1 : number + 4]
    held_out = next(iter(hidden.PackedBatches(chunks, tokens_per_batch=10_000, seed=3, held_out=True)))
    assert all(sample.held_out for sample in held_out)
    with pytest.raises(ValueError, match=r"longer samples: .*held-2 \(22\)"):
        hidden.PackedBatches(chunks, tokens_per_batch=19, seed=3, held_out=True)
