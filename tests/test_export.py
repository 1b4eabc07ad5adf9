"""export: layer ids by table, the closed set of names, the served config, and every gate failing for its own reason."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import check_export
import drafting
import export_drafter
import train_drafter
from aerie import artifact, export, hidden
from aerie.export import ExportError, served_layer_ids
from drafting import CONFIG, drawn, naive_of, random_drafter, random_sample

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("architecture", "version", "captured", "written"),
    [
        # Every setter of these families adds 1, in every version.
        ("LlamaForCausalLM", "0.5.12.post1", [2, 16, 29], [1, 15, 28]),
        ("LlamaForCausalLM", "0.5.20", [1, 14, 26], [0, 13, 25]),
        ("Qwen3ForCausalLM", "0.5.23", [2, 14, 25], [1, 13, 24]),
        ("Qwen3MoeForCausalLM", "0.5.14", [3, 31, 59], [2, 30, 58]),
        ("GptOssForCausalLM", "0.5.20", [2, 12, 23], [1, 11, 22]),
        # DeepSeek and Kimi: as written since 0.5.14, raised by 1 where the list begins with 1 and before 0.5.14.
        ("KimiK25ForConditionalGeneration", "0.5.20", [3, 31, 59], [3, 31, 59]),
        ("DeepseekV3ForCausalLM", "0.5.14", [3, 31, 59], [3, 31, 59]),
        ("DeepseekV3ForCausalLM", "0.5.12.post1", [3, 31, 59], [2, 30, 58]),
        ("DeepseekV3ForCausalLM", "0.5.23", [2, 30, 58], [1, 29, 57]),
        ("DeepseekV3ForCausalLM", "0.5.12.post1", [2, 30, 58], [1, 29, 57]),
    ],
)
def test_layer_ids_are_spelled_for_the_family_and_the_version(architecture, version, captured, written):
    assert served_layer_ids(captured, architecture, version) == written


@pytest.mark.parametrize("family", [export.PLUS_ONE_ARCHITECTURES, export.RAW_UNLESS_ONE_ARCHITECTURES])
@pytest.mark.parametrize("version", ["0.5.12.post1", "0.5.14", "0.5.20", "0.5.23"])
def test_what_sglang_makes_of_the_spelling_is_what_was_captured(family, version):
    raises_all = family is export.PLUS_ONE_ARCHITECTURES or version == "0.5.12.post1"
    for captured in ([2, 5, 8], [3, 4, 9], [4, 30]):
        for architecture in family:
            ids = served_layer_ids(captured, architecture, version)
            hooked = [index + 1 for index in ids] if raises_all or ids[0] == 1 else ids
            assert hooked == captured


@pytest.mark.parametrize(
    ("captured", "architecture", "version", "message"),
    [
        (
            [1, 2, 3],
            "DeepseekV3ForCausalLM",
            "0.5.20",
            r"cannot be spelled .*read as \[2, 3, 4\]; choose hidden.layers",
        ),
        ([2, 3, 4], "BrandNewForCausalLM", "0.5.20", "BrandNewForCausalLM: how SGLang 0.5.20 .*add it to a table"),
        (
            [2, 3, 4],
            "LlamaForCausalLM",
            "0.5.24",
            "0.5.24: its layer id rules were not read .*extend scripts/aerie/export.py",
        ),
        ([2, 3, 4], "LlamaForCausalLM", "0.4.9", "known: 0.5.12 to 0.5.23"),
        ([2, 3, 4], "DeepseekV3ForCausalLM", "0.5.13", "pin another version"),
        ([2, 3, 4], "LlamaForCausalLM", "main", "expected major.minor.patch"),
        ([3, 2, 4], "LlamaForCausalLM", "0.5.20", "expected ascending, distinct HF indices from 1 on"),
        ([0, 2], "LlamaForCausalLM", "0.5.20", "from 1 on"),
        ([], "LlamaForCausalLM", "0.5.20", "from 1 on"),
    ],
)
def test_a_list_that_cannot_be_spelled_is_refused_with_what_to_do(captured, architecture, version, message):
    with pytest.raises(ExportError, match=message):
        served_layer_ids(captured, architecture, version)


# ---- the folder


def trained_weights():
    module, teacher = random_drafter()
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}, teacher


def test_the_exported_names_are_those_of_the_module_and_of_its_shapes():
    weights, _ = trained_weights()
    assert set(weights) == set(export.WEIGHTS)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        name: shape for name, shape in export.shapes(CONFIG).items() if name in export.WEIGHTS
    }
    assert set(export.shapes(CONFIG)) == set(export.EXPORTED)


def test_all_wrong_names_and_all_wrong_tensors_are_reported_at_once():
    weights, teacher = trained_weights()
    offsets = teacher.target_ids - torch.arange(drafting.R)
    wrong = {name: tensor for name, tensor in weights.items() if name not in ("fc.weight", "norm.weight")}
    with pytest.raises(ExportError) as caught:
        export.exported_tensors(
            wrong | {"embed_tokens.weight": torch.zeros(1)}, offsets, teacher.members, CONFIG, torch.float32
        )
    assert "missing ['fc.weight', 'norm.weight'], unexpected ['embed_tokens.weight']" in str(caught.value)
    weights["norm.weight"] = torch.full((drafting.D,), float("nan"))
    weights["lm_head.weight"] = weights["lm_head.weight"][1:]
    with pytest.raises(
        ExportError, match=r"lm_head.weight is \(31, 16\), expected \(32, 16\); norm.weight is not finite"
    ):
        export.exported_tensors(weights, offsets, teacher.members, CONFIG, torch.float32)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A results folder with a trained and exported drafter."""
    results = tmp_path_factory.mktemp("finished")
    drafting.write_run(results)
    train_drafter.main(drafting.train_arguments(results, steps=4))
    export_drafter.main(export_arguments(results))
    return results


