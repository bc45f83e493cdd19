#!/usr/bin/env python3
"""Tables of docs/measurements/policies-on-servers.md: policies inside vLLM, and simulated.

Usage: scripts/server_tables.py [--only NAME]... [--work DIR] [--requests N] [--pages-only]

Every experiment of `EXPERIMENTS` is run on vLLM for CPU with `slo-bench run --validate` (about
three times the time of its requests) into DIR/NAME; a stopped one is continued by the same command,
and one that is complete is not run again. Then the page is written: between its two comments the
option that repeats a block, and a line for each level. Levels whose client was late are no results:
their line has the reason in place of figures. `--requests` makes runs shorter, to try them.

Servers with different roles cannot be validated: the same command is simulated with the step times
of the experiment that `FITTED_BY` names. Several models (`WOKEN`) are simulated with the measured
time of a wake-up, and with the TPOT of the last system as the time of a step. Experiments of
`ROUNDS` are run so often, into DIR/NAME-2 and so on without validation and with the systems in
reverse order every second time: other work on the machine then falls on all of them.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slo_bench import RunResult

Floats = NDArray[np.float64]
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measurements" / "policies-on-servers.md"
KEPT = ROOT / "docs" / "measurements" / "policies-on-servers.json"
MODEL, ENCODER = "models/tiny", "models/encoder"
MODELS = {"models/a": "4m", "models/b": "4m", "models/c": "8m"}
_BLOCK = re.compile(r"(<!-- server-table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_HEADS = (
    "system",
    "req/s",
    "in SLO, %",
    "TTFT",
    "TPOT",
    "E2E",
    "spread, %",
    "swapped, recomputed, sent away",
    "alike",
)

# A server with little KV memory: 20 or 24 blocks of 32 tokens beside requests of 50 to 450.
_SERVER = (
    *("--backend", "vllm", "--model", MODEL, "--seeds", "1", "--sweep", "block_size=32"),
    "--server-arg=--max-model-len=512",
)
_LENGTHS = (
    *("--workload", "sharegpt", "--requests", "120"),
    *("--sweep", "prompt_tokens=uniform(32,256)", "--sweep", "output_tokens=uniform(16,192)"),
)
_STATIC = "scripts/static_batches.py"
_MIX = "prompt=uniform(32,256),output=uniform(16,160),texts=uniform(2,12),tokens=16"
EXPERIMENTS: Mapping[str, tuple[str, ...]] = {
    "adaptivellm": (
        *(*_SERVER, *_LENGTHS, "--sweep", "num_gpu_blocks=20", "--sweep", "num_cpu_blocks=200"),
        *("--system", "adaptivellm", "--system", "vllm-swap", "--system", "vllm-v0"),
        *("--rates", "2,4", "--slo", "ttft=2,tpot=0.1", "--validate"),
    ),
    "uellm": (
        *(*_SERVER, *_LENGTHS, "--sweep", "num_gpu_blocks=20"),
        *("--system", "slo-odbs-continuous", "--system", "vllm-v0", "--system", "edf"),
        *("--rates", "2,4", "--slo", "e2e=uniform(1,20)", "--validate"),
        *("--sweep", "length_predictor=noisy(accuracy=0.8)"),
    ),
    "uellm-at-once": (
        *(*_SERVER, "--workload", "sharegpt", "--requests", "40"),
        *("--arrivals", "concurrency(40)", "--sweep", "num_gpu_blocks=600"),
        *("--sweep", "prompt_tokens=uniform(32,256)", "--sweep", "output_tokens=uniform(16,192)"),
        *("--system", "fastertransformer", "--sweep", "fastertransformer.max_batch=10"),
        *("--system", f"{_STATIC}:S3Batches", "--system", f"{_STATIC}:SloOdbsBatches"),
        *("--system", "slo-odbs-continuous", "--sweep", "slo-odbs-continuous.sort_by=weighted"),
        *("--sweep", "slo-odbs-continuous.max_batch=10", "--system", "vllm-v0"),
        *("--sweep", "length_predictor=noisy(accuracy=0.9951)"),
        *("--slo", "e2e=uniform(0.5,60)", "--validate"),
    ),
    "prism-queue": (
        *(*_SERVER, *_LENGTHS, "--sweep", "num_gpu_blocks=20", "--sweep", "num_cpu_blocks=200"),
        *("--system", "prism-queue", "--system", "vllm-v0", "--rates", "4"),
        *("--slo", "ttft=uniform(0.1,4),tpot=0.1", "--validate"),
    ),
    "collocation": (
        *(*_SERVER, "--workload", "WORK/priorities.csv", "--replay-speed", "1"),
        *("--sweep", "num_gpu_blocks=20", "--slo", "ttft=2,tpot=0.1", "--validate"),
        *("--system", "collocation", "--system", "vllm-v0"),
    ),
    "collocation-embedder": (
        *(*_SERVER, "--workload", f"collocated(7:3,{_MIX})"),
        *("--embedder", ENCODER, "--requests", "300", "--rates", "6"),
        *("--sweep", "num_gpu_blocks=128", "--slo", "ttft=2,tpot=0.1;embed:e2e=1"),
        *("--system", "collocation", "--system", "collocated-fcfs", "--system", "vllm"),
    ),
    "load-aware": (
        *(*_SERVER, "--system", "vllm", "--instances", "2"),
        *("--sweep", "router=prefix-aware,load-aware", "--sweep", "num_gpu_blocks=24"),
        *("--workload", "sharegpt", "--requests", "80", "--rates", "1"),
        *("--sweep", "prompt_tokens=64", "--sweep", "output_tokens=32"),
        *("--sweep", "sessions=sessions(turns=3, think_s=1, system_prompt_tokens=128)"),
        *("--server-arg=--enable-prompt-tokens-details", "--validate"),
    ),
    "distserve": (
        *(*_SERVER, *_LENGTHS, "--sweep", "num_gpu_blocks=24"),
        *("--system", "distserve", "--rates", "1,2", "--slo", "ttft=2,tpot=0.1"),
    ),
    "distserve-colocated": (
        *(*_SERVER, *_LENGTHS, "--sweep", "num_gpu_blocks=24", "--instances", "2"),
        *("--system", "vllm", "--rates", "1,2", "--slo", "ttft=2,tpot=0.1", "--validate"),
    ),
    "prism-models": (
        *("--backend", "vllm", "--model", MODEL, "--gpus", "2", "--gpu", "a10", "--seeds", "1"),
        *("--models", f"fleet({', '.join(MODELS)}, exponent=0.3, active_s=120, idle_s=120)"),
        *("--sweep", "memory_share=0.0506", "--server-arg=--max-model-len=512"),
        *("--system", "prism", "--sweep", "prism.max_num_batched_tokens=8192"),
        *("--system", "static-partition"),
        *("--sweep", "static-partition.max_num_batched_tokens=8192"),
        *("--workload", "sharegpt", "--requests", "60", "--rates", "0.25", "--slo", "ttft=10"),
        *("--sweep", "prompt_tokens=uniform(32,256)", "--sweep", "output_tokens=uniform(16,192)"),
        *("--send-delay-limit", "0.1", "--startup-timeout", "900"),
    ),
    "ascendra": (
        *(*_SERVER, *_LENGTHS, "--sweep", "num_gpu_blocks=24"),
        *("--system", "ascendra", "--sweep", "ascendra.n_lp=1", "--sweep", "ascendra.n_hp=1"),
        *("--rates", "2,4", "--slo", "ttft=0.5,tpot=0.1"),
    ),
    "sglang": (
        *("--backend", "sglang", "--model", MODEL, "--seeds", "1", "--sweep", "block_size=16"),
        *("--workload", "sharegpt", "--requests", "40", "--rates", "1"),
        *("--sweep", "prompt_tokens=uniform(32,256)", "--sweep", "output_tokens=uniform(16,96)"),
        *("--sweep", "num_gpu_blocks=64", "--slo", "ttft=uniform(1,20),tpot=0.5"),
        *("--system", "ascendra-lp", "--system", "prism-queue", "--system", "collocation"),
        *("--system", "adaptivellm", "--system", "sglang"),
    ),
}
FITTED_BY = {"distserve": "distserve-colocated", "ascendra": "distserve-colocated"}
ROUNDS = {"uellm-at-once": 3}
WOKEN = ("prism-models",)
_STEP_S = 0.05  # of the column that compares systems by steps
_ROUND_HEADS = (
    "system",
    "in SLO, %",
    "mean latency",
    "makespan",
    "mean steps",
    "steps to the last answer",
    "in SLO at 50 ms a step, %",
    "in SLO, replayed, %",
    "mean latency, replayed",
    "alike",
)


def command(
    name: str, work: str, requests: int | None = None, *, round_number: int = 1
) -> list[str]:
    """The command of an experiment."""
    words = [word.replace("WORK", work) for word in EXPERIMENTS[name]]
    if requests is not None and "--requests" in words:
        words[words.index("--requests") + 1] = str(requests)
    folder = f"{work}/{name}"
    if round_number > 1:
        words.remove("--validate")
        folder += f"-{round_number}"
    if round_number % 2 == 0:
        places = [place for place, word in enumerate(words) if word == "--system"]
        systems = [words[place + 1] for place in places]
        for place, system in zip(places, reversed(systems), strict=True):
            words[place + 1] = system
    return ["slo-bench", "run", *words, "--out", folder]


def write_priorities(path: Path, requests: int) -> None:
    """A trace of requests of which a quarter has priority; 3 req/s."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / 3, requests))
    prompts, outputs = rng.integers(32, 257, requests), rng.integers(16, 193, requests)
    priority = (rng.random(requests) < 0.25).astype(int)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = zip(arrivals, prompts, outputs, priority, strict=True)
    lines = [f"{a:.4f},{p},{o},{high}" for a, p, o, high in rows]
    header = "arrival_s,prompt_tokens,output_tokens,priority"
    path.write_text("\n".join([header, *lines]) + "\n")


