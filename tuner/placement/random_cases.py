"""How far the paper's procedure is from the optimum, over random devices, links and models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...predictors.specs import gpu, link, model
from ...workloads.errors import SloBenchError
from .exact import exact
from .paper import paper
from .problem import MODES, CostWeights, Problem, problem_of
from .topology import Machine, Topology

_GPUS = ("a100-80g", "a100-40g", "rtx-3090", "rtx-3090@150w", "v100-32g", "l4", "a10")
_LINKS = ("nvlink3", "pix", "node", "sys", "ethernet-25g")
_MODELS = ("chatglm2-6b", "llama-3.1-8b", "qwen2.5-14b", "opt-13b", "llama-2-70b")
_SAME = 1e-6  # percent


@dataclass(frozen=True)
class Gaps:
    """The paper's procedure against the exact solver in one mode.

    Args:
        mode: the weights of latency and devices.
        cases: random problems.
        feasible: problems for which a map exists.
        nothing: of these, those for which the procedure finds no map.
        overfull: of these, those for which its map does not fit.
        gaps_percent: how much more its map costs in the others.
    """

    mode: str
    cases: int
    feasible: int
    nothing: int
    overfull: int
    gaps_percent: tuple[float, ...]

    def row(self) -> dict[str, float | int | str | None]:
        """Figures of the gaps; None where the procedure never finds a map that fits."""
        gaps = np.array(self.gaps_percent)
        known = len(gaps) > 0
        return {
            "mode": self.mode,
            "cases": self.cases,
            "feasible": self.feasible,
            "no_map": self.nothing,
            "does_not_fit": self.overfull,
            "optimal": int((gaps < _SAME).sum()),
            "gap_mean_percent": round(float(gaps.mean()), 3) if known else None,
            "gap_p95_percent": round(float(np.percentile(gaps, 95)), 3) if known else None,
            "gap_max_percent": round(float(gaps.max()), 3) if known else None,
        }


def random_gaps(cases: int, seed: int) -> list[Gaps]:
    """`cases` random problems, solved by both in every mode."""
    return [_gaps(mode, weights, cases, seed) for mode, weights in MODES.items()]


def random_problem(rng: np.random.Generator) -> Problem:
    """Two to six GPUs of random kinds and links, and a model that may need several of them."""
    n = int(rng.integers(2, 7))
    devices = tuple(Machine(f"GPU{i}", gpu(str(rng.choice(_GPUS)))) for i in range(n))
    names = rng.choice(_LINKS, (n, n))
    links = tuple(
        tuple(None if i == j else link(str(names[min(i, j)][max(i, j)])) for j in range(n))
        for i in range(n)
    )
    reserve = float(rng.choice([0, 4, 8, 12])) * 2**30
    return problem_of(
        model(str(rng.choice(_MODELS))), Topology(devices, links), reserve_bytes=reserve
    )


def _gaps(mode: str, weights: CostWeights, cases: int, seed: int) -> Gaps:
    rng = np.random.default_rng(seed)
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
        if problem.fits(placed):
            found.append(100 * (problem.cost(placed, weights) / best - 1))
        else:
            overfull += 1
    return Gaps(mode, cases, feasible, nothing, overfull, tuple(found))
