"""Everything that the author of a policy needs.

A policy of one instance is a frozen dataclass that overrides what it changes of `Policy`, which
answers as vLLM V1 does. Its fields made by `parameter` can be set, swept and tuned; `Bounds` says
what they may be. A `Key` is a number or a tuple of numbers; the smallest comes first.

>>> from dataclasses import dataclass
>>> from slo_bench.policy import Bounds, Key, Policy, RequestState, Slo, View, parameter
>>> @dataclass(frozen=True)
... class ShortPrompts(Policy):
...     '''A prompt token counts as much as `wait_s_per_token` seconds of waiting.'''
...
...     wait_s_per_token: float = parameter(0.001, low=0.0, high=1.0)
...
...     def queue_key(self, r: RequestState, view: View) -> Key:
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
>>> ShortPrompts().queue_key(r, view=None)
1.5

`View` is the read-only state of the instance that a hook is given, with its clock, room and
requests; `view.predict` (`Predictions`) says what steps, swaps and answers are expected to take.

>>> from slo_bench.policy import Predictions
>>> def slack_s(r: RequestState, view: View) -> float:
...     told: Predictions = view.predict
...     prefill_s = told.step_s(0, 0, [(0, r.prompt_tokens)])
...     return r.arrival_s + r.slo.ttft_s - view.now_s - prefill_s

What hooks answer: `Limits` of an iteration (`UNLIMITED` where there is none), `Admission` on
arrival, `PreemptionMode` for a victim, `NextQueue` for the queue that enters next, `Timeout` for
when a request that has not begun goes, with its `ReleaseReason`, and `Line` for a key that changes
with time.

>>> from slo_bench.policy import UNLIMITED, Admission, Limits, Line, NextQueue, PreemptionMode
>>> from slo_bench.policy import ReleaseReason, Timeout
>>> @dataclass(frozen=True)
... class Strict(Policy):
...     '''Swaps its victims, refuses prompts that are too long, drops who is late.'''
...
...     longest: int = parameter(8192, low=1)
...
...     def limits(self, view: View) -> Limits:
...         return Limits(token_budget=UNLIMITED, chunked=False, mixed_batches=False)
...
...     def admit(self, r: RequestState, view: View) -> Admission:
...         return Admission.REJECT if r.prompt_tokens > self.longest else Admission.ADMIT
...
...     def preemption_mode(self, r: RequestState, view: View) -> PreemptionMode:
...         return PreemptionMode.SWAP
...
...     def next_queue(self, view: View) -> NextQueue:
...         return NextQueue.WAITING if view.n_waiting else NextQueue.SWAPPED
...
...     def timeout(self, r: RequestState, view: View) -> Timeout:
...         return Timeout(r.arrival_s + r.slo.ttft_s, ReleaseReason.DROP)
>>> Strict(longest=100).admit(r, view=None)
<Admission.REJECT: 'reject'>
>>> Strict().timeout(r, view=None).time_s
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

Across instances a `ClusterPolicy` decides, in a `ClusterView` of `Instance`s. Its `Role`s say which
instances there are and where they stand (`Placement`), its `Links` what KV moves over. A request
goes to an instance, or has a `RouteOutcome`; a `Release` is one that an instance gave back. What a
controller does at its own times is an `Action`.

>>> from collections.abc import Sequence
>>> from slo_bench.policy import Action, ClusterPolicy, ClusterView, RouteOutcome, Links, Placement
>>> from slo_bench.policy import Release, Role, Instance
>>> @dataclass(frozen=True)
... class LongPromptsApart(ClusterPolicy):
...     '''The first instance gets the long prompts, the others the rest.'''
...
...     long_tokens: int = parameter(1000, low=1)
...
...     def layout(self, policy: Policy, placement: Placement, instances: int) -> Sequence[Role]:
...         return (Role("long", policy, 1), Role("short", policy, instances - 1))
...
...     def links(self, instances: Sequence[Instance]) -> Links:
...         return super().links(instances)  # KV is there at once
...
...     def route(self, r: RequestState, cluster: ClusterView) -> Instance | RouteOutcome:
...         wanted = cluster.role("long" if r.prompt_tokens >= self.long_tokens else "short")
...         instances = wanted or cluster.up
...         if not instances:
...             return RouteOutcome.HOLD
...         return min(instances, key=lambda one: (one.n_requests, one.index))
...
...     def on_returned(self, release: Release, cluster: ClusterView) -> Instance | RouteOutcome:
...         return self.route(release.request, cluster)
...
...     def control_step(self, cluster: ClusterView) -> Sequence[Action]:
...         return ()
>>> [role.instances for role in LongPromptsApart().layout(Policy(), placement=None, instances=3)]
[1, 2]

`for_load` is told what one instance is estimated to carry in each phase (`PhaseCapacity`).

>>> from slo_bench.policy import PhaseCapacity
>>> PhaseCapacity(prefill_rps=2.0, decode_rps=6.0).prefill_instances(4)
3

A `Router` answers only on arrival; `Routed` makes a `ClusterPolicy` of it.

>>> from slo_bench.policy import Routed, Router
>>> class Last:
...     watches = measures = False
...
...     def route(self, r: RequestState, instances: Sequence[Instance]) -> Instance:
...         return instances[-1]
>>> router: Router = Last()
>>> Routed(router=router).least_instances
1

A `SharingPolicy` serves several models (`ServedModel`) on the shared GPUs of a `MultiModelCluster`;
a `ModelInstance` is the engine of one of them.

>>> from slo_bench.policy import MultiModelCluster, ServedModel, SharingPolicy, ModelInstance
>>> @dataclass(frozen=True)
... class MostAskedFor(SharingPolicy):
...     '''Begins with the models that most requests ask for; override what follows from it.'''
...
...     def first(self, models: list[ServedModel]) -> ServedModel:
...         return max(models, key=lambda model: model.rate_rps)
...
...     def moved(self, old: ModelInstance, new: ModelInstance, cluster: MultiModelCluster) -> None:
...         '''Called when a model goes on at another place.'''
>>> MostAskedFor().control_interval_s
5.0
"""

