"""What Apptainer needs on this machine.

`apptainer_environment` gives the variables that every `apptainer` call needs, the calls that Snakemake
makes included; the Snakefile asks for them while it is parsed, so this module is cheap to import and
uses the standard library only. `smoke_test` builds and runs a tiny image and says why it cannot:

    PYTHONPATH=scripts python -m aerie.container --cache-dir .cache
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

MINIMUM_VERSION = (1, 1)  # the first Apptainer that builds and runs without set-user-id helpers
TINY_DEFINITION = """\
Bootstrap: localimage
From: rootfs/

%post
    echo built > /proof
"""


class ContainerError(RuntimeError):
    """Apptainer, the image or one of its ingredients is not usable; the message says what to do."""


def lacks_capabilities(status: str, last_capability: int) -> bool:
    """Say whether a process may never hold some capability of its kernel.

    `status` is the text of /proc/self/status, `last_capability` the number in
    /proc/sys/kernel/cap_last_cap. Some virtual machines and containers take CAP_SYS_RESOURCE and others
    from root's bounding set.
    """
    found = re.search(r"^CapBnd:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if found is None:
        raise ContainerError("/proc/self/status: no line 'CapBnd: <hex digits>'; Aerie needs Linux with /proc")
    every_capability = (1 << (last_capability + 1)) - 1
    return int(found[1], 16) & every_capability != every_capability


def is_restricted_root() -> bool:
    """Say whether this is root on a machine that withholds capabilities from root.

    Apptainer run by root asks for all capabilities and stops when one is withheld; in a user namespace,
    the way ordinary users run it, it does not.
    """
    if os.geteuid() != 0:
        return False
    last_capability = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    return lacks_capabilities(Path("/proc/self/status").read_text(), last_capability)


def apptainer_environment(cache_dir: Path | str | None = None) -> dict[str, str]:
    """Return the environment variables for every `apptainer` call on this machine; writes nothing.

    With `cache_dir` Apptainer keeps its downloads and its unpacked images below that folder instead of
    in the home folder and /tmp; `build_image` and `smoke_test` create both folders.
    """
    environment = {}
    if is_restricted_root():
        environment["APPTAINER_USERNS"] = "1"
    if cache_dir is not None:
        folder = Path(cache_dir).absolute() / "apptainer"
        environment["APPTAINER_CACHEDIR"] = str(folder / "cache")
        environment["APPTAINER_TMPDIR"] = str(folder / "tmp")
    return environment


def create_apptainer_folders(environment: Mapping[str, str]) -> None:
    """Create the folders that `apptainer_environment` names; Apptainer does not."""
    for name in ("APPTAINER_CACHEDIR", "APPTAINER_TMPDIR"):
        if name in environment:
            Path(environment[name]).mkdir(parents=True, exist_ok=True)


def build_options() -> list[str]:
    """Return the options that `apptainer build` needs on this machine."""
    return ["--fakeroot"] if is_restricted_root() else []


def apptainer_version() -> str:
    """Return the version of the `apptainer` on PATH, such as "1.4.5"; raise where it is missing or too old."""
    program = shutil.which("apptainer")
    if program is None:
        raise ContainerError("no apptainer on PATH; install it with: make setup")
    answer = subprocess.run([program, "--version"], capture_output=True, text=True)
    found = re.search(r"\d+(\.\d+)+", answer.stdout)
    if answer.returncode != 0 or found is None:
        raise ContainerError(
            f"{program} --version failed with status {answer.returncode}: {(answer.stderr or answer.stdout).strip()}"
        )
    version = found[0]
    if tuple(map(int, version.split(".")[:2])) < MINIMUM_VERSION:
        needed = ".".join(map(str, MINIMUM_VERSION))
        raise ContainerError(
            f"{program} is version {version}, expected {needed} or newer; put a newer one first on PATH "
            "(module load, conda-forge, your distribution)"
        )
    return version


def obstacles(
    read: Mapping[str, str | None], fuse_usable: bool, has_squashfuse: bool, restricted_root: bool
) -> list[str]:
    """Return in words what may keep Apptainer from working, or slow it down, on a machine with these settings.

    `read` maps the paths of `SETTINGS` to their text, None where the kernel does not have them.
    """

    def setting(path: str) -> str | None:
        text = read.get(path)
        return None if text is None else text.strip()

    found = []
    if setting("/proc/sys/user/max_user_namespaces") == "0":
        found.append("user namespaces are switched off; as root: sysctl -w user.max_user_namespaces=15000")
    if setting("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        found.append("user namespaces are for root only; as root: sysctl -w kernel.unprivileged_userns_clone=1")
    if setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        found.append(
            "AppArmor allows user namespaces to programs with a profile only; install Apptainer's own package, "
            "which brings one, or as root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        )
    if restricted_root and not re.search(r"^(root|0):", setting("/etc/subuid") or "", re.MULTILINE):
        found.append(
            "root has no subordinate ids, which a build in a user namespace needs; "
            "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 root"
        )
    if not fuse_usable:
        found.append(
            "/dev/fuse is missing or closed to this user, so images cannot be mounted; as root: modprobe fuse && "
            "chmod 666 /dev/fuse, or, slow: export APPTAINER_UNSQUASH=1, and every job unpacks its image"
        )
    if not has_squashfuse:
        found.append("no squashfuse on PATH, so every job unpacks its image; install the package squashfuse")
    return found


SETTINGS = (
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/kernel/unprivileged_userns_clone",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
    "/etc/subuid",
)


def obstacles_here() -> list[str]:
    """Return the obstacles on this machine."""
    return obstacles(
        read={path: Path(path).read_text() if Path(path).is_file() else None for path in SETTINGS},
        fuse_usable=os.access("/dev/fuse", os.R_OK | os.W_OK),
        has_squashfuse=any(map(shutil.which, ("squashfuse_ll", "squashfuse"))),
        restricted_root=is_restricted_root(),
    )


def _tiny_root(folder: Path) -> None:
    """Make a root file system of the host's /bin/sh and the libraries it is linked to."""
    for name in ("bin", "dev", "etc", "proc", "root", "sys", "tmp", "var/tmp"):
        (folder / name).mkdir(parents=True)
    libraries = subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True, check=True).stdout
    for file in ["/bin/sh", *re.findall(r"(/\S+) \(0x", libraries)]:
        target = folder / file.removeprefix("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    (folder / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\n")