def export_arguments(results, **changes):
    flags = {
        "trained": results / "drafter" / "trained.safetensors", "vocab": results / "drafter" / "vocab.safetensors",
        "target": results / "target" / "manifest.json", "metrics": results / "drafter" / "metrics.json",
        "sglang_version": "0.5.20", "output": results / "drafter" / "export", **changes,
    }  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_the_folder_holds_exactly_what_sglang_reads(finished):
    folder = finished / "drafter" / "export"
    digests = artifact.check_all(folder / name for name in ("config.json", "model.safetensors", "README.md"))
    assert len(list(folder.iterdir())) == 2 * len(digests)
    tensors, trained = load_file(folder / "model.safetensors"), load_file(finished / "drafter" / "trained.safetensors")
    assert set(tensors) == set(export.EXPORTED)
    assert all(torch.equal(tensors[name], trained[name]) for name in export.WEIGHTS)
    assert tensors["d2t"].tolist() == [0] * drafting.R and tensors["t2d"].sum() == drafting.R
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["tie_word_embeddings"] is False
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    assert config["aerie"]["layers"] == drafting.LAYERS
    assert (config["draft_vocab_size"], config["vocab_size"]) == (drafting.R, drafting.V)
    assert "target_hidden_size" not in config and "bias" not in config


def test_the_model_card_has_the_numbers_of_this_run(finished):
    card = (finished / "drafter" / "export" / "README.md").read_text()
    metrics = artifact.read_json(finished / "drafter" / "metrics.json")
    for figure in (metrics["final"]["true_token"]["accept_length"], metrics["final"]["walk"]["accept_length"]):
        assert f"{figure:.3f}" in card
    assert artifact.read_sidecar(finished / "drafter" / "trained.safetensors") in card
    assert "--speculative-num-steps 3" in card and "[0, 1, 3]" in card and "EAGLE-3 drafter for cycle" in card


