"""Everything a run measured, as one page.

    results/{container/image.json, target/manifest.json, tokens/*, hidden/*.json, drafter/*, arms/*.json}
        →  results/report/index.html

`read_run` checks the digest of all it reads and that the artifacts speak of the same target, image, states and
drafter; every defect is reported at once. What is said about them is computed here, how it looks stands in
report.html.jinja, the pictures in figures.py. The page needs no network and no script.

Equal artifacts give equal bytes, but for the section on time and disk: its figures come from the benchmark files and
the folder as it is, which are volatile by nature.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from safetensors import safe_open

from aerie import arms, artifact, figures
from aerie.figures import Series
from aerie.hidden import IDENTITY

TEMPLATE = Path(__file__).with_name("report.html.jinja")
IMAGE = "container/image.json"
EXPORT = "drafter/export/model.safetensors"
NO_BREAK = "\u00a0"  # between a number and its unit
NOTHING = "–"
SHORT_DIGEST = 12  # hex digits shown; the whole digest is one click away
SHOWN_CHUNKS = 100  # rows of the table of chunks: the failed ones, then the first
SHOWN_DIFFERENCES = 50  # prompts listed with their first differing token
SHOWN_DIGESTS = 50  # chunk manifests in the table of digests; all are in MANIFEST.sha256
DEAR_STEP = 0.5  # of a target step: from here on a draft step is called expensive, a matter of wording only

# Rules and folders in the order of the data, for the tables of time and disk.
STAGES = (
    "build_image", "fetch_target", "write_prompts", "generate_conversations", "tokenize_conversations",
    "capture_hidden", "build_vocab", "train_drafter", "export_drafter", "check_export", "run_arm", "check_acceptance",
)  # fmt: skip
FOLDERS = (
    "container", "target", "prompts", "conversations", "tokens", "hidden", "drafter", "drafter/checkpoints", "arms",
    "logs", "benchmarks",
)  # fmt: skip


class ReportError(RuntimeError):
    """Artifacts that cannot be reported as one run; the message lists every defect with its command."""


# ----------------------------------------------------------------------------------------------------
# Numbers as people read them


def count(value: float | None) -> str:
    """Return a whole number with thousands separators."""
    return NOTHING if value is None else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    """Return three digits or more: 1,234 or 123 or 12.3 or 1.23."""
    if value is None:
        return NOTHING
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def percent(value: float | None) -> str:
    """Return a share as a percentage."""
    return NOTHING if value is None else f"{value:.1%}".replace("%", f"{NO_BREAK}%")


def size(value: int) -> str:
    """Return bytes in the decimal unit that fits."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = min((len(str(value)) - 1) // 3, len(units) - 1)
    return f"{decimal(value / 1000**power) if power else count(value)}{NO_BREAK}{units[power]}"