def run(name: str, work: Path, requests: int | None, *, round_number: int = 1) -> None:
    """Run an experiment, or continue it."""
    words = command(name, str(work), requests, round_number=round_number)
    folder = Path(words[-1])
    if (folder / "environment.json").is_file() and complete(folder):
        return
    if folder.exists():
        validates = ["--validate"] if "--validate" in words else []
        words = ["slo-bench", "run", "--resume", "--out", str(folder), *validates]
    if code := _called(words, check=False):
        print(f"{name} ended with code {code}", flush=True)


def _called(words: Sequence[str], *, check: bool = True) -> int:
    """Run a command of slo-bench and return its exit code."""
    print("$", shlex.join(words), flush=True)
    command = [sys.executable, "-m", "slo_bench.cli.main", *words[1:]]
    return subprocess.run(command, check=check).returncode


def simulate(name: str, work: Path, requests: int | None) -> None:
    """Simulate an experiment of servers with different roles into DIR/NAME-simulated."""
    folder, by = work / f"{name}-simulated", work / FITTED_BY[name] / "validation"
    profiles = sorted(by.glob("*.toml"))
    if folder.exists() or not profiles:
        return
    profile = profiles[-1].read_text()
    beside = by / f"{name}.toml"  # step times are measured and blocks are given: any GPU will do
    beside.write_text(re.sub(r'(?m)^gpu = ".*"$', 'gpu = "a10"', profile))
    words = [*command(name, str(work), requests)[:-1], str(folder)]
    backend_index = words.index("--backend")
    words[backend_index : backend_index + 2] = ["--gpu", "a10", "--profile", str(beside)]
    words = [word for word in words if not word.startswith("--server-arg")]
    _called(words)
    beside.unlink()


