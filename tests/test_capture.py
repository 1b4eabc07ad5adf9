"""What goes wrong while a chunk is captured ends in the complete chunk or in a clear error; nothing is lost or wrong.

    python -m pytest tests/test_capture.py -s

The client is scripts/capture_hidden.py, the plugin is the real one with its lanes; the server around it is
tests/bench_server.py, which knows the states of every prompt. At the end a table says what was tried.

    lost   durable and answered samples that a later run asked for again, samples missing in the chunk
    wrong  shards that differ from those of an undisturbed run or from the manifest, samples with other rows
"""

import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import bench_server
from aerie import artifact, hidden, tokens
from conftest import ROOT
from drafting import D, write_target

BENCH = ROOT / "tests" / "bench_server.py"
CONTEXT = 512
LAYERS = (1, 2, 4)
ROW_BYTES = (len(LAYERS) + 1) * D * 4  # float32
LENGTHS = [1 + 37 * number % 120 for number in range(60)]  # tokens
SHARD_BYTES = 1000 * ROW_BYTES  # four shards of those
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("scripts", "containers/capture", "tests")),
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
}
RUN_S = 20  # no run takes that long, except the one of 10,000 samples
SLOW_MS = 15.0  # a forward of the runs that are killed
UNTOUCHED = {"forward_ms": 0.0}


# --- jobs ------------------------------------------------------------------------------------------------------------


class Workshop:
    """Starts captures in processes forked from one that has loaded torch already."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, BENCH, "jobs"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )

    def ask(self, **order):
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        assert self._process.wait(20) == 0
        self._process.stdout.close()


def children(pid):
    """The processes that a process has started and that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(") ")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(stat.parent.name))
    return sorted(found)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@dataclass
class Outcome:
    """One ended run of scripts/capture_hidden.py: its exit status, what it said, [(shard, sample)] that were run."""

    code: int
    said: str
    captured: list

    @property
    def error(self):
        return self.said.rpartition("CaptureError: ")[2]


