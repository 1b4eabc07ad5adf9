"""SGLang → writer: two hook targets, no edited SGLang file (0.5.14 to 0.5.23).

(a) `ModelRunner.init_attention_backends`: BEFORE it, refuse a server whose rows would be wrong,
    switch the model's aux capture on at the asked layers, read them back and write the ready
    file; AFTER it, hold the layers against what SGLang set in the meantime (0.5.23's
    --enable-return-aux-hidden-states does).
(b) AROUND `LogitsProcessor.forward`: its arguments are the last place where the un-pruned final
    state, all aux states, the request ids and the lengths of a forward are together.

An exception in (a) stops the server, which is wanted. An exception in (b) would kill the scheduler
under every other request, so there each failure becomes the error ticket of its sample.

Layer index i means everywhere: the residual stream entering layer i, `hidden_states[i]` of
transformers. The public setters of SGLang shift ids by family and version, therefore the list
inside the model (and the per-layer flags of the families that use them) is written directly.

Legend: T tokens of a sample, N rows of a forward, K captured layers, D target width.
"""

import inspect
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aerie_capture.protocol import (
    COMPUTED_DTYPES,
    CONFIG_VARIABLE,
    FLOAT8,
    TICKET_KEY,
    Address,
    CaptureConfig,
    parse_rid,
    patch_digest,
    read_capture_config,
    read_json,
    read_shard,
    write_atomically,
)
from aerie_capture.writer import ERROR_FILE, Copier, OpenShard, Piece, Writer

RUNNER_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends"
LOGITS_TARGET = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"

LAYER_FLAG = "_is_layer_to_capture"  # Qwen-MoE, Qwen3-Next/3.5, MiniMax-M3, LFM2 read this flag
NEUTRAL_LAYER_ID = 0  # any family accepts it; the setter is called for its switches, not its ids
OPEN_SHARDS = 32  # two descriptors each, in a lane
PARTIAL_SAMPLES = 2  # a scheduler cuts one prompt at a time; more are left-overs of aborts
RING_FORWARDS = 4  # host memory for as many of the largest forwards: one is taken, one copied, two written
WATCHDOG_SHARE = 0.5  # of --watchdog-timeout, the longest a forward waits for the disk
DEFAULT_WATCHDOG_S = 300.0  # SGLang's own default, where the setting is not readable

# Names under which a model divides its final state before the logits processor sees it (muP), or
# scales the logits behind it. The trainer computes lm_head · final, so both change the teacher.
SCALED_FINAL_NAMES = (
    "logits_mup_width_multiplier",
    "mup_width_multiplier",
    "width_multiplier",
    "scale_width",
    "mup_scale_factor",
    "output_mult",
    "lm_head_multiplier",
    "logits_scaling",
    "logit_scale",
    "final_logit_softcapping",
)

# Settings that decide values or shapes: recorded in the ready file.
RECORDED_SETTINGS = (
    "model_path", "revision", "dtype", "quantization", "kv_cache_dtype", "device", "tp_size",
    "ep_size", "nnodes", "attention_backend", "prefill_attention_backend", "sampling_backend",
    "moe_runner_backend", "context_length", "max_total_tokens", "max_running_requests",
    "max_prefill_tokens", "prefill_max_requests", "chunked_prefill_size", "mem_fraction_static",
    "disable_radix_cache", "disable_overlap_schedule", "disable_prefill_cuda_graph",
    "enforce_disable_flashinfer_allreduce_fusion", "enable_deterministic_inference",
    "random_seed", "watchdog_timeout", "page_size",
)  # fmt: skip

log = logging.getLogger(__name__)

_capture: "Capture | None" = None  # set on the writer rank only
_pinned_layers: "LayerSwitch | None" = None  # set on every rank of the target


