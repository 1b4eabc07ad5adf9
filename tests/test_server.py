"""server: it starts under its own name, dies loudly, and never outlives the job that started it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aerie import server
from aerie.server import Server, ServerError, Settings

FAKE = (sys.executable, str(Path(__file__).with_name("fake_sglang.py")))


def settings(port=0, start_timeout_s=20.0):
    return Settings(
        model="model", device="cpu", dtype="float32", tensor_parallel=1, context_tokens=64, max_total_tokens=0,
        max_running_requests=4, start_timeout_s=start_timeout_s, port=port, seed=1,
    )  # fmt: skip


def make(tmp_path, environment=None, **arguments):
    return Server(settings(**arguments), [], environment or {}, tmp_path / "server.log", command=FAKE)


def gone(pid, within_s=10.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_it_answers_while_the_block_runs_and_is_gone_after_it(tmp_path):
    with make(tmp_path) as engine:
        pid = engine._process.pid
        answers = {}
        requests = [(n, {"input_ids": [n]}) for n in range(9)]
        engine.ask_all(requests, 3, lambda key, reply: answers.update({key: reply.body["output_ids"]}))
        assert answers == {n: [n] for n in range(9)}
    assert gone(pid)


def test_a_server_that_dies_at_start_is_reported_with_the_end_of_its_log(tmp_path):
    with pytest.raises(ServerError, match=r"ended before it was up \(exit status 1\)[\s\S]*no such model"):
        make(tmp_path, {"FAKE_DIE_AT_START": "1"}).__enter__()


def test_a_server_that_is_not_up_in_time_is_ended(tmp_path):
    engine = make(tmp_path, {"FAKE_SLOW_START_S": "60"}, start_timeout_s=1.0)
    with pytest.raises(ServerError, match="not up after 1 s"):
        engine.__enter__()
    assert not engine.alive()


def test_a_server_that_dies_in_the_middle_ends_the_questions_and_keeps_the_answers(tmp_path):
    answers = []
    with (
        pytest.raises(ServerError, match="out of memory"),
        make(tmp_path, {"FAKE_DIE_AFTER": "5"}) as engine,
    ):
        engine.ask_all([(n, {"input_ids": [n]}) for n in range(50)], 1, lambda key, reply: answers.append(key))
    assert answers == [0, 1, 2, 3]


def test_an_error_in_the_callers_hand_over_ends_the_questions(tmp_path):
    def refuse(key, reply):
        raise ValueError("not acknowledged")

    with pytest.raises(ValueError, match="not acknowledged"), make(tmp_path) as engine:
        pid = engine._process.pid
        engine.ask_all([(n, {"input_ids": [n]}) for n in range(50)], 4, refuse)
    assert gone(pid)


def test_a_port_already_taken_is_named_before_anything_starts(tmp_path):
    with socket.socket() as other:
        other.bind((server.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServerError, match=rf"port {port} on 127.0.0.1 is taken.*server.port to 0"):
            make(tmp_path, port=port).__enter__()
    assert not (tmp_path / "server.log").exists()


def test_a_foreign_server_is_never_taken_for_ours(tmp_path):
    engine = make(tmp_path, {"FAKE_NAME": "somebody-else"})
    with pytest.raises(ServerError, match="answered by another server"):
        engine.__enter__()
    assert not engine.alive()


def test_the_whole_process_group_goes_down_even_a_child_that_ignores_sigterm(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "STOP_S", 1.0)
    with make(tmp_path, {"FAKE_CHILD": str(tmp_path / "child")}):
        child = int((tmp_path / "child").read_text())
    assert gone(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_survives_the_end_of_the_job_that_started_it(tmp_path, number):
    code = (
        "import sys, time; sys.path[:0] = ['scripts', 'tests']\n"
        "from pathlib import Path; import test_server\n"
        "with test_server.make(Path(sys.argv[1])) as engine:\n"
        "    print(engine._process.pid, flush=True); time.sleep(600)\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[1], env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    with job.stdout:
        pid = int(job.stdout.readline())
    job.send_signal(number)
    job.wait(30)
    assert gone(pid)
