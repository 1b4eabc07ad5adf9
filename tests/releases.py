"""SGLang releases as folders: tests/releases.lock → .cache/releases/{version}/sglang/..., unzipped, never installed.

    PYTHONPATH=scripts:tests python -m releases

fetches what is missing. Tests call `unzipped(version)`, which does it for one release.
"""

import re
import shutil
import tempfile
import zipfile
from pathlib import Path

from aerie import image

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "tests/releases.lock"
CACHE = ROOT / ".cache/releases"
MARK = "wheel.sha256"  # in each folder, written last: which wheel it is


def locked():
    """Return {version: sha256 of its wheel}, oldest first."""
    lines = LOCK.read_text().replace("\\\n", " ").splitlines()
    pins = [
        re.fullmatch(r"sglang==(\S+)\s+--hash=sha256:([0-9a-f]{64})", line)
        for line in lines
        if line[:1] not in ("#", "")
    ]
    return {pin[1]: pin[2] for pin in pins}


VERSIONS = list(locked())


def unzipped(version):
    """Return the folder of a release, made on the first call; pip holds the download against the hash of the lock."""
    folder, sha256 = CACHE / version, locked()[version]
    if folder.is_dir() and (folder / MARK).is_file() and (folder / MARK).read_text() == sha256:
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="partial-") as partial:
        # A lock of one line: pip refuses to resolve five versions of one distribution together.
        one = Path(partial, "one.lock")
        one.write_text(f"sglang=={version} --hash=sha256:{sha256}\n")
        image.refuse_failed_pip(image.download(one, Path(partial)), f"download sglang {version}")
        (wheel,) = Path(partial).glob("*.whl")
        fresh = Path(partial, "unzipped")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(fresh)
        (fresh / MARK).write_text(sha256)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    return folder


if __name__ == "__main__":
    for version in VERSIONS:
        print(f"sglang {version}: {unzipped(version).relative_to(ROOT)}")
