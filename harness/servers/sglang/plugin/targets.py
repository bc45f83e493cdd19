"""Functions of SGLang that the plugin hooks into or calls, and the check of their signatures.

None of them is a stable interface. After an upgrade that changes one, the server must fail at
start-up with its name, and not run without the policy.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ...plugin.contract import moved_targets

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_MANAGERS = "sglang.srt.managers"

STARTED = f"{_SCHEDULER}.__init__"
ENQUEUE = f"{_SCHEDULER}._add_request_to_queue"
NEXT_BATCH = f"{_SCHEDULER}.get_next_batch_to_run"
PREFILL = f"{_SCHEDULER}.get_new_batch_prefill"
DECODE = f"{_SCHEDULER}.update_running_batch"
ALLOCATABLE = f"{_SCHEDULER}.get_num_allocatable_reqs"
RUN = f"{_SCHEDULER}.run_batch"
RESULT = f"{_SCHEDULER}.process_batch_result"
ORDER = f"{_MANAGERS}.schedule_policy.SchedulePolicy.calc_priority"
ADD = f"{_MANAGERS}.schedule_policy.PrefillAdder.add_one_req"
_BATCH = f"{_MANAGERS}.schedule_batch.ScheduleBatch"
MEMORY = f"{_BATCH}.check_decode_mem"
VICTIMS = f"{_BATCH}._get_decode_retraction_order"

# Name to the parameters that come first, in this order.
_HOOKED: dict[str, tuple[str, ...]] = {
    STARTED: ("self", "server_args"),
    ENQUEUE: ("self", "req", "is_retracted"),
    NEXT_BATCH: ("self", "running_batch", "last_batch"),
    PREFILL: ("self", "running_batch"),
    DECODE: ("self", "batch"),
    ALLOCATABLE: ("self", "running_bs"),
    RUN: ("self", "batch"),
    RESULT: ("self", "batch", "result"),
    ORDER: ("self", "waiting_queue", "running_batch"),
    ADD: ("self", "req", "has_chunked_req"),
    MEMORY: ("self", "selected_indices"),
    VICTIMS: ("reqs",),
}
_CALLED: dict[str, tuple[str, ...]] = {
    f"{_SCHEDULER}._release_aborted_request": ("self", "req"),
    f"{_MANAGERS}.scheduler._make_abort_req": ("req", "finished_reason"),
    f"{_MANAGERS}.schedule_batch.Req.finished": ("self",),
    f"{_MANAGERS}.schedule_policy.AddReqResult.NO_TOKEN": (),
    f"{_MANAGERS}.schedule_batch.NextBatchPlan": ("batch_to_run", "running_batch"),
    f"{_BATCH}.new_tokens_required_next_decode": ("self", "selected_indices"),
    f"{_MANAGERS}.utils.is_health_check_generate_req": ("recv_req",),
    "sglang.srt.mem_cache.common.match_kv_cache": ("req", "tree_cache"),
    "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
}
# From 0.5.23 on, and before: how the end of a request is told to its client.
SEND_ABORT = f"{_SCHEDULER}.send_abort_output"
_IPC = f"{_MANAGERS}.scheduler_components.ipc_channels"
_SENDS = {SEND_ABORT: ("self", "abort_req", "req")}
_SENT_BEFORE: dict[str, tuple[str, ...]] = {
    f"{_IPC}.SchedulerIpcChannels": (),
    f"{_IPC}.SenderWrapper.send_output": ("self", "output", "recv_obj"),
}
HOOKS = tuple(_HOOKED)
TARGETS = (*_HOOKED, *_CALLED, SEND_ABORT)


def server_version() -> str:
    """Version of the installed SGLang."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def moved() -> list[str]:
    """Targets that are missing or have other parameters, as texts; empty if all match."""
    ends = moved_targets(_SENDS)
    if ends and not moved_targets(_SENT_BEFORE):
        ends = []
    return [*moved_targets({**_HOOKED, **_CALLED}), *ends]
