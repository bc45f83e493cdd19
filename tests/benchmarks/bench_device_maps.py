"""How long the exact search for device maps takes on 64 devices.

python tests/benchmarks/bench_device_maps.py
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from slo_bench.predictors.specs import model
from slo_bench.tuner.placement.exact import exact
from slo_bench.tuner.placement.problem import MODES, Candidate, CostWeights, Problem, problem_of
from slo_bench.tuner.placement.topology import Topology, read_topology
from slo_bench.workloads.errors import SloBenchError

NODES = """
[[device]]
name = "n0"
gpu = "a100-40g"
count = 8
[[device]]
name = "n1"
gpu = "a100-40g"
count = 8
[[device]]
name = "n2"
gpu = "v100-32g"
count = 8
[[device]]
name = "n3"
gpu = "v100-32g"
count = 8
[[device]]
name = "n4"
gpu = "rtx-3090"
count = 8
[[device]]
name = "n5"
gpu = "rtx-3090"
count = 8
[[device]]
name = "n6"
gpu = "l4"
count = 8
[[device]]
name = "n7"
gpu = "l4"
count = 8
[links]
default = "ethernet-25g"
"""
for node in range(8):
    NODES += f'[[link]]\nbetween = ["n{node}", "n{node}"]\nlink = "node"\n'

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


def main() -> None:
    """Print the CPU seconds of each case."""
    for what, text in (("4 kinds", FOUR_KINDS), ("4 kinds in 8 nodes", NODES)):
        topology = _topology(text)
        for reserve_gib in (0, 12, 16):
            problem = problem_of(model("llama-2-70b"), topology, reserve_bytes=reserve_gib * 2**30)
            for mode, weights in {**MODES, "latency alone": CostWeights(1.0, 0.0)}.items():
                _timed(
                    f"64 devices of {what}, 80 layers, {reserve_gib} GiB reserved",
                    mode,
                    problem,
                    weights,
                )
    few = tuple(
        Candidate(f"{kind}-{i}", (1.0, 1.3, 1.7, 2.9)[kind], *[1 + kind % 2] * 5, head_s=0.5)
        for kind in range(4)
        for i in range(16)
    )
    rack = np.arange(64) // 16
    hop_s = np.where(rack[:, None] == rack[None, :], 0.1, 0.4 + 0.1 * abs(rack[:, None] - rack))
    hard = Problem(80, few, tuple(map(tuple, hop_s.tolist())))
    _timed(
        "64 devices of 4 kinds, 80 layers, one or two a device",
        "latency alone",
        hard,
        CostWeights(1.0, 0.0),
    )


def _topology(text: str) -> Topology:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "topology.toml"
        path.write_text(text, encoding="utf-8")
        return read_topology(path)


def _timed(what: str, mode: str, problem: Problem, weights: CostWeights) -> None:
    began_s = time.process_time()
    try:
        found = f"{len(exact(problem, weights))} devices"
    except SloBenchError as error:
        found = str(error)
    print(f"{what}, {mode}: {found}, {time.process_time() - began_s:.2f} CPU s")


if __name__ == "__main__":
    main()
