"""Several instances under one controller and one clock.

Events (arrivals, returned requests, transfers, control steps, starts, failures) are processed in
order of time. Instances advance lazily (`scheduling.py`): each runs to the next event that can
affect it, or until a policy reads its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from ....predictors.operators.front_end import FrontEnd, FrontEndQueue
from ....workloads.arrays import Floats
from ...core.cluster_policy import (
    DROP,
    EMBEDS,
    HOLD,
    REJECT,
    ClusterPolicy,
    Failure,
    Role,
    Routed,
    RouteOutcome,
    least_loaded,
    overrides,
)
from ...core.compiled import mypyc_attr
from ...core.counters import Counters, TimedCounters
from ...core.decisions import ReleaseReason
from ...core.instance import Instance, Links
from ...core.state import Phase, Release, RequestState
from ..loop.engine_instance import EngineStuckError
from .cluster_arrivals import INF, Arrivals
from .kept_values import KeptValues
from .lazy_instance import LazyInstance, own
from .paid_time import PaidTime
from .recorder import Recorder
from .scheduling import LOOK_EVERY, InstanceRunner

Progress = Callable[[int, float], None]
_Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]  # time, number, what it calls
_TOGETHER = 1024  # ended requests that are recorded at once
_FINISH, _HAND_OVER = ReleaseReason.FINISH, ReleaseReason.HAND_OVER
_FRUITLESS = 10_000  # control steps without progress after which a run is stuck


@mypyc_attr(allow_interpreted_subclasses=True)
class Cluster:
    """Runs a workload over instances. Its policy sees it as `policy.View`; actions act on it.

    Where events fall together, those that were known first come first, and arrivals last. What
    embeds goes to the embedder with the fewest requests, if there are any; the policy decides on
    all else.
    """

    def __init__(
        self,
        instances: Sequence[LazyInstance],
        policy: ClusterPolicy,
        arrivals: Arrivals,
        recorder: Recorder,
        *,
        failures: Sequence[Failure] = (),
        progress: Progress | None = None,
        front_end: FrontEnd | None = None,
    ) -> None:
        self.instances = instances
        numbers = {instance.number for instance in instances if front_end is not None}
        self._front_ends = {n: FrontEndQueue(front_end) for n in numbers if front_end is not None}
        # From the end of an answer at the engine until its client sends what follows. That this is
        # no longer after long prompts is measured: docs/measurements/step-time.md#front-end.
        self._answer_s = 0.0 if front_end is None else front_end.latency_s
        self.up = [instance for instance in instances if instance.up and instance.role != EMBEDS]
        self._embedders = [instance for instance in instances if instance.role == EMBEDS]
        self.now_s = 0.0
        self.state: Any = policy.new_state()
        self.counters: Counters = TimedCounters(policy.mechanisms(), lambda: self.now_s)
        self.links: Links = policy.links(instances)
        self._policy = policy
        self._arrivals = arrivals
        self._recorder = recorder
        recorder.front_end = front_end
        self._failures = failures
        self._progress = progress
        self._runner = InstanceRunner(instances, self._collect)
        self._roles: dict[str, list[LazyInstance]] = {}
        self._kept: dict[tuple[Callable[[Instance], float], str | None], KeptValues] = {}
        self._starting: set[LazyInstance] = set()
        self.paid = PaidTime(instances)
        self._held: dict[RequestState, None] = {}
        # prefilled there, and sent nowhere yet
        self._prefilled: dict[RequestState, LazyInstance] = {}
        self._away_s: dict[RequestState, float] = {}  # when they left an instance, with their KV
        # of requests with two copies, by id, the one that ended first
        self._answered: dict[int, RequestState | None] = {}
        self._events: list[_Event] = []
        self._event_number = 0
        self._closed = self._is_apart = self._is_pair = False
        self._prefill_only = any(instance.engine.prefill_only for instance in instances)
        self._travels = overrides(policy, "travel_s")
        self._tells = self._prefill_only or overrides(policy, "on_capacity")
        self._steps = 0  # events, and runs of instances between them
        self._steps_seen = self._fruitless = 0
        for instance in instances:
            instance.engine.reports_all_ends = self._tells
            instance.engine.reports_empty_queue = overrides(policy, "on_capacity")

    # ---------------------------------------------------------------- what the policy sees

    def role(self, name: str) -> Sequence[LazyInstance]:
        """Those of one role that accept requests."""
        if name not in self._roles:
            self._roles[name] = [instance for instance in self.up if instance.role == name]
        return self._roles[name]

    def kept(self, value: Callable[[Instance], float], role: str | None = None) -> Floats:
        """`value` of each of `up`, or of one role, as `ClusterView.kept`."""
        kept = self._kept.get((value, role))
        if kept is None:
            instances = self.up if role is None else self.role(role)
            kept = self._kept[value, role] = KeptValues(value, instances, self._runner)
        for instance in self._runner.touched:
            instance.touched = False
            for values in self._kept.values():
                values.note(instance)
        self._runner.touched.clear()
        return kept.values()

    @property
    def held(self) -> Sequence[RequestState]:
        """Requests in the controller's own queue, the longest there first."""
        return list(self._held)

    # ---------------------------------------------------------------- what actions can do

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """`act` at that time, or now if it is past."""
        self._call_at(time_s, act, ())

    def _call_at(self, time_s: float, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._event_number = number = self._event_number + 1
        heappush(self._events, (time_s if time_s > self.now_s else self.now_s, number, act, args))

    def send(self, r: RequestState, instance: LazyInstance, travel_s: float = 0.0) -> None:
        """`r`, waiting or with its KV free to enter, is at `instance` in `travel_s`."""
        if self._held:
            self._held.pop(r, None)
        visible_s = self.now_s + travel_s
        if self._front_ends and r.visible_s == r.arrival_s:  # else it has passed one
            visible_s = self._passed_s(r, instance, visible_s)
        r.visible_s = visible_s
        if not instance.touched:
            self._runner.touch(instance)
        inbox = instance.engine.inbox
        if not inbox:
            inbox.append(r)
            if self._runner.expects(instance, visible_s):
                return
        elif inbox[-1].visible_s <= visible_s:
            inbox.append(r)
            if instance.follows():
                return
        else:
            place = len(inbox) - 1
            while place and inbox[place - 1].visible_s > visible_s:
                place -= 1
            inbox.insert(place, r)
        self._runner.note_one(instance)

    def _passed_s(self, r: RequestState, instance: LazyInstance, arrival_s: float) -> float:
        """When `r`, which is at the server of `instance` then, has passed its front end."""
        return self._front_ends[instance.number].leaves_s(arrival_s)

    def migrate(
        self, r: RequestState, source: Instance, target: Instance, *, copied_tokens: int = 0
    ) -> None:
        """Move `r` from one instance to another between two iterations, its KV over a link.

        A request without KV on the GPU (waiting, swapped out or in its prefill) arrives at once.
        Otherwise it holds its blocks at `source` until the transfer ends. `copied_tokens` of its KV
        are at `target` already.
        """
        source, target = own(source), own(target)
        self._runner.bring(source)
        source.movable.take_out(r)
        self._runner.note(source.device_group)
        if r in source.movable.in_transfer:
            self._transfer(r, source, target, source.engine.now_s, copied_tokens)
        else:
            self._call_at(source.engine.now_s, self._enters, (r, target))

    def duplicate(self, r: RequestState, instance: Instance) -> RequestState:
        """Send a copy of `r`, from its prompt on, to `instance`; the copy."""
        twin = RequestState(
            r.id,
            r.arrival_s,
            r.prompt_tokens,
            r.output_tokens,
            r.max_output_tokens,
            r.slo,
            r.prefix_blocks,
            r.notify_on_finish,
        )
        twin.priority, twin.predicted_output_tokens = r.priority, r.predicted_output_tokens
        self._answered.setdefault(r.id, None)
        self.send(twin, own(instance))
        return twin

    def cancel(self, r: RequestState, instance: Instance) -> None:
        """End one of two copies, which is at `instance`, between two iterations."""
        instance = own(instance)
        self._runner.bring(instance)
        movable = instance.movable
        if r in instance.engine.inbox:
            instance.engine.inbox.remove(r)
        elif r.phase is not Phase.DONE:
            movable.take_out(r)
            if r in movable.in_transfer:
                movable.free_transferred(r)
        self._runner.note(instance.device_group)

    def unite(self, first: Instance, second: Instance) -> None:
        """They compute for each other from now on: neither may run ahead of the other."""
        self._runner.unite(own(first), own(second))

    def separate(self, first: Instance, second: Instance) -> None:
        """They were united, and compute for each other no longer."""
        self._runner.separate(own(first), own(second))

    def bring(self, instance: Instance) -> None:
        """Let it run up to the present."""
        self._runner.bring(own(instance))

    def reconsider(self, instance: Instance) -> None:
        """Make the policy of `instance` decide again, because its capacity has changed; requests
        whose transfer waits are tried again, too.
        """
        instance = own(instance)
        self._runner.bring(instance)
        instance.movable.reconsider()
        self._runner.note(instance.device_group)
        self._route_prefilled()

    def start(self, instance: Instance, startup_s: float = 0.0) -> None:
        """`instance` accepts requests after `startup_s`, at once if it still serves some; requests
        that are held are dispatched again.
        """
        instance = own(instance)
        if instance.up or instance in self._starting:
            return
        if instance.n_requests:
            self.paid.goes_on(instance)
            startup_s = 0.0
        else:
            self.paid.starts(instance, self.now_s)
            if instance.kv_manager.refs:
                instance.movable.fail_instance()  # without requests; the cache starts empty
        if startup_s:
            self._starting.add(instance)
            self._call_at(self.now_s + startup_s, self._serve, (instance,))
        else:
            self._serve(instance)

    def _serve(self, instance: LazyInstance) -> None:
        self._starting.discard(instance)
        instance.up = True
        if instance.engine.now_s < self.now_s:
            instance.engine.measures.idle(instance.engine.now_s, self.now_s)
        instance.engine.now_s = max(instance.engine.now_s, self.now_s)
        self._changed_up()
        for r in self.held:
            self._sent(r, self._policy.route(r, self))
        self._route_prefilled()
        self._offer_capacity(instance)

    def stop(self, instance: Instance) -> None:
        """`instance` accepts no requests from now on, and serves those that it has."""
        instance = own(instance)
        instance.up = False
        self.paid.stops(instance, self.now_s)
        self._changed_up()

    def fail(self, instance: LazyInstance) -> None:
        """`instance` loses everything; `on_returned` says where its requests begin again.

        An iteration that is under way is the last, and ends first.
        """
        self._runner.bring(instance)
        self.stop(instance)
        self._collect(instance)
        lost = instance.movable.fail_instance()
        self._runner.note(instance.device_group)
        for r in lost:
            self._prefilled.pop(r, None)
            self._away_s.pop(r, None)
            release = Release(r, ReleaseReason.FAIL, max(self.now_s, instance.engine.now_s))
            self._call_at(release.time_s, self._given_back, (release,))
        self._route_prefilled()

    # ---------------------------------------------------------------- running

    def expect(self, role: Role) -> None:
        """Instances of `role` that are not up yet start when it says."""
        for instance in self.instances:
            if instance.role == role.name and not (instance.up or role.spare):
                self._call_at(role.start_s, self.start, (instance,))

    def run(self, *, closed: bool) -> None:
        """Serve the whole workload. `closed`: some arrivals wait for answers.

        Raises:
            EngineStuckError: held requests are never routed, or an instance admits no request.
        """
        self._closed = closed
        for instance in self.instances:
            instance.engine.reports_all_ends |= closed
        for failure in self._failures:
            self._fail_later(failure)
        pair = self._pair()
        self._is_pair = pair is not None
        self._is_apart = self._is_pair or self._apart()
        if pair is not None:
            self._run_pair(*pair)
        elif self._is_apart:
            self._run_apart()
        else:
            self._run_together()
        for instance in self.instances:
            self._collect(instance)
            self._record(instance)
        self._recorder.cancelled(self._arrivals.cancelled)

    def _apart(self) -> bool:
        """Does nothing that happens on one instance matter to another? Of one alone, ends may let
        the next requests come.
        """
        policy = self._policy
        alone = len(self.instances) == 1 and self.instances[0].simulated is not None
        return (
            isinstance(policy, Routed)
            and (len(self.instances) == 1 or not policy.router.watches)
            and len(self._runner.device_groups) == len(self.instances) == len(self.up)
            and not (self._failures or self._prefill_only)
            and (not self._closed or (alone and self._arrivals.by_places))
        )

    def _run_apart(self) -> None:
        """Run instances in long slices, each on its own, while nothing couples them."""
        instances, arrivals = self.instances, self._arrivals
        assert isinstance(self._policy, Routed)
        route = self._policy.router.route
        single = instances[0] if len(instances) == 1 else None
        while True:
            requests = arrivals.pop_slice()
            if single is not None and not self._front_ends:
                single.engine.inbox.extend(requests)
            else:
                for r in requests:
                    instance = single or route(r, instances)
                    if self._front_ends:
                        r.visible_s = self._passed_s(r, instance, r.arrival_s)
                    instance.engine.inbox.append(r)
            horizon_s = arrivals.next_s()
            for instance in instances:
                instance.engine.run(horizon_s, self._closed)
                self._collect(instance)
                if not self._closed:  # else `_collect` does when there are many
                    self._record(instance)
            if horizon_s == INF and not arrivals.has_news:
                return
            arrivals.has_news = False

    def _pair(self) -> tuple[LazyInstance, LazyInstance] | None:
        """A language model and the embedder on its device, if there is nothing else."""
        if not isinstance(self._policy, Routed) or self._policy.router.watches:
            return None
        if self._closed or self._failures:
            return None
        if len(self.instances) != 2 or len(self.up) != 1 or len(self._embedders) != 1:
            return None
        llm, embedder = self.up[0], self._embedders[0]
        alone = llm.simulated is None or llm.device_group is not embedder.device_group
        return None if alone else (llm, embedder)

    def _run_pair(self, llm: LazyInstance, embedder: LazyInstance) -> None:
        """Run both in long slices; requests are for one or the other by what they are."""
        while True:
            requests = self._arrivals.pop_slice()
            for r in requests if self._front_ends else ():
                r.visible_s = self._passed_s(r, embedder if r.num_inputs else llm, r.arrival_s)
            end_s = self._arrivals.next_s()
            self._runner.run_pair(llm, embedder, requests, end_s)
            self._record(llm)
            self._record(embedder)
            if end_s == INF:
                return

    def _run_together(self) -> None:
        arrivals, events, runner = self._arrivals, self._events, self._runner
        emitters, changed = runner.emitters, runner.changed
        look_at = LOOK_EVERY
        if self._policy.control_interval_s < INF:
            self.at(self._policy.control_interval_s, self._control_step)
        arrival_s = arrivals.next_s()
        while True:
            if arrivals.has_news:
                arrivals.has_news = False
                arrival_s = arrivals.next_s()
            event_s = events[0][0] if events else INF
            until_s = arrival_s if arrival_s < event_s else event_s
            if changed:
                runner.ask_changed()
            while emitters and emitters[0][0] < until_s:
                if emitters[0][0] == emitters[0][2].earliest_release_s:
                    runner.run_first(until_s)
                    break
                heappop(emitters)
            else:  # nobody may give a request back before then
                if until_s == INF:
                    if not runner.run_busy():
                        self._nobody_left()
                        return
                elif event_s <= arrival_s:
                    self.now_s = runner.now_s = event_s
                    _, _, act, args = heappop(events)
                    act(*args)
                else:
                    self.now_s = runner.now_s = arrival_s
                    r = arrivals.pop()
                    arrival_s = arrivals.next_s()
                    self._arrived(r)
            self._steps += 1
            if self._steps >= look_at:
                look_at += LOOK_EVERY
                # Else instances that no policy reads collect requests.
                for instance in self.instances:
                    self._runner.bring(instance)
                    self._record(instance)

    def _nobody_left(self) -> None:
        left = [*self._held, *self._prefilled]
        if left:
            raise EngineStuckError(
                f"{type(self._policy).__name__} holds {len(left)} requests, as it does request "
                f"{left[0].id}, and nothing is left that could change that"
            )

    # ---------------------------------------------------------------- what instances tell

    def _collect(self, instance: LazyInstance) -> None:
        """Process the releases of an instance; those of one moment are one event."""
        engine, tells = instance.engine, self._tells
        together: list[tuple[Release, int]] = []
        last_s = -1.0
        for release in engine.outbox:
            r, reason, time_s = release
            answers = reason is _FINISH and r.notify_on_finish
            if answers and (not self._answered or self._is_answer(r)):
                self._arrivals.ended(r.id, r.finish_s + self._answer_s, answered=True)
            if not tells and (reason is _FINISH or reason is ReleaseReason.BEGUN):
                continue
            if self._is_apart:
                self._gone(release)
                continue
            if time_s != last_s:
                together, last_s = [], time_s
                self._call_at(time_s, self._released, (instance, together))
            together.append((release, r.version))
        engine.outbox.clear()
        if len(engine.finished) >= _TOGETHER:
            self._record(instance)

    def _record(self, instance: LazyInstance) -> None:
        """Record the requests that have finished at an instance."""
        engine = instance.engine
        if self._answered:
            engine.finished[:] = filter(self._is_answer, engine.finished)
        eventful = bool(
            self._closed
            or (len(self.instances) > 1 and not self._is_pair)
            or engine.measures.preemptions
            or engine.kv_manager.unit_tokens
        )
        self._recorder.finished(engine.finished, engine.index, eventful=eventful)
        self._recorder.measured(engine.measures)
        engine.finished.clear()
        if self._progress is not None:
            self._progress(self._recorder.ended, engine.now_s)

    def _is_answer(self, r: RequestState) -> bool:
        """Whether no copy of `r` has ended before it."""
        if r.id not in self._answered:
            return True
        if self._answered[r.id] is None:
            self._answered[r.id] = r
        return self._answered[r.id] is r

    # ---------------------------------------------------------------- requests between instances

    def _arrived(self, r: RequestState) -> None:
        if r.num_inputs and self._embedders:
            self.send(r, least_loaded(self._embedders))
        else:
            self._sent(r, self._policy.route(r, self))

    def _released(self, instance: LazyInstance, together: list[tuple[Release, int]]) -> None:
        self._steps += len(together) - 1
        for release, version in together:
            if release.reason is _FINISH:
                if self._prefilled:
                    self._route_prefilled()
            else:
                self._process(release, instance, version)
            if self._held and instance.role != EMBEDS:
                self._offer_capacity(instance)

    def _process(self, release: Release, instance: LazyInstance, version: int) -> None:
        r, reason, time_s = release
        if reason is _HAND_OVER:
            movable = instance.simulated or instance.movable
            if r.version == version and r in movable.in_transfer:  # else it has failed
                self._away_s[r] = time_s
                if self._prefilled:
                    self._prefilled[r] = instance
                    self._route_prefilled()
                elif not self._begins_decode(r, instance):
                    self._prefilled[r] = instance
        elif reason is ReleaseReason.OFFLOAD:
            self._given_back(release)
        elif reason in (ReleaseReason.DROP, ReleaseReason.REJECT):
            self._gone(release)

    def _route_prefilled(self) -> None:
        """Choose decode instances in the order of prefill; a request that must wait blocks later
        ones.
        """
        while self._prefilled:
            r = next(iter(self._prefilled))
            if not self._begins_decode(r, self._prefilled[r]):
                return
            del self._prefilled[r]

    def _given_back(self, release: Release) -> None:
        answer = self._policy.on_returned(release, self)
        if answer is DROP or answer is REJECT:
            self._gone(release)
        else:
            r = release.request
            if r.first_scheduled_s != r.first_scheduled_s:  # not yet
                r.queued_s = self.now_s
            self._sent(r, answer)

    def _gone(self, release: Release) -> None:
        self._recorder.gone(release)
        r = release.request
        self._held.pop(r, None)
        if r.notify_on_finish:
            self._arrivals.ended(r.id, release.time_s, answered=False)

    def _sent(self, r: RequestState, answer: Instance | RouteOutcome) -> None:
        if isinstance(answer, LazyInstance):
            travel_s = self._policy.travel_s(r, answer, self) if self._travels else 0.0
            self.send(r, answer, travel_s)
        elif answer is HOLD:
            self._held.setdefault(r)
        else:
            reason = ReleaseReason.DROP if answer is DROP else ReleaseReason.REJECT
            self._gone(Release(r, reason, self.now_s))

    def _offer_capacity(self, instance: LazyInstance) -> None:
        while self._held and instance.up:
            r = self._policy.on_capacity(instance, self)
            if r is None:
                return
            self.send(r, instance)

    def _begins_decode(self, r: RequestState, source: LazyInstance) -> bool:
        """Choose where `r` decodes. False if it must wait."""
        answer = self._policy.decode_instance(r, source, self)
        if answer is HOLD:
            return False
        if answer is source:
            self._leave(r, source)
            self.send(r, source)
        elif isinstance(answer, LazyInstance):
            self._transfer(r, source, answer, self.now_s)
        else:
            self._leave(r, source)
            reason = ReleaseReason.DROP if answer is DROP else ReleaseReason.REJECT
            self._gone(Release(r, reason, self.now_s))
        return True

    def _transfer(
        self,
        r: RequestState,
        source: LazyInstance,
        target: LazyInstance,
        begin_s: float,
        copied_tokens: int = 0,
    ) -> None:
        away_s = self._away_s.setdefault(r, begin_s)
        ends_s = self._carried_s(r, source, target, begin_s, copied_tokens)
        self._call_at(ends_s, self._moved, (r, source, target, away_s))

    def _carried_s(
        self,
        r: RequestState,
        source: LazyInstance,
        target: LazyInstance,
        begin_s: float,
        copied_tokens: int,
    ) -> float:
        """When the KV of `r` is at `target`, if it leaves `source` now."""
        return self.links.ends_s(source, target, r.kv_tokens - copied_tokens, begin_s)

    def _moved(
        self, r: RequestState, source: LazyInstance, target: LazyInstance, away_s: float
    ) -> None:
        """The KV of `r`, which left at `away_s`, is at `target`: it enters there when there is
        room.
        """
        if self._away_s.get(r) == away_s:  # else the source failed, and `r` has begun again
            self._leave(r, source)
            self._enters(r, target)

    def _leave(self, r: RequestState, source: LazyInstance) -> None:
        r.transfer_s += self.now_s - self._away_s.pop(r)
        self._runner.catch_up(source)
        heeds_room = source.heeds_room()
        movable = source.simulated or source.movable
        movable.free_transferred(r)
        if not source.touched:
            self._runner.touch(source)
        if heeds_room:
            self._runner.note_one(source)

    def _enters(self, r: RequestState, target: LazyInstance) -> None:
        if target.up:
            self.send(r, target)
            return
        if r.phase is Phase.SWAPPED:  # its KV is lost
            r.phase, r.kv_tokens = Phase.WAITING, 0
            r.target_tokens = r.prompt_tokens + r.emitted_tokens
            r.recomputes += 1
        self._given_back(Release(r, ReleaseReason.FAIL, self.now_s))

    # ---------------------------------------------------------------- the controller's own times

    def _control_step(self) -> None:
        """Apply the controller's actions and schedule the next control step while requests
        remain.
        """
        for action in self._policy.control_step(self):
            action.apply(self)
        alone = not self._events and self._arrivals.next_s() == INF
        if alone and not self._requests_remain():
            return
        if self._fruitless < _FRUITLESS:
            self.at(self.now_s + self._policy.control_interval_s, self._control_step)

    def _requests_remain(self) -> bool:
        """Whether requests remain. Counts control steps between which nothing happened."""
        for instance in self.instances:
            self._runner.bring(instance)
        steps = sum(instance.engine.measures.steps for instance in self.instances)
        self._fruitless = self._fruitless + 1 if steps == self._steps_seen else 0
        self._steps_seen = steps
        busy = any(instance.engine.inbox or not instance.engine.idle for instance in self.instances)
        return bool(busy or self._held or self._prefilled)

    def _fail_later(self, failure: Failure) -> None:
        for instance in self.instances:
            if instance.number == failure.instance:
                self._call_at(failure.at_s, self.fail, (instance,))
                if failure.back_s < INF:
                    self._call_at(failure.back_s, self.start, (instance,))

    def _changed_up(self) -> None:
        self.up = [i for i in self.instances if i.up and i.role != EMBEDS]
        self._roles.clear()
        self._kept.clear()
