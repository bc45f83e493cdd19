"""A server of another package: all that slo-bench has to know of it."""

import sys
from pathlib import Path

from slo_bench.harness.load_generator.server_metrics import MetricNames
from slo_bench.harness.policies.systems import System
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.harness.servers.launch.server_kind import Build, ServerKind, from_index

SERVER = Path(__file__).with_name("stand_in_server.py")
# What the unpatched server is in simulations.
SYSTEM = System("stand-in", Vllm())
STAND_IN = ServerKind(
    name="stand-in",
    title="Stand-in",
    builds={"cpu": Build("1.0", from_index("stand-in-cpu"), "print('1.0')", (3, 14))},
    distributions=("stand-in-cpu",),
    argv=lambda programs, device, launch: [
        *(sys.executable, str(SERVER), str(launch.port), launch.served_name or launch.model),
        *launch.server_args,
    ],
    limits={"max_num_seqs": ("max_num_seqs", "--slots")},
    metrics=MetricNames(prefix="stand_in_", names={"output_tokens": ("tokens_total",)}),
)
