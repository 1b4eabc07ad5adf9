"""One capture by the real server in the real image, and what transformers says it should be."""

import json
from pathlib import Path

import torch

import make_models
from aerie import artifact, tokens
from conftest import ROOT, in_image, run, toy_config

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
        "--max-running-requests": 8, "--start-timeout-s": 600, "--seed": 1, "--writer-threads": 2, "--deterministic": "no",
        "--repeated-samples": 2, "--warm-folder": WORK / "warm", **changes,
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


def largest_differences(chunk, expected):
    """Return {index or "final": largest absolute difference between the captured states and `expected`}."""
    worst = {}
    for sample in chunk:
        states = expected[sample.id]
        for position, index in enumerate(chunk.metadata["layers"]):
            worst[index] = max(worst.get(index, 0.0), (sample.aux[:, position] - states[index]).abs().max().item())
        worst["final"] = max(worst.get("final", 0.0), (sample.final - states[-1]).abs().max().item())
    return worst
