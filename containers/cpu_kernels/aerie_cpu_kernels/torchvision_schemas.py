"""Lets `import torchvision` succeed where its compiled library does not load.

On Linux x86-64 the index serves torchvision as a CUDA build only. Beside a CPU torch its `_C.so` does not
load, so the operators it would define are missing, and `torchvision/_meta_registrations.py` fails with
`operator torchvision::nms does not exist`. SGLang imports torchvision (`sglang/srt/utils/common.py`) but
calls none of its operators for a language model, so their schemas are enough.

`aerie_cpu_kernels.pth` calls `install` when the interpreter starts; it imports neither torch nor torchvision.
"""

import importlib.abc
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries = []  # a torch Library takes its definitions back when it is collected


class _BeforeMetaRegistrations(importlib.abc.MetaPathFinder):
    """Acts between torchvision's attempt to load `_C.so` and the first use of its operators."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision._meta_registrations":
            define_schemas()
        return None  # the ordinary finders load the module


_finder = _BeforeMetaRegistrations()


def define_schemas():
    """Defines the schemas, without a kernel, if torchvision's own library has not: calling them stays an error."""
    import torch

    if _libraries or sys.modules["torchvision.extension"]._has_ops():
        return
    _libraries.append(torch.library.Library("torchvision", "FRAGMENT"))
    for schema in SCHEMAS:
        _libraries[0].define(schema)


def install():
    """Registers the import hook once, though site reads a .pth twice where lib64 is a link to lib."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