def duration(seconds: float) -> str:
    """Return a wall time: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f}{NO_BREAK}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    first = next(position for position, (value, _) in enumerate(parts) if value)
    return " ".join(f"{value}{NO_BREAK}{unit}" for value, unit in parts[first : first + 2] if value)


def latency(seconds: float | None) -> str:
    """Return a latency: milliseconds below one second."""
    if seconds is None:
        return NOTHING
    return f"{decimal(seconds * 1000)}{NO_BREAK}ms" if seconds < 1 else f"{decimal(seconds)}{NO_BREAK}s"


def ratio(value: float) -> str:
    """Return a factor: 0.62×."""
    return f"{value:.2f}×"


def interval(values: Sequence[float]) -> str:
    """Return an interval: 0.58–0.66."""
    return f"{values[0]:.2f}–{values[1]:.2f}"


def short(digest: str) -> str:
    """Return the beginning of a digest."""
    return digest[:SHORT_DIGEST]


# ----------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Run:
    """The artifacts of one run, all digests checked; `chunks` and `arms` by name, the baseline first."""

    results: Path
    image: dict[str, Any]
    target: dict[str, Any]
    tokens: dict[str, dict[str, Any]]  # metadata of each chunk's tokens
    chunks: dict[str, dict[str, Any]]  # manifest of each chunk's states
    metrics: dict[str, Any]
    drafter: dict[str, int]  # parameters and bytes of the exported drafter
    check: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    parity: dict[str, Any]
    digests: dict[str, str]  # {path relative to the results: sha256}, in the order of the data

    @property
    def baseline(self) -> dict[str, Any]:
        """Return the arm without a drafter."""
        return next(iter(self.arms.values()))

    @property
    def drafter_arms(self) -> list[dict[str, Any]]:
        """Return the arms with a drafter."""
        return list(self.arms.values())[1:]

    @cached_property
    def comparisons(self) -> dict[str, dict[str, Any]]:
        """Return each arm with a drafter beside the baseline, by name; see arms.compare."""
        return {arm["arm"]: arms.compare(self.baseline, arm) for arm in self.drafter_arms}


@dataclass
class _Reader:
    """Reads artifacts and collects what is wrong with them."""

    results: Path
    defects: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    def json(self, relative: str, *keys: str) -> dict[str, Any]:
        """Return a published document that must hold `keys`, {} where it is defective."""
        try:
            document = artifact.read_json(self.results / relative)
        except artifact.ArtifactError as error:
            self.defects.append(str(error))
            return {}
        self.sidecar(relative)
        return self._complete(relative, document, keys)

    def header(self, relative: str, *keys: str) -> tuple[dict[str, Any], int]:
        """Return (metadata `aerie` that must hold `keys`, number of parameters) of a published safetensors file."""
        path = self.results / relative
        try:
            self.digests[relative] = artifact.check(path)
        except artifact.ArtifactError as error:
            self.defects.append(str(error))
            return {}, 0
        with safe_open(path, framework="numpy") as file:
            metadata = json.loads((file.metadata() or {}).get("aerie", "{}"))
            tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
            # Integer tensors are token maps; what was trained is floating point.
            parameters = sum(math.prod(one.get_shape()) for one in tensors if "F" in one.get_dtype())
        return self._complete(relative, metadata, keys), parameters

    def sidecar(self, relative: str) -> None:
        """Note a published digest; of a file that is not read here only `snakemake verify` compares it with the bytes."""
        try:
            self.digests[relative] = artifact.read_sidecar(self.results / relative)
        except artifact.ArtifactError as error:
            self.defects.append(str(error))

    def _complete(self, relative: str, document: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        missing = [key for key in keys if key not in document]
        if not missing:
            return document
        path = self.results / relative
        self.defects.append(
            f"{path}: lacks {', '.join(missing)}: another version of Aerie wrote it; "
            f"make it anew with: {artifact.rebuild_command(path)}"
        )
        return {}


def read_run(results: Path, chunk_ids: Sequence[str], arm_names: Sequence[str]) -> Run:
    """Return the run below `results`; raise ReportError with every missing, changed or contradicting artifact."""
    reader = _Reader(results)
    reader.sidecar("container/sglang.sif")
    image = reader.json(
        IMAGE, "sglang_version", "variant", "sif_sha256", "content_sha256", "patch_sha256", "base", "distributions",
        "files", "volatile",
    )  # fmt: skip
    target = reader.json("target/manifest.json", "source", "facts", "files", "target_digest")
    reader.sidecar("target/head.safetensors")
    tokens = {chunk: reader.header(f"tokens/{chunk}.safetensors", "counts", "greedy")[0] for chunk in chunk_ids}
    chunks = {
        chunk: reader.json(f"hidden/{chunk}.json", "metadata", "shards", "samples", "gates") for chunk in chunk_ids
    }
    reader.sidecar("drafter/vocab.safetensors")
    reader.sidecar("drafter/trained.safetensors")
    metrics = reader.json(
        "drafter/metrics.json", "config", "settings", "inputs", "capture", "selection", "steps", "tokens", "coverage",
        "curve", "evaluations", "final",
    )  # fmt: skip
    reader.sidecar("drafter/export/config.json")
    _, parameters = reader.header(EXPORT)
    check = reader.json("drafter/check.json", "gates", "export", "sglang_version")
    measured = {
        name: reader.json(
            f"arms/{name}.json", "arm", "flags", "sglang_version", "algorithm", "speculation", "target_digest",
            "drafter_sha256", "concurrency", "max_new_tokens", "passes", "summary", "gates",
        )
        for name in arm_names
    }  # fmt: skip
    parity = reader.json(
        "arms/parity.json", "arm", "offline_accept_length", "served_accept_length", "per_prompt", "gates"
    )
    _raise(reader.defects)
    run = Run(
        results=results,
        image=image,
        target=target,
        tokens=tokens,
        chunks=chunks,
        metrics=metrics,
        drafter={"parameters": parameters, "bytes": (results / EXPORT).stat().st_size},
        check=check,
        arms=dict(sorted(measured.items(), key=lambda item: item[1]["drafter_sha256"] is not None)),  # stable
        parity=parity,
        digests=reader.digests,
    )
    _raise(list(_contradictions(run)))
    return run


def _raise(defects: Sequence[str]) -> None:
    if defects:
        raise ReportError("\n".join(defects))


def _contradictions(run: Run) -> Iterator[str]:
    """Yield every place where one artifact says something else than another."""

    def defect(relative: str, words: str) -> str:
        path = run.results / relative
        return f"{path}: {words}; make it anew with: {artifact.rebuild_command(path)}"

    def differ(relative: str, what: str, found: Any, expected: Any, witness: str) -> Iterator[str]:
        if found != expected:
            yield defect(relative, f"{what} is {found!r}, {run.results / witness} says {expected!r}")

    target, sglang, patch = run.target["target_digest"], run.image["sglang_version"], run.image["patch_sha256"]
    sif = "container/sglang.sif"
    yield from differ(IMAGE, "sif_sha256", run.image["sif_sha256"], run.digests[sif], sif)
    capture, trained_on = run.metrics["capture"], run.metrics["inputs"]["hidden"]
    for chunk, manifest in run.chunks.items():
        name, metadata = f"hidden/{chunk}.json", manifest["metadata"]
        yield from differ(name, "target_digest", metadata["target_digest"], target, "target/manifest.json")
        tokens = f"tokens/{chunk}.safetensors"
        yield from differ(name, "tokens_digest", metadata["tokens_digest"], run.digests[tokens], tokens)
        yield from differ(name, "patch_digest", metadata["patch_digest"], patch, IMAGE)
        for key in IDENTITY:
            yield from differ("drafter/metrics.json", key, capture[key], metadata[key], name)
        what = f"the digest of {name}"
        yield from differ("drafter/metrics.json", what, trained_on.get(chunk), run.digests[name], name)
    checked = run.check["export"].get("model.safetensors")
    yield from differ("drafter/check.json", "the checked export", checked, run.digests[EXPORT], EXPORT)
    yield from differ("drafter/check.json", "sglang_version", run.check["sglang_version"], sglang, IMAGE)
    for name, arm in run.arms.items():
        path = f"arms/{name}.json"
        yield from differ(path, "target_digest", arm["target_digest"], target, "target/manifest.json")
        yield from differ(path, "sglang_version", arm["sglang_version"], sglang, IMAGE)
        if arm["drafter_sha256"] is not None:
            yield from differ(path, "drafter_sha256", arm["drafter_sha256"], run.digests[EXPORT], EXPORT)
    baselines = [name for name, arm in run.arms.items() if arm["drafter_sha256"] is None]
    if len(baselines) != 1 or len(run.arms) < 2:
        yield (
            f"--arms {' '.join(run.arms)}: {len(baselines)} without a drafter ({', '.join(baselines) or 'none'}), "
            "expected one baseline and at least one arm with a drafter; name them with --arms"
        )
        return
    for name, arm in run.arms.items():
        if _prompt_ids(arm) != _prompt_ids(run.baseline):
            yield defect(f"arms/{name}.json", f"measured other prompts than arm {baselines[0]}")
    if run.parity["arm"] not in run.arms:
        yield defect("arms/parity.json", f"speaks of arm {run.parity['arm']!r}, reported are {', '.join(run.arms)}")


def _prompt_ids(arm: dict[str, Any]) -> set[str]:
    return {request["id"] for measured in arm["passes"] for request in measured["requests"]}


# ----------------------------------------------------------------------------------------------------
# Gates


@dataclass(frozen=True)
class Gate:
    """One check of one stage as it stands in an artifact."""

    stage: str
    artifact: str  # path relative to the results
    name: str
    value: Any
    limit: Any
    passed: bool
    detail: str = ""


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,.6g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


# What a gate's name means in words, the side of its limit, and its unit. A name that is not listed is shown as it is.
GATE_WORDS: dict[str, tuple[str, str, Callable[[Any], str]]] = {
    "contract": ("drifted places in SGLang that the capture patch hooks into (the build’s contract test)", "≤", _plain),
    "repeatable": ("largest difference of states captured twice", "≤", _plain),
    "logprob_difference": (
        "captured final state through lm_head, against the server’s own top log-probabilities: largest difference, nats",
        "≤",
        _plain,
    ),
    "greedy_agreement": ("checked rows whose most likely token is the one the server generated", "≥", percent),
    "export": ("exported tensors that are not the trained ones", "≤", _plain),
    "names": ("tensor names skipped, missing or left unset by SGLang’s loader", "≤", _plain),
    "parameters": ("parameters in the server that differ from the exported ones", "≤", _plain),
    "draft_vocabulary": ("draft tokens the server maps to another target token", "≤", _plain),
    "layers": ("served capture layers other than the trained ones", "≤", _plain),
    "prompt": ("tokens or positions of the probed prompt that differ", "≤", _plain),
    "states": ("states fed to the served drafter, against the captured ones: largest relative difference", "≤", _plain),
    "logits": (
        "first draft step, server against trainer: largest difference, relative to the largest logit",
        "≤",
        _plain,
    ),
    "failed_requests": ("failed requests", "≤", _plain),
    "algorithm": ("speculative algorithm the server reports", "=", _plain),
    "accept_length": ("accept length", "≥", decimal),
    "acceptance_parity": (
        "served accept length, against the offline figure on the same prompts: difference",
        "≤",
        percent,
    ),
}


def gates_of(run: Run) -> list[Gate]:
    """Return every gate of every stage in the order of the data."""

    def read(stage: str, path: str, found: dict[str, dict[str, Any]]) -> Iterator[Gate]:
        for name, gate in found.items():
            yield Gate(stage, path, name, gate["value"], gate["limit"], gate["passed"], str(gate.get("detail", "")))

    # The build runs the contract test and publishes nothing where it finds a drift: a record speaks of none.
    result = [Gate("image", IMAGE, "contract", 0, 0, True)]
    for chunk, manifest in run.chunks.items():
        result += read("capture", f"hidden/{chunk}.json", manifest["gates"])
    result += read("export", "drafter/check.json", run.check["gates"])
    for name, arm in run.arms.items():
        result += read(f"arm {name}", f"arms/{name}.json", arm["gates"])
    result += read("parity", "arms/parity.json", run.parity["gates"])
    return result


def gate_rows(gates: Sequence[Gate]) -> list[dict[str, Any]]:
    """Return the rows of the table of gates: those of several chunks are one row with the worst value."""
    groups: dict[tuple[str, str], list[Gate]] = {}
    for gate in gates:
        groups.setdefault((gate.stage, gate.name), []).append(gate)
    rows = []
    for (stage, name), group in groups.items():
        words, sign, _ = _words(name)

        def badness(gate: Gate, sign: str = sign) -> tuple[bool, float]:
            if not isinstance(gate.value, int | float):
                return not gate.passed, math.inf
            return not gate.passed, -gate.value if sign == "≥" else gate.value

        worst = max(group, key=badness)
        failed = sum(not gate.passed for gate in group)
        result = "FAILED" if failed else "passed"
        if len(group) > 1:
            result += f" in {failed or len(group):,} of {len(group):,} chunks"
        rows.append(
            {
                "stage": stage,
                "words": words,
                "value": _shown(name, worst.value),
                "limit": f"{sign}{NO_BREAK}{_shown(name, worst.limit)}".strip(NO_BREAK),
                "passed": not failed,
                "result": result,
                "detail": worst.detail,
                "artifact": worst.artifact,
            }
        )
    return rows


def _words(name: str) -> tuple[str, str, Callable[[Any], str]]:
    return GATE_WORDS.get(name, (name.replace("_", " "), "", _plain))


def _shown(name: str, value: Any) -> str:
    """Return a gate's value or limit; one that could not be computed is a word."""
    return _words(name)[2](value) if isinstance(value, int | float) else _plain(value)