@dataclass(frozen=True)
class LayerSwitch:
    """The module that holds `layers_to_capture`, and the indices it is set to."""

    module: Any
    layers: tuple[int, ...]

    def set(self) -> None:
        self.module.layers_to_capture = list(self.layers)
        blocks = list(self.module.layers)
        if any(hasattr(block, LAYER_FLAG) for block in blocks):
            for index, block in enumerate(blocks):
                setattr(block, LAYER_FLAG, index in self.layers)

    def read_back(self) -> list[int]:
        """The indices the model will capture; RuntimeError when list and flags disagree."""
        listed = sorted(self.module.layers_to_capture)
        blocks = list(self.module.layers)
        if any(hasattr(block, LAYER_FLAG) for block in blocks):
            flagged = [i for i, block in enumerate(blocks) if getattr(block, LAYER_FLAG, False)]
            if flagged != listed:
                raise RuntimeError(
                    f"{type(self.module).__name__}: layers_to_capture is {listed}, the per-layer"
                    f" flag {LAYER_FLAG} is set on {flagged}"
                )
        return listed


def register() -> None:
    """Register both hooks; delete a ready file that another server start has left behind."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _delete_stale_ready_file(read_capture_config(_config_path()))
    HookRegistry.register(RUNNER_TARGET, switch_capture_on, HookType.BEFORE)
    HookRegistry.register(RUNNER_TARGET, hold_layers, HookType.AFTER)
    HookRegistry.register(LOGITS_TARGET, take_states, HookType.AROUND)


# --- hook (a) --------------------------------------------------------------------------------------


def switch_capture_on(runner: Any) -> None:
    """BEFORE ModelRunner.init_attention_backends: check, switch on, read back, report ready.

    RuntimeError lists every reason why this server must not capture; it stops the server.
    """
    global _capture, _pinned_layers
    if runner.is_draft_worker:
        return  # a speculative server was refused by its target, which comes first
    if _pinned_layers is not None:
        hold_layers(None, runner)
        return
    config = read_capture_config(_config_path())
    setting = _setting_reader(runner)
    rank, size = _tensor_parallel()
    text_config = runner.model_config.hf_text_config
    defects = refused_settings(setting, device=str(runner.device), tp_size=size)
    defects += refused_layers(config.layers, text_config.num_hidden_layers)
    computed = str(runner.dtype).removeprefix("torch.")
    defects += refused_dtypes(config.dtype, computed)
    defects += scaled_finals(runner.model, text_config)
    module, setter, missing = find_capture_module(runner.model)
    if module is not None:
        missing += lost_residuals(module)
    if config.final == "pre_norm" and module is not None and not hasattr(module, "norm"):
        missing.append(f"{type(module).__name__} has no `norm`: capture with final: post_norm")
    defects += missing
    if defects:
        raise RuntimeError(
            f"aerie_capture: this server cannot capture ({len(defects)} reasons):\n  " + "\n  ".join(defects)
        )
    setter([NEUTRAL_LAYER_ID])
    _pinned_layers = LayerSwitch(module, config.layers)
    _pinned_layers.set()
    hold_layers(None, runner)
    if rank != 0:
        return
    _capture = Capture(
        config=config,
        hidden_size=text_config.hidden_size,
        dtype=runner.dtype,
        device=torch.device(runner.device),
        forward_tokens=_largest_forward(setting, runner),
        chunk_tokens=int(setting("chunked_prefill_size") or 0),
        wait_s=WATCHDOG_SHARE * float(setting("watchdog_timeout") or DEFAULT_WATCHDOG_S),
    )
    if config.final == "pre_norm":
        module.norm.register_forward_pre_hook(_capture.keep_norm_input)
    ready = {
        "run": config.run,
        "pid": os.getpid(),
        "sglang_version": _sglang_version(),
        "patch_digest": patch_digest(),
        "model_class": type(runner.model).__name__,
        "layers": _pinned_layers.read_back(),
        "final": config.final,
        "num_hidden_layers": text_config.num_hidden_layers,
        "hidden_size": text_config.hidden_size,
        "dtype": computed,
        "stored_dtype": config.dtype,
        "tp_rank": rank,
        "tp_size": size,
        "flags": {name: _plain(setting(name)) for name in RECORDED_SETTINGS},
    }
    write_atomically(config.ready_path, json.dumps(ready, sort_keys=True, indent=1) + "\n")


def hold_layers(result: Any, runner: Any) -> None:
    """AFTER ModelRunner.init_attention_backends: the layers are still the asked ones.

    RuntimeError when the model does not hold them even after they were set again.
    """
    if runner.is_draft_worker or _pinned_layers is None:
        return
    if sorted(_pinned_layers.module.layers_to_capture) != list(_pinned_layers.layers):
        _pinned_layers.set()
    found = _pinned_layers.read_back()
    if found != list(_pinned_layers.layers):
        raise RuntimeError(f"aerie_capture: layers read back {found}, expected {list(_pinned_layers.layers)}")


def refused_settings(setting: Callable[[str], Any], *, device: str, tp_size: int) -> list[str]:
    """Reasons in the server's settings, each with the flag to change; [] when there are none.

    `setting(name)` returns the value in effect, or None where this SGLang has no such setting.
    """
    defects = []

    def refuse_above_one(name: str, flag: str, why: str) -> None:
        value = setting(name)
        if value is not None and int(value) > 1:
            defects.append(f"{name} is {value}: {why}; use {flag} 1")

    def refuse_true(name: str, change: str, why: str) -> None:
        if setting(name):
            defects.append(f"{name} is on: {why}; {change}")

    refuse_above_one("pp_size", "--pp-size", "aux states exist on the last stage only")
    refuse_above_one("dp_size", "--dp-size", "every replica would write the same files")
    refuse_above_one("attn_dp_size", "--attn-dp-size", "each rank sees only its own requests")
    refuse_above_one("attn_cp_size", "--attn-cp-size", "each rank holds a part of the prompt")
    refuse_true("enable_dp_attention", "drop --enable-dp-attention", "each rank sees only its own requests")
    refuse_true(
        "enable_two_batch_overlap",
        "drop --enable-two-batch-overlap",
        "its layers bypass the aux capture",
    )
    for name in (
        "enable_prefill_cp",
        "enable_prefill_context_parallel",
        "enable_dsa_prefill_context_parallel",
    ):
        refuse_true(name, "drop --" + name.replace("_", "-"), "aux states stay split over the ranks")
    refuse_true(
        "enable_attn_tp_input_scattered",
        "drop --enable-attn-tp-input-scattered",
        "the residual holds a part of the tokens",
    )
    refuse_true("enable_layernorm_sp", "drop --enable-layernorm-sp", "states are split over the ranks")
    if not setting("disable_radix_cache"):
        defects.append(
            "the radix cache is on: a shared prefix is not run again, so it leaves no states; add --disable-radix-cache"
        )
    algorithm = setting("speculative_algorithm")
    if algorithm is not None and not setting("enable_return_aux_hidden_states"):
        defects.append(
            f"speculative_algorithm is {algorithm}: verify forwards are no prefill;"
            " drop --speculative-algorithm and the other --speculative-* flags"
        )
    on_cuda = device.startswith("cuda")
    if on_cuda and tp_size > 1 and not setting("enforce_disable_flashinfer_allreduce_fusion"):
        defects.append(
            f"the flashinfer all-reduce fusion may be on with --tp-size {tp_size}: aux states can"
            " be partial sums of one rank; add --enforce-disable-flashinfer-allreduce-fusion"
        )
    refuse_true(
        "enable_aiter_allreduce_fusion",
        "drop --enable-aiter-allreduce-fusion",
        "aux states can be partial sums of one rank",
    )
    graphs_off = setting("disable_prefill_cuda_graph") or setting("disable_cuda_graph")
    if on_cuda and not graphs_off:
        defects.append(
            "the prefill CUDA graph may be on: its static batch carries no request ids;"
            " add --disable-prefill-cuda-graph"
        )
    return defects


def refused_layers(layers: tuple[int, ...], num_hidden_layers: int) -> list[str]:
    """Reasons in the asked layer indices; [] when there are none.

    0 has no residual yet in most families, and n never fires: list-based models would return one
    block less without a word, others stop the server at the first request.
    """
    defects = [
        f"layer {index}: the model has {num_hidden_layers} layers, an index is 1..{num_hidden_layers - 1}"
        for index in layers
        if not 1 <= index < num_hidden_layers
    ]
    if list(layers) != sorted(set(layers)):
        defects.append(
            f"layers {list(layers)}: SGLang concatenates by ascending index and each once; write {sorted(set(layers))}"
        )
    return defects


def refused_dtypes(stored: str, computed: str) -> list[str]:
    """Reasons in the dtypes; [] when the states can be stored as asked."""
    if computed not in COMPUTED_DTYPES:
        return [f"the server computes in {computed}: capture needs --dtype bfloat16 or float32"]
    if stored not in (computed, FLOAT8):
        return [f"dtype {stored} is asked for, the server computes in {computed}: store {computed} or {FLOAT8}"]
    return []


def scaled_finals(model: Any, text_config: Any) -> list[str]:
    """Reasons in the model: a factor between `final` and the logits; [] when there is none."""
    inner = getattr(model, "language_model", model)
    processor = getattr(inner, "logits_processor", None)
    places = {
        "model": model,
        "language_model": inner,
        "logits_processor": processor,
        "config": text_config,
    }
    defects = {}
    for place, owner in places.items():
        for name in SCALED_FINAL_NAMES:
            value = getattr(owner, name, None)
            if isinstance(value, (int, float)) and value not in (0, 1):
                defects.setdefault(
                    name,
                    f"{place}.{name} is {value}: the logits are not lm_head · final, which the"
                    " trainer computes; targets with a scaled final state or scaled logits are"
                    " not supported",
                )
    return list(defects.values())


def find_capture_module(model: Any) -> tuple[Any, Callable | None, list[str]]:
    """The module that holds `layers_to_capture`, the setter that switches capture on, defects."""
    setter = None
    for owner in (model, getattr(model, "language_model", None)):
        setter = setter or getattr(owner, "set_eagle3_layers_to_capture", None)
    name = type(model).__name__
    if setter is None:
        return None, None, [f"{name} has no set_eagle3_layers_to_capture in this SGLang"]
    holders = [module for module in model.modules() if "layers_to_capture" in vars(module)]
    if len(holders) != 1 or not hasattr(holders[0], "layers"):
        return None, setter, [
            f"{name}: {len(holders)} modules hold layers_to_capture, expected one with `layers`"
        ]  # fmt: skip
    return holders[0], setter, []


def lost_residuals(module: Any) -> list[str]:
    """Reasons in the model's own capture: states that are not the residual stream; [] when there are none.

    Up to 0.5.16 a layer of Gemma 3 returns the stream; since 0.5.18 it returns a branch and the
    residual apart, and the model's loop (models/gemma3_causal.py) appends the branch alone.
    """
    apart = "residual" in inspect.signature(module.layers[0].forward).parameters
    if type(module).__name__ == "Gemma3TextModel" and apart:
        return [
            "Gemma3TextModel of this SGLang appends its layers' branch without the residual: index i"
            " would be the MLP output of layer i-1, not the stream that enters layer i; releases up to"
            " 0.5.16 capture Gemma 3"
        ]
    return []


# --- hook (b) --------------------------------------------------------------------------------------


def take_states(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """AROUND LogitsProcessor.forward: copy the captured rows, leave one ticket per request."""
    capture = _capture
    tickets = capture.take(original, args, kwargs) if capture is not None else None
    output = original(*args, **kwargs)
    if tickets is not None:
        info = dict(output.customized_info or {})
        info[TICKET_KEY] = tickets
        output.customized_info = info
    return output


@dataclass
class Partial:
    """The pieces of a prompt that the server runs in several forwards."""

    tokens: int = 0
    pieces: list[Piece] = field(default_factory=list)


@dataclass(frozen=True)
class Rows:
    """The rows of one request in one forward: positions prefix.. of its prompt, at start.. ."""

    address: Address
    rid: str
    prefix: int
    start: int
    length: int


class Capture:
    """State of the writer rank: open shards, partial samples, the writer behind them."""

    def __init__(
        self,
        *,
        config: CaptureConfig,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        forward_tokens: int,
        wait_s: float,
        chunk_tokens: int = 0,
        start_lane: Any = None,
    ) -> None:
        self.config = config
        self.hidden_size = hidden_size
        self._dtype = dtype
        # A prompt that the server cuts holds a slab per piece, however short, until it is whole.
        cuts = -(-forward_tokens // chunk_tokens) if chunk_tokens > 0 else 1
        self._copier = Copier(
            device,
            tensors=len(config.layers) + 1,
            width=hidden_size,
            dtype=config.dtype,
            rows=RING_FORWARDS * forward_tokens,
            spare=(PARTIAL_SAMPLES + 1) * cuts,
            wait_s=wait_s,
        )
        expected = {
            "run": config.run,
            "dtype": config.dtype,
            "captured": len(config.layers),
            "hidden_size": hidden_size,
        }
        self.writer = Writer(self._copier.ring, config.threads, expected, config.control_dir / ERROR_FILE, start_lane)
        self._expected = expected
        self._shards: OrderedDict[str, tuple[tuple[int, int], OpenShard]] = OrderedDict()
        self._partials: OrderedDict[str, Partial] = OrderedDict()
        self._norm_input: torch.Tensor | None = None
        self._signature: inspect.Signature | None = None

    def keep_norm_input(self, module: Any, args: tuple) -> None:
        """Forward pre-hook on the final norm: its input is the residual stream behind the last
        layer. The sum must be taken here, because the fused norm overwrites both terms."""
        hidden = args[0]
        residual = args[1] if len(args) > 1 else None
        self._norm_input = hidden.clone() if residual is None else hidden + residual

    def take(self, original: Callable, args: tuple, kwargs: dict) -> list[dict | None] | None:
        """A ticket for every request of this forward, None for a foreign one; never raises.

        Also a forward of foreign requests alone and a decode step get their list of None: 0.5.14
        pairs the lists with the requests of a reply by position and ends the server when some
        request lacks one. None for a forward without request ids (warm-up, idle).
        """
        norm_input, self._norm_input = self._norm_input, None
        if self._signature is None:
            self._signature = inspect.signature(original)
        arguments = self._signature.bind(*args, **kwargs).arguments
        batch = arguments.get("logits_metadata")
        rids = getattr(batch, "rids", None)
        if not rids:
            return None
        addresses = [parse_rid(rid, self.config.run) for rid in rids]
        if not any(addresses) or not batch.forward_mode.is_extend():
            return [None] * len(rids)
        try:
            final = arguments["hidden_states"] if self.config.final == "post_norm" else norm_input
            aux = arguments.get("aux_hidden_states")
            lengths = [int(length) for length in batch.extend_seq_lens_cpu]
            prefixes = [int(prefix) for prefix in batch.extend_prefix_lens_cpu]
            self._check_shapes(aux, final, batch.input_ids, lengths, prefixes, len(rids))
            return self._take_rows(aux, final, batch.input_ids, _rows(rids, addresses, prefixes, lengths))
        except Exception as error:  # recorded in every ticket of this forward and in the log
            log.exception("aerie_capture: a forward could not be captured")
            return [
                self._refuse(address, f"{type(error).__name__}: {error}") if address else None for address in addresses
            ]

    def _check_shapes(
        self,
        aux: Any,
        final: Any,
        ids: torch.Tensor,
        lengths: list[int],
        prefixes: list[int],
        requests: int,
    ) -> None:
        """ValueError when this forward is not [N, K*D] and [N, D] of the captured dtype.

        The width check is what notices an index that never fires (K-1 blocks come back).
        """
        if aux is None or final is None:
            raise ValueError("the model handed over no aux or no final states")
        if not len(lengths) == len(prefixes) == requests:
            raise ValueError(f"{requests} requests, {len(lengths)} lengths, {len(prefixes)} prefixes")
        layers, width = len(self.config.layers), self.hidden_size
        blocks = aux if isinstance(aux, (list, tuple)) else [aux]
        found = sum(block.shape[-1] for block in blocks)
        if found != layers * width:
            raise ValueError(f"aux width {found}, expected {layers} x {width} = {layers * width}")
        if final.shape[-1] != width:
            raise ValueError(f"final width {final.shape[-1]}, expected {width}")
        rows = sum(lengths)
        fewest = min(tensor.shape[0] for tensor in (*blocks, final, ids))
        if fewest < rows:
            raise ValueError(f"{fewest} rows in this forward, its requests have {rows}")
        dtypes = {str(tensor.dtype) for tensor in (*blocks, final)}
        if dtypes != {str(self._dtype)}:
            raise ValueError(f"states of {sorted(dtypes)}, the ready file says {self._dtype}")

    def _take_rows(
        self, aux: Any, final: torch.Tensor, ids: torch.Tensor, requests: list[Rows | None]
    ) -> list[dict | None]:
        tickets: list[dict | None] = [None] * len(requests)
        due: list[tuple[int, Rows, OpenShard]] = []
        for position, rows in enumerate(requests):
            if rows is None:
                continue
            try:
                file = self._open_shard(rows.address.shard)
                tickets[position] = self._answer_without_copy(file, rows)
            except (OSError, ValueError) as error:
                tickets[position] = self._refuse(rows.address, str(error))
            if tickets[position] is None:
                due.append((position, rows, file))
        if due:
            blocks = [*aux, final] if isinstance(aux, (list, tuple)) else [aux, final]
            spans = [(rows.start, rows.start + rows.length) for _, rows, _ in due]
            try:
                samples = self._copier.copy(blocks, ids, spans)
            except TimeoutError as error:
                for position, rows, _ in due:
                    self._drop(self._partials.pop(rows.rid, None))
                    tickets[position] = self._refuse(rows.address, str(error))
            else:
                whole: list[tuple[OpenShard, int, list[Piece]]] = []
                for (position, rows, file), pieces in zip(due, samples, strict=True):
                    tickets[position] = self._assemble(file, rows, pieces, whole)
                self.writer.submit(whole)
        self._retire_shards()
        return tickets

    def _answer_without_copy(self, file: OpenShard, rows: Rows) -> dict | None:
        """The ticket that needs no rows: an earlier one, or a refusal; None when rows are due."""
        samples = file.shard.samples
        index = rows.address.sample
        if index >= len(samples):
            return self._refuse(rows.address, f"shard {file.shard.name} has {len(samples)} samples")
        if self.writer.first_error is not None:
            return self._refuse(rows.address, self.writer.first_error)
        if index in file.taken:  # a client that lost its reply asks again: nothing is written twice
            return self._accept(file, rows.address)
        total = rows.prefix + rows.length
        if total > samples[index].tokens:
            self._drop(self._partials.pop(rows.rid, None))
            return self._refuse(
                rows.address,
                f"{total} tokens ran under this request id, the control file says {samples[index].tokens}",
            )
        partial = self._partials.get(rows.rid)
        done = partial.tokens if partial is not None and rows.prefix > 0 else 0
        if rows.prefix != done:
            self._drop(self._partials.pop(rows.rid, None))
            return self._refuse(
                rows.address,
                f"a piece starts at token {rows.prefix}, {done} tokens were captured before it:"
                " they came from a cache or were lost",
            )
        return None

    def _assemble(self, file: OpenShard, rows: Rows, pieces: list[Piece], whole: list) -> dict:
        """Add the rows of a forward to their sample; a complete sample joins those of `whole`."""
        partial = self._partials.pop(rows.rid, None)
        if partial is None or rows.prefix == 0:
            self._drop(partial)
            partial = Partial()
        partial.pieces += pieces
        partial.tokens += rows.length
        expected = file.shard.samples[rows.address.sample].tokens
        if partial.tokens < expected:
            self._partials[rows.rid] = partial
            while len(self._partials) > PARTIAL_SAMPLES:
                self._drop(self._partials.popitem(last=False)[1])
            # SGLang reports only the last forward of a prompt. If this is the last one, the
            # prompt was cut or replaced (an aborted request runs the prompt [0]).
            return self._refuse(
                rows.address,
                f"{partial.tokens} of {expected} tokens ran under this request id: the prompt was"
                " rejected, aborted or is another one",
            )
        if rows.address.sample in file.taken:  # two attempts at one sample met in this forward
            self._drop(partial)
        else:
            file.taken.add(rows.address.sample)
            whole.append((file, rows.address.sample, partial.pieces))
        return self._accept(file, rows.address)

    def _drop(self, partial: Partial | None) -> None:
        """Give the host memory of rows back that will never be written."""
        for piece in partial.pieces if partial is not None else ():
            self._copier.ring.release(piece.slab)

    def _open_shard(self, name: str) -> OpenShard:
        """The shard behind a control file, reopened when the client has replaced that file."""
        path = self.config.control_dir / f"{name}.json"
        status = os.stat(path)
        version = (status.st_mtime_ns, status.st_size)
        known = self._shards.get(name)
        if known is not None and known[0] == version:
            self._shards.move_to_end(name)
            return known[1]
        shard = read_shard(path, **self._expected)
        if known is not None:
            self.writer.retire(known[1])
        self._shards[name] = (version, self.writer.open(shard, path))
        self._shards.move_to_end(name)
        return self._shards[name][1]

    def _retire_shards(self) -> None:
        """Let go of what is complete or no longer needed."""
        for name in [name for name, (_, file) in self._shards.items() if file.complete]:
            self.writer.retire(self._shards.pop(name)[1])
        while len(self._shards) > OPEN_SHARDS:
            self.writer.retire(self._shards.popitem(last=False)[1][1])

    def _accept(self, file: OpenShard, address: Address) -> dict:
        """The rows are taken; the journal will tell that they are durable, or why not."""
        sample = file.shard.samples[address.sample]
        facts = {"row": sample.row, "tokens": sample.tokens, "ids_sha256": sample.sha256}
        return self._ticket(address, "accepted", None) | facts

    def _refuse(self, address: Address, error: str) -> dict:
        return self._ticket(address, "refused", error)

    def _ticket(self, address: Address, state: str, error: str | None) -> dict:
        return {
            "state": state,
            "error": error,
            "shard": address.shard,
            "sample": address.sample,
            "dtype": self.config.dtype,
        }


# ---------------------------------------------------------------------------------------------------


def _rows(
    rids: list[str], addresses: list[Address | None], prefixes: list[int], lengths: list[int]
) -> list[Rows | None]:
    """Where each request's rows lie: packed in request order, padding may follow the last."""
    requests: list[Rows | None] = []
    start = 0
    for rid, address, prefix, length in zip(rids, addresses, prefixes, lengths, strict=True):
        requests.append(Rows(address, rid, prefix, start, length) if address else None)
        start += length
    return requests