def simulate_woken(name: str, work: Path) -> None:
    """Simulate an experiment of several models, at its time of a wake-up and of a step."""
    folder = work / name
    simulated = folder.with_name(f"{name}-simulated")
    rows = _rows(folder)
    if simulated.exists() or not rows:
        return
    logs = sorted((folder / "servers").glob("*.log"))
    wake_s = np.mean([seconds for log in logs for seconds in wakes(log.read_text())])
    words = [*command(name, str(work))[:-1], str(simulated)]
    backend = words.index("--backend")
    for option in ("--startup-timeout", "--send-delay-limit"):
        place = words.index(option)
        del words[place : place + 2]
    words[backend : backend + 2] = ["--sweep", f"host_s={float(rows[-1]['tpot_p50_s']):.3g}"]
    words += ["--sweep", f"prism.start_s={wake_s:.3g}"]
    _called([word for word in words if not word.startswith("--server-arg")])


def wakes(log: str) -> list[float]:
    """Seconds of each start in the log of a gateway of several models, without those that are made
    before the first request.
    """
    later = log.partition(" has left\n")[2]
    return [float(seconds) for seconds in re.findall(r" is at \S+ on GPU \d+: (\S+) s\n", later)]


def complete(folder: Path) -> bool:
    """Whether every planned cell has a row, and the report was written after the last."""
    planned = json.loads((folder / "environment.json").read_text()).get("planned_cells")
    return len(_rows(folder)) == planned and (folder / "report.html").is_file()