@dataclass
class Job:
    """A run under way."""

    workshop: Workshop
    pid: int
    log: Path
    record: Path

    def poll(self):
        if not hasattr(self, "code"):
            code = self.workshop.ask(poll=self.pid)
            if code is None:
                return None
            self.code = code
        return self.code

    def until(self, condition):
        """Wait for a condition; return whether it came while the job ran."""
        deadline = time.monotonic() + RUN_S
        while not condition():
            if self.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.002)
        return True

    def wait(self, limit_s=RUN_S):
        deadline = time.monotonic() + limit_s
        while self.poll() is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGUSR1)  # it says where it is
                time.sleep(0.5)
                os.kill(self.pid, signal.SIGKILL)
                pytest.fail(f"still running after {limit_s} s:\n{self.log.read_text()}")
            time.sleep(0.005)
        return Outcome(self.code, self.log.read_text(), self.captured())

    def captured(self):
        """What the server ran, by the request ids; the samples that are captured twice on purpose are left out."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        rids = [rid.split("-") for line in lines for rid in json.loads(line)["rids"]]
        return [(int(shard[-5:]), int(sample)) for _, _, shard, sample, _ in rids if shard[-5:] != "99999"]

    def server(self):
        """The pid of its server, None before it has one."""
        return next((pid for pid in children(self.pid) if os.getsid(pid) == pid), None)


@dataclass
class Case:
    """One chunk in a folder of its own, captured in one or more runs."""

    lab: "Lab"
    folder: Path
    logs: Path
    prompts: list
    flags: dict = field(default_factory=dict)
    layers: tuple = LAYERS
    count: int = 0

    @property
    def output(self):
        return self.folder / "hidden" / "00000.json"

    @property
    def partial(self):
        return self.output.with_suffix(artifact.PARTIAL)

    def start(self, faults=UNTOUCHED, layers=None, **flags):
        self.count += 1
        self.layers = layers or self.layers
        log, record = self.logs / f"run-{self.count}.log", self.logs / f"record-{self.count}.jsonl"
        environment = {**ENVIRONMENT, "BENCH": json.dumps({**faults, "record": str(record)})}
        words = self.lab.words(self, {**self.flags, **flags})
        pid = self.lab.workshop.ask(start=words, log=str(log), environment=environment)
        return Job(self.lab.workshop, pid, log, record)

    def run(self, faults=UNTOUCHED, limit_s=RUN_S, **changes):
        return self.start(faults, **changes).wait(limit_s)

    def kept(self):
        """{(shard, sample)} that are durable and answered in the unfinished folder: no later run may want them."""
        found = set()
        for journal in self.journals():
            number = journal.name.partition(".")[0]
            durable = {entry["sample"] for entry in whole_lines(journal) if "rows_xxh3" in entry}
            answered = {entry["sample"] for entry in whole_lines(self.partial / f"{number}.replies.jsonl")}
            found |= {(int(number), sample) for sample in durable & answered}
        return found

    def lines(self):
        return sum(path.read_bytes().count(b"\n") for path in self.journals())

    def journals(self):
        return list(self.partial.glob("*.journal.jsonl"))

    def everything(self):
        """{(shard, sample)} of the published chunk."""
        return {(entry["shard"], entry["position"]) for entry in json.loads(self.output.read_text())["samples"]}

    def wrong(self):
        """Return (lost, wrong) of the published chunk; see the head of this file."""
        chunk = hidden.open_chunk(self.output)
        lost = len(set(range(len(self.prompts))) ^ {int(entry["id"]) for entry in chunk.manifest["samples"]})
        undisturbed, wrong = self.lab.undisturbed(self), 0
        for entry in chunk.manifest["shards"]:
            data = (self.output.with_suffix("") / entry["name"]).read_bytes()
            wrong += hashlib.sha256(data).hexdigest() != entry["sha256"]
            wrong += undisturbed is not None and data != undisturbed.get(entry["name"])
        if undisturbed is not None:
            wrong += undisturbed.keys() != {entry["name"] for entry in chunk.manifest["shards"]}
        expected = bench_server.states_of(self.prompts, self.layers, D).split(list(map(len, self.prompts)))
        float8 = chunk.metadata["dtype"] == hidden.FLOAT8
        for sample, prompt, rows in zip(chunk, self.prompts, expected, strict=True):
            same = torch.allclose(sample.states, rows, rtol=2**-4, atol=1e-4) if float8 else torch.equal(sample.states, rows)  # fmt: skip
            wrong += sample.input_ids.tolist() != prompt or not same
        assert not self.partial.exists()
        return lost, wrong


def whole_lines(path):
    """The lines of a journal that a kill has not cut short."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


class Lab:
    """A target and the chunks of it that the tests capture."""

    def __init__(self, folder):
        self.folder = folder
        self.manifest = write_target(folder)
        self.workshop = Workshop()
        self._undisturbed = {}

    def case(self, name, lengths=LENGTHS, disk=None, prompts=None, **flags):
        """A chunk of random prompts or the given ones; `disk` is where it is captured, if not in the lab's folder."""
        generator = torch.Generator().manual_seed(7)
        prompts = prompts or [torch.randint(3, 40, (length,), generator=generator).tolist() for length in lengths]
        logs = self.folder / name
        logs.mkdir(exist_ok=True)
        self.write_tokens(disk or logs, prompts)
        return Case(self, disk or logs, logs, prompts, flags)

    def write_tokens(self, folder, prompts, **changes):
        digests = {key: self.manifest[key] for key in ("target_digest", "tokenizer_digest", "template_digest")}
        described = {"ids": [str(number) for number in range(len(prompts))], "held_out": [False] * len(prompts)}
        masks = [[0] * len(prompt) for prompt in prompts]
        tokens.write(folder / "00000.safetensors", prompts, masks, {**described, "greedy": False, **digests, **changes})

    def words(self, case, changes):
        flags = {
            "--tokens": case.folder / "00000.safetensors", "--head": self.folder / "target" / "head.safetensors",
            "--final": "post_norm", "--state-dtype": "float32", "--shard-bytes": SHARD_BYTES,
            "--sglang-version": bench_server.VERSION, "--concurrency": 4, "--writer-threads": 2,
            "--deterministic": "no", "--repeated-samples": 0, "--max-logprob-difference": 0.001,
            "--min-greedy-agreement": 0.999, "--checked-rows": 64, "--server-log": case.logs / "server.log",
            "--output": case.output, "--model": self.folder / "target" / "model", "--device": "cpu",
            "--dtype": "float32", "--tensor-parallel": 1, "--context-tokens": CONTEXT, "--max-running-requests": 16,
            "--start-timeout-s": 30, "--seed": 1, "--warm-folder": self.folder / "warm",
            **{f"--{name.replace('_', '-')}": value for name, value in changes.items()},
        }  # fmt: skip
        return [str(word) for pair in flags.items() for word in pair] + ["--layers", *map(str, case.layers)]

    def undisturbed(self, case):
        """{shard: bytes} of a run in which nothing went wrong; None where `case` is such a run."""
        key = json.dumps([case.prompts, case.layers, case.flags])
        if key not in self._undisturbed:
            self._undisturbed[key] = None
            twin = self.case(f"undisturbed-{len(self._undisturbed)}", prompts=case.prompts, **case.flags)
            outcome = twin.run(layers=case.layers)
            assert outcome.code == 0, outcome.said
            assert sorted(outcome.captured) == sorted(twin.everything())
            assert twin.wrong() == (0, 0)
            shards = twin.output.with_suffix("").glob("shard-*.safetensors")
            self._undisturbed[key] = {path.name: path.read_bytes() for path in shards}
        return self._undisturbed[key]


