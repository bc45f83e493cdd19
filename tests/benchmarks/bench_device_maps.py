"""How far the paper's HELR is from the optimum, and how long the exact search takes.

python tests/benchmarks/bench_device_maps.py
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from slo_bench.predictors.specs import gpu, link, model
from slo_bench.tuner.device_maps.exact import exact
from slo_bench.tuner.device_maps.paper import paper
from slo_bench.tuner.device_maps.problem import MODES, Problem, Weights, problem_of
from slo_bench.tuner.device_maps.topology import Machine, Topology, read_topology
from slo_bench.workloads.errors import SloBenchError

CASES = 200
GPUS = ("a100-80g", "a100-40g", "rtx-3090", "rtx-3090@150w", "v100-32g", "l4", "a10")
LINKS = ("nvlink3", "pix", "node", "sys", "ethernet-25g")
MODELS = ("chatglm2-6b", "llama-3.1-8b", "qwen2.5-14b", "opt-13b", "llama-2-70b")

FOUR_KINDS = """
[[device]]
name = "a"
gpu = "a100-40g"
count = 16
[[device]]
name = "b"
gpu = "v100-32g"
count = 16
[[device]]
name = "c"
gpu = "rtx-3090"
count = 16
[[device]]
name = "d"
gpu = "l4"
count = 16
[links]
default = "ethernet-25g"
"""


def random_problem(rng: np.random.Generator) -> Problem:
    """Two to six GPUs of random kinds and links, and a model that may need several of them."""
    n = int(rng.integers(2, 7))
    devices = tuple(Machine(f"GPU{i}", gpu(str(rng.choice(GPUS)))) for i in range(n))
    names = rng.choice(LINKS, (n, n))
    links = tuple(
        tuple(None if i == j else link(str(names[min(i, j)][max(i, j)])) for j in range(n))
        for i in range(n)
    )
    reserve = float(rng.choice([0, 4, 8, 12])) * 2**30
    return problem_of(
        model(str(rng.choice(MODELS))), Topology(devices, links), reserve_bytes=reserve
    )


def gaps(weights: Weights, cases: int = CASES) -> tuple[int, int, int, list[float]]:
    """Cases that fit; in which the paper finds no map, or one that does not fit; gaps in %."""
    rng = np.random.default_rng(0)
    feasible = nothing = overfull = 0
    found = []
    for _ in range(cases):
        problem = random_problem(rng)
        try:
            best = problem.cost(exact(problem, weights), weights)
        except SloBenchError:
            continue
        feasible += 1
        try:
            placed = paper(problem, weights)
        except SloBenchError:
            nothing += 1
            continue
        if not problem.fits(placed):
            overfull += 1
            continue
        found.append(100 * (problem.cost(placed, weights) / best - 1))
    return feasible, nothing, overfull, found


def main() -> None:
    """Print both."""
    for mode, weights in MODES.items():
        feasible, nothing, overfull, found = gaps(weights)
        print(
            f"{mode:9} {feasible} of {CASES} random cases fit; the paper's procedure finds nothing "
            f"in {nothing}, a map that does not fit in {overfull}, the optimum in "
            f"{sum(gap < 1e-6 for gap in found)}; gap mean {np.mean(found):.2f} %, "
            f"95th percentile {np.percentile(found, 95):.2f} %, largest {max(found):.2f} %"
        )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "four-kinds.toml"
        path.write_text(FOUR_KINDS, encoding="utf-8")
        topology = read_topology(path)
    for name, reserve_gib in (("llama-2-70b", 0), ("llama-2-70b", 12)):
        problem = problem_of(model(name), topology, reserve_bytes=reserve_gib * 2**30)
        for mode, weights in {**MODES, "latency alone": Weights(1.0, 0.0)}.items():
            began_s = time.process_time()
            placed = exact(problem, weights)
            took_s = time.process_time() - began_s
            print(
                f"64 devices of 4 kinds, {problem.layers} layers, {reserve_gib} GiB reserved, "
                f"{mode}: {len(placed)} devices, {took_s:.2f} CPU s"
            )


if __name__ == "__main__":
    main()
