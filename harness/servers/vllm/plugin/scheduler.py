"""vLLM's scheduler with the decisions of a policy.

vLLM executes: it manages blocks, batches and outputs. The policy's decisions are put where vLLM
reads them before each step: limits into its limits, the order into its waiting queue. Victims are
preempted before the step, as far as the need for blocks can be foreseen. For other cases
(speculative tokens) the victims' ranks are in `request.priority`: vLLM's PRIORITY mode preempts the
largest. The order of `running` is the order of service only: decodes, then prefills in order of
entry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from ....core.decisions import NextQueue, PreemptionMode, ReleaseReason
from ....core.policy import Policy, overrides
from ....core.state import Phase, RequestState
from ....core.wire import (
    DROPPED,
    OFFLOADED,
    REJECTED,
    predicted_length_from_wire,
    priority_from_wire,
    slo_from_wire,
    waited_s,
)
from ...plugin.contract import announce, asked_for, num_cpu_blocks
from ...plugin.hosted import HostedPolicy
from .hooks import TARGETS, server_version
from .vllm_queue import PolicyQueue
from .vllm_steps import StepRecorder, engine_settings
from .vllm_view import VllmView

_GOODBYES = {
    ReleaseReason.REJECT: REJECTED,
    ReleaseReason.DROP: DROPPED,
    ReleaseReason.OFFLOAD: OFFLOADED,
}


class PolicyScheduler(Scheduler):
    """Scheduler class for `--scheduler-cls`; the policy comes from the environment
    (`plugins.contract`).
    """

    clock: ClassVar[Callable[[], float]] = time.time  # as vLLM's own arrival times

    running: list[Any]  # of vLLM's requests
    max_num_scheduled_tokens: int
    max_num_running_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec = asked_for()
        if spec is None:
            raise RuntimeError("SLO_BENCH_POLICY is not set; start the server with slo-bench serve")
        policy = spec.load()
        if not isinstance(policy, Policy):
            raise RuntimeError(f"{spec.system} forms static batches, which vLLM does not")
        self.hosted = HostedPolicy(policy)
        self.slo_policy = policy = self.hosted.policy
        self.recorder = StepRecorder(self)
        self.view = VllmView(self, self.hosted)
        self.view.time_s = type(self).clock()
        self.states: dict[str, RequestState] = {}
        self._apart: list[Request] = []  # in the batch, but not in `running` at this moment
        self.num_cpu_blocks = self._checked_num_cpu_blocks()
        self._requests: dict[int, Request] = {}  # by the number of their state
        self._arrived = 0
        self._reserved_blocks = 0
        self._goodbyes: list[tuple[int, EngineCoreOutput]] = []
        self._own_limits = (self.max_num_scheduled_tokens, self.max_num_running_reqs)
        self._decode_next = False
        self._changed = True  # since the policy last chose the next queue
        self._heads: list[str] = []  # of the queue's groups when the policy was last asked
        self._seen_free: int | None = None
        self._asks_room = any(overrides(policy, h) for h in ("headroom_blocks", "reserved_blocks"))
        self._calls_next_queue = overrides(policy, "next_queue")
        # Answers that change while requests decode are taken when something happened.
        self._answers_drift = (
            policy.queue_order == "dynamic" or self._calls_next_queue or policy.dynamic_limits
        )

        self.policy = SchedulingPolicy.PRIORITY
        self.waiting = PolicyQueue(
            self._key,
            lambda r: r.request_id in self.swapped,
            hangs_on_view=policy.queue_order == "dynamic",
        )
        self._limits = policy.limits(self.view)
        self._apply_limits()
        announce(
            "vllm",
            server_version(),
            TARGETS,
            system=spec.system,
            num_cpu_blocks=self.num_cpu_blocks,
            **engine_settings(self),
        )

    def _checked_num_cpu_blocks(self) -> int:
        blocks = num_cpu_blocks()
        if not blocks:
            return 0
        if not hasattr(self.connector, "swap_out"):
            raise RuntimeError("host blocks need the swap connector; start with slo-bench serve")
        groups = len(self.kv_cache_config.kv_cache_groups)
        if groups != 1:
            raise RuntimeError(f"swapping needs one KV cache group, but this model has {groups}")
        return blocks

    # ---------------------------------------------------------------- read by the view

    @property
    def swapped(self) -> dict[str, int]:
        """Tokens in host memory by request id."""
        swapped_tokens: dict[str, int] = getattr(self.connector, "swapped", {})
        return swapped_tokens

    @property
    def batch(self) -> list[Request]:
        """All requests in the batch, also those that skip the step."""
        return [*self._apart, *self.running]

    @property
    def n_running(self) -> int:
        """Number of requests in the batch, without building the list."""
        return len(self._apart) + len(self.running)

    def request_of(self, r: RequestState) -> Request:
        """The vLLM request of a state."""
        return self._requests[r.id]

    def prefills(self, request: Request) -> bool:
        """Whether more tokens must be computed than the next decoded one."""
        lacks = bool(request.num_computed_tokens < request.num_tokens - 1)
        chunk = getattr(request, "is_prefill_chunk", None)
        if chunk is None:
            return lacks
        return bool(chunk) or lacks or request.num_output_tokens == 0

    # ---------------------------------------------------------------- coming and going

    def add_request(self, request: Request) -> None:
        if request.request_id in self.requests:  # the next input of a streaming session
            super().add_request(request)
            return
        self.view.time_s = type(self).clock()
        self._changed = True
        r = self._state_of(request)
        self.states[request.request_id] = r
        self._requests[r.id] = request
        rejected = self.hosted.rejects(r, self.view)
        super().add_request(request)
        if rejected:
            self._send_away(request, ReleaseReason.REJECT)
            return
        self.hosted.add_timeout(r, self.view)
        self._dismiss_failed()

    def _state_of(self, request: Request) -> RequestState:
        params = request.sampling_params or request.pooling_params
        wire = getattr(params, "extra_args", None) or getattr(params, "extra_kwargs", None) or {}
        arrival_s = min(float(request.arrival_time), self.view.time_s) - waited_s(wire)
        output = int(request.max_tokens)
        self._arrived += 1
        r = RequestState(
            self._arrived,
            arrival_s,
            int(request.num_prompt_tokens),
            output,
            int(wire.get("max_output_tokens", output)),
            slo_from_wire(wire, arrival_s),
        )
        r.seq = self._arrived
        r.predicted_output_tokens = predicted_length_from_wire(wire)
        r.priority = priority_from_wire(wire)
        return r

    def _dismiss(self) -> None:
        """Drop or offload waiting requests whose timeout has passed."""
        for r, reason in self.hosted.timed_out(self.view.time_s):
            request = self._requests.get(r.id)
            if request is not None and request.status == RequestStatus.WAITING:
                self._send_away(request, reason)

    def _dismiss_failed(self) -> None:
        """End the requests about which the policy raised an error."""
        for r, why in self.hosted.errors.failed().items():
            request = self._requests.get(r.id)
            if request is not None:
                self._end(request, why)

    def _send_away(self, request: Request, reason: ReleaseReason) -> None:
        self.hosted.decisions.release += 1
        self._end(request, _GOODBYES[reason])

    def _end(self, request: Request, why: str) -> None:
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=RequestStatus.get_finished_reason(RequestStatus.FINISHED_ABORTED),
            stop_reason=why,
        )
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self._goodbyes.append((request.client_index, output))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._changed = True
        r = self.states.get(request.request_id)
        if r is not None:
            self._reserved_blocks -= r.reserved_blocks
            r.phase = Phase.DONE
            r.finish_s = type(self).clock()
            r.kv_tokens = request.num_computed_tokens
            r.emitted_tokens = r.output_tokens = request.num_output_tokens
            stopped = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
            if request.status in stopped:
                self.slo_policy.on_finished(r, self.view)
            del self.states[request.request_id], self._requests[r.id]
            if self.hosted.log.wanted:
                self.recorder.ended.append(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    # ---------------------------------------------------------------- one step

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.view.time_s = type(self).clock()
        self.recorder.preempted.clear()
        if not self.slo_policy.may_start_at_timeout:
            self._dismiss()
        if self.slo_policy.queue_order != "static":
            self.waiting.rekey()
        self._dismiss_failed()
        overtaken = (
            self.slo_policy.queue_order == "linear-in-time" and self.waiting.heads() != self._heads
        )
        changed = self._changed or overtaken or not self.running
        ask_policy = changed or not self._answers_drift
        if self.slo_policy.dynamic_limits and ask_policy:
            self._limits = self.slo_policy.limits(self.view)
            self._apply_limits()
        self._rank()
        preempted = self._make_room()
        if preempted and self.slo_policy.queue_order != "static":
            self.waiting.rekey()  # more room, and another waiting request
        closed = not ask_policy or (preempted and bool(self._decoding()))
        which = NextQueue.NONE if closed else self._who_enters()
        sitting_out = self._sitting_out(which)
        if not self._limits.chunked:
            self.max_num_scheduled_tokens = self._budget_for_whole_prompts()
        self._seen_free = self.free_blocks()
        self.waiting.opened(which, self._fits, self._enters)
        try:
            if sitting_out:
                output = self._schedule_without(sitting_out, args, kwargs)
            else:
                output = super().schedule(*args, **kwargs)
        finally:
            self.waiting.closed()
            self._seen_free = None
        moved = self._prompts_moved(output.num_scheduled_tokens)
        self._changed = preempted or moved or (ask_policy and self._others_next(which, output))
        if ask_policy:
            self._heads = self.waiting.heads()
        self._decode_next = bool(sitting_out) and not output.num_scheduled_tokens
        self._note(output)
        if self.slo_policy.may_start_at_timeout:
            self._dismiss()
        return output

    def free_blocks(self) -> int:
        """Free blocks, less those that admitted prompts still need if prompts reserve blocks at
        entry.
        """
        free = int(self.kv_cache_manager.block_pool.get_num_free_blocks())
        if self._limits.allocate_per_chunk or not self._limits.chunked:
            return free
        blocks_of = self.kv_cache_manager.get_block_ids
        for request in self.batch:
            if self.prefills(request):
                needed_blocks = -(-request.num_tokens // self.block_size)
                free -= needed_blocks - len(blocks_of(request.request_id)[0])
        return free

    def seen_free_blocks(self) -> int:
        """`free_blocks`; while a batch is filled the value at its beginning, less the blocks of
        requests that entered.
        """
        return self.free_blocks() if self._seen_free is None else self._seen_free

    def _enters(self, request: Request) -> None:
        if self._seen_free is not None and not self._limits.allocate_per_chunk:
            self._seen_free -= -(-request.num_tokens // self.block_size)

    def _prompts_moved(self, scheduled: dict[str, int]) -> bool:
        """Whether the prompts of this step require calling the policy again in the next one.

        That is so if a prompt is complete, which frees budget (or changes a limit that depends on
        the batch), or if only the token budget kept other requests out.
        """
        if not (len(self.waiting) or self.slo_policy.dynamic_limits):
            return False
        pending = decodes = 0
        for request in self.batch:
            tokens = scheduled.get(request.request_id, 0)
            left = request.num_tokens - request.num_computed_tokens
            if left + tokens <= 1 and request.num_output_tokens:
                decodes += 1
            elif not left:
                return True
            else:
                pending += left + tokens
        budget = self._limits.token_budget - (decodes if self._limits.mixed_batches else 0)
        return len(self.waiting) > 0 and pending >= budget

    def _others_next(self, which: NextQueue, output: Any) -> bool:
        """Whether requests other than swapped ones may be next, because some entered."""
        cached = output.scheduled_cached_reqs
        entered = bool(output.scheduled_new_reqs or _resumed(cached))
        return entered and (which is NextQueue.SWAPPED or bool(self.waiting.swapped))

    def _apply_limits(self) -> None:
        """Apply the policy's limits, within those that the server was started with."""
        tokens, seqs = self._own_limits
        self.max_num_scheduled_tokens = min(tokens, self._limits.token_budget)
        seqs = min(seqs, self._limits.max_seqs)
        if hasattr(self, "max_num_active_reqs"):
            self.max_num_active_reqs = seqs
        else:
            self.max_num_running_reqs = seqs

    def _budget_for_whole_prompts(self) -> int:
        """Token budget that lets a larger prompt run alone, since it must not be split."""
        tokens, limits = self._own_limits[0], self._limits
        head = self.waiting.head()
        needed = 0 if head is None else head.num_tokens
        if limits.mixed_batches:
            needed += len(self._decoding())
        return min(tokens, max(limits.token_budget, needed))

    def _rank(self) -> None:
        """Rank victims by `priority`, and sort running requests in their order of service."""
        victim_key, view, states = self.slo_policy.victim_key, self.view, self.states
        running = self.running
        ranked = sorted(
            running,
            key=lambda r: (victim_key(s := states[r.request_id], view), -s.seq),
            reverse=True,
        )
        for rank, request in enumerate(ranked):
            request.priority = rank
        running.sort(key=lambda r: (1, 0) if self.prefills(r) else (0, r.priority))

    def _make_room(self) -> bool:
        """Preempt requests until the blocks of this step are free; True if any was preempted.

        vLLM would preempt in the middle of its pass over the batch. Requests behind the victim
        would then miss the step, or get chunks cut for a victim that is gone.
        """
        preempted = False
        while self.running:
            decoding = self._decoding()
            need = self._growth(decoding)
            if self._limits.allocate_per_chunk:
                need += self._chunk_growth(len(decoding))
            free = self.free_blocks()
            if free - self._limits.decode_headroom_blocks >= need:
                break
            if len(decoding) == len(self.running) == 1 and free >= need:
                break  # the headroom is for others, and there are none
            victim = max(self.running, key=lambda r: r.priority)
            self.running.remove(victim)
            self._preempt_request(victim, time.monotonic())
            preempted = True
        return preempted

    def _decoding(self) -> list[Request]:
        return [r for r in self.running if not self.prefills(r)]

    def _growth(self, decoding: list[Request]) -> int:
        """Blocks that the next tokens of decoding requests take."""
        return sum(r.num_computed_tokens % self.block_size == 0 for r in decoding)

    def _chunk_growth(self, decoding: int) -> int:
        """Blocks of the chunks that fit beside `decoding` decodes."""
        room = self.max_num_scheduled_tokens - decoding
        growth = 0
        for request in self.running:
            if room > 0 and self.prefills(request):
                before = request.num_computed_tokens
                chunk = min(request.num_tokens - before, room)
                room -= chunk
                growth += -(-(before + chunk) // self.block_size) - -(-before // self.block_size)
        return growth

    def _who_enters(self) -> NextQueue:
        queue = self.waiting
        if not (queue.swapped or self._calls_next_queue):
            return NextQueue.WAITING
        if not len(queue):
            return NextQueue.WAITING
        return self.slo_policy.next_queue(self.view)

    def _fits(self, request: Request) -> bool:
        """Whether the policy lets the head of the queue enter; vLLM checks its own limits and
        blocks.
        """
        limits, policy = self._limits, self.slo_policy
        if not (self._asks_room or limits.watermark_blocks):
            return True
        r = self.states[request.request_id]
        need = -(-request.num_tokens // self.block_size) + limits.watermark_blocks
        need += policy.headroom_blocks(r, self.view)
        if need > self.free_blocks():
            return False
        promise = 0 if r.reserved_blocks else policy.reserved_blocks(r, self.view)
        return self._reserved_blocks + promise <= self.view.total_blocks

    def admissible(self, group: NextQueue) -> list[RequestState]:
        """Requests of a group, in order, for which there is room now."""
        queue, limits = self.waiting, self._limits
        entries = queue.swapped if group is NextQueue.SWAPPED else queue.waiting
        decoding = self._decoding()
        free = self.free_blocks()
        if limits.mixed_batches or group is NextQueue.SWAPPED:
            free -= self._growth(decoding)
        room = limits.token_budget - (len(decoding) if limits.mixed_batches else 0)
        pending = sum(r.num_tokens - r.num_computed_tokens for r in self.batch if self.prefills(r))
        free_seqs = min(self._own_limits[1], limits.max_seqs) - len(self.running)
        fitting: list[RequestState] = []
        for entry in entries[: max(0, free_seqs)]:
            r, tokens = self.states[entry[2]], entry[3].num_tokens
            free -= -(-tokens // self.block_size)
            if free < limits.watermark_blocks + self.slo_policy.headroom_blocks(r, self.view):
                break
            if group is NextQueue.SWAPPED:
                if limits.mixed_batches and pending >= room:
                    break
                pending += 1
            else:
                over = pending + tokens > room and not limits.chunked
                if pending >= room or (pending and over):
                    break
                pending += tokens
            fitting.append(r)
        return fitting

    def _sitting_out(self, which: NextQueue) -> list[Request]:
        """Decoding requests that skip this step because it prefills and the policy does not mix
        batches.
        """
        if self._limits.mixed_batches:
            return []
        decoding = self._decoding()
        if len(decoding) < len(self.running):
            return decoding  # a prompt is under way
        head = self.waiting.head() if which is NextQueue.WAITING else None
        if head is None or self._decode_next:
            return []
        blocks = -(-head.num_tokens // self.block_size)
        room = len(decoding) < min(self._own_limits[1], self._limits.max_seqs)
        enters = room and blocks <= self.free_blocks() and self._fits(head)
        return decoding if enters else []

    def _schedule_without(
        self, sitting_out: list[Request], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a step in which these requests keep their place and blocks but get no token."""
        limit = (
            "max_num_active_reqs"
            if hasattr(self, "max_num_active_reqs")
            else ("max_num_running_reqs")
        )
        seqs = getattr(self, limit)
        out = set(sitting_out)
        self.running = [r for r in self.running if r not in out]
        self._apart = sitting_out
        setattr(self, limit, seqs - len(out))
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.running = [*sitting_out, *self.running]
            self._apart = []
            setattr(self, limit, seqs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        r = self.states[request.request_id]
        tokens = request.num_computed_tokens
        how = PreemptionMode.RECOMPUTE
        if not self.prefills(request):
            self._apart = [request]  # vLLM has taken it out already
            how = self.slo_policy.preemption_mode(r, self.view)
            self._apart = []
        blocks = -(-tokens // self.block_size)
        if how is PreemptionMode.SWAP and blocks <= self.view.host_free_blocks:
            if getattr(request, "num_in_flight_tokens", 0):
                raise RuntimeError("a victim's token is in flight: use --no-async-scheduling")
            ids = self.kv_cache_manager.get_block_ids(request.request_id)[0]
            self.connector.swap_out(request.request_id, ids[:blocks], tokens)
            r.swaps += 1
            r.phase = Phase.SWAPPED
        else:
            how = PreemptionMode.RECOMPUTE  # also of a swap for which host memory has no room
            r.recomputes += 1
            r.phase = Phase.WAITING
            r.target_tokens = request.num_tokens
        self.recorder.preempts(request.request_id, how, tokens)
        others = [self.states[other.request_id].seq for other in self.batch if other is not request]
        self.hosted.decisions.preempt(r.seq, others)
        super()._preempt_request(request, *args, **kwargs)

    def _key(self, request: Request) -> tuple[Any, int]:
        r = self.states[request.request_id]
        return self.hosted.queue_key(r, self.view), r.seq

    def _note(self, output: Any) -> None:
        """Record the requests that entered, and the step."""
        resumed = _resumed(output.scheduled_cached_reqs)
        entered = [*(new.req_id for new in output.scheduled_new_reqs), *resumed]
        for request_id in entered:
            r = self.states[request_id]
            r.phase = Phase.PREFILL
            if r.first_scheduled_s != r.first_scheduled_s:  # not yet
                r.first_scheduled_s = self.view.time_s
            if self._asks_room and not r.reserved_blocks:
                r.reserved_blocks = self.slo_policy.reserved_blocks(r, self.view)
                self._reserved_blocks += r.reserved_blocks
        if entered:
            waiting = [self.states[request.request_id].seq for request in self.waiting]
            self.hosted.decisions.enter(
                [self.states[entered_id].seq for entered_id in entered], waiting
            )
        self.recorder.begins(output, entered)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        now_s = type(self).clock()
        duration_s = self.recorder.ran(model_runner_output, now_s)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._note_first_tokens(outputs, now_s)
        log = self.hosted.log
        if duration_s is not None and log.wanted:
            left = int(self.get_num_unfinished_requests())
            log.write("done", time_s=now_s, duration_s=duration_s, left=left)
        for client, goodbye in self._goodbyes:
            if client not in outputs:
                outputs[client] = EngineCoreOutputs()
            outputs[client].outputs.append(goodbye)
            log.write("away", id=goodbye.request_id, reason=goodbye.stop_reason)
        self._goodbyes.clear()
        return outputs

    def _note_first_tokens(self, outputs: Any, now_s: float) -> None:
        for of_client in outputs.values():
            for output in of_client.outputs:
                r = self.states.get(output.request_id) if output.new_token_ids else None
                if r is not None and r.first_token_s != r.first_token_s:  # not yet
                    r.first_token_s = now_s


def _resumed(cached: Any) -> list[str]:
    """Ids of preempted requests that entered again; the field depends on vLLM's version."""
    ids = getattr(cached, "resumed_req_ids", None)
    if ids is not None:
        return list(ids)
    flags = cached.resumed_from_preemption
    return [request_id for request_id, flag in zip(cached.req_ids, flags, strict=True) if flag]
