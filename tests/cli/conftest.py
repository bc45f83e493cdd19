"""A server with given answers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@pytest.fixture
def answering():
    """Starts a server whose answers are `answer(path)`: a status and a text."""
    up = []

    def start(answer):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                status, text = answer(self.path)
                body = text.encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        up.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in up:
        server.shutdown()
        server.server_close()
