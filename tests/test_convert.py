"""convert: what each peer's own loader gives back is what the chunk holds; what would be read wrongly is refused.

The loaders are the published ones, see peers.py. The first run on a machine fetches them (1 MB) with pip.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import convert_hidden
import peers
from aerie import artifact, config, convert, hidden
from aerie.artifact import ArtifactError
from aerie.convert import ConversionError
from conftest import ROOT
from drafting import LAYERS, D, K, random_sample, write_chunk

MANIFEST = {"target_digest": "t" * 64, "tokenizer_digest": "k" * 64, "template_digest": "e" * 64}
LENGTHS = ((7, 12), (9, 5, 8))  # two chunks; the last sample of each is held out
COUNT = 5


def chunks(folder, final, **changes):
    """Two published chunks of random samples; return their manifests."""
    for number, lengths in enumerate(LENGTHS):
        samples = [
            random_sample(f"{number}-{i}", length, 10 * number + i, held_out=i == len(lengths) - 1)
            for i, length in enumerate(lengths)
        ]
        write_chunk(folder, MANIFEST, number, samples, final=final, **changes)
    return [folder / "hidden" / f"{number:05d}.json" for number in range(len(LENGTHS))]


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """{convention: the manifests of two chunks captured under it}"""
    return {final: chunks(tmp_path_factory.mktemp(final), final) for final in ("pre_norm", "post_norm")}


@pytest.fixture(scope="module")
def converted(captured, tmp_path_factory):
    """{format: the folder with every sample of both chunks}"""
    folders = {}
    for name, writer in convert.FORMATS.items():
        folders[name] = tmp_path_factory.mktemp(name) / "exports" / name
        convert.convert(captured[writer.final], name, folders[name], part="all", threads=2)
    return folders


def samples_of(manifests):
    return [sample for path in manifests for sample in hidden.open_chunk(path)]


def read_back(peer, folder, tmp_path):
    """Return ({name: tensor}, facts) that a peer's loader gave."""
    output = tmp_path / "read.safetensors"
    peers.read(peer, str(folder), str(output), ROOT / ".cache" / "peers")
    with safe_open(output, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["facts"])  # noqa: SIM118


def assert_equal(found, expected):
    assert found.dtype == expected.dtype and torch.equal(found, expected), (found, expected)


def assert_samples_of_speculators(found, samples):
    """Unshifted, the loader's tensors are the sample's; shifted, row i has x_{i+1}, aux_i, final_{i+1}, m_{i+1}."""
    for index, sample in enumerate(samples):
        ids, mask, aux = sample.input_ids.long(), sample.loss_mask.long(), sample.aux.flatten(1)
        for name, tensor in (
            ("whole.input_ids", ids), ("whole.loss_mask", mask), ("whole.hidden_states", aux),
            ("whole.verifier_last_hidden_states", sample.final), ("whole.lengths", torch.tensor([len(ids)])),
            ("shifted.input_ids", ids[1:]), ("shifted.loss_mask", mask[1:]), ("shifted.hidden_states", aux[:-1]),
            ("shifted.verifier_last_hidden_states", sample.final[1:]), ("shifted.position_ids", torch.arange(1, len(ids))),
        ):  # fmt: skip
            assert_equal(found[f"{index}.{name}"], tensor)
    assert len({name.split(".")[0] for name in found}) == len(samples)


@pytest.mark.parametrize("version", ["0.3.0", "0.4.0", "0.7.0.2"])
def test_speculators_v1_gives_back_what_the_chunks_hold(version, captured, converted, tmp_path):
    found, facts = read_back(f"speculators-{version}", converted["speculators_v1"], tmp_path)
    samples = samples_of(captured["pre_norm"])
    assert_samples_of_speculators(found, samples)
    assert facts["batch"] == [1, 64, K * D]
    if version != "0.3.0":  # which guesses lengths from file sizes
        assert facts["lengths"] == {str(index): len(sample.input_ids) for index, sample in enumerate(samples)}


