"""A job that borrows a stand-in server, says which, and holds it until its input ends; needs what the image has.

python tests/borrowing_job.py FOLDER [cpu|cuda]
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from aerie import server

FAKE = (sys.executable, str(Path(__file__).with_name("fake_sglang.py")))


def order(run, folder):
    """Write what a plugin would read."""
    (folder / "order.json").write_text(json.dumps({"run": run}))
    return {"FAKE_ORDER": str(folder / "order.json")}


def borrow(
    folder, *flags, idle_s=60.0, environment_of=order, same=None, device="cpu", context_tokens=64
):  # fmt: skip
    """Borrow a server whose command names `folder`, so that a test finds what is left of it."""
    settings = server.Settings(
        model="model", device=device, dtype="float32", tensor_parallel=1, context_tokens=context_tokens,
        max_total_tokens=0, max_running_requests=4, start_timeout_s=60.0, port=0, seed=1,
    )  # fmt: skip
    return server.borrow(
        settings, ["--made-by", str(folder), *flags], environment_of, folder / "server.log", folder / "cold", idle_s,
        folder / "warm", same, command=FAKE,
    )  # fmt: skip


if __name__ == "__main__":
    with borrow(Path(sys.argv[1]), device=(*sys.argv, "cpu")[2]) as engine:
        print(json.dumps([engine._server, engine.name]), flush=True)
        sys.stdin.read()
