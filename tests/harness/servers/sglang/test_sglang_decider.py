"""What a policy decides, and where it is put; SGLang's scheduler and requests are stand-ins."""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest

from slo_bench.harness.core.counters import REJECTIONS
from slo_bench.harness.core.decisions import Admission, Limits, Line, NextQueue
from slo_bench.harness.core.policy import Policy
from slo_bench.harness.core.records.decision_counts import DecisionCounts
from slo_bench.harness.core.state import Phase
from slo_bench.harness.policies.edf import EarliestDeadlineFirst
from slo_bench.harness.policies.edf_drop import EdfDrop
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.harness.policies.vllm_v0 import VllmV0
from slo_bench.harness.servers.plugin.contract import (
    HANDSHAKE_VARIABLE,
    STEP_LOG_VARIABLE,
    tally_file,
)
from slo_bench.workloads.errors import SloBenchError

OURS = "slo_bench.harness.servers.sglang.plugin"


@pytest.fixture
def decider_module(monkeypatch):
    """Our module, imported beside a stand-in for SGLang."""
    modules = {
        "sglang.srt.managers.scheduler": {
            "_make_abort_req": lambda req, finished_reason: finished_reason
        },
        "sglang.srt.managers.utils": {
            "is_health_check_generate_req": lambda req: req.rid.startswith("HEALTH")
        },
        "sglang.srt.mem_cache.common": {"match_kv_cache": lambda req, cache: None},
    }
    for name, content in modules.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            parent = ".".join(parts[:length])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        for key, value in content.items():
            setattr(sys.modules[name], key, value)
    for module in ("decider", "view"):
        monkeypatch.delitem(sys.modules, f"{OURS}.{module}", raising=False)
    decider = importlib.import_module(f"{OURS}.decider")
    yield decider
    for module in ("decider", "view"):
        sys.modules.pop(f"{OURS}.{module}", None)


class Mode:
    def __init__(self, extend):
        self._extend = extend

    def is_extend(self):
        return self._extend

    def is_decode(self):
        return not self._extend


class Req:
    def __init__(self, rid, prompt_tokens=10, tokens=5, at_s=0.0, matched=0, **values):
        self.rid = rid
        self.origin_input_ids = [0] * prompt_tokens
        self.output_ids = []
        self.sampling_params = SimpleNamespace(max_new_tokens=tokens, custom_params=values or None)
        self.time_stats = SimpleNamespace(scheduler_recv_time=at_s)
        self.kv = SimpleNamespace(kv_committed_len=0, kv_allocated_len=0)
        self.to_finish = self.finished_reason = None
        self.is_retracted = False
        self.num_matched_prefix_tokens = matched
        self.prefix_len, self.extend_end = 0, prompt_tokens

    def finished(self):
        return self.finished_reason is not None

    def end(self, how="length"):
        self.finished_reason = SimpleNamespace(to_json=lambda: {"type": how})


@dataclass
class Batch:
    reqs: list
    extend: bool = False
    decoding_reqs: list | None = None
    batch_is_full: bool = True

    def batch_size(self):
        return len(self.reqs)

    def new_tokens_required_next_decode(self, selected=None):
        return 4 * len(self.reqs if selected is None else selected)

    @property
    def forward_mode(self):
        return Mode(self.extend)

    @property
    def prefix_lens(self):
        return [len(r.output_ids) + 2 for r in self.reqs]

    @property
    def extend_lens(self):
        return [1 if r in (self.decoding_reqs or ()) else 8 for r in self.reqs]


@dataclass
class Scheduler:
    page_size: int = 4
    max_total_num_tokens: int = 400
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int | None = 8192
    is_mixed_chunk: bool = False
    chunked_req: object = None
    tree_cache: object = field(default_factory=lambda: SimpleNamespace(evictable_size=lambda: 40))
    token_to_kv_pool_allocator: object = field(
        default_factory=lambda: SimpleNamespace(available_size=lambda: 100)
    )
    beam_coordinator: object = field(
        default_factory=lambda: SimpleNamespace(retire_group=lambda req: None)
    )
    waiting_queue: list = field(default_factory=list)
    running_batch: object = None
    aborts: dict = field(default_factory=dict)
    released: list = field(default_factory=list)

    def _release_aborted_request(self, req):
        self.released.append(req.rid)

    def send_abort_output(self, reason, req):
        self.aborts[req.rid] = (int(reason["status_code"]), reason["message"])


