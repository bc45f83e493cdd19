"""Everything that the author of a policy needs.

A policy of one instance is a frozen dataclass that overrides what it changes of `Policy`, which
answers as vLLM V1 does. Its fields made by `knob` can be set, swept and tuned; `Bounds` says what
they may be. A `Key` is a number or a tuple of numbers; the smallest comes first.

>>> from dataclasses import dataclass
>>> from slo_bench.policy import Bounds, Key, Policy, RequestState, Slo, View, knob
>>> @dataclass(frozen=True)
... class ShortPrompts(Policy):
...     '''A prompt token counts as much as `wait_s_per_token` seconds of waiting.'''
...
...     wait_s_per_token: float = knob(0.001, low=0.0, high=1.0)
...
...     def urgency(self, r: RequestState, view: View) -> Key:
...         return r.arrival_s + self.wait_s_per_token * r.prompt_tokens
>>> ShortPrompts.bounds() == {"wait_s_per_token": Bounds(low=0.0, high=1.0)}
True

Run it with `Experiment(systems=["short_prompts.py", "vllm"])`, or `slo-bench run --system
short_prompts.py --system vllm`. Hooks are plain functions, so that a test needs no engine. An
`Slo` is what a request asks for, its `Phase` where it stands on its instance.

>>> from slo_bench.policy import Phase
>>> r = RequestState(
...     id=0, arrival_s=1.0, prompt_tokens=500, output_tokens=20, max_output_tokens=20,
...     slo=Slo(ttft_s=1.0),
... )
>>> r.phase is Phase.WAITING
True
>>> ShortPrompts().urgency(r, view=None)
1.5

`View` is the read-only state of the instance that a hook is given, with its clock, room and
requests; `view.predict` (`Predictions`) says what steps, swaps and answers are expected to take.

>>> from slo_bench.policy import Predictions
>>> def slack_s(r: RequestState, view: View) -> float:
...     told: Predictions = view.predict
...     prefill_s = told.step_s(0, 0, [(0, r.prompt_tokens)])
...     return r.arrival_s + r.slo.ttft_s - view.now_s - prefill_s

What hooks answer: `Limits` of an iteration (`UNLIMITED` where there is none), `Admission` on
arrival, `PreemptBy` for a victim, `Refill` for who enters next, `Leave` for when a request goes
that has not begun, with `Why`, and `Line` for a key that changes with time.

>>> from slo_bench.policy import UNLIMITED, Admission, Leave, Limits, Line, PreemptBy, Refill, Why
>>> @dataclass(frozen=True)
... class Strict(Policy):
...     '''Swaps its victims, refuses prompts that are too long, drops who is late.'''
...
...     longest: int = knob(8192, low=1)
...
...     def limits(self, view: View) -> Limits:
...         return Limits(token_budget=UNLIMITED, chunked=False, mix=False)
...
...     def admit(self, r: RequestState, view: View) -> Admission:
...         return Admission.REJECT if r.prompt_tokens > self.longest else Admission.ADMIT
...
...     def preempt_by(self, r: RequestState, view: View) -> PreemptBy:
...         return PreemptBy.SWAP
...
...     def refill(self, view: View) -> Refill:
...         return Refill.WAITING if view.n_waiting else Refill.RESIDENT
...
...     def leave(self, r: RequestState, view: View) -> Leave:
...         return Leave(r.arrival_s + r.slo.ttft_s, Why.DROP)
>>> Strict(longest=100).admit(r, view=None)
<Admission.REJECT: 'reject'>
>>> Strict().leave(r, view=None).time_s
2.0
>>> Line(time_s=1.0, value=3.0, per_s=-0.5).at(now_s=3.0)
2.0

A policy whose keys hang on who else waits may bring a `Queue` that finds the smallest of them
without asking for all (`Policy.queue`).

>>> from slo_bench.policy import Queue
>>> def next_two(queue: Queue) -> list[RequestState]:
...     return [r for r, _ in zip(queue.ordered(), range(2))]

A `StaticPolicy` forms whole batches when the engine idles.

>>> from slo_bench.policy import StaticPolicy
>>> @dataclass(frozen=True)
... class Pairs(StaticPolicy):
...     '''Two requests at a time, in order of arrival.'''
...
...     def form_batch(self, waiting, view):
...         return list(waiting[:2])
>>> Pairs().form_batch([r, r, r], view=None) == [r, r]
True

`Collocated` also decides for an embedder on the same device, of which it sees an `EmbedView`; what
it learns is a `Beside`.

>>> from slo_bench.policy import Beside, Collocated, EmbedView
>>> @dataclass(frozen=True)
... class EmbedsAlone(Collocated):
...     '''The embedder works only while the language model has nothing to do.'''
...
...     def embed_batch(self, embedder: EmbedView):
...         return () if embedder.llm_running else super().embed_batch(embedder)
>>> EmbedsAlone().new_state() == Beside(embedder=None)
True

Across instances a `ClusterPolicy` decides, in a `ClusterView` of `Site`s. Its `Role`s say which
instances there are and where they stand (`Placement`), its `Links` what KV moves over. A request
goes to a site or to `Instead`; a `Release` is one that an instance gave back. What a controller
does at its own times is an `Action`.

>>> from collections.abc import Sequence
>>> from slo_bench.policy import Action, ClusterPolicy, ClusterView, Instead, Links, Placement
>>> from slo_bench.policy import Release, Role, Site
>>> @dataclass(frozen=True)
... class LongPromptsApart(ClusterPolicy):
...     '''The first instance gets the long prompts, the others the rest.'''
...
...     long_tokens: int = knob(1000, low=1)
...
...     def layout(self, policy: Policy, placement: Placement, instances: int) -> Sequence[Role]:
...         return (Role("long", policy, 1), Role("short", policy, instances - 1))
...
...     def links(self, sites: Sequence[Site]) -> Links:
...         return super().links(sites)  # KV is there at once
...
...     def dispatch(self, r: RequestState, cluster: ClusterView) -> Site | Instead:
...         wanted = cluster.role("long" if r.prompt_tokens >= self.long_tokens else "short")
...         sites = wanted or cluster.up
...         return min(sites, key=lambda s: (s.n_requests, s.index)) if sites else Instead.HOLD
...
...     def returned(self, release: Release, cluster: ClusterView) -> Site | Instead:
...         return self.dispatch(release.request, cluster)
...
...     def review(self, cluster: ClusterView) -> Sequence[Action]:
...         return ()
>>> [role.instances for role in LongPromptsApart().layout(Policy(), placement=None, instances=3)]
[1, 2]

A `Router` answers only on arrival; `Routed` makes a `ClusterPolicy` of it.

>>> from slo_bench.policy import Routed, Router
>>> class Last:
...     watches = measures = False
...
...     def dispatch(self, r: RequestState, instances: Sequence[Site]) -> Site:
...         return instances[-1]
>>> router: Router = Last()
>>> Routed(router=router).least_instances
1

A `SharingPolicy` serves several models (`Hosted`) on the shared GPUs of a `Fleet`; a `Tenant` is
the engine of one of them.

>>> from slo_bench.policy import Fleet, Hosted, SharingPolicy, Tenant
>>> @dataclass(frozen=True)
... class MostAskedFor(SharingPolicy):
...     '''Begins with the models that most requests ask for; override what follows from it.'''
...
...     def first(self, models: list[Hosted]) -> Hosted:
...         return max(models, key=lambda model: model.rate_rps)
...
...     def moved(self, old: Tenant, new: Tenant, fleet: Fleet) -> None:
...         '''Called when a model goes on at another place.'''
>>> MostAskedFor().review_s
5.0
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .harness.core.collocated_policy import Beside, Collocated, EmbedView
from .harness.core.decisions import (
    UNLIMITED,
    Admission,
    Leave,
    Limits,
    Line,
    PreemptBy,
    Refill,
    Why,
)
from .harness.core.policy import Bounds, Key, Policy, StaticPolicy, knob
from .harness.core.queue import Queue
from .harness.core.state import Phase, RequestState
from .harness.core.view import Predictions, View
from .workloads.request import Slo

if TYPE_CHECKING:
    from .harness.core.cluster_policy import Action, ClusterPolicy, Instead, Role, Routed
    from .harness.core.cluster_policy import View as ClusterView
    from .harness.core.instance import Site
    from .harness.core.links import Links
    from .harness.core.multi_model_policy import Fleet, Hosted, SharingPolicy, Tenant
    from .harness.core.release import Release
    from .harness.core.routing import Router
    from .predictors.placement import Placement

__all__ = [
    "UNLIMITED",
    "Action",
    "Admission",
    "Beside",
    "Bounds",
    "ClusterPolicy",
    "ClusterView",
    "Collocated",
    "EmbedView",
    "Fleet",
    "Hosted",
    "Instead",
    "Key",
    "Leave",
    "Limits",
    "Line",
    "Links",
    "Phase",
    "Placement",
    "Policy",
    "Predictions",
    "PreemptBy",
    "Queue",
    "Refill",
    "Release",
    "RequestState",
    "Role",
    "Routed",
    "Router",
    "SharingPolicy",
    "Site",
    "Slo",
    "StaticPolicy",
    "Tenant",
    "View",
    "Why",
    "knob",
]

# Imported when they are asked for: a policy of one instance also runs inside vLLM and SGLang, where
# nothing but the standard library and numpy is promised.
_ACROSS_INSTANCES = {
    "Action": (".harness.core.cluster_policy", "Action"),
    "ClusterPolicy": (".harness.core.cluster_policy", "ClusterPolicy"),
    "ClusterView": (".harness.core.cluster_policy", "View"),
    "Fleet": (".harness.core.multi_model_policy", "Fleet"),
    "Hosted": (".harness.core.multi_model_policy", "Hosted"),
    "Instead": (".harness.core.cluster_policy", "Instead"),
    "Links": (".harness.core.links", "Links"),
    "Placement": (".predictors.placement", "Placement"),
    "Release": (".harness.core.release", "Release"),
    "Role": (".harness.core.cluster_policy", "Role"),
    "Routed": (".harness.core.cluster_policy", "Routed"),
    "Router": (".harness.core.routing", "Router"),
    "SharingPolicy": (".harness.core.multi_model_policy", "SharingPolicy"),
    "Site": (".harness.core.instance", "Site"),
    "Tenant": (".harness.core.multi_model_policy", "Tenant"),
}


def __getattr__(name: str) -> object:
    if name in _ACROSS_INSTANCES:
        module, attribute = _ACROSS_INSTANCES[name]
        return getattr(import_module(module, __package__), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