# ----------------------------------------------------------------------------------------------------
# Does it pay, and why


@dataclass(frozen=True)
class RoundCost:
    """What one round of speculation costs beside one plain step of the target; seconds."""

    step_s: float
    round_s: float

    @property
    def ratio(self) -> float:
        """Return plain steps per round: the accept length at which speculation breaks even."""
        return self.round_s / self.step_s


def round_cost(baseline: dict[str, Any], arm: dict[str, Any]) -> RoundCost | None:
    """Return the cost of a round, from the time behind the first token; None where no request had such time.

    A plain step yields one token, so the baseline's divisor is its tokens behind the first; the first token of a
    speculating server comes from the prefill too, so all its verifications lie behind it.
    """

    def requests(one: dict[str, Any]) -> list[dict[str, Any]]:
        return [request for measured in one["passes"] for request in measured["requests"]]

    def seconds(one: dict[str, Any]) -> float:
        return sum(request["latency_s"] - request["first_token_s"] for request in requests(one))

    steps = sum(request["completion_tokens"] - 1 for request in requests(baseline))
    rounds = sum(request["verifications"] or 0 for request in requests(arm))
    if not steps or not rounds or seconds(baseline) <= 0:
        return None
    return RoundCost(seconds(baseline) / steps, seconds(arm) / rounds)


