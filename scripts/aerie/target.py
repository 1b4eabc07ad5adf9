"""The target: its files, their digests, and its head without loading the model.

    results/target/model/            the Hugging Face folder (a link where the source is local)
    results/target/manifest.json     sha256 of every file, and the facts later stages rely on
    results/target/head.safetensors  embed_tokens.weight [V, D], lm_head.weight [V, D], norm.weight [D]

V target vocabulary, D target width. The head is read from the shards tensor by tensor, so a target of
500 GB needs the memory of its head alone. A tied head is written out: a consumer never has to know.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from aerie import artifact
from aerie.progress import progress

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
TOKENIZER_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
# Every consumer rehashes a target up to this size; of a larger one it compares the sizes of all files and
# rehashes those up to the limit (`snakemake verify` always rehashes everything). 0.5 s at 2 GB/s.
REHASH_LIMIT_BYTES = 1 << 30


class TargetError(ValueError):
    """A target folder that cannot be used; the message lists every defect."""


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a config.json (multimodal wrappers nest it)."""
    return config.get("text_config", config)


def read_config(model: Path) -> dict[str, Any]:
    """Return config.json of a model folder."""
    path = model / "config.json"
    if not path.is_file():
        raise TargetError(f"{path}: missing; {model} is not a Hugging Face model folder")
    return json.loads(path.read_text())


def chat_template(model: Path) -> str:
    """Return the chat template of a model folder, '' where it has none."""
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        path = model / name
        if path.is_file():
            if name.endswith(".jinja"):
                return path.read_text()
            return json.loads(path.read_text()).get("chat_template") or ""
    return ""


def _shard_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file after comparing the file's size with it."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise TargetError(f"{path}: cut short: {size:,} bytes, its header alone needs {8 + length:,}")
        header = json.loads(file.read(length))
    end = 8 + length + max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)  # fmt: skip
    if end != size:
        raise TargetError(f"{path}: cut short or grown: expected {end:,} bytes, found {size:,}")
    return header


def weight_map(model: Path) -> dict[str, Path]:
    """Return {tensor name: shard} of a model folder; raise TargetError with every missing or torn shard."""
    index = model / "model.safetensors.index.json"
    if index.is_file():
        expected = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        expected = ["model.safetensors"]
    defects, names = [], {}
    for name in expected:
        path = model / name
        if not path.is_file():
            where = f"named in {index.name}" if index.is_file() else "and there is no index of shards"
            defects.append(f"{path}: missing shard ({where}); fetch the model again")
            continue
        try:
            names.update({tensor: path for tensor in _shard_header(path) if tensor != "__metadata__"})
        except TargetError as error:
            defects.append(f"{error}; fetch the model again")
    if defects:
        raise TargetError("\n".join(defects))
    return names


