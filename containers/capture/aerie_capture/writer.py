"""Captured rows on their way to the disk: device tensors → host → data file → journal → ticket.

    hook ─▶ Copier ─▶ Job ─▶ write threads (check, sha256, pwrite) ─▶ commit thread ─▶ Ticket
                              one sample always meets one thread      fdatasync data,
                                                                      journal lines,
                                                                      fdatasync journal, release

Nothing of a sample reaches the disk before the whole sample is there and its ids, its token count
and its values are right: a rejected prompt can therefore never overwrite rows that a journal line
already vouches for. A journal line is one complete sample, so it does not depend on how the server
cut the prompt.

Legend: T tokens of a sample, t tokens of a piece, N rows of a forward, K captured layers,
D target width.
"""

import hashlib
import json
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from aerie_capture.protocol import Shard, sync_folder

QUEUE_BYTES = 1 << 30  # host bytes the writer may hold before the hook waits
WRITE_THREADS = 2  # sha256 bounds a thread at about 1.5 GB/s with SHA instructions
BLOCK_BYTES = 1 << 20  # hashed and written while still in cache; the digest does not depend on it


@dataclass(frozen=True)
class Piece:
    """Rows of one sample out of one forward, on the host.

    aux [t, K*D], final [t, D] of the captured dtype; ids int32 [t]; sums float32 [t, 2], the row
    sums of aux and final. `ready` is the CUDA event after which they may be read, or None.
    """

    aux: torch.Tensor
    final: torch.Tensor
    ids: torch.Tensor
    sums: torch.Tensor
    ready: Any

    @property
    def nbytes(self) -> int:
        return self.aux.nbytes + self.final.nbytes


class Ticket:
    """The acknowledgement of one sample: a promise until the rows are durable, or refused.

    SGLang's result processor calls `.copy()` on each entry of `customized_info` and sends what it
    returns to the client; waiting in there is what makes the HTTP reply mean "durable".
    """

    def __init__(self, facts: dict, wait_s: float) -> None:
        self.facts = {"ids_sha256": None, "rows_sha256": None, **facts}
        # A deadline, not a duration: the scheduler asks the tickets of a forward one after the
        # other, and together they must stay below the watchdog.
        self._deadline = time.monotonic() + wait_s
        self._settled = threading.Event()
        self._answer: dict | None = None

    def durable(self, ids_sha256: str, rows_sha256: str) -> None:
        self._settle("durable", None, ids_sha256=ids_sha256, rows_sha256=rows_sha256)

    def fail(self, error: str) -> "Ticket":
        self._settle("error", error)
        return self

    def copy(self) -> dict:
        """Wait for the outcome and return it as a plain dict (it crosses a process boundary)."""
        if not self._settled.wait(max(0.0, self._deadline - time.monotonic())):
            error = "the disk did not finish in time; the journal tells whether it did later"
            return {**self.facts, "state": "error", "error": error}
        return dict(self._answer)

    @property
    def settled(self) -> bool:
        return self._settled.is_set()

    @property
    def failed(self) -> bool:
        return self.settled and self._answer["state"] == "error"

    def _settle(self, state: str, error: str | None, **digests: str) -> None:
        self._answer = {**self.facts, **digests, "state": state, "error": error}
        self._settled.set()


class ShardFile:
    """An open shard: its data file, its journal, and the tickets given for its samples."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.tickets: dict[int, Ticket] = {}
        self._retired = False
        self._users = 0
        self._lock = threading.Lock()
        self.data = os.open(shard.path, os.O_WRONLY)
        try:
            self.journal = _open_journal(shard)
        except OSError:
            os.close(self.data)
            raise

    def enter(self) -> None:
        """One more job needs the descriptors."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            self._close_if_unused()

    def retire(self) -> None:
        """Close when the last job has left; no job enters after this."""
        with self._lock:
            self._retired = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and self._users == 0 and self.data >= 0:
            os.close(self.data)
            os.close(self.journal)
            self.data = self.journal = -1


@dataclass(frozen=True)
class Job:
    """One complete sample, to be checked, written and acknowledged."""

    file: ShardFile
    sample: int
    pieces: tuple[Piece, ...]
    ticket: Ticket

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass
class _Written:
    """A job whose rows are in the page cache: what its journal line will say."""

    job: Job
    ids_sha256: str
    rows_sha256: str


@dataclass
class _Room:
    """Host bytes in flight, and the condition on which the hook waits."""

    limit: int
    held: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)