@pytest.fixture
def set_clock(decider_module, monkeypatch):
    """Sets the clock."""

    def set_now(now_s):
        monkeypatch.setattr(decider_module.Decider, "clock", staticmethod(lambda: now_s))

    set_now(0.0)
    return set_now


@pytest.fixture
def decide(decider_module, set_clock):
    def make(policy, **scheduler):
        fake_scheduler = Scheduler(**scheduler)
        return fake_scheduler, decider_module.Decider(fake_scheduler, policy)

    return make


def come(scheduler, decider, *reqs):
    for req in reqs:
        if decider.comes(req):
            scheduler.waiting_queue.append(req)


def rids(reqs):
    return [req.rid for req in reqs]


def test_sglang_queue_follows_the_policy_and_ties_go_to_the_first(decide):
    scheduler, decider = decide(EarliestDeadlineFirst())
    late, never = Req("late", deadline_in_s=9.0), Req("never")
    soon, soon_too = Req("soon", e2e_slo_s=2.0), Req("soon too", ttft_slo_s=2.0)
    come(scheduler, decider, late, never, soon, soon_too)
    decider.order(scheduler.waiting_queue, None)
    assert rids(scheduler.waiting_queue) == ["soon", "soon too", "late", "never"]


def test_sglang_deadlines_count_from_the_schedulers_arrival_time(decide, set_clock):
    scheduler, decider = decide(EarliestDeadlineFirst())
    set_clock(10.0)
    come(
        scheduler,
        decider,
        Req("a", at_s=9.0, deadline_in_s=5.0),
        Req("b", at_s=3.0, deadline_in_s=6.0),
    )
    decider.order(scheduler.waiting_queue, None)
    assert rids(scheduler.waiting_queue) == ["b", "a"]


@dataclass(frozen=True)
class ByCache(Vllm):
    queue_order = "prefix-cache"

    def queue_key(self, r, view):
        return (-view.cached_tokens(r), r.arrival_s)


def test_sglang_cache_keys_are_recomputed_and_long_queues_go_by_arrival(decide):
    scheduler, decider = decide(ByCache())
    reqs = [Req(f"r{i}", at_s=0.0, matched=i) for i in range(129)]
    come(scheduler, decider, *reqs[:128])
    decider.order(scheduler.waiting_queue, None)
    assert rids(scheduler.waiting_queue)[:2] == ["r127", "r126"]
    reqs[5].num_matched_prefix_tokens = 1000
    decider.order(scheduler.waiting_queue, None)
    assert rids(scheduler.waiting_queue)[:2] == ["r5", "r127"]
    come(scheduler, decider, reqs[128])
    decider.order(scheduler.waiting_queue, None)
    assert rids(scheduler.waiting_queue)[:3] == ["r0", "r1", "r2"]


@dataclass(frozen=True)
class Aging(Vllm):
    queue_order = "linear-in-time"

    def queue_key_line(self, r, view):
        return Line(r.arrival_s, r.prompt_tokens, -1.0 if r.prompt_tokens > 10 else 0.0)


def test_sglang_dynamic_keys_are_evaluated_at_the_current_time(decide, set_clock):
    scheduler, decider = decide(Aging())
    come(scheduler, decider, Req("short", prompt_tokens=10), Req("long", prompt_tokens=15))
    decider.order(scheduler.waiting_queue, None)
    assert rids(scheduler.waiting_queue) == ["short", "long"]
    set_clock(6.0)
    decider.order(scheduler.waiting_queue, None)
    assert rids(scheduler.waiting_queue) == ["long", "short"]


def test_sglang_retracts_the_latest_deadline_then_the_later_arrival(decide):
    scheduler, decider = decide(EarliestDeadlineFirst())
    reqs = [
        Req("soon", deadline_in_s=1.0),
        Req("late", deadline_in_s=9.0),
        Req("late too", deadline_in_s=9.0),
        Req("later", deadline_in_s=10.0),
    ]
    come(scheduler, decider, *reqs)
    places = decider.victims(reqs)
    assert [reqs[i].rid for i in reversed(places)] == ["later", "late too", "late", "soon"]


