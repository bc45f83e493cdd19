"""The documented example of an Azure deployment, against the mock behind a front as strict."""

import csv
import http.client
import json
import re
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from slo_bench.harness.servers.mock import MockConfig, serving

PAGE = Path(__file__).parents[3] / "docs" / "load-generator.md"
FIELDS = {
    *("model", "messages", "max_completion_tokens", "stream", "stream_options", "temperature"),
    *("seed", "top_p", "stop", "n", "user"),
}


def documented():
    """The words of the page's command for an Azure deployment."""
    (line,) = re.findall(r"^slo-bench (.*/openai/deployments/.*)$", PAGE.read_text("utf-8"), re.M)
    return shlex.split(line)


def error(code, message):
    return {"error": {"code": str(code), "message": message}}


@pytest.fixture
def azure():
    """The address of a front of the mock that takes what an Azure deployment takes, and the fields
    of the requests that it served.
    """
    with serving(MockConfig(ttft_s=0.0, itl_s=0.0)) as mock:
        served = []

        class Front(BaseHTTPRequestHandler):
            def refusal(self, body):
                target = urlsplit(self.path)
                if self.headers.get_all("api-key") != ["sesame"]:
                    return 401, "Access denied due to invalid subscription key"
                if target.path != "/openai/deployments/NAME/chat/completions":
                    return 404, "Resource not found"
                if set(parse_qs(target.query)) != {"api-version"}:
                    return 404, "Resource not found"
                if unknown := set(body) - FIELDS:
                    names = ", ".join(sorted(unknown))
                    return 400, f"Unrecognized request arguments supplied: {names}"
                return None

            def do_GET(self):
                self.tell(*(self.refusal({}) or (404, "Resource not found")))

            def do_POST(self):
                content = self.rfile.read(int(self.headers["content-length"]))
                body = json.loads(content)
                if refused := self.refusal(body):
                    self.tell(*refused)
                    return
                served.append(set(body))
                behind = http.client.HTTPConnection(urlsplit(mock.url).netloc)
                behind.request("POST", "/v1/chat/completions", content)
                reply = behind.getresponse()
                self.send_response(reply.status)
                self.send_header("content-type", reply.getheader("content-type"))
                self.end_headers()
                for line in reply:
                    self.wfile.write(line)
                    self.wfile.flush()
                behind.close()

            def tell(self, code, message):
                content = json.dumps(error(code, message)).encode()
                self.send_response(code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        front = ThreadingHTTPServer(("127.0.0.1", 0), Front)
        threading.Thread(target=front.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{front.server_port}", served
        front.shutdown()
        front.server_close()


def test_documented_azure_example_is_served_by_a_front_as_strict(
    slo_bench, azure, tmp_path, monkeypatch
):
    url, served = azure
    monkeypatch.setenv("MY_KEY", "sesame")
    words = [word.replace("https://host", url) for word in documented()]
    small = ("--workload", "synthetic", "--prompt-tokens", "8", "--output-tokens", "3")
    code, printed, problems = slo_bench(
        *words, *small, "--requests", "4", "--send-delay-limit", "60", "--out", "o"
    )
    assert code == 0, problems
    (row,) = csv.DictReader((tmp_path / "o" / "cells.csv").read_text().splitlines())
    assert (row["finished"], row["requests"]) == ("4", "4")
    assert "failed" not in printed
    assert all("max_completion_tokens" in fields for fields in served)
    written = [path.read_bytes() for path in (tmp_path / "o").rglob("*") if path.is_file()]
    assert not any(b"sesame" in content for content in written)


def test_azure_deployment_without_its_key_is_told_in_one_request(slo_bench, azure, monkeypatch):
    url, served = azure
    monkeypatch.setenv("MY_KEY", "wrong")
    words = [word.replace("https://host", url) for word in documented()]
    code, _, problems = slo_bench(*words, "--out", "o")
    assert code == 2
    assert "401" in problems
    assert not served
