"""Small Hugging Face model folders for the end-to-end tests, made from nothing but a seed.

    tiny-llama     OUT/       random Llama: 4 layers, D = 64, grouped-query attention, states of scale 1
    tiny-deepseek  OUT/       random DeepSeek-V3 in the style of Kimi-K2 (model_type kimi_k2): 5 layers,
                              D = 64, MLA, a dense layer, then 8 experts (2 active) and a shared one
    toy-target     OUT/       a Llama (4 layers, D = 128) that learned the code tables of the Python
                              library for about a minute: asked for a row, it goes on with the next rows
                              to the end of a block, sure of most tokens, so a drafter is accepted
    FAMILY         OUT/       random, 4 layers, D = 64: any key of FAMILIES, a model_type of transformers
    toy-prompts    OUT.jsonl  {id, messages} from tables that toy-target was not trained on

    python tests/make_models.py tiny-llama /tmp/tiny-llama
    python tests/make_models.py toy-target /tmp/toy-target
    python tests/make_models.py toy-prompts /tmp/toy-prompts.jsonl --count 200

A folder holds config.json, generation_config.json, model.safetensors (fp32), tokenizer.json and
tokenizer_config.json (with the chat template), is complete when it exists, and is never
overwritten. Nothing is downloaded: the text, and so the tokenizer, comes from encodings/*.py of the
running Python. Tables, because a minute on 2 cores does not teach a model of this size to continue
Python functions: with those (half a million tokens seen) the mean probability of a greedy token was
0.33, with tables 0.82.

Layer indices are those of transformers' hidden_states. `auto` ([2, n//2, n-3]) is ascending from
n = 7 layers on and so does not suit these models; capture [1, 2, 3].

Shapes: B batch, T tokens, D target width, V target vocabulary.
"""

import argparse
import copy
import functools
import hashlib
import json
import math
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SEED = 20250
VOCABULARY = 512  # 256 bytes + 3 special + 253 merges; a multiple of 64, so SGLang pads nothing
CONTEXT_TOKENS = 512  # of the Llamas; tiny-deepseek has 1,024
TOY_STEPS = 400  # about a minute on 2 cores
TOKENS_PER_STEP = 2048  # padding included
PEAK_LEARNING_RATE = 3e-3
WARM_UP_STEPS = 20
HELD_OUT_IN = 3  # one table in three is held out, by the hash of its name
ROWS = 8  # of a block; the last one has a code that ends in 7 or F, so the end can be learned
CUTS = ROWS - 1  # places to cut a block, each a snippet
FEWEST_TABLES = 60  # Python 3.11 has 70
# A row as the sources write it: '\u0433'   #  0xE3 -> CYRILLIC SMALL LETTER GHE
ROW = re.compile(r"#\s+0x([0-9A-Fa-f]{2,4}) -> (?!<control>|UNDEFINED)(\S.*)")
REPORT_EVERY_S = 5.0

