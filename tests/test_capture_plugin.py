"""The capture plugin without SGLang: fakes of what it meets there stand at the top.

    python -m pytest tests/test_capture_plugin.py

Legend: T tokens of a sample, N rows of a forward, K captured layers, D target width.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import xxhash

import aerie_capture
from aerie import hidden
from aerie_capture import contract, hooks, lane, memory, probe, protocol, writer

RUN = "0123456789abcdef"
LAYERS = (1, 2, 4)
K, D, N_LAYERS = len(LAYERS), 4, 6
FLOAT_BYTES = 4


# --- fakes of SGLang -------------------------------------------------------------------------------------------------


@dataclass
class Mode:
    extend: bool

    def is_extend(self):
        return self.extend


@dataclass
class Batch:
    """The fields of SGLang's ForwardBatch that the plugin reads."""

    rids: list
    extend_seq_lens_cpu: list
    extend_prefix_lens_cpu: list
    input_ids: torch.Tensor
    forward_mode: Mode = field(default_factory=lambda: Mode(True))


@dataclass
class Output:
    customized_info: dict | None = None


def logits_forward(
    self,
    input_ids,
    hidden_states,
    lm_head,
    logits_metadata,
    aux_hidden_states=None,
    hidden_states_before_norm=None,
):
    """LogitsProcessor.forward: the hook gets it unbound."""
    return Output()


class Inner(torch.nn.Module):
    """An inner model: its loop looks at a list, or (`flags`) at a flag of each layer."""

    def __init__(self, flags=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(N_LAYERS))
        self.norm = torch.nn.Identity()
        self.layers_to_capture = []
        self.flags = flags

    def switch(self, ids):
        self.layers_to_capture = ids
        for index in ids if self.flags else ():
            self.layers[index]._is_layer_to_capture = True


class Model(torch.nn.Module):
    def __init__(self, flags=False, shift=1):
        super().__init__()
        self.model = Inner(flags)
        self.logits_processor = types.SimpleNamespace(logit_scale=None, final_logit_softcapping=None)
        self.shift = shift
        self.capture = False

    def set_eagle3_layers_to_capture(self, ids):
        self.capture = True
        self.model.switch([index + self.shift for index in ids])


def runner(model, **changes):
    facts = {
        "model": model,
        "is_draft_worker": False,
        "model_config": types.SimpleNamespace(
            hf_text_config=types.SimpleNamespace(num_hidden_layers=N_LAYERS, hidden_size=D), context_len=64
        ),
        "dtype": torch.float32,
        "device": "cpu",
        "server_args": types.SimpleNamespace(),
    }
    return types.SimpleNamespace(**{**facts, **changes})


@pytest.fixture
def sglang(monkeypatch):
    """Stand-in modules; returns the settings in effect, the rank and what was registered."""
    world = types.SimpleNamespace(
        settings={"disable_radix_cache": True, "watchdog_timeout": 300.0, "max_prefill_tokens": 128},
        rank=0,
        size=1,
        registered=[],
    )

    def config_leaf(name):
        if name not in world.settings:
            raise ValueError(f"{name!r} is not a config leaf")
        return world.settings[name]

    context = types.SimpleNamespace(config_leaf=config_leaf)
    registry = types.SimpleNamespace(register=lambda target, hook, kind: world.registered.append((target, hook, kind)))
    contents = {
        "sglang": {},
        "sglang.version": {"__version__": "0.5.20"},
        "sglang.srt": {},
        "sglang.srt.runtime_context": {"get_context": lambda: context},
        "sglang.srt.distributed": {},
        "sglang.srt.distributed.parallel_state": {
            "get_tensor_model_parallel_rank": lambda: world.rank,
            "get_tensor_model_parallel_world_size": lambda: world.size,
        },
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": registry,
            "HookType": types.SimpleNamespace(BEFORE="before", AFTER="after", AROUND="around"),
        },
        "sglang.srt.model_loader": {},
        "sglang.srt.model_loader.weight_utils": {"default_weight_loader": lambda p, tensor: p.data.copy_(tensor)},
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    monkeypatch.setattr(hooks, "_capture", None)
    monkeypatch.setattr(hooks, "_pinned_layers", None)
    return world


# --- a shard and a server that captures it ---------------------------------------------------------------------------


def ids_sha256(ids):
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()


def states_of(ids, *, base=0.0):
    """Rows that tell their token: aux [T, K*D], final [T, D]."""
    rows = torch.tensor(ids, dtype=torch.float32)[:, None]  # (T, 1)
    columns = torch.arange(K * D, dtype=torch.float32)[None]  # (1, K*D)
    return rows * 100 + columns + base, rows * -100 - columns[:, :D] - base


def joined(aux, final):
    """As stored: aux [T, K*D] and final [T, D] → [T, K+1, D]."""
    return torch.cat((aux, final), dim=1).view(len(aux), K + 1, D)


HEAD = bytes(range(64))  # what the client wrote before the states
TAIL = b"tail of the file"


def eventually(condition, what):
    """Wait until a condition holds; what happens in a lane happens a little later."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def text_of(path):
    """What a file says, also before its lane has made it."""
    return path.read_text() if path.exists() else ""


class LaneThread:
    """A lane as a thread of this process, where a test can replace what it calls."""

    def __init__(self, order):
        self._order = order
        self._error = None
        self._thread = threading.Thread(target=self._run, name=f"lane-{order['incoming']}", daemon=True)
        self._thread.start()

    def _run(self):
        try:
            lane.main(json.dumps(self._order))
        except Exception as error:  # raised by wait
            self._error = error
            with contextlib.suppress(OSError):
                os.close(self._order["outgoing"])  # as the end of a process would

    def wait(self):
        self._thread.join(20)
        assert not self._thread.is_alive(), "the lane does not end"
        if self._error is not None:
            raise self._error


class WatchedLane(lane.Lane):
    """A lane that counts the jobs which its writing thread is done with."""

    def __init__(self, *arguments):
        self.done = 0
        super().__init__(*arguments)

    def _take(self, *arguments):
        super()._take(*arguments)
        self.done += 1

    @property
    def idle(self):
        """Whether every outcome of those jobs is settled: only the scheduler's own numbers hold the files."""
        holders = list(self._files.values())
        return all(file._users == sum(file is each for each in holders) for file in list(self._registry.values()))


class Bench:
    """A control folder, shards in it, and a Capture that is asked like LogitsProcessor.forward.

    Its lanes are threads of this process, or processes as in a server (`real`).
    """

    def __init__(
        self,
        folder,
        monkeypatch,
        *,
        forward_tokens=256,
        chunk_tokens=0,
        wait_s=10.0,
        prompts=None,
        real=False,
        **config,
    ):
        self.folder = folder
        (folder / "control").mkdir(exist_ok=True)
        self.config = protocol.CaptureConfig(
            **{
                "run": RUN,
                "ready_path": folder / "ready.json",
                "control_dir": folder / "control",
                "layers": LAYERS,
                "final": "post_norm",
                "dtype": "float32",
                "threads": 2,
                **config,
            }
        )
        self.computed = torch.bfloat16 if self.config.dtype == "bfloat16" else torch.float32
        self.real = real
        self.lanes = []
        monkeypatch.setattr(lane, "Lane", self._watched)
        self.capture = hooks.Capture(
            config=self.config, hidden_size=D, dtype=self.computed, device=torch.device("cpu"),
            forward_tokens=forward_tokens, wait_s=wait_s, chunk_tokens=chunk_tokens,
            start_lane=None if real else LaneThread,
        )  # fmt: skip
        eventually(lambda: real or len(self.lanes) == self.config.threads, "the lanes do not start")
        monkeypatch.setattr(hooks, "_capture", self.capture)
        self.prompts = dict(prompts or {})
        self.jobs = []  # (journal, sample) of all that was submitted
        self.closed = False
        self.digests_hold = True  # a test that plays with the files says no
        self.lanes_live = True  # a test that kills one says no
        submit = self.capture.writer.submit

        def recording(jobs):
            self.jobs += [(opened.shard.journal, sample) for opened, sample, _ in jobs]
            submit(jobs)

        self.capture.writer.submit = recording

    def _watched(self, *arguments):
        self.lanes.append(WatchedLane(*arguments))
        return self.lanes[-1]

    @property
    def ring(self):
        return self.capture._copier.ring

    @property
    def scaled(self):
        return self.config.dtype == protocol.FLOAT8

    def shard(self, name, prompts, **changes):
        """Lay a shard out: HEAD, states, scales (float8), TAIL; and its control file."""
        rows = sum(map(len, prompts))
        states_bytes = (K + 1) * D * protocol.DTYPE_BYTES[self.config.dtype]
        scales_bytes = (K + 1) * FLOAT_BYTES if self.scaled else 0
        data = self.folder / f"{name}.bin"
        data.write_bytes(HEAD + bytes(rows * (states_bytes + scales_bytes)) + TAIL)
        samples, row = [], 0
        for ids in prompts:
            samples.append({"row": row, "tokens": len(ids), "sha256": ids_sha256(ids)})
            row += len(ids)
        scales = {"offset": len(HEAD) + rows * states_bytes, "row_bytes": scales_bytes}
        control = {
            "run": RUN,
            "path": str(data),
            "journal": str(self.folder / f"{name}.journal"),
            "dtype": self.config.dtype,
            "total_bytes": data.stat().st_size,
            "states": {"offset": len(HEAD), "row_bytes": states_bytes},
            "scales": scales if self.scaled else None,
            "samples": samples,
            **changes,
        }
        (self.folder / "control" / f"{name}.json").write_text(json.dumps(control))
        self.prompts[name] = (prompts, samples, rows)

    def stored(self, shard, sample):
        """The sample's bytes as they lie in the data file: its states, its scales (b"" without)."""
        self.drain()
        prompts, samples, rows = self.prompts[shard]
        raw = (self.folder / f"{shard}.bin").read_bytes()
        states_bytes = (K + 1) * D * protocol.DTYPE_BYTES[self.config.dtype]
        spans = [(len(HEAD), states_bytes)]
        if self.scaled:
            spans.append((len(HEAD) + rows * states_bytes, (K + 1) * FLOAT_BYTES))
        first, last = samples[sample]["row"], samples[sample]["row"] + len(prompts[sample])
        parts = [raw[offset + first * size : offset + last * size] for offset, size in spans]
        return parts[0], b"".join(parts[1:])

    def rows(self, shard, sample):
        """The sample's states as a reader sees them, float32 [T, K+1, D]."""
        states, scales = self.stored(shard, sample)
        if not self.scaled:
            return torch.frombuffer(bytearray(states), dtype=self.computed).view(-1, K + 1, D).float()
        values = torch.frombuffer(bytearray(states), dtype=torch.float8_e4m3fn).view(-1, K + 1, D)
        scales = torch.frombuffer(bytearray(scales), dtype=torch.float32).view(-1, K + 1, 1)
        return values.float() * scales  # (T, K+1, D)

    def drain(self):
        """Wait until every job has left its lane: its line stands, or it failed; and the scheduler knows."""
        if self.closed:
            return
        if self.real:
            eventually(self._all_have_lines, "jobs get no line")
            return
        eventually(
            lambda: sum(each.done for each in self.lanes) == len(self.jobs) and all(each.idle for each in self.lanes),
            "jobs do not leave their lanes",
        )
        opened = self.capture.writer._shards
        for number, each in enumerate(self.lanes, 1):  # a message behind all others, and its arrival
            opened[-number] = types.SimpleNamespace(complete=False, lane=None)
            each._say({"complete": -number})
            eventually(lambda number=number: opened[-number].complete, "the scheduler does not listen")
            del opened[-number]

    def _all_have_lines(self):
        found = {path: re.findall(r'"sample": (\d+),', text_of(path)) for path in {path for path, _ in self.jobs}}
        return {(path, int(sample)) for path, samples in found.items() for sample in samples} >= set(self.jobs)

    def journal(self, shard):
        """The whole lines of a journal, after everything that was submitted."""
        self.drain()
        path = self.folder / f"{shard}.journal"
        entries = []
        for line in text_of(path).splitlines():
            with contextlib.suppress(ValueError):  # torn
                entries.append(json.loads(line))
        return entries

    def durable(self, shard):
        """The samples that the journal vouches for, in the order of their lines."""
        return [entry["sample"] for entry in self.journal(shard) if "rows_xxh3" in entry]

    def refusal(self, ticket):
        """Why an accepted sample was refused afterwards: the last line of it."""
        assert ticket["state"] == "accepted"
        lines = [entry for entry in self.journal(ticket["shard"]) if entry.get("sample") == ticket["sample"]]
        return lines[-1]["refused"]

    def forward(self, *requests, packed=True, padding=0, damage=None):
        """Run requests (rid, prefix, ids); return the tickets, or None when there are none."""
        ids = [token for _, _, tokens in requests for token in tokens] + [0] * padding
        aux, final = (rows.to(self.computed) for rows in states_of(ids))  # (N, K*D), (N, D)
        if damage is not None:
            aux, final = damage(aux, final)
        blocks = aux if packed else list(aux.split(D, dim=1))  # (N, K*D), or K of (N, D)
        batch = Batch(
            rids=[rid for rid, _, _ in requests],
            extend_seq_lens_cpu=[len(tokens) for _, _, tokens in requests],
            extend_prefix_lens_cpu=[prefix for _, prefix, _ in requests],
            input_ids=torch.tensor(ids),
        )
        output = hooks.take_states(logits_forward, object(), batch.input_ids, final, None, batch, blocks)
        return None if output.customized_info is None else output.customized_info[protocol.TICKET_KEY]

    def restarted(self, make_bench, **options):
        """End this server; return one that takes up the same shards."""
        self.finish()
        return make_bench(prompts=self.prompts, **options)

    def close(self):
        """End the lanes behind everything that was submitted."""
        if not self.closed:
            self.capture.writer.close()
            self.closed = True

    def finish(self):
        """End the server, and check what must hold after any mix of samples.

        Every slab is free once the left-overs of aborted prompts are given back; no file stays registered in a lane
        and no descriptor open; a journal has the sha256 of its file exactly when every sample of it is durable.
        """
        self.close()
        while self.capture._partials:
            self.capture._drop(self.capture._partials.popitem()[1])
        if self.lanes_live:
            assert self.ring.free == len(self.ring.slabs) == len(set(map(id, self.ring._free)))
            assert all(slab.users == 0 for slab in self.ring.slabs)
            assert [process.returncode for process in self.capture.writer._processes if self.real] == (
                [0] * self.config.threads if self.real else []
            )
        assert [each._registry for each in self.lanes] == [{}] * len(self.lanes)
        held = {os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in os.listdir("/proc/self/fd")}
        assert not [path for path in held if path.startswith(str(self.folder)) and path.endswith((".bin", ".journal"))]
        for shard, (prompts, _, _) in self.prompts.items() if self.digests_hold else ():
            found = [entry["shard_sha256"] for entry in self.journal(shard) if "shard_sha256" in entry]
            whole = set(self.durable(shard)) == set(range(len(prompts)))
            assert found == ([file_sha256(self.folder / f"{shard}.bin")] if whole else [])


