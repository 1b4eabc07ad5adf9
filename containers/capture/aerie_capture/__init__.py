"""SGLang plugin of Aerie: prefill forward → rows of a shard file, a journal line, a reply ticket.

Reading order: `protocol` (files and request ids, standard library only), `hooks` (SGLang →
writer), `writer` (device tensors → slabs of `memory` → lanes), `lane` (slabs → durable rows), `probe` (export check), `contract` (does this SGLang still
have what the hooks need: `python -m aerie_capture.contract`).

The entry point group `sglang.srt.plugins` calls `activate()` in the launcher and in every
scheduler. SGLang only logs what goes wrong here and serves on without the plugin, so nothing may
rest on this call: the client trusts the ready file and the tickets, never the absence of an error.
"""

import os

from aerie_capture.protocol import CONFIG_VARIABLE, PROBE_VARIABLE


def activate() -> None:
    """Register the capture hooks, the probe hooks, both or neither, as the environment asks.

    Without `AERIE_CAPTURE_CONFIG` and `AERIE_PROBE_CONFIG` nothing is registered: the image that
    captures also serves the measured arms, and a measured arm must not carry a hook.
    """
    if os.environ.get(CONFIG_VARIABLE):
        from aerie_capture import hooks

        hooks.register()
    if os.environ.get(PROBE_VARIABLE):
        from aerie_capture import probe

        probe.register()
