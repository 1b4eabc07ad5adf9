"""Locks, wheelhouse, base, definition and content digest of the image; real builds are of tiny images."""

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

import build_image
from aerie import image
from aerie.artifact import ArtifactError
from aerie.container import ContainerError, apptainer_environment, create_apptainer_folders
from aerie.image import Entry, Pin

ROOT = Path(__file__).parents[1]
HASH = "a" * 64
DEFINITION = (ROOT / "containers/sglang.def").read_text()
VALUES = {
    "bootstrap": "localimage",
    "base": "rootfs/",
    "base_sha256": "b" * 64,
    "python": "3.11",
    "variant": "cpu",
    "contract_options": "",
    "sglang_version": "0.5.20",
    "lock_sha256": "c" * 64,
}


def fake_program(folder: Path, monkeypatch, name: str, script: str) -> None:
    """Put a shell script of this name first on PATH."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def requirement_names(path: Path) -> dict[str, str | None]:
    """Return {name: version or None} of an .in file."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    pairs = [line.partition("==") for line in lines if line]
    return {image.canonical_name(name): version or None for name, _, version in pairs}


# ----------------------------------------------------------------------------------------------------
# Locks


def test_a_lock_is_read_with_its_hashes_over_several_lines(tmp_path):
    lock = tmp_path / "cpu.lock"
    lock.write_text(
        f"# made by uv\nFoo_Bar==1.2 \\\n    --hash=sha256:{HASH} \\\n    --hash=sha256:{'d' * 64}\n# why\n"
        f"torch==2.13.0+cpu \\\n    --hash=sha256:{HASH}\n"
    )
    assert image.read_lock(lock) == {
        "foo-bar": Pin("foo-bar", "1.2", frozenset({HASH, "d" * 64})),
        "torch": Pin("torch", "2.13.0+cpu", frozenset({HASH})),
    }


def test_every_line_of_a_lock_without_version_or_hash_is_reported(tmp_path):
    lock = tmp_path / "cpu.lock"
    lock.write_text(f"good==1 --hash=sha256:{HASH}\nunhashed==2\nunpinned>=3 --hash=sha256:{HASH}\n-r other.txt\n")
    with pytest.raises(ContainerError) as error:
        image.read_lock(lock)
    lines = str(error.value).splitlines()
    assert len(lines) == 3 and all("expected NAME==VERSION --hash=sha256" in line for line in lines)
    assert [word in text for word, text in zip(("unhashed==2", "unpinned>=3", "-r other.txt"), lines, strict=True)]


def test_a_lock_that_pins_another_sglang_is_refused_with_both_remedies():
    pins = {"sglang": Pin("sglang", "0.5.19", frozenset({HASH}))}
    with pytest.raises(ContainerError, match="pins sglang 0.5.19, container.sglang_version asks for 0.5.20") as error:
        image.check_sglang_version(Path("containers/cpu.lock"), pins, "0.5.20")
    assert "bash envs/lock.sh" in str(error.value) and "containers/cpu.in" in str(error.value)
    image.check_sglang_version(Path("containers/cpu.lock"), pins, "0.5.19")


@pytest.mark.parametrize("stem", ["envs/host", "containers/cpu", "containers/cuda"])
def test_each_lock_has_what_its_input_file_asks_for(stem):
    pins = image.read_lock(ROOT / f"{stem}.lock")
    wanted = requirement_names(ROOT / f"{stem}.in")
    if stem != "containers/cuda":
        del wanted["torch"]  # in the two locks of torch
    found = {name: pins[name].version if name in pins else "not locked" for name in wanted}
    assert found == {name: version or found[name] for name, version in wanted.items()}


def test_the_locks_agree_with_each_other_and_with_the_config():
    cpu, cuda, host = (image.read_lock(ROOT / path) for path in ("containers/cpu.lock", "containers/cuda.lock", "envs/host.lock"))  # fmt: skip
    torch_cpu, torch_cuda = (image.read_lock(ROOT / f"envs/torch-{build}.lock") for build in ("cpu", "cuda"))
    asked = {requirement_names(ROOT / f"{stem}.in")["torch"] for stem in ("envs/host", "containers/cpu")}
    assert asked == {torch_cuda["torch"].version} == {cuda["torch"].version}
    assert torch_cpu["torch"].version == torch_cuda["torch"].version + "+cpu"
    assert "torch" not in cpu and "torch" not in host
    assert cpu["triton"] == torch_cuda["triton"]
    assert cpu["transformers"].version == host["transformers"].version == cuda["transformers"].version
    pin = yaml.safe_load((ROOT / "config.yaml").read_text())["container"]["sglang_version"]
    assert cpu["sglang"].version == cuda["sglang"].version == pin