def test_a_model_card_without_held_out_figures_says_unknown():
    nothing = {"accept_length": None, "cumulative": [None], "conditional": [None]}
    metrics = {
        "final": {"served_steps": 1, "positions": 0, "true_token": nothing,
                  "walk": {"accept_length": None, "tokens": 0, "rounds": 0}},
        "coverage": {"train": 1.0, "held_out": None}, "steps": 1, "tokens": 1, "selection": {"step": 1, "rule": "r"},
    }  # fmt: skip
    own = dict.fromkeys(("target_digest", "tokenizer_digest", "trained_sha256"), "d")
    config = export.served_config(
        CONFIG, [0, 1, 3], "float32", {**own, "layers": [1, 2, 4], "sglang_version": "0.5.20"}
    )
    assert export.model_card(config, metrics, "x").count("unknown") == 5


def test_two_exports_are_equal_byte_for_byte(finished, tmp_path):
    export_drafter.main(export_arguments(finished, output=tmp_path))
    for name in ("config.json", "model.safetensors", "README.md"):
        assert artifact.check(tmp_path / name) == artifact.check(finished / "drafter" / "export" / name)


def test_weights_are_exported_in_the_dtype_asked_for(finished, tmp_path):
    export_drafter.main(export_arguments(finished, output=tmp_path, dtype="bfloat16"))
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensors[name].dtype for name in export.WEIGHTS} == {torch.bfloat16} and tensors["d2t"].dtype == torch.int64
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_files_of_different_runs_are_refused_all_at_once(finished, tmp_path):
    with safe_open(finished / "drafter" / "trained.safetensors", framework="pt") as file:
        description = json.loads(file.metadata()["aerie"])
    description["identity"], description["inputs"]["vocab"] = "0" * 64, "1" * 64
    other = tmp_path / "trained.safetensors"
    with artifact.publish(other) as temporary:
        save_file(
            load_file(finished / "drafter" / "trained.safetensors"), temporary, artifact.metadata_entry(description)
        )
    with pytest.raises(
        ExportError, match=r"vocab.safetensors: digest is[\s\S]*metrics.json: identity is[\s\S]*train again"
    ):
        export_drafter.main(export_arguments(finished, trained=other))


def test_transformers_reads_the_config_as_it_was_meant(finished):
    transformers = pytest.importorskip("transformers")
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    for rope in (None, scaling):
        written = export.served_config(replace(CONFIG, rope_theta=5e5, rope_scaling=rope), [0, 1, 3], "bfloat16", {})
        read = transformers.LlamaConfig.from_dict(written)
        assert read.rope_parameters == {"rope_theta": 5e5, "rope_type": "default", **(rope or {})}
        assert read.head_dim == CONFIG.head_dim and read.draft_vocab_size == drafting.R
        assert read.tie_word_embeddings is False and read.dtype == torch.bfloat16


# ---- what the server must hold


