"""The client's side of a capture: lay out a chunk, send its samples, watch the journals, check, publish.

    tokens/{chunk}.safetensors ─▶ shards in hidden/{chunk}.partial/ ─▶ hidden/{chunk}/ and hidden/{chunk}.json

The server writes the states itself (containers/capture). A reply says that the rows of its sample were
taken; that they are durable, or why not, stands in the journal of the shard, which a thread reads while
the next samples are sent. Nothing is published before all checks hold; what is unfinished is taken up by
the next run.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aerie import artifact, hidden, server
from aerie.progress import progress, say

TOP_LOGPROBS = 5  # of the server's distribution after each sample, compared with lm_head · final
READY_S = 30.0  # the ready file is written before the server answers; this is for a slow shared folder
REQUESTS = 16  # at once; beyond that, samples share one
POLL_S = 0.1  # how often the journals are read
PATIENCE_S = 300.0  # without a new line in any journal, once everything is sent
HEAD_ROWS = 256  # rows of logits in memory at once
REPEAT_NUMBER = 99_999  # shard number of the samples that are captured twice
CAUSES = (
    "usual causes: another lm_head or final norm than the server's (quantised or scaled logits), final states of the "
    "wrong convention, rows of another request"
)


class CaptureError(RuntimeError):
    """A capture that cannot be trusted; nothing was published, what is durable is kept for the next run."""


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[Path]:
    """Hold the unfinished folder of a chunk, yield an empty folder in it for the server's own files.

    Raises CaptureError where another job holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise CaptureError(
                f"{path}: another job captures this chunk ({file.read().strip() or 'it has not said who'}); "
                "wait for it, or end it and run this one again"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        control = folder / "control"
        shutil.rmtree(control, ignore_errors=True)
        control.mkdir()
        yield control


def wait_ready(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Return what the capturing server read back; raise CaptureError where it differs from what was asked."""
    deadline = time.monotonic() + READY_S
    while not path.is_file():
        if time.monotonic() > deadline:
            raise CaptureError(
                f"{path}: the server is up but did not announce the capture; the image lacks the capture patch, "
                f"or SGLANG_PLUGINS hides it; rebuild the image"
            )
        time.sleep(0.2)
    ready = json.loads(path.read_text())
    differences = [
        f"{key}: expected {value!r}, the server read back {ready.get(key)!r}"
        for key, value in expected.items()
        if ready.get(key) != value
    ]
    if differences:
        raise CaptureError("the server does not capture what was asked:\n" + "\n".join(differences))
    return ready


# ----------------------------------------------------------------------------------------------------
# One shard under way


class Work:
    """A shard, its journal as far as it was read, and the server's answers (kept for the checks of a resumed run)."""

    def __init__(self, shard: hidden.PartialShard, name: str) -> None:
        self.shard = shard
        self.name = name  # of its control file, and in the request ids
        self.replies_path = shard.folder / f"{shard.number:05d}.replies.jsonl"
        self.journal = shard.prepare()
        if not self.journal.durable:  # perhaps laid out anew: the answers may be those of other samples
            self.replies_path.unlink(missing_ok=True)
        self._read = shard.journal.stat().st_size
        self.top: dict[int, list[Any]] = {}
        if self.replies_path.is_file():
            for line in self.replies_path.read_text(errors="replace").splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # cut short by a kill: that sample is sent again
                    entry = json.loads(line)
                    self.top[entry["sample"]] = entry["top"]
        if len(self.journal.durable) == len(shard.lengths) and self.journal.shard_sha256 is None:
            self.journal.shard_sha256 = artifact.sha256_file(shard.path)  # the server died before it could say

    def announce(self, control: Path, run: str) -> None:
        """Write the control file that the server reads when the first sample of the shard arrives."""
        hold = control / f"{self.name}.json"
        temporary = hold.with_suffix(".new")
        temporary.write_text(artifact.canonical_json(self.shard.control(run)))
        temporary.rename(hold)

    def requests(self, run: str) -> Iterator[tuple[tuple[Work, int], dict[str, Any]]]:
        """Yield ((self, position), payload) of every sample that is not both durable and answered."""
        for position in range(len(self.shard.lengths)):
            if position in self.journal.durable and position in self.top:
                continue
            payload = {
                "input_ids": self.shard.input_ids[position].tolist(),
                "rid": f"aerie-{run}-{self.name}-{position:06d}-0",
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "top_logprobs_num": TOP_LOGPROBS,
            }
            yield (self, position), payload

    def keep(self, position: int, top: list[Any]) -> None:
        """Append one sample's answer."""
        self.top[position] = top
        with open(self.replies_path, "a") as file:
            file.write(artifact.canonical_json({"sample": position, "top": top}) + "\n")

    def read_on(self) -> int:
        """Read what the journal got since; return the tokens that became durable."""
        with open(self.shard.journal, "rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            return 0
        before = set(self.journal.durable)
        self._read += len(whole)
        for line in whole.decode().splitlines():
            self.journal.add(line)
        return sum(self.shard.lengths[position] for position in self.journal.durable.keys() - before)

    @property
    def complete(self) -> bool:
        """Whether every sample is durable and answered, and the file's digest is known."""
        count = len(self.shard.lengths)
        return len(self.journal.durable) == count == len(self.top) and self.journal.shard_sha256 is not None


def require_room(folder: Path, needed: int) -> None:
    """Raise CaptureError where the disk cannot hold a chunk of `needed` bytes, before any server is started."""
    laid_out = sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))
    free = artifact.free_bytes(folder)
    if needed - laid_out > free:
        raise CaptureError(
            f"{folder}: no room for the states of this chunk: {needed - laid_out:,} bytes are needed, {free:,} are free; "
            "make room there, set results_dir to another disk, or capture fewer prompts per chunk (prompts.rows_per_chunk)"
        )


def prefetched(works: Iterator[Work], ahead: int) -> Iterator[Work]:
    """Yield works while a thread lays out the next ones; a gigabyte in memory takes a while to lay out."""
    with ThreadPoolExecutor(1) as pool:
        waiting = deque(pool.submit(next, works, None) for _ in range(ahead))
        while (work := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, works, None))
            yield work


