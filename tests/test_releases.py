"""The contract on real releases: none has drifted, and each thing it claims is missed by name once it is gone.

    python -m pytest tests/test_releases.py

Only wheels are read (tests/releases.lock, unzipped below .cache); nothing of them is imported or installed.
"""

import ast
import re
import shutil

import pytest
import torch

import releases
import sgl_kernel
from aerie_capture import contract
from conftest import toy_config

pytestmark = pytest.mark.image  # no image, but 120 MB of wheels, once per checkout

OLDEST, NEWEST = releases.VERSIONS[0], releases.VERSIONS[-1]
PIN = toy_config()["container"]["sglang_version"]
PARALLEL = "srt/distributed/parallel_state.py"
AMX = "srt/layers/attention/intel_amx_backend.py"
ARGUMENTS = ("srt/server_args.py", "srt/arg_groups/")  # where settings and flags are declared
EXPRESSION = r"(?:[^\n()]|\((?:[^()]|\([^()]*\))*\))*"  # up to the end of the line, over the lines inside parentheses
LOADERS = (
    (contract.EAGLE3, "LlamaForCausalLMEagle3"),
    (contract.EAGLE3_MLA, "Eagle3DeepseekV2ForCausalLM"),
)


class Mutated(contract.Source):
    """A release with one change in some of its files; the other files are parsed once for all changes."""

    def __init__(self, original, files, change):
        super().__init__(original.package)
        self._original, self._files, self._change = original, files, change
        self.changed = False

    def text(self, path):
        before = self._original.text(path)
        after = self._change(before) if path.startswith(self._files) else before
        self.changed = self.changed or after != before
        return after

    def tree(self, path):
        if not path.startswith(self._files):
            return self._original.tree(path)
        if path not in self._trees:
            text = self.text(path)
            same = text == self._original.text(path)
            self._trees[path] = self._original.tree(path) if same else ast.parse(text)
        return self._trees[path]


def replaced(pattern, new):
    """Return the change of every match in a file."""
    return lambda text: re.sub(pattern, new, text)


def renamed(*names):
    """Return the change of whole names and flags: `--port` is not in `--port-range`."""
    pattern = "|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in names)
    return lambda text: re.sub(pattern, lambda match: match[0][:-1] + "0", text)


def within(name, change):
    """Return the change of one class or function alone."""

    def change_part(text):
        kinds = (ast.ClassDef, ast.FunctionDef)
        node = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds) and node.name == name)
        lines = text.splitlines(keepends=True)
        parts = lines[: node.lineno - 1], lines[node.lineno - 1 : node.end_lineno], lines[node.end_lineno :]
        before, inside, after = map("".join, parts)
        return before + change(inside) + after

    return change_part


def argument(owner, function, name):
    """Return the change of one argument's name in one signature."""
    pattern = rf"(def {function}\([^)]*?)\b{name}\b"
    return within(owner, lambda text: re.sub(pattern, rf"\1{name}_0", text, count=1))


@pytest.fixture(scope="module")
def originals():
    return {version: contract.Source(releases.unzipped(version) / "sglang") for version in releases.VERSIONS}


@pytest.mark.parametrize("version", releases.VERSIONS)
def test_a_release_has_not_drifted_from_what_the_plugin_stands_on(originals, version):
    assert [str(drift) for check in contract.CHECKS for drift in check(originals[version])] == []


def test_the_releases_are_those_that_the_contract_names_and_the_pin_is_among_them():
    assert f"{OLDEST} to {NEWEST}" in contract.__doc__
    assert PIN in releases.VERSIONS


