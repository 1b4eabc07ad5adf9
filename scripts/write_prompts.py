"""Write the prompts of one chunk: a list, a hub file or the target itself → results/prompts/{chunk}.jsonl.

    python scripts/write_prompts.py --source jsonl --file prompts.jsonl.gz --chunk 0 --rows-per-chunk 64 \
        --count 256 --held-out-fraction 0.1 --output results/prompts/00000.jsonl

With `--source self` the target writes the user turns from its own chat template. Each row has a random
generator of its own, seeded by (seed, row, attempt): the first tokens of a turn are drawn from the target's
distribution, the rest is its most probable continuation, so a row depends on no other row.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aerie import artifact, conversations, prompts, server, target
from aerie.progress import progress, say

CANDIDATES = 64  # most probable tokens to draw from; what lies beyond is noise on small models
ATTEMPTS = 10  # draws for a row before an empty or repeated turn is an error


def hub_file(repository: str, revision: str, name: str, cache: Path) -> Path:
    """Download one JSON-lines file of a data set at a pinned commit."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repository, name, repo_type="dataset", revision=revision, cache_dir=cache))


def listed(path: Path, chunk: int, rows_per_chunk: int, count: int) -> list[dict[str, Any]]:
    """Return the rows of one chunk of a JSON-lines file; the whole file is checked each time."""
    everything = prompts.read_json_lines(path)
    if len(everything) < count:
        raise prompts.PromptError(f"{path}: {len(everything):,} prompts, config.yaml asks for prompts.count: {count:,}")
    return [everything[row] for row in prompts.rows_of_chunk(chunk, rows_per_chunk, count)]


class SelfWriter:
    """Lets the target write user turns; all rows of a chunk advance together, one token or one tail a round."""

    def __init__(self, arguments: argparse.Namespace, tokenizer: Any, engine: server.Server) -> None:
        self.arguments, self.tokenizer, self.engine = arguments, tokenizer, engine
        opening = prompts.user_turn_opening(
            lambda messages: conversations.render(tokenizer, messages, answer_next=False)
        )
        self.opening = conversations.ids_of(tokenizer, opening)
        self.eos = target.facts(Path(arguments.model))["eos_token_ids"]

    def _draw(self, row: int, reply: server.Reply) -> None:
        (candidates,) = self._accepted(reply)["meta_info"]["output_top_logprobs"]
        weights = [math.exp(logprob) for logprob, _, _ in candidates]
        self.turns[row] += self.generators[row].choices([token for _, token, _ in candidates], weights)

    def _continue(self, row: int, reply: server.Reply) -> None:
        self.turns[row] += self._accepted(reply)["output_ids"]

    @staticmethod
    def _accepted(reply: server.Reply) -> Any:
        if reply.status != 200:
            raise server.ServerError(f"the server refused to continue a user turn: {reply.body}")
        return reply.body

    def _round(self, payload: dict[str, Any], on_reply: Callable[[int, server.Reply], None]) -> None:
        requests = (
            (row, {"input_ids": self.opening + turn, **payload})
            for row, turn in self.turns.items()
            if not (turn and turn[-1] in self.eos)
        )
        self.engine.ask_all(requests, self.arguments.max_running_requests, on_reply)

    def _text(self, row: int) -> str:
        text = conversations.answer_text(self.tokenizer, self.turns[row], self.eos)
        # Nothing of the template's own may stand inside the user's text.
        for token in self.tokenizer.all_special_tokens:
            text = text.split(token)[0]
        return text.strip()

    def write(self, rows: range) -> list[dict[str, Any]]:
        """Return one prompt per row, all different; raises PromptError where the target keeps repeating itself."""
        texts: dict[int, str] = {}
        waiting = list(rows)
        one_token = {
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "top_logprobs_num": CANDIDATES,
        }
        tail = {"sampling_params": {"max_new_tokens": self.arguments.max_new_tokens, "temperature": 0}}
        counter = progress(len(rows), "writing prompts", "prompts")
        for attempt in range(ATTEMPTS):
            self.generators = {row: random.Random(f"{self.arguments.seed}/{row}/{attempt}") for row in waiting}
            self.turns: dict[int, list[int]] = {row: [] for row in waiting}
            for _ in range(self.arguments.drawn_tokens):
                self._round(one_token, self._draw)
            self._round(tail, self._continue)
            for row in waiting:
                text = self._text(row)
                if text and text not in texts.values():
                    texts[row] = text
                    counter.update()
            waiting = [row for row in waiting if row not in texts]
            if not waiting:
                break
            say(f"{len(waiting)} empty or repeated turns of attempt {attempt + 1} are drawn again")
        counter.close()
        if waiting:
            raise prompts.PromptError(
                f"rows {waiting}: after {ATTEMPTS} attempts still empty or repeated; raise prompts.drawn_tokens "
                "or give prompts.source: jsonl"
            )
        # The id is the text's digest: equal texts of two chunks then fall on the same side of the held-out split.
        return [
            {
                "id": f"self-{hashlib.sha256(texts[row].encode()).hexdigest()[:16]}",
                "messages": [{"role": "user", "content": texts[row]}],
            }
            for row in rows
        ]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=["self", "jsonl", "hub"], required=True)
    parser.add_argument("--file", default="", help="JSON-lines file; with --source hub its name in the repository")
    parser.add_argument("--name", default="", help="data set repository (hub)")
    parser.add_argument("--version", default="", help="commit of the repository (hub)")
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache"))
    parser.add_argument("--chunk", type=int, required=True)
    parser.add_argument("--rows-per-chunk", type=int, required=True)
    parser.add_argument("--count", type=int, required=True, help="prompts in all chunks")
    parser.add_argument("--held-out-fraction", type=float, required=True)
    parser.add_argument("--drawn-tokens", type=int, default=4, help="first tokens of a turn that are drawn (self)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="longest user turn, tokens (self)")
    parser.add_argument("--server-log", type=Path, help="log of the server (self)")
    parser.add_argument("--output", type=Path, required=True)
    known, rest = parser.parse_known_args(argv)
    if known.source == "self":
        server.add_arguments(parser)
        return parser.parse_args(argv)
    # A listed source needs no server; its flags may be given all the same, so that one rule serves all sources.
    del rest
    return known


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    rows = prompts.rows_of_chunk(arguments.chunk, arguments.rows_per_chunk, arguments.count)
    if arguments.source == "self":
        from transformers import AutoTokenizer

        target.check_model(Path(arguments.model).parent / "manifest.json")
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        with server.Server(server.settings_of(arguments), [], {}, arguments.server_log) as engine:
            written = SelfWriter(arguments, tokenizer, engine).write(rows)
    else:
        path = Path(arguments.file)
        if arguments.source == "hub":
            path = hub_file(arguments.name, arguments.version, arguments.file, arguments.cache_dir)
        written = listed(path, arguments.chunk, arguments.rows_per_chunk, arguments.count)
    for record in written:
        record["held_out"] = prompts.is_held_out(record["id"], arguments.held_out_fraction)
    artifact.write_json_lines(arguments.output, written)
    say(f"{arguments.output}: {len(written)} prompts, {sum(r['held_out'] for r in written)} held out")


if __name__ == "__main__":
    main()
