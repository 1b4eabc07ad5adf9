"""The pure-torch CPU kernels against loops written out here, one token and one head at a time.

    python -m pytest tests/test_cpu_kernels.py

Legend: B requests, N new tokens per request (or nodes per tree), L tokens seen, M cache slots, H query heads,
G key/value heads, D key width, E value width.
"""

import math
import random
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import aerie_cpu_kernels
import sgl_kernel
from aerie_cpu_kernels import fused_steps

KERNELS = Path(__file__).parents[1] / "containers" / "cpu_kernels"
SHAPES = {"gqa": (6, 2, 16, 16), "one_to_one": (3, 3, 8, 8), "absorbed_mla": (4, 1, 24, 16)}  # H, G, D, E
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
SLOTS, CONTEXT = 600, 160


class Cache:
    """A paged cache with scattered slots; every slot that no request of the test owns holds NaN."""

    def __init__(self, shape, dtype, lengths):
        heads, groups, key_width, value_width = SHAPES[shape]
        generator = torch.Generator().manual_seed(7)
        self.lengths, self.dtype, self.generator = lengths, dtype, generator
        self.heads, self.groups, self.key_width, self.value_width = heads, groups, key_width, value_width
        slots = torch.randperm(SLOTS, generator=generator).to(torch.int32)
        self.req_to_token = slots[torch.randint(SLOTS, (len(lengths) + 3, CONTEXT), generator=generator)]
        self.rows = torch.randperm(len(lengths) + 3, generator=generator)[: len(lengths)]
        used = 0
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            self.req_to_token[row, :length] = slots[used : used + length]
            used += length
        self.keys = torch.full((SLOTS, groups, key_width), math.nan, dtype=dtype)
        owned = slots[:used].long()
        self.keys[owned] = self.random(used, groups, key_width)
        if shape == "absorbed_mla":
            self.values = self.keys[..., :value_width]
        else:
            self.values = torch.full((SLOTS, groups, value_width), math.nan, dtype=dtype)
            self.values[owned] = self.random(used, groups, value_width)

    def random(self, *size):
        return torch.randn(*size, generator=self.generator).to(self.dtype)

    def slots(self, request):
        return self.req_to_token[self.rows[request], : self.lengths[request]].long()

    def seq_lens(self):
        return torch.tensor(self.lengths)


def naive_attention(query, keys, values, visible, scale, sinks=None):
    """query [N, H, D], keys [L, G, D], values [L, G, E], visible [N][L], sinks [H] or None → [N, H, E] in fp64."""
    new, heads, _ = query.shape
    output = torch.zeros(new, heads, values.shape[2], dtype=torch.float64)
    for token in range(new):
        for head in range(heads):
            group = head * keys.shape[1] // heads
            seen = [position for position in range(keys.shape[0]) if visible[token][position]]
            scores = [float(query[token, head].double() @ keys[p, group].double()) * scale for p in seen]
            largest = max(scores)
            weights = [math.exp(score - largest) for score in scores]
            total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[head]) - largest))
            for weight, position in zip(weights, seen, strict=True):
                output[token, head] += weight / total * values[position, group].double()
    return output


def causal(new, length, window=0):
    return [
        [p <= length - new + n and (not window or p > length - new + n - window) for p in range(length)]
        for n in range(new)
    ]


def decode(cache, query, key, value, window=0, **changed):
    output = torch.empty(len(cache.lengths), cache.heads, cache.value_width, dtype=cache.dtype)
    last = torch.stack([cache.slots(request)[-1] for request in range(len(cache.lengths))])
    arguments = {
        "query": query, "k_cache": cache.keys, "v_cache": cache.values, "k_scale": 1.0, "v_scale": 1.0,
        "output": output, "key": key, "value": value, "loc": last, "attn_logits": torch.empty(0),
        "req_to_token": cache.req_to_token, "req_pool_indices": cache.rows, "seq_lens": cache.seq_lens(),
        "sm_scale": 0.3, "logit_cap": 0.0, "is_cross_attn": False, "sliding_window_size": window,
        "encoder_lens": None, "sinks": None,
    }  # fmt: skip
    torch.ops.sgl_kernel.decode_attention_cpu(*{**arguments, **changed}.values())
    return output


