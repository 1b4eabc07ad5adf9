"""The capture plugin without SGLang: fakes of what it meets there stand at the top.

    python -m pytest tests/test_capture_plugin.py

Legend: T tokens of a sample, N rows of a forward, K captured layers, D target width.
"""

import errno
import hashlib
import json
import os
import struct
import sys
import threading
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import aerie_capture
from aerie_capture import contract, hooks, probe, protocol, writer

RUN = "0123456789abcdef"
LAYERS = (1, 2, 4)
K, D, N_LAYERS = len(LAYERS), 4, 6
FLOAT_BYTES = 4


# --- fakes of SGLang -------------------------------------------------------------------------------------------------


@dataclass
class Mode:
    extend: bool

    def is_extend(self):
        return self.extend


@dataclass
class Batch:
    """The fields of SGLang's ForwardBatch that the plugin reads."""

    rids: list
    extend_seq_lens_cpu: list
    extend_prefix_lens_cpu: list
    input_ids: torch.Tensor
    forward_mode: Mode = field(default_factory=lambda: Mode(True))


@dataclass
class Output:
    customized_info: dict | None = None


def logits_forward(
    self,
    input_ids,
    hidden_states,
    lm_head,
    logits_metadata,
    aux_hidden_states=None,
    hidden_states_before_norm=None,
):
    """LogitsProcessor.forward: the hook gets it unbound."""
    return Output()


class Inner(torch.nn.Module):
    """An inner model: its loop looks at a list, or (`flags`) at a flag of each layer."""

    def __init__(self, flags=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(N_LAYERS))
        self.norm = torch.nn.Identity()
        self.layers_to_capture = []
        self.flags = flags

    def switch(self, ids):
        self.layers_to_capture = ids
        for index in ids if self.flags else ():
            self.layers[index]._is_layer_to_capture = True


class Model(torch.nn.Module):
    def __init__(self, flags=False, shift=1):
        super().__init__()
        self.model = Inner(flags)
        self.logits_processor = types.SimpleNamespace(logit_scale=None, final_logit_softcapping=None)
        self.shift = shift
        self.capture = False

    def set_eagle3_layers_to_capture(self, ids):
        self.capture = True
        self.model.switch([index + self.shift for index in ids])


def runner(model, **changes):
    facts = {
        "model": model,
        "is_draft_worker": False,
        "model_config": types.SimpleNamespace(
            hf_text_config=types.SimpleNamespace(num_hidden_layers=N_LAYERS, hidden_size=D)
        ),
        "dtype": torch.float32,
        "device": "cpu",
        "server_args": types.SimpleNamespace(),
    }
    return types.SimpleNamespace(**{**facts, **changes})


@pytest.fixture
def sglang(monkeypatch):
    """Stand-in modules; returns the settings in effect, the rank and what was registered."""
    world = types.SimpleNamespace(
        settings={"disable_radix_cache": True, "watchdog_timeout": 300.0}, rank=0, size=1, registered=[]
    )

    def config_leaf(name):
        if name not in world.settings:
            raise ValueError(f"{name!r} is not a config leaf")
        return world.settings[name]

    context = types.SimpleNamespace(config_leaf=config_leaf)
    registry = types.SimpleNamespace(register=lambda target, hook, kind: world.registered.append((target, hook, kind)))
    contents = {
        "sglang": {},
        "sglang.version": {"__version__": "0.5.20"},
        "sglang.srt": {},
        "sglang.srt.runtime_context": {"get_context": lambda: context},
        "sglang.srt.distributed": {},
        "sglang.srt.distributed.parallel_state": {
            "get_tensor_model_parallel_rank": lambda: world.rank,
            "get_tensor_model_parallel_world_size": lambda: world.size,
        },
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": registry,
            "HookType": types.SimpleNamespace(BEFORE="before", AFTER="after", AROUND="around"),
        },
        "sglang.srt.model_loader": {},
        "sglang.srt.model_loader.weight_utils": {"default_weight_loader": lambda p, tensor: p.data.copy_(tensor)},
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    monkeypatch.setattr(hooks, "_capture", None)
    monkeypatch.setattr(hooks, "_pinned_layers", None)
    return world


# --- a shard and a server that captures it ---------------------------------------------------------------------------


def ids_sha256(ids):
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()


def states_of(ids, *, base=0.0):
    """Rows that tell their token: aux [T, K*D], final [T, D]."""
    rows = torch.tensor(ids, dtype=torch.float32)[:, None]  # (T, 1)
    columns = torch.arange(K * D, dtype=torch.float32)[None]  # (1, K*D)
    return rows * 100 + columns + base, rows * -100 - columns[:, :D] - base


