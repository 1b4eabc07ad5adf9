"""The captured states of one chunk: byte format, preallocation, resume, reader.

    results/hidden/{chunk}.json                        manifest: metadata, shards, samples, gates
    results/hidden/{chunk}/shard-{j:05}.safetensors    whole samples, at most `shard_bytes` each

Layer indices are HF indices: index i is the residual stream entering layer i, `hidden_states[i]` of
transformers. T tokens of a shard, N samples, K captured layers, D target width.

A shard is a plain safetensors file:

    8 bytes              length of the header, little-endian unsigned
    header               JSON, padded with spaces so that the data begin at a multiple of 4,096 bytes
    cu_seqlens  int64             [N+1]        first row of each sample, last element T
    input_ids   int32             [T]
    states      bf16|f32|f8_e4m3  [T, K+1, D]  the layers ascending, then `final`: the lm_head input
                                               (`post_norm`) or the final norm's input (`pre_norm`)
    scales      float32           [T, K+1]     f8_e4m3 only: a state is states * scales
    loss_mask   uint8             [T]          1 where the assistant produced the token

in this order without gaps. `__metadata__["aerie"]` is canonical JSON with everything a reader relies on.
One tensor for all states, because a token then lies in one place: one write, one checksum, and the sha256 of
the file can be taken in the order of its bytes while it is written.

The small tensors are written when the shard is laid out, the states by the server at their final
offsets; a journal beside the shard has one line per sample whose rows are durable. A reader of a
published shard never sees the journal.

The manifest has checksums of every sample (sha256 of its ids, xxh3 of its rows and of its mask), so that a
reader can check what it reads, at the speed of memory, without hashing whole shards first.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from aerie import artifact
from aerie.artifact import ArtifactError

FORMAT = 2
ALIGNMENT_BYTES = 4096  # start of the data: a page, so that direct I/O and mmap stay possible
FLOAT8 = "float8_e4m3"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, FLOAT8: torch.float8_e4m3fn}
SAFETENSORS_NAMES = {"bfloat16": "BF16", "float32": "F32", FLOAT8: "F8_E4M3"}
SCALE_BYTES = 4  # float32

# What must be equal in all chunks that train one drafter.
IDENTITY = (
    "format",
    "layers",
    "final",
    "dtype",
    "computed_dtype",
    "hidden_size",
    "target_digest",
    "tokenizer_digest",
    "template_digest",
    "sglang_version",
    "patch_digest",
)


def ids_sha256(input_ids: torch.Tensor) -> str:
    """Return the sha256 of token ids as little-endian int32, the form server and client compare."""
    return hashlib.sha256(input_ids.to(torch.int32).contiguous().numpy().tobytes()).hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes; numpy knows no bfloat16, so the view goes through uint8."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def checksum(*tensors: torch.Tensor) -> str:
    """Return the xxh3 (128 bits, hex) of the tensors' bytes, one after the other.

    It finds faults, not forgery: the manifest that holds it is itself under sha256.
    """
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def token_bytes(layers: int, width: int, dtype: str) -> int:
    """Return the bytes that the states of one token take: K+1 tensors of D values, and their scales."""
    scales = (layers + 1) * SCALE_BYTES if dtype == FLOAT8 else 0
    return (layers + 1) * width * DTYPES[dtype].itemsize + scales


def resolve_layers(layers: Sequence[int] | str, num_hidden_layers: int) -> list[int]:
    """Return HF layer indices, ascending; `auto` is [2, n // 2, n - 3] (SGLang's own default).

    Raises ValueError for an index outside 1..n-1, an unsorted or a repeated one.
    """
    n = num_hidden_layers
    chosen = [2, n // 2, n - 3] if layers == "auto" else [int(index) for index in layers]
    if sorted(set(chosen)) != chosen or not chosen or chosen[0] < 1 or chosen[-1] >= n:
        raise ValueError(
            f"hidden.layers: {chosen} on a model of {n} layers: expected ascending, distinct HF indices "
            f"from 1 to {n - 1} (index i is the residual stream entering layer i)"
        )
    return chosen


# ----------------------------------------------------------------------------------------------------
# Layout


@dataclass(frozen=True)
class Sample:
    """One conversation with its states: T tokens."""

    id: str
    held_out: bool
    input_ids: torch.Tensor  # int32 [T]
    loss_mask: torch.Tensor  # uint8 [T]
    states: torch.Tensor  # [T, K+1, D]: the layers ascending, then the final state

    @property
    def aux(self) -> torch.Tensor:
        """The captured layers, a view [T, K, D]."""
        return self.states[:, :-1]  # (T, K, D)

    @property
    def final(self) -> torch.Tensor:
        """The final state, a view [T, D]."""
        return self.states[:, -1]  # (T, D)


@dataclass(frozen=True)
class Layout:
    """Where the tensors of one shard lie: byte offsets from the start of the file."""

    header: bytes
    offsets: dict[str, int]
    total_bytes: int


def layout(lengths: Sequence[int], layers: int, width: int, dtype: str, metadata: dict[str, Any]) -> Layout:
    """Return the layout of a shard with samples of `lengths` tokens. See the module docstring."""
    tokens, tensors = sum(lengths), layers + 1
    states = tokens * tensors * width * DTYPES[dtype].itemsize
    fields = [  # name, dtype, shape, bytes
        ("cu_seqlens", "I64", [len(lengths) + 1], 8 * (len(lengths) + 1)),
        ("input_ids", "I32", [tokens], 4 * tokens),
        ("states", SAFETENSORS_NAMES[dtype], [tokens, tensors, width], states),
        ("scales", "F32", [tokens, tensors], SCALE_BYTES * tokens * tensors),
        ("loss_mask", "U8", [tokens], tokens),
    ]
    if dtype != FLOAT8:
        fields = [entry for entry in fields if entry[0] != "scales"]
    header: dict[str, Any] = {"__metadata__": artifact.metadata_entry(metadata)}
    relative, position = {}, 0
    for name, kind, shape, size in fields:
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [position, position + size]}
        relative[name] = position
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    start = 8 + len(text)
    return Layout(
        header=struct.pack("<Q", len(text)) + text,
        offsets={name: start + offset for name, offset in relative.items()},
        total_bytes=start + position,
    )


def split_into_shards(lengths: Sequence[int], bytes_per_token: int, shard_bytes: int) -> list[list[int]]:
    """Return the sample numbers of each shard: whole samples, in order, at most `shard_bytes` of states.

    A sample larger than `shard_bytes` gets a shard of its own.
    """
    shards: list[list[int]] = []
    used = 0
    for number, length in enumerate(lengths):
        size = length * bytes_per_token
        if not shards or used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(number)
        used += size
    return shards


def shard_name(number: int) -> str:
    """Return the file name of shard `number`."""
    return f"shard-{number:05d}.safetensors"


@dataclass(frozen=True)
class Durable:
    """One durable sample of an unfinished shard, as the server's journal has it."""

    sample: int
    tokens: int
    ids_sha256: str
    rows_xxh3: str
    float8_error: float | None = None  # largest |x - stored| / |x| of a row of one tensor


@dataclass
class Journal:
    """What the journal of a shard says: durable samples, refused ones, and the sha256 of the whole file."""

    durable: dict[int, Durable] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    shard_sha256: str | None = None

    def add(self, line: str) -> None:
        """Take one line; ValueError for one that a kill cut short."""
        entry = json.loads(line)
        if not isinstance(entry, dict) or not entry.keys() & {"shard_sha256", "sample"}:
            raise ValueError(f"not a line of a journal: {line!r}")
        if "shard_sha256" in entry:
            self.shard_sha256 = entry["shard_sha256"]
        elif "refused" in entry:
            self.refused[entry["sample"]] = entry["refused"]
        else:
            try:
                self.durable[entry["sample"]] = Durable(**entry)
            except TypeError as error:
                raise ValueError(f"not a line of a journal: {line!r}") from error
            self.shard_sha256 = None  # the digest of the file is the last line, or of another state of it


@dataclass
class PartialShard:
    """A shard being filled: `<folder>/shard-{j}.safetensors`, its control file and its journal."""

    folder: Path
    number: int
    samples: list[int]  # sample numbers within the chunk
    lengths: list[int]
    input_ids: list[torch.Tensor]  # int32 [T_i] each
    loss_mask: list[torch.Tensor]  # uint8 [T_i] each
    layers: int
    width: int
    dtype: str
    metadata: dict[str, Any]

    def __post_init__(self) -> None:
        self.layout = layout(self.lengths, self.layers, self.width, self.dtype, self.metadata)
        self.digests = [ids_sha256(ids) for ids in self.input_ids]
        self.starts = [0, *itertools.accumulate(self.lengths)]

    @property
    def path(self) -> Path:
        return self.folder / shard_name(self.number)

    @property
    def journal(self) -> Path:
        return self.folder / f"{self.number:05d}.journal.jsonl"

    def prepare(self) -> Journal:
        """Lay the file out, or take up one with the same header; return what is already durable.

        A file of another layout (another layer list, other tokens) is laid out anew; nothing of it could
        be kept. Rows that do not hash to their line are captured again. Raises OSError where the disk has
        no room for the whole shard (posix_fallocate).
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._has_same_head():
            self.journal.unlink(missing_ok=True)
            self._lay_out()
        journal = self._read_journal()
        lines = [{key: value for key, value in asdict(entry).items() if value is not None}
                 for _, entry in sorted(journal.durable.items())]  # fmt: skip
        if journal.shard_sha256:
            lines.append({"shard_sha256": journal.shard_sha256})
        self._write_journal(lines)  # without torn and refused lines
        return journal

    def _head(self) -> bytes:
        """What precedes the states."""
        starts = torch.tensor(self.starts, dtype=torch.int64)
        return self.layout.header + tensor_bytes(starts) + tensor_bytes(torch.cat(self.input_ids))

    def _has_same_head(self) -> bool:
        if not self.path.is_file() or self.path.stat().st_size != self.layout.total_bytes:
            return False
        head, mask = self._head(), tensor_bytes(torch.cat(self.loss_mask))
        with open(self.path, "rb") as file:
            if file.read(len(head)) != head:
                return False
            file.seek(self.layout.offsets["loss_mask"])
            return file.read(len(mask)) == mask

    def _lay_out(self) -> None:
        # A new file under a new name: a server that still writes into an old one of this name does no harm.
        temporary = self.path.with_suffix(".new")
        with open(temporary, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.layout.total_bytes)
            file.write(self._head())
            file.seek(self.layout.offsets["loss_mask"])
            file.write(tensor_bytes(torch.cat(self.loss_mask)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        artifact.fsync_folder(self.folder)

    def _read_journal(self) -> Journal:
        journal = Journal()
        if not self.journal.is_file():
            return journal
        for line in self.journal.read_text(errors="replace").splitlines():
            try:
                journal.add(line)
            except ValueError:
                continue  # the line a kill cut short: its sample is captured again
        journal.refused.clear()  # of an earlier run: those samples are asked for again
        tensors = self.tensors() if journal.durable else {}
        journal.durable = {
            position: entry
            for position, entry in journal.durable.items()
            if position in range(len(self.lengths))
            and entry.tokens == self.lengths[position]
            and entry.ids_sha256 == self.digests[position]
            and entry.rows_xxh3 == checksum(*rows_of(tensors, self.starts[position], self.starts[position + 1]))
        }
        if len(journal.durable) < len(self.lengths):
            journal.shard_sha256 = None
        return journal

    def _write_journal(self, lines: list[dict[str, Any]]) -> None:
        temporary = self.journal.with_suffix(".new")
        with open(temporary, "w") as file:
            file.writelines(artifact.canonical_json(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.journal)
        artifact.fsync_folder(self.folder)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the file as it is now, memory-mapped."""
        with safe_open(self.path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def control(self, run: str) -> dict[str, Any]:
        """Return the control record that tells the server where each sample's rows belong."""
        tensors = self.layers + 1
        row_bytes = {"states": tensors * self.width * DTYPES[self.dtype].itemsize, "scales": tensors * SCALE_BYTES}
        spans = {name: {"offset": self.layout.offsets[name], "row_bytes": size}
                 for name, size in row_bytes.items() if name in self.layout.offsets}  # fmt: skip
        return {
            "run": run,
            "path": str(self.path.resolve()),
            "journal": str(self.journal.resolve()),
            "dtype": self.dtype,
            "total_bytes": self.layout.total_bytes,
            "states": spans["states"],
            "scales": spans.get("scales"),
            "samples": [
                {"row": row, "tokens": length, "sha256": digest}
                for row, length, digest in zip(self.starts, self.lengths, self.digests, strict=False)
            ],
        }

    def entries(self, journal: Journal) -> list[dict[str, Any]]:
        """Return the manifest's record of each sample, in the order of the shard."""
        return [
            {
                "id": self.metadata["ids"][position],
                "held_out": self.metadata["held_out"][position],
                "shard": self.number,
                "position": position,
                "tokens": self.lengths[position],
                "ids_sha256": entry.ids_sha256,
                "mask_xxh3": checksum(self.loss_mask[position]),
                "rows_xxh3": entry.rows_xxh3,
                **({} if entry.float8_error is None else {"float8_error": entry.float8_error}),
            }
            for position, entry in sorted(journal.durable.items())
        ]


def rows_of(tensors: dict[str, torch.Tensor], start: int, stop: int) -> list[torch.Tensor]:
    """Return rows start..stop of what is checked as one: states, and scales where there are some."""
    return [tensors[name][start:stop] for name in ("states", "scales") if name in tensors]


def restored(states: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return states [T, K+1, D] in the dtype they were computed in; without scales they are returned as they are."""
    if scales is None:
        return states
    return (states.to(torch.float32) * scales[..., None]).to(dtype)  # (T, K+1, D)


def states_at(tensors: dict[str, torch.Tensor], index: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return `states[index]` of a shard's tensors in the dtype they were computed in; see `restored`."""
    scales = tensors["scales"][index] if "scales" in tensors else None
    return restored(tensors["states"][index], scales, dtype)


# ----------------------------------------------------------------------------------------------------
# Self-checks


@dataclass(frozen=True)
class Head:
    """The target's head as the self-checks use it; see target.write_head. D target width, V vocabulary."""

    lm_head: torch.Tensor  # [V, D]
    norm: torch.Tensor  # [D]
    rms_norm_eps: float

    def logits(self, final: torch.Tensor, convention: str) -> torch.Tensor:
        """Return fp32 logits [rows, V] of `final` [rows, D] under its convention.

        `pre_norm` rows go through RMSNorm first (Zhang and Sennrich, arXiv 1910.07467).
        """
        states = final.to(torch.float32)
        if convention == "pre_norm":
            scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.rms_norm_eps)
            states = states * scale * self.norm.to(torch.float32)
        return states @ self.lm_head.to(torch.float32).T  # (rows, D) @ (D, V) -> (rows, V)


def logprob_difference(logits: torch.Tensor, top: Sequence[Sequence[float]]) -> float:
    """Return the largest |log_softmax(logits) - server's logprob| over the server's top tokens.

    `logits` fp32 [V] of a sample's last row; `top` [(logprob, token id), ...] of the one token the server
    generated from that row.
    """
    ours = torch.log_softmax(logits, -1)
    return max(abs(ours[int(token)].item() - logprob) for logprob, token, *_ in top)


def greedy_agreement(logits: torch.Tensor, next_ids: torch.Tensor) -> int:
    """Return for how many rows the argmax of `logits` [rows, V] is the token that follows, int32 [rows]."""
    return int((logits.argmax(-1) == next_ids).sum())


# ----------------------------------------------------------------------------------------------------
# Reader


class Shard:
    """One published shard, memory-mapped when its first sample is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by name, as views into the mapped file."""
        try:
            with safe_open(self.path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ArtifactError(
                f"{self.path}: not a readable shard ({error}); make it anew with: {artifact.rebuild_command(self.path)}"
            ) from error

    @cached_property
    def starts(self) -> list[int]:
        """First row of each sample, and the number of rows."""
        return self.tensors["cu_seqlens"].tolist()


class Chunk:
    """All samples of one chunk in their order; see `open_chunk`. Nothing is read before a sample is asked for."""

    def __init__(self, manifest: dict[str, Any], shards: list[Shard]) -> None:
        self.manifest = manifest
        self.metadata: dict[str, Any] = manifest["metadata"]
        self._shards = shards
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return len(self.manifest["samples"])

    def sample(self, number: int) -> Sample:
        """Return sample `number` as views into the mapped file (float8 states are restored into memory).

        Its bytes are checked when it is read for the first time; ArtifactError where they are not the
        captured ones.
        """
        entry = self.manifest["samples"][number]
        shard = self._shards[entry["shard"]]
        begin, end = shard.starts[entry["position"] : entry["position"] + 2]
        ids, mask = shard.tensors["input_ids"][begin:end], shard.tensors["loss_mask"][begin:end]
        if number not in self._checked:
            found = (end - begin, ids_sha256(ids), checksum(mask), checksum(*rows_of(shard.tensors, begin, end)))
            expected = tuple(entry[key] for key in ("tokens", "ids_sha256", "mask_xxh3", "rows_xxh3"))
            if found != expected:
                raise ArtifactError(
                    f"{shard.path}: sample {entry['id']} changed since it was captured: expected {expected}, found "
                    f"{found}; make it anew with: {artifact.rebuild_command(shard.path)}"
                )
            self._checked.add(number)
        dtype = DTYPES[self.metadata["computed_dtype"]]
        states = states_at(shard.tensors, slice(begin, end), dtype)  # (T, K+1, D)
        return Sample(entry["id"], entry["held_out"], ids, mask, states)

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(number) for number in range(len(self)))


def open_chunk(manifest_path: Path | str) -> Chunk:
    """Open `hidden/{chunk}.json` after checking its digest and the sizes of its shards.

    The samples are checked one by one as they are read. Raises ArtifactError naming every defect at once.
    """
    manifest_path = Path(manifest_path)
    manifest = artifact.read_json(manifest_path)
    folder = manifest_path.with_suffix("")
    defects, shards = [], []
    if manifest["metadata"].get("format") != FORMAT:
        raise ArtifactError(
            f"{manifest_path}: format {manifest['metadata'].get('format')}, this Aerie reads {FORMAT}; "
            f"make it anew with: {artifact.rebuild_command(manifest_path)}"
        )
    for entry in manifest["shards"]:
        path = folder / entry["name"]
        rebuild = artifact.rebuild_command(path)
        if not path.is_file():
            defects.append(f"{path}: missing; make it with: {rebuild}")
        elif path.stat().st_size != entry["bytes"]:
            defects.append(
                f"{path}: cut short or grown: expected {entry['bytes']:,} bytes, "
                f"found {path.stat().st_size:,}; make it anew with: {rebuild}"
            )
        shards.append(Shard(path))
    if defects:
        raise ArtifactError("\n".join(defects))
    return Chunk(manifest, shards)


def require_one_identity(chunks: dict[str, Chunk]) -> dict[str, Any]:
    """Return the identity that all chunks share; raise ArtifactError naming every difference."""
    reference_name, reference = next(iter(chunks.items()))
    defects = [
        f"{name}: {key} is {chunk.metadata[key]!r}, but {reference_name} has {reference.metadata[key]!r}; "
        f"make it anew with: {artifact.rebuild_command(name)}"
        for name, chunk in chunks.items()
        for key in IDENTITY
        if chunk.metadata[key] != reference.metadata[key]
    ]
    if defects:
        raise ArtifactError("states of different captures cannot train one drafter:\n" + "\n".join(defects))
    return {key: reference.metadata[key] for key in IDENTITY}


# ----------------------------------------------------------------------------------------------------
# Batches


def epoch_batches(lengths: Sequence[int], tokens_per_batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of one epoch as sample numbers: shuffled by (seed, epoch), packed in that order.

    A batch is closed when the next document would exceed `tokens_per_batch`, which no document may
    exceed by itself. Nothing is dropped or padded.
    """
    assert max(lengths, default=0) <= tokens_per_batch, (max(lengths), tokens_per_batch)
    order = list(range(len(lengths)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    batches: list[list[int]] = []
    room = 0
    for number in order:
        if lengths[number] > room:
            batches.append([])
            room = tokens_per_batch
        batches[-1].append(number)
        room -= lengths[number]
    return batches


class PackedBatches:
    """Batches of whole samples, at most `tokens_per_batch` tokens each, epoch after epoch without end.

        batches = PackedBatches(chunks, tokens_per_batch=8192, seed=1)
        for samples in batches:           # list of Sample
            ...
            save(batches.position)        # the batch that comes next: {"epoch": 0, "batch": 17}

    A sample is read, and checked, when its batch comes. With the same chunks, budget and seed, a position
    means the same batch in every process.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        tokens_per_batch: int,
        seed: int,
        held_out: bool = False,
        position: dict[str, int] | None = None,
    ) -> None:
        """Take the samples of `chunks` that are held out, or those that are not. Raises ValueError naming every
        sample that is longer than the budget."""
        entries = [
            (chunk, number, entry)
            for chunk in chunks
            for number, entry in enumerate(chunk.manifest["samples"])
            if entry["held_out"] == held_out
        ]
        too_long = [
            f"{entry['id']} ({entry['tokens']:,})" for _, _, entry in entries if entry["tokens"] > tokens_per_batch
        ]
        if too_long or not entries:
            raise ValueError(
                f"tokens_per_batch {tokens_per_batch:,}: longer samples: {', '.join(too_long)}"
                if too_long
                else f"no sample that is {'' if held_out else 'not '}held out in {len(chunks)} chunks"
            )
        self._samples = [(chunk, number) for chunk, number, _ in entries]
        self._lengths = [entry["tokens"] for _, _, entry in entries]
        self._budget, self._seed = tokens_per_batch, seed
        self.position = dict(position or {"epoch": 0, "batch": 0})

    def __iter__(self) -> Iterator[list[Sample]]:
        while True:
            batches = epoch_batches(self._lengths, self._budget, self._seed, self.position["epoch"])
            while self.position["batch"] < len(batches):
                numbers = batches[self.position["batch"]]
                self.position = {**self.position, "batch": self.position["batch"] + 1}
                yield [chunk.sample(number) for chunk, number in (self._samples[each] for each in numbers)]
            self.position = {"epoch": self.position["epoch"] + 1, "batch": 0}
