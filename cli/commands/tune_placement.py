"""`slo-bench tune placement`: maps the layers of a model to devices."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...workloads.errors import SloBenchError
from ...workloads.machine_memory import check_memory
from ..options.declared import HtmlOrJson
from ..options.from_schema import Given, offer, with_options
from ..options.parameters import OUT, flag, option, option_group
from ..output.progress import phase

if TYPE_CHECKING:
    from ...tuner.placement.compare_placements import SolverResult
    from ...tuner.placement.problem import CostWeights, Problem
    from ...tuner.placement.topology import Topology

PLACEMENT_EXAMPLES = (
    "slo-bench tune placement --model chatglm2-6b --topology uellm",
    "slo-bench tune placement --model llama-3.1-70b --gpu a100-80g --devices 4 --mode lr",
    "slo-bench tune placement --model qwen2.5-32b --topology cluster.toml --reserve-gib 8 --check",
    "slo-bench tune placement --model chatglm2-6b --topology uellm --method morphling --out "
    "map.json",
    "slo-bench tune placement --model chatglm2-6b --topology uellm-3090-v100 --batch 1 "
    "--context 100 --host-ms 28 --split 14,14 --split 27,1",
    "slo-bench tune placement --random-cases 200",
)
_DEVICES, _ASKED = "Deployment", "Search"
_deployment = partial(option, panel=_DEVICES)
_asked = partial(option, panel=_ASKED)

_TRIAL_BYTES = 3_200  # of a trial that Optuna keeps, measured
_TAKEN = ("model", "weight_dtype", "kv_dtype", "gpu", "memory_share", "seed")
_CHANGED = {
    "gpu": {"panel": _DEVICES, "help": "GPU type of all devices. Default: as in --topology."},
    "seed": {"panel": _ASKED, "help": "Seed of the random numbers."},
}


@option_group
class MapSearch:
    """Search options: objective, solver and the iteration that is timed."""

    mode: str = _asked(
        "he|lr|balanced",
        "Objective: he: fewest devices; lr: lowest latency; balanced: both.",
        default="balanced",
    )
    latency_weight: float | None = _asked("A1", "In place of the mode's.")
    device_weight: float | None = _asked("A2", "In place of the mode's.")
    method: str = _asked(
        "exact|helr|even|optuna|morphling", "Solver whose map is saved.", default="exact"
    )
    check: bool = flag("Also solve with Optuna, as a check.", "--check", panel=_ASKED)
    trials: int = _asked("N", "Number of Optuna trials.", default=300)
    tests: int = _asked("N", "Number of stress tests of the solver morphling.", default=4)
    test_requests: int = _asked("N", "Requests in each stress test.", default=100)
    batch: int = _asked("N", "Batch size (sequences) of the timed iteration.", default=8)
    context: int = _asked("N", "Context length of each sequence, in KV tokens.", default=512)
    host_ms: float = _asked(
        "MS", "Host time of an iteration in milliseconds; about 30 for an eager loop.", default=1.0
    )
    lanes: int | None = _asked(
        "N", "Batches in flight in the simulation of the map. Default: one per stage."
    )


@option_group
class _Output(HtmlOrJson):
    html: Path | None = option("FILE", "Also write an HTML page with the map.", "--html")


@with_options
def tune_placement(
    *,
    model_options: Given = offer(only=_TAKEN, changed=_CHANGED),
    search: MapSearch,
    topology: str | None = _deployment(
        "FILE|NAME",
        "TOML file of devices and links, or a shipped topology: uellm, uellm-table-2-1, "
        "uellm-3090-v100, uellm-unlike, two-sites. Default: this machine, as reported by "
        "nvidia-smi.",
    ),
    devices: int | None = _deployment("N", "Number of GPUs."),
    reserve_gib: float = _deployment(
        "GIB", "Memory kept free for KV on every device.", default=0.0
    ),
    workload: str = _deployment(
        "SOURCE",
        "Workload whose longest request must fit beside the layers, as must --batch mean ones.",
        "--workload",
        "-w",
        default="sharegpt",
    ),
    kv_tokens: int | None = _deployment(
        "N", "Number of tokens whose KV must fit beside the layers, in place of --workload."
    ),
    out: Path | None = option(
        "FILE.json",
        "File for the device map, as accelerate, vLLM, SGLang and `run --device-map` read it.",
        *OUT,
    ),
    random_cases: int | None = _asked(
        "N", "Compare HELR with the exact solver on N random devices and models instead.", min=1
    ),
    split: list[str] | None = _asked(
        "N,N…",
        "Time this number of layers on each device, in their order, instead of searching. May be "
        "repeated.",
    ),
    output: _Output,
) -> None:
    """Map the layers of a model to devices by HELR and by an exact solver; compare the costs."""
    if random_cases is not None:
        if topology or devices or out or output.html or set(model_options.settings) - {"seed"}:
            raise SloBenchError(
                "--random-cases draws devices and models; it takes --seed and --json"
            )
        _show_gaps(random_cases, model_options.value("seed"), as_json=output.as_json)
        return
    from ...predictors.specs import model as model_of
    from ...reports.pages import placement_page as shown
    from ...tuner.placement.compare_placements import CHECK, METHODS, SolverResult, answer, answers
    from ...tuner.placement.launch import document
    from ...tuner.placement.morphling import Bench, morphling
    from ...tuner.placement.problem import kv_tokens_of, problem_of

    if search.method not in (*METHODS, "morphling"):
        raise SloBenchError(
            f"--method must be one of {', '.join(METHODS)} or morphling but is {search.method!r}"
        )
    numbers = {
        name: model_options.value(name) for name in ("weight_dtype", "kv_dtype", "memory_share")
    }
    spec, seed = model_of(model_options.value("model")), model_options.value("seed")
    where = _topology(topology, model_options.settings.get("gpu"), devices)
    weights = _weights(search.mode, search.latency_weight, search.device_weight)
    notes, ready_s = list[str](), 0.0
    if kv_tokens is None:
        kv_tokens = kv_tokens_of(workload, spec, search.batch, seed)
        notes.append(f"KV for {kv_tokens:,} tokens fits beside the layers: {workload}")
    problem = problem_of(
        spec,
        where,
        **numbers,
        reserve_bytes=reserve_gib * 2**30,
        kv_tokens=kv_tokens,
        batch=search.batch,
        context_tokens=search.context,
        host_s=search.host_ms / 1e3,
    )
    if split:
        if out or output.html:
            raise SloBenchError("--split times given maps; it takes --json, not --out or --html")
        _show_splits(problem, split, search.batch, as_json=output.as_json)
        return
    beside = [name for name in METHODS if name != "optuna" or search.method == "optuna"]
    beside += [CHECK] if search.check else []
    if CHECK in beside or "optuna" in beside:
        check_memory(search.trials * _TRIAL_BYTES, f"a study of {search.trials:,} trials")
    with phase("searching for maps"):
        solutions = answers(problem, weights, beside, trials=search.trials, seed=seed)
    if search.method == "morphling":
        bench = Bench(
            where,
            search.test_requests,
            host_s=search.host_ms / 1e3,
            **numbers,
            seed=seed,
        )
        with phase("morphling: stress tests"):
            tried = morphling(spec, bench, tests=search.tests)
        ready_s, placed = round(tried.took_s, 3), tried.placed
        latency_s, cost = problem.latency_s(placed), problem.cost(placed, weights)
        solutions.append(SolverResult("morphling", placed, latency_s, cost))
        count = len(tried.tests)
        notes.append(
            f"morphling: {count} stress {'test' if count == 1 else 'tests'} took {ready_s:.0f} s "
            f"(simulated), in which nothing is served; batches of {tried.best.batch}"
        )
    chosen = next(solution for solution in solutions if solution.method == search.method)
    if chosen.refused:
        answer(problem, weights, search.method, trials=search.trials, seed=seed)
    result = shown.FoundMap(
        spec, where, problem, weights, _mode_text(search.mode, weights), solutions, chosen, notes
    )
    if out is not None:
        _write(
            out, document(spec, where, chosen.placed, lanes=search.lanes, ready_s=ready_s), chosen
        )
    output.show(result, shown.write_map, shown.map_json, shown.map_text, out)


def _show_splits(problem: Problem, splits: list[str], batch: int, *, as_json: bool) -> None:
    """Latency of a pass over given maps, and the tokens per second of its sequences."""
    from ...reports.pages.table import one_group
    from ...tuner.placement.problem import map_of
    from ..output.console import print_result

    rows = []
    for text in splits:
        latency_s = problem.latency_s(map_of(problem, text))
        rows.append(
            {"split": text, "latency_ms": 1e3 * latency_s, "tokens_per_s": batch / latency_s}
        )
    if as_json:
        typer.echo(json.dumps(rows, allow_nan=False))
        return
    heads = ["layers on each device", "latency of a pass", "tokens/s"]
    lines = [
        [str(r["split"]), f"{r['latency_ms']:.2f} ms", f"{r['tokens_per_s']:.2f}"] for r in rows
    ]
    names = ", ".join(device.name for device in problem.devices)
    print_result(one_group(f"Splits over {names} (estimated)", heads, lines).rich())


def _show_gaps(cases: int, seed: int, *, as_json: bool) -> None:
    """The paper's procedure against the exact solver, in every mode."""
    from ...tuner.placement.compare_placements import random_gaps
    from ..output.console import print_result

    with phase("solving random cases"):
        rows = [gap.row() for gap in random_gaps(cases, seed)]
    if as_json:
        typer.echo(json.dumps(rows, allow_nan=False))
        return
    from ...reports.pages.table import one_group

    lines = [
        [name.replace("_", " "), *("–" if row[name] is None else f"{row[name]}" for row in rows)]
        for name in rows[0]
    ]
    print_result(one_group("HELR against the exact solver", lines[0], lines[1:]).rich())


