"""Torch in place of three Triton kernels that SGLang launches on a CPU too where it has no AMX.

Each takes the arguments of the function it replaces (`REPLACED`) and computes in fp32 as that does.

Legend: T tokens, D model width, A and C widths of the queries and keys of one rank.
"""

import torch

REPLACED = {
    "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add": "add_gated",  # Qwen2-MoE
    "sglang.srt.models.minimax_m2.rms_sumsq_serial": "sums_of_squares",
    "sglang.srt.models.minimax_m2.rms_apply_serial": "normalise",
}


def add_gated(hidden_states, gate_weight, shared_output, final_hidden_states):
    """Adds sigmoid(hidden_states · gate_weight) * shared_output [T, D] to `final_hidden_states` [T, D] in place."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None]  # [T, 1]
    final_hidden_states.copy_(final_hidden_states.float() + gate * shared_output.float())


def sums_of_squares(x1, x2):
    """Returns fp32 [2T]: the sums of squares of the rows of x1 [T, A], then of x2 [T, C]; ranks add them up."""
    return torch.cat([part.float().square().sum(-1) for part in (x1, x2)])


def normalise(x1, x2, w1, w2, sum_sq, tp_world=1, eps=1e-5):
    """Returns x1 [T, A] and x2 [T, C] over their root mean square, times w1 [A] and w2 [C].

    `sum_sq` [2T] covers all `tp_world` ranks, each of which holds one part of a row.
    """
    count = len(x1)
    sums = sum_sq[:count, None], sum_sq[count : 2 * count, None]  # [T, 1] each
    return tuple(
        (part.float() * torch.rsqrt(total / (part.shape[1] * tp_world) + eps) * weight.float()).to(part.dtype)
        for part, weight, total in zip((x1, x2), (w1, w2), sums, strict=True)
    )
