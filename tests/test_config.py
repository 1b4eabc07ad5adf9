"""config: every mistake is refused before anything runs, with the key, the value and what is allowed."""

import copy

import pytest
import yaml

from aerie import config
from aerie.config import ConfigError

SHIPPED = yaml.safe_load((config.ROOT / "config.yaml").read_text())


def changed(**sections):
    result = copy.deepcopy(SHIPPED)
    for section, keys in sections.items():
        result[section].update(keys)
    return result


def test_the_shipped_configuration_is_valid():
    config.validate(SHIPPED)


@pytest.mark.parametrize(
    "sections, words",
    [
        ({"drafter": {"learning_rat": 1}}, ["drafter.learning_rat: 1: unknown key", "did you mean 'learning_rate'?"]),
        ({"prompts": {"count": 0}}, ["prompts.count: 0", ">= 1"]),
        ({"prompts": {"rows_per_chunk": 0}}, ["prompts.rows_per_chunk: 0", ">= 1"]),
        ({"prompts": {"source": "sharegpt"}}, ["prompts.source: 'sharegpt'", "self, jsonl, hub"]),
        ({"target": {"source": "ftp"}}, ["target.source: 'ftp'", "pypi, hub, local"]),
        ({"hidden": {"layers": [3, 15, 30]}}, ["hidden.layers: [3, 15, 30]", "from 1 to 29"]),
        ({"hidden": {"layers": [0, 15]}}, ["hidden.layers", "from 1"]),
        ({"hidden": {"layers": [15, 3]}}, ["hidden.layers: [15, 3]", "ascending"]),
        ({"container": {"base": "docker://debian:bookworm"}}, ["container.base", "sha256"]),
        ({"prompts": {"source": "jsonl"}}, ["prompts.file: ''", "not empty with prompts.source: jsonl"]),
        ({"arms": {"settings": {"a": {}, "b": {}}}}, ["arms.settings: ['a', 'b']", "exactly one baseline"]),
        ({"arms": {"parity": "nobody"}}, ["arms.parity: 'nobody'"]),
        ({"arms": {"repeats": 2}}, ["arms.repeats: 2", ">= 3"]),
        ({"conversations": {"max_new_tokens": 5000}}, ["conversations.max_new_tokens: 5000", "1024"]),
        ({"drafter": {"num_key_value_heads": 2}}, ["drafter.num_key_value_heads: 2", "divisor"]),
    ],
)
def test_a_mistake_is_named_with_its_key_its_value_and_what_is_allowed(sections, words):
    with pytest.raises(ConfigError) as error:
        config.validate(changed(**sections))
    for word in words:
        assert word in str(error.value)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        config.validate(changed(prompts={"count": 0}, drafter={"typo": 1}, target={"source": "x"}))
    assert all(word in str(error.value) for word in ("prompts.count", "drafter.typo", "target.source"))


def test_a_missing_key_is_named():
    broken = changed()
    del broken["hidden"]["final"]
    with pytest.raises(ConfigError, match="hidden: missing final"):
        config.validate(broken)


def test_chunks_are_known_from_the_configuration_alone():
    assert config.chunk_ids(changed(prompts={"count": 9, "rows_per_chunk": 4})) == ["00000", "00001", "00002"]
    assert config.chunk_ids(changed(prompts={"count": 8, "rows_per_chunk": 4})) == ["00000", "00001"]


def test_flags_spell_keys_as_the_scripts_do():
    section = {"max_tokens": 3, "layers": [1, 2], "regenerate": True, "file": "", "mode": "auto"}
    assert config.flags(section, "max_tokens", "layers", "regenerate", "file", "mode") == (
        "--max-tokens 3 --layers 1 2 --regenerate yes --mode auto"
    )


def test_the_sources_of_a_script_are_it_and_all_it_imports():
    found = config.sources("capture_hidden")
    assert "scripts/capture_hidden.py" in found and "scripts/aerie/hidden.py" in found
    assert "scripts/aerie/artifact.py" in found  # through hidden
    assert "scripts/aerie/arms.py" not in found


def test_every_key_is_commented_in_the_shipped_file():
    for number, line in enumerate((config.ROOT / "config.yaml").read_text().splitlines(), 1):
        if line.startswith("  ") and not line.startswith("    ") and ":" in line:
            explained = "#" in line or line.strip().split(":")[0] in EXPLAINED_BY_NAME
            assert explained, f"config.yaml:{number}: no comment: {line}"


# Keys whose name and unit say all there is to say.
EXPLAINED_BY_NAME = {
    "max_running_requests", "seed", "top_p", "num_attention_heads", "num_key_value_heads", "epochs",
    "learning_rate", "weight_decay", "max_grad_norm", "eval_every_steps", "save_every_steps",
}  # fmt: skip