class Writer:
    """Threads that make samples durable; `submit` never blocks, `wait_for_room` does.

    The first OSError (disk full, quota, a dead mount) is remembered: it answers the sample it hit
    and every later one, because a writer that lost rows once has no business acknowledging more.
    """

    def __init__(self, wait_s: float, threads: int = WRITE_THREADS, queue_bytes: int = QUEUE_BYTES) -> None:
        self.wait_s = wait_s
        self.first_error: str | None = None
        self._room = _Room(limit=queue_bytes)
        self._written: queue.SimpleQueue[_Written | None] = queue.SimpleQueue()
        self._queues = [queue.SimpleQueue() for _ in range(threads)]
        self._threads = [
            threading.Thread(target=self._write_loop, args=(jobs,), name=f"aerie-write-{i}")
            for i, jobs in enumerate(self._queues)
        ]
        self._commit_thread = threading.Thread(target=self._commit_loop, name="aerie-commit")
        for thread in (*self._threads, self._commit_thread):
            thread.daemon = True  # SIGTERM ends the server; unacknowledged samples are resent
            thread.start()

    def wait_for_room(self, nbytes: int) -> None:
        """Back-pressure: wait until `nbytes` more may be held, below the server's watchdog.

        A sample larger than the whole limit passes when nothing else is held. TimeoutError after
        `wait_s`: the disk does not keep up and the sample is refused, never dropped in silence.
        """
        room = self._room

        def fits() -> bool:
            return room.held == 0 or room.held + nbytes <= room.limit

        with room.changed:
            if not room.changed.wait_for(fits, timeout=self.wait_s):
                raise TimeoutError(
                    f"{room.held:,} bytes still wait for the disk after {self.wait_s:g} s;"
                    " lower the client's concurrency or use a faster disk"
                )

    def submit(self, job: Job) -> None:
        """Hand over a complete sample; its ticket settles when it is durable or refused."""
        with self._room.changed:
            self._room.held += job.nbytes
        job.file.enter()
        self._queues[job.sample % len(self._queues)].put(job)

    def close(self) -> None:
        """Finish what was submitted and stop the threads."""
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._written.put(None)
        self._commit_thread.join()

    # --- write threads ---------------------------------------------------------------------------

    def _write_loop(self, jobs: queue.SimpleQueue) -> None:
        while (job := jobs.get()) is not None:
            try:
                written = self._write(job)
            except Exception as error:  # recorded: it answers this sample and every later one
                self._remember(error, job.file.shard.path)
                self._finish(job, self.first_error)
                continue
            if isinstance(written, str):
                self._finish(job, written)
            else:
                self._written.put(written)

    def _write(self, job: Job) -> _Written | str:
        """Check one sample and write its rows; a string is the reason why it was refused."""
        if self.first_error is not None:
            return self.first_error
        for piece in job.pieces:
            if piece.ready is not None:
                piece.ready.synchronize()
        shard = job.file.shard
        sample = shard.samples[job.sample]
        ids_sha256 = _sha256_of_ids(job.pieces)
        if ids_sha256 != sample.sha256:
            return (
                f"ids_sha256: the server ran {ids_sha256}, the control file of shard {shard.name}"
                f" says {sample.sha256}: another prompt came under this request id"
            )
        refusal = _non_finite(job.pieces)
        if refusal is not None:
            return refusal
        rows = hashlib.sha256()
        for name, span in (("aux", shard.aux), ("final", shard.final)):
            offset = span.offset + sample.row * span.row_bytes
            for piece in job.pieces:
                offset = _write_rows(job.file.data, getattr(piece, name), offset, rows)
        return _Written(job, ids_sha256, rows.hexdigest())

    # --- commit thread ---------------------------------------------------------------------------

    def _commit_loop(self) -> None:
        while (first := self._written.get()) is not None:
            group, last = [first], False
            while not last:
                try:
                    more = self._written.get_nowait()
                except queue.Empty:
                    break
                last = more is None
                if not last:
                    group.append(more)
            for file, members in _by_file(group):
                self._commit(file, members)
            if last:
                return

    def _commit(self, file: ShardFile, members: list[_Written]) -> None:
        """Rows durable, then lines durable, then tickets: each step vouches for the one before."""
        error = self.first_error
        if error is None:
            try:
                os.fdatasync(file.data)
                _write_all(file.journal, "".join(map(_journal_line, members)).encode())
                os.fdatasync(file.journal)
            except Exception as failure:  # recorded: it answers every later sample
                self._remember(failure, file.shard.journal)
                error = self.first_error
        for member in members:
            if error is None:
                member.job.ticket.durable(member.ids_sha256, member.rows_sha256)
            self._finish(member.job, error)

    # ---------------------------------------------------------------------------------------------

    def _finish(self, job: Job, error: str | None) -> None:
        if error is not None:
            job.ticket.fail(error)
        job.file.leave()
        with self._room.changed:
            self._room.held -= job.nbytes
            self._room.changed.notify_all()

    def _remember(self, error: Exception, path: Any) -> None:
        if self.first_error is None:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self.first_error = f"writer stopped at {stamp}: {path}: {error!r}"


