"""Bands: quantiles worked out by hand, and coverage of rows, models and GPUs not used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slo_bench.predictors.bands import (
    DENSE,
    EXPERTS,
    FITTED,
    KERNELS,
    METRICS,
    NAMES,
    SCALED,
    UNFITTED,
    Residuals,
    Setting,
    coverage,
    residual_id,
    residuals,
)

TTFT, TTFT_P99 = METRICS.index("ttft_mean"), METRICS.index("ttft_p99")


def rows(*groups: tuple[str, str, list[float]]) -> Residuals:
    """Residuals of TTFT means by (GPU, regime)."""
    names: dict[str, list[str]] = {name: [] for name in NAMES}
    logs = []
    for gpu, regime, values in groups:
        for number, value in enumerate(values):
            row = (
                residual_id(gpu, str(number)),
                "vllm",
                gpu,
                "m",
                "closed-loop",
                regime,
                KERNELS,
                DENSE,
            )
            for name, cell in zip(NAMES, row, strict=True):
                names[name].append(cell)
            logs.append(np.full(len(METRICS), np.nan))
            logs[-1][TTFT] = value
    return Residuals({name: np.array(column) for name, column in names.items()}, np.array(logs))


def at(gpu: str, regime: str = "decode-bound") -> Setting:
    return Setting("vllm", gpu, "m", KERNELS, regime)


def test_band_of_19_rows_spans_least_to_greatest():
    residual_rows = rows(("h100", "decode-bound", list(np.linspace(-1, 0.8, 19))))
    spread = residual_rows.spread(at("h100"), ["ttft_mean"])
    assert spread.same_system
    assert spread.factors() == pytest.approx((np.exp(-1), np.exp(0.8)))
    # One row is judged: 18 are too few, and there are no other groups.
    assert residual_rows.spread(at("h100"), ["ttft_mean"], residual_id("h100", "3")) is None


def test_band_prefers_rows_of_the_same_regime():
    calm, full = list(np.linspace(-0.1, 0.1, 19)), list(np.linspace(1, 2, 19))
    residual_rows = rows(("h100", "decode-bound", calm), ("h100", "kv-bound", full))
    assert residual_rows.spread(at("h100", "kv-bound"), ["ttft_mean"]).logs.min() == 1
    assert residual_rows.spread(at("h100"), ["ttft_mean"]).logs.max() == pytest.approx(0.1)


def test_band_of_an_unmeasured_quantile_takes_that_of_the_mean():
    residual_rows = rows(("h100", "decode-bound", [0.5] * 19))
    assert residual_rows.spread(at("h100"), ["ttft_p99"]).factors() == pytest.approx(
        (np.exp(0.5),) * 2
    )
    residual_rows = rows(("h100", "decode-bound", [0.5] * 19))
    residual_rows.logs[:, TTFT_P99] = 0.7
    assert residual_rows.spread(at("h100"), ["ttft_p99"]).factors() == pytest.approx(
        (np.exp(0.7),) * 2
    )


def test_band_of_a_new_gpu_weighs_groups_equally():
    residual_rows = rows(
        *((f"gpu-{n}", "decode-bound", [0.0] * 40) for n in range(3)),
        ("gpu-3", "decode-bound", [1.0]),
    )
    spread = residual_rows.spread(at("new"), ["ttft_mean"])
    assert not spread.same_system
    assert spread.share(np.abs(spread.logs[:, 0]) == 1.0) == pytest.approx(0.25)
    low, high = spread.factors()
    assert low < 1 < high  # which way a new group is off is not known
    assert rows(("a", "decode-bound", [0.0] * 40)).spread(at("new"), ["ttft_mean"]) is None


def test_band_of_a_new_group_covers_scattered_groups():
    draw = np.random.default_rng(0)
    alike = [(f"g{n}", "decode-bound", list(draw.normal(0, 0.1, 30))) for n in range(10)]
    apart = [
        (gpu, regime, [v + 0.4 * n for v in values])
        for n, (gpu, regime, values) in enumerate(alike)
    ]
    for groups, least, greatest in ((alike, 0.1, 0.4), (apart, 3.0, 4.5)):
        low, high = rows(*groups).spread(at("new"), ["ttft_mean"]).factors()
        assert least < np.log(high) < greatest
        assert -greatest < np.log(low) < -least


@pytest.mark.parametrize(
    ("step_time", "kind"),
    [(KERNELS, DENSE), (SCALED, DENSE), (UNFITTED, DENSE), (KERNELS, EXPERTS), (SCALED, EXPERTS)],
)
@pytest.mark.parametrize("metric", ["ttft_mean", "tpot_mean", "e2e_mean", "throughput"])
@pytest.mark.parametrize("left_out", ["id", "model", "gpu"])
def test_band_covers_left_out_rows(step_time, kind, metric, left_out):
    assert 0.85 <= coverage(residuals(), step_time, metric, left_out, kind) <= 0.97


def test_band_prefers_groups_of_the_same_kind_of_model():
    residual_rows = rows(*((f"gpu-{n}", "decode-bound", [float(n >= 4)] * 9) for n in range(8)))
    residual_rows.names["kind"] = np.repeat([DENSE, EXPERTS], 36)
    for kind, value in ((DENSE, 0.0), (EXPERTS, 1.0)):
        spread = residual_rows.spread(replace(at("new"), kind=kind), ["ttft_mean"])
        assert set(np.abs(spread.logs[:, 0])) == {value}
    few = residual_rows.kept(np.arange(72) < 45)  # one group of experts
    spread = few.spread(replace(at("new"), kind=EXPERTS), ["ttft_mean"])
    assert set(np.abs(spread.logs[:, 0])) == {0.0, 1.0}


def test_joint_residuals_come_from_the_same_rows():
    residual_rows = residuals()
    setting = Setting("vllm", "h100-80g", "qwen3-32b", KERNELS, "decode-bound")
    spread = residual_rows.spread(setting, ["ttft_mean", "tpot_mean"])
    mine = residual_rows.having("gpu", "h100-80g") & residual_rows.having("model", "qwen3-32b")
    mine &= residual_rows.having("engine", "vllm") & residual_rows.having("step_time", KERNELS)
    pairs = {tuple(row) for row in residual_rows.logs[mine][:, [TTFT, METRICS.index("tpot_mean")]]}
    assert {tuple(row) for row in spread.logs} <= pairs


def test_band_of_fitted_step_times_uses_kernel_table_rows():
    setting = Setting("vllm", "a100-80g", "llama-3.1-8b", FITTED, "decode-bound")
    spread = residuals().spread(setting, ["ttft_mean"])
    assert spread.borrowed
    fitted = residuals().having("step_time", FITTED).sum()
    assert len(spread.weights) > fitted