def verdict(comparison: dict[str, Any]) -> str:
    """Return `slower`, `faster`, or `even` where the interval holds 1."""
    low, high = comparison["speed_up_interval"]
    return "slower" if high < 1 else "faster" if low > 1 else "even"


VERDICT_WORDS = {
    "slower": "Speculation is slower here",
    "faster": "Speculation is faster here",
    "even": "Speculation makes no clear difference here",
}


def reasons(run: Run, arm: dict[str, Any], outcome: str) -> list[str]:
    """Return, sentence by sentence, why an arm is as fast as it is."""
    cost = round_cost(run.baseline, arm)
    accept, steps = arm["summary"]["accept_length"], arm["speculation"]["num_steps"]
    if cost is None or accept is None:
        return ["No answer is longer than one token, so there is nothing to speculate on; measure longer answers."]
    tokens = arm["speculation"]["num_draft_tokens"]
    found = [
        f"One round ({steps} draft steps, then a verification of {tokens} tokens at once) takes {latency(cost.round_s)}; "
        f"one plain step of the target takes {latency(cost.step_s)}. So a round costs {decimal(cost.ratio)} plain steps "
        f"and brings {decimal(accept)} tokens."
    ]
    budget, spent = (accept - 1) / steps, (cost.ratio - 1) / steps
    if accept < cost.ratio:
        found.append(
            f"It pays where it brings more than it costs: at accept length {decimal(accept)} a draft step, its share of "
            f"the verification included, must cost less than {budget:.2f} of a target step; here it costs {spent:.2f}."
        )
        if spent >= DEAR_STEP:
            found.append(
                f"The target is small ({size(weight_bytes(run.target))} of weights, {device(arm)}), so its own step is "
                "hardly dearer than a draft step; beside a larger target the same drafter costs a smaller part of a step."
            )
        else:
            found.append("Draft steps are cheap enough; the accept length is too short: more data, more epochs, or fewer draft steps.")  # fmt: skip
    elif outcome == "slower":
        ours, theirs = (one["summary"]["first_token_s"]["p50"] for one in (arm, run.baseline))
        found.append(
            f"Behind the first token it pays; it loses before it: the first token takes {latency(ours)}, without a "
            f"drafter {latency(theirs)}. Longer answers would make up for it."
        )
    else:
        found.append(f"It pays as long as the accept length stays above {decimal(cost.ratio)}.")
    return found


