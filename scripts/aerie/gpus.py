"""Take GPUs of this node for one server, so that no two jobs ever share one.

    with gpus.slots(2) as devices:
        subprocess.Popen(command, env={**os.environ, **devices.environment}, pass_fds=devices.locks)

Snakemake counts GPUs and assigns none. The pool is what CUDA_VISIBLE_DEVICES allows, else every GPU that nvidia-smi
lists. One lock file per GPU lies in a folder of this user and this node; a GPU is taken while anyone has its file
locked. The locks go to the server with `pass_fds`: where a job is killed and its server lives on, its GPUs stay taken.
`count` GPUs are taken all at once or not at all, so two jobs that want two of two never wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aerie.progress import say

WAIT_S = 6 * 3600.0  # a chunk of a large target takes hours, and the next job waits for it
POLL_S = 0.5
NEXT_WORD_S = 60.0
NVIDIA_SMI_S = 120.0  # the first call after a boot wakes every GPU up
NO_MORE = ("-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES: end of the list (CUDA), no GPU at all (Slurm)


class GpuError(RuntimeError):
    """The GPUs that were asked for cannot be had; the message says what to change."""


class GpusTakenError(GpuError):
    """The pool is large enough, but too much of it stayed taken for the time allowed."""


@dataclass(frozen=True)
class Devices:
    """GPUs that are taken: their names, what makes a process see them alone, and the locks it must hold."""

    names: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES spells them
    environment: dict[str, str]
    locks: tuple[int, ...]  # file descriptors, for `pass_fds` of the process that uses the GPUs


def listed_gpus() -> dict[str, str]:
    """Return {index: UUID} of the GPUs of this node, in the order of nvidia-smi; empty without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S)
    except subprocess.TimeoutExpired:
        raise GpuError(f"`{' '.join(command)}` gave no answer in {NVIDIA_SMI_S:.0f} s; a GPU hangs") from None
    if answer.returncode != 0:
        said = (answer.stdout + answer.stderr).strip()
        raise GpuError(f"`{' '.join(command)}` failed with status {answer.returncode}: {said}")
    return dict(re.findall(r"^\s*(\d+)\s*,\s*(\S+)\s*$", answer.stdout, re.MULTILINE))


def pool() -> dict[str, str]:
    """Return {name: key} of the GPUs a job may use, in order.

    A name is what goes into CUDA_VISIBLE_DEVICES; its key is the UUID where nvidia-smi can tell, so that the index
    and the UUID of one GPU are known to be the same.
    """
    listed = listed_gpus()
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return listed
    found: dict[str, str] = {}
    for name in filter(None, (word.strip() for word in allowed.split(","))):
        if name in NO_MORE:
            break
        # CUDA takes the beginning of a UUID for the whole; an id of a MIG instance stands for itself.
        full = [uuid for uuid in listed.values() if uuid.lower().startswith(name.lower())]
        key = listed.get(name) or (full[0] if len(full) == 1 else name)
        if key not in found.values():
            found[name] = key
    return found


def lock_folder() -> Path:
    """Return the folder of the lock files: of this node and this user; create it."""
    folder = Path(tempfile.gettempdir(), f"aerie-gpus-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise GpuError(f"{folder}: belongs to user id {folder.stat().st_uid}, expected {os.getuid()}; set TMPDIR")
    return folder


def _lock_file(folder: Path, key: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9-]', '_', key)}.lock"


def _holder(path: Path) -> str:
    """Say who took a GPU; whoever holds its lock wrote it there."""
    pid, _, command = path.read_text(errors="replace").strip().partition(" ")
    if pid and not Path("/proc", pid).exists():
        return f"a process that pid {pid} ({command}) left behind; find it with: fuser {path}"
    return f"pid {pid or '?'} ({command or 'just starting'})"


def _try(folder: Path, keys: dict[str, str], count: int) -> dict[str, int]:
    """Return {name: lock} of `count` free GPUs, or of none where fewer are free."""
    taken: dict[str, int] = {}
    with open(folder / "turn.lock", "a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # for the blink of one try: a GPU is never refused for another's failed try
        for name, key in keys.items():
            if len(taken) == count:
                break
            lock = os.open(_lock_file(folder, key), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            else:
                taken[name] = lock
        if len(taken) < count:
            _release(taken)
            return {}
    for lock in taken.values():
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {' '.join([Path(sys.executable).name, *sys.argv])[:200]}\n".encode(), 0)
    return taken


def _release(taken: dict[str, int]) -> None:
    # Closed, never unlocked: an unlock would also take the lock from the server that got it by `pass_fds`.
    for lock in taken.values():
        os.close(lock)


def _taken_text(folder: Path, keys: dict[str, str]) -> str:
    lines = []
    for name, key in keys.items():
        with open(_lock_file(folder, key), "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                lines.append(f"  GPU {name}: taken by {_holder(_lock_file(folder, key))}")
            else:
                lines.append(f"  GPU {name}: free")
    return "\n".join(lines)


def require(count: int) -> dict[str, str]:
    """Return the pool; raise GpuError where it has fewer than `count` GPUs."""
    keys = pool()
    if count > len(keys):
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
        origin = "nvidia-smi" if allowed is None else f"CUDA_VISIBLE_DEVICES={allowed!r}"
        missing = "; there is no nvidia-smi on PATH" if allowed is None and not shutil.which("nvidia-smi") else ""
        raise GpuError(
            f"{count} GPUs are asked for (server.tensor_parallel), this job's pool has {len(keys)} "
            f"({', '.join(keys) or 'none'}; from {origin}{missing}); lower server.tensor_parallel in config.yaml, "
            "or give the job more GPUs"
        )
    return keys


def are_free(count: int) -> bool:
    """Return whether `count` GPUs are free at this moment; takes none."""
    taken = _try(lock_folder(), require(count), count)
    _release(taken)
    return len(taken) == count


@contextlib.contextmanager
def slots(count: int, wait_s: float = WAIT_S) -> Iterator[Devices]:
    """Take `count` free GPUs of this node for the length of the block; wait for them at most `wait_s` seconds.

    Raises GpuError at once where the pool is smaller, GpusTakenError where too few became free in time.
    """
    keys, folder = require(count), lock_folder()
    began = time.monotonic()
    next_word = began + min(wait_s, 2.0)
    while not (taken := _try(folder, keys, count)):
        now = time.monotonic()
        if now - began > wait_s:
            raise GpusTakenError(
                f"{count} of {len(keys)} GPUs did not become free within {wait_s:,.0f} s:\n{_taken_text(folder, keys)}\n"
                f"end what should not run, or set `resources: gpu: {len(keys)}` in the profile, so that no more jobs "
                "start than there are GPUs"
            )
        if now > next_word:
            say(f"waiting for {count} of {len(keys)} GPUs:\n{_taken_text(folder, keys)}")
            next_word = now + NEXT_WORD_S
        time.sleep(POLL_S)
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(taken)}
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order in which nvidia-smi numbers them
    try:
        yield Devices(tuple(taken), environment, tuple(taken.values()))
    finally:
        _release(taken)
