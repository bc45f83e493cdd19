"""Which model stands on which GPU: the least KV pressure on the GPU that has most of it.

Source: Prism (see docs/papers.md), Algorithm 1 and appendix A.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ....workloads.errors import SloBenchError

Gpus = tuple[int, ...]


@dataclass(frozen=True)
class Demand:
    """What a model asks of its GPUs. `gpus` are those it stands on, part by part; empty: none.

    `part_bytes` are the weights (and workspace) of one of its `tp` parts.
    """

    model: int
    rate_rps: float
    slo_s: float
    part_bytes: int
    tp: int = 1
    gpus: Gpus = ()

    def __post_init__(self) -> None:
        if not self.slo_s > 0 or self.rate_rps < 0 or self.part_bytes < 0 or self.tp < 1:
            raise SloBenchError(
                "a model needs a positive SLO, one part at least, and no negative rate or weight"
            )

    @property
    def part_weight(self) -> float:
        """What one part adds to the weighted request rate of its GPU: d = (r / tp) / s."""
        return self.rate_rps / self.tp / self.slo_s


@dataclass
class Loads:
    """W and S of every GPU: weighted request rate, and bytes that are left for KV."""

    weighted_rate: list[float]
    kv_bytes: list[int]

    @classmethod
    def empty(cls, gpus: int, capacity_bytes: int) -> Loads:
        """Loads of GPUs that hold no model."""
        return cls([0.0] * gpus, [capacity_bytes] * gpus)

    def copy(self) -> Loads:
        """Loads that change on their own."""
        return Loads(list(self.weighted_rate), list(self.kv_bytes))

    def pressure_with(self, gpu: int, demand: Demand) -> float | None:
        """(W + d) / (S - w) once a part stands there too; None where its weights do not fit.

        The printed ratio W / S is that before the model is added: on empty GPUs all of them are
        zero, and a model may go where its weights do not fit.
        """
        left = self.kv_bytes[gpu] - demand.part_bytes
        return (self.weighted_rate[gpu] + demand.part_weight) / left if left > 0 else None

    def add(self, gpu: int, demand: Demand) -> None:
        """A part stands there from now on."""
        self.weighted_rate[gpu] += demand.part_weight
        self.kv_bytes[gpu] -= demand.part_bytes

    def remove(self, gpu: int, demand: Demand) -> None:
        """Undo `add` of a model."""
        self.weighted_rate[gpu] -= demand.part_weight
        self.kv_bytes[gpu] += demand.part_bytes

    def pressure(self, gpu: int) -> float:
        """W / S of one GPU."""
        return self.weighted_rate[gpu] / self.kv_bytes[gpu]


@dataclass(frozen=True)
class Assignment:
    """Where every model goes, and what that makes of the GPUs. `unplaced`: for these no room."""

    gpus: Mapping[int, Gpus]
    loads: Loads
    unplaced: tuple[int, ...] = field(default=())


def best_gpus(demand: Demand, loads: Loads, node_gpus: int, *, tightest: bool = False) -> Gpus:
    """The GPUs with the least pressure for the parts of a model; empty if they fit nowhere.

    `tightest`: those with the least memory left. Parts go on different GPUs of one node
    (`node_gpus` each), because their all-reduces need its links; of all nodes the one whose worst
    part is under the least pressure.
    """
    best: tuple[float, Gpus] | None = None
    gpus = len(loads.kv_bytes)
    for begin in range(0, gpus, node_gpus):
        ratios = []
        for gpu in range(begin, min(begin + node_gpus, gpus)):
            ratio = loads.pressure_with(gpu, demand)
            if ratio is not None:
                ratios.append((loads.kv_bytes[gpu] if tightest else ratio, gpu))
        if len(ratios) >= demand.tp:
            chosen = sorted(ratios)[: demand.tp]
            if best is None or chosen[-1][0] < best[0]:
                best = chosen[-1][0], tuple(gpu for _, gpu in chosen)
    return best[1] if best is not None else ()


def place(
    demands: Sequence[Demand],
    loads: Loads,
    *,
    threshold: float = 0.0,
    node_gpus: int = 8,
) -> Assignment:
    """Algorithm 1: in order of falling r / s, each model goes where it leaves the least KV pressure
    ratio. A model stays on its GPUs unless the ratio on others is smaller by more than `threshold`,
    as a share of its present ratio: τ, which the paper leaves without a unit.
    """
    by_rate = sorted(demands, key=lambda d: -d.part_weight)
    return _in_order(by_rate, loads, threshold=threshold, node_gpus=node_gpus)


def place_by_memory(demands: Sequence[Demand], loads: Loads, *, node_gpus: int = 8) -> Assignment:
    """Algorithm 1, and where it leaves models out, the largest first: where they leave the least
    pressure, then where they leave the least memory; of the three what leaves the fewest out.

    Mends the paper's algorithm, which may leave a model out although all have room.
    """
    by_memory = sorted(demands, key=lambda d: (-d.part_bytes * d.tp, -d.part_weight))
    assignment = place(demands, loads.copy(), node_gpus=node_gpus)
    for tightest in (False, True):
        if not assignment.unplaced:
            break
        largest_first = _in_order(by_memory, loads.copy(), node_gpus=node_gpus, tightest=tightest)
        if len(largest_first.unplaced) < len(assignment.unplaced):
            assignment = largest_first
    return assignment


def _in_order(
    demands: Sequence[Demand],
    loads: Loads,
    *,
    threshold: float = 0.0,
    node_gpus: int,
    tightest: bool = False,
) -> Assignment:
    """Each model in turn where `best_gpus` says; `loads` is filled."""
    assigned: dict[int, Gpus] = {}
    unplaced = []
    for demand in demands:
        chosen = best_gpus(demand, loads, node_gpus, tightest=tightest)
        if demand.gpus and demand.gpus != chosen:
            here = _worst(demand, demand.gpus, loads)
            if here is not None and here - (_worst(demand, chosen, loads) or 0.0) <= (
                threshold * here
            ):
                chosen = demand.gpus
        if not chosen:
            unplaced.append(demand.model)
            continue
        for gpu in chosen:
            loads.add(gpu, demand)
        assigned[demand.model] = chosen
    return Assignment(assigned, loads, tuple(unplaced))


def swapped(
    assignment: Assignment, demands: Sequence[Demand], *, swaps: int, node_gpus: int = 8
) -> Assignment:
    """The assignment after at most `swaps` steps of local search, which the paper does not have.

    A step takes a model off the GPU under most pressure: it goes where Algorithm 1 would place it
    now, or changes places with a model of as many parts. The step that lowers the pressures most is
    made, comparing the highest pressure first, then the next; the search ends when no step lowers
    them. A model without room stays without.
    """
    demand_of = {demand.model: demand for demand in demands}
    gpus, loads = dict(assignment.gpus), assignment.loads
    for _ in range(swaps):
        best, better = _pressures(loads), None
        worst = max(range(len(loads.kv_bytes)), key=loads.pressure)
        for change in _changes(worst, gpus, demand_of, loads, node_gpus):
            _carry_out(change, gpus, demand_of, loads)
            after = _pressures(loads)
            if after < best:
                best, better = after, change
            _carry_out({model: gpus[model] for model in change}, change, demand_of, loads)
        if better is None:
            break
        _carry_out(better, gpus, demand_of, loads)
        gpus |= better
    return Assignment(gpus, loads, assignment.unplaced)


Change = Mapping[int, Gpus]


def _changes(
    worst: int,
    gpus: Mapping[int, Gpus],
    demand_of: Mapping[int, Demand],
    loads: Loads,
    node_gpus: int,
) -> Iterator[Change]:
    """Feasible changes that take load off this GPU by moving models to others."""
    for model in [m for m, model_gpus in gpus.items() if worst in model_gpus]:
        candidate = demand_of[model]
        for gpu in gpus[model]:
            loads.remove(gpu, candidate)
        model_gpus = best_gpus(candidate, loads, node_gpus)
        for gpu in gpus[model]:
            loads.add(gpu, candidate)
        if model_gpus and model_gpus != gpus[model]:
            yield {model: model_gpus}
        for other, theirs in gpus.items():
            apart = demand_of[other].tp == candidate.tp and not set(theirs) & set(gpus[model])
            more = candidate.part_bytes - demand_of[other].part_bytes
            if (
                apart
                and all(loads.kv_bytes[gpu] > more for gpu in theirs)
                and all(loads.kv_bytes[gpu] > -more for gpu in gpus[model])
            ):
                yield {model: theirs, other: gpus[model]}


def _carry_out(
    change: Change, gpus: Mapping[int, Gpus], demand_of: Mapping[int, Demand], loads: Loads
) -> None:
    """The models of `change` go to its GPUs from where `gpus` says."""
    for model, model_gpus in change.items():
        for gpu in gpus[model]:
            loads.remove(gpu, demand_of[model])
        for gpu in model_gpus:
            loads.add(gpu, demand_of[model])


def _pressures(loads: Loads) -> list[float]:
    """Of all GPUs, the highest first; sums in another order differ by less than is kept."""
    assignment = sorted(map(loads.pressure, range(len(loads.kv_bytes))), reverse=True)
    return [float(f"{pressure:.12g}") for pressure in assignment]


def _worst(demand: Demand, gpus: Gpus, loads: Loads) -> float | None:
    ratios = [loads.pressure_with(gpu, demand) for gpu in gpus]
    with_room = [ratio for ratio in ratios if ratio is not None]
    return max(with_room) if with_room and len(with_room) == len(ratios) else None