from __future__ import annotations

import typing
from importlib import import_module

from .harness.core.collocated_policy import Beside as Beside
from .harness.core.collocated_policy import Collocated as Collocated
from .harness.core.collocated_policy import EmbedView as EmbedView
from .harness.core.decisions import UNLIMITED as UNLIMITED
from .harness.core.decisions import Admission as Admission
from .harness.core.decisions import Limits as Limits
from .harness.core.decisions import Line as Line
from .harness.core.decisions import NextQueue as NextQueue
from .harness.core.decisions import PreemptionMode as PreemptionMode
from .harness.core.decisions import ReleaseReason as ReleaseReason
from .harness.core.decisions import Timeout as Timeout
from .harness.core.policy import Bounds as Bounds
from .harness.core.policy import Key as Key
from .harness.core.policy import Policy as Policy
from .harness.core.policy import Queue as Queue
from .harness.core.policy import StaticPolicy as StaticPolicy
from .harness.core.policy import parameter as parameter
from .harness.core.state import Phase as Phase
from .harness.core.state import Release as Release
from .harness.core.state import RequestState as RequestState
from .harness.core.view import Predictions as Predictions
from .harness.core.view import View as View
from .workloads.request import Slo as Slo

if typing.TYPE_CHECKING:
    from .harness.core.cluster_policy import Action as Action
    from .harness.core.cluster_policy import ClusterPolicy as ClusterPolicy
    from .harness.core.cluster_policy import ClusterView as ClusterView
    from .harness.core.cluster_policy import Role as Role
    from .harness.core.cluster_policy import Routed as Routed
    from .harness.core.cluster_policy import RouteOutcome as RouteOutcome
    from .harness.core.cluster_policy import Router as Router
    from .harness.core.instance import Instance as Instance
    from .harness.core.instance import Links as Links
    from .harness.core.multi_model_policy import ModelInstance as ModelInstance
    from .harness.core.multi_model_policy import MultiModelCluster as MultiModelCluster
    from .harness.core.multi_model_policy import ServedModel as ServedModel
    from .harness.core.multi_model_policy import SharingPolicy as SharingPolicy
    from .harness.core.phase_capacity import PhaseCapacity as PhaseCapacity
    from .predictors.placement import Placement as Placement

# Imported when they are asked for: a policy of one instance also runs inside vLLM and SGLang, where
# nothing but the standard library and numpy is promised.
_ACROSS_INSTANCES = {
    ".harness.core.cluster_policy": (
        *("Action", "ClusterPolicy", "ClusterView"),
        *("Role", "Routed", "RouteOutcome", "Router"),
    ),
    ".harness.core.instance": ("Instance", "Links"),
    ".harness.core.multi_model_policy": (
        *("ModelInstance", "MultiModelCluster"),
        *("ServedModel", "SharingPolicy"),
    ),
    ".harness.core.phase_capacity": ("PhaseCapacity",),
    ".predictors.placement": ("Placement",),
}

# Classes, types, UNLIMITED and `parameter`.
__all__ = [
    name
    for name in sorted({*globals(), *(n for names in _ACROSS_INSTANCES.values() for n in names)})
    if name[0].isupper() or name == "parameter"
]


def __getattr__(name: str) -> object:
    for module, names in _ACROSS_INSTANCES.items():
        if name in names:
            return getattr(import_module(module, __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
