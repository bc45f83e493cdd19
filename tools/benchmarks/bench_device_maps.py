"""Time and gap of the exact search for device maps, on topologies of 64 devices.

python tools/benchmarks/bench_device_maps.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from slo_bench.predictors.specs import gpu, link, model
from slo_bench.tuner.placement.exact import optimum
from slo_bench.tuner.placement.problem import MODES, Candidate, CostWeights, Problem, problem_of
from slo_bench.tuner.placement.topology import Machine, Topology

GPUS = ("a100-40g", "v100-32g", "rtx-3090", "l4")
WEIGHTS = {**MODES, "latency alone": CostWeights(1.0, 0.0)}


def main() -> None:
    """Print devices used, gap and CPU seconds of each case, and the largest of them."""
    gaps, times_s = [], []
    for label, problem in cases():
        for mode, weights in WEIGHTS.items():
            began_s = time.process_time()
            solution = optimum(problem, weights)
            took_s = time.process_time() - began_s
            print(
                f"{label}, {mode}: {len(solution.placed)} devices, "
                f"gap {100 * solution.gap:.3f} %, {took_s:.2f} CPU s"
            )
            gaps.append(solution.gap)
            times_s.append(took_s)
    exact = sum(gap == 0 for gap in gaps)
    print(f"{len(gaps)} cases: {exact} exact, largest gap {100 * max(gaps):.3f} %, "
          f"longest {max(times_s):.2f} CPU s")  # fmt: skip


def cases() -> Iterator[tuple[str, Problem]]:
    """Hosts of equal GPUs with little and much memory reserved, and random problems."""
    for hosts, each, racks in ((8, 8, 1), (16, 4, 1), (16, 4, 4), (32, 2, 4)):
        for name, kinds in (("1 kind", 1), ("4 kinds", 4)):
            for needed_gib in (8, 11):
                topology = hosted(hosts, each, racks, GPUS[-kinds:])
                problem = problem_of(
                    model("llama-2-70b"), topology, reserve_bytes=needed_gib * 2**30
                )
                yield (
                    f"{hosts} hosts of {each} in {racks} racks, {name}, {needed_gib} GiB reserved",
                    problem,
                )
    for layers, rooms in ((80, (2, 4)), (128, (2, 4)), (128, (4, 12))):
        for seed in range(2):
            yield (
                f"hosts of 4, random, {layers} layers, seed {seed}",
                random(layers, rooms, seed, 4),
            )
            yield (
                f"all differ, random, {layers} layers, seed {seed}",
                random(layers, rooms, seed, 1),
            )


def hosted(hosts: int, each: int, racks: int, gpus: tuple[str, ...]) -> Topology:
    """Hosts with one kind of GPU each: PCIe within, 100 Gbit/s in a rack, 25 Gbit/s between."""
    machines = tuple(
        Machine(f"h{host}-{n}", gpu(gpus[host % len(gpus)]))
        for host in range(hosts)
        for n in range(each)
    )
    count = len(machines)
    links = tuple(
        tuple(
            None if i == j else link(_between(i // each, j // each, hosts // racks))
            for j in range(count)
        )
        for i in range(count)
    )
    return Topology(machines, links)


def _between(a: int, b: int, of_rack: int) -> str:
    if a == b:
        return "node"
    return "ethernet-100g" if a // of_rack == b // of_rack else "ethernet-25g"


def random(layers: int, rooms: tuple[int, int], seed: int, each: int) -> Problem:
    """64 devices in hosts of `each`; times, rooms and hops are random, also in one host if 1."""
    rng = np.random.default_rng(seed)
    hosts = 64 // each
    speeds, room = rng.uniform(1, 3, hosts), rng.integers(rooms[0], rooms[1] + 1, hosts)
    devices = tuple(
        Candidate(f"d{i}", speeds[i // each], r, r - 1, r - 1, max(0, r - 2), r, 0.5)
        for i in range(64)
        for r in [int(room[i // each])]
    )
    host = np.arange(64) // each
    between = rng.uniform(0.2, 1.0, (hosts, hosts))
    hop_s = np.where(host[:, None] == host, 0.05, ((between + between.T) / 2)[host[:, None], host])
    np.fill_diagonal(hop_s, 0.0)
    return Problem(layers, devices, tuple(map(tuple, hop_s.tolist())))


if __name__ == "__main__":
    main()
