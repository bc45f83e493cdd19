"""A stand-in for a server: fake_server.py PORT MODE [--uds PATH] [--config FILE].

MODE is ready, never, dies or leaves. With a file all requests need the key in it.
"""

import http.server
import os
import socketserver
import subprocess
import sys
import time
from pathlib import Path

port, mode = int(sys.argv[1]), sys.argv[2]
print(f"starting {mode}", flush=True)
if mode == "dies":
    print(f"RuntimeError: no such model {os.environ.get('WORD', '')}", flush=True)
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


options = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
key = ""
if "--config" in options:
    assert Path(options["--config"]).stat().st_mode & 0o77 == 0
    key = Path(options["--config"]).read_text().split('"')[1]


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        denied = key and self.headers.get("authorization") != f"Bearer {key}"
        self.send_response(401 if denied else 200)
        self.end_headers()
        self.wfile.write(b"fake:requests 1\n" if self.path == "/metrics" else b"ok")

    def address_string(self):
        return "a client"

    def log_message(self, *args):
        pass


class Socket(socketserver.ThreadingUnixStreamServer):
    pass


if "--uds" in options:
    Socket(options["--uds"], Answers).serve_forever()
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
