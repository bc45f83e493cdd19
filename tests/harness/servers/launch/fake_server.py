"""A stand-in for a server: fake_server.py PORT MODE, in MODE ready, never, dies or leaves."""

import http.server
import os
import subprocess
import sys
import time
from pathlib import Path

port, mode = int(sys.argv[1]), sys.argv[2]
print(f"starting {mode}", flush=True)
if mode == "dies":
    print("RuntimeError: no such model", flush=True)
    sys.exit(3)
if mode == "never":
    time.sleep(600)
if mode == "leaves":
    # A child in a session of its own, which no signal to the group reaches.
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    print(f"child {child.pid}", flush=True)
handshake = os.environ.get("SLO_BENCH_HANDSHAKE")
if handshake and mode != "unhooked":
    Path(handshake).write_text('{"server": "fake", "hooks": ["one"]}')


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"fake:requests 1\n" if self.path == "/metrics" else b"ok")

    def log_message(self, *args):
        pass


http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
