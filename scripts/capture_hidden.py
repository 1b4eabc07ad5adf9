"""Capture the hidden states of one chunk: results/tokens/{chunk}.safetensors → results/hidden/{chunk}/ and {chunk}.json.

    python scripts/capture_hidden.py --tokens results/tokens/00000.safetensors --head results/target/head.safetensors \
        --layers auto --final post_norm --state-dtype bfloat16 --shard-bytes 4294967296 --sglang-version 0.5.20 \
        --concurrency 8 --server-log results/logs/server.log --output results/hidden/00000.json \
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
import random
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from aerie import artifact, hidden, server, target, tokens
from aerie.progress import progress, say

TOP_LOGPROBS = 5  # of the server's distribution after each sample, compared with lm_head · final
READY_S = 30.0  # the ready file is written before the server answers; this is for a slow shared folder
CAUSES = (
    "usual causes: another lm_head or final norm than the server's (quantised or scaled logits), final states of the "
    "wrong convention, rows of another request"
)


class CaptureError(RuntimeError):
    """A capture that cannot be trusted; nothing was published, what is durable is kept for the next run."""


def wait_ready(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Return what the capturing server read back; raise CaptureError where it differs from what was asked."""
    deadline = time.monotonic() + READY_S
    while not path.is_file():
        if time.monotonic() > deadline:
            raise CaptureError(
                f"{path}: the server is up but did not announce the capture; the image lacks the capture patch, "
                f"or SGLANG_PLUGINS hides it; rebuild the image"
            )
        time.sleep(0.2)
    ready = json.loads(path.read_text())
    differences = [
        f"{key}: expected {value!r}, the server read back {ready.get(key)!r}"
        for key, value in expected.items()
        if ready.get(key) != value
    ]
    if differences:
        raise CaptureError("the server does not capture what was asked:\n" + "\n".join(differences))
    return ready


class Replies:
    """The server's top log-probabilities after each sample of a shard, kept beside the journal for a resume."""

    def __init__(self, shard: hidden.PartialShard) -> None:
        self.path = shard.folder / f"{shard.number:05d}.replies.jsonl"
        self.top: dict[int, list[Any]] = {}
        if self.path.is_file():
            for line in self.path.read_text(errors="replace").splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue  # cut short by a kill: the sample is captured again
                self.top[entry["sample"]] = entry["top"]

    def keep(self, sample: int, top: list[Any]) -> None:
        """Append one sample's answer."""
        self.top[sample] = top
        with open(self.path, "a") as file:
            file.write(artifact.canonical_json({"sample": sample, "top": top}) + "\n")


def refusal(body: Any, sample_id: str, length: int) -> str | None:
    """Return why an answer does not acknowledge its sample, None where it does."""
    meta = body.get("meta_info", {}) if isinstance(body, dict) else {}
    reason = (meta.get("finish_reason") or {}).get("type")
    if reason == "abort":
        return f"{sample_id}: the server aborted the request: {meta['finish_reason']}"
    if meta.get("prompt_tokens") != length:
        return f"{sample_id}: sent {length:,} tokens, the server counted {meta.get('prompt_tokens')}: {body}"
    tickets = meta.get("aerie_capture") or [None]
    if tickets[0] is None:
        return f"{sample_id}: the server answered without capturing"
    if tickets[0]["state"] != "durable" or tickets[0]["tokens"] != length:
        return f"{sample_id}: {tickets[0].get('error')} (state {tickets[0]['state']}, {tickets[0]['tokens']} tokens)"
    return None


def lay_out(arguments: argparse.Namespace, chunk: tuple[Any, Any], metadata: dict[str, Any], folder: Path) -> list[hidden.PartialShard]:  # fmt: skip
    """Return the shards of a chunk, laid out on disk or taken up from an earlier run."""
    tensors, described = chunk
    starts = tensors["cu_seqlens"].tolist()
    spans = [slice(begin, end) for begin, end in itertools.pairwise(starts)]
    lengths = [span.stop - span.start for span in spans]
    layers, width = len(metadata["layers"]), metadata["hidden_size"]
    token_bytes = (layers + 1) * width * hidden.ITEM_BYTES[metadata["dtype"]]
    shards = [
        hidden.PartialShard(
            folder=folder,
            number=number,
            samples=samples,
            lengths=[lengths[sample] for sample in samples],
            input_ids=[tensors["input_ids"][spans[sample]] for sample in samples],
            loss_mask=[tensors["loss_mask"][spans[sample]] for sample in samples],
            layers=layers,
            width=width,
            dtype=metadata["dtype"],
            metadata={
                **metadata,
                "shard": number,
                "ids": [described["ids"][sample] for sample in samples],
                "held_out": [described["held_out"][sample] for sample in samples],
            },
        )
        for number, samples in enumerate(hidden.split_into_shards(lengths, token_bytes, arguments.shard_bytes))
    ]
    return shards


