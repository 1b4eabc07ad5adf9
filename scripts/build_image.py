"""containers/ → the SGLang image and its record.

    python scripts/build_image.py --variant cpu --sglang-version 0.5.20 --base auto --cache-dir .cache \\
        --definition containers/sglang.def --lock containers/cpu.lock \\
        --output results/demo/container/sglang.sif --record results/demo/container/image.json

The record names what the image was built from and what is in it. Its `content_sha256` is equal for two builds
of the same locks, base, definition and plugins; `sif_sha256` is not, because Apptainer files carry the time of
their build.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import time
from pathlib import Path

from aerie.artifact import publish, read_sidecar, write_json
from aerie.container import ContainerError, apptainer_version
from aerie.image import Recipe, build, stopwatch
from aerie.progress import say


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build the SGLang image.")
    parser.add_argument("--variant", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--sglang-version", required=True, help="what the lock must pin")
    parser.add_argument("--definition", type=Path, default=Path("containers/sglang.def"))
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--torch-cpu-lock", type=Path, default=Path("envs/torch-cpu.lock"))
    parser.add_argument("--torch-cuda-lock", type=Path, default=Path("envs/torch-cuda.lock"))
    parser.add_argument("--capture", type=Path, default=Path("containers/capture"))
    parser.add_argument("--cpu-kernels", type=Path, default=Path("containers/cpu_kernels"), help="variant cpu only")
    parser.add_argument("--base", default="auto", help="auto | mmdebstrap | docker://NAME@sha256:DIGEST | FILE.tar")
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="the .sif")
    parser.add_argument("--record", type=Path, required=True, help="the .json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_args(argv)
    start = time.monotonic()
    recipe = Recipe(
        variant=arguments.variant,
        definition=arguments.definition,
        lock=arguments.lock,
        torch_cpu_lock=arguments.torch_cpu_lock,
        torch_cuda_lock=arguments.torch_cuda_lock,
        plugins=(arguments.capture, arguments.cpu_kernels) if arguments.variant == "cpu" else (arguments.capture,),
        base=arguments.base,
        sglang_version=arguments.sglang_version,
    )
    tell = stopwatch(say)
    try:
        version = apptainer_version()
        with publish(arguments.output) as temporary:
            record = build(recipe, arguments.cache_dir, temporary, tell)
    except ContainerError as error:
        say(f"build_image: {error}")
        return 1
    record["sif_sha256"] = read_sidecar(arguments.output)
    record["apptainer_version"] = version
    record["volatile"] = {
        "built_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "seconds": round(time.monotonic() - start, 1),
        "sif_bytes": arguments.output.stat().st_size,
    }
    write_json(arguments.record, record)
    tell(f"image: {arguments.output}, content sha256 {record['content_sha256']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
