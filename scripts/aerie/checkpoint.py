"""Resumable training state: one safetensors file per checkpoint, published like every other artifact.

    results/drafter/checkpoints/<identity>/step-00000120.safetensors (+ .sha256)
        model/<name>        the drafter's parameters
        master/<name>       fp32 masters, only where the parameters are bfloat16
        adam_mean/<name>    first moments, fp32          adam_square/<name>  second moments, fp32
        random_state        uint8, torch's CPU generator
        metadata            JSON: identity, config, and the scalars of `state`

<identity> is the beginning of a digest over all inputs and settings that shape the result, so a run never
resumes from another run's state. A file without its sidecar is unfinished: never loaded, removed at the
next save. No pickle.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from aerie import artifact

PATTERN = "step-*.safetensors"
IDENTITY_DIGITS = 12  # hex digits of the folder's name; the whole digest is in every file and compared


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be resumed from; the message says what to remove or correct."""


def path_of(folder: Path, step: int) -> Path:
    """Return the file of one step."""
    return folder / f"step-{step:08d}.safetensors"


def step_of(path: Path) -> int:
    """Return the step a checkpoint's name states."""
    return int(path.stem.removeprefix("step-"))


def complete(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder, oldest first (those with a sidecar)."""
    return sorted(path for path in folder.glob(PATTERN) if artifact.sidecar_of(path).is_file())


def masters_of(drafter: nn.Module) -> dict[str, Tensor]:
    """Return fp32 masters of all parameters: the parameters themselves where they are fp32, else copies."""
    return {
        name: parameter
        if parameter.dtype == torch.float32
        else parameter.detach().to(torch.float32, copy=True).requires_grad_()
        for name, parameter in drafter.named_parameters()
    }


def save(
    folder: Path,
    drafter: nn.Module,
    masters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    record: Mapping[str, Any],
) -> Path:
    """Publish the training state at `state["step"]`; `record` (identity, config) goes into the metadata."""
    tensors: dict[str, Tensor] = {"random_state": torch.get_rng_state()}
    for name, parameter in drafter.named_parameters():
        tensors[f"model/{name}"] = parameter.detach()
        if masters[name] is not parameter:
            tensors[f"master/{name}"] = masters[name].detach()
        moments = optimizer.state[masters[name]]
        for kind, key in (("adam_mean", "exp_avg"), ("adam_square", "exp_avg_sq")):
            tensors[f"{kind}/{name}"] = moments[key] if moments else torch.zeros_like(masters[name])
    path = path_of(folder, state["step"])
    metadata = artifact.metadata_entry({**record, "state": state})
    with artifact.publish(path) as temporary:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary, metadata)
    return path


def rotate(folder: Path, keep: Collection[int]) -> None:
    """Remove the checkpoints of all other steps, and what an interrupted save left behind."""
    for path in folder.glob(PATTERN):
        if step_of(path) not in keep:
            artifact.sidecar_of(path).unlink(missing_ok=True)  # first: without it the file is not loaded
            path.unlink()
    for path in folder.glob(f".*{artifact.PARTIAL}-*"):
        path.unlink()


def read(path: Path, identity: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Check and read a checkpoint: (tensors, metadata). Raises CheckpointError for another run's."""
    try:
        artifact.check(path)
    except artifact.ArtifactError as error:
        raise CheckpointError(
            f"{error}\n{path} is no artifact of its own: remove it and its sidecar; training then goes on "
            "from the checkpoint before it, or from the start"
        ) from error
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["aerie"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata["identity"] != identity:
        raise CheckpointError(
            f"{path}: belongs to run {metadata['identity']}, expected {identity}; remove the folder {path.parent}"
        )
    return tensors, metadata


def load_parameters(drafter: nn.Module, tensors: Mapping[str, Tensor], source: Path, prefix: str) -> None:
    """Copy `<prefix><name>` into each parameter; CheckpointError lists every missing, misshapen, surplus one."""
    expected = dict(drafter.named_parameters())
    found = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    defects = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    defects += [f"unexpected {name}" for name in sorted(found.keys() - expected.keys())]
    defects += [
        f"{name} is {found[name].dtype} {tuple(found[name].shape)}, "
        f"expected {expected[name].dtype} {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & found.keys())
        if (found[name].shape, found[name].dtype) != (expected[name].shape, expected[name].dtype)
    ]
    if defects:
        raise CheckpointError(
            f"{source} is of another drafter: " + "; ".join(defects) + f"; remove the folder {source.parent}"
        )
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(found[name])


def restore(
    path: Path,
    identity: str,
    drafter: nn.Module,
    masters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Load a checkpoint into everything that training changes; return its `state`."""
    tensors, metadata = read(path, identity)
    load_parameters(drafter, tensors, path, "model/")
    state = metadata["state"]
    for name, parameter in drafter.named_parameters():
        master = masters[name]
        if master is not parameter:
            with torch.no_grad():
                master.copy_(tensors[f"master/{name}"])
        # Clones: what was read is a view into the mapped file, the optimizer writes in place.
        optimizer.state[master] = {
            "step": torch.tensor(float(state["step"])),
            "exp_avg": tensors[f"adam_mean/{name}"].to(master.device, copy=True),
            "exp_avg_sq": tensors[f"adam_square/{name}"].to(master.device, copy=True),
        }
    torch.set_rng_state(tensors["random_state"])
    return state