def file_sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rid(shard, sample, attempt=0, run=RUN):
    return f"aerie-{run}-{shard}-{sample:06d}-{attempt}"


@pytest.fixture
def make_bench(tmp_path, monkeypatch):
    """Make a Bench; all are checked at the end. Slabs have 64 rows of float32."""
    monkeypatch.setattr(memory, "SLAB_BYTES", 64 * (K + 1) * D * FLOAT_BYTES)
    benches = []

    def make(**options):
        benches.append(Bench(tmp_path, monkeypatch, **options))
        return benches[-1]

    yield make
    benches[-1].finish()  # an earlier one was ended by the test


@pytest.fixture
def bench(make_bench):
    return make_bench()


def assert_captured(bench, ticket, shard, sample):
    """The ticket, the journal and the file say the same, and the file holds the right rows."""
    ids = bench.prompts[shard][0][sample]
    expected = {"tokens": len(ids), "ids_sha256": ids_sha256(ids)}
    assert ticket == {
        "state": "accepted",
        "error": None,
        "shard": shard,
        "sample": sample,
        "dtype": bench.config.dtype,
        "row": bench.prompts[shard][1][sample]["row"],
        **expected,
    }
    lines = [entry for entry in bench.journal(shard) if entry.get("sample") == sample and "refused" not in entry]
    digest = xxhash.xxh3_128(b"".join(bench.stored(shard, sample))).hexdigest()
    assert lines == [{"sample": sample, **expected, "rows_xxh3": digest}]
    assert torch.equal(bench.rows(shard, sample), joined(*states_of(ids)))


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "list"])
def test_rows_of_a_mixed_forward_land_at_their_samples(bench, packed):
    bench.shard("00000", [[5], [6, 7, 8], [9, 10]])
    bench.shard("00001", [[11, 12, 13, 14]])
    tickets = bench.forward(
        (rid("00000", 2), 0, [9, 10]),
        ("somebody-else", 0, [1, 2, 3]),
        (rid("00001", 0), 0, [11, 12, 13, 14]),
        (rid("00000", 0), 0, [5]),
        ("HEALTH_CHECK_1", 0, [4]),
        (rid("00000", 1), 0, [6, 7, 8]),
        packed=packed,
        padding=3,
    )
    assert [ticket is None for ticket in tickets] == [False, True, False, False, True, False]
    for ticket, shard, sample in ((0, "00000", 2), (2, "00001", 0), (3, "00000", 0), (5, "00000", 1)):
        assert_captured(bench, tickets[ticket], shard, sample)
    for shard in ("00000", "00001"):
        raw = (bench.folder / f"{shard}.bin").read_bytes()
        assert raw.startswith(HEAD) and raw.endswith(TAIL)


def test_a_ticket_is_settled_when_the_forward_returns(bench, monkeypatch):
    """SGLang copies and pickles it; nothing in it waits for the disk."""
    gate, original = threading.Event(), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (gate.wait(5), original(descriptor))[1])
    bench.shard("00000", [[5, 6]])
    (ticket,) = bench.forward((rid("00000", 0), 0, [5, 6]))
    assert type(ticket) is dict and ticket.copy() == json.loads(json.dumps(ticket))
    assert ticket["state"] == "accepted" and not text_of(bench.folder / "00000.journal")
    gate.set()
    assert_captured(bench, ticket, "00000", 0)


def copier(width=D, dtype="float32", device="cpu", rows=64):
    return writer.Copier(
        torch.device(device), tensors=K + 1, width=width, dtype=dtype, rows=rows, spare=0, wait_s=1.0
    )  # fmt: skip


def part_of(piece, name):
    return getattr(piece.slab, name)[piece.start : piece.stop]


def test_bfloat16_rows_keep_their_bytes_where_a_lane_looks_for_them():
    aux, final = (rows.bfloat16() for rows in states_of([3, 5]))
    blocks = [*aux.split(D, dim=1), final]
    made = copier(dtype="bfloat16")
    (((piece,)),) = made.copy(blocks, torch.tensor([3, 5]), [(0, 2)])
    expected = joined(aux, final)
    assert torch.equal(part_of(piece, "states"), expected) and part_of(piece, "ids").tolist() == [3, 5]
    geometry = made.ring.geometry
    shared = memory.attach(made.ring.descriptor, geometry)
    base = piece.slab.number * geometry.slab_bytes

    def found(name):
        offset, size = geometry.sections[name]
        return shared[base + offset + piece.start * size : base + offset + piece.stop * size]

    assert found("states") == expected.view(torch.int16).numpy().tobytes()
    assert found("ids") == struct.pack("<2i", 3, 5)
    assert found("sums") == expected.sum(dim=2, dtype=torch.float32).numpy().tobytes()
    os.close(made.ring.descriptor)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3"])
@pytest.mark.parametrize(("rows", "tensors", "width"), [(1, 2, 1), (3, 4, 5), (64, 4, 4), (1000, 7, 33)])
def test_the_sections_of_a_slab_do_not_touch_each_other(dtype, rows, tensors, width):
    geometry = memory.Geometry(3, rows, tensors, width, dtype)
    ends = [(offset, offset + rows * size) for offset, size in geometry.sections.values()]
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ends)) and ends[0][0] == 0
    assert ends[-1][1] <= geometry.slab_bytes and geometry.slab_bytes % memory.PAGE == 0
    assert all(offset % 64 == 0 for offset, _ in geometry.sections.values())
    assert set(geometry.sections) == {"states", "sums", "ids"} | (
        {"scales", "errors"} if dtype == "float8_e4m3" else set()
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: streams and pinned memory")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "list"])
def test_rows_copied_from_a_gpu_survive_the_forwards_that_follow(packed):
    """The forward stream runs on and reuses the memory of the rows; the copies must not see it."""
    device, rows, width, steps = torch.device("cuda"), 4096, 1024, 20
    gpu_copier, heavy = copier(width, device="cuda", rows=steps * rows), torch.ones(4096, 4096, device=device)
    copied = []
    for step in range(steps):
        for _ in range(4):
            heavy = heavy @ heavy * 1e-4  # keeps the forward stream busy while the host runs ahead
        blocks = [torch.full((rows, width), float(step * K + k), device=device) for k in range(K)]
        final = torch.full((rows, width), -float(step), device=device)
        ids = torch.full((rows,), step, device=device)
        blocks = [torch.cat(blocks, dim=1), final] if packed else [*blocks, final]
        copied.append(gpu_copier.copy(blocks, ids, [(0, 100), (100, rows - 7)]))
        del blocks, final, ids
        torch.full((2 * (K + 1) * rows, width), float("nan"), device=device)
    for step, samples in enumerate(copied):
        for pieces, length in zip(samples, (100, rows - 107), strict=True):
            assert sum(piece.stop - piece.start for piece in pieces) == length
            for piece in pieces:
                piece.ready.synchronize()
                states = part_of(piece, "states")  # (n, K+1, D)
                assert states.is_pinned()
                assert all((states[:, k] == step * K + k).all() for k in range(K))
                assert (states[:, K] == -step).all() and (part_of(piece, "ids") == step).all()
                assert (part_of(piece, "sums")[:, K] == -step * width).all()


def test_foreign_requests_get_an_empty_entry_in_every_forward(bench):
    """SGLang 0.5.14 dies when one request of a reply has an entry and another has none."""
    bench.shard("00000", [[5, 6]])
    assert bench.forward(("somebody-else", 0, [1, 2]), ("another", 0, [3])) == [None, None]
    assert bench.forward((rid("00000", 0, run="f" * 16), 0, [5, 6])) == [None]  # a client of an earlier server
    decode = Batch([rid("00000", 0), "somebody-else"], [1, 1], [2, 2], torch.tensor([5, 6]), Mode(False))
    output = hooks.take_states(logits_forward, object(), decode.input_ids, None, None, decode)
    assert output.customized_info == {protocol.TICKET_KEY: [None, None]}
    assert bench.journal("00000") == []


@pytest.mark.parametrize("rids", [None, []], ids=["warm-up", "idle"])
def test_forwards_without_request_ids_are_left_alone(bench, rids):
    dummy = Batch(rids, [1], [0], torch.tensor([5]))
    output = hooks.take_states(logits_forward, object(), dummy.input_ids, None, None, dummy)
    assert output.customized_info is None


def test_another_rank_takes_nothing(monkeypatch):
    monkeypatch.setattr(hooks, "_capture", None)
    batch = Batch([rid("00000", 0)], [1], [0], torch.tensor([5]))
    assert hooks.take_states(logits_forward, object(), batch.input_ids, None, None, batch).customized_info is None


def test_other_customized_info_is_kept(bench):
    bench.shard("00000", [[5]])
    aux, final = states_of([5])
    batch = Batch([rid("00000", 0)], [1], [0], torch.tensor([5]))
    output = hooks.take_states(
        lambda self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states: Output({"other": [1]}),
        object(), batch.input_ids, final, None, batch, aux_hidden_states=aux,
    )  # fmt: skip
    assert output.customized_info["other"] == [1]
    assert_captured(bench, output.customized_info[protocol.TICKET_KEY][0], "00000", 0)


def test_pieces_of_several_prompts_are_assembled_by_request_and_prefix(bench):
    first, second = list(range(20, 27)), list(range(40, 45))
    bench.shard("00000", [first, second])
    one, two = rid("00000", 0), rid("00000", 1)
    (half,) = bench.forward((one, 0, first[:3]))
    assert half["state"] == "refused" and half["error"].startswith("3 of 7 tokens")
    assert bench.journal("00000") == []
    _, other = bench.forward((one, 3, first[3:5]), (two, 0, second[:4]))
    assert other["error"].startswith("4 of 5 tokens")
    whole, rest = bench.forward((two, 4, second[4:]), (one, 5, first[5:]))
    assert_captured(bench, whole, "00000", 1)
    assert_captured(bench, rest, "00000", 0)


def test_a_prompt_that_starts_again_replaces_its_earlier_pieces(bench):
    prompt = list(range(20, 27))
    bench.shard("00000", [prompt])
    bench.forward((rid("00000", 0), 0, [1, 1, 1]))
    (half,) = bench.forward((rid("00000", 0), 0, prompt[:2]))
    assert half["error"].startswith("2 of 7 tokens")
    (whole,) = bench.forward((rid("00000", 0), 2, prompt[2:]))
    assert_captured(bench, whole, "00000", 0)


@pytest.mark.parametrize("prefix", [2, 5])
def test_a_piece_that_does_not_follow_its_predecessor_is_refused(bench, prefix):
    prompt = list(range(20, 27))
    bench.shard("00000", [prompt])
    bench.forward((rid("00000", 0), 0, prompt[:3]))
    (ticket,) = bench.forward((rid("00000", 0), prefix, prompt[prefix:]))
    assert ticket["state"] == "refused"
    assert f"starts at token {prefix}, 3 tokens were captured before it" in ticket["error"]
    assert bench.journal("00000") == []


def test_a_prefix_from_the_radix_cache_is_refused(bench):
    bench.shard("00000", [[5, 6, 7]])
    (ticket,) = bench.forward((rid("00000", 0), 2, [7]))
    assert "starts at token 2, 0 tokens were captured before it" in ticket["error"]


def test_left_overs_of_aborted_prompts_do_not_pile_up(bench):
    bench.shard("00000", [[5, 6, 7]])
    for attempt in range(2 * len(bench.ring.slabs)):
        (ticket,) = bench.forward((rid("00000", 0, attempt), 0, [5]))
        assert ticket["error"].startswith("1 of 3 tokens")
    assert len(bench.capture._partials) == hooks.PARTIAL_SAMPLES
    assert bench.ring.free == len(bench.ring.slabs) - hooks.PARTIAL_SAMPLES


def test_left_overs_of_aborted_prompts_do_not_starve_a_small_ring(make_bench):
    bench = make_bench(forward_tokens=16, wait_s=0.2)  # 4 x 16 rows fit in one slab
    bench.shard("00000", [[5, 6, 7]])
    for attempt in range(2 * len(bench.ring.slabs)):
        (ticket,) = bench.forward((rid("00000", 0, attempt), 0, [5]))
        assert ticket["error"].startswith("1 of 3 tokens")
    (ticket,) = bench.forward((rid("00000", 0, 99), 0, [5, 6, 7]))
    assert_captured(bench, ticket, "00000", 0)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5])
