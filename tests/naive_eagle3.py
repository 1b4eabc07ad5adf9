"""EAGLE-3 a second time, as slowly and plainly as it can be said: the reference for `aerie.drafter`.

Python loops over documents, rows, steps, heads and keys; no masks, no packing, no chunks, nothing shared
with the module under test but the names of the weights. Written from the paper (arXiv 2503.01840) and from
SGLang's served drafter. Gradients come from autograd on these same lines.

Row i at step t: reads the token x[i+1+t] and, as hidden state, fc(aux[i]) at step 0 and its own output
later; predicts x[i+2+t]; is taught by the target's distribution at i+1+t.
"""

import math

import torch


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).sum() / len(x) + eps) * weight


def turn(vector, position, theta):
    """RoPE on one head's vector: element j and element j + E/2 are a pair."""
    half = len(vector) // 2
    first, second = [], []
    for j in range(half):
        angle = position / theta ** (2 * j / len(vector))
        a, b = vector[j], vector[j + half]
        first.append(a * math.cos(angle) - b * math.sin(angle))
        second.append(b * math.cos(angle) + a * math.sin(angle))
    return torch.stack(first + second)


def heads_of(flat, count):
    width = len(flat) // count
    return [flat[n * width : (n + 1) * width] for n in range(count)]


class Naive:
    def __init__(self, weights, embedding, heads, key_heads, theta, eps):
        self.w, self.embedding = weights, embedding
        self.heads, self.key_heads, self.theta, self.eps = heads, key_heads, theta, eps

    def norm(self, x, name):
        return rms_norm(x, self.w[f"{name}.weight"], self.eps)

    def linear(self, x, name):
        return self.w[f"{name}.weight"] @ x

    def attention_input(self, token, h):
        e = self.norm(self.embedding[token], "midlayer.input_layernorm")
        return torch.cat([e, self.norm(h, "midlayer.hidden_norm")])

    def key_value(self, u, position):
        keys = heads_of(self.linear(u, "midlayer.self_attn.k_proj"), self.key_heads)
        values = heads_of(self.linear(u, "midlayer.self_attn.v_proj"), self.key_heads)
        return [turn(key, position, self.theta) for key in keys], values

    def layer(self, u, h, position, seen):
        """`seen`: the (keys, values) this row attends to."""
        queries = heads_of(self.linear(u, "midlayer.self_attn.q_proj"), self.heads)
        attended = []
        for n, query in enumerate(queries):
            query = turn(query, position, self.theta)
            group = n // (self.heads // self.key_heads)
            scores = [query @ keys[group] / math.sqrt(len(query)) for keys, _ in seen]
            shares = torch.softmax(torch.stack(scores), 0)
            mixed = torch.zeros_like(query)
            for share, (_, values) in zip(shares, seen, strict=True):
                mixed = mixed + share * values[group]
            attended.append(mixed)
        r = h + self.linear(torch.cat(attended), "midlayer.self_attn.o_proj")
        x = self.norm(r, "midlayer.post_attention_layernorm")
        gate, up = self.linear(x, "midlayer.mlp.gate_proj"), self.linear(x, "midlayer.mlp.up_proj")
        return r + self.linear(torch.nn.functional.silu(gate) * up, "midlayer.mlp.down_proj")

    def chain(self, ids, aux, row, steps):
        """Yield the draft logits of `row` at steps 0..steps-1, as far as there are tokens to read."""
        seen = []
        for j in range(row + 1):
            token = ids[j + 1] if j + 1 < len(ids) else ids[j]
            h = self.linear(aux[j].flatten(), "fc")
            u = self.attention_input(token, h)
            seen.append(self.key_value(u, j))
        # u and h are now those of `row` itself, whose own step-0 key is the last one seen.
        for t in range(steps):
            if row + 1 + t >= len(ids):
                return
            if t > 0:
                u = self.attention_input(ids[row + 1 + t], h)
                seen.append(self.key_value(u, row + t))
            h = self.layer(u, h, row + t, seen)
            yield self.linear(self.norm(h, "norm"), "lm_head")


def naive_loss(naive, documents, target_head, target_ids, steps, decay, rule="target"):
    """documents: list of (ids, mask, aux [L][K, D], final [L][D]) with plain lists of ints.

    Returns (loss, per-step losses, per-step accuracies, per-step valid rows).
    """
    members = set(target_ids)
    losses = [[] for _ in range(steps)]
    hits = [0] * steps
    for ids, mask, aux, final in documents:
        for row in range(len(ids)):
            for t, logits in enumerate(naive.chain(ids, aux, row, steps)):
                taught_by, predicted = row + 1 + t, row + 2 + t
                if rule == "target":
                    if predicted >= len(ids) or not mask[predicted]:
                        continue
                else:
                    if taught_by >= len(ids) or not mask[row + t]:
                        continue
                    if int((target_head @ final[taught_by]).argmax()) not in members:
                        continue
                p = torch.softmax((target_head @ final[taught_by])[target_ids], 0)
                log_q = torch.log_softmax(logits, 0)
                losses[t].append(-(p * log_q).sum())
                if predicted < len(ids) and target_ids[int(logits.argmax())] == ids[predicted]:
                    hits[t] += 1
    means = [sum(step) / len(step) if step else torch.zeros(()) for step in losses]
    total = sum(decay**t * mean for t, mean in enumerate(means))
    counts = [len(step) for step in losses]
    return total, means, [hit / max(count, 1) for hit, count in zip(hits, counts, strict=True)], counts


def naive_rounds(hit, first_row, last_token, steps):
    """Count greedy rounds of serving: `hit(row, t)` says whether the draft of x[row+2+t] is right.

    The target's prefill gives the token behind `first_row`; every round gives its hits and one more token.
    """
    produced = first_row + 1  # the last token that exists
    rounds = 0
    while produced < last_token:
        row = produced - 1
        accepted = 0
        while accepted < steps and row + 2 + accepted <= last_token and hit(row, accepted):
            accepted += 1
        produced = min(produced + accepted + 1, last_token)
        rounds += 1
    return rounds
