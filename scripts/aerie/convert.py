"""Captured chunks in the formats of other trainers: results/hidden/{chunk}.json → a folder and its manifest.

    exports/{format}.json             manifest: identity, chunks, samples, sha256 of every file of the folder
    exports/speculators_v1/           speculators 0.2 to 0.4, up to 0.7 as --legacy-data
        data_{i}.pt                   input_ids int64 [T], hidden_states list of K+1 [T, D], loss_mask int64 [T]
        data_config.json, sample_lengths.json
    exports/speculators/              speculators 0.5 to 0.9, `--data-path`
        hidden_states/hs_{i}.safetensors  token_ids int64 [T], hidden_states [T, K+1, D]
        data-00000-of-00001.arrow     row i: input_ids, loss_mask, seq_len; with state.json and dataset_info.json a
                                      folder of `datasets.load_from_disk`
        token_freq.pt                 {token id: count} where the loss mask is 1
    exports/specforge/                SpecForge 0.2, offline
        rows_{g}-{g+2000}/data_{i}.ckpt  input_ids int64 [T], loss_mask int64 [T], hidden_state [1, T, D] (final),
                                      aux_hidden_state [1, T, K*D]

T tokens of a sample, K captured layers, D target width. Layers ascend; the final state is the last of the K+1.
States keep the dtype of the reader, masks and ids are not shifted: every one of these loaders shifts by itself.

.pt and .ckpt are pickles, because these formats are. They are the only ones Aerie writes, it reads none, and they
hold nothing but tensors, lists and numbers: `torch.load(weights_only=True)` accepts them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from aerie import artifact, hidden
from aerie.hidden import Chunk, Sample
from aerie.progress import progress

PARTS = ("train", "held_out", "all")
SPECFORGE_GROUP = 2000  # samples in one rows_* folder, as SpecForge's own script groups them
ARROW_BATCH = 1000  # rows held in memory before they are written


class ConversionError(RuntimeError):
    """Chunks that cannot be written in a format; the message says why and what to change."""


def convert(
    manifests: Sequence[Path], name: str, output: Path, part: str = "train", threads: int = 1
) -> dict[str, Any]:
    """Write the samples of chunks, in order, as the folder `output` in format `name`; return the manifest.

    The folder appears whole, by one rename; `<output>.json` and its sidecar come last. Raises ConversionError
    for a final state under the wrong convention, an output that exists or nothing to write, ArtifactError for
    chunks of different captures or a file that is not what was published.
    """
    output = Path(output)
    manifest_path = output.with_name(f"{output.name}.json")
    writer = _writer(name)
    existing = [str(path) for path in (output, manifest_path) if path.exists()]
    if existing:
        raise ConversionError(f"{' and '.join(existing)}: already there, and nothing is overwritten; remove it first")
    chunks = _open(manifests, name)
    identity = hidden.require_one_identity(chunks)
    chosen = [entry for chunk in chunks.values() for entry in chunk.manifest["samples"] if _wanted(entry["held_out"], part)]  # fmt: skip
    if not chosen:
        raise ConversionError(f"{', '.join(chunks)}: no sample of the part '{part}'; parts: {', '.join(PARTS)}")
    _require_space(output, next(_samples(chunks, part))[1], sum(entry["tokens"] for entry in chosen))
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}{artifact.PARTIAL}-{os.getpid()}")
    temporary.mkdir()
    try:
        samples, files = _write(
            writer(temporary, identity), chunks, part, progress(len(chosen), f"writing {name}", "samples"), threads
        )
        for folder in {temporary, *(path.parent for path in map(temporary.joinpath, files))}:
            artifact.fsync_folder(folder)
        temporary.rename(output)
        artifact.fsync_folder(output.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    manifest = {
        "format": name,
        "part": part,
        "identity": identity,
        "chunks": {str(chunk.metadata["chunk"]): artifact.read_sidecar(path) for path, chunk in chunks.items()},
        "samples": samples,
        "files": files,
    }
    artifact.write_json(manifest_path, manifest)
    return manifest


def _writer(name: str) -> type[Writer]:
    if name not in FORMATS:
        raise ConversionError(f"format '{name}': unknown; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def _open(manifests: Sequence[Path], name: str) -> dict[str, Chunk]:
    """Open all chunks, digests checked; refuse one that comes twice or has the other final state."""
    writer = _writer(name)
    chunks: dict[str, Chunk] = {}
    seen: dict[str, str] = {}
    defects = []
    for path in map(str, manifests):
        chunk = hidden.open_chunk(path)
        number, final = chunk.metadata["chunk"], chunk.metadata["final"]
        if number in seen:
            defects.append(f"{path}: chunk {number} is already there from {seen[number]}")
        if final != writer.final:
            defects.append(
                f"{path}: the final state is {final}, {name} needs {writer.final}: {writer.reason}; set `hidden.final: "
                f"{writer.final}` in the configuration, with another results_dir to keep both, and capture again"
            )
        seen.setdefault(number, path)
        chunks[path] = chunk
    if defects:
        raise ConversionError("\n".join(defects))
    return chunks


def _require_space(output: Path, sample: Sample, tokens: int) -> None:
    row_bytes = (sample.aux[0].numel() + sample.final[0].numel()) * sample.aux.element_size()
    needed, free = row_bytes * tokens, artifact.free_bytes(output.parent)
    if needed > free:
        raise ConversionError(f"{output}: needs {needed:,} bytes, {free:,} are free; convert fewer chunks at a time")


def _wanted(held_out: bool, part: str) -> bool:
    return part == "all" or held_out == (part == "held_out")


def _samples(chunks: dict[str, Chunk], part: str) -> Iterator[tuple[str, Sample]]:
    for chunk in chunks.values():
        for sample in chunk:
            if _wanted(sample.held_out, part):
                yield chunk.metadata["chunk"], sample


def _write(
    writer: Writer, chunks: dict[str, Chunk], part: str, counter: tqdm, threads: int
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Write every sample and what goes beside them; return (samples, files) of the manifest."""
    samples: list[dict[str, Any]] = []
    files: dict[str, dict[str, Any]] = {}
    waiting: deque[tuple[str, Future[dict[str, Any]]]] = deque()

    def settle(most: int) -> None:
        while len(waiting) > most:
            name, future = waiting.popleft()
            files[name] = future.result()
            counter.update()

    with ThreadPoolExecutor(threads) as pool:
        for index, (chunk, sample) in enumerate(_samples(chunks, part)):
            name = writer.name(index)
            path = writer.folder / name
            path.parent.mkdir(exist_ok=True)
            # A file is written, synced and hashed beside the next ones; few wait, for each holds its states.
            waiting.append((name, pool.submit(_write_one, writer, sample, path)))
            writer.note(sample)
            samples.append(
                {"index": index, "file": name, "id": sample.id, "chunk": chunk, "held_out": sample.held_out,
                 "tokens": len(sample.input_ids)}
            )  # fmt: skip
            settle(2 * threads)
        settle(0)
    counter.close()
    for name in writer.finish():
        files[name] = _seal(writer.folder / name)
    return samples, files