# {check: {what must be told: (files, change)}}: one change for each thing that the check claims.
MUTATIONS = {
    contract.check_hook_targets: {
        "ModelRunner.init_attention_backends: found absent": (contract.RUNNER, renamed("init_attention_backends")),
        "ModelRunner.init_attention_backends: found (self, pool)": (
            contract.RUNNER, replaced(r"def init_attention_backends\(self", "def init_attention_backends(self, pool")),
        **{
            f"ModelRunner.{name}: found never assigned": (contract.RUNNER, replaced(rf"self\.{name}\b", f"self.{name}_0"))
            for name in ("model", "model_config", "server_args", "is_draft_worker", "dtype", "device")
        },
        "LogitsProcessor.forward: found absent": (
            contract.LOGITS, within("LogitsProcessor", replaced(r"def forward\(", "def run("))),
        **{
            f"LogitsProcessor.forward: found ({', '.join(contract.LOGITS_ARGUMENTS[:place])}, {name}_0": (
                contract.LOGITS, argument("LogitsProcessor", "forward", name))
            for place, name in enumerate(contract.LOGITS_ARGUMENTS) if name != "self"
        },
        **{
            f"{name}: found absent": (PARALLEL, renamed(name))
            for name in ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size")
        },
    },
    contract.check_plugin_loader: {
        "GENERAL_PLUGINS_GROUP: found 'sglang.plugins'": (contract.PLUGINS, replaced("sglang.srt.plugins", "sglang.plugins")),
        "GENERAL_PLUGINS_GROUP: found None": (contract.PLUGINS, renamed("GENERAL_PLUGINS_GROUP")),
        "HookRegistry.register: found absent": (contract.REGISTRY, within("HookRegistry", renamed("register"))),
        **{
            f"HookRegistry.register: found (cls, {', '.join(names)})": (
                contract.REGISTRY, argument("HookRegistry", "register", names[place].removesuffix("_0")))
            for place, names in enumerate((
                ("target_0", "hook", "hook_type"), ("target", "hook_0", "hook_type"), ("target", "hook", "hook_type_0")))
        },
        "HookRegistry.apply_hooks: found absent": (contract.REGISTRY, renamed("apply_hooks")),
        **{f"HookType: found no {kind}": (contract.REGISTRY, renamed(kind)) for kind in ("BEFORE", "AFTER", "AROUND")},
        "scheduler.py load_plugins(): found not called": ("srt/managers/scheduler.py", renamed("load_plugins")),
        "launch_server.py load_plugins(): found not called": ("launch_server.py", renamed("load_plugins")),
        "environ.py SGLANG_PLUGINS: found absent": ("srt/environ.py", replaced("SGLANG_PLUGINS", "SGLANG_EXTENSIONS")),
    },
    contract.check_ticket_path: {
        "LogitsProcessorOutput.customized_info: found absent": (
            contract.LOGITS, within("LogitsProcessorOutput", renamed("customized_info"))),
        "_maybe_collect_customized_info: found absent": (contract.RESULTS, renamed("_maybe_collect_customized_info")),
        "process_batch_result_prefill: found absent": (contract.RESULTS, renamed("process_batch_result_prefill")),
        "process_batch_result_prefill: found does not call _maybe_collect_customized_info": (
            contract.RESULTS, within("process_batch_result_prefill", renamed("_maybe_collect_customized_info"))),
        "output_streamer.py customized_info: found absent": (contract.STREAMER, replaced("customized_info", "extra_info")),
        "tokenizer_manager.py customized_info: found absent": (
            contract.TOKENIZER_MANAGER, replaced("customized_info", "extra_info")),
    },
    contract.check_forward_batch: {
        **{
            f"ForwardBatch.{name}: found absent": (
                contract.BATCH, within("ForwardBatch", replaced(rf"(?m)^    {name}:", f"    {name}_0:")))
            for name in ("forward_mode", "input_ids", "rids", "extend_seq_lens_cpu", "extend_prefix_lens_cpu")
        },
        "ForwardMode.is_extend: found absent": (contract.BATCH, renamed("is_extend")),
        "ForwardBatch(rids=...): found not filled": (contract.BATCH, replaced(r"\brids=", "ids=")),
    },
    contract.check_families: {
        **{
            f"{path} {owner}.set_eagle3_layers_to_capture: found absent": (path, renamed("set_eagle3_layers_to_capture"))
            for path, owner, _ in contract.FAMILIES
        },
        **{
            f"{path} {owner}.set_eagle3_layers_to_capture([4, 6]): found [6, 8], expected [5, 7]": (
                path, replaced(r"\bval \+ 1\b", "val + 2"))
            for path, owner, rule in contract.FAMILIES if rule == contract.PLUS_ONE
        },
        "DeepseekV2ForCausalLM.set_eagle3_layers_to_capture([4, 6]): found [5, 7], expected [4, 6]": (
            "srt/models/deepseek_v2.py", replaced(r"layer_ids\[0\] == 1", "layer_ids[0] >= 1")),
        "DeepseekV2ForCausalLM.set_eagle3_layers_to_capture([1, 6]): found [1, 6], expected [2, 7]": (
            "srt/models/deepseek_v2.py", replaced(r"layer_ids\[0\] == 1", "layer_ids[0] == 0")),
        **{
            f"{path} {owner}.layers_to_capture: found never assigned": (
                path, replaced(r"self\.layers_to_capture\b", "self.taken"))
            for path, owner in contract.INNER_MODELS
        },
    },
    contract.check_settings: {
        f"ServerArgs.{contract.SETTINGS[0]}: found absent": (ARGUMENTS, renamed(contract.SETTINGS[0])),
        "flag --model-path: found absent": (ARGUMENTS, renamed("--model-path", "model_path")),
        "flag --tp-size: found absent": (ARGUMENTS, renamed("--tp-size", "tp_size")),
    },
    contract.check_drafter_loader: {
        **{
            f"{path} {owner}.load_weights: found (self, weights_0)": (path, argument(owner, "load_weights", "weights"))
            for path, owner in LOADERS
        },
        **{
            f"{path} {owner} d2t: found []": (path, replaced(r"\.hot_token_id = ", ".hot_tokens = "))
            for path, owner in LOADERS
        },
        **{
            f"{path} {owner} d2t: found ['loaded_weight']": (
                path, replaced(rf"(\.hot_token_id = ){EXPRESSION}", r"\1loaded_weight"))
            for path, owner in LOADERS
        },
        **{
            f"llama_eagle3.py load_weights: found no '{name}'": (
                contract.EAGLE3, replaced(rf"([\"']){re.escape(name)}\1", "'other'"))
            for name in (".q_proj", ".k_proj", ".v_proj", ".gate_proj", ".up_proj", "midlayer", "d2t", "t2d")
        },
        **{
            f"llama_eagle3.py self.{name}: found absent": (contract.EAGLE3, replaced(rf"self\.{name}\b", f"self.{name}_0"))
            for name in ("embed_tokens", "fc", "layers", "norm", "hidden_norm", "lm_head", "fc_norm")
        },
        **{
            f"llama_eagle3.py config.{key}: found not read": (contract.EAGLE3, renamed(key))
            for key in ("draft_vocab_size", "tie_word_embeddings", "target_hidden_size", "norm_output")
        },
        "eagle_config.eagle_aux_hidden_state_layer_ids: found read by none": (
            (contract.RUNNER, "srt/model_executor/model_runner_components/spec_aux_hidden_state.py"),
            renamed("eagle_aux_hidden_state_layer_ids")),
    },
}  # fmt: skip


