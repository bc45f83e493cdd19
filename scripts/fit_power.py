"""Fit the power of GPUs to ML.ENERGY's measurements: `predictors/power.toml`, and its errors.

    python scripts/fit_power.py mlenergy.csv.gz

Of text tasks with 16-bit dense models of the catalogue. Prompt lengths are not in the table: the
context is half the answer, and operations are those of the answers. Each fit is judged on models
that it has not seen (a model left out, Llama-3.1-70B and 3.3-70B being one) and on the other GPU.
Joules a token are predicted twice: with the measured step time, and with that of
`predictors/operators`. Writes `power.toml` and the table `energy` of docs/accuracy.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from slo_bench.predictors.operators.assembly import operator_step_time
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.power import PowerModel
from slo_bench.predictors.specs import gpu, model
from slo_bench.scripts.accuracy_page import replace_part, table
from slo_bench.workloads.arrays import Floats

OUT = Path(__file__).parents[1] / "predictors" / "power.toml"
GPUS = {"H100": "h100-80g", "B200": "b200"}
MODELS = {
    "Qwen/Qwen3-14B": "qwen3-14b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.1-70b",
}
HEAD = """\
# Power of GPUs while they compute, as shares of their limit (predictors/power.py), fitted by
# scripts/fit_power.py to the measurements of ml-energy/data (Apache-2.0): 16-bit dense models, text
# tasks. Errors are those of models that were left out of the fit: |predicted / measured - 1|.
"""


def _features(row: pd.Series[Any], placement: Placement, step_s: float) -> tuple[float, float]:
    """Shares of the bandwidth and of the FLOP/s in a decode step of `step_s`."""
    spec, batch = placement.gpu, row["avg_batch_size"]
    kv = batch * row["avg_output_tokens"] / 2 * placement.kv_bytes_per_token / placement.tp
    moved = placement.weight_bytes_per_gpu + kv
    operations = 2 * placement.model.parameters * batch / placement.tp
    return (
        moved / step_s / spec.bandwidth_bytes_per_s,
        operations / step_s / spec.flops_16bit,
    )


def _fit(shares: Floats, power: Floats) -> Floats:
    """Coefficients of least relative squares, none below 0."""
    columns = np.column_stack([np.ones(len(shares)), shares[:, 0], np.sqrt(shares[:, 1])])
    return np.asarray(nnls(columns / power[:, None], np.ones(len(power)))[0])


def _predicted(coefficients: Floats, shares: Floats) -> Floats:
    drawn = PowerModel(1.0, *coefficients)
    return np.array([drawn.watts(*row) for row in shares.tolist()])


def _errors(error: Floats) -> str:
    size = np.abs(error)
    return f"{np.median(size):.1%} / {np.quantile(size, 0.9):.1%} ({np.median(error):+.1%})"


def main(file: Path) -> None:
    """Fit, judge, and write both."""
    frame = pd.read_csv(file)
    frame = frame[frame["model_id"].isin(list(MODELS)) & (frame["weight_precision"] == "bfloat16")]
    names, kinds = frame["model_id"].map(MODELS).to_numpy(), frame["gpu"].map(GPUS).to_numpy()
    measured_features, simulated_features, ratio, power = [], [], [], []
    for _, row in frame.iterrows():
        spec = gpu(GPUS[row["gpu"]])
        placement = Placement(model(MODELS[row["model_id"]]), spec, tp=int(row["num_gpus"]))
        batch, measured_s = row["avg_batch_size"], row["avg_batch_size"] / row["tokens_per_s"]
        held = round(batch * row["avg_output_tokens"] / 2)
        step_s = operator_step_time(placement).model.step_s(round(batch), held, ())
        measured_features.append(_features(row, placement, measured_s))
        simulated_features.append(_features(row, placement, step_s))
        ratio.append(step_s / measured_s)
        power.append(row["avg_power_w"] / row["num_gpus"] / spec.power_w)
    shares, simulated, slower, drawn = map(
        np.array, (measured_features, simulated_features, ratio, power)
    )
    lines, rows = [HEAD], []
    for kind in GPUS.values():
        here = kinds == kind
        error, whole = np.full(len(frame), np.nan), np.full(len(frame), np.nan)
        for name in sorted(set(names)):
            kept, judged = here & (names != name), here & (names == name)
            coefficients = _fit(shares[kept], drawn[kept])
            error[judged] = _predicted(coefficients, shares[judged]) / drawn[judged] - 1
            energy = _predicted(coefficients, simulated[judged]) * slower[judged]
            whole[judged] = energy / drawn[judged] - 1
        other = _fit(shares[~here], drawn[~here])
        crossed = _predicted(other, shares[here]) / drawn[here] - 1
        constant, bandwidth, compute = _fit(shares[here], drawn[here])
        size = np.abs(error[here])
        lines.append(
            f'["{kind}"]\nconstant = {constant:.4f}\nbandwidth = {bandwidth:.4f}\n'
            f"compute = {compute:.4f}\nn = {here.sum()}\n"
            f"median_error = {np.median(size):.4f}\np90_error = {np.quantile(size, 0.9):.4f}\n"
        )
        figures = (_errors(error[here]), _errors(whole[here]), _errors(crossed))
        rows.append((kind, str(here.sum()), *figures))
    OUT.write_text("\n".join(lines), encoding="utf-8")
    heads = ("GPU", "n", "model left out", "the same, step time predicted", "GPU left out")
    replace_part("energy", table(heads, rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