# The random models of the families: config.json is COMMON with the keys of an entry over it. An entry says what its
# family has of its own, and what SGLang reads from published config.json files though transformers knows no such key.
COMMON: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK_EXPERTS = {
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
FAMILIES: dict[str, dict[str, object]] = {
    "deepseek_v2": {
        **LATENT_ATTENTION,
        **DEEPSEEK_EXPERTS,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        # Yarn, as SGLang's CPU rope knows no other; mscale_all_dim 0, as transformers forgets it in this family.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
        },
    },
    "exaone_moe": {
        **EXPERTS,
        "architectures": ["ExaoneMoEForCausalLM"],
        "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "is_moe_layer": [False, True, True, True],
        # On a CPU SGLang refuses a pattern; everywhere its theta is 1e6 and its windows are one token wider.
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": CONTEXT_TOKENS,
        "sliding_window_pattern": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma4_text": {
        **WINDOWS,
        "global_head_dim": 16,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "swa_num_key_value_heads": 2,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
    "glm4_moe": {**DEEPSEEK_EXPERTS, "use_qk_norm": True},
    "glm4_moe_lite": {**LATENT_ATTENTION, **DEEPSEEK_EXPERTS, "head_dim": 8},
    "gpt_oss": {**WINDOWS, **LOCAL_EXPERTS, "swiglu_limit": 7.0},
    "mellum": {**WINDOWS, **EXPERTS},
    "minimax_m2": {
        **LOCAL_EXPERTS,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "rotary_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "ministral3": {},
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
}

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2
# Every turn is closed before the next one opens, so the render of the first k turns is a prefix of
# the render of all, in characters and (the tokenizer never merges across a newline) in tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Snippet:
    """A block of a code table, cut: the question is the row above the cut, the answer all below."""

    question: str
    answer: str


@dataclass(frozen=True)
class Toy:
    """What a training run came to; `losses` are nats per token, one per step."""

    losses: list[float]
    wall_s: float
    tokens: int

    @property
    def final_loss(self) -> float:
        """Mean over the last tenth of the steps: one step may hold long samples, another short."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


# --------------------------------------------------------------------------------------------------
# Text: the code tables of the standard library
# --------------------------------------------------------------------------------------------------


def training_conversations() -> list[list[dict[str, str]]]:
    """Messages of the training tables; every second one goes on to the next block of its table."""
    conversations = []
    for snippets in _snippets(held_out=False):
        for position in range(len(snippets)):
            turns = 1 + len(conversations) % 2
            conversations.append(
                [
                    message
                    for snippet in snippets[position : position + turns * CUTS : CUTS]
                    for message in (
                        {"role": "user", "content": snippet.question},
                        {"role": "assistant", "content": snippet.answer},
                    )
                ]
            )
    return conversations


def _snippets(held_out: bool) -> list[list[Snippet]]:
    """Snippets of each table, block by block; tables are split by the hash of their name."""
    return [
        [
            Snippet(question=f"continue {table}: {rows[cut - 1]}", answer="\n".join(rows[cut:]))
            for rows in blocks
            for cut in range(1, ROWS)
        ]
        for table, blocks in _blocks_by_table()
        if (hashlib.sha256(table.encode()).digest()[0] % HELD_OUT_IN == 0) == held_out
    ]


@functools.cache
def _blocks_by_table() -> list[tuple[str, list[list[str]]]]:
    """(name, blocks) of each 8-bit code table in encodings/, sorted; a row reads "0xE0 -> NAME".

    A block is ROWS rows from a multiple of ROWS on, in the upper half, where the tables differ, and
    all of its rows have a name.
    """
    folder = Path(sysconfig.get_path("stdlib")) / "encodings"
    found = []
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        rows: dict[int, str] = {}
        for digits, name in ROW.findall(path.read_text("utf-8")):
            rows.setdefault(int(digits, 16), f"0x{digits} -> {name}")
        blocks = [range(start, start + ROWS) for start in range(0x80, 0x100, ROWS)]
        complete = [block for block in blocks if all(code in rows for code in block)]
        if complete:
            found.append((path.stem, [[rows[code] for code in block] for block in complete]))
    if len(found) < FEWEST_TABLES:
        raise FileNotFoundError(
            f"{folder}: {len(found)} code tables, expected {FEWEST_TABLES} or more; "
            "install the sources of the library (Debian: apt-get install libpython3-stdlib)"
        )
    return found


def toy_prompts(path: Path | str, count: int) -> None:
    """Write `count` prompts {id, messages: [one user turn]} as JSONL, none shown to toy-target.

    They come from held-out tables, each appears once, and their order is that of a hash, so that a
    longer list starts with the shorter one.
    """
    path = Path(path)
    fresh = {snippet.question for table in _snippets(held_out=True) for snippet in table}
    if not 1 <= count <= len(fresh):
        raise ValueError(
            f"{path}: {count:,} prompts asked, the held-out tables of this Python have "
            f"{len(fresh):,}; ask for 1 to {len(fresh):,} with --count"
        )
    if path.exists():
        raise FileExistsError(f"{path}: exists and is never overwritten; remove it: rm {path}")
    ordered = sorted(fresh, key=lambda text: hashlib.sha256(text.encode()).digest())
    lines = [
        json.dumps({"id": f"toy-{row:05d}", "messages": [{"role": "user", "content": text}]})
        for row, text in enumerate(ordered[:count])
    ]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    partial.rename(path)


# --------------------------------------------------------------------------------------------------
# Tokenizer
# --------------------------------------------------------------------------------------------------


def build_tokenizer(context_tokens: int = CONTEXT_TOKENS) -> PreTrainedTokenizerFast:
    """The one tokenizer of all models here: byte-level BPE learned from the training conversations.

    A newline is always a token of its own, so no merge reaches across "assistant\\n" into an answer.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_learned_tokenizer()),
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        model_max_length=context_tokens,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@functools.cache
def _learned_tokenizer() -> str:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        f"{message['role']}\n{message['content']}\n" for messages in training_conversations() for message in messages
    ]
    core.train_from_iterator(texts, trainer)
    if core.get_vocab_size() != VOCABULARY:
        raise ValueError(
            f"{sysconfig.get_path('stdlib')}: the text gave {core.get_vocab_size()} tokens, expected "
            f"{VOCABULARY}; the library of this Python is not complete, use another interpreter"
        )
    return core.to_str()


# --------------------------------------------------------------------------------------------------
# Folders
# --------------------------------------------------------------------------------------------------


def tiny_llama(path: Path | str) -> None:
    """Random LlamaForCausalLM at `path`; 4 heads over 2 key-value heads, so TP = 2 divides all."""
    model = LlamaForCausalLM(_llama_config(hidden=64, layers=4, intermediate=128))
    _draw_weights(model, head_gain=3.0)
    _publish_folder(Path(path), model)


