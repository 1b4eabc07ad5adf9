"""Files and request ids that the plugin and its client share; standard library only.

AERIE_CAPTURE_CONFIG (JSON) → `CaptureConfig`
<control_dir>/<shard>.json  → `Shard` (where each sample's rows belong)
rid "aerie-<run>-<shard>-<sample>-<attempt>" → `Address`

Every reader collects all defects of its file and raises one ValueError that lists them.
"""

import hashlib
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
COMPUTED_DTYPES = {"bfloat16": 2, "float32": 4}  # what a server computes in, bytes a value
FLOAT8 = "float8_e4m3"  # stored instead of them on demand, with a scale per token and tensor
DTYPE_BYTES = {**COMPUTED_DTYPES, FLOAT8: 1}
SCALE_BYTES = 4  # float32
SHOWN_DEFECTS = 20  # a shard holds thousands of samples; an error message should not

_RUN = re.compile(r"[0-9a-f]{16}")
_RID = re.compile(r"aerie-([0-9a-f]{16})-(\d+)-(\d{6})-(\d+)")
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
    dtype: str  # of the stored states: the one the server computes in, or FLOAT8
    threads: int  # shards written at the same time


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

    def at(self, row: int) -> int:
        return self.offset + row * self.row_bytes


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
    total_bytes: int
    states: Span
    scales: Span | None  # FLOAT8 only
    samples: tuple[Sample, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        return (self.states,) if self.scales is None else (self.states, self.scales)


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
    keys = {"run", "ready_path", "control_dir", "layers", "final", "dtype", "threads"}
    defects = _key_defects(document, keys)
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
    if document.get("dtype") not in DTYPE_BYTES:
        defects.append(f"dtype: found {document.get('dtype')!r}, expected {sorted(DTYPE_BYTES)}")
    threads = document.get("threads")
    if not _is_integer(threads) or threads < 1:
        defects.append(f"threads: found {threads!r}, expected an integer from 1")
    _raise_defects(path, defects)
    return CaptureConfig(
        run=document["run"],
        ready_path=Path(document["ready_path"]),
        control_dir=Path(document["control_dir"]),
        layers=tuple(layers),
        final=document["final"],
        dtype=document["dtype"],
        threads=document["threads"],
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
    keys = {"run", "path", "journal", "dtype", "total_bytes", "states", "scales", "samples"}
    defects = _key_defects(document, keys)
    if document.get("run") != run:
        defects.append(f"run: found {document.get('run')!r}, this server is {run!r}")
    if document.get("dtype") != dtype:
        defects.append(f"dtype: found {document.get('dtype')!r}, the server stores {dtype!r}")
    samples = _samples(document.get("samples"), defects)
    rows = sum(sample.tokens for sample in samples)
    tensors = captured + 1  # K aux blocks and the final one
    states = _span("states", document.get("states"), tensors * hidden_size * DTYPE_BYTES[dtype], defects)
    scales = None
    if dtype == FLOAT8:
        scales = _span("scales", document.get("scales"), tensors * SCALE_BYTES, defects)
    elif document.get("scales") is not None:
        defects.append(f"scales: found {document['scales']!r}, {dtype} has none")
    for key in ("path", "journal"):
        if not isinstance(document.get(key), str) or not document.get(key):
            defects.append(f"{key}: found {document.get(key)!r}, expected a path")
    if not defects:
        needed = max(span.at(rows) for span in (states, scales) if span is not None)
        data, stated = Path(document["path"]), document.get("total_bytes")
        found = data.stat().st_size if data.is_file() else None
        if stated != found or not _is_integer(stated) or stated < needed:
            defects.append(f"{data}: found {found} bytes, expected total_bytes {stated!r} and at least {needed:,}")
    _raise_defects(path, defects)
    return Shard(
        name=path.stem,
        path=Path(document["path"]),
        journal=Path(document["journal"]),
        dtype=dtype,
        total_bytes=document["total_bytes"],
        states=states,
        scales=scales,
        samples=samples,
    )


def journalled(shard: Shard) -> set[int]:
    """The samples that an earlier server made durable; the client has checked their lines."""
    durable = set()
    for line in shard.journal.read_text(errors="replace").splitlines() if shard.journal.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut short by a kill
        if isinstance(entry, dict) and "rows_xxh3" in entry:
            durable.add(entry["sample"])
    return durable


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


def _span(name: str, entry: Any, expected: int, defects: list[str]) -> Span | None:
    """One tensor's place in the file; `expected` is the number of bytes of its rows."""
    entry = entry if isinstance(entry, dict) else {}
    offset, row_bytes = entry.get("offset"), entry.get("row_bytes")
    if not _is_integer(offset) or offset < 0:
        defects.append(f"{name}.offset: found {offset!r}, expected a byte offset")
    elif row_bytes != expected:
        defects.append(f"{name}.row_bytes: found {row_bytes!r}, expected {expected}")
    else:
        return Span(offset=offset, row_bytes=row_bytes)
    return None


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
    row = 0
    for index, sample in enumerate(samples):
        if sample.row != row:
            defects.append(f"samples[{index}].row: found {sample.row}, expected {row}: rows follow without a gap")
            break
        row += sample.tokens
    return tuple(samples)


def _raise_defects(path: Path, defects: list[str]) -> None:
    if defects:
        shown = defects[:SHOWN_DEFECTS]
        if len(defects) > len(shown):
            shown.append(f"and {len(defects) - len(shown):,} more")
        raise ValueError(f"{path}: {len(defects):,} defects:\n  " + "\n  ".join(shown))
