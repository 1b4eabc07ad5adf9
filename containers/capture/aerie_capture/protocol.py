"""Files and request ids that the plugin and its client share; standard library only.

AERIE_CAPTURE_CONFIG (JSON) → `CaptureConfig`
<control_dir>/<shard>.json  → `Shard` (where each sample's rows belong)
rid "aerie-<run>-<shard>-<sample>-<attempt>" → `Address`

Every reader collects all defects of its file and raises one ValueError that lists them.
"""

import hashlib
import itertools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_VARIABLE = "AERIE_CAPTURE_CONFIG"
PROBE_VARIABLE = "AERIE_PROBE_CONFIG"
TICKET_KEY = "aerie_capture"  # key of the ticket in customized_info, so in meta_info
FINAL_CONVENTIONS = ("post_norm", "pre_norm")
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
SHOWN_DEFECTS = 20  # a shard holds thousands of samples; an error message should not

_RUN = re.compile(r"[0-9a-f]{16}")
_RID = re.compile(r"aerie-([0-9a-f]{16})-(\d{5})-(\d{6})-(\d+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class CaptureConfig:
    """What one capture server is asked to do; `layers` are HF indices, checked against the model
    by the hook, not here."""

    run: str
    ready_path: Path
    control_dir: Path
    layers: tuple[int, ...]
    final: str


@dataclass(frozen=True)
class ProbeConfig:
    run: str
    path: Path


@dataclass(frozen=True)
class Address:
    """One sample of one shard, as its request id names it."""

    shard: str
    sample: int
    attempt: int


@dataclass(frozen=True)
class Span:
    """Rows of one tensor inside the data file: row i starts at `offset + i * row_bytes`."""

    offset: int
    row_bytes: int


@dataclass(frozen=True)
class Sample:
    row: int
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    name: str
    path: Path
    journal: Path
    dtype: str
    aux: Span
    final: Span
    samples: tuple[Sample, ...]


def parse_rid(rid: Any, run: str) -> Address | None:
    """Return the address of a request of this run; None for every foreign request.

    A request id of another run is foreign too: it belongs to a client of an earlier server.
    """
    match = _RID.fullmatch(rid) if isinstance(rid, str) else None
    if match is None or match[1] != run:
        return None
    return Address(shard=match[2], sample=int(match[3]), attempt=int(match[4]))


def read_json(path: Path) -> dict:
    """Read one JSON object; ValueError names the file when it is anything else."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: found a {type(document).__name__}, expected a JSON object")
    return document


def read_capture_config(path: Path) -> CaptureConfig:
    """AERIE_CAPTURE_CONFIG → CaptureConfig; ValueError lists every defect of the file."""
    document = read_json(path)
    defects = _key_defects(document, {"run", "ready_path", "control_dir", "layers", "final"})
    defects += _run_defects(document)
    defects += [
        f"{key}: found {document.get(key)!r}, expected a path"
        for key in ("ready_path", "control_dir")
        if not isinstance(document.get(key), str) or not document.get(key)
    ]
    layers = document.get("layers")
    if not isinstance(layers, list) or not layers or not all(map(_is_integer, layers)):
        defects.append(f"layers: found {layers!r}, expected a list of layer indices")
    if document.get("final") not in FINAL_CONVENTIONS:
        defects.append(f"final: found {document.get('final')!r}, expected {FINAL_CONVENTIONS}")
    _raise_defects(path, defects)
    return CaptureConfig(
        run=document["run"],
        ready_path=Path(document["ready_path"]),
        control_dir=Path(document["control_dir"]),
        layers=tuple(layers),
        final=document["final"],
    )


def read_probe_config(path: Path) -> ProbeConfig:
    """AERIE_PROBE_CONFIG → ProbeConfig; ValueError lists every defect of the file."""
    document = read_json(path)
    defects = _key_defects(document, {"run", "path"})
    for key in ("run", "path"):
        if not isinstance(document.get(key), str) or not document.get(key):
            defects.append(f"{key}: found {document.get(key)!r}, expected a text")
    _raise_defects(path, defects)
    return ProbeConfig(run=document["run"], path=Path(document["path"]))


def read_shard(path: Path, *, run: str, dtype: str, captured: int, hidden_size: int) -> Shard:
    """Control file → Shard, checked against what the server captures.

    `captured` is K, the number of aux layers; `hidden_size` is D. The data file must already have
    its full length, so that a full disk shows when the client preallocates, not in mid-capture.
    """
    document = read_json(path)
    defects = _key_defects(document, {"run", "path", "journal", "dtype", "tensors", "samples"})
    if document.get("run") != run:
        defects.append(f"run: found {document.get('run')!r}, this server is {run!r}")
    if document.get("dtype") != dtype:
        defects.append(f"dtype: found {document.get('dtype')!r}, the server captures {dtype!r}")
    samples = _samples(document.get("samples"), defects)
    rows = max((sample.row + sample.tokens for sample in samples), default=0)
    spans = _spans(document.get("tensors"), dtype, captured, hidden_size, defects)
    for key in ("path", "journal"):
        if not isinstance(document.get(key), str) or not document.get(key):
            defects.append(f"{key}: found {document.get(key)!r}, expected a path")
    if not defects:
        data = Path(document["path"])
        needed = max(span.offset + rows * span.row_bytes for span in spans.values())
        found = data.stat().st_size if data.is_file() else None
        if found is None or found < needed:
            defects.append(f"{data}: found {found} bytes, expected at least {needed:,}")
    _raise_defects(path, defects)
    return Shard(
        name=path.stem,
        path=Path(document["path"]),
        journal=Path(document["journal"]),
        dtype=dtype,
        aux=spans["aux"],
        final=spans["final"],
        samples=samples,
    )


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that readers see all of it or none: temporary, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; a rename or a new file is not, until this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def patch_digest() -> str:
    """sha256 over the names and contents of the plugin's own modules, in name order."""
    digest = hashlib.sha256()
    for module in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(module.name.encode() + b"\0" + module.read_bytes() + b"\0")
    return digest.hexdigest()


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _key_defects(document: dict, expected: set[str]) -> list[str]:
    missing = [f"{key}: missing" for key in sorted(expected - document.keys())]
    return missing + [f"{key}: unknown key" for key in sorted(document.keys() - expected)]


def _run_defects(document: dict) -> list[str]:
    run = document.get("run")
    if isinstance(run, str) and _RUN.fullmatch(run):
        return []
    return [f"run: found {run!r}, expected 16 lower-case hex digits"]


def _spans(tensors: Any, dtype: str, captured: int, hidden_size: int, defects: list[str]) -> dict[str, Span]:
    if not isinstance(tensors, dict) or tensors.keys() != {"aux", "final"}:
        defects.append(f"tensors: found {tensors!r}, expected aux and final")
        return {}
    spans = {}
    widths = {"aux": captured * hidden_size, "final": hidden_size}
    for name, width in widths.items():
        entry = tensors[name] if isinstance(tensors[name], dict) else {}
        offset, row_bytes = entry.get("offset"), entry.get("row_bytes")
        expected = width * DTYPE_BYTES[dtype]
        if not _is_integer(offset) or offset < 0:
            defects.append(f"tensors.{name}.offset: found {offset!r}, expected a byte offset")
        elif row_bytes != expected:
            defects.append(
                f"tensors.{name}.row_bytes: found {row_bytes!r}, expected {expected}"
                f" = {width} x {DTYPE_BYTES[dtype]} bytes"
            )
        else:
            spans[name] = Span(offset=offset, row_bytes=row_bytes)
    return spans


def _samples(entries: Any, defects: list[str]) -> tuple[Sample, ...]:
    if not isinstance(entries, list) or not entries:
        defects.append(f"samples: found {type(entries).__name__}, expected a list of samples")
        return ()
    samples = []
    for index, entry in enumerate(entries):
        entry = entry if isinstance(entry, dict) else {}
        row, tokens, sha256 = entry.get("row"), entry.get("tokens"), entry.get("sha256")
        if not _is_integer(row) or row < 0 or not _is_integer(tokens) or tokens < 1:
            defects.append(f"samples[{index}]: row {row!r}, tokens {tokens!r}")
        elif not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            defects.append(f"samples[{index}].sha256: found {sha256!r}")
        else:
            samples.append(Sample(row=row, tokens=tokens, sha256=sha256))
    ordered = sorted(samples, key=lambda sample: sample.row)
    defects += [
        f"samples: rows {before.row}..{before.row + before.tokens - 1} overlap row {after.row}"
        for before, after in itertools.pairwise(ordered)
        if after.row < before.row + before.tokens
    ]
    return tuple(samples)


def _raise_defects(path: Path, defects: list[str]) -> None:
    if defects:
        shown = defects[:SHOWN_DEFECTS]
        if len(defects) > len(shown):
            shown.append(f"and {len(defects) - len(shown):,} more")
        raise ValueError(f"{path}: {len(defects):,} defects:\n  " + "\n  ".join(shown))
