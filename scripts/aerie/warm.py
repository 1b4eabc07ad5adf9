"""Keep one server between the jobs of a workflow on one node: results/<run>/runs/warm/<16 hex digits>/.

`aerie.server.borrow` is the only user. Per server one folder:

    identity      digest of all that makes two servers the same, and the machine; a job takes only its own kind
    lease.lock    locked by the job that uses the server: one at a time
    lent          there from the moment a job takes the server until it gives it back well
    keeper.lock   locked by the keeper, the process that owns the server, as long as it lives
    task.json     what the keeper starts; state.json: what became of it; keeper.log: what it said
    order/        the server's private folder, for whoever writes its plugin's order

A job takes a free server of its kind, else starts another one if there is room, else waits for whichever comes first.
Only a server whose last job gave it back is lent again: after an error, or a killed job, its keeper ends it. The
keeper also ends it after an idle time, and as soon as the workflow's main process (AERIE_WORKFLOW) is gone.

Inside an Apptainer container a keeper would not survive its job: the image is mounted for the length of `apptainer
exec`. There the starter, a process on the host that the workflow starts with its first job, runs a container for each
keeper:

    python -m aerie.warm --folder results/demo/runs/warm --workflow "$AERIE_WORKFLOW" -- apptainer exec --home "$PWD"
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aerie import artifact

POLL_S = 0.5
STARTER_S = 30.0  # it needs a second
REMOVAL_S = 30.0  # a job that still looks at a server that ended gets so long before the folder goes
WORKFLOW = "AERIE_WORKFLOW"
# Variables that change what a server computes, or where; never one that looks like a credential.
MATTERS = re.compile(
    r"(AERIE|CUDA|FLASHINFER|GLOO|HF|KMP|MKL|NCCL|NVIDIA|OMP|PYTORCH|SGL|SGLANG|TORCH\w*|TRANSFORMERS|TRITON|XDG_CACHE)_\w+"
)
CREDENTIAL = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
# `python -m` would need PYTHONPATH, which the image unsets.
KEEPER = "import sys; sys.path.insert(0, sys.argv[1]); from aerie import server; server.keep(*sys.argv[2:])"
# The keeper's parent is a shell that notes its end. Nothing of the job's is inherited: a `tee` at the end of its
# pipe would wait for the keeper.
DETACH = '( "$@"; touch "$0/ended" ) </dev/null >>"$0/keeper.log" 2>&1 &'


class WarmError(RuntimeError):
    """A warm server cannot be had the way it was asked for."""


# ---- processes


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine() -> str:
    """Return what tells this machine, since its last boot, from every other."""
    return f"{socket.gethostname()}/{_boot()}"


def process_name(pid: int) -> str:
    """Return the name of a running process that no later process will ever have: pid, start time, boot."""
    fields = _stat(pid)
    return f"{pid}:{fields[19] if fields else 'gone'}:{_boot()}"


def is_alive(process: str) -> bool:
    """Return whether the process that `process_name` named runs on this machine."""
    pid, start, boot = process.split(":")
    fields = _stat(int(pid))
    return bool(fields) and fields[0] not in "ZX" and fields[19] == start and boot == _boot()


def has_ended(workflow: str) -> bool:
    """Return whether the workflow of this name has ended; False for "", a job that was started by hand."""
    return bool(workflow) and not is_alive(workflow)


# ---- locks


def _lock(path: Path, wait: bool = False, shared: bool = False) -> int | None:
    """Return the locked descriptor of a file, None where another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        if error.errno not in NO_FLOCK:
            raise
        raise WarmError(
            f"{path}: this file system cannot lock files ({error.strerror}), so servers cannot be kept; set "
            "server.warm_idle_s to 0 in config.yaml, or results_dir to another disk"
        ) from error
    return descriptor


def is_locked(path: Path) -> bool:
    """Return whether some process has a file locked; two that ask at once do not see each other."""
    descriptor = _lock(path, shared=True)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


