"""What suites allow their systems: alike rules, alike effort, and a table that says so."""

import re
from pathlib import Path

import pandas as pd
import pytest

from slo_bench import Experiment, SloBenchError
from slo_bench.harness.experiments.allowances import HEADS, allowances, configurations
from slo_bench.harness.experiments.suite_files import suites
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.harness.results.read_run import read_runs
from slo_bench.reports.pages.allowed import table_of


def policies_of(system):
    return [
        type(part) for part in (system.sharing or system.policy, system.cluster) if part is not None
    ]


def related(first, second):
    """Whether one is a variant of the other."""
    return any(
        issubclass(a, b) or issubclass(b, a)
        for a, b in zip(policies_of(first), policies_of(second), strict=False)
    )


@pytest.mark.parametrize("name", suites())
def test_suite_lists_the_allowances_of_each_system(name):
    suite = Experiment.suite(name)
    entries = allowances(suite)
    assert len(entries) == sum(len(variant.systems) for variant in suite.each_variant().values())
    assert suite.variants or [entry.system for entry in entries] == list(suite.systems)
    assert all(all(entry.row) for entry in entries)
    for entry in entries:
        fixed = [p for p, values in entry.parameters.items() if len(values) == 1]
        if fixed and len(fixed) == len(entry.parameters):
            system = entry.system.partition(" (")[0]  # of a variant
            assert system in suite.tuning, f"why {entry.system} has {fixed} is not said"


@pytest.mark.parametrize("name", suites())
def test_suite_with_a_dropping_system_has_a_dropping_rival(name):
    suite = Experiment.suite(name)
    droppers = [s for s in suite.systems if any(o.drop_rule for o in configurations(s, suite))]
    for dropper in droppers:
        rivals = [s for s in droppers if not related(SYSTEMS[s], SYSTEMS[dropper])]
        assert rivals or len(suite.systems) == 1, f"{dropper} alone may drop requests"


@pytest.mark.parametrize("name", suites())
def test_suite_tunes_its_systems_with_equal_budgets(name):
    suite = Experiment.suite(name)
    tuned = {s: record for s, record in suite.tuning.items() if record.trials}
    assert len({(record.seeds, record.objective) for record in tuned.values()}) <= 1
    budgets = {record.trials for record in tuned.values() if not record.whole_space}
    assert len(budgets) <= 1
    for record in tuned.values():
        assert not record.whole_space or record.trials <= max(budgets, default=record.trials)
        assert not set(record.seeds) & {cell.seed for cell in suite.plan().cells}


@pytest.mark.parametrize("name", suites())
def test_suite_uses_one_router_for_all_systems(name):
    suite = Experiment.suite(name)
    if len(suite.router) > 1:
        return  # what the suite compares
    routers = {entry.router for entry in allowances(suite)} - {"its own", "none: one instance"}
    assert len(routers) <= 1


RESULTS = Path(__file__).parents[3] / "docs" / "papers" / "results"
BEFORE_THE_COLUMN = {
    f"prism-{part}" for part in ("host-time", "local", "mechanisms", "tpot", "two")
}
"""Suites whose kept results are older than the column `models_unplaced`."""
NO_ROOM = re.compile(r"no room for all models on ([\d, ]+) GPUs")
"""How the note of a system's tuning says that a suite has too few GPUs for it on purpose."""


def cells_that_leave_models_out(cells, suite):
    """Cells in which models stood on no GPU, but where the suite says that they have no room."""
    without = cells[cells["models_unplaced"] > 0]
    rooms = {s: NO_ROOM.search(record.note) for s, record in suite.tuning.items()}
    gpus = {s: {int(n) for n in room[1].split(",")} for s, room in rooms.items() if room}
    excused = [row.gpus in gpus.get(row.system, ()) for row in without.itertuples()]
    return without[[not excuse for excuse in excused]]


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.glob("prism*")))
def test_kept_results_place_every_model_of_every_system(name):
    cells = pd.read_csv(RESULTS / name / "cells.csv")
    suite = Experiment.suite(name)
    if suite.models == (None,):
        return  # one model
    if "models_unplaced" not in cells and name in BEFORE_THE_COLUMN:
        pytest.skip("kept before the column was")
    without = cells_that_leave_models_out(cells, suite)
    assert without.empty, without[["system", "gpus", "models_unplaced"]].drop_duplicates()


