"""Goodput that a length predictor recovers, by hand and from a run."""

from __future__ import annotations

import pandas as pd
import pytest

from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.results.read_run import read_runs
from slo_bench.reports.figures.levels import combine
from slo_bench.reports.pages.recovered import recovered, table
from slo_bench.reports.pages.run_page import write_report

GOODPUT = {  # by predictor, one value a seed
    "constant(64)": (1.0, 2.0, 1.5),
    "constant(8)": (0.1, 0.2, 0.1),
    "half": (2.0, 3.0, 2.5),
    "uneven": (2.0, 2.0, 3.5),
    "oracle": (3.0, 4.0, 3.5),
}


def cells(goodput=GOODPUT, system="s3"):
    rows = [
        {
            "system": system,
            "workload": "w",
            "seed": seed,
            "length_predictor": name,
            "requests": 10,
            "goodput_rps": value,
            "level_rps": 2.0,
            "valid": True,
        }
        for name, values in goodput.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_recovered_shares_by_hand():
    (recovery,) = recovered(cells())
    assert (recovery.setup, recovery.constant, recovery.gap_rps) == ("s3", "constant(64)", 2.0)
    assert recovery.shares["half"] == (0.5, 0.0)  # the same in every seed
    share, half = recovery.shares["uneven"]
    assert share == pytest.approx(0.5)
    # Residuals 0, -1 and 1 over a gap of 2; Student's t of 2 degrees of freedom.
    assert half == pytest.approx(4.303 * 1 / 3**0.5 / 2, rel=1e-3)
    assert list(recovery.shares) == ["half", "uneven"]


def test_recovered_without_a_gap_is_empty():
    flat = GOODPUT | {"oracle": (1.1, 1.9, 1.5)}
    both = pd.concat([cells(), cells(flat, "fifo")])
    shown = table(both)
    assert shown.heads == ("system", "req/s", "gap, req/s", "half", "uneven")
    (_, rows) = shown.groups[0]
    assert rows[0] == ["s3", "2", "2.00", "50% ± 0", "50% ± 124"]
    assert rows[1] == ["fifo", "2", "0.00", "–", "–"]


@pytest.mark.parametrize("missing", ["oracle", "constant(64)"])
def test_recovered_needs_oracle_and_constant(missing):
    some = {
        name: goodput for name, goodput in GOODPUT.items() if name not in (missing, "constant(8)")
    }
    assert not recovered(cells(some))
    assert not table(cells(some)).groups
    assert not table(cells().drop(columns="length_predictor")).groups


@pytest.mark.slow
def test_run_and_report_show_recovered_shares(tmp_path):
    Experiment(
        systems=["sjf"],
        workload="alpaca",
        model="chatglm2-6b",
        gpu="rtx-3090@250w",
        slo="e2e=uniform(1,350)",
        length_predictor=["constant(64)", "noisy(accuracy=0.8)", "oracle"],
        rates=[2.8],
        requests=300,
        seeds=3,
        host_s=0.03,
        parameters={"sjf": {"max_batch": 10}},
    ).run(tmp_path / "run")
    recoveries = recovered(combine(read_runs([tmp_path / "run"])))
    ((share, _),) = (row.shares["noisy(accuracy=0.8)"] for row in recoveries)
    assert 0 < share < 1
    page = write_report([tmp_path / "run"], tmp_path / "page.html").read_text("utf-8")
    assert "Goodput recovered by the length predictor" in page
    assert f"{share:.0%} ±" in page
