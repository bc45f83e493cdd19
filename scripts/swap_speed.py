#!/usr/bin/env python3
"""Speed of the swaps of a policy inside vLLM, beside that of the link to host memory.

Usage: scripts/swap_speed.py [--device cpu|cuda:N] [--layers N] [--block-kib K] [--at-least SHARE]

Needs torch alone: any Python that has it, also that of vLLM's environment, with slo_bench on
PYTHONPATH. Blocks of all layers go out and in as in a worker of vLLM (`swap_copies`); the link is
one copy of as many bytes between two pieces of memory, pinned on CUDA (on a CPU: a `memcpy`, and
all times are CPU times of one thread). The best of several counts: other work on the machine makes
the others longer. Exits with 1 if the swap of the most blocks is slower than SHARE of the link.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence

import torch

from slo_bench.harness.servers.vllm.plugin.swap_copies import (
    HostLane,
    SwapCopies,
    Ticket,
)

COUNTS = (1, 8, 64, 256)  # blocks of one swap
_TIMES = 15


def best_s(submit: Callable[[], Ticket]) -> float:
    """The shortest of several copies, in seconds."""
    return min(submit().finish() for _ in range(_TIMES))


def measure(copies: SwapCopies, blocks: int, block_ids: Sequence[int]) -> dict[str, float]:
    """Seconds of a swap of `blocks` blocks, out and in, and of their bytes over the link."""
    lane = copies.lane
    assert lane is not None
    host = copies.host[:blocks]
    device = torch.empty_like(host, device=copies.layers[0].device)
    ids, seconds = list(block_ids[:blocks]), dict[str, list[float]]()
    for _ in range(_TIMES):
        held = copies.out(ids)
        seconds.setdefault("out", []).append(held.ticket.finish())
        seconds.setdefault("in", []).append(copies.back(held, ids).finish())
    return {
        **{way: min(times) for way, times in seconds.items()},
        "link out": best_s(lambda: lane.submit(lambda: host.copy_(device, non_blocking=True))),
        "link in": best_s(lambda: lane.submit(lambda: device.copy_(host, non_blocking=True))),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--block-kib", type=int, default=64, help="of one block in one layer")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="SHARE")
    options = parser.parse_args(arguments)
    max_blocks = max(COUNTS)
    shape = (2, 2 * max_blocks, options.block_kib * 256)  # bfloat16: keys and values of a layer
    layers = [
        torch.zeros(shape, dtype=torch.bfloat16, device=options.device).unbind(0)
        for _ in range(options.layers)
    ]
    lane = None
    if options.device == "cpu":
        torch.set_num_threads(1)
        lane = HostLane(time.thread_time)
    copies = SwapCopies([part for layer in layers for part in layer], max_blocks, lane)
    block_ids = random.Random(0).sample(range(2 * max_blocks), max_blocks)
    print(f"{options.device}: {options.layers} layers, {copies.block_bytes / 2**20:g} MiB a block")
    share = 0.0
    for blocks in COUNTS:
        seconds = measure(copies, blocks, block_ids)
        shares = [seconds[f"link {way}"] / seconds[way] for way in ("out", "in")]
        share = min(shares)
        speeds = [blocks * copies.block_bytes / seconds[f"link {w}"] / 1e9 for w in ("out", "in")]
        print(
            f"{blocks:4} blocks: out {1e6 * seconds['out'] / blocks:.0f}, "
            f"in {1e6 * seconds['in'] / blocks:.0f} µs a block; "
            f"{shares[0]:.2f} and {shares[1]:.2f} of the link "
            f"({speeds[0]:.3g} and {speeds[1]:.3g} GB/s)"
        )
    copies.close()
    return int(share < options.at_least)


if __name__ == "__main__":
    sys.exit(main())
