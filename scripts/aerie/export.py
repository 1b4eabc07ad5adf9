"""The trained drafter as a folder that SGLang serves, and the comparison of the two.

    results/drafter/trained.safetensors, vocab.safetensors, metrics.json
        →  results/drafter/export/{config.json, model.safetensors, README.md}

    probe folder written by a server that loaded the export, captured states  →  gates

SGLang's loader skips a tensor whose name it does not know and keeps random numbers where one is missing;
its layer ids mean different layers for different families and versions. Neither is an error there. So the
set of names is closed here, the ids are spelled for the pinned version, and `compare` asks a real server
what it loaded, where it captures and what its first draft step computes.

Layer indices: index i is the residual stream entering layer i (HF hidden_states[i]).
Shapes: T tokens of the probed prompt, D target width, H drafter width, K captured layers, V target
vocabulary, R draft vocabulary.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from aerie.drafter import Drafter, DrafterConfig, pack
from aerie.hidden import Sample

ARCHITECTURE = "LlamaForCausalLMEagle3"
WEIGHTS = (
    "fc.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
    "norm.weight",
    "lm_head.weight",
)
EXPORTED = (*WEIGHTS, "d2t", "t2d")
EMBEDDING = "model.embed_tokens.weight"  # the server's name; not exported, shared with the target


class ExportError(ValueError):
    """A drafter that cannot be exported for this server; the message lists every defect."""


# ----------------------------------------------------------------------------------------------------
# Layer ids: what eagle_config must say so that SGLang captures given HF indices
#
# Read in the model files of 0.5.14, 0.5.20 and 0.5.23 (`set_eagle3_layers_to_capture`). An explicit id list
# is used in one of two ways: `plus_one`, every id is raised by 1; `raw_unless_one`, ids are used as they
# are, but all are raised by 1 where the first id is 1. gpt-oss raises by 1 too unless the largest id is
# the number of layers, which a raised HF index never is.

FIRST_SGLANG, LAST_SGLANG = (0, 5, 12), (0, 5, 23)  # versions whose rules are known
RAW_SINCE = (0, 5, 14)  # pull request 25454; up to 0.5.12.post1 these families raised by 1 as well
PLUS_ONE_ARCHITECTURES = frozenset(
    {
        "ApertusForCausalLM", "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM",
        "ExaoneMoEForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration", "Glm4MoeForCausalLM", "GptOssForCausalLM", "IQuestCoderForCausalLM",
        "InternLM3ForCausalLM", "Llama4ForConditionalGeneration", "LlamaForCausalLM", "LongcatFlashForCausalLM",
        "MiniMaxM2ForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration",
    }
)  # fmt: skip
RAW_UNLESS_ONE_ARCHITECTURES = frozenset(
    {
        "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM", "KimiK25ForConditionalGeneration", "MistralLarge3ForCausalLM",
    }
)  # fmt: skip


def version_of(text: str) -> tuple[int, int, int]:
    """Return (major, minor, patch) of an SGLang version such as 0.5.12.post1."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if not match:
        raise ExportError(f"SGLang version {text!r}: expected major.minor.patch, such as 0.5.20")
    major, minor, patch = (int(number) for number in match.groups())
    return major, minor, patch


