"""What Apptainer needs here: capabilities, versions, causes of failure. No image is built but a tiny one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aerie import container
from aerie.container import ContainerError

SCRIPTS = Path(container.__file__).parents[1]
HEALTHY = {
    "/proc/sys/user/max_user_namespaces": "96364\n",
    "/proc/sys/kernel/unprivileged_userns_clone": None,
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": None,
    "/etc/subuid": "root:100000:65536\n",
}


def status(bounding: int) -> str:
    """The lines of /proc/self/status around the bounding set."""
    return f"CapEff:\t000001ffffffffff\nCapBnd:\t{bounding:016x}\nCapAmb:\t0000000000000000\n"


@pytest.fixture
def fake_apptainer(tmp_path, monkeypatch):
    """Put a shell script named apptainer first on PATH; the test gives its text."""

    def install(script: str) -> Path:
        program = tmp_path / "bin/apptainer"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return program

    return install


@pytest.mark.parametrize(
    ("bounding", "lacks"),
    [
        (0x1FFFFFFFFFF, False),  # all 41 capabilities of a kernel whose last is number 40
        (0x1FFFEFFFFFF, True),  # CAP_SYS_RESOURCE, bit 24, withheld
        (0x1FFFFFFFFFF & ~1, True),
        (0x3FFFFFFFFFF, False),  # a bit above the kernel's last capability means nothing
        (0, True),
    ],
)
def test_a_withheld_capability_is_seen_in_the_bounding_set(bounding, lacks):
    assert container.lacks_capabilities(status(bounding), last_capability=40) is lacks


def test_a_status_without_bounding_set_is_refused():
    with pytest.raises(ContainerError, match="CapBnd"):
        container.lacks_capabilities("Name:\tpython\n", last_capability=40)


def test_restricted_root_runs_and_builds_in_a_user_namespace(monkeypatch):
    monkeypatch.setattr(container, "is_restricted_root", lambda: True)
    assert container.apptainer_environment() == {"APPTAINER_USERNS": "1"}
    assert container.build_options() == ["--fakeroot"]


def test_an_ordinary_user_needs_no_variable_and_no_option(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert container.apptainer_environment() == {}
    assert container.build_options() == []


def test_the_cache_folders_are_absolute_and_are_created_by_the_builder_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = container.apptainer_environment(".cache")
    folders = [Path(environment[name]) for name in ("APPTAINER_CACHEDIR", "APPTAINER_TMPDIR")]
    assert all(folder.is_absolute() and folder.is_relative_to(tmp_path / ".cache") for folder in folders)
    assert not Path(".cache").exists()
    container.create_apptainer_folders(environment)
    assert all(folder.is_dir() for folder in folders)


def test_importing_the_module_imports_the_standard_library_only():
    program = (
        "import sys; before = set(sys.modules); import aerie.container;"
        "print(*{name.split('.')[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=SCRIPTS, capture_output=True, text=True, check=True, env={}
    )
    assert answer.stdout.split() == ["aerie"]


def test_the_version_is_read_from_apptainers_own_words(fake_apptainer):
    fake_apptainer("echo apptainer version 1.3.6-2.el9")
    assert container.apptainer_version() == "1.3.6"


def test_an_old_apptainer_is_refused_with_both_versions(fake_apptainer):
    program = fake_apptainer("echo apptainer version 1.0.3")
    with pytest.raises(ContainerError, match=r"version 1\.0\.3, expected 1\.1 or newer; put a newer one") as error:
        container.apptainer_version()
    assert str(program) in str(error.value)


def test_an_apptainer_that_does_not_run_is_reported_with_its_own_words(fake_apptainer):
    fake_apptainer("echo libc.so.6: version GLIBC_2.38 not found >&2; exit 127")
    with pytest.raises(ContainerError, match="status 127: .*GLIBC_2.38 not found"):
        container.apptainer_version()


def test_a_missing_apptainer_names_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ContainerError, match="make setup"):
        container.apptainer_version()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"/proc/sys/user/max_user_namespaces": "0\n"}, "user.max_user_namespaces"),
        ({"/proc/sys/kernel/unprivileged_userns_clone": "0\n"}, "kernel.unprivileged_userns_clone"),
        ({"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n"}, "AppArmor"),
        ({"/etc/subuid": "alice:100000:65536\n"}, "usermod --add-subuids"),
        ({"/etc/subuid": None}, "usermod --add-subuids"),
    ],
)
def test_each_obstacle_is_named_with_its_remedy(change, words):
    (found,) = container.obstacles(HEALTHY | change, fuse_usable=True, has_squashfuse=True, restricted_root=True)
    assert words in found


def test_missing_fuse_and_squashfuse_are_both_named():
    found = container.obstacles(HEALTHY, fuse_usable=False, has_squashfuse=False, restricted_root=False)
    assert ["/dev/fuse" in found[0], "squashfuse" in found[1], len(found)] == [True, True, 2]


def test_a_healthy_machine_has_no_obstacles():
    assert container.obstacles(HEALTHY, fuse_usable=True, has_squashfuse=True, restricted_root=True) == []


def test_a_failed_smoke_test_shows_the_command_apptainers_words_and_the_likely_cause(
    fake_apptainer, tmp_path, monkeypatch, capsys
):
    fake_apptainer('test "$1" = --version && echo apptainer version 1.4.5 && exit; echo no user namespace >&2; exit 3')
    monkeypatch.setattr(container, "obstacles_here", lambda: ["user namespaces are switched off"])
    assert container.main(["--cache-dir", str(tmp_path / "cache")]) == 1
    said = capsys.readouterr().err
    for words in ("`apptainer build", "status 3", "no user namespace", "likely: user namespaces are switched off"):
        assert words in said
    assert list((tmp_path / "cache/apptainer/tmp").iterdir()) == []


@pytest.mark.skipif(shutil.which("apptainer") is None, reason="needs Apptainer")
def test_the_real_apptainer_builds_and_runs_a_tiny_image(tmp_path, capsys):
    assert container.main(["--cache-dir", str(tmp_path)]) == 0
    assert "builds and runs images here" in capsys.readouterr().out