def weight_bytes(target: dict[str, Any]) -> int:
    """Return the bytes of the target's weight files."""
    return sum(entry["bytes"] for name, entry in target["files"].items() if name.endswith(".safetensors"))


def device(arm: dict[str, Any]) -> str:
    """Return where the server of an arm ran, in words."""
    on_cpu = any(pair == ("--device", "cpu") for pair in zip(arm["flags"], arm["flags"][1:], strict=False))
    return "on a CPU" if on_cpu else "on a GPU"


def _outcome(run: Run, arm: dict[str, Any]) -> dict[str, Any]:
    """Return what the page says about one arm with a drafter."""
    comparison = run.comparisons[arm["arm"]]
    prompts = len(run.baseline["passes"][0]["requests"])
    differences = sorted(comparison["first_differences"].items(), key=lambda item: (item[1], item[0]))
    kind = verdict(comparison)
    return {
        **comparison,
        "name": arm["arm"],
        "kind": kind,
        "words": VERDICT_WORDS[kind],
        "reasons": reasons(run, arm, kind),
        "prompts": prompts,
        "equal": prompts - len(differences),
        "differences": [(prompt_id, position + 1) for prompt_id, position in differences[:SHOWN_DIFFERENCES]],
        "more_differences": max(0, len(differences) - SHOWN_DIFFERENCES),
        "summary": arm["summary"],
        "speculation": arm["speculation"],
    }