def test_speculators_gives_back_what_the_chunks_hold(captured, converted, tmp_path):
    found, facts = read_back("speculators-0.9.0", converted["speculators"], tmp_path)
    samples = samples_of(captured["pre_norm"])
    assert_samples_of_speculators(found, samples)
    assert facts["lengths"] == {str(index): len(sample.input_ids) for index, sample in enumerate(samples)}
    assert facts["existing"] == list(range(COUNT)) and facts["corrupt"] == {} and facts["dropped"] == 0
    ours, theirs = facts["counts"]
    assert ours == theirs and sum(count for _, count in ours) == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert facts["batch"] == [1, 64, K * D]


def test_specforge_gives_back_what_the_chunks_hold(captured, converted, tmp_path):
    found, facts = read_back("specforge-0.2.0", converted["specforge"], tmp_path)
    samples = samples_of(captured["post_norm"])
    for index, sample in enumerate(samples):
        ids, mask, aux = sample.input_ids.long(), sample.loss_mask.long(), sample.aux.flatten(1)
        trained = mask.clone()
        trained[-1] = 0  # the loader's own doing: nothing follows the last token
        for name, tensor in (
            ("stored.input_ids", ids), ("stored.loss_mask", mask), ("stored.hidden_state", sample.final[None]),
            ("stored.aux_hidden_state", aux[None]), ("loaded.input_ids", ids[None]), ("loaded.loss_mask", trained[None]),
            ("loaded.hidden_state", aux[None]), ("loaded.target", sample.final[None]),
        ):  # fmt: skip
            assert_equal(found[f"{index}.{name}"], tensor)
    assert facts["order"] == list(range(COUNT))
    assert facts["tokens"] == [len(sample.input_ids) for sample in samples]


def test_aux_layers_stand_in_their_order_before_the_final_state(captured, converted):
    sample = samples_of(captured["pre_norm"])[0]
    stored = torch.load(converted["speculators_v1"] / "data_0.pt", weights_only=True)
    assert len(stored["hidden_states"]) == K + 1
    for number in range(K):
        assert torch.equal(stored["hidden_states"][number], sample.aux[:, number])
    assert torch.equal(stored["hidden_states"][K], sample.final)


def test_a_pickle_holds_its_own_sample_and_nothing_of_the_shard_behind_it(converted):
    for path, tokens in ((converted["speculators_v1"] / "data_3.pt", 5), (converted["specforge"] / "rows_0-2000/data_3.ckpt", 5)):  # fmt: skip
        states = tokens * (K + 1) * D * 4
        assert states < path.stat().st_size < states + 4000
        torch.load(path, weights_only=True)


def test_data_config_spells_the_layers_as_the_outputs_that_the_format_counts(converted):
    described = json.loads((converted["speculators_v1"] / "data_config.json").read_text())
    assert described["hidden_states"]["layer_ids"] == [*(index - 1 for index in LAYERS), -1]
    assert described["hidden_states"]["hf_indices"] == LAYERS
    schema = described["format"]["schema"]["hidden_states"]
    assert schema == {"dtype": "list[torch.float32]", "shape": f"list of [seq_len, {D}]", "num_tensors": K + 1}
    assert described["data"] == {"num_samples": COUNT, "seq_length": 12}


@pytest.mark.parametrize("name", convert.FORMATS)
def test_the_manifest_lists_every_file_with_its_digest(name, captured, converted):
    folder = converted[name]
    manifest = artifact.read_json(folder.with_name(f"{name}.json"))
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert {n: e["sha256"] for n, e in manifest["files"].items()} == {n: artifact.sha256_file(p) for n, p in files.items()}  # fmt: skip
    samples = samples_of(captured[convert.FORMATS[name].final])
    assert [(s["index"], s["id"], s["held_out"], s["tokens"]) for s in manifest["samples"]] == [
        (index, sample.id, sample.held_out, len(sample.input_ids)) for index, sample in enumerate(samples)
    ]
    assert manifest["chunks"] == {p.stem: artifact.sha256_file(p) for p in captured[convert.FORMATS[name].final]}
    assert not [path for path in folder.parent.iterdir() if artifact.PARTIAL in path.name]