def tiny_deepseek(path: Path | str) -> None:
    """Random DeepseekV3ForCausalLM at `path`, with a config.json as Kimi-K2's; TP = 2 divides all.

    transformers has no kimi_k2: load it with `reference_model` and `reference_tokenizer`.
    """
    config = _kimi_config()
    model = DeepseekV3ForCausalLM(_as_deepseek(config))
    _draw_weights(model, head_gain=3.0)
    _publish_folder(Path(path), model, config)


def tiny_family(path: Path | str, family: str) -> None:
    """Random model at `path` of a family, a model_type of transformers that FAMILIES has an entry for."""
    entry = FAMILIES[family]
    config = AutoConfig.for_model(family, **copy.deepcopy(COMMON | entry))
    model = AutoModelForCausalLM.from_config(config)
    _draw_weights(model, head_gain=3.0)
    _publish_folder(Path(path), model, {**config.to_dict(), "architectures": [type(model).__name__], **entry})


def toy_target(path: Path | str, steps: int = TOY_STEPS, say: Callable[[str], None] | None = None) -> Toy:
    """Train a Llama (4 layers, D = 128) on the training conversations; fp32 folder at `path`.

    `say` gets a line every REPORT_EVERY_S seconds. Two runs with the same number of threads on the
    same machine give the same weights; another machine may round sums differently.
    """
    if steps < 1:
        raise ValueError(f"{path}: {steps} steps asked; ask for 1 or more with --steps")
    _refuse_existing(Path(path))
    model = LlamaForCausalLM(_llama_config(hidden=128, layers=4, intermediate=384))
    _draw_weights(model, head_gain=1.0)
    toy = _train(model, steps, say or (lambda line: None))
    _publish_folder(Path(path), model)
    return toy


def reference_model(path: Path | str, attention: str | None = None) -> PreTrainedModel:
    """Load any folder made here in transformers, fp32, eval mode; `attention` "sdpa" or "eager", None: its default."""
    path = Path(path)
    config = json.loads((path / "config.json").read_text("utf-8"))
    kimi = config["model_type"] == "kimi_k2"
    model = (DeepseekV3ForCausalLM if kimi else AutoModelForCausalLM).from_pretrained(
        path,
        config=_as_deepseek(config) if kimi else None,
        dtype=torch.float32,
        attn_implementation=attention,
    )
    return model.eval()


