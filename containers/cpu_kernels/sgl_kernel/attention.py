"""The two attention operators of SGLang's backend intel_amx, on the paged KV cache.

Legend: B requests, N new tokens per request, T new tokens of all requests, L tokens seen by one request,
M cache slots, H query heads, G key/value heads, D key width, E value width (absorbed MLA: G = 1, D > E, and the
value cache is the first E columns of the key cache), R rows and C columns of the request table.

`req_to_token` int32 [R, C] maps (request row, token position) to a cache slot; `req_pool_indices` [B] picks rows.
Caller of both: srt/layers/attention/intel_amx_backend.py. fp32 and bf16; sums are taken in fp32 by torch.
"""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

SHORT = 64  # new tokens per request up to which a batch is computed at once (decoding, verification)

DECODE = """decode_attention_cpu(
    Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, float v_scale, Tensor(c!) output,
    Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token, Tensor req_pool_indices,
    Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size,
    Tensor? encoder_lens, Tensor? sinks) -> ()"""
EXTEND = """extend_attention_cpu(
    Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, Tensor k_buffer, Tensor v_buffer,
    float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens,
    Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap,
    bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask,
    bool is_causal) -> ()"""


def _refuse_unsupported(**features):
    """Raises for a feature of the compiled kernels that this stand-in lacks; `features` name → in use."""
    used = [name for name, in_use in features.items() if in_use]
    if used:
        raise NotImplementedError(
            f"sgl_kernel stand-in: attention with {', '.join(used)} is not implemented; "
            "serve this model on a GPU or on a CPU with SGLang's compiled kernels"
        )


def _gather(cache, slots):
    """Rows `slots` [...] of a cache [M, G, W] → [..., G, W]; index_select is 3 times as fast as indexing."""
    return cache.index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[1:])


def _gather_pair(k_cache, v_cache, slots):
    """Keys [..., G, D] and values [..., G, E] at `slots` [...]."""
    keys = _gather(k_cache, slots)
    if v_cache.data_ptr() == k_cache.data_ptr():  # absorbed MLA
        return keys, keys[..., : v_cache.shape[-1]]
    return keys, _gather(v_cache, slots)


def _seen(query_positions, key_positions, window):
    """True where a query may see a key: not later, and within the last `window` tokens (0: no limit)."""
    seen = key_positions <= query_positions
    return seen & (key_positions > query_positions - window) if window > 0 else seen


def _attend_with_sinks(query, keys, values, seen, scale, sinks):
    """Attention written out, because torch's own knows no sinks; in fp32.

    A sink is a key without a value, one per head: it takes its share of the softmax and adds nothing (gpt-oss).
    query [B, N, H, D], keys [B, L, G, D], values [B, L, G, E], seen bool [B, N, L], sinks [H] → [B, N, H, E].
    """
    repeats = query.shape[2] // keys.shape[2]
    keys, values = (part.float().repeat_interleave(repeats, 2) for part in (keys, values))  # [B, L, H, D or E]
    scores = torch.einsum("bnhd,blhd->bhnl", query.float(), keys) * scale  # [B, H, N, L]
    scores = scores.masked_fill(~seen[:, None], -torch.inf)  # [B, H, N, L]
    column = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)  # [B, H, N, 1]
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]  # [B, H, N, L]
    return torch.einsum("bhnl,blhe->bnhe", weights, values).to(query.dtype)  # [B, N, H, E]


