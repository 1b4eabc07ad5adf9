"""Families of docs/families.md that run on a CPU: the captured index i is transformers' hidden_states[i]."""

import os

import pytest

import make_models
from aerie import hidden
from capturing import TOLERANCE, capture_command, largest_differences, prepare, reference_states
from conftest import MODELS, ROOT, run

pytestmark = pytest.mark.image

# A family takes most of a minute on two cores. These differ in what could go wrong: how the residual is carried, experts,
# latent attention, attention sinks, norms. AERIE_ALL_FAMILIES=1 runs every one.
DIFFERENT = ("deepseek_v2", "gemma4_text", "glm4_moe", "gpt_oss", "minimax_m2", "qwen3_moe")
REFUSED = {"gemma3_text": "appends its layers' branch without the residual"}
FAMILIES = sorted(make_models.FAMILIES.keys() - REFUSED) if os.environ.get("AERIE_ALL_FAMILIES") else DIFFERENT


def prepare_family(family):
    """Make the model of a family where it is missing; return its folder, the work folder and the layers to capture."""
    model = MODELS / family
    if not (ROOT / model / "config.json").is_file():
        make_models.tiny_family(ROOT / model, family)
    folder, count = prepare(f"family-{family}", model)
    return model, folder, list(range(1, count))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_captured_index_of_a_family_equals_transformers(sif, family):
    model, folder, layers = prepare_family(family)
    output = folder / "hidden" / "00000.json"
    run(*capture_command(sif, folder, output, layers))
    chunk = hidden.open_chunk(ROOT / output)
    assert chunk.metadata["layers"] == layers
    expected = reference_states(model, chunk)
    worst = largest_differences(chunk, expected)
    print(f"{family} ({chunk.metadata['model_class']}): largest difference by index: {worst}")
    assert all(difference <= TOLERANCE for difference in worst.values()), worst
    # A shift by one layer would be seen.
    assert max((s.aux[:, 0] - expected[s.id][2]).abs().max().item() for s in chunk) > 100 * TOLERANCE


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_whose_aux_states_are_wrong_in_sglang_is_refused_with_the_reason(sif, family):
    _, folder, layers = prepare_family(family)
    done = run(*capture_command(sif, folder, folder / "hidden" / "00000.json", layers), check=False)
    assert done.returncode != 0
    assert REFUSED[family] in (ROOT / folder / "hidden" / "00000.json.server.log").read_text()
