"""Twenty-four hours of production arrivals, replayed in simulation: CPU time, memory, report.

Run `python tools/benchmarks/bench_day.py RATES LENGTHS`, two tables of the ServeGen data set
(Alibaba; Xiang et al., "ServeGen", 2025), a row for each client and window:

    client,window_start_s,rate_rps,iat_cv,iat_dist,iat_param1,iat_param2     (windows of 600 s)
    client,window_start_s,est_requests,field,mean,p5,p50,p90,p99,max         (windows of 6 h)

The first day of whole clients is taken, in an order drawn from the seed, for as long as they stay
within `--requests`. Each client is a renewal process with the gaps (Gamma or Weibull, their shape)
that the data set gives for the window, at its rate; lengths are drawn along the client's quantiles,
prompt and answer independently. So the hours, the clients and their bursts are those of production;
the requests themselves are drawn. The trace then goes through `slo-bench run` and `report` as any
other, each in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd

DAY_S = 86_400
WINDOW_S = 600
SIX_HOURS_S = 21_600
_SHARES = (0.0, 0.05, 0.5, 0.9, 0.99, 1.0)


def arrivals(window: pd.Series, rng: np.random.Generator) -> np.ndarray:
    """Moments within one window of one client, in seconds from its start."""
    shape, count = float(window["iat_param1"]), window["rate_rps"] * WINDOW_S
    if window["iat_dist"] == "Gamma":
        gaps = rng.gamma(shape, 1 / shape, int(2 * count + 50))
    else:
        gaps = rng.weibull(shape, int(2 * count + 50)) / math.gamma(1 + 1 / shape)
    moments = np.cumsum(gaps) / window["rate_rps"]
    return moments[moments < WINDOW_S]


def day(rates: pd.DataFrame, lengths: pd.DataFrame, max_requests: int, seed: int) -> pd.DataFrame:
    """A trace: arrival_s, prompt_tokens, output_tokens, by arrival."""
    rng = np.random.default_rng(seed)
    rates = rates[rates["window_start_s"] < DAY_S]
    clients = set.intersection(
        *(
            set(lengths.loc[lengths["field"] == f"{w}_tokens", "client"])
            for w in ("input", "output")
        )
    )
    parts, left = [], float(max_requests)
    for client in rng.permutation(sorted(clients & set(rates["client"]))):
        client_rates = rates[rates["client"] == client]
        expected = client_rates["rate_rps"].sum() * WINDOW_S
        if expected > left:
            continue
        left -= expected
        window_arrivals_s = [
            arrivals(row, rng) + row["window_start_s"] for _, row in client_rates.iterrows()
        ]
        moments = np.concatenate(window_arrivals_s)
        part = pd.DataFrame({"arrival_s": moments})
        for field, name in (("input_tokens", "prompt_tokens"), ("output_tokens", "output_tokens")):
            client_lengths = lengths[(lengths["client"] == client) & (lengths["field"] == field)]
            drawn = np.zeros(len(moments))
            nearest = np.abs(
                moments[:, None] - (client_lengths["window_start_s"].to_numpy() + SIX_HOURS_S / 2)
            ).argmin(axis=1)
            for window, (_, row) in enumerate(client_lengths.iterrows()):
                rows = nearest == window
                values = [
                    min(1.0, row["p5"]),
                    *(row[q] for q in ("p5", "p50", "p90", "p99", "max")),
                ]
                drawn[rows] = np.interp(rng.random(rows.sum()), _SHARES, values)
            part[name] = np.maximum(1, drawn.round()).astype(np.int64)
        parts.append(part)
    return pd.concat(parts).sort_values("arrival_s", ignore_index=True)


def costs() -> ModuleType:
    """`bench_report.py` beside this file."""
    spec = importlib.util.spec_from_file_location(
        "bench_report", Path(__file__).parent / "bench_report.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_report"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rates", type=Path)
    parser.add_argument("lengths", type=Path)
    parser.add_argument("--requests", type=int, default=400_000)
    parser.add_argument("--systems", default="vllm,sarathi")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep trace, run and report here")
    options = parser.parse_args()
    bench = costs()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        trace = day(
            pd.read_csv(options.rates), pd.read_csv(options.lengths), options.requests, options.seed
        )
        trace.to_csv(folder / "day.csv", index=False, float_format="%.6f")
        hours = trace["arrival_s"].max() / 3600
        print(f"{len(trace):,} requests in {hours:.1f} h")
        print(f"{'':24} {'CPU s':>8} {'wall s':>8} {'peak MB':>9}")
        systems = [word for name in options.systems.split(",") for word in ("--system", name)]
        cost = bench.cost_of(
            *("run", *systems, "--workload", str(folder / "day.csv"), "--model", "llama-3-8b"),
            *(
                "--gpu",
                "a100-80g",
                "--overlong-requests",
                "reject",
                "--records",
                "csv",
                "--jobs",
                "1",
            ),
            *("--replay-speed", "1", "--seeds", "1"),
            *("--no-report", "--out", str(folder / "run")),
        )
        bench.show("run", cost)
        page = folder / "report.html"
        bench.show("report", bench.cost_of("report", str(folder / "run"), "--out", str(page)))
        bench.browse(page)


if __name__ == "__main__":
    main()
