"""Turn one chunk of conversations into ids and a loss mask: results/conversations/{chunk}.jsonl → results/tokens/{chunk}.safetensors.

    python scripts/tokenize_conversations.py --conversations results/conversations/00000.jsonl \
        --target results/target/manifest.json --truncated keep --output results/tokens/00000.safetensors

Answers that the server generated keep its ids; given answers are tokenised at the template's render boundaries.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from aerie import artifact, target, tokens
from aerie.conversations import ConversationError
from aerie.progress import say


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True, help="target/manifest.json")
    parser.add_argument("--truncated", choices=["keep", "drop"], required=True, help="answers cut at the limit")
    parser.add_argument("--context-tokens", type=int, required=True, help="longest conversation, tokens")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    manifest = target.check_model(arguments.target)
    records = artifact.read_json_lines(arguments.conversations)
    tokenizer = None
    if any(not record["turns"] for record in records):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.target.parent / "model")

    ids, masks, kept, defects, truncated = [], [], [], [], 0
    for record in records:
        if record["target_digest"] != manifest["target_digest"]:
            defects.append(f"{record['id']}: answered by target {record['target_digest'][:12]}, "
                           f"expected {manifest['target_digest'][:12]}")  # fmt: skip
            continue
        if tokens.was_truncated(record):
            truncated += 1
            if arguments.truncated == "drop":
                continue
        try:
            if record["turns"]:
                sequence, mask = tokens.mask_of_turns(record["turns"])
            else:
                sequence, mask = tokens.mask_of_boundaries(
                    tokenizer, record["messages"], manifest["facts"]["eos_token_ids"]
                )
        except ConversationError as error:
            defects.append(f"{record['id']}: {error}")
            continue
        if len(sequence) > arguments.context_tokens:
            defects.append(f"{record['id']}: {len(sequence):,} tokens, longer than server.context_tokens "
                           f"{arguments.context_tokens:,}")  # fmt: skip
            continue
        ids.append(sequence)
        masks.append(mask)
        kept.append(record)
    if not kept and not defects:
        defects.append("no conversation is left: every answer was cut at conversations.max_new_tokens; raise it, "
                       "or set tokens.truncated: keep")  # fmt: skip
    if defects:
        raise ConversationError(f"{arguments.conversations}:\n" + "\n".join(defects))
    counts = {
        "conversations": len(records),
        "truncated": truncated,
        "dropped": len(records) - len(kept),
        "tokens": sum(map(len, ids)),
        "masked_tokens": sum(map(sum, masks)),
    }
    metadata = {
        "ids": [record["id"] for record in kept],
        "held_out": [record["held_out"] for record in kept],
        # Greedy answers allow a stronger self-check of the captured states: each is the argmax of its state.
        "greedy": all(record["temperature"] == 0 for record in kept),
        "counts": counts,
        **{key: manifest[key] for key in ("target_digest", "tokenizer_digest", "template_digest")},
    }
    tokens.write(arguments.output, ids, masks, metadata)
    say(f"{arguments.output}: " + ", ".join(f"{value:,} {name}" for name, value in counts.items()))


if __name__ == "__main__":
    main()
