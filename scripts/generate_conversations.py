"""Let the target answer: results/prompts/{chunk}.jsonl → results/conversations/{chunk}.jsonl.

    python scripts/generate_conversations.py --prompts results/prompts/00000.jsonl \
        --output results/conversations/00000.jsonl --model results/target/model --device cpu ...

`--regenerate no` keeps the answers that the prompts carry; no server is started then.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aerie import artifact, conversations, server, target
from aerie.conversations import ConversationError
from aerie.progress import progress, say


def kept(prompts: list[dict[str, Any]], target_digest: str) -> list[dict[str, Any]]:
    """Return conversations with the given answers; every user turn must have one."""
    defects = []
    for prompt in prompts:
        roles = [message["role"] for message in prompt["messages"]]
        if roles[-1] != "assistant" or roles.count("assistant") != roles.count("user"):
            defects.append(f"{prompt['id']}: not every user turn has an answer, found roles {', '.join(roles)}")
    if defects:
        raise ConversationError("conversations.regenerate: false needs given answers:\n" + "\n".join(defects))
    return [{**prompt, "turns": [], "temperature": None, "target_digest": target_digest} for prompt in prompts]


class Generation:
    """Asks the target turn by turn: the first turns of all conversations, then their second turns, ..."""

    def __init__(self, arguments: argparse.Namespace, tokenizer: Any, eos_ids: list[int]) -> None:
        self.arguments, self.tokenizer, self.eos_ids = arguments, tokenizer, eos_ids
        self.sampling = {
            "max_new_tokens": arguments.max_new_tokens,
            "temperature": arguments.temperature,
            "top_p": arguments.top_p,
        }

    def payloads(self, states: list[dict[str, Any]], turn: int) -> dict[int, dict[str, Any]]:
        """Return {conversation number: request} of one turn; refuse every prompt too long for the context at once."""
        payloads, defects = {}, []
        for number, state in enumerate(states):
            if turn >= len(state["asked"]):
                continue
            position = state["asked"][turn]
            # Messages between the last answer and this user turn (a tool's result, a system note) come along.
            state["messages"] += [m for m in state["given"][state["taken"] : position + 1] if m["role"] != "assistant"]
            state["taken"] = position + 1
            try:
                ids = conversations.next_prompt_ids(
                    self.tokenizer, state["asked_with"], state["messages"], state["turns"], self.eos_ids
                )
            except ConversationError as error:
                defects.append(f"{state['id']}: {error}")
                continue
            room = self.arguments.context_tokens - self.arguments.max_new_tokens
            if len(ids) > room:
                defects.append(
                    f"{state['id']}, turn {turn}: {len(ids):,} tokens, but server.context_tokens "
                    f"{self.arguments.context_tokens:,} - conversations.max_new_tokens "
                    f"{self.arguments.max_new_tokens:,} leaves room for {room:,}; shorten or remove the prompt"
                )
                continue
            state["asked_with"] = list(state["messages"])
            payloads[number] = {"input_ids": ids, "sampling_params": self.sampling}
        if defects:
            raise ConversationError("\n".join(defects))
        return payloads

    def record(self, state: dict[str, Any], payload: dict[str, Any], reply: server.Reply) -> int:
        """Keep one answer; return its length in tokens."""
        body = reply.body
        if reply.status != 200:
            raise server.ServerError(f"{state['id']}: HTTP {reply.status}: {body}")
        reason = body["meta_info"]["finish_reason"]["type"]
        if reason not in ("stop", "length") or not body["output_ids"]:
            raise server.ServerError(f"{state['id']}: the server ended the answer with {reason!r}: {body}")
        state["turns"].append(
            {"prompt_ids": payload["input_ids"], "output_ids": body["output_ids"], "finish_reason": reason}
        )
        text = conversations.answer_text(self.tokenizer, body["output_ids"], self.eos_ids)
        state["messages"].append({"role": "assistant", "content": text})
        return len(body["output_ids"])


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--regenerate", choices=["yes", "no"], default="yes")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--server-log", type=Path, required=True)
    server.add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_args(argv)
    manifest = target.check_model(Path(arguments.model).parent / "manifest.json")
    prompts = artifact.read_json_lines(arguments.prompts)
    if arguments.regenerate == "no":
        artifact.write_json_lines(arguments.output, kept(prompts, manifest["target_digest"]))
        return

    from transformers import AutoTokenizer

    generation = Generation(
        arguments, AutoTokenizer.from_pretrained(arguments.model), manifest["facts"]["eos_token_ids"]
    )
    states = [
        {"id": prompt["id"], "held_out": prompt["held_out"], "given": prompt["messages"], "taken": 0,
         "asked": conversations.asked_turns(prompt["messages"]), "asked_with": [], "messages": [], "turns": []}
        for prompt in prompts
    ]  # fmt: skip
    payloads = generation.payloads(states, 0)  # before the server: a bad prompt costs no start
    counter = progress(sum(len(state["asked"]) for state in states), "answering", "answers")
    tokens = 0
    with server.Server(server.settings_of(arguments), [], {}, arguments.server_log) as engine:

        def on_reply(number: int, reply: server.Reply) -> None:
            nonlocal tokens
            tokens += generation.record(states[number], payloads[number], reply)
            counter.update()

        turn = 0
        while payloads:
            engine.ask_all(payloads.items(), arguments.concurrency, on_reply)
            turn += 1
            payloads = generation.payloads(states, turn)
    rate = tokens / max(counter.format_dict["elapsed"], 1e-9)
    counter.close()
    artifact.write_json_lines(
        arguments.output,
        (
            {key: state[key] for key in ("id", "held_out", "messages", "turns")}
            | {"temperature": arguments.temperature, "target_digest": manifest["target_digest"]}
            for state in states
        ),
    )
    cut = sum(turn["finish_reason"] == "length" for state in states for turn in state["turns"])
    say(f"{arguments.output}: {len(states)} conversations, {tokens:,} tokens, {rate:,.0f} tok/s, "
        f"{cut} answers cut at {arguments.max_new_tokens} tokens")  # fmt: skip


if __name__ == "__main__":
    main()
