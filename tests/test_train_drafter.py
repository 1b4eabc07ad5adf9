"""train_drafter: learns, resumes bit for bit, stops on SIGTERM, and refuses what does not belong together."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import drafting
import train_drafter
from aerie import artifact, checkpoint, drafter, hidden, training
from aerie.artifact import ArtifactError
from aerie.drafter import DrafterError
from drafting import cyclic_sample, train_arguments

torch.set_num_threads(1)


def train(results, **changes):
    train_drafter.main(train_arguments(results, **changes))


def outputs(results):
    names = ("drafter/trained.safetensors", "drafter/metrics.json")
    return {name: artifact.check(results / name) for name in names}


def checkpoints(results):
    (folder,) = (results / "drafter" / "checkpoints").iterdir()
    return [checkpoint.step_of(path) for path in checkpoint.complete(folder)]


class Killed(Exception):
    pass


def kill_after(monkeypatch, steps):
    """Let the process die in the middle of the step behind `steps` finished ones: nothing is saved any more."""
    loss, calls = training.ttt_loss, []

    def dying(*arguments):
        calls.append(1)
        if len(calls) > steps:
            raise Killed
        return loss(*arguments)

    monkeypatch.setattr(training, "ttt_loss", dying)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A results folder with one finished run of 12 steps."""
    results = tmp_path_factory.mktemp("unbroken")
    drafting.write_run(results)
    train(results)
    return results


@pytest.fixture
def run(unbroken, tmp_path):
    """The same inputs, not trained yet."""
    results = tmp_path / "results"
    shutil.copytree(unbroken, results)
    shutil.rmtree(results / "drafter" / "checkpoints")
    for path in (results / "drafter").glob("[tm][re]*"):
        path.unlink()
    return results


def test_loss_falls_and_hits_rise_on_a_language_that_can_be_learned(tmp_path):
    drafting.write_run(tmp_path)
    train(tmp_path, steps=120, eval_every_steps=60, save_every_steps=200)
    metrics = artifact.read_json(tmp_path / "drafter" / "metrics.json")
    first, last = metrics["curve"][0], metrics["curve"][-1]
    assert last["loss"] < first["loss"] / 8
    assert min(last["step_accuracy"]) > 0.8 > 0.3 > max(first["step_accuracy"])
    assert metrics["final"]["true_token"]["accept_length"] > 2
    assert metrics["final"]["walk"]["accept_length"] > 1.5


def test_metrics_hold_the_curve_the_evaluations_the_figures_and_no_volatile_fact(unbroken):
    metrics = artifact.read_json(unbroken / "drafter" / "metrics.json")
    assert [point["step"] for point in metrics["curve"]] == [1, 10, 12]
    assert [evaluation["step"] for evaluation in metrics["evaluations"]] == [4, 8, 12]
    assert len(metrics["curve"][0]["step_loss"]) == 3 and len(metrics["final"]["true_token"]["cumulative"]) == 3
    best = max(metrics["evaluations"], key=lambda one: one["true_token"]["accept_length"])
    assert metrics["selection"]["step"] == best["step"] and "held-out" in metrics["selection"]["rule"]
    assert metrics["final"]["true_token"] == best["true_token"]
    assert set(metrics["final"]["walk"]["documents"]) == {"held-0", "held-1", "held-2"}
    assert metrics["data"]["training"] == 12 and metrics["data"]["held_out"] == 3
    assert metrics["capture"]["layers"] == drafting.LAYERS
    assert not {"time", "seconds", "host", "tok_per_s"} & set(json.dumps(metrics).split('"'))


def test_the_published_weights_are_those_of_the_best_evaluation(unbroken):
    best = artifact.read_json(unbroken / "drafter" / "metrics.json")["selection"]["step"]
    (folder,) = (unbroken / "drafter" / "checkpoints").iterdir()
    tensors, _ = checkpoint.read(checkpoint.path_of(folder, best), artifact.read_json(
        unbroken / "drafter" / "metrics.json")["identity"])  # fmt: skip
    from safetensors.torch import load_file

    for name, tensor in load_file(unbroken / "drafter" / "trained.safetensors").items():
        assert torch.equal(tensor, tensors[f"model/{name}"])


@pytest.mark.parametrize("killed_after", [1, 3, 5, 11])
def test_a_killed_and_resumed_run_equals_an_unbroken_one_bit_for_bit(unbroken, run, monkeypatch, killed_after):
    with monkeypatch.context() as patch:
        kill_after(patch, killed_after)
        with pytest.raises(Killed):
            train(run)
    assert not (run / "drafter" / "trained.safetensors").exists()
    train(run)
    assert outputs(run) == outputs(unbroken)