@pytest.fixture(scope="module")
def table():
    """Rows [tried, lost, wrong] by fault; printed at the end, where lost and wrong must be 0."""
    rows = {}
    began = time.monotonic()
    yield rows
    width = max(map(len, rows), default=0)
    print(f"\n\n{'fault':{width}}  tried  lost  wrong")
    for fault, (tried, lost, wrong) in rows.items():
        print(f"{fault:{width}}  {tried:5}  {lost:4}  {wrong:5}")
    print(f"in {time.monotonic() - began:.0f} s")
    assert not [fault for fault, (_, lost, wrong) in rows.items() if lost or wrong]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    made = Lab(tmp_path_factory.mktemp("lab"))
    yield made
    made.workshop.close()


@pytest.fixture
def tally(table):
    """Count one try of a fault: tally(fault, lost, wrong)."""

    def add(fault, lost, wrong):
        row = table.setdefault(fault, [0, 0, 0])
        for place, value in enumerate((1, lost, wrong)):
            row[place] += value

    return add


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of so many bytes; root only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = []

    def mount(size):
        if os.geteuid() != 0:
            pytest.skip("mounting a small file system needs root")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True)  # fmt: skip
        if done.returncode:
            pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    if mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder, options):
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def finish(case, fault, tally, strictly=True, **changes):
    """Run until the chunk is there: exactly what is not kept is captured, and the chunk is right. Return the run."""
    kept = case.kept()
    outcome = case.run(**changes)
    assert outcome.code == 0, outcome.said
    again = kept & set(outcome.captured)
    if strictly:
        assert sorted(outcome.captured) == sorted(case.everything() - kept)
    lost, wrong = case.wrong()
    tally(fault, lost + len(again), wrong)
    assert (lost, again, wrong) == (0, set(), 0)
    return outcome


