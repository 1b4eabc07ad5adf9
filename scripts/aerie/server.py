"""Start, ask and stop one SGLang server.

    with Server(settings, flags, environment, log_path) as server:
        server.ask_all(requests, concurrency=8, on_reply=...)

The server runs in a process group of its own on a free port of the loopback interface, carries a name
made for this start (so a foreign server on the same port is never taken for it), and is gone when the
block ends, whatever ends it: SIGTERM for it, SIGKILL for what is left of its group; and the kernel kills it when this
process is killed itself. On a GPU it gets GPUs of its own (`aerie.gpus`).

    with borrow(settings, flags, environment_of, log_path, folder, warm_idle_s=600, warm_folder=...) as server:

takes a server that an earlier job left running (`aerie.warm`), or starts one that outlives the block.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from aerie import gpus, warm
from aerie.progress import say

HOST = "127.0.0.1"
POLL_S = 0.5
STOP_S = 15.0  # SGLang needs about 6 s from SIGTERM to exit on two cores
LOG_TAIL_LINES = 25
START_TRIES = 3  # only for a port that was taken between the choice and the server's bind
PREFILL_TOKENS = 16384  # SGLang's own default for one forward pass; a longer context raises it
PR_SET_PDEATHSIG = 1  # linux/prctl.h
KEEPER_GPU_WAIT_S = 5.0  # a job that finds no GPU goes on looking for a free server as well
NEXT_WORD_S = 15.0
ANSWER_S = 5.0  # /v1/models answers at once, or never
COMMAND = (sys.executable, "-m", "sglang.launch_server")
REQUEST_TIMEOUT_S = 1800.0  # one answer; a server that is alive but silent that long is stuck

CPU_FLAGS = (
    "--device", "cpu",
    "--attention-backend", "intel_amx",  # the reference operators of containers/cpu_kernels
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
    # SGLang derives its default from max_prefill_tokens as on a GPU, and comes out below zero on a laptop.
    "--mem-fraction-static", "0.5",
)  # fmt: skip

# What a capture needs, whatever the model: whole prompts, every token computed, nothing reordered or fused
# away. See docs/capture.md for the reason behind each.
CAPTURE_FLAGS = (
    "--disable-radix-cache",
    "--chunked-prefill-size", "-1",
    "--disable-overlap-schedule",
    "--disable-prefill-cuda-graph",
    "--disable-decode-cuda-graph",
    "--enforce-disable-flashinfer-allreduce-fusion",
)  # fmt: skip


# One prompt per forward pass, so that no value depends on what else arrived. On a GPU also SGLang's own switch for
# reductions in a fixed order, with the attention kernels it is right for (its default may be others).
DETERMINISTIC_FLAGS = ("--prefill-max-requests", "1")
DETERMINISTIC_GPU_FLAGS = ("--enable-deterministic-inference", "--attention-backend", "triton")


def capture_flags(device: str, deterministic: bool) -> tuple[str, ...]:
    """Return the flags of a capturing server."""
    if not deterministic:
        return CAPTURE_FLAGS
    return CAPTURE_FLAGS + DETERMINISTIC_FLAGS + (DETERMINISTIC_GPU_FLAGS if device == "cuda" else ())


# What a measured server gets, the baseline too: a prompt seen in an earlier pass must cost what it cost then.
ARM_FLAGS = ("--disable-radix-cache",)


class ServerError(RuntimeError):
    """The server did not start, died or refused; the message ends with what its log said last."""


@dataclass(frozen=True)
class Settings:
    """How the target is served; one field per flag of `add_arguments`."""

    model: str
    device: str
    dtype: str
    tensor_parallel: int
    context_tokens: int
    max_total_tokens: int
    max_running_requests: int
    start_timeout_s: float
    port: int
    seed: int
    extra_flags: list[str] = field(default_factory=list)

    def flags(self) -> list[str]:
        """Return the flags every server of this target gets, measured or capturing."""
        flags = [
            "--model-path", self.model,
            "--dtype", self.dtype,
            "--tp-size", str(self.tensor_parallel),
            "--context-length", str(self.context_tokens),
            "--max-running-requests", str(self.max_running_requests),
            "--random-seed", str(self.seed),
            "--max-prefill-tokens", str(max(self.context_tokens, PREFILL_TOKENS)),
            "--skip-server-warmup",
        ]  # fmt: skip
        if self.max_total_tokens:
            flags += ["--max-total-tokens", str(self.max_total_tokens)]
        if self.device == "cpu":
            flags += CPU_FLAGS
        return flags + self.extra_flags

    def environment(self) -> dict[str, str]:
        """Return the variables every server of this target gets."""
        if self.device != "cpu" or self.tensor_parallel == 1:
            return {}
        # SGLang asks for a NUMA node per rank otherwise, which a laptop has not.
        cores = sorted(os.sched_getaffinity(0))
        binding = "|".join(str(cores[rank % len(cores)]) for rank in range(self.tensor_parallel))
        return {"SGLANG_CPU_OMP_THREADS_BIND": binding}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that make `Settings`; they are the keys of the config section `server`."""
    group = parser.add_argument_group("server")
    group.add_argument("--model", required=True, help="folder of the target")
    group.add_argument("--device", choices=["cpu", "cuda"], required=True)
    group.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], required=True)
    group.add_argument("--tensor-parallel", type=int, required=True, help="GPUs (CPU: processes) per server")
    group.add_argument("--context-tokens", type=int, required=True, help="longest prompt with its answer")
    group.add_argument("--max-total-tokens", type=int, default=0, help="KV cache in tokens; 0: SGLang's choice")
    group.add_argument("--max-running-requests", type=int, required=True)
    group.add_argument("--start-timeout-s", type=float, required=True)
    group.add_argument("--port", type=int, default=0, help="0: any free port")
    group.add_argument("--seed", type=int, required=True)
    group.add_argument("--extra-flag", dest="extra_flags", action="append", default=[], metavar="FLAG",
                       help="one more word for the server's command line, e.g. --extra-flag=--mem-fraction-static")  # fmt: skip