class Bench:
    """A control folder, shards in it, and a Capture that is asked like LogitsProcessor.forward."""

    def __init__(self, folder, monkeypatch, **config):
        self.folder = folder
        (folder / "control").mkdir()
        self.config = protocol.CaptureConfig(
            **{
                "run": RUN,
                "ready_path": folder / "ready.json",
                "control_dir": folder / "control",
                "layers": LAYERS,
                "final": "post_norm",
                **config,
            }
        )
        self.capture = hooks.Capture(
            config=self.config, hidden_size=D, dtype=torch.float32, device=torch.device("cpu"), wait_s=5.0
        )
        monkeypatch.setattr(hooks, "_capture", self.capture)
        self.prompts = {}

    def shard(self, name, prompts, **changes):
        rows = sum(map(len, prompts))
        aux_bytes, final_bytes = K * D * FLOAT_BYTES, D * FLOAT_BYTES
        data = self.folder / f"{name}.bin"
        with open(data, "wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, 64 + rows * (aux_bytes + final_bytes))
        samples, row = [], 0
        for ids in prompts:
            samples.append({"row": row, "tokens": len(ids), "sha256": ids_sha256(ids)})
            row += len(ids)
        control = {
            "run": RUN,
            "path": str(data),
            "journal": str(self.folder / f"{name}.journal"),
            "dtype": "float32",
            "tensors": {
                "aux": {"offset": 64, "row_bytes": aux_bytes},
                "final": {"offset": 64 + rows * aux_bytes, "row_bytes": final_bytes},
            },
            "samples": samples,
            **changes,
        }
        (self.folder / "control" / f"{name}.json").write_text(json.dumps(control))
        self.prompts[name] = (prompts, samples, rows)

    def rows(self, shard, sample):
        """The sample's rows as they lie in the data file: aux [T, K*D], final [T, D]."""
        prompts, samples, rows = self.prompts[shard]
        raw = (self.folder / f"{shard}.bin").read_bytes()[64:]
        values = torch.frombuffer(bytearray(raw), dtype=torch.float32)
        aux, final = values[: rows * K * D].view(rows, K * D), values[rows * K * D :].view(rows, D)  # (T, K*D), (T, D)
        span = slice(samples[sample]["row"], samples[sample]["row"] + len(prompts[sample]))
        return aux[span], final[span]

    def journal(self, shard):
        path = self.folder / f"{shard}.journal"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def forward(self, *requests, packed=True, padding=0, damage=None):
        """Run requests (rid, prefix, ids); return the tickets, or None when there are none."""
        ids = [token for _, _, tokens in requests for token in tokens] + [0] * padding
        aux, final = states_of(ids)  # (N, K*D), (N, D)
        if damage is not None:
            aux, final = damage(aux, final)
        blocks = aux if packed else list(aux.split(D, dim=1))  # (N, K*D), or K of (N, D)
        batch = Batch(
            rids=[rid for rid, _, _ in requests],
            extend_seq_lens_cpu=[len(tokens) for _, _, tokens in requests],
            extend_prefix_lens_cpu=[prefix for _, prefix, _ in requests],
            input_ids=torch.tensor(ids),
        )
        output = hooks.take_states(logits_forward, object(), batch.input_ids, final, None, batch, blocks)
        return None if output.customized_info is None else output.customized_info[protocol.TICKET_KEY]


def rid(shard, sample, attempt=0, run=RUN):
    return f"aerie-{run}-{shard}-{sample:06d}-{attempt}"


@pytest.fixture
def bench(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch)
    yield bench
    bench.capture.writer.close()


def assert_durable(bench, ticket, shard, sample):
    """The ticket, the journal and the file say the same, and the file holds the right rows."""
    answer = ticket.copy()
    assert answer["state"] == "durable" and answer["error"] is None
    ids = bench.prompts[shard][0][sample]
    aux, final = bench.rows(shard, sample)
    expected_aux, expected_final = states_of(ids)
    assert torch.equal(aux, expected_aux) and torch.equal(final, expected_final)
    digest = hashlib.sha256(aux.numpy().tobytes() + final.numpy().tobytes()).hexdigest()
    line = {"sample": sample, "tokens": len(ids), "ids_sha256": ids_sha256(ids), "rows_sha256": digest}
    assert [entry for entry in bench.journal(shard) if entry["sample"] == sample] == [line]
    assert answer == {
        "state": "durable",
        "error": None,
        "shard": shard,
        "sample": sample,
        "tokens": len(ids),
        "dtype": "float32",
        "layers": list(LAYERS),
        "final": "post_norm",
        "ids_sha256": line["ids_sha256"],
        "rows_sha256": digest,
    }


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "list"])
def test_rows_of_a_mixed_forward_land_at_their_samples(bench, packed):
    bench.shard("00000", [[5], [6, 7, 8], [9, 10]])
    bench.shard("00001", [[11, 12, 13, 14]])
    tickets = bench.forward(
        (rid("00000", 2), 0, [9, 10]),
        ("somebody-else", 0, [1, 2, 3]),
        (rid("00001", 0), 0, [11, 12, 13, 14]),
        (rid("00000", 0), 0, [5]),
        ("HEALTH_CHECK_1", 0, [4]),
        (rid("00000", 1), 0, [6, 7, 8]),
        packed=packed,
        padding=3,
    )
    assert [ticket is None for ticket in tickets] == [False, True, False, False, True, False]
    for ticket, shard, sample in ((0, "00000", 2), (2, "00001", 0), (3, "00000", 0), (5, "00000", 1)):
        assert_durable(bench, tickets[ticket], shard, sample)


