"""stand_in_server.py PORT MODEL [--slots N]: completions as a stream, N requests at a time."""

import http.server
import json
import sys
import threading
import time

port, model, words = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
slots = threading.Semaphore(int(words[words.index("--slots") + 1]) if "--slots" in words else 1)
tokens = 0
ANSWER_S = 0.005


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        text = {
            "/health": "",
            "/metrics": f"stand_in_tokens_total {tokens}\n",
            "/v1/models": json.dumps({"object": "list", "data": [{"id": model}]}),
        }.get(self.path)
        self._send(404 if text is None else 200, "text/plain", text or "")

    def do_POST(self):
        global tokens
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with slots:
            time.sleep(ANSWER_S)
        count = body.get("max_tokens", 1)
        tokens += count
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        chunks = [{"choices": [{"index": 0, "text": " a"}]} for _ in range(count)]
        chunks[-1]["choices"][0]["finish_reason"] = "length"
        events = [json.dumps(chunk) for chunk in (*chunks, {"choices": [], "usage": usage})]
        text = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))
        self._send(200, "text/event-stream", text)

    def _send(self, status, kind, text):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128


Server(("127.0.0.1", port), Answers).serve_forever()