def test_cells_without_room_are_excused_on_the_gpus_that_the_note_names():
    note = "as elsewhere; no room for all models on 1, 2 GPUs"
    suite = Experiment(systems=["muxserve"], tuning={"muxserve": {"note": note}})
    cells = pd.DataFrame(
        {"system": "muxserve", "gpus": [1, 2, 3, 4], "models_unplaced": [5, 1, 1, 0]}
    )
    assert list(cells_that_leave_models_out(cells, suite)["gpus"]) == [3]


def test_allowances_list_swept_values_and_drop_rules():
    experiment = Experiment(
        systems=["ascendra", "vllm"],
        parameters={"ascendra": {"overdue": ["keep", "drop"], "tickets": True}},
        tuning={"vllm": {"note": "as published"}},
        instances=3,
        router="least-loaded",
    )
    ours, vllm = (dict(zip(HEADS, entry.row, strict=True)) for entry in allowances(experiment))
    assert ours["router"] == "its own"
    assert ours["drops or rejects a request when"] == (
        "its TTFT SLO has passed before it begins (in some configurations)"
    )
    assert ours["parameters"] == "overdue=keep | drop, tickets=true"
    assert ours["how they were chosen"] == "all values are run"
    assert list(vllm.values()) == ["vllm", "least-loaded", "never", "defaults", "as published"]


def test_tuning_record_is_shown_and_kept_in_the_run(tmp_path):
    record = {
        "command": "slo-bench tune sarathi --trials 40",
        "trials": 40,
        "seeds": [10, 11],
        "objective": "attainment at 4 req/s",
        "default_value": 0.5,
        "best_value": 0.75,
    }
    experiment = Experiment(
        systems=["sarathi"],
        parameters={"sarathi": {"chunk_tokens": 2048}},
        tuning={"sarathi": record},
        rates=[1],
        requests=20,
        seeds=1,
    )
    result = experiment.run(tmp_path / "run", jobs=1)
    table = table_of(read_runs([result.folder]))
    [(_, [row])] = table.groups
    assert row[-1] == "40 trials on seeds 10, 11: attainment at 4 req/s 0.5 → 0.75"
    assert "slo-bench tune sarathi --trials 40" in (result.folder / "experiment.toml").read_text()


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        ({"s4": {"note": "x"}}, "tuning are set for 's4'"),
        ({"vllm": {"nte": "x"}}, "did you mean note"),
        ({"vllm": {}}, "needs a note, or trials"),
        ({"vllm": {"trials": 3}}, "needs command, trials, seeds, objective and best_value"),
    ],
)
def test_impossible_tuning_record_is_refused(tuning, message):
    with pytest.raises(SloBenchError, match=message):
        Experiment(systems=["vllm"], tuning=tuning)


@pytest.mark.slow
def test_systems_without_a_drop_rule_drop_no_request():
    """Far beyond capacity, each system of one instance that says it never drops serves all."""
    from slo_bench.harness.core.policy import Policy
    from slo_bench.harness.engine.simulator.simulate import simulate
    from slo_bench.harness.experiments.execution.cells import PlacementSpec, placed
    from slo_bench.workloads.slo import parse_slo
    from slo_bench.workloads.source import load_source

    place = placed(PlacementSpec(model="mistral-7b", gpu="a100-80g", tp=1))
    workload = load_source("alpaca").make(
        rate_rps=400.0, requests=1500, seed=0, slo=parse_slo("ttft=0.5,e2e=3")
    )
    for name, system in SYSTEMS.items():
        if system.sharing or system.cluster or not isinstance(system.policy, Policy):
            continue
        records = simulate(workload, system, place.placement, place.step_time.model).records
        lost = int((records.outcome != 1).sum())
        assert bool(lost) == bool(system.drop_rule), (name, lost)


def test_list_suites_shows_allowances():
    from typer.testing import CliRunner

    from slo_bench.cli.main import app

    shown = CliRunner().invoke(app, ["list", "suites", "uellm-tuned"])
    assert shown.exit_code == 0
    words = " ".join(shown.output.split())
    assert "30 trials" in words
    assert all(head in words for head in ("router", "parameters"))