def test_sglang_health_checks_go_first_and_are_retracted_last(decide):
    scheduler, decider = decide(ByCache())
    check, other = Req("HEALTH_CHECK_1"), Req("r")
    come(scheduler, decider, other, check)
    decider.order(scheduler.waiting_queue, None)
    assert rids(scheduler.waiting_queue) == ["HEALTH_CHECK_1", "r"]
    assert [rids([check, other])[i] for i in decider.victims([check, other])] == rids(
        [check, other]
    )


@dataclass(frozen=True)
class ShortOnly(Vllm):
    def admit(self, r, view):
        return Admission.REJECT if r.prompt_tokens > 10 else Admission.ADMIT


def test_sglang_rejected_requests_are_answered_and_not_queued(decide):
    scheduler, decider = decide(ShortOnly())
    come(scheduler, decider, Req("long", prompt_tokens=11), Req("short"))
    assert rids(scheduler.waiting_queue) == ["short"]
    assert scheduler.aborts == {"long": (503, "slo_bench: rejected by the policy")}
    assert scheduler.released == ["long"]


@dataclass(frozen=True)
class CountsLong(ShortOnly):
    def mechanisms(self):
        return {"turned_away": "requests that are too long", REJECTIONS: "the same, by the records"}

    def admit(self, r, view):
        admission = super().admit(r, view)
        if admission is Admission.REJECT:
            view.counters.add("turned_away", r)
        return admission


def test_sglang_counters_are_written_to_the_tally_file(decide, tmp_path, monkeypatch):
    handshake = tmp_path / "handshake.json"
    monkeypatch.setenv(HANDSHAKE_VARIABLE, str(handshake))
    scheduler, decider = decide(CountsLong())
    nothing = {"preempted_recompute": 0, "policy_errors": 0, **DecisionCounts().totals()}
    short = Req("short")
    come(scheduler, decider, short, Req("long", prompt_tokens=11), Req("longer", prompt_tokens=12))
    decider.write_tally()
    tally = json.loads(tally_file(handshake).read_text("utf-8"))
    assert tally == {**nothing, "decisions_release": 2, "count_turned_away": 2}
    come(scheduler, decider, short)  # retracted
    decider.write_tally()
    tally = json.loads(tally_file(handshake).read_text("utf-8"))
    assert tally == {
        **nothing,
        "preempted_recompute": 1,
        "decisions_release": 2,
        "count_turned_away": 2,
    }


def test_sglang_policy_error_fails_its_request_only(decide):
    @dataclass(frozen=True)
    class FailsLong(Policy):
        def queue_key(self, r, view):
            return 1 / (r.prompt_tokens < 11)

    scheduler, decider = decide(FailsLong())
    short = Req("short")
    come(scheduler, decider, Req("long", prompt_tokens=11), short)
    assert scheduler.waiting_queue == [short]


def test_sglang_late_waiting_request_is_dropped(decide, set_clock):
    scheduler, decider = decide(EdfDrop())
    begun, late, patient = (
        Req("begun", deadline_in_s=2.0),
        Req("late", deadline_in_s=2.0),
        Req("patient", deadline_in_s=50.0),
    )
    come(scheduler, decider, begun, late, patient)
    decider.begins(Batch([begun], extend=True))
    set_clock(3.0)
    decider.expire_timeouts([None, None])
    assert rids(scheduler.waiting_queue) == ["begun", "patient"]
    assert scheduler.aborts == {"late": (503, "slo_bench: dropped by the policy")}


def test_sglang_request_cancelled_by_the_client_is_not_dropped(decide, set_clock):
    scheduler, decider = decide(EdfDrop())
    come(scheduler, decider, Req("gone", deadline_in_s=2.0))
    scheduler.waiting_queue.clear()
    set_clock(3.0)
    decider.expire_timeouts([None, None])
    assert scheduler.aborts == {}


@dataclass(frozen=True)
class Learns(Vllm):
    def new_state(self):
        return []

    def on_finished(self, r, view):
        view.policy_state.append((r.output_tokens, r.finish_s))


