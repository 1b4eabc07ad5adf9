"""Captured rows out of the scheduler: device tensors → slabs → the lanes' processes.

    hook ─▶ Copier ─▶ Writer ─▶ a lane per shard (aerie_capture.lane): check, checksum, pwrite, journal
             slabs of a ring      waits for the copy, then tells the lane

The scheduler waits for none of this, except where the ring is empty: then the disk sets the pace.

Legend: N rows of a forward, R rows of a slab, K captured layers, D target width.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from aerie_capture import memory
from aerie_capture.protocol import FLOAT8, Shard, journalled

FLOAT8_LARGEST = 448.0  # torch.finfo(torch.float8_e4m3fn).max
LANE_MODULE = "aerie_capture.lane"  # a process of its own; see there
RESERVED_BYTES = 4096  # for the error file: the first error may be that the disk is full
ERROR_FILE = "error.json"  # in the control folder; the client looks for it while it waits
STORED = {"bfloat16": torch.bfloat16, "float32": torch.float32, FLOAT8: torch.float8_e4m3fn}


# --- host memory -------------------------------------------------------------------------------------


class Slab:
    """One slab as tensors; see aerie_capture.memory for what they hold."""

    def __init__(self, number: int, room: torch.Tensor, geometry: memory.Geometry) -> None:
        def section(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor | None:
            if name not in geometry.sections:
                return None
            offset, size = geometry.sections[name]
            return room[offset : offset + geometry.rows * size].view(dtype).view(geometry.rows, *shape)

        tensors, width = geometry.tensors, geometry.width
        self.number = number
        self.states = section("states", STORED[geometry.dtype], tensors, width)  # (R, K+1, D)
        self.sums = section("sums", torch.float32, tensors)  # (R, K+1)
        self.ids = section("ids", torch.int32)  # (R,)
        self.scales = section("scales", torch.float32, tensors)  # (R, K+1)
        self.errors = section("errors", torch.float32, tensors)  # (R, K+1)
        self.users = 0


class Ring:
    """All slabs in one shared memory, pinned for CUDA; whoever needs one while none is free waits."""

    def __init__(self, geometry: memory.Geometry, pinned: bool) -> None:
        self.geometry = geometry
        self.descriptor = memory.create(geometry)
        self._memory = memory.attach(self.descriptor, geometry)
        room = torch.frombuffer(self._memory, dtype=torch.uint8)
        if pinned:  # about a second per 3 GB: at start, not under the first requests
            code = torch.cuda.cudart().cudaHostRegister(room.data_ptr(), room.numel(), 0)
            if int(code) != 0:
                raise RuntimeError(
                    f"aerie_capture: {room.numel():,} bytes of host memory cannot be pinned (CUDA error {int(code)});"
                    " lower --max-prefill-tokens or --context-length"
                )
        size = geometry.slab_bytes
        self.slabs = [Slab(i, room[i * size : (i + 1) * size], geometry) for i in range(geometry.slabs)]
        self._free = list(reversed(self.slabs))
        self._changed = threading.Condition()
        self._broken: str | None = None

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int, wait_s: float) -> list[Slab]:
        """Return `count` slabs; TimeoutError when the disk has not freed them within `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or len(self._free) >= count, timeout=wait_s)
            if len(self._free) < count:
                raise TimeoutError(
                    self._broken
                    or f"{len(self.slabs) - len(self._free)} of {len(self.slabs)} buffers still wait for the disk after"
                    f" {wait_s:g} s; lower the client's concurrency or use a faster disk"
                )
            return [self._free.pop() for _ in range(count)]

    def give_up(self, error: str) -> None:
        """Let nobody wait any longer: who has the slabs may never give them back."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()

    def release(self, slab: Slab) -> None:
        """One user of a slab less; the last one frees it."""
        with self._changed:
            slab.users -= 1
            if slab.users <= 0:
                slab.users = 0
                self._free.append(slab)
                self._changed.notify_all()


@dataclass(frozen=True)
class Piece:
    """Rows start..stop of a slab: a part of one sample. `ready` is the CUDA event after which they
    may be read, or None."""

    slab: Slab
    start: int
    stop: int
    ready: Any


class Copier:
    """Rows on the device → pieces of slabs, without stopping the forward stream."""

    def __init__(
        self, device: torch.device, *, tensors: int, width: int, dtype: str, rows: int, spare: int, wait_s: float
    ) -> None:
        """`tensors` is K+1, `dtype` the stored one; the ring holds `rows` rows and `spare` slabs more."""
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._shape = (tensors, width)
        self._stored = STORED[dtype]
        self._wait_s = wait_s
        self.slab_rows = memory.slab_rows(tensors, width, dtype)
        slabs = -(-rows // self.slab_rows) + spare
        self.ring = Ring(memory.Geometry(slabs, self.slab_rows, tensors, width, dtype), pinned=cuda)

    def copy(
        self,
        blocks: list[torch.Tensor],
        ids: torch.Tensor,
        spans: list[tuple[int, int]],
    ) -> list[list[Piece]]:
        """The pieces of each (start, stop) row span, spans ascending.

        blocks: [N, n*D] each, together K+1 blocks of D columns, the final one last; ids [N].
        On CUDA the copies run on a side stream behind an event of the forward stream; the sources
        are kept alive for that stream. One slab per slice of the forward, one event for all: the
        scheduler pays for the slices, not for the requests.
        """
        first, last = spans[0][0], spans[-1][1]
        starts = range(first, last, self.slab_rows)
        slabs = self.ring.take(len(starts), self._wait_s)
        slices = [(start, min(start + self.slab_rows, last), slab) for start, slab in zip(starts, slabs, strict=True)]
        try:
            ready = self._fill_all(slices, blocks, ids)
        except Exception:
            if self._stream is not None:
                self._stream.synchronize()  # what was begun must not write into a slab of somebody else
            for slab in slabs:
                self.ring.release(slab)
            raise
        pieces = [list(_cut(slices, span, ready)) for span in spans]
        for slab in slabs:
            slab.users = sum(piece.slab is slab for sample in pieces for piece in sample)
            if slab.users == 0:  # rows of foreign requests only
                self.ring.release(slab)
        return pieces

    def _fill_all(self, slices: list[tuple[int, int, Slab]], blocks: list[torch.Tensor], ids: torch.Tensor) -> Any:
        """Start the copies of all slices; the event after which they are done, or None."""
        if self._stream is None:
            for start, stop, slab in slices:
                self._fill(slab, [block[start:stop] for block in blocks], ids[start:stop])
            return None
        produced = torch.cuda.Event()
        produced.record()
        ready = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(produced)
            for start, stop, slab in slices:
                self._fill(slab, [block[start:stop] for block in blocks], ids[start:stop])
            ready.record()
        for source in (*blocks, ids):
            source.record_stream(self._stream)
        return ready

    def _fill(self, slab: Slab, blocks: list[torch.Tensor], ids: torch.Tensor) -> None:
        count = len(ids)
        packed = torch.cat(blocks, dim=1).view(count, *self._shape)  # (n, K+1, D)
        # A row sum in float32 is finite exactly when the row is, up to overflow near 1e38, which
        # the lane looks at again: one pass over the rows and no mask of their size.
        slab.sums[:count].copy_(packed.sum(dim=2, dtype=torch.float32), non_blocking=True)  # (n, K+1)
        slab.ids[:count].copy_(ids.to(torch.int32), non_blocking=True)
        if slab.scales is not None:
            values = packed.float()
            scales = (values.abs().amax(dim=2) / FLOAT8_LARGEST).clamp(min=1e-12)  # (n, K+1)
            scaled = values / scales[..., None]  # (n, K+1, D), at most FLOAT8_LARGEST: its norm does not overflow
            packed = scaled.to(self._stored)  # (n, K+1, D)
            errors = (scaled - packed.float()).norm(dim=2) / scaled.norm(dim=2).clamp(min=1e-12)  # (n, K+1)
            slab.scales[:count].copy_(scales, non_blocking=True)
            slab.errors[:count].copy_(errors, non_blocking=True)
        slab.states[:count].copy_(packed, non_blocking=True)


def _cut(slices: list[tuple[int, int, Slab]], span: tuple[int, int], ready: Any) -> Iterator[Piece]:
    """The parts of a row span in the slices it crosses."""
    for start, stop, slab in slices:
        low, high = max(start, span[0]), min(stop, span[1])
        if low < high:
            yield Piece(slab, low - start, high - start, ready)


# --- lanes -------------------------------------------------------------------------------------------


@dataclass
class OpenShard:
    """A shard as the scheduler knows it: `taken` are the samples in flight or durable, asked again
    they are not written again."""

    number: int
    shard: Shard
    lane: int
    taken: set[int] = field(default_factory=set)
    complete: bool = False


class Writer:
    """The lanes and what is told to them; nothing here blocks the scheduler.

    The first failure (disk full, quota, a dead mount, a lane that was killed) is remembered: every
    later sample is refused with it, because a writer that lost rows once has no business taking more.
    """

    def __init__(
        self, ring: Ring, lanes: int, expected: dict, error_path: Path, start: Callable[[dict], Any] | None = None
    ) -> None:
        """`expected` is what control files must agree with; `start(order)` starts a lane, by default as a process."""
        self.first_error: str | None = None
        self._ring = ring
        self._error_path = error_path
        self._reserved = error_path.with_suffix(".reserved")
        self._reserved.write_bytes(b" " * RESERVED_BYTES)
        self._shards: dict[int, OpenShard] = {}
        self._numbers = 0
        self._lane_of: dict[Path, int] = {}  # a data file always meets the same one
        self._closing = False
        self._outbox: queue.SimpleQueue[tuple[int, dict, tuple] | None] = queue.SimpleQueue()
        self._pipes: list[int] = []
        self._processes: list[Any] = []
        self._threads = [threading.Thread(target=self._send_all, name="aerie-send", daemon=True)]
        for lane in range(lanes):
            theirs_in, ours_out = os.pipe()
            ours_in, theirs_out = os.pipe()
            order = {"memory": ring.descriptor, "incoming": theirs_in, "outgoing": theirs_out,
                     "geometry": asdict(ring.geometry), "expected": expected}  # fmt: skip
            self._processes.append((start or _start_process)(order))
            self._pipes.append(ours_out)
            self._threads.append(
                threading.Thread(target=self._listen, args=(lane, ours_in), name=f"aerie-listen-{lane}", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def open(self, shard: Shard, control: Path) -> OpenShard:
        """Follow a shard; the least burdened lane gets it."""
        if shard.path not in self._lane_of:
            burden = [sum(1 for each in self._shards.values() if each.lane == lane) for lane in range(len(self._pipes))]
            self._lane_of[shard.path] = burden.index(min(burden))
        self._numbers += 1
        opened = OpenShard(self._numbers, shard, self._lane_of[shard.path], journalled(shard))
        self._shards[opened.number] = opened
        self._outbox.put((opened.lane, {"open": opened.number, "control": str(control)}, ()))
        return opened

    def submit(self, jobs: list[tuple[OpenShard, int, list[Piece]]]) -> None:
        """Hand over the complete samples of a forward; the journals tell what becomes of them."""
        for lane in {shard.lane for shard, _, _ in jobs}:
            own = [job for job in jobs if job[0].lane == lane]
            message = {
                "write": [
                    [shard.number, sample, [[piece.slab.number, piece.start, piece.stop] for piece in pieces]]
                    for shard, sample, pieces in own
                ]
            }
            events = {id(piece.ready): piece.ready for _, _, pieces in own for piece in pieces}
            self._outbox.put((lane, message, tuple(events.values())))

    def retire(self, shard: OpenShard) -> None:
        """No more samples of it will come."""
        self._shards.pop(shard.number, None)
        self._outbox.put((shard.lane, {"retire": shard.number}, ()))

    def close(self) -> None:
        """Finish what was submitted and end the lanes."""
        self._closing = True
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.wait()
        os.close(self._ring.descriptor)

    def fail(self, error: str) -> None:
        """Keep the first error, and tell the client that may be waiting for a journal line."""
        if self.first_error is None:
            self.first_error = error
            self._ring.give_up(error)
            text = json.dumps({"error": error[: RESERVED_BYTES // 8]}) + "\n"
            with contextlib.suppress(OSError):  # replies carry the error as well
                with open(self._reserved, "r+b") as file:  # in the place that it has: the disk may be full
                    file.write(text.encode())
                    file.truncate()
                os.replace(self._reserved, self._error_path)

    def _send_all(self) -> None:
        while (item := self._outbox.get()) is not None:
            lane, message, events = item
            try:
                for event in events:
                    if event is not None:
                        event.synchronize()
            except RuntimeError as error:  # of CUDA: these rows never arrived
                self.fail(f"rows could not be copied from the device: {error}")
                continue
            data = memoryview((json.dumps(message) + "\n").encode())
            with contextlib.suppress(BrokenPipeError):  # the lane is gone: its listener says so
                while data:
                    data = data[os.write(self._pipes[lane], data) :]
        for pipe in self._pipes:
            os.close(pipe)

    def _listen(self, lane: int, incoming: int) -> None:
        with open(incoming) as lines:
            for line in lines:
                if not line.endswith("\n"):
                    break  # the lane died in the middle of it
                message = json.loads(line)
                for slab in message.get("free", ()):
                    self._ring.release(self._ring.slabs[slab])
                for number, sample in message.get("refused", ()):
                    if number in self._shards:
                        self._shards[number].taken.discard(sample)
                if message.get("complete") in self._shards:
                    self._shards[message["complete"]].complete = True
                if "error" in message:
                    self.fail(message["error"])
        if not self._closing:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self.fail(f"writer stopped at {stamp}: the process of lane {lane} ended; see the server's log")


def _start_process(order: dict) -> subprocess.Popen:
    """Start a lane; it holds the other ends of the pipes from now on."""
    descriptors = (order["memory"], order["incoming"], order["outgoing"])
    process = subprocess.Popen(
        [sys.executable, "-m", LANE_MODULE, json.dumps(order)], stdin=subprocess.DEVNULL, pass_fds=descriptors
    )
    os.close(order["incoming"])
    os.close(order["outgoing"])
    return process
