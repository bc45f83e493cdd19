"""What tuning and placement read: their settings, machines, and what a tuning run left."""

from __future__ import annotations

from pathlib import Path

from slo_bench.tuner.placement.topology import parse_gpus, parse_topo, read_topology
from slo_bench.tuner.search.outcome import FILE, read_tuning
from slo_bench.tuner.search.settings import load

from .target import Target, from_file

TUNE = b"""systems = ["vllm"]
rates = [4]
requests = 10
seeds = 1
[tune]
objectives = ["attainment"]
trials = 5
rate_rps = 4.0
[tune.search]
"vllm.max_num_seqs" = "8..256:log"
"""
TOPOLOGY = b"""[[device]]
name = "GPU0"
gpu = "rtx-3090@350w"
layer_extra_ms = 0.5
[[device]]
name = "A"
gpu = {like = "a100-80g", memory_gib = 40}
count = 2
[links]
default = "ethernet-100g"
[[link]]
between = ["A", "A"]
link = "nvlink3"
"""
MATRIX = b"      GPU0  GPU1  CPU Affinity\nGPU0   X    NV12  0-15\nGPU1  NV12   X    0-15\n"
GPUS = 2 * b"0, NVIDIA A100-SXM4-80GB, 81920, 300.00, 400.00\n"
LEFT = b'{"trials": [], "system": "vllm", "objectives": ["attainment"]}'


def targets(folder: Path) -> list[Target]:
    """Files, and what `nvidia-smi` prints."""
    return [
        Target("tuning TOML", [TUNE], from_file(folder, "tune.toml", load)),
        Target("topology", [TOPOLOGY], from_file(folder, "topology.toml", read_topology)),
        Target("nvidia-smi topo", [MATRIX], lambda data: parse_topo(_text(data), "it")),
        Target("nvidia-smi list", [GPUS], lambda data: parse_gpus(_text(data))),
        Target(
            "tune.json", [LEFT], from_file(folder, f"tuned/{FILE}", lambda p: read_tuning(p.parent))
        ),
    ]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