def add_warm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a job that shares its server with the jobs after it; see `borrow`."""
    group = parser.add_argument_group("server between jobs")
    group.add_argument(
        "--warm-idle-s", type=float, default=0.0, help="wait so long for the next job; 0: end with this one"
    )
    group.add_argument("--warm-folder", type=Path, required=True, help="folder of the servers that wait")


def add_speculation_arguments(parser: argparse.ArgumentParser, required: bool) -> None:
    """Add the flags that make a server speculate; without --drafter it does not."""
    group = parser.add_argument_group("speculation")
    group.add_argument("--drafter", type=Path, required=required, help="folder of the exported drafter")
    group.add_argument("--num-steps", type=int, default=0, required=required, help="draft steps")
    group.add_argument("--eagle-topk", type=int, default=0, required=required, help="branches per step")
    group.add_argument("--num-draft-tokens", type=int, default=0, required=required, help="tokens verified at once")


def speculation_flags(arguments: argparse.Namespace) -> list[str]:
    """Return SGLang's flags for `add_speculation_arguments`, none without a drafter."""
    if not arguments.drafter:
        return []
    return [
        "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", str(arguments.drafter),
        "--speculative-num-steps", str(arguments.num_steps),
        "--speculative-eagle-topk", str(arguments.eagle_topk),
        "--speculative-num-draft-tokens", str(arguments.num_draft_tokens),
    ]  # fmt: skip


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the server settings among parsed arguments."""
    return Settings(**{name: getattr(arguments, name) for name in Settings.__dataclass_fields__})


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def require_free(port: int) -> None:
    """Raise ServerError where someone already listens on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerError(
                f"port {port} on {HOST} is taken ({error.strerror}); end the program that holds it, "
                "or set server.port to 0 in config.yaml to take any free port"
            ) from None


