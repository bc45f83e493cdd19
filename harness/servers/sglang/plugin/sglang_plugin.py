"""SGLang's entry point `sglang.srt.plugins`: every process of the server calls `register`.

Only the process with the scheduler makes a `Decider`; in the others the hooks are never called.
"""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Mapping
from typing import Any

from ....core.policy import Policy
from ....core.predictions import LearnedPredictions
from ...plugin.contract import PolicySpec, StepLog, announce, asked_for
from .sglang_compatibility import refusal
from .sglang_steps import SglangSteps, engine_settings, requests_left
from .targets import (
    ADD,
    ALLOCATABLE,
    DECODE,
    ENQUEUE,
    HOOKS,
    MEMORY,
    NEXT_BATCH,
    ORDER,
    PREFILL,
    RESULT,
    RUN,
    STARTED,
    VICTIMS,
    moved,
    server_version,
)


def register() -> None:
    """Install the hooks, after checking this version of SGLang.

    Does nothing unless a policy or a step log is asked for.

    Raises:
        SystemExit: the policy cannot run, or something that we hook into has moved. SGLang logs
            errors of plugins and goes on; this ends the server.
    """
    spec = asked_for()
    if spec is None:
        _watch()
        return
    policy = spec.load()
    if reason := refusal(policy):
        raise SystemExit(f"Error: slo-bench: {spec.system} cannot run inside SGLang: {reason}")
    _check_targets()
    assert isinstance(policy, Policy)
    hooks = _Hooks(spec, policy, {target: pkgutil.resolve_name(target) for target in HOOKS})
    table = {
        STARTED: hooks.started,
        ENQUEUE: hooks.enqueue,
        NEXT_BATCH: hooks.next_batch,
        PREFILL: hooks.prefill,
        DECODE: hooks.decode,
        ADD: hooks.add,
        MEMORY: hooks.memory,
        ALLOCATABLE: hooks.allocatable,
        RUN: hooks.run,
        RESULT: hooks.result,
        ORDER: hooks.order,
        VICTIMS: hooks.victims,
    }
    _register(table)


def _check_targets() -> None:
    if problems := moved():
        raise SystemExit(
            f"Error: slo-bench does not know this SGLang ({server_version()}): "
            + "; ".join(problems)
        )