def interleaved(works: Iterator[Work], run: str, at_once: int) -> Iterator[tuple[tuple[Work, int], dict[str, Any]]]:
    """Yield the requests of `at_once` shards in turn: each of the server's writer threads gets one."""
    streams: list[Iterator[tuple[tuple[Work, int], dict[str, Any]]]] = []
    while True:
        if len(streams) < at_once:  # one more per turn: the server computes while the next ones are laid out
            streams += [work.requests(run) for work in itertools.islice(works, 1)]
        if not streams:
            return
        for stream in list(streams):
            request = next(stream, None)
            if request is None:
                streams.remove(stream)
            else:
                yield request


def in_groups(
    requests: Iterator[tuple[Any, dict[str, Any]]], concurrency: int
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Yield ([keys], payload) with several samples in one request where many are in flight: HTTP has its price."""
    size = max(1, concurrency // REQUESTS)
    while group := list(itertools.islice(requests, size)):
        keys, payloads = zip(*group, strict=True)
        many = {name: [payload[name] for payload in payloads] for name in ("input_ids", "rid")} if size > 1 else {}
        yield list(keys), payloads[0] | many


def refusal(body: Any, sample_id: str, length: int) -> str | None:
    """Return why an answer does not acknowledge its sample, None where it does."""
    meta = body.get("meta_info", {}) if isinstance(body, dict) else {}
    reason = (meta.get("finish_reason") or {}).get("type")
    if reason == "abort":
        return f"{sample_id}: the server aborted the request: {meta['finish_reason']}"
    if meta.get("prompt_tokens") != length:
        return f"{sample_id}: sent {length:,} tokens, the server counted {meta.get('prompt_tokens')}: {body}"
    tickets = meta.get("aerie_capture") or [None]
    if tickets[0] is None:
        return f"{sample_id}: the server answered without capturing"
    if tickets[0]["state"] != "accepted":
        return f"{sample_id}: {tickets[0]['error']}"
    return None


class Watch:
    """Reads the journals while samples are sent, and checks each shard as soon as it is complete."""

    def __init__(self, shards: list[hidden.PartialShard], control: Path, check: Any) -> None:
        self.works: list[Work] = []
        self.failure: str | None = None
        self._waiting = len(shards)  # not complete yet
        self._open: list[Work] = []
        self._control = control
        self._check = check
        self._results: list[Future[Any]] = []
        self._checker = ThreadPoolExecutor(1)
        self._ended = threading.Event()
        self._last_news = time.monotonic()
        self._counter = progress(sum(sum(shard.lengths) for shard in shards), "capturing", "tokens")
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._checker.shutdown(cancel_futures=True)
        self._counter.close()

    def open(self, work: Work) -> Work:
        """Watch one more shard."""
        if work.journal.durable:
            say(
                f"{work.shard.path.name}: taking up {len(work.journal.durable):,} of {len(work.shard.lengths):,} samples"
            )
            self._counter.update(sum(work.shard.lengths[position] for position in work.journal.durable))
        self.works.append(work)
        self._open.append(work)
        return work

    def raise_failure(self) -> None:
        """Raise what the journals or the server's writer reported: the rest would follow it."""
        if self.failure is not None:
            raise CaptureError(self.failure)

    def wait(self, engine: server.Server) -> list[Any]:
        """Return the results of the checks once every shard is complete."""
        self._last_news = time.monotonic()
        while self._waiting:
            self.raise_failure()
            if not engine.alive():
                raise server.ServerError(f"the server died before everything was durable; its log: {engine.log_path}")
            if time.monotonic() - self._last_news > PATIENCE_S:
                names = ", ".join(work.shard.path.name for work in self._open)
                raise CaptureError(
                    f"{names}: no sample became durable for {PATIENCE_S:.0f} s although all were accepted; is the "
                    f"disk stuck? the server's log: {engine.log_path}"
                )
            time.sleep(POLL_S / 2)
        self.raise_failure()
        return [result.result() for result in self._results]

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._look()
            except Exception as error:  # handed to the thread that sends
                self.failure = self.failure or f"{type(error).__name__}: {error}"
            self._ended.wait(POLL_S)

    def _look(self) -> None:
        for work in list(self._open):
            news = work.read_on()
            if news:
                self._counter.update(news)
                self._last_news = time.monotonic()
            for position, reason in work.journal.refused.items():
                self.failure = self.failure or f"{work.shard.metadata['ids'][position]}: {reason}"
            if work.complete:
                self._results.append(self._checker.submit(self._check, work))
                self._open.remove(work)
                self._waiting -= 1
        error = self._control / "error.json"
        if self._waiting and error.is_file():
            self.failure = self.failure or json.loads(error.read_text())["error"]


def send(
    engine: server.Server, works: Iterator[Work], watch: Watch, run: str, control: Path, concurrency: int, at_once: int
) -> None:
    """Send every sample that is not durable and answered yet; raise CaptureError at the first refusal."""

    def opened() -> Iterator[Work]:
        for work in prefetched(works, ahead=at_once + 1):
            work.announce(control, run)
            yield watch.open(work)

    def on_reply(keys: list[tuple[Work, int]], reply: server.Reply) -> None:
        watch.raise_failure()
        if reply.status != 200:
            names = ", ".join(work.shard.metadata["ids"][position] for work, position in keys)
            raise CaptureError(f"{names}: HTTP {reply.status}: {reply.body}")
        bodies = reply.body if isinstance(reply.body, list) else [reply.body]
        for (work, position), body in zip(keys, bodies, strict=True):
            defect = refusal(body, work.shard.metadata["ids"][position], work.shard.lengths[position])
            if defect:
                raise CaptureError(defect)  # the first refusal ends the run: the rest would follow it
            (top,) = body["meta_info"]["output_top_logprobs"]
            work.keep(position, [[logprob, token] for logprob, token, *_ in top])

    requests = in_groups(interleaved(opened(), run, at_once), concurrency)
    engine.ask_all(requests, min(concurrency, REQUESTS), on_reply, check=watch.raise_failure)


# ----------------------------------------------------------------------------------------------------
# Checks


@dataclass(frozen=True)
class Limits:
    """What the gates of a chunk are held against."""

    max_logprob_difference: float  # nats
    min_greedy_agreement: float  # share of rows


@dataclass(frozen=True)
class Measured:
    """What the checks of one shard found."""

    logprob_difference: float
    agreed: int
    asked: int
    float8_error: float | None


def check(work: Work, head: hidden.Head, final: str, computed: torch.dtype, greedy: bool, rows: int) -> Measured:
    """Hold the states of a complete shard against what the server answered.

    For every sample: log_softmax(lm_head · final) of its last row against the server's own top
    log-probabilities. For up to `rows` rows of greedy answers: the argmax is the token that follows.
    """
    shard = work.shard
    tensors = shard.tensors()

    def logits(numbers: list[int]) -> Iterator[torch.Tensor]:
        for begin in range(0, len(numbers), HEAD_ROWS):
            last = (numbers[begin : begin + HEAD_ROWS], slice(-1, None))
            states = hidden.states_at(tensors, last, computed)[:, 0]  # (rows, 1, D) -> (rows, D)
            yield from head.logits(states, final)  # (rows, V) -> (V,) each

    lasts = [stop - 1 for stop in shard.starts[1:]]
    largest = max(hidden.logprob_difference(row, work.top[position]) for position, row in enumerate(logits(lasts)))
    # Row j predicts token j+1: a generated token that has a row before it in the same sample.
    ids, mask, firsts = tensors["input_ids"], tensors["loss_mask"], set(shard.starts)
    candidates = [int(j) - 1 for j in mask.nonzero().flatten() if int(j) not in firsts] if greedy else []
    chosen = sorted(random.Random(shard.number).sample(candidates, min(len(candidates), rows)))
    agreed = sum(int(row.argmax() == ids[j + 1]) for j, row in zip(chosen, logits(chosen), strict=True))
    errors = [entry.float8_error for entry in work.journal.durable.values() if entry.float8_error is not None]
    return Measured(largest, agreed, len(chosen), max(errors, default=None))


def gates_of(measured: list[Measured], limits: Limits) -> dict[str, Any]:
    """Return the gates of a finished chunk: {name: {"value", "limit", "passed"}}."""
    largest = max(each.logprob_difference for each in measured)
    asked = sum(each.asked for each in measured)
    gates: dict[str, Any] = {
        "logprob_difference": {"value": round(largest, 6), "limit": limits.max_logprob_difference,
                               "passed": largest <= limits.max_logprob_difference},
    }  # fmt: skip
    if asked:
        agreement = sum(each.agreed for each in measured) / asked
        gates["greedy_agreement"] = {"value": round(agreement, 6), "limit": limits.min_greedy_agreement,
                                     "rows": asked, "passed": agreement >= limits.min_greedy_agreement}  # fmt: skip
    return gates


def repeat(
    engine: server.Server, works: list[Work], control: Path, run: str, name: str, count: int, computed: torch.dtype
) -> dict[str, Any]:
    """Capture `count` samples a second time, in another company; return how far the two captures agree.

    {"samples": ids, "bitwise": whether every stored byte is the same, "largest_difference": absolute}
    """
    positions = [(work, position) for work in works for position in range(len(work.shard.lengths))]
    drawn = random.Random(0).sample(range(len(positions)), min(count, len(positions)))
    chosen = [positions[number] for number in sorted(drawn)]
    first = works[0].shard
    shard = hidden.PartialShard(
        folder=first.folder / "repeat",
        number=REPEAT_NUMBER,
        samples=list(range(len(chosen))),
        lengths=[work.shard.lengths[position] for work, position in chosen],
        input_ids=[work.shard.input_ids[position] for work, position in chosen],
        loss_mask=[work.shard.loss_mask[position] for work, position in chosen],
        layers=first.layers,
        width=first.width,
        dtype=first.dtype,
        metadata={"ids": [work.shard.metadata["ids"][position] for work, position in chosen]},
    )
    shutil.rmtree(shard.folder, ignore_errors=True)
    with Watch([shard], control, lambda work: None) as watch:
        send(engine, iter([Work(shard, name)]), watch, run, control, concurrency=1, at_once=1)
        watch.wait(engine)
    (again,) = watch.works
    bitwise, largest = True, 0.0
    second = shard.tensors()
    for number, (work, position) in enumerate(chosen):
        pairs = []
        for tensors, owner, place in ((work.shard.tensors(), work.shard, position), (second, shard, number)):
            rows = slice(owner.starts[place], owner.starts[place + 1])
            pairs.append(hidden.states_at(tensors, rows, computed).float())  # (T, K+1, D)
        bitwise &= work.journal.durable[position].rows_xxh3 == again.journal.durable[number].rows_xxh3
        largest = max(largest, float((pairs[0] - pairs[1]).abs().max()))
    return {"samples": shard.metadata["ids"], "bitwise": bitwise, "largest_difference": largest}


# ----------------------------------------------------------------------------------------------------
# Publication


def publish(output: Path, works: list[Work], record: dict[str, Any]) -> None:
    """Move the finished shards into place, with the digests taken while they were written; the manifest comes last."""
    folder = output.with_suffix("")
    artifact.sidecar_of(output).unlink(missing_ok=True)  # the old manifest must not speak for the new shards
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shards, samples = [], []
    for work in works:
        shard = work.shard
        digest = artifact.seal(shard.path, folder / shard.path.name, work.journal.shard_sha256)
        shards.append({"name": shard.path.name, "sha256": digest, "bytes": shard.layout.total_bytes,
                       "tokens": sum(shard.lengths)})  # fmt: skip
        samples += shard.entries(work.journal)
    artifact.write_json(output, {**record, "shards": shards, "samples": samples})
    shutil.rmtree(works[0].shard.folder)
