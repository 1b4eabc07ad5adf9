"""Export probe: what a served EAGLE-3 drafter really loaded, and one forward of it.

On a server with --speculative-algorithm EAGLE3 and AERIE_PROBE_CONFIG = {"run", "path"}:

    load_weights     → <path>/draft-params-rank{r}.safetensors  parameters as SGLang holds them
    first extend of  → <path>/probe.safetensors                 input_ids, positions, aux, logits
    "aerie-probe-*"  → <path>/probe.json                        names, layers, shapes

SGLang skips weight names it does not know, without a word. The probe therefore watches each
parameter's loader and reports which offered names arrived, which were left over and which
parameters nobody filled.

probe.json is written after loading ("state": "loaded") and again after the forward ("probed").

Legend: T tokens of the prompt, K captured layers, D target width, R draft vocabulary.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from aerie_capture.hooks import LAYER_FLAG, RUNNER_TARGET, find_capture_module
from aerie_capture.protocol import (
    PROBE_VARIABLE,
    patch_digest,
    read_probe_config,
    sync_folder,
    write_atomically,
)

DRAFT_TARGET = "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3"
RID_PREFIX = "aerie-probe-"
OFFSETS, MASK = "d2t", "t2d"  # read into hot_token_id; not read by SGLang at all

# Shards that one fused parameter needs before it is whole (name ending → loader's shard ids).
FUSED_SHARDS = {
    ".qkv_proj.weight": {"q", "k", "v"},
    ".gate_up_proj.weight": {"0", "1"},
}

_probe: "Probe | None" = None


def register() -> None:
    """Register the probe hooks; SGLang calls `activate` once per process."""
    global _probe
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _probe = Probe(read_probe_config(Path(os.environ[PROBE_VARIABLE])))
    HookRegistry.register(RUNNER_TARGET, read_target_layers, HookType.AFTER)
    HookRegistry.register(DRAFT_TARGET + ".load_weights", watch_loading, HookType.AROUND)
    HookRegistry.register(DRAFT_TARGET + ".forward", watch_forward, HookType.AROUND)


def read_target_layers(result: Any, runner: Any) -> None:
    """AFTER ModelRunner.init_attention_backends of the target: the indices SGLang will feed."""
    if not runner.is_draft_worker:
        _probe.target(runner.model)


def watch_loading(original: Callable, model: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND load_weights: which offered names reach which parameter."""
    record = LoadingRecord(model)
    with record:
        result = original(model, record.offer(weights), *args, **kwargs)
    _probe.loaded(model, record)
    return result


