"""The whole workflow on the toy target: real image, real server, a drafter that is really accepted, and what comes after.

The tests of this file share one run and stand in the order in which a person would do these things.
"""

import re
import subprocess

import pytest

from aerie import artifact, hidden
from conftest import ROOT, run, snakemake, toy_config

pytestmark = pytest.mark.image

RESULTS = ROOT / toy_config()["results_dir"]
AFTER_HIDDEN = {
    "capture_hidden", "train_drafter", "export_drafter", "check_export", "run_arm", "check_acceptance", "write_report",
    "write_manifest", "all",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(sif):
    """Run the workflow to its end once."""
    snakemake()
    return RESULTS


def planned(output):
    """Return {rule: count} of a dry run; empty where there is nothing to do."""
    if "Nothing to be done" in output:
        return {}
    table = output.split("Job stats:")[1].split("total")[0]
    return {rule: int(count) for rule, count in re.findall(r"^(\w+)\s+(\d+)$", table, re.MULTILINE)}


def test_the_drafter_is_accepted_and_changes_no_answer(finished):
    arm = artifact.read_json(finished / "arms" / "eagle3.json")
    baseline = artifact.read_json(finished / "arms" / "baseline.json")
    assert arm["summary"]["accept_length"] > 1.5
    ours = {request["id"]: request["output_ids"] for request in arm["passes"][0]["requests"]}
    assert ours == {request["id"]: request["output_ids"] for request in baseline["passes"][0]["requests"]}
    assert len(ours) == toy_config()["arms"]["max_prompts"]


def test_every_gate_of_every_stage_passed(finished):
    documents = [
        *(finished / "hidden").glob("*.json"), *(finished / "arms").glob("*.json"), finished / "drafter" / "check.json",
    ]  # fmt: skip
    gates = [(path, name, gate) for path in documents for name, gate in artifact.read_json(path)["gates"].items()]
    assert len(gates) >= 2 * 3 + 2 + 3 + 1 + 5
    assert all(gate["passed"] for _, _, gate in gates), gates
    assert artifact.read_json(finished / "hidden" / "00000.json")["gates"]["greedy_agreement"]["rows"] > 500


def test_served_acceptance_is_the_offline_figure(finished):
    parity = artifact.read_json(finished / "arms" / "parity.json")
    assert len(parity["prompts"]) == toy_config()["arms"]["max_prompts"]
    assert abs(parity["served_accept_length"] / parity["offline_accept_length"] - 1) < 0.02


def test_the_page_is_there_and_says_what_was_found(finished):
    page = (finished / "report" / "index.html").read_text()
    assert "<svg" in page and "http://" not in re.sub(r'xmlns(:\w+)?="[^"]+"|"http://www.w3.org[^"]*"', "", page)
    assert "speculation" in page.lower()


def test_the_manifest_covers_everything_and_sha256sum_accepts_it(finished):
    subprocess.run(["sha256sum", "--quiet", "--strict", "-c", artifact.MANIFEST], cwd=finished, check=True)
    assert "verify" not in planned(snakemake("-n").stdout)
    assert "files are as published" in snakemake("verify").stdout


def test_a_second_run_does_nothing(finished):
    assert planned(snakemake("-n").stdout) == {}


def test_every_published_file_can_be_rebuilt_by_the_command_that_verify_names(finished):
    commands = {
        artifact.rebuild_command(path).split(" -- ")[1].replace(f"{ROOT}/", "")
        for name in artifact.read_manifest(finished)
        if not (path := finished / name).name.endswith(artifact.SIDECAR)
    }
    output = snakemake("-n", "-f", "--", *sorted(commands)).stdout
    assert planned(output)["capture_hidden"] == 2 and planned(output)["export_drafter"] == 1


def test_a_flipped_byte_is_named_by_verify_and_refused_by_its_consumer(finished):
    shard = finished / "hidden" / "00001" / "shard-00000.safetensors"
    whole = shard.read_bytes()
    try:
        shard.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        said = snakemake("verify", check=False)
        assert said.returncode != 0
        assert "changed   hidden/00001/shard-00000.safetensors" in said.stdout
        assert "snakemake --cores 1 -f -- results/test/hidden/00001.json.sha256" in said.stdout
        assert "1 of " in said.stdout
        said = snakemake("-f", "--", "results/test/drafter/trained.safetensors.sha256", check=False)
        assert said.returncode != 0
        assert re.search(
            r"hidden/00001/shard-00000\.safetensors: sample \S+ changed since it was captured", said.stdout
        )
    finally:
        shard.write_bytes(whole)


def test_the_run_goes_on_after_the_damage_was_mended(finished):
    # The failed training of the test before took its outputs along, as Snakemake does; nothing else is planned.
    assert planned(snakemake("-n").stdout).keys() <= AFTER_HIDDEN - {"capture_hidden"}
    snakemake()
    assert "files are as published" in snakemake("verify").stdout


def test_a_removed_chunk_is_planned_alone_with_what_depends_on_it(finished):
    moved = finished / "hidden.moved.partial"
    moved.mkdir()
    names = ["00001", "00001.json", "00001.json.sha256"]
    try:
        for name in names:
            (finished / "hidden" / name).rename(moved / name)
        jobs = planned(snakemake("-n").stdout)
        assert set(jobs) == AFTER_HIDDEN
        assert jobs["capture_hidden"] == 1 and jobs["run_arm"] == 1
    finally:
        for name in names:
            (moved / name).rename(finished / "hidden" / name)
        moved.rmdir()


def test_states_of_both_chunks_are_those_of_one_capture(finished):
    chunks = {str(path): hidden.open_chunk(path) for path in sorted((finished / "hidden").glob("*.json"))}
    identity = hidden.require_one_identity(chunks)
    assert identity["layers"] == [1, 2, 3] and identity["dtype"] == "float32"
    held_out = [sample.id for chunk in chunks.values() for sample in chunk if sample.held_out]
    assert 8 <= len(held_out) <= 35


def test_snakemakes_own_report_holds_the_page(finished, tmp_path):
    snakemake("--report", str(tmp_path / "report.zip"))
    listed = run("python", "-m", "zipfile", "-l", tmp_path / "report.zip").stdout
    assert "index.html" in listed
