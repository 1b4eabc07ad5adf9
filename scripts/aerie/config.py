"""config.yaml against its closed schema, and what the rules derive from it.

Everything here runs at parse time of the Snakefile, in every job anew: no file of a run is opened, nothing
is hashed. All defects of a configuration are reported at once, with the key, the value and what is allowed.
"""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from aerie import artifact, container

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "schema" / "config.schema.yaml"
LIBRARY = Path("scripts", "aerie")
SERVER_PLUGINS = "aerie_capture,aerie_cpu_kernels"  # entry points SGLang may load; a missing one is no error


# Formats of scripts/convert_hidden.py, and the final state each needs.
EXPORT_FINAL = {"speculators_v1": "pre_norm", "speculators": "pre_norm", "specforge": "post_norm"}


class ConfigError(ValueError):
    """A configuration that cannot run; one line per defect."""


def _name(path: Any) -> str:
    return ".".join(str(part) for part in path) or "(top level)"


def _allowed(schema: dict[str, Any]) -> str:
    """Return what a key accepts, in words."""
    if "oneOf" in schema:
        return schema.get("description") or " or ".join(_allowed(option) for option in schema["oneOf"])
    parts = []
    if "enum" in schema:
        parts.append("one of " + ", ".join(map(str, schema["enum"])))
    elif "const" in schema:
        parts.append(str(schema["const"]))
    elif "type" in schema:
        parts.append({"object": "a section", "integer": "a whole number"}.get(schema["type"], f"a {schema['type']}"))
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    parts += [f"{sign} {schema[key]}" for key, sign in bounds.items() if key in schema]
    if "minLength" in schema:
        parts.append("not empty")
    text = ", ".join(parts) or "see the schema"
    return f"{text} ({schema['description']})" if "description" in schema else text


def _schema_defects(config: dict[str, Any]) -> Iterator[str]:
    schema = yaml.safe_load(SCHEMA.read_text())
    for error in jsonschema.Draft202012Validator(schema).iter_errors(config):
        if error.validator == "additionalProperties" and error.schema.get("properties"):
            known = sorted(error.schema["properties"])
            for key in sorted(set(error.instance) - set(known)):
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean '{near[0]}'? " if near else ""
                yield f"{_name([*error.path, key])}: {error.instance[key]!r}: unknown key; {hint}allowed: {', '.join(known)}"
        elif error.validator == "required":
            missing = [key for key in error.schema["required"] if key not in error.instance]
            yield f"{_name(error.path)}: missing {', '.join(missing)}"
        else:
            yield f"{_name(error.path)}: {error.instance!r}: allowed: {_allowed(error.schema)}"


def _meaning_defects(config: dict[str, Any]) -> Iterator[str]:
    """Yield what the schema cannot say: keys that must agree with each other."""
    layers, count = config["hidden"]["layers"], config["target"]["num_hidden_layers"]
    if layers != "auto" and (sorted(layers) != layers or layers[-1] >= count):
        yield (
            f"hidden.layers: {layers}: allowed: ascending HF indices from 1 to {count - 1} "
            f"(target.num_hidden_layers: {count}), or auto"
        )
    stored, computed = config["hidden"]["state_dtype"], config["server"]["dtype"]
    if stored not in (computed, "float8_e4m3"):
        yield f"hidden.state_dtype: {stored}: allowed: server.dtype: {computed}, or float8_e4m3"
    if computed == "float16":
        yield "server.dtype: float16: allowed: bfloat16 or float32, the dtypes whose states can be captured"
    needs = {
        ("target", "pypi"): ("version", "sha256", "member"),
        ("target", "hub"): ("version",),
        ("prompts", "jsonl"): ("file",),
        ("prompts", "hub"): ("name", "version", "file"),
    }
    for (section, source), keys in needs.items():
        for key in keys:
            if config[section]["source"] == source and not config[section][key]:
                yield f"{section}.{key}: '': allowed: not empty with {section}.source: {source}"
    server, answers, arms = config["server"], config["conversations"], config["arms"]
    for name, section in (("conversations", answers), ("arms", arms)):
        if section["max_new_tokens"] >= server["context_tokens"]:
            yield (
                f"{name}.max_new_tokens: {section['max_new_tokens']}: allowed: less than "
                f"server.context_tokens: {server['context_tokens']}"
            )
    baselines = [name for name, speculation in arms["settings"].items() if not speculation]
    if len(baselines) != 1:
        yield f"arms.settings: {baselines or 'no'} arm without speculation: allowed: exactly one baseline, as NAME: {{}}"
    parity = arms["settings"].get(arms["parity"])
    if not parity or parity["eagle_topk"] != 1:
        yield (
            f"arms.parity: {arms['parity']!r}: allowed: an arm of arms.settings with eagle_topk: 1 "
            "(the offline figure follows one chain)"
        )
    for name, speculation in arms["settings"].items():
        if (
            speculation
            and speculation["eagle_topk"] == 1
            and speculation["num_draft_tokens"] != speculation["num_steps"] + 1
        ):
            yield (
                f"arms.settings.{name}.num_draft_tokens: {speculation['num_draft_tokens']}: allowed: num_steps + 1 = "
                f"{speculation['num_steps'] + 1} with eagle_topk: 1"
            )
    heads, groups = config["drafter"]["num_attention_heads"], config["drafter"]["num_key_value_heads"]
    if heads % groups:
        yield f"drafter.num_key_value_heads: {groups}: allowed: a divisor of num_attention_heads: {heads}"


def validate(config: dict[str, Any]) -> None:
    """Raise ConfigError with every defect of a configuration."""
    defects = sorted(_schema_defects(config)) or sorted(_meaning_defects(config))
    if defects:
        raise ConfigError("the configuration is refused:\n" + "\n".join(f"  {defect}" for defect in defects))


