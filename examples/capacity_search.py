"""The highest rate at which 90 % of requests meet their SLO, with its 95 % interval."""

import sys
import tempfile
from pathlib import Path

from slo_bench import CapacityOptions, Experiment, search_capacity


def main(folder: Path) -> None:
    """A rough search; a smaller tolerance and more requests narrow the interval."""
    search = search_capacity(
        Experiment(
            systems=["vllm", "sarathi"],
            workload="azure-conv",
            requests=300,
            slo="ttft=1,tpot=0.15",
        ),
        folder / "capacity",
        options=CapacityOptions(targets=(0.9,), tolerance=0.2, max_requests=8_000),
    )
    for row in search.rows():
        low, high = row["low_rps"], row["high_rps"]
        print(f"{row['system']}: {row['capacity_rps']:.2f} req/s [{low:.2f}, {high or 0:.2f}]")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