def test_the_fused_layout_is_the_one_of_tensor_parallel_ranks():
    weights, _ = trained_weights()
    q, k, v = (weights[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkv")
    whole = export.fused_parameters(weights, CONFIG, 0, 1)
    assert torch.equal(whole["model.layers.0.self_attn.qkv_proj.weight"], torch.cat((q, k, v)))
    assert torch.equal(whole["model.layers.0.self_attn.o_proj.weight"], weights["midlayer.self_attn.o_proj.weight"])
    halves = [export.fused_parameters(weights, CONFIG, rank, 2) for rank in range(2)]
    assert torch.equal(halves[1]["model.layers.0.self_attn.qkv_proj.weight"], torch.cat((q[12:], k[6:], v[6:])))
    assert torch.equal(torch.cat([half["model.layers.0.mlp.down_proj.weight"] for half in halves], 1),
                       weights["midlayer.mlp.down_proj.weight"])  # fmt: skip
    # Four ranks share two key heads: ranks 2 and 3 both hold the second one.
    quarters = [export.fused_parameters(weights, CONFIG, rank, 4) for rank in range(4)]
    assert torch.equal(quarters[2]["model.layers.0.self_attn.qkv_proj.weight"], torch.cat((q[12:18], k[6:], v[6:])))
    assert torch.equal(quarters[3]["model.layers.0.self_attn.qkv_proj.weight"], torch.cat((q[18:], k[6:], v[6:])))


def test_vocabulary_rows_are_padded_with_zeros_and_split():
    tensor = torch.arange(10.0).view(5, 2)
    assert torch.equal(export.vocabulary_shard(tensor, 4, 0), tensor[:4])
    assert torch.equal(export.vocabulary_shard(tensor, 4, 1), torch.cat((tensor[4:], torch.zeros(3, 2))))


def served(sample, prompt_tokens=9, ranks=1):
    """What a faultless server would leave in the probe, computed by the naive implementation."""
    weights, teacher = trained_weights()
    module, _ = random_drafter()
    exported = export.exported_tensors(
        weights, teacher.target_ids - torch.arange(drafting.R), teacher.members, CONFIG, torch.float32
    )
    ids = sample.input_ids[: prompt_tokens + 1]
    naive = naive_of(module, module.embed_tokens)
    with torch.no_grad():
        logits = next(naive.chain(ids.tolist(), sample.aux, prompt_tokens - 1, 1))
    rows = 64 // ranks  # SGLang pads the vocabulary to a multiple of 64
    parameters = [
        {**export.fused_parameters(exported, CONFIG, rank, ranks),
         "lm_head.weight": export.vocabulary_shard(exported["lm_head.weight"], rows, rank)}
        for rank in range(ranks)
    ]  # fmt: skip
    probe = export.Probe(
        parameters=parameters, hot_token_id=teacher.target_ids.clone(), offered=list(export.EXPORTED), left_over=[],
        not_loaded=[export.EMBEDDING], layers=[1, 2, 4], flagged_layers=[], layer_defects=[], input_ids=ids[1:],
        positions=torch.arange(prompt_tokens), aux=sample.aux[:prompt_tokens].flatten(1), logits=logits[None],
    )  # fmt: skip
    return probe, exported, weights, module.embed_tokens


SAMPLE = random_sample("asked", 14, 9)


def gates_of(probe, exported, trained, embedding, dtype="float32"):
    gates = export.compare(probe, exported, trained, CONFIG, [1, 2, 4], SAMPLE, embedding, dtype)
    return {gate.name: gate for gate in gates}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_faultless_server_passes_every_gate(ranks):
    gates = gates_of(*served(SAMPLE, ranks=ranks))
    assert set(gates) == set(export.CAUSES)
    for gate in gates.values():
        assert gate.passed, gate
    assert gates["states"].value == 0 and 0 < gates["logits"].value < 1e-5
    assert gates["logits"].detail.endswith("first choice equal")


def changed_parameter(probe, name, change):
    loaded = dict(probe.parameters[0])
    loaded[name] = change(loaded[name].clone())
    return replace(probe, parameters=[loaded])


def without(probe, name):
    return replace(probe, parameters=[{key: t for key, t in probe.parameters[0].items() if key != name}])


def nudge(tensor):
    tensor.view(-1)[3] += 2e-7 * tensor.view(-1)[3].abs() + 1e-30  # a last bit
    return tensor


FAULTS = {
    "a skipped name": ("names", lambda p: replace(p, left_over=["midlayer.hidden_norm.weight"])),
    "a name that was never offered": ("names", lambda p: replace(p, offered=p.offered[1:])),
    "a name that was not exported": ("names", lambda p: replace(p, offered=[*p.offered, "embed_tokens.weight"])),
    "an unset parameter": ("names", lambda p: replace(p, not_loaded=[export.EMBEDDING, "model.fc.weight"])),
    "a last bit of fc": ("parameters", lambda p: changed_parameter(p, "model.fc.weight", nudge)),
    "another dtype": ("parameters", lambda p: changed_parameter(p, "model.norm.weight", torch.Tensor.bfloat16)),
    "a missing parameter": ("parameters", lambda p: without(p, "model.norm.weight")),
    "a missing lm_head": ("parameters", lambda p: without(p, "lm_head.weight")),
    "a surplus parameter": ("parameters", lambda p: replace(p, parameters=[{**p.parameters[0], "model.input_norm": p.logits}])),
    "a short lm_head": ("parameters", lambda p: changed_parameter(p, "lm_head.weight", lambda t: t[:20])),
    "padding that is not zero": ("parameters", lambda p: changed_parameter(p, "lm_head.weight", lambda t: t + (torch.arange(64) == 63)[:, None])),
    "ids for offsets": ("draft_vocabulary", lambda p: replace(p, hot_token_id=p.hot_token_id + torch.arange(drafting.R))),
    "no token map": ("draft_vocabulary", lambda p: replace(p, hot_token_id=None)),
    "one layer off": ("layers", lambda p: replace(p, layers=[2, 3, 5])),
    "flags on other layers": ("layers", lambda p: replace(p, flagged_layers=[1, 2, 5])),
    "layers that were not read": ("layers", lambda p: replace(p, layer_defects=["no layers_to_capture"])),
    "another prompt": ("prompt", lambda p: replace(p, input_ids=p.input_ids.roll(1))),
    "positions from one on": ("prompt", lambda p: replace(p, positions=p.positions + 1)),
    "layers in another order": ("states", lambda p: replace(p, aux=p.aux.unflatten(1, (3, -1)).flip(1).flatten(1))),
    "a state that is not a number": ("states", lambda p: replace(p, aux=p.aux.masked_fill(torch.eye(9, 48) > 0, float("nan")))),
    "one layer only": ("states", lambda p: replace(p, aux=p.aux[:, :16])),
    "other logits": ("logits", lambda p: replace(p, logits=p.logits.flip(1))),
    "logits of another width": ("logits", lambda p: replace(p, logits=p.logits[:, :-1])),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails_its_own_gate_with_its_usual_cause(fault):
    name, breaking = FAULTS[fault]
    probe, exported, trained, embedding = served(SAMPLE)
    gates = gates_of(breaking(probe), exported, trained, embedding)
    assert not gates[name].passed
    record = gates[name].to_json()
    assert record["passed"] is False and record["usual_cause"] == export.CAUSES[name]
    json.dumps(record, allow_nan=False)
    unrelated = {"names", "parameters", "draft_vocabulary", "layers", "export"} - {name}
    assert all(gates[other].passed for other in unrelated)


def test_an_export_of_other_weights_fails_the_export_gate():
    probe, exported, trained, embedding = served(SAMPLE)
    trained["fc.weight"] = trained["fc.weight"] + 1
    gates = gates_of(probe, exported, trained, embedding)
    assert not gates["export"].passed and gates["export"].detail == "fc.weight"


def test_the_targets_first_token_may_differ_from_the_captured_one_but_no_other_may():
    probe, exported, trained, embedding = served(SAMPLE)
    drawn_token = probe.input_ids.clone()
    drawn_token[-1] = (drawn_token[-1] + 1) % drafting.V
    assert gates_of(replace(probe, input_ids=drawn_token), exported, trained, embedding)["prompt"].passed
    drawn_token[-2] = (drawn_token[-2] + 1) % drafting.V
    assert gates_of(replace(probe, input_ids=drawn_token), exported, trained, embedding)["prompt"].value == 1


def test_rounded_states_and_logits_pass_as_bfloat16_and_fail_as_float32():
    probe, exported, trained, embedding = served(SAMPLE)
    rounded = replace(probe, aux=probe.aux.bfloat16(), logits=probe.logits.bfloat16())
    gates = gates_of(rounded, exported, trained, embedding, "float32")
    assert not gates["states"].passed
    half = {name: t if name in ("d2t", "t2d") else t.bfloat16() for name, t in exported.items()}
    loaded = [{name: tensor.bfloat16() for name, tensor in probe.parameters[0].items()}]
    gates = gates_of(replace(rounded, parameters=loaded), half, trained, embedding, "bfloat16")
    assert all(gate.passed for gate in gates.values()), gates


def test_a_probe_is_read_back_and_an_incomplete_one_is_refused(tmp_path):
    probe, *_ = served(SAMPLE)
    with pytest.raises(ExportError, match=r"no complete probe \(state 'none'.*look at the server's log"):
        export.read_probe(tmp_path, 1)
    facts = {
        "state": "loaded",
        "draft": {"offered": probe.offered, "left_over": [], "not_loaded": probe.not_loaded},
        "target": {"layers_to_capture": [1, 2, 4], "flagged_layers": [], "defects": []},
    }
    (tmp_path / "probe.json").write_text(json.dumps(facts))
    save_file(probe.parameters[0], tmp_path / "draft-params-rank0.safetensors")
    with pytest.raises(ExportError, match="state 'loaded'"):
        export.read_probe(tmp_path, 1)
    (tmp_path / "probe.json").write_text(json.dumps(facts | {"state": "probed"}))
    tensors = {
        name: getattr(probe, name).contiguous() for name in ("input_ids", "positions", "aux", "logits", "hot_token_id")
    }
    save_file(tensors, tmp_path / "probe.safetensors")
    with pytest.raises(ExportError, match="missing .'draft-params-rank1.safetensors'"):
        export.read_probe(tmp_path, 2)
    read = export.read_probe(tmp_path, 1)
    for name in tensors:
        assert torch.equal(getattr(read, name), getattr(probe, name))
    assert (read.layers, read.offered, read.left_over) == ([1, 2, 4], probe.offered, [])
    assert read.parameters[0].keys() == probe.parameters[0].keys()


def test_the_trainers_first_step_is_the_naive_one():
    probe, exported, _, embedding = served(SAMPLE, prompt_tokens=5)
    ours = export.first_step_logits(exported, CONFIG, embedding, probe.input_ids, probe.aux)
    torch.testing.assert_close(ours, probe.logits[0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(
        ours,
        export.first_step_logits(exported, CONFIG, drawn(drafting.V, drafting.D, seed=77), probe.input_ids, probe.aux),
    )


# ---- the check's command line, with the server replaced by what a faultless one leaves behind


def check_arguments(results):
    flags = {
        "drafter": results / "drafter" / "export", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4,
        "sglang_version": "0.5.20", "trained": results / "drafter" / "trained.safetensors",
        "head": results / "target" / "head.safetensors", "hidden": results / "hidden" / "00000.json",
        "server_log": results / "logs" / "server.log", "output": results / "drafter" / "check.json",
        "model": results / "target" / "model", "device": "cpu", "dtype": "float32", "tensor_parallel": 1,
        "context_tokens": 128, "max_running_requests": 1, "start_timeout_s": 1, "seed": 1,
    }  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def serve(results, monkeypatch, version="0.5.20", breaking=lambda tensors: tensors):
    """Replace the server: write the probe of the exported folder for the prompt that is asked."""

    def ask(arguments, prompt, folder):
        exported = load_file(arguments.drafter / "model.safetensors")
        samples = {tuple(s.input_ids[: len(prompt)].tolist()): s for s in hidden.open_chunk(arguments.hidden)}
        sample, T = samples[tuple(prompt)], len(prompt)
        head = load_file(arguments.head)
        ids, aux = sample.input_ids[1 : T + 1], sample.aux[:T].flatten(1)
        logits = export.first_step_logits(exported, CONFIG, head["embed_tokens.weight"], ids, aux)
        tensors = {"input_ids": ids, "positions": torch.arange(T), "aux": aux, "logits": logits[None],
                   "hot_token_id": exported["d2t"] + torch.arange(drafting.R)}  # fmt: skip
        parameters = export.fused_parameters(exported, CONFIG, 0, 1)
        parameters["lm_head.weight"] = export.vocabulary_shard(exported["lm_head.weight"], 64, 0)
        probe = folder / "probe"
        probe.mkdir()
        save_file(
            {name: tensor.clone() for name, tensor in parameters.items()}, probe / "draft-params-rank0.safetensors"
        )
        save_file({name: tensor.clone() for name, tensor in breaking(tensors).items()}, probe / "probe.safetensors")
        (probe / "probe.json").write_text(json.dumps({
            "state": "probed",
            "draft": {"offered": sorted(exported), "left_over": [], "not_loaded": [export.EMBEDDING]},
            "target": {"layers_to_capture": drafting.LAYERS, "flagged_layers": [], "defects": []},
        }))  # fmt: skip
        return version

    monkeypatch.setattr(check_export, "ask", ask)
    check_export.main(check_arguments(results))


def test_the_check_publishes_all_gates_of_a_faultless_server(finished, monkeypatch):
    serve(finished, monkeypatch)
    record = artifact.read_json(finished / "drafter" / "check.json")
    assert set(record["gates"]) == set(export.CAUSES) and all(gate["passed"] for gate in record["gates"].values())
    assert record["sglang_version"] == "0.5.20" and record["prompt_tokens"] == drafting.PROMPT_TOKENS
    assert set(record["export"]) == {"config.json", "model.safetensors", "README.md"}


def test_the_check_names_every_failed_gate_with_its_cause_and_publishes_nothing(finished, monkeypatch):
    (finished / "drafter" / "check.json").unlink(missing_ok=True)
    with pytest.raises(ExportError) as caught:
        serve(
            finished, monkeypatch, breaking=lambda t: t | {"positions": t["positions"] + 1, "logits": t["logits"] + 9}
        )
    message = str(caught.value)
    assert "the served drafter is not the trained drafter" in message
    assert "prompt: 4 of 4" in message and f"Usual cause: {export.CAUSES['logits']}" in message
    assert "states:" not in message
    assert not (finished / "drafter" / "check.json").exists()


def test_the_check_refuses_another_sglang_and_a_changed_export(finished, monkeypatch, tmp_path):
    with pytest.raises(ExportError, match="served by SGLang 0.5.23, exported for 0.5.20"):
        serve(finished, monkeypatch, version="0.5.23")
    copied = tmp_path / "results"
    shutil.copytree(finished, copied, symlinks=True)
    card = copied / "drafter" / "export" / "README.md"
    card.write_text(card.read_text() + "x")
    with pytest.raises(artifact.ArtifactError, match="README.md: changed since it was published"):
        serve(copied, monkeypatch)


def test_the_longest_prompt_of_the_chunk_is_asked(tmp_path):
    manifest = drafting.write_target(tmp_path)
    short, long = drafting.cyclic_sample("short", 12, False), drafting.cyclic_sample("long", 12, False)
    long.loss_mask[: drafting.PROMPT_TOKENS + 3] = 0
    drafting.write_chunk(tmp_path, manifest, 0, [short, long])
    path = tmp_path / "hidden" / "00000.json"
    sample, prompt = check_export.choose_prompt(hidden.open_chunk(path), path)
    assert sample.id == "long" and prompt == long.input_ids[:7].tolist()
    long.loss_mask[:] = short.loss_mask[:] = 0
    drafting.write_chunk(tmp_path, manifest, 1, [short, long])
    path = tmp_path / "hidden" / "00001.json"
    with pytest.raises(ExportError, match="00001.json: no conversation with a prompt and an answer"):
        check_export.choose_prompt(hidden.open_chunk(path), path)
