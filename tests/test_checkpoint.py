"""checkpoint: a round trip bit for bit, and everything that must never be loaded."""

from dataclasses import replace

import pytest
import torch

import drafting
from aerie import artifact, checkpoint, drafter, training
from aerie.checkpoint import CheckpointError
from drafting import CONFIG, random_drafter, random_sample

torch.set_num_threads(1)

RECORD = {"identity": "f" * 64, "config": CONFIG.to_json()}


def trained(dtype=torch.float32, steps=3):
    module, teacher = random_drafter()
    module.to(dtype)
    masters = checkpoint.masters_of(module)
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3)
    for _ in range(steps):
        step(module, teacher, masters, optimizer, dtype)
    return module, teacher, masters, optimizer


def step(module, teacher, masters, optimizer, dtype):
    batch = drafter.pack([random_sample("a", 12, 3)], dtype)
    training.ttt_loss(module, teacher, batch, 3, 0.8).loss.backward()
    for name, parameter in module.named_parameters():
        masters[name].grad = parameter.grad.float()
    optimizer.step()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(masters[name])
            parameter.grad = None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_state_goes_on_bit_for_bit(tmp_path, dtype):
    module, teacher, masters, optimizer = trained(dtype)
    state = {"step": 3, "best": {"step": 2, "accept_length": 1.1 + 0.2}, "curve": [{"loss": 1 / 3}]}
    path = checkpoint.save(tmp_path, module, masters, optimizer, state, RECORD)
    step(module, teacher, masters, optimizer, dtype)
    expected_random = torch.rand(2)

    other, _, other_masters, other_optimizer = trained(dtype, steps=0)
    assert checkpoint.restore(path, "f" * 64, other, other_masters, other_optimizer) == state
    step(other, teacher, other_masters, other_optimizer, dtype)
    for name, parameter in module.named_parameters():
        assert torch.equal(dict(other.named_parameters())[name], parameter), name
        assert torch.equal(other_masters[name], masters[name]), name
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(other_optimizer.state[other_masters[name]][key], optimizer.state[masters[name]][key])
    assert torch.equal(torch.rand(2), expected_random)


def test_bfloat16_parameters_have_fp32_masters_and_fp32_ones_are_their_own():
    module, _ = random_drafter()
    assert all(checkpoint.masters_of(module)[name] is parameter for name, parameter in module.named_parameters())
    module.to(torch.bfloat16)
    masters = checkpoint.masters_of(module)
    assert all(master.dtype == torch.float32 and master.requires_grad for master in masters.values())
    assert all(torch.equal(masters[name].bfloat16(), parameter) for name, parameter in module.named_parameters())


def test_equal_states_give_equal_files(tmp_path):
    digests = []
    for folder in ("a", "b"):
        module, _, masters, optimizer = trained()
        torch.manual_seed(0)
        path = checkpoint.save(tmp_path / folder, module, masters, optimizer, {"step": 3}, RECORD)
        digests.append(artifact.check(path))
    assert digests[0] == digests[1]


def test_a_half_written_checkpoint_is_never_loaded_and_swept_away(tmp_path):
    module, _, masters, optimizer = trained()
    kept = checkpoint.save(tmp_path, module, masters, optimizer, {"step": 3}, RECORD)
    cut = checkpoint.path_of(tmp_path, 4)  # killed between the rename and the sidecar
    cut.write_bytes(kept.read_bytes()[:100])
    (tmp_path / f".{cut.name}{artifact.PARTIAL}-123").write_bytes(b"x")  # killed before the rename
    assert checkpoint.complete(tmp_path) == [kept]
    checkpoint.rotate(tmp_path, {3})
    assert sorted(path.name for path in tmp_path.iterdir()) == [kept.name, kept.name + ".sha256"]


def test_rotation_keeps_the_steps_it_is_told(tmp_path):
    module, _, masters, optimizer = trained()
    for number in (1, 2, 10):
        checkpoint.save(tmp_path, module, masters, optimizer, {"step": number}, RECORD)
    checkpoint.rotate(tmp_path, {2, 10})
    assert [checkpoint.step_of(path) for path in checkpoint.complete(tmp_path)] == [2, 10]


def test_a_damaged_file_and_another_runs_file_are_refused_with_what_to_remove(tmp_path):
    module, _, masters, optimizer = trained()
    path = checkpoint.save(tmp_path, module, masters, optimizer, {"step": 3}, RECORD)
    with pytest.raises(CheckpointError, match="belongs to run f+, expected e+; remove the folder"):
        checkpoint.read(path, "e" * 64)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="changed since it was published[\\s\\S]*remove it and its sidecar"):
        checkpoint.read(path, "f" * 64)


def test_a_checkpoint_of_another_shape_names_every_tensor_that_differs(tmp_path):
    module, _, masters, optimizer = trained()
    path = checkpoint.save(tmp_path, module, masters, optimizer, {"step": 3}, RECORD)
    tensors, _ = checkpoint.read(path, "f" * 64)
    del tensors["model/norm.weight"]
    tensors["model/surplus"] = torch.zeros(1)
    other, _ = random_drafter(replace(CONFIG, intermediate_size=20))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_parameters(other, tensors, path, "model/")
    message = str(caught.value)
    assert "missing norm.weight" in message and "unexpected surplus" in message
    assert f"gate_proj.weight is torch.float32 (24, {drafting.D}), expected torch.float32 (20, {drafting.D})" in message
