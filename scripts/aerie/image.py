"""The SGLang image: a base, the wheels of a lock and our own plugins -> one Apptainer file.

    mmdebstrap, or a base pinned by digest ──────┐
    containers/<variant>.lock ──▶ wheelhouse ────┼──▶ apptainer build ──▶ results/…/container/sglang.sif
    containers/capture, containers/cpu_kernels ──┘    (offline)           results/…/container/image.json

Everything is fetched outside, checked against hashes and kept below `<cache_dir>/container`; the build
itself needs no network. An Apptainer file carries time stamps and an id of its own, so two builds of one
lock differ in their sha256; they agree in the content digest, which covers every file's path, mode and bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spython.main import Client

from aerie.artifact import check, digest_of, publish, sha256_file, write_text
from aerie.container import ContainerError, apptainer_environment, build_options, create_apptainer_folders

SUITE = "bookworm"  # Debian 12
PYTHON = "3.11"  # bookworm's; the locks of the image are made for it
GLIBC_MINOR = 36  # bookworm's C library is 2.36: newer wheels do not run on it
# What the wheels expect of the system, and ps for people who look into a running container.
BASE_PACKAGES = ("python3", "python3-venv", "libgomp1", "libnuma1", "ca-certificates", "procps")
# What the host or the installation itself leaves behind, of no use in a read-only image and not the same twice.
LEFTOVERS = (
    *("etc/hostname", "etc/resolv.conf", "etc/apt/sources.list", "var/log/*", "var/cache/debconf/*"),
    "usr/share/python3/debpython/__pycache__",
)
EPOCH = "1735689600"  # 2025-01-01, the time of every file that would otherwise carry the time of the build
SQUASHFS_ARGUMENTS = "-comp zstd -Xcompression-level 3"  # as small as gzip's default, and several times faster

# What pip says when it finds none of the builds in torch-cpu.lock; the second where a constraints file names torch.
NO_CPU_BUILD = ("No matching distribution found for torch==", "Cannot install torch==")

# Apptainer writes its own files into the image; of those only what comes from our definition is content.
APPTAINER_FOLDER = ".singularity.d"
APPTAINER_CONTENT = (
    ".singularity.d/env/90-environment.sh",
    ".singularity.d/env/91-environment.sh",
    ".singularity.d/runscript",
    ".singularity.d/test",
)

Say = Callable[[str], None]


# ----------------------------------------------------------------------------------------------------
# Locks


@dataclass(frozen=True)
class Pin:
    """One distribution of a lock: its version and the sha256 of every file that may stand for it."""

    name: str
    version: str
    hashes: frozenset[str]


def canonical_name(name: str) -> str:
    """Return the name under which the package index knows a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, Pin]:
    """Return {name: pin} of a lock; raise ContainerError for a line without version or hash."""
    pins, defects = {}, []
    for entry in re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n?", "", path.read_text())).splitlines():
        if not entry.strip():
            continue
        found = re.fullmatch(
            r"(?P<name>[\w.-]+)==(?P<version>[^\s;]+)(?P<hashes>(?:\s+--hash=sha256:[0-9a-f]{64})+)\s*", entry
        )
        if found is None:
            defects.append(
                f"{path}: expected NAME==VERSION --hash=sha256:…, found {entry.split(' --hash')[0].strip()!r}"
            )
            continue
        name = canonical_name(found["name"])
        pins[name] = Pin(name, found["version"], frozenset(re.findall(r"sha256:(\w+)", found["hashes"])))
    if defects:
        raise ContainerError("\n".join(defects))
    return pins


def check_sglang_version(lock: Path, pins: Mapping[str, Pin], expected: str) -> None:
    """Refuse a lock that does not pin the SGLang that the config names."""
    found = pins["sglang"].version if "sglang" in pins else "no sglang"
    if found != expected:
        source = lock.with_suffix(".in")
        raise ContainerError(
            f"{lock}: pins sglang {found}, container.sglang_version asks for {expected}; "
            f"set that key to {found}, or put sglang=={expected} into {source} and run: bash envs/lock.sh"
        )


