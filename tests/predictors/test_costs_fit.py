"""Learned costs: found again where a formula made them, held out honestly, over tp as §6 says."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.predictors.costs.fit_costs import fit_costs, swap_costs
from slo_bench.predictors.costs.grid import read_cost_grid
from slo_bench.predictors.costs.regressors import (
    REGRESSORS,
    Setting,
    described,
    learn,
    samples,
    settings,
    whole_sizes,
)
from slo_bench.predictors.profiles.formulas import FORMULAS
from slo_bench.predictors.profiles.observations import observations, placement_of
from slo_bench.predictors.profiles.profile_format import Profile, table_of, write_profile
from slo_bench.predictors.profiles.step_time_table import Host
from slo_bench.workloads.errors import SloBenchError

BASE = Profile("llama-3-8b", "a100-80g")
KNN = [Setting("knn", 1, "ratio"), Setting("knn", 1, "seconds")]
NINE = dict(
    zip(
        FORMULAS["nine"].coefficients,
        (1.4, 0.7, 0.9, 1.8, 2.0, 1.2, 1e-6, 4e-6, 2e-4, 7e-4),
        strict=True,
    )
)


def measured(base=BASE, bend=0.0):
    """Steps of the nine terms; `bend` makes long prompts dearer than any operator would."""
    step_time = FORMULAS["nine"].step_time(base, NINE, Host())
    rows = []
    for chunk in (0, 16, 32, 64, 128, 256, 512, 1024):
        for n in (0, 1, 4, 16, 64):
            for kv in (16, 64, 256, 1024) if n else (0,):
                if chunk or n:
                    seconds = step_time.step_s(n, n * kv, [(0, chunk)] if chunk else [])
                    seconds *= 1 + bend * np.log1p(chunk)
                    rows.append((bool(chunk), chunk, 0, n, kv, 1e6 * seconds))
    return dataclasses.replace(base, tables={"steps": table_of("steps", rows)})


@pytest.fixture(scope="module")
def fitted_costs():
    pytest.importorskip("sklearn")
    return fit_costs(measured(bend=0.05), tried=settings((1,)))


@pytest.mark.slow
def test_fit_costs_tries_all_settings_at_every_degree(fitted_costs):
    tried = {dataclasses.astuple(q.setting) for q in fitted_costs.qualities}
    assert len(tried) == 8 * 3
    assert {regressor for regressor, *_ in tried} == set(REGRESSORS)
    assert fitted_costs.best.held_out_percent == min(
        q.held_out_percent for q in fitted_costs.qualities
    )
    for q in fitted_costs.qualities:
        assert np.isfinite([q.random_percent, q.whole_percent, q.beyond_percent]).all()
        assert q.train_s > 0
        assert q.call_s > 0


@pytest.mark.slow
def test_fit_costs_best_model_and_grid_are_close(fitted_costs):
    assert fitted_costs.best.random_percent < 1
    assert fitted_costs.best.whole_percent < 1
    assert fitted_costs.grid_quality.whole_percent < 5
    steps = measured(bend=0.05).tables["steps"]
    for row in range(0, len(steps), 7):
        n, kv = int(steps["n_decode"][row]), int(steps["kv_decode"][row])
        seconds = fitted_costs.grid.step_seconds(int(steps["prefill_chunk"][row]), n, n * kv)
        assert seconds == pytest.approx(steps["time_us"][row] * 1e-6, rel=0.02)


def test_prefill_below_the_least_measured_prompt_costs_no_less(fitted_costs):
    assert fitted_costs.grid.step_seconds(1) == pytest.approx(fitted_costs.grid.step_seconds(16))


def test_learned_ratio_corrects_a_wrong_formula():
    pytest.importorskip("sklearn")
    step_samples = samples([measured(bend=0.3)])
    straight = learn(Setting("linear", 1, "ratio"), step_samples)
    mended = learn(Setting("tree", 1, "ratio"), step_samples)
    assert np.abs(mended.predict(step_samples) / step_samples.seconds - 1).max() < 1e-6
    assert np.abs(straight.predict(step_samples) / step_samples.seconds - 1).max() > 0.01


def test_split_by_size_holds_whole_sizes_out_and_keeps_the_ends():
    steps = observations(measured())
    for gone in whole_sizes(steps, np.random.default_rng(1)):
        kept, held = steps[~gone], steps[gone]
        lost = set(np.unique(held.chunk_tokens)) - set(np.unique(kept.chunk_tokens))
        lost_batches = set(np.unique(held.sequences)) - set(np.unique(kept.sequences))
        assert len(lost) == 1
        assert len(lost_batches) == 1
        assert not lost & {0.0, 1024.0}
        assert not lost_batches & {0.0, 64.0}


def test_tensor_parallelism_divides_the_hidden_size():
    steps = observations(measured())
    alone, split = described(BASE, steps), described(BASE, steps, tp=4)
    assert (split.features[:, 1] * 4 == alone.features[:, 1]).all()
    assert (split.operators[:, 1] <= alone.operators[:, 1]).all()


def test_fit_costs_of_one_tp_predicts_another():
    pytest.importorskip("sklearn")
    two = dataclasses.replace(BASE, tp=2)
    both = fit_costs(measured(), [measured(two)], tp=2, tried=KNN)
    truth = FORMULAS["nine"].step_time(two, NINE, Host())
    for tokens in (16, 256, 1024):
        expected = truth.step_s(0, 0, [(0, tokens)])
        assert both.grid.step_seconds(tokens) == pytest.approx(expected, rel=0.02)
    alone = fit_costs(measured(), [measured(two)], tried=KNN)
    assert both.grid.step_seconds(1024) < 0.7 * alone.grid.step_seconds(1024)
    assert both.grid.swap_out.s_per_token == pytest.approx(alone.grid.swap_out.s_per_token / 2)


def test_swap_costs_without_copies_use_the_catalogue_link():
    place = placement_of(BASE)
    swap = swap_costs(BASE, place, np.random.default_rng(0))
    assert not swap.measured
    assert swap.source.startswith("not measured: the catalogue's pcie4-x16")
    assert swap.out.s_per_token * 16 == pytest.approx(place.swap_s_per_block)


def test_swap_costs_of_measured_copies_have_both_directions():
    rng = np.random.default_rng(3)
    rows = []
    for direction, latency_us, gb_per_s in (("to-host", 12, 20), ("to-gpu", 8, 25)):
        for moved in 2 ** np.arange(16, 28):
            noise = 1 + 0.01 * rng.standard_normal()
            rows.append((direction, moved, (latency_us + moved / gb_per_s / 1e3) * noise))
    profile = dataclasses.replace(BASE, tables={"transfers": table_of("transfers", rows)})
    swap = swap_costs(profile, placement_of(profile), rng)
    token_bytes = placement_of(profile).kv_bytes_per_token
    assert swap.measured
    assert swap.out.s_per_token == pytest.approx(token_bytes / 20e9, rel=0.02)
    assert swap.into.s_per_token == pytest.approx(token_bytes / 25e9, rel=0.02)
    assert swap.out.latency_s == pytest.approx(12e-6, rel=0.1)
    assert 0 < swap.held_out_percent < 4


def test_swap_costs_of_too_few_copies_are_refused():
    rows = [("to-host", 1e6 * k, 50 * k) for k in range(1, 9)]
    profile = dataclasses.replace(BASE, tables={"transfers": table_of("transfers", rows)})
    with pytest.raises(SloBenchError, match="0 copies to-gpu"):
        swap_costs(profile, placement_of(profile), np.random.default_rng(0))


def test_fit_costs_of_too_few_steps_is_refused():
    few = dataclasses.replace(
        BASE, tables={"steps": table_of("steps", [(1, 16, 0, 0, 0, 9000.0)] * 5)}
    )
    with pytest.raises(SloBenchError, match="5 steps, too few"):
        samples([few])


def test_settings_are_eight_regressors_by_degree_target_and_scale():
    assert len(settings()) == 48
    published = [setting for setting in settings((1, 10)) if setting.scale == "raw"]
    assert {(setting.target, setting.degree) for setting in published} == {
        ("seconds", 1),
        ("seconds", 10),
    }
    assert len(published) == 16


def test_raw_features_of_high_degree_fit_a_polynomial_of_them():
    pytest.importorskip("sklearn")
    step_samples = samples([measured()])
    cubic = step_samples.steps.chunk_tokens**3 * 1e-12 + 0.01
    steps = dataclasses.replace(step_samples.steps, seconds=cubic)
    step_samples = dataclasses.replace(step_samples, steps=steps)
    raw = learn(Setting("ridge", 3, "seconds", "raw"), step_samples)
    assert raw.predict(step_samples) == pytest.approx(cubic, rel=0.01)
    high = learn(Setting("ridge", 6, "seconds", "raw"), step_samples)
    assert np.isfinite(high.predict(step_samples)).all()


# ---------------------------------------------------------------- command line


@pytest.mark.slow
def test_profile_fit_command_prints_and_writes(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    header = write_profile(measured(), tmp_path / "a.toml")
    command = ["profile", "fit", str(header), "--like", "adaptivellm", "--degrees", "1"]
    out = tmp_path / "costs.npz"
    monkeypatch.setattr("slo_bench.predictors.costs.regressors.REGRESSORS", ("knn", "tree"))
    done = CliRunner().invoke(app, [*command, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert len(report["regressors"]) == 6
    assert [q["best"] for q in report["regressors"]].count(True) == 1
    assert report["swap"]["measured"] is False
    assert report["swap"]["held_out_percent"] is None
    assert read_cost_grid(out).about["model"] == "llama-3-8b"
    shown = CliRunner().invoke(app, [*command, "--dry-run"], env={"COLUMNS": "60"})
    assert "regressor" in shown.output, "a head is broken"
    assert "seconds" in shown.output, "a word is broken"
    assert re.search(r"(?m)^kept$", shown.output), "a table without room lists its cells"
    assert "not measured" in shown.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--like", "adaptive"], "unknown paper in --like"),
        (["--like", "adaptivellm"], "needs --out FILE"),
        (["--like", "adaptivellm", "--out", "x.toml"], "no profile"),
        (["--like", "adaptivellm", "--out", "x.npz", "--degrees", "two"], "--degrees 'two'"),
        (["--like", "adaptivellm", "--out", "x.npz", "--degrees", "11"], "from 1 to 10"),
        (["--tp", "2"], "--tp goes with --like"),
    ],
)
def test_profile_fit_command_refuses_impossible_options(tmp_path, options, message):
    header = write_profile(measured(), tmp_path / "a.toml")
    with pytest.raises(SloBenchError, match=message):
        CliRunner().invoke(app, ["profile", "fit", str(header), *options], catch_exceptions=False)


def test_profile_fit_without_scikit_learn_names_the_extra(monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(SloBenchError, match=r"slo-bench\[regressors\]"):
        fit_costs(measured())
