"""The exact search against brute force, and what it must be quick at."""

from functools import lru_cache
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest

from slo_bench.tuner.placement import exact as exact_module
from slo_bench.tuner.placement.compare_placements import search, unused_reasons
from slo_bench.tuner.placement.exact import exact, optimum
from slo_bench.tuner.placement.paper import paper
from slo_bench.tuner.placement.problem import (
    INF,
    MODES,
    Candidate,
    CostWeights,
    LayerRange,
    Problem,
    weights_of,
)
from slo_bench.workloads.errors import SloBenchError, UnknownNameError


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch):
    """Results do not depend on how busy the machine is."""
    monkeypatch.setattr(exact_module, "LIMIT_S", 600.0)


@lru_cache
def compositions(layers, parts):
    """All ways to give `layers` layers to `parts` devices, at least one each."""
    cuts = [(0, *cut, layers) for cut in combinations(range(1, layers), parts - 1)]
    return np.diff(np.array(cuts).reshape(-1, parts + 1), axis=1)


def brute_force(problem, weights):
    """The least cost over every order of every subset and every split of the layers."""
    best = INF
    n = len(problem.devices)
    for size in range(1, min(n, problem.layers) + 1):
        layers = compositions(problem.layers, size)
        for order in permutations(range(n), size):
            devices = [problem.devices[i] for i in order]
            rooms = [d.holds(first=k == 0, last=k == size - 1) for k, d in enumerate(devices)]
            fits = (layers <= rooms).all(axis=1)
            if not fits.any():
                continue
            own_s = layers[fits] @ [d.layer_s for d in devices]
            hops_s = sum(problem.hop_s[a][b] for a, b in pairwise(order))
            latency_s = own_s.min() + hops_s + devices[-1].head_s
            best = min(best, problem.cost_of(latency_s, size, weights))
    return best