# ----------------------------------------------------------------------------------------------------
# Volatile: time and disk


def stage_times(benchmarks: Path) -> list[dict[str, Any]]:
    """Return {"stage", "jobs", "seconds"} per rule from Snakemake's benchmark files, in the order of the data.

    Raises ReportError listing files whose first column is not `s`, the wall time in seconds.
    """
    seconds: dict[str, list[float]] = {}
    defects = []
    for path in sorted(benchmarks.rglob("*.tsv")):
        rows = list(csv.reader(path.read_text().splitlines(), delimiter="\t"))
        if len(rows) < 2 or rows[0][:1] != ["s"]:
            defects.append(f"{path}: expected a benchmark file whose first column is 's'; remove it, it is no artifact")
            continue
        stage = path.relative_to(benchmarks).parts[0].removesuffix(".tsv")
        seconds.setdefault(stage, []).append(sum(float(row[0]) for row in rows[1:]))
    _raise(defects)
    order = [*(stage for stage in STAGES if stage in seconds), *sorted(set(seconds) - set(STAGES))]
    return [{"stage": stage, "jobs": len(seconds[stage]), "seconds": sum(seconds[stage])} for stage in order]


def folder_bytes(results: Path) -> list[dict[str, Any]]:
    """Return {"folder", "bytes"} per folder of the results; links are not followed, the report is left out."""
    found: dict[str, int] = {}
    for root, _, names in os.walk(results):
        relative = Path(root).relative_to(results).as_posix()
        folder = next(
            (one for one in reversed(FOLDERS) if f"{relative}/".startswith(f"{one}/")), relative.split("/")[0]
        )
        if folder not in (".", "report"):
            held = sum(os.lstat(Path(root, name)).st_size for name in names)
            found[folder] = found.get(folder, 0) + held
    order = [*(folder for folder in FOLDERS if folder in found), *sorted(set(found) - set(FOLDERS))]
    return [{"folder": folder, "bytes": found[folder]} for folder in order]


