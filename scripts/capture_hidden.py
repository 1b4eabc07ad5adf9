"""Capture the hidden states of one chunk: results/tokens/{chunk}.safetensors → results/hidden/{chunk}/ and {chunk}.json.

    python scripts/capture_hidden.py --tokens results/tokens/00000.safetensors --head results/target/head.safetensors \
        --layers auto --final post_norm --state-dtype bfloat16 --shard-bytes 4294967296 --sglang-version 0.5.20 \
        --concurrency 8 --writer-threads 4 --server-log results/logs/server.log --output results/hidden/00000.json \
        --model results/target/model --device cpu ...

The server writes the states itself (containers/capture); this client lays out the files, sends every sample once
with max_new_tokens 1, and publishes nothing before all checks hold. Unfinished work lies in {chunk}.partial/ and a
later run takes it up: only samples without a durable journal line are sent again.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import math
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from aerie import artifact, capture, hidden, server, target, tokens
from aerie.capture import CaptureError
from aerie.progress import say

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True, help="target/head.safetensors")
    parser.add_argument("--layers", nargs="+", required=True, help="HF indices, or auto")
    parser.add_argument("--final", choices=["post_norm", "pre_norm"], required=True)
    parser.add_argument("--state-dtype", choices=sorted(hidden.DTYPES), required=True)
    parser.add_argument("--shard-bytes", type=int, required=True)
    parser.add_argument("--sglang-version", required=True)
    parser.add_argument("--concurrency", type=int, required=True, help="requests in flight")
    parser.add_argument("--writer-threads", type=int, required=True, help="shards the server writes at the same time")
    parser.add_argument(
        "--deterministic", choices=["yes", "no"], required=True, help="one prompt per forward pass, fixed reductions"
    )
    parser.add_argument("--repeated-samples", type=int, required=True, help="captured a second time and compared")
    parser.add_argument("--max-logprob-difference", type=float, required=True, help="nats")
    parser.add_argument("--min-greedy-agreement", type=float, required=True, help="share of rows, 0 to 1")
    parser.add_argument("--checked-rows", type=int, required=True, help="rows of a shard checked for agreement")
    parser.add_argument("--server-log", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    server.add_arguments(parser)
    server.add_warm_arguments(parser)
    return parser.parse_args(argv)


def read_chunk(arguments: argparse.Namespace, manifest: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:  # fmt: skip
    """Return the tensors and the description of the chunk; refuse tokens of another target."""
    tensors, described = tokens.read(arguments.tokens)
    for key in ("target_digest", "tokenizer_digest", "template_digest"):
        if described[key] != manifest[key]:
            raise CaptureError(
                f"{arguments.tokens}: {key} {described[key][:12]}, the target has {manifest[key][:12]}; "
                f"make it anew with: {artifact.rebuild_command(arguments.tokens)}"
            )
    return tensors, described


def lay_out(tensors: dict[str, torch.Tensor], described: dict[str, Any], metadata: dict[str, Any], folder: Path, shard_bytes: int) -> list[hidden.PartialShard]:  # fmt: skip
    """Return the shards of a chunk; nothing is written yet."""
    starts = tensors["cu_seqlens"].tolist()
    spans = [slice(begin, end) for begin, end in itertools.pairwise(starts)]
    lengths = [span.stop - span.start for span in spans]
    layers, width, dtype = len(metadata["layers"]), metadata["hidden_size"], metadata["dtype"]
    return [
        hidden.PartialShard(
            folder=folder,
            number=number,
            samples=samples,
            lengths=[lengths[sample] for sample in samples],
            input_ids=[tensors["input_ids"][spans[sample]] for sample in samples],
            loss_mask=[tensors["loss_mask"][spans[sample]] for sample in samples],
            layers=layers,
            width=width,
            dtype=dtype,
            metadata={
                **metadata,
                "shard": number,
                "ids": [described["ids"][sample] for sample in samples],
                "held_out": [described["held_out"][sample] for sample in samples],
            },
        )
        for number, samples in enumerate(
            hidden.split_into_shards(lengths, hidden.token_bytes(layers, width, dtype), shard_bytes)
        )
    ]


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    manifest = target.check_model(Path(arguments.model).parent / "manifest.json")
    tensors, described = read_chunk(arguments, manifest)
    artifact.check(arguments.head)
    with safe_open(arguments.head, framework="pt") as file:
        head = hidden.Head(file.get_tensor("lm_head.weight"), file.get_tensor("norm.weight"), manifest["facts"]["rms_norm_eps"])  # fmt: skip
    asked = arguments.layers[0] if arguments.layers == ["auto"] else [int(index) for index in arguments.layers]
    layers = hidden.resolve_layers(asked, manifest["facts"]["num_hidden_layers"])
    deterministic = arguments.deterministic == "yes"
    wish = {"layers": layers, "final": arguments.final}

    def order(run: str, folder: Path) -> dict[str, str]:
        path = folder / "capture.json"
        path.write_text(
            json.dumps(
                {**wish, "run": run, "ready_path": str((folder / "ready.json").resolve()),
                 "control_dir": str(folder.resolve()), "dtype": arguments.state_dtype,
                 "threads": arguments.writer_threads}
            )
        )  # fmt: skip
        return {"AERIE_CAPTURE_CONFIG": str(path.resolve())}

    unfinished = arguments.output.with_suffix(artifact.PARTIAL)
    per_token = hidden.token_bytes(len(layers), manifest["facts"]["hidden_size"], arguments.state_dtype)
    capture.require_room(unfinished, len(tensors["input_ids"]) * per_token)
    flags = server.capture_flags(arguments.device, deterministic)
    same = {**wish, "dtype": arguments.state_dtype, "threads": arguments.writer_threads}
    try:
        with (
            capture.lock(unfinished) as control_folder,
            server.borrow(
                server.settings_of(arguments),
                flags,
                order,
                arguments.server_log,
                control_folder,
                arguments.warm_idle_s,
                arguments.warm_folder,
                same,
            ) as engine,
        ):
            run, control = engine.run, engine.folder
            ready = capture.wait_ready(
                control / "ready.json",
                {**wish, "run": run, "sglang_version": arguments.sglang_version,
                 "stored_dtype": arguments.state_dtype,
                 "num_hidden_layers": manifest["facts"]["num_hidden_layers"],
                 "hidden_size": manifest["facts"]["hidden_size"]},
            )  # fmt: skip
            computed = hidden.DTYPES[ready["dtype"]]
            metadata = {
                "format": hidden.FORMAT,
                "chunk": arguments.output.stem,
                "tokens_digest": artifact.read_sidecar(arguments.tokens),
                "seed": arguments.seed,
                "tensor_parallel": arguments.tensor_parallel,
                "deterministic": deterministic,
                "greedy": described["greedy"],
                "dtype": arguments.state_dtype,
                "computed_dtype": ready["dtype"],
                **wish,
                **{key: ready[key] for key in ("hidden_size", "sglang_version", "patch_digest", "model_class")},
                **{key: manifest[key] for key in ("target_digest", "tokenizer_digest", "template_digest")},
            }
            shards = lay_out(tensors, described, metadata, unfinished, arguments.shard_bytes)
            serial = f"{zlib.crc32(str(arguments.output.resolve()).encode()):010d}"  # a warm server serves many chunks

            def check(work: capture.Work) -> capture.Measured:
                rows = math.ceil(arguments.checked_rows / len(shards))
                return capture.check(work, head, arguments.final, computed, described["greedy"], rows)

            with capture.Watch(shards, control, check) as watch:
                laid_out = (capture.Work(shard, f"{serial}{shard.number:05d}") for shard in shards)
                capture.send(engine, laid_out, watch, run, control, arguments.concurrency, arguments.writer_threads)
                measured, works = watch.wait(engine), watch.works
            record: dict[str, Any] = {"metadata": metadata}
            if arguments.repeated_samples:
                name = f"{serial}{capture.REPEAT_NUMBER:05d}"
                record["repeat"] = capture.repeat(engine, works, control, run, name, arguments.repeated_samples, computed)  # fmt: skip
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise CaptureError(
            f"{unfinished}: cannot be written ({error.strerror}; {artifact.free_bytes(unfinished):,} bytes free); "
            "make room there, or set results_dir to another disk; what is durable is kept and the next run continues"
        ) from error

    limits = capture.Limits(arguments.max_logprob_difference, arguments.min_greedy_agreement)
    record["gates"] = gates = capture.gates_of(measured, limits)
    if deterministic and arguments.repeated_samples:
        found = record["repeat"]["largest_difference"]
        gates["repeatable"] = {"value": found, "limit": 0.0, "passed": record["repeat"]["bitwise"]}
    errors = [each.float8_error for each in measured if each.float8_error is not None]
    if errors:
        record["float8_error"] = max(errors)
    failed = [f"{name}: {gate['value']} (limit {gate['limit']})" for name, gate in gates.items() if not gate["passed"]]
    if failed:
        refused = unfinished.with_name(f"{arguments.output.stem}.refused{artifact.PARTIAL}")
        shutil.rmtree(refused, ignore_errors=True)
        os.replace(unfinished, refused)
        raise CaptureError("the captured states fail their self-checks: " + "; ".join(failed) + f"\n{capture.CAUSES}")
    capture.publish(arguments.output, works, record)
    say(f"{arguments.output}: {sum(sum(shard.lengths) for shard in shards):,} tokens in {len(shards)} shard(s); "
        + ", ".join(f"{name} {gate['value']}" for name, gate in gates.items()))  # fmt: skip


if __name__ == "__main__":
    main()