def extend(cache, query, new, window=0, tree_mask=None, pass_keys=True, **changed):
    output = torch.empty(sum(new), cache.heads, cache.value_width, dtype=cache.dtype)
    pieces = [cache.slots(request)[-count:] for request, count in enumerate(new)]
    fresh = torch.cat(pieces)
    starts = [sum(new[:request]) for request in range(len(new))]
    arguments = {
        "q": query, "k": cache.keys[fresh] if pass_keys else None, "v": cache.values[fresh] if pass_keys else None,
        "o": output, "k_buffer": cache.keys, "v_buffer": cache.values, "k_scale": 1.0, "v_scale": 1.0,
        "req_to_token": cache.req_to_token, "req_pool_indices": cache.rows, "seq_lens": cache.seq_lens(),
        "extend_seq_lens": torch.tensor(new, dtype=torch.int32),
        "extend_start_loc": torch.tensor(starts, dtype=torch.int32), "max_len_extend": max(new),
        "sm_scale": 0.3, "logit_cap": 0.0, "is_cross_attn": False, "sliding_window_size": window,
        "encoder_lens": None, "sinks": None, "tree_mask": tree_mask, "is_causal": True,
    }  # fmt: skip
    torch.ops.sgl_kernel.extend_attention_cpu(*{**arguments, **changed}.values())
    return output


