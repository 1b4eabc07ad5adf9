"""A stand-in for `python -m sglang.launch_server` that hosts the real capture plugin: no SGLang, no model.

    python tests/bench_server.py serve --model-path results/target/model --host 127.0.0.1 --port 30000 ...
    python tests/bench_server.py capture --tokens ...     scripts/capture_hidden.py with that server
    python tests/bench_server.py jobs                     both, forked from one process; see `run_jobs`

PYTHONPATH has to name scripts and containers/capture, for the lanes too.

Everything of containers/capture is real: its hooks are registered and called as SGLang does it, the lanes are
processes. The states are a function of a token, its position and the layer, so a test knows every row.

What goes wrong is asked for in the environment, BENCH as JSON: see `Faults`.

Legend: N rows of a forward, K captured layers, D target width, V vocabulary.
"""

import asyncio
import faulthandler
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

import aerie_capture
import capture_hidden
from aerie import capture, server
from aerie_capture import hooks, protocol

TOKENS = 64  # rows of the table of states, at least V
LAYERS = 16
NOISE = 1e-3
VERSION = "0.5.20"
COMMAND = (sys.executable, str(Path(__file__).resolve()), "serve")


@dataclass(frozen=True)
class Faults:
    """What a server does wrong. Tokens are ids: a prompt that has them meets the fault."""

    record: str = ""  # file that gets a line {"rids": [...]} for each forward
    nan: tuple = ()  # (token, block): 0 to K-1 for the layers, K for the final state
    inf: tuple = ()
    abort: int | None = None  # HTTP 200 with the finish reason "abort"
    forward_ms: float = 0.0  # how long a forward takes
    kill_after: int = 0  # SIGKILL of itself at the end of the forward with the n-th request
    noise: bool = False  # on every forward of a prompt but its first
    version: str = VERSION


@functools.cache
def table(width):
    """States of unit scale [LAYERS, TOKENS, D], and what a position adds to them [4096, D]."""
    generator = torch.Generator().manual_seed(11)
    states = torch.randn(LAYERS, TOKENS, width, generator=generator)
    return states, 0.1 * torch.randn(4096, width, generator=generator)


def states_of(prompts, layers, width):
    """The states of prompts [N, K+1, D] in float32: the layers, then the final one (that of layer 0, never asked)."""
    states, wave = table(width)
    ids = torch.tensor([token for prompt in prompts for token in prompt])  # (N,)
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])  # (N,)
    return states[[*layers, 0]][:, ids].transpose(0, 1) + wave[positions, None]  # (N, K+1, D)


# --- what the plugin meets in SGLang ---------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A model as far as the plugin looks into it."""

    def __init__(self, count):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(count))
        self.model.norm = torch.nn.Identity()
        self.model.layers_to_capture = []

    def set_eagle3_layers_to_capture(self, ids):
        self.model.layers_to_capture = [index + 1 for index in ids]


@dataclass
class Batch:
    """The fields of SGLang's ForwardBatch that the plugin reads."""

    rids: list
    extend_seq_lens_cpu: list
    extend_prefix_lens_cpu: list
    input_ids: torch.Tensor
    forward_mode: object


def logits_forward(self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None):
    """LogitsProcessor.forward, of which the plugin needs the arguments."""
    return types.SimpleNamespace(customized_info=None)


def stand_in_modules(version, settings):
    """Put modules named sglang into this process; return the list that the plugin's hooks are registered in."""
    registered = []

    def config_leaf(name):
        if name not in settings:
            raise ValueError(f"{name!r} is not a config leaf")
        return settings[name]

    context = types.SimpleNamespace(config_leaf=config_leaf)
    registry = types.SimpleNamespace(register=lambda target, hook, kind: registered.append((target, hook, kind)))
    contents = {
        "sglang": {},
        "sglang.version": {"__version__": version},
        "sglang.srt": {},
        "sglang.srt.runtime_context": {"get_context": lambda: context},
        "sglang.srt.distributed": {},
        "sglang.srt.distributed.parallel_state": {
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_tensor_model_parallel_world_size": lambda: 1,
        },
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": registry,
            "HookType": types.SimpleNamespace(BEFORE="before", AFTER="after", AROUND="around"),
        },
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return registered


# --- the server ------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """One POST /generate; `deliver(status, body)` answers it."""

    payload: dict
    deliver: object
    ids: list = field(default_factory=list)  # that are run
    reject: tuple = ()  # (status, finish reason) of a request that is run as the prompt [0]