def test_sglang_policy_learns_from_finished_answers_only(decide, set_clock):
    scheduler, decider = decide(Learns())
    done, aborted, running = Req("done"), Req("aborted"), Req("running")
    come(scheduler, decider, done, aborted, running)
    done.output_ids = [1, 2, 3]
    done.end()
    aborted.end("abort")
    set_clock(4.0)
    batch = Batch([done, aborted, running])
    decider.ended(batch)
    decider.ended(batch)  # overlapped scheduling shows the finished once more
    assert decider.view.policy_state == [(3, 4.0)]


def test_sglang_limits_are_those_of_the_policy_within_the_servers(decide):
    scheduler, decider = decide(Vllm(max_num_batched_tokens=1023, max_num_seqs=3))
    assert not decider.prefill_waits(Batch([Req("a")]))
    assert scheduler.chunked_prefill_size == 1020  # whole pages
    assert scheduler.max_prefill_tokens == 1020
    assert decider.room(10, 1) == 2
    assert decider.room(1, 1) == 1
    scheduler, decider = decide(Vllm(max_num_batched_tokens=4096), chunked_prefill_size=512)
    assert not decider.prefill_waits(Batch([]))
    assert scheduler.chunked_prefill_size == 512


def test_sglang_decodes_count_in_the_budget_of_mixed_batches(decide):
    scheduler, decider = decide(Vllm(max_num_batched_tokens=16), is_mixed_chunk=True)
    assert not decider.prefill_waits(Batch([Req(f"{i}") for i in range(9)]))
    assert scheduler.chunked_prefill_size == 9 + 4  # what is left, in whole pages
    decodes = Batch([Req(f"{i}") for i in range(13)])
    assert decider.prefill_waits(decodes)  # SGLang would be left with 3 tokens, less than a page
    assert scheduler.chunked_prefill_size == 13


@dataclass(frozen=True)
class OneWaiting(Policy):
    """As many tokens as requests wait; nothing enters while the first is short."""

    dynamic_limits = True

    def limits(self, view):
        view.counters.add("asked")
        return Limits(token_budget=16 * max(1, view.n_waiting), max_seqs=5)

    def mechanisms(self):
        return {"asked": "how often"}

    def next_queue(self, view):
        first, *_ = view.admissible(NextQueue.WAITING) or [None]
        return NextQueue.NONE if first is None or first.prompt_tokens < 5 else NextQueue.WAITING


def asked(decider):
    return decider.view.counters.of_policy()["asked"]


def test_sglang_policy_is_asked_for_limits_and_entry_when_something_changed(decide):
    scheduler, decider = decide(OneWaiting())
    running, first = Batch([]), Req("first", prompt_tokens=4)
    come(scheduler, decider, first)
    decider.plan(running, None)
    assert not running.batch_is_full
    assert decider.room(5, 0) == 0  # nobody enters
    before, running.batch_is_full = asked(decider), True
    decider.plan(running, None)
    assert asked(decider) == before
    assert running.batch_is_full
    come(scheduler, decider, Req("second", at_s=-1.0))
    scheduler.waiting_queue.remove(first)
    decider.plan(running, None)
    assert asked(decider) == before + 1
    assert decider.room(5, 0) == 5
    decider.prefill_waits(running)
    assert scheduler.chunked_prefill_size == 16
    decider.begins(Batch([scheduler.waiting_queue.pop()], extend=True))
    decider.plan(running, None)
    assert asked(decider) == before + 2  # a prompt was computed


def test_sglang_queue_is_opened_when_another_request_overtakes(decide, set_clock):
    scheduler, decider = decide(Aging())
    come(scheduler, decider, Req("short", prompt_tokens=10), Req("long", prompt_tokens=15))
    running = Batch([])
    decider.plan(running, None)
    running.batch_is_full = True
    set_clock(4.0)
    decider.plan(running, None)
    assert running.batch_is_full
    set_clock(6.0)
    decider.plan(running, None)
    assert not running.batch_is_full


@dataclass(frozen=True)
class Roomy(Policy):
    """4 blocks stay free, and one for each running request."""

    def limits(self, view):
        return Limits(watermark_blocks=4, decode_headroom_blocks=6)

    def headroom_blocks(self, r, view):
        return view.n_running


def adder(running, entered=()):
    return SimpleNamespace(running_batch=Batch(running), can_run_list=list(entered))


