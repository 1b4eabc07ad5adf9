"""Draft trees of speculative decoding: building, greedy verification, bookkeeping of accepted tokens.

Legend: B requests in the batch, N nodes per tree (`draft_token_num`, node 0 is the last committed token),
P branches per step (`topk`), E entries per request in `accept_index` (depth + 1).
A node's flat index is request * N + node. The argument names are SGLang's, spelling included.
"""

import torch


def _parents(parent_list, selected_index, topk):
    """Parent of every node, int64 [B, N]; -1 for the root, -2 where the parent was not selected.

    `selected_index` [B, N-1] numbers the kept candidates in the order drafted; candidate c grew out of beam
    c // P, and `parent_list` [B, >=beams] names the candidate on that beam (beam 0 is the root).
    """
    beams = selected_index // topk  # [B, N-1]
    if parent_list.shape[1] == 0:
        found, position = torch.zeros_like(beams, dtype=torch.bool), beams
    else:
        candidates = parent_list.gather(1, beams.clamp(max=parent_list.shape[1] - 1))  # [B, N-1]
        same = candidates[:, :, None] == selected_index[:, None, :]  # [B, N-1, N-1]
        found, position = same.any(2), same.int().argmax(2) + 1  # [B, N-1]
    parents = torch.where(found, position, -2).masked_fill(beams == 0, 0)  # [B, N-1]
    return torch.nn.functional.pad(parents, (1, 0), value=-1)  # [B, N]


def _first(flags):
    """Index of the first True along the last axis, -1 where there is none; [..., N] to [...]."""
    return torch.where(flags.any(-1), flags.int().argmax(-1), -1)


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    """Fills the visibility, positions and links of the draft trees.

    Fills `tree_mask` bool [B*N*N] (node i sees node j: its ancestors and itself; mode 1 = QLEN_ONLY, the only one
    SGLang uses on a CPU), `positions` [B*N] (committed length + depth of the node), `retrive_index` [B, N]
    (flat index), `retrive_next_token` [B, N] (first child or -1), `retrive_next_sibling` [B, N] (next child of
    the same parent or -1). Caller: srt/speculative/eagle_utils.py.
    """
    if tree_mask_mode != 1:
        raise NotImplementedError(f"tree_mask_mode {tree_mask_mode}: expected 1 (QLEN_ONLY)")
    batch, nodes = retrive_index.shape
    parents = _parents(parent_list, selected_index, topk)  # [B, N]
    sees = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)  # [B, N, N]
    requests = torch.arange(batch)
    for node in range(1, nodes):  # a parent comes before its children
        inherited = sees[requests, parents[:, node].clamp(min=0)]  # [B, N]
        sees[:, node] |= inherited
    tree_mask[: batch * nodes * nodes] = sees.flatten()
    positions.copy_((verified_seq_len[:, None] + sees.sum(2) - 1).flatten())
    order = torch.arange(nodes)
    retrive_index.copy_(requests[:, None] * nodes + order)
    retrive_next_token.copy_(_first(parents[:, None, :] == order[:, None]))  # [B, N]
    siblings = (parents[:, :, None] == parents[:, None, :]) & (order > order[:, None])  # [B, N, N]
    retrive_next_sibling.copy_(_first(siblings))  # [B, N]


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walks each tree along the target's argmax and records the accepted path.

    `candidates` [B, N] are the drafted tokens, `target_predict` [B, N] the target's argmax after each node.
    Fills `predicts` [B*N] (the target's token at every accepted node), `accept_index` [B, E] (flat indices of the
    path from the root, rest untouched), `accept_token_num` [B] (accepted drafts, without the root).
    Caller: srt/speculative/eagle_utils.py.
    """
    trees = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        target_predict.tolist(),
        strict=True,
    )
    for request, (drafted, flat, first_child, next_sibling, target) in enumerate(trees):
        path = [0]
        while len(path) < accept_index.shape[1]:
            node = first_child[path[-1]]
            while node != -1 and drafted[node] != target[path[-1]]:
                node = next_sibling[node]
            if node == -1:
                break
            path.append(node)
        accepted = torch.tensor([flat[node] for node in path])
        accept_index[request, : len(path)] = accepted
        accept_token_num[request] = len(path) - 1
        predicts[accepted] = torch.tensor([target[node] for node in path], dtype=predicts.dtype)


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """Fills `bonus_tokens` [B] with the last accepted token of each request.

    `accept_tokens` [B*E] (E = `accept_stride`), `accept_lens` [B] counts the root.
    Caller: kernels/ops/speculative/eagle.py.
    """
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1  # [B]
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Fills the head of `accept_out_cache_loc` with the cache slots of the accepted nodes, in order.

    `accept_index` [B, E] holds flat indices into `out_cache_loc` [B*N], -1 where there is none.
    Caller: kernels/ops/speculative/eagle.py.
    """
    slots = out_cache_loc[accept_index[accept_index >= 0].long()]
    accept_out_cache_loc[: slots.numel()] = slots


def rotate_input_ids_cpu(input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None):
    """Shifts each request's ids one to the left in place and appends its new token.

    `input_ids` [T]; `topk_index` [B] (or [B, 1]) are the new tokens; they go to the last place of the request, or
    to `select_index` [B]. Caller: kernels/ops/speculative/multi_layer_eagle.py.
    """
    starts, lengths = extend_start_loc.tolist(), extend_seq_lens.tolist()
    for start, length in zip(starts, lengths, strict=True):
        if length:
            input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
    last = extend_start_loc + extend_seq_lens - 1 if select_index is None else select_index  # [B]
    filled = extend_seq_lens > 0  # [B]
    input_ids[last[filled].long()] = topk_index.flatten()[filled].to(input_ids.dtype)
