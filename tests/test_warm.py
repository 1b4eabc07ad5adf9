"""warm: one server for many jobs, one job at a time, and no server without a workflow."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import test_gpus
import test_server
from aerie import gpus, server, warm
from aerie.server import ServerError
from borrowing_job import borrow, order
from conftest import in_image, settings, toy_config

ROOT = Path(__file__).parents[1]
JOB = [sys.executable, "tests/borrowing_job.py"]


def pid_of(engine):
    return int(engine._server.split(":")[0])


def left_over(tmp_path):
    """Return the processes that name the folder of a test in their command."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(tmp_path) in command and int(path.parent.name) != os.getpid():
            found[int(path.parent.name)] = command
    return found


def within(seconds, condition):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(autouse=True)
def workflow(tmp_path, monkeypatch):
    """A process that stands for Snakemake; with its end all that the test started must end."""
    process = subprocess.Popen(["sleep", "600"])
    monkeypatch.setenv(warm.WORKFLOW, warm.process_name(process.pid))
    monkeypatch.delenv("APPTAINER_CONTAINER", raising=False)
    handler = signal.getsignal(signal.SIGTERM)
    yield process
    signal.signal(signal.SIGTERM, handler)
    process.kill()
    process.wait()
    assert within(20, lambda: not left_over(tmp_path)), left_over(tmp_path)


@pytest.fixture
def job(tmp_path, workflow, spawn):
    """Start jobs that hold a lease until their input ends; they are gone before the workflow is."""
    return lambda device="cpu": spawn(*JOB, tmp_path, device)


def server_of(process):
    return int(json.loads(process.stdout.readline())[0].split(":")[0])


def test_without_an_idle_time_the_server_ends_with_the_block(tmp_path):
    with borrow(tmp_path, idle_s=0) as engine:
        pid = engine.pid
        assert engine.folder == tmp_path / "cold"
        assert json.loads((engine.folder / "order.json").read_text())["run"] == engine.name.removeprefix("aerie-")
    assert test_server.gone(pid)
    assert not (tmp_path / "warm").exists()


def test_the_second_job_gets_the_server_of_the_first_and_it_is_started_once(tmp_path):
    calls = []

    def counted(run, folder):
        calls.append(run)
        return order(run, folder)

    with borrow(tmp_path, environment_of=counted) as engine:
        first, answers = pid_of(engine), {}
        requests = [(n, {"input_ids": [n]}) for n in range(5)]
        engine.ask_all(requests, 2, lambda key, reply: answers.update({key: reply.body["output_ids"]}))
        assert answers == {n: [n] for n in range(5)}
        assert f"FAKE_ORDER={engine.folder}" in Path(f"/proc/{first}/environ").read_text()
    with borrow(tmp_path, environment_of=counted) as engine:
        assert pid_of(engine) == first and engine.alive()
        assert engine.get("/v1/models")["data"][0]["id"] == engine.name == f"aerie-{calls[0]}"
        assert (engine.folder / "order.json").is_file()
        assert "launch" not in engine.log_tail()  # readable
    assert len(calls) == 1


@pytest.mark.parametrize(
    "other", [{"context_tokens": 65}, {"same": ["another image"]}, {"environment": "SGLANG_X"}, {"flag": "--more"}]
)
def test_a_job_that_needs_another_server_gets_another_one(tmp_path, monkeypatch, other):
    with borrow(tmp_path) as engine:
        first = pid_of(engine)
    if "environment" in other:
        monkeypatch.setenv(other["environment"], "1")
    changes = {key: value for key, value in other.items() if key in ("context_tokens", "same")}
    with borrow(tmp_path, *filter(None, [other.get("flag")]), **changes) as engine:
        assert pid_of(engine) != first


def test_two_jobs_at_once_never_share_a_server(tmp_path, job):
    first, second = job(), job()
    servers = {server_of(first), server_of(second)}
    assert len(servers) == 2
    first.communicate()
    with borrow(tmp_path) as engine:  # the one that became free
        assert pid_of(engine) in servers


def test_an_idle_server_is_ended(tmp_path):
    with borrow(tmp_path, idle_s=1.0) as engine:
        pid = pid_of(engine)
        time.sleep(3)
        assert engine.alive()  # in use, however long
    assert test_server.gone(pid)
    assert within(10, lambda: not list((tmp_path / "warm").glob("*/"))), "its folder stays"