def _attend_short(query, keys, values, seen, scale):
    """Few queries per request: the H/G query heads of a key head become rows of one matrix product.

    query [B, N, H, D], keys [B, L, G, D], values [B, L, G, E], seen bool [B, N, L] → [B, N, H, E].
    """
    batch, new, heads, _ = query.shape
    groups = keys.shape[2]
    rows = query.unflatten(2, (groups, heads // groups)).permute(0, 2, 3, 1, 4)  # [B, G, H/G, N, D]
    if new > 1:
        seen = seen.repeat(1, heads // groups, 1)  # [B, H/G*N, L]
    output = scaled_dot_product_attention(
        rows.flatten(2, 3),  # [B, G, H/G*N, D]
        keys.transpose(1, 2),  # [B, G, L, D]
        values.transpose(1, 2),  # [B, G, L, E]
        attn_mask=seen[:, None],  # [B, 1, H/G*N or 1, L]
        scale=scale,
    )  # [B, G, H/G*N, E]
    return output.unflatten(2, (-1, new)).permute(0, 3, 1, 2, 4).reshape(batch, new, heads, -1)


def _attend_long(query, keys, values, seen, scale):
    """Many queries of one request; values are widened to the keys because the fused kernel wants equal widths.

    query [N, H, D], keys [L, G, D], values [L, G, E], seen bool [N, L] or None (plain causal, N = L) → [N, H, E].
    """
    width, missing = values.shape[-1], keys.shape[-1] - values.shape[-1]
    if missing:
        values = pad(values, (0, missing))  # [L, G, D]
    output = scaled_dot_product_attention(
        query.transpose(0, 1)[None],  # [1, H, N, D]
        keys.transpose(0, 1)[None],  # [1, G, L, D]
        values.transpose(0, 1)[None],  # [1, G, L, D]
        attn_mask=seen,
        is_causal=seen is None,
        scale=scale,
        enable_gqa=True,
    )  # [1, H, N, D]
    return output[0].transpose(0, 1)[..., :width]


def _attend_batch(
    query, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, scale, window, sinks=None, tree_mask=None
):  # fmt: skip
    """The last N tokens of every request attend to all its slots: query [B, N, H, D] → [B, N, H, E]."""
    new = query.shape[1]
    positions = torch.arange(int(seq_lens.max()))  # [L] of the longest request
    first = seq_lens[:, None, None] - new  # [B, 1, 1]
    seen = _seen(first + torch.arange(new)[:, None], positions, window)  # [B, N, L]
    if tree_mask is not None:  # bool [B, N, N]
        columns = (positions - first).clamp(min=0, max=new - 1)  # [B, 1, L]
        seen &= (positions < first) | tree_mask.gather(2, columns.expand_as(seen))
    slots = req_to_token[req_pool_indices, : positions.numel()]  # [B, L]
    slots = torch.where(positions < seq_lens[:, None], slots, slots[:, :1])  # nothing of another request
    keys, values = _gather_pair(k_cache, v_cache, slots)  # [B, L, G, D], [B, L, G, E]
    if sinks is not None:
        return _attend_with_sinks(query, keys, values, seen, scale, sinks)
    return _attend_short(query, keys, values, seen, scale)


def decode_attention_cpu(
    query, k_cache, v_cache, k_scale, v_scale, output, key, value, loc, attn_logits, req_to_token,
    req_pool_indices, seq_lens, sm_scale, logit_cap, is_cross_attn, sliding_window_size, encoder_lens, sinks,
):  # fmt: skip
    """Writes the new keys and values to the cache, then fills `output` with the attention of one token per request.

    query [B, H, D], k_cache [M, G, D], v_cache [M, G, E], output [B, H, E], key [B, G, D] and value [B, G, E] (or
    None: already written), loc [B] their slots, seq_lens int64 [B] with the new token, sinks [H] or None.
    `attn_logits` is scratch of the compiled kernel and stays unused. Raises NotImplementedError for cross attention,
    a logit cap or a scaled FP8 cache.
    """
    _refuse_unsupported(
        cross_attention=is_cross_attn, logit_cap=logit_cap > 0, scaled_cache=k_scale != 1.0 or v_scale != 1.0
    )  # fmt: skip
    if key is not None:
        k_cache.index_copy_(0, loc, key)
        if v_cache.data_ptr() != k_cache.data_ptr():
            v_cache.index_copy_(0, loc, value)
    if seq_lens.numel():
        output.copy_(
            _attend_batch(
                query[:, None], k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                sm_scale, sliding_window_size, sinks,
            )[:, 0]
        )  # fmt: skip


def extend_attention_cpu(
    q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, k_scale, v_scale, req_to_token,
    req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, max_len_extend, sm_scale, logit_cap,
    is_cross_attn, sliding_window_size, encoder_lens, sinks, tree_mask, is_causal,
):  # fmt: skip
    """Fills `o_extend` with the attention of several new tokens per request to the prefix and to each other.

    q_extend [T, H, D], k_buffer [M, G, D], v_buffer [M, G, E] (the new keys and values are already in them;
    k_extend [T, G, D], v_extend [T, G, E] repeat them or are None), o_extend [T, H, E], seq_lens int64 [B] with the
    new tokens, extend_seq_lens and extend_start_loc [B] the part of T that is the request's.
    `tree_mask` bool [B*N*N] or None: which new token sees which, for N new tokens in every request. sinks [H] or None.
    Raises NotImplementedError for cross attention, a logit cap, a scaled FP8 cache or non-causal attention.
    """
    _refuse_unsupported(
        cross_attention=is_cross_attn, logit_cap=logit_cap > 0,
        scaled_cache=k_scale != 1.0 or v_scale != 1.0, non_causal=not is_causal,
    )  # fmt: skip
    batch, total = seq_lens.numel(), q_extend.shape[0]
    if not batch:
        return
    if tree_mask is not None or (total == batch * max_len_extend and max_len_extend <= SHORT):
        if tree_mask is not None:
            tree_mask = tree_mask.view(batch, max_len_extend, max_len_extend)
        attended = _attend_batch(
            q_extend.unflatten(0, (batch, max_len_extend)), k_buffer, v_buffer, req_to_token,
            req_pool_indices, seq_lens, sm_scale, sliding_window_size, sinks, tree_mask,
        )  # fmt: skip
        o_extend.copy_(attended.flatten(0, 1))
        return
    columns = (req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc)
    for row, length, new, start in zip(*(column.tolist() for column in columns), strict=True):
        part, prefix, seen = slice(start, start + new), length - new, None
        if prefix == 0 and k_extend is not None:
            keys, values = k_extend[part], v_extend[part]
        else:
            keys, values = _gather_pair(k_buffer, v_buffer, req_to_token[row, :length])
        if prefix or sinks is not None or 0 < sliding_window_size < length:
            positions = torch.arange(length)
            seen = _seen(positions[prefix:, None], positions, sliding_window_size)  # [N, L]
        if sinks is not None:
            attended = _attend_with_sinks(q_extend[part][None], keys[None], values[None], seen[None], sm_scale, sinks)
            o_extend[part] = attended[0]
        else:
            o_extend[part] = _attend_long(q_extend[part], keys, values, seen, sm_scale)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define(DECODE)
_library.define(EXTEND)
_library.impl("decode_attention_cpu", decode_attention_cpu, "CPU")
_library.impl("extend_attention_cpu", extend_attention_cpu, "CPU")