def head_names(names: Iterable[str], tied: bool) -> dict[str, str]:
    """Return {head tensor: its name in the shards}; a wrapper's prefix (`language_model.`) is allowed.

    Raises TargetError naming what is missing or ambiguous.
    """
    names = sorted(names)
    found, defects = {}, []
    wanted = {"embed_tokens.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not tied:
        wanted["lm_head.weight"] = "lm_head.weight"
    for key, ending in wanted.items():
        matches = [name for name in names if name == ending or name.endswith("." + ending)]
        if len(matches) != 1:
            defects.append(f"expected one tensor '[prefix.]{ending}', found {matches or 'none'}")
        else:
            found[key] = matches[0]
    if defects:
        raise TargetError("the target's head: " + "; ".join(defects))
    if tied:
        found["lm_head.weight"] = found["embed_tokens.weight"]
    return found


def is_tied(names: Iterable[str]) -> bool:
    """Return whether lm_head is the embedding: the shards hold no lm_head of their own.

    config.json is no witness: `tie_word_embeddings` is left out where it equals the class default, and that
    default differs between families.
    """
    return not any(name == "lm_head.weight" or name.endswith(".lm_head.weight") for name in names)


def facts(model: Path) -> dict[str, Any]:
    """Return what later stages rely on, read from config.json and generation_config.json."""
    config = read_config(model)
    inner = text_config(config)
    missing = [key for key in ("num_hidden_layers", "hidden_size", "vocab_size") if key not in inner]
    if missing:
        raise TargetError(f"{model}/config.json: lacks {', '.join(missing)}")
    generation = model / "generation_config.json"
    generated = json.loads(generation.read_text()) if generation.is_file() else {}
    eos = generated.get("eos_token_id", inner.get("eos_token_id"))
    return {
        "architecture": (config.get("architectures") or ["unknown"])[0],
        "model_type": inner.get("model_type", "unknown"),
        "num_hidden_layers": inner["num_hidden_layers"],
        "hidden_size": inner["hidden_size"],
        "vocab_size": inner["vocab_size"],
        "context_tokens": inner.get("max_position_embeddings"),
        "rms_norm_eps": inner.get("rms_norm_eps", 1e-6),
        "tied_head": is_tied(weight_map(model)),
        "eos_token_ids": [eos] if isinstance(eos, int) else list(eos or []),
    }


def require_complete(model: Path) -> None:
    """Raise TargetError listing everything a usable model folder lacks: config, tokenizer, template, shards."""
    defects = []
    for look in (read_config, weight_map):
        try:
            look(model)
        except TargetError as error:
            defects.append(str(error))
    if not any((model / name).is_file() for name in TOKENIZER_VOCABULARIES):
        defects.append(f"{model}: no tokenizer (looked for {', '.join(TOKENIZER_VOCABULARIES)})")
    elif not chat_template(model):
        defects.append(
            f"{model}: no chat template (looked in chat_template.jinja and tokenizer_config.json); "
            "a drafter needs the template the target is served with"
        )
    if defects:
        raise TargetError("\n".join(defects))


def _files(model: Path) -> list[Path]:
    return sorted(path for path in model.rglob("*") if path.is_file() and ".cache" not in path.parts)


def describe(model: Path, source: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a complete model folder: digests of all files, digests of its parts, facts."""
    files = _files(model)
    counter = progress(sum(path.stat().st_size for path in files), "hashing the target", "bytes")
    entries = {}
    for path in files:
        size = path.stat().st_size
        entries[path.relative_to(model).as_posix()] = {"sha256": artifact.sha256_file(path), "bytes": size}
        counter.update(size)
    counter.close()
    tokenizer = {name: entries[name]["sha256"] for name in TOKENIZER_FILES if name in entries}
    return {
        "source": source,
        "facts": facts(model),
        "files": entries,
        "target_digest": artifact.digest_of({name: entry["sha256"] for name, entry in entries.items()}),
        "tokenizer_digest": artifact.digest_of(tokenizer),
        "template_digest": hashlib.sha256(chat_template(model).encode()).hexdigest(),
    }


def write_head(model: Path, manifest: dict[str, Any], output: Path) -> None:
    """Publish the head's three tensors in the dtype they are stored in, without loading the model."""
    shards = weight_map(model)
    names = head_names(shards, manifest["facts"]["tied_head"])
    tensors: dict[str, torch.Tensor] = {}
    for key, name in names.items():
        with safe_open(shards[name], framework="pt") as shard:
            tensors[key] = shard.get_tensor(name).clone()  # a tied head is written twice
    metadata = {key: manifest[key] for key in ("target_digest", "tokenizer_digest", "template_digest", "facts")}
    with artifact.publish(output) as temporary:
        save_file(tensors, temporary, artifact.metadata_entry(metadata))


def check_model(manifest_path: Path) -> dict[str, Any]:
    """Return the manifest after comparing the model folder with it; raise ArtifactError with every defect.

    All sizes are compared; files up to `REHASH_LIMIT_BYTES` are rehashed.
    """
    manifest = artifact.read_json(manifest_path)
    model = manifest_path.parent / "model"
    defects = []
    for name, entry in manifest["files"].items():
        path = model / name
        if not path.is_file():
            defects.append(f"{path}: missing")
        elif path.stat().st_size != entry["bytes"]:
            defects.append(f"{path}: expected {entry['bytes']:,} bytes, found {path.stat().st_size:,}")
        elif entry["bytes"] <= REHASH_LIMIT_BYTES and artifact.sha256_file(path) != entry["sha256"]:
            defects.append(f"{path}: changed since it was fetched (expected sha256 {entry['sha256']})")
    if defects:
        rebuild = artifact.rebuild_command(manifest_path)
        raise artifact.ArtifactError("\n".join(defects) + f"\nfetch the target again with: {rebuild}")
    return manifest
