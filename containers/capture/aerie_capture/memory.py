"""Host memory that the scheduler fills and the lanes read: slabs in one anonymous file.

A slab holds the rows of one slice of a forward. In the file slab i begins at i * `Geometry.slab_bytes`:

    states  stored dtype  [R, K+1, D]
    sums    float32       [R, K+1]     row sums before storing; finite exactly when the row is
    ids     int32         [R]
    scales  float32       [R, K+1]     FLOAT8 only
    errors  float32       [R, K+1]     FLOAT8 only: |x - stored| / |x| of each row

Legend: R rows of a slab, K captured layers, D target width. No torch here: a lane starts in a moment.
"""

import mmap
import os
from dataclasses import dataclass

from aerie_capture.protocol import DTYPE_BYTES, FLOAT8

SLAB_BYTES = 32 << 20
PAGE = 4096


@dataclass(frozen=True)
class Geometry:
    """What both sides must agree on; `dtype` is the stored one, `tensors` is K+1."""

    slabs: int
    rows: int
    tensors: int
    width: int
    dtype: str

    @property
    def sections(self) -> dict[str, tuple[int, int]]:
        """Name → (offset in the slab, bytes of one row)."""
        small = 4 * self.tensors
        sizes = {"states": self.row_bytes, "sums": small, "ids": 4}
        if self.dtype == FLOAT8:
            sizes |= {"scales": small, "errors": small}
        sections, offset = {}, 0
        for name, size in sizes.items():
            sections[name] = (offset, size)
            offset += -(-self.rows * size // 64) * 64
        return sections

    @property
    def row_bytes(self) -> int:
        return self.tensors * self.width * DTYPE_BYTES[self.dtype]

    @property
    def slab_bytes(self) -> int:
        offset, size = list(self.sections.values())[-1]
        return -(-(offset + self.rows * size) // PAGE) * PAGE


def slab_rows(tensors: int, width: int, dtype: str) -> int:
    """R: as many rows as SLAB_BYTES hold, at least one."""
    return max(1, SLAB_BYTES // (tensors * width * DTYPE_BYTES[dtype]))


def create(geometry: Geometry) -> int:
    """The descriptor of a new file for these slabs; its pages come into being when they are written."""
    descriptor = os.memfd_create("aerie-slabs")
    os.ftruncate(descriptor, geometry.slabs * geometry.slab_bytes)
    return descriptor


def attach(descriptor: int, geometry: Geometry) -> mmap.mmap:
    """The slabs as shared memory."""
    return mmap.mmap(descriptor, geometry.slabs * geometry.slab_bytes)
