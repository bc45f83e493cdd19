"""What each erratum of the collocation paper changes when it is followed to the letter.

    python tests/benchmarks/collocation_errata.py [SEEDS] [FIRST]

Workloads of the suite (ratios 3:7, 7:3 and 9:1, and memory pressure; FIRST: so many of them) at
125 % of the estimated capacity. docs/papers.md quotes it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from slo_bench import Experiment

LETTER: dict[str, Any] = {
    "counts": "current",
    "slack": "letter",
    "recompute": "answer",
    "lateness": "letter",
    "forecast_as": "sum",
    "kv_scale": 1 / 64,  # 32 KV heads, 2 bytes
    "embed_scale": 1024 / 24576,  # one activation of d_model values, without bytes
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as built": {},
    **{f"{name} = {value}": {name: value} for name, value in LETTER.items()},
    "all of these": LETTER,
    "no speculative reservation": {"speculative_share": 0.0},
    "quota static": {"quota": "static"},
    "safety_ratio 0": {"safety_ratio": 0.0},
}
FIGURES = (
    "attainment",
    "attainment_chat",
    "attainment_batch",
    "attainment_embed",
    "preemptions_recompute",
    "rejected",
)


def main() -> None:
    """Print a table for each workload."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    suite = Experiment.suite("collocation")
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    workloads = (suite.workload[1], *suite.workload[3:])[:first]
    for label, parameters in VARIANTS.items():
        asked = suite.model_copy(
            update={
                "systems": ("collocation",),
                "parameters": {
                    "collocation": {name: (value,) for name, value in parameters.items()}
                },
                "workload": workloads,
                "load_factors": (1.25,),
                "seeds": seeds,
                "published": None,
                "records": "none",
            }
        )
        with tempfile.TemporaryDirectory() as folder:
            cells = asked.run(Path(folder) / "run", jobs=1).cells
        for number, text in enumerate(dict.fromkeys(cells["workload"])):
            mean = cells[cells["workload"] == text][list(FIGURES)].mean()
            shares = " ".join(f"{100 * mean[name]:6.1f}" for name in FIGURES[:4])
            counts = " ".join(f"{mean[name]:6.0f}" for name in FIGURES[4:])
            print(f"{number} | {label:30} | {shares} | {counts}", flush=True)


if __name__ == "__main__":
    main()