def assert_extend_equals_loops(cache, new, visible, **options):
    query = cache.random(sum(new), cache.heads, cache.key_width)
    output = extend(cache, query, new, **options)
    start = 0
    for request, count in enumerate(new):
        slots = cache.slots(request)
        expected = naive_attention(
            query[start : start + count], cache.keys[slots], cache.values[slots], visible(request, count), 0.3,
            options.get("sinks"),
        )  # fmt: skip
        torch.testing.assert_close(
            output[start : start + count].double(), expected, atol=TOLERANCE[cache.dtype], rtol=TOLERANCE[cache.dtype]
        )
        start += count


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [0, 4])
def test_decoding_writes_the_new_token_and_attends_to_its_own_request_only(shape, dtype, window):
    cache = Cache(shape, dtype, [1, 9, 3, 30])
    before = cache.keys.clone()
    query = cache.random(4, cache.heads, cache.key_width)
    key = cache.random(4, cache.groups, cache.key_width)
    value = (
        key[..., : cache.value_width] if shape == "absorbed_mla" else cache.random(4, cache.groups, cache.value_width)
    )
    output = decode(cache, query, key, value, window)
    for request, length in enumerate(cache.lengths):
        slots = cache.slots(request)
        assert torch.equal(cache.keys[slots[-1]], key[request])
        assert torch.equal(cache.values[slots[-1]], value[request])
        assert torch.equal(cache.keys[slots[:-1]], before[slots[:-1]])
        expected = naive_attention(
            query[request : request + 1], cache.keys[slots], cache.values[slots], causal(1, length, window), 0.3
        )
        torch.testing.assert_close(output[request].double(), expected[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_decoding_without_a_new_key_leaves_the_cache_alone():
    cache = Cache("gqa", torch.float32, [5])
    before = cache.keys.clone()
    decode(cache, cache.random(1, cache.heads, cache.key_width), None, None)
    assert torch.equal(cache.keys.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("new", [[1, 7, 3, 20], [1, 1, 1, 1], [3, 3, 3, 3]], ids=["uneven", "single", "even"])
def test_prefill_attends_causally_with_and_without_a_prefix(shape, dtype, new):
    cache = Cache(shape, dtype, [3, 7, 5, 31])  # with uneven lengths, request 1 has no prefix
    assert_extend_equals_loops(cache, new, lambda request, count: causal(count, cache.lengths[request]))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_too_long_for_the_batched_path_gives_the_same_attention(shape):
    cache = Cache(shape, torch.float32, [70, 100])
    assert_extend_equals_loops(cache, [70, 70], lambda request, count: causal(count, cache.lengths[request]))


@pytest.mark.parametrize("new", [[9, 6, 20], [5, 5, 5]], ids=["uneven", "even"])
def test_prefill_stays_within_the_sliding_window(new):
    cache = Cache("gqa", torch.float32, [9, 6, 31])
    assert_extend_equals_loops(
        cache, new, lambda request, count: causal(count, cache.lengths[request], window=4), window=4
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("new", [[1, 7, 3, 20], [3, 3, 3, 3]], ids=["uneven", "even"])
def test_a_sink_takes_its_share_of_a_prefill(shape, dtype, window, new):
    lengths = [1, 12, 9, 20] if max(new) > 3 else [3, 12, 9, 20]
    cache = Cache(shape, dtype, lengths)

    def visible(request, count):
        return causal(count, lengths[request], window)

    assert_extend_equals_loops(cache, new, visible, window=window, sinks=cache.random(cache.heads))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sink_takes_its_share_of_a_decoding_step(shape):
    lengths = [1, 12, 5]
    cache = Cache(shape, torch.float32, lengths)
    query, sinks = cache.random(3, cache.heads, cache.key_width), cache.random(cache.heads).bfloat16()
    output = decode(cache, query, None, None, sinks=sinks)
    for request, length in enumerate(lengths):
        slots = cache.slots(request)
        expected = naive_attention(
            query[request][None], cache.keys[slots], cache.values[slots], causal(1, length), 0.3, sinks
        )
        torch.testing.assert_close(output[request][None].double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("new", [[9, 2], [2, 2]], ids=["uneven", "even"])
def test_prefill_reads_the_cache_where_no_new_keys_are_passed(new):
    cache = Cache("gqa", torch.float32, [9, 6])
    assert_extend_equals_loops(
        cache, new, lambda request, count: causal(count, cache.lengths[request]), pass_keys=False
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_verification_sees_the_prefix_and_the_ancestors_in_the_tree(shape, dtype):
    nodes, lengths = 5, [5, 12, 30]  # request 0 has no prefix
    cache = Cache(shape, dtype, lengths)
    generator = random.Random(3)
    trees = []
    for _ in lengths:
        parents = [None, *(generator.randrange(node) for node in range(1, nodes))]
        trees.append([[other in ancestors(parents, node) for other in range(nodes)] for node in range(nodes)])
    trees[1][nodes - 1][0] = False  # hiding the root hides nothing of the prefix

    def visible(request, count):
        return [[True] * (lengths[request] - count) + trees[request][node] for node in range(count)]

    assert_extend_equals_loops(cache, [nodes] * 3, visible, tree_mask=torch.tensor(trees).flatten())


@pytest.mark.parametrize(
    ("call", "changed", "named"),
    [
        ("decode", {"logit_cap": 30.0}, "logit_cap"),
        ("decode", {"k_scale": 0.5}, "scaled_cache"),
        ("extend", {"is_cross_attn": True}, "cross_attention"),
        ("extend", {"is_causal": False}, "non_causal"),
        ("extend", {"v_scale": 2.0}, "scaled_cache"),
    ],
)
def test_a_feature_the_kernels_lack_is_refused_by_name(call, changed, named):
    cache = Cache("gqa", torch.float32, [4])
    query = cache.random(1, cache.heads, cache.key_width)
    with pytest.raises(NotImplementedError, match=named):
        decode(cache, query, None, None, **changed) if call == "decode" else extend(cache, query, [1], **changed)


def table(rows=6, columns=40):
    """A request table of distinct slots, and three of its rows."""
    slots = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    return slots.view(rows, columns), torch.tensor([4, 0, 3])


def test_new_slots_are_entered_between_start_and_end_of_each_request():
    req_to_token, rows = table()
    start, end = torch.tensor([5, 0, 9], dtype=torch.int32), torch.tensor([8, 0, 13], dtype=torch.int32)
    slots = torch.arange(1000, 1007)
    expected, given = req_to_token.clone(), iter(slots.tolist())
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        for column in range(first, last):
            expected[row, column] = next(given)
    sgl_kernel.assign_req_to_token_pool_cpu(rows, req_to_token, start, end, slots, req_to_token.shape[1])
    assert torch.equal(req_to_token, expected)


def test_the_slots_of_a_range_of_positions_are_listed_request_by_request():
    req_to_token, rows = table()
    start, end = torch.tensor([5, 7, 0]), torch.tensor([8, 7, 4])
    expected = [
        int(req_to_token[row, column])
        for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True)
        for column in range(first, last)
    ]
    slots = torch.full((12,), -5)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, req_to_token, start, end, slots, req_to_token.shape[1])
    assert slots.tolist() == expected + [-5] * 5


def test_draft_slots_follow_the_committed_tokens():
    req_to_token, rows = table()
    lengths, slots = torch.tensor([5, 0, 11]), torch.empty(3 * 2 * 3, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(rows, req_to_token, lengths, slots, 40, 2, 3)
    assert slots.tolist() == [
        int(req_to_token[row, length + step])
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
        for step in range(6)
    ]


def test_each_draft_branch_gets_a_row_with_the_committed_slots_and_its_own():
    req_to_token, rows = table()
    lengths, branches, steps = torch.tensor([5, 1, 11]), 3, 2
    drafted = sgl_kernel.build_draft_decode_metadata_cpu(req_to_token, rows, lengths, branches, steps, 40)
    assert drafted.shape == (9, 40)
    assert drafted.dtype == torch.int32
    for request, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        for branch in range(branches):
            own = [int(req_to_token[row, length + branch * steps + step]) for step in range(steps)]
            expected = req_to_token[row, :length].tolist() + own
            assert drafted[request * branches + branch, : length + steps].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moving_cache_rows_reads_before_it_writes_in_every_layer(dtype):
    layers = [torch.randn(20, 2, 4).to(dtype), torch.randn(20, 3, 4).to(dtype)]
    source, target = torch.tensor([3, 4, 9, 0]), torch.tensor([2, 3, 4, 0])
    expected = [layer.clone() for layer in layers]
    for layer, copy in zip(layers, expected, strict=True):
        for here, there in zip(source.tolist(), target.tolist(), strict=True):
            copy[there] = layer[here]
    sgl_kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64),
        torch.tensor([layer[0].numel() * layer.element_size() for layer in layers]),
        target,
        source,
    )
    assert all(torch.equal(layer, copy) for layer, copy in zip(layers, expected, strict=True))


def ancestors(parents, node):
    """A node and all nodes above it."""
    return {node} if parents[node] is None else {node, *ancestors(parents, parents[node])}


def draft_tree(generator, branches, steps, nodes):
    """Drafts as EAGLE does and keeps the best candidates.

    Candidates are numbered in the order drafted; each step grows `branches` children of each beam, and the best
    `branches` of the new ones are the next beams. Returns the beams' candidates (first entry: the root), the kept
    numbers and the parent of each kept node (node 0 is the root).
    """
    candidates = [(generator.random(), None) for _ in range(branches)]  # (score, parent's number)
    beams, listed = list(range(branches)), [-1, *range(branches)]
    for _ in range(1, steps):
        first = len(candidates)
        for beam in beams:
            candidates += [(candidates[beam][0] * generator.random(), beam) for _ in range(branches)]
        beams = sorted(range(first, len(candidates)), key=lambda number: -candidates[number][0])[:branches]
        listed += beams
    kept = sorted(sorted(range(len(candidates)), key=lambda number: -candidates[number][0])[: nodes - 1])
    parents = [None] + [0 if candidates[c][1] is None else kept.index(candidates[c][1]) + 1 for c in kept]
    return listed[: 1 + branches * (steps - 1)] if steps > 1 else [], kept, parents


def build_trees(branches, steps, nodes, requests=6):
    """Draws trees and runs the kernel: parents, committed lengths, and what the kernel filled in."""
    generator = random.Random(branches * 100 + steps)
    listed, kept, parents = zip(*(draft_tree(generator, branches, steps, nodes) for _ in range(requests)), strict=True)
    lengths = torch.tensor([generator.randrange(50) for _ in range(requests)])
    mask = torch.ones(requests * nodes * nodes, dtype=torch.bool)
    positions = torch.empty(requests * nodes, dtype=torch.int64)
    index, child, sibling = torch.full((3, requests, nodes), -1)
    sgl_kernel.build_tree_kernel_efficient_cpu(
        torch.tensor(listed, dtype=torch.int64), torch.tensor(kept), lengths, mask, positions, index, child,
        sibling, branches, steps, nodes, 1,
    )  # fmt: skip
    return parents, lengths, mask.view(requests, nodes, nodes), positions.view(requests, nodes), index, child, sibling


TREES = pytest.mark.parametrize(
    ("branches", "steps", "nodes"), [(1, 3, 4), (4, 3, 8), (2, 4, 7), (4, 1, 5), (1, 1, 2), (3, 3, 12)]
)


@TREES
def test_a_tree_is_linked_and_masked_as_it_was_drafted(branches, steps, nodes):
    parents, lengths, mask, positions, index, child, sibling = build_trees(branches, steps, nodes)
    for request, parent in enumerate(parents):
        for node in range(nodes):
            above = ancestors(parent, node)
            assert mask[request, node].tolist() == [other in above for other in range(nodes)]
            assert int(positions[request, node]) == int(lengths[request]) + len(above) - 1
            assert int(index[request, node]) == request * nodes + node
            children = [other for other in range(nodes) if parent[other] == node]
            linked, following = [], int(child[request, node])
            while following != -1 and len(linked) < nodes:
                linked.append(following)
                following = int(sibling[request, following])
            assert linked == children
        assert int(sibling[request, 0]) == -1


@TREES
def test_verification_accepts_the_longest_path_along_the_targets_choice(branches, steps, nodes):
    parents, _, _, _, index, child, sibling = build_trees(branches, steps, nodes, requests=40)
    generator = torch.Generator().manual_seed(5)
    drafted = torch.randint(3, (40, nodes), generator=generator)
    target = torch.randint(3, (40, nodes), generator=generator)
    predicts = torch.full((40 * nodes,), -7, dtype=torch.int32)
    accepted = torch.full((40, steps + 1), -1, dtype=torch.int32)
    counts = torch.empty(40, dtype=torch.int32)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=accepted, accept_token_num=counts, candidates=drafted,
        retrive_index=index, retrive_next_token=child, retrive_next_sibling=sibling, target_predict=target,
    )  # fmt: skip
    expected_predicts = torch.full_like(predicts, -7)
    for request, parent in enumerate(parents):
        path = [0]
        while True:
            matching = [
                node
                for node in range(nodes)
                if parent[node] == path[-1] and drafted[request, node] == target[request, path[-1]]
            ]
            if not matching:
                break
            path.append(matching[0])
        flat = [request * nodes + node for node in path]
        assert accepted[request].tolist() == flat + [-1] * (steps + 1 - len(path))
        assert int(counts[request]) == len(path) - 1
        expected_predicts[flat] = target[request, path].int()
    assert torch.equal(predicts, expected_predicts)
    assert counts.max() > 0


def test_a_node_whose_parent_was_not_kept_is_never_reached():
    index, child, sibling = torch.full((3, 1, 3), -1)
    mask, positions = torch.ones(9, dtype=torch.bool), torch.empty(3, dtype=torch.int64)
    listed, kept = torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 4]])  # candidate 4 grew out of candidate 1
    sgl_kernel.build_tree_kernel_efficient_cpu(
        listed, kept, torch.tensor([10]), mask, positions, index, child, sibling, 2, 2, 3, 1
    )
    assert child.tolist() == [[1, -1, -1]]
    assert sibling.tolist() == [[-1, -1, -1]]
    assert mask.view(3, 3)[2].tolist() == [True, False, True]