def smoke_test(cache_dir: Path) -> list[str]:
    """Build and run a tiny image the way the workflow builds and runs its own.

    Returns the obstacles that did not stop it; raises ContainerError with the likely causes when it fails.
    """
    apptainer_version()
    environment = apptainer_environment(cache_dir)
    create_apptainer_folders(environment)
    with tempfile.TemporaryDirectory(dir=environment["APPTAINER_TMPDIR"]) as work:
        _tiny_root(Path(work, "rootfs"))
        Path(work, "tiny.def").write_text(TINY_DEFINITION)
        for command in (
            ["apptainer", "build", *build_options(), "tiny.sif", "tiny.def"],
            ["apptainer", "exec", "tiny.sif", "/bin/sh", "-c", "read proof < /proof && test $proof = built"],
        ):
            answer = subprocess.run(command, cwd=work, env=os.environ | environment, capture_output=True, text=True)
            if answer.returncode != 0:
                causes = [f"  likely: {cause}" for cause in obstacles_here()]
                said = [f"  {line}" for line in (answer.stdout + answer.stderr).splitlines()[-12:]]
                raise ContainerError(
                    "\n".join([f"`{' '.join(command)}` failed with status {answer.returncode}:", *said, *causes])
                )
    return obstacles_here()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build and run a tiny image; say what is wrong with Apptainer here.")
    parser.add_argument("--cache-dir", type=Path, required=True, help="where Apptainer's temporary files go")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_args(argv)
    try:
        warnings = smoke_test(arguments.cache_dir)
    except ContainerError as error:
        print(f"apptainer: ERROR: {error}", file=sys.stderr)
        return 1
    for warning in warnings:
        print(f"apptainer: note: {warning}", file=sys.stderr)
    print("apptainer: builds and runs images here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