def test_the_server_ends_when_the_workflow_is_killed_even_while_a_job_uses_it(tmp_path, workflow):
    with borrow(tmp_path) as engine:
        pid = pid_of(engine)
        workflow.kill()  # SIGKILL; not waited for, so it is a zombie, which is gone too
        assert test_server.gone(pid, 10)
        assert not engine.alive()


def test_a_server_that_died_is_not_lent(tmp_path):
    with borrow(tmp_path) as engine:
        pid = pid_of(engine)
    os.kill(pid, signal.SIGKILL)
    with borrow(tmp_path) as engine:
        assert pid_of(engine) != pid and engine.alive()
        os.kill(pid_of(engine), signal.SIGKILL)  # after the last answer: the block ends well all the same
        assert within(5, lambda: not engine.alive())
    with borrow(tmp_path) as engine:
        assert engine.alive()


def test_a_server_that_dies_under_a_job_is_reported_with_the_end_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_DIE_AFTER", "3")
    with pytest.raises(ServerError, match="out of memory"), borrow(tmp_path) as engine:
        engine.ask_all([(n, {"input_ids": [n]}) for n in range(50)], 1, lambda *_: None)


def test_a_server_whose_job_failed_is_ended(tmp_path):
    with pytest.raises(ValueError, match="rows differ"), borrow(tmp_path) as engine:
        pid = pid_of(engine)
        raise ValueError("rows differ")
    with borrow(tmp_path) as engine:
        assert pid_of(engine) != pid
    assert test_server.gone(pid)


def test_a_hung_server_is_not_lent(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "ANSWER_S", 1.0)
    with borrow(tmp_path) as engine:
        pid = pid_of(engine)
    os.kill(pid, signal.SIGSTOP)
    with borrow(tmp_path) as engine:
        assert pid_of(engine) != pid
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_job_frees_its_lease_and_the_next_job_gets_a_healthy_server(tmp_path, job, number):
    killed = job()
    used = server_of(killed)
    killed.send_signal(number)
    killed.wait()
    with borrow(tmp_path) as engine:
        assert pid_of(engine) != used and engine.alive()  # what the killed job left in it, nobody knows
    assert test_server.gone(used)


def test_a_job_killed_while_its_server_starts_leaves_no_server(tmp_path, job, monkeypatch):
    monkeypatch.setenv("FAKE_SLOW_START_S", "60")
    killed = job()
    assert within(20, lambda: any("fake_sglang" in command and "keep" not in command
                                  for command in left_over(tmp_path).values()))  # fmt: skip
    killed.kill()
    killed.wait()
    assert within(10, lambda: not left_over(tmp_path)), left_over(tmp_path)


def test_the_server_ends_with_a_killed_keeper(tmp_path):
    with borrow(tmp_path) as engine:
        pid = pid_of(engine)
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        assert test_server.gone(pid)
    with borrow(tmp_path) as engine:
        assert engine.alive()
    assert len(list((tmp_path / "warm").glob("*/"))) == 1  # the killed keeper's folder is removed


def test_a_server_that_does_not_start_is_reported_to_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_DIE_AT_START", "1")
    with pytest.raises(ServerError, match=r"ended before it was up \(exit status 1\)[\s\S]*no such model"):
        borrow(tmp_path).__enter__()


def test_a_keeper_that_does_not_start_is_reported_to_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(warm, "KEEPER", "raise SystemExit('no room for a keeper')")
    with pytest.raises(ServerError, match="keeper of the server did not start[\\s\\S]*no room for a keeper"):
        borrow(tmp_path).__enter__()


def test_a_pipe_behind_the_job_ends_with_the_job(tmp_path):
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {' '.join(JOB)} {tmp_path} 2>&1 | tee {tmp_path / 'log'}"],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    pid = int(json.loads(done.stdout.splitlines()[-1])[0].split(":")[0])
    with borrow(tmp_path) as engine:
        assert pid_of(engine) == pid


def test_without_its_workflow_on_this_machine_a_job_starts_a_server_of_its_own(tmp_path, monkeypatch, capsys):
    pid, start, _ = os.environ[warm.WORKFLOW].split(":")
    monkeypatch.setenv(warm.WORKFLOW, f"{pid}:{start}:another-machine")
    with borrow(tmp_path) as engine:
        assert engine.folder == tmp_path / "cold"
    assert "does not run on this machine" in capsys.readouterr().err


