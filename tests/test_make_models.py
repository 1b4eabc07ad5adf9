"""The small models of the end-to-end tests: same seed, same bytes; the facts that other tests lean on."""

import hashlib
import itertools
import json
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import make_models

FOLDER = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
MAKERS = {"llama": make_models.tiny_llama, "deepseek": make_models.tiny_deepseek}
TWO_TURNS = [
    {"role": "user", "content": "continue cp1251: 0xE3 -> CYRILLIC SMALL LETTER GHE"},
    {"role": "assistant", "content": "\n   indented, after a blank line\n"},
    {"role": "user", "content": "\n\n  and é, ß, 中文"},
    {"role": "assistant", "content": "0xE4 -> CYRILLIC SMALL LETTER DE"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Each tiny model, made once."""
    root = tmp_path_factory.mktemp("models")
    for name, make in MAKERS.items():
        make(root / name)
    return {name: root / name for name in MAKERS}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> tuple[Path, make_models.Toy, list[str]]:
    """A toy target after a few steps, with what the run came to and said."""
    path = tmp_path_factory.mktemp("toy") / "toy"
    lines: list[str] = []
    return path, make_models.toy_target(path, steps=12, say=lines.append), lines


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text("utf-8"))


# --------------------------------------------------------------------------------------------------
# Folders
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_making_a_tiny_model_twice_gives_the_same_bytes(name, folders, tmp_path):
    torch.manual_seed(7)  # the state of the global generator must not matter
    MAKERS[name](tmp_path / "again")
    assert digests(tmp_path / "again") == digests(folders[name])
    assert sorted(digests(folders[name])) == FOLDER


def test_the_two_architectures_share_one_tokenizer(folders):
    assert digests(folders["llama"])["tokenizer.json"] == digests(folders["deepseek"])["tokenizer.json"]


@pytest.mark.parametrize("name", MAKERS)
def test_heads_and_widths_divide_over_two_ranks(name, folders):
    config = config_of(folders[name])
    widths = ["num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"]
    widths += ["moe_intermediate_size", "n_routed_experts"] if name == "deepseek" else []
    assert {key: config[key] % 2 for key in widths} == dict.fromkeys(widths, 0)


@pytest.mark.parametrize("name", MAKERS)
def test_layers_1_to_3_can_be_captured_and_the_context_holds_512_tokens(name, folders):
    config = config_of(folders[name])
    assert config["num_hidden_layers"] >= 4
    assert config["max_position_embeddings"] >= 512
    assert (config["dtype"], config["hidden_size"], config["vocab_size"]) == ("float32", 64, 512)


def test_tiny_llama_has_fewer_key_value_heads_than_heads(folders):
    config = config_of(folders["llama"])
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]


def test_tiny_deepseek_has_the_keys_that_sglang_reads_from_kimi_k2(folders):
    config = config_of(folders["deepseek"])
    assert config["model_type"] == "kimi_k2"
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["rope_scaling"]["type"] == "yarn"
    assert config["rope_theta"] == 50000.0
    assert config["moe_layer_freq"] == 1
    assert config["first_k_dense_replace"] == 1
    assert config["topk_method"] == "noaux_tc"


def test_tiny_deepseek_stores_experts_one_by_one_with_a_routing_bias_that_matters(folders):
    with safe_open(folders["deepseek"] / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        bias = weights.get_tensor("model.layers.1.mlp.gate.e_score_correction_bias")
    for part in ("gate_proj", "up_proj", "down_proj"):
        assert {f"model.layers.4.mlp.experts.{expert}.{part}.weight" for expert in range(8)} <= names
        assert f"model.layers.4.mlp.shared_experts.{part}.weight" in names
    assert "model.layers.0.mlp.gate_proj.weight" in names  # the dense layer
    assert bias.abs().min() > 0


@pytest.mark.parametrize("name", MAKERS)
def test_every_weight_is_fp32_and_finite(name, folders):
    with safe_open(folders[name] / "model.safetensors", "pt") as weights:
        for key in weights.keys():  # noqa: SIM118, safe_open is no mapping
            tensor = weights.get_tensor(key)
            assert tensor.dtype == torch.float32, key
            assert tensor.isfinite().all(), key
            assert tensor.std() > 0, key


@pytest.mark.parametrize("name", MAKERS)
def test_a_folder_is_never_overwritten(name, folders):
    before = digests(folders[name])
    with pytest.raises(FileExistsError, match=r"never overwritten; remove it: rm -r "):
        MAKERS[name](folders[name])
    assert digests(folders[name]) == before


def test_what_a_killed_run_left_does_not_stop_the_next_one(tmp_path, folders):
    (tmp_path / ".llama.partial").mkdir()
    (tmp_path / ".llama.partial" / "stale").write_text("half")
    make_models.tiny_llama(tmp_path / "llama")
    assert digests(tmp_path / "llama") == digests(folders["llama"])
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


# --------------------------------------------------------------------------------------------------
# Tokenizer and template
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_the_tokenizer_of_a_folder_decodes_what_it_encodes(name, folders):
    tokenizer = make_models.reference_tokenizer(folders[name])
    text = "".join(message["content"] for message in TWO_TURNS) + "\t\x00\U0001f600 end"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer) == 512
    assert tokenizer.model_max_length == config_of(folders[name])["max_position_embeddings"]


@pytest.mark.parametrize("name", MAKERS)
def test_the_end_of_a_turn_is_the_end_of_sequence_in_all_three_files(name, folders):
    tokenizer = make_models.reference_tokenizer(folders[name])
    generation = json.loads((folders[name] / "generation_config.json").read_text("utf-8"))
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    assert ids == [0, 1, 2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert set(ids) == set(tokenizer.all_special_ids)
    assert generation["eos_token_id"] == config_of(folders[name])["eos_token_id"] == 2


def test_the_chat_template_is_in_the_tokenizer_config(folders):
    stored = json.loads((folders["llama"] / "tokenizer_config.json").read_text("utf-8"))
    assert stored["chat_template"] == make_models.CHAT_TEMPLATE


def test_two_turns_render_prefix_stable_in_characters_and_tokens(folders):
    tokenizer = make_models.reference_tokenizer(folders["llama"])

    def render(count: int, prompt: bool) -> tuple[str, list[int]]:
        text = tokenizer.apply_chat_template(TWO_TURNS[:count], tokenize=False, add_generation_prompt=prompt)
        return text, tokenizer(text)["input_ids"]

    # In the order of a conversation: each render must start with the one before it.
    steps = [render(1, False), render(1, True), render(2, False), render(3, False), render(3, True), render(4, False)]
    for (text, ids), (longer_text, longer_ids) in itertools.pairwise(steps):
        assert longer_text.startswith(text)
        assert longer_ids[: len(ids)] == ids
        assert len(longer_ids) > len(ids)
    text, ids = steps[-1]
    assert text.startswith("<|im_start|>user\ncontinue cp1251")
    assert (ids.count(1), ids.count(2)) == (4, 4)


# --------------------------------------------------------------------------------------------------
# Forward passes in transformers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MAKERS)
def test_hidden_states_are_finite_and_of_scale_one(name, attention, folders):
    model = make_models.reference_model(folders[name], attention)
    assert not model.training
    assert model.config._attn_implementation == attention
    ids = torch.randint(3, 512, (2, 200), generator=torch.Generator().manual_seed(1))  # (B, T)
    with torch.no_grad():
        output = model(input_ids=ids, output_hidden_states=True)
    scales = [state.pow(2).mean().sqrt().item() for state in output.hidden_states]
    assert len(scales) == model.config.num_hidden_layers + 1
    assert all(state.dtype == torch.float32 and state.isfinite().all() for state in output.hidden_states)
    assert all(0.5 < scale < 2.0 for scale in scales), scales
    assert 1.0 < output.logits.std() < 5.0  # greedy choices are clear of rounding


@pytest.mark.parametrize("family", make_models.FAMILIES)
def test_a_family_is_made_the_same_twice_and_every_layer_of_its_reference_matters(family, tmp_path):
    for name in (family, "again"):
        make_models.tiny_family(tmp_path / name, family)
    assert sorted(digests(tmp_path / family)) == FOLDER
    assert digests(tmp_path / family) == digests(tmp_path / "again")
    model = make_models.reference_model(tmp_path / family)
    assert model.config.model_type == family
    ids = torch.randint(3, 512, (1, 200), generator=torch.Generator().manual_seed(1))  # (B, T)
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(states) == config_of(tmp_path / family)["num_hidden_layers"] + 1 == 5
    assert all(state.isfinite().all() and 0.5 < state.pow(2).mean().sqrt() < 4.0 for state in states)
    assert all((after - before).pow(2).mean().sqrt() > 0.1 for before, after in itertools.pairwise(states))


def test_sdpa_and_eager_attention_agree(folders):
    ids = torch.arange(3, 103)[None]  # (1, T)
    for folder in folders.values():
        with torch.no_grad():
            first, second = (
                make_models.reference_model(folder, attention)(input_ids=ids).logits for attention in ("sdpa", "eager")
            )
        assert (first - second).abs().max() < 1e-4


@pytest.mark.parametrize("name", MAKERS)
def test_neighbouring_layers_differ_far_more_than_any_tolerance(name, folders):
    ids = torch.arange(3, 203)[None]  # (1, T)
    with torch.no_grad():
        states = make_models.reference_model(folders[name])(input_ids=ids, output_hidden_states=True).hidden_states
    for before, after in itertools.pairwise(states):
        assert (after - before).pow(2).mean().sqrt() > 0.1


# --------------------------------------------------------------------------------------------------
# The toy
# --------------------------------------------------------------------------------------------------


def test_a_short_training_lowers_the_loss(toy):
    _, run, _ = toy
    assert len(run.losses) == 12
    assert run.losses[0] > 6.0  # ln 512 = 6.24: the untrained toy knows nothing
    assert run.final_loss == run.losses[-1] < run.losses[0] - 1.5
    assert run.tokens > 12 * 1000


def test_training_says_how_far_it_is_and_how_long_it_takes(toy):
    _, _, lines = toy
    assert "conversations" in lines[0]
    assert lines[-1].startswith("toy-target: step 12 of 12, loss ")
    assert lines[-1].endswith(" tok/s, 0 s left")


def test_the_toy_folder_holds_the_weights_that_were_trained(toy, folders):
    path, run, _ = toy
    assert sorted(digests(path)) == FOLDER
    assert digests(path)["tokenizer.json"] == digests(folders["llama"])["tokenizer.json"]
    model, tokenizer = make_models.reference_model(path), make_models.reference_tokenizer(path)
    losses = []
    for messages in make_models.training_conversations()[::200]:
        ids = torch.tensor([tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]])  # (1, T)
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    assert sum(losses) / len(losses) < run.losses[0] - 1.5


def test_training_is_repeatable(tmp_path):
    first, second = (make_models.toy_target(tmp_path / name, steps=2) for name in ("first", "second"))
    assert first.losses == second.losses
    assert digests(tmp_path / "first") == digests(tmp_path / "second")


def test_no_step_count_below_one_is_taken(tmp_path):
    with pytest.raises(ValueError, match=r"0 steps asked; ask for 1 or more with --steps"):
        make_models.toy_target(tmp_path / "toy", steps=0)
    assert list(tmp_path.iterdir()) == []


def test_the_learning_rate_warms_up_peaks_and_ends_at_zero():
    rates = [make_models.learning_rate_at(step, 400) for step in range(401)]
    assert rates[0] == pytest.approx(make_models.PEAK_LEARNING_RATE / 20)
    assert max(rates) == pytest.approx(make_models.PEAK_LEARNING_RATE, rel=0.01)
    assert rates.index(max(rates)) == 19
    assert rates[200] == pytest.approx(make_models.PEAK_LEARNING_RATE / 2)
    assert rates[400] == pytest.approx(0, abs=1e-12)


# --------------------------------------------------------------------------------------------------
# Prompts
# --------------------------------------------------------------------------------------------------


def test_prompts_are_unique_and_from_tables_that_were_not_trained_on(tmp_path):
    make_models.toy_prompts(tmp_path / "prompts.jsonl", 500)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text("utf-8").splitlines()]
    questions = [row["messages"][0]["content"] for row in rows]
    trained = {
        message["content"].split(":")[0]
        for messages in make_models.training_conversations()
        for message in messages
        if message["role"] == "user"
    }
    assert [row["id"] for row in rows] == [f"toy-{row:05d}" for row in range(500)]
    assert all([message["role"] for message in row["messages"]] == ["user"] for row in rows)
    assert len(set(questions)) == 500
    assert not trained & {question.split(":")[0] for question in questions}


def test_a_longer_prompt_list_starts_with_the_shorter_one(tmp_path):
    make_models.toy_prompts(tmp_path / "short.jsonl", 5)
    make_models.toy_prompts(tmp_path / "long.jsonl", 50)
    assert (tmp_path / "long.jsonl").read_bytes().startswith((tmp_path / "short.jsonl").read_bytes())


@pytest.mark.parametrize("count", [0, 100_000])
def test_a_prompt_count_that_cannot_be_had_is_refused_with_the_range(count, tmp_path):
    with pytest.raises(ValueError, match=r"ask for 1 to [0-9,]+ with --count"):
        make_models.toy_prompts(tmp_path / "prompts.jsonl", count)
    assert list(tmp_path.iterdir()) == []


def test_prompts_are_never_overwritten(tmp_path):
    make_models.toy_prompts(tmp_path / "prompts.jsonl", 5)
    with pytest.raises(FileExistsError, match=r"never overwritten; remove it: rm "):
        make_models.toy_prompts(tmp_path / "prompts.jsonl", 6)


def test_a_python_without_its_sources_is_named_with_the_package_to_install(tmp_path, monkeypatch):
    (tmp_path / "encodings").mkdir()
    make_models._blocks_by_table.cache_clear()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"0 code tables, expected 60 or more; .*libpython3-stdlib"):
        make_models.training_conversations()


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------


def test_the_command_line_makes_each_kind_and_prints_its_path(tmp_path, folders, capsys):
    out = tmp_path / "new" / "llama"
    make_models.main(["tiny-llama", str(out)])
    make_models.main(["tiny-deepseek", str(tmp_path / "deepseek")])
    make_models.main(["toy-target", str(tmp_path / "toy"), "--steps", "1"])
    make_models.main(["toy-prompts", str(tmp_path / "prompts.jsonl"), "--count", "3"])
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == str(out)
    assert "toy-target: final loss" in printed.err
    assert digests(out) == digests(folders["llama"])
    assert digests(tmp_path / "deepseek") == digests(folders["deepseek"])
    assert sorted(digests(tmp_path / "toy")) == FOLDER
    assert len((tmp_path / "prompts.jsonl").read_text("utf-8").splitlines()) == 3
