"""`slo-bench capture` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.servers.mock import MockConfig
from slo_bench.harness.servers.mock import serving as mock

PROGRAM = "from slo_bench.cli.main import main; main()"


def capture(url: str, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "capture", url, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )


def test_capture_writes_until_it_is_stopped_and_keeps_its_salt(tmp_path):
    salt = tmp_path / "salt"
    first_ids = []
    with mock(MockConfig(ttft_s=0.001, itl_s=0.001)) as server:
        for name in ("a.jsonl", "b.jsonl"):
            path = tmp_path / name
            with capture(server.url, "--out", path, "--salt", salt) as process:
                url = process.stdout.readline().strip()
                assert url.endswith("/v1")
                body = json.dumps({"prompt": list(range(40)), "max_tokens": 2}).encode()
                with urllib.request.urlopen(f"{url}/completions", body) as answer:
                    assert json.load(answer)["usage"]["prompt_tokens"] == 40
                process.send_signal(signal.SIGTERM)
                stderr = process.stderr.read()
            assert process.returncode == 128 + signal.SIGTERM
            assert f"1 request in {path}" in stderr
            first_ids.append(json.loads(path.read_text())["hash_ids"][:2])
    assert first_ids[0] == first_ids[1]
    assert salt.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["capture", "ftp://x"], "should look like http://127.0.0.1:8000"),
        (["capture", "http://x", "--share", "--salt", "s"], "leave --salt out"),
        (["capture", "http://x", "--block-size", "100"], "--block-size must be one of 1, 2, 4,"),
        (["capture", "http://x", "--salt", "."], "cannot use --salt"),
        (["capture", "http://x", "--out", "/dev/null/x"], "cannot write /dev/null/x"),
    ],
)
def test_bad_options_are_refused(words, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code != 0
    assert problem in str(done.exception)