def capture(
    engine: server.Server, shards: list[hidden.PartialShard], run: str, control: Path, concurrency: int
) -> list[Replies]:
    """Send every sample that is not durable yet; return the server's answers per shard."""
    replies, requests, done, total = [], [], 0, 0
    for shard in shards:
        durable, kept = shard.prepare(), Replies(shard)
        replies.append(kept)
        hold = control / f"{shard.number:05d}.json"
        temporary = hold.with_suffix(".new")
        temporary.write_text(artifact.canonical_json(shard.control(run)))
        temporary.rename(hold)
        total += sum(shard.lengths)
        for position, length in enumerate(shard.lengths):
            if position in durable and position in kept.top:
                done += length
                continue
            payload = {
                "input_ids": shard.input_ids[position].tolist(),
                "rid": f"aerie-{run}-{shard.number:05d}-{position:06d}-0",
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "top_logprobs_num": TOP_LOGPROBS,
            }
            requests.append(((shard, kept, position), payload))
    if done:
        say(f"taking up an unfinished capture: {done:,} of {total:,} tokens are durable")
    counter = progress(total, "capturing", "tokens", done)

    def on_reply(key: tuple[hidden.PartialShard, Replies, int], reply: server.Reply) -> None:
        shard, kept, position = key
        sample_id, length = shard.metadata["ids"][position], shard.lengths[position]
        defect = f"{sample_id}: HTTP {reply.status}: {reply.body}" if reply.status != 200 else refusal(reply.body, sample_id, length)  # fmt: skip
        if defect:
            raise CaptureError(defect)  # the first refusal ends the run: the rest would follow it
        (top,) = reply.body["meta_info"]["output_top_logprobs"]
        kept.keep(position, [[logprob, token] for logprob, token, *_ in top])
        counter.update(length)

    engine.ask_all(requests, concurrency, on_reply)
    counter.close()
    return replies


def self_check(arguments: argparse.Namespace, shards: list[hidden.PartialShard], replies: list[Replies], head: hidden.Head, greedy: bool) -> dict[str, Any]:  # fmt: skip
    """Return the gates of a finished chunk: {name: {"value", "limit", "passed"}}."""
    largest, agreed, asked, infinite = 0.0, 0, 0, 0
    generator = random.Random(0)
    for shard, kept in zip(shards, replies, strict=True):
        reader = hidden.Shard(shard.path)
        final, aux = reader.tensors["final"], reader.tensors["aux"]
        ids, mask = reader.tensors["input_ids"], reader.tensors["loss_mask"]
        for begin in range(0, len(final), 4096):
            rows = slice(begin, begin + 4096)
            infinite += int((~torch.isfinite(final[rows])).sum() + (~torch.isfinite(aux[rows])).sum())
        for position, top in kept.top.items():
            last = reader.starts[position + 1] - 1
            largest = max(largest, hidden.logprob_difference(head.logits(final[last : last + 1], arguments.final)[0], top))  # fmt: skip
        # Row j predicts token j+1: a generated token that has a row before it in the same sample.
        firsts = set(reader.starts)
        rows = [j for j in range(len(ids) - 1) if mask[j + 1] and (j + 1) not in firsts]
        rows = sorted(generator.sample(rows, min(len(rows), math.ceil(arguments.checked_rows / len(shards)))))
        for begin in range(0, len(rows), 256):
            part = torch.tensor(rows[begin : begin + 256])
            agreed += hidden.greedy_agreement(head.logits(final[part], arguments.final), ids[part + 1])
            asked += len(part)
    gates = {
        "finite": {"value": infinite, "limit": 0, "passed": infinite == 0},
        "logprob_difference": {"value": round(largest, 6), "limit": arguments.max_logprob_difference,
                               "passed": largest <= arguments.max_logprob_difference},
    }  # fmt: skip
    if greedy and asked:
        agreement = agreed / asked
        gates["greedy_agreement"] = {"value": round(agreement, 6), "limit": arguments.min_greedy_agreement,
                                     "rows": asked, "passed": agreement >= arguments.min_greedy_agreement}  # fmt: skip
    return gates


