"""The captured states of one chunk: byte format, preallocation, resume, reader.

    results/hidden/{chunk}.json                        manifest: metadata, shards, samples, gates
    results/hidden/{chunk}/shard-{j:05}.safetensors    whole samples, at most `shard_bytes` each

Layer indices are HF indices: index i is the residual stream entering layer i, `hidden_states[i]` of
transformers. T tokens of a shard, N samples, K captured layers, D target width.

A shard is a plain safetensors file:

    8 bytes              length of the header, little-endian unsigned
    header               JSON, padded with spaces so that the data begin at a multiple of 4,096 bytes
    cu_seqlens  int64    [N+1]      first row of each sample, last element T
    input_ids   int32    [T]
    aux         bf16|f32 [T, K, D]  layers ascending
    final       bf16|f32 [T, D]     lm_head input (`post_norm`) or the final norm's input (`pre_norm`)
    loss_mask   uint8    [T]        1 where the assistant produced the token

in this order without gaps. `__metadata__["aerie"]` is canonical JSON with everything a reader relies on.
The small tensors are written when the shard is laid out, the states by the server at their final
offsets; a journal beside the shard has one line per sample whose rows are durable. A reader of a
published shard never sees the journal.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from aerie import artifact
from aerie.artifact import ArtifactError

FORMAT = 1
ALIGNMENT_BYTES = 4096  # start of the data: a page, so that direct I/O and mmap stay possible
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SAFETENSORS_NAMES = {"bfloat16": "BF16", "float32": "F32"}
ITEM_BYTES = {"bfloat16": 2, "float32": 4}

# What must be equal in all chunks that train one drafter.
IDENTITY = (
    "format",
    "layers",
    "final",
    "dtype",
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
    aux: torch.Tensor  # [T, K, D]
    final: torch.Tensor  # [T, D]


@dataclass(frozen=True)
class Layout:
    """Where the tensors of one shard lie: byte offsets from the start of the file."""

    header: bytes
    offsets: dict[str, int]
    total_bytes: int


def layout(lengths: Sequence[int], layers: int, width: int, dtype: str, metadata: dict[str, Any]) -> Layout:
    """Return the layout of a shard with samples of `lengths` tokens. See the module docstring."""
    tokens = sum(lengths)
    item = ITEM_BYTES[dtype]
    state = SAFETENSORS_NAMES[dtype]
    fields = [  # name, dtype, shape, bytes
        ("cu_seqlens", "I64", [len(lengths) + 1], 8 * (len(lengths) + 1)),
        ("input_ids", "I32", [tokens], 4 * tokens),
        ("aux", state, [tokens, layers, width], item * tokens * layers * width),
        ("final", state, [tokens, width], item * tokens * width),
        ("loss_mask", "U8", [tokens], tokens),
    ]
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


def split_into_shards(lengths: Sequence[int], token_bytes: int, shard_bytes: int) -> list[list[int]]:
    """Return the sample numbers of each shard: whole samples, in order, at most `shard_bytes` of states.

    A sample larger than `shard_bytes` gets a shard of its own.
    """
    shards: list[list[int]] = []
    used = 0
    for number, length in enumerate(lengths):
        size = length * token_bytes
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
class JournalLine:
    """One durable sample of an unfinished shard; digests are sha256 in hex."""

    sample: int
    tokens: int
    ids_sha256: str
    rows_sha256: str


@dataclass
class PartialShard:
    """A shard being filled: `<folder>/shard-{j}.safetensors`, its control file and its journal.

    All three live in the chunk's unfinished folder until `finish` has hashed the shard.
    """

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
    _layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        self._layout = layout(self.lengths, self.layers, self.width, self.dtype, self.metadata)
        self.digests = [ids_sha256(ids) for ids in self.input_ids]

    @property
    def path(self) -> Path:
        return self.folder / shard_name(self.number)

    @property
    def journal(self) -> Path:
        return self.folder / f"{self.number:05d}.journal.jsonl"

    def row_of(self, position: int) -> int:
        """Return the first row of the shard's sample number `position`."""
        return sum(self.lengths[:position])

    def prepare(self) -> dict[int, JournalLine]:
        """Lay the file out, or take up one with the same header; return what is already durable.

        A file of another layout (another layer list, other tokens) is laid out anew; nothing of it could
        be kept. Raises OSError where the disk has no room for the whole shard (posix_fallocate).
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._has_same_header():
            self.journal.unlink(missing_ok=True)
            self._lay_out()
        durable = self._read_journal()
        if durable:
            self._rewrite_journal(durable)  # a torn last line must not run into the next one
        return durable

    def _has_same_header(self) -> bool:
        if not self.path.is_file() or self.path.stat().st_size != self._layout.total_bytes:
            return False
        with open(self.path, "rb") as file:
            if file.read(len(self._layout.header)) != self._layout.header:
                return False
            file.seek(self._layout.offsets["input_ids"])
            ids = torch.cat(self.input_ids)
            return file.read(4 * len(ids)) == tensor_bytes(ids)

    def _lay_out(self) -> None:
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        with open(self.path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, self._layout.total_bytes)
            file.write(self._layout.header)
            for name, tensor in (
                ("cu_seqlens", torch.tensor(starts, dtype=torch.int64)),
                ("input_ids", torch.cat(self.input_ids)),
                ("loss_mask", torch.cat(self.loss_mask)),
            ):
                file.seek(self._layout.offsets[name])
                file.write(tensor_bytes(tensor))
            file.flush()
            os.fsync(file.fileno())
        artifact.fsync_folder(self.folder)

    def _read_journal(self) -> dict[int, JournalLine]:
        if not self.journal.is_file():
            return {}
        durable = {}
        for line in self.journal.read_text(errors="replace").splitlines():
            try:
                entry = JournalLine(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                continue  # the line a kill cut short: its sample is captured again
            if entry.tokens == self.lengths[entry.sample] and entry.ids_sha256 == self.digests[entry.sample]:
                durable[entry.sample] = entry
        return {number: entry for number, entry in durable.items() if self.rows_sha256(number) == entry.rows_sha256}

    def _rewrite_journal(self, durable: dict[int, JournalLine]) -> None:
        temporary = self.journal.with_suffix(".new")
        with open(temporary, "w") as file:
            for number in sorted(durable):
                file.write(artifact.canonical_json(asdict(durable[number])) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.journal)

    def rows_sha256(self, position: int) -> str:
        """Return the sha256 of a sample's rows in the file: the aux bytes, then the final bytes."""
        digest = hashlib.sha256()
        row, length = self.row_of(position), self.lengths[position]
        with open(self.path, "rb") as file:
            for name, row_bytes in self.row_bytes().items():
                file.seek(self._layout.offsets[name] + row * row_bytes)
                digest.update(file.read(length * row_bytes))
        return digest.hexdigest()

    def row_bytes(self) -> dict[str, int]:
        """Return the bytes of one row of `aux` and of `final`."""
        item = ITEM_BYTES[self.dtype]
        return {"aux": self.layers * self.width * item, "final": self.width * item}

    def control(self, run: str) -> dict[str, Any]:
        """Return the control record that tells the server where each sample's rows belong."""
        return {
            "run": run,
            "path": str(self.path.resolve()),
            "journal": str(self.journal.resolve()),
            "dtype": self.dtype,
            "tensors": {
                name: {"offset": self._layout.offsets[name], "row_bytes": row_bytes}
                for name, row_bytes in self.row_bytes().items()
            },
            "samples": [
                {"row": self.row_of(position), "tokens": length, "sha256": self.digests[position]}
                for position, length in enumerate(self.lengths)
            ],
        }

    def durable(self) -> dict[int, JournalLine]:
        """Return the samples whose rows are durable and hash to what the journal says."""
        return self._read_journal()


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
    """One shard, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="pt") as file:
                self.metadata = json.loads(file.metadata()["aerie"])
                self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ArtifactError(
                f"{path}: not a readable shard ({error}); make it anew with: {artifact.rebuild_command(path)}"
            ) from error
        self.starts = self.tensors["cu_seqlens"].tolist()


class Chunk:
    """All samples of one chunk in their order; see `open_chunk`."""

    def __init__(self, manifest: dict[str, Any], shards: list[Shard]) -> None:
        self.manifest = manifest
        self.metadata: dict[str, Any] = manifest["metadata"]
        self._shards = shards

    def __len__(self) -> int:
        return len(self.manifest["samples"])

    def sample(self, number: int) -> Sample:
        """Return sample `number` as views into the mapped file (nothing is copied)."""
        entry = self.manifest["samples"][number]
        shard = self._shards[entry["shard"]]
        rows = slice(shard.starts[entry["position"]], shard.starts[entry["position"] + 1])
        return Sample(
            id=entry["id"],
            held_out=entry["held_out"],
            input_ids=shard.tensors["input_ids"][rows],
            loss_mask=shard.tensors["loss_mask"][rows],
            aux=shard.tensors["aux"][rows],
            final=shard.tensors["final"][rows],
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(number) for number in range(len(self)))


def open_chunk(manifest_path: Path | str, verify: bool = True) -> Chunk:
    """Open `hidden/{chunk}.json` with its shards after checking every digest.

    `verify=False` skips hashing the shards (their sizes are still compared): for a reader that has
    already checked them in the same job. Raises ArtifactError naming every defect at once.
    """
    manifest_path = Path(manifest_path)
    manifest = artifact.read_json(manifest_path)
    folder = manifest_path.with_suffix("")
    defects, shards = [], []
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
        elif verify and (found := artifact.sha256_file(path)) != entry["sha256"]:
            defects.append(
                f"{path}: changed since it was captured: expected sha256 {entry['sha256']}, found {found}; "
                f"make it anew with: {rebuild}"
            )
        else:
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