def test_a_run_with_bfloat16_parameters_resumes_bit_for_bit_too(run, monkeypatch):
    train(run, dtype="bfloat16")
    expected = outputs(run)
    shutil.rmtree(run / "drafter" / "checkpoints")
    with monkeypatch.context() as patch:
        kill_after(patch, 7)
        with pytest.raises(Killed):
            train(run, dtype="bfloat16")
    train(run, dtype="bfloat16")
    assert outputs(run) == expected


def test_epochs_visit_every_training_document_and_no_held_out_one(run, monkeypatch):
    pack, seen = drafter.pack, []

    def watching(samples, *arguments):
        seen.extend(sample.id for sample in samples)
        return pack(samples, *arguments)

    monkeypatch.setattr(drafter, "pack", watching)  # the evaluation has its own reference to pack
    train(run, steps=None, epochs=2)
    assert sorted(seen) == sorted([f"train-{i}" for i in range(12)] * 2)


def test_the_newest_and_the_best_checkpoints_are_kept(run):
    train(run, save_every_steps=1, keep_checkpoints=2)
    best = artifact.read_json(run / "drafter" / "metrics.json")["selection"]["step"]
    assert set(checkpoints(run)) == {11, 12, best}


def test_another_setting_starts_another_run(run):
    train(run)
    train(run, learning_rate=1e-3)
    assert len(list((run / "drafter" / "checkpoints").iterdir())) == 2
    train(run, threads=2, save_every_steps=5)  # these do not shape the result
    assert len(list((run / "drafter" / "checkpoints").iterdir())) == 2


def test_sigterm_saves_within_seconds_and_the_same_command_goes_on(unbroken, run):
    script = Path(train_drafter.__file__)
    command = [sys.executable, str(script), *train_arguments(run)]
    # A step takes half a second here, so that the signal arrives in the middle of the run.
    slow = "import sys, time, runpy; sys.path.insert(0, {0!r}); from aerie import training; loss = training.ttt_loss\n" \
           "def slow(*a):\n time.sleep(0.5)\n return loss(*a)\n" \
           "training.ttt_loss = slow; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", slow.format(str(script.parent)), *command[1:]],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    for line in process.stderr:
        if line.startswith("step 1/"):
            break
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == train_drafter.EXIT_RESTARTABLE == 75
    assert time.monotonic() - began < 30
    assert "run the same command to go on" in rest
    assert 1 <= checkpoints(run)[-1] < 12
    train(run)
    assert outputs(run) == outputs(unbroken)


def test_a_signal_before_the_first_step_saves_nothing_and_says_restartable(run, monkeypatch):
    monkeypatch.setattr(training, "make_teacher", lambda *a, f=training.make_teacher: (os.kill(os.getpid(), signal.SIGTERM), f(*a))[1])  # fmt: skip
    with pytest.raises(SystemExit) as caught:
        train(run)
    assert caught.value.code == 75
    assert not (run / "drafter" / "checkpoints").exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_conversations(run, monkeypatch):
    train(run, steps=6, save_every_steps=2)
    shutil.rmtree(run / "drafter" / "checkpoints")
    loss, calls = training.ttt_loss, []

    def breaking(model, teacher, batch, *rest):
        calls.append(batch.sample_ids)
        if len(calls) == 4:
            batch.final[5] = math.nan
        return loss(model, teacher, batch, *rest)

    monkeypatch.setattr(training, "ttt_loss", breaking)
    with pytest.raises(DrafterError) as caught:
        train(run, steps=6, save_every_steps=2)
    message = str(caught.value)
    assert "training step 3" in message and "loss is nan" in message
    assert all(name in message for name in calls[3])
    assert "Last good checkpoint: " in message and "step-00000002" in message
    assert checkpoints(run) == [2]


def test_without_held_out_conversations_the_last_step_is_chosen_and_said_so(tmp_path):
    drafting.write_run(tmp_path, held_out=0)
    train(tmp_path, steps=4)
    metrics = artifact.read_json(tmp_path / "drafter" / "metrics.json")
    assert metrics["selection"] == {"step": 4, "rule": metrics["selection"]["rule"]}
    assert "last step: no held-out row" in metrics["selection"]["rule"]
    assert metrics["evaluations"] == [] and metrics["final"]["true_token"]["accept_length"] is None


def test_samples_without_a_valid_row_are_skipped_and_counted(tmp_path):
    manifest = drafting.write_target(tmp_path)
    unmasked = replace(cyclic_sample("unmasked", 12, False), loss_mask=torch.zeros(12, dtype=torch.uint8))
    samples = [cyclic_sample("good", 12, False), unmasked, replace(unmasked, id="out", held_out=True)]
    drafting.write_chunk(tmp_path, manifest, 0, samples)
    drafting.write_vocab(tmp_path, manifest, 1)
    train(tmp_path, chunks=1, steps=1)
    counts = artifact.read_json(tmp_path / "drafter" / "metrics.json")["data"]
    assert (counts["samples"], counts["training"], counts["held_out"]) == (3, 1, 0)
    assert (counts["training_without_rows"], counts["held_out_without_rows"]) == (1, 1)