def _rows(folder: Path) -> list[dict[str, str]]:
    path = folder / "cells.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def levels(folder: Path) -> list[dict[str, Any]]:
    """Of each level of a run what the table shows."""
    validated = _by_cell(folder / "validation.json")
    decided = _by_cell(folder / "decisions.json")
    simulated = {row["cell"]: row for row in _rows(folder.with_name(f"{folder.name}-simulated"))}
    level_rows = []
    for row in _rows(folder):
        errors = {
            (entry["metric"], entry["statistic"]): entry
            for entry in validated.get(row["cell"], {}).get("rows", ())
        }
        errors |= _beside(row, simulated.get(row["cell"]))
        names = ("router", "length_predictor")
        extra = [row[name] for name in names if row.get(name) and _several(folder, name)]
        level_rows.append(
            {
                "system": ", ".join([row["system"], *extra]),
                "rate_rps": float(row["rate_rps"] or "nan"),
                "valid": row["valid"] == "True",
                "invalid_because": row.get("invalid_because") or "",
                "attainment": float(row["attainment"]) if row["attainment"] else None,
                "ttft_p50_s": float(row["ttft_p50_s"]),
                "tpot_p50_s": float(row["tpot_p50_s"]),
                "e2e_p50_s": float(row["e2e_p50_s"]),
                "errors": {f"{m} {s}": entry for (m, s), entry in errors.items()},
                "measured": validated.get(row["cell"], {}).get("measured"),
                "decisions": decided.get(row["cell"]),
                "preemptions": row.get("server_preemptions"),
                "models": _model_counts(row, simulated.get(row["cell"])),
            }
        )
    return level_rows


def _model_counts(
    row: Mapping[str, str], simulated: Mapping[str, str] | None
) -> dict[str, list[float]] | None:
    """Of a run of several models what was counted, each measured and simulated."""
    if not row.get("models_unplaced") or simulated is None:
        return None
    names = ("count_activations", "count_evictions", "models_unplaced", "attainment")
    return {name: [float(level[name] or 0) for level in (row, simulated)] for name in names}


def _beside(row: Mapping[str, str], simulated: Mapping[str, str] | None) -> dict[Any, Any]:
    if simulated is None:
        return {}
    errors = {}
    for metric in ("ttft", "tpot", "e2e"):
        real_s, simulated_s = (float(level[f"{metric}_p50_s"]) for level in (row, simulated))
        error = simulated_s / real_s - 1
        errors[metric, "p50"] = {"real_s": real_s, "simulated_s": simulated_s, "error": error}
    return errors


def _several(folder: Path, column: str) -> bool:
    return len({row.get(column) for row in _rows(folder)}) > 1


