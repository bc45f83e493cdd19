"""A run folder in pandas: how many requests missed their SLO, and were they the long ones?"""

import sys
import tempfile
from pathlib import Path

from slo_bench import Experiment, RunResult


def main(folder: Path) -> None:
    """Make a run, then read it as anybody can who is given the folder."""
    Experiment(
        systems=["vllm", "sarathi"], workload="azure-conv", rates=[8], requests=300, seeds=2
    ).run(folder / "runs", jobs=1)
    result = RunResult(folder / "runs")
    print(result.cells.groupby("system")[["attainment", "ttft_p99_s"]].mean().to_string())
    for cell in result.cells["cell"]:
        requests = result.requests(cell)
        missed = requests[requests["met"] == 0]
        print(
            f"{cell}: {len(missed)} misses; median prompt {missed['prompt_tokens'].median():g} "
            f"tokens, of all requests {requests['prompt_tokens'].median():g}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