# ----------------------------------------------------------------------------------------------------
# The page


def _pictures(run: Run, outcomes: Sequence[dict[str, Any]]) -> dict[str, Markup]:
    """Return the plots by name; one that has no data is left out."""
    curve, metrics = run.metrics["curve"], run.metrics
    chosen = (metrics["selection"]["step"], "weights chosen")
    final, per_prompt = metrics["final"], run.parity["per_prompt"]
    positions = range(len(curve[0]["step_loss"])) if curve else ()
    names = [f"position {position + 1}" for position in positions]

    def along(key: str) -> list[Series]:
        # A loss of exactly 0 means that the batch had no row for this position.
        return [
            Series(names[position], [(e["step"], e[key][position]) for e in curve if e["step_loss"][position] > 0])
            for position in positions
            if any(e["step_loss"][position] > 0 for e in curve)
        ]

    evaluated = [
        Series(name, [(e["step"], e[key]["accept_length"]) for e in metrics["evaluations"] if e[key]["accept_length"]])
        for name, key in (("walked as served", "walk"), ("by position", "true_token"))
    ]
    evaluated = [one for one in evaluated if one.points]
    walked = [(one["offline"], one["served"]) for one in per_prompt.values() if one["served"]]
    found: dict[str, str] = {}
    if curve:
        first, last = curve[0], curve[-1]
        found["loss"] = figures.lines(
            "loss", f"Training loss per position, from {first['loss']:.2f} to {last['loss']:.2f} in total over "
            f"{last['step']:,} steps", along("step_loss"), "optimizer step", "cross-entropy, nats", chosen)  # fmt: skip
        found["hits"] = figures.lines(
            "hits", "Share of training rows whose proposal is the next token; in the last batch "
            + ", ".join(f"{value:.0%}" for value in last["step_accuracy"]), along("step_accuracy"),
            "optimizer step", "hit rate in the batch", chosen)  # fmt: skip
    if evaluated:
        found["accept"] = figures.lines(
            "accept", f"Accept length on held-out conversations over {len(metrics['evaluations'])} evaluations",
            evaluated, "optimizer step", "accept length", chosen)  # fmt: skip
    if final["positions"]:
        rates = final["true_token"]
        found["positions"] = figures.bars(
            "positions", "Offline acceptance per position; the page has the same figures as a table",
            [f"position {number + 1}" for number in range(final["served_steps"])],
            {"if all before were right": rates["conditional"], "with all before it": rates["cumulative"]},
            "share of proposals", lambda value: f"{value:.0%}")  # fmt: skip
    if walked:
        found["parity"] = figures.scatter(
            "parity", f"Accept length of {len(walked)} prompts, offline against served", [Series("prompts", walked)],
            "accept length offline", "accept length served")  # fmt: skip
    rates = [arm["summary"] for arm in run.arms.values()]
    found["rates"] = figures.bars(
        "rates", "Output tokens per second: " + ", ".join(
            f"{name} {decimal(one['tok_per_s'])}" for name, one in zip(run.arms, rates, strict=True)),
        list(run.arms), {"": [one["tok_per_s"] for one in rates]}, "output tok/s", decimal,
        [(one["tok_per_s_lowest"], one["tok_per_s_highest"]) for one in rates])  # fmt: skip
    found["speed_ups"] = figures.ranked(
        "speed_ups", "Speed-up of each prompt in ascending order",
        {arm["arm"]: list(run.comparisons[arm["arm"]]["prompt_speed_ups"].values()) for arm in run.drafter_arms},
        "prompts, slowest first", "speed-up", 1.0)  # fmt: skip
    return {name: Markup(picture) for name, picture in found.items()}