def watch_forward(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """AROUND forward: keep the first extend of a probe request."""
    inputs = _probe.inputs(args, kwargs)
    output = original(*args, **kwargs)
    if inputs is not None:
        _probe.probed(inputs, output)
    return output


class LoadingRecord:
    """Names offered to a loader, and the parameters each of them arrived in.

    While the record is entered, every parameter carries a loader that notes the name being
    offered and then does what the parameter's own loader (or SGLang's default) does.
    """

    def __init__(self, model: Any) -> None:
        self.offered: list[str] = []
        self.arrived: dict[str, list[str]] = {}
        self.shards: dict[str, set[str]] = {}
        self._current = ""
        self._parameters = dict(model.named_parameters())
        self._own: list[tuple[Any, Any]] = []

    def offer(self, weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._current = name
            self.offered.append(name)
            yield name, tensor

    def __enter__(self) -> "LoadingRecord":
        from sglang.srt.model_loader.weight_utils import default_weight_loader

        for name, parameter in self._parameters.items():
            own = getattr(parameter, "weight_loader", None)
            self._own.append((parameter, own))
            _set_loader(parameter, self._noting(name, own or default_weight_loader))
        return self

    def __exit__(self, *failure: Any) -> None:
        for parameter, own in self._own:
            _set_loader(parameter, own)

    def not_loaded(self) -> list[str]:
        """Parameters that no offered name filled, or filled only in part."""
        missing = []
        for name in self._parameters:
            expected = next((shards for ending, shards in FUSED_SHARDS.items() if name.endswith(ending)), set())
            if name not in self.shards or not expected <= self.shards[name]:
                missing.append(name)
        return missing

    def _noting(self, parameter_name: str, loader: Callable) -> Callable:
        def load(parameter: Any, tensor: torch.Tensor, *shard: Any, **kwargs: Any) -> Any:
            self.arrived.setdefault(self._current, []).append(parameter_name)
            self.shards.setdefault(parameter_name, set()).update(map(str, shard))
            return loader(parameter, tensor, *shard, **kwargs)

        return load


class Probe:
    """What was seen so far; every rank dumps its parameters, rank 0 writes the rest."""

    def __init__(self, config: Any) -> None:
        self._folder = config.path
        self._facts: dict = {"run": config.run, "state": "loaded", "patch_digest": patch_digest()}
        self._hot_token_id: torch.Tensor | None = None

    def target(self, model: Any) -> None:
        module, _, defects = find_capture_module(model)
        layers = [] if module is None else sorted(module.layers_to_capture or ())
        flagged = [] if module is None else _flagged(module)
        self._facts["target"] = {
            "class": type(model).__name__,
            "layers_to_capture": layers,
            "flagged_layers": flagged,
            "defects": defects,
        }
        self._publish()

    def loaded(self, model: Any, record: LoadingRecord) -> None:
        special = [name for name in record.offered if name.endswith((OFFSETS, MASK))]
        hot = getattr(model, "hot_token_id", None)
        self._hot_token_id = None if hot is None else hot.detach().cpu()
        not_loaded = record.not_loaded()
        parameters = dict(model.named_parameters())
        self._facts["draft"] = {
            "class": type(model).__name__,
            "offered": sorted(record.offered),
            "consumed": {name: record.arrived[name] for name in sorted(record.arrived)},
            "offsets": [name for name in special if name.endswith(OFFSETS) and hot is not None],
            "ignored": [name for name in special if name.endswith(MASK)],
            "left_over": sorted(
                name
                for name in record.offered
                if name not in record.arrived
                and not name.endswith(MASK)
                and not (name.endswith(OFFSETS) and hot is not None)
            ),
            "not_loaded": sorted(not_loaded),
            "parameters": {
                name: {"shape": list(value.shape), "dtype": _dtype_name(value)}
                for name, value in sorted(parameters.items())
            },
        }
        # What nobody filled is uninitialised memory: its name is reported, its bytes are not.
        filled = {
            name: value.detach().cpu().contiguous() for name, value in parameters.items() if name not in not_loaded
        }
        rank = _rank()
        self._folder.mkdir(parents=True, exist_ok=True)
        _save(self._folder / f"draft-params-rank{rank}.safetensors", filled)
        self._publish()

    def inputs(self, args: tuple, kwargs: dict) -> dict | None:
        """Inputs of the first probe extend, sliced to its request; None for any other forward."""
        if self._facts["state"] == "probed":
            return None
        names = ("model", "input_ids", "positions", "forward_batch")
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        batch = values["forward_batch"]
        position = next(
            (
                index
                for index, rid in enumerate(batch.rids or ())
                if isinstance(rid, str) and rid.startswith(RID_PREFIX)
            ),
            None,
        )
        lengths = getattr(batch, "extend_seq_lens_cpu", None)
        if position is None or not batch.forward_mode.is_extend() or lengths is None:
            return None
        start = sum(int(length) for length in lengths[:position])
        rows = slice(start, start + int(lengths[position]))
        tensors = {
            "input_ids": values["input_ids"][rows],  # (T,)
            "positions": values["positions"][rows],  # (T,)
            "aux": batch.spec_info.hidden_states[rows],  # (T, K*D)
        }
        return {
            "rid": batch.rids[position],
            "position": position,
            "prefix": int(batch.extend_prefix_lens_cpu[position]),
            "tensors": {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()},
        }

    def probed(self, inputs: dict, output: Any) -> None:
        if _rank() != 0:
            return
        position = inputs["position"]
        logits = output.next_token_logits[position : position + 1]  # (1, R)
        tensors = {**inputs["tensors"], "logits": logits.detach().cpu().contiguous().clone()}
        if self._hot_token_id is not None:
            tensors["hot_token_id"] = self._hot_token_id.contiguous()  # (R,)
        _save(self._folder / "probe.safetensors", tensors)
        self._facts["state"] = "probed"
        self._facts["forward"] = {
            "rid": inputs["rid"],
            "prefix": inputs["prefix"],
            "tensors": {
                name: {"shape": list(value.shape), "dtype": _dtype_name(value)} for name, value in tensors.items()
            },
        }
        self._publish()

    def _publish(self) -> None:
        if _rank() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self._facts, sort_keys=True, indent=1) + "\n"
            write_atomically(self._folder / "probe.json", text)


def _flagged(module: Any) -> list[int]:
    return [i for i, block in enumerate(module.layers) if getattr(block, LAYER_FLAG, False)]


def _set_loader(parameter: Any, loader: Callable | None) -> None:
    """Plain parameters carry the loader as an attribute; quantised ones behind a property."""
    name = "_weight_loader" if hasattr(type(parameter), "weight_loader") else "weight_loader"
    if loader is None:
        delattr(parameter, name)
    else:
        setattr(parameter, name, loader)


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    save_file(tensors, temporary)
    with open(temporary, "rb") as stream:
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def _dtype_name(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _rank() -> int:
    from sglang.srt.distributed import parallel_state

    return parallel_state.get_tensor_model_parallel_rank()
