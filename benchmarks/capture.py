"""How much of a server's prefill speed a capture keeps: bare prefill and capture side by side, one JSON document.

    python benchmarks/capture.py --shape llama-3.1-8b --shape smollm2-135m --seconds 60 \
        --memory /dev/shm/aerie --disk results/bench --output benchmarks/capture-h200.json

Per shape three servers with the same flags and dummy weights, asked for the same prompts by the same client:

    bare         no plugin: what the model can do
    capture      the plugin as shipped; first foreign requests (hooks on, nothing taken), then to memory, then to disk
    unchecked    the plugin with both digests switched off by this script, to memory: what the checksums cost

A point is durable tokens per second: from the first request until the journal of the last shard has the sha256 of
its file. Shards are deleted as they complete, so a point can be longer than the disk is large. The host's own rates
(disk, sha256, xxh3, by as many threads as the writer has) tell what bounds a point.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from aerie import capture, hidden, server  # noqa: E402
from aerie.progress import say  # noqa: E402

PROMPT_TOKENS = 1024
BLOCK = 1 << 20
SHAPES = {
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "rope_theta": 10000.0,
    },
}  # fmt: skip
UNCHECKED = '''
"""Replaces the digests of aerie_capture.lane by nothing; made by benchmarks/capture.py, for a measurement only."""

def activate():
    from aerie_capture import writer

    writer.LANE_MODULE = "aerie_unchecked"

def main(argument):
    import types
    from aerie_capture import lane

    class Nothing:
        def update(self, block): pass
        def hexdigest(self): return "0" * 32

    lane.xxhash = types.SimpleNamespace(xxh3_128=Nothing)
    lane.FileDigest.update = lambda self, block: None
    lane.main(argument)

if __name__ == "__main__":
    import sys
    main(sys.argv[1])
'''


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", dest="shapes", action="append", choices=sorted(SHAPES), required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a point")
    parser.add_argument("--points", nargs="+", default=["bare", "foreign", "memory", "disk", "unchecked", "bare again"])
    parser.add_argument("--memory", type=Path, required=True, help="folder in a shared memory file system")
    parser.add_argument("--disk", type=Path, required=True, help="folder on the disk")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--writer-threads", type=int, default=4)
    parser.add_argument("--shard-bytes", type=int, default=1 << 30)
    parser.add_argument("--extra-flag", dest="extra_flags", action="append", default=[])
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(argv)


# ----------------------------------------------------------------------------------------------------
# Servers


def write_model(folder: Path, shape: str, dtype: str) -> Path:
    """A config.json is all that a server with dummy weights and without a tokenizer needs."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": dtype, "hidden_act": "silu",
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, **SHAPES[shape],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def install_plugins(folder: Path) -> Path:
    """A folder for PYTHONPATH with the capture plugin as a distribution, and the one that switches digests off."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    project = tomllib.loads((ROOT / "containers/capture/pyproject.toml").read_text())["project"]
    (folder / "aerie_capture").symlink_to(ROOT / "containers/capture/aerie_capture")
    (folder / "aerie_unchecked.py").write_text(textwrap.dedent(UNCHECKED))
    for name, target in (("aerie_capture", "aerie_capture:activate"), ("aerie_unchecked", "aerie_unchecked:activate")):
        info = folder / f"{name}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {target}\n")
    return folder


def serve(arguments: argparse.Namespace, model: Path, folder: Path, plugins: str, layers: list[int]) -> server.Server:
    """A server with these plugins; its own files lie in `folder`."""
    settings = server.Settings(
        model=str(model), device=arguments.device, dtype=arguments.dtype, tensor_parallel=1, context_tokens=4096,
        max_total_tokens=4 * arguments.concurrency * PROMPT_TOKENS, max_running_requests=256, start_timeout_s=600, port=0, seed=1,
        extra_flags=["--load-format", "dummy", "--skip-tokenizer-init", *arguments.extra_flags],
    )  # fmt: skip
    engine = server.Server(settings, server.CAPTURE_FLAGS, {}, folder / "server.log")
    path = [str(install_plugins(folder / "plugins")), os.environ.get("PYTHONPATH", "")]
    kernels = "aerie_cpu_kernels" if arguments.device == "cpu" else ""
    environment = {
        "SGLANG_PLUGINS": ",".join(filter(None, (plugins, kernels))) or "none",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    if "aerie_capture" in plugins:
        order = folder / "capture.json"
        order.write_text(json.dumps({
            "run": engine.name.removeprefix("aerie-"), "ready_path": str((folder / "ready.json").resolve()),
            "control_dir": str(folder.resolve()), "layers": layers, "final": "post_norm", "dtype": arguments.dtype,
            "threads": arguments.writer_threads,
        }))  # fmt: skip
        environment["AERIE_CAPTURE_CONFIG"] = str(order.resolve())
    engine.add_environment(environment)
    return engine


# ----------------------------------------------------------------------------------------------------
# Points


def prompts(shape: str, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, SHAPES[shape]["vocab_size"], (min(count, 512), PROMPT_TOKENS), generator=generator)
    return [ids[number % len(ids)].to(torch.int32) for number in range(count)]


def ask(engine: server.Server, shape: str, count: int, concurrency: int) -> float:
    """Seconds for `count` foreign requests of the same form as a capture's."""
    requests = (
        (number, {"input_ids": ids.tolist(), "rid": f"bench-{time.monotonic_ns()}-{number}",
                  "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                  "return_logprob": True, "top_logprobs_num": capture.TOP_LOGPROBS})
        for number, ids in enumerate(prompts(shape, count))
    )  # fmt: skip

    def on_reply(numbers: list[int], reply: server.Reply) -> None:
        if reply.status != 200:
            raise RuntimeError(f"requests {numbers}: HTTP {reply.status}: {reply.body}")

    began = time.perf_counter()
    engine.ask_all(capture.in_groups(requests, concurrency), min(concurrency, capture.REQUESTS), on_reply)
    return time.perf_counter() - began


def capture_to(
    folder: Path, engine: server.Server, control: Path, arguments: argparse.Namespace, shape: str, layers: list[int],
    count: int,
) -> dict[str, float]:  # fmt: skip
    """Capture `count` prompts into `folder`; return seconds until replied, and until everything was durable."""
    run, width, dtype = engine.name.removeprefix("aerie-"), SHAPES[shape]["hidden_size"], arguments.dtype
    shutil.rmtree(folder, ignore_errors=True)
    per_token = hidden.token_bytes(len(layers), width, dtype)
    everything = prompts(shape, count)
    mask = torch.ones(PROMPT_TOKENS, dtype=torch.uint8)
    shards = []
    for number, samples in enumerate(
        hidden.split_into_shards([PROMPT_TOKENS] * count, per_token, arguments.shard_bytes)
    ):
        shards.append(
            hidden.PartialShard(
                folder=folder, number=number, samples=samples, lengths=[PROMPT_TOKENS] * len(samples),
                input_ids=[everything[sample] for sample in samples], loss_mask=[mask] * len(samples),
                layers=len(layers), width=width, dtype=dtype,
                metadata={"ids": [str(sample) for sample in samples], "held_out": [False] * len(samples)},
            )
        )  # fmt: skip
    serial = f"{time.monotonic_ns()}"
    replied = 0.0

    def done(work: capture.Work) -> str:
        work.shard.path.unlink()  # a consumer that is as fast as the capture
        return work.journal.shard_sha256 or ""

    began = time.perf_counter()
    with capture.Watch(shards, control, done) as watch:
        works = (capture.Work(shard, f"{serial}{shard.number:05d}") for shard in shards)
        capture.send(engine, works, watch, run, control, arguments.concurrency, arguments.writer_threads)
        replied = time.perf_counter() - began
        watch.wait(engine)
    durable = time.perf_counter() - began
    shutil.rmtree(folder)
    tokens = count * PROMPT_TOKENS
    return {
        "tokens": tokens, "bytes": tokens * per_token, "replied_s": replied, "durable_s": durable,
        "replied_tokens_per_s": tokens / replied, "durable_tokens_per_s": tokens / durable,
        "durable_bytes_per_s": tokens * per_token / durable,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# The host's own rates


def rate(threads: int, seconds: float, work: Callable[[int, Callable[[], bool]], int]) -> float:
    """Bytes per second of `work(thread, running) -> bytes` by so many threads."""
    stop = time.perf_counter() + seconds
    results = [0] * threads

    def run(number: int) -> None:
        results[number] = work(number, lambda: time.perf_counter() < stop)

    began = time.perf_counter()
    pool = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    return sum(results) / (time.perf_counter() - began)


def host_rates(arguments: argparse.Namespace) -> dict[str, float]:
    """sha256, xxh3, and writing to both folders with fdatasync, by the writer's number of threads; bytes per second."""
    block = os.urandom(BLOCK)

    def digest(make: Callable[[], Any]) -> Callable[[int, Callable[[], bool]], int]:
        def work(number: int, running: Callable[[], bool]) -> int:
            total, state = 0, make()
            while running():
                state.update(block)
                total += BLOCK
            return total

        return work

    def write(folder: Path) -> Callable[[int, Callable[[], bool]], int]:
        # Like the writer: new files, laid out beforehand, synced as they grow, deleted when they are full.
        def work(number: int, running: Callable[[], bool]) -> int:
            total, path = 0, folder / f"rate-{number}"
            while running():
                with open(path, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, arguments.shard_bytes)
                    for offset in range(0, arguments.shard_bytes - BLOCK, BLOCK):
                        total += os.pwrite(file.fileno(), block, offset)
                        if offset % (64 * BLOCK) == 0:
                            os.fdatasync(file.fileno())
                    os.fdatasync(file.fileno())
                path.unlink()
            return total

        return work

    rates = {
        "sha256_one_thread": rate(1, 2, digest(hashlib.sha256)),
        "sha256": rate(arguments.writer_threads, 2, digest(hashlib.sha256)),
        "xxh3": rate(arguments.writer_threads, 1, digest(xxhash.xxh3_128)),
    }
    for name, folder in (("memory", arguments.memory), ("disk", arguments.disk)):
        folder.mkdir(parents=True, exist_ok=True)
        seconds = 5 if name == "memory" else max(5.0, arguments.seconds / 3)  # a disk's cache is full after a while
        rates[f"write_{name}"] = rate(arguments.writer_threads, seconds, write(folder))
    return rates


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    import sglang.version

    cpu = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())  # fmt: skip
    return {
        "gpu": gpu, "cpu": cpu, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
        "torch": torch.__version__, "sglang": sglang.version.__version__, "kernel": platform.release(),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, shape: str, rates: dict[str, float]) -> dict[str, Any]:
    layer_count = SHAPES[shape]["num_hidden_layers"]
    layers = hidden.resolve_layers("auto", layer_count) if layer_count > 6 else [1, 2, 3]
    root = arguments.disk / f"bench-{shape}"
    shutil.rmtree(root, ignore_errors=True)
    model = write_model(root / "model", shape, arguments.dtype)
    points: dict[str, Any] = {}
    count = 0

    def bare(name: str) -> None:
        nonlocal count
        with serve(arguments, model, root / name.replace(" ", "-"), "", layers) as engine:
            ask(engine, shape, 64, arguments.concurrency)  # compiles, warms
            if not count:
                trial = ask(engine, shape, 256, arguments.concurrency)
                count = max(256, int(arguments.seconds * 256 / trial))
            points[name] = prefill(engine)

    def prefill(engine: server.Server) -> dict[str, float]:
        seconds = ask(engine, shape, count, arguments.concurrency)
        tokens = count * PROMPT_TOKENS
        return {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}

    def captured(name: str, engine: server.Server, control: Path, folder: Path) -> None:
        points[name] = capture_to(folder / f"bench-{shape}-{name}", engine, control, arguments, shape, layers, count)
        say(f"{shape} {name}: {points[name]['durable_tokens_per_s']:,.0f} tokens/s durable")

    bare("bare")
    say(f"{shape} bare: {points['bare']['tokens_per_s']:,.0f} tokens/s")
    if {"foreign", "memory", "disk"} & set(arguments.points):
        control = root / "capture"
        with serve(arguments, model, control, "aerie_capture", layers) as engine:
            ask(engine, shape, 64, arguments.concurrency)
            if "foreign" in arguments.points:
                points["foreign"] = prefill(engine)
            for name, folder in (("memory", arguments.memory), ("disk", arguments.disk)):
                if name in arguments.points:
                    captured(name, engine, control, folder)
    if "unchecked" in arguments.points:
        control = root / "unchecked"
        with serve(arguments, model, control, "aerie_capture,aerie_unchecked", layers) as engine:
            ask(engine, shape, 64, arguments.concurrency)
            captured("unchecked", engine, control, arguments.memory)
    if "bare again" in arguments.points:
        bare("bare again")
    shutil.rmtree(root)
    return {
        "shape": SHAPES[shape],
        "layers": layers,
        "points": points,
        **ratios(points, rates, shape, layers, arguments),
    }


def ratios(points: dict[str, Any], rates: dict[str, float], shape: str, layers: list[int], arguments: Any) -> dict[str, Any]:  # fmt: skip
    """Each capture against the mean of the bare points, and against the slowest of what bounds it."""
    bares = [points[name]["tokens_per_s"] for name in ("bare", "bare again") if name in points]
    prefill = sum(bares) / len(bares)
    per_token = hidden.token_bytes(len(layers), SHAPES[shape]["hidden_size"], arguments.dtype)
    found: dict[str, Any] = {"bare_tokens_per_s": prefill, "bytes_per_token": per_token, "ratios": {}}
    for name, medium in (("foreign", ""), ("memory", "memory"), ("disk", "disk"), ("unchecked", "memory")):
        if name not in points:
            continue
        point = points[name]
        if not medium:
            found["ratios"][name] = {"of_bare": point["tokens_per_s"] / prefill}
            continue
        bounds = {"prefill": prefill, f"write_{medium}": rates[f"write_{medium}"] / per_token}
        if name != "unchecked":
            bounds["sha256"] = rates["sha256"] / per_token
        slowest = min(bounds, key=bounds.__getitem__)
        found["ratios"][name] = {
            "of_bare": point["durable_tokens_per_s"] / prefill,
            "replied_of_bare": point["replied_tokens_per_s"] / prefill,
            "of_slowest": point["durable_tokens_per_s"] / bounds[slowest],
            "slowest": slowest,
            "bounds_tokens_per_s": bounds,
        }
    return found


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    rates = host_rates(arguments)
    say("host, GB/s: " + ", ".join(f"{name} {value / 1e9:.2f}" for name, value in rates.items()))
    result = {
        "command": ["python", *sys.argv] if argv is None else argv,
        "machine": machine(),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "prompt_tokens": PROMPT_TOKENS,
        "concurrency": arguments.concurrency,
        "writer_threads": arguments.writer_threads,
        "host_bytes_per_s": rates,
        "shapes": {},
    }
    for shape in arguments.shapes:
        result["shapes"][shape] = measure(arguments, shape, rates)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(
            json.dumps(result, indent=1) + "\n"
        )  # each shape is kept, whatever the next one does
    for shape, found in result["shapes"].items():
        for name, ratio in found["ratios"].items():
            print(f"{shape:14} {name:10} " + " ".join(
                f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                for key, value in ratio.items() if not isinstance(value, dict)
            ))  # fmt: skip


if __name__ == "__main__":
    main()
