"""The capture with another release than the image's: a real server in the real image, that release first on PYTHONPATH.

The image pins one SGLang. The newest release of tests/releases.lock is laid over it, with the image's own Python, torch and
transformers: what its files make of the plugin and of the CPU kernels is tested, not its own dependencies.
"""

import pytest

import releases
from aerie import artifact, hidden
from capturing import LENGTHS, TOLERANCE, capture_command, largest_differences, prepare, reference_states
from conftest import ROOT, run, toy_config

pytestmark = pytest.mark.image

NEWEST = releases.VERSIONS[-1]
PIN = toy_config()["container"]["sglang_version"]


def with_release(version, command):
    """Return the command with a release before the image's; PYTHONPATH is set inside, because the image unsets it."""
    program = command.index("python")
    return (*command[:program], "env", f"PYTHONPATH={releases.unzipped(version)}", *command[program:])


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-deepseek"])
def test_every_index_that_the_newest_release_captures_equals_transformers(sif, models, name):
    assert NEWEST != PIN
    folder, count = prepare(f"{name}-{NEWEST}", models[name])
    layers, output = list(range(1, count)), folder / "hidden" / "00000.json"
    run(*with_release(NEWEST, capture_command(sif, folder, output, layers, **{"--sglang-version": NEWEST})))
    chunk = hidden.open_chunk(ROOT / output)
    assert [len(sample.input_ids) for sample in chunk] == LENGTHS * 2
    assert chunk.metadata["sglang_version"] == NEWEST
    expected = reference_states(models[name], chunk)
    worst = largest_differences(chunk, expected)
    print(f"{name}, SGLang {NEWEST} in the image of {PIN}: largest difference by index: {worst}")
    assert all(difference <= TOLERANCE for difference in worst.values()), worst
    shifted = max((sample.aux[:, 0] - expected[sample.id][2]).abs().max().item() for sample in chunk)
    assert shifted > 100 * TOLERANCE  # a shift of one layer would be seen


def test_another_release_under_the_pin_is_refused_by_name(sif, models):
    folder, count = prepare(f"pin-{NEWEST}", models["tiny-llama"])
    output = folder / "hidden" / "00000.json"
    command = capture_command(sif, folder, output, list(range(1, count)), **{"--sglang-version": PIN})
    done = run(*with_release(NEWEST, command), check=False)
    assert done.returncode != 0
    assert f"sglang_version: expected {PIN!r}, the server read back {NEWEST!r}" in done.stdout, done.stdout
    assert not (ROOT / output).exists() and not artifact.sidecar_of(ROOT / output).exists()
