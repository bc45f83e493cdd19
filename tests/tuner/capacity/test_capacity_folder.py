import json

import numpy as np
import pandas as pd
import pytest

from slo_bench import Experiment
from slo_bench.harness.results.run_folder import CAPACITY_FILE
from slo_bench.harness.servers.mock.mock_config import InjectedFault, MockConfig
from slo_bench.harness.servers.mock.running_mock import serving
from slo_bench.reports.pages.run_page import write_report
from slo_bench.reports.terminal.capacity_answer import failed_lines
from slo_bench.tuner.capacity.capacity_checkpoint import read_capacity
from slo_bench.tuner.capacity.capacity_options import CapacityOptions
from slo_bench.tuner.capacity.folder import search_capacity
from slo_bench.workloads.errors import SloBenchError

QUICK = CapacityOptions(tolerance=0.3, targets=(0.9,), max_requests=6000)


def experiment(**changes):
    settings = {"systems": "vllm", "requests": 200, "seeds": 2, "output_tokens": "20"}
    return Experiment(**{**settings, **changes})


def same(rows):
    """Rows without the time they took."""
    return [{name: value for name, value in row.items() if name != "wall_s"} for row in rows]


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Two configurations; the second begins near the first."""
    folder = tmp_path_factory.mktemp("capacity") / "run"
    return search_capacity(experiment(systems=["vllm", "sarathi"]), folder, options=QUICK)


def test_capacity_rows_have_rate_and_interval(searched):
    rows = searched.rows()
    assert [row["system"] for row in rows] == ["vllm", "sarathi"]
    for row in rows:
        assert row["low_rps"] < row["capacity_rps"] < row["high_rps"]
        assert row["target"] == 0.9
        assert row["requests_spent"] == sum(level["requests"] for level in row["levels"])
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert same(read_capacity(searched.folder)) == same(rows)


def test_second_search_starts_at_the_capacity_of_the_first(searched):
    kept = json.loads((searched.folder / CAPACITY_FILE).read_text())["searches"]
    first, second = kept
    assert first["neighbours"] == []
    assert second["neighbours"] == [first["found"][0]["capacity_rps"]]
    begin = second["runs"][0]["rate_rps"]
    assert begin == pytest.approx(second["neighbours"][0], rel=0.01)


def test_capacity_runs_are_cells_that_the_report_reads(searched, tmp_path):
    runs = {
        (search["search"], run["rate_rps"], run["seed"])
        for search in json.loads((searched.folder / CAPACITY_FILE).read_text())["searches"]
        for run in search["runs"]
    }
    cells = pd.read_csv(searched.folder / "cells.csv")
    assert {(r.system, r.rate_rps, r.seed) for r in cells.itertuples()} == runs
    page = write_report([searched.folder], tmp_path / "report.html").read_text()
    best = max(searched.rows(), key=lambda row: row["capacity_rps"])
    assert f"<strong>{best['system']}</strong> carries" in page
    assert "with at least 90 % of requests in their SLO." in page
    section = page.partition('id="capacity-section"')[2].partition("</section>")[0]
    assert "vllm" in section
    assert "95 % interval" in section
    assert '"capacity":{"id":"capacity"' in page


@pytest.mark.slow
def test_capacity_report_names_every_workload(tmp_path):
    two_workloads = experiment(systems=["vllm", "orca"], workload=["sharegpt", "azure-conv"])
    outcome = search_capacity(two_workloads, tmp_path / "run", options=QUICK)
    page = write_report([outcome.folder], tmp_path / "report.html").read_text()
    capacities = pd.DataFrame(outcome.rows()).pivot_table(
        index="workload", columns="system", values="capacity_rps"
    )
    ahead = capacities.idxmax(axis=1).value_counts()
    for system, count in ahead.items():
        assert f"<strong>{system}</strong> in <strong>{count} of 2</strong>" in page
    assert "is carried by" in page
    section = page.partition('id="capacity-section"')[2].partition("</section>")[0]
    places = [section.index(f">{name}<") for name in ("sharegpt", "azure-conv")]
    assert places == sorted(places)
    assert section.count(">vllm<") == section.count(">orca<") == 2


def test_interrupted_capacity_search_is_resumed(tmp_path, searched):
    two_systems = experiment(systems=["vllm", "sarathi"])
    runs = 0

    def interrupt(progress):
        nonlocal runs
        runs += 1
        if runs == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_capacity(two_systems, tmp_path / "run", options=QUICK, progress=interrupt)
    kept = json.loads((tmp_path / "run" / CAPACITY_FILE).read_text())["searches"]
    remembered = sum(len(search["runs"]) for search in kept)
    assert remembered >= 6
    ran = []
    outcome = search_capacity(
        two_systems,
        tmp_path / "run",
        options=QUICK,
        resume=True,
        ended=lambda requests, clock_s: ran.append(requests),
    )
    assert same(outcome.rows()) == same(searched.rows())
    again = search_capacity(
        two_systems,
        tmp_path / "run",
        options=QUICK,
        resume=True,
        ended=lambda *_: pytest.fail("ran"),
    )
    assert again.rows() == outcome.rows()


@pytest.mark.slow
def test_capacity_search_continues_with_a_larger_budget(tmp_path):
    small = QUICK.model_copy(update={"tolerance": 0.02, "max_requests": 3000})
    first = search_capacity(experiment(), tmp_path / "run", options=small)
    large = small.model_copy(update={"max_requests": 9000})
    second = search_capacity(experiment(), tmp_path / "run", options=large, resume=True)
    (before,), (after,) = first.rows(), second.rows()
    assert before["requests_spent"] <= 3000 < after["requests_spent"] <= 9000
    first_rates = {level["rate_rps"] for level in before["levels"]}
    assert first_rates <= {level["rate_rps"] for level in after["levels"]}


def test_resume_with_other_targets_is_refused(searched):
    other = QUICK.model_copy(update={"targets": (0.5,)})
    two_systems = experiment(systems=["vllm", "sarathi"])
    with pytest.raises(SloBenchError, match=r"another experiment.*targets"):
        search_capacity(two_systems, searched.folder, options=other, resume=True)


def test_resume_with_another_version_is_refused(searched, monkeypatch):
    monkeypatch.setattr("slo_bench.harness.experiments.experiment._version", lambda name: "9")
    two_systems = experiment(systems=["vllm", "sarathi"])
    with pytest.raises(SloBenchError, match="this is 9: it would mix"):
        search_capacity(two_systems, searched.folder, resume=True)


def test_capacity_search_warm_starts_from_another_folder(searched, tmp_path):
    options = QUICK.model_copy(update={"warm_start": searched.folder})
    search_capacity(experiment(systems="sarathi"), tmp_path / "run", options=options)
    (search,) = json.loads((tmp_path / "run" / CAPACITY_FILE).read_text())["searches"]
    assert search["neighbours"] == [searched.rows()[1]["capacity_rps"]]


def test_rates_bound_the_capacity_search(tmp_path):
    outcome = search_capacity(experiment(rates=[0.5, 1.0]), tmp_path / "run", options=QUICK)
    (row,) = outcome.rows()
    assert row["capacity_rps"] is None
    assert row["low_rps"] == 1.0
    assert {level["rate_rps"] for level in row["levels"]} <= {0.707, 1.0}


def test_capacity_of_a_trace_replays_it_whole(tmp_path):
    rng = np.random.default_rng(4)
    arrival_us = (np.cumsum(rng.standard_exponential(400)) * 1e6).astype("timedelta64[us]")
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"{moment},500,50" for moment in np.datetime64("2024-05-01", "us") + arrival_us]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(lines) + "\n")
    outcome = search_capacity(
        Experiment(systems="vllm", workload=str(trace)), tmp_path / "run", options=QUICK
    )
    (row,) = outcome.rows()
    assert {level["requests"] for level in row["levels"]} <= {400 * n for n in range(1, 3)}
    assert row["low_rps"] < row["capacity_rps"] < row["high_rps"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"replay_speeds": [1, 2]}, "leave replay_speeds out"),
        ({"requests": [100, 200]}, "one value of requests"),
        ({"arrivals": "concurrency(4)"}, "choose another arrival process"),
    ],
)
def test_capacity_search_refuses_unusable_settings(settings, problem, tmp_path):
    with pytest.raises(SloBenchError, match=problem):
        search_capacity(experiment(**settings), tmp_path / "run", options=QUICK)
    assert not (tmp_path / "run").exists()


def test_capacity_search_ignores_duration_and_warmup_of_a_suite(tmp_path):
    with_duration = {"requests": None, "duration_s": 60, "warmup_s": 50}
    levels = []
    for name, settings in (("with", with_duration), ("without", {"requests": None})):
        [row] = search_capacity(experiment(**settings), tmp_path / name, options=QUICK).rows()
        levels.append([(level["rate_rps"], level["attainment"]) for level in row["levels"]])
    assert levels[0] == levels[1]
    kept = Experiment.load(tmp_path / "with" / "experiment.toml")
    assert (kept.duration_s, kept.warmup_s) == ((60.0,), (50.0,))


def test_warm_start_from_a_folder_without_capacities_is_refused(tmp_path):
    options = QUICK.model_copy(update={"warm_start": tmp_path})
    with pytest.raises(SloBenchError, match="holds no capacity to start from"):
        search_capacity(experiment(), tmp_path / "run", options=options)


def over_http(mock, send_delay_limit_s=0.5, **changes):
    return Experiment(
        systems="mock",
        backend="openai",
        client={"base_urls": [mock.url], "send_delay_limit_s": send_delay_limit_s},
        model="mock",
        workload="synthetic",
        prompt_tokens="8",
        output_tokens="2",
        slo="ttft=0.05",
        requests=100,
        seeds=1,
        **changes,
    )


@pytest.mark.slow
def test_capacity_of_a_server_over_http(tmp_path):
    with serving(MockConfig(ttft_s=0.002, slots=4, service_s=0.02)) as mock:
        outcome = search_capacity(
            over_http(mock, rates=[100, 400]),
            tmp_path / "run",
            options=QUICK.model_copy(update={"max_requests": 600}),
        )
    (row,) = outcome.rows()
    assert row["backend"] == "openai"
    assert 0 < row["requests_spent"] <= 600
    # Four slots of 20 ms carry 200 req/s; on a busy machine less, or too few valid runs to tell.
    assert 0 <= row["low_rps"] <= 200
    carried = [level["rate_rps"] for level in row["levels"] if level["sustained"]]
    assert row["low_rps"] in [0, *carried]


def test_capacity_of_a_server_that_ignores_max_tokens_tells_the_longer_answers(tmp_path):
    config = MockConfig(ttft_s=0.002, itl_s=0.0, answer_tokens=64)
    options = QUICK.model_copy(update={"max_requests": 400})
    with serving(config) as mock:
        server_setup = over_http(mock, 60.0, rates=[100, 200])
        notes = []
        outcome = search_capacity(server_setup, tmp_path / "run", options=options, say=notes.append)
    assert "sending a first request" in notes
    (row,) = outcome.rows()
    assert (row["failed"], row["faults_decide"]) == (0, False)
    assert row["surplus_outputs"] == row["requests_spent"]
    (line,) = failed_lines([row])
    assert f"{row['requests_spent']} of {row['requests_spent']} answers have more tokens" in line


def test_requests_refused_at_any_rate_end_the_capacity_search(tmp_path):
    refusing = MockConfig(fault=InjectedFault.TOO_LONG, fault_every=2)
    says = r"refuses 50 of 100 requests at any rate \(400: the prompt is too long\)"
    with serving(refusing) as mock, pytest.raises(SloBenchError, match=says):
        search_capacity(over_http(mock, rates=[100, 400]), tmp_path / "run", options=QUICK)