def test_a_tree_mask_in_another_layout_is_refused():
    index, child, sibling = torch.full((3, 1, 2), -1)
    with pytest.raises(NotImplementedError, match="tree_mask_mode 0"):
        sgl_kernel.build_tree_kernel_efficient_cpu(
            torch.empty(1, 0, dtype=torch.int64), torch.tensor([[0]]), torch.tensor([3]), torch.empty(4), torch.empty(2),
            index, child, sibling, 1, 1, 2, 0,
        )  # fmt: skip


def test_the_bonus_token_is_the_last_accepted_one():
    bonus = torch.empty(3, dtype=torch.int64)
    tokens = torch.arange(100, 112, dtype=torch.int32)
    sgl_kernel.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [100, 107, 109]


def test_slots_of_accepted_nodes_are_packed_in_order():
    slots = torch.zeros(6, dtype=torch.int64)
    index = torch.tensor([[0, 2, -1], [4, -1, -1]], dtype=torch.int32)
    sgl_kernel.fill_accept_out_cache_loc_cpu(index, torch.arange(50, 58), slots)
    assert slots.tolist() == [50, 52, 54, 0, 0, 0]


@pytest.mark.parametrize("select", [None, torch.tensor([1, 0, 4])])
def test_ids_move_one_place_to_the_left_and_the_new_token_comes_last(select):
    ids = torch.arange(10, 17)
    sgl_kernel.rotate_input_ids_cpu(
        ids, torch.tensor([0, 3, 3]), torch.tensor([3, 0, 4]), torch.tensor([[90], [91], [92]]), select
    )
    assert ids.tolist() == ([11, 12, 90, 14, 15, 16, 92] if select is None else [11, 90, 12, 14, 92, 16, 16])


