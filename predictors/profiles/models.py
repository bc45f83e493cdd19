"""The step-time model that a profile stands for: its tables or one of its fitted formulas."""

from __future__ import annotations

from ...workloads.errors import SloBenchError, UnknownNameError
from ..roofline import StepTime
from ..step_time import StepTimeModel
from .build import default_host, table_step_time
from .formulas import FORMULAS
from .profile import Profile
from .table import Host

TABLE = "table"


def available(profile: Profile) -> tuple[str, ...]:
    """The formulas that the profile can be used with; tables first."""
    tables = (TABLE,) if {"linear", "attention"} <= set(profile.tables) else ()
    return (*tables, *profile.fits)


def is_whole(profile: Profile) -> bool:
    """Are its step times of whole steps, the host's share included?"""
    known = available(profile)
    chosen = profile.best or (known[0] if known else TABLE)
    return chosen in FORMULAS and FORMULAS[chosen].whole


def profiled_step_time(
    profile: Profile, host: Host | None = None, formula: str | None = None
) -> StepTimeModel:
    """Step times from the profile, by `formula` or else by its best one.

    Raises:
        SloBenchError: it has no such formula, or none at all.
    """
    known = available(profile)
    if not known:
        raise SloBenchError(
            f"the profile of {profile.label} gives no step times yet: it needs tables of linear "
            "layers and attention (`slo-bench profile import … --add`) or a fit (`slo-bench "
            "profile fit`)"
        )
    chosen = formula or profile.best or known[0]
    if chosen not in known:
        raise UnknownNameError(f"formula in the profile of {profile.label}", chosen, known)
    host = default_host() if host is None else host
    made: StepTime
    if chosen == TABLE:
        made = table_step_time(profile, host)
    else:
        made = FORMULAS[chosen].step_time(profile, profile.fits[chosen].coefficients, host)
    projects = ", ".join(dict.fromkeys(source.project for source in profile.sources))
    return StepTimeModel(
        made, fitted=True, provenance=f"profile: {profile.label}, {chosen} ({projects})"
    )
