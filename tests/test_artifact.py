"""artifact: what is published is complete, what was changed is refused, a manifest sees everything."""

import hashlib
import shutil
import subprocess

import pytest

from aerie import artifact
from aerie.artifact import ArtifactError


def test_publish_writes_the_file_then_a_sidecar_that_sha256sum_accepts(tmp_path):
    artifact.write_text(tmp_path / "deep" / "a.txt", "hello\n")
    digest = hashlib.sha256(b"hello\n").hexdigest()
    assert (tmp_path / "deep" / "a.txt.sha256").read_text() == f"{digest}  a.txt\n"
    subprocess.run(["sha256sum", "-c", "a.txt.sha256"], cwd=tmp_path / "deep", check=True, capture_output=True)
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["a.txt", "a.txt.sha256"]


def test_an_error_while_writing_leaves_the_old_artifact_and_no_rest(tmp_path):
    path = tmp_path / "a.txt"
    artifact.write_text(path, "old")
    with pytest.raises(RuntimeError), artifact.publish(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    artifact.check(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "a.txt.sha256"]


@pytest.mark.parametrize("crash_at", [1, 2])
def test_a_kill_between_the_renames_never_leaves_a_file_with_a_wrong_sidecar(tmp_path, monkeypatch, crash_at):
    path = tmp_path / "a.txt"
    artifact.write_text(path, "old")
    calls = []

    def replace(source, destination):
        calls.append(destination)
        if len(calls) == crash_at:
            raise KeyboardInterrupt
        return shutil.move(source, destination)

    monkeypatch.setattr(artifact.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        artifact.write_text(path, "new")
    with pytest.raises(ArtifactError, match="no sidecar"):
        artifact.check(path)


def test_a_flipped_byte_is_refused_with_both_digests_and_the_command(tmp_path):
    path = tmp_path / "tokens" / "00001.safetensors"
    with artifact.publish(path) as temporary:
        temporary.write_bytes(b"abc")
    path.write_bytes(b"abd")
    with pytest.raises(ArtifactError) as error:
        artifact.check(path)
    assert hashlib.sha256(b"abc").hexdigest() in str(error.value)
    assert hashlib.sha256(b"abd").hexdigest() in str(error.value)
    assert f"snakemake --cores 1 -f -- {path}.sha256" in str(error.value)


@pytest.mark.parametrize("text", ["", "nonsense", f"{'0' * 64}  other.txt\n", f"{'0' * 10}  a.txt\n"])
def test_a_sidecar_that_says_something_else_is_refused(tmp_path, text):
    path = tmp_path / "a.txt"
    artifact.write_text(path, "x")
    artifact.sidecar_of(path).write_text(text)
    with pytest.raises(ArtifactError, match="make it anew with"):
        artifact.check(path)


def test_check_all_reports_every_defect_at_once(tmp_path):
    for name in "abc":
        artifact.write_text(tmp_path / name, name)
    (tmp_path / "a").write_text("z")
    (tmp_path / "c").unlink()
    with pytest.raises(ArtifactError) as error:
        artifact.check_all([tmp_path / name for name in "abc"])
    lines = str(error.value).splitlines()
    assert len(lines) == 2 and "changed" in lines[0] and "missing" in lines[1]


def test_canonical_json_ignores_order_and_refuses_nan():
    assert artifact.canonical_json({"b": 1, "a": [1, 2]}) == artifact.canonical_json({"a": [1, 2], "b": 1})
    assert artifact.digest_of({"a": 1}) != artifact.digest_of({"a": 2})
    with pytest.raises(ValueError):
        artifact.canonical_json(float("nan"))


def test_json_and_json_lines_round_trip(tmp_path):
    artifact.write_json(tmp_path / "a.json", {"x": [1, "two"]})
    artifact.write_json_lines(tmp_path / "b.jsonl", [{"x": 1}, {"y": "ü"}])
    assert artifact.read_json(tmp_path / "a.json") == {"x": [1, "two"]}
    assert artifact.read_json_lines(tmp_path / "b.jsonl") == [{"x": 1}, {"y": "ü"}]


@pytest.fixture
def results(tmp_path):
    results = tmp_path / "results"
    artifact.write_text(results / "tokens" / "00000.safetensors", "t")
    artifact.write_text(results / "hidden" / "00000" / "shard-00000.safetensors", "h")
    artifact.write_text(results / "hidden" / "00000.json", "{}")
    (results / "target" / "model").mkdir(parents=True)
    (results / "target" / "model" / "config.json").write_text("{}")
    (results / "logs").mkdir()
    (results / "logs" / "a.log").write_text("volatile")
    listed = {"target/model/config.json": artifact.sha256_file(results / "target" / "model" / "config.json")}
    (results / artifact.MANIFEST).write_text("\n".join(artifact.manifest_lines(results, listed)) + "\n")
    return results


def test_the_manifest_is_sorted_and_sha256sum_accepts_it_in_a_moved_folder(results, tmp_path):
    moved = tmp_path / "elsewhere"
    results.rename(moved)
    subprocess.run(["sha256sum", "--strict", "-c", artifact.MANIFEST], cwd=moved, check=True, capture_output=True)
    paths = list(artifact.read_manifest(moved))
    assert paths == sorted(paths) and "logs/a.log" not in paths and "target/model/config.json" in paths
    assert artifact.audit(moved) == []


def test_audit_names_a_changed_a_missing_and_an_extra_file_with_the_command_for_each(results):
    (results / "hidden" / "00000" / "shard-00000.safetensors").write_text("H")
    (results / "tokens" / "00000.safetensors").unlink()
    (results / "tokens" / "stray.bin").write_text("?")
    (results / "target" / "model" / "config.json").write_text("[]")
    found = {defect.path: defect for defect in artifact.audit(results, threads=2)}
    assert {path: defect.kind for path, defect in found.items()} == {
        "hidden/00000/shard-00000.safetensors": "changed",
        "tokens/00000.safetensors": "missing",
        "tokens/stray.bin": "unlisted",
        "target/model/config.json": "changed",
    }
    assert f"-f -- {results}/hidden/00000.json.sha256" in found["hidden/00000/shard-00000.safetensors"].detail
    assert f"-f -- {results}/target/manifest.json.sha256" in found["target/model/config.json"].detail
    assert f"-f -- {results}/tokens/00000.safetensors.sha256" in found["tokens/00000.safetensors"].detail


def test_audit_without_a_manifest_says_how_to_make_one(tmp_path):
    with pytest.raises(ArtifactError, match="snakemake --cores 1 -- "):
        artifact.audit(tmp_path)


def test_a_torn_manifest_line_is_named(results):
    (results / artifact.MANIFEST).write_text("abc\n")
    with pytest.raises(ArtifactError, match=r"MANIFEST.sha256:1"):
        artifact.audit(results)