def test_in_a_container_without_a_starter_a_job_starts_a_server_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("APPTAINER_CONTAINER", str(tmp_path / "image.sif"))
    with borrow(tmp_path) as engine:
        assert engine.folder == tmp_path / "cold"
    assert "starter.lock: no workflow holds it" in capsys.readouterr().err


def test_in_a_container_the_starter_runs_the_keeper_in_a_container_of_its_own(tmp_path, monkeypatch, workflow):
    apptainer = tmp_path / "apptainer"  # stands for the program: notes its options, runs the command
    script = f'#!/bin/sh\necho "$1 $2" >{tmp_path}/options\nshift 3\nexec {sys.executable} "$@"\n'
    apptainer.write_text(script)
    apptainer.chmod(0o755)
    warm.start_starter(tmp_path / "warm", [str(apptainer), "exec"])
    monkeypatch.setenv("APPTAINER_CONTAINER", str(tmp_path / "image.sif"))
    with borrow(tmp_path) as engine:
        first = pid_of(engine)
    with borrow(tmp_path) as engine:
        assert pid_of(engine) == first
    assert (tmp_path / "options").read_text() == f"exec {tmp_path / 'image.sif'}\n"


@pytest.mark.parametrize("name, shared", [("SGLANG_LOG", True), ("OMP_NUM_THREADS", True), ("HF_TOKEN", False), ("PWD", False)])  # fmt: skip
def test_a_credential_is_never_written_down(name, shared):
    assert (name in warm.matters({name: "x"})) is shared


@pytest.fixture
def one_gpu(tmp_path, monkeypatch):
    """A node with one GPU."""
    test_gpus.make_node(tmp_path, monkeypatch, test_gpus.UUIDS[:1])


def test_a_kept_server_keeps_its_gpu_and_a_job_that_waits_for_one_gets_the_server(tmp_path, one_gpu, job):
    first = job("cuda")
    used = server_of(first)
    assert "CUDA_VISIBLE_DEVICES=0" in Path(f"/proc/{used}/environ").read_text().split("\0")
    second = job("cuda")
    time.sleep(2)
    first.communicate()
    assert server_of(second) == used
    second.communicate()
    assert not gpus.are_free(1)
    os.kill(used, signal.SIGKILL)
    assert within(10, lambda: gpus.are_free(1))


def test_every_job_of_a_workflow_knows_its_main_process(tmp_path):
    (tmp_path / "Snakefile").write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "from aerie import warm\n"
        "if workflow.is_main_process:\n"
        "    os.environ[warm.WORKFLOW] = warm.process_name(os.getpid())\n"
        "    open('main', 'w').write(os.environ[warm.WORKFLOW])\n"
        "rule all:\n    input: 'shell', 'run'\n"
        "rule shell:\n    output: 'shell'\n    shell: 'printf %s $AERIE_WORKFLOW > {output}'\n"
        "rule run:\n    output: 'run'\n    run:\n        open(output[0], 'w').write(os.environ[warm.WORKFLOW])\n"
    )
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--quiet", "all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {(tmp_path / name).read_text() for name in ("main", "shell", "run")}
    assert len(names) == 1 and names != {os.environ[warm.WORKFLOW]}  # its own, not the one it inherited


@pytest.mark.image
def test_a_server_survives_the_container_of_the_job_that_started_it(sif, workflow, monkeypatch):
    folder = ROOT / sif.parents[1] / "test-warm"  # where a container sees it
    shutil.rmtree(folder, ignore_errors=True)
    for name, value in settings.job_environment(toy_config()).items():
        monkeypatch.setenv(name, value)
    warm.start_starter(folder / "warm", list(in_image("")[:-1]))
    servers = []
    for number in range(2):
        done = subprocess.run(
            in_image(sif, "bash", "-c", f"set -o pipefail; python {JOB[1]} {folder} 2>&1 | tee {folder}/{number}.log"),
            cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        servers.append(json.loads(done.stdout.splitlines()[-1]))
        time.sleep(15)  # Apptainer takes the image away from what a container left behind within ten seconds
    assert servers[0] == servers[1]
    workflow.kill()
    assert within(10, lambda: not left_over(folder)), left_over(folder)
    shutil.rmtree(folder)
