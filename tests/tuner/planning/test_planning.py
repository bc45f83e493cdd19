"""The cheapest plan is what trying everything finds, and its files start what was simulated."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import subprocess
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from reference.examples import examples
from reference.logs import PROFILE
from slo_bench.cli.main import app
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.policies.systems import SYSTEMS, system
from slo_bench.predictors.profiles.profile_format import write_profile
from slo_bench.reports.pages.plan_page import (
    confirmed_lines,
    decided_lines,
    plan_rows,
    price_lines,
)
from slo_bench.tuner.capacity.capacity_cells import CellRunner
from slo_bench.tuner.capacity.level_samples import LevelSample
from slo_bench.tuner.planning.deployment_levels import CONFIRM, SEARCH, DeploymentLevel, judged
from slo_bench.tuner.planning.launch_files import launch_script, write_launch_files
from slo_bench.tuner.planning.offers import offers
from slo_bench.tuner.planning.plan_search import LEVELS, PlanOptions, TargetLoad, plan_cheapest
from slo_bench.tuner.planning.prices import PriceList, default_prices, read_prices, shipped_lists
from slo_bench.workloads.checksums import sealed
from slo_bench.workloads.errors import SloBenchError

KINDS = ("a100-80g", "l40s", "h100-80g")
ASKED = Experiment(systems=["vllm"], slo="ttft=1,tpot=0.1", output_tokens="uniform(50,150)")
ONE_BUDGET = {"vllm": {"max_num_batched_tokens": (2048,)}}


@dataclass
class Formula:
    """Each instance carries so much, however it is set."""

    spec: object
    each_rps: dict[tuple[str, int], float]

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        place = self.spec.placement
        enough = self.spec.instances * self.each_rps[place.gpu, place.tp] >= rate_rps
        met = 100 if enough else 10
        return LevelSample(
            rate_rps=rate_rps,
            seed=seed,
            requests=requests,
            batch_met=(met,) * 20,
            batch_requests=(100,) * 20,
            backlog=(0,) * 21,
        )


class Finite(Formula):
    """Each instance carries two; its runs can be kept."""

    def __init__(self, spec):
        super().__init__(spec, defaultdict(lambda: 2.0))

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        return replace(super().run(rate_rps, seed, requests), window_s=1000.0)


def each_carries_two(spec):
    return Formula(spec, defaultdict(lambda: 2.0))


@pytest.mark.slow
@settings(max_examples=examples(30))
@given(
    each=st.lists(st.floats(0.5, 20), min_size=12, max_size=12),
    rate=st.floats(1, 30),
    plans=st.integers(1, 4),
)
def test_plan_cheapest_equals_brute_force(each, rate, plans):
    carries = dict(zip(itertools.product(KINDS, (1, 2, 4, 8)), each, strict=True))
    every, _ = offers(ASKED, rate, KINDS)
    # What an offer needs at least, by the estimate, holds for the truth as well.
    carries = {k: min(v, *_most(every, k, rate)) for k, v in carries.items()}
    costs = []
    for offer in every:
        n = math.ceil(rate / carries[offer.gpu, offer.tp])
        n = max(n, offer.least_instances)
        # A rate at which one is idle must not be over its head.
        light = min(rate, 0.05 * offer.alone_rps * offer.least_instances)
        if offer.least_instances * carries[offer.gpu, offer.tp] >= light and n * offer.gpus <= 64:
            costs.append(n * offer.usd_per_hour)

    def found():
        return plan_cheapest(
            ASKED,
            TargetLoad(rate, plans=plans),
            PlanOptions(kinds=KINDS, runner_of=lambda spec: Formula(spec, carries)),
        )

    if not costs:
        with pytest.raises(SloBenchError, match="no offer"):
            found()
        return
    usd = [one.usd_per_hour for one in found().plans]
    assert usd == pytest.approx(sorted(costs)[:plans])


def _most(every, key, rate):
    [offer] = [one for one in every if (one.gpu, one.tp) == key]
    return (rate / (offer.least_instances - 1),) if offer.least_instances > 1 else (math.inf,)


@pytest.mark.slow
def test_plan_cheapest_carries_its_load_and_is_resumed(tmp_path, short_runs):
    asked = ASKED.model_copy(update={"parameters": ONE_BUDGET})
    wanted = TargetLoad(4, plans=1)
    simulated = []
    first = plan_cheapest(
        asked,
        wanted,
        PlanOptions(kinds=("a100-80g", "l40s"), folder=tmp_path, say=simulated.append),
    )
    assert simulated
    for one in first.plans:
        assert one.verdict.low >= 0.9
        assert one.verdict.runs >= 3
        assert one.verdict.requests >= 3 * short_runs["CONFIRM"].requests
        assert one.capacity.low_rps >= 4 * 0.9
    again = []
    with pytest.raises(SloBenchError, match="--resume"):
        plan_cheapest(asked, wanted, PlanOptions(kinds=("a100-80g", "l40s"), folder=tmp_path))
    second = plan_cheapest(
        asked,
        wanted,
        PlanOptions(kinds=("a100-80g", "l40s"), folder=tmp_path, resume=True, say=again.append),
    )
    assert second == first
    assert all(line.startswith("capacity") for line in again)  # only the capacities
    with pytest.raises(SloBenchError, match="another experiment"):
        plan_cheapest(asked, TargetLoad(5), PlanOptions(folder=tmp_path, resume=True))


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        ("harness.experiments.experiment._version", "9", "this is 9"),
        ("tuner.planning.deployment_levels.step_times_of", {"a": {}}, "other step times"),
    ],
)
def test_plan_is_not_resumed_with_another_simulator(tmp_path, monkeypatch, place, value, problem):
    options = PlanOptions(kinds=("l40s",), folder=tmp_path, runner_of=Finite)
    load = TargetLoad(4, plans=1)
    first = plan_cheapest(ASKED, load, options)
    again = replace(options, resume=True)
    assert plan_cheapest(ASKED, load, again).plans == first.plans
    monkeypatch.setattr(f"slo_bench.{place}", lambda _: value)
    with pytest.raises(SloBenchError, match=problem):
        plan_cheapest(ASKED, load, again)


@pytest.mark.slow
def test_plan_of_a_folder_whose_levels_have_no_runs_is_that_of_a_new_one(tmp_path, short_runs):
    asked = ASKED.model_copy(update={"parameters": ONE_BUDGET})
    options = PlanOptions(kinds=("l40s",), folder=tmp_path, resume=True)
    first = plan_cheapest(asked, TargetLoad(4, plans=1), options)
    file = tmp_path / LEVELS
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    for entry in entries:
        del entry["level"]["samples"], entry["crc32"]
        entry["level"]["attainment"] = 0.5
    file.write_text("".join(f"{json.dumps(sealed(entry))}\n" for entry in entries))
    assert plan_cheapest(asked, TargetLoad(4, plans=1), options) == first


@pytest.mark.slow
def test_plan_cheapest_in_a_pool_equals_one_process(tmp_path, pool_of, short_runs):
    budget = {"vllm": {"max_num_batched_tokens": (512,)}}
    requested = ASKED.model_copy(update={"parameters": budget, "tp": (1, 2)})
    load, kinds = TargetLoad(4, plans=1), ("a100-80g",)
    here = plan_cheapest(requested, load, PlanOptions(kinds=kinds, folder=tmp_path / "here"))
    with pool_of(2) as pool:
        options = PlanOptions(kinds=kinds, folder=tmp_path / "pool", pool=pool)
        from_pool = plan_cheapest(requested, load, options)
        assert repr(from_pool) == repr(here)  # a NaN from another process equals none
    written = [(tmp_path / name / "plan.jsonl").read_bytes() for name in ("here", "pool")]
    assert written[0] == written[1]


def test_plan_simulates_nothing_twice(monkeypatch, short_runs):
    run, runs = CellRunner.run, []

    def noted(runner, rate_rps, seed, requests):
        spec = runner.template
        runs.append((spec.instances, str(spec.parameters), rate_rps, seed, requests))
        return run(runner, rate_rps, seed, requests)

    monkeypatch.setattr(CellRunner, "run", noted)
    requested = ASKED.model_copy(update={"parameters": ONE_BUDGET, "tp": (1,)})
    [plan] = plan_cheapest(
        requested, TargetLoad(4, plans=1), PlanOptions(kinds=("a100-80g",))
    ).plans
    assert plan.figures.ttft_p99_s > 0
    assert len(set(runs)) == len(runs)


class PoolThatFailsAt:
    """Runs work at once; levels that `needed` does not hold end with an error."""

    at_once = 8

    def __init__(self, needed):
        self.needed = needed
        self.failed = []

    def begin(self, work, *given):
        future = Future()
        line = getattr(given[0], "line", None)
        if line is None or line in self.needed:
            future.set_result(work(*given))
        else:
            self.failed.append(line)
            future.set_exception(SloBenchError("this process was killed"))
        return future


@pytest.mark.slow
def test_plan_cheapest_ignores_failures_of_levels_not_needed(short_runs):
    asked = ASKED.model_copy(update={"systems": ("vllm", "sarathi")})
    wanted, kinds, needed = TargetLoad(4, plans=1), ("a100-80g", "l40s"), []
    here = plan_cheapest(asked, wanted, PlanOptions(kinds=kinds, say=needed.append))
    pool = PoolThatFailsAt(needed)
    assert plan_cheapest(asked, wanted, PlanOptions(kinds=kinds, pool=pool)) == here
    assert pool.failed


def test_plan_options_with_a_pool_and_a_runner_are_refused(pool_of):
    with pool_of(1) as pool, pytest.raises(SloBenchError, match="runner_of"):
        PlanOptions(pool=pool, runner_of=each_carries_two)


@dataclass
class Flattering(Formula):
    """On the seeds of the search two instances carry what takes four."""

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        flattered = seed < 1000 and self.spec.instances >= 2
        return super().run(0.01 if flattered else rate_rps, seed, requests)


@dataclass
class ByBudget(Formula):
    """A share of the requests is in time, by the budget of tokens, and `each_rps` by instance."""

    met: ClassVar[dict[int, int]] = {2048: 60, 512: 96, 8192: 98}

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        sample = super().run(rate_rps, seed, requests)
        met = self.met[self.spec.parameters["max_num_batched_tokens"]]
        return replace(sample, batch_met=tuple(min(met, each) for each in sample.batch_met))


def test_plan_tries_the_budget_of_the_best_look_first_and_no_budget_behind_it():
    lines = []
    planned = plan_cheapest(
        ASKED.model_copy(update={"tp": (1,)}),
        TargetLoad(4, plans=1),
        PlanOptions(
            kinds=("l40s",),
            say=lines.append,
            runner_of=lambda spec: ByBudget(spec, defaultdict(lambda: 2.0)),
        ),
    )
    [plan] = planned.plans
    assert (plan.instances, plan.parameters["max_num_batched_tokens"]) == (2, 8192)
    searched = [line for line in lines if line.endswith("runs of 2,000")]
    name = "2 × vllm on l40s tp1 max_num_batched_tokens=8192"
    assert searched == [f"{name} at 4 req/s, runs of 2,000"]
    looks = [line for line in lines if line.endswith("runs of 1,000")]
    assert len(looks) == 2 * 3  # the budgets with 2 instances, and with 1, which has no chance


def test_plan_looks_at_no_other_budget_where_the_first_misses_nothing():
    lines = []
    planned = plan_cheapest(
        ASKED.model_copy(update={"tp": (1,)}),
        TargetLoad(4, plans=1),
        PlanOptions(kinds=("l40s",), say=lines.append, runner_of=each_carries_two),
    )
    [plan] = planned.plans
    assert (plan.instances, plan.parameters["max_num_batched_tokens"]) == (2, 2048)
    looks = [line for line in lines if line.endswith("runs of 1,000") and line.startswith("2 ×")]
    assert looks == ["2 × vllm on l40s tp1 max_num_batched_tokens=2048 at 4 req/s, runs of 1,000"]


def test_plan_refuted_by_long_runs_is_replaced_by_the_next():
    asked = ASKED.model_copy(update={"parameters": ONE_BUDGET, "tp": (1,)})
    planned = plan_cheapest(
        asked,
        TargetLoad(8, plans=1),
        PlanOptions(
            kinds=("l40s",), runner_of=lambda spec: Flattering(spec, defaultdict(lambda: 2.0))
        ),
    )
    [plan] = planned.plans
    assert plan.instances == 4
    assert plan.verdict.carries
    assert [one.instances for one in planned.refuted] == [2, 3]
    assert all(one.verdict.attainment == pytest.approx(0.1) for one in planned.refuted)
    assert "2 carried the load in the search" in confirmed_lines(planned.plans, planned.refuted)[1]


def verdict_of(runner, rate_rps, target, length):
    level = DeploymentLevel("any", None, rate_rps, target, 0, length)
    return judged(level, lambda spec: runner)


@pytest.mark.parametrize(
    ("batch_met", "backlog"),
    [
        (tuple(100 - 2 * k for k in range(20)), (0,) * 21),  # attainment falls
        ((100,) * 20, tuple(40 * k for k in range(21))),  # the backlog grows
    ],
)
def test_rate_with_a_run_not_stationary_is_not_carried(batch_met, backlog):
    class Unsteady:
        def run(self, rate_rps, seed, requests):
            return LevelSample(
                rate_rps=rate_rps,
                seed=seed,
                requests=requests,
                batch_met=batch_met,
                batch_requests=(100,) * 20,
                backlog=backlog,
            )

    assert not verdict_of(Unsteady(), 5.0, 0.6, CONFIRM).carries


class Growing:
    """All requests are in time; the backlog of each run grows by the next of `grown`, of those
    after them by the last.
    """

    def __init__(self, *grown):
        self.grown, self.sizes = grown, []

    def run(self, rate_rps, seed, requests):
        self.sizes.append(requests)
        grown = self.grown[min(len(self.sizes), len(self.grown)) - 1]
        return LevelSample(
            rate_rps=rate_rps,
            seed=seed,
            requests=requests,
            batch_met=(requests // 20,) * 20,
            batch_requests=(requests // 20,) * 20,
            backlog=(*[0] * 11, *[grown] * 10),
        )


def test_undecided_short_runs_are_followed_by_longer_ones():
    runner = Growing(40)  # however long the run is
    assert verdict_of(runner, 5.0, 0.9, SEARCH).carries
    assert runner.sizes == [2000]  # what a search finds is confirmed
    runner = Growing(40)
    assert verdict_of(runner, 5.0, 0.9, replace(SEARCH, proving=True)).carries
    assert runner.sizes == sorted(runner.sizes)
    assert runner.sizes[0] == 2000 < runner.sizes[-1] <= 16000


def test_confirming_run_after_the_proof_is_as_long_as_the_first():
    runner = Growing(160, 0)  # 160 of 8,000: too many to tell
    assert verdict_of(runner, 5.0, 0.9, CONFIRM).carries
    assert runner.sizes == [8000, 16000, 8000]


@pytest.mark.parametrize(
    ("cold_requests", "target"),
    [(1000, 0.8), (1200, 0.83)],  # the first half; 82 % of the second, too few by chance perhaps
)
def test_run_that_begins_with_a_cold_cache_is_made_again_longer(cold_requests, target):
    class Warming:
        sizes: ClassVar[list[int]] = []

        def run(self, rate_rps, seed, requests):
            self.sizes.append(requests)
            each = requests // 20
            cold = cold_requests // each  # batches, in which a tenth is in time
            met = [each // 10 if n < cold else each - n % 2 for n in range(20)]
            return LevelSample(
                rate_rps=rate_rps,
                seed=seed,
                requests=requests,
                batch_met=tuple(met),
                batch_requests=(each,) * 20,
                backlog=(0,) * 21,
            )

    assert verdict_of(Warming(), 5.0, target, SEARCH).attainment >= target
    assert Warming.sizes[:3] == [2000, 4000, 8000]


def test_runs_of_a_verdict_are_long_against_the_slo():
    class Slow:
        sizes: ClassVar[list[int]] = []

        def run(self, rate_rps, seed, requests):
            self.sizes.append(requests)
            return LevelSample(
                rate_rps=rate_rps,
                seed=seed,
                requests=requests,
                batch_met=(requests // 20,) * 20,
                batch_requests=(requests // 20,) * 20,
                backlog=(0,) * 21,
                horizon_s=100.0,
                window_s=requests / rate_rps,
            )

    verdict = verdict_of(Slow(), 10.0, 0.9, CONFIRM)
    assert verdict.carries
    assert Slow.sizes[0] == 8000
    assert min(Slow.sizes[1:]) >= 20 * 100 * 10
    assert verdict.runs == 3


@dataclass
class Scattered:
    """Runs of these shares in SLO, in which requests stay the longer the longer they are."""

    shares: tuple[float, ...]
    sizes: list[int] = field(default_factory=list)

    def run(self, rate_rps, seed, requests):
        self.sizes.append(requests)
        share = self.shares[min(seed, len(self.shares) - 1)]
        each = requests // 20
        batches = [round(each * share) + each // 10 * (-1) ** n for n in range(20)]
        return LevelSample(
            rate_rps=rate_rps,
            seed=seed,
            requests=requests,
            batch_met=tuple(min(each, max(0, met)) for met in batches),
            batch_requests=(each,) * 20,
            backlog=(0,) * 21,
            window_s=requests / rate_rps,
            stay_s=requests / 1e5 + 10,
        )


def test_first_run_is_not_made_again_to_be_a_little_longer():
    steady = Scattered((1.0,))
    assert verdict_of(steady, 20.0, 0.8, SEARCH).carries
    first, whole = steady.sizes[:2]
    assert first == 2000 < whole
    assert steady.sizes[2:].count(whole) == len(steady.sizes) - 2


def test_three_runs_that_miss_the_target_decide():
    wavering = Scattered((0.9, 0.895, 0.895, 0.99))
    verdict = verdict_of(wavering, 20.0, 0.9, SEARCH)
    assert not verdict.carries
    assert verdict.runs == 3
    assert verdict.low < verdict.attainment < 0.9 < verdict.high


def test_plan_cheapest_follows_prices():
    kinds = ("a100-80g", "h100-80g")
    wanted = TargetLoad(2, plans=1)
    listed = default_prices()
    for usd, gpu in ((100, "a100-80g"), (0.1, "h100-80g")):
        prices = listed.changed({"h100-80g": usd})
        found = plan_cheapest(
            ASKED, wanted, PlanOptions(kinds=kinds, prices=prices, runner_of=each_carries_two)
        )
        assert found.plans[0].offer.gpu == gpu


def test_plan_shows_the_cheapest_on_fitted_step_times_beside_an_unfitted_winner():
    load = TargetLoad(rate_rps=4.0, plans=2)
    prices = default_prices().changed({"a10": 1.0, "a100-80g": 3.0, "h100-80g": 7.0})
    kinds = ("h100-80g", "a10", "a100-80g")
    options = PlanOptions(kinds=kinds, prices=prices, runner_of=each_carries_two)
    planned = plan_cheapest(ASKED, load, options)
    shown = [(plan.offer.gpu, plan.fitted) for plan in planned.plans]
    assert shown == [("a10", False), ("a10", False), ("a100-80g", True)]
    (line,) = decided_lines(plan_rows(planned))
    assert line.startswith("cheapest on fitted step times: 2 × a100-80g, 2 × tp1, vllm, 6.00 USD")
    slower = re.search(r"if steps on a10, tp 1, take longer than .* more than (\d+)%: slo", line)
    assert slower is not None
    assert int(slower[1]) == pytest.approx(50, abs=5)  # three times the price; capacities are rough
    alone = plan_cheapest(ASKED, load, replace(options, kinds=("a10",)))
    assert decided_lines(plan_rows(alone)) == ["no plan on fitted step times carries the load"]
    fitted = plan_cheapest(ASKED, load, replace(options, kinds=kinds[::2]))
    assert decided_lines(plan_rows(fitted)) == []
    assert len(fitted.plans) == 2


def test_price_sums_the_list_price_and_energy():
    listed = PriceList(
        basis="ours",
        date="2026-11-01",
        usd_per_kwh=0.2,
        pue=1.5,
        usd_per_gpu_hour={"rtx-3090": 0.1, "rtx-3090@250w": 0.05},
    )
    assert listed.price("rtx-3090") == pytest.approx(0.1 + 0.35 * 1.5 * 0.2)
    assert listed.price("rtx-3090@250w") == pytest.approx(0.05 + 0.25 * 1.5 * 0.2)
    assert listed.price("rtx-3090@300w") == pytest.approx(0.1 + 0.3 * 1.5 * 0.2)
    assert listed.price("h100-80g") is None


def test_shipped_price_lists_have_a_basis_and_a_date():
    for listed in (default_prices(), *map(read_prices, shipped_lists())):
        assert listed.basis in listed.title
        assert str(listed.date) in listed.title
        assert all(listed.price(name) for name in listed.usd_per_gpu_hour)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("basis = 'x'\n[usd_per_gpu_hour]\nl4 = 1\n", "date is missing"),
        ("basis = 'x'\ndate = 2026-01-01\n", "usd_per_gpu_hour is missing"),
        ("basis = 'x'\ndate = 2026-01-01\n[usd_per_gpu_hour]\nl4 = -1\n", "but is -1 .*line 4"),
        ("basis = 'x'\ndate = 2026-01-01\n[usd_per_gpu_hour]\nl5 = 1\n", "l4.*line 4"),
        ("basis = 'x'\ndate = 2026-01-01\npeu = 1\n[usd_per_gpu_hour]\nl4 = 1\n", "pue.*line 3"),
        ("basis = x\n", "not TOML.*line 1"),
    ],
)
def test_price_file_with_an_error_is_refused(tmp_path, text, message):
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(SloBenchError, match=message):
        read_prices(str(file))


def test_plan_shows_prices_of_list_and_catalogue(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text("basis = 'ours'\ndate = 2026-01-01\n[usd_per_gpu_hour]\nl40s = 0.5\na40 = 9\n")
    asked = ASKED.model_copy(update={"parameters": ONE_BUDGET})
    planned = plan_cheapest(
        asked,
        TargetLoad(1, plans=9),
        PlanOptions(prices=read_prices(str(file)), runner_of=each_carries_two),
    )
    rows = plan_rows(planned)
    assert {row["gpu"] for row in rows} == {"l40s", "a40"}
    for row in rows:
        assert row["price_basis"] == "ours, 2026-01-01"
        listed = default_prices().price(row["gpu"])
        shown = row["catalogue_usd_per_hour"]
        assert shown == (None if listed is None else pytest.approx(listed * row["gpus"]))
    lines = "\n".join(price_lines(planned.prices, planned.plans, planned.kinds))
    assert "prices: ours, 2026-01-01" in lines
    assert f"in brackets: {default_prices().title}" in lines
    assert "left out, without a price: a100-40g" in lines


@pytest.mark.parametrize("name", SYSTEMS)
def test_plan_gives_every_system_a_plan_or_a_reason(name):
    asked = ASKED.model_copy(update={"systems": ("vllm", name), "tp": (1,)})
    planned = plan_cheapest(
        asked, TargetLoad(1, plans=20), PlanOptions(kinds=("a100-80g",), runner_of=each_carries_two)
    )
    assert {one.offer.system for one in planned.plans} | set(planned.absent) == {"vllm", name}
    several = system(name).sharing is not None
    assert planned.absent == (
        {name: f"{name} serves several models; plan chooses for one"} if several else {}
    )


def test_plan_chooses_the_ratio_of_prefill_to_decode():
    asked = ASKED.model_copy(update={"systems": ("distserve",)})
    [offer, *_], _ = offers(asked, 4, ("a100-80g",))
    shapes = [one.parameters for one in offer.shapes(4)]
    ratios = {(k["prefill_instances"], k["decode_instances"]) for k in shapes}
    assert ratios == {(1, 3), (2, 2), (3, 1)}
    fixed = asked.model_copy(update={"parameters": {"distserve": {"prefill_instances": (1,)}}})
    [offer, *_], _ = offers(fixed, 4, ("a100-80g",))
    assert all(one.parameters["prefill_instances"] == 1 for one in offer.shapes(4))


def test_plan_chooses_among_setting_values_and_writes_them():
    sweep = {"weight_dtype": ("bf16", "fp8"), "kv_dtype": ("bf16", "fp8"), "memory_share": (0.8,)}
    asked = ASKED.model_copy(update={**sweep, "parameters": ONE_BUDGET})
    found, _ = offers(asked, 4, ("h100-80g",))
    assert {(one.weight_dtype, one.kv_dtype) for one in found} == set(
        itertools.product(("bf16", "fp8"), repeat=2)
    )
    wanted = TargetLoad(4, plans=8)
    planned = plan_cheapest(
        asked, wanted, PlanOptions(kinds=("h100-80g",), runner_of=each_carries_two)
    )
    plans = planned.plans
    assert len({one.offer.name for one in plans}) == len(plans)
    for one in plans:
        script = launch_script(asked, wanted, one, planned.prices)
        assert f"Weights {one.offer.weight_dtype}, KV cache {one.offer.kv_dtype}" in script
        assert default_prices().title in script
        assert ("--quantization fp8" in script) is (one.offer.weight_dtype == "fp8")
        assert ("--kv-cache-dtype fp8" in script) is (one.offer.kv_dtype == "fp8")
        assert "--gpu-memory-utilization 0.8" in script


def test_launch_files_of_a_dtype_without_option_ask_for_a_checkpoint():
    asked = ASKED.model_copy(update={"weight_dtype": ("int4",), "parameters": ONE_BUDGET})
    [plan] = plan_cheapest(
        asked, TargetLoad(1, plans=1), PlanOptions(kinds=("a100-80g",), runner_of=each_carries_two)
    ).plans
    assert "a checkpoint with int4 weights" in launch_script(
        asked, TargetLoad(1), plan, default_prices()
    )


@pytest.mark.parametrize("file", ["", "/config.json"])
def test_launch_script_of_a_models_folder_serves_the_folder(tmp_path, file):
    folder = tmp_path / "a model"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000}
    config |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    experiment = ASKED.model_copy(update={"model": (f"{folder}{file}",), "tp": (1,)})
    options = PlanOptions(kinds=("a100-80g",), runner_of=each_carries_two)
    [plan] = plan_cheapest(experiment, TargetLoad(1, plans=1), options).plans
    script = launch_script(experiment, TargetLoad(1), plan, default_prices())
    assert f"MODEL=${{MODEL:-{shlex.quote(str(folder))}}}" in script


def test_system_without_a_plan_is_named_with_its_reason():
    asked = ASKED.model_copy(update={"systems": ("vllm", "distserve")})
    how = PlanOptions(kinds=("a100-80g",), runner_of=each_carries_two)
    planned = plan_cheapest(asked, TargetLoad(1, plans=1), how)
    assert planned.plans[0].offer.system == "vllm"
    assert "USD per hour" in planned.absent["distserve"]
    many = plan_cheapest(asked, TargetLoad(1, plans=50), how)
    assert {one.offer.system for one in many.plans} | set(many.absent) == {"vllm", "distserve"}


@pytest.fixture
def planned():
    asked = ASKED.model_copy(update={"tp": (2,)})
    wanted = TargetLoad(18, plans=1)
    return asked, plan_cheapest(
        asked, wanted, PlanOptions(kinds=("a100-80g",), runner_of=each_carries_two)
    )


def test_context_of_the_servers_is_in_their_files_and_not_in_the_experiment(tmp_path, planned):
    experiment, result = planned
    servers = experiment.server.model_copy(update={"max_model_tokens": 4096})
    requested = experiment.model_copy(update={"server": servers})
    write_launch_files(tmp_path, requested, result.load, result.plans[0], result.prices)
    for name in ("launch.sh", "command.sh", "kubernetes.yaml"):
        words = (tmp_path / name).read_text().split()
        assert "--max-model-len" in words, name
    assert "max_model_tokens" not in (tmp_path / "experiment.toml").read_text()


def test_launch_script_starts_each_instance_on_its_own_gpus(tmp_path, planned):
    asked, found = planned
    plan = found.plans[0]
    write_launch_files(tmp_path, asked, found.load, plan, found.prices)
    fake = tmp_path / "bin" / "vllm"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*"\n')
    fake.chmod(0o755)
    environ = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    lines = []
    for host in range(math.ceil(plan.instances / 4)):
        done = subprocess.run(
            [tmp_path / "launch.sh", str(host)],
            capture_output=True,
            text=True,
            check=True,
            env=environ,
        )
        gpus = [line.split()[0] for line in done.stdout.splitlines()]
        assert sorted(gpus) == ["0,1", "2,3", "4,5", "6,7"][: len(gpus)]
        lines += done.stdout.splitlines()
    assert len(lines) == plan.instances
    budget = plan.parameters["max_num_batched_tokens"]
    assert all("--tensor-parallel-size 2" in line for line in lines)
    assert all(f"--max-num-batched-tokens {budget}" in line for line in lines)
    kept = Experiment.load(tmp_path / "experiment.toml")
    [spec] = kept.model_copy(update={"seeds": 1}).plan().cells
    assert (spec.instances, spec.placement.tp, spec.rate_rps) == (plan.instances, 2, 18)


@pytest.mark.parametrize(
    ("system", "word"),
    [("distserve", "--set prefill_instances=1"), ("edf", "slo-bench serve edf --backend vllm")],
)
def test_launch_files_of_policies_use_slo_bench_serve(system, word):
    asked = ASKED.model_copy(update={"systems": (system,)})
    wanted = TargetLoad(2, plans=1)
    [plan] = plan_cheapest(
        asked, wanted, PlanOptions(kinds=("a100-80g",), runner_of=each_carries_two)
    ).plans
    script = launch_script(asked, wanted, plan, default_prices())
    assert word in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.slow
def test_plan_command_prints_a_table_and_json(tmp_path, monkeypatch, short_runs):
    words = ["plan", "--rate", "1", "--gpu", "a100-80g", "--plans", "1", "--jobs", "1"]
    words += ["--out", str(tmp_path / "plan"), "--sweep", "vllm.max_num_batched_tokens=2048"]
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert " ".join(shown.stdout.split()).startswith(
        "Cheapest GPUs for 1 req/s of llama-3.1-8b, sharegpt, 0.9 of requests within "
        "TTFT ≤ 1 s, TPOT ≤ 150 ms, on vllm (simulated): plan "
    )
    assert shown.stdout.count("a100-80g") == 2  # in the plan's line and the answer
    assert "max_num_batched_tokens" not in shown.stdout  # it is at its default
    done = CliRunner().invoke(app, [*words, "--json", "--resume"])
    [row] = json.loads(done.stdout)
    assert row["gpu"] == "a100-80g"
    assert row["attainment_low"] >= 0.9
    assert row["simulated"] is True
    assert {path.name for path in (tmp_path / "plan").iterdir()} == {
        "command.sh",
        "compose.yaml",
        "experiment.toml",
        "kubernetes.yaml",
        "launch.sh",
        "plan.jsonl",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]  # nothing beside it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "0"], "rate must be positive"),
        (["--rate", "2", "--gpu", "a100-8g"], "a100-80g"),
        (["--rate", "2", "--price", "a100-80g"], "GPU=USD"),
        (["--rate", "2", "--prices", "market"], "runpod-serverless"),
        (["--rate", "2", "--gpu", "a40"], "--price a40=USD"),
        (["--rate", "2", "--target", "90"], "between 0 and 1"),
        (["--rate", "2", "-s", "prism"], "several models"),
        (["--rate", "2", "--gpu", "t4", "--model", "llama-3.1-70b"], "use a larger GPU"),
        (["--rate", "2", "--slo", "ttft=0.0001", "--gpu", "a100-80g"], "if one alone misses it"),
        (["--rate", "1e5", "--gpu", "a100-80g", "--target", "0.9999"], "with 0.9999 of requests"),
        (["--rate", "1e5", "--gpu", "a100-80g"], "SLO; it takes at least"),
        (["--rate", "2", "--resume"], "--out"),
        (["--rate", "2", "--slo", "ttft=1", "--slo", "ttft=2"], "plan takes one slo"),
    ],
)
def test_plan_command_refuses_impossible_requests(words, message, short_runs):
    done = CliRunner().invoke(app, ["plan", "--jobs", "1", *words])
    assert done.exit_code != 0
    assert message in f"{done.output}{done.exception}"


def test_plan_cheapest_counts_plans_and_then_their_capacities():
    experiment = ASKED.model_copy(update={"parameters": ONE_BUDGET})
    counts = []
    planned = plan_cheapest(
        experiment,
        TargetLoad(1, plans=2),
        PlanOptions(KINDS, runner_of=each_carries_two, count=lambda *count: counts.append(count)),
    )
    assert len(planned.plans) == 2
    assert counts == sorted(counts)
    assert set(counts) == {(done, 4) for done in range(4)}


def test_plan_simulates_the_named_server(monkeypatch):
    experiments = []

    def planned(experiment, *_):
        experiments.append(experiment)
        raise SloBenchError("enough")

    monkeypatch.setattr("slo_bench.tuner.planning.plan_search.plan_cheapest", planned)
    CliRunner().invoke(app, ["plan", "--rate", "1", "--server-version", "0.11"])
    [experiment] = experiments
    assert experiment.server_version == ("0.11",)


def test_plans_use_a_profile_on_its_gpu_and_tp_alone(tmp_path):
    header = str(write_profile(PROFILE, tmp_path / "p.toml"))
    experiment = Experiment(
        systems=["vllm"], model="llama-3.1-8b", workload="sharegpt", profile=header
    )
    prices = PriceList(
        basis="mine", date="2026-01-01", usd_per_gpu_hour={"rtx-4090": 0.4, "l40s": 1.0}
    )
    every, _ = offers(experiment, 1.0, prices=prices)
    profiles = {
        (offer.gpu, offer.tp): next(offer.shapes(1)).experiment(experiment, 1.0).profile
        for offer in every
    }
    assert profiles.pop(("rtx-4090", 1)) == (header,)
    assert set(profiles.values()) == {(None,)}
