"""The file of a tuning run: an experiment with a table `[tune]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...harness.experiments.config.experiment_file import SettingError, line_of, read_toml, to_toml
from ...harness.experiments.experiment import Experiment
from ...workloads.errors import FileFormatError, SloBenchError
from .settings import TuneSettings

TABLE = "tune"
_BUDGET = ("trials", "max_requests", "max_time_s")  # may be another when a study goes on


def load(path: Path) -> tuple[Experiment, TuneSettings]:
    """An experiment with a table `[tune]`.

    Raises:
        FileFormatError: the file cannot be read, or says something wrong (with its line).
    """
    read, text = read_toml(path)
    if not read:
        raise FileFormatError(path, None, "says nothing")
    table: dict[str, Any] = dict(read)
    tuned = table.pop(TABLE, {})
    if not isinstance(tuned, Mapping):
        raise FileFormatError(path, line_of(text, (TABLE,)), f"{TABLE} must be a table")
    try:
        settings = TuneSettings(**tuned)
    except SettingError as error:
        raise FileFormatError(path, line_of(text, (TABLE, *error.location)), str(error)) from None
    except SloBenchError as error:
        named = next((name for name in tuned if name in str(error)), "")
        raise FileFormatError(path, line_of(text, (TABLE, named)), str(error)) from None
    try:
        experiment = Experiment(**table)
    except SettingError as error:
        raise FileFormatError(path, line_of(text, error.location), str(error)) from None
    return experiment.anchored(path.resolve().parent), settings


def text_of(experiment: Experiment, settings: TuneSettings, *, budget: bool = True) -> str:
    """Both as one file; without the budget it says whether two runs ask the same."""
    table = {
        name: value
        for name, value in settings.model_dump(exclude=None if budget else set(_BUDGET)).items()
        if value not in (None, (), {})
    }
    return experiment.to_toml() + to_toml({TABLE: table})
