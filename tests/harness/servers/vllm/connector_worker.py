"""Run by vLLM's own Python: swaps of the connector's worker, from metadata to bytes and reports.

connector_worker.py, with slo_bench on PYTHONPATH; prints a line of JSON
"""

import json
import os
from types import SimpleNamespace

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="1")
os.environ["SLO_BENCH_NUM_CPU_BLOCKS"] = "12"

import cpu_platform  # noqa: F401  # before the rest of vLLM
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from slo_bench.harness.servers.vllm.plugin.connector import SloBenchSwapConnector, SwapMetadata

BLOCKS, LAYERS = 30, 3
draw = torch.Generator().manual_seed(1)
caches = {f"l{n}": torch.randn(2, BLOCKS, 2, 4, 8, generator=draw) for n in range(LAYERS - 1)}
caches["first"] = torch.randn(BLOCKS, 16, generator=draw)  # blocks in the first dimension


def rows(blocks):
    return [c[:, blocks].clone() if c.shape[0] == 2 else c[blocks].clone() for c in caches.values()]


def but_the_first(before):
    return [part[:, 1:] if part.shape[0] == 2 else part[1:] for part in before]


def same(blocks, before):
    return all(torch.equal(a, b) for a, b in zip(rows(blocks), before, strict=True))


def step(out=(), into=(), forget=()):
    """What vLLM calls in a step; the swaps that are reported."""
    metadata = SwapMetadata(list(out), list(into), list(forget))
    connector.bind_connector_metadata(metadata)
    connector.handle_preemptions(metadata)
    for cache in caches.values():
        cache[(slice(None), slice(0, 10)) if cache.shape[0] == 2 else slice(0, 10)] += 1
    connector.start_load_kv(None)
    stats = connector.get_kv_connector_stats()
    connector.clear_connector_metadata()
    return stats


config = SimpleNamespace(
    cache_config=SimpleNamespace(block_size=4),
    kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
)
blocks = SimpleNamespace(num_blocks=BLOCKS)
connector = SloBenchSwapConnector(config, KVConnectorRole.WORKER, blocks)
untouched = rows(list(range(BLOCKS)))
connector.register_kv_caches(caches)
checks = {"the trial changes nothing": same(list(range(BLOCKS)), untouched)}
trial = connector.get_kv_connector_stats()
checks["the trial is reported without a request"] = trial.blocks == 16 and not trial.copies
checks["nothing more is reported"] = connector.get_kv_connector_stats() is None

a, b = rows([0, 1, 2]), rows([3, 4])
stats = step(out=[("a", [0, 1, 2]), ("b", [3, 4])])
checks["both out"] = (stats.swaps_out, stats.swaps_in, stats.blocks) == (2, 0, 5)
block_bytes = sum(cache.nbytes for cache in caches.values()) // BLOCKS
checks["bytes"] = [moved for _, moved, _ in stats.copies] == [3 * block_bytes, 2 * block_bytes]
stats = step(into=[("b", [20, 21], 0)])
checks["b is back before a"] = same([20, 21], b) and stats.swaps_in == 1
stats = step(into=[("a", [11, 12], 1)])
checks["a is back but for its cached block"] = same([11, 12], but_the_first(a))
ten = rows(list(range(10, 20)))
step(out=[("c", list(range(10, 20)))])
checks["a forgotten request makes room in the same step"] = (
    step(out=[("d", list(range(10, 20)))], forget=["c"]).swaps_out == 1
)
stats = step(out=[("e", [0])], into=[("e", [25], 0)], forget=[])
checks["out and in within a step"] = (stats.swaps_out, stats.swaps_in) == (1, 1)
step(out=[("f", [1])], forget=["f"])
checks["out and forgotten within a step"] = "f" not in connector._held
stats = step(into=[("d", list(range(20, 30)), 0)])
checks["d is back"] = same(list(range(20, 30)), ten)
connector.shutdown()
connector.shutdown()
print(json.dumps(checks))
