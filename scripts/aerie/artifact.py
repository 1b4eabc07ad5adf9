"""One way to write a file, one way to trust one.

`publish` writes: a temporary file in the same folder, fsync, rename, fsync of the folder, and last the
sidecar `<name>.sha256` (one line in the format of `sha256sum`). So a name with its sidecar is complete,
and a consumer that calls `check` before it reads either gets the bytes that were published or an error
that names the file, both digests and the command that rebuilds it.

`MANIFEST.sha256` lists every artifact of one results folder (`sha256sum -c` accepts it); `audit` compares
the folder with it and finds changed, missing and unlisted files. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIDECAR = ".sha256"
MANIFEST = "MANIFEST.sha256"
PARTIAL = ".partial"  # in the name of every unfinished file or folder

# What lives beside the artifacts without being one: logs and timings (volatile by nature), unfinished
# work and checkpoints (superseded by what is published from them), the caches of kernels, and conversions
# for other trainers (made on demand, each with a manifest of its own).
VOLATILE_FOLDERS = ("logs", "benchmarks", "checkpoints", "runs", "exports")


class ArtifactError(RuntimeError):
    """A file that cannot be trusted. The message names the file, the defect and the next command."""


def sha256_file(path: Path | str) -> str:
    """Return the sha256 of a file's bytes as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no spaces, so that equal values hash equally. NaN is refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(value: Any) -> str:
    """Return the sha256 of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def metadata_entry(metadata: dict[str, Any]) -> dict[str, str]:
    """Return `__metadata__` of a safetensors file: one key, because the library writes several in random order."""
    return {"aerie": canonical_json(metadata)}


def sidecar_of(path: Path | str) -> Path:
    """Return where the sidecar of an artifact lies."""
    path = Path(path)
    return path.with_name(path.name + SIDECAR)


# Files that come into being as part of another artifact: the pattern of their path, and that artifact.
PARTS = (
    (re.compile(r"(.*hidden/[^/]+)/shard-\d+\.safetensors"), r"\1.json"),
    (re.compile(r"(.*target)/model/.*"), r"\1/manifest.json"),
)


def rebuild_command(path: Path | str) -> str:
    """Return the command that makes an artifact, or the artifact it is a part of, anew."""
    whole = Path(path).as_posix().removesuffix(SIDECAR)
    for pattern, artifact in PARTS:
        if pattern.fullmatch(whole):
            whole = pattern.sub(artifact, whole)
    return f"snakemake --cores 1 -f -- {whole}{SIDECAR}"


def fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def grant_usual_permissions(path: Path) -> None:
    """Give a file the mode that a newly created one has; some libraries write through private files (0600)."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _replace(temporary: Path, path: Path) -> None:
    grant_usual_permissions(temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)


def seal(temporary: Path, path: Path, digest: str | None = None) -> str:
    """Move a finished temporary file of the same folder to its name, then write its sidecar.

    `digest` is its sha256 where the caller already computed it while writing. Returns the digest.
    The old sidecar goes first: at no moment do a new file and an old digest stand together.
    """
    digest = digest or sha256_file(temporary)
    sidecar = sidecar_of(path)
    sidecar.unlink(missing_ok=True)
    _replace(temporary, path)
    sidecar_temporary = _temporary_name(sidecar)
    sidecar_temporary.write_text(f"{digest}  {path.name}\n")
    _replace(sidecar_temporary, sidecar)
    return digest


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}{PARTIAL}-{os.getpid()}")


