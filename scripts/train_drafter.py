"""Train the drafter: captured states → results/drafter/trained.safetensors and metrics.json.

    python scripts/train_drafter.py --hidden results/hidden --chunks 3 \
        --vocab results/drafter/vocab.safetensors --target results/target/manifest.json \
        --head results/target/head.safetensors --checkpoints results/drafter/checkpoints \
        --ttt-steps 7 --step-decay 0.8 --epochs 3 --tokens-per-batch 2048 --learning-rate 1e-4 \
        --warmup-ratio 0.015 --max-grad-norm 0.5 --dtype float32 --seed 1 --served-steps 3 \
        --eval-every-steps 100 --save-every-steps 100 \
        --output results/drafter/trained.safetensors --metrics results/drafter/metrics.json

On one GPU: `--device cuda --dtype bfloat16` (fp32 masters in the optimizer). Training can be stopped at any
time: SIGTERM or SIGINT finishes the running step, saves, and exits with status 75 (EX_TEMPFAIL of sysexits.h:
"run me again"); the same command then goes on where it stopped and ends, on a CPU bit for bit, with the files
of an unbroken run. A loss that is not finite stops the run with status 1, names the conversations of its
batch and leaves the checkpoints as they are.

The weights published are those of the evaluation with the longest accept length by position on the held-out
conversations; those of the last step where there are no held-out rows. metrics.json says which.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from aerie import acceptance, artifact, checkpoint, drafter, gpus, hidden, training, vocab
from aerie.drafter import DrafterError
from aerie.hidden import Sample
from aerie.progress import say

EXIT_RESTARTABLE = 75  # EX_TEMPFAIL: the state is saved, the same command continues
LOG_EVERY_STEPS = 10  # a line of the log and a point of the training curve; the first and the last step too
ADAM_BETAS = (0.9, 0.95)  # as the EAGLE-3 authors train; the short memory suits runs of a few hundred steps
CODE = (__file__, drafter.__file__, training.__file__, acceptance.__file__, checkpoint.__file__)
SHAPE = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
# Settings that decide the result. The others (paths, threads, how often to save) can change between restarts.
IDENTITY = (
    "ttt_steps", "step_decay", "mask_rule", "epochs", "steps", "tokens_per_batch", "learning_rate",
    "warmup_ratio", "weight_decay", "max_grad_norm", "served_steps", "eval_every_steps",
    "rope_theta", "dtype", "device", "seed", *SHAPE,
)  # fmt: skip


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # Inputs
    parser.add_argument("--hidden", type=Path, required=True, help="folder of the states, results/hidden")
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True, help="results/target/manifest.json")
    parser.add_argument("--head", type=Path, required=True, help="results/target/head.safetensors")
    # Outputs
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder that survives a restart")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--metrics", type=Path, required=True)
    # Drafter: what is left out is the target's
    parser.add_argument("--intermediate-size", type=int)
    parser.add_argument("--num-attention-heads", type=int)
    parser.add_argument("--num-key-value-heads", type=int)
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--rope-theta", type=float, help="plain RoPE in place of the target's")
    # Loss
    parser.add_argument("--ttt-steps", type=int, required=True, help="steps of the training-time test (S)")
    parser.add_argument("--step-decay", type=float, required=True, help="weight of a step over the one before")
    parser.add_argument("--mask-rule", choices=sorted(training.MASK_OFFSET), default="target")
    # Optimization
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=int, help="passes over the training conversations")
    length.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--tokens-per-batch", type=int, required=True, help="budget of a packed batch")
    parser.add_argument("--learning-rate", type=float, required=True, help="peak")
    parser.add_argument("--warmup-ratio", type=float, required=True, help="share of all steps")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--max-grad-norm", type=float, required=True, help="gradients are scaled down to this norm")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True, help="of the parameters")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's choice where left out")
    parser.add_argument("--seed", type=int, required=True, help="of initialisation and data order")
    # Evaluation, checkpoints
    parser.add_argument("--served-steps", type=int, required=True, help="draft steps of the server")
    parser.add_argument("--eval-every-steps", type=int, required=True)
    parser.add_argument("--save-every-steps", type=int, required=True)
    parser.add_argument("--keep-checkpoints", type=int, default=2, help="newest ones; the best is kept besides")
    arguments = parser.parse_args(argv)
    for name in ("epochs", "steps", "ttt_steps", "tokens_per_batch", "served_steps", "eval_every_steps",
                 "save_every_steps", "keep_checkpoints", "chunks"):  # fmt: skip
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}, expected 1 or more")
    return arguments


def require_counted_on(vocabulary: vocab.DraftVocabulary, chunks: dict[str, hidden.Chunk], path: Path) -> None:
    """Raise DrafterError where the vocabulary was counted on other tokens than these states belong to."""
    counted = vocabulary.metadata["chunks"]
    defects = [
        f"{name}: states of tokens {chunk.metadata['tokens_digest'][:12]}, "
        f"counted were {counted.get(chunk.metadata['chunk'], 'none')[:12]}"
        for name, chunk in chunks.items()
        if counted.get(chunk.metadata["chunk"]) != chunk.metadata["tokens_digest"]
    ]
    if defects:
        raise DrafterError(
            f"{path} was built from other tokens than these states:\n"
            + "\n".join(defects)
            + f"\nmake it anew with: {artifact.rebuild_command(path)}"
        )


def select_samples(
    chunks: dict[str, hidden.Chunk], ttt_steps: int, mask_rule: str
) -> tuple[list[Sample], list[Sample], dict[str, int]]:
    """Return (training samples, held-out samples, counts).

    A sample without a valid row is left out and counted, and so is one that occurs again: targets that write their own
    prompts repeat themselves. Raises DrafterError where one id stands for two different conversations.
    """
    samples: list[Sample] = []
    held_out: list[Sample] = []
    counts = dict.fromkeys(
        ("samples", "training", "held_out", "training_without_rows", "held_out_without_rows",
         "training_tokens", "training_rows", "held_out_tokens", "repeated"), 0)  # fmt: skip
    first: dict[str, tuple[str, str]] = {}  # id: (digest of its tokens, chunk)
    conflicts = []
    for name, chunk in chunks.items():
        for sample in chunk:
            counts["samples"] += 1
            digest = hidden.ids_sha256(sample.input_ids)
            known, where = first.setdefault(sample.id, (digest, name))
            if known != digest:
                conflicts.append(f"{sample.id} in {where} and {name}")
            if where != name:
                counts["repeated"] += 1
                continue
            kind, chosen = ("held_out", held_out) if sample.held_out else ("training", samples)
            T = len(sample.input_ids)
            valid = training.valid_pairs(sample.loss_mask.bool(), torch.full((T,), T), ttt_steps, mask_rule)
            if not valid.any():
                counts[f"{kind}_without_rows"] += 1
                continue
            chosen.append(sample)
            counts[kind] += 1
            counts[f"{kind}_tokens"] += T
            if kind == "training":
                counts["training_rows"] += int(valid[0].sum())
    if conflicts:
        raise DrafterError("one id for two different conversations: " + "; ".join(conflicts))
    if not samples:
        raise DrafterError(
            f"no training conversation has a valid row ({counts}): the assistant's turns are masked out or "
            "all conversations are held out; look at tokens.* and prompts.held_out_*"
        )
    return samples, held_out, counts


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)

    # ------------------------------------------------------------------------------------------------
    # stop requests, threads, device
    stop_signals: list[int] = []
    previous = {s: signal.signal(s, lambda number, _: stop_signals.append(number))
                for s in (signal.SIGTERM, signal.SIGINT)}  # fmt: skip
    try:
        with contextlib.ExitStack() as held:
            if arguments.device == "cuda":  # before CUDA looks: a server that is kept between jobs has GPUs of its own
                os.environ.update(held.enter_context(gpus.slots(1)).environment)
            status = train(arguments, stop_signals)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if status:
        raise SystemExit(status)


def train(arguments: argparse.Namespace, stop_signals: list[int]) -> int:
    """Train from the newest checkpoint, or from the start, to the end; return the exit status."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    dtype = getattr(torch, arguments.dtype)

    # ------------------------------------------------------------------------------------------------
    # data: states, draft vocabulary, target
    manifests = artifact.chunk_paths(arguments.hidden, arguments.chunks, ".json")
    chunks = {str(path): hidden.open_chunk(path) for path in manifests}
    capture = hidden.require_one_identity(chunks)
    target_manifest = artifact.read_json(arguments.target)
    vocabulary = vocab.read(arguments.vocab)
    head_digest = artifact.check(arguments.head)
    with safe_open(arguments.head, framework="pt") as file:
        head_metadata = json.loads(file.metadata()["aerie"])
        head = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    origins = {
        str(arguments.target): target_manifest["target_digest"],
        str(arguments.head): head_metadata["target_digest"],
        str(arguments.vocab): vocabulary.metadata["target_digest"],
        f"{arguments.hidden} (all chunks)": capture["target_digest"],
    }
    if len(set(origins.values())) > 1:
        raise DrafterError(
            "inputs of different targets:\n"
            + "\n".join(f"{name}: target {digest[:12]}" for name, digest in origins.items())
        )
    require_counted_on(vocabulary, chunks, arguments.vocab)
    samples, held_out, counts = select_samples(chunks, arguments.ttt_steps, arguments.mask_rule)
    training.require_within_budget([*samples, *held_out], arguments.tokens_per_batch)
    lengths = [len(sample.input_ids) for sample in samples]
    held_out_batches = [
        [held_out[number] for number in sorted(batch)]
        for batch in hidden.epoch_batches(
            [len(sample.input_ids) for sample in held_out], arguments.tokens_per_batch, arguments.seed, 0
        )
    ]

    # ------------------------------------------------------------------------------------------------
    # model
    config_path = arguments.target.parent / "model" / "config.json"
    if artifact.sha256_file(config_path) != target_manifest["files"]["config.json"]["sha256"]:
        raise DrafterError(
            f"{config_path}: changed since the target was fetched; "
            f"make it anew with: {artifact.rebuild_command(arguments.target)}"
        )
    config = drafter.config_from_target(
        json.loads(config_path.read_text()),
        captured_layers=len(capture["layers"]),
        draft_vocab_size=len(vocabulary.target_ids),
        rope_theta=arguments.rope_theta,
        **{name: getattr(arguments, name) for name in SHAPE},
    )
    model = drafter.Drafter(config, head["embed_tokens.weight"].to(dtype))
    model.initialise(head["lm_head.weight"], vocabulary.target_ids, arguments.seed)
    model.to(device, dtype)
    teacher = training.make_teacher(
        head, vocabulary.target_ids, vocabulary.members, capture["final"], head_metadata["facts"], device
    )

    # ------------------------------------------------------------------------------------------------
    # optimizer
    masters = checkpoint.masters_of(model)
    optimizer = torch.optim.AdamW(
        masters.values(), lr=arguments.learning_rate, betas=ADAM_BETAS, weight_decay=arguments.weight_decay
    )
    epochs: list[list[list[int]]] = []  # batches of each epoch, drawn when the first of them is needed

    def batches_of(epoch: int) -> list[list[int]]:
        while len(epochs) <= epoch:
            epochs.append(hidden.epoch_batches(lengths, arguments.tokens_per_batch, arguments.seed, len(epochs)))
        return epochs[epoch]

    total_steps = arguments.steps or sum(len(batches_of(epoch)) for epoch in range(arguments.epochs))

    # ------------------------------------------------------------------------------------------------
    # resume
    settings = {name: getattr(arguments, name) for name in IDENTITY}
    inputs = {
        "hidden": {path.stem: artifact.read_sidecar(path) for path in manifests},
        "vocab": vocabulary.digest,
        "head": head_digest,
        "config": target_manifest["files"]["config.json"]["sha256"],
        # A changed trainer starts anew: resuming would publish what the old one computed.
        "code": artifact.digest_of([artifact.sha256_file(path) for path in CODE]),
    }
    identity = artifact.digest_of({"settings": settings, "inputs": inputs})
    folder = arguments.checkpoints / identity[: checkpoint.IDENTITY_DIGITS]
    record = {"identity": identity, "config": config.to_json()}
    state: dict[str, Any] = {
        "step": 0, "epoch": 0, "batch": 0, "tokens": 0, "best": None, "curve": [], "evaluations": [],
    }  # fmt: skip
    finished = checkpoint.complete(folder)
    if finished:
        state = checkpoint.restore(finished[-1], identity, model, masters, optimizer)
        say(f"resuming from {finished[-1]}")

    # ------------------------------------------------------------------------------------------------
    # derived facts
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(
        f"drafter: H {config.hidden_size:,}, {config.num_attention_heads} heads of {config.head_dim}, "
        f"draft vocabulary {config.draft_vocab_size:,} of {config.vocab_size:,}, layers {capture['layers']} "
        f"({capture['final']}), {parameters:,} parameters, {arguments.dtype} on {device}"
    )
    say(
        f"data: {counts['samples']:,} conversations = {counts['training']:,} training "
        f"({counts['training_tokens']:,} tokens, {counts['training_rows']:,} valid rows) + "
        f"{counts['held_out']:,} held out ({counts['held_out_tokens']:,} tokens) + skipped without a valid row: "
        f"{counts['training_without_rows']:,} training, {counts['held_out_without_rows']:,} held out"
    )
    say(
        f"{total_steps:,} steps of at most {arguments.tokens_per_batch:,} tokens x {arguments.ttt_steps} unrolled "
        f"steps; warm-up {math.ceil(arguments.warmup_ratio * total_steps):,} steps; run {identity[:12]}"
    )

    # ------------------------------------------------------------------------------------------------
    # training loop
    started, tokens_before = time.perf_counter(), state["tokens"]
    while True:
        last_step = state["step"] >= total_steps
        position = f"training step {state['step']:,} (epoch {state['epoch']}, batch {state['batch']})"

        # once in a while: evaluate on the held-out conversations
        due = state["step"] > 0 and (last_step or state["step"] % arguments.eval_every_steps == 0)
        evaluated = state["evaluations"] and state["evaluations"][-1]["step"] == state["step"]
        new_best = False
        if held_out and due and not evaluated and not stop_signals:
            try:
                result = acceptance.evaluate(model, teacher, held_out_batches, arguments.served_steps,
                                             dtype, device, lambda: bool(stop_signals))  # fmt: skip
            except acceptance.Interrupted:
                pass  # the state is that of before the evaluation; a resumed run evaluates first
            else:
                accept_length = result["true_token"]["accept_length"]
                new_best = accept_length is not None and (
                    state["best"] is None or accept_length > state["best"]["accept_length"]
                )
                if new_best:
                    state["best"] = {"step": state["step"], "accept_length": accept_length}
                summary = {key: value for key, value in result["walk"].items() if key != "documents"}
                state["evaluations"].append({"step": state["step"], **result, "walk": summary})
                say(
                    f"held out, step {state['step']:,}: accept length {_figure(accept_length)} by position, "
                    f"{_figure(summary['accept_length'])} walked"
                )

        # once in a while: save; keep the last and the best
        stop = bool(stop_signals)
        if state["step"] > 0 and (last_step or stop or new_best or state["step"] % arguments.save_every_steps == 0):
            checkpoint.save(folder, model, masters, optimizer, state, record)
            newest = [checkpoint.step_of(path) for path in checkpoint.complete(folder)][-arguments.keep_checkpoints :]
            checkpoint.rotate(folder, {*newest, *([state["best"]["step"]] if state["best"] else [])})
        if stop:
            say(f"stopped by signal {stop_signals[0]} at step {state['step']:,}; run the same command to go on")
            return EXIT_RESTARTABLE
        if last_step:
            break

        # --------------------------------------------------------------------------------------------
        # single training step
        numbers = batches_of(state["epoch"])[state["batch"]]
        batch = drafter.pack([samples[number] for number in numbers], dtype, device)
        result = training.ttt_loss(
            model, teacher, batch, arguments.ttt_steps, arguments.step_decay, arguments.mask_rule
        )
        result.loss.backward()
        for name, parameter in model.named_parameters():
            if masters[name] is not parameter:
                masters[name].grad = parameter.grad.float()
                parameter.grad = None
        gradient_norm = torch.nn.utils.clip_grad_norm_(masters.values(), arguments.max_grad_norm)
        loss = result.loss.item()  # sync point
        if not (math.isfinite(loss) and math.isfinite(gradient_norm.item())):
            kept = checkpoint.complete(folder)
            raise DrafterError(
                f"{position}: loss is {loss}, gradient norm {gradient_norm.item()}. Conversations of the batch: "
                f"{', '.join(batch.sample_ids)}. Last good checkpoint: {kept[-1] if kept else 'none yet'}. "
                "Look at the states of these conversations, then lower --learning-rate"
            )
        learning_rate = training.learning_rate_at(
            state["step"], total_steps, arguments.learning_rate, arguments.warmup_ratio
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if masters[name] is not parameter:
                    parameter.copy_(masters[name])
        state["step"] += 1
        state["tokens"] += len(batch.input_ids)
        state["batch"] += 1
        if state["batch"] == len(batches_of(state["epoch"])):
            state["epoch"], state["batch"] = state["epoch"] + 1, 0
        # --------------------------------------------------------------------------------------------

        # log
        if state["step"] % LOG_EVERY_STEPS == 0 or state["step"] in (1, total_steps):
            state["curve"].append({
                "step": state["step"],
                "tokens": state["tokens"],
                "loss": loss,
                "step_loss": result.step_loss.tolist(),
                "step_accuracy": result.step_accuracy.tolist(),
                "learning_rate": learning_rate,
                "gradient_norm": gradient_norm.item(),
            })  # fmt: skip
            tok_per_s = (state["tokens"] - tokens_before) / (time.perf_counter() - started)
            left_s = (total_steps - state["step"]) * state["tokens"] / state["step"] / tok_per_s
            say(
                f"step {state['step']:,}/{total_steps:,}  loss {loss:.4f}  "
                f"accuracy {' '.join(f'{value:.3f}' for value in result.step_accuracy.tolist())}  "
                f"{tok_per_s:,.0f} tok/s  {int(left_s // 60)}:{int(left_s % 60):02d} left"
            )

    # ------------------------------------------------------------------------------------------------
    # publish the best weights and the figures
    chosen = state["best"]["step"] if state["best"] else state["step"]
    rule = "longest accept length by position on the held-out conversations"
    if not state["best"]:
        rule = "last step: no held-out row is valid at every served step, so there is nothing to choose by"
    path = checkpoint.path_of(folder, chosen)
    tensors, _ = checkpoint.read(path, identity)
    checkpoint.load_parameters(model, tensors, path, "model/")
    try:
        final = acceptance.evaluate(model, teacher, held_out_batches, arguments.served_steps,
                                    dtype, device, lambda: bool(stop_signals))  # fmt: skip
    except acceptance.Interrupted:
        return EXIT_RESTARTABLE  # the last checkpoint is saved: a restart comes straight back here
    description = {
        **record,
        "settings": settings,
        "inputs": inputs,
        "capture": capture,
        "selection": {"step": chosen, "rule": rule},
    }
    with artifact.publish(arguments.output) as temporary:
        weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
        save_file(weights, temporary, artifact.metadata_entry(description))
    artifact.write_json(
        arguments.metrics,
        {
            **description,
            "steps": state["step"],
            "tokens": state["tokens"],
            "data": counts,
            "coverage": vocabulary.metadata["coverage"],
            "curve": state["curve"],
            "evaluations": state["evaluations"],
            "final": final,
        },
    )
    say(
        f"{arguments.output}: weights of step {chosen:,} of {state['step']:,}; accept length "
        f"{_figure(final['true_token']['accept_length'])} by position, "
        f"{_figure(final['walk']['accept_length'])} walked with {arguments.served_steps} steps"
    )
    return 0


def _figure(value: float | None) -> str:
    return "unknown (no held-out row)" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