def _write_one(writer: Writer, sample: Sample, path: Path) -> dict[str, Any]:
    writer.write(sample, path)
    return _seal(path)


def _seal(path: Path) -> dict[str, Any]:
    """Sync one file; return its entry in the manifest."""
    artifact.grant_usual_permissions(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"sha256": artifact.sha256_file(path), "bytes": path.stat().st_size}


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy with memory of its own: torch.save writes the whole memory behind a view."""
    return tensor.clone(memory_format=torch.contiguous_format)


# ----------------------------------------------------------------------------------------------------
# Formats


class Writer:
    """One format: what a sample is written as, and what goes beside the samples."""

    final: ClassVar[str]  # the convention its trainer expects
    reason: ClassVar[str]  # and why

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        self.identity = identity

    def name(self, index: int) -> str:
        """Return the path of sample `index` within the folder."""
        raise NotImplementedError

    def write(self, sample: Sample, path: Path) -> None:
        """Write one sample; called from several threads."""
        raise NotImplementedError

    def note(self, sample: Sample) -> None:
        """Take what `finish` needs of a sample; called in order."""

    def finish(self) -> list[str]:
        """Write what goes beside the samples; return the names."""
        return []

    def _write_json(self, name: str, value: Any) -> str:
        (self.folder / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return name


class SpeculatorsV1(Writer):
    """speculators 0.2 to 0.4. Its loader reads every file whose name ends in `pt`: none may lie there but samples."""

    final = "pre_norm"
    reason = "speculators applies the target's final norm to the last state when it trains"

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        super().__init__(folder, identity)
        self.lengths: list[int] = []
        self.dtypes: set[str] = set()

    def name(self, index: int) -> str:
        return f"data_{index}.pt"

    def write(self, sample: Sample, path: Path) -> None:
        states = [*sample.aux.unbind(1), sample.final]  # (T, K, D), (T, D) -> K+1 x (T, D)
        torch.save(
            {
                "input_ids": owned(sample.input_ids.long()),
                "hidden_states": [owned(state) for state in states],
                "loss_mask": owned(sample.loss_mask.long()),
            },
            path,
        )

    def note(self, sample: Sample) -> None:
        self.lengths.append(len(sample.input_ids))
        self.dtypes.add(str(sample.final.dtype))

    def finish(self) -> list[str]:
        layers, width = self.identity["layers"], self.identity["hidden_size"]
        (dtype,) = self.dtypes  # the reader's, which is not the stored one where states are stored in 8 bits
        config = {
            "version": "2.0",
            "model": {"hidden_size": width, "target_digest": self.identity["target_digest"]},
            "data": {"num_samples": len(self.lengths), "seq_length": max(self.lengths)},
            "hidden_states": {
                # The format counts outputs: what enters layer i is what layer i - 1 puts out; -1 is the last layer.
                "layer_ids": [*(index - 1 for index in layers), -1],
                "hf_indices": layers,
                "final": self.final,
                "description": "outputs of layers, the last one before the target's final norm",
            },
            "format": {
                "file_pattern": "data_{idx}.pt",
                "data_format_version": 1,
                "schema": {
                    "input_ids": {"dtype": "torch.long", "shape": "[seq_len]"},
                    "hidden_states": {
                        "dtype": f"list[{dtype}]",
                        "shape": f"list of [seq_len, {width}]",
                        "num_tensors": len(layers) + 1,
                    },
                    "loss_mask": {"dtype": "torch.long", "shape": "[seq_len]"},
                },
            },
            "aerie": self.identity,
        }
        lengths = {str(index): length for index, length in enumerate(self.lengths)}
        return [self._write_json("data_config.json", config), self._write_json("sample_lengths.json", lengths)]


class Speculators(Writer):
    """speculators 0.5 to 0.9: states as safetensors; ids, mask and length as a `datasets` folder in Arrow."""

    final = "pre_norm"
    reason = SpeculatorsV1.reason
    arrow = "data-00000-of-00001.arrow"

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        super().__init__(folder, identity)
        import pyarrow  # half a second, and only this format asks for it

        self.pyarrow = pyarrow
        integers = pyarrow.list_(pyarrow.int64())
        columns = [("input_ids", integers), ("loss_mask", integers), ("seq_len", pyarrow.int64())]
        self.schema = pyarrow.schema(columns)
        self.sink = pyarrow.OSFile(str(folder / self.arrow), "wb")
        self.stream = pyarrow.ipc.new_stream(self.sink, self.schema)
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []  # ids and mask; a row must not hold its states
        self.counts: Counter[int] = Counter()

    def name(self, index: int) -> str:
        return f"hidden_states/hs_{index}.safetensors"

    def write(self, sample: Sample, path: Path) -> None:
        states = torch.cat([sample.aux, sample.final.unsqueeze(1)], 1)  # (T, K, D), (T, 1, D) -> (T, K+1, D)
        save_file({"token_ids": sample.input_ids.long(), "hidden_states": states}, path)

    def note(self, sample: Sample) -> None:
        self.rows.append((sample.input_ids, sample.loss_mask))
        tokens, counts = sample.input_ids[sample.loss_mask.bool()].unique(return_counts=True)
        self.counts.update(dict(zip(tokens.tolist(), counts.tolist(), strict=True)))
        if len(self.rows) == ARROW_BATCH:
            self._write_rows()

    def _write_rows(self) -> None:
        lengths = torch.tensor([len(ids) for ids, _ in self.rows])
        starts = self.pyarrow.array(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().numpy())
        columns = [
            self.pyarrow.ListArray.from_arrays(starts, self.pyarrow.array(torch.cat(values).long().numpy()))
            for values in zip(*self.rows, strict=True)
        ]
        self.stream.write_batch(
            self.pyarrow.record_batch([*columns, self.pyarrow.array(lengths.numpy())], schema=self.schema)
        )
        self.rows = []

    def finish(self) -> list[str]:
        if self.rows:
            self._write_rows()
        self.stream.close()
        self.sink.close()
        torch.save(dict(sorted(self.counts.items())), self.folder / "token_freq.pt")
        state = {
            "_data_files": [{"filename": self.arrow}],
            "_fingerprint": artifact.sha256_file(self.folder / self.arrow)[:16],
            "_format_columns": self.schema.names,
            "_format_kwargs": {},
            "_format_type": "torch",  # the loader compares the ids of a row as a tensor
            "_output_all_columns": False,
            "_split": None,
        }
        info = {"citation": "", "description": "", "homepage": "", "license": ""}
        return [
            self.arrow,
            "token_freq.pt",
            self._write_json("state.json", state),
            self._write_json("dataset_info.json", info),
        ]


class SpecForge(Writer):
    """SpecForge 0.2. Its reader takes the files in the order of their names as text: data_10 before data_2."""

    final = "post_norm"
    reason = "SpecForge multiplies the final state with lm_head as it is"

    def name(self, index: int) -> str:
        first = index - index % SPECFORGE_GROUP
        return f"rows_{first}-{first + SPECFORGE_GROUP}/data_{index}.ckpt"

    def write(self, sample: Sample, path: Path) -> None:
        torch.save(
            {
                "input_ids": owned(sample.input_ids.long()),
                "loss_mask": owned(sample.loss_mask.long()),
                "hidden_state": owned(sample.final.unsqueeze(0)),  # (T, D) -> (1, T, D)
                "aux_hidden_state": owned(sample.aux.flatten(1).unsqueeze(0)),  # (T, K, D) -> (1, T, K*D)
            },
            path,
        )


FORMATS: dict[str, type[Writer]] = {
    "speculators_v1": SpeculatorsV1,
    "speculators": Speculators,
    "specforge": SpecForge,
}