def test_no_lock_names_a_registry():
    for lock in [*ROOT.glob("envs/*.lock"), *ROOT.glob("containers/*.lock")]:
        assert re.search(r"https?://|--index|--find-links", lock.read_text()) is None, lock


# ----------------------------------------------------------------------------------------------------
# Wheels


def test_a_wheelhouse_is_compared_with_its_lock_wheel_by_wheel(tmp_path):
    for name, text in {"good-1-py3-none-any.whl": "good", "Bad_One-1-py3-none-any.whl": "bad", "extra-1-py3-none-any.whl": ""}.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    good = frozenset({hashlib.sha256(b"good").hexdigest()})
    pins = {"good": Pin("good", "1", good), "bad-one": Pin("bad-one", "1", good), "gone": Pin("gone", "4", good)}
    defects = image.wheel_defects(tmp_path, pins)
    assert len(defects) == 3
    for words in ("Bad_One-1-py3-none-any.whl: its sha256 is not in the lock", "extra-1", "no wheel of gone 4"):
        assert any(words in defect for defect in defects)
    assert image.wheel_defects(tmp_path, pins | {"extra": pins["good"]}) != []


def test_wheels_are_chosen_for_the_images_system_not_for_the_hosts():
    options = image.platform_options()
    assert options[:6] == ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
    assert "manylinux_2_36_x86_64" in options and "manylinux_2_37_x86_64" not in options
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64"} <= set(options)