@pytest.mark.parametrize("name", convert.FORMATS)
def test_the_same_chunks_give_the_same_bytes(name, captured, converted, tmp_path):
    again = convert.convert(captured[convert.FORMATS[name].final], name, tmp_path / name, part="all")
    assert again["files"] == artifact.read_json(converted[name].with_name(f"{name}.json"))["files"]


def test_rows_are_written_in_batches_without_losing_any(captured, converted, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "ARROW_BATCH", 2)
    convert.convert(captured["pre_norm"], "speculators", tmp_path / "s", part="all")
    import pyarrow

    def table(folder):
        with pyarrow.OSFile(str(folder / convert.Speculators.arrow)) as file:
            return pyarrow.ipc.open_stream(file).read_all()

    batched, whole = table(tmp_path / "s"), table(converted["speculators"])
    assert len(batched.to_batches()) == 3 and batched.to_pydict() == whole.to_pydict()


def test_strided_bfloat16_states_come_out_whole_and_as_bfloat16(tmp_path):
    drawn = random_sample("a", 6, 1)
    states = torch.cat([drawn.aux, drawn.final[:, None]], 1).bfloat16()  # (T, K+1, D)
    sample = SimpleNamespace(
        input_ids=drawn.input_ids, loss_mask=drawn.loss_mask, aux=states[:, :K], final=states[:, K]
    )  # fmt: skip
    identity = {"layers": LAYERS, "hidden_size": D, "dtype": "bfloat16"}
    for name, writer in convert.FORMATS.items():
        (tmp_path / name).mkdir()
        writer(tmp_path / name, identity).write(sample, tmp_path / name / "sample")
    v1, specforge = (
        torch.load(tmp_path / name / "sample", weights_only=True) for name in ("speculators_v1", "specforge")
    )
    assert_equal(torch.stack(v1["hidden_states"], 1), states)
    assert_equal(load_file(tmp_path / "speculators" / "sample")["hidden_states"], states)
    assert_equal(specforge["hidden_state"], states[None, :, K])
    assert_equal(specforge["aux_hidden_state"], states[None, :, :K].flatten(2))


def test_held_out_samples_are_left_out_unless_asked_for(captured, tmp_path):
    for part, ids in (("train", ["0-0", "1-0", "1-1"]), ("held_out", ["0-1", "1-2"])):
        manifest = convert.convert(captured["post_norm"], "specforge", tmp_path / part, part)
        assert [sample["id"] for sample in manifest["samples"]] == ids
        assert [sample["index"] for sample in manifest["samples"]] == list(range(len(ids)))


@pytest.mark.parametrize(
    "name, captured_as, needed",
    [("speculators_v1", "post_norm", "pre_norm"), ("speculators", "post_norm", "pre_norm"), ("specforge", "pre_norm", "post_norm")],
)  # fmt: skip
def test_the_other_final_state_is_refused_with_the_reason_and_the_key(name, captured_as, needed, captured, tmp_path):
    with pytest.raises(ConversionError) as error:
        convert.convert(captured[captured_as], name, tmp_path / "out")
    for path in captured[captured_as]:
        assert f"{path}: the final state is {captured_as}, {name} needs {needed}" in str(error.value)
    assert f"`hidden.final: {needed}`" in str(error.value) and convert.FORMATS[name].reason in str(error.value)
    assert not any(tmp_path.iterdir())


