"""A lane: the process that makes the samples of its shards durable.

    python -m aerie_capture.lane '{"memory": 5, "incoming": 7, "outgoing": 8, "geometry": {...}, ...}'

A process, not a thread, because the scheduler holds Python's lock whenever it runs and polls for requests when
it does not: threads that hash and write beside it got a fifth of their speed. Messages are lines of JSON:

    in   {"open": shard, "control": path}         follow a shard; `shard` is a number the scheduler gave it
         {"write": [[shard, sample, [[slab, start, stop], ...]], ...]}
         {"retire": shard}                        no more samples of it will come
    out  {"free": [slab, ...]}                    one entry for each part of a sample that needs its slab no more
         {"refused": [[shard, sample], ...]}      they may be asked for again
         {"complete": shard}                      every sample is durable and the sha256 of the file is known
         {"error": text}                          the first failure; everything later is refused with it

Nothing of a sample reaches the disk before the whole sample is there and its ids, its token count and its values
are right: a rejected prompt can therefore never overwrite rows that a journal line already vouches for. The
journal of a shard has three kinds of lines:

    {"sample", "tokens", "ids_sha256", "rows_xxh3"[, "float8_error"]}   rows are durable
    {"sample", "refused"}                                               why there will be none
    {"shard_sha256"}                                                    the file is complete

A sample's line is written once, for the whole sample, so it does not depend on how the server cut the prompt. The
sha256 of the file is taken while its rows are written, in the order of the file; what arrives out of order is
read back from the page cache when its turn comes.
"""

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import xxhash

from aerie_capture import memory
from aerie_capture.protocol import FLOAT8, Shard, journalled, read_shard, sync_folder

BLOCK_BYTES = 1 << 20  # hashed and written while still in cache; the digests do not depend on it

Parts = tuple[tuple[int, int, int], ...]  # (slab, start, stop) in the order of the tokens


# --- a shard on disk ---------------------------------------------------------------------------------


