"""Attainment against a swept setting, such as the number of GPUs or the SLO scale."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from .facets import full_names, with_facets
from .figure import ONLY, Axis, Figure, View, rate_key
from .levels import knee_rps
from .numbers import rate_text

_SWEPT = {"gpus": "GPUs", "slo_scale": "SLO scale"}
_MOST_CURVES = 16
_TARGET = 0.99


def figures(cells: pd.DataFrame, rows: pd.DataFrame) -> list[Figure]:
    """A figure for each such setting with several values; a view for each rate, the knee first."""
    return [found for axis in _SWEPT if (found := _figure(axis, cells, rows)) is not None]


def _figure(axis: str, cells: pd.DataFrame, rows: pd.DataFrame) -> Figure | None:
    if axis not in cells or cells[axis].nunique() < 2:
        return None
    valid = cells[cells["valid"]]
    plain = valid.drop(columns=["facet", "series"])
    alike = with_facets(plain.assign(swept=pd.to_numeric(plain[axis]), **{axis: 0}))
    swept = pd.DataFrame(
        {
            "name": full_names(alike).to_numpy(),
            "x": alike["swept"].to_numpy(),
            "rate": alike["level_rps"].to_numpy(),
            "attainment": alike["attainment"].to_numpy(),
        }
    )
    varied = swept.groupby("name")["x"].nunique()
    names = [n for n in dict.fromkeys(swept["name"]) if varied[n] > 1][:_MOST_CURVES]
    if not names:
        return None
    swept = swept[swept["name"].isin(names)]
    knee = knee_rps(rows)
    rates = sorted(set(swept["rate"]), key=lambda rate: (rate != knee, rate))
    views = {rate_key(rate): _view(swept[swept["rate"] == rate], names) for rate in rates}
    several = len(rates) > 1
    word = _SWEPT[axis]
    return Figure(
        id=f"sweep-{axis.replace('_', '-')}",
        kind="lines",
        title=f"Requests in SLO against {word}",
        note=f"Mean over seeds; band: lowest to highest seed. {_fewest(swept, names, word, rates)}",
        x=Axis(word, "number"),
        y=Axis("requests in SLO", "percent", top=1.0),
        views=views if several else {ONLY: views[rate_key(rates[0])]},
        picker="local" if several else "none",
        options=[[rate_key(r), f"{rate_text(r)} req/s"] for r in rates] if several else [],
    )


def _view(swept: pd.DataFrame, names: Sequence[str]) -> View:
    curves = []
    for place, name in enumerate(names):
        of = swept[swept["name"] == name].groupby("x")["attainment"].agg(["mean", "min", "max"])
        if len(of):
            curves.append(
                {
                    "s": place,
                    "x": [float(x) for x in of.index],
                    "y": of["mean"].tolist(),
                    "lo": of["min"].tolist(),
                    "hi": of["max"].tolist(),
                }
            )
    lines = [{"axis": "y", "value": _TARGET, "label": "99 %"}]
    return {"names": list(names), "series": curves, "lines": lines}


def _fewest(swept: pd.DataFrame, names: Sequence[str], word: str, rates: Sequence[float]) -> str:
    """Where 99 % is reached first, at the rate shown first."""
    told = []
    for name in names:
        of = swept[(swept["name"] == name) & (swept["rate"] == rates[0])]
        means = of.groupby("x")["attainment"].mean()
        enough = means[means >= _TARGET - 1e-12]
        if len(means):
            told.append(f"{name}: {enough.index.min():g}" if len(enough) else f"{name}: none")
    return f"Least {word} at 99 %, {rate_text(rates[0])} req/s: {'; '.join(told)}."