def served_layer_ids(hf_layers: Sequence[int], architecture: str, sglang_version: str) -> list[int]:
    """Return the ids to write into eagle_config so that this SGLang captures `hf_layers` of this target.

    Raises ExportError for a version or an architecture whose rule is not known, and for a list that the
    rule cannot express.
    """
    layers = list(hf_layers)
    version = version_of(sglang_version)
    if sorted(set(layers)) != layers or not layers or layers[0] < 1:
        raise ExportError(f"captured layers {layers}: expected ascending, distinct HF indices from 1 on")
    if not FIRST_SGLANG <= version <= LAST_SGLANG:
        raise ExportError(
            f"SGLang {sglang_version}: its layer id rules were not read (known: "
            f"{'.'.join(map(str, FIRST_SGLANG))} to {'.'.join(map(str, LAST_SGLANG))}); read "
            "set_eagle3_layers_to_capture of the target's model file there and extend scripts/aerie/export.py"
        )
    if architecture in PLUS_ONE_ARCHITECTURES:
        return [index - 1 for index in layers]
    if architecture not in RAW_UNLESS_ONE_ARCHITECTURES:
        raise ExportError(
            f"{architecture}: how SGLang {sglang_version} reads the layer ids of this target is not known; read "
            "set_eagle3_layers_to_capture of its model file and add it to a table in scripts/aerie/export.py"
        )
    if version < RAW_SINCE:
        if version == (0, 5, 13):
            raise ExportError(f"{architecture}: its rule changed around SGLang 0.5.13; pin another version")
        return [index - 1 for index in layers]
    if layers[0] == 2:
        # Both spellings exist; [1, ...] means the same on every version from 0.5.9 to 0.5.23.
        return [index - 1 for index in layers]
    if layers[0] == 1:
        raise ExportError(
            f"{architecture}: captured layers {layers} cannot be spelled for SGLang {sglang_version}: a list "
            f"that begins with 1 is read as {[index + 1 for index in layers]}; choose hidden.layers whose first "
            "index is 2 or more"
        )
    return layers


# ----------------------------------------------------------------------------------------------------
# The exported folder


def require_exactly(found: Iterable[str], expected: Iterable[str], source: str) -> None:
    """Raise ExportError listing every missing and every unexpected name."""
    found, expected = set(found), set(expected)
    if found != expected:
        raise ExportError(
            f"{source}: missing {sorted(expected - found) or 'nothing'}, "
            f"unexpected {sorted(found - expected) or 'nothing'}"
        )


def shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every exported tensor."""
    H, R, inner = config.hidden_size, config.draft_vocab_size, config.intermediate_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    return {
        "fc.weight": (H, config.captured_layers * H),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * H),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, q),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.mlp.gate_proj.weight": (inner, H),
        "midlayer.mlp.up_proj.weight": (inner, H),
        "midlayer.mlp.down_proj.weight": (H, inner),
        "norm.weight": (H,),
        "lm_head.weight": (R, H),
        "d2t": (R,),
        "t2d": (config.vocab_size,),
    }


def exported_tensors(
    trained: Mapping[str, Tensor], offsets: Tensor, members: Tensor, config: DrafterConfig, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors: the weights as `dtype`, d2t int64 [R] offsets, t2d bool [V].

    Raises ExportError listing every missing, unexpected or misshapen tensor and every weight that is not finite.
    """
    require_exactly(trained, WEIGHTS, "trained drafter")
    tensors = {name: trained[name].to(dtype).contiguous() for name in WEIGHTS}
    tensors |= {"d2t": offsets.to(torch.int64), "t2d": members.to(torch.bool)}
    defects = [
        f"{name} is {tuple(tensors[name].shape)}, expected {shape}"
        for name, shape in shapes(config).items()
        if tuple(tensors[name].shape) != shape
    ]
    defects += [f"{name} is not finite" for name in WEIGHTS if not tensors[name].isfinite().all()]
    if defects:
        raise ExportError("trained drafter: " + "; ".join(defects))
    return tensors


def served_config(
    config: DrafterConfig, layer_ids: Sequence[int], dtype: str, aerie: Mapping[str, Any]
) -> dict[str, Any]:
    """Return config.json as SGLang reads it; `aerie` holds what only Aerie reads (HF indices, digests)."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "num_aux_hidden_states": config.captured_layers,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,  # true would serve the embedding as lm_head
        "torch_dtype": dtype,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(layer_ids),
        },
        "aerie": dict(aerie),
    }


def model_card(config: Mapping[str, Any], metrics: Mapping[str, Any], target: str) -> str:
    """Return README.md of the exported folder: what it is, how to serve it, the numbers of this run."""
    final, steps = metrics["final"], metrics["final"]["served_steps"]
    own, walked, shares = config["aerie"], final["walk"], metrics["coverage"]

    def number(value: float | None, form: str = ".3f") -> str:
        return "unknown" if value is None else format(value, form)

    rows = "\n".join(
        f"| {position + 1} | {number(cumulative)} | {number(conditional)} |"
        for position, (cumulative, conditional) in enumerate(
            zip(final["true_token"]["cumulative"], final["true_token"]["conditional"], strict=True)
        )
    )
    return f"""\
