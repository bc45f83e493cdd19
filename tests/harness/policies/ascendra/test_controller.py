"""Ascendra by hand: its Fig. 1, tickets, offload, subgroups, elastic batches."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from slo_bench import Experiment
from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.policies.ascendra.high_priority import AscendraHp, DecodeLengths
from slo_bench.harness.policies.shared.timeouts import SarathiDrop, VllmDrop, VllmV0Drop
from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.workload import Workload

# A step takes a sixteenth of a second a token: one unit of time for a block.
UNIT = {"step_s": 0.0, "per_token_s": 1 / 16}


def ascendra(**parameters):
    plain = {"performance_model": "given", "watermark": 0.0, "step_budget_s": 60.0}
    return SYSTEMS["ascendra"].with_parameters(**{**plain, **parameters})


# B goes to the HP instance, which is idle; A, D and C to the LP instance; E comes at 1.
FIG_1 = {"B": (0, 16, 1), "A": (0, 48, 1), "D": (0, 32, 1), "C": (0, 32, 1), "E": (1, 32, 1)}


def in_slo(records, ttft_s=5.0):
    return (records.first_token_s - records.arrival_s <= ttft_s).tolist()


def test_ascendra_fig_1_first_come_first_served_is_late(serve_each_way, requests):
    """A takes 3 units, C, D and E 2, B 1: E waits behind five units of work and has 5 in all."""
    rows = [FIG_1[name] for name in "ABCDE"]
    vllm = SYSTEMS["vllm-v0"].with_parameters(max_num_seqs=1, watermark=0.0)
    records = serve_each_way(requests(*rows), vllm, instances=2, **UNIT).records
    assert records.instance.tolist() == [0, 1, 0, 1, 0]
    assert records.first_scheduled_s.tolist() == [0, 0, 3, 1, 5]
    assert in_slo(records) == [True, True, True, True, False]


def test_ascendra_fig_1_serves_all_five_in_slo(serve_each_way, requests):
    """E finds the HP instance idle at 1; at 3 the LP instance takes D and offloads C."""
    workload = requests(*FIG_1.values(), ttft_slo_s=[5.0] * 5)
    system = ascendra(n_lp=1, n_hp=1, max_num_seqs=1, elastic=False, hp_batch=1, hp_batch_tokens=16)
    records = serve_each_way(workload, system, instances=2, **UNIT).records
    lp, hp = 0, 1
    by_name = dict(zip(FIG_1, records.instance.tolist(), strict=True))
    assert by_name == {"A": lp, "B": hp, "C": hp, "D": lp, "E": hp}
    scheduled = dict(zip(FIG_1, records.first_scheduled_s.tolist(), strict=True))
    assert scheduled == {"A": 0, "B": 0, "C": 3, "D": 3, "E": 1}
    assert in_slo(records) == [True] * 5


def test_ascendra_fig_1_without_offload_one_is_late(serve_each_way, requests):
    workload = requests(*FIG_1.values(), ttft_slo_s=[5.0] * 5)
    system = ascendra(n_lp=1, n_hp=1, max_num_seqs=1, offload=False)
    records = serve_each_way(workload, system, instances=2, **UNIT).records
    assert dict(zip(FIG_1, in_slo(records), strict=True))["C"] is False


def test_hp_instance_has_one_outstanding_ticket(serve_each_way, requests):
    """The HP instance computes a prompt until 1, decodes from then on, and asks again at once."""
    workload = requests((0, 16, 9), (0.5, 16, 1), (1.5, 16, 1), (1.6, 16, 1))
    records = serve_each_way(workload, ascendra(n_lp=1), instances=2).records
    assert records.instance.tolist() == [1, 0, 1, 0]
    records = serve_each_way(workload, ascendra(n_lp=1, tickets=False), instances=2).records
    assert records.instance.tolist() == [0, 0, 0, 0]


def test_lp_instances_take_turns_in_each_group(serve_each_way, requests):
    workload = requests(*[(0.1 * k, 16, 1) for k in range(8)])
    system = ascendra(n_lp=2, n_hp=1, tickets=False)
    records = serve_each_way(workload, system, instances=6).records
    # Groups {0, 1 | 4} and {2, 3 | 5}.
    assert records.instance.tolist() == [0, 2, 1, 3, 0, 2, 1, 3]


def test_offload_goes_to_the_shortest_queue_of_the_group(serve_each_way, requests):
    """All four are due at once; the LP instance takes one of them, the others go over."""
    workload = requests(*[(0, 16, 1)] * 5, ttft_slo_s=[3.0] * 5)
    system = ascendra(
        n_lp=1, n_hp=2, tickets=False, max_num_seqs=1, hp_batch=1, elastic=False, hp_batch_tokens=32
    )
    records = serve_each_way(workload, system, instances=3, **UNIT).records
    assert records.instance.tolist() == [0, 1, 2, 1, 2]
    assert in_slo(records, 3.0) == [True] * 5


def test_overdue_drop_applies_to_lp_and_hp_instances(serve_each_way, requests):
    workload = requests(*[(0, 64, 1)] * 4, ttft_slo_s=[5.0] * 4)
    parameters = {"n_lp": 1, "max_num_seqs": 1, "hp_batch": 1, "elastic": False, "tickets": False}
    kept = serve_each_way(workload, ascendra(**parameters), instances=2, **UNIT).records
    assert (kept.outcome == Outcome.FINISHED).all()
    dropped = serve_each_way(workload, ascendra(overdue="drop", **parameters), instances=2, **UNIT)
    assert (dropped.records.outcome == Outcome.DROPPED).sum() == 1
    assert (dropped.records.finish_s[:3] <= [4, 4, 8]).all()


@pytest.mark.parametrize("policy", [VllmDrop, VllmV0Drop, SarathiDrop])
def test_drop_baselines_drop_overdue_requests(policy, serve_each_way, requests):
    workload = requests(*[(0, 16, 5)] * 3, ttft_slo_s=[4.0, 4.0, 6.0])
    records = serve_each_way(workload, policy(max_num_seqs=1)).records
    assert records.outcome.tolist() == [Outcome.FINISHED, Outcome.DROPPED, Outcome.FINISHED]


def test_instances_that_do_not_divide_into_groups_are_refused(serve, requests):
    with pytest.raises(SloBenchError, match=r"2 LP and 1 HP instances, and 4 .* use 3 instances"):
        serve(requests((0, 16, 1)), ascendra(), instances=4)


def test_decode_lengths_estimate_remaining_tokens():
    lengths = DecodeLengths()
    assert lengths.to_come(9, 9) == 0
    for k in range(100):
        lengths.add(10 if k % 2 else 30)
    assert lengths.mean == pytest.approx(20)
    # Those met decoding: (100 + 900) / 2 / (2 * 20) = 12.5 tokens left.
    assert lengths.to_come(2, 1) == pytest.approx(2 * 12.5 + 20)


def test_elastic_batch_keeps_a_tenth_or_the_expected_blocks_free():
    lengths = DecodeLengths()
    view = SimpleNamespace(
        n_running=4,
        n_decoding=4,
        n_prefilling=0,
        total_blocks=1000,
        block_size=16,
        policy_state=lengths,
    )
    hp = AscendraHp()
    assert hp.headroom_blocks(None, view) == 90  # and 10 of the watermark
    for _ in range(100):
        lengths.add(800)
    assert hp.headroom_blocks(None, view) == (4 * 400 + 800) / 16
    assert dataclasses.replace(hp, elastic=False).headroom_blocks(None, view) == 0
    view.n_running = 0
    assert hp.headroom_blocks(None, view) == 0


def test_an_elastic_batch_grows_beyond_a_fixed_one(serve_each_way, requests):
    workload = requests(*[(0.1 * k, 16, 20) for k in range(12)])
    fixed = serve_each_way(workload, AscendraHp(elastic=False, max_num_seqs=4)).records
    elastic = serve_each_way(workload, AscendraHp(max_num_seqs=4)).records
    assert elastic.first_scheduled_s.max() == 2
    assert fixed.first_scheduled_s.max() > 20


PLACEMENT = Placement(model("mistral-7b"), gpu("a100-80g"))


def overloaded(n: int, rate_rps: float) -> Workload:
    rng = np.random.default_rng(3)
    return Workload(
        np.cumsum(rng.exponential(1 / rate_rps, n)),
        rng.integers(50, 2000, n),
        rng.integers(20, 400, n),
        ttft_slo_s=np.ones(n),
        tpot_slo_s=np.full(n, 0.15),
    )


def test_refitted_model_is_within_a_tenth_and_keeps_attainment():
    workload = overloaded(1500, 14.0)
    steps = step_time(PLACEMENT).model
    results = {
        name: simulate(
            workload,
            SYSTEMS["ascendra"].with_parameters(performance_model=name),
            PLACEMENT,
            steps,
            instances=3,
        )
        for name in ("refitted", "given")
    }
    for instance in results["refitted"].instances:
        assert instance.prediction_error < 0.1
    ttft_s = {name: result.records.ttft_s for name, result in results.items()}
    met = {name: (t <= 1.0).mean() for name, t in ttft_s.items()}
    assert met["refitted"] == pytest.approx(met["given"], abs=0.1)
    assert np.isnan(results["given"].instances[0].prediction_error)


def test_ascendra_parameters_are_swept_and_counts_are_columns(tmp_path):
    """Parameters of LP instances and of the controller are swept alike; rows say who served
    them.
    """
    experiment = Experiment(
        systems=["ascendra", "vllm"],
        workload="sharegpt",
        model="mistral-7b",
        router="least-loaded",
        gpus=3,
        rates=[3],
        requests=40,
        seeds=1,
        records="csv",
        overlong_requests="reject",
        parameters={"ascendra": {"n_lp": 2, "tickets": [True, False], "value": "sjf"}},
    )
    cells = experiment.plan().cells
    assert [(cell.system, cell.router) for cell in cells] == [
        ("ascendra", None),
        ("ascendra", None),
        ("vllm", "least-loaded"),
    ]
    assert {cell.columns["gpus"] for cell in cells} == {3}
    folder = experiment.run(tmp_path / "run").folder
    rows = pd.read_csv(folder / "cells.csv")
    assert rows["ascendra.tickets"].astype(str).tolist()[:2] == ["True", "False"]
    with_tickets = pd.read_csv(folder / "requests" / f"{cells[0].cell}.csv.gz")
    assert set(with_tickets.role[with_tickets.outcome == "finished"]) == {"lp", "hp"}
    assert (with_tickets.instance[with_tickets.role == "hp"] == 2).all()
    learned = rows.prediction_error[rows.system == "ascendra"]
    assert ((learned > 0) & (learned < 0.2)).all()
    assert rows.prediction_error[rows.system == "vllm"].isna().all()


def test_ascendra_refuses_a_router():
    with pytest.raises(SloBenchError, match="ascendra decides across instances itself"):
        Experiment(systems="ascendra", instances=3, router="least-loaded").plan()
