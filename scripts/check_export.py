"""Check that the served drafter is the trained drafter → results/drafter/check.json.

    python scripts/check_export.py --drafter results/drafter/export --num-steps 3 --eagle-topk 1 \
        --num-draft-tokens 4 --sglang-version 0.5.20 --trained results/drafter/trained.safetensors \
        --head results/target/head.safetensors --hidden results/hidden/00000.json \
        --server-log results/logs/check_export.log --output results/drafter/check.json \
        --model results/target/model --device cpu ...

Starts SGLang with the exported folder and the probe of the capture plugin, asks the prompt of one captured
conversation, and compares: names and parameters loaded, token map, layers read back, states fed to the drafter,
logits of its first step. All gates are reported; any failed one fails the check.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from aerie import artifact, export, hidden, server
from aerie.acceptance import last_answer
from aerie.drafter import DrafterConfig
from aerie.hidden import Sample
from aerie.progress import say


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    server.add_speculation_arguments(parser, required=True)
    parser.add_argument("--sglang-version", required=True)
    parser.add_argument("--trained", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True, help="target/head.safetensors")
    parser.add_argument("--hidden", type=Path, required=True, help="manifest of a captured chunk")
    parser.add_argument("--server-log", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    server.add_arguments(parser)
    return parser.parse_args(argv)


def choose_prompt(chunk: hidden.Chunk, path: Path) -> tuple[Sample, list[int]]:
    """Return the chunk's conversation with the longest prompt, and that prompt."""
    answers = [(last_answer(sample.loss_mask.tolist()), number) for number, sample in enumerate(chunk)]
    prompts = [(answer[0], -number) for answer, number in answers if answer and answer[0] > 0]
    if not prompts:
        raise export.ExportError(f"{path}: no conversation with a prompt and an answer: nothing to ask the server")
    tokens, number = max(prompts)
    sample = chunk.sample(-number)
    return sample, sample.input_ids[:tokens].tolist()


def ask(arguments: argparse.Namespace, prompt: list[int], folder: Path) -> str:
    """Serve the export, ask one prompt with the probe on; return the server's SGLang version."""
    flags = [*server.ARM_FLAGS, *server.speculation_flags(arguments)]
    engine = server.Server(server.settings_of(arguments), flags, {}, arguments.server_log)
    wish = folder / "config.json"
    wish.write_text(json.dumps({"run": engine.name, "path": str(folder / "probe")}))
    engine.add_environment({"AERIE_PROBE_CONFIG": str(wish)})
    replies: list[server.Reply] = []
    payload: dict[str, Any] = {
        "rid": f"aerie-probe-{engine.name}",
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 2, "temperature": 0},
    }
    with engine:
        version = engine.get("/server_info")["version"]
        engine.ask_all([(None, payload)], 1, lambda _, reply: replies.append(reply))
    if replies[0].status != 200:
        raise export.ExportError(f"the server refused the prompt: HTTP {replies[0].status}: {replies[0].body}")
    return version


def read_export(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Check the exported folder; return (its tensors, digests of its files)."""
    digests = artifact.check_all(folder / name for name in ("config.json", "model.safetensors", "README.md"))
    return load_file(folder / "model.safetensors"), {Path(path).name: digest for path, digest in digests.items()}


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    exported, digests = read_export(arguments.drafter)
    artifact.check_all((arguments.trained, arguments.head))
    with safe_open(arguments.trained, framework="pt") as file:
        description = json.loads(file.metadata()["aerie"])
    with safe_open(arguments.head, framework="pt") as file:
        embedding = file.get_tensor("embed_tokens.weight")
    sample, prompt = choose_prompt(hidden.open_chunk(arguments.hidden), arguments.hidden)

    with tempfile.TemporaryDirectory() as name:
        version = ask(arguments, prompt, Path(name))
        probe = export.read_probe(Path(name) / "probe", arguments.tensor_parallel)
    gates = export.compare(
        probe,
        exported,
        load_file(arguments.trained),
        DrafterConfig(**description["config"]),
        description["capture"]["layers"],
        sample,
        embedding,
        arguments.dtype,
    )
    if version != arguments.sglang_version:
        raise export.ExportError(
            f"served by SGLang {version}, exported for {arguments.sglang_version}: rebuild the image"
        )
    for gate in gates:
        say(
            f"{'passed' if gate.passed else 'FAILED'}  {gate.name}: {gate.value:g} (limit {gate.limit:g}), {gate.detail}"
        )
    failed = [gate for gate in gates if not gate.passed]
    if failed:
        raise export.ExportError(
            f"{arguments.drafter}: the served drafter is not the trained drafter:\n"
            + "\n".join(f"{gate.name}: {gate.detail}. Usual cause: {export.CAUSES[gate.name]}" for gate in failed)
        )
    artifact.write_json(
        arguments.output,
        {
            "gates": {gate.name: gate.to_json() for gate in gates},
            "sglang_version": version,
            "export": digests,
            "conversation": sample.id,
            "prompt_tokens": len(prompt),
        },
    )


if __name__ == "__main__":
    main()
