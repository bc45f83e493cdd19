"""A KV connector that swaps single requests to host memory and back, when the policy decides so.

In the scheduler's process it records which requests are swapped, with how many tokens. In the
workers it copies blocks: out before the step that reuses them, in before the step that reads them.
It needs one tensor a layer with a dimension of blocks, and one KV cache group.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

NAME = "SloBenchSwapConnector"
Copy = tuple[str, int, float]  # direction ("to-host", "to-gpu"), bytes, seconds
_TRIAL_BLOCKS = 8


@dataclass
class SwapMetadata(KVConnectorMetadata):
    """Swaps that the workers execute before the next step."""

    out: list[tuple[str, list[int]]] = field(default_factory=list)
    into: list[tuple[str, list[int], int]] = field(default_factory=list)  # from block number
    forget: list[str] = field(default_factory=list)


@dataclass
class SwapStats(KVConnectorStats):
    """Swaps of a worker since its last report: requests out and in, blocks, seconds; `copies`: each
    request that was swapped by itself.
    """

    swaps_out: int = 0
    swaps_in: int = 0
    blocks: int = 0
    duration_s: float = 0.0
    copies: list[Copy] = field(default_factory=list)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Combine two workers: the swaps that both executed, and the longer durations. Each moves
        its own heads over its own link, so bytes are those of one worker.
        """
        assert isinstance(other, SwapStats)
        self.swaps_out = min(self.swaps_out, other.swaps_out)
        self.swaps_in = min(self.swaps_in, other.swaps_in)
        self.blocks = min(self.blocks, other.blocks)
        self.duration_s = max(self.duration_s, other.duration_s)
        self.copies = [
            (direction, moved_bytes, max(seconds, theirs[2]))
            for (direction, moved_bytes, seconds), theirs in zip(
                self.copies, other.copies, strict=False
            )
        ]
        return self

    def is_empty(self) -> bool:
        """Whether no block was moved."""
        return not self.blocks


class SloBenchSwapConnector(KVConnectorBase_V1):
    """Swap connector; vLLM makes one object in the scheduler's process and one in each worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        try:
            super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        except TypeError:  # releases before 0.12 take no cache configuration
            super().__init__(vllm_config=vllm_config, role=role)
        self._block_size = int(vllm_config.cache_config.block_size)
        self.swapped: dict[str, int] = {}  # request id to tokens in host memory
        self.swaps_out = self.swaps_in = 0
        self._pending = SwapMetadata()
        self._local: dict[str, int] = {}
        self._host: dict[str, list[torch.Tensor]] = {}
        self._layers: list[torch.Tensor] = []
        self._moved = SwapStats()
        self._n_blocks = int(getattr(kv_cache_config, "num_blocks", 0) or 0)

    # ---------------------------------------------------------------- in the scheduler's process

    def swap_out(self, request_id: str, block_ids: Sequence[int], tokens: int) -> None:
        """Copy the KV of a request to host memory before its blocks are reused."""
        self.swapped[request_id] = tokens
        self._pending.out.append((request_id, list(block_ids)))
        self.swaps_out += 1

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        tokens = min(self.swapped.get(request.request_id, 0), request.num_tokens - 1)
        self._local[request.request_id] = num_computed_tokens
        return max(0, tokens - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        request_id = request.request_id
        local = self._local.pop(request_id, 0)
        if request_id not in self.swapped:
            return
        tokens = self.swapped.pop(request_id)
        if num_external_tokens <= 0:  # the prefix cache has kept everything
            self._pending.forget.append(request_id)
            return
        last = -(-tokens // self._block_size)
        first = local // self._block_size  # blocks still in the prefix cache are not copied
        ids = list(blocks.get_block_ids()[0][first:last])
        self._pending.into.append((request_id, ids, first))
        self.swaps_in += 1

    def build_connector_meta(self, scheduler_output: Any) -> SwapMetadata:
        metadata, self._pending = self._pending, SwapMetadata()
        return metadata

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._local.pop(request.request_id, None)
        if self.swapped.pop(request.request_id, None) is not None:
            self._pending.forget.append(request.request_id)
        return False, None

    # ---------------------------------------------------------------- in the workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = list(kv_caches.values())
        for name, layer in kv_caches.items():
            blocks = layer.shape[self._dimension(layer)]
            if self._n_blocks and blocks != self._n_blocks:
                raise RuntimeError(
                    f"slo-bench cannot swap this KV cache: {name} has {blocks} blocks, the "
                    f"scheduler counts {self._n_blocks}"
                )
        if self._layers:
            self._try_out(self._layers[0].shape[self._dimension(self._layers[0])])

    def _try_out(self, n_blocks: int) -> None:
        """Swap a few blocks out and in, so that the cost of a swap is known before the first
        decision.
        """
        blocks = list(range(min(_TRIAL_BLOCKS, n_blocks)))
        for _ in range(2):  # the first run includes one-time set-up
            self._moved = SwapStats()
            begin_s = time.perf_counter()
            self._back(self._copied(blocks), blocks, 0)
            self._took(2 * len(blocks), begin_s)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Copy swapped blocks out before the step, whose requests may overwrite them."""
        for request_id, block_ids in kv_connector_metadata.out:
            begin_s = time.perf_counter()
            self._host[request_id] = self._copied(block_ids)
            self._moved.swaps_out += 1
            self._took(len(block_ids), begin_s, "to-host")
        for request_id in kv_connector_metadata.forget:
            self._host.pop(request_id, None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, block_ids, first in self._get_connector_metadata().into:
            begin_s = time.perf_counter()
            self._back(self._host.pop(request_id), block_ids, first)
            self._moved.swaps_in += 1
            self._took(len(block_ids), begin_s, "to-gpu")

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Swaps since the last report, sent with the step's output to the scheduler."""
        if self._moved.is_empty():
            return None
        moved, self._moved = self._moved, SwapStats()
        return moved

    def _copied(self, block_ids: Sequence[int]) -> list[torch.Tensor]:
        return [
            layer.index_select(self._dimension(layer), _index(block_ids, layer)).cpu()
            for layer in self._layers
        ]

    def _back(self, copies: Sequence[torch.Tensor], block_ids: Sequence[int], first: int) -> None:
        for layer, host in zip(self._layers, copies, strict=True):
            dimension = self._dimension(layer)
            blocks = host.narrow(dimension, first, len(block_ids)).to(layer.device)
            layer.index_copy_(dimension, _index(block_ids, layer), blocks)
        if self._layers[0].is_cuda:
            torch.cuda.synchronize(self._layers[0].device)

    def _took(self, blocks: int, begin_s: float, direction: str = "") -> None:
        """Add a copy that ends now; one with a direction is a request's and is reported by itself,
        the trial at the start is not.
        """
        seconds = time.perf_counter() - begin_s
        self._moved.blocks += blocks
        self._moved.duration_s += seconds
        if direction:
            self._moved.copies.append((direction, blocks * self._block_bytes, seconds))

    @property
    def _block_bytes(self) -> int:
        """Bytes of one block in all layers of this worker."""
        return sum(layer.nbytes // layer.shape[self._dimension(layer)] for layer in self._layers)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete when `start_load_kv` returns."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        """No save is in progress."""

    def _dimension(self, layer: torch.Tensor) -> int:
        """Dimension that counts blocks: the first, or the second after keys and values."""
        return 1 if layer.shape[0] == 2 != self._n_blocks else 0


def _index(block_ids: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(block_ids), dtype=torch.long, device=like.device)
