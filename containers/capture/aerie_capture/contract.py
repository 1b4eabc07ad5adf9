"""Does this SGLang still have what Aerie stands on? A list of drifted items, or exit 0.

    python -m aerie_capture.contract                     the installed SGLang, read and imported
    python -m aerie_capture.contract --no-import         read only (an image built without its GPU)
    python -m aerie_capture.contract --source DIR        an unzipped wheel: DIR/sglang/..., read only

SGLang logs a hook whose target is gone and serves on without it, and its loaders skip names they do
not know. So each fact that the plugin, the exporter and the server commands rely on is checked here
by name, at build time, and all drifted items are reported at once (exit 1).

Reading works on the syntax tree, so it needs neither torch nor a GPU. Facts and where they were
found: models, hook targets and the reply path of SGLang 0.5.14 to 0.5.23.
"""

import argparse
import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ENTRY_POINT_GROUP = "sglang.srt.plugins"
ENTRY_POINT = "aerie_capture"

RUNNER = "srt/model_executor/model_runner.py"
LOGITS = "srt/layers/logits_processor.py"
BATCH = "srt/model_executor/forward_batch_info.py"
RESULTS = "srt/managers/scheduler_components/batch_result_processor.py"
STREAMER = "srt/managers/scheduler_components/output_streamer.py"
TOKENIZER_MANAGER = "srt/managers/tokenizer_manager.py"
REGISTRY = "srt/plugins/hook_registry.py"
PLUGINS = "srt/plugins/__init__.py"
EAGLE3 = "srt/models/llama_eagle3.py"
EAGLE3_MLA = "srt/models/kimi_k25_eagle3.py"

LOGITS_ARGUMENTS = [
    "self",
    "input_ids",
    "hidden_states",
    "lm_head",
    "logits_metadata",
    "aux_hidden_states",
    "hidden_states_before_norm",
]

# Target families: file, class, and what its setter makes of explicit ids. The exporter writes the
# spelling that turns into HF indices, so a changed rule would serve a drafter on the wrong layers.
PLUS_ONE = {(4, 6): [5, 7], (1, 6): [2, 7]}
RAW_UNLESS_FIRST_IS_ONE = {(4, 6): [4, 6], (1, 6): [2, 7]}
FAMILIES = (
    ("srt/models/llama.py", "LlamaForCausalLM", PLUS_ONE),
    ("srt/models/qwen3.py", "Qwen3ForCausalLM", PLUS_ONE),
    ("srt/models/qwen3_moe.py", "Qwen3MoeForCausalLM", PLUS_ONE),
    ("srt/models/deepseek_v2.py", "DeepseekV2ForCausalLM", RAW_UNLESS_FIRST_IS_ONE),
    ("srt/models/kimi_k25.py", "KimiK25ForConditionalGeneration", None),
    ("srt/models/gpt_oss.py", "GptOssForCausalLM", PLUS_ONE),
)
INNER_MODELS = (
    ("srt/models/llama.py", "LlamaModel"),
    ("srt/models/qwen2.py", "Qwen2Model"),
    ("srt/models/qwen2_moe.py", "Qwen2MoeModel"),
    ("srt/models/deepseek_v2.py", "DeepseekV2Model"),
)

# Settings the plugin reads before it lets a server capture. A renamed one would read as "off".
SETTINGS = (
    "pp_size",
    "dp_size",
    "attn_cp_size",
    "enable_dp_attention",
    "enable_two_batch_overlap",
    "enable_prefill_cp",
    "enable_attn_tp_input_scattered",
    "disable_radix_cache",
    "speculative_algorithm",
    "enforce_disable_flashinfer_allreduce_fusion",
    "enable_aiter_allreduce_fusion",
    "disable_prefill_cuda_graph",
    "watchdog_timeout",
)

# Flags on the server commands that Aerie writes (capture, generation, baseline and drafter arms).
FLAGS = (
    "--model-path",
    "--host",
    "--port",
    "--device",
    "--dtype",
    "--tp-size",
    "--nnodes",
    "--node-rank",
    "--dist-init-addr",
    "--served-model-name",
    "--trust-remote-code",
    "--context-length",
    "--quantization",
    "--kv-cache-dtype",
    "--mem-fraction-static",
    "--max-total-tokens",
    "--max-running-requests",
    "--max-prefill-tokens",
    "--prefill-max-requests",
    "--chunked-prefill-size",
    "--attention-backend",
    "--disable-radix-cache",
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
    "--disable-prefill-cuda-graph",
    "--disable-decode-cuda-graph",
    "--disable-flashinfer-autotune",
    "--enforce-disable-flashinfer-allreduce-fusion",
    "--enable-deterministic-inference",
    "--skip-server-warmup",
    "--watchdog-timeout",
    "--random-seed",
    "--log-level",
    "--cuda-graph-max-bs-decode",
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--speculative-draft-model-quantization",
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
)