def test_bfloat16_rows_keep_their_bytes(tmp_path):
    aux, final = (rows.bfloat16() for rows in states_of([3, 5]))
    (piece,) = writer.Copier(torch.device("cpu")).copy(list(aux.split(D, dim=1)), final, torch.tensor([3, 5]), [(0, 2)])
    assert bytes(writer._bytes_of(piece.aux)) == aux.view(torch.int16).numpy().tobytes()
    assert bytes(writer._bytes_of(piece.ids)) == struct.pack("<2i", 3, 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: streams and pinned memory")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "list"])
def test_rows_copied_from_a_gpu_survive_the_forwards_that_follow(packed):
    """The forward stream runs on and reuses the memory of the rows; the copies must not see it."""
    device, rows, width = torch.device("cuda"), 4096, 1024
    copier, heavy = writer.Copier(device), torch.ones(4096, 4096, device=device)
    copied = []
    for step in range(20):
        for _ in range(4):
            heavy = heavy @ heavy * 1e-4  # keeps the forward stream busy while the host runs ahead
        blocks = [torch.full((rows, width), float(step * K + k), device=device) for k in range(K)]
        final = torch.full((rows, width), -float(step), device=device)
        ids = torch.full((rows,), step, device=device)
        aux = torch.cat(blocks, dim=1) if packed else blocks  # (N, K*D), or K of (N, D)
        copied.append(copier.copy(aux, final, ids, [(0, 100), (100, rows - 7)]))
        del blocks, aux, final, ids
        torch.full((2 * (K + 1) * rows, width), float("nan"), device=device)
    for step, pieces in enumerate(copied):
        for piece, length in zip(pieces, (100, rows - 107), strict=True):
            piece.ready.synchronize()
            assert piece.aux.is_pinned() and piece.aux.shape == (length, K * width)
            for k in range(K):
                assert (piece.aux[:, k * width : (k + 1) * width] == step * K + k).all()
            assert (piece.final == -step).all() and (piece.ids == step).all()
            assert (piece.sums[:, 1] == -step * width).all()


def test_foreign_requests_get_an_empty_entry_in_every_forward(bench):
    """SGLang 0.5.14 dies when one request of a reply has an entry and another has none."""
    bench.shard("00000", [[5, 6]])
    assert bench.forward(("somebody-else", 0, [1, 2]), ("another", 0, [3])) == [None, None]
    assert bench.forward((rid("00000", 0, run="f" * 16), 0, [5, 6])) == [None]  # a client of an earlier server
    decode = Batch([rid("00000", 0), "somebody-else"], [1, 1], [2, 2], torch.tensor([5, 6]), Mode(False))
    output = hooks.take_states(logits_forward, object(), decode.input_ids, None, None, decode)
    assert output.customized_info == {protocol.TICKET_KEY: [None, None]}
    assert bench.journal("00000") == []


@pytest.mark.parametrize("rids", [None, []], ids=["warm-up", "idle"])
def test_forwards_without_request_ids_are_left_alone(bench, rids):
    dummy = Batch(rids, [1], [0], torch.tensor([5]))
    output = hooks.take_states(logits_forward, object(), dummy.input_ids, None, None, dummy)
    assert output.customized_info is None


def test_another_rank_takes_nothing(monkeypatch):
    monkeypatch.setattr(hooks, "_capture", None)
    batch = Batch([rid("00000", 0)], [1], [0], torch.tensor([5]))
    assert hooks.take_states(logits_forward, object(), batch.input_ids, None, None, batch).customized_info is None


def test_other_customized_info_is_kept(bench):
    bench.shard("00000", [[5]])
    aux, final = states_of([5])
    batch = Batch([rid("00000", 0)], [1], [0], torch.tensor([5]))
    output = hooks.take_states(
        lambda self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states: Output({"other": [1]}),
        object(), batch.input_ids, final, None, batch, aux_hidden_states=aux,
    )  # fmt: skip
    assert output.customized_info["other"] == [1]
    assert_durable(bench, output.customized_info[protocol.TICKET_KEY][0], "00000", 0)


def test_pieces_of_several_prompts_are_assembled_by_request_and_prefix(bench):
    first, second = list(range(20, 27)), list(range(40, 45))
    bench.shard("00000", [first, second])
    one, two = rid("00000", 0), rid("00000", 1)
    (half,) = bench.forward((one, 0, first[:3]))
    assert half.copy()["error"].startswith("3 of 7 tokens")
    assert bench.journal("00000") == []
    _, other = bench.forward((one, 3, first[3:5]), (two, 0, second[:4]))
    assert other.copy()["error"].startswith("4 of 5 tokens")
    whole, rest = bench.forward((two, 4, second[4:]), (one, 5, first[5:]))
    assert_durable(bench, whole, "00000", 1)
    assert_durable(bench, rest, "00000", 0)


def test_a_prompt_that_starts_again_replaces_its_earlier_pieces(bench):
    prompt = list(range(20, 27))
    bench.shard("00000", [prompt])
    bench.forward((rid("00000", 0), 0, [1, 1, 1]))
    (half,) = bench.forward((rid("00000", 0), 0, prompt[:2]))
    assert half.copy()["error"].startswith("2 of 7 tokens")
    (whole,) = bench.forward((rid("00000", 0), 2, prompt[2:]))
    assert_durable(bench, whole, "00000", 0)


@pytest.mark.parametrize("prefix", [2, 5])
def test_a_piece_that_does_not_follow_its_predecessor_is_refused(bench, prefix):
    prompt = list(range(20, 27))
    bench.shard("00000", [prompt])
    bench.forward((rid("00000", 0), 0, prompt[:3]))
    (ticket,) = bench.forward((rid("00000", 0), prefix, prompt[prefix:]))
    answer = ticket.copy()
    assert answer["state"] == "error"
    assert f"starts at token {prefix}, 3 tokens were captured before it" in answer["error"]
    assert bench.journal("00000") == []


def test_a_prefix_from_the_radix_cache_is_refused(bench):
    bench.shard("00000", [[5, 6, 7]])
    (ticket,) = bench.forward((rid("00000", 0), 2, [7]))
    assert "starts at token 2, 0 tokens were captured before it" in ticket.copy()["error"]


def test_left_overs_of_aborted_prompts_do_not_pile_up(bench):
    bench.shard("00000", [[5, 6, 7]])
    for attempt in range(3 * hooks.PARTIAL_SAMPLES):
        bench.forward((rid("00000", 0, attempt), 0, [5]))
    assert len(bench.capture._partials) == hooks.PARTIAL_SAMPLES


# --- samples that must not become durable ----------------------------------------------------------------------------


def test_the_prompt_of_an_aborted_request_is_noticed_by_its_ids(bench):
    """SGLang runs the one-token prompt [0] under the request id of a prompt it rejects."""
    bench.shard("00000", [[77], [1, 2, 3]])
    before = (bench.folder / "00000.bin").read_bytes()
    same_length, other_length = bench.forward((rid("00000", 0), 0, [0]), (rid("00000", 1), 0, [0]))
    answer = same_length.copy()
    assert answer["state"] == "error" and answer["rows_sha256"] is None
    assert ids_sha256([0]) in answer["error"] and ids_sha256([77]) in answer["error"]
    assert other_length.copy()["error"].startswith("1 of 3 tokens")
    assert bench.journal("00000") == []
    assert (bench.folder / "00000.bin").read_bytes() == before
    (again,) = bench.forward((rid("00000", 0, 1), 0, [77]))
    assert_durable(bench, again, "00000", 0)


def test_an_aborted_prompt_cannot_touch_rows_that_are_durable(bench):
    bench.shard("00000", [[77], [1, 2, 3]])
    bench.forward((rid("00000", 1), 0, [1, 2, 3]))[0].copy()
    (ticket,) = bench.forward((rid("00000", 1, 1), 0, [0]))
    assert_durable(bench, ticket, "00000", 1)


def test_more_tokens_than_the_sample_has_are_refused(bench):
    bench.shard("00000", [[5, 6]])
    (ticket,) = bench.forward((rid("00000", 0), 0, [5, 6, 7]))
    assert "3 tokens ran under this request id, the control file says 2" in ticket.copy()["error"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda aux, final: (aux[:, :-D], final), "aux width 8, expected 3 x 4 = 12"),
        (lambda aux, final: (aux, final[:, :-1]), "final width 3, expected 4"),
        (lambda aux, final: (aux[:-1], final), "2 rows in this forward, its requests have 3"),
        (lambda aux, final: (aux.double(), final), "states of ['torch.float32', 'torch.float64']"),
    ],
    ids=["an index that never fires", "final", "rows", "dtype"],
)
def test_states_of_another_shape_are_refused_and_the_forward_goes_on(bench, damage, message):
    bench.shard("00000", [[5, 6]])
    tickets = bench.forward((rid("00000", 0), 0, [5, 6]), ("other", 0, [1]), damage=damage)
    assert message in tickets[0].copy()["error"] and tickets[1] is None
    (again,) = bench.forward((rid("00000", 0, 1), 0, [5, 6]))
    assert_durable(bench, again, "00000", 0)


def test_a_model_without_aux_states_is_refused(bench):
    bench.shard("00000", [[5]])
    batch = Batch([rid("00000", 0)], [1], [0], torch.tensor([5]))
    output = hooks.take_states(logits_forward, object(), batch.input_ids, states_of([5])[1], None, batch)
    (ticket,) = output.customized_info[protocol.TICKET_KEY]
    assert "no aux or no final states" in ticket.copy()["error"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("name", "column"), [("aux", 7), ("final", 2)])
def test_a_value_that_is_not_finite_is_refused_by_its_place(bench, name, column, value):
    bench.shard("00000", [[5, 6], [7, 8, 9]])

    def damage(aux, final):
        {"aux": aux, "final": final}[name][3, column] = value
        return aux, final

    good, bad = bench.forward((rid("00000", 0), 0, [5, 6]), (rid("00000", 1), 0, [7, 8, 9]), damage=damage)
    assert_durable(bench, good, "00000", 0)
    assert bad.copy()["error"].startswith(f"{name}[1, {column}] is {value}")  # row 3 is token 1 of the second prompt
    assert [line["sample"] for line in bench.journal("00000")] == [0]
    aux, final = bench.rows("00000", 1)
    assert aux.count_nonzero() == 0 and final.count_nonzero() == 0


def test_a_value_in_a_later_piece_is_refused_by_its_token_of_the_prompt(bench):
    prompt = list(range(20, 27))
    bench.shard("00000", [prompt])

    def damage(aux, final):
        final[1, 3] = float("nan")
        return aux, final

    bench.forward((rid("00000", 0), 0, prompt[:3]))
    (ticket,) = bench.forward((rid("00000", 0), 3, prompt[3:]), damage=damage)
    assert ticket.copy()["error"].startswith("final[4, 3] is nan")