---
library_name: sglang
tags: [eagle3, speculative-decoding]
---
# EAGLE-3 drafter for {target}

Made by Aerie from the target's own answers and its hidden states. It proposes tokens; the target decides
every one of them, so greedy answers stay the target's.

Serve it with SGLang {own["sglang_version"]} (the layer ids below are spelled for this version):

    python -m sglang.launch_server --model-path TARGET --speculative-algorithm EAGLE3 \\
        --speculative-draft-model-path THIS_FOLDER --speculative-num-steps {steps} \\
        --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}

| | |
|---|---|
| architecture | {ARCHITECTURE}, 1 layer, width {config["hidden_size"]:,}, {config["torch_dtype"]} |
| captured layers (HF indices) | {own["layers"]} |
| eagle_aux_hidden_state_layer_ids | {config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]} |
| draft vocabulary | {config["draft_vocab_size"]:,} of {config["vocab_size"]:,} tokens; covers \
{number(shares["train"], ".2%")} of the training and {number(shares["held_out"], ".2%")} of the held-out tokens |
| trained | {metrics["steps"]:,} steps, {metrics["tokens"]:,} tokens; weights of step \
{metrics["selection"]["step"]:,} ({metrics["selection"]["rule"]}) |
| held-out accept length, by position | {number(final["true_token"]["accept_length"])} \
({final["positions"]:,} positions, {steps} steps) |
| held-out accept length, walked as served | {number(walked["accept_length"])} \
({walked["tokens"]:,} tokens in {walked["rounds"]:,} rounds) |
| target digest | `{own["target_digest"]}` |
| tokenizer digest | `{own["tokenizer_digest"]}` |
| trained weights | `{own["trained_sha256"]}` |

Offline, greedy, on held-out conversations; accept length counts the token the target adds to each round.

