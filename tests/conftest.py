"""What the real tests share: the image, the models, and commands run as a person would run them.

Tests marked `image` build the SGLang image first (minutes, once per run) and then start real servers inside it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from aerie import config as settings

ROOT = settings.ROOT
TOY = "tests/toy.yaml"
MODELS = Path("results", "test-models")  # relative: the container sees the checkout as its home


def toy_config():
    """Return config.yaml with the keys of tests/toy.yaml over it, as Snakemake merges them."""
    merged = yaml.safe_load((ROOT / "config.yaml").read_text())
    for key, value in yaml.safe_load((ROOT / TOY).read_text()).items():
        merged[key] = merged[key] | value if isinstance(value, dict) else value
    return merged


def run(*words, check=True):
    """Run a command in the checkout with what the workflow gives its jobs; return it with its combined output.

    Every line is printed as it comes (pytest -s shows it), so that a test that hangs is seen to hang.
    """
    environment = {**os.environ, **settings.job_environment(toy_config()), "PYTHONUNBUFFERED": "1"}
    words = [str(word) for word in words]
    lines = []
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    ) as process:  # fmt: skip
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    done = subprocess.CompletedProcess(words, process.returncode, "".join(lines))
    if check and done.returncode:
        pytest.fail(f"exit status {done.returncode}: {' '.join(words)}\n{done.stdout[-6000:]}")
    return done


def snakemake(*words, check=True):
    """Run `snakemake --cores 2` on the toy configuration."""
    return run(sys.executable, "-m", "snakemake", "--cores", "2", f"--configfile={TOY}", *words, check=check)


def in_image(sif, *words):
    """Return the command line that runs something inside the image, as Snakemake's `container:` does."""
    return ("apptainer", "exec", "--home", str(ROOT), str(sif), *map(str, words))


@pytest.fixture
def spawn():
    """Start programs in the checkout that are talked to through pipes; all are gone after the test."""
    started = []

    def start(*words, **environment):
        process = subprocess.Popen(
            [str(word) for word in words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, **environment},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def models():
    """Make the models of the real tests; return {name: folder}."""
    import make_models

    makers = {"tiny-llama": make_models.tiny_llama, "tiny-deepseek": make_models.tiny_deepseek, "toy": make_models.toy_target}  # fmt: skip
    for name, make in makers.items():
        if not (ROOT / MODELS / name / "config.json").is_file():
            make(ROOT / MODELS / name)
    prompts = ROOT / MODELS / "prompts.jsonl"
    if not prompts.is_file():
        make_models.toy_prompts(prompts, toy_config()["prompts"]["count"])
    return {name: MODELS / name for name in makers}


@pytest.fixture(scope="session")
def sif(models):
    """Build the image through the workflow; return its path."""
    path = Path(toy_config()["results_dir"], "container", "sglang.sif")
    snakemake("--", f"{path}.sha256")
    return path
