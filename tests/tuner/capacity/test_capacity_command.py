import json
from pathlib import Path

import pandas as pd
import pytest

from slo_bench.cli.commands.capacity import _advice
from slo_bench.reports.terminal.capacity_answer import _levels, best_lines

QUICK = ["capacity", "-s", "vllm", "--requests", "200", "--target", "0.9", "--tolerance", "0.3"]
QUICK += ["--max-requests", "3000"]


def test_capacity_prints_levels_interval_and_why_it_stopped(slo_bench, tmp_path):
    code, out, err = slo_bench(*QUICK, "--out", "o")
    assert code == 0
    assert err.startswith("searching into o\n")
    for text in ("simulated: llama-3.1-8b on 1", "≥ 0.9", "sampling", "At 90 %: vllm carries"):
        assert text in out
    assert "Levels tried" not in out
    assert (tmp_path / "o" / "report.html").is_file()
    code, out, _ = slo_bench("report", "o", "--verbose")
    assert "Levels tried: vllm" in out
    assert "stopped after" in out


@pytest.mark.slow
def test_report_of_a_capacity_search_shows_no_means_of_levels(slo_bench, tmp_path):
    """Levels may be too short to pass; a report beside other runs shows both."""
    assert slo_bench(*QUICK, "--out", "o")[0] == 0
    code, out, _ = slo_bench("report", "o")
    assert code == 0
    assert "sampling, 95 %" in " ".join(out.split())
    assert "req/s at 90 %" not in out
    assert "Highest tested rate" not in (tmp_path / "o" / "report.html").read_text()
    load = ["-s", "vllm", "--rates", "1,2", "--requests", "50", "--seeds", "1", "--no-report"]
    assert slo_bench("run", *load, "--out", "r")[0] == 0
    code, out, _ = slo_bench("report", "o", "r", "--out", "both.html")
    assert code == 0
    assert "sampling, 95 %" in " ".join(out.split())
    assert "at 90 %" in out
    assert "Highest tested rate" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(("high", "note"), [(0.93, "too short to pass"), (0.6, "")])
def test_level_that_misses_the_target_is_not_called_too_short(high, note):
    level = {"rate_rps": 4.0, "runs": 1, "valid_runs": 1, "requests": 200, "sustained": False}
    level |= {"backlog_grows": False, "attainment": 0.5, "invalid_because": None}
    level |= {"attainment_low": 0.4, "attainment_high": high}
    row = {"search": "vllm", "target": 0.9, "levels": [level]}
    row |= {"requests_spent": 200, "wall_s": 1.0, "stopped": "enough"}
    assert [line[5] for line in _levels(row).groups[0].rows] == [note]


def test_capacity_json_prints_only_the_list(slo_bench):
    code, out, _ = slo_bench(*QUICK, "--no-report", "--json", "--out", "o")
    assert code == 0
    (row,) = json.loads(out)
    asked_for = ["system", "target", "capacity_rps", "low_rps", "high_rps", "requests_spent"]
    assert set(row) >= {*asked_for, "levels"}
    assert row["levels"][0]["attainment"] >= row["levels"][-1]["attainment"]


def test_capacity_resume_needs_only_the_folder(slo_bench):
    code, first, _ = slo_bench(*QUICK, "--no-report", "--out", "o", "--json")
    assert code == 0
    resume = ["capacity", "--resume", "--out", "o", "--no-report"]
    code, second, err = slo_bench(*resume, "--json")
    assert code == 0, err
    assert json.loads(second) == json.loads(first)
    code, _, err = slo_bench(*resume, "--target", "0.5")
    assert code == 2
    assert "it has 'targets = [0.9]'" in err


def test_the_command_that_is_advised_goes_on(slo_bench):
    precise = ["0.01" if word == "0.3" else word for word in QUICK]
    rough = [*precise, "--no-report", "--out", "o"]
    code, out, _ = slo_bench(*rough)
    assert code == 0
    advised = "slo-bench capacity --resume --out o --max-requests …"
    assert f"narrower intervals: {advised}" in out
    words = advised.replace("…", "5000").split()[1:]
    code, out, err = slo_bench(*words, "--no-report", "--json")
    assert code == 0, err
    assert json.loads(out)[0]["requests_spent"] > 3000
    code, again, err = slo_bench("capacity", "--resume", "--out", "o", "--no-report", "--json")
    assert code == 0, err
    assert json.loads(again) == json.loads(out)  # with the budget of the last search


