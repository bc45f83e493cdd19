"""Which chunk size gives Sarathi the shortest waits at a rate, while its tokens come in time?"""

import sys
import tempfile
from pathlib import Path

from slo_bench import Experiment, TuneSettings, tune


def main(folder: Path) -> None:
    """Four trials; the system's own setting is the first of them."""
    outcome = tune(
        Experiment(systems="sarathi", workload="azure-conv", requests=300, seeds=1),
        TuneSettings(
            objectives=("ttft_p99",),
            rate_rps=6,
            search={"chunk_tokens": [256, 512, 1024, 2048]},
            trials=4,
            confirm=False,
        ),
        folder / "tuned",
    )
    for trial in outcome.study.trials:
        value = "-" if trial.values is None else f"{trial.values[0]:.3f} s"
        print(f"chunk_tokens={trial.configuration.get('chunk_tokens')}: p99 of TTFT {value}")
    best = outcome.winners[0]
    print(f"best: {dict(best.row.configuration)}, written to {best.file.name}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