def test_values_whose_sum_overflows_are_finite(bench):
    bench.shard("00000", [[5]])

    def damage(aux, final):
        return torch.full_like(aux, 3e38), final

    (ticket,) = bench.forward((rid("00000", 0), 0, [5]), damage=damage)
    assert ticket.copy()["state"] == "durable"


def test_an_unknown_sample_and_a_missing_shard_are_refused_by_name(bench):
    bench.shard("00000", [[5]])
    unknown, missing = bench.forward((rid("00000", 3), 0, [5]), (rid("00009", 0), 0, [5]))
    assert "shard 00000 has 1 samples" in unknown.copy()["error"]
    assert "00009.json" in missing.copy()["error"]


def test_every_defect_of_a_control_file_is_told_at_once(bench):
    bench.shard(
        "00000", [[5], [6]], run="e" * 16, dtype="bfloat16", extra=1,
        tensors={"aux": {"offset": -1, "row_bytes": 48}, "final": {"offset": 0, "row_bytes": 17}},
        samples=[{"row": 0, "tokens": 2, "sha256": "0" * 64}, {"row": 1, "tokens": 1, "sha256": "?"},
                 {"row": 1, "tokens": 1, "sha256": "0" * 64}],
    )  # fmt: skip
    (ticket,) = bench.forward((rid("00000", 0), 0, [5]))
    error = ticket.copy()["error"]
    for part in (
        "run:", "dtype: found 'bfloat16'", "extra: unknown key", "tensors.aux.offset: found -1",
        "tensors.final.row_bytes: found 17, expected 16", "samples[1].sha256", "rows 0..1 overlap row 1",
    ):  # fmt: skip
        assert part in error


def test_a_data_file_that_is_too_short_is_refused(bench):
    bench.shard("00000", [[5, 6]])
    os.truncate(bench.folder / "00000.bin", 100)
    (ticket,) = bench.forward((rid("00000", 0), 0, [5, 6]))
    assert "found 100 bytes, expected at least 192" in ticket.copy()["error"]


# --- durability ------------------------------------------------------------------------------------------------------


def test_rows_then_journal_then_ticket(bench, monkeypatch):
    """Each step is durable before the next one speaks for it."""
    steps, released = [], threading.Event()
    names = {}

    def name_of(descriptor):
        return names.setdefault(descriptor, Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix)

    def recording(name, original):
        def record(descriptor, *arguments):
            steps.append((name, name_of(descriptor)))
            assert not released.is_set()
            return original(descriptor, *arguments)

        return record

    bench.shard("00000", [[5, 6]])
    monkeypatch.setattr(os, "pwrite", recording("pwrite", os.pwrite))
    monkeypatch.setattr(os, "write", recording("write", os.write))
    monkeypatch.setattr(os, "fdatasync", recording("fdatasync", os.fdatasync))
    settle = writer.Ticket._settle
    monkeypatch.setattr(writer.Ticket, "_settle", lambda *a, **k: (released.set(), settle(*a, **k)))
    (ticket,) = bench.forward((rid("00000", 0), 0, [5, 6]))
    assert ticket.copy()["state"] == "durable"
    assert steps == [
        ("pwrite", ".bin"),
        ("pwrite", ".bin"),
        ("fdatasync", ".bin"),
        ("write", ".journal"),
        ("fdatasync", ".journal"),
    ]


def test_a_reply_waits_until_its_rows_are_durable(bench, monkeypatch):
    gate = threading.Event()
    original = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (gate.wait(5), original(descriptor))[1])
    bench.shard("00000", [[5, 6]])
    (ticket,) = bench.forward((rid("00000", 0), 0, [5, 6]))
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ticket.copy()))
    thread.start()
    thread.join(0.1)
    assert answers == [] and not ticket.settled
    gate.set()
    thread.join(5)
    assert type(answers[0]) is dict and answers[0]["state"] == "durable"


def test_a_reply_does_not_wait_longer_than_the_watchdog_allows():
    ticket = writer.Ticket({"shard": "00000"}, wait_s=0.01)
    assert "did not finish in time" in ticket.copy()["error"]
    ticket.durable("a", "b")
    assert ticket.copy()["state"] == "durable"


def test_a_full_disk_is_remembered_and_answers_every_later_sample(bench, monkeypatch):
    bench.shard("00000", [[5], [6], [7]])
    bench.shard("00001", [[8]])
    bench.forward((rid("00000", 0), 0, [5]))[0].copy()

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        error = bench.forward((rid("00000", 1), 0, [6]))[0].copy()["error"]
    assert "No space left on device" in error and "00000.bin" in error
    for shard, sample, ids in (("00000", 2, [7]), ("00001", 0, [8])):
        assert bench.forward((rid(shard, sample), 0, ids))[0].copy()["error"] == error
    assert [line["sample"] for line in bench.journal("00000")] == [0] and bench.journal("00001") == []


def test_samples_that_wait_behind_a_full_disk_fail_with_it(bench, monkeypatch):
    """A disk with room again must not be taken for one that never lost a row."""
    bench.shard("00000", [[5], [6], [7]])
    original, calls = os.pwrite, []

    def full_once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(os, "pwrite", full_once)
    first, second = bench.forward((rid("00000", 0), 0, [5]), (rid("00000", 2), 0, [7]))  # both for the same thread
    assert "No space left on device" in first.copy()["error"]
    assert second.copy()["error"] == first.copy()["error"]
    assert len(calls) == 1 and bench.journal("00000") == []


def test_a_journal_on_a_full_device_is_an_error(bench):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    bench.shard("00000", [[5]], journal="/dev/full")
    error = bench.forward((rid("00000", 0), 0, [5]))[0].copy()["error"]
    assert "No space left on device" in error


def test_a_short_write_is_continued(bench, monkeypatch):
    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: original(fd, data[:5], offset))
    bench.shard("00000", [[5, 6, 7]])
    (ticket,) = bench.forward((rid("00000", 0), 0, [5, 6, 7]))
    assert_durable(bench, ticket, "00000", 0)


def test_a_torn_last_line_does_not_swallow_the_next_one(bench):
    bench.shard("00000", [[5], [6]])
    journal = bench.folder / "00000.journal"
    journal.write_text('{"sample": 0, "tok')
    bench.forward((rid("00000", 1), 0, [6]))[0].copy()
    torn, whole = journal.read_text().splitlines()
    assert torn == '{"sample": 0, "tok' and json.loads(whole)["sample"] == 1


def test_a_sample_asked_for_twice_is_written_once(bench):
    bench.shard("00000", [[5, 6]])
    both = bench.forward((rid("00000", 0, 0), 0, [5, 6]), (rid("00000", 0, 1), 0, [5, 6]))
    later = bench.forward((rid("00000", 0, 2), 0, [5, 6]))
    for ticket in (*both, *later):
        assert_durable(bench, ticket, "00000", 0)