# --- kills -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victims, times", [("server", 10), ("client", 10), ("server and client", 10), ("lane", 4)])
def test_a_kill_at_any_point_costs_only_what_was_not_durable(lab, tally, victims, times):
    """The seeds are fixed; where a kill strikes depends on the machine as well."""
    middles = 0
    for number in range(times):
        seed = f"{victims} {number}"
        chance = random.Random(seed)
        many = {"concurrency": 64, "max_running_requests": 4} if number % 4 == 3 else {}  # four samples in a request
        goal, after_s = chance.randrange(1, len(LENGTHS) - 10), chance.uniform(0.05, 1.5)
        by_time = number % 3 == 2 and victims != "lane"
        for attempt in range(10):  # a run that was ready before the kill is none of the tries
            case = lab.case(f"killed-{victims.replace(' ', '-')}-{number}-{attempt}")
            job = case.start({"forward_ms": SLOW_MS}, **many)
            if by_time:
                moment = time.monotonic() + after_s / 2**attempt
                job.until(lambda moment=moment: time.monotonic() > moment)
            else:
                job.until(lambda goal=goal, case=case: case.lines() >= goal)
            processes = processes_of(job)
            killed = {
                "server": processes[1:2], "client": processes[:1], "server and client": processes[1::-1],
                "lane": processes[2:][-1:],
            }[victims]  # fmt: skip
            for pid in killed:
                with contextlib.suppress(ProcessLookupError):  # a server that has just ended
                    os.kill(pid, signal.SIGKILL)
            outcome = job.wait()
            if not case.output.exists():
                break
            assert case.wrong() == (0, 0)
        assert outcome.code != 0
        strictly = number % 2 == 0
        if strictly:  # otherwise at once, while the lanes of the dead server may still write
            wait_for_the_end(processes)
        kept = case.kept()
        print(f"seed {seed!r}: exit {outcome.code}, {len(kept)} of {len(LENGTHS)} samples kept")
        middles += 0 < len(kept) < len(LENGTHS)
        finish(case, f"SIGKILL of the {victims}", tally, strictly, **many)
    assert middles >= times / 2, "the kills come too early or too late"


def processes_of(job):
    """The client, its server and the lanes, as far as they run."""
    server = job.server()
    return [job.pid] + ([] if server is None else [server, *children(server)])