def failed_pip(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(["pip"], 1, "", words)


class FakeIndex:
    """Stands for `image.download`: writes a wheel per pin of a lock, or fails as pip does."""

    def __init__(self, failures: dict[str, str]):
        self.failures = failures
        self.asked: list[str] = []

    def __call__(self, lock: Path, folder: Path) -> subprocess.CompletedProcess[str]:
        self.asked.append(lock.name)
        if lock.name in self.failures:
            return failed_pip(self.failures[lock.name])
        for pin in image.read_lock(lock).values():
            (folder / f"{pin.name}-{pin.version}-py3-none-any.whl").write_text(pin.name)
        return subprocess.CompletedProcess(["pip"], 0, "", "")


@pytest.fixture
def locks(tmp_path):
    """A lock without torch and the two locks that complete it."""
    texts = {"cpu.lock": "sglang==0.5.20", "torch-cpu.lock": "torch==2.13.0+cpu", "torch-cuda.lock": "torch==2.13.0"}
    for name, pin in texts.items():
        digest = hashlib.sha256(pin.split("==")[0].encode()).hexdigest()
        (tmp_path / name).write_text(f"{pin} \\\n    --hash=sha256:{digest}\n")
    return [tmp_path / name for name in texts]


def test_the_cpu_build_of_torch_is_taken_where_pip_finds_it_and_nothing_is_downloaded_twice(
    locks, tmp_path, monkeypatch
):
    index = FakeIndex({})
    monkeypatch.setattr(image, "download", index)
    first = image.fetch_wheelhouse(*locks, tmp_path / "cache", lambda text: None)
    again = image.fetch_wheelhouse(*locks, tmp_path / "cache", lambda text: None)
    assert first == again and index.asked == ["cpu.lock", "torch-cpu.lock"]
    assert first.pins["torch"].version == "2.13.0+cpu"
    assert {wheel.name.split("-")[0] for wheel in first.folder.iterdir()} == {"sglang", "torch"}


@pytest.mark.parametrize(
    "words",
    [
        "ERROR: No matching distribution found for torch==2.13.0+cpu",
        "ERROR: Cannot install torch==2.13.0+cpu because these package versions have conflicting dependencies.",
    ],
)
def test_the_index_build_of_torch_is_taken_where_there_is_no_cpu_build(words, locks, tmp_path, monkeypatch):
    index = FakeIndex({"torch-cpu.lock": words})
    monkeypatch.setattr(image, "download", index)
    found = image.fetch_wheelhouse(*locks, tmp_path / "cache", lambda text: None)
    assert found.pins["torch"].version == "2.13.0" and found.locks == (locks[0], locks[2])


def test_another_failure_of_pip_is_never_taken_for_a_missing_cpu_build(locks, tmp_path, monkeypatch):
    monkeypatch.setattr(
        image, "download", FakeIndex({"torch-cpu.lock": "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"})
    )
    with pytest.raises(ContainerError, match="DO NOT MATCH THE HASHES"):
        image.fetch_wheelhouse(*locks, tmp_path / "cache", lambda text: None)
    assert list((tmp_path / "cache/wheelhouse").iterdir()) == []


def test_a_kept_wheelhouse_with_a_flipped_byte_is_downloaded_anew(locks, tmp_path, monkeypatch):
    index = FakeIndex({})
    monkeypatch.setattr(image, "download", index)
    found = image.fetch_wheelhouse(*locks, tmp_path / "cache", lambda text: None)
    next(found.folder.glob("sglang*.whl")).write_text("sglanG")
    image.fetch_wheelhouse(*locks, tmp_path / "cache", lambda text: None)
    assert index.asked == ["cpu.lock", "torch-cpu.lock"] * 2
    assert image.wheel_defects(found.folder, found.pins) == []


def test_our_own_wheels_have_the_same_bytes_whenever_they_are_built(tmp_path):
    wheels = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        wheels.append(image.build_wheel(ROOT / "containers/capture", tmp_path / name))
    assert wheels[0].name.startswith("aerie_capture-")
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    assert not (ROOT / "containers/capture/build").exists()


def test_a_distribution_that_does_not_build_is_named(tmp_path):
    (tmp_path / "broken").mkdir()
    with pytest.raises(ContainerError, match="build the wheel of .*broken"):
        image.build_wheel(tmp_path / "broken", tmp_path)


# ----------------------------------------------------------------------------------------------------
# Base


def test_a_base_is_mmdebstraps_or_pinned_by_digest():
    pinned = f"docker://docker.io/library/python@sha256:{HASH}"
    assert image.parse_base("auto", has_mmdebstrap=True) == ("mmdebstrap", "bookworm")
    assert image.parse_base("mmdebstrap", has_mmdebstrap=False) == ("mmdebstrap", "bookworm")
    assert image.parse_base(pinned, has_mmdebstrap=False) == ("docker", pinned.removeprefix("docker://"))
    assert image.parse_base("kept/bookworm.tar", has_mmdebstrap=False) == ("tar", "kept/bookworm.tar")


@pytest.mark.parametrize("tagged", ["docker://python:3.11-bookworm", "docker://python", f"docker://python@sha256:{'a' * 63}"])  # fmt: skip
def test_a_base_by_tag_is_refused_with_the_reason(tagged):
    with pytest.raises(ContainerError, match="a tag can name another image tomorrow"):
        image.parse_base(tagged, has_mmdebstrap=True)


def test_an_unknown_base_is_refused_with_what_is_allowed():
    with pytest.raises(ContainerError, match="allowed are auto, mmdebstrap"):
        image.parse_base("debian", has_mmdebstrap=True)


def test_auto_without_mmdebstrap_says_what_to_set():
    with pytest.raises(ContainerError, match="mmdebstrap is not on PATH.*docker://NAME@sha256"):
        image.parse_base("auto", has_mmdebstrap=False)


def test_the_base_comes_from_the_mirrors_that_the_host_uses(tmp_path, monkeypatch):
    lines = [
        "Debian\thttp://mirror.example/debian/",
        "Debian\thttp://mirror.example/debian/",
        "Debian-Security\thttp://mirror.example/security/",
        "Debian Backports\thttp://mirror.example/debian/",
    ]
    (tmp_path / "targets").write_text("\n".join(lines) + "\n")
    fake_program(tmp_path / "bin", monkeypatch, "apt-get", f"cat '{tmp_path}/targets'")
    assert image.debian_sources() == [
        "deb http://mirror.example/debian/ bookworm main",
        "deb http://mirror.example/debian/ bookworm-updates main",
        "deb http://mirror.example/security/ bookworm-security main",
    ]


def test_only_installed_packages_are_listed():
    status = (
        "Package: tar\nStatus: install ok installed\nVersion: 1.34\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 2\n\n"
        "Package: adduser\nStatus: install ok installed\nVersion: 3.134\nDescription: add\n more\n"
    )
    assert image.installed_packages(status) == {"adduser": "3.134", "tar": "1.34"}


def make_base(archive: Path) -> None:
    """Stand for mmdebstrap: a tar with a package list, a shadow file and a device."""
    root = archive.parent / "root"
    (root / "var/lib/dpkg").mkdir(parents=True)
    (root / "dev").mkdir()
    (root / "dev/console").write_text("")
    (root / "var/lib/dpkg/status").write_text("Package: tar\nStatus: install ok installed\nVersion: 1.34\n")
    with tarfile.open(archive, "w") as tar:
        tar.add(root, arcname=".")


def test_a_base_is_made_once_and_kept_with_its_digest_and_its_packages(tmp_path, monkeypatch):
    fake_program(tmp_path / "bin", monkeypatch, "mmdebstrap", "exit 1")
    monkeypatch.setattr(image, "bootstrap_debian", make_base)
    first = image.fetch_base("auto", tmp_path / "cache", lambda text: None)
    monkeypatch.setattr(image, "bootstrap_debian", lambda archive: pytest.fail("made twice"))
    assert image.fetch_base("auto", tmp_path / "cache", lambda text: None) == first
    assert first.archive.with_suffix(".packages.txt").read_text() == "tar 1.34\n"
    assert first.sha256 == hashlib.sha256(first.archive.read_bytes()).hexdigest()
    assert first.sha256[:16] in first.archive.name
    pinned = image.fetch_base(str(first.archive), tmp_path / "elsewhere", lambda text: None)
    assert pinned == dataclasses.replace(first, kind="tar")


def test_a_kept_base_with_a_flipped_byte_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(image, "bootstrap_debian", make_base)
    base = image.fetch_base("mmdebstrap", tmp_path, lambda text: None)
    data = bytearray(base.archive.read_bytes())
    data[600] ^= 1
    base.archive.write_bytes(data)
    with pytest.raises(ArtifactError, match="changed since it was published"):
        image.fetch_base("mmdebstrap", tmp_path, lambda text: None)


def test_a_failing_mmdebstrap_leaves_no_base(tmp_path, monkeypatch):
    fake_program(tmp_path / "bin", monkeypatch, "mmdebstrap", "exit 25")
    with pytest.raises(ContainerError, match="mmdebstrap failed with status 25"):
        image.fetch_base("auto", tmp_path / "cache", lambda text: None)
    assert list((tmp_path / "cache/base").iterdir()) == []


def test_a_base_is_unpacked_without_its_devices(tmp_path):
    make_base(tmp_path / "base.tar")
    image.unpack_base(tmp_path / "base.tar", tmp_path / "rootfs")
    assert (tmp_path / "rootfs/var/lib/dpkg/status").is_file()
    assert list((tmp_path / "rootfs/dev").iterdir()) == []


# ----------------------------------------------------------------------------------------------------
# Definition and build


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_the_definition_renders_for_both_variants(variant):
    options = "" if variant == "cpu" else "--no-import"
    text = image.render_definition(DEFINITION, VALUES | {"variant": variant, "contract_options": options})
    assert "{{" not in text.replace("{{ names }}", "")
    assert f"if [ {variant} = cpu ]; then" in text
    assert ("aerie_capture.contract --no-import" in text) == (variant == "cuda")
    assert text.count("SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1") == 1


def test_a_name_without_value_and_a_value_without_place_are_refused():
    with pytest.raises(ContainerError, match=r"no value for \['python'\], no place for \['pyton'\]"):
        image.render_definition("%post\n  {{ python }}\n", {"pyton": "3.11"})


def test_variables_are_set_for_a_block_only(monkeypatch):
    monkeypatch.setenv("AERIE_KEPT", "before")
    with image.environment_set({"AERIE_KEPT": "during", "AERIE_NEW": "1"}):
        assert (os.environ["AERIE_KEPT"], os.environ["AERIE_NEW"]) == ("during", "1")
    assert os.environ["AERIE_KEPT"] == "before" and "AERIE_NEW" not in os.environ


# spython leaves the pipe of Apptainer's error output to the garbage collector.
unclosed_pipe = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed file")
needs_apptainer = pytest.mark.skipif(shutil.which("apptainer") is None, reason="needs Apptainer")


def build_tiny(tmp_path: Path, test: str, said: list[str]) -> Path:
    """Build an image of the host's shell through the function that builds the real one."""
    from aerie.container import _tiny_root

    environment = apptainer_environment(tmp_path / "cache")
    create_apptainer_folders(environment)
    work = tmp_path / f"work-{len(list(tmp_path.iterdir()))}"
    _tiny_root(work / "rootfs")
    (work / "sglang.def").write_text(
        f"Bootstrap: localimage\nFrom: rootfs/\n%post\n    echo made > /file\n%test\n    {test}\n%environment\n    export AERIE=1\n"
    )
    image.run_build(work, tmp_path / "tiny.sif", environment, said.append)
    return tmp_path / "tiny.sif"


@needs_apptainer
@unclosed_pipe
def test_a_failing_test_section_fails_the_build_shows_why_and_leaves_no_image(tmp_path):
    said = []
    with pytest.raises(ContainerError, match="apptainer build failed"):
        build_tiny(tmp_path, "echo LogitsProcessor.forward drifted; exit 1", said)
    assert not (tmp_path / "tiny.sif").exists()
    assert "build: LogitsProcessor.forward drifted" in said


@needs_apptainer
@unclosed_pipe
def test_two_builds_of_the_same_content_have_one_content_digest(tmp_path):
    digests = []
    for name in ("first", "second"):
        sif = build_tiny(tmp_path, "true", []).rename(tmp_path / f"{name}.sif")
        with image.image_opened(sif, tmp_path / name) as root:
            entries = image.list_entries(root)
        digests.append(image.content_digest(entries))
    assert digests[0] == digests[1]
    assert (tmp_path / "first.sif").read_bytes() != (tmp_path / "second.sif").read_bytes()
    paths = {entry.path for entry in entries}
    assert {"bin/sh", "file", ".singularity.d/env/90-environment.sh"} <= paths
    assert ".singularity.d/labels.json" not in paths


@needs_apptainer
@unclosed_pipe
def test_an_image_unpacked_where_fuse_is_closed_lists_the_same_files(tmp_path, monkeypatch):
    sif = build_tiny(tmp_path, "true", [])
    listings = []
    for fuse in (True, False):
        if not fuse:
            monkeypatch.setattr(os, "access", lambda path, mode: False)
        with image.image_opened(sif, tmp_path / f"fuse-{fuse}") as root:
            listings.append(sorted(image.list_entries(root)))
    assert listings[0] == listings[1]
    assert not os.path.ismount(tmp_path / "fuse-True")


# ----------------------------------------------------------------------------------------------------
# Content digest


def test_the_content_digest_ignores_the_order_of_the_files_and_nothing_else():
    entries = [Entry("a", 0o644, HASH), Entry("b", 0o755, "d" * 64), Entry("c", 0o777, "-> a")]
    digest = image.content_digest(entries)
    assert image.content_digest(reversed(entries)) == digest
    changes = [Entry("a", 0o600, HASH), Entry("A", 0o644, HASH), Entry("a", 0o644, "e" * 64)]
    others = {image.content_digest([change, *entries[1:]]) for change in changes}
    others |= {image.content_digest([*entries[:2], Entry("c", 0o777, "-> b")]), image.content_digest(entries[1:])}
    assert len(others | {digest}) == 6


def test_files_links_and_linked_folders_are_listed_once_and_apptainers_own_files_are_not(tmp_path):
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/sh").write_text("shell")
    (tmp_path / "usr/bin/sh").chmod(0o755)
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "dangling").symlink_to("/nowhere")
    (tmp_path / ".singularity.d/env").mkdir(parents=True)
    for name in ("labels.json", "Singularity", "env/01-base.sh", "env/90-environment.sh"):
        (tmp_path / ".singularity.d" / name).write_text(name)
    found = {entry.path: (entry.mode & 0o700, entry.content) for entry in image.list_entries(tmp_path)}
    assert found.keys() == {"usr/bin/sh", "bin", "dangling", ".singularity.d/env/90-environment.sh"}
    assert found["usr/bin/sh"] == (0o700, hashlib.sha256(b"shell").hexdigest())
    assert (found["bin"][1], found["dangling"][1]) == ("-> usr/bin", "-> /nowhere")


# ----------------------------------------------------------------------------------------------------
# The CLI


def test_the_cli_refuses_a_lock_of_another_sglang_before_it_fetches_anything(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build_image, "apptainer_version", lambda: "1.4.5")
    flags = {
        "--variant": "cpu",
        "--sglang-version": "0.5.23",
        "--lock": ROOT / "containers/cpu.lock",
        "--cache-dir": tmp_path / "cache",
        "--output": tmp_path / "out/sglang.sif",
        "--record": tmp_path / "out/image.json",
    }
    status = build_image.main([str(word) for flag in flags.items() for word in flag])
    assert status == 1
    assert "pins sglang 0.5.20, container.sglang_version asks for 0.5.23" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists() and list((tmp_path / "out").iterdir()) == []