def test_a_replaced_control_file_is_read_again(bench):
    bench.shard("00000", [[5, 6]])
    assert_durable(bench, bench.forward((rid("00000", 0), 0, [5, 6]))[0], "00000", 0)
    (bench.folder / "00000.journal").unlink()
    bench.shard("00000", [[7], [8, 9, 10]])
    assert_durable(bench, bench.forward((rid("00000", 1), 0, [8, 9, 10]))[0], "00000", 1)


def test_a_forward_over_many_shards_keeps_them_open_until_they_are_written(bench):
    names = [f"{number:05d}" for number in range(2 * hooks.OPEN_SHARDS)]
    for name in names:
        bench.shard(name, [[5, 6]])
    tickets = bench.forward(*((rid(name, 0), 0, [5, 6]) for name in names))
    for name, ticket in zip(names, tickets, strict=True):
        assert_durable(bench, ticket, name, 0)
    bench.capture.writer.close()
    assert len(bench.capture._shards) == hooks.OPEN_SHARDS
    held = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    assert sum(str(bench.folder / f"{name}.bin") in held for name in names) == hooks.OPEN_SHARDS
    bench.capture.writer = writer.Writer(wait_s=1.0)  # the fixture closes it


def test_a_slow_disk_holds_the_forward_back_and_then_refuses(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch)
    bench.capture.writer.close()
    bench.capture.writer = writer.Writer(wait_s=0.05, queue_bytes=100)  # one sample of one token has 64 bytes
    gate, original = threading.Event(), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (gate.wait(5), original(descriptor))[1])
    bench.shard("00000", [[5], [6], [7]])
    (first,) = bench.forward((rid("00000", 0), 0, [5]))
    (second,) = bench.forward((rid("00000", 1), 0, [6]))
    assert "64 bytes still wait for the disk after 0.05 s" in second.copy()["error"]
    gate.set()
    assert first.copy()["state"] == "durable"
    (third,) = bench.forward((rid("00000", 2), 0, [7]))
    assert third.copy()["state"] == "durable"
    bench.capture.writer.close()


def test_a_sample_larger_than_the_queue_passes_when_the_queue_is_empty(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch)
    bench.capture.writer.close()
    bench.capture.writer = writer.Writer(wait_s=1.0, queue_bytes=1)
    bench.shard("00000", [[5, 6, 7]])
    assert_durable(bench, bench.forward((rid("00000", 0), 0, [5, 6, 7]))[0], "00000", 0)
    bench.capture.writer.close()


# --- hook (a) --------------------------------------------------------------------------------------------------------


@pytest.fixture
def capture_config(tmp_path, monkeypatch):
    """Write AERIE_CAPTURE_CONFIG; returns a function that changes it."""
    path = tmp_path / "capture.json"
    monkeypatch.setenv(protocol.CONFIG_VARIABLE, str(path))

    def write(**changes):
        config = {
            "run": RUN,
            "ready_path": str(tmp_path / "ready.json"),
            "control_dir": str(tmp_path),
            "layers": list(LAYERS),
            "final": "post_norm",
            **changes,
        }
        path.write_text(json.dumps(config))

    write()
    yield write
    if hooks._capture is not None:
        hooks._capture.writer.close()


@pytest.mark.parametrize("flags", [False, True], ids=["list", "per-layer flags"])
def test_the_asked_layers_are_set_whatever_the_setter_makes_of_them(sglang, capture_config, tmp_path, flags):
    model = Model(flags=flags)
    hooks.switch_capture_on(runner(model))
    assert model.capture and model.model.layers_to_capture == list(LAYERS)
    flagged = [i for i, layer in enumerate(model.model.layers) if getattr(layer, hooks.LAYER_FLAG, False)]
    assert flagged == (list(LAYERS) if flags else [])
    ready = json.loads((tmp_path / "ready.json").read_text())
    settings = ready.pop("flags")
    assert settings["disable_radix_cache"] is True and settings["tp_size"] is None
    assert ready == {
        "run": RUN,
        "pid": os.getpid(),
        "sglang_version": "0.5.20",
        "patch_digest": protocol.patch_digest(),
        "model_class": "Model",
        "layers": list(LAYERS),
        "final": "post_norm",
        "num_hidden_layers": N_LAYERS,
        "hidden_size": D,
        "dtype": "float32",
        "tp_rank": 0,
        "tp_size": 1,
    }


def test_only_rank_zero_writes(sglang, capture_config, tmp_path):
    sglang.rank, sglang.size = 1, 2
    model = Model()
    hooks.switch_capture_on(runner(model))
    assert model.model.layers_to_capture == list(LAYERS)  # every rank runs the same forward
    assert hooks._capture is None and not (tmp_path / "ready.json").exists()


def test_a_draft_model_is_left_alone(sglang, capture_config, tmp_path):
    model = Model()
    hooks.switch_capture_on(runner(model, is_draft_worker=True))
    hooks.hold_layers(None, runner(model, is_draft_worker=True))
    assert not model.capture and not (tmp_path / "ready.json").exists()


def test_layers_that_sglang_changes_afterwards_are_set_again(sglang, capture_config):
    model = Model(flags=True)
    hooks.switch_capture_on(runner(model))
    model.set_eagle3_layers_to_capture(list(LAYERS))  # as --enable-return-aux-hidden-states does
    hooks.hold_layers(None, runner(model))
    assert model.model.layers_to_capture == list(LAYERS)
    assert hooks._pinned_layers.read_back() == list(LAYERS)


def test_a_list_that_disagrees_with_the_flags_is_an_error(sglang, capture_config):
    model = Model(flags=True)
    hooks.switch_capture_on(runner(model))
    model.model.layers[3]._is_layer_to_capture = True
    with pytest.raises(RuntimeError, match=r"layers_to_capture is \[1, 2, 4\].* is set on \[1, 2, 3, 4\]"):
        hooks.hold_layers(None, runner(model))


def test_every_reason_to_refuse_a_server_is_told_at_once(sglang, capture_config, tmp_path):
    capture_config(layers=[9, 2, 2, 0], final="pre_norm")
    sglang.size = 8
    sglang.settings.update(
        disable_radix_cache=False,
        pp_size=2,
        dp_size=2,
        attn_cp_size=4,
        enable_dp_attention=True,
        enable_two_batch_overlap=True,
        enable_prefill_cp=True,
        enable_attn_tp_input_scattered=True,
        enable_layernorm_sp=True,
        speculative_algorithm="EAGLE3",
    )
    model = Model()
    del model.model.norm
    model.logits_processor.logit_scale = 0.125
    changed = runner(model, device="cuda")
    changed.model_config.hf_text_config.logits_mup_width_multiplier = 24.0
    with pytest.raises(RuntimeError, match="cannot capture") as caught:
        hooks.switch_capture_on(changed)
    reasons = str(caught.value)
    for part in (
        "--pp-size 1", "--dp-size 1", "--attn-cp-size 1", "drop --enable-dp-attention", "drop --enable-two-batch-overlap",
        "drop --enable-prefill-cp", "drop --enable-attn-tp-input-scattered", "drop --enable-layernorm-sp",
        "add --disable-radix-cache", "drop --speculative-algorithm", "add --enforce-disable-flashinfer-allreduce-fusion",
        "add --disable-prefill-cuda-graph", "layer 9: the model has 6 layers, an index is 1..5", "layer 0:",
        "layers [9, 2, 2, 0]", "logits_processor.logit_scale is 0.125", "config.logits_mup_width_multiplier is 24.0",
        "Inner has no `norm`",
    ):  # fmt: skip
        assert part in reasons
    assert not model.capture and not (tmp_path / "ready.json").exists()


