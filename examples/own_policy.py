"""A policy of your own beside vLLM's: short prompts overtake long ones, but not for ever."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from slo_bench import Experiment, compare, read_results
from slo_bench.policy import Key, Policy, RequestState, View, parameter


@dataclass(frozen=True)
class ShortPrompts(Policy):
    """A prompt token counts as much as `wait_s_per_token` seconds of waiting."""

    wait_s_per_token: float = parameter(0.001, low=0.0, high=1.0)

    def queue_key(self, r: RequestState, view: View) -> Key:
        """The smallest key goes next."""
        return r.arrival_s + self.wait_s_per_token * r.prompt_tokens


def main(folder: Path) -> None:
    """Both serve the same requests; the table says which differences are more than noise."""
    result = Experiment(
        systems=["vllm", __file__],
        workload="azure-conv",
        rates=[8, 10],
        requests=200,
        seeds=2,
    ).run(folder / "runs", jobs=1)
    runs = read_results(result.folder)
    for row in compare(runs, runs, systems=("vllm", "own-policy")).rows:
        if row.metric.name in ("attainment", "goodput"):
            values = f"{row.a:.3g} → {row.b:.3g} ({row.verdict})"
            print(f"{row.rate_rps:g} req/s: {row.metric.name} {values}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