# ----------------------------------------------------------------------------------------------------
# Wheels


def platform_options() -> list[str]:
    """Return the pip options that choose wheels for the image, whatever Python and system the host has."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC_MINOR, 4, -1)]
    tags += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    options = ["--python-version", PYTHON, "--implementation", "cp", "--abi", "cp" + PYTHON.replace(".", "")]
    return options + [word for tag in tags for word in ("--platform", tag)]


def pip(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run this Python's pip; the caller looks at the status."""
    command = [sys.executable, "-m", "pip", *map(str, words)]
    environment = os.environ | {"SOURCE_DATE_EPOCH": EPOCH, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def download(lock: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Download the wheels of a lock into a folder; pip compares each with the lock's hashes."""
    return pip(
        *("download", "-qq", "--require-hashes", "--no-deps", "--only-binary", ":all:"),
        *platform_options(),
        *("--dest", folder, "--requirement", lock),
    )


def refuse_failed_pip(answer: subprocess.CompletedProcess[str], what: str) -> None:
    """Raise ContainerError with pip's own words where it failed."""
    if answer.returncode != 0:
        raise ContainerError(f"pip could not {what}:\n{(answer.stderr or answer.stdout).strip()}")


def wheel_defects(folder: Path, pins: Mapping[str, Pin]) -> list[str]:
    """Compare a wheelhouse with the pins: every pin has one wheel with an allowed sha256, nothing is left over."""
    wheels: dict[str, list[Path]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        wheels.setdefault(canonical_name(wheel.name.split("-")[0]), []).append(wheel)
    defects = [f"{folder}: no wheel of {pins[name].name} {pins[name].version}" for name in pins.keys() - wheels.keys()]
    for name, files in wheels.items():
        if name not in pins or len(files) > 1:
            defects += [f"{file}: not in the lock, or there twice" for file in files]
        elif sha256_file(files[0]) not in pins[name].hashes:
            defects.append(f"{files[0]}: its sha256 is not in the lock")
    return sorted(defects)


@dataclass(frozen=True)
class Wheelhouse:
    """A folder with the wheels of some locks, all checked against their hashes."""

    folder: Path
    locks: tuple[Path, ...]
    pins: dict[str, Pin]
    bytes: int


def _fill_wheelhouse(folder: Path, locks: list[Path]) -> Wheelhouse | list[str]:
    pins: dict[str, Pin] = {}
    for lock in locks:
        pins |= read_lock(lock)
    defects = wheel_defects(folder, pins)
    if defects:
        return defects
    return Wheelhouse(folder, tuple(locks), pins, sum(wheel.stat().st_size for wheel in folder.glob("*.whl")))


def fetch_wheelhouse(lock: Path, torch_cpu_lock: Path, torch_cuda_lock: Path, cache: Path, say: Say) -> Wheelhouse:
    """Return the wheels of a lock, downloaded once per set of locks.

    A lock without torch (the CPU variant's) is completed by `torch_cpu_lock` where pip finds that build,
    else by `torch_cuda_lock`: the package index's build, which runs on a CPU too.
    """
    with_torch = "torch" in read_lock(lock)
    choices = [[lock]] if with_torch else [[lock, torch_cpu_lock], [lock, torch_cuda_lock]]
    for locks in choices:
        folder = cache / "wheelhouse" / digest_of([sha256_file(file) for file in locks])[:16]
        if folder.is_dir():
            found = _fill_wheelhouse(folder, locks)
            if isinstance(found, Wheelhouse):
                say(f"wheelhouse: {len(found.pins)} wheels, {found.bytes:,} bytes, kept from an earlier build")
                return found
            shutil.rmtree(folder)

    (cache / "wheelhouse").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache / "wheelhouse", prefix="partial-") as partial:
        say(f"wheelhouse: downloading the wheels of {lock}")
        refuse_failed_pip(download(lock, Path(partial)), f"download {lock}")
        locks = choices[0]
        if not with_torch:
            answer = download(torch_cpu_lock, Path(partial))
            if any(words in answer.stderr for words in NO_CPU_BUILD):
                say(f"wheelhouse: pip finds no CPU build of torch; downloading {torch_cuda_lock} (3 GB)")
                locks = choices[1]
                answer = download(torch_cuda_lock, Path(partial))
            refuse_failed_pip(answer, f"download {locks[-1]}")
        folder = cache / "wheelhouse" / digest_of([sha256_file(file) for file in locks])[:16]
        defects = _fill_wheelhouse(Path(partial), locks)
        if not isinstance(defects, Wheelhouse):
            raise ContainerError("\n".join(["the downloaded wheels are not those of the lock:", *defects]))
        os.rename(partial, folder)
        Path(partial).mkdir()  # what the context manager is going to remove
    found = Wheelhouse(folder, tuple(locks), defects.pins, defects.bytes)
    say(f"wheelhouse: {len(found.pins)} wheels, {found.bytes:,} bytes")
    return found


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel of one of our distributions with this environment's build backend; same source, same bytes."""
    with tempfile.TemporaryDirectory() as work:
        copy = shutil.copytree(
            source, Path(work, source.name), ignore=shutil.ignore_patterns("__pycache__", "build", "dist", "*.egg-info")
        )
        before = set(folder.glob("*.whl"))
        answer = pip("wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, copy)
        refuse_failed_pip(answer, f"build the wheel of {source}")
    (wheel,) = set(folder.glob("*.whl")) - before
    return wheel


# ----------------------------------------------------------------------------------------------------
# Base


@dataclass(frozen=True)
class Base:
    """Where the root file system comes from: the two header lines of the definition, and its sha256."""

    kind: str  # "mmdebstrap", "tar" or "docker"
    bootstrap: str
    source: str
    sha256: str
    archive: Path | None


def parse_base(base: str, has_mmdebstrap: bool) -> tuple[str, str]:
    """Return (kind, source) of the setting `container.base`; refuse what does not name one fixed base."""
    if base == "auto":
        if not has_mmdebstrap:
            raise ContainerError(
                "container.base is auto and mmdebstrap is not on PATH; install it (make setup does on Debian and "
                "Ubuntu), or set container.base to docker://NAME@sha256:DIGEST of a Debian 12 with Python 3.11"
            )
        return "mmdebstrap", SUITE
    if base == "mmdebstrap":
        return base, SUITE
    if base.startswith("docker://"):
        if re.fullmatch(r"docker://[^@\s]+@sha256:[0-9a-f]{64}", base) is None:
            raise ContainerError(
                f"container.base is {base}: a tag can name another image tomorrow; name the image by its digest, "
                "docker://NAME@sha256:<64 hex digits> (skopeo inspect or docker inspect prints it)"
            )
        return "docker", base.removeprefix("docker://")
    if base.endswith(".tar"):
        return "tar", base
    raise ContainerError(
        f"container.base is {base!r}; allowed are auto, mmdebstrap, docker://NAME@sha256:DIGEST, "
        "and the path of a .tar that an earlier build kept (with its .sha256 beside it)"
    )


def debian_sources() -> list[str]:
    """Return apt's lines for the base, from the mirrors this host uses for Debian; [] where it uses none."""
    if shutil.which("apt-get") is None:
        return []
    fields = "$(LABEL)\t$(REPO_URI)"
    answer = subprocess.run(
        ["apt-get", "indextargets", "--format", fields, "Created-By: Packages", "Origin: Debian"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines: dict[str, None] = {}  # a set that keeps the order
    for line in answer.stdout.splitlines():
        label, mirror = line.split("\t")
        suites = {"Debian": (SUITE, f"{SUITE}-updates"), "Debian-Security": (f"{SUITE}-security",)}.get(label, ())
        lines |= dict.fromkeys(f"deb {mirror} {suite} main" for suite in suites)
    return list(lines)


def bootstrap_debian(archive: Path) -> None:
    """Write a minimal Debian as a tar; the same package versions give the same bytes."""
    command = [
        *("mmdebstrap", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}", "--format=tar"),
        *('--customize-hook=cd "$1" && rm -rf ' + " ".join(LEFTOVERS), SUITE, str(archive), *debian_sources()),
    ]
    answer = subprocess.run(
        command, env=os.environ | {"SOURCE_DATE_EPOCH": EPOCH, "PYTHONHASHSEED": "0"}, stdout=sys.stderr
    )
    if answer.returncode != 0:
        raise ContainerError(f"mmdebstrap failed with status {answer.returncode}; its own message stands above")


def installed_packages(status: str) -> dict[str, str]:
    """Return {package: version} from the text of /var/lib/dpkg/status."""
    packages = {}
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Status): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            packages[fields["Package"]] = fields["Version"]
    return dict(sorted(packages.items()))


def fetch_base(setting: str, cache: Path, say: Say) -> Base:
    """Return the base that `container.base` names.

    A base made by mmdebstrap is kept as an artifact, `<cache>/base/<suite>-<sha256[:16]>.tar` with its
    sidecar and its list of packages, and used by later builds: Debian's mirrors move, a kept file does
    not. Removing the folder makes a base of today.
    """
    kind, source = parse_base(setting, shutil.which("mmdebstrap") is not None)
    if kind == "docker":
        return Base(kind, "docker", source, source.rsplit(":", 1)[1], None)
    if kind == "tar":
        return Base(kind, "localimage", "rootfs/", check(source), Path(source))
    request = digest_of([SUITE, BASE_PACKAGES, LEFTOVERS])[:8]
    kept = sorted((cache / "base").glob(f"{SUITE}-{request}-*.tar"), key=lambda file: file.stat().st_mtime)
    if kept:
        say(f"base: {kept[-1]}, kept from an earlier build")
        return Base(kind, "localimage", "rootfs/", check(kept[-1]), kept[-1])
    say(f"base: mmdebstrap {SUITE} with {', '.join(BASE_PACKAGES)}")
    (cache / "base").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache / "base", prefix="partial-") as partial:
        fresh = Path(partial, "base.tar")
        bootstrap_debian(fresh)
        digest = sha256_file(fresh)
        status = subprocess.run(
            ["tar", "-xOf", fresh, "./var/lib/dpkg/status"], capture_output=True, text=True, check=True
        ).stdout
        archive = cache / "base" / f"{SUITE}-{request}-{digest[:16]}.tar"
        packages = installed_packages(status)
        write_text(archive.with_suffix(".packages.txt"), "".join(f"{name} {packages[name]}\n" for name in packages))
        with publish(archive) as temporary:
            os.rename(fresh, temporary)
    say(f"base: {archive}, {archive.stat().st_size:,} bytes")
    return Base(kind, "localimage", "rootfs/", digest, archive)


def unpack_base(archive: Path, folder: Path) -> None:
    """Unpack a base for Apptainer, which makes /dev itself and runs everything as one user."""
    folder.mkdir()
    subprocess.run(
        ["tar", "-xpf", archive, "-C", folder, "--no-same-owner", "--exclude=./dev/*"], check=True, stdout=sys.stderr
    )


# ----------------------------------------------------------------------------------------------------
# Definition and build


def render_definition(template: str, values: Mapping[str, str]) -> str:
    """Fill the {{ names }} of a definition; a name without value and a value without name are refused."""
    names = set(re.findall(r"\{\{ (\w+) \}\}", template.replace("{{ names }}", "")))
    if names != values.keys():
        raise ContainerError(
            f"definition: no value for {sorted(names - values.keys())}, no place for {sorted(values.keys() - names)}"
        )
    return re.sub(r"\{\{ (\w+) \}\}", lambda found: values.get(found[1], found[0]), template)


@contextlib.contextmanager
def environment_set(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of a block."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_build(work: Path, image: Path, environment: Mapping[str, str], say: Say) -> None:
    """Build `work`/sglang.def into `image` through spython, passing Apptainer's output on line by line."""
    # spython calls a program named singularity; here that name means the apptainer on PATH, whatever else is installed.
    apptainer = shutil.which("apptainer")
    if apptainer is None:
        raise ContainerError("no apptainer on PATH; install it with: make setup")
    (work / "bin").mkdir()
    (work / "bin/singularity").symlink_to(apptainer)
    path = f"{work / 'bin'}:{os.environ['PATH']}"
    options = [*build_options(), "--mksquashfs-args", SQUASHFS_ARGUMENTS]
    # Folders that jobs need do not exist in an image that is being made.
    with environment_set({**environment, "PATH": path, "APPTAINER_BIND": ""}), contextlib.chdir(work):
        _, lines = Client.build("sglang.def", str(image), sudo=False, stream=True, quiet=True, options=options)
        try:
            for line in lines:
                say(f"build: {line.rstrip()}")
        except subprocess.CalledProcessError as error:
            raise ContainerError(
                f"apptainer build failed with status {error.returncode}; its own messages stand above. "
                "No image was written"
            ) from None
    if not image.is_file():
        raise ContainerError("apptainer build ended without an error and without an image")


# ----------------------------------------------------------------------------------------------------
# What an image contains


@dataclass(frozen=True, order=True)
class Entry:
    """One file of an image: POSIX path, permission bits, and the sha256 of its bytes or `-> target` of a link."""

    path: str
    mode: int
    content: str


def content_digest(entries: Iterable[Entry]) -> str:
    """Return the sha256 over the sorted lines `path mode content`; the order of `entries` does not matter."""
    digest = hashlib.sha256()
    for entry in sorted(entries):
        digest.update(f"{entry.path} {entry.mode:04o} {entry.content}\n".encode())
    return digest.hexdigest()


def is_content(path: str) -> bool:
    """Say whether a file of the image counts: all do but those that Apptainer adds by itself."""
    return not path.startswith(APPTAINER_FOLDER + "/") or path in APPTAINER_CONTENT


def list_entries(root: Path, threads: int = 2) -> list[Entry]:
    """Return the entries of an unpacked image."""

    def entry(path: str) -> Entry:
        file = root / path
        information = file.lstat()
        content = f"-> {os.readlink(file)}" if stat.S_ISLNK(information.st_mode) else sha256_file(file)
        return Entry(path, stat.S_IMODE(information.st_mode), content)

    paths = []
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        paths += [Path(folder, name).relative_to(root).as_posix() for name in [*links, *names]]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(entry, filter(is_content, paths)))


def squashfs_offset(image: Path) -> str:
    """Return at which byte of an Apptainer file its file system begins."""
    listing = subprocess.run(["apptainer", "sif", "list", image], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\|(\d+)-\d+\s*\|FS \(Squashfs", listing)
    if found is None:
        raise ContainerError(f"{image}: no squashfs partition in:\n{listing}")
    return found[1]


def unpack_image(image: Path, folder: Path) -> None:
    """Unpack the file system of an Apptainer file into a new folder."""
    command = ["unsquashfs", "-q", "-n", "-no-xattrs", "-o", squashfs_offset(image), "-d", folder, image]
    subprocess.run(command, check=True, stdout=sys.stderr)


@contextlib.contextmanager
def image_opened(image: Path, folder: Path) -> Iterator[Path]:
    """Show the file system of an Apptainer file at `folder` for the duration of a block.

    Mounted where FUSE is usable, else unpacked: the same files, 100 seconds and 2 GB more on a slow disk.
    """
    mount, unmount = (
        next(filter(None, map(shutil.which, names)), None)
        for names in (("squashfuse_ll", "squashfuse"), ("fusermount3", "fusermount"))
    )
    if mount is None or unmount is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        unpack_image(image, folder)
        yield folder
        return
    folder.mkdir()
    subprocess.run([mount, "-o", f"ro,offset={squashfs_offset(image)}", image, folder], check=True, stdout=sys.stderr)
    try:
        yield folder
    finally:
        subprocess.run([unmount, "-u", folder], check=True)


def patch_digest(image: Path, environment: Mapping[str, str]) -> str:
    """Return the digest of the capture patch, computed by the installed patch itself inside the image."""
    program = "from aerie_capture.protocol import patch_digest; print(patch_digest())"
    answer = subprocess.run(
        ["apptainer", "exec", "--cleanenv", image, "python", "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    if answer.returncode != 0:
        raise ContainerError(
            f"the new image does not run the capture patch:\n{(answer.stderr or answer.stdout).strip()}"
        )
    return answer.stdout.strip()


# ----------------------------------------------------------------------------------------------------
# All of it


@dataclass(frozen=True)
class Recipe:
    """What an image is made from."""

    variant: str  # "cpu" or "cuda"
    definition: Path
    lock: Path
    torch_cpu_lock: Path
    torch_cuda_lock: Path
    plugins: tuple[Path, ...]  # folders of our own distributions
    base: str
    sglang_version: str


def build(recipe: Recipe, cache_dir: Path, image: Path, say: Say) -> dict[str, Any]:
    """Build the image of a recipe into `image` and return the facts of its record.

    Only `image` and files below `cache_dir` are written. Raises ContainerError; then there is no image.
    """
    check_sglang_version(recipe.lock, read_lock(recipe.lock), recipe.sglang_version)
    environment = apptainer_environment(cache_dir)
    create_apptainer_folders(environment)
    cache = cache_dir.absolute() / "container"
    base = fetch_base(recipe.base, cache, say)
    wheelhouse = fetch_wheelhouse(recipe.lock, recipe.torch_cpu_lock, recipe.torch_cuda_lock, cache, say)

    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder:
        work = Path(folder)
        (work / "own").mkdir()
        for plugin in recipe.plugins:
            say(f"wheel: {build_wheel(plugin, work / 'own').name}")
        (work / "wheelhouse").mkdir()
        for wheel in wheelhouse.folder.glob("*.whl"):
            (work / "wheelhouse" / wheel.name).symlink_to(wheel)
        for lock in wheelhouse.locks:
            shutil.copy(lock, work / "wheelhouse")
        if base.archive is not None:
            say(f"base: unpacking {base.archive.name}")
            unpack_base(base.archive, work / "rootfs")
        values = {
            "bootstrap": base.bootstrap,
            "base": base.source,
            "base_sha256": base.sha256,
            "python": PYTHON,
            "variant": recipe.variant,
            "contract_options": "" if recipe.variant == "cpu" else "--no-import",  # the builder may have no GPU
            "sglang_version": recipe.sglang_version,
            "lock_sha256": sha256_file(recipe.lock),
        }
        (work / "sglang.def").write_text(render_definition(recipe.definition.read_text(), values))
        say("build: apptainer build (1 to 3 minutes)")
        run_build(work, image.absolute(), environment, say)

        say(f"content: hashing what is in the image ({image.stat().st_size:,} bytes)")
        with image_opened(image, work / "content") as root:
            entries = list_entries(root)
            site_packages = root / "opt/aerie/lib" / f"python{PYTHON}" / "site-packages"
            found = importlib.metadata.distributions(path=[str(site_packages)])
            distributions = {canonical_name(distribution.name): distribution.version for distribution in found}
            status = root / "var/lib/dpkg/status"
            packages = installed_packages(status.read_text()) if status.is_file() else {}
        say(f"content: {len(entries):,} files, {len(distributions)} distributions, {len(packages)} Debian packages")

    return {
        "variant": recipe.variant,
        "content_sha256": content_digest(entries),
        "files": len(entries),
        "base": {"kind": base.kind, "sha256": base.sha256, "packages": packages},
        "locks": {lock.as_posix(): sha256_file(lock) for lock in wheelhouse.locks},
        "definition_sha256": sha256_file(recipe.definition),
        "distributions": dict(sorted(distributions.items())),
        "sglang_version": distributions["sglang"],
        "patch_sha256": patch_digest(image, environment),
    }


def stopwatch(print_line: Say) -> Say:
    """Return a `say` that puts the seconds since this call in front of every line."""
    start = time.monotonic()
    return lambda text: print_line(f"[{time.monotonic() - start:6.1f} s] {text}")