def wait_for_the_end(processes):
    deadline = time.monotonic() + 20
    while any(map(runs, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_command_itself_captures_what_the_forked_jobs_do(lab):
    """All other tests fork a loaded process instead of starting the script and the server."""
    case = lab.case("executed")
    assert lab.undisturbed(case)
    words = [sys.executable, BENCH, "capture", *lab.words(case, {})]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    assert case.wrong() == (0, 0)


# --- disks -----------------------------------------------------------------------------------------------------------


def fill(folder):
    """Leave no block of a file system free."""
    with open(folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_chunk_without_room_is_refused_before_anything_is_sent(lab, tally, small_disk):
    case = lab.case("no-room", disk=small_disk("700k"))
    outcome = case.run()
    assert outcome.code != 0 and "no room for the states of this chunk" in outcome.error, outcome.said
    assert outcome.captured == [] and not case.output.exists()
    remount(case.folder, "size=16m")
    finish(case, "no room for the chunk", tally)


@pytest.mark.parametrize("goal", [3, 40, 120])
def test_a_disk_that_fills_up_in_the_middle_keeps_what_is_durable(lab, tally, small_disk, goal):
    """Something else fills it: the files of the shards have their place, the journals and answers have not."""
    lengths = [1 + number % 7 for number in range(400)]
    case = lab.case(f"full-{goal}", lengths, disk=small_disk("4m"))
    job = case.start({"forward_ms": SLOW_MS})
    assert job.until(lambda: case.lines() >= goal)
    processes = processes_of(job)
    fill(case.folder)
    outcome = job.wait()
    assert outcome.code != 0 and not case.output.exists()
    assert "No space left on device" in outcome.error, outcome.said
    wait_for_the_end(processes)
    kept = case.kept()
    print(f"full after {goal} lines: {len(kept)} of {len(lengths)} samples kept; {outcome.error.strip()}")
    assert goal * 0.5 <= len(kept) < len(lengths)
    (case.folder / "filler").unlink()
    finish(case, "disk full while writing", tally)


def test_a_disk_that_fills_up_behind_the_last_request_is_told_at_once(lab, tally, small_disk):
    """No reply can carry the error then, and on the full disk there is no room for a file that says it."""
    case = lab.case("full-at-the-end", [2] * 48, disk=small_disk("4m"), writer_threads=1, concurrency=64)
    job = case.start({"forward_ms": 300.0}, max_running_requests=64)  # few forwards: the lane is behind by all of them
    assert job.until(lambda: len(processes_of(job)) == 3 and case.journals())
    processes = processes_of(job)
    os.kill(processes[2], signal.SIGSTOP)
    assert job.until(lambda: len(whole_lines(case.partial / "00000.replies.jsonl")) == 48) and case.lines() == 0
    fill(case.folder)
    os.kill(processes[2], signal.SIGCONT)
    outcome = job.wait()
    assert outcome.code != 0 and "No space left on device" in outcome.error, outcome.said
    wait_for_the_end(processes)
    (case.folder / "filler").unlink()
    finish(case, "disk full behind the last request", tally)


def test_a_folder_that_cannot_be_written_is_a_clear_error(lab, tally, small_disk):
    case = lab.case("read-only", disk=small_disk("4m"))
    assert case.run({"forward_ms": SLOW_MS, "kill_after": 20}).code != 0
    kept = case.kept()
    assert kept
    remount(case.folder, "ro")
    outcome = case.run()
    assert outcome.code != 0 and "cannot be written (Read-only file system" in outcome.error, outcome.said
    remount(case.folder, "rw")
    assert case.kept() == kept
    finish(case, "read-only folder", tally)


# --- what the model and the server do wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["nan", "inf"])
@pytest.mark.parametrize("block, name", [(1, "aux[1]"), (len(LAYERS), "final")])
def test_a_value_that_is_not_finite_is_named_and_only_its_sample_is_captured_again(lab, tally, fault, block, name):
    case = lab.case(f"{fault}-{block}")
    token, number = 45, 31
    case.prompts[number][5] = token
    lab.write_tokens(case.folder, case.prompts)
    outcome = case.run({fault: (token, block)})
    assert outcome.code != 0 and not case.output.exists()
    assert f"{number}: {name} of token 5: 1 of {D} values are not finite" in outcome.error, outcome.said
    kept = case.kept()
    missing = {(entry, sample) for entry, sample in outcome.captured} - kept
    assert missing and kept
    outcome = finish(case, f"{'NaN' if fault == 'nan' else 'infinity'} in a state", tally)
    assert missing <= set(outcome.captured)


def rows_in_file(case, number):
    """The bytes of a sample's states in the unfinished shard, by its place in the chunk."""
    for path in case.partial.glob("shard-*.safetensors"):
        with bench_server.safe_open(path, framework="pt") as file:
            ids = json.loads(file.metadata()["aerie"])["ids"]
            if str(number) in ids:
                starts = file.get_tensor("cu_seqlens")
                position = ids.index(str(number))
                return file.get_tensor("states")[starts[position] : starts[position + 1]]
    raise AssertionError(f"no shard with sample {number}")


def test_an_aborted_request_is_an_error_and_leaves_no_row(lab, tally):
    case = lab.case("aborted")
    case.prompts[31][0] = 45
    lab.write_tokens(case.folder, case.prompts)
    outcome = case.run({"abort": 45})
    assert outcome.code != 0 and "31: the server aborted the request" in outcome.error, outcome.said
    assert not rows_in_file(case, 31).any()
    finish(case, "aborted request", tally)


@pytest.mark.parametrize("concurrency", [4, 64])
def test_a_prompt_that_is_too_long_for_the_server_is_an_error_and_leaves_no_row(lab, tally, concurrency):
    """SGLang runs one token under its request id; with 64 in flight it fails the requests sent beside it."""
    lengths = [*LENGTHS]
    lengths[31] = CONTEXT
    case = lab.case(f"too-long-{concurrency}", lengths, concurrency=concurrency)
    outcome = case.run()
    assert outcome.code != 0 and "HTTP 400" in outcome.error and "exceeds the maximum" in outcome.error, outcome.said
    assert re.search(r"\b31\b", outcome.error.partition(": HTTP")[0])
    assert not rows_in_file(case, 31).any()
    case.flags["context_tokens"] = 2 * CONTEXT
    finish(case, "prompt that is too long", tally)


def test_a_lane_that_dies_with_all_buffers_in_its_hands_is_told_at_once(lab, tally):
    case = lab.case("buffers", writer_threads=1)
    job = case.start({"forward_ms": SLOW_MS})
    assert job.until(lambda: case.lines() >= 5)
    processes = processes_of(job)
    (lane,) = processes[2:]
    os.kill(lane, signal.SIGSTOP)
    forwards = -1
    while forwards != (forwards := len(job.captured())):  # until the scheduler waits for a buffer
        time.sleep(0.3)
    assert len(job.captured()) < len(LENGTHS)
    os.kill(lane, signal.SIGKILL)
    began = time.monotonic()
    outcome = job.wait()
    assert outcome.code != 0 and "lane 0 ended" in outcome.error, outcome.said
    print(f"told after {time.monotonic() - began:.1f} s")
    wait_for_the_end(processes)
    finish(case, "SIGKILL of a lane that holds all buffers", tally)


def test_a_lane_that_outlives_its_server_keeps_the_next_run_away_from_its_shard(lab, tally):
    case = lab.case("outlived", writer_threads=1)
    job = case.start({"forward_ms": SLOW_MS})
    assert job.until(lambda: case.lines() >= 5)
    processes = processes_of(job)
    os.kill(processes[2], signal.SIGSTOP)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    wait_for_the_end(processes[:2])
    refused = case.run()
    assert refused.code != 0 and "another process writes this shard" in refused.error, refused.said
    os.kill(processes[2], signal.SIGCONT)
    wait_for_the_end(processes)
    finish(case, "lane that outlives its server", tally)


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_one_token_and_the_full_context_are_captured(lab, tally):
    """The longest prompt leaves room for one answer token."""
    case = lab.case("extremes", [1, CONTEXT - 1, 1, 1, CONTEXT - 1])
    finish(case, "samples of one token and of the full context", tally)


def test_ten_thousand_tiny_samples_fit_into_a_chunk(lab, tally):
    lengths = [1 + number % 3 for number in range(10_000)]
    case = lab.case("tiny", lengths, concurrency=128, shard_bytes=1 << 30)
    lab._undisturbed[json.dumps([case.prompts, case.layers, case.flags])] = None  # once is enough
    began = time.monotonic()
    outcome = case.run(limit_s=120)
    assert outcome.code == 0, outcome.said
    print(f"10,000 samples in {time.monotonic() - began:.1f} s")
    assert len(outcome.captured) == len(set(outcome.captured)) == 10_000
    lost, wrong = case.wrong()
    tally("10,000 samples in a chunk", lost, wrong)


def test_many_shards_are_written_at_the_same_time(lab, tally):
    case = lab.case("shards", writer_threads=3, concurrency=16, shard_bytes=300 * ROW_BYTES)
    job = case.start({"forward_ms": 2.0})
    outcome = job.wait()
    assert outcome.code == 0, outcome.said
    shards = [shard for shard, _ in outcome.captured[:9]]
    assert len(set(shards)) >= 3
    assert len(list(case.output.with_suffix("").glob("shard-*"))) > 10
    lost, wrong = case.wrong()
    tally("three lanes, 16 requests", lost, wrong)


def test_float8_states_survive_a_kill(lab, tally):
    case = lab.case("float8", state_dtype=hidden.FLOAT8, max_logprob_difference=1.0)
    assert case.run({"forward_ms": SLOW_MS, "kill_after": 30}).code != 0
    assert case.kept()
    finish(case, "SIGKILL of the server, float8", tally)
    manifest = json.loads(case.output.read_text())
    assert 0 < manifest["float8_error"] < 0.07


# --- determinism -----------------------------------------------------------------------------------------------------


def test_a_repeated_capture_is_recorded_as_bitwise_equal(lab, tally):
    case = lab.case("repeated", repeated_samples=5)
    finish(case, "samples captured twice", tally)
    repeat = json.loads(case.output.read_text())["repeat"]
    assert len(repeat.pop("samples")) == 5
    assert repeat == {"bitwise": True, "largest_difference": 0.0}


@pytest.mark.parametrize("dtype", ["float32", hidden.FLOAT8])
def test_a_server_that_does_not_repeat_itself_is_recorded_and_fails_where_it_was_asked_to(lab, tally, dtype):
    flags = {"repeated_samples": 5, "state_dtype": dtype, "max_logprob_difference": 1.0}
    case = lab.case(f"noisy-{dtype}", **flags)
    outcome = case.run({"noise": True})
    assert outcome.code == 0, outcome.said
    repeat = json.loads(case.output.read_text())["repeat"]
    assert not repeat["bitwise"] and repeat["largest_difference"] >= bench_server.NOISE / 2
    tally("a server that does not repeat itself", *case.wrong())

    case = lab.case(f"noisy-deterministic-{dtype}", **flags, deterministic="yes")
    outcome = case.run({"noise": True})
    assert outcome.code != 0 and "repeatable" in outcome.error, outcome.said
    assert not case.output.exists() and not case.partial.exists()
    finish(case, "a server that does not repeat itself", tally)
    gates = json.loads(case.output.read_text())["gates"]
    assert gates["repeatable"] == {"value": 0.0, "limit": 0.0, "passed": True}


# --- what does not belong together -----------------------------------------------------------------------------------


def test_tokens_of_another_tokenizer_are_refused_before_a_server_starts(lab, tally):
    case = lab.case("tokenizer")
    lab.write_tokens(case.folder, case.prompts, tokenizer_digest="0" * 64)
    outcome = case.run()
    assert outcome.code != 0 and "tokenizer_digest" in outcome.error and outcome.captured == [], outcome.said
    assert "starting SGLang" not in outcome.said
    lab.write_tokens(case.folder, case.prompts)
    finish(case, "tokens of another tokenizer", tally)


def test_a_server_of_another_version_is_refused_before_anything_is_sent(lab, tally):
    case = lab.case("version")
    outcome = case.run({"version": "0.5.99"})
    assert outcome.code != 0 and "sglang_version: expected '0.5.20', the server read back '0.5.99'" in outcome.error
    assert outcome.captured == []
    finish(case, "a server of another version", tally)


@pytest.mark.parametrize("layers", [(1, 2, 3), (1, 2, 3, 4), (4,)])
def test_other_layers_take_nothing_over_from_unfinished_work(lab, tally, layers):
    """More layers make fewer samples a shard, so the answers kept for a shard would be those of other samples."""
    case = lab.case(f"layers-{len(layers)}-{layers[-1]}")
    assert case.run({"forward_ms": SLOW_MS, "kill_after": 50}).code != 0
    assert case.kept()
    case.layers = layers
    outcome = case.run()
    assert outcome.code == 0, outcome.said
    assert sorted(outcome.captured) == sorted(case.everything())
    lost, wrong = case.wrong()
    tally("another list of layers", lost, wrong)
    assert (lost, wrong) == (0, 0)


def test_answers_of_another_layout_are_not_taken_for_those_of_these_samples(lab, tally):
    """Killed with the old layout, killed with the new one: rows are durable by then that have no answer yet."""
    case = lab.case("relaid", concurrency=1)
    assert case.run({"forward_ms": SLOW_MS, "kill_after": 55}).code != 0
    case.flags["shard_bytes"] = 700 * ROW_BYTES
    for goal in (10, 20, 30):
        job = case.start({"forward_ms": SLOW_MS})
        assert job.until(lambda goal=goal: case.lines() >= goal)
        processes = processes_of(job)
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
        wait_for_the_end(processes)
    outcome = case.run()
    assert outcome.code == 0, outcome.said
    lost, wrong = case.wrong()
    tally("another layout of the shards", lost, wrong)
    assert (lost, wrong) == (0, 0)


def test_of_two_jobs_on_one_chunk_one_refuses(lab, tally):
    case = lab.case("two-jobs")
    job = case.start({"forward_ms": SLOW_MS})
    assert job.until(lambda: case.lines() >= 5)
    refused = case.run()
    assert refused.code != 0 and f"another job captures this chunk (process {job.pid} on" in refused.error, refused.said
    assert refused.captured == []
    outcome = job.wait()
    assert outcome.code == 0, outcome.said
    assert len(outcome.captured) == len(set(outcome.captured)) == len(LENGTHS)
    lost, wrong = case.wrong()
    tally("two jobs on one chunk", lost, wrong)
    assert (lost, wrong) == (0, 0)
