"""The workflow as a whole, without running it: what is planned, what is refused, and whether the house is in order."""

import ast
import re
import subprocess
import sys

import pytest
import yaml

from aerie import config as settings
from conftest import ROOT

CHUNKED = ("write_prompts", "generate_conversations", "tokenize_conversations", "capture_hidden")
# Which module may import which: only those before it. The order of reading in aerie/__init__.py.
ORDER = [
    "artifact", "progress", "container", "image", "config", "gpus", "warm", "server", "target", "prompts",
    "conversations", "tokens", "hidden", "capture", "convert", "vocab", "drafter", "training", "acceptance",
    "checkpoint", "export", "arms", "figures", "report",
]  # fmt: skip


def plan(tmp_path, *words, **changes):
    """Return (exit status, output) of a dry run with keys changed, in a results folder that does not exist."""
    changed = tmp_path / "changed.yaml"
    changed.write_text(yaml.safe_dump({"results_dir": f"results/{tmp_path.name}", **changes}))
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "2", "-n", "--configfile", str(changed), *words],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def jobs(output):
    """Return {rule: count} of the job table that Snakemake prints."""
    table = output.split("job ", 1)[1].split("total", 1)[0]
    return {rule: int(count) for rule, count in re.findall(r"^(\w+)\s+(\d+)$", table, re.MULTILINE)}


def test_a_fresh_run_plans_one_job_per_chunk_and_stage(tmp_path):
    status, output = plan(tmp_path, prompts={"count": 9, "rows_per_chunk": 4})
    assert status == 0, output
    planned = jobs(output)
    assert all(planned[rule] == 3 for rule in CHUNKED)
    assert planned["run_arm"] == 2 and planned["build_image"] == 1 and planned["write_report"] == 1


def test_one_chunk_can_be_asked_for_alone(tmp_path):
    target = f"results/{tmp_path.name}/hidden/00001.json.sha256"
    status, output = plan(tmp_path, "--", target, prompts={"count": 9, "rows_per_chunk": 4})
    assert status == 0, output
    assert {rule: count for rule, count in jobs(output).items() if rule in CHUNKED} == dict.fromkeys(CHUNKED, 1)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"drafter": {"learning_rat": 1}}, "drafter.learning_rat: 1: unknown key; did you mean 'learning_rate'?"),
        ({"prompts": {"count": 0}}, "prompts.count: 0"),
        ({"hidden": {"layers": [3, 99]}}, "hidden.layers: [3, 99]"),
        ({"target": {"source": "torrent"}}, "target.source: 'torrent'"),
    ],
)
def test_a_bad_configuration_is_refused_at_parse_time(tmp_path, changes, words):
    status, output = plan(tmp_path, **changes)
    assert status != 0 and words in output


def test_the_workflow_passes_its_own_lint():
    done = subprocess.run([sys.executable, "-m", "snakemake", "--lint"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "in a good condition" in done.stdout + done.stderr


def rules():
    """Return {rule: text of its file from its name on} of all rule files."""
    found = {}
    for path in sorted((ROOT / "rules").glob("*.smk")):
        for name, body in re.findall(r"^rule (\w+):\n(.*?)(?=^\S|\Z)", path.read_text(), re.MULTILINE | re.DOTALL):
            found[name] = body
    return found


def test_every_rule_runs_the_script_of_its_name_and_every_script_has_a_rule():
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert scripts == set(rules())
    for name, body in rules().items():
        assert f"python scripts/{name}.py" in body, name
        assert name == "verify" or f'settings.sources("{name}")' in body, f"{name}: its code is no input"


def test_directives_stand_in_one_order():
    order = [
        "input", "output", "log", "benchmark", "container", "conda", "threads", "resources", "retries", "params", "message", "shell",
    ]  # fmt: skip
    for name, body in rules().items():
        found = re.findall(r"^    (\w+):", body, re.MULTILINE)
        assert found == sorted(found, key=order.index), f"{name}: {found}"
        assert {"log", "message", "shell"} <= set(found), f"{name}: {found}"


def test_rules_hold_no_logic_and_no_secrets_of_snakemake():
    text = "".join(path.read_text() for path in (ROOT / "rules").glob("*.smk"))
    for word in ("def ", "service(", "group:", "touch(", "checkpoint ", "script:", "run:"):
        assert word not in text, word


def test_every_file_a_job_publishes_is_declared_with_its_sidecar():
    for name, body in rules().items():
        outputs = body.split("output:", 1)[1].split("log:", 1)[0] if "output:" in body else ""
        if name in ("write_manifest", "verify"):
            continue
        assert ".sha256" in outputs, name


def test_every_module_and_script_says_what_turns_into_what():
    for path in [*(ROOT / "scripts").glob("*.py"), *(ROOT / "scripts" / "aerie").glob("*.py")]:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, path
        if path.parent.name == "scripts":
            assert f"scripts/{path.name}" in docstring and "→" in docstring, path


def test_modules_import_only_what_stands_before_them():
    modules = {path.stem for path in (ROOT / "scripts" / "aerie").glob("*.py")} - {"__init__"}
    assert modules == set(ORDER)
    for module in modules:
        imported = {settings.Path(name).stem for name in settings.sources(f"aerie/{module}")} - {module}
        late = {name for name in imported if ORDER.index(name) > ORDER.index(module)}
        assert not late, f"{module} imports {late}"


def test_every_module_has_a_test_of_its_name():
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")}
    untested = set(ORDER) - tested - {"progress", "conversations", "checkpoint"}  # with server, tokens, train_drafter
    assert not untested


def test_the_tree_in_the_readme_is_the_tree():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    readme = (ROOT / "README.md").read_text().split("## The tree", 1)[1].split("##", 1)[0]
    named = set(re.findall(r"^ {4,6}([\w./]+)/? +\S", readme, re.MULTILINE))
    shown = {name.rstrip("/") for name in named}
    unnamed = {
        "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", ".gitignore",  # conventional, as on any project's front page
    }  # fmt: skip
    top = {name.split("/")[0] for name in listed} - unnamed
    assert top == {name.split("/")[0] for name in shown}, "README.md, 'The tree'"
    for name in shown:
        assert (ROOT / name).exists(), f"README.md names {name}"


def test_every_key_of_the_schema_is_a_flag_of_a_script():
    schema = yaml.safe_load(settings.SCHEMA.read_text())["properties"]
    flags = "".join(path.read_text() for path in [*(ROOT / "scripts").glob("*.py"), *(ROOT / "scripts" / "aerie").glob("*.py")])  # fmt: skip
    not_flags = {
        "threads",  # of Snakemake
        "settings", "parity",  # which arms there are, and which is compared
        "max_parity_difference", "extra_flags",  # --max-difference, --extra-flag
    }  # fmt: skip
    for section in schema.values():
        for key in section.get("properties", {}):
            assert key in not_flags or f'"--{key.replace("_", "-")}"' in flags, key


def test_the_project_names_no_machine_path_and_no_registry():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        if name.endswith(".lock"):
            continue
        text = (ROOT / name).read_text(errors="replace")
        found = re.findall(r"/(?:home|root)/\w+|(?:pypi|pythonhosted|(?:deb|ftp)\.debian)\.org", text)
        assert not found, f"{name}: {found}"
