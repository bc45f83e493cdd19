import json
import sys

import pytest

from slo_bench.cli.main import main

QUICK = ["capacity", "-s", "vllm", "--requests", "200", "--target", "0.9", "--tolerance", "0.3"]
QUICK += ["--max-requests", "3000"]


@pytest.fixture
def slo_bench(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["slo-bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call


def test_tables_say_levels_interval_and_why_it_stopped(slo_bench, tmp_path):
    code, out, _ = slo_bench(*QUICK, "--out", "o")
    assert code == 0
    for text in ("Capacity, req/s (simulated)", "≥ 0.9", "Levels tried: vllm", "stopped after"):
        assert text in out
    assert (tmp_path / "o" / "report.html").is_file()


def test_json_is_the_list_and_nothing_else(slo_bench):
    code, out, _ = slo_bench(*QUICK, "--no-report", "--json", "--out", "o")
    assert code == 0
    (row,) = json.loads(out)
    asked_for = ["system", "target", "capacity_rps", "low_rps", "high_rps", "requests_spent"]
    assert set(row) >= {*asked_for, "levels"}
    assert row["levels"][0]["attainment"] >= row["levels"][-1]["attainment"]


def test_resume_needs_nothing_but_the_folder(slo_bench):
    search = ["--target", "0.9", "--tolerance", "0.3", "--max-requests", "3000", "--no-report"]
    code, first, _ = slo_bench(*QUICK, "--no-report", "--out", "o", "--json")
    assert code == 0
    code, second, err = slo_bench("capacity", "--resume", "--out", "o", "--json", *search)
    assert code == 0, err
    assert json.loads(second) == json.loads(first)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--target", "2"], "target must lie between 0 and 1 but is 2"),
        (["--tolerance", "0"], "tolerance must lie in"),
        (["--max-requests", "0"], "max requests must be positive but is 0"),
        (["--resume"], "--resume needs the folder"),
        (["--arrivals", "concurrency(4)"], "choose another arrival process"),
        (["--system", "vlm"], "did you mean vllm"),
    ],
)
def test_what_the_user_can_mend_ends_with_2(slo_bench, options, problem):
    code, out, err = slo_bench("capacity", *options)
    assert code == 2
    assert problem in err
    assert not out


def test_examples_are_shown(slo_bench):
    code, out, _ = slo_bench("capacity", "--help")
    assert code == 0
    assert "slo-bench capacity --system sarathi" in out.partition("Examples:")[2]
