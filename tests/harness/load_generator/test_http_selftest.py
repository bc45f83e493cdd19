import json
import subprocess
import sys

import pytest

from slo_bench.cli.main import main
from slo_bench.harness.validation import load_generator_selftest as selftest


@pytest.mark.slow
def test_selftest_prints_error_and_cost_of_the_client(monkeypatch, capsys):
    options = ["--rates", "40,80", "--seconds", "0.5", "--no-search"]
    monkeypatch.setattr(sys, "argv", ["slo-bench", "selftest", *options, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    report = json.loads(capsys.readouterr().out)
    levels = report["levels"]
    assert [(level["rate_rps"], level["tokens"]) for level in levels] == [
        (40, 1),
        (40, 64),
        (80, 64),
    ]
    for level in levels:
        assert level["finished"] == level["requests"]
        assert level["token_error_p50_s"] > 0  # nothing is seen before it leaves
        assert level["ttft_error_p99_s"] >= level["ttft_error_p50_s"]
        assert level["truthful"] == (level["problem"] is None)
    true = [level["rate_rps"] for level in levels[1:] if level["truthful"]]
    assert report["highest_rps"] == max(true, default=None)
    busy = report["beside_server"]
    assert [level["rate_rps"] for level in busy] == [4, 16, 64][: len(busy)]
    assert all(level["truthful"] for level in busy[:-1])
    true = [level["rate_rps"] for level in busy if level["truthful"]]
    assert report["highest_beside_server_rps"] == max(true, default=None)
    whole = report["request_cpu_s"] + 64 * report["token_cpu_s"]
    assert whole == pytest.approx(levels[1]["cpu_per_request_s"])


def test_selftest_refuses_wrong_options(monkeypatch, capsys):
    for option, value in (("--seconds", "0"), ("--rates", "0")):
        monkeypatch.setattr(sys, "argv", ["slo-bench", "selftest", option, value])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert "must be positive" in capsys.readouterr().err


def test_selftest_spinner_ends_with_its_parent():
    argv = [sys.executable, "-S", "-E", "-c", selftest._SPIN]
    spinning = subprocess.Popen(argv, stdin=subprocess.PIPE)
    spinning.stdin.close()  # as when the parent was killed
    assert spinning.wait(timeout=60) == 0


def test_mock_child_without_a_parent_ends_silently():
    argv = [sys.executable, "-m", "slo_bench.harness.servers.mock", "--child"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