def reference_tokenizer(path: Path | str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of any folder made here.

    AutoTokenizer reads config.json first and fails on kimi_k2, which transformers does not know.
    """
    return PreTrainedTokenizerFast.from_pretrained(path)


def _llama_config(hidden: int, layers: int, intermediate: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )


def _kimi_config() -> dict[str, object]:
    """config.json with the keys of Kimi-K2's own, at a size that a test can afford.

    What SGLang 0.5.20 asks for on a CPU: yarn rope (its CPU rope knows no other), moe_layer_freq
    (absent from transformers' DeepseekV3Config) and e_score_correction_bias among the weights.
    rms_norm_eps is 1e-6 because transformers fixes the two norms inside MLA at 1e-6 while SGLang
    gives them this value.
    """
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 1024,
        # attention: MLA, keys of 16 + 8 dimensions and values of 16 from a latent of 32
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        # feed-forward: layer 0 dense, then experts
        **DEEPSEEK_EXPERTS,
        "intermediate_size": 128,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "ep_size": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "use_cache": True,
        "dtype": "float32",
    }


def _as_deepseek(config: dict[str, object]) -> DeepseekV3Config:
    kept = {key: value for key, value in config.items() if key != "model_type"}
    return DeepseekV3Config(**copy.deepcopy(kept))  # it rewrites rope_scaling in place


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, head_gain: float) -> None:
    """Seeded weights that keep the residual stream at scale 1 and every tensor worth loading.

    Matrices have the deviation 1/sqrt(fan_in), those that write into the residual stream half of it,
    embeddings 1 (after the factor of those families that scale them); norms are 1 ± 0.1, biases ± 0.1 and attention
    sinks 1, so that one left out shows.
    `head_gain` is the scale of the logits.
    """
    generator = torch.Generator().manual_seed(SEED)
    for name, tensor in sorted(model.state_dict().items()):  # names the same tensors, sorted for the seed
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("sinks"):
            tensor.copy_(noise.bfloat16())  # SGLang holds them so, whatever the dtype of the model
        elif name.endswith("bias"):
            tensor.copy_(0.1 * noise)
        elif tensor.dim() == 0:
            continue  # a constant
        elif tensor.dim() == 1:  # norms: 1, or 0 where the family adds the 1 itself
            tensor.copy_(tensor.round() + 0.1 * noise)
        elif name.endswith("embed_tokens.weight"):
            tensor.copy_(noise / getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0))
        else:
            writes_residual = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
            gain = head_gain if name == "lm_head.weight" else 0.5 if writes_residual else 1.0
            tensor.copy_(noise * gain / math.sqrt(tensor.shape[-1]))


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path}: exists and is never overwritten; remove it: rm -r {path}")


def _publish_folder(path: Path, model: PreTrainedModel, config: dict[str, object] | None = None) -> None:
    """Model and tokenizer into a hidden sibling folder, then a rename: `path` is complete or absent."""
    _refuse_existing(path)
    partial = path.with_name(f".{path.name}.partial")
    if partial.exists():  # of a run that was killed
        shutil.rmtree(partial)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(partial)
    if config is not None:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    tokenizer = build_tokenizer(model.config.max_position_embeddings)
    tokenizer.save_pretrained(partial, save_jinja_files=False)
    partial.rename(path)


# --------------------------------------------------------------------------------------------------
# Training of the toy
# --------------------------------------------------------------------------------------------------


def _train(model: PreTrainedModel, steps: int, say: Callable[[str], None]) -> Toy:
    """Next-token loss over all tokens, user turns too, so that the toy can write its own prompts."""
    tokenizer = build_tokenizer(2 * CONTEXT_TOKENS)  # no warning about what is dropped below
    samples = [
        tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]
        for messages in training_conversations()
    ]
    samples = [ids for ids in samples if len(ids) <= CONTEXT_TOKENS]
    say(
        f"toy-target: {sum(parameter.numel() for parameter in model.parameters()):,} parameters, "
        f"{len(samples):,} conversations of {sum(map(len, samples)):,} tokens, {steps:,} steps of at most "
        f"{TOKENS_PER_STEP:,}"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.01)
    losses: list[float] = []
    tokens, started, reported = 0, time.monotonic(), time.monotonic()
    model.train()
    batches = _batches(samples)
    for step in range(steps):
        input_ids, labels = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, steps)
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens += int((labels >= 0).sum())
        now = time.monotonic()
        if now - reported >= REPORT_EVERY_S or step + 1 == steps:
            reported = now
            left_s = (now - started) / (step + 1) * (steps - step - 1)
            say(
                f"toy-target: step {step + 1:,} of {steps:,}, loss {losses[-1]:.3f}, "
                f"{tokens / (now - started):,.0f} tok/s, {left_s:.0f} s left"
            )
    return Toy(losses=losses, wall_s=time.monotonic() - started, tokens=tokens)


def learning_rate_at(step: int, steps: int) -> float:
    """A cosine from PEAK_LEARNING_RATE to 0 after the last step, times a linear warm-up."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return PEAK_LEARNING_RATE * warm_up * 0.5 * (1 + math.cos(math.pi * step / steps))


def _batches(samples: Sequence[list[int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (input_ids, labels), int64 [B, T]: samples of like length together, in a drawn order.

    Pads stand on the right, where causal attention never looks, and have the label -100 (no loss).
    """
    generator = torch.Generator().manual_seed(SEED)
    while True:
        shuffled = [samples[row] for row in torch.randperm(len(samples), generator=generator)]
        groups: list[list[list[int]]] = [[]]
        for ids in sorted(shuffled, key=len):  # stable, so equal lengths stay shuffled
            if (len(groups[-1]) + 1) * len(ids) > TOKENS_PER_STEP:
                groups.append([])
            groups[-1].append(ids)
        for row in torch.randperm(len(groups), generator=generator):
            group = groups[row]
            width = max(map(len, group))
            input_ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in group])  # (B, T)
            labels = torch.tensor([ids + [-100] * (width - len(ids)) for ids in group])  # (B, T)
            yield input_ids, labels


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the small models of the end-to-end tests.")
    parser.add_argument("what", choices=["tiny-llama", "tiny-deepseek", *FAMILIES, "toy-target", "toy-prompts"])
    parser.add_argument("out", type=Path, help="folder (models) or .jsonl file (prompts) to make")
    parser.add_argument("--steps", type=int, default=TOY_STEPS, help="of toy-target (default %(default)s)")
    parser.add_argument("--count", type=int, default=64, help="of toy-prompts (default %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.what == "tiny-llama":
        tiny_llama(args.out)
    elif args.what == "tiny-deepseek":
        tiny_deepseek(args.out)
    elif args.what in FAMILIES:
        tiny_family(args.out, args.what)
    elif args.what == "toy-target":
        toy = toy_target(args.out, args.steps, say=lambda line: print(line, file=sys.stderr, flush=True))
        print(f"toy-target: final loss {toy.final_loss:.3f} after {toy.wall_s:.0f} s", file=sys.stderr)
    else:
        toy_prompts(args.out, args.count)
    print(args.out)


if __name__ == "__main__":
    main()
