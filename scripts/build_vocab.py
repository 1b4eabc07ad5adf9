"""Build the draft vocabulary: results/tokens/*.safetensors → results/drafter/vocab.safetensors.

    python scripts/build_vocab.py --tokens results/tokens --chunks 3 \
        --target results/target/manifest.json --draft-vocab-size 8192 \
        --output results/drafter/vocab.safetensors

Counts what the assistant produced in the training conversations (held-out ones excluded) and keeps the
most frequent tokens, the target's special tokens and EOS always among them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from aerie import artifact, tokens, vocab
from aerie.progress import say


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="folder of the tokens, results/tokens")
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--target", type=Path, required=True, help="results/target/manifest.json")
    parser.add_argument("--draft-vocab-size", type=int, required=True, help="draft tokens (R)")
    parser.add_argument("--special-ids", type=int, nargs="*", default=[],
                        help="ids that must be in, besides those of the target's tokenizer")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    manifest = artifact.read_json(arguments.target)
    V = manifest["facts"]["vocab_size"]
    counts = {part: torch.zeros(V, dtype=torch.int64) for part in ("train", "held_out")}
    conversations = {"train": 0, "held_out": 0}
    chunks: dict[str, str] = {}
    tokenizers: dict[str, str] = {}
    for path in artifact.chunk_paths(arguments.tokens, arguments.chunks, ".safetensors"):
        tensors, metadata = tokens.read(path)
        tokenizers[str(path)] = metadata["tokenizer_digest"]
        chunks[path.stem] = artifact.read_sidecar(path)
        lengths = tensors["cu_seqlens"].diff()
        held_out = torch.tensor(metadata["held_out"], dtype=torch.bool)
        for part, kept in (("train", ~held_out), ("held_out", held_out)):
            mask = tensors["loss_mask"].bool() & kept.repeat_interleave(lengths)  # (T,)
            counts[part] += vocab.count_assistant_tokens(tensors["input_ids"], mask, V)
            conversations[part] += int(kept.sum())
    foreign = [name for name, digest in tokenizers.items() if digest != manifest["tokenizer_digest"]]
    if foreign:
        raise vocab.VocabularyError(
            f"made with another tokenizer than {arguments.target}: {', '.join(foreign)}; "
            f"make them anew with: {artifact.rebuild_command(foreign[0])}"
        )
    if not counts["train"].sum():
        raise vocab.VocabularyError("no assistant token in any training conversation: nothing to count")

    special = sorted({*arguments.special_ids, *vocab.special_tokens(arguments.target.parent / "model")})
    chosen, filled = vocab.choose(counts["train"], arguments.draft_vocab_size, special)
    metadata = {
        "tokenizer_digest": manifest["tokenizer_digest"],
        "target_digest": manifest["target_digest"],
        "chunks": chunks,
        "special_ids": special,
        "filled": filled,
        "conversations": conversations,
        "tokens": {part: int(count.sum()) for part, count in counts.items()},
        "coverage": {part: vocab.coverage(count, chosen) for part, count in counts.items()},
    }
    vocab.write(arguments.output, chosen, V, metadata)
    shares = ", ".join(
        f"{part} {'no tokens' if share is None else f'{share:.4f}'}" for part, share in metadata["coverage"].items()
    )
    say(
        f"{arguments.output}: {len(chosen):,} of {V:,} tokens ({len(special)} special, {filled:,} never "
        f"seen), counted on {metadata['tokens']['train']:,} tokens; coverage: {shares}"
    )


if __name__ == "__main__":
    main()