# ---- what is refused


def test_no_valid_row_at_all_is_refused(tmp_path):
    manifest = drafting.write_target(tmp_path)
    drafting.write_chunk(tmp_path, manifest, 0, [cyclic_sample("only", 12, True)])
    drafting.write_vocab(tmp_path, manifest, 1)
    with pytest.raises(DrafterError, match="no training conversation has a valid row .*'held_out': 1"):
        train(tmp_path, chunks=1)


@pytest.mark.parametrize(
    "change", [{"layers": [1, 2, 3]}, {"final": "pre_norm"}, {"dtype": "bfloat16"}, {"target_digest": "0" * 64}]
)
def test_chunks_of_different_captures_are_refused_with_what_differs(tmp_path, change):
    manifest = drafting.write_target(tmp_path)
    drafting.write_chunk(tmp_path, manifest, 0, [cyclic_sample("a", 12, False)])
    drafting.write_chunk(tmp_path, manifest, 1, [cyclic_sample("b", 12, False)], **change)
    drafting.write_vocab(tmp_path, manifest, 2)
    (key,) = change
    with pytest.raises(ArtifactError, match=f"00001.json: {key} is [\\s\\S]*snakemake --cores 1 -f"):
        train(tmp_path)


def test_states_of_another_target_are_refused(tmp_path):
    manifest = drafting.write_target(tmp_path)
    drafting.write_chunk(tmp_path, manifest | {"target_digest": "0" * 64}, 0, [cyclic_sample("a", 12, False)])
    drafting.write_vocab(tmp_path, manifest, 1)
    with pytest.raises(DrafterError, match="inputs of different targets:[\\s\\S]*hidden .all chunks.: target 0+"):
        train(tmp_path, chunks=1)


def test_a_vocabulary_built_from_other_tokens_is_refused(run):
    manifest = artifact.read_json(run / "target" / "manifest.json")
    shutil.rmtree(run / "tokens")
    shutil.rmtree(run / "hidden")
    drafting.write_chunk(run, manifest, 0, [cyclic_sample("new", 12, False)])
    with pytest.raises(
        DrafterError, match="built from other tokens than these states:[\\s\\S]*00000.json[\\s\\S]*vocab"
    ):
        train(run, chunks=1)


def test_a_document_longer_than_the_batch_is_refused(run):
    with pytest.raises(
        DrafterError, match="1 of 15 .*--tokens-per-batch 20: held-2 .22.; raise drafter.tokens_per_batch to 22"
    ):
        train(run, tokens_per_batch=20)


def two_chunks(folder, *lengths):
    """Write one chunk per length, each with one conversation of the same id."""
    manifest = drafting.write_target(folder)
    for chunk, length in enumerate(lengths):
        drafting.write_chunk(folder, manifest, chunk, [cyclic_sample("twin", length, False)])
    drafting.write_vocab(folder, manifest, 2)


def test_one_id_for_two_different_conversations_is_refused(tmp_path):
    two_chunks(tmp_path, 12, 13)
    with pytest.raises(
        DrafterError, match="one id for two different conversations: twin in .*00000.json and .*00001.json"
    ):
        train(tmp_path)


def test_a_conversation_that_occurs_again_is_trained_on_once_and_counted(tmp_path):
    two_chunks(tmp_path, 12, 12)
    paths = sorted((tmp_path / "hidden").glob("*.json"))
    samples, _, counts = train_drafter.select_samples({str(p): hidden.open_chunk(p) for p in paths}, 2, "target")
    assert [sample.id for sample in samples] == ["twin"]
    assert (counts["samples"], counts["training"], counts["repeated"]) == (2, 1, 1)


def test_a_changed_target_config_is_refused(run):
    config = run / "target" / "model" / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    with pytest.raises(DrafterError, match="config.json: changed since the target was fetched"):
        train(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"steps": 0}, "--steps is 0, expected 1 or more"), ({"epochs": 1}, "not allowed with argument"),
     ({"steps": None}, "one of the arguments --epochs --steps is required"), ({"served_steps": 0}, "--served-steps is 0")],
)  # fmt: skip
def test_flags_without_sense_are_usage_errors(tmp_path, capsys, changes, message):
    with pytest.raises(SystemExit) as caught:
        train(tmp_path, **changes)
    assert caught.value.code == 2 and message in capsys.readouterr().err
