"""Servers that stand on one machine do not share GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.servers.launch.gpus import gpus_each, shares
from slo_bench.harness.servers.launch.server_kind import Launch
from slo_bench.harness.servers.launch.server_process import _environ
from slo_bench.harness.servers.sglang.sglang_kind import SGLANG
from slo_bench.harness.servers.vllm.vllm_kind import VLLM
from slo_bench.workloads.errors import SloBenchError


@pytest.mark.parametrize(
    ("args", "gpus"),
    [
        ((), 1),
        (("--tensor-parallel-size", "4"), 4),
        (("--tensor-parallel-size=2", "--pipeline-parallel-size=3", "--max-num-seqs=8"), 6),
        (("-tp", "2", "--enforce-eager"), 2),
        (("--tp-size", "2", "--dp-size", "2"), 4),
    ],
)
def test_gpus_of_a_server_are_read_from_its_arguments(args, gpus):
    kind = SGLANG if "--tp-size" in args else VLLM
    assert gpus_each(kind, args) == gpus


def test_parallel_degree_that_is_no_number_is_refused():
    with pytest.raises(SloBenchError, match="--tp-size must be a whole number"):
        gpus_each(SGLANG, ("--tp-size", "many"))


@given(servers=st.integers(1, 8), each=st.integers(1, 8), visible=st.integers(0, 32))
def test_gpu_shares_are_disjoint_and_complete_or_refused(servers, each, visible):
    names = [f"GPU-{k}" for k in range(visible)]
    if servers * each > visible:
        with pytest.raises(SloBenchError, match=f"need {servers * each}; {visible} can"):
            shares(servers, each, names)
        return
    server_gpus = shares(servers, each, names)
    assert [len(gpus) for gpus in server_gpus] == [each] * servers
    assert [name for gpus in server_gpus for name in gpus] == names[: servers * each]


@pytest.mark.parametrize(("gpus", "visible"), [(("GPU-a", "GPU-b"), "GPU-a,GPU-b"), ((), "7")])
def test_server_sees_its_own_gpus_only(monkeypatch, gpus, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    where = SimpleNamespace(device="cuda", programs=Path("bin"))
    assert _environ(VLLM, where, Launch("m", 1, gpus=gpus))["CUDA_VISIBLE_DEVICES"] == visible