def _data(run: Run) -> dict[str, int]:
    """Return the counts of the data over all chunks."""
    counts: dict[str, int] = {}
    for metadata in run.tokens.values():
        for key, value in metadata["counts"].items():
            counts[key] = counts.get(key, 0) + value
    samples = [sample for chunk in run.chunks.values() for sample in chunk["samples"]]
    return counts | {
        "kept": len(samples),
        "held_out": sum(sample["held_out"] for sample in samples),
        "held_out_tokens": sum(sample["tokens"] for sample in samples if sample["held_out"]),
        "repeated": len(samples) - len({sample["id"] for sample in samples}),
        "state_bytes": sum(shard["bytes"] for chunk in run.chunks.values() for shard in chunk["shards"]),
    }


def _chunk_rows(run: Run) -> list[dict[str, Any]]:
    rows = [
        {
            "chunk": chunk,
            "samples": len(manifest["samples"]),
            "tokens": sum(shard["tokens"] for shard in manifest["shards"]),
            "bytes": sum(shard["bytes"] for shard in manifest["shards"]),
            "gates": {name: _shown(name, gate["value"]) for name, gate in manifest["gates"].items()},
            "passed": all(gate["passed"] for gate in manifest["gates"].values()),
        }
        for chunk, manifest in run.chunks.items()
    ]
    return sorted(rows, key=lambda row: row["passed"])  # stable: the failed ones, then in order


def _shown_digests(run: Run) -> tuple[list[tuple[str, str]], int]:
    chunked = [path for path in run.digests if path.startswith(("tokens/", "hidden/"))]
    hidden = set(chunked[SHOWN_DIGESTS:])
    return [(path, digest) for path, digest in run.digests.items() if path not in hidden], len(hidden)


def html(run: Run) -> str:
    """Return the page."""
    # The best setting is what the page opens with.
    outcomes = sorted((_outcome(run, arm) for arm in run.drafter_arms), key=lambda one: -one["speed_up"])
    gates = gates_of(run)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        one.__name__: one for one in (count, decimal, percent, size, duration, latency, ratio, interval, short)
    }
    digests, more_digests = _shown_digests(run)
    return environment.get_template(TEMPLATE.name).render(
        run=run,
        best=outcomes[0],
        outcomes=outcomes,
        gates=gates,
        passed=sum(gate.passed for gate in gates),
        gate_rows=gate_rows(gates),
        chunk_rows=_chunk_rows(run),
        shown_chunks=SHOWN_CHUNKS,
        data=_data(run),
        greedy=all(metadata["greedy"] for metadata in run.tokens.values()),
        capture=run.metrics["capture"],
        facts=run.target["facts"],
        source=run.target["source"],
        weight_bytes=weight_bytes(run.target),
        device=device(run.baseline),
        pictures=_pictures(run, outcomes),
        times=stage_times(run.results / "benchmarks"),
        disk=folder_bytes(run.results),
        digests=digests,
        more_digests=more_digests,
    )


def summary(run: Run, page: Path) -> str:
    """Return the few lines a terminal shows at the end: arms, gates, and where the page is."""
    rows = [("arm", "tok/s", "lowest-highest", "accept length", "speed-up", "95 % interval", "greedy equal")]
    for name, arm in run.arms.items():
        one = arm["summary"]
        rates = (decimal(one["tok_per_s"]), f"{decimal(one['tok_per_s_lowest'])}-{decimal(one['tok_per_s_highest'])}")
        if arm is run.baseline:
            rows.append((name, *rates, "-", "-", "-", "-"))
            continue
        outcome = _outcome(run, arm)
        low, high = outcome["speed_up_interval"]
        rows.append(
            (name, *rates, decimal(one["accept_length"]), f"{outcome['speed_up']:.2f}x", f"{low:.2f}-{high:.2f}",
             f"{outcome['equal']:,} of {outcome['prompts']:,}")
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    gates = gates_of(run)
    failed = [f"{gate.stage}: {gate.name} ({gate.artifact})" for gate in gates if not gate.passed]
    lines.append(f"gates passed: {len(gates) - len(failed):,} of {len(gates):,}")
    lines += [f"FAILED {gate}" for gate in failed]
    return "\n".join([*lines, f"page: {page}"])
