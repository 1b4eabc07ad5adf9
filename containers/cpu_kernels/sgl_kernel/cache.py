"""Bookkeeping of the paged KV cache: which cache slot holds which token of which request.

Legend: R rows of the request table, C its columns (`pool_len`), B requests in the batch,
P draft branches per request (`topk`), S draft steps (`num_steps`).

`req_to_token` int32 [R, C] maps (request row, token position) to a cache slot. `req_pool_indices` [B] picks
the rows. Every function that fills an argument says so; the others return a new tensor.
"""

import ctypes

import torch


def _positions(req_pool_indices, start_offset, end_offset):
    """Lists positions start to end-1 of every request in order: row and column of `req_to_token`, int64 [N]."""
    lengths = (end_offset - start_offset).long()  # [B]
    rows = req_pool_indices.long().repeat_interleave(lengths)  # [N]
    skipped = start_offset.long() - (lengths.cumsum(0) - lengths)  # [B]
    columns = torch.arange(rows.numel()) + skipped.repeat_interleave(lengths)  # [N]
    return rows, columns


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Fills `req_to_token` from start to end of each request with the next slots of `out_cache_loc` [>=N].

    Caller: srt/mem_cache/allocation.py (slots for the draft tokens of a decode step).
    """
    rows, columns = _positions(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Fills the first N entries of `out_cache_loc` with the slots of positions start to end of each request.

    Callers: kernels/ops/speculative/cache_locs.py (verification), srt/speculative/spec_utils.py (accepted tokens).
    """
    rows, columns = _positions(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """Fills `out_cache_loc` [B*P*S] with the P*S slots that follow the committed tokens of each request.

    Caller: srt/speculative/eagle_worker_common.py (where the draft model writes its keys and values).
    """
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps)  # [B, P*S]
    slots = req_to_token[req_pool_indices.long()[:, None], columns]  # [B, P*S]
    out_cache_loc.copy_(slots.flatten())


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """Returns one table row per draft branch, [B*P, C]: the committed slots, then the branch's own S slots.

    Columns after seq_len + S are never read and hold nothing in particular.
    Caller: srt/layers/attention/intel_amx_backend.py (IntelAMXMultiStepDraftBackend).
    """
    batch = seq_lens.numel()
    width = min(int(seq_lens.max()) + num_steps, pool_len) if batch else 0
    committed = req_to_token[req_pool_indices.long(), :width]  # [B, width]
    table = req_to_token.new_zeros(batch * topk, pool_len)  # [B*P, C]
    table[:, :width] = committed.repeat_interleave(topk, 0)
    lengths = seq_lens.long().repeat_interleave(topk)[:, None]  # [B*P, 1]
    steps = torch.arange(num_steps)  # [S]
    branches = torch.arange(topk).repeat(batch)[:, None] * num_steps  # [B*P, 1]
    rows = req_pool_indices.long().repeat_interleave(topk)[:, None]  # [B*P, 1]
    return table.scatter_(1, lengths + steps, req_to_token[rows, lengths + branches + steps])


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copies cache rows `src_loc` [N] to `tgt_loc` [N] in place in every buffer; all reads precede the writes.

    `data_ptrs` [L] are the addresses of the buffers, `strides` [L] their bytes per slot.
    Caller: kernels/ops/kvcache/cache_move.py (moves accepted tree tokens into the committed part).
    """
    slots = int(torch.maximum(tgt_loc, src_loc).max()) + 1
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * row_bytes)).from_address(address)
        rows = torch.frombuffer(memory, dtype=torch.uint8).view(slots, row_bytes)
        rows[tgt_loc] = rows[src_loc]
