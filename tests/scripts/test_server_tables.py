"""The page of policies on real servers: its tables are those of the kept figures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from slo_bench.harness.results.compared_decisions import TABLE

SCRIPT = Path(__file__).parents[2] / "scripts" / "server_tables.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("server_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_server_page_equals_the_one_written_from_kept_results(script):
    kept = json.loads(script.KEPT.read_text()) if script.KEPT.is_file() else {}
    text = script.PAGE.read_text()
    assert script.written(text, kept) == text
    assert {match[2] for match in script._BLOCK.finditer(text)} == set(script.EXPERIMENTS)


def test_table_of_several_models_shows_what_was_counted_and_simulated(script, tmp_path):
    head = "cell,system,rate_rps,valid,attainment,ttft_p50_s,tpot_p50_s,e2e_p50_s"
    head += ",models_unplaced,count_activations,count_evictions\n"
    for folder, row in (
        ("run", "a,prism,1,True,0.5,1,0.1,2,0,3,2\n"),
        ("run-simulated", "a,prism,1,True,0.6,2,0.1,2,0,4,3\n"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "cells.csv").write_text(head + row)
    assert script.table(script.levels(tmp_path / "run")).splitlines()[2] == (
        "| prism | 1 | 50.0 (60.0) | 1 s (+100%) | 100 ms (+0%) | 2 s (+0%) |  | "
        "woken, evicted, unplaced 3, 2, 0 (4, 3, 0) |  |"
    )
    log = "a is at http://x on GPU 0: 9.0 s\na has left\nb is at http://y on GPU 1: 30.5 s\n"
    assert script.wakes(log) == [30.5]


def test_server_tables_by_hand(script, tmp_path):
    cells = (
        "cell,system,rate_rps,valid,invalid_because,attainment,ttft_p50_s,tpot_p50_s,e2e_p50_s\n"
        "a,edf,2,True,,0.9,0.05,0.01,1.5\n"
        "b,edf,4,False,sent late,0.5,0.05,0.01,1.5\n"
    )
    (tmp_path / "cells.csv").write_text(cells)
    names = [("ttft", 0.04, 0.05, 0.25), ("tpot", 0.02, 0.01, -0.5), ("e2e", 2.0, 1.0, -0.5)]
    rows = [
        {
            "metric": m,
            "statistic": "p50",
            "real_s": real,
            "simulated_s": simulated,
            "error": error,
            "spread": 0.1,
        }
        for m, real, simulated, error in names
    ]
    (tmp_path / "validation.json").write_text(json.dumps([{"cell": "a", "rows": rows}]))
    counts = {"preemptions_swap": 3, "preemptions_recompute": 0, "decisions_release": 1}
    decided = {"cell": "a", "server": counts, "simulated": counts, "alike": 9, "requests": 10}
    (tmp_path / TABLE).write_text(json.dumps([decided]))
    first, second = script.table(script.levels(tmp_path)).splitlines()[2:]
    assert first == (
        "| edf | 2 | 90.0 | 40 ms (+25%) | 20 ms (-50%) | 2 s (-50%) | "
        "10 | 3, 0, 1 (3, 0, 1) | 9/10 |"
    )
    assert second.startswith("| edf | 4 | no result: sent late |")
    assert "Not measured yet" in script.table([])


def test_server_table_has_the_errors_of_a_simulation_beside_it(script, tmp_path):
    for folder, seconds in (("distserve", 0.04), ("distserve-simulated", 0.03)):
        (tmp_path / folder).mkdir()
        head = (
            "cell,system,rate_rps,valid,invalid_because,attainment,ttft_p50_s,tpot_p50_s,e2e_p50_s"
        )
        row = f"a,distserve,2,True,,0.9,{seconds},{seconds},{seconds}"
        (tmp_path / folder / "cells.csv").write_text(f"{head}\n{row}\n")
    (line,) = script.table(script.levels(tmp_path / "distserve")).splitlines()[2:]
    assert line.startswith("| distserve | 2 | 90.0 | 40 ms (-25%) | 40 ms (-25%) |")
    assert set(script.FITTED_BY) | set(script.FITTED_BY.values()) <= set(script.EXPERIMENTS)


def test_command_of_a_shorter_run_has_its_requests_and_trace(script, tmp_path):
    words = script.command("adaptivellm", "work", 8)
    assert words[words.index("--requests") + 1] == "8"
    assert words[-1] == "work/adaptivellm"
    script.write_priorities(tmp_path / "p.csv", 20)
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert lines[0] == "arrival_s,prompt_tokens,output_tokens,priority"
    assert len(lines) == 21


def test_even_rounds_have_the_systems_in_reverse_order_and_no_validation(script):
    def systems(words):
        return [words[k + 1] for k, word in enumerate(words) if word == "--system"]

    first, second, third = (
        script.command("uellm-at-once", "work", round_number=number) for number in (1, 2, 3)
    )
    assert systems(second) == systems(first)[::-1]
    assert systems(third) == systems(first)
    assert "--validate" in first
    assert "--validate" not in second + third
    assert [words[-1] for words in (first, second)] == [
        "work/uellm-at-once",
        "work/uellm-at-once-2",
    ]


def test_table_of_rounds_has_the_median_and_range_of_measurements(script):
    measurements = [
        {
            "attainment": share,
            "e2e_mean_s": e2e_s,
            "makespan_s": 2 * e2e_s,
            "steps_mean": 40.0,
            "steps_last": 90.0,
            "attainment_by_steps": 0.8,
        }
        for share, e2e_s in ((0.5, 2.0), (0.7, 4.0), (0.6, 3.0))
    ]
    counts = dict.fromkeys(("preemptions_swap", "preemptions_recompute", "decisions_release"), 0)
    row = {
        "system": "s3batches",
        "measurements": measurements,
        "errors": [{"statistic": "mean", "simulated_s": 1.8, "error": -0.1}],
        "replayed_attainment": 0.55,
        "decisions": {"server": counts, "simulated": None, "alike": 38, "requests": 40},
    }
    (line,) = script.table([row]).splitlines()[2:]
    assert line == (
        "| s3batches | 60 (50 to 70) | 3 s (2 s to 4 s) | 6 s (4 s to 8 s) | 40 | 90 | 80 | 55 | "
        "1.8 s (-10%) | 38/40 |"
    )


def test_steps_to_answers_are_counted_in_the_servers_log(script, tmp_path):
    first, second, other = "cmpl-slo-bench-0-0-a", "cmpl-slo-bench-1-0-b", "cmpl-slo-bench-7-0-c"
    steps = [
        {"event": "step", "entered": [second], "ended": [other]},
        {"event": "done"},
        {"event": "step", "entered": [first], "ended": []},
        {"event": "step", "entered": [], "ended": [second]},
    ]
    before = "of another run\n"
    (tmp_path / "log").write_text(before + "".join(json.dumps(step) + "\n" for step in steps))
    place = {"file": "log", "begin": len(before), "end": None}
    assert script.steps_to_answers(tmp_path, place).tolist() == [3, 2]
