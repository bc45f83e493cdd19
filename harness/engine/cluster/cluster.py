"""Several instances under one controller and one clock.

Events (arrivals, requests that come back, transfers, reviews, starts, failures) are worked off in
order of time. Between them instances run (`instances.py`), and lag behind while nobody looks at
them: they leap, and those that nobody looks at get long slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any

from ...core.cluster_policy import (
    DROP,
    EMBEDS,
    HOLD,
    REJECT,
    ClusterPolicy,
    Failure,
    Instead,
    Role,
    Routed,
    overrides,
)
from ...core.decisions import Why
from ...core.instance import Site
from ...core.links import Links
from ...core.release import Release
from ...core.routing import least_loaded
from ...core.state import Phase, RequestState
from ..loop.instance import EngineStuckError
from .arrivals import INF, Arrivals
from .instance import LazyInstance, own
from .recorder import Recorder
from .scheduling import Instances

Progress = Callable[[int, float], None]
_TOGETHER = 1024  # ended requests that are recorded at once
_FRUITLESS = 10_000  # reviews in a row after which nobody waits for another


class Cluster:
    """Runs a workload over instances. Its policy sees it as `policy.View`; actions act on it.

    Where events fall together, those that were known first come first, and arrivals last. What
    embeds goes to the embedder with the fewest requests, if there are any; the policy decides on
    all else.
    """

    def __init__(
        self,
        sites: Sequence[LazyInstance],
        policy: ClusterPolicy,
        arrivals: Arrivals,
        recorder: Recorder,
        *,
        failures: Sequence[Failure] = (),
        progress: Progress | None = None,
    ) -> None:
        self.sites = sites
        self.up = [site for site in sites if site.up and site.role != EMBEDS]
        self._embedders = [site for site in sites if site.role == EMBEDS]
        self.now_s = 0.0
        self.state: Any = policy.new_state()
        self.links: Links = policy.links(sites)
        self._policy = policy
        self._arrivals = arrivals
        self._recorder = recorder
        self._failures = failures
        self._progress = progress
        self._instances = Instances(sites, self._collect)
        self._roles: dict[str, list[LazyInstance]] = {}
        self._held: dict[RequestState, None] = {}
        self._parked: dict[RequestState, LazyInstance] = {}  # prefilled there, and sent nowhere yet
        self._moving: dict[RequestState, object] = {}  # by transfer
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0
        self._closed = self._is_apart = False
        self._hands_over = any(site.instance.hands_over for site in sites)
        self._tells = self._hands_over or overrides(policy, "emptied")
        self._steps_seen = self._fruitless = 0
        for site in sites:
            site.instance.tells_ends = self._tells
            site.instance.tells_begun = overrides(policy, "emptied")

    # ---------------------------------------------------------------- what the policy sees

    def role(self, name: str) -> Sequence[LazyInstance]:
        """Those of one role that accept requests."""
        if name not in self._roles:
            self._roles[name] = [site for site in self.up if site.role == name]
        return self._roles[name]

    @property
    def held(self) -> Sequence[RequestState]:
        """Requests in the controller's own queue, the longest there first."""
        return list(self._held)

    # ---------------------------------------------------------------- what actions can do

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """`act` at that time, or now if it is past."""
        self._made += 1
        heappush(self._events, (max(time_s, self.now_s), self._made, act))

    def send(self, r: RequestState, site: LazyInstance) -> None:
        """`r`, waiting or with its KV free to enter, is at `site` now."""
        self._held.pop(r, None)
        r.visible_s = self.now_s
        site.instance.inbox.append(r)
        self._instances.note(site.island)

    def migrate(
        self, r: RequestState, source: Site, target: Site, *, copied_tokens: int = 0
    ) -> None:
        """`r` goes from one instance to another between two iterations, its KV over a link.

        Who has none here (it waits, or is swapped out or in the midst of its prefill) is there at
        once. It holds its blocks at `source` until the transfer ends. `copied_tokens` of its KV
        are there already.
        """
        source, target = own(source), own(target)
        self._instances.bring(source)
        source.movable.take_out(r)
        self._instances.note(source.island)
        if r in source.movable.parked:
            self._transfer(r, source, target, source.instance.now_s, copied_tokens)
        else:
            self.at(source.instance.now_s, lambda: self._enters(r, target))

    def unite(self, one: Site, other: Site) -> None:
        """They compute for each other from now on: neither may run ahead of the other."""
        self._instances.unite(own(one), own(other))

    def separate(self, one: Site, other: Site) -> None:
        """They were united, and compute for each other no longer."""
        self._instances.separate(own(one), own(other))

    def bring(self, site: Site) -> None:
        """Let it run up to the present."""
        self._instances.bring(own(site))

    def reconsider(self, site: Site) -> None:
        """What `site` can hold has changed: its policy is asked again, and those who are parked."""
        site = own(site)
        self._instances.bring(site)
        site.movable.reconsider()
        self._instances.note(site.island)
        self._ask_parked()

    def start(self, site: LazyInstance) -> None:
        """`site` accepts requests from now on; those that are held are dispatched again."""
        if site.up:
            return
        site.up = True
        site.instance.now_s = max(site.instance.now_s, self.now_s)
        self._changed_up()
        for r in self.held:
            self._sent(r, self._policy.dispatch(r, self))
        self._ask_parked()
        self._emptied(site)

    def stop(self, site: LazyInstance) -> None:
        """`site` accepts no requests from now on, and serves those that it has."""
        site.up = False
        self._changed_up()

    def fail(self, site: LazyInstance) -> None:
        """`site` loses everything; `returned` says where its requests begin again.

        An iteration that is under way is the last, and ends first.
        """
        self._instances.bring(site)
        self.stop(site)
        self._collect(site)
        lost = site.movable.lose_all()
        self._instances.note(site.island)
        for r in lost:
            self._parked.pop(r, None)
            self._moving.pop(r, None)
            release = Release(r, Why.FAIL, max(self.now_s, site.instance.now_s))
            self.at(release.time_s, partial(self._given_back, release))
        self._ask_parked()

    # ---------------------------------------------------------------- running

    def expect(self, role: Role) -> None:
        """Instances of `role` that are not up yet start when it says."""
        for site in self.sites:
            if site.role == role.name and not site.up:
                self.at(role.start_s, partial(self.start, site))

    def run(self, *, closed: bool) -> None:
        """Serve everything. `closed`: some arrivals wait for answers.

        Raises:
            EngineStuckError: requests are held for ever, or an instance admits nobody.
        """
        self._closed = closed
        for site in self.sites:
            site.instance.tells_ends |= closed
        for failure in self._failures:
            self._fail_later(failure)
        self._is_apart = self._apart()
        if self._is_apart:
            self._run_apart()
        else:
            self._run_together()
        for site in self.sites:
            self._collect(site)
            self._record(site)
        self._recorder.cancelled(self._arrivals.cancelled)

    def _apart(self) -> bool:
        """Does nothing that happens on one instance matter to another?"""
        policy = self._policy
        return (
            isinstance(policy, Routed)
            and (len(self.sites) == 1 or not policy.router.watches)
            and len(self._instances.islands) == len(self.sites) == len(self.up)
            and not (self._closed or self._failures or self._hands_over)
        )

    def _run_apart(self) -> None:
        """Each instance gets long slices."""
        sites, arrivals = self.sites, self._arrivals
        assert isinstance(self._policy, Routed)
        dispatch = self._policy.router.dispatch
        while True:
            requests = arrivals.pop_slice()
            if len(sites) == 1:
                sites[0].instance.inbox.extend(requests)
            else:
                for r in requests:
                    dispatch(r, sites).instance.inbox.append(r)
            horizon_s = arrivals.next_s()
            for site in sites:
                site.instance.run(horizon_s, False)
                self._collect(site)
                self._record(site)
            if horizon_s == INF:
                return

    def _run_together(self) -> None:
        arrivals, events, instances = self._arrivals, self._events, self._instances
        steps = 0
        if self._policy.review_s < INF:
            self.at(self._policy.review_s, self._review)
        arrival_s = arrivals.next_s()
        while True:
            if self._closed:
                arrival_s = arrivals.next_s()
            event_s = events[0][0] if events else INF
            until_s = arrival_s if arrival_s < event_s else event_s
            if instances.run_first(until_s):
                pass
            elif until_s == INF:
                if not instances.run_busy():
                    self._nobody_left()
                    return
            elif event_s <= arrival_s:
                self.now_s = instances.now_s = event_s
                heappop(events)[2]()
            else:
                self.now_s = instances.now_s = arrival_s
                r = arrivals.pop()
                arrival_s = arrivals.next_s()
                self._arrived(r)
            steps += 1
            if steps % 4096 == 0:
                for site in self.sites:  # else those that nobody looks at hoard requests
                    self._instances.bring(site)
                    self._record(site)

    def _nobody_left(self) -> None:
        left = [*self._held, *self._parked]
        if left:
            raise EngineStuckError(
                f"{type(self._policy).__name__} holds {len(left)} requests, as it does request "
                f"{left[0].id}, and nothing is left that could change that"
            )

    # ---------------------------------------------------------------- what instances tell

    def _collect(self, site: LazyInstance) -> None:
        """Hear what the instance tells."""
        instance = site.instance
        for release in instance.outbox:
            r, why, _ = release
            if why is Why.FINISH and r.notify:
                self._arrivals.ended(r.id, r.finish_s, answered=True)
            if self._tells or why not in (Why.FINISH, Why.BEGUN):
                self._heard(release, site)
        instance.outbox.clear()
        if len(instance.finished) >= _TOGETHER:
            self._record(site)

    def _record(self, site: LazyInstance) -> None:
        """Write down who has ended there."""
        instance = site.instance
        eventful = bool(
            self._closed
            or len(self.sites) > 1
            or instance.measures.preemptions
            or instance.ledger.unit_tokens
        )
        self._recorder.finished(instance.finished, instance.index, eventful=eventful)
        instance.finished.clear()
        self._report(instance.now_s)

    def _heard(self, release: Release, site: LazyInstance) -> None:
        if self._is_apart:
            self._gone(release)
        else:
            self.at(release.time_s, partial(self._told, release, site, release.request.version))

    # ---------------------------------------------------------------- requests between instances

    def _arrived(self, r: RequestState) -> None:
        if r.texts and self._embedders:
            self.send(r, least_loaded(self._embedders))
        else:
            self._sent(r, self._policy.dispatch(r, self))

    def _told(self, release: Release, site: LazyInstance, version: int) -> None:
        why, r = release.why, release.request
        if why is Why.HAND_OVER:
            if r in site.movable.parked and r.version == version:  # else the instance has failed
                self._parked[r] = site
                self._ask_parked()
        elif why is Why.OFFLOAD:
            self._given_back(release)
        elif why in (Why.DROP, Why.REJECT):
            self._gone(release)
        if self._parked and why is Why.FINISH:
            self._ask_parked()
        if self._held and site.role != EMBEDS:
            self._emptied(site)

    def _ask_parked(self) -> None:
        """Hand over, in the order of prefill; who has to wait holds up those behind."""
        while self._parked:
            r = next(iter(self._parked))
            self._hand_over(r)
            if r in self._parked:
                return

    def _given_back(self, release: Release) -> None:
        answer = self._policy.returned(release, self)
        if answer is DROP or answer is REJECT:
            self._gone(release)
        else:
            r = release.request
            if r.scheduled_s != r.scheduled_s:  # not yet
                r.queued_s = self.now_s
            self._sent(r, answer)

    def _gone(self, release: Release) -> None:
        self._recorder.gone(release)
        r = release.request
        self._held.pop(r, None)
        if r.notify:
            self._arrivals.ended(r.id, release.time_s, answered=False)

    def _sent(self, r: RequestState, answer: Site | Instead) -> None:
        if answer is HOLD:
            self._held.setdefault(r)
        elif isinstance(answer, Instead):
            why = Why.DROP if answer is DROP else Why.REJECT
            self._gone(Release(r, why, self.now_s))
        else:
            self.send(r, own(answer))

    def _emptied(self, site: LazyInstance) -> None:
        while self._held and site.up:
            r = self._policy.emptied(site, self)
            if r is None:
                return
            self.send(r, site)

    def _hand_over(self, r: RequestState) -> None:
        source = self._parked[r]
        answer = self._policy.hand_over(r, source, self)
        if answer is HOLD:
            return
        del self._parked[r]
        if isinstance(answer, Instead):
            self._leave(r, source)
            why = Why.DROP if answer is DROP else Why.REJECT
            self._gone(Release(r, why, self.now_s))
        elif answer is source:
            self._leave(r, source)
            self.send(r, source)
        else:
            self._transfer(r, source, own(answer), self.now_s)

    def _transfer(
        self,
        r: RequestState,
        source: LazyInstance,
        target: LazyInstance,
        begin_s: float,
        copied_tokens: int = 0,
    ) -> None:
        transfer = self._moving[r] = object()
        ends_s = self.links.ends_s(source, target, r.kv_tokens - copied_tokens, begin_s)
        self.at(ends_s, lambda: self._moved(r, source, target, transfer))

    def _moved(
        self, r: RequestState, source: LazyInstance, target: LazyInstance, transfer: object
    ) -> None:
        """The KV of `r` is at `target`: it enters there when there is room."""
        if self._moving.get(r) is transfer:  # else the source failed, and `r` has begun again
            del self._moving[r]
            self._leave(r, source)
            self._enters(r, target)

    def _leave(self, r: RequestState, source: LazyInstance) -> None:
        self._instances.bring(source)
        source.movable.let_go_of(r)
        self._instances.note(source.island)

    def _enters(self, r: RequestState, target: LazyInstance) -> None:
        if target.up:
            self.send(r, target)
            return
        if r.phase is Phase.RESIDENT:  # its KV is lost
            r.phase, r.kv_tokens = Phase.WAITING, 0
            r.target_tokens = r.prompt_tokens + r.emitted_tokens
            r.recomputes += 1
        self._given_back(Release(r, Why.FAIL, self.now_s))

    # ---------------------------------------------------------------- the controller's own times

    def _review(self) -> None:
        """Ask for actions, and again later while anybody is here or to come."""
        for action in self._policy.review(self):
            action.carry_out(self)
        alone = not self._events and self._arrivals.next_s() == INF
        if alone and not self._goes_on():
            return
        if self._fruitless < _FRUITLESS:
            self.at(self.now_s + self._policy.review_s, self._review)

    def _goes_on(self) -> bool:
        """Is anybody here? Counts reviews between which nothing happened."""
        for site in self.sites:
            self._instances.bring(site)
        steps = sum(site.instance.measures.steps for site in self.sites)
        self._fruitless = self._fruitless + 1 if steps == self._steps_seen else 0
        self._steps_seen = steps
        busy = any(site.instance.inbox or not site.instance.idle for site in self.sites)
        return bool(busy or self._held or self._parked)

    def _fail_later(self, failure: Failure) -> None:
        for site in self.sites:
            if site.number == failure.instance:
                self.at(failure.at_s, partial(self.fail, site))
                if failure.back_s < INF:
                    self.at(failure.back_s, partial(self.start, site))

    def _changed_up(self) -> None:
        self.up = [site for site in self.sites if site.up and site.role != EMBEDS]
        self._roles.clear()

    def _report(self, now_s: float) -> None:
        if self._progress is not None:
            self._progress(self._recorder.ended, now_s)
