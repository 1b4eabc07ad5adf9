"""Start, ask and stop one SGLang server.

    with Server(settings, flags, environment, log_path) as server:
        server.ask_all(requests, concurrency=8, on_reply=...)

The server runs in a process group of its own on a free port of the loopback interface, carries a name
made for this start (so a foreign server on the same port is never taken for it), and is gone when the
block ends, whatever ends it: SIGTERM for it, SIGKILL for what is left of its group; and the kernel kills it when this
process is killed itself.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from aerie.progress import say

HOST = "127.0.0.1"
POLL_S = 0.5
STOP_S = 15.0  # SGLang needs about 6 s from SIGTERM to exit on two cores
LOG_TAIL_LINES = 25
START_TRIES = 3  # only for a port that was taken between the choice and the server's bind
PREFILL_TOKENS = 16384  # SGLang's own default for one forward pass; a longer context raises it
PR_SET_PDEATHSIG = 1  # linux/prctl.h
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
        command: tuple[str, ...] = (sys.executable, "-m", "sglang.launch_server"),
    ) -> None:
        self.settings = settings
        self.name = f"aerie-{secrets.token_hex(8)}"
        self.log_path = Path(log_path)
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
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(self.log_path, "ab")  # noqa: SIM115 (lives as long as the server)
        self._log.write(f"$ {' '.join(command)}\n".encode())
        self._log.flush()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.settings.environment(), **self._environment},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    def _wait_until_up(self) -> bool:
        """Return True once the server answers under its own name, False where its port was taken."""
        began = time.monotonic()
        deadline = began + self.settings.start_timeout_s
        next_word = began + 15.0
        say(f"starting SGLang on {self._base_url} (log: {self.log_path})")
        while True:
            if not self.alive():
                if self.settings.port == 0 and "address already in use" in self.log_tail().lower():
                    self.stop()
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
                next_word += 15.0
            time.sleep(POLL_S)

    def _answers_under_its_name(self) -> bool:
        # /model_info needs no forward pass: it answers while the scheduler waits for a slow disk.
        try:
            reply = httpx.get(f"{self._base_url}/model_info", timeout=5.0)
        except httpx.TransportError:
            return False
        if reply.status_code != 200:
            return False
        found = reply.json().get("served_model_name")
        if found != self.name:
            raise ServerError(
                f"{self._base_url} is answered by another server (it calls itself {found!r}, expected {self.name!r}); "
                "set server.port to 0 in config.yaml"
            )
        return True

    def alive(self) -> bool:
        """Return whether the server process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End the server, then what is left of its process group. Does nothing the second time."""
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
    ) -> None:
        """POST each payload to /generate, at most `concurrency` at once, and hand over each answer.

        `requests` yields (key, payload); `on_reply(key, reply)` is called in the order of arrival. With
        `stream` the answer is streamed, and `reply.first_token_s` is the time to its first event.
        Raises ServerError as soon as the server dies; answers that arrived before it are kept.
        """
        asyncio.run(self._ask_all(requests, concurrency, on_reply, stream))

    async def _ask_all(
        self,
        requests: Iterable[tuple[Any, dict[str, Any]]],
        concurrency: int,
        on_reply: Callable[[Any, Reply], None],
        stream: bool,
    ) -> None:
        pending = iter(requests)
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(base_url=self.url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client:

            async def work() -> None:
                for key, payload in pending:  # one iterator shared by all workers
                    on_reply(key, await _post(client, payload, stream))

            workers = [asyncio.create_task(work()) for _ in range(concurrency)]
            watch = asyncio.create_task(self._until_dead())
            everything = asyncio.gather(*workers)
            try:
                await asyncio.wait({everything, watch}, return_when=asyncio.FIRST_COMPLETED)
                if everything.done():
                    await everything
                else:
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

    async def _until_dead(self) -> None:
        while self.alive():
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