| proposal | right, with all before it | right, if all before it were |
|---|---|---|
{rows}
"""


# ----------------------------------------------------------------------------------------------------
# What a server must have loaded


def fused_parameters(exported: Mapping[str, Tensor], config: DrafterConfig, rank: int, ranks: int) -> dict[str, Tensor]:
    """Return the parameters SGLang holds on one tensor-parallel rank, without embedding and lm_head.

    q, k, v become qkv_proj and gate, up become gate_up_proj; these are split by output rows, o_proj and
    down_proj by input columns; key heads are copied where there are more ranks than heads.
    """

    def rows(name: str, part: int = rank, parts: int = ranks) -> Tensor:
        return exported[f"midlayer.{name}.weight"].chunk(parts, 0)[part]

    def columns(name: str) -> Tensor:
        return exported[f"midlayer.{name}.weight"].chunk(ranks, 1)[rank].contiguous()

    key_parts = min(ranks, config.num_key_value_heads)
    key_part = rank * key_parts // ranks
    layer = "model.layers.0"
    fused = {
        "model.fc.weight": exported["fc.weight"],
        "model.norm.weight": exported["norm.weight"],
        f"{layer}.self_attn.qkv_proj.weight": torch.cat(
            (
                rows("self_attn.q_proj"),
                rows("self_attn.k_proj", key_part, key_parts),
                rows("self_attn.v_proj", key_part, key_parts),
            )
        ),  # (heads of this rank * E, 2H)
        f"{layer}.self_attn.o_proj.weight": columns("self_attn.o_proj"),
        f"{layer}.mlp.gate_up_proj.weight": torch.cat((rows("mlp.gate_proj"), rows("mlp.up_proj"))),
        f"{layer}.mlp.down_proj.weight": columns("mlp.down_proj"),
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        fused[f"{layer}.{norm}.weight"] = exported[f"midlayer.{norm}.weight"]
    return fused


def vocabulary_shard(tensor: Tensor, shard_rows: int, rank: int) -> Tensor:
    """Return the rows of a [V or R, H] tensor that a rank holds: padded with zeros, then split evenly."""
    shard = tensor.new_zeros(shard_rows, *tensor.shape[1:])
    part = tensor[rank * shard_rows : (rank + 1) * shard_rows]
    shard[: len(part)] = part
    return shard


# ----------------------------------------------------------------------------------------------------
# Gates

# Largest allowed differences by the server's dtype. Parameters must be equal bit for bit.
# States: |served - captured| / |captured| of one token and layer; a neighbouring layer differs by 0.1 or more.
STATE_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
# First draft step: largest difference of a logit over the largest logit. The trainer computes in fp32.
LOGIT_TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}

CAUSES = {
    "export": "the exported folder is older than the trained weights, or its dtype cannot hold them; export again",
    "names": "a tensor name that this SGLang does not know is skipped without a word; compare "
    "load_weights in its llama_eagle3.py with EXPORTED in scripts/aerie/export.py",
    "parameters": "another folder was served than the one exported, or the server loaded it in another dtype",
    "draft_vocabulary": "d2t must hold offsets (target id minus draft id), not target ids",
    "layers": "the layer ids are spelled for another SGLang version or target family; export again with "
    "--sglang-version of the image",
    "prompt": "the probe was asked with another prompt than the captured sample",
    "states": "another layer, another final-norm convention, another target or template than at capture",
    "logits": "RoPE, norm or residual differ between trainer and server, or fc reads the layers in another order",
}


@dataclass(frozen=True)
class Gate:
    """One comparison: it passed where `value` is at most `limit`."""

    name: str
    value: float
    limit: float
    detail: str

    @property
    def passed(self) -> bool:
        """Return whether the gate passed; a value that is not a number never does."""
        return self.value <= self.limit

    def to_json(self) -> dict[str, Any]:
        """Return the gate as JSON values, with its usual cause where it failed; no finite value becomes None."""
        record = {key: value for key, value in asdict(self).items() if key != "name"}
        cause = {} if self.passed else {"usual_cause": CAUSES[self.name]}
        return {**record, "value": self.value if math.isfinite(self.value) else None, "passed": self.passed, **cause}


@dataclass(frozen=True)
class Probe:
    """What the server's plugin wrote about one prompt and the drafter it loaded."""

    parameters: Sequence[Mapping[str, Tensor]]  # one mapping per tensor-parallel rank
    hot_token_id: Tensor | None  # int64 [R]: the target's id of each draft token
    offered: Sequence[str]  # names given to load_weights
    left_over: Sequence[str]  # of these, names that load_weights did not use
    not_loaded: Sequence[str]  # parameters that load_weights did not fill
    layers: Sequence[int]  # layers_to_capture, read back from the target
    flagged_layers: Sequence[int]  # layers that carry a flag of their own (families that look at nothing else)
    layer_defects: Sequence[str]  # why the plugin could not read the layers
    input_ids: Tensor  # int [T]: x_1..x_T, the draft's tokens, one ahead of the states
    positions: Tensor  # int [T]
    aux: Tensor  # [T, K*D]
    logits: Tensor  # [1 or more, R], the last row that of the last position


def read_probe(folder: Path, ranks: int) -> Probe:
    """Read what the server's plugin left in `folder`; ExportError where the probed forward is missing."""
    described = folder / "probe.json"
    facts = json.loads(described.read_text()) if described.is_file() else {}
    dumps = [folder / f"draft-params-rank{rank}.safetensors" for rank in range(ranks)]
    missing = [path.name for path in dumps if not path.is_file()]
    if facts.get("state") != "probed" or missing or not {"draft", "target"} <= facts.keys():
        raise ExportError(
            f"{folder}: the server wrote no complete probe (state {facts.get('state', 'none')!r}, missing "
            f"{missing or 'no dump'}): the plugin aerie_capture was not active, or no probe request reached the "
            "drafter; look at the server's log"
        )
    tensors = load_file(folder / "probe.safetensors")
    return Probe(
        parameters=[load_file(path) for path in dumps],
        hot_token_id=tensors.get("hot_token_id"),
        offered=facts["draft"]["offered"],
        left_over=facts["draft"]["left_over"],
        not_loaded=facts["draft"]["not_loaded"],
        layers=facts["target"]["layers_to_capture"],
        flagged_layers=facts["target"]["flagged_layers"],
        layer_defects=facts["target"]["defects"],
        **{name: tensors[name] for name in ("input_ids", "positions", "aux", "logits")},
    )