class ShardFile:
    """An open shard: its data file (locked against other processes), its journal, its samples.

    Each `enter` is one more user; with the last `leave` it closes. It is one for all control files of one
    data file: a client that lost its server asks again with another one while the last rows are still
    under way, and neither would see all samples alone.
    """

    def __init__(
        self,
        shard: Shard,
        registry: dict[tuple[int, int], "ShardFile"],
        guard: threading.Lock,
        known: "ShardFile | None" = None,
    ) -> None:
        """`guard` is held by the caller: it covers the registry and the users of all its files. `known` holds the
        lock of the same data file already, with another journal."""
        self.shard = shard
        self.durable = journalled(shard)  # the commit thread's own
        self.written = set(self.durable)  # rows lie in the file; the writing thread's own, like `digest`
        self.digest: FileDigest | None = None
        self._registry = registry
        self._users = 1
        self._guard = guard
        self.data = os.dup(known.data) if known else os.open(shard.path, os.O_RDWR)  # a duplicate shares the lock
        try:
            fcntl.flock(self.data, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.journal = _open_journal(shard)
        except BlockingIOError as error:
            os.close(self.data)
            raise OSError(f"{shard.path}: another process writes this shard") from error
        except OSError:
            os.close(self.data)
            raise
        registry[self.identity] = self

    @property
    def identity(self) -> tuple[int, int]:
        status = os.fstat(self.data)
        return status.st_dev, status.st_ino

    def enter(self) -> "ShardFile":
        with self._guard:
            self._users += 1
        return self

    def has_journal(self, path: Path) -> bool:
        """Whether the journal is still the one of that name: a client that takes a shard up replaces it."""
        return path.exists() and os.path.samestat(os.stat(path), os.fstat(self.journal))

    def leave(self) -> None:
        with self._guard:
            self._users -= 1
            if self._users == 0:
                if self._registry.get(self.identity) is self:
                    del self._registry[self.identity]
                os.close(self.data)  # and with it the lock
                os.close(self.journal)


class FileDigest:
    """sha256 of a shard in the order of its bytes: what precedes the states, the samples, the rest."""

    def __init__(self, file: ShardFile) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._read(0, file.shard.states.offset)
        self.next = 0
        self.catch_up()

    def update(self, block: memoryview) -> None:
        """More bytes of sample `next`."""
        self._sha256.update(block)

    def catch_up(self, finished: int | None = None) -> None:
        """Go past sample `finished` and past those already in the file, which are read back."""
        if finished is not None:
            self.next = finished + 1
        shard = self._file.shard
        while self.next in self._file.written:
            sample = shard.samples[self.next]
            self._read(shard.states.at(sample.row), shard.states.at(sample.row + sample.tokens))
            self.next += 1

    def finish(self) -> str:
        """The digest, once every sample has been gone past."""
        shard = self._file.shard
        assert self.next == len(shard.samples)
        rows = sum(sample.tokens for sample in shard.samples)
        self._read(shard.states.at(rows), shard.total_bytes)
        return self._sha256.hexdigest()

    def _read(self, start: int, stop: int) -> None:
        while start < stop:
            block = os.pread(self._file.data, min(BLOCK_BYTES, stop - start), start)
            if not block:
                raise OSError(f"{self._file.shard.path}: ends at byte {start:,}, expected {stop:,}")
            self._sha256.update(block)
            start += len(block)


@dataclass(frozen=True)
class Outcome:
    """What the journal will say of a sample whose rows are in the page cache, or why there are none."""

    file: ShardFile
    number: int  # of the shard, as the scheduler knows it
    sample: int
    line: dict
    refused: bool = False


class Lane:
    """One thread writes the samples in turn, another one makes them durable."""

    def __init__(self, slabs: mmap.mmap, geometry: memory.Geometry, outgoing: int, expected: dict) -> None:
        """`expected` is what a control file must agree with: run, dtype, captured, hidden_size."""
        self.first_error: str | None = None
        self._slabs = slabs
        self._geometry = geometry
        self._outgoing = outgoing
        self._expected = expected
        self._files: dict[int, ShardFile] = {}
        self._registry: dict[tuple[int, int], ShardFile] = {}
        self._guard = threading.Lock()  # of the registry: a file must not close between its being found and entered
        self._mouth = threading.Lock()
        self._outcomes: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
        self._commit_thread = threading.Thread(target=self._commit_all, name="aerie-commit")
        self._commit_thread.start()

    def run(self, incoming: int) -> None:
        """Serve until the scheduler closes its end, then finish what was taken."""
        try:
            with open(incoming) as lines:
                for line in lines:
                    if not line.endswith("\n"):
                        break  # the scheduler died in the middle of it
                    message = json.loads(line)
                    if "open" in message:
                        self._open(message["open"], Path(message["control"]))
                    elif "retire" in message:
                        file = self._files.pop(message["retire"], None)
                        if file is not None:
                            file.leave()
                    else:
                        for number, sample, parts in message["write"]:
                            self._take(number, sample, tuple(map(tuple, parts)))
        finally:  # also behind a defect or an interrupt: a process that waits for its thread would keep the locks
            self._outcomes.put(None)
            self._commit_thread.join()
            for file in self._files.values():
                file.leave()
            os.close(self._outgoing)

    def _open(self, number: int, control: Path) -> None:
        try:
            shard = read_shard(control, **self._expected)
            status = os.stat(shard.path)
            with self._guard:
                known = self._registry.get((status.st_dev, status.st_ino))
                if known is not None and known.has_journal(shard.journal):
                    known._users += 1
                    self._files[number] = known
                else:
                    self._files[number] = ShardFile(shard, self._registry, self._guard, known)
        except (OSError, ValueError) as error:
            self._remember(error, control)

    def _take(self, number: int, sample: int, parts: Parts) -> None:
        """Write one sample and free its slabs, whatever becomes of it."""
        file = self._files.get(number)
        if file is not None:
            file.enter()
            try:
                outcome = self._write(file, number, sample, parts)
            except Exception as error:  # remembered: it refuses this sample and every later one
                self._remember(error, file.shard.path)
                outcome = _refusal(file, number, sample, self.first_error)
            if outcome is None:
                file.leave()
            else:
                self._outcomes.put(outcome)
        self._say({"free": [slab for slab, _, _ in parts]})

    def _write(self, file: ShardFile, number: int, sample: int, parts: Parts) -> Outcome | None:
        """Check one sample and write its rows; None for one that another client's request has brought already."""
        if sample in file.written:
            return None
        if self.first_error is not None:
            return _refusal(file, number, sample, self.first_error)
        shard = file.shard
        wanted = shard.samples[sample]
        ids = hashlib.sha256()
        for part in parts:
            ids.update(self._bytes("ids", part))
        if ids.hexdigest() != wanted.sha256:
            return _refusal(
                file,
                number,
                sample,
                f"ids_sha256: the server ran {ids.hexdigest()}, the control file of shard {shard.name}"
                f" says {wanted.sha256}: another prompt came under this request id",
            )
        reason = self._not_finite(parts)
        if reason is not None:
            return _refusal(file, number, sample, reason)
        if file.digest is None:
            file.digest = FileDigest(file)
        digest = file.digest if file.digest.next == sample else None
        checksum = xxhash.xxh3_128()
        self._write_rows(file.data, "states", parts, shard.states.at(wanted.row), checksum, digest)
        line = {"sample": sample, "tokens": wanted.tokens, "ids_sha256": ids.hexdigest()}
        if shard.dtype == FLOAT8:
            self._write_rows(file.data, "scales", parts, shard.scales.at(wanted.row), checksum, None)
            line["float8_error"] = max(float(self._values("errors", part).max()) for part in parts)
        file.written.add(sample)
        if digest is not None:
            digest.catch_up(finished=sample)
        return Outcome(file, number, sample, {**line, "rows_xxh3": checksum.hexdigest()})

    def _write_rows(
        self, descriptor: int, name: str, parts: Parts, offset: int, checksum: Any, digest: FileDigest | None
    ) -> None:
        """Write one tensor of a sample block by block; both digests see the same bytes as the file."""
        for part in parts:
            view = self._bytes(name, part)
            for start in range(0, len(view), BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                checksum.update(block)
                if digest is not None:
                    digest.update(block)
                done = 0
                while done < len(block):
                    done += os.pwrite(descriptor, block[done:], offset + done)
                offset += len(block)

    def _bytes(self, name: str, part: tuple[int, int, int]) -> memoryview:
        slab, start, stop = part
        offset, size = self._geometry.sections[name]
        base = slab * self._geometry.slab_bytes + offset
        return memoryview(self._slabs)[base + start * size : base + stop * size]

    def _values(self, name: str, part: tuple[int, int, int]) -> numpy.ndarray:
        """float32 [rows, K+1] of `sums`, `scales` or `errors`."""
        return numpy.frombuffer(self._bytes(name, part), numpy.float32).reshape(-1, self._geometry.tensors)

    def _not_finite(self, parts: Parts) -> str | None:
        """Name the first tensor and token with a NaN or an infinity; None if there is none."""
        first_token = 0
        for part in parts:
            for token, block in zip(*numpy.nonzero(~numpy.isfinite(self._values("sums", part))), strict=True):
                bad = self._bad_values(part, int(token), int(block))
                if bad:
                    name = "final" if block == self._geometry.tensors - 1 else f"aux[{block}]"
                    return (
                        f"{name} of token {first_token + token}: {bad} of {self._geometry.width} values are not finite"
                    )
            first_token += part[2] - part[1]
        return None

    def _bad_values(self, part: tuple[int, int, int], token: int, block: int) -> int:
        """How many values of a row are NaN or infinite; a sum alone can overflow near 1e38.

        The exponent's bits are all ones: 8 below the sign in bfloat16 and float32. FLOAT8 has no
        infinity, and its scale has spoilt the row: all of them.
        """
        size = self._geometry.width * (self._geometry.row_bytes // self._geometry.tensors // self._geometry.width)
        slab, start, _ = part
        row = self._bytes("states", (slab, start + token, start + token + 1))[block * size : (block + 1) * size]
        if self._geometry.dtype == FLOAT8:
            scale = self._values("scales", (slab, start + token, start + token + 1))[0, block]
            return 0 if numpy.isfinite(scale) else self._geometry.width
        kind, exponent = (numpy.uint16, 0x7F80) if self._geometry.dtype == "bfloat16" else (numpy.uint32, 0x7F800000)
        return int(((numpy.frombuffer(row, kind) & kind(exponent)) == exponent).sum())

    # --- commit thread ---------------------------------------------------------------------------

    def _commit_all(self) -> None:
        last = False
        while not last:
            group = [self._outcomes.get()]
            while not self._outcomes.empty():
                group.append(self._outcomes.get())
            last = None in group
            members: dict[int, list[Outcome]] = {}
            for outcome in group:
                if outcome is not None:
                    members.setdefault(id(outcome.file), []).append(outcome)
            for outcomes in members.values():
                self._commit(outcomes[0].file, outcomes)

    def _commit(self, file: ShardFile, outcomes: list[Outcome]) -> None:
        """Rows durable, then lines durable: each step vouches for the one before."""
        stopped = self.first_error is not None
        try:
            kept = [outcome for outcome in outcomes if not outcome.refused and not stopped]
            if kept:
                os.fdatasync(file.data)
            lines = [outcome.line for outcome in outcomes if outcome.refused or not stopped]
            file.durable |= {outcome.sample for outcome in kept}
            complete = bool(kept) and len(file.durable) == len(file.shard.samples)
            if complete:
                lines.append({"shard_sha256": file.digest.finish()})
            _append(file.journal, "".join(json.dumps(line) + "\n" for line in lines).encode())
            os.fdatasync(file.journal)
        except Exception as error:  # remembered: it refuses every later sample
            self._remember(error, file.shard.journal)
            file.durable -= {outcome.sample for outcome in outcomes}
            complete = False
        lost = [[outcome.number, outcome.sample] for outcome in outcomes if outcome.sample not in file.durable]
        if lost:
            self._say({"refused": lost})
        if complete:
            self._say({"complete": outcomes[0].number})
        for _ in outcomes:
            file.leave()

    # ---------------------------------------------------------------------------------------------

    def _remember(self, error: Exception, path: Any) -> None:
        if self.first_error is None:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self.first_error = f"writer stopped at {stamp}: {path}: {type(error).__name__}: {error}"
            self._say({"error": self.first_error})

    def _say(self, message: dict) -> None:
        # Without a reader the scheduler is gone; what was taken is finished all the same.
        with self._mouth, contextlib.suppress(BrokenPipeError):
            _append(self._outgoing, (json.dumps(message) + "\n").encode())


def _refusal(file: ShardFile, number: int, sample: int, reason: str | None) -> Outcome:
    return Outcome(file, number, sample, {"sample": sample, "refused": reason}, refused=True)


def _open_journal(shard: Shard) -> int:
    """Open for appending; end a torn last line first, or the next good line would join it."""
    existed = shard.journal.exists()
    descriptor = os.open(shard.journal, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if not existed:
            sync_folder(shard.journal.parent)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            _append(descriptor, b"\n")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _append(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def main(argument: str) -> None:
    order = json.loads(argument)
    geometry = memory.Geometry(**order["geometry"])
    slabs = memory.attach(order["memory"], geometry)
    Lane(slabs, geometry, order["outgoing"], order["expected"]).run(order["incoming"])


if __name__ == "__main__":
    main(sys.argv[1])
