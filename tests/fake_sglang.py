"""A stand-in for `python -m sglang.launch_server` in the tests of the server's life: the same endpoints, no model.

Behaviour by environment: FAKE_DIE_AT_START, FAKE_SLOW_START_S, FAKE_NAME (answers under another name),
FAKE_DIE_AFTER (exits in the middle of its n-th answer), FAKE_CHILD (file for the pid of a child that ignores SIGTERM).
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

flags = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
answered = 0


class Handler(BaseHTTPRequestHandler):
    def send(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send({"data": [{"id": os.environ.get("FAKE_NAME", flags["--served-model-name"])}]})

    def do_POST(self):
        global answered
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answered += 1
        if answered == int(os.environ.get("FAKE_DIE_AFTER", "0")):
            print("fatal: out of memory", flush=True)
            os._exit(9)
        self.send({"output_ids": payload["input_ids"], "meta_info": {"finish_reason": {"type": "stop"}}})

    def log_message(self, *arguments):
        pass


if "FAKE_DIE_AT_START" in os.environ:
    sys.exit("ValueError: no such model")
if "FAKE_CHILD" in os.environ:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code])
    with open(os.environ["FAKE_CHILD"], "w") as file:
        file.write(str(child.pid))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
time.sleep(float(os.environ.get("FAKE_SLOW_START_S", "0")))
ThreadingHTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()