def test_there_are_changes_for_every_check_of_the_contract():
    assert tuple(MUTATIONS) == contract.CHECKS


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize(
    ("check", "message"), [(check, message) for check, changes in MUTATIONS.items() for message in changes]
)
def test_what_a_release_lacks_is_named(originals, version, check, message):
    source = Mutated(originals[version], *MUTATIONS[check][message])
    told = [str(drift) for drift in check(source)]
    assert source.changed, f"nothing of this is in {version}"
    assert any(message in drift for drift in told), told


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_setting_and_every_flag_is_looked_for(originals, version):
    """All at once, because a release takes seconds to read through for one of them."""
    source = Mutated(originals[version], ARGUMENTS, renamed(*contract.SETTINGS))
    told = [drift.item for drift in contract.check_settings(source)]
    assert [item for item in told if not item.startswith("flag ")] == [
        f"ServerArgs.{name}" for name in contract.SETTINGS
    ]
    names = [flag[2:].replace("-", "_") for flag in contract.FLAGS]
    source = Mutated(originals[version], ARGUMENTS, renamed(*contract.FLAGS, *names))
    told = [drift.item for drift in contract.check_settings(source)]
    assert [item for item in told if item.startswith("flag ")] == [f"flag {flag}" for flag in contract.FLAGS]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_a_changed_release_on_disk_fails_the_contract_with_all_that_is_gone(tmp_path, capsys, version):
    package = releases.unzipped(version) / "sglang"
    shutil.copytree(package / "srt", tmp_path / "sglang/srt", ignore=shutil.ignore_patterns("*.so", "*.json"))
    shutil.copy(package / "launch_server.py", tmp_path / "sglang")
    chosen = {
        message: change
        for changes in MUTATIONS.values()
        for message, change in changes.items()
        if message.startswith(("HookType: found no AFTER", "ForwardMode.", "environ.py", "output_streamer.py"))
    }
    for path, change in chosen.values():
        file = tmp_path / "sglang" / path
        file.write_text(change(file.read_text()))
    assert contract.main(["--source", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert len(chosen) == 4 and all(message in told for message in chosen), told
    assert "4 drifted items" in told


# --- the CPU kernels -----------------------------------------------------------------------------------------------------


def kernel_misfits(source):
    """Return what a release and the CPU kernels of containers/cpu_kernels do not find in each other."""
    misfits = []
    for file in sorted(source.package.rglob("*.py")):
        if "from sgl_kernel import" not in (text := file.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module == "sgl_kernel":
                names = {alias.name for alias in node.names if alias.name.endswith("_cpu")}
                misfits += [f"{file.name} imports {name}" for name in sorted(names - set(sgl_kernel.__all__))]
    for node in ast.walk(source.tree(AMX)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "self.decode_attention_fwd",
            "self.extend_attention_fwd",
        ):
            operator = node.func.attr.replace("_fwd", "_cpu")
            takes = len(getattr(torch.ops.sgl_kernel, operator).default._schema.arguments)
            gets = len(node.args) + len(node.keywords)
            misfits += [] if gets == takes else [f"{operator} gets {gets} arguments, takes {takes}"]
    wanted = (
        ("srt/arg_groups/overrides.py", "_attention_backend_platform_fallbacks"),
        ("srt/models/deepseek_common/attention_backend_handler.py", "AttentionBackendRegistry.register"),
        ("srt/models/deepseek_common/attention_forward_methods/forward_methods.py", "AttnForwardMethod"),
    )
    misfits += [f"{path} has no {name}" for path, name in wanted if source.definition(path, name) is None]
    return misfits


@pytest.mark.parametrize("version", [PIN, NEWEST])
def test_the_cpu_kernels_fit_the_pin_and_the_newest_release(originals, version):
    assert kernel_misfits(originals[version]) == []


def test_a_release_that_calls_other_kernels_is_seen(originals):
    """0.5.18 gives neither operator the scales of the cache, and prefill no `is_causal`."""
    assert kernel_misfits(originals["0.5.18"]) == [
        "extend_attention_cpu gets 19 arguments, takes 22",
        "decode_attention_cpu gets 17 arguments, takes 19",
    ]