@pytest.mark.parametrize(
    "allowed",
    [
        {"disable_overlap_schedule": False},
        {"disable_overlap_schedule": True},
        {"speculative_algorithm": "EAGLE3", "enable_return_aux_hidden_states": True},  # only names a convention
        {"pp_size": 1, "dp_size": 1, "attn_cp_size": 1, "attn_dp_size": 1},
    ],
)
def test_what_does_no_harm_is_not_refused(sglang, allowed):
    settings = {"disable_radix_cache": True, **allowed}
    assert hooks.refused_settings(settings.get, device="cpu", tp_size=2) == []


def test_a_cuda_server_with_the_right_flags_is_not_refused():
    settings = {
        "disable_radix_cache": True,
        "enforce_disable_flashinfer_allreduce_fusion": True,
        "disable_prefill_cuda_graph": True,
    }
    assert hooks.refused_settings(settings.get, device="cuda", tp_size=8) == []


def test_a_model_without_the_setter_is_refused(sglang, capture_config):
    model = torch.nn.Module()
    with pytest.raises(RuntimeError, match="Module has no set_eagle3_layers_to_capture"):
        hooks.switch_capture_on(runner(model))


def test_settings_without_a_namespace_are_read_from_the_server_arguments(sglang):
    old = runner(Model(), server_args=types.SimpleNamespace(pp_size=4))
    setting = hooks._setting_reader(old)
    assert setting("pp_size") == 4 and setting("disable_radix_cache") is True and setting("unheard_of") is None


def test_pre_norm_is_the_sum_that_enters_the_final_norm(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, final="pre_norm")
    bench.shard("00000", [[5, 6]])
    aux, final = states_of([5, 6])
    hidden, residual = final - 7, torch.full_like(final, 7.0)
    norm = torch.nn.Module()
    norm.forward = lambda hidden, residual: (hidden.zero_(), residual.zero_())  # a fused norm overwrites both
    norm.register_forward_pre_hook(bench.capture.keep_norm_input)
    norm(hidden, residual)
    batch = Batch([rid("00000", 0)], [2], [0], torch.tensor([5, 6]))
    normed = torch.ones(2, D)
    output = hooks.take_states(logits_forward, object(), batch.input_ids, normed, None, batch, aux)
    answer = output.customized_info[protocol.TICKET_KEY][0].copy()
    assert answer["state"] == "durable" and answer["final"] == "pre_norm"
    assert torch.equal(bench.rows("00000", 0)[1], final)
    # A forward whose norm did not run must not reuse the sum of the one before.
    output = hooks.take_states(logits_forward, object(), batch.input_ids, normed, None, Batch(
        [rid("00000", 0, 1)], [2], [0], torch.tensor([5, 6])), aux)  # fmt: skip
    assert "no aux or no final states" in output.customized_info[protocol.TICKET_KEY][0].copy()["error"]
    bench.capture.writer.close()


def test_nothing_is_registered_without_a_configuration(sglang, monkeypatch):
    monkeypatch.delenv(protocol.CONFIG_VARIABLE, raising=False)
    monkeypatch.delenv(protocol.PROBE_VARIABLE, raising=False)
    aerie_capture.activate()
    assert sglang.registered == []


def test_both_hooks_are_registered_with_a_configuration(sglang, capture_config):
    aerie_capture.activate()
    assert sglang.registered == [
        (hooks.RUNNER_TARGET, hooks.switch_capture_on, "before"),
        (hooks.RUNNER_TARGET, hooks.hold_layers, "after"),
        (hooks.LOGITS_TARGET, hooks.take_states, "around"),
    ]


@pytest.mark.parametrize(
    ("stale", "kept"), [('{"run": "ffff"}', False), ("torn", False), (f'{{"run": "{RUN}"}}', True)]
)
def test_only_a_stale_ready_file_is_deleted_at_start(sglang, capture_config, tmp_path, stale, kept):
    (tmp_path / "ready.json").write_text(stale)
    hooks.register()
    assert (tmp_path / "ready.json").exists() is kept


def test_every_defect_of_the_configuration_is_told_at_once(sglang, capture_config):
    capture_config(run="XYZ", layers=[1, "2"], final="both", surplus=1, ready_path="")
    with pytest.raises(ValueError, match="5 defects") as caught:
        aerie_capture.activate()
    for part in ("run:", "layers:", "final:", "surplus: unknown key", "ready_path:"):
        assert part in str(caught.value)


# --- probe -----------------------------------------------------------------------------------------------------------


