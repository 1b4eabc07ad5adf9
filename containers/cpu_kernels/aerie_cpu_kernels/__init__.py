"""SGLang plugin: lets `--attention-backend intel_amx` and MLA models run on a CPU without AMX.

SGLang calls `activate` through the entry-point group `sglang.srt.plugins` in every process it starts.
The kernels themselves are in the package `sgl_kernel` of this distribution.

    SGLANG_PLUGINS=aerie_cpu_kernels SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 \\
        python -m sglang.launch_server --device cpu --attention-backend intel_amx ...
"""


def keep_intel_amx(original, view):
    """Around SGLang's platform pass: drops its switch from intel_amx to torch_native.

    `original(view)` returns the server arguments to overwrite as a dict. The switch is made because the
    compiled kernels need AMX; those of `sgl_kernel` here need only torch.
    """
    if view.attention_backend == "intel_amx" and view.device == "cpu":
        return {}
    return original(view)


def absorbed_mla(attention, forward_batch):
    """Forward method of DeepSeek attention layers: always the absorbed path.

    SGLang has no handler for the CPU backends and falls back to Triton's, which prefills with the
    expanded heads; the paged cache that the CPU backends read holds the latent only.
    """
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    return AttnForwardMethod.MLA


def activate():
    """Registers the changes above and those of `fused_steps`. Called by SGLang's `load_plugins`."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from aerie_cpu_kernels import fused_steps

    HookRegistry.register(
        "sglang.srt.arg_groups.overrides._attention_backend_platform_fallbacks",
        keep_intel_amx,
        HookType.AROUND,
    )
    for target, name in fused_steps.REPLACED.items():
        HookRegistry.register(target, getattr(fused_steps, name), HookType.REPLACE)
    for backend in ("intel_amx", "torch_native"):
        AttentionBackendRegistry.register(backend, absorbed_mla)