def _die_with_parent() -> None:
    # Runs in the child between fork and exec. Without it a SIGKILL of this process leaves a server behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_on_sigterm() -> None:
    # A raised SystemExit runs the `with` blocks, so the server goes down with the job that Snakemake ends.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@dataclass(frozen=True)
class Reply:
    """One answer: HTTP status, parsed body, seconds from sending to the last byte."""

    status: int
    body: Any
    latency_s: float
    first_token_s: float | None = None


class Server:
    """One SGLang process; use as a context manager."""

    def __init__(
        self,
        settings: Settings,
        flags: Iterable[str],
        environment: dict[str, str],
        log_path: Path,
        command: tuple[str, ...] = COMMAND,
        run: str = "",
        folder: Path | None = None,
        gpu_wait_s: float = gpus.WAIT_S,
        is_unwanted: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Describe a server; `run` is its name after "aerie-", `is_unwanted` is asked while it starts."""
        self.settings = settings
        self.run = run or secrets.token_hex(8)
        self.name = f"aerie-{self.run}"
        self.folder = folder  # the private one of a server that has some
        self.log_path = Path(log_path)
        self._gpu_wait_s = gpu_wait_s
        self._is_unwanted = is_unwanted
        self._devices: gpus.Devices | None = None
        self._held = contextlib.ExitStack()
        self._flags = [*settings.flags(), *flags]
        self._environment = environment
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def add_environment(self, variables: dict[str, str]) -> None:
        """Set variables of the server's process that depend on its name; call before it starts."""
        self._environment = {**self._environment, **variables}

    # ---- life

    def __enter__(self) -> Server:
        _exit_on_sigterm()
        try:
            if self.settings.device == "cuda":
                self._devices = self._held.enter_context(gpus.slots(self.settings.tensor_parallel, self._gpu_wait_s))
                say(f"GPU {', '.join(self._devices.names)} for this server")
            for attempt in range(1, START_TRIES + 1):
                self._start()
                if self._wait_until_up() or attempt == START_TRIES:
                    break
                say("the port was taken by another program meanwhile: trying another one")
            if not self.url:
                raise ServerError(self._obituary("the server found its port taken each time"))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        port = self.settings.port or free_port()
        require_free(port)
        self._base_url = f"http://{HOST}:{port}"
        command = [
            *self._command, *self._flags,
            "--host", HOST, "--port", str(port), "--served-model-name", self.name,
        ]  # fmt: skip
        devices = self._devices.environment if self._devices else {}
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(self.log_path, "ab")  # noqa: SIM115 (lives as long as the server)
        self._log.write(f"$ {' '.join(command)}\n".encode())
        self._log.flush()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.settings.environment(), **devices, **self._environment},
            pass_fds=self._devices.locks if self._devices else (),  # a server that outlives us keeps its GPUs
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    def _wait_until_up(self) -> bool:
        """Return True once the server answers under its own name, False where its port was taken."""
        began = time.monotonic()
        deadline = began + self.settings.start_timeout_s
        next_word = began + NEXT_WORD_S
        say(f"starting SGLang on {self._base_url} (log: {self.log_path})")
        while True:
            if not self.alive():
                if self.settings.port == 0 and "address already in use" in self.log_tail().lower():
                    self._end_process()
                    return False
                raise ServerError(self._obituary("the server ended before it was up"))
            if self._answers_under_its_name():
                self.url = self._base_url
                say(f"server up after {time.monotonic() - began:.0f} s")
                return True
            if time.monotonic() > deadline:
                raise ServerError(
                    self._obituary(
                        f"the server was not up after {self.settings.start_timeout_s:,.0f} s (server.start_timeout_s)"
                    )
                )
            if time.monotonic() > next_word:
                say(f"still starting, {time.monotonic() - began:.0f} s of at most "
                    f"{self.settings.start_timeout_s:,.0f} s")  # fmt: skip
                next_word += NEXT_WORD_S
            if reason := self._is_unwanted():
                raise ServerError(self._obituary(f"the start of the server was given up: {reason}"))
            time.sleep(POLL_S)

    def _answers_under_its_name(self) -> bool:
        # This needs no forward pass: it answers while the scheduler waits for a slow disk. /model_info has no name
        # before 0.5.18.
        try:
            reply = httpx.get(f"{self._base_url}/v1/models", timeout=ANSWER_S)
        except httpx.TransportError:
            return False
        if reply.status_code != 200:
            return False
        found = reply.json()["data"][0]["id"]
        if found != self.name:
            raise ServerError(
                f"{self._base_url} is answered by another server (it calls itself {found!r}, expected {self.name!r}); "
                "set server.port to 0 in config.yaml"
            )
        return True

    @property
    def pid(self) -> int:
        """Return the id of the server process, which leads its group."""
        if self._process is None:
            raise ServerError(f"{self.name} does not run")
        return self._process.pid

    def alive(self) -> bool:
        """Return whether the server process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End the server, then what is left of its process group; free its GPUs. Does nothing the second time."""
        self._end_process()
        self._held.close()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # SIGTERM to the leader alone: sent to all, SGLang takes the end of its children for a crash.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._log.close()

    def log_tail(self) -> str:
        """Return the last lines of the server's log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _obituary(self, what: str) -> str:
        code = None if self._process is None else self._process.poll()
        ending = "" if code is None else f" (exit status {code})"
        return f"{what}{ending}; the log {self.log_path} ends with:\n{self.log_tail()}"

    # ---- questions

    def get(self, path: str) -> Any:
        """Return the JSON document behind `path`."""
        reply = httpx.get(f"{self.url}{path}", timeout=60.0)
        reply.raise_for_status()
        return reply.json()

    def ask_all(
        self,
        requests: Iterable[tuple[Any, dict[str, Any]]],
        concurrency: int,
        on_reply: Callable[[Any, Reply], None],
        stream: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """POST each payload to /generate, at most `concurrency` at once, and hand over each answer.

        `requests` yields (key, payload); `on_reply(key, reply)` is called in the order of arrival. With
        `stream` the answer is streamed, and `reply.first_token_s` is the time to its first event.
        Raises ServerError as soon as the server dies; answers that arrived before it are kept.
        """
        asyncio.run(self._ask_all(requests, concurrency, on_reply, stream, check))

    async def _ask_all(
        self,
        requests: Iterable[tuple[Any, dict[str, Any]]],
        concurrency: int,
        on_reply: Callable[[Any, Reply], None],
        stream: bool,
        check: Callable[[], None],
    ) -> None:
        pending = iter(requests)
        # Shorter than the server's 5 s: a connection must not be taken up while the server closes it.
        limits = httpx.Limits(max_connections=concurrency, keepalive_expiry=2.0)
        async with httpx.AsyncClient(base_url=self.url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client:

            async def work() -> None:
                for key, payload in pending:  # one iterator shared by all workers
                    on_reply(key, await _post(client, payload, stream))

            workers = [asyncio.create_task(work()) for _ in range(concurrency)]
            watch = asyncio.create_task(self._until_dead(check))
            everything = asyncio.gather(*workers)
            try:
                await asyncio.wait({everything, watch}, return_when=asyncio.FIRST_COMPLETED)
                if everything.done():
                    await everything
                else:
                    await watch  # raises what `check` raised
                    raise ServerError(self._obituary("the server died while it answered"))
            except httpx.TransportError as error:
                # A dying server closes its connections a moment before its process can be seen to be gone.
                await asyncio.wait({watch}, timeout=STOP_S)
                what = f"the connection to the server broke ({type(error).__name__}: {error})"
                raise ServerError(self._obituary(what)) from error
            finally:
                for task in (*workers, watch):
                    task.cancel()
                await asyncio.gather(*workers, watch, return_exceptions=True)

    async def _until_dead(self, check: Callable[[], None]) -> None:
        while self.alive():
            check()
            await asyncio.sleep(POLL_S)


async def _post(client: httpx.AsyncClient, payload: dict[str, Any], stream: bool) -> Reply:
    began = time.perf_counter()
    if not stream:
        response = await client.post("/generate", json=payload)
        return Reply(response.status_code, response.json(), time.perf_counter() - began)
    first_token_s, last = None, None
    async with client.stream("POST", "/generate", json={**payload, "stream": True}) as response:
        if response.status_code != 200:
            await response.aread()
            return Reply(response.status_code, response.json(), time.perf_counter() - began)
        async for line in response.aiter_lines():
            if line.startswith("data:") and line != "data: [DONE]":
                first_token_s = first_token_s or time.perf_counter() - began
                last = line
    body = None if last is None else json.loads(last.removeprefix("data:"))
    return Reply(200, body, time.perf_counter() - began, first_token_s)


# ---- a server between jobs


class _Kept(Server):
    """A server that belongs to a keeper; this process has the lease of it."""

    def __init__(self, lease: warm.Lease, settings: Settings) -> None:
        task, state = lease.task(), lease.state()
        super().__init__(settings, [], {}, Path(task["log_path"]), run=lease.run, folder=lease.order_folder)
        self.url = self._base_url = state["url"]
        self._server = state["process"]

    def alive(self) -> bool:
        return warm.is_alive(self._server)

    def answers(self) -> bool:
        """Return whether the server is the one it should be and answers."""
        try:
            return self.alive() and self._answers_under_its_name()
        except ServerError:
            return False  # its port is another server's: ours is gone


@contextlib.contextmanager
def borrow(
    settings: Settings,
    flags: Iterable[str],
    environment_of: Callable[[str, Path], dict[str, str]],
    log_path: Path,
    folder: Path,
    warm_idle_s: float,
    warm_folder: Path,
    same: Any = None,
    command: tuple[str, ...] = COMMAND,
) -> Iterator[Server]:
    """Yield a server for the length of the block: one of this job's own, or one that is kept for the next job.

    `environment_of(run, folder)` is called where a server is really started: it writes what the server reads into
    the private folder and returns its variables. With `warm_idle_s` 0 that folder is `folder`, and the server ends
    with the block. Otherwise the server is one of those in `warm_folder`; it is handed on where the block ended
    well, and ended by its keeper where it did not, where it died, after `warm_idle_s` seconds without a job, and
    with the workflow. `same` is whatever else must be equal for two jobs to share a server.

    Raises ServerError where the server does not start, gpus.GpuError where there is no GPU for it.
    """
    flags, folder, warm_folder = list(flags), Path(folder), Path(warm_folder).resolve()
    obstacle = warm.obstacle(warm_folder) if warm_idle_s else None
    if obstacle:
        say(f"no server is kept for the next job: {obstacle}")
    if obstacle or not warm_idle_s:
        engine = Server(settings, flags, {}, log_path, command, folder=folder)
        folder.mkdir(parents=True, exist_ok=True)
        engine.add_environment(environment_of(engine.run, folder))
        with engine:
            yield engine
        return

    _exit_on_sigterm()  # so that the lease is ended by the blocks below
    kind = warm.identity({"settings": asdict(settings), "flags": flags, "command": list(command), "same": same})
    task = {
        "settings": asdict(settings), "flags": flags, "command": list(command), "idle_s": warm_idle_s,
        "log_path": str(Path(log_path).absolute()),
    }  # fmt: skip
    lease = _lease(settings, warm_folder, kind, task, environment_of)
    well = False
    try:
        kept = _Kept(lease, settings)
        if kept.log_path != Path(log_path).absolute():
            say(f"using the server {kept.name} that an earlier job left running (log: {kept.log_path})")
        yield kept
        well = kept.alive()
    finally:
        lease.end(well)


def _lease(
    settings: Settings,
    warm_folder: Path,
    kind: str,
    task: dict[str, Any],
    environment_of: Callable[[str, Path], dict[str, str]],
) -> warm.Lease:
    """Return the lease of a server that answers: a free one, a new one where there is room, whichever is there first."""
    began = time.monotonic()
    next_word = began + NEXT_WORD_S
    while True:
        lease = warm.free_lease(warm_folder, kind)
        if lease is not None:
            if _Kept(lease, settings).answers():
                return lease
            say("a kept server does not answer: it is ended")
            lease.end(well=False)
            continue
        if settings.device != "cuda" or gpus.are_free(settings.tensor_parallel):
            lease = warm.new_lease(warm_folder, kind, secrets.token_hex(8))
            try:
                if _start_kept(lease, task, environment_of):
                    return lease
            except BaseException:
                lease.end(well=False)
                raise
            lease.end(well=False)
        now = time.monotonic()
        if now - began > gpus.WAIT_S:
            raise ServerError(
                f"neither a kept server in {warm_folder} nor {settings.tensor_parallel} GPUs became free within "
                f"{gpus.WAIT_S:,.0f} s; set `resources: gpu:` in the profile to the GPUs of this node"
            )
        if now > next_word:
            say(f"waiting for a kept server or {settings.tensor_parallel} GPUs, {now - began:.0f} s")
            next_word = now + NEXT_WORD_S
        time.sleep(POLL_S)


def _start_kept(lease: warm.Lease, task: dict[str, Any], environment_of: Callable[[str, Path], dict[str, str]]) -> bool:
    """Start a server and its keeper; return False where another job took the GPUs meanwhile."""
    environment = {**warm.matters(os.environ), **environment_of(lease.run, lease.order_folder)}
    say(f"starting a server that is kept between jobs (log: {task['log_path']})")
    began = time.monotonic()
    next_word = began + NEXT_WORD_S
    lease.start({**task, "environment": environment})
    while not (state := lease.state()):
        now = time.monotonic()
        # The keeper sees to the time limit of the server itself; this one is for a keeper that never starts.
        if now - began > 2 * task["settings"]["start_timeout_s"] + NEXT_WORD_S:
            raise ServerError(f"{lease.folder}: no server and no word of its keeper:\n{lease.keeper_log()}")
        if now > next_word:
            say(f"still starting, {now - began:.0f} s")
            next_word = now + NEXT_WORD_S
        time.sleep(POLL_S)
    if state["state"] in ("failed", "ended"):
        raise ServerError(state["error"])
    if state["state"] == "up":
        say(f"server up after {time.monotonic() - began:.0f} s")
    return state["state"] == "up"


def keep(folder: str, workflow: str) -> None:
    """Own one server between jobs: the main function of a keeper process (`aerie.warm`)."""
    keeper = warm.Keeper(Path(folder), workflow)
    task = keeper.task
    os.environ.update(task["environment"])
    engine = Server(
        Settings(**task["settings"]), task["flags"], {}, Path(task["log_path"]), tuple(task["command"]),
        run=keeper.folder.name, gpu_wait_s=KEEPER_GPU_WAIT_S, is_unwanted=keeper.is_unwanted,
    )  # fmt: skip
    try:
        with engine:
            keeper.announce(state="up", url=engine.url, process=warm.process_name(engine.pid))
            say(f"ending the server: {keeper.watch(engine.alive)}")
    except gpus.GpusTakenError as error:
        keeper.announce(state="busy", error=str(error))
    except (ServerError, gpus.GpuError) as error:
        keeper.announce(state="failed", error=str(error))
    keeper.leave()