@contextmanager
def publish(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; on a clean exit publish it with its sidecar.

    An exception inside the block removes the temporary file and leaves the old artifact as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    try:
        yield temporary
        seal(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> None:
    """Publish a text file."""
    with publish(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any) -> None:
    """Publish a JSON document, sorted and indented for people and for `git diff`."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def write_json_lines(path: Path | str, records: Iterable[dict[str, Any]]) -> None:
    """Publish one canonical JSON document per line."""
    with publish(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for record in records:
            file.write(canonical_json(record) + "\n")


def read_sidecar(path: Path | str) -> str:
    """Return the digest that the sidecar of `path` states."""
    sidecar = sidecar_of(path)
    try:
        digest, name = sidecar.read_text().split()
    except FileNotFoundError:
        raise ArtifactError(
            f"{path}: no sidecar {sidecar.name}, so the file is not known to be complete; "
            f"make it with: {rebuild_command(path)}"
        ) from None
    except ValueError:
        raise ArtifactError(
            f"{sidecar}: expected one line '<64 hex digits>  {Path(path).name}'; "
            f"make it anew with: {rebuild_command(path)}"
        ) from None
    if name != Path(path).name or len(digest) != 64:
        raise ArtifactError(
            f"{sidecar}: speaks of '{name}', expected '{Path(path).name}'; make it anew with: {rebuild_command(path)}"
        )
    return digest


def check(path: Path | str) -> str:
    """Return the digest of an artifact after comparing its bytes with its sidecar; raise ArtifactError."""
    expected = read_sidecar(path)
    try:
        found = sha256_file(path)
    except FileNotFoundError:
        raise ArtifactError(
            f"{path}: missing though its sidecar is there; make it with: {rebuild_command(path)}"
        ) from None
    if found != expected:
        raise ArtifactError(
            f"{path}: changed since it was published: expected sha256 {expected}, found {found}; "
            f"make it anew with: {rebuild_command(path)}"
        )
    return found


def check_all(paths: Iterable[Path | str]) -> dict[str, str]:
    """Check several artifacts; report every defect in one error. Returns {path: digest}."""
    digests, defects = {}, []
    for path in paths:
        try:
            digests[str(path)] = check(path)
        except ArtifactError as error:
            defects.append(str(error))
    if defects:
        raise ArtifactError("\n".join(defects))
    return digests


def read_json(path: Path | str) -> Any:
    """Check and parse a published JSON document."""
    check(path)
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_json_lines(path: Path | str) -> list[dict[str, Any]]:
    """Check and parse a published JSON-lines file."""
    check(path)
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


# ----------------------------------------------------------------------------------------------------
# The manifest of a results folder


@dataclass(frozen=True, order=True)
class Defect:
    """One difference between a results folder and its manifest; `kind` is changed, missing or unlisted."""

    path: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind:8}  {self.path}: {self.detail}"


def _is_volatile(relative: Path) -> bool:
    return (
        relative.name == MANIFEST
        or any(part in VOLATILE_FOLDERS for part in relative.parts[:-1])
        or any(PARTIAL in part for part in relative.parts)
    )


def _files(folder: Path) -> Iterator[Path]:
    # Links are followed on purpose: a local target is linked, not copied, into the results folder.
    for root, _, names in os.walk(folder, followlinks=True):
        for name in names:
            yield Path(root, name)


def manifest_lines(results: Path, listed_elsewhere: dict[str, str]) -> list[str]:
    """Return the sorted lines `<digest>  <path relative to results>` of all published artifacts.

    `listed_elsewhere` holds files whose digests stand in another artifact instead of in a sidecar
    (the target's own files: {path relative to results: digest}).
    """
    entries = dict(listed_elsewhere)
    for file in _files(results):
        relative = file.relative_to(results)
        if file.name.endswith(SIDECAR) and not _is_volatile(relative):
            data = file.with_name(file.name.removesuffix(SIDECAR))
            entries[data.relative_to(results).as_posix()] = read_sidecar(data)
            entries[relative.as_posix()] = sha256_file(file)
    return [f"{digest}  {path}" for path, digest in sorted(entries.items())]


def read_manifest(results: Path) -> dict[str, str]:
    """Return {path relative to results: digest} from `MANIFEST.sha256`."""
    manifest = results / MANIFEST
    if not manifest.is_file():
        raise ArtifactError(f"{manifest}: missing; make it with: snakemake --cores 1 -- {manifest}")
    entries = {}
    for number, line in enumerate(manifest.read_text().splitlines(), 1):
        digest, _, path = line.partition("  ")
        if len(digest) != 64 or not path:
            raise ArtifactError(f"{manifest}:{number}: expected '<64 hex digits>  <path>', found {line!r}")
        entries[path] = digest
    return entries


def audit(results: Path, threads: int = 1) -> list[Defect]:
    """Rehash everything `MANIFEST.sha256` lists; return all changed, missing and unlisted files, sorted."""
    entries = read_manifest(results)

    def compare(item: tuple[str, str]) -> Defect | None:
        path, expected = item
        rebuild = rebuild_command(results / path)
        if not (results / path).is_file():
            return Defect(path, "missing", f"rebuild with: {rebuild}")
        found = sha256_file(results / path)
        if found != expected:
            return Defect(path, "changed", f"expected {expected}, found {found}; rebuild with: {rebuild}")
        return None

    with ThreadPoolExecutor(threads) as pool:
        defects = [defect for defect in pool.map(compare, entries.items()) if defect]
    for file in _files(results):
        relative = file.relative_to(results)
        if not _is_volatile(relative) and relative.as_posix() not in entries:
            manifest = (results / MANIFEST).as_posix()
            defects.append(
                Defect(
                    relative.as_posix(),
                    "unlisted",
                    f"no rule made it: remove it, or list it with: snakemake --cores 1 -f -- {manifest}",
                )
            )
    return sorted(defects)


# ----------------------------------------------------------------------------------------------------
# Chunks

CHUNK_DIGITS = 5  # chunk ids are zero-padded, so their order as text is their order


def chunk_id(number: int) -> str:
    """Return the id of chunk `number` as it stands in file names."""
    return f"{number:0{CHUNK_DIGITS}d}"


def chunk_paths(folder: Path, count: int, suffix: str) -> list[Path]:
    """Return `folder/{chunk}{suffix}` of all `count` chunks, in order.

    Scripts get the folder and the count: 10,000 paths are more than a command line holds.
    """
    return [folder / f"{chunk_id(number)}{suffix}" for number in range(count)]


def free_bytes(folder: Path) -> int:
    """Return the bytes an ordinary user may still write below `folder` (its nearest existing parent)."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
