"""A trace of your own, replayed at its own pace, at twice that, and at four times."""

import sys
import tempfile
from pathlib import Path

from slo_bench import Experiment, load_source

COLUMNS = "arrival_s,prompt_tokens,output_tokens,class"


def main(folder: Path) -> None:
    """A request each half second: chat, and every tenth a long document to be summed up."""
    rows = [
        f"{i / 2},6000,150,document" if i % 10 == 9 else f"{i / 2},{200 + i % 7 * 100},250,chat"
        for i in range(240)
    ]
    trace = folder / "trace.csv"
    trace.write_text("\n".join([COLUMNS, *rows]))
    workload = load_source(trace).make()
    print(
        f"{len(workload)} requests in {workload.span_s:g} s, longest {max(workload.prompt_tokens)}"
    )
    result = Experiment(
        systems="vllm",
        workload=str(trace),
        speeds=[1, 2, 4],
        slo={"chat": {"ttft": 0.5, "tpot": 0.05}, "document": {"ttft": 3}},
    ).run(folder / "runs", jobs=1)
    print(result.cells[["speed", "attainment", "ttft_p99_s", "goodput_rps"]].to_string(index=False))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
