"""vLLM's scheduler with the decisions of a policy that also decides on an embedder beside it.

The blocks of a pass are allocated in vLLM's own pool, so that vLLM cannot use them and the policy
sees one memory. Messages of the gateway are taken in a thread of the scheduler's process, between
its steps: the lock is not held while the model computes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

from ....core.collocated_policy import Collocated
from ...plugin.contract import EmbedderBeside
from ...plugin.embedding_scheduler import EmbeddingScheduler
from .scheduler import PolicyScheduler


class CollocatedScheduler(PolicyScheduler):
    """Scheduler class for `--scheduler-cls` where an embedding server stands beside vLLM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.lock = threading.RLock()
        self._pass_blocks: list[Any] = []
        super().__init__(*args, **kwargs)
        spec, policy = EmbedderBeside.asked_for(), self.slo_policy
        if spec is None or not isinstance(policy, Collocated):
            raise RuntimeError("no embedder, or a policy that decides on none")
        EmbeddingScheduler(self, policy, spec, self.hosted, clock=type(self).clock).listen()

    # ---------------------------------------------------------------- read by the scheduler

    @property
    def total_kv_blocks(self) -> int:
        """KV blocks of the server."""
        return self.view.total_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block over all layers."""
        groups = self.kv_cache_config.kv_cache_groups
        return sum(
            len(group.layer_names) * int(group.kv_cache_spec.page_size_bytes) for group in groups
        )

    def oldest_waiting_arrival_s(self) -> float:
        """Arrival of the first waiting request; infinite if none waits."""
        return min((r.arrival_s for r in self.view.waiting()), default=math.inf)

    def take_blocks(self, blocks: int) -> None:
        """Allocate blocks of the pool for a pass."""
        self._pass_blocks = self.kv_cache_manager.block_pool.get_new_blocks(blocks)

    def return_blocks(self) -> None:
        """Free the blocks of the pass."""
        self.kv_cache_manager.block_pool.free_blocks(self._pass_blocks)
        self._pass_blocks = []

    def embedder_changed(self, passes: Mapping[str, int]) -> None:
        """Ask the policy again in the next step, and write the counters."""
        self._changed = True
        self.recorder.passes = dict(passes)
        self.recorder.write_tally()

    # ---------------------------------------------------------------- one at a time

    def add_request(self, request: Any) -> None:
        with self.lock:
            super().add_request(request)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return super().finish_requests(*args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        with self.lock:
            return super().update_from_output(scheduler_output, model_runner_output)
