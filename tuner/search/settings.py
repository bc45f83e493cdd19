"""Settings of a tuning run: the table `[tune]` of an experiment file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...harness.experiments.config.experiment_file import setting_error
from ...harness.experiments.config.setting import Count, Positive, Several, setting
from ...workloads.errors import SloBenchError
from .objectives import CAPACITY, Aim

SOUGHT = "Objectives"
SEARCHED = "Search"
PROVED = "Confirmation"


def _searched(text: str) -> tuple[str, str]:
    """A `--search` option: a name, and its range, which may be left out."""
    name, equals, what = (piece.strip() for piece in text.partition("="))
    if not name or (equals and not what):
        raise SloBenchError(
            f"cannot read --search {text!r}; write NAME, NAME=LOW..HIGH or NAME=A,B,…"
        )
    return name, what


class TuneSettings(BaseModel):
    """Settings of a tuning run: objectives, search space, sampler, budget and confirmation.

    `search` is name to range, as in `--search`; empty: all parameters of the system. A budget of
    None is no limit. `confirm_backend`: the winner is also measured on that backend.

    Raises:
        SloBenchError: a value is invalid.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    objectives: Annotated[Several[str], Field(min_length=1)] = setting(
        SOUGHT,
        "Objective: capacity (req/s at --target), goodput, attainment, cost (fewest GPUs), "
        "ttft_p50, ttft_p99, tpot_p50, tpot_p99, itl_p99, e2e_p50 or e2e_p99 (at --rate). "
        "Repeated: a Pareto front.",
        (CAPACITY,),
        option="--objective",
        metavar="O",
        repeated=True,
        split=True,
    )
    search: Mapping[str, Any] = setting(
        SEARCHED,
        "Parameter or setting to search, with its range: slo_weight (its whole range), "
        "threshold=1..4000 (…:log for a logarithmic scale), tp=1,2,4, slo_weight=0:7:1, or "
        "parameters (all of the system). Others stay fixed. May be repeated. Default: "
        "parameters.",
        {},
        metavar="NAME[=LOW..HIGH|A,B,…]",
        read=_searched,
    )
    target: float = setting(
        SOUGHT, "Target attainment of the objectives capacity and cost.", 0.9, metavar="SHARE"
    )
    tolerance: Annotated[float, Field(ge=0.001, le=0.5)] = setting(
        SOUGHT,
        "Relative precision of a capacity: its interval is within ± this share.",
        0.03,
        metavar="SHARE",
    )
    rate_rps: Positive | None = setting(
        SOUGHT,
        "Offered rate in req/s, for objectives measured at one rate.",
        option="--rate",
        metavar="R",
    )
    sampler: str = setting(
        SEARCHED,
        "Optuna sampler: tpe, gp (needs the extra torch), cmaes (numbers only), nsga2, random "
        "or grid. Default: tpe; for several objectives nsga2.",
        "",
        metavar="S",
    )
    sampler_seed: int = setting(SEARCHED, "Seed of the sampler.", 0)
    trials: Count = setting(SEARCHED, "Number of configurations to try.", 50)
    max_requests: Count | None = setting(SEARCHED, "Start no trial after this number of requests.")
    max_time_s: Positive | None = setting(SEARCHED, "Start no trial after this time.", unit="s")
    confirm_workloads: Several[str] = setting(
        PROVED,
        "Also measure the best configuration and the default on this workload. May be repeated.",
        (),
        option="--confirm-workload",
        metavar="W",
        repeated=True,
    )
    confirm_backend: Literal["vllm", "sglang"] | None = setting(
        PROVED,
        "Also measure the best configuration and the default on this real server.",
        option="--confirm",
    )
    confirm: bool = setting(
        PROVED, "Skip the final measurement with new seeds.", True, option="--no-confirm"
    )

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise setting_error(error, type(self), "setting in [tune]") from None
        if not self.sampler:
            default = "tpe" if len(self.objectives) == 1 else "nsga2"
            object.__setattr__(self, "sampler", default)
        self.aim  # noqa: B018 - says what contradicts

    @property
    def aim(self) -> Aim:
        """The objectives.

        Raises:
            SloBenchError: they are unknown, or contradict each other.
        """
        return Aim.of(self.objectives, self.target, self.rate_rps)

    def changed(self, **changes: Any) -> TuneSettings:
        """The same with other values.

        Raises:
            SloBenchError: a value makes no sense.
        """
        return TuneSettings(**self.model_dump() | changes)
