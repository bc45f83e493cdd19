"""A run folder of ours as `Results`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...harness.results.read import RunResults, detail_file, read_run, read_table
from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.parsing import parse_toml
from ..figures.facets import IDENTITY
from ..figures.figure import rate_key
from ..figures.levels import combine
from .results import Cell, RequestResults, Results

_BOUNDS = {
    "ttft": "ttft_slo_s",
    "tpot": "tpot_slo_s",
    "e2e": "e2e_slo_s",
    "deadline": "deadline_s",
}
_COLUMNS = (
    "arrival_s",
    "first_token_s",
    "finish_s",
    "outcome",
    "output_tokens",
    "prompt_tokens",
    "expected_output_tokens",
    *_BOUNDS.values(),
)


def run_results(path: Path) -> Results:
    """All valid cells of a run folder.

    Raises:
        SloBenchError: it is no whole run folder, kept no per-request records, or has no valid cell.
    """
    run = read_run(path)
    if not run.keeps_requests:
        raise SloBenchError(
            f"{path} kept no per-request records, without which nothing says how certain a "
            "difference is; run it again without --records none"
        )
    settings = _settings(run)
    closed = _closed(settings)
    table = combine([run])
    valid = table[table["valid"]]
    if valid.empty:
        raise SloBenchError(f"no cell of {path} is valid; there is nothing to compare")
    columns = [c for c in ("system", *IDENTITY, *run.axes) if c in valid.columns]
    cells = [
        Cell(
            name=str(row["cell"]),
            identity={column: _text(row[column]) for column in columns},
            rate_rps=None if closed else float(row["level_rps"]),
            seed=int(row["seed"]),
            read=partial(read_requests, path, str(row["cell"]), _warmup_s(settings, row)),
        )
        for _, row in valid.iterrows()
    ]
    notes = []
    left_out = len(table) - len(valid)
    if left_out:
        notes.append(f"{run.name}: {left_out} of {len(table)} cells are invalid and left out.")
    return Results(
        name=run.name,
        kind="slo-bench",
        cells=cells,
        has_slo=True,
        notes=tuple(notes),
        settings=settings,
        simulated=bool((valid["backend"] == "simulated").any()),
        unfinished=run.unfinished,
    )


def _settings(run: RunResults) -> Mapping[str, object]:
    try:
        return parse_toml(run.experiment_toml)
    except tomllib.TOMLDecodeError as error:
        raise FileFormatError(run.path / "experiment.toml", None, f"is no TOML: {error}") from error


def _closed(settings: Mapping[str, object]) -> bool:
    """Whether a number of users sets the load; its rate is then an outcome, not a setting."""
    arrivals = settings.get("arrivals", "")
    listed = arrivals if isinstance(arrivals, list) else [arrivals]
    return any(str(one).startswith("concurrency") for one in listed)


def _warmup_s(settings: Mapping[str, object], row: pd.Series[Any]) -> float:
    own = row.get("warmup_s", settings.get("warmup_s", 0.0))
    return float(own) if isinstance(own, str | int | float) and own != "" else 0.0


def _text(value: object) -> str:
    if value is None or value != value:
        return ""
    return rate_key(value) if isinstance(value, float) else str(value)


def read_requests(folder: Path, cell: str, warmup_s: float = 0.0) -> RequestResults:
    """The per-request records of a cell.

    Raises:
        SloBenchError: they are missing or cannot be read.
    """
    path = detail_file(folder / "requests", cell)
    frame = read_table(path, _COLUMNS, ("sent_s",), words=("outcome",))

    def column(name: str) -> NDArray[np.float64]:
        return frame[name].to_numpy()

    return RequestResults(
        arrival_s=column("arrival_s"),
        first_token_s=column("first_token_s"),
        finish_s=column("finish_s"),
        output_tokens=column("output_tokens"),
        prompt_tokens=column("prompt_tokens"),
        expected_output_tokens=column("expected_output_tokens"),
        finished=(frame["outcome"] == "finished").to_numpy(dtype=np.bool_, na_value=False),
        bounds_s={short: column(name) for short, name in _BOUNDS.items()},
        sent_s=column("sent_s") if "sent_s" in frame else None,
        warmup_s=warmup_s,
    )
