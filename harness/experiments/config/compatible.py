"""Do the systems and settings of an experiment go together?"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ....workloads.errors import SloBenchError
from ...core.policy import StaticPolicy
from ...engine.cluster.failures import check_failures, parse_failures
from ...policies.systems import several_models
from ..execution.cells import models_of, placed
from .choices import Combination, SystemChoice


def check_models(systems: Iterable[SystemChoice], combinations: Sequence[Combination]) -> None:
    """Raise SloBenchError where a system for several models gets one, or one for one several."""
    for choice, combination in itertools.product(systems, combinations):
        if choice.system is None:
            continue
        several = combination.values["models"] is not None
        if several and choice.system.sharing is None:
            raise SloBenchError(
                f"{choice.label} serves one model; for models = {combination.values['models']!r} "
                f"use one of {', '.join(several_models())}"
            )
        if choice.system.sharing is not None and not several:
            raise SloBenchError(
                f"{choice.label} serves several models: say which (models, for example "
                "fleet(llama-3.1-8b*4, qwen2.5-3b*4), or assign(…) for a trace that names its own)"
            )
        if several:
            models_of(combination.place, combination.workload, combination.instances)


def check_layouts(systems: Sequence[SystemChoice], combinations: Sequence[Combination]) -> None:
    """Raise SloBenchError if the instances cannot form a system, their roles do not fit, or a
    router is set and no system takes one.
    """
    for choice, combination in itertools.product(systems, combinations):
        alone = combination.values["embed_instances"]
        instances = combination.instances_of(choice.system)
        if alone >= instances:
            raise SloBenchError(
                f"embed_instances = {alone} leaves none of {instances} instances to generate"
            )
        if alone and combination.values["embedder"] is None:
            raise SloBenchError("embed_instances needs an embedder")
        _check_failures(choice, combination, instances)
    asked = any(c.values["router"] is not None for c in combinations)
    if asked and all(choice.decides_itself for choice in systems):
        raise SloBenchError(f"{systems[0].label} decides across instances itself; leave router out")
    for choice, combination in itertools.product(systems, combinations):
        system = choice.system
        if system is None or system.cluster is None:
            continue
        if combination.place.device_map is not None:
            raise SloBenchError(f"{choice.label} places layers itself; leave device_map out")
        place = placed(combination.place).placement
        instances = combination.generating(system)
        for role in system.cluster.layout(system.policy, place, instances):
            if role.placement is not None:
                role.placement.check()


def _check_failures(choice: SystemChoice, combination: Combination, instances: int) -> None:
    failures, system = combination.values["failures"], choice.system
    if failures is None or system is None:
        return
    if system.sharing is not None or isinstance(system.policy, StaticPolicy):
        kind = "several models on shared GPUs" if system.sharing is not None else "static batches"
        raise SloBenchError(f"instances of {choice.label} ({kind}) do not fail; leave failures out")
    if combination.values["embedder"] is not None:
        raise SloBenchError("an instance with an embedder does not fail; leave failures out")
    check_failures(parse_failures(failures), instances)