def _config_path() -> Path:
    return Path(os.environ[CONFIG_VARIABLE])


def _delete_stale_ready_file(config: CaptureConfig) -> None:
    """Only a file of another run: the processes of one server start at different times."""
    if not config.ready_path.exists():
        return
    try:
        run = read_json(config.ready_path).get("run")
    except ValueError:  # torn or foreign: whatever it is, it does not speak for this server
        run = None
    if run != config.run:
        config.ready_path.unlink(missing_ok=True)


def _setting_reader(runner: Any) -> Callable[[str], Any]:
    """Settings in effect by name; None for a name this SGLang does not have.

    Since 0.5.18 the resolved settings live in the runtime context and `ServerArgs` keeps what the
    operator typed; before, `ServerArgs` itself is resolved.
    """
    from sglang.srt import runtime_context

    context = runtime_context.get_context()

    def setting(name: str) -> Any:
        if hasattr(context, "config_leaf"):
            try:
                return context.config_leaf(name)
            except ValueError:  # "not a config leaf": the record below is all there is
                pass
        return getattr(runner.server_args, name, None)

    return setting


def _largest_forward(setting: Callable[[str], Any], runner: Any) -> int:
    """The most tokens one forward can hold: whole prompts are run, so also the longest prompt."""
    return max(int(setting("max_prefill_tokens") or 0), int(runner.model_config.context_len))


def _tensor_parallel() -> tuple[int, int]:
    from sglang.srt.distributed import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _sglang_version() -> str:
    from sglang.version import __version__

    return __version__


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