def compare(
    probe: Probe,
    exported: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    config: DrafterConfig,
    hf_layers: Sequence[int],
    sample: Sample,
    embedding: Tensor,
    dtype: str,
) -> list[Gate]:
    """Return all gates of one probed server. `sample`: the captured states of the probed prompt.

    `exported` are the tensors of model.safetensors, `trained` those of trained.safetensors, `embedding` [V, D]
    is the target's, `dtype` the server's.
    """
    return [
        _export(exported, trained),
        _names(probe),
        _parameters(probe, exported, config, dtype),
        _draft_vocabulary(probe, exported),
        _layers(probe, hf_layers),
        _prompt(probe, sample),
        _states(probe, sample, config, dtype),
        _logits(probe, exported, config, embedding, dtype),
    ]


def _export(exported: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> Gate:
    different = [
        name
        for name in WEIGHTS
        if name not in exported
        or name not in trained
        or not torch.equal(exported[name], trained[name].to(exported[name].dtype))
    ]
    return Gate("export", len(different), 0, ", ".join(different) or "the trained weights")


def _names(probe: Probe) -> Gate:
    missing, surplus = set(EXPORTED) - set(probe.offered), set(probe.offered) - set(EXPORTED)
    # The embedding is the one parameter that is not loaded: the server shares the target's.
    left_over, unset = set(probe.left_over), set(probe.not_loaded) - {EMBEDDING}
    detail = "; ".join(
        f"{what}: {', '.join(sorted(names))}"
        for what, names in (
            ("not offered", missing), ("not exported", surplus), ("not used", left_over), ("not filled", unset)
        )
        if names
    )  # fmt: skip
    return Gate("names", len(missing | surplus | left_over | unset), 0, detail or "all used, all filled")


def _parameters(probe: Probe, exported: Mapping[str, Tensor], config: DrafterConfig, dtype: str) -> Gate:
    different = []
    ranks = len(probe.parameters)
    for rank, loaded in enumerate(probe.parameters):
        expected = fused_parameters(exported, config, rank, ranks)
        rows = len(loaded["lm_head.weight"]) if "lm_head.weight" in loaded else -(-config.draft_vocab_size // ranks)
        expected["lm_head.weight"] = vocabulary_shard(exported["lm_head.weight"], rows, rank)
        if rows * ranks < config.draft_vocab_size:
            different.append(f"rank {rank}: lm_head.weight has too few rows ({rows})")
        different += [f"rank {rank}: {name} is missing" for name in sorted(expected.keys() - loaded.keys())]
        different += [
            f"rank {rank}: {name} is not expected" for name in sorted(loaded.keys() - expected.keys() - {EMBEDDING})
        ]
        different += [
            f"rank {rank}: {name} differs"
            for name in sorted(expected.keys() & loaded.keys())
            if not torch.equal(loaded[name], expected[name].to(getattr(torch, dtype)))
        ]
    return Gate("parameters", len(different), 0, "; ".join(different) or "equal bit for bit")


def _draft_vocabulary(probe: Probe, exported: Mapping[str, Tensor]) -> Gate:
    expected = exported["d2t"] + torch.arange(len(exported["d2t"]))
    found = probe.hot_token_id
    if found is None or found.shape != expected.shape:
        shape = None if found is None else tuple(found.shape)
        return Gate("draft_vocabulary", len(expected), 0, f"token map {shape}, expected {tuple(expected.shape)}")
    wrong = int((found != expected).sum())
    return Gate("draft_vocabulary", wrong, 0, f"{wrong} of {len(expected):,} draft tokens mapped elsewhere")


def _layers(probe: Probe, hf_layers: Sequence[int]) -> Gate:
    served = [probe.layers, *([probe.flagged_layers] if probe.flagged_layers else [])]
    different = sum(sorted(layers) != list(hf_layers) for layers in served) + len(probe.layer_defects)
    told = "".join(f"; {defect}" for defect in probe.layer_defects)
    return Gate("layers", different, 0, f"served {list(served[-1])}, captured {list(hf_layers)}{told}")


def _prompt(probe: Probe, sample: Sample) -> Gate:
    T = len(probe.input_ids)
    expected = sample.input_ids[1:T]  # the token behind them is the target's own answer, drawn or not
    wrong = T - 1 - len(expected) + int((probe.input_ids[: len(expected)] != expected).sum())
    wrong += int((probe.positions != torch.arange(T)).sum())
    return Gate("prompt", wrong, 0, f"{wrong} of {T:,} tokens and positions differ from conversation {sample.id}")


def _states(probe: Probe, sample: Sample, config: DrafterConfig, dtype: str) -> Gate:
    T, K = len(probe.input_ids), config.captured_layers
    captured = sample.aux[:T].float()  # (T, K, D)
    if probe.aux.shape != (len(captured), captured[0].numel()):
        detail = f"states {tuple(probe.aux.shape)}, expected {(len(captured), captured[0].numel())}"
        return Gate("states", float("inf"), STATE_TOLERANCE[dtype], detail)
    served = probe.aux.float().unflatten(1, (K, -1))  # (T, K, D)
    error = (served - captured).norm(dim=-1) / captured.norm(dim=-1)  # (T, K)
    worst = int(error.nan_to_num(nan=float("inf")).argmax())
    detail = f"largest at token {worst // K}, layer number {worst % K} of {K}; relative"
    return Gate("states", float(error.flatten()[worst]), STATE_TOLERANCE[dtype], detail)


def _logits(probe: Probe, exported: Mapping[str, Tensor], config: DrafterConfig, embedding: Tensor, dtype: str) -> Gate:
    T = len(probe.input_ids)
    if probe.aux.shape != (T, config.captured_layers * config.hidden_size):
        return Gate("logits", float("inf"), LOGIT_TOLERANCE[dtype], f"states {tuple(probe.aux.shape)}")
    ours = first_step_logits(exported, config, embedding, probe.input_ids, probe.aux)
    served = probe.logits[-1].float()
    if served.shape != ours.shape:
        detail = f"{tuple(served.shape)} logits, expected {tuple(ours.shape)}"
        return Gate("logits", float("inf"), LOGIT_TOLERANCE[dtype], detail)
    error = float((served - ours).abs().max() / ours.abs().max())
    same = "equal" if served.argmax() == ours.argmax() else "not equal"
    return Gate("logits", error, LOGIT_TOLERANCE[dtype], f"relative to the largest logit; first choice {same}")


@torch.no_grad()
def first_step_logits(
    exported: Mapping[str, Tensor], config: DrafterConfig, embedding: Tensor, input_ids: Tensor, aux: Tensor
) -> Tensor:
    """Return the trainer's draft logits [R] of the last position, in fp32, on what the server fed its drafter.

    `input_ids` int [T] one ahead of the states (the last one is the target's own first token), `aux` [T, K*D].
    """
    drafter = Drafter(config, embedding.float())
    state = drafter.state_dict()
    require_exactly(state, WEIGHTS, "drafter module")
    drafter.load_state_dict({name: exported[name].float() for name in WEIGHTS})
    T, D = len(input_ids), config.hidden_size
    # One row more than the server has: row T-1 must find its next token in the document.
    sample = Sample(
        id="probe",
        held_out=True,
        input_ids=torch.cat((input_ids[:1], input_ids)),  # (T+1,); the first one is read by nobody
        loss_mask=torch.zeros(T + 1, dtype=torch.uint8),
        # (T, K*D) -> (T+1, K+1, D): a row and a final state of zeros, which no step reads
        states=torch.nn.functional.pad(aux.float().unflatten(1, (-1, D)), (0, 0, 0, 1, 0, 1)),
    )
    (h,) = drafter.unroll(pack([sample], torch.float32), [torch.tensor([T - 1])])
    return drafter.logits(h)[0]