def test_a_prompt_cut_into_many_short_pieces_does_not_block_itself(make_bench, chunk_tokens):
    bench = make_bench(forward_tokens=16, chunk_tokens=chunk_tokens, wait_s=0.2)
    ids = list(range(20, 36))
    bench.shard("00000", [ids])
    for attempt in range(hooks.PARTIAL_SAMPLES + 1):  # the last one is not aborted
        for start in range(0, 16, chunk_tokens):
            if attempt == hooks.PARTIAL_SAMPLES or start + chunk_tokens < 16:
                (ticket,) = bench.forward((rid("00000", 0, attempt), start, ids[start : start + chunk_tokens]))
                assert "buffers" not in str(ticket["error"])
    assert_captured(bench, ticket, "00000", 0)


@pytest.mark.parametrize("slices", [0, 1, 2])
def test_a_copy_that_fails_gives_all_slabs_back_and_the_next_one_works(bench, monkeypatch, slices):
    ids = list(range(100, 300))  # four slabs
    bench.shard("00000", [ids])
    original, calls = torch.cat, []

    def failing(*arguments, **options):
        calls.append(arguments)
        if len(calls) > slices:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*arguments, **options)

    with monkeypatch.context() as device:
        device.setattr(torch, "cat", failing)
        ticket, other = bench.forward((rid("00000", 0), 0, ids), ("else", 0, [1]))
    assert ticket["state"] == "refused" and "out of memory" in ticket["error"] and other is None
    assert len(calls) == slices + 1 and bench.ring.free == len(bench.ring.slabs)
    (again,) = bench.forward((rid("00000", 0, 1), 0, ids))
    assert_captured(bench, again, "00000", 0)


def test_a_prompt_of_one_token_is_a_sample(bench):
    bench.shard("00000", [[7]])
    (ticket,) = bench.forward((rid("00000", 0), 0, [7]))
    assert_captured(bench, ticket, "00000", 0)


# --- slabs -----------------------------------------------------------------------------------------------------------

PROMPTS = [[5, 6], [7, 8, 9], [10, 11, 12, 13, 14], [15], [16, 17, 18, 19, 20, 21, 22]]  # 18 tokens


@pytest.mark.parametrize("slab_rows", [1, 2, 3, 7, 17, 18])
def test_samples_may_cross_slabs_and_a_forward_may_be_longer_than_one(make_bench, monkeypatch, slab_rows):
    monkeypatch.setattr(memory, "SLAB_BYTES", slab_rows * (K + 1) * D * FLOAT_BYTES)
    bench = make_bench()
    assert bench.capture._copier.slab_rows == slab_rows
    bench.shard("00000", PROMPTS)
    tickets = bench.forward(
        ("somebody-else", 0, [1, 2]),
        *((rid("00000", number), 0, ids) for number, ids in enumerate(PROMPTS[:3])),
        ("another", 0, [3] * 5),
        *((rid("00000", number), 0, ids) for number, ids in enumerate(PROMPTS[3:], 3)),
    )
    for number, ticket in enumerate(ticket for ticket in tickets if ticket is not None):
        assert_captured(bench, ticket, "00000", number)


def test_pieces_of_several_forwards_may_cross_slabs(make_bench, monkeypatch):
    monkeypatch.setattr(memory, "SLAB_BYTES", 2 * (K + 1) * D * FLOAT_BYTES)
    bench = make_bench()
    prompt = list(range(20, 37))
    bench.shard("00000", [prompt, [5]])
    bench.forward((rid("00000", 0), 0, prompt[:5]))
    bench.forward((rid("00000", 0), 5, prompt[5:10]))
    small, whole = bench.forward((rid("00000", 1), 0, [5]), (rid("00000", 0), 10, prompt[10:]))
    assert_captured(bench, small, "00000", 1)
    assert_captured(bench, whole, "00000", 0)


def test_a_slab_width_of_foreign_rows_between_two_samples_is_given_back_at_once(make_bench, monkeypatch):
    monkeypatch.setattr(memory, "SLAB_BYTES", 2 * (K + 1) * D * FLOAT_BYTES)
    bench = make_bench()
    bench.shard("00000", [[5, 6], [7, 8, 9]])
    gate, original = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *arguments: (gate.wait(5), original(*arguments))[1])
    tickets = bench.forward((rid("00000", 0), 0, [5, 6]), ("else", 0, [1] * 6), (rid("00000", 1), 0, [7, 8, 9]))
    assert len(bench.ring.slabs) - bench.ring.free == 3  # the samples hold 1 and 2 slabs
    gate.set()
    assert_captured(bench, tickets[0], "00000", 0)
    assert_captured(bench, tickets[2], "00000", 1)


def test_a_slow_disk_holds_the_forward_back(make_bench, monkeypatch):
    bench = make_bench(forward_tokens=1)
    slabs = len(bench.ring.slabs)
    gate, original = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *arguments: (gate.wait(5), original(*arguments))[1])
    prompts = [[number + 5] for number in range(slabs + 1)]
    bench.shard("00000", prompts)
    tickets = []
    for number in range(slabs):
        tickets += bench.forward((rid("00000", number), 0, prompts[number]))
    timer = threading.Timer(0.2, gate.set)
    began = time.monotonic()
    timer.start()
    tickets += bench.forward((rid("00000", slabs), 0, prompts[slabs]))
    assert time.monotonic() - began > 0.15
    for number, ticket in enumerate(tickets):
        assert_captured(bench, ticket, "00000", number)


def test_a_disk_slower_than_the_watchdog_allows_refuses_and_everything_goes_on_afterwards(make_bench, monkeypatch):
    bench = make_bench(forward_tokens=1, wait_s=0.05)
    slabs = len(bench.ring.slabs)
    gate, original = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *arguments: (gate.wait(5), original(*arguments))[1])
    prompts = [[number + 5] for number in range(slabs + 1)] + [[70, 71]]
    bench.shard("00000", prompts)
    last, cut = rid("00000", slabs), rid("00000", slabs + 1)
    bench.forward((cut, 0, [70]))  # holds one slab
    accepted = []
    for number in range(slabs - 1):
        accepted += bench.forward((rid("00000", number), 0, prompts[number]))
    tickets = bench.forward((last, 0, prompts[slabs]), ("else", 0, [1]), (cut, 1, [71]))
    assert tickets[1] is None
    for ticket in (tickets[0], tickets[2]):
        assert ticket["state"] == "refused"
        assert f"{slabs} of {slabs} buffers still wait for the disk after 0.05 s" in ticket["error"]
    assert not bench.capture._partials and bench.ring.free == 1  # what came of the cut prompt is of no use any more
    gate.set()
    for number, ticket in enumerate(accepted):
        assert_captured(bench, ticket, "00000", number)
    third, _, fourth = bench.forward((last, 0, prompts[slabs]), ("else", 0, [1]), (cut, 0, [70, 71]))
    assert_captured(bench, third, "00000", slabs)
    assert_captured(bench, fourth, "00000", slabs + 1)


def test_any_mix_of_samples_leaves_every_slab_free(make_bench, monkeypatch):
    """`finish` looks at the slabs; here everything that can happen to a sample happens, many times over."""
    monkeypatch.setattr(memory, "SLAB_BYTES", 4 * (K + 1) * D * FLOAT_BYTES)
    bench = make_bench(forward_tokens=32)
    prompts = [[number + 1] * (1 + number % 6) for number in range(40)]
    bench.shard("00000", prompts)
    bench.shard("00001", prompts)

    def spoil(aux, final):
        aux[0, 0] = float("nan")
        return aux, final

    def forward(*requests, **options):
        for ticket in bench.forward(*requests, **options):
            assert ticket is None or "buffers" not in str(ticket["error"])  # each leak would cost a wait

    for number, ids in enumerate(prompts):
        one, two = rid("00000", number), rid("00001", number)
        forward((one, 0, ids), damage=spoil)
        forward((two, 0, [0] * len(ids)), ("else", 0, [1] * 5))  # other ids
        forward((rid("00001", number, 1), 0, [0]), (rid("00009", 0), 0, [1]))  # aborted; no such shard
        forward((one, 0, [*ids, 1]), (two, 1, ids), damage=lambda aux, final: (aux[:, :-1], final))
        forward((one, 0, ids[:2]))
        bench.drain()
        forward((one, 2, ids[2:])) if len(ids) > 2 else forward((one, 0, ids))
        forward(("else", 0, [1]), (two, 0, ids), (rid("00001", number, 1), 0, ids), (one, 0, ids))
    assert set(bench.durable("00000")) == set(bench.durable("00001")) == set(range(40))


# --- shards as a client lays them out --------------------------------------------------------------------------------


def partial_shard(folder, dtype, lengths=(2,), masks=None, width=2, layers=1):
    ids = [torch.arange(10 * i + 5, 10 * i + 5 + n, dtype=torch.int32) for i, n in enumerate(lengths)]
    return hidden.PartialShard(
        folder=folder, number=0, samples=list(range(len(lengths))), lengths=list(lengths), input_ids=ids,
        loss_mask=masks or [torch.ones(n, dtype=torch.uint8) for n in lengths], layers=layers, width=width, dtype=dtype,
        metadata={"ids": [f"s{i}" for i in range(len(lengths))], "held_out": [False] * len(lengths)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "states"),
    [
        ("float32", struct.pack("<8f", 448, 1, -224, 0.5, 3, -448, 112, 7)),
        ("bfloat16", struct.pack("<8H", 0x43E0, 0x3F80, 0xC360, 0x3F00, 0x4040, 0xC3E0, 0x42E0, 0x40E0)),
        # 448 is 0x7E, 1 is 0x38; scales 1, 1/2, 1, 1/4: -448, 1 → 0xFE, 0x38; 3, -448 → 0x44, 0xFE; 448, 28 → 0x7E, 0x5E
        ("float8_e4m3", bytes.fromhex("7E38 FE38 44FE 7E5E") + struct.pack("<4f", 1, 0.5, 1, 0.25)),
    ],
    ids=["float32", "bfloat16", "float8"],
)
def test_a_two_token_shard_gets_exactly_these_bytes(tmp_path, monkeypatch, dtype, states):
    shard = partial_shard(tmp_path / "partial", dtype, masks=[torch.tensor([0, 1], dtype=torch.uint8)])
    shard.prepare()
    control = tmp_path / "control"
    control.mkdir()
    (control / "00000.json").write_text(json.dumps(shard.control(RUN)))
    config = protocol.CaptureConfig(RUN, tmp_path / "ready", control, (1,), "post_norm", dtype, 1)
    computed = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    capture = hooks.Capture(
        config=config, hidden_size=2, dtype=computed, device=torch.device("cpu"), forward_tokens=2, wait_s=1.0,
        start_lane=LaneThread,
    )  # fmt: skip
    monkeypatch.setattr(hooks, "_capture", capture)
    aux, final = torch.tensor([[448, 1], [3, -448]]).to(computed), torch.tensor([[-224, 0.5], [112, 7]]).to(computed)
    batch = Batch([rid("00000", 0)], [2], [0], torch.tensor([5, 6]))
    hooks.take_states(logits_forward, object(), batch.input_ids, final, None, batch, aux)
    capture.writer.close()
    raw = shard.path.read_bytes()
    assert raw[: len(shard.layout.header)] == shard.layout.header
    assert raw[len(shard.layout.header) :] == struct.pack("<2q2i", 0, 2, 5, 6) + states + b"\0\1"
    journal = shard.prepare()  # the client trusts what the server wrote
    assert journal.durable[0].rows_xxh3 == xxhash.xxh3_128(states).hexdigest()
    assert journal.shard_sha256 == file_sha256(shard.path)
    assert journal.durable[0].float8_error == (0.0 if dtype == "float8_e4m3" else None)


ORDERS = ["012345", "543210", "135024", "340125", "102345", "012354"]


