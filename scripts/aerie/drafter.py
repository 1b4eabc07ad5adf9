"""The EAGLE-3 drafter: configuration and module (arXiv 2503.01840).

    packed documents of captured states  →  the layer's output of each row and step

The module computes what SGLang's `LlamaForCausalLMEagle3` computes and has its parameter names, so that a
trained drafter is exported as it is. One layer reads at row i the target's captured states of token i
(three layers, concatenated) and the embedding of token i+1, and predicts token i+2. It is unrolled as serving
does: step t reads its own output of step t-1 in place of the target's states, and predicts token i+2+t.

Shapes: T tokens of a batch (documents packed, nothing padded), D target width, H drafter width (= D),
K captured layers, V target vocabulary, R draft vocabulary, N rows computed at a step, A query heads, G key
heads, E head width, L tokens of one document.
Layer indices: index i is the residual stream entering layer i (HF hidden_states[i]).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aerie.hidden import Sample
from aerie.target import text_config

INIT_STD = 0.02  # of fresh linear layers, as in Llama
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "attn_factor", "extrapolation_factor", "truncate",
    ),
}  # fmt: skip
ROPE_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ROPE_KEYS["llama3"],
    "yarn": ("factor", "original_max_position_embeddings"),
}


class DrafterError(ValueError):
    """A drafter that cannot be built or trained; the message lists every defect and what to change."""


# ----------------------------------------------------------------------------------------------------
# Configuration


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter; every field is exported to, and read by, SGLang."""

    hidden_size: int  # H, equal to the target's width D: it shares the target's embedding
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # keys of `ROPE_KEYS` and `rope_type`
    max_position_embeddings: int
    vocab_size: int  # V
    draft_vocab_size: int  # R
    captured_layers: int  # K

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; `DrafterConfig(**value)` is the way back."""
        return asdict(self)


def config_from_target(
    config: dict[str, Any],
    captured_layers: int,
    draft_vocab_size: int,
    rope_theta: float | None = None,
    **shape: int | None,
) -> DrafterConfig:
    """Return the drafter's configuration for a target's config.json.

    `shape` overrides `intermediate_size`, `num_attention_heads`, `num_key_value_heads`, `head_dim`; what is
    left out (or None) is the target's own. `rope_theta` replaces the target's RoPE by a plain one. Raises
    DrafterError listing everything that cannot be built or served.
    """
    inner = text_config(config)
    chosen = {key: value for key, value in shape.items() if value is not None}
    defects: list[str] = []

    def take(key: str, *default: Any) -> Any:
        if key in chosen:
            return chosen[key]
        if inner.get(key) is not None:
            return inner[key]
        if default:
            return default[0]
        defects.append(f"the target's config.json has no {key}; give --{key.replace('_', '-')}")
        return 1

    if "kv_lora_rank" in inner:
        # Latent attention (DeepSeek, Kimi) has no head layout that a Llama layer could take over.
        layout = ("num_attention_heads", "num_key_value_heads", "head_dim")
        defects += [
            f"the target has latent attention (MLA): give --{key.replace('_', '-')}"
            for key in layout
            if key not in chosen
        ]
    heads = take("num_attention_heads")
    width = take("hidden_size")
    rope: dict[str, Any] | None = None
    theta = rope_theta
    if theta is None:
        try:
            theta, rope = rope_of(inner)
        except DrafterError as error:
            defects.append(str(error))
            theta = 1.0
    result = DrafterConfig(
        hidden_size=width,
        intermediate_size=take("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=take("num_key_value_heads", heads),
        head_dim=take("head_dim", width // heads),
        rms_norm_eps=take("rms_norm_eps", 1e-6),
        rope_theta=float(theta),
        rope_scaling=rope,
        max_position_embeddings=take("max_position_embeddings"),
        vocab_size=take("vocab_size"),
        draft_vocab_size=draft_vocab_size,
        captured_layers=captured_layers,
    )
    if result.num_attention_heads % result.num_key_value_heads:
        defects.append(
            f"{result.num_attention_heads} query heads do not divide by {result.num_key_value_heads} key heads"
        )
    if result.head_dim % 2:
        defects.append(f"head_dim is {result.head_dim}; RoPE turns pairs, so it must be even")
    if captured_layers < 2:
        # SGLang applies fc only where the width of the states differs from H: one layer would skip it.
        defects.append("hidden.layers names one layer; SGLang serves a drafter of 2 or more")
    if defects:
        raise DrafterError("this drafter cannot be built:\n" + "\n".join(defects))
    return result


def rope_of(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return (theta, scaling or None) of a model's RoPE, from either spelling of config.json.

    transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`. Raises
    DrafterError for a kind that this module does not compute as SGLang does.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if "mrope_section" in parameters or kind not in ROPE_KEYS:
        raise DrafterError(
            f"RoPE of the target: {parameters} is not supported (kinds: {', '.join(ROPE_KEYS)}); "
            "give --rope-theta for a drafter with a plain RoPE"
        )
    theta = parameters.get("rope_theta", config.get("rope_theta", 10_000.0))
    if kind == "default":
        return float(theta), None
    if config.get("original_max_position_embeddings"):
        parameters = {
            **parameters,
            "original_max_position_embeddings": config["original_max_position_embeddings"],
        }
    missing = [key for key in ROPE_REQUIRED[kind] if parameters.get(key) is None]
    if missing:
        raise DrafterError(
            f"RoPE of the target ({kind}) lacks {', '.join(missing)}; give --rope-theta for a drafter with a plain RoPE"
        )
    kept = {key: parameters[key] for key in ROPE_KEYS[kind] if parameters.get(key) is not None}
    return float(theta), {"rope_type": kind, **kept}


# ----------------------------------------------------------------------------------------------------
# RoPE


def rope_frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """Return (angle per position of each pair, float32 [E/2]; the factor on cosine and sine).

    As SGLang's rotary embeddings: llama3 keeps short waves and stretches long ones; yarn (arXiv 2309.00071)
    blends the two between `beta_fast` and `beta_slow` turns and scales by its attention factor.
    """
    E, scaling = config.head_dim, config.rope_scaling or {"rope_type": "default"}
    exponents = torch.arange(0, E, 2, dtype=torch.float32) / E  # (E/2,)
    frequencies = 1.0 / config.rope_theta**exponents
    kind, factor = scaling["rope_type"], float(scaling.get("factor", 1.0))
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / factor, 1.0
    trained = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        waves = 2 * math.pi / frequencies
        blend = (trained / waves - low) / (high - low) if high != low else torch.zeros_like(waves)
        between = (1 - blend) * frequencies / factor + blend * frequencies
        stretched = torch.where(waves > trained / low, frequencies / factor, between)
        return torch.where(waves < trained / high, frequencies, stretched), 1.0

    def pair_of(turns: float) -> float:
        """Return the pair that makes `turns` full turns within the trained context."""
        return E * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = pair_of(scaling.get("beta_fast", 32)), pair_of(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, E - 1)
    pairs = torch.arange(E // 2, dtype=torch.float32)
    ramp = ((pairs - first) / (max(last - first, 0) or 0.001)).clamp(0, 1)  # (E/2,)
    keep = (1 - ramp) * scaling.get("extrapolation_factor", 1)
    frequencies = frequencies / factor * (1 - keep) + frequencies * keep

    def attention_factor(scale: float, mscale: float) -> float:
        return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0

    if scaling.get("mscale") is not None and scaling.get("mscale_all_dim") is not None:
        ratio = attention_factor(factor, scaling["mscale"])
        ratio /= attention_factor(factor, scaling["mscale_all_dim"])
    else:
        ratio = attention_factor(factor, 1.0)
    return frequencies, ratio * scaling.get("attn_factor", 1.0)


def rotate(vectors: Tensor, angles: Tensor, factor: float) -> Tensor:
    """Turn `vectors` [N, heads, E] by `angles` [N, E/2] (halves paired, as in Llama); computed in fp32."""
    cosine, sine = angles.cos()[:, None] * factor, angles.sin()[:, None] * factor  # (N, 1, E/2)
    first, second = vectors.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)  # (N, heads, E)
    return turned.to(vectors.dtype)


# ----------------------------------------------------------------------------------------------------
# Batches


@dataclass(frozen=True)
class Batch:
    """Whole documents, one after the other: T tokens, nothing padded."""

    sample_ids: tuple[str, ...]
    starts: Tensor  # int64 [documents + 1], on the CPU: first row of each document, last element T
    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T], unshifted: 1 where the assistant produced the token
    aux: Tensor  # [T, K, D]
    final: Tensor  # [T, D]

    @property
    def positions(self) -> Tensor:
        """Return the position of each row in its document, int64 [T]."""
        lengths = self.starts.diff()
        first = self.starts[:-1].repeat_interleave(lengths)  # (T,)
        return (torch.arange(int(self.starts[-1])) - first).to(self.input_ids.device)

    @property
    def ends(self) -> Tensor:
        """Return for each row the row behind its document, int64 [T]."""
        return self.starts[1:].repeat_interleave(self.starts.diff()).to(self.input_ids.device)


def pack(samples: Sequence[Sample], dtype: torch.dtype, device: torch.device | str = "cpu") -> Batch:
    """Return one batch of the samples in their order, the states as `dtype`, on `device`."""
    lengths = torch.tensor([0] + [len(sample.input_ids) for sample in samples])
    return Batch(
        sample_ids=tuple(sample.id for sample in samples),
        starts=lengths.cumsum(0),
        input_ids=torch.cat([sample.input_ids for sample in samples]).to(device, torch.int64),
        loss_mask=torch.cat([sample.loss_mask for sample in samples]).to(device, torch.bool),
        aux=torch.cat([sample.aux for sample in samples]).to(device, dtype),  # (T, K, D)
        final=torch.cat([sample.final for sample in samples]).to(device, dtype),  # (T, D)
    )


# ----------------------------------------------------------------------------------------------------
# The module; parameter names are those of the exported file


class RMSNorm(nn.Module):
    """Root mean square norm, computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, in fp32, then in x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Projections of the layer's attention; what attends to what is `joint_attention`'s business."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width = 2 * config.hidden_size  # embedding and hidden state side by side
        self.heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)
        frequencies, self.rope_factor = rope_frequencies(config)
        self.register_buffer("rope_frequencies", frequencies, persistent=False)

    def angles(self, positions: Tensor) -> Tensor:
        """Return RoPE angles, float32 [N, E/2], of `positions` [N]."""
        return positions.float()[:, None] * self.rope_frequencies

    def queries(self, u: Tensor, angles: Tensor) -> Tensor:
        """Return turned queries [N, A, E] of `u` [N, 2H]."""
        return rotate(self.q_proj(u).unflatten(-1, (self.heads["q"], -1)), angles, self.rope_factor)

    def keys_values(self, u: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Return turned keys and values, [N, G, E] each, of `u` [N, 2H]."""
        keys = rotate(self.k_proj(u).unflatten(-1, (self.heads["k"], -1)), angles, self.rope_factor)
        return keys, self.v_proj(u).unflatten(-1, (self.heads["k"], -1))  # (N, G, E) twice


class Layer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(H, eps)  # of the embedding
        self.hidden_norm = RMSNorm(H, eps)  # of the hidden state
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(H, eps)
        self.mlp = MLP(H, config.intermediate_size)

    def attention_input(self, embedded: Tensor, h: Tensor) -> Tensor:
        """Return u = [norm(embedding); norm(h)], [N, 2H]."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(h)), -1)  # (N, 2H)

    def output(self, h: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output [N, H]; the residual is `h` as it came, not normed."""
        r = h + self.self_attn.o_proj(attended.flatten(1))  # (N, H)
        return r + self.mlp(self.post_attention_layernorm(r))


class Drafter(nn.Module):
    """The drafter with the target's embedding [V, H], which is frozen and no part of the state dict."""

    def __init__(self, config: DrafterConfig, embed_tokens: Tensor) -> None:
        super().__init__()
        H = config.hidden_size
        if tuple(embed_tokens.shape) != (config.vocab_size, H):
            raise DrafterError(
                f"the target's embedding is {tuple(embed_tokens.shape)}, expected "
                f"{(config.vocab_size, H)}: a drafter has the target's width and vocabulary"
            )
        self.config = config
        self.fc = nn.Linear(config.captured_layers * H, H, bias=False)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(H, config.rms_norm_eps)
        self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False)
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)

    def initialise(self, target_head: Tensor, target_ids: Tensor, seed: int) -> None:
        """Draw fresh weights by `seed`; lm_head starts as the target's rows of the draft vocabulary.

        `target_head` [V, D], `target_ids` int64 [R].
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 2 and name != "lm_head.weight":
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * INIT_STD)
            self.lm_head.weight.copy_(target_head[target_ids.to(target_head.device)])

    def unroll(self, batch: Batch, rows_of_step: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield for each step t the layer's output [N_t, H] (before `norm`) of the rows asked for.

        `rows_of_step[t]` holds ascending rows, a subset of those of the step before. Step t of row i reads
        the embedding of token i+1+t and, as hidden state, its own output of step t-1 (at step 0: fc of the
        target's states). It attends to the step-0 keys of rows up to i in its document and to its own keys
        of steps 1..t, in one softmax, its query and its own key at position i+t.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        T = len(batch.input_ids)
        positions, last_rows = batch.positions, batch.ends - 1
        h = self.fc(batch.aux.flatten(1))  # (T, H)
        known = torch.arange(T, device=h.device)  # the rows h speaks of
        own: list[tuple[Tensor, Tensor]] = []  # keys and values of steps 1..t, (N, G, E) each
        for t, rows in enumerate(rows_of_step):
            kept = torch.searchsorted(known, rows)  # (N,)
            if t:
                h, known = h[kept], rows
                own = [(keys[kept], values[kept]) for keys, values in own]
            # Behind the end of a document there is no token; such rows are never valid, any token will do.
            following = batch.input_ids[torch.minimum(known + 1 + t, last_rows[known])]
            u = layer.attention_input(self.embed_tokens[following].to(h.dtype), h)  # (T or N, 2H)
            angles = attention.angles(positions[known] + t)
            keys, values = attention.keys_values(u, angles)
            if t == 0:
                context_keys, context_values = keys, values  # (T, G, E)
                h, known, u, angles = h[kept], rows, u[kept], angles[kept]
            else:
                own.append((keys, values))
            queries = attention.queries(u, angles)  # (N, A, E)
            attended = joint_attention(queries, context_keys, context_values, own, rows, batch.starts)
            h = layer.output(h, attended)  # (N, H)
            yield h

    def logits(self, h: Tensor) -> Tensor:
        """Return draft logits [N, R] of layer outputs [N, H]."""
        return self.lm_head(self.norm(h))


def joint_attention(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    rows: Tensor,
    starts: Tensor,
) -> Tensor:
    """Return what each query attends to, [N, A, E].

    `queries` [N, A, E] of `rows` [N] (ascending), `context_keys` and `context_values` [T, G, E] of step 0,
    `own` the keys and values [N, G, E] of steps 1..t, `starts` the documents' first rows. Document by
    document, so no score between documents is ever computed; recomputed in the backward pass, so the scores
    of one document at a time are held.
    """
    bounds = torch.searchsorted(rows, starts.to(rows.device)).tolist()
    pieces = []
    for document, (first, last) in enumerate(pairwise(bounds)):
        if first == last:
            continue
        start = int(starts[document])
        stop = int(rows[last - 1]) + 1  # keys behind the last query of the document are never attended to
        arguments = (
            queries[first:last],
            context_keys[start:stop],
            context_values[start:stop],
            rows[first:last] - start,
            *(tensor[first:last] for pair in own for tensor in pair),
        )
        pieces.append(checkpoint(_attend, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(pieces) if pieces else queries  # (N, A, E)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, rows: Tensor, *own: Tensor) -> Tensor:
    """Attention in one document: causal over `keys` [L, G, E], plus the own keys of each of `rows` [N]."""
    N, A, E = queries.shape
    L, G, _ = keys.shape
    grouped = queries.view(N, G, A // G, E).permute(1, 2, 0, 3)  # (G, A/G, N, E)
    scores = grouped @ keys.permute(1, 2, 0)[:, None]  # (G, A/G, N, L)
    future = torch.arange(L, device=rows.device) > rows[:, None]  # (N, L)
    scores = scores.masked_fill(future, float("-inf"))
    if own:
        own_keys = torch.stack(own[0::2], 1).permute(2, 0, 1, 3)  # (G, N, t, E)
        own_values = torch.stack(own[1::2], 1).permute(2, 0, 1, 3)  # (G, N, t, E)
        own_scores = torch.einsum("ghne,gnte->ghnt", grouped, own_keys)  # (G, A/G, N, t)
        scores = torch.cat((scores, own_scores), -1)  # (G, A/G, N, L+t)
    weights = torch.softmax(scores.float() * E**-0.5, -1).to(values.dtype)
    attended = weights[..., :L] @ values.permute(1, 0, 2)[:, None]  # (G, A/G, N, E)
    if own:
        attended = attended + torch.einsum("ghnt,gnte->ghne", weights[..., L:], own_values)
    return attended.permute(2, 0, 1, 3).reshape(N, A, E)