class Engine:
    """The scheduler: a thread that runs whatever has arrived as one forward."""

    def __init__(self, flags, faults):
        self.faults = faults
        self.flags = flags
        config = json.loads(Path(flags["--model-path"], "config.json").read_text())
        self.width, self.context = config["hidden_size"], int(flags["--context-length"])
        self.dtype = getattr(torch, flags["--dtype"])
        self.most = int(flags.get("--prefill-max-requests", flags["--max-running-requests"]))
        with safe_open(Path(flags["--model-path"], "model.safetensors"), framework="pt") as file:
            self.head = file.get_tensor("lm_head.weight").float()  # (V, D)
        settings = {
            "disable_radix_cache": "--disable-radix-cache" in flags,
            "max_prefill_tokens": int(flags["--max-prefill-tokens"]),
            "chunked_prefill_size": int(flags["--chunked-prefill-size"]),
            "watchdog_timeout": 300.0,
        }
        registered = stand_in_modules(faults.version, settings)
        aerie_capture.activate()
        runner = types.SimpleNamespace(
            model=Model(config["num_hidden_layers"]), is_draft_worker=False, dtype=self.dtype, device="cpu",
            model_config=types.SimpleNamespace(
                hf_text_config=types.SimpleNamespace(
                    num_hidden_layers=config["num_hidden_layers"], hidden_size=self.width
                ),
                context_len=self.context,
            ),
            server_args=types.SimpleNamespace(),
        )  # fmt: skip
        hook = {(target, kind): hook for target, hook, kind in registered}
        hook[hooks.RUNNER_TARGET, "before"](runner)
        hook[hooks.RUNNER_TARGET, "after"](None, runner)
        self.around = hook[hooks.LOGITS_TARGET, "around"]
        self.layers = runner.model.model.layers_to_capture
        self.seen = set()
        self.answered = 0
        self.queue = queue.SimpleQueue()
        threading.Thread(target=self.run, daemon=True).start()

    def submit(self, request):
        ids = request.payload["input_ids"]
        if len(ids) >= self.context:  # as SGLang: refused, and yet run as a prompt of one token
            request.reject = (400, f"Input length ({len(ids)} tokens) exceeds the maximum ({self.context} tokens)")
        elif self.faults.abort in ids:
            request.reject = (200, "aborted by the test")
        request.ids = [0] if request.reject else ids
        self.queue.put(request)

    def run(self):
        try:
            while True:
                batch = [self.queue.get()]
                time.sleep(self.faults.forward_ms / 1000)
                while len(batch) < self.most and not self.queue.empty():
                    batch.append(self.queue.get())
                self.forward(batch)
        except BaseException:  # as in SGLang: a scheduler that fails takes the server with it
            traceback.print_exc()
            os._exit(1)

    def forward(self, requests):
        ids = torch.tensor([token for request in requests for token in request.ids])  # (N,)
        states = states_of([request.ids for request in requests], self.layers, self.width)  # (N, K+1, D)
        if self.faults.noise:
            states += NOISE * torch.tensor([again for request in requests for again in self.repeats(request)])[:, None, None]  # fmt: skip
        for fault, value in ((self.faults.nan, float("nan")), (self.faults.inf, float("inf"))):
            if fault:
                states[ids == fault[0], fault[1], 3] = value
        states = states.to(self.dtype)
        rids = [request.payload["rid"] for request in requests]
        lengths = [len(request.ids) for request in requests]
        batch = Batch(rids, lengths, [0] * len(rids), ids, types.SimpleNamespace(is_extend=lambda: True))
        aux, final = states[:, :-1].flatten(1), states[:, -1]  # (N, K*D), (N, D)
        output = self.around(logits_forward, self, ids, final, None, batch, aux)
        tickets = (output.customized_info or {}).get(protocol.TICKET_KEY, [None] * len(rids))
        lasts = torch.tensor(lengths).cumsum(0) - 1
        logprobs = torch.log_softmax(final[lasts].float() @ self.head.T, -1)  # (requests, V)
        tops = logprobs.topk(requests[0].payload.get("top_logprobs_num", 1))
        if self.faults.record:
            with open(self.faults.record, "a") as file:
                file.write(json.dumps({"rids": rids}) + "\n")
        self.answered += len(requests)
        if self.faults.kill_after and self.answered >= self.faults.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        for number, request in enumerate(requests):
            top = [[value, token, None] for value, token in zip(tops.values[number].tolist(), tops.indices[number].tolist(), strict=True)]  # fmt: skip
            reason = {"type": "length", "length": 1}
            if request.reject:
                reason = {"type": "abort", "message": request.reject[1]}
            meta = {"prompt_tokens": lengths[number], "finish_reason": reason,
                    protocol.TICKET_KEY: [tickets[number]], "output_top_logprobs": [top]}  # fmt: skip
            body = {"text": "", "output_ids": [top[0][1]], "meta_info": meta}
            if request.reject and request.reject[0] != 200:
                body = {"error": {"message": request.reject[1]}}
            request.deliver(request.reject[0] if request.reject else 200, body)

    def repeats(self, request):
        """Whether its prompt has been run before, for each of its tokens."""
        prompt = tuple(request.ids)
        again = prompt in self.seen
        self.seen.add(prompt)
        return [again] * len(prompt)


