#!/usr/bin/env python3
"""Write predictors/lengths/confusion.toml: how the medians of a trained predictor err.

slo-bench predict-train DATA… --out lengths
slo-bench predict-eval lengths DATA… --predictions rows.csv
scripts/pack_confusion.py rows.csv --origin 'what DATA and the predictor were'
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np

from slo_bench.predictors.lengths.distribution import DEFAULT_EDGES, buckets_in

OUT = Path(__file__).parents[1] / "predictors" / "lengths" / "confusion.toml"


def main() -> None:
    """Count the rows and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", type=Path, help="CSV of predict-eval --predictions")
    parser.add_argument("--origin", required=True, help="data and predictor, for the reader")
    options = parser.parse_args()
    with options.rows.open(newline="", encoding="utf-8") as file:
        rows = [(int(r["output_tokens"]), int(r["predicted_median"])) for r in csv.DictReader(file)]
    true, predicted = buckets_in(DEFAULT_EDGES, np.array(rows)).T
    counts = np.zeros((len(DEFAULT_EDGES),) * 2, dtype=int)
    np.add.at(counts, (true, predicted), 1)
    lines = [
        "# Buckets (rows: of the answer; columns: of the median that was told), made by",
        "# scripts/pack_confusion.py. Figures alone: no prompt, no answer.",
        f'origin = "{options.origin}"',
        f"answers = {len(rows)}",
        f"exact = {np.trace(counts) / len(rows):.4f}",
        f"within_one = {(abs(true - predicted) <= 1).mean():.4f}",
        f"first_tokens = {list(DEFAULT_EDGES)}",
        "confusion = [",
        *(f"    {row}," for row in counts.tolist()),
        "]",
    ]
    OUT.write_text("\n".join(lines) + "\n", "utf-8")
    print(OUT)


if __name__ == "__main__":
    main()