def test_sglang_request_enters_if_watermark_and_headroom_stay_free(decide):
    scheduler, decider = decide(Roomy())  # 35 blocks of 4 tokens are free
    old, entering = Req("old"), Req("entering", prompt_tokens=40)
    fits, large = Req("fits", prompt_tokens=4 * 29), Req("large", prompt_tokens=4 * 30 + 1)
    come(scheduler, decider, old, entering, fits, large)
    assert decider.may_enter(adder([old]), fits)  # 29 + 4 + 1
    assert not decider.may_enter(adder([old]), large)
    assert decider.may_enter(adder([]), large)  # it would wait for ever
    assert not decider.may_enter(adder([old], [entering]), fits)  # that one takes ten
    entering.prefix_len = 20  # five of them from the prefix cache
    small = Req("small", prompt_tokens=4 * 24)
    come(scheduler, decider, small)
    assert decider.may_enter(adder([old], [entering]), small)  # 24 + 4 + 2 of 30
    assert decider.may_enter(adder([old]), Req("HEALTH_CHECK"))


def test_sglang_prompt_in_chunks_reserves_its_blocks_unless_taken_by_chunk(decide):
    for policy, free in ((Roomy(), 35 - 8), (Vllm(), 35)):
        scheduler, decider = decide(policy)
        chunked = Req("chunked", prompt_tokens=40)
        chunked.kv.kv_allocated_len = chunked.prefix_len = 8
        come(scheduler, decider, chunked)
        scheduler.chunked_req = scheduler.waiting_queue.pop()
        assert decider.view.free_blocks == free


def test_sglang_decode_steps_keep_the_policys_headroom_for_others(decide):
    _, decider = decide(Roomy())
    many = Batch([Req(f"{i}") for i in range(30)])
    assert decider.has_headroom(many, None)  # a prefill takes no headroom
    with decider.decode_step():
        assert not decider.has_headroom(many, None)
        assert not decider.has_headroom(many, range(30))
        assert decider.has_headroom(many, range(29))
        assert decider.has_headroom(Batch([Req("last")]), [0])
    assert decider.has_headroom(many, None)


def test_sglang_request_may_start_at_its_timeout_where_the_policy_says_so(decide, set_clock):
    for policy in (EdfDrop(caution=0.0), LateEdf(caution=0.0)):
        scheduler, decider = decide(policy)
        come(scheduler, decider, Req("late", deadline_in_s=2.0))
        set_clock(3.0)
        decider.plan(Batch([]), None)
        assert rids(scheduler.waiting_queue) == ["late"] * policy.may_start_at_timeout
        decider.planned()
        assert scheduler.waiting_queue == []
        set_clock(0.0)


@dataclass(frozen=True)
class LateEdf(EdfDrop):
    may_start_at_timeout = True


def test_sglang_refuses_a_server_that_splits_prompts_for_a_policy_that_does_not(decide):
    with pytest.raises(RuntimeError, match="start with --chunked-prefill-size -1"):
        decide(VllmV0())
    scheduler, decider = decide(VllmV0(max_num_batched_tokens=64), chunked_prefill_size=None)
    assert not decider.prefill_waits(Batch([Req("a")]))
    assert (scheduler.max_prefill_tokens, scheduler.chunked_prefill_size) == (64, None)


def test_sglang_phases_of_a_mixed_batch_and_first_tokens(decide, set_clock):
    scheduler, decider = decide(Vllm())
    old, new = Req("old"), Req("new")
    come(scheduler, decider, old, new)
    decider.begins(Batch([old], extend=True))
    old.output_ids = [1]
    set_clock(1.0)
    decider.ended(Batch([old], extend=True))
    mixed = Batch([new, old], extend=True, decoding_reqs=[old])
    decider.begins(mixed)
    assert (old.slo_bench.phase, new.slo_bench.phase) == (Phase.DECODE, Phase.PREFILL)
    set_clock(2.0)
    decider.ended(mixed)
    assert old.slo_bench.first_token_s == 1.0
    assert math.isnan(new.slo_bench.first_token_s)