def _topology(named: str | None, gpu: str | None, devices: int | None) -> Topology:
    from ...predictors.specs import gpu as gpu_of
    from ...tuner.placement.topology import alike, named_topology, this_machine

    if named is not None and (gpu is not None or devices is not None):
        raise SloBenchError(
            "--topology says which devices there are; leave --gpu and --devices out"
        )
    if named is not None:
        return named_topology(named)
    if gpu is None and devices is None:
        return this_machine()
    if gpu is None or devices is None:
        raise SloBenchError("--gpu and --devices must be given together: GPU type and number")
    return alike(gpu_of(gpu), devices)


def _weights(mode: str, latency: float | None, devices: float | None) -> CostWeights:
    from ...tuner.placement.problem import CostWeights, weights_of

    usual = weights_of(mode)
    return CostWeights(
        usual.latency if latency is None else latency,
        usual.devices if devices is None else devices,
    )


def _mode_text(mode: str, weights: CostWeights) -> str:
    from ...tuner.placement.problem import MODES

    if MODES[mode] == weights:
        return mode
    return f"a1 = {weights.latency:g}, a2 = {weights.devices:g}"


def _write(out: Path, document: dict[str, Any], chosen: SolverResult) -> None:
    if out.suffix != ".json":
        raise SloBenchError(f"--out must be a file .json but is {out}")
    if not chosen.fits:
        raise SloBenchError(
            f"the map of --method {chosen.method} does not fit, so it is not written; use "
            "--method exact"
        )
    from ...workloads.whole_file import write_whole

    write_whole(out, [json.dumps(document, indent=2).encode(), b"\n"])
