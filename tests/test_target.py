"""target: the head is read without the model, and a folder that is not whole is refused with all its defects."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from aerie import artifact, target
from aerie.target import TargetError

V, D = 12, 4


def make_folder(folder, tied=False, prefix="", shards=2, nested=False):
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    tensors = {
        f"{prefix}model.embed_tokens.weight": torch.randn(V, D),
        f"{prefix}model.norm.weight": torch.randn(D),
        f"{prefix}model.layers.0.input_layernorm.weight": torch.randn(D),
    }
    if not tied:
        tensors[f"{prefix}lm_head.weight"] = torch.randn(V, D)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        names = {}
        for number, name in enumerate(sorted(tensors)):
            shard = f"model-0000{number % 2}.safetensors"
            names[name] = shard
        for shard in sorted(set(names.values())):
            save_file({name: tensors[name] for name, where in names.items() if where == shard}, folder / shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    inner = {"num_hidden_layers": 4, "hidden_size": D, "vocab_size": V, "model_type": "llama", "eos_token_id": 2}
    config = {"architectures": ["X"], **({"text_config": inner} if nested else inner)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return tensors


@pytest.mark.parametrize("tied, prefix, shards, nested", [(False, "", 2, False), (True, "", 1, False), (False, "language_model.", 2, True)])  # fmt: skip
def test_the_head_is_written_whole_also_when_tied_or_wrapped(tmp_path, tied, prefix, shards, nested):
    tensors = make_folder(tmp_path / "m", tied, prefix, shards, nested)
    target.require_complete(tmp_path / "m")
    manifest = target.describe(tmp_path / "m", {})
    target.write_head(tmp_path / "m", manifest, tmp_path / "head.safetensors")
    artifact.check(tmp_path / "head.safetensors")
    with safe_open(tmp_path / "head.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["embed_tokens.weight", "lm_head.weight", "norm.weight"]
        embedding = tensors[f"{prefix}model.embed_tokens.weight"]
        assert torch.equal(file.get_tensor("embed_tokens.weight"), embedding)
        head = embedding if tied else tensors[f"{prefix}lm_head.weight"]
        assert torch.equal(file.get_tensor("lm_head.weight"), head)
    assert manifest["facts"]["tied_head"] is tied and manifest["facts"]["eos_token_ids"] == [2]


def test_every_defect_of_a_folder_is_reported_at_once(tmp_path):
    make_folder(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    (tmp_path / "m" / "model-00000.safetensors").unlink()
    path = tmp_path / "m" / "model-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(TargetError) as error:
        target.require_complete(tmp_path / "m")
    assert "model-00000.safetensors: missing shard (named in model.safetensors.index.json)" in str(error.value)
    assert "model-00001.safetensors: cut short or grown" in str(error.value)
    assert "no tokenizer" in str(error.value)


def test_a_shard_cut_inside_its_header_is_named(tmp_path):
    make_folder(tmp_path / "m", shards=1)
    path = tmp_path / "m" / "model.safetensors"
    for size in (4, 20):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(TargetError, match="cut short"):
            target.require_complete(tmp_path / "m")


def test_a_folder_without_a_chat_template_is_refused(tmp_path):
    make_folder(tmp_path / "m")
    (tmp_path / "m" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TargetError, match="no chat template"):
        target.require_complete(tmp_path / "m")


def test_a_missing_or_doubled_head_tensor_is_named():
    with pytest.raises(TargetError, match=r"'\[prefix.\]lm_head.weight', found none"):
        target.head_names(["model.embed_tokens.weight", "model.norm.weight"], tied=False)
    with pytest.raises(TargetError, match="found \\['a.model.norm.weight', 'b.model.norm.weight'\\]"):
        target.head_names(["model.embed_tokens.weight", "a.model.norm.weight", "b.model.norm.weight"], tied=True)


def test_a_changed_tokenizer_changes_its_digest_and_is_refused_by_consumers(tmp_path):
    make_folder(tmp_path / "target" / "model")
    manifest = target.describe(tmp_path / "target" / "model", {})
    artifact.write_json(tmp_path / "target" / "manifest.json", manifest)
    assert target.check_model(tmp_path / "target" / "manifest.json") == manifest
    (tmp_path / "target" / "model" / "tokenizer.json").write_text("[]")
    (tmp_path / "target" / "model" / "model-00000.safetensors").unlink()
    with pytest.raises(artifact.ArtifactError) as error:
        target.check_model(tmp_path / "target" / "manifest.json")
    assert "tokenizer.json: changed" in str(error.value) and "model-00000.safetensors: missing" in str(error.value)
    assert "-f -- " in str(error.value)
