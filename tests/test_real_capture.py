"""Captured states equal transformers' hidden_states: real server, real image, fp32, every index, batched, TP 1 and 2."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

from aerie import artifact, hidden, target, tokens
from capturing import LENGTHS, TOLERANCE, WORK, capture_command, largest_differences, prepare, reference_states
from conftest import ROOT, run, settings, toy_config

pytestmark = pytest.mark.image


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-deepseek"])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_every_captured_index_equals_transformers(sif, models, name, tensor_parallel):
    folder, count = prepare(f"{name}-tp{tensor_parallel}", models[name])
    layers = list(range(1, count))
    output = folder / "hidden" / "00000.json"
    run(*capture_command(sif, folder, output, layers, tensor_parallel))
    chunk = hidden.open_chunk(ROOT / output)
    assert [len(sample.input_ids) for sample in chunk] == LENGTHS * 2
    assert chunk.metadata["layers"] == layers and len(chunk.manifest["shards"]) > 1
    expected = reference_states(models[name], chunk)
    worst = largest_differences(chunk, expected)
    print(f"{name}, TP {tensor_parallel}: largest difference by index: {worst}")
    assert all(difference <= TOLERANCE for difference in worst.values()), worst
    # A test that could not see a shift of one layer would be worthless.
    shifted = max((s.aux[:, 0] - expected[s.id][2]).abs().max().item() for s in chunk)
    assert shifted > 100 * TOLERANCE


def durable(folder):
    """How many samples the journals of an unfinished chunk have."""
    return sum(path.read_text().count("rows_xxh3") for path in folder.glob("*.journal.jsonl"))


@pytest.mark.parametrize("victim", ["server", "client"])
def test_a_capture_killed_in_the_middle_ends_in_the_same_bytes(sif, models, victim):
    """In deterministic mode the states of a sample depend on nothing else, so not on where the kill came either."""
    folder, count = prepare(f"killed-{victim}", models["tiny-llama"], lengths=[200] * 48)
    layers, slow = list(range(1, count)), {"--deterministic": "yes", "--concurrency": 2, "--max-running-requests": 1}
    output = folder / "hidden" / "00000.json"
    unfinished = ROOT / output.with_suffix(artifact.PARTIAL)
    environment = {**os.environ, **settings.job_environment(toy_config())}
    words = [str(word) for word in capture_command(sif, folder, output, layers, **slow)]
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        deadline = time.monotonic() + 600
        while durable(unfinished) < 5:
            assert time.monotonic() < deadline and job.poll() is None, job.stdout.read()
            time.sleep(0.01)
        lock = (
            unfinished / "lock"
        ).read_text()  # "process 123 on ...": a job in a container is a process like any other
        ready = json.loads((unfinished / "control" / "ready.json").read_text())
        os.kill(ready["pid"] if victim == "server" else int(lock.split()[1]), signal.SIGKILL)
        said, _ = job.communicate(timeout=300)
        assert job.returncode != 0
        assert victim == "client" or "died" in said or "broke" in said, said
    assert not (ROOT / output).exists() and not artifact.sidecar_of(ROOT / output).exists()
    complete = durable(unfinished)
    assert 5 <= complete < 48

    said = run(*capture_command(sif, folder, output, layers, **slow)).stdout
    taken_up = sum(int(found) for found in re.findall(r"taking up (\d+) of", said))
    assert taken_up >= complete, said
    resumed = hidden.open_chunk(ROOT / output)
    assert resumed.manifest["repeat"]["bitwise"] and not unfinished.exists()

    run(*capture_command(sif, folder, folder / "undisturbed" / "00000.json", layers, **slow))
    undisturbed = hidden.open_chunk(ROOT / folder / "undisturbed" / "00000.json")
    assert resumed.manifest == undisturbed.manifest
    for entry in resumed.manifest["shards"]:
        assert artifact.sha256_file(ROOT / output.with_suffix("") / entry["name"]) == entry["sha256"]


@pytest.fixture
def small_disk():
    """A file system of its own with room for the first shard but not for all; root only."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = ROOT / WORK / "small-disk"
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_fills_up_is_a_clear_error_and_the_next_run_continues(sif, models, small_disk):
    folder, count = prepare("full", models["tiny-llama"])
    output = (small_disk / "00000.json").relative_to(ROOT)
    command = capture_command(sif, folder, output, list(range(1, count)), **{"--server-log": folder / "server.log"})
    done = run(*command, check=False)
    assert done.returncode != 0 and "no room for the states of this chunk" in done.stdout, done.stdout
    assert not (ROOT / output).exists()
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    run(*command)
    assert len(hidden.open_chunk(ROOT / output)) == len(LENGTHS * 2)


def test_a_server_of_another_version_than_the_pin_is_refused(sif, models):
    folder, count = prepare("pin", models["tiny-llama"])
    command = capture_command(sif, folder, folder / "hidden" / "00000.json", list(range(1, count)), **{"--sglang-version": "0.5.99"})  # fmt: skip
    done = run(*command, check=False)
    assert done.returncode != 0
    assert "sglang_version: expected '0.5.99', the server read back" in done.stdout, done.stdout


def test_tokens_of_another_tokenizer_are_refused_before_any_server(sif, models):
    folder, _ = prepare("tokenizer", models["tiny-llama"])
    tensors, metadata = tokens.read(ROOT / folder / "tokens.safetensors")
    metadata["tokenizer_digest"] = "0" * 64
    ids = tensors["input_ids"].tolist()
    tokens.write(ROOT / folder / "tokens.safetensors", [ids], [[0] * len(ids)], metadata)
    done = run(*capture_command(sif, folder, folder / "hidden" / "00000.json", [1]), check=False)
    assert done.returncode != 0 and "tokenizer_digest" in done.stdout and "starting SGLang" not in done.stdout
    assert target.check_model(ROOT / folder / "target" / "manifest.json")
