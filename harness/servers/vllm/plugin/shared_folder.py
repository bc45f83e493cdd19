"""KV that goes from one vLLM server to another through a shared folder.

vLLM's `ExampleConnector` writes and reads the files; here is decided which. It knows prompts by
their tokens alone, and would load whatever looks like one of them: a prompt that another one
begins with, an answer that was preempted, a file that is just being written. Each of these ends the
server. So the request says itself: `kv_transfer_params` names the transfer and its direction.
"""

from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
    align_to_block_size,
)

from ....core.wire import LOAD_KV, STORE_KV

_STEPS_AHEAD = 3  # steps scheduled before the first of them has certainly run


class SharedFolderConnector(ExampleConnector):
    """Stores and loads the KV that requests name; files are removed when no request can load them.

    Prompts must be computed in one step (no chunked prefill), on one device an instance.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        devices = vllm_config.parallel_config.world_size
        if devices > 1:
            raise ValueError(f"KV files are for one device an instance, but this one has {devices}")
        super().__init__(vllm_config, *args, **kwargs)
        self._stores: dict[str, str] = {}  # request to transfer, of those that enter now
        self._loads: dict[str, str] = {}
        self._given: dict[str, Path] = {}  # folder that a running request may load
        self._ended: deque[tuple[int, Path]] = deque()
        self._steps = 0

    def _folder(self, request: Any, key: str) -> Path:
        tokens = _tensor(request.prompt_token_ids or [])
        whole = align_to_block_size(len(tokens), self._block_size)
        return Path(self._generate_foldername_debug(tokens[:whole], [key]))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        key = (request.kv_transfer_params or {}).get(LOAD_KV)
        if key is None or request.num_preemptions or not self._folder(request, key).is_dir():
            return 0, False
        whole = align_to_block_size(len(request.prompt_token_ids or []), self._block_size)
        return max(0, whole - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if (key := params.get(LOAD_KV)) is not None:
            self._given[request.request_id] = self._folder(request, key)
            if num_external_tokens > 0:
                self._loads[request.request_id] = key
        elif params.get(STORE_KV) is not None and not request.num_preemptions:
            self._stores[request.request_id] = params[STORE_KV]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = ExampleConnectorMetadata()
        for new in scheduler_output.scheduled_new_reqs:
            key = self._stores.get(new.req_id) or self._loads.get(new.req_id)
            if key is not None and self._is_whole(new, scheduler_output):
                meta.add_request(
                    token_ids=new.prompt_token_ids or [],
                    block_ids=new.block_ids[0],
                    block_size=self._block_size,
                    is_store=new.req_id in self._stores,
                    mm_hashes=[key],
                )
        self._stores.clear()
        self._loads.clear()
        self._steps += 1
        while self._ended and self._ended[0][0] <= self._steps - _STEPS_AHEAD:
            folder = self._ended.popleft()[1]
            if folder not in self._given.values():
                shutil.rmtree(folder, ignore_errors=True)
        return meta

    @staticmethod
    def _is_whole(new: Any, scheduler_output: Any) -> bool:
        """Whether this step completes the prompt; the KV of a part cannot be stored."""
        computed_tokens = (
            new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
        )
        return bool(computed_tokens >= len(new.prompt_token_ids or []))

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        folder = self._given.pop(request.request_id, None)
        if folder is not None:
            self._ended.append((self._steps, folder))
        return False, None


def _tensor(token_ids: list[int]) -> Any:
    import torch

    return torch.tensor(token_ids)