def _register(table: Mapping[str, Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in table.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _not_applied(originals: Mapping[str, Any]) -> list[str]:
    """Targets that SGLang did not hook, which it only logs."""
    return [target for target, was in originals.items() if pkgutil.resolve_name(target) is was]


def _watch() -> None:
    """Log the steps of an unchanged scheduler, if a step log is asked for."""
    log = StepLog()
    if not log.wanted:
        return
    _check_targets()
    hooks = _WatchHooks(log, {t: pkgutil.resolve_name(t) for t in (STARTED, RUN, RESULT)})
    _register({STARTED: hooks.started, RUN: hooks.run, RESULT: hooks.result})


class _WatchHooks:
    """Hooks of the step log, which change no decision."""

    def __init__(self, log: StepLog, originals: Mapping[str, Any]) -> None:
        self._originals = originals
        self._steps = SglangSteps(LearnedPredictions(), log)
        self._up = False

    def started(
        self, original: Any, scheduler: Any, server_args: Any, *args: Any, **kw: Any
    ) -> None:
        original(scheduler, server_args, *args, **kw)
        if missing := _not_applied(self._originals):
            raise RuntimeError(f"slo-bench: SGLang did not apply the hooks on {', '.join(missing)}")
        self._up = True
        announce("sglang", server_version(), list(self._originals), **engine_settings(scheduler))

    def run(self, original: Any, scheduler: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        if self._up:
            waiting = len(scheduler.waiting_queue)
            self._steps.begin(batch, time.perf_counter(), waiting=waiting, free_blocks=0)
        return original(scheduler, batch, *args, **kw)

    def result(
        self, original: Any, scheduler: Any, batch: Any, result: Any, *args: Any, **kw: Any
    ) -> Any:
        returned = original(scheduler, batch, result, *args, **kw)
        if self._up:
            self._steps.done(time.perf_counter(), requests_left(scheduler, batch))
        return returned


class _Hooks:
    """Hooks of a policy. Each wraps the function of its target, which is its first argument,
    `original`.

    Unknown arguments are passed on, so that a new parameter of SGLang is no error.
    """

    def __init__(self, spec: PolicySpec, policy: Policy, originals: Mapping[str, Any]) -> None:
        self._spec = spec
        self._originals = originals
        self._policy = policy
        self._decider: Any = None  # until the scheduler is there

    def started(
        self, original: Any, scheduler: Any, server_args: Any, *args: Any, **kw: Any
    ) -> None:
        _check(server_args)
        original(scheduler, server_args, *args, **kw)
        from .decider import Decider

        if missing := _not_applied(self._originals):
            raise RuntimeError(f"slo-bench: SGLang did not apply the hooks on {', '.join(missing)}")
        self._decider = Decider(scheduler, self._policy)
        settings = engine_settings(scheduler)
        announce("sglang", server_version(), HOOKS, system=self._spec.system, **settings)

    def enqueue(self, original: Any, scheduler: Any, req: Any, *args: Any, **kw: Any) -> None:
        if self._decider.comes(req):
            original(scheduler, req, *args, **kw)

    def next_batch(
        self, original: Any, scheduler: Any, running_batch: Any, last_batch: Any, **kw: Any
    ) -> Any:
        self._decider.plan(running_batch, last_batch)
        self._decider.write_tally()
        plan = original(scheduler, running_batch=running_batch, last_batch=last_batch, **kw)
        self._decider.planned()
        return plan

    def prefill(
        self, original: Any, scheduler: Any, running_batch: Any, *args: Any, **kw: Any
    ) -> Any:
        if self._decider.prefill_waits(running_batch):
            from sglang.srt.managers.schedule_batch import NextBatchPlan

            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        return original(scheduler, running_batch, *args, **kw)

    def add(self, original: Any, adder: Any, req: Any, *args: Any, **kw: Any) -> Any:
        if not self._decider.may_enter(adder, req):
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult.NO_TOKEN
        return original(adder, req, *args, **kw)

    def decode(self, original: Any, scheduler: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        with self._decider.decode_step():
            return original(scheduler, batch, *args, **kw)

    def memory(
        self, original: Any, batch: Any, selected_indices: Any = None, *args: Any, **kw: Any
    ) -> bool:
        fits = bool(original(batch, selected_indices, *args, **kw))
        # During warm-up there is no decider yet.
        headroom = self._decider is None or self._decider.has_headroom(batch, selected_indices)
        return fits and headroom

    def allocatable(
        self, original: Any, scheduler: Any, running_bs: int, *args: Any, **kw: Any
    ) -> int:
        n_allocatable: int = original(scheduler, running_bs, *args, **kw)
        return int(self._decider.room(n_allocatable, running_bs))

    def run(self, original: Any, scheduler: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        if self._decider is not None:  # None: a warm-up while the scheduler is made
            self._decider.begins(batch)
        return original(scheduler, batch, *args, **kw)

    def result(
        self, original: Any, scheduler: Any, batch: Any, result: Any, *args: Any, **kw: Any
    ) -> Any:
        returned = original(scheduler, batch, result, *args, **kw)
        if self._decider is not None:
            self._decider.ended(batch)
        return returned

    def order(
        self,
        original: Any,
        schedule_policy: Any,
        waiting_queue: list[Any],
        running_batch: Any = None,
        *args: Any,
        **kw: Any,
    ) -> None:
        original(schedule_policy, waiting_queue, running_batch, *args, **kw)
        self._decider.order(waiting_queue, running_batch)

    def victims(self, original: Any, reqs: list[Any], *args: Any, **kw: Any) -> list[int]:
        victim_indexes: list[int] = self._decider.victims(reqs)
        return victim_indexes


def _check(server_args: Any) -> None:
    """Refuse several schedulers of one model: each would read its own clock, and they would
    disagree.
    """
    for name, required in (("tp_size", 1), ("pp_size", 1), ("disaggregation_mode", "null")):
        configured = getattr(server_args, name, required)
        if configured != required:
            raise RuntimeError(
                f"slo-bench runs inside SGLang with {name} {required}, not {configured}"
            )
