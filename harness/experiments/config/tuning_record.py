"""How a suite chose the parameters of its systems: the table `[tuning]` of an experiment file."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .setting import Count


class TuningRecord(BaseModel):
    """How the parameters of one system were chosen: by trials of `slo-bench tune`, or as `note`
    says. Frozen.

    Args:
        note: the reason for values that were not tuned, or more about the tuning.
        command: the command that tuned them.
        trials: configurations that were tried.
        whole_space: there were no others in the search space.
        seeds: seeds of the requests that they were tried on.
        objective: what was maximised or minimised, with the rate and the target.
        default_value: the objective with default parameters.
        best_value: the objective with the parameters chosen.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    note: str = ""
    command: str = ""
    trials: Count | None = None
    whole_space: bool = False
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = ()
    objective: str = ""
    default_value: float | None = None
    best_value: float | None = None

    @model_validator(mode="after")
    def _complete(self) -> TuningRecord:
        tuned = (self.command, self.trials, self.seeds, self.objective, self.best_value)
        given = [value not in ("", None, ()) for value in tuned]
        if any(given) and not all(given):
            raise ValueError("needs command, trials, seeds, objective and best_value together")
        if not (any(given) or self.note):
            raise ValueError("needs a note, or trials with their command")
        return self

    @property
    def text(self) -> str:
        """The record as a sentence for tables."""
        if self.trials is None:
            return self.note
        seeds = ", ".join(map(str, self.seeds))
        before = "" if self.default_value is None else f"{self.default_value:g} → "
        tried = f"all {self.trials} configurations" if self.whole_space else f"{self.trials} trials"
        told = f"{tried} on seeds {seeds}: {self.objective} {before}{self.best_value:g}"
        return f"{told}. {self.note}".rstrip(". ")
