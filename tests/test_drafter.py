"""drafter: configuration of every kind of target, RoPE as transformers has it, rows computed alone or together."""

import json
from dataclasses import replace

import pytest
import torch

import drafting
from aerie import drafter
from aerie.drafter import DrafterConfig, DrafterError, pack
from drafting import CONFIG, naive_of, random_drafter, random_sample

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other

SAMPLES = [random_sample("a", 13, 1), random_sample("b", 3, 2), random_sample("c", 1, 3), random_sample("d", 10, 4)]


def test_every_row_and_step_equals_the_naive_chain():
    module, _ = random_drafter()
    naive = naive_of(module, module.embed_tokens)
    batch = pack(SAMPLES, torch.float32)
    states = list(module.unroll(batch, [torch.arange(27)] * 4))
    start = 0
    for sample in SAMPLES:
        for row in range(len(sample.input_ids)):
            for t, logits in enumerate(naive.chain(sample.input_ids.tolist(), sample.aux, row, 4)):
                torch.testing.assert_close(module.logits(states[t][start + row]), logits, atol=1e-5, rtol=1e-5)
        start += len(sample.input_ids)


def test_leaving_out_rows_that_nobody_needs_changes_nothing():
    module, _ = random_drafter()
    batch = pack(SAMPLES, torch.float32)
    everything = [torch.arange(27)] * 4
    few = [torch.tensor([0, 4, 7, 20]), torch.tensor([4, 7, 20]), torch.tensor([4, 20]), torch.tensor([4])]
    for full, part, rows in zip(module.unroll(batch, everything), module.unroll(batch, few), few, strict=True):
        torch.testing.assert_close(part, full[rows], atol=1e-5, rtol=1e-5)


def test_lm_head_starts_as_the_targets_rows_and_the_seed_decides_the_rest():
    embedding, head = drafting.drawn(drafting.V, drafting.D, seed=1), drafting.drawn(drafting.V, drafting.D, seed=2)
    ids = torch.arange(0, drafting.V, 2)[: drafting.R]
    config = replace(CONFIG, draft_vocab_size=len(ids))
    states = []
    for seed in (1, 1, 2):
        module = drafter.Drafter(config, embedding)
        module.initialise(head, ids, seed)
        states.append(module.state_dict())
        assert torch.equal(module.lm_head.weight, head[ids])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["fc.weight"], states[2]["fc.weight"])
    assert "embed_tokens" not in states[0]


# ---- configuration

TARGET = {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 5e5, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 0.5}  # fmt: skip


def test_a_drafter_takes_its_shape_from_the_target_and_from_what_is_given():
    config = drafter.config_from_target(TARGET, 3, 100, intermediate_size=32, num_attention_heads=None)
    assert config == DrafterConfig(64, 32, 8, 2, 8, 1e-6, 5e5, None, 512, 256, 100, 3)
    assert DrafterConfig(**json.loads(json.dumps(config.to_json()))) == config
    assert drafter.config_from_target({"text_config": TARGET}, 3, 100).hidden_size == 64


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
def test_both_spellings_of_rope_are_read(scaling):
    old = drafter.rope_of(TARGET | {"rope_scaling": scaling})
    kind = scaling.get("rope_type", scaling.get("type"))
    new = drafter.rope_of({"rope_parameters": {**scaling, "rope_type": kind, "rope_theta": 5e5}})
    assert old == new and old[0] == 5e5 and old[1]["rope_type"] == kind


def test_everything_wrong_with_a_target_is_reported_at_once():
    target = {"kv_lora_rank": 8, "hidden_size": 64, "vocab_size": 256, "max_position_embeddings": 512,
              "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}  # fmt: skip
    with pytest.raises(DrafterError) as caught:
        drafter.config_from_target(target, 1, 100)
    message = str(caught.value)
    for part in ("give --num-attention-heads", "give --head-dim", "no intermediate_size; give --intermediate-size",
                 "'dynamic'", "give --rope-theta", "names one layer"):  # fmt: skip
        assert part in message
    with pytest.raises(DrafterError, match="8 query heads do not divide by 3 key heads"):
        drafter.config_from_target(TARGET | {"num_key_value_heads": 3}, 3, 100)
    with pytest.raises(DrafterError, match="head_dim is 7"):
        drafter.config_from_target(TARGET | {"head_dim": 7}, 3, 100)
    with pytest.raises(DrafterError, match=r"llama3\) lacks high_freq_factor"):
        drafter.rope_of(TARGET | {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "high_freq_factor"}})
    with pytest.raises(DrafterError, match="has the target's width and vocabulary"):
        drafter.Drafter(CONFIG, torch.zeros(drafting.V, drafting.D + 1))


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, YARN | {"truncate": False, "mscale": None}])
def test_rope_frequencies_are_those_of_transformers(scaling):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = drafter.config_from_target(TARGET | {"head_dim": 32, "rope_scaling": scaling}, 3, 100)
    parameters = {"rope_theta": 5e5, "rope_type": "default", **(config.rope_scaling or {})}
    theirs = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=8, head_dim=32, max_position_embeddings=512, rope_parameters=parameters
    )
    frequencies, factor = drafter.rope_frequencies(config)
    if scaling is None:
        expected, expected_factor = 5e5 ** -(torch.arange(0, 32, 2) / 32), 1.0
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, torch.device("cpu"))
    torch.testing.assert_close(frequencies, expected.float(), atol=1e-9, rtol=1e-6)
    assert factor == pytest.approx(expected_factor)


def test_linear_rope_divides_the_positions():
    config = drafter.config_from_target(TARGET | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 3, 100)
    plain = drafter.config_from_target(TARGET, 3, 100)
    torch.testing.assert_close(drafter.rope_frequencies(config)[0] * 2, drafter.rope_frequencies(plain)[0])