def test_chunks_of_different_targets_are_refused(tmp_path):
    first = chunks(tmp_path / "a", "post_norm")[0]
    second = chunks(tmp_path / "b", "post_norm", target_digest="u" * 64)[1]
    with pytest.raises(ArtifactError, match="target_digest is 'uuuu"):
        convert.convert([first, second], "specforge", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_chunk_named_twice_is_refused(captured, tmp_path):
    first, second = captured["post_norm"]
    with pytest.raises(ConversionError, match="chunk 00000 is already there from"):
        convert.convert([first, second, first], "specforge", tmp_path / "out")


def test_an_unknown_format_is_refused_with_the_known_ones(captured, tmp_path):
    with pytest.raises(ConversionError, match="format 'gguf': unknown; known: speculators_v1, speculators, specforge"):
        convert.convert(captured["post_norm"], "gguf", tmp_path / "out")


@pytest.mark.parametrize("there", ["out", "out.json"])
def test_an_output_that_is_there_is_refused_and_left_alone(there, captured, tmp_path):
    (tmp_path / there).write_text("mine")
    with pytest.raises(ConversionError, match=f"{there}: already there"):
        convert.convert(captured["post_norm"], "specforge", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [there] and (tmp_path / there).read_text() == "mine"


def test_a_changed_shard_is_refused_and_leaves_nothing_behind(tmp_path):
    paths = chunks(tmp_path, "post_norm")
    shard = paths[1].with_suffix("") / hidden.shard_name(0)
    data = bytearray(shard.read_bytes())
    data[data.index(samples_of(paths[1:])[0].final[3].numpy().tobytes())] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ArtifactError, match="changed since it was captured"):
        convert.convert(paths, "specforge", tmp_path / "exports" / "specforge")
    assert not (tmp_path / "exports").exists() or not any((tmp_path / "exports").iterdir())


def test_a_disk_without_room_is_refused_before_anything_is_written(captured, tmp_path, monkeypatch):
    monkeypatch.setattr(artifact, "free_bytes", lambda folder: 1000)
    with pytest.raises(ConversionError, match=r"needs 5,376 bytes, 1,000 are free"):
        convert.convert(captured["post_norm"], "specforge", tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_writer_that_fails_leaves_nothing_behind(captured, tmp_path, monkeypatch):
    def full(self, sample, path):
        raise OSError("no space left on device")

    monkeypatch.setattr(convert.SpecForge, "write", full)
    with pytest.raises(OSError, match="no space left"):
        convert.convert(captured["post_norm"], "specforge", tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_the_command_takes_manifests_or_their_folder(captured, tmp_path, capsys):
    folder = captured["post_norm"][0].parent
    words = ["--format", "specforge", "--part", "all"]
    convert_hidden.main(["--chunks", *map(str, captured["post_norm"]), *words, "--output", str(tmp_path / "a")])
    convert_hidden.main(["--hidden", str(folder), "--count", "2", *words, "--output", str(tmp_path / "b")])
    assert "5 samples (all), 41 tokens" in capsys.readouterr().err
    assert artifact.read_json(tmp_path / "a.json") == artifact.read_json(tmp_path / "b.json")
    with pytest.raises(SystemExit):
        convert_hidden.main(["--hidden", str(folder), *words, "--output", str(tmp_path / "c")])


def test_an_export_in_a_results_folder_is_no_defect_of_it(tmp_path):
    paths = chunks(tmp_path, "post_norm")
    before = artifact.manifest_lines(tmp_path, {})
    convert.convert(paths, "specforge", tmp_path / "exports" / "specforge")
    assert artifact.manifest_lines(tmp_path, {}) == before
    (tmp_path / artifact.MANIFEST).write_text("\n".join(before) + "\n")
    assert not [defect for defect in artifact.audit(tmp_path) if "exports" in defect.path]


def test_the_configuration_knows_what_every_format_needs():
    assert {name: writer.final for name, writer in convert.FORMATS.items()} == config.EXPORT_FINAL
    settings = {"results_dir": "r", "hidden": {"final": "pre_norm"}, "prompts": {"count": 3, "rows_per_chunk": 2}}
    assert config.export_inputs(settings, "speculators") == [f"r/hidden/0000{n}.json.sha256" for n in (0, 1)]
    with pytest.raises(
        config.ConfigError, match="hidden.final: pre_norm: allowed: post_norm for a conversion to specforge"
    ):
        config.export_inputs(settings, "specforge")
