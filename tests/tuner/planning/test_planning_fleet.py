"""Fleets: instances by hour are what brute force finds, and a day costs what was worked out."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from reference.examples import examples
from slo_bench.cli.main import app
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.tuner.capacity.level_samples import LevelSample
from slo_bench.tuner.planning.deployment_levels import Verdict
from slo_bench.tuner.planning.fleet import Fleet, Pool, PoolPlan, plan_fleet, read_fleet
from slo_bench.tuner.planning.offers import offers
from slo_bench.tuner.planning.plan_search import PlanOptions, SizedOffer, TargetLoad
from slo_bench.tuner.planning.prices import PriceList
from slo_bench.workloads.errors import SloBenchError

ASKED = Experiment(
    systems=["vllm"],
    slo="ttft=1,tpot=0.1",
    output_tokens="uniform(50,150)",
    parameters={"vllm": {"max_num_batched_tokens": 2048}},
)
PRICES = {"basis": "test", "date": "2026-01-01"}


@dataclass
class Formula:
    """Each instance carries so much."""

    spec: object
    each_rps: dict[str, float]

    def run(self, rate_rps: float, seed: int, requests: int) -> LevelSample:
        enough = self.spec.instances * self.each_rps[self.spec.placement.gpu] >= rate_rps
        return LevelSample(
            rate_rps=rate_rps,
            seed=seed,
            requests=requests,
            batch_met=(100 if enough else 10,) * 20,
            batch_requests=(100,) * 20,
            backlog=(0,) * 21,
        )


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(
    rates=st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5, 4.0]), min_size=24, max_size=24),
    each=st.floats(0.6, 1.5),
    headroom=st.sampled_from([0.0, 0.5]),
)
def test_fleet_hour_has_the_fewest_instances_that_carry_it(rates, each, headroom):
    rates = [*rates[1:], 4.0]
    planned = plan_fleet(
        Fleet((Pool("one", ASKED.model_copy(update={"tp": (1,)}), tuple(rates)),)),
        TargetLoad(1, headroom=headroom, plans=1),
        PlanOptions(
            kinds=("l40s",), runner_of=lambda spec: Formula(spec, defaultdict(lambda: each))
        ),
    )
    [one] = planned.pools
    assert one.load.rate_rps == 4.0
    for rate, instances in zip(rates, one.instances, strict=True):
        whole_rps = rate * (1 + headroom)
        assert instances == next(n for n in itertools.count() if n * each >= whole_rps)


def test_fleet_pool_plan_is_the_cheapest_over_the_day():
    # At the peak one large instance is cheaper; by night one of ten small ones is enough.
    pool = Pool("one", ASKED.model_copy(update={"tp": (1,)}), (10.0, *[1.0] * 23))
    listed = PriceList(**PRICES, usd_per_gpu_hour={"h100-80g": 9.0, "l40s": 1.0})
    how = PlanOptions(
        prices=listed,
        runner_of=lambda spec: Formula(spec, {"h100-80g": 10.0, "l40s": 1.0}),
    )
    planned = plan_fleet(Fleet((pool,)), TargetLoad(1, plans=4), how)
    [one] = planned.pools
    assert one.plan.offer.gpu == "l40s"
    assert one.usd_per_day(listed, autoscaled=True) == pytest.approx(10 + 23)
    assert one.usd_per_day(listed, autoscaled=False) == pytest.approx(240)
    [fixed] = plan_fleet(Fleet((pool,)), TargetLoad(1, plans=1), how).pools
    assert fixed.plan.offer.gpu == "h100-80g"


def pool_plan(startup_s=0.0):
    [offer, *_], _ = offers(
        ASKED.model_copy(update={"tp": (2,)}),
        4,
        ("rtx-4090",),
        PriceList(**PRICES, usd_per_gpu_hour={"rtx-4090": 1.0}),
    )
    plan = SizedOffer(offer, 3, {}, Verdict(True, 1.0, 0.99, 1.0, 3, 24000))
    instances = (1,) * 12 + (3,) * 6 + (2,) * 6
    return PoolPlan(Pool("one", ASKED, (1.0,) * 24), TargetLoad(4), plan, instances, startup_s)


def test_fleet_gpu_hours_of_a_day_by_hand():
    one = pool_plan()
    hours = (12 * 1 + 6 * 3 + 6 * 2) * 2
    assert one.gpu_hours(autoscaled=False) == 24 * 3 * 2
    assert one.gpu_hours(autoscaled=True) == hours
    assert pool_plan(startup_s=1800).gpu_hours(autoscaled=True) == hours + 2 * 0.5 * 2
    rented = PriceList(**PRICES, usd_per_gpu_hour={"rtx-4090": 2.0})
    assert one.usd_per_day(rented, autoscaled=True) == 2.0 * hours
    energy_usd = 0.450 * 1.5 * 0.2  # of an hour at 450 W
    own = PriceList(
        **PRICES, owned=True, usd_per_kwh=0.2, pue=1.5, usd_per_gpu_hour={"rtx-4090": 0.3}
    )
    assert one.usd_per_day(own, autoscaled=True) == pytest.approx(144 * 0.3 + hours * energy_usd)
    assert one.usd_per_day(own, autoscaled=False) == pytest.approx(144 * (0.3 + energy_usd))
    other = PriceList(**PRICES, usd_per_gpu_hour={"l4": 1.0})
    assert one.usd_per_day(other, autoscaled=True) is None


def test_fleet_instances_kept_over_midnight_are_not_started_again():
    one = replace(pool_plan(startup_s=3600), instances=(2,) * 6 + (1,) * 12 + (2,) * 6)
    assert one.gpu_hours(autoscaled=True) == (12 * 2 + 12 + 1) * 2


def test_fleet_file_has_common_and_pool_settings(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text(
        "startup_s = 60\n[pools.a]\nmodel = 'llama-3.1-70b'\nrate_rps = 2\n"
        "[pools.b]\nslo = 'ttft=3'\nrate_rps = [" + "1, " * 23 + "5]\n"
    )
    fleet = read_fleet(file, ASKED)
    assert fleet.startup_s == 60
    first, second = fleet.pools
    assert (first.name, first.experiment.model, first.experiment.slo) == (
        "a",
        ("llama-3.1-70b",),
        ASKED.slo,
    )
    assert first.rates_rps == (2.0,) * 24
    assert (second.experiment.model, max(second.rates_rps)) == (ASKED.model, 5.0)
    assert second.experiment.slo != ASKED.slo


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pools.a]\nmodel = 'x'\n", "rate_rps.*line 1"),
        ("[pools.a]\n\nrate_rps = [1, 2]\n", "24 items.*line 3"),
        ("[pools.a]\nrate_rps = -1\n", "greater than or equal to 0.*line 2"),
        ("[pools.a]\nrate_rps = 0\n", "0 all day.*line 2"),
        ("[pools.a]\nrate_rps = 1\n\nmodl = 'x'\n", "did you mean model.*line 4"),
        ("[pool.a]\nrate_rps = 1\n", "pools"),
        ("pools = 3\n", "pools.*line 1"),
    ],
)
def test_fleet_file_with_an_error_is_refused(tmp_path, text, message):
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(SloBenchError, match=message):
        read_fleet(file, ASKED)


@pytest.mark.slow
def test_plan_fleet_command_writes_the_files_of_each_pool(tmp_path, short_runs):
    file = tmp_path / "fleet.toml"
    file.write_text("[pools.a]\nrate_rps = [" + "0, " * 12 + "1, " * 12 + "]\n")
    words = ["plan", "--fleet", str(file), "--gpu", "a100-80g", "--plans", "1", "--tp", "1"]
    words += ["--jobs", "1"]
    words += ["--sweep", "vllm.max_num_batched_tokens=2048", "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "a, instances from 0 h to 23 h: 0 0" in shown.output
    done = CliRunner().invoke(app, [*words, "--json", "--resume"])
    [row] = json.loads(done.stdout)
    assert row["pool"] == "a"
    assert row["instances_by_hour"] == [0] * 12 + [row["instances"]] * 12
    assert row["gpu_hours_autoscaled"] == row["gpu_hours_fixed"] / 2
    assert row["usd_per_day_fixed"] == pytest.approx(24 * row["usd_per_hour"])
    assert {path.name for path in (tmp_path / "out" / "a").iterdir()} == {
        *("experiment.toml", "launch.sh", "plan.jsonl"),
        *("command.sh", "compose.yaml", "kubernetes.yaml"),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--rate R or --fleet FILE"),
        (["--rate", "1", "--fleet", "x.toml"], "one of them"),
        (["--fleet", "x.toml", "--html", "y.html"], "--html"),
        (["--fleet", "nowhere.toml"], "cannot be read"),
    ],
)
def test_plan_fleet_command_refuses_impossible_requests(words, message):
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code != 0
    assert message in f"{done.output}{done.exception}"
