"""Captured states equal transformers' hidden_states: real server, real image, fp32, every index, batched, TP 1 and 2."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import make_models
from aerie import artifact, hidden, target, tokens
from conftest import ROOT, in_image, run, settings, toy_config

pytestmark = pytest.mark.image

LENGTHS = [1, 8, 37, 200]  # tokens per prompt; each twice, so that requests of every length share a forward pass
TOLERANCE = 1e-4  # absolute, at unit scale, fp32
WORK = Path("results", "test-capture")


def prepare(name, model, lengths=LENGTHS * 2):
    """Describe a model and write a tokens file of random prompts; return the folder."""
    folder = WORK / name
    config = json.loads((ROOT / model / "config.json").read_text())
    run(
        "python", "scripts/fetch_target.py", "--source", "local", "--name", model, "--num-hidden-layers",
        config["num_hidden_layers"], "--cache-dir", ".cache", "--output", folder / "target",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(3, config["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
    manifest = artifact.read_json(ROOT / folder / "target" / "manifest.json")
    metadata = {
        "ids": [f"p{number}-{n}" for number, n in enumerate(lengths)], "held_out": [False] * len(lengths), "greedy": False,
        **{key: manifest[key] for key in ("target_digest", "tokenizer_digest", "template_digest")},
    }  # fmt: skip
    tokens.write(ROOT / folder / "tokens.safetensors", ids, [[0] * n for n in lengths], metadata)
    return folder, config["num_hidden_layers"]


def capture_command(sif, folder, output, layers, tensor_parallel=1, **changes):
    """Return the command of one capture inside the image."""
    flags = {
        "--tokens": folder / "tokens.safetensors", "--head": folder / "target" / "head.safetensors",
        "--final": "post_norm", "--state-dtype": "float32", "--shard-bytes": 200_000, "--sglang-version": toy_config()["container"]["sglang_version"],
        "--concurrency": 8, "--max-logprob-difference": 0.001, "--min-greedy-agreement": 0.999, "--checked-rows": 512,
        "--server-log": f"{output}.server.log", "--output": output, "--model": folder / "target" / "model", "--device": "cpu",
        "--dtype": "float32", "--tensor-parallel": tensor_parallel, "--context-tokens": 512, "--max-total-tokens": 4096,
        "--max-running-requests": 8, "--start-timeout-s": 600, "--seed": 1, **changes,
    }  # fmt: skip
    words = [word for pair in flags.items() for word in pair]
    return in_image(sif, "python", "scripts/capture_hidden.py", *words, "--layers", *layers)


def reference_states(model, chunk):
    """Return {sample id: hidden_states of transformers, a tuple of [T, D]}, eager fp32."""
    network = make_models.reference_model(ROOT / model)
    states = {}
    with torch.no_grad():
        for sample in chunk:
            output = network(sample.input_ids[None].long(), output_hidden_states=True)
            states[sample.id] = tuple(state[0] for state in output.hidden_states)  # (1, T, D) -> (T, D)
    return states


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
    worst = {}
    for sample in chunk:
        states = expected[sample.id]
        for position, index in enumerate(layers):
            worst[index] = max(worst.get(index, 0.0), (sample.aux[:, position] - states[index]).abs().max().item())
        worst["final"] = max(worst.get("final", 0.0), (sample.final - states[-1]).abs().max().item())
    print(f"{name}, TP {tensor_parallel}: largest difference by index: {worst}")
    assert all(difference <= TOLERANCE for difference in worst.values()), worst
    # A test that could not see a shift of one layer would be worthless.
    shifted = max((s.aux[:, 0] - expected[s.id][2]).abs().max().item() for s in chunk)
    assert shifted > 100 * TOLERANCE


def test_a_server_that_dies_in_the_middle_loses_nothing_that_was_complete(sif, models):
    folder, count = prepare("killed", models["tiny-llama"], lengths=[200] * 48)
    layers = list(range(1, count))
    whole = folder / "hidden" / "00001.json"
    run(*capture_command(sif, folder, whole, layers))

    output = folder / "hidden" / "00000.json"
    unfinished = ROOT / output.with_suffix(artifact.PARTIAL)
    environment = {**os.environ, **settings.job_environment(toy_config())}
    words = capture_command(sif, folder, output, layers, **{"--concurrency": 2, "--max-running-requests": 1})
    job = subprocess.Popen(
        [str(word) for word in words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip
    deadline = time.monotonic() + 600
    while sum(len(path.read_text().splitlines()) for path in unfinished.glob("*.journal.jsonl")) < 5:
        assert time.monotonic() < deadline and job.poll() is None, job.stdout.read()
        time.sleep(0.01)
    ready = json.loads(next(unfinished.glob("control-*/ready.json")).read_text())
    os.kill(ready["pid"], signal.SIGKILL)
    said, _ = job.communicate(timeout=300)
    assert job.returncode != 0 and ("died" in said or "broke" in said), said
    assert not (ROOT / output).exists() and not artifact.sidecar_of(ROOT / output).exists()
    complete = sum(len(path.read_text().splitlines()) for path in unfinished.glob("*.journal.jsonl"))
    assert 5 <= complete < 48

    said = run(*capture_command(sif, folder, output, layers)).stdout
    assert "taking up an unfinished capture" in said, said
    for ours, undisturbed in zip(hidden.open_chunk(ROOT / output), hidden.open_chunk(ROOT / whole), strict=True):
        assert torch.equal(ours.input_ids, undisturbed.input_ids)
        assert torch.allclose(ours.aux, undisturbed.aux, atol=1e-5, rtol=0)
        assert torch.allclose(ours.final, undisturbed.final, atol=1e-5, rtol=0)
    assert not unfinished.exists()


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
