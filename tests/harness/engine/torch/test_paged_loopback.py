"""Worker processes of this machine are nobody else's business."""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from slo_bench.harness.engine.torch.torch_workers import Workers  # noqa: E402

pytestmark = pytest.mark.torch
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def listening(pid):
    """Addresses, in hexadecimal, at which a process waits for connections."""
    ours = set()
    for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        try:
            ours.add(os.readlink(f"/proc/{pid}/fd/{number}"))  # noqa: PTH115
        except FileNotFoundError:
            continue
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in ours:
                addresses.append(words[1].partition(":")[0])
    return addresses


def test_worker_processes_listen_on_loopback_only(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    with Workers(1) as workers:
        addresses = [*listening(os.getpid()), *listening(workers.processes[0].pid)]
    assert len(addresses) >= 2
    assert set(addresses) <= LOOPBACK
