"""A KV connector that swaps single requests to host memory and back, when the policy decides so.

In the scheduler's process it records which requests are swapped, with how many tokens. In the
workers it copies blocks (`swap_copies`): out before the step that reuses them, in before the step
that reads them. It needs one tensor a layer with a dimension of blocks, and one KV cache group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from ...plugin.contract import num_cpu_blocks
from .swap_copies import Held, SwapCopies, Ticket

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
        self._copies: SwapCopies | None = None  # until the worker's KV caches are there
        self._held: dict[str, Held] = {}  # by request id, in host memory
        self._submitted: list[tuple[str, int, Ticket]] = []  # direction, blocks; to be reported
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
        layers: list[torch.Tensor] = []
        for name, layer in kv_caches.items():
            # Blocks are counted by the first dimension, or the second after keys and values.
            parts = layer.unbind(0) if layer.shape[0] == 2 != self._n_blocks else [layer]
            if self._n_blocks and len(parts[0]) != self._n_blocks:
                raise RuntimeError(
                    f"slo-bench cannot swap this KV cache: {name} has {len(parts[0])} blocks, the "
                    f"scheduler counts {self._n_blocks}"
                )
            layers += parts
        if layers:
            self._copies = SwapCopies(layers, max(num_cpu_blocks(), _TRIAL_BLOCKS))
            self._try_out(self._copies, len(layers[0]))

    def _try_out(self, copies: SwapCopies, n_blocks: int) -> None:
        """Swap a few blocks out and in, so that the cost of a swap is known before the first
        decision.
        """
        blocks = list(range(min(_TRIAL_BLOCKS, n_blocks)))
        for _ in range(2):  # the first run includes one-time set-up
            held = copies.out(blocks)
            back = copies.back(held, blocks)
            tickets = (held.ticket, back)
            self._submitted = [("", len(blocks), ticket) for ticket in tickets]
            for ticket in tickets:
                ticket.finish()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Copy swapped blocks out before the step, whose requests may overwrite them."""
        forgotten = set(kv_connector_metadata.forget)
        for request_id in forgotten & set(self._held):  # the scheduler counts their room as free
            self._worker.drop(self._held.pop(request_id))
        for request_id, block_ids in kv_connector_metadata.out:
            held = self._worker.out(block_ids)
            self._submitted.append(("to-host", len(block_ids), held.ticket))
            if request_id in forgotten:
                self._worker.drop(held)
            else:
                self._held[request_id] = held

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, block_ids, first in self._get_connector_metadata().into:
            ticket = self._worker.back(self._held.pop(request_id), block_ids, first)
            self._submitted.append(("to-gpu", len(block_ids), ticket))

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Swaps since the last report, sent with the step's output to the scheduler.

        It waits for the copies, which end before the step that is under way begins.
        """
        if not self._submitted:
            return None
        submitted, self._submitted = self._submitted, []
        moved = SwapStats()
        for direction, blocks, ticket in submitted:
            seconds = ticket.finish()
            moved.blocks += blocks
            moved.duration_s += seconds
            moved.swaps_out += direction == "to-host"
            moved.swaps_in += direction == "to-gpu"
            if direction:  # the trial at the start is no request's
                moved.copies.append((direction, blocks * self._worker.block_bytes, seconds))
        return moved

    def shutdown(self) -> None:
        """End all copies and give the host memory back."""
        if self._copies is not None:
            self._copies.close()

    @property
    def _worker(self) -> SwapCopies:
        assert self._copies is not None, "swaps before the KV caches are there"
        return self._copies

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete when `start_load_kv` returns."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        """No save is in progress."""