def test_sglang_view_counts_running_entering_and_waiting_requests(decide):
    scheduler, decider = decide(Vllm())
    first, second, ended, chunked, waits = (Req(name) for name in ("1", "2", "3", "4", "5"))
    for req in (first, second, ended, chunked, waits):
        decider.comes(req)
    scheduler.waiting_queue.append(waits)
    scheduler.chunked_req = chunked
    first.kv.kv_committed_len, first.kv.kv_allocated_len = 13, 16
    chunked.kv.kv_committed_len = 6
    ended.end()
    decider.expire_timeouts([Batch([first, ended]), Batch([second, first], extend=True)])
    view = decider.view
    assert (view.n_running, view.n_prefilling, view.n_decoding, view.n_waiting) == (3, 1, 2, 1)
    assert view.decode_kv_tokens == 13
    assert view.max_future_kv_tokens == 3 * 15 - 19
    assert (view.total_blocks, view.free_blocks) == (100, 35)
    (r,) = (r for r in view.running() if view.kv_tokens(r) == 13)
    assert view.held_blocks(r) == 4
    assert [view.kv_tokens(r) for r in view.waiting()] == [0]


def test_sglang_steps_are_logged_and_learned_from(decide, set_clock, monkeypatch, tmp_path):
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv(STEP_LOG_VARIABLE, str(path))
    scheduler, decider = decide(Vllm())
    new, old = Req("new"), Req("old")
    come(scheduler, decider, new, old)
    old.kv.kv_committed_len = 7
    # Overlapped: the second step is begun before the result of the first is there.
    decider.begins(Batch([new, old], extend=True, decoding_reqs=[old]))
    set_clock(1.0)
    decider.begins(Batch([old]))
    set_clock(3.0)
    decider.ended(Batch([]))
    set_clock(3.5)
    decider.ended(Batch([]))
    decider.steps.log._file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first, second, *done = lines
    assert (first["decode_seqs"], first["decode_kv_tokens"], first["chunks"]) == (1, 2, [[2, 8]])
    assert first["entered"] == ["new"]
    assert (second["decode_seqs"], second["decode_kv_tokens"], second["chunks"]) == (1, 7, [])
    assert [line["duration_s"] for line in done] == [3.0, 0.5]
    assert [line["left"] for line in done] == [2, 2]  # two wait in the queue throughout


def test_sglang_first_step_of_a_kind_is_not_learned_from(decide, set_clock):
    _, decider = decide(Vllm())
    for now_s, lasts_s, batch in (
        (0.0, 9.0, Batch([Req("slow")], extend=True)),
        (10.0, 9.0, Batch([Req("slow")])),
        (20.0, 0.5, Batch([Req("warm")], extend=True)),
        (30.0, 0.25, Batch([Req("warm")])),
    ):
        set_clock(now_s)
        decider.begins(batch)
        set_clock(now_s + lasts_s)
        decider.ended(batch)
    predict = decider.view.predict
    assert predict.step_s(0, 0, [(2, 8)]) == pytest.approx(0.5, abs=0.01)
    assert predict.step_s(1, 0, []) == pytest.approx(0.25, abs=0.01)


def test_sglang_retracted_requests_are_queued_again(decide, set_clock):
    @dataclass(frozen=True)
    class RetractedLast(Policy):
        def queue_key(self, r, view):
            return r.recomputes

    scheduler, decider = decide(RetractedLast())
    back, new = Req("back"), Req("new")
    decider.comes(back)
    set_clock(1.0)
    come(scheduler, decider, new)
    set_clock(2.0)
    back.output_ids = [1, 2, 3]
    come(scheduler, decider, back)
    decider.order(scheduler.waiting_queue, None)
    assert rids(scheduler.waiting_queue) == ["new", "back"]
    assert not math.isfinite(back.slo_bench.first_scheduled_s)
    assert back.slo_bench.recomputes == 1
    assert back.slo_bench.target_tokens == 10 + 3


def test_sglang_static_key_that_reads_the_clock_is_an_error(decide):
    @dataclass(frozen=True)
    class Oldest(Policy):
        def queue_key(self, r, view):
            return r.arrival_s - view.now_s

    _, decider = decide(Oldest())
    with pytest.raises(SloBenchError, match=r"queue_key of Oldest reads view\.now_s"):
        decider.comes(Req("a"))
    assert decider.view.now_s == 0.0