@contextlib.contextmanager
def _door(folder: Path) -> Iterator[None]:
    """Let one process at a time look at and change the leases; whoever is in leaves in the blink of an eye."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(folder / "door.lock", wait=True)
    assert descriptor is not None
    try:
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, value: Any) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.new")
    temporary.write_text(artifact.canonical_json(value))
    temporary.rename(path)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


# ---- the job's side


def matters(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a kept server shares with the job that starts it."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if MATTERS.fullmatch(name) and not CREDENTIAL.search(name)
    }


def image() -> str:
    """Return the path of the image this process runs in, empty outside a container."""
    return os.environ.get("APPTAINER_CONTAINER", "")


def identity(parts: Mapping[str, Any]) -> str:
    """Return the digest of all that makes two servers the same: `parts`, environment, image and machine."""
    file = Path(image() or "/nowhere")
    found = file.stat() if file.is_file() else None
    sif = [str(file), found.st_ino, found.st_size, found.st_mtime_ns] if found else image()
    everything = {**parts, "environment": matters(os.environ), "image": sif, "machine": machine()}
    return artifact.digest_of(everything)


def obstacle(folder: Path) -> str | None:
    """Return why no server can be kept for this job, None where one can."""
    if has_ended(os.environ.get(WORKFLOW, "")):
        return f"{WORKFLOW} names process {os.environ[WORKFLOW].split(':')[0]}, which does not run on this machine"
    starter = folder / "starter.lock"
    if image() and not (starter.is_file() and is_locked(starter)):
        return f"{starter}: no workflow holds it, and a server that is started in a container ends with the job"
    return None


class Lease:
    """The right of one job to one server; `lock` is held by this process until the lease ends."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder, self._lock = folder, lock
        self.run = folder.name
        self.order_folder = folder / "order"

    def end(self, well: bool) -> None:
        """End the lease. Only a server given back `well` is lent again; its keeper ends any other."""
        with _door(self.folder.parent):
            if well:
                (self.folder / "lent").unlink(missing_ok=True)
            os.close(self._lock)

    def start(self, task: dict[str, Any]) -> None:
        """Start the keeper of this lease's server: here, or through the starter where this is a container."""
        _write(self.folder / "task.json", task)
        if image():
            (self.folder / "image").write_text(image())
            (self.folder / "image").rename(self.folder / "wanted")
        else:
            _detach(self.folder, [], os.environ.get(WORKFLOW, ""))

    def state(self) -> dict[str, Any]:
        """Return what the keeper said last: {"state": "up" | "busy" | "failed" | "ended", ...}, {} before that."""
        state = _read(self.folder / "state.json")
        if not state and (self.folder / "ended").exists():
            return {"state": "failed", "error": f"the keeper of the server did not start:\n{self.keeper_log()}"}
        return state

    def task(self) -> dict[str, Any]:
        """Return what the keeper was asked to start."""
        return _read(self.folder / "task.json")

    def keeper_log(self) -> str:
        """Return the end of what the keeper said."""
        path = self.folder / "keeper.log"
        return path.read_text(errors="replace")[-2000:] if path.is_file() else "(it said nothing)"


def new_lease(folder: Path, identity: str, run: str) -> Lease:
    """Return the lease of a server that is yet to be started."""
    with _door(folder):
        own = folder / run
        (own / "order").mkdir(parents=True)
        _write(own / "identity", {"identity": identity, "machine": machine()})
        (own / "lent").touch()
        lock = _lock(own / "lease.lock")
        assert lock is not None
        return Lease(own, lock)


def free_lease(folder: Path, identity: str) -> Lease | None:
    """Return the lease of a running server of this kind that no job uses, None where there is none.

    Folders whose keeper is gone and that no job looks at any more are removed on the way.
    """
    with _door(folder):
        for own in sorted(path.parent for path in folder.glob("*/identity")):
            kind = _read(own / "identity")
            if kind.get("machine") != machine():
                continue
            lock = _lock(own / "lease.lock")
            if lock is None:
                continue
            keeper_lives = is_locked(own / "keeper.lock")
            is_up = _read(own / "state.json").get("state") == "up"
            if keeper_lives and is_up and kind["identity"] == identity and not (own / "lent").exists():
                (own / "lent").touch()
                return Lease(own, lock)
            if not keeper_lives:
                # Whatever the shell of a killed keeper writes meanwhile is removed by the next job.
                shutil.rmtree(own, ignore_errors=True)
            os.close(lock)
    return None


