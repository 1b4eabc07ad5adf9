"""Capture on a real GPU: a real SGLang outside an image, tiny models, every index against transformers.

    PYTHONPATH=... python -m pytest tests/test_gpu_capture.py -s

Needs CUDA and an importable SGLang; skipped anywhere else. The largest differences are printed for docs/releases.md.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import capture_hidden  # noqa: F401 (fails early where a dependency is missing)
import fetch_target
import make_models
from aerie import artifact, hidden, tokens
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from capture import install_plugins

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("sglang") is None, reason="needs CUDA and SGLang"
)

LENGTHS = [1, 8, 37, 200] * 2
EXTRA = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.3"]
# At unit scale; the server computes in bfloat16 (SGLang's norms have no float32 kernel), the reference in float32.
TOLERANCE = {"bfloat16": 0.15, "float8_e4m3": 0.4}


def capture_on_gpu(folder, name, stored, computed, **changes):
    """Capture all indices of a tiny model; return (manifest path, layer count)."""
    makers = {"tiny-llama": make_models.tiny_llama, "tiny-deepseek": make_models.tiny_deepseek}
    model = folder / "model"
    makers[name](model)
    config = json.loads((model / "config.json").read_text())
    count = config["num_hidden_layers"]
    fetch_target.main(["--source", "local", "--name", str(model), "--num-hidden-layers", str(count),
                       "--cache-dir", str(folder / "cache"), "--output", str(folder / "target")])  # fmt: skip
    manifest = artifact.read_json(folder / "target" / "manifest.json")
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(3, config["vocab_size"], (n,), generator=generator).tolist() for n in LENGTHS]
    tokens.write(
        folder / "tokens.safetensors", ids, [[0] * n for n in LENGTHS],
        {"ids": [f"p{i}" for i in range(len(ids))], "held_out": [False] * len(ids), "greedy": False,
         **{key: manifest[key] for key in ("target_digest", "tokenizer_digest", "template_digest")}},
    )  # fmt: skip
    import sglang.version

    output = folder / "hidden" / "00000.json"
    flags = {
        "--tokens": folder / "tokens.safetensors", "--head": folder / "target" / "head.safetensors",
        "--final": "post_norm", "--state-dtype": stored, "--shard-bytes": 200_000, "--concurrency": 8,
        "--sglang-version": sglang.version.__version__, "--writer-threads": 2, "--deterministic": "no",
        "--repeated-samples": 4, "--max-logprob-difference": 0.3, "--min-greedy-agreement": 0.9, "--checked-rows": 64,
        "--server-log": folder / "server.log", "--output": output, "--model": folder / "target" / "model",
        "--device": "cuda", "--dtype": computed, "--tensor-parallel": 1, "--context-tokens": 512,
        "--max-total-tokens": 8192, "--max-running-requests": 16, "--start-timeout-s": 300, "--seed": 1,
        "--warm-folder": folder / "warm", **changes,
    }  # fmt: skip
    words = [str(word) for pair in flags.items() for word in pair]
    words += ["--layers", *map(str, range(1, count)), *(f"--extra-flag={word}" for word in EXTRA)]
    path = [str(install_plugins(folder / "plugins")), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "SGLANG_PLUGINS": "aerie_capture"}
    done = subprocess.run([sys.executable, "scripts/capture_hidden.py", *words], cwd=ROOT, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    log = folder / "server.log"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:]) if log.exists() else ""
    assert done.returncode == 0, done.stdout[-3000:] + tail
    return output, model


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-deepseek"])
@pytest.mark.parametrize("stored, computed", [("bfloat16", "bfloat16"), ("float8_e4m3", "bfloat16")])
def test_every_captured_index_equals_transformers_on_a_gpu(tmp_path: Path, name, stored, computed):
    output, model = capture_on_gpu(tmp_path, name, stored, computed)
    chunk = hidden.open_chunk(output)
    network = make_models.reference_model(model)
    worst, scale = 0.0, 0.0
    for sample in chunk:
        with torch.no_grad():
            states = network(sample.input_ids[None].long(), output_hidden_states=True).hidden_states
        for position, index in enumerate(chunk.metadata["layers"]):
            worst = max(worst, float((sample.aux[:, position].float() - states[index][0]).abs().max()))
            scale = max(scale, float(states[index][0].abs().max()))
        worst = max(worst, float((sample.final.float() - states[-1][0]).abs().max()))
        scale = max(scale, float(states[-1][0].abs().max()))
    repeat = chunk.manifest["repeat"]
    print(f"\n{name} {stored}: largest difference {worst:.1e} (largest state {scale:.1f}), "
          f"captured twice: {'bitwise' if repeat['bitwise'] else repeat['largest_difference']}, "
          f"gates {chunk.manifest['gates']}")  # fmt: skip
    assert len(chunk) == len(LENGTHS)
    assert worst < TOLERANCE[stored] * max(1.0, scale / 4)
    digests = {entry["name"]: entry["sha256"] for entry in chunk.manifest["shards"]}
    for shard, digest in digests.items():
        assert artifact.sha256_file(output.with_suffix("") / shard) == digest