class Copier:
    """Rows on the device → `Piece`s on the host, without stopping the forward stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(
        self,
        aux: torch.Tensor | list[torch.Tensor],
        final: torch.Tensor,
        ids: torch.Tensor,
        spans: list[tuple[int, int]],
    ) -> list[Piece]:
        """One piece per (start, stop) row span; aux is packed [N, K*D] or K tensors [N, D].

        On CUDA the copies run on a side stream behind an event of the forward stream into pinned
        memory; the sources are kept alive for that stream. On the CPU the rows are cloned, since
        the allocator may reuse them as soon as the forward returns.
        """
        if self._stream is None:
            return [self._piece(aux, final, ids, span, None) for span in spans]
        produced = torch.cuda.Event()
        produced.record()
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(produced)
            pieces = [self._piece(aux, final, ids, span, copied) for span in spans]
            copied.record()
        for source in (*(aux if isinstance(aux, list) else [aux]), final, ids):
            source.record_stream(self._stream)
        return pieces

    def _piece(self, aux, final, ids, span: tuple[int, int], ready: Any) -> Piece:
        start, stop = span
        blocks = [block[start:stop] for block in (aux if isinstance(aux, list) else [aux])]
        packed = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)  # (t, K*D)
        rows = final[start:stop]  # (t, D)
        # A row sum in float32 is finite exactly when the row is, up to overflow near 1e38, which
        # the writer looks at again: one pass over the rows and no mask of their size.
        sums = torch.stack(
            [packed.sum(dim=1, dtype=torch.float32), rows.sum(dim=1, dtype=torch.float32)], dim=1
        )  # (t, 2)
        return Piece(
            aux=self._to_host(packed),
            final=self._to_host(rows),
            ids=self._to_host(ids[start:stop].to(torch.int32)),
            sums=self._to_host(sums),
            ready=ready,
        )

    def _to_host(self, source: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            return source.clone(memory_format=torch.contiguous_format)
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return host.copy_(source, non_blocking=True)


def _open_journal(shard: Shard) -> int:
    """Open for appending; end a torn last line first, or the next good line would join it."""
    existed = shard.journal.exists()
    descriptor = os.open(shard.journal, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if not existed:
            sync_folder(shard.journal.parent)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            _write_all(descriptor, b"\n")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _journal_line(written: _Written) -> str:
    job = written.job
    line = {
        "sample": job.sample,
        "tokens": job.file.shard.samples[job.sample].tokens,
        "ids_sha256": written.ids_sha256,
        "rows_sha256": written.rows_sha256,
    }
    return json.dumps(line) + "\n"


def _by_file(group: list[_Written]) -> list[tuple[ShardFile, list[_Written]]]:
    members: dict[int, tuple[ShardFile, list[_Written]]] = {}
    for written in group:
        file = written.job.file
        members.setdefault(id(file), (file, []))[1].append(written)
    return list(members.values())


def _sha256_of_ids(pieces: tuple[Piece, ...]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(_bytes_of(piece.ids))
    return digest.hexdigest()


def _non_finite(pieces: tuple[Piece, ...]) -> str | None:
    """Name the first NaN or infinity of a sample by tensor, token and column; None if there is
    none."""
    first_token = 0
    for piece in pieces:
        suspects = (~torch.isfinite(piece.sums)).nonzero().tolist()
        for token, column in suspects:
            name = ("aux", "final")[column]
            row = getattr(piece, name)[token]
            bad = (~torch.isfinite(row)).nonzero().flatten()
            if bad.numel():
                index = int(bad[0])
                return (
                    f"{name}[{first_token + token}, {index}] is {row[index].item()},"
                    f" {bad.numel()} of {row.numel()} values of this token are not finite"
                )
        first_token += piece.ids.numel()
    return None


def _write_rows(descriptor: int, rows: torch.Tensor, offset: int, digest: Any) -> int:
    """Hash and write one tensor block by block; return the offset behind it."""
    view = _bytes_of(rows)
    for start in range(0, len(view), BLOCK_BYTES):
        block = view[start : start + BLOCK_BYTES]
        digest.update(block)
        done = 0
        while done < len(block):
            done += os.pwrite(descriptor, block[done:], offset + start + done)
    return offset + len(view)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # (bytes,)