@pytest.mark.parametrize(
    ("limits", "advice"),
    [
        ([None, "max_time_s"], "--resume --out 'a folder' --max-time …"),
        (["max_requests", "max_time_s"], "--max-requests … --max-time …"),
        (["requests", "max_time_s"], "(--requests N, in another folder)"),
    ],
)
def test_advice_names_the_settings_that_limited_the_search(limits, advice):
    text = _advice([{"limited_by": name} for name in limits], Path("a folder"))
    assert text.endswith(advice)


def test_no_advice_where_nothing_limited_the_search():
    assert _advice([{"limited_by": None}], Path("o")) is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--target", "2"], "target must lie between 0 and 1 but is 2"),
        (["--tolerance", "0"], "tolerance must lie in"),
        (["--max-requests", "0"], "max_requests must be positive but is 0"),
        (["--jobs", "0"], "jobs must be from 1 to 1,024"),
        (["--jobs", "2", "--executor", "ray"], "--jobs are processes of this machine"),
        (["--resume"], "--resume needs the folder"),
        (["--arrivals", "concurrency(4)"], "choose another arrival process"),
        (["--system", "vlm"], "did you mean vllm"),
        (["--sweep", "model=nope"], "unknown model 'nope'"),
    ],
)
def test_capacity_wrong_options_exit_2(slo_bench, options, problem):
    code, out, err = slo_bench("capacity", *options)
    assert code == 2
    assert problem in err
    assert "searching into" not in err
    assert not out


def test_capacity_help_has_examples(slo_bench):
    code, out, _ = slo_bench("capacity", "--help")
    assert code == 0
    assert "slo-bench capacity --system sarathi" in out.partition("Examples:")[2]


def _found(name: str, capacity: float | None, low: float, high: float | None, **columns):
    return {
        "search": name,
        "system": name,
        **columns,
        "target": 0.9,
        "capacity_rps": capacity,
        "low_rps": low,
        "high_rps": high,
    }


def test_capacity_says_whether_the_lead_holds_in_reality():
    rows = [_found("a", 5.0, 4.9, 5.1), _found("b", 4.0, 3.9, 4.1), _found("c", 3.0, 2.9, 3.1)]
    runs = []
    for row, engine in zip(rows, ("vllm", "vllm", "sglang"), strict=True):
        for rate in (1.0, 2.0, 4.0, 8.0):
            shares = [
                min(1.0, max(0.0, 1.9 - rate / (row["capacity_rps"] * n))) for n in (1.6, 1, 0.6)
            ]
            runs.append(
                {
                    "cell": f"{row['search']}_rate-{rate:g}",
                    "folder": 0,
                    "rate_rps": rate,
                    "band_basis": engine,
                    "band_draws": " ".join(f"{share:.3f}" for share in shares),
                }
            )
    (line,) = best_lines(rows, pd.DataFrame(runs))
    assert line == (
        "At 90\xa0%: a carries the most, 5\xa0req/s. The lead over b holds in reality, "
        "that over c is inside the model's error."
    )


RUNS = pd.DataFrame({"cell": ["a_rate-1"], "folder": [0], "rate_rps": [1.0]})


def test_capacity_names_the_best_configuration():
    on = {"workload": "azure-conv", "gpus": 4}
    rows = [
        _found("1-3", 11.3, 10.9, 11.4, **on, **{"distserve.prefill_instances": 1}),
        _found("2-2", 12.4, 11.3, 13.5, **on, **{"distserve.prefill_instances": 2}),
        _found("3-1", 6.2, 5.8, 6.5, **on, **{"distserve.prefill_instances": 3}),
    ]
    (line,) = best_lines(rows, RUNS)
    assert line == (
        "At 90\xa0%: 2-2 carries the most, 12.4\xa0req/s on 4 GPUs; "
        "not distinguishable from it: 1-3."
    )
    other = _found("2-2", 3.0, 2.9, 3.1, workload="longbench", gpus=4)
    assert best_lines([*rows, other], RUNS)[0] == line.replace("%:", "%, workload azure-conv:")
    assert best_lines([other], RUNS) == ["At 90\xa0%: 2-2 carries 3\xa0req/s on 4 GPUs."]
    assert best_lines([_found("a", 0.0, 0.0, 9.0), _found("b", 0.0, 0.0, 1.0)], RUNS) == []
    endless = [_found("a", None, 9.0, None), _found("b", None, 8.0, None), _found("c", 4, 3, 5)]
    assert best_lines(endless, RUNS) == [
        "At 90\xa0%: a carries the most, > 9\xa0req/s; not distinguishable from it: b."
    ]
