"""A results folder up to `hidden`, made from nothing: what the tests of the drafter's stages read.

The language is a cycle: after token t always comes NEXT[t]. The captured states are a fixed random vector per
token, the final state of token t points at the head's row of NEXT[t]. So a drafter has something to learn, and a
trained one is right nearly always.

Shapes: T tokens, D width, K layers, V vocabulary, R draft vocabulary.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from aerie import artifact, hidden, target, tokens, vocab
from aerie.drafter import Drafter, DrafterConfig
from aerie.hidden import Sample
from aerie.training import Teacher
from naive_eagle3 import Naive

V, R, D, K = 48, 32, 16, 3
LAYERS = [1, 2, 4]
SPECIAL = 2  # id of the end-of-turn token, made special by the tokenizer
PROMPT_TOKENS = 4
CONFIG = DrafterConfig(
    hidden_size=D, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-5,
    rope_theta=10_000.0, rope_scaling=None, max_position_embeddings=128, vocab_size=V, draft_vocab_size=R,
    captured_layers=K,
)  # fmt: skip


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_sample(name, length, seed, held_out=False):
    """A document without any structure: random tokens, mask and states."""
    generator = torch.Generator().manual_seed(seed)
    return Sample(
        id=name,
        held_out=held_out,
        input_ids=torch.randint(0, V, (length,), generator=generator, dtype=torch.int32),
        loss_mask=(torch.rand(length, generator=generator) < 0.6).to(torch.uint8),
        states=torch.cat(
            [
                torch.randn(length, K, D, generator=generator),
                torch.randn(length, 1, D, generator=generator) * 0.5,
            ],
            dim=1,
        ),  # (T, K+1, D)
    )


def random_drafter(config=CONFIG, seed=1):
    """A drafter far from its initial state, norms included, and its teacher."""
    head = drawn(config.vocab_size, config.hidden_size, seed=seed + 1)
    chosen = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(seed))[: config.draft_vocab_size]
    ids = chosen.sort().values
    drafter = Drafter(config, drawn(config.vocab_size, config.hidden_size, seed=seed + 2))
    drafter.initialise(head, ids, seed)
    with torch.no_grad():
        for number, parameter in enumerate(drafter.parameters()):
            parameter += 0.2 * drawn(*parameter.shape, seed=seed + 10 + number)
    members = torch.zeros(config.vocab_size, dtype=torch.bool)
    members[ids] = True
    return drafter, Teacher(head, head[ids], ids, members, None)


def naive_of(module, embedding):
    """The naive implementation with a module's weights."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    config = module.config
    heads = (config.num_attention_heads, config.num_key_value_heads)
    return Naive(weights, embedding, *heads, config.rope_theta, config.rms_norm_eps)


NEXT = torch.roll(torch.arange(3, V), -1)  # of the tokens 3..V-1; 0, 1, 2 are special


def cyclic_sample(name, length, held_out):
    """PROMPT_TOKENS tokens of a prompt, then an answer that follows the cycle and ends with SPECIAL."""
    first = sum(name.encode()) % (V - 3)
    ids = [3 + first]
    while len(ids) < length - 1:
        ids.append(int(NEXT[ids[-1] - 3]))
    ids = torch.tensor([*ids, SPECIAL], dtype=torch.int32)
    mask = torch.zeros(length, dtype=torch.uint8)
    mask[PROMPT_TOKENS:] = 1
    aux, head = drawn(V, K, D, seed=5), drawn(V, D, seed=6)
    following = torch.cat((ids[1:], ids[:1])).long()
    final = head[following] / head.norm(dim=1)[following, None] * 3  # (T, D)
    return Sample(name, held_out, ids, mask, torch.cat((aux[ids.long()], final[:, None]), dim=1))


def write_target(results: Path):
    """target/model, target/manifest.json and target/head.safetensors of a model that has only a head."""
    model = results / "target" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(artifact.canonical_json({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "vocab_size": V,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "intermediate_size": 24, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 128,
        "eos_token_id": SPECIAL,
    }))  # fmt: skip
    (model / "tokenizer.json").write_text(artifact.canonical_json({
        "added_tokens": [
            {"id": 0, "content": "<unused>", "special": False},
            {"id": 1, "content": "<turn>", "special": False},
            {"id": SPECIAL, "content": "<end>", "special": True},
        ]
    }))  # fmt: skip
    (model / "chat_template.jinja").write_text("{% for m in messages %}<turn>{{ m.content }}<end>{% endfor %}")
    head = {
        "lm_head.weight": drawn(V, D, seed=6),
        "embed_tokens.weight": drawn(V, D, seed=7),
        "norm.weight": torch.ones(D),
    }
    save_file({"model.embed_tokens.weight": head["embed_tokens.weight"], "lm_head.weight": head["lm_head.weight"],
               "model.norm.weight": head["norm.weight"]}, model / "model.safetensors")  # fmt: skip
    manifest = target.describe(model, {"source": "local", "name": "cycle"})
    target.write_head(model, manifest, results / "target" / "head.safetensors")
    artifact.write_json(results / "target" / "manifest.json", manifest)
    return manifest