@dataclass(frozen=True)
class Drift:
    """One item that is not as Aerie needs it."""

    item: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.item}: found {self.found}, expected {self.expected}"


class Source:
    """The Python files of one `sglang` package, parsed on demand."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, path: str) -> ast.Module | None:
        if path not in self._trees:
            file = self.package / path
            self._trees[path] = ast.parse(file.read_text()) if file.is_file() else None
        return self._trees[path]

    def text(self, path: str) -> str:
        file = self.package / path
        return file.read_text() if file.is_file() else ""

    def definition(self, path: str, dotted: str) -> ast.AST | None:
        """A class or function by its name inside the file, as "Class.method"; None if absent."""
        scope: Any = self.tree(path)
        for name in dotted.split("."):
            if scope is None:
                return None
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            named = [node for node in scope.body if isinstance(node, kinds) and node.name == name]
            scope = named[-1] if named else None
        return scope


# --- checks: each yields the drifted items of one fact ---------------------------------------------


def check_hook_targets(source: Source) -> Iterator[Drift]:
    yield from _signature(source, RUNNER, "ModelRunner.init_attention_backends", ["self"])
    yield from _signature(source, LOGITS, "LogitsProcessor.forward", LOGITS_ARGUMENTS)
    runner = source.definition(RUNNER, "ModelRunner")
    assigned = _assigned_to_self(runner)
    for name in ("model", "model_config", "server_args", "is_draft_worker", "dtype", "device"):
        if name not in assigned:
            yield Drift(f"{RUNNER} ModelRunner.{name}", "never assigned", "an attribute")
    rank = "get_tensor_model_parallel_rank"
    yield from _signature(source, "srt/distributed/parallel_state.py", rank, [])
    yield from _signature(source, "srt/distributed/parallel_state.py", rank.replace("rank", "world_size"), [])


def check_plugin_loader(source: Source) -> Iterator[Drift]:
    group = _constant(source.tree(PLUGINS), "GENERAL_PLUGINS_GROUP")
    if group != ENTRY_POINT_GROUP:
        yield Drift(f"{PLUGINS} GENERAL_PLUGINS_GROUP", repr(group), repr(ENTRY_POINT_GROUP))
    register = ["cls", "target", "hook", "hook_type"]
    yield from _signature(source, REGISTRY, "HookRegistry.register", register)
    yield from _signature(source, REGISTRY, "HookRegistry.apply_hooks", ["cls"])
    kinds = _class_constants(source.definition(REGISTRY, "HookType"))
    missing = sorted({"BEFORE", "AFTER", "AROUND"} - kinds)
    if missing:
        yield Drift(f"{REGISTRY} HookType", f"no {', '.join(missing)}", "BEFORE, AFTER, AROUND")
    for path in ("srt/managers/scheduler.py", "launch_server.py"):
        if not _calls(source.tree(path), "load_plugins"):
            yield Drift(f"{path} load_plugins()", "not called", "called before the model is built")
    if "SGLANG_PLUGINS" not in source.text("srt/environ.py"):
        yield Drift("srt/environ.py SGLANG_PLUGINS", "absent", "the plugin allow list")


def check_ticket_path(source: Source) -> Iterator[Drift]:
    """customized_info → result processor → streamer → meta_info."""
    fields = _class_fields(source.definition(LOGITS, "LogitsProcessorOutput"))
    if "customized_info" not in fields:
        yield Drift(f"{LOGITS} LogitsProcessorOutput.customized_info", "absent", "a field")
    name = "_maybe_collect_customized_info"
    if _find_function(source.tree(RESULTS), name) is None:
        yield Drift(f"{RESULTS} {name}", "absent", "a method")
    prefill = _find_function(source.tree(RESULTS), "process_batch_result_prefill")
    if prefill is None or not _calls(prefill, name):
        yield Drift(
            f"{RESULTS} process_batch_result_prefill",
            "absent" if prefill is None else f"does not call {name}",
            f"a call of {name}",
        )
    for path in (STREAMER, TOKENIZER_MANAGER):
        if "customized_info" not in source.text(path):
            yield Drift(f"{path} customized_info", "absent", "handed on to meta_info")


def check_forward_batch(source: Source) -> Iterator[Drift]:
    fields = _class_fields(source.definition(BATCH, "ForwardBatch"))
    needed = {"forward_mode", "input_ids", "rids", "extend_seq_lens_cpu", "extend_prefix_lens_cpu"}
    for name in sorted(needed - fields):
        yield Drift(f"{BATCH} ForwardBatch.{name}", "absent", "a field")
    if source.definition(BATCH, "ForwardMode.is_extend") is None:
        yield Drift(f"{BATCH} ForwardMode.is_extend", "absent", "a method")
    if not any(
        isinstance(node, ast.keyword) and node.arg == "rids"
        for node in ast.walk(source.tree(BATCH) or ast.Module([], []))
    ):
        yield Drift(f"{BATCH} ForwardBatch(rids=...)", "not filled", "the request ids of the batch")


def check_families(source: Source) -> Iterator[Drift]:
    setter_name = "set_eagle3_layers_to_capture"
    for path, family, rule in FAMILIES:
        owner, setter = _inherited(source, path, family, setter_name)
        if setter is None:
            yield Drift(f"{path} {family}.{setter_name}", "absent", "a method")
            continue
        for ids, expected in (rule or {}).items():
            found = _run_setter(setter, list(ids))
            if found != expected:
                yield Drift(f"{owner} {family}.{setter_name}({list(ids)})", str(found), str(expected))
    for path, model in INNER_MODELS:
        definition = source.definition(path, model)
        if "layers_to_capture" not in _assigned_to_self(definition):
            yield Drift(f"{path} {model}.layers_to_capture", "never assigned", "a list of indices")


def check_settings(source: Source) -> Iterator[Drift]:
    """Names the plugin reads and flags Aerie passes, from the annotations and add_argument calls
    of the argument parser."""
    fields, flags = _declared_arguments(source)
    for name in SETTINGS:
        if name not in fields:
            yield Drift(f"ServerArgs.{name}", "absent", "a setting the plugin checks")
    for flag in FLAGS:
        if flag not in flags:
            yield Drift(f"flag {flag}", "absent", "a flag of the server")


def check_drafter_loader(source: Source) -> Iterator[Drift]:
    owner = "LlamaForCausalLMEagle3"
    for path, name in ((EAGLE3, owner), (EAGLE3_MLA, "Eagle3DeepseekV2ForCausalLM")):
        yield from _signature(source, path, f"{name}.load_weights", ["self", "weights"])
        hot = [
            ast.unparse(node.value)
            for node in _walk(source.definition(path, f"{name}.load_weights"))
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith(".hot_token_id")
        ]
        if len(hot) != 1 or "+" not in hot[0] or "arange" not in hot[0]:
            yield Drift(f"{path} {name} d2t", str(hot), "hot_token_id = d2t + arange (offsets)")
    loader = source.definition(EAGLE3, f"{owner}.load_weights")
    strings = _strings(loader)
    names = {".q_proj", ".k_proj", ".v_proj", ".gate_proj", ".up_proj", "midlayer", "d2t", "t2d"}
    for name in sorted(names - strings):
        yield Drift(f"{EAGLE3} load_weights", f"no {name!r}", "the name the exporter writes")
    modules = _assigned_to_self(source.definition(EAGLE3, "LlamaModel"))
    modules |= _assigned_to_self(source.definition(EAGLE3, "LlamaDecoderLayer"))
    modules |= _assigned_to_self(source.definition(EAGLE3, owner))
    for name in ("embed_tokens", "fc", "layers", "norm", "hidden_norm", "lm_head", "fc_norm"):
        if name not in modules:
            yield Drift(f"{EAGLE3} self.{name}", "absent", "a module of the drafter")
    everything = _strings(source.tree(EAGLE3)) | _attributes(source.tree(EAGLE3))
    for key in ("draft_vocab_size", "tie_word_embeddings", "target_hidden_size", "norm_output"):
        if key not in everything:
            yield Drift(f"{EAGLE3} config.{key}", "not read", "a key of the exported config")
    key = "eagle_aux_hidden_state_layer_ids"
    readers = (RUNNER, "srt/model_executor/model_runner_components/spec_aux_hidden_state.py")
    if not any(key in source.text(path) for path in readers):
        yield Drift(f"eagle_config.{key}", "read by none of the known files", "the layer ids")


CHECKS: tuple[Callable[[Source], Iterator[Drift]], ...] = (
    check_hook_targets,
    check_plugin_loader,
    check_ticket_path,
    check_forward_batch,
    check_families,
    check_settings,
    check_drafter_loader,
)


def check_source(package: Path) -> list[Drift]:
    """Every drifted item of an `sglang` package folder, found by reading it."""
    if not (package / "srt").is_dir():
        return [Drift(str(package), "no srt/ in it", "the folder of the sglang package")]
    source = Source(package)
    return [drift for check in CHECKS for drift in check(source)]


def check_import() -> list[Drift]:
    """Every drifted item of the SGLang that this interpreter imports: hook targets and their live
    signatures, the registry doing its work on a class of ours, and our entry point."""
    from aerie_capture.hooks import LOGITS_TARGET, RUNNER_TARGET

    drifts = []
    for target, expected in ((RUNNER_TARGET, ["self"]), (LOGITS_TARGET, LOGITS_ARGUMENTS)):
        module, owner, name = target.rsplit(".", 2)
        try:
            function = getattr(getattr(importlib.import_module(module), owner), name)
        except (ImportError, AttributeError, KeyError, OSError, RuntimeError) as error:
            drifts.append(Drift(f"import {target}", repr(error), "a method"))
            continue
        found = list(inspect.signature(function).parameters)
        if found != expected:
            drifts.append(Drift(f"import {target}", str(found), str(expected)))
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    calls: list[str] = []

    class Subject:
        def method(self, value: int) -> int:
            calls.append("method")
            return value + 1

    sys.modules[__name__].Subject = Subject
    target = f"{__name__}.Subject.method"
    kinds = registry.HookType
    hooks = registry.HookRegistry
    hooks.register(target, lambda *arguments: calls.append("before"), kinds.BEFORE)
    hooks.register(target, lambda result, *arguments: calls.append("after"), kinds.AFTER)
    hooks.register(target, lambda original, *arguments: original(*arguments) * 10, kinds.AROUND)
    hooks.apply_hooks()
    found = (Subject().method(1), sorted(calls))
    if found != (20, ["after", "before", "method"]):
        drifts.append(Drift("HookRegistry at work", str(found), "(20, [after, before, method])"))
    names = [point.name for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)]
    if ENTRY_POINT not in names:
        drifts.append(Drift(f"entry points {ENTRY_POINT_GROUP}", str(names), ENTRY_POINT))
    return drifts


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m aerie_capture.contract", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--source", type=Path, help="folder that holds sglang/ (an unzipped wheel); read only")
    parser.add_argument("--no-import", action="store_true", help="read the installed SGLang only")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_args(argv)
    if arguments.source is not None:
        package = arguments.source / "sglang"
        drifts = check_source(package)
    else:
        found = importlib.util.find_spec("sglang")
        if found is None or not found.submodule_search_locations:
            print("aerie_capture.contract: sglang is not installed here; pass --source DIR")
            return 1
        package = Path(next(iter(found.submodule_search_locations)))
        drifts = check_source(package)
        if not arguments.no_import:
            drifts += check_import()
    if drifts:
        print(f"aerie_capture.contract: {package}: {len(drifts)} drifted items")
        for drift in drifts:
            print(f"  {drift}")
        print("Pin another SGLang (container.sglang in config.yaml) or adapt aerie_capture to it.")
        return 1
    print(f"aerie_capture.contract: {package}: no drift")
    return 0


# --- reading syntax trees --------------------------------------------------------------------------


def _signature(source: Source, path: str, dotted: str, expected: list[str]) -> Iterator[Drift]:
    function = source.definition(path, dotted)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield Drift(f"{path} {dotted}", "absent", f"({', '.join(expected)})")
        return
    found = [argument.arg for argument in function.args.posonlyargs + function.args.args]
    if found != expected:
        yield Drift(f"{path} {dotted}", f"({', '.join(found)})", f"({', '.join(expected)})")


def _walk(tree: ast.AST | None) -> Iterator[ast.AST]:
    return iter(()) if tree is None else ast.walk(tree)


def _assigned_to_self(definition: ast.AST | None) -> set[str]:
    names = set()
    for node in _walk(definition):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        for target in targets:
            for leaf in ast.walk(target):
                if isinstance(leaf, ast.Attribute) and isinstance(leaf.value, ast.Name) and leaf.value.id == "self":
                    names.add(leaf.attr)
    return names


def _class_fields(definition: ast.AST | None) -> set[str]:
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def _class_constants(definition: ast.AST | None) -> set[str]:
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    return {
        target.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _constant(tree: ast.Module | None, name: str) -> Any:
    for node in tree.body if tree is not None else []:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return None


def _calls(tree: ast.AST | None, name: str) -> bool:
    return any(isinstance(node, ast.Call) and ast.unparse(node.func).rsplit(".", 1)[-1] == name for node in _walk(tree))


def _find_function(tree: ast.AST | None, name: str) -> ast.AST | None:
    return next((n for n in _walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name), None)


def _strings(tree: ast.AST | None) -> set[str]:
    return {node.value for node in _walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _attributes(tree: ast.AST | None) -> set[str]:
    return {node.attr for node in _walk(tree) if isinstance(node, ast.Attribute)}


def _inherited(source: Source, path: str, owner: str, method: str) -> tuple[str, ast.FunctionDef | None]:
    """A method of a class or of its nearest base in the same package; ("", None) if absent."""
    definition = source.definition(path, owner)
    if not isinstance(definition, ast.ClassDef):
        return path, None
    own = source.definition(path, f"{owner}.{method}")
    if isinstance(own, ast.FunctionDef):
        return path, own
    imported = {
        alias.asname or alias.name: node.module.replace(".", "/") + ".py"
        for node in _walk(source.tree(path))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sglang.")
        for alias in node.names
    }
    for base in definition.bases:
        name = ast.unparse(base)
        if name == owner:
            continue
        base_path = imported.get(name, path).removeprefix("sglang/")
        found = _inherited(source, base_path, name, method)
        if found[1] is not None:
            return found
    return path, None


def _run_setter(setter: ast.FunctionDef, ids: list[int]) -> Any:
    """What a setter's own code makes of explicit ids, run on a stand-in model of 61 layers.

    Its code is executed rather than compared, because what counts is the rule, not its wording.
    """
    stripped = ast.FunctionDef(
        name="setter",
        args=ast.arguments(
            posonlyargs=[],
            args=[ast.arg(argument.arg) for argument in setter.args.args],
            kwonlyargs=[],
            kw_defaults=[],
            defaults=setter.args.defaults,
        ),
        body=setter.body,
        decorator_list=[],
        type_params=[],
    )
    module = ast.fix_missing_locations(ast.Module(body=[stripped], type_ignores=[]))
    stage = SimpleNamespace(is_last_rank=True, is_first_rank=True)
    inner = SimpleNamespace(layers_to_capture=[])
    inner.set_eagle3_layers_to_capture = lambda layers: setattr(inner, "layers_to_capture", layers)
    model = SimpleNamespace(pp_group=stage, config=SimpleNamespace(num_hidden_layers=61), model=inner)
    scope: dict[str, Any] = {"get_pp_group": lambda: stage}
    try:
        exec(compile(module, "<setter>", "exec"), scope)
        scope["setter"](model, ids)
    except (AttributeError, NameError, TypeError, ValueError) as error:
        return repr(error)
    return inner.layers_to_capture


def _declared_arguments(source: Source) -> tuple[set[str], set[str]]:
    """Setting names and flags, from `name: A[type, ...]` declarations and add_argument calls."""
    fields, flags = set(), set()
    files = sorted((source.package / "srt/arg_groups").rglob("*.py"))
    files.append(source.package / "srt/server_args.py")
    for file in files:
        tree = source.tree(file.relative_to(source.package).as_posix())
        for node in _walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                annotation = node.annotation
                if not isinstance(annotation, ast.Subscript):
                    continue
                if ast.unparse(annotation.value) not in ("A", "Annotated"):
                    continue
                name = node.target.id
                fields.add(name)
                keywords = {
                    keyword.arg: keyword.value
                    for inner in ast.walk(annotation)
                    if isinstance(inner, ast.Call)
                    for keyword in inner.keywords
                }
                if "no_cli" not in keywords:
                    flags.add("--" + name.replace("_", "-"))
                for key in ("cli_name", "aliases"):
                    flags |= _strings(keywords.get(key))
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
                for argument in node.args:
                    flags |= {text for text in _strings(argument) if text.startswith("--")}
    return fields, flags


if __name__ == "__main__":
    sys.exit(main())