def _by_cell(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    return {level["cell"]: level for level in json.loads(path.read_text())}


def rounds(folder: Path, number: int) -> list[dict[str, Any]]:
    """Of each system of an experiment in rounds what the table shows."""
    folders = [folder, *(folder.with_name(f"{folder.name}-{n}") for n in range(2, number + 1))]
    decided, validated = _by_cell(folder / "decisions.json"), _by_cell(folder / "validation.json")
    return [
        {
            "system": row["system"],
            "measurements": [
                figures
                for measured in folders
                if (figures := measurement(measured, row["cell"])) is not None
            ],
            "errors": [
                error for error in validated[row["cell"]]["rows"] if error["metric"] == "e2e"
            ],
            "replayed_attainment": replayed_attainment(folder, row["cell"]),
            "decisions": decided.get(row["cell"]),
        }
        for row in _rows(folder)
    ]


def measurement(folder: Path, cell: str) -> dict[str, float] | None:
    """Figures of a cell; None where it has no result."""
    if not any(row["cell"] == cell and row["valid"] == "True" for row in _rows(folder)):
        return None
    table = RunResult(folder).requests(cell).sort_values("id")
    log = json.loads((folder / "servers" / f"{cell}.meta.json").read_text())
    steps = steps_to_answers(folder, log["steps"][0])
    return {
        "attainment": float(table["slo_met"].mean()),
        "e2e_mean_s": float((table["finish_s"] - table["arrival_s"]).mean()),
        "makespan_s": float(table["finish_s"].max() - table["arrival_s"].min()),
        "steps_mean": float(np.mean(steps)),
        "steps_last": float(max(steps)),
        "attainment_by_steps": float(np.mean(_STEP_S * steps <= table["e2e_slo_s"])),
    }


def steps_to_answers(folder: Path, place: Mapping[str, Any]) -> NDArray[np.int64]:
    """Steps that the server had done when each request ended, from a part of its step log."""
    text = (folder / place["file"]).read_bytes()[place["begin"] : place["end"]].decode()
    events = [event for event in map(json.loads, text.splitlines()) if event["event"] == "step"]
    # No later step tells the end of the last ones.
    ends = {request: len(events) for event in events for request in event["entered"]}
    for steps, event in enumerate(events):
        ends |= {request: steps for request in event["ended"] if request in ends}
    return np.array([ends[request] for request in sorted(ends, key=_index_of)])


def _index_of(request: str) -> int:
    """The number of a request, in `cmpl-slo-bench-NUMBER-…`."""
    return int(request.split("-")[3])


def replayed_attainment(folder: Path, cell: str) -> float:
    """Share of the requests whose end-to-end bound the replay keeps."""
    bounds_s = RunResult(folder).requests(cell)["e2e_slo_s"].to_numpy()
    with gzip.open(folder / "validation" / f"{cell}.csv.gz", "rt", newline="") as file:
        replayed_s = [float(row["e2e_simulated_s"]) for row in csv.DictReader(file)]
    return float(np.mean(np.array(replayed_s) <= bounds_s))


def table(level_rows: Sequence[Mapping[str, Any]]) -> str:
    """The levels as a table."""
    if not level_rows:
        return "Not measured yet.\n"
    if "measurements" in level_rows[0]:
        return _rounds_table(level_rows)
    lines = [f"| {' | '.join(_HEADS)} |", f"|{'---|' * len(_HEADS)}"]
    for level in level_rows:
        first = [level["system"], f"{level['rate_rps']:.3g}"]
        if not level["valid"]:
            cells = [*first, f"no result: {level['invalid_because']}"]
            cells += [""] * (len(_HEADS) - len(cells))
        else:
            cells = [*first, *_figures(level), *_decisions(level)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rounds_table(system_rows: Sequence[Mapping[str, Any]]) -> str:
    """Medians of the rounds with smallest and largest, and the replay of the first round."""
    lines = [f"| {' | '.join(_ROUND_HEADS)} |", f"|{'---|' * len(_ROUND_HEADS)}"]
    for row in system_rows:
        shares, latencies_s, makespans_s, mean_steps, last_steps, shares_by_steps = (
            np.array([measured[name] for measured in row["measurements"]])
            for name in (
                *("attainment", "e2e_mean_s", "makespan_s"),
                *("steps_mean", "steps_last", "attainment_by_steps"),
            )
        )
        mean = next(error for error in row["errors"] if error["statistic"] == "mean")
        cells = [
            row["system"],
            _ranged(100 * shares, "{:.0f}".format),
            _ranged(latencies_s, _time),
            _ranged(makespans_s, _time),
            _ranged(mean_steps, "{:.0f}".format),
            _ranged(last_steps, "{:.0f}".format),
            _ranged(100 * shares_by_steps, "{:.0f}".format),
            f"{100 * row['replayed_attainment']:.0f}",
            f"{_time(mean['simulated_s'])} ({100 * mean['error']:+.0f}%)",
            _decisions(row)[1],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ranged(values: Floats, text: Callable[[float], str]) -> str:
    low, high = text(values.min()), text(values.max())
    return text(float(np.median(values))) + (f" ({low} to {high})" if low != high else "")


def _figures(level: Mapping[str, Any]) -> list[str]:
    """Attainment, and each latency measured, with the simulation's error."""
    share = level["attainment"]
    cells = ["" if share is None else f"{100 * share:.1f}"]
    if models := level.get("models"):
        cells[0] += f" ({100 * models['attainment'][1]:.1f})"
    for name in ("ttft p50", "tpot p50", "e2e p50"):
        error_row = level["errors"].get(name) or {}
        real_s = error_row.get("real_s")
        real_s = level[f"{name.replace(' ', '_')}_s"] if real_s is None else real_s
        error = error_row.get("error")
        cells.append(_time(real_s) + ("" if error is None else f" ({100 * error:+.0f}%)"))
    spread = (level["errors"].get("e2e p50") or {}).get("spread")
    return [*cells, "" if spread is None else f"{100 * spread:.0f}"]


def _decisions(level: Mapping[str, Any]) -> list[str]:
    decided = level["decisions"]
    if models := level.get("models"):
        names = ("count_activations", "count_evictions", "models_unplaced")
        real, same = (", ".join(f"{models[name][side]:.0f}" for name in names) for side in (0, 1))
        return [f"woken, evicted, unplaced {real} ({same})", ""]
    if decided is None:
        return [f"–, {level['preemptions'] or '–'}, –", ""]
    names = ("preemptions_swap", "preemptions_recompute", "decisions_release")
    counts = ", ".join(str(decided["server"][name]) for name in names)
    if decided["simulated"]:
        counts += f" ({', '.join(str(decided['simulated'].get(name, '–')) for name in names)})"
    alike = decided["alike"]
    return [counts, "" if alike is None else f"{alike}/{decided['requests']}"]


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def written(text: str, kept: Mapping[str, Any]) -> str:
    """The page with its blocks written again."""

    def again(match: re.Match[str]) -> str:
        name = match[2]
        return f"{match[1]}\n`--only {name}`\n\n{table(kept.get(name, ()))}\n{match[4]}"

    return _BLOCK.sub(again, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=list(EXPERIMENTS), metavar="NAME")
    parser.add_argument("--work", type=Path, default=Path("runs"))
    parser.add_argument("--requests", type=int, help="of each level, to try a run")
    parser.add_argument("--pages-only", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    kept = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    if not options.pages_only:
        for folder, like in ((MODEL, "llama"), (ENCODER, "bert")):
            _called(["slo-bench", "model", "make", folder, "--like", like])
        for folder, size in MODELS.items():
            _called(["slo-bench", "model", "make", folder, "--size", size])
        trace = options.work / "priorities.csv"
        if not trace.is_file():
            write_priorities(trace, options.requests or 120)
        for name in options.only or EXPERIMENTS:
            number = ROUNDS.get(name, 1)
            for round_number in range(1, number + 1):
                run(name, options.work, options.requests, round_number=round_number)
            if name in FITTED_BY:
                simulate(name, options.work, options.requests)
            if name in WOKEN:
                simulate_woken(name, options.work)
            folder = options.work / name
            level_rows = levels(folder) if number == 1 else rounds(folder, number)
            print(table(level_rows), flush=True)
            if options.requests is None and level_rows:
                kept[name] = level_rows
                KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    if options.requests is None:
        PAGE.write_text(written(PAGE.read_text(), kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