def stored(states, dtype):
    """States [T, K+1, D] as the capture plugin stores them: (states, scales [T, K+1] or None, float8_error or None).

    float8_e4m3 has a scale per token and tensor, the largest magnitude over the largest float8.
    """
    if dtype != hidden.FLOAT8:
        return states.to(hidden.DTYPES[dtype]), None, None
    values = states.float()
    scales = (values.abs().amax(dim=2) / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-12)  # (T, K+1)
    quantised = (values / scales[..., None]).to(torch.float8_e4m3fn)  # (T, K+1, D)
    missed = (values - quantised.float() * scales[..., None]).norm(dim=2)  # (T, K+1)
    return quantised, scales, (missed / values.norm(dim=2).clamp(min=1e-12)).max().item()


def fill(shard, position, states):
    """Write one sample's states [T, K+1, D] and its journal line, as a capture server does."""
    control = shard.control("run")
    entry = control["samples"][position]
    rows, scales, error = stored(states, shard.dtype)
    with open(control["path"], "r+b") as file:
        for name, tensor in (("states", rows), ("scales", scales)):
            if tensor is not None:
                file.seek(control[name]["offset"] + entry["row"] * control[name]["row_bytes"])
                file.write(hidden.tensor_bytes(tensor))
    line = {
        "sample": position,
        "tokens": entry["tokens"],
        "ids_sha256": entry["sha256"],
        "rows_xxh3": hidden.checksum(*(tensor for tensor in (rows, scales) if tensor is not None)),
        **({} if error is None else {"float8_error": error}),
    }
    with open(control["journal"], "a") as file:
        file.write(json.dumps(line) + "\n")


def write_chunk(results: Path, manifest, number, samples, dtype="float32", **changes):
    """tokens/{chunk}.safetensors and hidden/{chunk}.json with one shard; `changes` go into its metadata."""
    chunk = f"{number:05d}"
    identity = {key: manifest[key] for key in ("target_digest", "tokenizer_digest", "template_digest")}
    tokens_path = results / "tokens" / f"{chunk}.safetensors"
    names = {"ids": [s.id for s in samples], "held_out": [s.held_out for s in samples]}
    tokens.write(
        tokens_path,
        [sample.input_ids.tolist() for sample in samples],
        [sample.loss_mask.tolist() for sample in samples],
        {**names, "greedy": True, **identity},
    )
    metadata = {
        "format": hidden.FORMAT, "chunk": chunk, "tokens_digest": artifact.read_sidecar(tokens_path), "layers": LAYERS,
        "final": "post_norm", "dtype": dtype, "computed_dtype": "bfloat16" if dtype == "bfloat16" else "float32",
        "hidden_size": D, "sglang_version": "0.5.20", "patch_digest": "p", **identity, **changes,
    }  # fmt: skip
    lengths = [len(sample.input_ids) for sample in samples]
    shard = hidden.PartialShard(
        results / "partial" / chunk, 0, list(range(len(samples))), lengths, [s.input_ids for s in samples],
        [s.loss_mask for s in samples], K, D, dtype, {**metadata, **names},
    )  # fmt: skip
    shard.prepare()
    for position, sample in enumerate(samples):
        fill(shard, position, sample.states)
    journal = shard.prepare()  # reads the lines back
    path = results / "hidden" / f"{chunk}.json"
    folder = path.with_suffix("")
    folder.mkdir(parents=True)
    size = shard.path.stat().st_size
    digest = artifact.seal(shard.path, folder / shard.path.name)
    artifact.write_json(path, {
        "metadata": metadata, "gates": {},
        "shards": [{"name": shard.path.name, "sha256": digest, "bytes": size, "tokens": sum(lengths)}],
        "samples": shard.entries(journal),
    })  # fmt: skip


def write_vocab(results: Path, manifest, chunks):
    """drafter/vocab.safetensors: the first R tokens, counted on the given chunks."""
    counted = {f"{n:05d}": artifact.read_sidecar(results / "tokens" / f"{n:05d}.safetensors") for n in range(chunks)}
    metadata = {
        "chunks": counted,
        "target_digest": manifest["target_digest"],
        "coverage": {"train": 1.0, "held_out": 0.9},
    }
    vocab.write(results / "drafter" / "vocab.safetensors", torch.arange(R), V, metadata)


def write_run(results: Path, training=12, held_out=3):
    """Everything the trainer reads, in two chunks of documents of 12 to 22 tokens. Returns the target's manifest."""
    manifest = write_target(results)
    samples = [cyclic_sample(f"train-{i}", 12 + i % 7, False) for i in range(training)]
    samples += [cyclic_sample(f"held-{i}", 18 + 2 * i, True) for i in range(held_out)]
    write_chunk(results, manifest, 0, samples[::2])
    write_chunk(results, manifest, 1, samples[1::2])
    write_vocab(results, manifest, 2)
    return manifest


def train_arguments(results: Path, **changes):
    """The command line of train_drafter for `results`; a flag with None is left out."""
    flags = {
        "hidden": results / "hidden", "chunks": 2, "vocab": results / "drafter" / "vocab.safetensors",
        "target": results / "target" / "manifest.json", "head": results / "target" / "head.safetensors",
        "checkpoints": results / "drafter" / "checkpoints", "output": results / "drafter" / "trained.safetensors",
        "metrics": results / "drafter" / "metrics.json", "ttt_steps": 3, "step_decay": 0.8, "steps": 12,
        "tokens_per_batch": 48, "learning_rate": 5e-3, "warmup_ratio": 0.1, "max_grad_norm": 0.5, "dtype": "float32",
        "seed": 1, "served_steps": 3, "eval_every_steps": 4, "save_every_steps": 3, "threads": 1, **changes,
    }  # fmt: skip
    return [word for name, value in flags.items() if value is not None
            for word in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip
