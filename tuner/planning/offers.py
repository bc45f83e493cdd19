"""Offers: a GPU, its parallelism, a system and its parameters, and a deployment of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...harness.experiments.config.schema import ExperimentSchema
from ...harness.experiments.config.setting import declared
from ...harness.experiments.execution.cell_specs import CellSpec
from ...harness.experiments.execution.experiment_plan import plan
from ...harness.experiments.execution.offered_load import estimated_capacity_rps
from ...harness.policies.systems import system as system_by_name
from ...predictors.operators.assembly import is_file
from ...predictors.placement import smallest_tp, tp_degrees
from ...predictors.profiles.profile_format import read_profile
from ...predictors.specs import gpu, model
from ...workloads.errors import SloBenchError
from ...workloads.file_cache import file_cache
from .prices import PriceList, default_prices

Value = bool | int | float | str

# Parameters for the number of instances of either kind; their ratio is searched.
_PAIRS = (("prefill_instances", "decode_instances"), ("n_lp", "n_hp"))
_RATIOS = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1))
_ALL_RATIOS_UP_TO = 6  # instances
# Tokens of an iteration: the trade between TTFT and TPOT that every deployment must make.
_BUDGETS = ("max_num_batched_tokens", "chunk_tokens")
_BUDGET_FACTORS = (1.0, 0.25, 4.0)
_OPTIMISM = 1.25  # over the estimate, which knows no shared prefixes
_SEARCHED = ("gpu", "tp", "pp", "instances", "rates")  # by loops of their own


@dataclass(frozen=True)
class Offer:
    """A type of instance to rent, on `tp` × `pp` × `dp` GPUs; rented in any number."""

    system: str
    settings: tuple[Mapping[str, Value], ...]  # parameters to choose from
    gpu: str
    tp: int
    pp: int
    usd_per_hour: float  # of one instance
    least_instances: int  # fewer cannot carry the load, or make no such system
    alone_rps: float  # what one carries at most, by an estimate that knows no SLO
    weight_dtype: str
    kv_dtype: str
    memory_share: float
    dp: int = 1
    minimum: int = 1  # instances of such a system, whatever the load
    deployment: Mapping[str, Value] = field(default_factory=dict)  # settings with several values

    @property
    def gpus(self) -> int:
        """Number of GPUs of one instance."""
        return self.dp * self.tp * self.pp

    @property
    def name(self) -> str:
        """A name that no other offer has."""
        chosen = "".join(f" {name}={value}" for name, value in self.deployment.items())
        return f"{self.system} on {self.gpu} {self.spread}{chosen}"

    @property
    def spread(self) -> str:
        """Its parallelism, as `tp4 pp2`."""
        return spread_text(self.tp, self.pp, self.dp)

    def shapes(self, instances: int) -> Iterator[Deployment]:
        """What to try with `instances` instances: all settings, and all useful ratios where there
        are two kinds of instances.
        """
        for parameters in self.settings:
            pair = _open_pair(self.system, parameters)
            if pair is None:
                yield Deployment(self, instances, parameters)
                continue
            for first, other in _ratios(instances):
                chosen = {**parameters, pair[0]: first, pair[1]: other}
                yield Deployment(self, instances, chosen)


@dataclass(frozen=True)
class Deployment:
    """A number of instances of an offer with these parameters."""

    offer: Offer
    instances: int
    parameters: Mapping[str, Value]

    @property
    def gpus(self) -> int:
        """Total GPUs over all instances."""
        return self.instances * self.offer.gpus

    @property
    def usd_per_hour(self) -> float:
        """Total price over all instances."""
        return self.instances * self.offer.usd_per_hour

    @property
    def name(self) -> str:
        """A name that no other deployment has."""
        set_to = "".join(f" {parameter}={value}" for parameter, value in self.parameters.items())
        return f"{self.instances} × {self.offer.name}{set_to}"

    def resized(self, instances: int) -> Iterator[Deployment]:
        """Those of `instances` instances that differ from this one in the ratio alone."""
        ratio = {name for pair in _PAIRS for name in pair}
        for deployment in self.offer.shapes(instances):
            kept = deployment.parameters.keys() - ratio
            if all(deployment.parameters[name] == self.parameters[name] for name in kept):
                yield deployment

    def spec(self, experiment: ExperimentSchema, rate_rps: float) -> CellSpec:
        """Its cell at a rate.

        Raises:
            SloBenchError: the system cannot have that number of instances, or the model does not
                fit.
        """
        return plan(self.experiment(experiment, rate_rps)).cells[0]

    def experiment(self, experiment: ExperimentSchema, rate_rps: float) -> ExperimentSchema:
        """The experiment that `slo-bench run` would run for it."""
        offer = self.offer
        parameters = {name: (value,) for name, value in self.parameters.items()}
        single = _with(experiment, offer.deployment)
        shape = offer.gpu, offer.tp, offer.pp * offer.dp
        profile = single.profile[0]
        if is_file(profile) and _shape_of(str(profile)) != shape:
            profile = None  # measured on other GPUs
        return single.model_copy(
            update={
                "profile": (profile,),
                "systems": (offer.system,),
                "parameters": {offer.system: parameters},
                "gpu": (offer.gpu,),
                "tp": (offer.tp,),
                "pp": (offer.pp,),
                "instances": (self.instances,),
                "rates": (rate_rps,),
                "requests": (None,),
                "records": "none",
            }
        )


@file_cache(maxsize=8)
def _shape_of(profile: str) -> tuple[str, int, int]:
    """GPU, tp and other parallelism that a profile's file is of."""
    measured = read_profile(profile)
    return measured.gpu, measured.tp, 1


def spread_text(tp: int, pp: int, dp: int) -> str:
    """The parallelism of an instance, as `tp4 pp2`; degrees of 1 beside tp are left out."""
    return f"tp{tp}" + "".join(f" {name}{n}" for name, n in (("pp", pp), ("dp", dp)) if n > 1)


def offers(
    experiment: ExperimentSchema,
    rate_rps: float,
    kinds: Sequence[str] | None = None,
    prices: PriceList | None = None,
) -> tuple[list[Offer], dict[str, SloBenchError]]:
    """All offers that may carry `rate_rps`, in the order of a lower bound of their cost, and why
    systems without an offer have none.

    Args:
        experiment: the model, the workload, systems and their parameters; `tp` and `pp` if they are
            fixed; settings of the deployment, such as the dtype of weights, with one or several
            values.
        rate_rps: requests per second.
        kinds: GPUs to choose from; by default all of the price list.
        prices: what GPUs cost; by default the catalogue's prices.

    Raises:
        SloBenchError: a name is unknown, or the model fits on none of the GPUs.
    """
    prices = prices or default_prices()
    names = [gpu(name).name for name in kinds or prices.usd_per_gpu_hour]
    usd = {name: prices.price(name) for name in names}
    chosen = {name: price for name, price in usd.items() if price is not None}
    for name in usd.keys() - chosen.keys() if kinds else ():
        raise SloBenchError(f"{name} has no price ({prices.basis}); give one: --price {name}=USD")
    fitting = []
    refused: dict[str, SloBenchError] = {}
    axes = choices(experiment)
    for kind, pp, values in itertools.product(
        chosen, experiment.pp, itertools.product(*axes.values())
    ):
        deployment = dict(zip(axes, values, strict=True))
        single = _with(experiment, deployment)
        try:
            degrees = _degrees(single, kind, pp)
        except SloBenchError as error:
            refused |= dict.fromkeys(experiment.systems, error)
            continue
        for tp, system in itertools.product(degrees, experiment.systems):
            try:
                offer = _offer(single, rate_rps, kind, tp, pp, system, chosen[kind])
                fitting.append(replace(offer, deployment=deployment))
            except SloBenchError as error:  # heads cannot be split over that number of GPUs
                refused[system] = error
    if not fitting:
        raise next(reversed(refused.values()))
    fitting.sort(key=lambda offer: (offer.least_instances * offer.usd_per_hour, offer.name))
    having = {offer.system for offer in fitting}
    return fitting, {name: error for name, error in refused.items() if name not in having}


def choices(experiment: ExperimentSchema) -> dict[str, tuple[Value, ...]]:
    """The settings of a deployment that have several values: each makes other offers.

    Raises:
        SloBenchError: a setting of the workload has several values.
    """
    experiment.refuse_variants("plan")
    values_of = {}
    for name in experiment.axes():
        values = getattr(experiment, name)
        if name in _SEARCHED or len(values) < 2:
            continue
        if declared(type(experiment))[name].role != "deployment":
            shown = ", ".join(map(str, values))
            raise SloBenchError(f"plan takes one {name}, not {len(values)}: {shown}")
        values_of[name] = values
    return values_of


def _with(experiment: ExperimentSchema, deployment: Mapping[str, Value]) -> ExperimentSchema:
    return experiment.model_copy(update={name: (value,) for name, value in deployment.items()})


def _offer(
    experiment: ExperimentSchema,
    rate_rps: float,
    kind: str,
    tp: int,
    pp: int,
    system: str,
    usd: float,
) -> Offer:
    settings = tuple(_settings(experiment, system))
    configured = system_by_name(system).with_parameters(**settings[0])
    least = 1 if configured.cluster is None else configured.cluster.least_instances
    if _open_pair(system, settings[0]) is not None:
        least = 2
    language, dp = model(experiment.model[0]), experiment.dp[0]
    weights = language.dtype_of(experiment.weight_dtype[0])
    kv = language.kv_dtype_of(experiment.kv_dtype[0])
    numbers = (weights, kv, experiment.memory_share[0], dp)
    draft = Offer(
        system, settings, kind, tp, pp, usd * tp * pp * dp, least, math.inf, *numbers, least
    )
    spec = next(draft.shapes(least)).spec(experiment, rate_rps)
    alone = estimated_capacity_rps(spec.workload, spec.placement, spec.seed)
    enough = math.ceil(rate_rps / (alone * _OPTIMISM))
    return replace(draft, least_instances=max(least, enough), alone_rps=alone)


def _degrees(experiment: ExperimentSchema, kind: str, pp: int) -> Sequence[int]:
    """Tensor-parallel degrees on which the model fits."""
    if any(experiment.tp):
        return [tp for tp in experiment.tp if tp is not None]
    least = smallest_tp(
        model(experiment.model[0]),
        gpu(kind),
        pp,
        experiment.weight_dtype[0],
        experiment.kv_dtype[0],
        experiment.memory_share[0],
        experiment.dp[0],
    )
    return [tp for tp in tp_degrees(model(experiment.model[0])) if tp >= least]


def _settings(experiment: ExperimentSchema, name: str) -> Iterator[Mapping[str, Value]]:
    """A system's parameters: those given, and a few token budgets where none is."""
    stock = system_by_name(name)
    if stock.sharing is not None:
        raise SloBenchError(f"{name} serves several models; plan chooses for one")
    values_of = dict(experiment.parameters.get(name, {}))
    for parameter, bounds in stock.bounds().items():
        if parameter in _BUDGETS and parameter not in values_of:
            default = stock.parameters()[parameter]
            budgets = dict.fromkeys(round(default * factor) for factor in _BUDGET_FACTORS)
            values_of[parameter] = tuple(
                budget
                for budget in budgets
                if (bounds.low or 0) <= budget <= (bounds.high or math.inf)
            )
    for values in itertools.product(*values_of.values()):
        yield dict(zip(values_of, values, strict=True))


def _open_pair(name: str, parameters: Mapping[str, Value]) -> tuple[str, str] | None:
    """The two numbers of instances of a system, unless one is given."""
    cluster = system_by_name(name).cluster
    for pair in _PAIRS:
        if cluster is not None and all(hasattr(cluster, parameter) for parameter in pair):
            return None if any(parameter in parameters for parameter in pair) else pair
    return None


def _ratios(instances: int) -> list[tuple[int, int]]:
    if instances <= _ALL_RATIOS_UP_TO:
        return [(first, instances - first) for first in range(1, instances)]
    ratios = []
    for share, other_share in _RATIOS:
        first = max(1, min(instances - 1, round(instances * share / (share + other_share))))
        ratios.append((first, instances - first))
    return list(dict.fromkeys(ratios))
