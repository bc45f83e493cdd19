"""Whether two source trees write the same bytes: `python tools/benchmarks/same_records.py BEFORE`.

Runs small experiments over systems, arrivals, seeds and clusters with each tree (the second is
this one unless it is named), one process a tree, and compares the files of every run folder that
hold results: cells, requests, timelines, values over time. Exit code 1 if any differs. With `--keep
FOLDER` the files of the first tree are kept there, or read from there if they are.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ("cells.csv", "requests/*", "timelines/*", "timeseries/*", "mispredictions/*")
_DENSE = "--workload synthetic --prompt-tokens 1024 --output-tokens 128 --model qwen3-32b"
_DENSE += " --gpu b200 --tp 4 --arrivals concurrency(64)"
_CHAT = "--workload azure-conv --model llama-3-8b --gpu a100-80g --overlong-requests reject"
_SPLIT = "--sweep {0}.prefill_instances=1 --instances 3"
EXPERIMENTS = (
    *(f"--system {name} {_DENSE}" for name in ("vllm", "sarathi", "vllm-v0", "sglang")),
    f"--system vllm {_DENSE} --instances 4 --router least-loaded",
    f"--system vllm {_DENSE} --set vllm.async_scheduling=true",
    f"--system distserve {_DENSE} {_SPLIT.format('distserve')}",
    f"--system mooncake {_DENSE} {_SPLIT.format('mooncake')}",
    f"--system banaserve {_DENSE} {_SPLIT.format('banaserve')}",
    f"--system splitwise {_DENSE} --instances 4",
    f"--system llumnix {_DENSE} --instances 4",
    f"--system ascendra {_DENSE} --instances 3",
    f"--system vllm --system sarathi --system vllm-v0 --system vllm-swap {_CHAT} --rates 5,9",
    f"--system edf --system adaptivellm --system fastserve --system orca {_CHAT} --rates 6",
    f"--system s3 --system slo-odbs --system fastertransformer {_CHAT} --rates 3 --slo e2e=40",
    f"--system sarathi-drop --system edf-drop --system prism-queue {_CHAT} --rates 9",
    f"--system vllm {_CHAT} --rates 40 --instances 8 --router load-aware",
    f"--system sglang {_CHAT} --rates 30 --instances 6",
    f"--system llumnix {_CHAT} --rates 40 --instances 8",
    f"--system llumnix {_CHAT} --rates 400 --instances 64 --seeds 3",
    f"--system ascendra {_CHAT} --rates 40 --instances 8 --sweep ascendra.n_lp=6"
    " --sweep ascendra.n_hp=2",
    f"--system distserve --system splitwise {_CHAT} --rates 40 --instances 8",
    f"--system distserve {_CHAT} --rates 90 --instances 32 --seeds 2",
    f"--system mooncake --system memserve {_CHAT} --rates 40 --instances 8",
    f"--system mooncake {_CHAT} --rates 200 --instances 48",
    f"--system banaserve --system banaserve-forecast {_CHAT} --rates 40 --instances 8",
    f"--system hedged --system autoscaled --system multi-site {_CHAT} --rates 20 --instances 4",
    f"--system distserve --system llumnix {_CHAT} --rates 20 --instances 4 --failures 1@5..20",
    "--system mooncake --system vllm --workload mooncake-conversation --model llama-3-8b"
    " --gpu a100-80g --rates 1 --instances 4 --overlong-requests reject",
    f"--system vllm --system distserve {_CHAT} --arrivals gamma(cv=3) --rates 12 --instances 4",
    f"--system vllm --system llumnix {_CHAT} --rates 3 --instances 4"
    " --sessions sessions(turns=4,think_s=2)",
    "--system collocation --workload collocated(1:9) --embedder bge-m3 --model llama-3-8b"
    " --gpu a100-80g --rates 8",
    "--system prism --system muxserve --models fleet(llama-3.1-8b*4) --gpus 4 --rates 8"
    " --workload azure-conv --overlong-requests reject",
)


def write(folder: Path, requests: int, only: list[int]) -> None:
    """Run the experiments with the `slo_bench` of this process; a folder of results each."""
    from slo_bench.cli.main import app

    for number in only:
        words = ["run", "--no-report", "--jobs", "1", "--requests", str(requests)]
        words += ["--out", str(folder / str(number)), *shlex.split(EXPERIMENTS[number])]
        if "--seeds" not in words:
            words += ["--seeds", "1"]
        with contextlib.redirect_stdout(sys.stderr):
            app(words, standalone_mode=False)


def digests(folder: Path) -> dict[str, str]:
    """Checksums of all results by the place of the file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for pattern in RESULTS
        for path in sorted(folder.rglob(pattern))
    }


def main() -> None:
    """Compare, or be a process that writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--keep", type=Path, help="folder of the first tree's results")
    parser.add_argument("--only", help="numbers of experiments, with commas; all by default")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    every = ",".join(map(str, range(len(EXPERIMENTS))))
    only = [int(number) for number in (options.only or every).split(",")]
    if options.write:
        write(options.write, options.requests, only)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folders = [options.keep or Path(scratch) / "before", Path(scratch) / "after"]
        for tree, folder in zip((options.before, options.after), folders, strict=True):
            missing = [number for number in only if not (folder / str(number)).is_dir()]
            words = [sys.executable, __file__, str(options.before), "--write", str(folder)]
            words += ["--requests", str(options.requests), "--only", ",".join(map(str, missing))]
            path = tree / ".editable" if (tree / ".editable").is_dir() else tree
            if missing:
                subprocess.run(
                    words,
                    env={**os.environ, "PYTHONPATH": str(path)},
                    stderr=subprocess.DEVNULL,
                    check=True,
                )
        pairs = [(digests(folders[0] / str(n)), digests(folders[1] / str(n))) for n in only]
    files = sum(len(before) for before, _ in pairs)
    unlike = [
        f"{number} {name} ({EXPERIMENTS[number]})"
        for number, (before, after) in zip(only, pairs, strict=True)
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    print(*unlike, f"{len(only)} experiments, {files} files, {len(unlike)} differ", sep="\n")
    sys.exit(bool(unlike) or not files)


if __name__ == "__main__":
    main()