def split(payload):
    """The requests of a payload: one, or one for each element of `rid` and `input_ids`."""
    if isinstance(payload["rid"], str):
        return [payload]
    pairs = zip(payload["rid"], payload["input_ids"], strict=True)
    return [{**payload, "rid": rid, "input_ids": ids} for rid, ids in pairs]


async def ask(engine, payload):
    """Have one request answered by the scheduler's thread; return (status, body)."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    engine.submit(Request(payload, lambda *reply: loop.call_soon_threadsafe(future.set_result, reply)))
    return await future


async def answer(engine, reader, writer):
    """Serve one connection until the client closes it."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            status, value = 200, {"data": [{"id": engine.flags["--served-model-name"]}]}
            if head[0].startswith("POST /generate"):  # one bad request of several fails them all, as in SGLang
                replies = await asyncio.gather(*(ask(engine, payload) for payload in split(json.loads(body))))
                refused = [reply for reply in replies if reply[0] != 200]
                status, value = refused[0] if refused else (200, [value for _, value in replies])
                if status == 200 and isinstance(json.loads(body)["rid"], str):
                    (value,) = value
            data = json.dumps(value).encode()
            writer.write(f"HTTP/1.1 {status} .\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def serve(words):
    """Serve until SIGTERM, which ends it as abruptly as it ends SGLang: the lanes finish what they have."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    torch.set_num_threads(1)
    flags = dict(zip(words, [*words[1:], ""], strict=True))
    engine = Engine(flags, Faults(**json.loads(os.environ.get("BENCH", "{}"))))

    async def main():
        listening = await asyncio.start_server(
            lambda reader, writer: answer(engine, reader, writer), flags["--host"], int(flags["--port"])
        )
        await listening.serve_forever()

    asyncio.run(main())


# --- jobs ------------------------------------------------------------------------------------------------------------


class Forked:
    """What aerie.server uses of subprocess.Popen, for a server that this process has loaded: torch takes seconds."""

    def __init__(self, command, *, stdin, stdout, stderr, env, pass_fds, start_new_session, preexec_fn):
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            enter(stdout.fileno(), env)
            preexec_fn()
            os.closerange(3, 4096)  # the lock of the chunk among them, as an exec would
            leave(lambda: serve(command[len(COMMAND) :]))

    def poll(self):
        if self.returncode is None and os.waitpid(self.pid, os.WNOHANG) != (0, 0):
            self.returncode = -1
        return self.returncode

    def wait(self, timeout=None):
        deadline = time.monotonic() + (timeout or 60)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("server", timeout)
            time.sleep(0.002)
        return self.returncode

    def terminate(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def enter(log, environment):
    """Behind a fork: a session, an output and an environment of its own."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR1)  # for a test that has waited too long


def leave(work):
    """Do the work of a forked process and end it: nothing of its parent's frames may run."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def capture_chunk(words, forked):
    """scripts/capture_hidden.py with this server; `forked` from this process, or as the program it is."""
    server.borrow = functools.partial(server.borrow, command=COMMAND)
    if forked:
        server.subprocess = types.SimpleNamespace(
            Popen=Forked, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
        )
        server.POLL_S = 0.02
        capture.POLL_S = 0.02
    capture_hidden.main(words)


def run_jobs():
    """Serve orders, a line of JSON each; answer each with a line.

    {"start": words, "log": path, "environment": {...}} → the pid of a forked `capture`
    {"poll": pid} → its exit status, or null while it runs
    """
    torch.set_num_threads(1)
    table(16)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    for line in sys.stdin:
        order = json.loads(line)
        if "poll" in order:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            reply = os.waitstatus_to_exitcode(status) if pid else None
        else:
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            reply = os.fork()
            if reply == 0:
                enter(log, order["environment"])
                leave(functools.partial(capture_chunk, order["start"], forked=True))
            os.close(log)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2:])
    elif sys.argv[1] == "capture":
        capture_chunk(sys.argv[2:], forked=False)
    else:
        run_jobs()
