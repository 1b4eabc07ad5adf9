"""Pure-torch stand-in for SGLang's CPU kernel package, which the package index does not offer.

SGLang imports these names at module level when SGLANG_USE_CPU_ENGINE=1; importing the package also
registers the two attention operators of the torch library `sgl_kernel`.

Names and arguments are those of SGLang 0.5.20 and 0.5.23 (`tests/test_releases.py`). 0.5.18 and earlier call the attention
operators without the scales of the cache and end at the first request.
"""

from . import attention as attention
from .cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
)
from .speculation import (
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
