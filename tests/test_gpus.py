"""gpus: two jobs never share one, whatever they call it, whoever is killed."""

import os
import select
import sys
import time

import pytest

from aerie import gpus
from aerie.gpus import GpuError, GpusTakenError

UUIDS = ("GPU-aaaa1111-0000", "GPU-bbbb2222-0000")
TAKE = """
import os, subprocess, sys, time
sys.path.insert(0, "scripts")
from aerie import gpus
with gpus.slots(int(sys.argv[1]), 20) as devices:
    if "server" in sys.argv:
        server = subprocess.Popen(["sleep", "600"], pass_fds=devices.locks)
    print(devices.environment["CUDA_VISIBLE_DEVICES"], server.pid if "server" in sys.argv else "", flush=True)
    sys.stdin.read()
"""


def make_node(tmp_path, monkeypatch, uuids):
    """Make a node with these GPUs and a temporary folder of its own; return its nvidia-smi."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    listing = "\n".join(f"{index}, {uuid}" for index, uuid in enumerate(uuids))
    program.write_text(f"#!/bin/sh\ncat <<END\n{listing}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(gpus.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


@pytest.fixture(autouse=True)
def node(tmp_path, monkeypatch):
    """A node of two GPUs."""
    return make_node(tmp_path, monkeypatch, UUIDS)


@pytest.fixture
def job(spawn):
    """Start jobs that take GPUs until their input ends."""
    return lambda count, *words, **environment: spawn(sys.executable, "-c", TAKE, count, *words, **environment)


def took(process):
    return process.stdout.readline().split()[0].split(",")


def test_two_jobs_at_once_get_different_gpus_and_a_third_waits_for_one(job):
    first, second = job(1), job(1)
    assert sorted(took(first) + took(second)) == ["0", "1"]
    with pytest.raises(GpusTakenError, match=r"1 of 2 GPUs did not[\s\S]*GPU 0: taken by pid \d+ \([\s\S]*gpu: 2"):
        gpus.slots(1, wait_s=0.1).__enter__()
    third = job(1)
    time.sleep(1)
    first.communicate()
    assert took(third)[0] in ("0", "1")


def test_what_the_job_was_given_is_the_pool_in_its_order_and_spelling(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, MIG-7f,GPU-aaaa")
    with gpus.slots(3) as devices:
        assert devices.names == ("1", "MIG-7f", "GPU-aaaa")
        assert devices.environment == {"CUDA_VISIBLE_DEVICES": "1,MIG-7f,GPU-aaaa"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1, MIG-7f,GPU-aaaa"  # the job's own is left alone


def test_the_index_and_the_uuid_of_one_gpu_are_the_same_gpu(job):
    holder = job(1, CUDA_VISIBLE_DEVICES="1")
    assert took(holder) == ["1"]
    other = job(1, CUDA_VISIBLE_DEVICES=f"{UUIDS[1]},{UUIDS[0]}")
    assert took(other) == [UUIDS[0]]


def test_without_a_given_pool_the_numbers_are_those_of_nvidia_smi():
    with gpus.slots(2) as devices:
        assert devices.environment == {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert not gpus.are_free(1)
    assert gpus.are_free(2)


def test_two_jobs_that_each_want_both_gpus_get_them_one_after_the_other(job):
    jobs = [job(2) for _ in range(4)]
    for _ in range(4):
        (holder,) = _readable(jobs, 20)
        assert took(holder) == ["0", "1"]
        jobs.remove(holder)
        time.sleep(0.2)
        assert not _readable(jobs, 0)
        holder.communicate()


def _readable(processes, within_s):
    ready, _, _ = select.select([process.stdout for process in processes], [], [], within_s)
    return [process for process in processes if process.stdout in ready]


def test_a_killed_job_frees_its_gpu(job):
    holder = job(2)
    took(holder)
    holder.kill()
    holder.wait()
    with gpus.slots(2, wait_s=5):
        pass


def test_the_server_of_a_killed_job_keeps_its_gpu(job):
    holder = job(1, "server")
    name, server = holder.stdout.readline().split()
    holder.kill()
    holder.wait()
    try:
        with gpus.slots(1) as devices:
            assert devices.names != (name,)
            with pytest.raises(
                GpusTakenError, match=rf"GPU {name}: taken by a process that pid {holder.pid} .*left behind"
            ):
                gpus.slots(1, wait_s=0.1).__enter__()
    finally:
        os.kill(int(server), 9)
    with gpus.slots(2, wait_s=5):
        pass


@pytest.mark.parametrize(
    "allowed, found", [(None, "has 2 .0, 1; from nvidia-smi"), ("1", "has 1 .1; from CUDA"), ("", "has 0 .none"),
                       ("NoDevFiles", "has 0"), ("0,0,-1,1", "has 1 .0;")]
)  # fmt: skip
def test_more_gpus_than_there_are_is_an_error_at_once(monkeypatch, allowed, found):
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    with pytest.raises(GpuError, match=f"3 GPUs are asked for .*{found}.*lower server.tensor_parallel"):
        gpus.slots(3).__enter__()


def test_a_node_without_nvidia_smi_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpuError, match="no nvidia-smi on PATH"):
        gpus.slots(1).__enter__()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with gpus.slots(1) as devices:
        assert devices.names == ("3",)


def test_a_driver_that_fails_is_quoted(node):
    node.write_text("#!/bin/sh\necho Driver/library version mismatch; exit 18\n")
    with pytest.raises(GpuError, match="failed with status 18: Driver/library version mismatch"):
        gpus.slots(1).__enter__()