def random_problem(rng, devices, layers, kinds=3):
    """Devices of a few kinds; hops by groups, so that some are alike and others are not."""
    figures = []
    for _ in range(kinds):
        room = int(rng.integers(0, layers + 1))
        lost = int(rng.integers(0, 3))
        figures.append((float(rng.choice([1.0, 1.5, rng.uniform(0.5, 4)])), room, lost))
    candidates = []
    for i in range(devices):
        layer_s, room, lost = figures[rng.integers(kinds)]
        candidates.append(
            Candidate(
                f"d{i}",
                layer_s,
                room,
                max(0, room - lost),
                max(0, room - lost),
                max(0, room - 2 * lost),
                room_spread=max(0, room - (2 * lost * room) // layers),
                head_s=0.3 * layer_s,
            )
        )
    nodes = rng.integers(0, 3, devices)
    near, far = rng.uniform(0, 1), rng.uniform(0, 4)
    hop_s = np.where(nodes[:, None] == nodes[None, :], near, far)
    if rng.random() < 0.4:  # nothing alike
        hop_s = rng.uniform(0, 3, (devices, devices))
    np.fill_diagonal(hop_s, 0.0)
    return Problem(layers, tuple(candidates), tuple(map(tuple, hop_s.tolist())))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_exact_equals_brute_force_in_500_random_cases(part):
    rng = np.random.default_rng(part)
    feasible = 0
    for case in range(50):
        devices = 6 if case % 10 == 0 else int(rng.integers(1, 6))
        problem = random_problem(rng, devices, int(rng.integers(1, 13)))
        weights = [*MODES.values(), CostWeights(1.0, 0.0), CostWeights(1.0, 0.1)][case % 5]
        least = brute_force(problem, weights)
        if least == INF:
            with pytest.raises(SloBenchError, match="do not fit"):
                exact(problem, weights)
            continue
        feasible += 1
        placed = exact(problem, weights)
        assert problem.fits(placed)
        assert problem.cost(placed, weights) == pytest.approx(least, rel=1e-9)
    assert feasible > 20  # not all cases are hopeless


def four_kinds(rooms):
    """64 devices of four kinds in four racks, and 80 layers."""
    devices, speeds = [], (1.0, 1.3, 1.7, 2.9)
    for kind, room in enumerate(rooms):
        for i in range(16):
            devices.append(
                Candidate(f"{kind}-{i}", speeds[kind], room, room, room, room, room, 0.5)
            )
    rack = np.arange(64) // 16
    hop_s = np.where(rack[:, None] == rack[None, :], 0.1, 0.4 + 0.1 * abs(rack[:, None] - rack))
    np.fill_diagonal(hop_s, 0.0)
    return Problem(80, tuple(devices), tuple(map(tuple, hop_s.tolist())))


def test_exact_maps_64_devices_of_4_kinds_nearly_all_needed():
    problem = four_kinds((1, 2, 1, 2))
    placed = exact(problem, CostWeights(1.0, 0.0))
    assert problem.fits(placed)
    # The 48 fastest hold 64 layers; the other 16 go, two each, to eight of the slowest. The racks
    # are passed one after the other, either way.
    assert len(placed) == 56
    own_s = 16 * 1.0 + 32 * 1.3 + 16 * 1.7 + 16 * 2.9
    hops_s = 52 * 0.1 + 3 * 0.5
    assert problem.latency_s(placed) == pytest.approx(own_s + hops_s + 0.5)


def test_exact_maps_64_devices_few_needed():
    problem = four_kinds((10, 20, 5, 40))
    fewest = exact(problem, weights_of("he"))
    assert [held.layers for held in fewest] == [40, 40]
    fastest = exact(problem, CostWeights(1.0, 0.0))
    assert problem.latency_s(fastest) < problem.latency_s(fewest)
    assert {problem.devices[held.device].layer_s for held in fastest} == {1.0}


def test_exact_breaks_ties_by_latency():
    devices = tuple(Candidate(f"d{i}", s, 4, 4, 4, 4, 4) for i, s in enumerate((3.0, 1.0, 2.0)))
    hop_s = ((0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0))
    assert exact(Problem(4, devices, hop_s), weights_of("he")) == (LayerRange(1, 4),)


def test_exact_of_64_different_devices_has_a_map_and_a_bound():
    rng = np.random.default_rng(0)
    devices = tuple(
        Candidate(f"d{i}", float(s), 3, 2, 2, 1, 2) for i, s in enumerate(rng.uniform(1, 2, 64))
    )
    hop_s = tuple(map(tuple, rng.uniform(0.05, 0.3, (64, 64)).tolist()))
    problem = Problem(128, devices, hop_s)
    solution = optimum(problem, weights_of("balanced"), enough=0.01)
    assert problem.fits(solution.placed)
    assert 0 <= solution.gap <= 0.01


def test_exact_maps_16_equal_hosts_of_4():
    host = np.arange(64) // 4
    hop_s = np.where(host[:, None] == host, 0.1, 0.5)
    np.fill_diagonal(hop_s, 0.0)
    devices = tuple(Candidate(f"d{i}", 1.0, 7, 6, 6, 5, 6) for i in range(64))
    problem = Problem(80, devices, tuple(map(tuple, hop_s.tolist())))
    solution = optimum(problem, weights_of("balanced"))
    assert solution.gap == 0
    assert len(solution.placed) == 12  # 12 × 7 − 2 layers
    latency_s = 80 + 9 * 0.1 + 2 * 0.5  # three hosts
    assert problem.latency_s(solution.placed) == pytest.approx(latency_s)


def test_exact_bound_of_a_cut_search_is_below_the_optimum():
    rng = np.random.default_rng(5)
    checked = 0
    for _ in range(20):
        problem, weights = random_problem(rng, 5, 10), CostWeights(1.0, 0.1)
        least = brute_force(problem, weights)
        if least == INF:
            continue
        solution = optimum(problem, weights, limit_s=1e-9)
        cost = problem.cost(solution.placed, weights)
        assert cost / (1 + solution.gap) <= least * (1 + 1e-6)
        checked += 1
    assert checked > 5


def test_exact_gives_a_reason_for_unused_devices():
    devices = (
        Candidate("full", 1.0, 4, 4, 4, 4, 4),
        Candidate("slow", 2.0, 4, 4, 4, 4, 4),
        Candidate("small", 1.0, 0, 0, 0, 0, 0),
    )
    hop_s = ((0.0, 0.5, 0.5), (0.5, 0.0, 0.5), (0.5, 0.5, 0.0))
    problem, weights = Problem(4, devices, hop_s), CostWeights(1.0, 0.0)
    reasons = unused_reasons(problem, weights, exact(problem, weights))
    # One layer of four takes 2 s instead of 1 s, and a hop takes 0.5 s: 5.5 s instead of 4 s.
    assert reasons == {
        "with one more, a pass takes +1.5e+03 ms and the cost is +38 %": [1],
        "no layer fits there": [2],
    }


def test_paper_procedure_is_optimal_for_equal_layers():
    rng = np.random.default_rng(1)
    for _ in range(40):
        problem = random_problem(rng, 4, 8)
        alike = tuple(
            Candidate(d.name, d.layer_s, d.room, d.room, d.room, d.room, d.room)
            for d in problem.devices
        )
        problem = Problem(8, alike, problem.hop_s)
        weights = CostWeights(1.0, 0.2)
        least = brute_force(problem, weights)
        if least == INF:
            with pytest.raises(SloBenchError, match="do not fit"):
                paper(problem, weights)
        else:
            assert problem.cost(paper(problem, weights), weights) == pytest.approx(least)


def test_paper_procedure_may_overfill_the_ends():
    # 12 layers would fit on one device if the embeddings were spread over all layers.
    wide = Candidate("wide", 1.0, 13, 11, 11, 10, room_spread=12)
    spare = Candidate("spare", 2.0, 13, 11, 11, 10, room_spread=12)
    problem = Problem(12, (wide, spare), ((0.0, 0.1), (0.1, 0.0)))
    weights = weights_of("balanced")
    assert paper(problem, weights) == (LayerRange(0, 12),)
    assert not problem.fits(paper(problem, weights))
    assert problem.fits(exact(problem, weights))


def test_paper_procedure_refuses_many_devices():
    with pytest.raises(SloBenchError, match="at most 10"):
        paper(four_kinds((5, 5, 5, 5)), weights_of("lr"))


@pytest.mark.slow
def test_optuna_finds_no_better_map_than_exact():
    rng = np.random.default_rng(3)
    costs = []
    while len(costs) < 4:
        problem = random_problem(rng, 3, 8)
        weights = weights_of("balanced")
        try:
            least = problem.cost(exact(problem, weights), weights)
        except SloBenchError:
            continue
        placed = search(problem, weights, trials=100)
        assert problem.fits(placed)
        costs.append(problem.cost(placed, weights) / least)
        started = search(problem, weights, trials=3, start=optimum(problem, weights))
        assert problem.cost(started, weights) == pytest.approx(least)
    assert min(costs) >= 1 - 1e-12
    assert np.median(costs) == pytest.approx(1.0, abs=0.02)


def test_unknown_weights_mode_is_refused():
    with pytest.raises(UnknownNameError, match="balanced"):
        weights_of("balance")
    with pytest.raises(SloBenchError, match="both 0"):
        CostWeights(0.0, 0.0)
