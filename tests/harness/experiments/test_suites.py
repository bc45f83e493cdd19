"""Suites state how long requests arrive, long enough against their SLOs and answers."""

import dataclasses

import numpy as np
import pytest

from slo_bench import Experiment
from slo_bench.harness.experiments.execution.cell_specs import CellSpec, placed, source
from slo_bench.harness.experiments.execution.cells import models_of, workload_of
from slo_bench.harness.experiments.suite_files import suites
from slo_bench.workloads.arrivals import Concurrency

LEAST = 10  # times the longest SLO or answer, after the warm-up


def longest_slo_s(spec: CellSpec) -> float:
    """The longest bound of a request on TTFT, E2E latency or its deadline."""
    workload = workload_of(spec)
    until_s = workload.deadline_s - workload.arrival_s
    bounds = np.concatenate([workload.ttft_slo_s, workload.e2e_slo_s, until_s])
    return float(bounds[np.isfinite(bounds)].max(initial=0.0))


def longest_answer_s(spec: CellSpec) -> float:
    """The decoding time of the longest answer, alone on the slowest model."""
    workload = workload_of(spec)
    if spec.workload.models is None:
        steps = [placed(spec.placement).step_time.model]
    else:
        models = models_of(spec.placement, spec.workload, spec.instances)
        steps = [deployment.step_time for deployment in models.values()]
    longest = int(workload.output_tokens.argmax())
    tokens = int(workload.output_tokens[longest])
    kv_tokens = int(workload.prompt_tokens[longest]) + tokens // 2
    return tokens * max(step.step_s(1, kv_tokens, ()) for step in steps)


def lightest(cells: list[CellSpec]) -> list[CellSpec]:
    """One cell of each workload, SLO and placement: that of the lowest rate and the most GPUs."""
    representatives: dict[tuple[object, ...], CellSpec] = {}
    for spec in sorted(cells, key=lambda spec: (spec.rate_rps or 0.0, -spec.instances)):
        slo = (str(spec.slo), spec.slo_scale)
        representatives.setdefault((spec.workload, spec.placement, slo, spec.duration_s), spec)
    return list(representatives.values())


@pytest.mark.parametrize("name", suites())
def test_suites_last_ten_times_their_longest_slo_and_answer(name):
    for spec in lightest(list(Experiment.suite(name).plan().cells)):
        arrivals = getattr(source(spec.workload), "arrivals", None)
        if isinstance(arrivals, Concurrency):
            # All requests are there from the start, or batch follows on batch: their number is
            # the experiment.
            assert spec.requests is not None
            assert spec.requests % arrivals.users == 0
            continue
        if name == "quickstart":  # the default experiment: its first answer comes within seconds
            counted_s = spec.requests / spec.rate_rps
        else:
            assert spec.requests is None
            assert spec.duration_s is not None
            assert spec.warmup_s > 0
            counted_s = spec.duration_s - spec.warmup_s
        assert counted_s >= LEAST * longest_slo_s(spec), spec.cell
        assert counted_s >= LEAST * longest_answer_s(spec), spec.cell


def test_duration_check_detects_a_suite_that_is_too_short():
    (spec,) = lightest(list(Experiment.suite("uellm").plan().cells))
    assert 345 < longest_slo_s(spec) < 350
    short = dataclasses.replace(spec, duration_s=1000.0)
    assert short.duration_s < LEAST * longest_slo_s(short)
    assert 5 < longest_answer_s(spec) < 60


def test_at_once_suite_cuts_answers_of_ua_and_of_no_other_variant(tmp_path):
    answers = "lognormal(median=169,sigma=0.55)"
    predictor = "noisy(accuracy=0.2,factor=0.45)"
    settings = {"output_tokens": answers, "length_predictor": predictor, "host_s": 0.014}
    experiment = Experiment.suite("uellm-at-once", seeds=1, **settings)
    results = experiment.run(tmp_path / "run", jobs=1)
    cut = results.cells.groupby("variant")["count_answers_cut"].sum()
    assert {name for name, count in cut.items() if count} == {"UA"}
    whole = results.cells.query("variant == 'fair SLO-ODBS'")
    assert whole["count_answers_cut"].isna().all()