def _detach(folder: Path, prefix: list[str], workflow: str) -> None:
    """Run the keeper of a server as the leader of a process group that outlives this process; `prefix` runs its container."""
    python = "python" if prefix else sys.executable  # the image's own
    command = [*prefix, python, "-c", KEEPER, str(Path(__file__).resolve().parents[1]), str(folder), workflow]
    subprocess.run(["/bin/sh", "-c", DETACH, str(folder), *command], start_new_session=True, check=True)


# ---- the keeper's side


class Keeper:
    """The keeper's view of its server's folder."""

    def __init__(self, folder: Path, workflow: str) -> None:
        self.folder, self._workflow = folder, workflow
        self.task = _read(folder / "task.json")
        self._lock = _lock(folder / "keeper.lock", wait=True)

    def announce(self, **state: Any) -> None:
        """Tell the job what became of the server; what was said before and still holds stays."""
        _write(self.folder / "state.json", {**_read(self.folder / "state.json"), **state})

    def is_unwanted(self) -> str | None:
        """Return why a server that is still starting is wanted by nobody any more, None where it is wanted."""
        if has_ended(self._workflow):
            return "the workflow has ended"
        with _door(self.folder.parent):
            return None if is_locked(self.folder / "lease.lock") else "the job that asked for it is gone"

    def watch(self, alive: Callable[[], bool]) -> str:
        """Return why the server must end, as soon as it must; from then on no job gets it."""
        idle_since: float | None = None
        while True:
            reason = None
            if not alive():
                reason = "the server died"
            elif has_ended(self._workflow):
                reason = "the workflow has ended"
            with _door(self.folder.parent):
                if is_locked(self.folder / "lease.lock"):
                    idle_since = None
                elif (self.folder / "lent").exists():
                    reason = reason or "the job that used it was killed or failed"
                else:
                    idle_since = idle_since or time.monotonic()
                    if time.monotonic() - idle_since >= self.task["idle_s"]:
                        reason = reason or f"no job for {self.task['idle_s']:g} s (server.warm_idle_s)"
                if reason:
                    self.announce(state="ended", error=reason)
                    return reason
            time.sleep(POLL_S)

    def leave(self) -> None:
        """Remove the folder once no job looks at it any more."""
        deadline = time.monotonic() + REMOVAL_S
        while time.monotonic() < deadline:
            with _door(self.folder.parent):
                if not is_locked(self.folder / "lease.lock"):
                    shutil.rmtree(self.folder)
                    return
            time.sleep(POLL_S)


# ---- the starter: on the host, one per workflow


def start_starter(folder: Path, prefix: list[str]) -> None:
    """Start the starter of this workflow and wait until it is there; called by the main process."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "aerie.warm", "--folder", str(folder), "--workflow", os.environ[WORKFLOW], "--", *prefix
    ]  # fmt: skip
    with open(folder / "starter.log", "ab") as log:
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, check=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        )  # fmt: skip
    deadline = time.monotonic() + STARTER_S
    while not is_locked(folder / "starter.lock"):
        if time.monotonic() > deadline:
            raise WarmError(f"{folder / 'starter.log'}: the starter of kept servers is not there after {STARTER_S:g} s")
        time.sleep(0.1)


def serve(folder: Path, workflow: str, prefix: list[str]) -> None:
    """Run a container with a keeper for each server that a job asks for, until the workflow is gone."""
    lock = _lock(folder / "starter.lock", wait=True)  # a killed workflow's starter may need a moment
    assert lock is not None
    while is_alive(workflow):
        for wanted in folder.glob("*/wanted"):
            sif = wanted.read_text()
            wanted.unlink()
            _detach(wanted.parent, [*prefix, sif], workflow)
        time.sleep(POLL_S)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Start a container for each server that a job asks to keep.")
    parser.add_argument("--folder", type=Path, required=True, help="the folder of the kept servers")
    parser.add_argument("--workflow", required=True, help="pid:start:boot of the workflow's main process")
    parser.add_argument("prefix", nargs="+", help="what runs a container: apptainer exec and its options")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    serve(arguments.folder.resolve(), arguments.workflow, arguments.prefix)


if __name__ == "__main__":
    main()
