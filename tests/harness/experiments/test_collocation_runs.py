"""Cells with embedding requests: what fits, what is measured, and loads as shares of capacity."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from slo_bench import Experiment
from slo_bench.harness.core.records.judging import judge
from slo_bench.harness.core.records.request_records import Outcome, Records
from slo_bench.harness.engine.loop.overlong_requests import fit, fit_embeds
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.experiments.execution.cell_specs import placed
from slo_bench.harness.experiments.execution.cells import workload_of
from slo_bench.harness.experiments.explain.latency_breakdown import SpanKind
from slo_bench.harness.experiments.explain.trace import cell_names, replay
from slo_bench.harness.policies.systems import system
from slo_bench.harness.results.metrics import CollocationObjective, parse_objective
from slo_bench.harness.results.metrics import _by_kind as by_kind
from slo_bench.harness.results.rate_windows import rate_window
from slo_bench.harness.results.request_figures import Requests
from slo_bench.predictors.embedder import embedder
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.reports.pages.explain_page import explain
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.request import RequestType
from slo_bench.workloads.workload import Workload

MIX = (
    "mix(chat=synthetic(prompt=100,output=50,priority=1):1,"
    "batch=synthetic(prompt=100,output=50):1,embed=embed(texts=32,tokens=256):2)"
)
BESIDE = embedder(model("e5-large"), Placement(model("llama-2-7b"), gpu("a100-80g")))


def embeds(*rows: tuple[int, int]) -> Workload:
    texts, length = (np.array(column) for column in zip(*rows, strict=True))
    ones = np.ones(len(rows), dtype=np.int64)
    return Workload(np.zeros(len(rows)), texts * length, ones, request_type=ones, num_inputs=texts)


def test_texts_longer_than_the_embedders_context_are_refused():
    workload = embeds((4, 512), (4, 600))
    with pytest.raises(SloBenchError, match="those of request 1 have 600 tokens, e5-large reads 5"):
        fit_embeds(workload, BESIDE, 1000, "error")
    assert fit_embeds(workload, BESIDE, 1000, "reject")[1].tolist() == [1]
    cut, refused = fit_embeds(workload, BESIDE, 1000, "truncate")
    assert not len(refused)
    assert cut.prompt_tokens.tolist() == [2048, 2048]


def test_embedding_passes_larger_than_memory_are_refused():
    workload = embeds((4, 512), (512, 512))
    needs = BESIDE.blocks([(512, 512)])
    assert not len(fit_embeds(workload, BESIDE, needs, "error")[1])
    assert fit_embeds(workload, BESIDE, needs - 1, "reject")[1].tolist() == [1]
    with pytest.raises(SloBenchError, match=f"takes {needs} of {needs - 1} blocks"):
        fit_embeds(workload, BESIDE, needs - 1, "error")


def test_texts_longer_than_the_language_models_context_are_embedded():
    workload = embeds((100, 500))
    assert not len(fit(workload, 1000, "error", reserved=False, embeds_apart=True)[1])
    assert len(fit(workload, 1000, "reject", reserved=False)[1]) == 1


def test_figures_are_given_for_generation_and_embedding():
    workload = Workload(
        np.array([0.0, 1.0, 2.0, 4.0]),
        np.array([10, 10, 10, 20]),
        np.array([2, 2, 2, 1]),
        e2e_slo_s=np.array([5.0, 5.0, 5.0, 1.0]),
        priority=np.array([1, 0, 0, 0]),
        request_type=np.array([0, 0, 0, 1]),
    )
    records = Records.empty(4)
    records.arrival_s[:] = workload.arrival_s
    records.first_scheduled_s[:] = workload.arrival_s
    records.finish_s[:] = [1.0, 9.0, np.nan, 4.5]
    records.outcome[:] = [Outcome.FINISHED, Outcome.FINISHED, Outcome.REJECTED, Outcome.FINISHED]
    requests = Requests.of(workload, records, judge(workload, records))
    everybody = np.ones(4, dtype=bool)
    window = rate_window(records.arrival_s, records.finish_s)
    weights = CollocationObjective(1.0, 2.0, 4.0)
    figures = by_kind(workload, requests, everybody, window, weights)
    assert figures["llm_attainment"] == pytest.approx(1 / 3)
    assert figures["embed_attainment"] == 1.0
    assert figures["embed_p50_s"] == 0.5
    assert figures["priority_spread"] == 1.0
    # One of four finishes by the last arrival, at 4 s.
    assert figures["objective"] == pytest.approx(1 / 3 + 2 * 1 + 4 * 0.25)
    alone = dataclasses.replace(workload, request_type=np.zeros(4, dtype=np.int64))
    assert by_kind(alone, requests, everybody, window, weights) == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("alpha=-1", "objective alpha must not be negative"),
        ("alpha=0,beta=0,gamma=0", "weighs nothing"),
        ("delta=1", "cannot read objective"),
        ("1,1,1", "cannot read objective"),
    ],
)
def test_impossible_objectives_are_refused(text, problem):
    with pytest.raises(SloBenchError, match=problem):
        parse_objective(text)


def experiment(**settings: object) -> Experiment:
    common = {"model": "llama-2-7b", "embedder": "bge-m3", "requests": 40, "seeds": 1}
    return Experiment(**{"systems": "collocation", "workload": MIX, **common, **settings})


def test_load_factors_are_shares_of_each_cells_capacity():
    both = experiment(workload=[MIX, MIX.replace(":2)", ":18)")], load_factors=[0.5, 1.0]).plan()
    rates = {(c.columns["workload"], c.columns["load_factor"]): c.rate_rps for c in both.cells}
    few, many = dict.fromkeys(workload for workload, _ in rates)
    for workload in (few, many):
        assert rates[workload, 1.0] == pytest.approx(2 * rates[workload, 0.5], rel=1e-3)
    assert rates[few, 1.0] != rates[many, 1.0]


def test_collocated_run_has_its_columns(tmp_path):
    result = experiment(load_factors=[0.5], objective="alpha=0.5,beta=0.5,gamma=0").run(
        tmp_path, jobs=1
    )
    row = result.cells.iloc[0]
    assert row["load_factor"] == 0.5
    assert row["objective"] == pytest.approx((row["llm_attainment"] + row["embed_attainment"]) / 2)
    again = Experiment.load(tmp_path / "experiment.toml").plan()
    assert [c.cell for c in again.cells] == [
        c.cell for c in experiment(load_factors=[0.5]).plan().cells
    ]


def test_experiment_with_embeddings_needs_an_embedder():
    with pytest.raises(SloBenchError, match="say which model embeds"):
        experiment(embedder=None, load_factors=[0.5]).plan()


def test_load_factors_with_rates_are_refused():
    with pytest.raises(SloBenchError, match="rates and load_factors contradict"):
        experiment(rates=[1.0], load_factors=[0.5])


def test_explain_of_an_embedding_has_one_stage(tmp_path):
    experiment(load_factors=[0.5]).run(tmp_path, jobs=1)
    cell = replay(tmp_path, cell_names(tmp_path)[0])
    request = int(np.flatnonzero(cell.workload.request_type)[0])
    [stage] = explain(cell, request).stages
    records = cell.result.records
    assert stage.spans[-1].part is SpanKind.EMBED
    assert stage.spans[-1].begin_s == records.first_scheduled_s[request]
    assert stage.begin_s == records.arrival_s[request]
    assert stage.end_s == records.finish_s[request]


SPLIT = ("distserve", "splitwise", "mooncake", "memserve", "banaserve")


@pytest.mark.parametrize("name", ["vllm", "collocation", "llumnix", "ascendra", *SPLIT])
@pytest.mark.parametrize("alone", [0, 1])
def test_embeddings_across_instances_are_all_served(name, alone, tmp_path):
    """Beside every instance, or on one that does nothing else: nobody is lost, nobody strays."""
    run = experiment(
        systems=name,
        parameters={name: {"decode_instances": 0}} if name in SPLIT else {},
        instances=3 + alone,
        embed_instances=alone,
        rates=[20.0],
        records="csv",
    ).run(tmp_path, jobs=1)
    row = run.cells.iloc[0]
    assert row["finished"] == row["requests"] == 40
    requests = pd.read_csv(next((tmp_path / "requests").iterdir()))
    embeds = requests["request_type"] == 1
    where = {kind: set(requests.loc[embeds == kind, "instance"]) for kind in (True, False)}
    if alone:
        assert where[True] == {3}
        assert where[False] <= {0, 1, 2}
    else:
        assert len(where[True]) > 1
    if name in SPLIT:
        assert 0 not in where[False]  # it prefills


def test_embed_instances_must_leave_one_to_generate():
    with pytest.raises(SloBenchError, match="embed_instances = 2 leaves none of 2 instances"):
        experiment(instances=2, embed_instances=2, rates=[1.0]).plan()
    with pytest.raises(SloBenchError, match="embed_instances needs an embedder"):
        experiment(
            workload="alpaca", embedder=None, instances=2, embed_instances=1, rates=[1.0]
        ).plan()


def test_several_embedders_waiting_for_memory_end():
    """None gives anything back meanwhile: they need not stop for each other at every instant."""
    crowd = "mix(chat=synthetic(prompt=100,output=400):6,embed=embed(texts=128,tokens=512):1)"
    crowded_experiment = experiment(
        systems="vllm", workload=crowd, instances=3, num_gpu_blocks=300, rates=[30.0], requests=150
    )
    cell = crowded_experiment.plan().cells[0]
    place, workload = placed(cell.placement), workload_of(cell)
    result = simulate(
        workload,
        system("vllm"),
        place.placement,
        place.step_time.model,
        instances=3,
        router="least-loaded",
        embedder=place.embedder,
    )
    embeds = workload.request_type == RequestType.EMBED
    assert (result.records.outcome == Outcome.FINISHED).all()
    assert place.embedder.blocks([(128, 512)]) > 150  # of 300
    assert (result.records.first_scheduled_s - result.records.arrival_s)[embeds].max() > 1.0