class Drafter(torch.nn.Module):
    """A loader in SGLang's way: fused parameters, unknown names skipped in silence."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2, bias=False)
        self.norm = torch.nn.Linear(2, 1, bias=False)
        self.attention = torch.nn.Module()
        self.attention.qkv_proj = torch.nn.Linear(1, 3, bias=False)
        self.attention.qkv_proj.weight.weight_loader = self.load_shard
        self.hot_token_id = None

    @staticmethod
    def load_shard(parameter, tensor, shard):
        parameter.data["qkv".index(shard)] = tensor

    def load_weights(self, weights):
        from sglang.srt.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name == "d2t":
                self.hot_token_id = tensor + torch.arange(len(tensor))
            elif name.startswith("attention."):
                fused = parameters["attention.qkv_proj.weight"]
                fused.weight_loader(fused, tensor, name.split(".")[1][0])
            elif name in parameters:
                parameter = parameters[name]
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def test_the_probe_tells_which_names_arrived_and_what_nobody_filled(sglang, tmp_path, monkeypatch):
    config = tmp_path / "probe.cfg"
    config.write_text(json.dumps({"run": "any name", "path": str(tmp_path / "probe")}))
    monkeypatch.setenv(protocol.PROBE_VARIABLE, str(config))
    monkeypatch.setattr(probe, "_probe", None)
    probe.register()
    assert [target for target, _, _ in sglang.registered] == [
        hooks.RUNNER_TARGET, probe.DRAFT_TARGET + ".load_weights", probe.DRAFT_TARGET + ".forward",
    ]  # fmt: skip
    target = Model()
    target.set_eagle3_layers_to_capture([0, 1, 3])
    probe.read_target_layers(None, runner(target))
    drafter = Drafter()
    weights = {
        "fc.weight": torch.full((2, 2), 3.0),
        "attention.q_proj.weight": torch.tensor([4.0]),
        "attention.k_proj.weight": torch.tensor([5.0]),
        "misspelt.weight": torch.zeros(1),
        "d2t": torch.tensor([0, 1, 1]),
        "t2d": torch.ones(5, dtype=torch.bool),
    }
    probe.watch_loading(Drafter.load_weights, drafter, iter(weights.items()))
    facts = json.loads((tmp_path / "probe" / "probe.json").read_text())
    assert facts["state"] == "loaded" and facts["target"]["layers_to_capture"] == list(LAYERS)
    draft = facts["draft"]
    assert draft["offered"] == sorted(weights) and draft["left_over"] == ["misspelt.weight"]
    assert draft["not_loaded"] == ["attention.qkv_proj.weight", "norm.weight"]  # v is missing, norm was not offered
    assert draft["offsets"] == ["d2t"] and draft["ignored"] == ["t2d"]
    assert draft["consumed"]["attention.q_proj.weight"] == ["attention.qkv_proj.weight"]
    assert torch.equal(drafter.fc.weight, weights["fc.weight"])
    assert not hasattr(drafter.fc.weight, "weight_loader")  # the watching loaders are gone
    assert drafter.attention.qkv_proj.weight.weight_loader is Drafter.load_shard

    forward = {"input_ids": torch.arange(9), "positions": torch.arange(9), "aux": torch.arange(54.0).view(9, 6)}
    batch = Batch(["other", "aerie-probe-1"], [4, 5], [0, 0], forward["input_ids"])
    batch.spec_info = types.SimpleNamespace(hidden_states=forward["aux"])
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])

    def run(model, input_ids, positions, forward_batch):
        return types.SimpleNamespace(next_token_logits=logits)

    for times in (1, 10):  # only the first extend is kept
        probe.watch_forward(run, drafter, forward["input_ids"] * times, forward["positions"], batch)
    tensors = probe_tensors(tmp_path / "probe" / "probe.safetensors")
    assert {name: value.tolist() for name, value in tensors.items()} == {
        "input_ids": [4, 5, 6, 7, 8],
        "positions": [4, 5, 6, 7, 8],
        "aux": forward["aux"][4:].tolist(),
        "logits": [[4.0, 5.0, 6.0]],
        "hot_token_id": [0, 2, 3],
    }
    assert json.loads((tmp_path / "probe" / "probe.json").read_text())["state"] == "probed"
    assert probe_tensors(tmp_path / "probe" / "draft-params-rank0.safetensors").keys() == {"fc.weight"}


def probe_tensors(path):
    from safetensors.torch import load_file

    return load_file(path)


# --- contract --------------------------------------------------------------------------------------------------------

PLUS_ONE = """
    def set_eagle3_layers_to_capture(self, layer_ids: Optional[List[int]] = None):
        if not self.pp_group.is_last_rank:
            return
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [val + 1 for val in layer_ids]
"""
RAW = PLUS_ONE.replace(
    "[val + 1 for val in layer_ids]",
    "[val + 1 for val in layer_ids] if layer_ids[0] == 1 else list(layer_ids)",
)
INNER = "    def __init__(self):\n        self.layers_to_capture = []\n"
D2T = "            self.hot_token_id = loaded_weight + torch.arange(loaded_weight.shape[0])\n"
SOURCE = {
    "launch_server.py": "load_plugins()\n",
    "srt/environ.py": "SGLANG_PLUGINS = EnvStr('')\n",
    "srt/managers/scheduler.py": "def run():\n    load_plugins()\n",
    "srt/distributed/parallel_state.py": (
        "def get_tensor_model_parallel_rank(): pass\ndef get_tensor_model_parallel_world_size(): pass\n"
    ),
    contract.PLUGINS: 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"\n',
    contract.REGISTRY: (
        "class HookType(Enum):\n    BEFORE = 1\n    AFTER = 2\n    AROUND = 3\n"
        "class HookRegistry:\n    @classmethod\n    def register(cls, target, hook, hook_type=1, *, source=None): pass\n"
        "    @classmethod\n    def apply_hooks(cls): pass\n"
    ),
    contract.RUNNER: (
        "class ModelRunner:\n    def __init__(self):\n        self.model = self.model_config = self.server_args = 1\n"
        "        self.is_draft_worker = self.dtype = self.device = 1\n"
        "        ids = config['eagle_aux_hidden_state_layer_ids']\n"
        "    def init_attention_backends(self): pass\n"
    ),
    contract.LOGITS: (
        "class LogitsProcessorOutput:\n    customized_info: dict = None\n"
        "class LogitsProcessor:\n    def forward(self, input_ids, hidden_states, lm_head, logits_metadata,"
        " aux_hidden_states=None, hidden_states_before_norm=None): pass\n"
    ),
    contract.BATCH: (
        "class ForwardMode:\n    def is_extend(self): pass\n"
        "class ForwardBatch:\n    forward_mode: int\n    input_ids: int\n    rids: list\n"
        "    extend_seq_lens_cpu: list\n    extend_prefix_lens_cpu: list\n"
        "    def init_new(cls, batch): return cls(rids=[req.rid for req in batch.reqs])\n"
    ),
    contract.RESULTS: (
        "class Processor:\n    def _maybe_collect_customized_info(self, i, req, out):\n"
        "        req.customized_info.append(out[i].copy())\n"
        "    def process_batch_result_prefill(self):\n        self._maybe_collect_customized_info(1, 2, 3)\n"
    ),
    contract.STREAMER: "customized_info = 1\n",
    contract.TOKENIZER_MANAGER: "customized_info = 1\n",
    "srt/models/llama.py": f"class LlamaModel:\n{INNER}class LlamaForCausalLM:\n{PLUS_ONE}",
    "srt/models/qwen2.py": f"class Qwen2Model:\n{INNER}",
    "srt/models/qwen2_moe.py": f"class Qwen2MoeModel:\n{INNER}class Qwen2MoeForCausalLM:\n{PLUS_ONE}",
    "srt/models/qwen3.py": f"class Qwen3ForCausalLM:\n{PLUS_ONE}",
    "srt/models/qwen3_moe.py": (
        "from sglang.srt.models.qwen2_moe import Qwen2MoeForCausalLM\n"
        "class Qwen3MoeForCausalLM(Qwen2MoeForCausalLM):\n    pass\n"
    ),
    "srt/models/deepseek_v2.py": f"class DeepseekV2Model:\n{INNER}class DeepseekV2ForCausalLM:\n{RAW}",
    "srt/models/kimi_k25.py": f"class KimiK25ForConditionalGeneration:\n{PLUS_ONE}",
    "srt/models/gpt_oss.py": f"class GptOssForCausalLM:\n{PLUS_ONE}",
    contract.EAGLE3: (
        "class LlamaDecoderLayer:\n    def __init__(self): self.hidden_norm = 1\n"
        "class LlamaModel:\n    def __init__(self):\n"
        "        self.embed_tokens = self.fc = self.layers = self.norm = self.fc_norm = 1\n"
        "class LlamaForCausalLMEagle3:\n    def __init__(self, config):\n        self.lm_head = 1\n"
        "        config.draft_vocab_size, config.tie_word_embeddings, config.target_hidden_size, config.norm_output\n"
        "    def load_weights(self, weights):\n"
        "        names = ['.q_proj', '.k_proj', '.v_proj', '.gate_proj', '.up_proj', 'midlayer', 'd2t', 't2d']\n"
        "        for loaded_weight in weights:\n" + D2T
    ),
    contract.EAGLE3_MLA: (
        "class Eagle3DeepseekV2ForCausalLM:\n    def load_weights(self, weights):\n"
        "        for loaded_weight in weights:\n" + D2T
    ),
    "srt/server_args.py": (
        "class ServerArgs:\n"
        + "".join(f"    {name}: A[int, 'help'] = 1\n" for name in contract.SETTINGS)
        + "".join(f"    {flag[2:].replace('-', '_')}: A[int, Arg(help='x')] = 1\n" for flag in contract.FLAGS[:10])
        + "    def add_cli_args(parser):\n"
        + "".join(f"        parser.add_argument('{flag}')\n" for flag in contract.FLAGS[10:])
    ),
}  # fmt: skip


def write_source(folder, changes=()):
    """An unzipped wheel in little; `changes` are (file, old text, new text)."""
    for name, text in SOURCE.items():
        for file, old, new in changes:
            if file == name:
                assert old in text
                text = text.replace(old, new)
        path = folder / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_source_tree_as_expected_passes_the_contract(tmp_path, capsys):
    assert contract.main(["--source", str(write_source(tmp_path))]) == 0
    assert "no drift" in capsys.readouterr().out


DRIFTS = {
    "ModelRunner.init_attention_backends: found (self, pool)": (
        contract.RUNNER, "init_attention_backends(self)", "init_attention_backends(self, pool)"),
    "ModelRunner.is_draft_worker: found never assigned": (contract.RUNNER, "self.is_draft_worker", "self.is_draft"),
    "LogitsProcessor.forward: found (self, input_ids": (contract.LOGITS, "hidden_states, lm_head", "states, lm_head"),
    "LogitsProcessorOutput.customized_info: found absent": (contract.LOGITS, "customized_info:", "custom_info:"),
    "GENERAL_PLUGINS_GROUP: found 'sglang.plugins'": (contract.PLUGINS, "sglang.srt.plugins", "sglang.plugins"),
    "HookRegistry.register: found (cls, path, hook": (contract.REGISTRY, "cls, target", "cls, path"),
    "HookType: found no AROUND": (contract.REGISTRY, "AROUND", "WRAP"),
    "scheduler.py load_plugins(): found not called": ("srt/managers/scheduler.py", "load_plugins()", "pass"),
    "get_tensor_model_parallel_rank: found absent": (
        "srt/distributed/parallel_state.py", "parallel_rank", "parallel_index"),
    "_maybe_collect_customized_info: found no .copy() call": (contract.RESULTS, ".copy()", ""),
    "process_batch_result_prefill: found does not call": (
        contract.RESULTS, "self._maybe_collect_customized_info(1", "self.collect(1"),
    "output_streamer.py customized_info: found absent": (contract.STREAMER, "customized_info", "custom_info"),
    "ForwardBatch.extend_prefix_lens_cpu: found absent": (contract.BATCH, "extend_prefix_lens_cpu", "prefix_lens_cpu"),
    "ForwardBatch(rids=...): found not filled": (contract.BATCH, "cls(rids=[req.rid", "cls([req.rid"),
    "LlamaForCausalLM.set_eagle3_layers_to_capture([4, 6]): found [4, 6], expected [5, 7]": (
        "srt/models/llama.py", "[val + 1 for val in layer_ids]", "list(layer_ids)"),
    "DeepseekV2ForCausalLM.set_eagle3_layers_to_capture([1, 6]): found [1, 6], expected [2, 7]": (
        "srt/models/deepseek_v2.py", "layer_ids[0] == 1", "layer_ids[0] == 0"),
    "Qwen3MoeForCausalLM.set_eagle3_layers_to_capture: found absent": (
        "srt/models/qwen2_moe.py", "set_eagle3_layers_to_capture", "set_layers"),
    "DeepseekV2Model.layers_to_capture: found never assigned": (
        "srt/models/deepseek_v2.py", "        self.layers_to_capture = []", "        self.captured = []"),
    "ServerArgs.enable_two_batch_overlap: found absent": (
        "srt/server_args.py", "    enable_two_batch_overlap:", "    two_batch_overlap:"),
    "flag --model-path: found absent": ("srt/server_args.py", "    model_path: A[int, Arg(help='x')]",
                                        "    model_path: A[int, Arg(no_cli=True)]"),
    "flag --skip-server-warmup: found absent": (
        "srt/server_args.py", "add_argument('--skip-server-warmup')", "add_argument('--other')"),
    "LlamaForCausalLMEagle3 d2t: found ['loaded_weight']": (
        contract.EAGLE3, "loaded_weight + torch.arange(loaded_weight.shape[0])", "loaded_weight"),
    "load_weights: found no 'midlayer'": (contract.EAGLE3, "'midlayer'", "'layer'"),
    "self.hidden_norm: found absent": (contract.EAGLE3, "self.hidden_norm", "self.state_norm"),
    "config.norm_output: found not read": (contract.EAGLE3, "config.norm_output", "config.norm"),
    "eagle_config.eagle_aux_hidden_state_layer_ids: found read by none": (
        contract.RUNNER, "eagle_aux_hidden_state_layer_ids", "layer_ids"),
}  # fmt: skip


@pytest.mark.parametrize("message", DRIFTS)
def test_each_drifted_item_fails_the_contract_by_name(tmp_path, capsys, message):
    source = write_source(tmp_path, [DRIFTS[message]])
    assert contract.main(["--source", str(source)]) == 1
    assert message in capsys.readouterr().out


def test_all_drifted_items_are_told_at_once(tmp_path, capsys):
    """Each message alone would hide the others until the next build, ten minutes later."""
    chosen = [message for message in DRIFTS if message.startswith(("ForwardBatch.", "HookType", "flag --skip"))]
    (tmp_path / "sglang").mkdir()
    source = write_source(tmp_path, [DRIFTS[message] for message in chosen])
    assert contract.main(["--source", str(source)]) == 1
    told = capsys.readouterr().out
    assert len(chosen) == 3 and all(message in told for message in chosen)
    assert "3 drifted items" in told


def test_a_folder_without_sglang_fails_the_contract(tmp_path, capsys):
    assert contract.main(["--source", str(tmp_path)]) == 1
    assert "expected the folder of the sglang package" in capsys.readouterr().out