def test_the_gated_shared_expert_is_added_in_place():
    generator = torch.Generator().manual_seed(3)
    states, shared, routed = (torch.randn(5, 8, generator=generator) for _ in range(3))
    weight = torch.randn(8, generator=generator)
    expected = routed.clone()
    for token in range(5):
        gate = 1 / (1 + math.exp(-sum(float(states[token, column] * weight[column]) for column in range(8))))
        expected[token] += gate * shared[token]
    fused_steps.add_gated(states, weight, shared, routed)
    torch.testing.assert_close(routed, expected, atol=1e-6, rtol=1e-6)


def test_queries_and_keys_split_over_two_ranks_are_normalised_as_one_row():
    generator = torch.Generator().manual_seed(4)
    queries, keys = torch.randn(5, 12, generator=generator), torch.randn(5, 4, generator=generator)
    weights = torch.randn(12, generator=generator), torch.randn(4, generator=generator)
    ranks = [(queries[:, :6], keys[:, :2]), (queries[:, 6:], keys[:, 2:])]
    sums = sum(fused_steps.sums_of_squares(*rank) for rank in ranks)
    halves = [
        fused_steps.normalise(*rank, weights[0][part], weights[1][other], sums, tp_world=2, eps=1e-6)
        for rank, part, other in zip(ranks, (slice(6), slice(6, 12)), (slice(2), slice(2, 4)), strict=True)
    ]
    for position, (whole, weight) in enumerate(zip((queries, keys), weights, strict=True)):
        joined = torch.cat([half[position] for half in halves], 1)
        for row, values in zip(joined, whole.tolist(), strict=True):
            root = math.sqrt(sum(value * value for value in values) / len(values) + 1e-6)
            expected = torch.tensor([value / root for value in values]) * weight
            torch.testing.assert_close(row, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [("intel_amx", "cpu", {}), ("intel_xpu", "xpu", {"attention_backend": "triton"})],
)
def test_only_the_switch_away_from_intel_amx_is_dropped(backend, device, expected):
    view = types.SimpleNamespace(attention_backend=backend, device=device)
    switch = {"intel_amx": {"attention_backend": "torch_native"}, "intel_xpu": {"attention_backend": "triton"}}
    assert aerie_cpu_kernels.keep_intel_amx(lambda view: switch[view.attention_backend], view) == expected


FAKE_TORCHVISION = {
    "__init__.py": "from . import extension\nfrom torchvision import _meta_registrations\n",
    "_meta_registrations.py": "import torch\ntorch.library.register_fake('torchvision::nms')(lambda *a: a)\n",
}
LOADED = """import torch
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
def _has_ops(): return True
"""
NOT_LOADED = "def _has_ops(): return False\n"


@pytest.mark.parametrize("extension", [LOADED, NOT_LOADED], ids=["loads", "does_not_load"])
def test_torchvision_imports_whether_or_not_its_library_loads(tmp_path, extension):
    package = tmp_path / "torchvision"
    package.mkdir()
    for name, text in {**FAKE_TORCHVISION, "extension.py": extension}.items():
        (package / name).write_text(text)
    start = (KERNELS / "aerie_cpu_kernels.pth").read_text()
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(KERNELS)!r}]\n{start}{start}"
        "assert 'torch' not in sys.modules\nimport torch, torchvision\n"
        "print(torch.ops.torchvision.nms.default._schema)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor\n"