@pytest.mark.parametrize("together", [True, False], ids=["one forward", "a forward each"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_digest_of_a_file_does_not_depend_on_the_order_of_its_samples(make_bench, order, dtype, together):
    bench = make_bench(dtype=dtype)
    prompts = [[number + 1] * (number + 1) for number in range(6)]
    bench.shard("00000", prompts)
    requests = [(rid("00000", int(number)), 0, prompts[int(number)]) for number in order if int(number) < 6]
    for forward in [requests] if together else [[request] for request in requests]:
        bench.forward(*forward)
    if len(set(order)) < 6:  # the sample that is left comes last
        (rest,) = set(range(6)) - set(map(int, order))
        bench.forward((rid("00000", rest), 0, prompts[rest]))
    lines = bench.journal("00000")
    assert lines[-1] == {"shard_sha256": file_sha256(bench.folder / "00000.bin")}
    assert sum("shard_sha256" in line for line in lines) == 1


@pytest.mark.parametrize("first", ["0", "5", "024", "135", "543", "01234", "12345"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3"])
def test_a_server_that_takes_up_a_shard_writes_the_digest_of_the_whole_file(make_bench, first, dtype):
    bench = make_bench(dtype=dtype)
    prompts = [[number + 1] * (number + 1) for number in range(6)]
    bench.shard("00000", prompts)
    for number in map(int, first):
        bench.forward((rid("00000", number), 0, prompts[number]))
    again = bench.restarted(make_bench, dtype=dtype)
    assert not any("shard_sha256" in line for line in again.journal("00000"))
    tickets = [again.forward((rid("00000", number, 1), 0, prompts[number]))[0] for number in range(6)]
    assert {ticket["state"] for ticket in tickets} == {"accepted"}
    lines = again.journal("00000")
    assert sorted(line["sample"] for line in lines[:-1]) == list(range(6))  # none was written twice
    assert lines[-1] == {"shard_sha256": file_sha256(again.folder / "00000.bin")}


def test_a_shard_that_is_complete_already_gets_no_second_digest(make_bench):
    bench = make_bench()
    bench.shard("00000", [[5, 6]])
    bench.forward((rid("00000", 0), 0, [5, 6]))
    again = bench.restarted(make_bench)
    (ticket,) = again.forward((rid("00000", 0), 0, [5, 6]))
    assert_captured(again, ticket, "00000", 0)
    assert len(again.journal("00000")) == 2


def test_ten_thousand_tiny_samples_take_seconds(make_bench):
    bench = make_bench(forward_tokens=500)
    prompts = [[number % 97 + 1] for number in range(10_000)]
    bench.shard("00000", prompts)
    began = time.monotonic()
    for start in range(0, len(prompts), 500):
        numbers = range(start, start + 500)
        tickets = bench.forward(*((rid("00000", number), 0, prompts[number]) for number in numbers))
        assert {ticket["state"] for ticket in tickets} == {"accepted"}
    assert sorted(bench.durable("00000")) == list(range(10_000))
    assert time.monotonic() - began < 20
    raw = (bench.folder / "00000.bin").read_bytes()[len(HEAD) : -len(TAIL)]
    assert raw == joined(*states_of([token for (token,) in prompts])).numpy().tobytes()


# --- lanes -----------------------------------------------------------------------------------------------------------


def test_two_shards_are_written_in_two_lanes_each_always_in_the_same(bench, monkeypatch):
    gate, hanging, original, threads = threading.Event(), threading.Event(), os.pwrite, {}

    def slow(descriptor, data, offset):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).stem
        threads.setdefault(name, set()).add(threading.current_thread().name)
        if name == "00000":
            hanging.set()
            gate.wait(20)
        return original(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    for name in ("00000", "00001"):
        bench.shard(name, [[5], [6, 7], [8, 9, 10]])
    tickets = []
    for number, ids in enumerate([[5], [6, 7], [8, 9, 10]]):
        tickets += bench.forward((rid("00000", number), 0, ids))
        assert hanging.wait(5)  # nothing waits in its lane at first: the number of shards must decide
        tickets += bench.forward((rid("00001", number), 0, ids))
    journal = bench.folder / "00001.journal"
    eventually(lambda: "shard_sha256" in text_of(journal), "one shard waits for the other")
    assert (bench.folder / "00000.journal").read_text() == "" and not gate.is_set()
    gate.set()
    for position, ticket in enumerate(tickets):
        assert_captured(bench, ticket, f"0000{position % 2}", position // 2)
    assert {name: len(found) for name, found in threads.items()} == {"00000": 1, "00001": 1}
    assert threads["00000"] != threads["00001"]


def test_more_shards_than_lanes_are_all_written(bench):
    names = [f"{number:05d}" for number in range(5)]
    for name in names:
        bench.shard(name, [[5, 6], [7]])
    tickets = bench.forward(*((rid(name, 0), 0, [5, 6]) for name in names))
    tickets += bench.forward(*((rid(name, 1), 0, [7]) for name in reversed(names)))
    for name, ticket in zip(names, tickets[:5], strict=True):
        assert_captured(bench, ticket, name, 0)
    for name, ticket in zip(reversed(names), tickets[5:], strict=True):
        assert_captured(bench, ticket, name, 1)


# --- float8 ----------------------------------------------------------------------------------------------------------


def outlying(ids, seed=0):
    """States like those of a language model, in which a few values are far larger than the rest: aux, final."""
    generator = torch.Generator().manual_seed(seed + sum(ids))
    aux, final = torch.randn(len(ids), K * D, generator=generator), torch.randn(len(ids), D, generator=generator)
    aux[:, 1] *= 50
    return aux, final * 1e-3


@pytest.fixture
def float8_bench(make_bench):
    return make_bench(dtype="float8_e4m3")


def test_float8_rows_come_back_within_an_eighth_of_each_value(float8_bench):
    ids = list(range(20, 60))
    float8_bench.shard("00000", [ids])
    aux, final = outlying(ids)
    (ticket,) = float8_bench.forward((rid("00000", 0), 0, ids), damage=lambda *_: (aux, final))
    assert ticket["dtype"] == "float8_e4m3"
    (line,) = float8_bench.journal("00000")[:1]
    values, found = joined(aux, final), float8_bench.rows("00000", 0)
    scales = values.abs().amax(dim=2, keepdim=True) / 448  # (T, K+1, 1)
    normal = values.abs() > scales * 2**-6  # below, float8 has fewer than 3 digits
    assert normal.float().mean() > 0.9
    assert ((found - values).abs()[normal] <= values.abs()[normal] / 8).all()
    assert ((found - values).abs() <= torch.maximum(values.abs() / 8, scales * 2**-9)).all()
    assert torch.allclose(found.abs().amax(dim=2), values.abs().amax(dim=2), rtol=1e-6)  # the largest is exact
    rows, digest = b"".join(float8_bench.stored("00000", 0)), line["rows_xxh3"]
    assert digest == xxhash.xxh3_128(rows).hexdigest()


def test_the_float8_error_is_the_largest_relative_error_of_a_row(float8_bench):
    ids = [20, 21, 22]
    float8_bench.shard("00000", [ids])
    aux, final = outlying(ids)
    float8_bench.forward((rid("00000", 0), 0, ids), damage=lambda *_: (aux, final))
    (line,) = float8_bench.journal("00000")[:1]
    found = float8_bench.rows("00000", 0).tolist()
    errors = []
    for kept, row in zip(found, joined(aux, final).tolist(), strict=True):
        for after, before in zip(kept, row, strict=True):
            missed = math.sqrt(sum((a - b) ** 2 for a, b in zip(after, before, strict=True)))
            errors.append(missed / math.sqrt(sum(b**2 for b in before)))
    assert line["float8_error"] == pytest.approx(max(errors), rel=1e-4) and 0 < line["float8_error"] < 2**-4


def test_float8_bytes_do_not_depend_on_how_a_prompt_was_cut(make_bench, monkeypatch):
    ids, found = list(range(20, 37)), []
    aux, final = outlying(ids)
    for slab_rows, cuts in ((256, [0, 17]), (3, [0, 17]), (256, [0, 1, 9, 17]), (4, [0, 6, 17])):
        monkeypatch.setattr(memory, "SLAB_BYTES", slab_rows * (K + 1) * D)
        bench = make_bench(dtype="float8_e4m3")
        bench.shard("00000", [ids])
        (bench.folder / "00000.journal").unlink(missing_ok=True)
        for start, stop in itertools.pairwise(cuts):
            part = (aux[start:stop], final[start:stop])
            bench.forward((rid("00000", 0), start, ids[start:stop]), damage=lambda *_, part=part: part)
        found.append((bench.stored("00000", 0), bench.journal("00000")))
        bench.finish()
    (first, lines), *others = found
    assert all(each == first for each, _ in others)
    assert all(each == lines for _, each in others)


def test_a_float8_row_of_zeros_stays_zero(float8_bench):
    float8_bench.shard("00000", [[5, 6]])
    zeros = (torch.zeros(2, K * D), torch.zeros(2, D))
    float8_bench.forward((rid("00000", 0), 0, [5, 6]), damage=lambda *_: zeros)
    (line,) = float8_bench.journal("00000")[:1]
    assert line["float8_error"] == 0 and float8_bench.rows("00000", 0).count_nonzero() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_float8_value_that_is_not_finite_is_refused(float8_bench, value):
    float8_bench.shard("00000", [[5, 6]])

    def damage(aux, final):
        aux[1, D + 2] = value
        return aux, final

    (ticket,) = float8_bench.forward((rid("00000", 0), 0, [5, 6]), damage=damage)
    assert float8_bench.refusal(ticket) == "aux[1] of token 1: 4 of 4 values are not finite"


# --- samples that must not become durable ----------------------------------------------------------------------------


def test_the_prompt_of_an_aborted_request_is_noticed_by_its_ids(bench):
    """SGLang runs the one-token prompt [0] under the request id of a prompt it rejects."""
    bench.shard("00000", [[77], [1, 2, 3]])
    before = (bench.folder / "00000.bin").read_bytes()
    same_length, other_length = bench.forward((rid("00000", 0), 0, [0]), (rid("00000", 1), 0, [0]))
    reason = bench.refusal(same_length)
    assert ids_sha256([0]) in reason and ids_sha256([77]) in reason
    assert other_length["state"] == "refused" and other_length["error"].startswith("1 of 3 tokens")
    assert bench.durable("00000") == []
    assert (bench.folder / "00000.bin").read_bytes() == before
    (again,) = bench.forward((rid("00000", 0, 1), 0, [77]))
    assert_captured(bench, again, "00000", 0)


def test_an_aborted_prompt_cannot_touch_rows_that_are_durable(bench):
    bench.shard("00000", [[77], [1, 2, 3]])
    bench.forward((rid("00000", 1), 0, [1, 2, 3]))
    bench.drain()
    for ids in ([0], [9, 9, 9]):
        (ticket,) = bench.forward((rid("00000", 1, 1), 0, ids))
        assert_captured(bench, ticket, "00000", 1)


def test_more_tokens_than_the_sample_has_are_refused(bench):
    bench.shard("00000", [[5, 6]])
    (ticket,) = bench.forward((rid("00000", 0), 0, [5, 6, 7]))
    assert "3 tokens ran under this request id, the control file says 2" in ticket["error"]
    bench.forward((rid("00000", 0, 1), 0, [5]))
    assert bench.ring.free == len(bench.ring.slabs) - 1
    (ticket,) = bench.forward((rid("00000", 0, 1), 1, [6, 7]))
    assert "3 tokens ran under this request id, the control file says 2" in ticket["error"]
    assert not bench.capture._partials and bench.ring.free == len(bench.ring.slabs)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda aux, final: (aux[:, :-D], final), "aux width 8, expected 3 x 4 = 12"),
        (lambda aux, final: (aux, final[:, :-1]), "final width 3, expected 4"),
        (lambda aux, final: (aux[:-1], final), "2 rows in this forward, its requests have 3"),
        (lambda aux, final: (aux.double(), final), "states of ['torch.float32', 'torch.float64']"),
    ],
    ids=["an index that never fires", "final", "rows", "dtype"],
)
def test_states_of_another_shape_are_refused_and_the_forward_goes_on(bench, damage, message):
    bench.shard("00000", [[5, 6]])
    tickets = bench.forward((rid("00000", 0), 0, [5, 6]), ("other", 0, [1]), damage=damage)
    assert message in tickets[0]["error"] and tickets[1] is None
    (again,) = bench.forward((rid("00000", 0, 1), 0, [5, 6]))
    assert_captured(bench, again, "00000", 0)


def test_a_model_without_aux_states_is_refused(bench):
    bench.shard("00000", [[5]])
    batch = Batch([rid("00000", 0)], [1], [0], torch.tensor([5]))
    output = hooks.take_states(logits_forward, object(), batch.input_ids, states_of([5])[1], None, batch)
    (ticket,) = output.customized_info[protocol.TICKET_KEY]
    assert ticket["state"] == "refused" and "no aux or no final states" in ticket["error"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3"])
@pytest.mark.parametrize(("name", "block"), [("aux[0]", 0), ("aux[1]", 1), ("aux[2]", 2), ("final", K)])
def test_a_value_that_is_not_finite_is_refused_by_its_place_and_may_come_again(make_bench, name, block, dtype, value):
    bench = make_bench(dtype=dtype)
    bench.shard("00000", [[5, 6], [7, 8, 9]])

    def damage(aux, final):
        tensors = [*aux.split(D, dim=1), final]  # views
        tensors[block][3, 2] = value
        return aux, final

    good, bad = bench.forward((rid("00000", 0), 0, [5, 6]), (rid("00000", 1), 0, [7, 8, 9]), damage=damage)
    assert good["state"] == "accepted"
    # Row 3 is token 1 of the second prompt. Float8 shares a scale, which the value has spoilt, in a row.
    count = 4 if dtype == "float8_e4m3" else 1
    assert bench.refusal(bad) == f"{name} of token 1: {count} of 4 values are not finite"
    assert bench.durable("00000") == [0]
    assert not any(b"".join(bench.stored("00000", 1)))
    (again,) = bench.forward((rid("00000", 1, 1), 0, [7, 8, 9]))
    assert again["state"] == "accepted" and bench.durable("00000") == [0, 1]
    if dtype != "float8_e4m3":
        for sample, ids in enumerate(([5, 6], [7, 8, 9])):
            assert torch.equal(bench.rows("00000", sample), joined(*states_of(ids)).to(bench.computed).float())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_values_of_a_row_that_are_not_finite_are_counted(make_bench, dtype):
    bench = make_bench(dtype=dtype)
    bench.shard("00000", [[5]])

    def damage(aux, final):
        aux[0, D:] = torch.tensor([math.nan, 1, math.inf, -math.inf, *[math.nan] * D])
        return aux, final

    (ticket,) = bench.forward((rid("00000", 0), 0, [5]), damage=damage)
    assert bench.refusal(ticket) == "aux[1] of token 0: 3 of 4 values are not finite"  # the first of two


def test_a_value_in_a_later_piece_is_refused_by_its_token_of_the_prompt(bench):
    prompt = list(range(20, 27))
    bench.shard("00000", [prompt])

    def damage(aux, final):
        final[1, 3] = float("nan")
        return aux, final

    bench.forward((rid("00000", 0), 0, prompt[:2]))
    (ticket,) = bench.forward((rid("00000", 0), 2, prompt[2:]), damage=damage)
    assert bench.refusal(ticket) == "final of token 3: 1 of 4 values are not finite"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_whose_sum_overflows_are_finite(make_bench, dtype):
    bench = make_bench(dtype=dtype)
    bench.shard("00000", [[5]])

    def damage(aux, final):
        return torch.full_like(aux, 3e38), final

    bench.forward((rid("00000", 0), 0, [5]), damage=damage)
    assert bench.durable("00000") == [0]


def test_an_unknown_sample_and_a_missing_shard_are_refused_by_name(bench):
    bench.shard("00000", [[5]])
    unknown, missing = bench.forward((rid("00000", 3), 0, [5]), (rid("00009", 0), 0, [5]))
    assert unknown == {
        "state": "refused", "error": "shard 00000 has 1 samples", "shard": "00000", "sample": 3, "dtype": "float32",
    }  # fmt: skip
    assert "00009.json" in missing["error"]


def test_every_defect_of_a_control_file_is_told_at_once(bench):
    bench.shard(
        "00000", [[5], [6]], run="e" * 16, dtype="bfloat16", extra=1, states={"offset": -1, "row_bytes": 64},
        scales={"offset": 0, "row_bytes": 16},
        samples=[{"row": 0, "tokens": 2, "sha256": "0" * 64}, {"row": 1, "tokens": 1, "sha256": "?"},
                 {"row": 1, "tokens": 1, "sha256": "0" * 64}],
    )  # fmt: skip
    (ticket,) = bench.forward((rid("00000", 0), 0, [5]))
    for part in (
        "run:", "dtype: found 'bfloat16', the server stores 'float32'", "extra: unknown key",
        "states.offset: found -1", "scales: found {'offset': 0, 'row_bytes': 16}, float32 has none",
        "samples[1].sha256", "samples[1].row: found 1, expected 2: rows follow without a gap",
    ):  # fmt: skip
        assert part in ticket["error"]


def test_a_float8_control_file_without_scales_is_refused(float8_bench):
    float8_bench.shard("00000", [[5]], scales=None, states={"offset": 64, "row_bytes": 64})
    (ticket,) = float8_bench.forward((rid("00000", 0), 0, [5]))
    assert "scales.offset: found None" in ticket["error"]
    assert "states.row_bytes: found 64, expected 16" in ticket["error"]


@pytest.mark.parametrize("size", [100, 300])
def test_a_data_file_of_another_size_is_refused(bench, size):
    bench.shard("00000", [[5, 6]])
    os.truncate(bench.folder / "00000.bin", size)
    (ticket,) = bench.forward((rid("00000", 0), 0, [5, 6]))
    assert f"found {size} bytes, expected total_bytes 208 and at least 192" in ticket["error"]


# --- durability ------------------------------------------------------------------------------------------------------


def test_rows_then_journal_lines(bench, monkeypatch):
    """Each step is durable before the next one speaks for it."""
    steps = []

    def recording(name, original):
        def record(descriptor, *arguments):
            if stat.S_ISREG(os.fstat(descriptor).st_mode):  # messages go through pipes
                steps.append((name, Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix))
            return original(descriptor, *arguments)

        return record

    bench.shard("00000", [[5, 6], [7]])
    monkeypatch.setattr(os, "pwrite", recording("pwrite", os.pwrite))
    monkeypatch.setattr(os, "write", recording("write", os.write))
    monkeypatch.setattr(os, "fdatasync", recording("fdatasync", os.fdatasync))
    for number, ids in enumerate([[5, 6], [7]]):
        bench.forward((rid("00000", number), 0, ids))
        assert bench.durable("00000") == list(range(number + 1))
    sample = [("pwrite", ".bin"), ("fdatasync", ".bin"), ("write", ".journal"), ("fdatasync", ".journal")]
    assert steps == sample * 2


def full_disk(monkeypatch, call, suffix, after=0):
    """Let `os.<call>` fail with ENOSPC on files of a suffix, from its call number `after` on."""
    original, calls = getattr(os, call), []

    def full(descriptor, *arguments):
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith(suffix):
            return original(descriptor, *arguments)
        calls.append(call)
        if len(calls) <= after:
            return original(descriptor, *([arguments[0][:10], *arguments[1:]] if arguments else ()))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    return calls


@pytest.mark.parametrize(
    ("call", "suffix", "after"),
    [
        ("pwrite", ".bin", 0),
        ("pwrite", ".bin", 1),
        ("fdatasync", ".bin", 0),
        ("write", ".journal", 0),
        ("write", ".journal", 1),
        ("fdatasync", ".journal", 0),
    ],
    ids=["rows", "half of the rows", "rows to disk", "journal", "half a line", "journal to disk"],
)
def test_a_full_disk_is_remembered_and_refuses_every_later_sample(bench, monkeypatch, call, suffix, after):
    bench.shard("00000", [[5], [6, 7, 8], [7]])
    bench.shard("00001", [[8]])
    bench.forward((rid("00000", 0), 0, [5]))
    bench.drain()
    with monkeypatch.context() as disk:
        full_disk(disk, call, suffix, after)
        (ticket,) = bench.forward((rid("00000", 1), 0, [6, 7, 8]))
        assert ticket["state"] == "accepted"
        bench.drain()
    error = json.loads((bench.folder / "control" / "error.json").read_text())["error"]
    assert "No space left on device" in error and str(bench.folder / "00000") in error
    for shard, sample, ids in (("00000", 1, [6, 7, 8]), ("00000", 2, [7]), ("00001", 0, [8])):
        (later,) = bench.forward((rid(shard, sample), 0, ids))
        assert later == {"state": "refused", "error": error, "shard": shard, "sample": sample, "dtype": "float32"}
    if (call, suffix) == ("fdatasync", ".journal"):  # the line stands, but so do the rows
        assert bench.durable("00000") == [0, 1]
        assert torch.equal(bench.rows("00000", 1), joined(*states_of([6, 7, 8])))
    else:
        assert bench.durable("00000") == [0]
    assert bench.journal("00001") == []


def test_the_first_error_stays_the_one_that_is_told(bench, monkeypatch):
    bench.shard("00000", [[5]])
    bench.shard("00001", [[6]])
    gate = threading.Event()

    def full(descriptor, data, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("00001.bin"):
            gate.wait(5)
            raise OSError(errno.EIO, "Input/output error")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        one, two = bench.forward((rid("00000", 0), 0, [5]), (rid("00001", 0), 0, [6]))
        eventually(lambda: bench.capture.writer.first_error is not None, "no error is told")
        gate.set()
        assert "No space left on device" in bench.refusal(one)
        assert "Input/output error" in bench.refusal(two)  # each lane knows its own disk
    told = json.loads((bench.folder / "control" / "error.json").read_text())["error"]
    assert told == bench.capture.writer.first_error == bench.refusal(one)


def test_samples_that_wait_behind_a_full_disk_fail_with_it(bench, monkeypatch):
    """A disk with room again must not be taken for one that never lost a row."""
    bench.shard("00000", [[5], [6], [7]])
    original, calls = os.pwrite, []

    def full_once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(os, "pwrite", full_once)
    first, second = bench.forward((rid("00000", 0), 0, [5]), (rid("00000", 2), 0, [7]))  # both for the same thread
    assert "No space left on device" in bench.refusal(first)
    assert bench.refusal(second) == bench.refusal(first)
    assert len(calls) == 1 and bench.durable("00000") == []


def test_an_error_is_remembered_even_where_it_cannot_be_written_down(bench):
    (bench.folder / "control" / "error.json").mkdir()  # so the file cannot be put there
    bench.shard("00000", [[5]])
    with pytest.MonkeyPatch.context() as disk:
        full_disk(disk, "pwrite", ".bin")
        bench.forward((rid("00000", 0), 0, [5]))
        bench.drain()
    (later,) = bench.forward((rid("00000", 0, 1), 0, [5]))
    assert later["state"] == "refused" and "No space left on device" in later["error"]


def test_a_short_write_is_continued(bench, monkeypatch):
    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: original(fd, data[:5], offset))
    bench.shard("00000", [[5, 6, 7]])
    (ticket,) = bench.forward((rid("00000", 0), 0, [5, 6, 7]))
    assert_captured(bench, ticket, "00000", 0)


def test_rows_larger_than_a_block_are_written_and_hashed_block_by_block(bench, monkeypatch):
    monkeypatch.setattr(lane, "BLOCK_BYTES", 100)
    bench.shard("00000", [[5, 6, 7], [8, 9]])
    for number, ids in ((1, [8, 9]), (0, [5, 6, 7])):
        (ticket,) = bench.forward((rid("00000", number), 0, ids))
        assert_captured(bench, ticket, "00000", number)


def test_a_torn_last_line_does_not_swallow_the_next_one(bench):
    bench.shard("00000", [[5], [6]])
    journal = bench.folder / "00000.journal"
    journal.write_text('{"sample": 0, "tok')
    bench.forward((rid("00000", 1), 0, [6]))
    bench.drain()
    torn, whole = journal.read_text().splitlines()
    assert torn == '{"sample": 0, "tok' and json.loads(whole)["sample"] == 1


def test_a_sample_asked_for_twice_is_written_once(bench):
    bench.shard("00000", [[5, 6]])
    both = bench.forward((rid("00000", 0, 0), 0, [5, 6]), (rid("00000", 0, 1), 0, [5, 6]))
    later = bench.forward((rid("00000", 0, 2), 0, [5, 6]))
    for ticket in (*both, *later):
        assert_captured(bench, ticket, "00000", 0)


def test_a_replaced_control_file_is_read_again(bench):
    bench.shard("00000", [[5, 6]])
    assert_captured(bench, bench.forward((rid("00000", 0), 0, [5, 6]))[0], "00000", 0)
    (bench.folder / "00000.journal").unlink()
    bench.shard("00000", [[7], [8, 9, 10]])
    assert_captured(bench, bench.forward((rid("00000", 1), 0, [8, 9, 10]))[0], "00000", 1)


def replace_control_file(bench, shard):
    control = bench.folder / "control" / f"{shard}.json"
    control.write_text(control.read_text() + "\n")


def test_a_control_file_replaced_while_jobs_are_in_flight_loses_none_of_them(bench, monkeypatch):
    prompts = [[5, 6], [7, 8, 9], [10]]
    bench.shard("00000", prompts)
    gate, original, written = threading.Event(), os.pwrite, []

    def slow(descriptor, data, offset):
        written.append(offset)
        gate.wait(5)
        return original(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    first = bench.forward((rid("00000", 0), 0, [5, 6]))
    replace_control_file(bench, "00000")
    tickets = first + bench.forward((rid("00000", 1), 0, [7, 8, 9]), (rid("00000", 0, 1), 0, [5, 6]))
    assert len(bench.capture.writer._shards) == 1  # the first one is retired, but not its job
    gate.set()
    for ticket, sample in zip(tickets, (0, 1, 0), strict=True):
        assert_captured(bench, ticket, "00000", sample)
    assert sum(len(each._registry) for each in bench.lanes) == 1
    (last,) = bench.forward((rid("00000", 2), 0, [10]))
    assert_captured(bench, last, "00000", 2)
    lines = bench.journal("00000")  # each sample once, although one was asked for under both control files
    assert [line.get("sample") for line in lines] == [0, 1, 2, None]
    assert lines[-1] == {"shard_sha256": file_sha256(bench.folder / "00000.bin")}
    assert len(written) == len(set(written)) == 3


def test_a_sample_refused_in_flight_may_come_again_under_a_new_control_file(bench, monkeypatch):
    bench.shard("00000", [[5, 6], [7, 8, 9]])
    gate, original = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *arguments: (gate.wait(5), original(*arguments))[1])
    bench.forward((rid("00000", 0), 0, [5, 6]), (rid("00000", 1), 0, [1, 1, 1]))
    replace_control_file(bench, "00000")
    (again,) = bench.forward((rid("00000", 1, 1), 0, [7, 8, 9]))
    gate.set()
    assert_captured(bench, again, "00000", 1)
    assert [line.get("sample") for line in bench.journal("00000")] == [0, 1, 1, None]


HOLD = "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"


@contextlib.contextmanager
def locked_elsewhere(path):
    """Another process holds the lock of a file."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "1\n"
        yield
        other.communicate("\n")


def test_a_shard_that_another_process_writes_is_refused_by_name(bench):
    bench.shard("00000", [[5, 6], [7]])
    data = bench.folder / "00000.bin"
    before = data.read_bytes()
    with locked_elsewhere(data):
        bench.forward((rid("00000", 0), 0, [5, 6]))
        bench.drain()
    (later,) = bench.forward((rid("00000", 1), 0, [7]))
    assert later["state"] == "refused" and f"{data}: another process writes this shard" in later["error"]
    assert data.read_bytes() == before and bench.journal("00000") == []


def test_another_process_is_shut_out_while_a_shard_is_open(bench):
    bench.shard("00000", [[5, 6], [7]])
    data = bench.folder / "00000.bin"
    assert_captured(bench, bench.forward((rid("00000", 0), 0, [5, 6]))[0], "00000", 0)
    grab = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'r+b'), fcntl.LOCK_SH | fcntl.LOCK_NB)"
    shut_out = subprocess.run([sys.executable, "-c", grab, str(data)], capture_output=True, text=True)
    assert shut_out.returncode == 1 and "BlockingIOError" in shut_out.stderr
    bench.close()
    assert subprocess.run([sys.executable, "-c", grab, str(data)]).returncode == 0


def test_a_forward_over_many_shards_keeps_them_open_until_they_are_written(bench, monkeypatch):
    gate, original = threading.Event(), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (gate.wait(5), original(descriptor))[1])
    names = [f"{number:05d}" for number in range(2 * hooks.OPEN_SHARDS)]

    def held():
        found = {os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in os.listdir("/proc/self/fd")}
        return sum(str(bench.folder / f"{name}.bin") in found for name in names)

    for name in names:
        bench.shard(name, [[5, 6]])
    tickets = bench.forward(*((rid(name, 0), 0, [5, 6]) for name in names))
    assert len(bench.capture._shards) == len(bench.capture.writer._shards) == hooks.OPEN_SHARDS
    eventually(lambda: held() == len(names), "a shard is closed before it is written")
    gate.set()
    for name, ticket in zip(names, tickets, strict=True):
        assert_captured(bench, ticket, name, 0)
    eventually(lambda: held() == hooks.OPEN_SHARDS, "retired shards stay open")
    bench.forward((rid(names[-1], 0, 1), 0, [5, 6]))  # the complete ones are let go of
    assert not bench.capture._shards and not bench.capture.writer._shards
    eventually(lambda: held() == 0, "complete shards stay open")


def test_closing_the_writer_finishes_what_was_submitted(bench, monkeypatch):
    original = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (time.sleep(0.02), original(descriptor))[1])
    prompts = [[number + 1] for number in range(20)]
    bench.shard("00000", prompts)
    for number, ids in enumerate(prompts):
        bench.forward((rid("00000", number), 0, ids))
    bench.close()
    assert len((bench.folder / "00000.journal").read_text().splitlines()) == 21


# --- lanes as processes ----------------------------------------------------------------------------------------------


@pytest.fixture
def lane_modules(monkeypatch):
    """Where a lane's process finds the package."""
    monkeypatch.setenv("PYTHONPATH", str(Path(aerie_capture.__file__).parents[1]))


@pytest.fixture
def make_real(make_bench, lane_modules):
    benches = []

    def make(**options):
        benches.append(make_bench(real=True, **options))
        return benches[-1]

    yield make
    for process in benches[-1].capture.writer._processes:
        process.send_signal(signal.SIGCONT)  # a test that failed may have left it stopped


def lane_process(bench, shard):
    """The process of the lane that a shard is written by, and its number."""
    (number,) = {each.lane for each in bench.capture.writer._shards.values() if each.shard.name == shard}
    return bench.capture.writer._processes[number], number


def told(bench):
    """What the client finds in error.json, once it is there."""
    path = bench.folder / "control" / "error.json"
    eventually(path.exists, "the client is not told")
    return json.loads(path.read_text())["error"]


def test_a_lane_starts_without_torch(lane_modules):
    check = "import sys, aerie_capture.lane; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3"])
def test_rows_become_durable_in_processes(make_real, dtype):
    bench = make_real(dtype=dtype)
    prompts = [list(range(10, 10 + length)) for length in (3, 1, 130, 7)]
    names = ["00000", "00001", "00002"]
    for name in names:
        bench.shard(name, prompts)
    for sample in (2, 0, 3, 1):
        tickets = bench.forward(*((rid(name, sample), 0, prompts[sample]) for name in names))
        assert {ticket["state"] for ticket in tickets} == {"accepted"}
    for name in names:
        assert sorted(bench.durable(name)) == [0, 1, 2, 3]
        for sample, ids in enumerate(prompts):
            line = next(line for line in bench.journal(name) if line["sample"] == sample)
            assert line["rows_xxh3"] == xxhash.xxh3_128(b"".join(bench.stored(name, sample))).hexdigest()
            if dtype == "float32":
                assert torch.equal(bench.rows(name, sample), joined(*states_of(ids)))
    assert len({process.pid for process in bench.capture.writer._processes}) == 2
    assert os.getpid() not in {process.pid for process in bench.capture.writer._processes}


def test_a_sample_that_a_process_refuses_may_come_again(make_real):
    bench = make_real()
    bench.shard("00000", [[5], [6, 7]])
    (bad,) = bench.forward((rid("00000", 0), 0, [1]))
    assert ids_sha256([1]) in bench.refusal(bad)
    opened = bench.capture._shards["00000"][1]
    eventually(lambda: 0 not in opened.taken, "the scheduler is not told")
    bench.forward((rid("00000", 0, 1), 0, [5]), (rid("00000", 1), 0, [6, 7]))
    eventually(lambda: opened.complete, "the shard does not become complete")
    assert [line.get("sample") for line in bench.journal("00000")] == [0, 0, 1, None]


@pytest.mark.parametrize("busy", [True, False], ids=["with rows", "idle"])
def test_a_lane_that_is_killed_is_told_by_name_and_nothing_hangs(make_real, busy):
    bench = make_real(wait_s=60.0)
    bench.shard("00000", [[5, 6], [7]])
    bench.shard("00001", [[8]])
    assert_captured(bench, bench.forward((rid("00000", 0), 0, [5, 6]))[0], "00000", 0)
    process, number = lane_process(bench, "00000")
    if busy:
        process.send_signal(signal.SIGSTOP)
        (lost,) = bench.forward((rid("00000", 1), 0, [7]))
        assert lost["state"] == "accepted"
    process.kill()
    error = told(bench)
    assert f"the process of lane {number} ended" in error
    began = time.monotonic()
    for shard, sample, ids in (("00000", 1, [7]), ("00001", 0, [8])):
        (later,) = bench.forward((rid(shard, sample, 1), 0, ids))
        assert later["state"] == "refused" and later["error"] == error
    bench.lanes_live = False
    bench.close()
    assert time.monotonic() - began < 10
    codes = [process.returncode for process in bench.capture.writer._processes]
    assert codes[number] == -signal.SIGKILL and codes[1 - number] == 0
    assert text_of(bench.folder / "00001.journal") == "" and bench.durable("00000") == [0]


def test_a_lane_that_is_killed_under_a_message_longer_than_a_pipe_holds_nobody_up(make_real):
    bench = make_real(forward_tokens=6000, threads=1, wait_s=60.0)
    prompts = [[number + 1] for number in range(6000)]
    bench.shard("00000", prompts)
    bench.forward((rid("00000", 0), 0, prompts[0]))
    bench.drain()
    process, _ = lane_process(bench, "00000")
    process.send_signal(signal.SIGSTOP)
    bench.forward(*((rid("00000", number), 0, ids) for number, ids in enumerate(prompts)))
    time.sleep(0.1)  # the pipe is full, and its sender waits
    process.kill()
    assert "the process of lane 0 ended" in told(bench)
    bench.lanes_live = False


def test_messages_longer_than_a_pipe_hold_neither_side_up(make_real):
    """Thousands of samples at once, half of them refused, while first the lane and then the scheduler stands still."""
    bench = make_real(forward_tokens=8000, threads=1)
    prompts = [[number + 1] for number in range(8000)]
    bench.shard("00000", prompts)
    bench.forward((rid("00000", 0), 0, prompts[0]))
    bench.drain()
    process, _ = lane_process(bench, "00000")
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    tickets = bench.forward(
        *((rid("00000", number), 0, [ids[0] + number % 2]) for number, ids in enumerate(prompts) if number)
    )
    assert time.monotonic() - began < 10  # the scheduler goes on
    assert {ticket["state"] for ticket in tickets} == {"accepted"}
    with bench.ring._changed:  # nobody takes the lane's answers
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
    opened = bench.capture._shards["00000"][1]
    eventually(lambda: opened.taken == set(range(0, 8000, 2)), "the scheduler is not told")
    assert sorted(bench.durable("00000")) == list(range(0, 8000, 2))
    bench.forward(*((rid("00000", number, 1), 0, prompts[number]) for number in range(1, 8000, 2)))
    eventually(lambda: opened.complete, "the shard does not become complete")


def test_a_lane_finishes_what_is_queued_when_the_writer_closes(make_real):
    bench = make_real(threads=1)
    prompts = [[number + 1] * 3 for number in range(50)]
    bench.shard("00000", prompts)
    bench.forward((rid("00000", 0), 0, prompts[0]))
    bench.drain()
    process, _ = lane_process(bench, "00000")
    process.send_signal(signal.SIGSTOP)
    for start in range(0, 50, 10):
        bench.forward(*((rid("00000", number), 0, prompts[number]) for number in range(start, start + 10)))
    threading.Timer(0.2, process.send_signal, [signal.SIGCONT]).start()
    bench.close()
    assert sorted(bench.durable("00000")) == list(range(50)) and process.returncode == 0
    assert bench.capture.writer.first_error is None


def test_a_lane_finishes_what_it_took_when_the_scheduler_is_gone(make_bench, lane_modules, tmp_path):
    """Nobody reads its answers then, and the memory stays as long as the lane needs it."""
    bench = make_bench()
    prompts = [[number + 1] * 3 for number in range(20)]
    bench.shard("00000", prompts)
    geometry = memory.Geometry(1, 64, K + 1, D, "float32")
    ring = writer.Ring(geometry, pinned=False)
    tokens = [token for ids in prompts for token in ids]
    rows = joined(*states_of(tokens))  # (60, K+1, D)
    ring.slabs[0].states[:60] = rows
    ring.slabs[0].sums[:60] = rows.sum(dim=2)
    ring.slabs[0].ids[:60] = torch.tensor(tokens)
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    process = writer._start_process(
        {"memory": ring.descriptor, "incoming": theirs_in, "outgoing": theirs_out,
         "geometry": writer.asdict(geometry), "expected": bench.capture._expected}
    )  # fmt: skip
    process.send_signal(signal.SIGSTOP)
    jobs = [[1, number, [[0, 3 * number, 3 * number + 3]]] for number in range(20)]
    for message in ({"open": 1, "control": str(bench.folder / "control" / "00000.json")}, {"write": jobs}):
        os.write(ours_out, (json.dumps(message) + "\n").encode())
    for descriptor in (ours_out, ours_in, ring.descriptor):
        os.close(descriptor)
    process.send_signal(signal.SIGCONT)
    assert process.wait(20) == 0
    assert bench.durable("00000") == list(range(20))
    assert all(torch.equal(bench.rows("00000", number), rows[3 * number : 3 * number + 3]) for number in range(20))


@pytest.mark.parametrize("why", ["locked", "deleted", "no journal"])
def test_a_control_file_that_a_lane_cannot_open_is_told(make_real, why):
    bench = make_real()
    bench.shard("00000", [[5], [6]])
    data, control = bench.folder / "00000.bin", bench.folder / "control" / "00000.json"
    if why == "locked":
        with locked_elsewhere(data):
            assert bench.forward((rid("00000", 0), 0, [5]))[0]["state"] == "accepted"
            error = told(bench)
        assert f"{control}: " in error and f"{data}: another process writes this shard" in error
    elif why == "deleted":
        shard = protocol.read_shard(control, **bench.capture._expected)
        control.unlink()
        bench.capture.writer.open(shard, control)
        error = told(bench)
        assert str(control) in error and "No such file" in error
        bench.shard("00000", [[5], [6]])
    else:
        bench.shard("00000", [[5], [6]], journal=str(bench.folder / "nowhere" / "00000.journal"))
        assert bench.forward((rid("00000", 0), 0, [5]))[0]["state"] == "accepted"
        error = told(bench)
        assert str(control) in error and "No such file" in error
    (later,) = bench.forward((rid("00000", 1), 0, [6]))
    assert later["state"] == "refused" and later["error"] == error == bench.capture.writer.first_error
    assert text_of(bench.folder / "00000.journal") == ""
    eventually(lambda: bench.ring.free == len(bench.ring.slabs), "its slabs are lost")


# --- hook (a) --------------------------------------------------------------------------------------------------------


@pytest.fixture
def capture_config(tmp_path, monkeypatch):
    """Write AERIE_CAPTURE_CONFIG; returns a function that changes it. Lanes are threads here."""
    monkeypatch.setattr(writer, "_start_process", LaneThread)
    path = tmp_path / "capture.json"
    monkeypatch.setenv(protocol.CONFIG_VARIABLE, str(path))

    def write(**changes):
        config = {
            "run": RUN,
            "ready_path": str(tmp_path / "ready.json"),
            "control_dir": str(tmp_path),
            "layers": list(LAYERS),
            "final": "post_norm",
            "dtype": "float32",
            "threads": 1,
            **changes,
        }
        path.write_text(json.dumps(config))

    write()
    yield write
    if hooks._capture is not None:
        hooks._capture.writer.close()


@pytest.mark.parametrize("flags", [False, True], ids=["list", "per-layer flags"])
def test_the_asked_layers_are_set_whatever_the_setter_makes_of_them(sglang, capture_config, tmp_path, flags):
    model = Model(flags=flags)
    hooks.switch_capture_on(runner(model))
    assert model.capture and model.model.layers_to_capture == list(LAYERS)
    flagged = [i for i, layer in enumerate(model.model.layers) if getattr(layer, hooks.LAYER_FLAG, False)]
    assert flagged == (list(LAYERS) if flags else [])
    ready = json.loads((tmp_path / "ready.json").read_text())
    settings = ready.pop("flags")
    assert settings["disable_radix_cache"] is True and settings["tp_size"] is None
    assert ready == {
        "run": RUN,
        "pid": os.getpid(),
        "sglang_version": "0.5.20",
        "patch_digest": protocol.patch_digest(),
        "model_class": "Model",
        "layers": list(LAYERS),
        "final": "post_norm",
        "num_hidden_layers": N_LAYERS,
        "hidden_size": D,
        "dtype": "float32",
        "stored_dtype": "float32",
        "tp_rank": 0,
        "tp_size": 1,
    }


def test_only_rank_zero_writes(sglang, capture_config, tmp_path):
    sglang.rank, sglang.size = 1, 2
    model = Model()
    hooks.switch_capture_on(runner(model))
    assert model.model.layers_to_capture == list(LAYERS)  # every rank runs the same forward
    assert hooks._capture is None and not (tmp_path / "ready.json").exists()


def test_a_draft_model_is_left_alone(sglang, capture_config, tmp_path):
    model = Model()
    hooks.switch_capture_on(runner(model, is_draft_worker=True))
    hooks.hold_layers(None, runner(model, is_draft_worker=True))
    assert not model.capture and not (tmp_path / "ready.json").exists()


def test_layers_that_sglang_changes_afterwards_are_set_again(sglang, capture_config):
    model = Model(flags=True)
    hooks.switch_capture_on(runner(model))
    model.set_eagle3_layers_to_capture(list(LAYERS))  # as --enable-return-aux-hidden-states does
    hooks.hold_layers(None, runner(model))
    assert model.model.layers_to_capture == list(LAYERS)
    assert hooks._pinned_layers.read_back() == list(LAYERS)


def test_a_list_that_disagrees_with_the_flags_is_an_error(sglang, capture_config):
    model = Model(flags=True)
    hooks.switch_capture_on(runner(model))
    model.model.layers[3]._is_layer_to_capture = True
    with pytest.raises(RuntimeError, match=r"layers_to_capture is \[1, 2, 4\].* is set on \[1, 2, 3, 4\]"):
        hooks.hold_layers(None, runner(model))


def test_every_reason_to_refuse_a_server_is_told_at_once(sglang, capture_config, tmp_path):
    capture_config(layers=[9, 2, 2, 0], final="pre_norm")
    sglang.size = 8
    sglang.settings.update(
        disable_radix_cache=False,
        pp_size=2,
        dp_size=2,
        attn_cp_size=4,
        enable_dp_attention=True,
        enable_two_batch_overlap=True,
        enable_prefill_cp=True,
        enable_attn_tp_input_scattered=True,
        enable_layernorm_sp=True,
        speculative_algorithm="EAGLE3",
    )
    model = Model()
    del model.model.norm
    model.logits_processor.logit_scale = 0.125
    changed = runner(model, device="cuda")
    changed.model_config.hf_text_config.logits_mup_width_multiplier = 24.0
    with pytest.raises(RuntimeError, match="cannot capture") as caught:
        hooks.switch_capture_on(changed)
    reasons = str(caught.value)
    for part in (
        "--pp-size 1", "--dp-size 1", "--attn-cp-size 1", "drop --enable-dp-attention", "drop --enable-two-batch-overlap",
        "drop --enable-prefill-cp", "drop --enable-attn-tp-input-scattered", "drop --enable-layernorm-sp",
        "add --disable-radix-cache", "drop --speculative-algorithm", "add --enforce-disable-flashinfer-allreduce-fusion",
        "add --disable-prefill-cuda-graph", "layer 9: the model has 6 layers, an index is 1..5", "layer 0:",
        "layers [9, 2, 2, 0]", "logits_processor.logit_scale is 0.125", "config.logits_mup_width_multiplier is 24.0",
        "Inner has no `norm`",
    ):  # fmt: skip
        assert part in reasons
    assert not model.capture and not (tmp_path / "ready.json").exists()


@pytest.mark.parametrize(
    "allowed",
    [
        {"disable_overlap_schedule": False},
        {"disable_overlap_schedule": True},
        {"speculative_algorithm": "EAGLE3", "enable_return_aux_hidden_states": True},  # only names a convention
        {"pp_size": 1, "dp_size": 1, "attn_cp_size": 1, "attn_dp_size": 1},
    ],
)
def test_what_does_no_harm_is_not_refused(sglang, allowed):
    settings = {"disable_radix_cache": True, **allowed}
    assert hooks.refused_settings(settings.get, device="cpu", tp_size=2) == []


def test_a_cuda_server_with_the_right_flags_is_not_refused():
    settings = {
        "disable_radix_cache": True,
        "enforce_disable_flashinfer_allreduce_fusion": True,
        "disable_prefill_cuda_graph": True,
    }
    assert hooks.refused_settings(settings.get, device="cuda", tp_size=8) == []


def test_a_model_without_the_setter_is_refused(sglang, capture_config):
    model = torch.nn.Module()
    with pytest.raises(RuntimeError, match="Module has no set_eagle3_layers_to_capture"):
        hooks.switch_capture_on(runner(model))


class StreamLayer(torch.nn.Module):
    """A layer of Gemma 3 up to 0.5.16: hands the residual stream on."""

    def forward(self, hidden_states):
        return hidden_states


class BranchLayer(torch.nn.Module):
    """A layer of Gemma 3 since 0.5.18: hands its branch and the residual on."""

    def forward(self, hidden_states, residual=None):
        return hidden_states, residual


class Gemma3TextModel(Inner):
    def __init__(self, layer):
        super().__init__()
        self.layers = torch.nn.ModuleList(layer() for _ in range(N_LAYERS))


def test_a_gemma_3_that_appends_states_without_the_residual_is_refused(sglang, capture_config):
    model = Model()
    model.model = Gemma3TextModel(BranchLayer)
    with pytest.raises(RuntimeError, match="appends its layers' branch without the residual"):
        hooks.switch_capture_on(runner(model))
    assert model.model.layers_to_capture == []


def test_other_layers_with_a_residual_and_an_older_gemma_3_are_not_refused():
    model = Inner()
    model.layers = torch.nn.ModuleList([BranchLayer()])
    assert hooks.lost_residuals(model) == hooks.lost_residuals(Gemma3TextModel(StreamLayer)) == []


def test_settings_without_a_namespace_are_read_from_the_server_arguments(sglang):
    old = runner(Model(), server_args=types.SimpleNamespace(pp_size=4))
    setting = hooks._setting_reader(old)
    assert setting("pp_size") == 4 and setting("disable_radix_cache") is True and setting("unheard_of") is None


def test_pre_norm_is_the_sum_that_enters_the_final_norm(make_bench):
    bench = make_bench(final="pre_norm")
    bench.shard("00000", [[5, 6]])
    aux, final = states_of([5, 6])
    entering, residual = final - 7, torch.full_like(final, 7.0)
    norm = torch.nn.Module()
    norm.forward = lambda entering, residual: (entering.zero_(), residual.zero_())  # a fused norm overwrites both
    norm.register_forward_pre_hook(bench.capture.keep_norm_input)
    norm(entering, residual)
    batch = Batch([rid("00000", 0)], [2], [0], torch.tensor([5, 6]))
    normed = torch.ones(2, D)
    output = hooks.take_states(logits_forward, object(), batch.input_ids, normed, None, batch, aux)
    assert_captured(bench, output.customized_info[protocol.TICKET_KEY][0], "00000", 0)
    # A forward whose norm did not run must not reuse the sum of the one before.
    output = hooks.take_states(logits_forward, object(), batch.input_ids, normed, None, Batch(
        [rid("00000", 0, 1)], [2], [0], torch.tensor([5, 6])), aux)  # fmt: skip
    assert "no aux or no final states" in output.customized_info[protocol.TICKET_KEY][0]["error"]


@pytest.mark.parametrize("stored", ["float32", "float8_e4m3"])
def test_the_server_tells_what_it_computes_in_and_what_it_stores(sglang, capture_config, tmp_path, stored):
    capture_config(dtype=stored)
    hooks.switch_capture_on(runner(Model()))
    ready = json.loads((tmp_path / "ready.json").read_text())
    assert (ready["dtype"], ready["stored_dtype"]) == ("float32", stored)


@pytest.mark.parametrize(
    ("stored", "computed", "reason"),
    [
        ("bfloat16", "float32", "dtype bfloat16 is asked for, the server computes in float32"),
        ("float32", "bfloat16", "store bfloat16 or float8_e4m3"),
        ("float8_e4m3", "float16", "the server computes in float16: capture needs --dtype bfloat16 or float32"),
        ("float8_e4m3", "float8_e4m3", "the server computes in float8_e4m3"),
    ],
)
def test_a_dtype_that_cannot_be_stored_is_refused(sglang, capture_config, stored, computed, reason):
    capture_config(dtype=stored)
    dtype = {"float8_e4m3": torch.float8_e4m3fn}.get(computed, getattr(torch, computed, None))
    assert any(reason in defect for defect in hooks.refused_dtypes(stored, computed))
    with pytest.raises(RuntimeError, match="cannot capture"):
        hooks.switch_capture_on(runner(Model(), dtype=dtype))
    assert hooks._capture is None


@pytest.mark.parametrize(
    ("prefill", "context", "chunk", "largest", "cuts"),
    [(128, 64, None, 128, 1), (None, 64, -1, 64, 1), (128, 1000, 0, 1000, 1), (128, 1000, 300, 1000, 4)],
)
def test_host_memory_is_for_the_largest_forward(
    sglang, capture_config, monkeypatch, prefill, context, chunk, largest, cuts
):
    monkeypatch.setattr(memory, "SLAB_BYTES", (K + 1) * D * FLOAT_BYTES)  # one row
    sglang.settings.update(max_prefill_tokens=prefill, chunked_prefill_size=chunk)
    server = runner(Model())
    server.model_config.context_len = context
    hooks.switch_capture_on(server)
    spare = (hooks.PARTIAL_SAMPLES + 1) * cuts
    assert len(hooks._capture._copier.ring.slabs) == hooks.RING_FORWARDS * largest + spare


def test_nothing_is_registered_without_a_configuration(sglang, monkeypatch):
    monkeypatch.delenv(protocol.CONFIG_VARIABLE, raising=False)
    monkeypatch.delenv(protocol.PROBE_VARIABLE, raising=False)
    aerie_capture.activate()
    assert sglang.registered == []


def test_both_hooks_are_registered_with_a_configuration(sglang, capture_config):
    aerie_capture.activate()
    assert sglang.registered == [
        (hooks.RUNNER_TARGET, hooks.switch_capture_on, "before"),
        (hooks.RUNNER_TARGET, hooks.hold_layers, "after"),
        (hooks.LOGITS_TARGET, hooks.take_states, "around"),
    ]


@pytest.mark.parametrize(
    ("stale", "kept"), [('{"run": "ffff"}', False), ("torn", False), (f'{{"run": "{RUN}"}}', True)]
)
def test_only_a_stale_ready_file_is_deleted_at_start(sglang, capture_config, tmp_path, stale, kept):
    (tmp_path / "ready.json").write_text(stale)
    hooks.register()
    assert (tmp_path / "ready.json").exists() is kept


def test_every_defect_of_the_configuration_is_told_at_once(sglang, capture_config):
    capture_config(
        run="XYZ", layers=[1, "2"], final="both", surplus=1, ready_path="", dtype="float16", threads=0
    )  # fmt: skip
    with pytest.raises(ValueError, match="7 defects") as caught:
        aerie_capture.activate()
    for part in ("run:", "layers:", "final:", "surplus: unknown key", "ready_path:", "dtype:", "threads: found 0"):
        assert part in str(caught.value)


# --- probe -----------------------------------------------------------------------------------------------------------


class Drafter(torch.nn.Module):
    """A loader in SGLang's way: fused parameters, unknown names skipped in silence."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2, bias=False)
        self.norm = torch.nn.Linear(2, 1, bias=False)
        self.attention = torch.nn.Module()
        self.attention.qkv_proj = torch.nn.Linear(1, 3, bias=False)
        self.attention.qkv_proj.weight.weight_loader = self.load_shard
        self.hot_token_id = None

    @staticmethod
    def load_shard(parameter, tensor, shard):
        parameter.data["qkv".index(shard)] = tensor

    def load_weights(self, weights):
        from sglang.srt.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name == "d2t":
                self.hot_token_id = tensor + torch.arange(len(tensor))
            elif name.startswith("attention."):
                fused = parameters["attention.qkv_proj.weight"]
                fused.weight_loader(fused, tensor, name.split(".")[1][0])
            elif name in parameters:
                parameter = parameters[name]
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def test_the_probe_tells_which_names_arrived_and_what_nobody_filled(sglang, tmp_path, monkeypatch):
    config = tmp_path / "probe.cfg"
    config.write_text(json.dumps({"run": "any name", "path": str(tmp_path / "probe")}))
    monkeypatch.setenv(protocol.PROBE_VARIABLE, str(config))
    monkeypatch.setattr(probe, "_probe", None)
    probe.register()
    assert [target for target, _, _ in sglang.registered] == [
        hooks.RUNNER_TARGET, probe.DRAFT_TARGET + ".load_weights", probe.DRAFT_TARGET + ".forward",
    ]  # fmt: skip
    target = Model()
    target.set_eagle3_layers_to_capture([0, 1, 3])
    probe.read_target_layers(None, runner(target))
    drafter = Drafter()
    weights = {
        "fc.weight": torch.full((2, 2), 3.0),
        "attention.q_proj.weight": torch.tensor([4.0]),
        "attention.k_proj.weight": torch.tensor([5.0]),
        "misspelt.weight": torch.zeros(1),
        "d2t": torch.tensor([0, 1, 1]),
        "t2d": torch.ones(5, dtype=torch.bool),
    }
    probe.watch_loading(Drafter.load_weights, drafter, iter(weights.items()))
    facts = json.loads((tmp_path / "probe" / "probe.json").read_text())
    assert facts["state"] == "loaded" and facts["target"]["layers_to_capture"] == list(LAYERS)
    draft = facts["draft"]
    assert draft["offered"] == sorted(weights) and draft["left_over"] == ["misspelt.weight"]
    assert draft["not_loaded"] == ["attention.qkv_proj.weight", "norm.weight"]  # v is missing, norm was not offered
    assert draft["offsets"] == ["d2t"] and draft["ignored"] == ["t2d"]
    assert draft["consumed"]["attention.q_proj.weight"] == ["attention.qkv_proj.weight"]
    assert torch.equal(drafter.fc.weight, weights["fc.weight"])
    assert not hasattr(drafter.fc.weight, "weight_loader")  # the watching loaders are gone
    assert drafter.attention.qkv_proj.weight.weight_loader is Drafter.load_shard

    forward = {"input_ids": torch.arange(9), "positions": torch.arange(9), "aux": torch.arange(54.0).view(9, 6)}
    batch = Batch(["other", "aerie-probe-1"], [4, 5], [0, 0], forward["input_ids"])
    batch.spec_info = types.SimpleNamespace(hidden_states=forward["aux"])
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])

    def run(model, input_ids, positions, forward_batch):
        return types.SimpleNamespace(next_token_logits=logits)

    for times in (1, 10):  # only the first extend is kept
        probe.watch_forward(run, drafter, forward["input_ids"] * times, forward["positions"], batch)
    tensors = probe_tensors(tmp_path / "probe" / "probe.safetensors")
    assert {name: value.tolist() for name, value in tensors.items()} == {
        "input_ids": [4, 5, 6, 7, 8],
        "positions": [4, 5, 6, 7, 8],
        "aux": forward["aux"][4:].tolist(),
        "logits": [[4.0, 5.0, 6.0]],
        "hot_token_id": [0, 2, 3],
    }
    assert json.loads((tmp_path / "probe" / "probe.json").read_text())["state"] == "probed"
    assert probe_tensors(tmp_path / "probe" / "draft-params-rank0.safetensors").keys() == {"fc.weight"}


def probe_tensors(path):
    from safetensors.torch import load_file

    return load_file(path)


# --- contract --------------------------------------------------------------------------------------------------------

PLUS_ONE = """
    def set_eagle3_layers_to_capture(self, layer_ids: Optional[List[int]] = None):
        if not self.pp_group.is_last_rank:
            return
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [val + 1 for val in layer_ids]
"""
RAW = PLUS_ONE.replace(
    "[val + 1 for val in layer_ids]",
    "[val + 1 for val in layer_ids] if layer_ids[0] == 1 else list(layer_ids)",
)
INNER = "    def __init__(self):\n        self.layers_to_capture = []\n"
D2T = "            self.hot_token_id = loaded_weight + torch.arange(loaded_weight.shape[0])\n"
SOURCE = {
    "launch_server.py": "load_plugins()\n",
    "srt/environ.py": "SGLANG_PLUGINS = EnvStr('')\n",
    "srt/managers/scheduler.py": "def run():\n    load_plugins()\n",
    "srt/distributed/parallel_state.py": (
        "def get_tensor_model_parallel_rank(): pass\ndef get_tensor_model_parallel_world_size(): pass\n"
    ),
    contract.PLUGINS: 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"\n',
    contract.REGISTRY: (
        "class HookType(Enum):\n    BEFORE = 1\n    AFTER = 2\n    AROUND = 3\n"
        "class HookRegistry:\n    @classmethod\n    def register(cls, target, hook, hook_type=1, *, source=None): pass\n"
        "    @classmethod\n    def apply_hooks(cls): pass\n"
    ),
    contract.RUNNER: (
        "class ModelRunner:\n    def __init__(self):\n        self.model = self.model_config = self.server_args = 1\n"
        "        self.is_draft_worker = self.dtype = self.device = 1\n"
        "        ids = config['eagle_aux_hidden_state_layer_ids']\n"
        "    def init_attention_backends(self): pass\n"
    ),
    contract.LOGITS: (
        "class LogitsProcessorOutput:\n    customized_info: dict = None\n"
        "class LogitsProcessor:\n    def forward(self, input_ids, hidden_states, lm_head, logits_metadata,"
        " aux_hidden_states=None, hidden_states_before_norm=None): pass\n"
    ),
    contract.BATCH: (
        "class ForwardMode:\n    def is_extend(self): pass\n"
        "class ForwardBatch:\n    forward_mode: int\n    input_ids: int\n    rids: list\n"
        "    extend_seq_lens_cpu: list\n    extend_prefix_lens_cpu: list\n"
        "    def init_new(cls, batch): return cls(rids=[req.rid for req in batch.reqs])\n"
    ),
    contract.RESULTS: (
        "class Processor:\n    def _maybe_collect_customized_info(self, i, req, out):\n"
        "        req.customized_info.append(out[i])\n"
        "    def process_batch_result_prefill(self):\n        self._maybe_collect_customized_info(1, 2, 3)\n"
    ),
    contract.STREAMER: "customized_info = 1\n",
    contract.TOKENIZER_MANAGER: "customized_info = 1\n",
    "srt/models/llama.py": f"class LlamaModel:\n{INNER}class LlamaForCausalLM:\n{PLUS_ONE}",
    "srt/models/qwen2.py": f"class Qwen2Model:\n{INNER}",
    "srt/models/qwen2_moe.py": f"class Qwen2MoeModel:\n{INNER}class Qwen2MoeForCausalLM:\n{PLUS_ONE}",
    "srt/models/qwen3.py": f"class Qwen3ForCausalLM:\n{PLUS_ONE}",
    "srt/models/qwen3_moe.py": (
        "from sglang.srt.models.qwen2_moe import Qwen2MoeForCausalLM\n"
        "class Qwen3MoeForCausalLM(Qwen2MoeForCausalLM):\n    pass\n"
    ),
    "srt/models/deepseek_v2.py": f"class DeepseekV2Model:\n{INNER}class DeepseekV2ForCausalLM:\n{RAW}",
    "srt/models/kimi_k25.py": f"class KimiK25ForConditionalGeneration:\n{PLUS_ONE}",
    "srt/models/gpt_oss.py": f"class GptOssForCausalLM:\n{PLUS_ONE}",
    contract.EAGLE3: (
        "class LlamaDecoderLayer:\n    def __init__(self): self.hidden_norm = 1\n"
        "class LlamaModel:\n    def __init__(self):\n"
        "        self.embed_tokens = self.fc = self.layers = self.norm = self.fc_norm = 1\n"
        "class LlamaForCausalLMEagle3:\n    def __init__(self, config):\n        self.lm_head = 1\n"
        "        config.draft_vocab_size, config.tie_word_embeddings, config.target_hidden_size, config.norm_output\n"
        "    def load_weights(self, weights):\n"
        "        names = ['.q_proj', '.k_proj', '.v_proj', '.gate_proj', '.up_proj', 'midlayer', 'd2t', 't2d']\n"
        "        for loaded_weight in weights:\n" + D2T
    ),
    contract.EAGLE3_MLA: (
        "class Eagle3DeepseekV2ForCausalLM:\n    def load_weights(self, weights):\n"
        "        for loaded_weight in weights:\n" + D2T
    ),
    "srt/server_args.py": (
        "class ServerArgs:\n"
        + "".join(f"    {name}: A[int, 'help'] = 1\n" for name in contract.SETTINGS)
        + "".join(f"    {flag[2:].replace('-', '_')}: A[int, Arg(help='x')] = 1\n" for flag in contract.FLAGS[:10])
        + "    def add_cli_args(parser):\n"
        + "".join(f"        parser.add_argument('{flag}')\n" for flag in contract.FLAGS[10:])
    ),
}  # fmt: skip


def write_source(folder, changes=()):
    """An unzipped wheel in little; `changes` are (file, old text, new text)."""
    for name, text in SOURCE.items():
        for file, old, new in changes:
            if file == name:
                assert old in text
                text = text.replace(old, new)
        path = folder / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_source_tree_as_expected_passes_the_contract(tmp_path, capsys):
    assert contract.main(["--source", str(write_source(tmp_path))]) == 0
    assert "no drift" in capsys.readouterr().out


DRIFTS = {
    "ModelRunner.init_attention_backends: found (self, pool)": (
        contract.RUNNER, "init_attention_backends(self)", "init_attention_backends(self, pool)"),
    "ModelRunner.is_draft_worker: found never assigned": (contract.RUNNER, "self.is_draft_worker", "self.is_draft"),
    "LogitsProcessor.forward: found (self, input_ids": (contract.LOGITS, "hidden_states, lm_head", "states, lm_head"),
    "LogitsProcessorOutput.customized_info: found absent": (contract.LOGITS, "customized_info:", "custom_info:"),
    "GENERAL_PLUGINS_GROUP: found 'sglang.plugins'": (contract.PLUGINS, "sglang.srt.plugins", "sglang.plugins"),
    "HookRegistry.register: found (cls, path, hook": (contract.REGISTRY, "cls, target", "cls, path"),
    "HookType: found no AROUND": (contract.REGISTRY, "AROUND", "WRAP"),
    "scheduler.py load_plugins(): found not called": ("srt/managers/scheduler.py", "load_plugins()", "pass"),
    "get_tensor_model_parallel_rank: found absent": (
        "srt/distributed/parallel_state.py", "parallel_rank", "parallel_index"),
    "process_batch_result_prefill: found does not call": (
        contract.RESULTS, "self._maybe_collect_customized_info(1", "self.collect(1"),
    "output_streamer.py customized_info: found absent": (contract.STREAMER, "customized_info", "custom_info"),
    "ForwardBatch.extend_prefix_lens_cpu: found absent": (contract.BATCH, "extend_prefix_lens_cpu", "prefix_lens_cpu"),
    "ForwardBatch(rids=...): found not filled": (contract.BATCH, "cls(rids=[req.rid", "cls([req.rid"),
    "LlamaForCausalLM.set_eagle3_layers_to_capture([4, 6]): found [4, 6], expected [5, 7]": (
        "srt/models/llama.py", "[val + 1 for val in layer_ids]", "list(layer_ids)"),
    "DeepseekV2ForCausalLM.set_eagle3_layers_to_capture([1, 6]): found [1, 6], expected [2, 7]": (
        "srt/models/deepseek_v2.py", "layer_ids[0] == 1", "layer_ids[0] == 0"),
    "Qwen3MoeForCausalLM.set_eagle3_layers_to_capture: found absent": (
        "srt/models/qwen2_moe.py", "set_eagle3_layers_to_capture", "set_layers"),
    "DeepseekV2Model.layers_to_capture: found never assigned": (
        "srt/models/deepseek_v2.py", "        self.layers_to_capture = []", "        self.captured = []"),
    "ServerArgs.enable_two_batch_overlap: found absent": (
        "srt/server_args.py", "    enable_two_batch_overlap:", "    two_batch_overlap:"),
    "flag --model-path: found absent": ("srt/server_args.py", "    model_path: A[int, Arg(help='x')]",
                                        "    model_path: A[int, Arg(no_cli=True)]"),
    "flag --skip-server-warmup: found absent": (
        "srt/server_args.py", "add_argument('--skip-server-warmup')", "add_argument('--other')"),
    "LlamaForCausalLMEagle3 d2t: found ['loaded_weight']": (
        contract.EAGLE3, "loaded_weight + torch.arange(loaded_weight.shape[0])", "loaded_weight"),
    "load_weights: found no 'midlayer'": (contract.EAGLE3, "'midlayer'", "'layer'"),
    "self.hidden_norm: found absent": (contract.EAGLE3, "self.hidden_norm", "self.state_norm"),
    "config.norm_output: found not read": (contract.EAGLE3, "config.norm_output", "config.norm"),
    "eagle_config.eagle_aux_hidden_state_layer_ids: found read by none": (
        contract.RUNNER, "eagle_aux_hidden_state_layer_ids", "layer_ids"),
}  # fmt: skip


@pytest.mark.parametrize("message", DRIFTS)
def test_each_drifted_item_fails_the_contract_by_name(tmp_path, capsys, message):
    source = write_source(tmp_path, [DRIFTS[message]])
    assert contract.main(["--source", str(source)]) == 1
    assert message in capsys.readouterr().out


def test_all_drifted_items_are_told_at_once(tmp_path, capsys):
    """Each message alone would hide the others until the next build, ten minutes later."""
    chosen = [message for message in DRIFTS if message.startswith(("ForwardBatch.", "HookType", "flag --skip"))]
    (tmp_path / "sglang").mkdir()
    source = write_source(tmp_path, [DRIFTS[message] for message in chosen])
    assert contract.main(["--source", str(source)]) == 1
    told = capsys.readouterr().out
    assert len(chosen) == 3 and all(message in told for message in chosen)
    assert "3 drifted items" in told


def test_a_folder_without_sglang_fails_the_contract(tmp_path, capsys):
    assert contract.main(["--source", str(tmp_path)]) == 1
    assert "expected the folder of the sglang package" in capsys.readouterr().out