def chunk_ids(config: dict[str, Any]) -> list[str]:
    """Return the ids of all chunks, zero-padded, in order."""
    count, rows = config["prompts"]["count"], config["prompts"]["rows_per_chunk"]
    return [artifact.chunk_id(number) for number in range(-(-count // rows))]


def arm_names(config: dict[str, Any]) -> list[str]:
    """Return the names of all arms, the baseline first."""
    return sorted(config["arms"]["settings"], key=lambda name: bool(config["arms"]["settings"][name]))


def flags(section: dict[str, Any], *keys: str) -> str:
    """Return keys of a config section as the flags of its script: `max_tokens: 3` → `--max-tokens 3`."""
    shown = {key: _word(section[key]) for key in keys}
    return " ".join(f"--{key.replace('_', '-')} {word}" for key, word in shown.items() if word)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def server_flags(config: dict[str, Any]) -> str:
    """Return the flags of `aerie.server.add_arguments` for this configuration."""
    section = config["server"]
    words = flags(
        section, "device", "dtype", "tensor_parallel", "context_tokens", "max_total_tokens",
        "max_running_requests", "start_timeout_s", "port", "seed",
    )  # fmt: skip
    extra = " ".join(f"--extra-flag={word}" for word in section["extra_flags"])
    return f"--model {config['results_dir']}/target/model {words} {extra}".strip()


def sources(script: str) -> list[str]:
    """Return `scripts/<script>.py` and every library module it imports, however indirectly.

    They are inputs of the rule: a job is rerun when the code that made its output changed.
    """
    found: list[Path] = []
    waiting = [Path("scripts", f"{script}.py")]
    while waiting:
        path = waiting.pop()
        if path in found or not (ROOT / path).is_file():
            continue
        found.append(path)
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "aerie":
                waiting += [LIBRARY / f"{alias.name}.py" for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aerie."):
                waiting.append(LIBRARY / f"{node.module.split('.')[1]}.py")
    return sorted(path.as_posix() for path in found)


def gpus(config: dict[str, Any]) -> int:
    """Return the GPUs of a job that serves the target."""
    return config["server"]["tensor_parallel"] if config["server"]["device"] == "cuda" else 0


def patch_sources(config: dict[str, Any]) -> list[str]:
    """Return the files of the distributions that go into the image beside the locked wheels."""
    names = ["capture"] + (["cpu_kernels"] if config["container"]["variant"] == "cpu" else [])
    return sorted(
        path.relative_to(ROOT).as_posix()
        for name in names
        for pattern in ("**/*.py", "*.pth", "pyproject.toml")
        for path in (ROOT / "containers" / name).glob(pattern)
    )


def drafter_inputs(config: dict[str, Any], arm: str) -> list[str]:
    """Return the sidecars of the drafter that an arm serves; none for the baseline."""
    if not config["arms"]["settings"][arm]:
        return []
    results = config["results_dir"]
    # The export is measured only once SGLang itself has loaded it and agreed with the trainer.
    return [
        f"{results}/drafter/export/model.safetensors.sha256",
        f"{results}/drafter/export/config.json.sha256",
        f"{results}/drafter/check.json.sha256",
    ]


def export_inputs(config: dict[str, Any], name: str) -> list[str]:
    """Return the sidecars of all chunks for a conversion into format `name`.

    Raises ConfigError where it would be refused anyway, before hours of capture go into it.
    """
    final = config["hidden"]["final"]
    if final != EXPORT_FINAL[name]:
        raise ConfigError(f"hidden.final: {final}: allowed: {EXPORT_FINAL[name]} for a conversion to {name}")
    return [f"{config['results_dir']}/hidden/{chunk}.json.sha256" for chunk in chunk_ids(config)]


def speculation_flags(config: dict[str, Any], arm: str) -> str:
    """Return the flags that make an arm speculate; none for the baseline."""
    speculation = config["arms"]["settings"][arm]
    if not speculation:
        return ""
    words = flags(speculation, "num_steps", "eagle_topk", "num_draft_tokens")
    return f"--drafter {config['results_dir']}/drafter/export {words}"


def served_steps(config: dict[str, Any]) -> int:
    """Return the draft steps of the arm that the offline figure is compared with."""
    return config["arms"]["settings"][config["arms"]["parity"]]["num_steps"]


def job_environment(config: dict[str, Any]) -> dict[str, str]:
    """Return the variables every job needs: the interpreter of this workflow first on PATH, what Apptainer needs on
    this machine, and all caches below `cache_dir`. Snakemake's containers inherit the environment of the job.
    """
    cache = Path(config["cache_dir"]).resolve()
    variables = container.apptainer_environment(cache)
    folders = [cache, Path(config["results_dir"]).resolve()]
    if config["target"]["source"] == "local":
        folders.append(Path(config["target"]["name"]).resolve())
    # Snakemake mounts the working folder; what lies elsewhere must be named.
    binds = [os.environ.get("APPTAINER_BIND", "")]
    binds += [str(folder) for folder in folders if not folder.is_relative_to(Path.cwd())]
    variables |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "APPTAINER_BIND": ",".join(dict.fromkeys(filter(None, ",".join(binds).split(",")))),
        "XDG_CACHE_HOME": str(cache / "xdg"),
        "HF_HOME": str(cache / "huggingface"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "SGLANG_PLUGINS": SERVER_PLUGINS,
    }
    if config["server"]["device"] == "cuda":
        variables["APPTAINER_NV"] = "1"
    else:
        # Idle OpenMP threads that spin take the few cores from everything else.
        variables["OMP_WAIT_POLICY"] = "passive"
    return variables