def publish(arguments: argparse.Namespace, shards: list[hidden.PartialShard], journal: list[dict[int, hidden.JournalLine]], metadata: dict[str, Any], gates: dict[str, Any]) -> None:  # fmt: skip
    """Move the finished shards into place and write the manifest last."""
    final_folder = arguments.output.with_suffix("")
    if final_folder.exists():
        shutil.rmtree(final_folder)
    final_folder.mkdir(parents=True)
    entries, samples = [], []
    for shard, durable in zip(shards, journal, strict=True):
        size = shard.path.stat().st_size
        digest = artifact.seal(shard.path, final_folder / shard.path.name)
        entries.append({"name": shard.path.name, "sha256": digest, "bytes": size, "tokens": sum(shard.lengths)})
        samples += [
            {"id": shard.metadata["ids"][position], "held_out": shard.metadata["held_out"][position],
             "shard": shard.number, "position": position, **asdict(durable[position])}
            for position in range(len(shard.lengths))
        ]  # fmt: skip
    for sample in samples:
        del sample["sample"]
    artifact.write_json(arguments.output, {"metadata": metadata, "shards": entries, "samples": samples, "gates": gates})
    shutil.rmtree(shards[0].folder)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True, help="target/head.safetensors")
    parser.add_argument("--layers", nargs="+", required=True, help="HF indices, or auto")
    parser.add_argument("--final", choices=["post_norm", "pre_norm"], required=True)
    parser.add_argument("--state-dtype", choices=sorted(hidden.DTYPES), required=True)
    parser.add_argument("--shard-bytes", type=int, required=True)
    parser.add_argument("--sglang-version", required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--max-logprob-difference", type=float, required=True, help="nats")
    parser.add_argument("--min-greedy-agreement", type=float, required=True, help="share of rows, 0 to 1")
    parser.add_argument("--checked-rows", type=int, required=True, help="rows of a chunk checked for agreement")
    parser.add_argument("--server-log", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    server.add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    manifest = target.check_model(Path(arguments.model).parent / "manifest.json")
    chunk = tokens.read(arguments.tokens)
    described = chunk[1]
    for key in ("target_digest", "tokenizer_digest", "template_digest"):
        if described[key] != manifest[key]:
            raise CaptureError(
                f"{arguments.tokens}: {key} {described[key][:12]}, the target has {manifest[key][:12]}; "
                f"make it anew with: {artifact.rebuild_command(arguments.tokens)}"
            )
    artifact.check(arguments.head)
    with safe_open(arguments.head, framework="pt") as file:
        head = hidden.Head(file.get_tensor("lm_head.weight"), file.get_tensor("norm.weight"), manifest["facts"]["rms_norm_eps"])  # fmt: skip
    asked = arguments.layers[0] if arguments.layers == ["auto"] else [int(index) for index in arguments.layers]
    layers = hidden.resolve_layers(asked, manifest["facts"]["num_hidden_layers"])

    unfinished = arguments.output.with_suffix(artifact.PARTIAL)
    engine = server.Server(server.settings_of(arguments), server.CAPTURE_FLAGS, {}, arguments.server_log)
    run = engine.name.removeprefix("aerie-")
    control = unfinished / f"control-{run}"
    control.mkdir(parents=True)
    for stale in unfinished.glob("control-*"):
        if stale != control:
            shutil.rmtree(stale)
    wish = {"run": run, "layers": layers, "final": arguments.final}
    order = control / "capture.json"
    order.write_text(
        json.dumps(
            {**wish, "ready_path": str((control / "ready.json").resolve()), "control_dir": str(control.resolve())}
        )
    )
    engine.add_environment({"AERIE_CAPTURE_CONFIG": str(order.resolve())})
    try:
        with engine:
            ready = wait_ready(
                control / "ready.json",
                {**wish, "sglang_version": arguments.sglang_version, "dtype": arguments.state_dtype,
                 "num_hidden_layers": manifest["facts"]["num_hidden_layers"],
                 "hidden_size": manifest["facts"]["hidden_size"]},
            )  # fmt: skip
            metadata = {
                "format": hidden.FORMAT,
                "chunk": arguments.output.stem,
                "tokens_digest": artifact.read_sidecar(arguments.tokens),
                "seed": arguments.seed,
                "tensor_parallel": arguments.tensor_parallel,
                "greedy": described["greedy"],
                "layers": layers,
                "final": arguments.final,
                "dtype": ready["dtype"],
                **{key: ready[key] for key in ("hidden_size", "sglang_version", "patch_digest", "model_class")},
                **{key: manifest[key] for key in ("target_digest", "tokenizer_digest", "template_digest")},
            }
            shards = lay_out(arguments, chunk, metadata, unfinished)
            replies = capture(engine, shards, run, control, arguments.concurrency)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise CaptureError(
            f"{unfinished}: no room for the states of this chunk ({artifact.free_bytes(unfinished):,} bytes free); "
            "free some, or set results_dir to a larger disk; what is durable is kept and the next run continues"
        ) from error

    journal = [shard.durable() for shard in shards]
    missing = [
        shard.metadata["ids"][position]
        for shard, durable in zip(shards, journal, strict=True)
        for position in range(len(shard.lengths))
        if position not in durable
    ]
    if missing:
        raise CaptureError(
            f"{len(missing)} samples were acknowledged, but their rows on disk do not hash to the journal: "
            f"{', '.join(missing[:5])} ...; a faulty disk, or two jobs on one chunk; run it again"
        )
    gates = self_check(arguments, shards, replies, head, described["greedy"])
    failed = [f"{name}: {gate['value']} (limit {gate['limit']})" for name, gate in gates.items() if not gate["passed"]]
    if failed:
        os.replace(unfinished, unfinished.with_name(f"{arguments.output.stem}.refused{artifact.PARTIAL}"))
        raise CaptureError("the captured states fail their self-checks: " + "; ".join(failed) + f"\n{CAUSES}")
    publish(arguments, shards, journal, metadata, gates)
    say(f"{arguments.output}: {sum(sum(shard.lengths) for shard in shards):,} tokens in {len(shards)} shard(s); "
        + ", ".join(f"{name} {gate['value']}" for name, gate in gates.items()))  # fmt: skip


if __name__ == "__main__":
    main()
