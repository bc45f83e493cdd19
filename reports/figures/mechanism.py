"""Figures of a system's mechanism: instances and models over time, waits by role, activations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .details import LevelDetail
from .figure import Axis, Figure, View, curve, rate_key
from .figures import curves_at_a_rate

Floats = NDArray[np.float64]

MOST_FIGURES = 4
"""Of a kind; the systems in which most happened have them."""

MOST_CURVES = 8
"""Instances or models in a figure: those that have most."""

_SHORTEST_S = 1e-4  # that a wait is shown with

_APART = {
    "load": (
        "Load of each instance",
        "U = C / Cmax + M / Mmax as the orchestrator measures it. Vertical lines: layers or heads "
        "have moved.",
        Axis("load U", "number"),
    ),
    "requests": (
        "Requests on each instance",
        "Waiting and running. Vertical lines: layers or heads have moved.",
        Axis("requests", "number"),
    ),
    "waiting": (
        "Queue of each instance",
        "Requests that wait.",
        Axis("requests waiting", "number"),
    ),
    "compute": (
        "Compute of each instance",
        "Tokens computed, of prompts and answers, as a share of what its GPUs compute in prompts.",
        Axis("arithmetic used", "percent"),
    ),
    "kv_cache_usage": (
        "KV memory of each instance",
        "KV blocks in use.",
        Axis("KV blocks in use", "percent", top=1.0),
    ),
    "memory": (
        "Memory of each device with an embedder",
        "KV, activations of embedding passes, and what neither holds.",
        Axis("memory for KV and activations", "percent", top=1.0),
    ),
    "acts": (
        "Acts of the mechanisms",
        "Acts a second of each mechanism; after the colon the reason, where there are several.",
        Axis("acts a second", "number"),
    ),
    "kv_gib": (
        "KV memory of each model",
        "All GPUs together.",
        Axis("KV memory, GiB", "number"),
    ),
    "lengths": (
        "Predicted lengths that were right",
        "Share of answers in the predicted bucket, as policies were told and as the network alone "
        "would have said, and in it or next to it. Vertical lines: what had come was taught.",
        Axis("share of answers", "percent"),
    ),
}


def figures(details: Sequence[LevelDetail], names: Sequence[str]) -> list[Figure]:
    """The figures that the levels of one facet give; none where all are of one instance."""
    drawn = [f for metric in _APART for f in _each_over_time(details, names, metric)]
    for figure in (_waits(details, names), _activations(details, names)):
        if figure is not None:
            drawn.append(figure)
    return drawn


def _each_over_time(
    details: Sequence[LevelDetail], names: Sequence[str], metric: str
) -> list[Figure]:
    """A figure a series, in which every instance or model has a curve."""
    title, note, axis = _APART[metric]
    having: dict[str, list[LevelDetail]] = {}
    for detail in details:
        apart = detail.mechanism.apart
        if metric in apart and not (metric == "requests" and "waiting" in apart):
            having.setdefault(detail.series, []).append(detail)
    busiest = sorted(
        having, key=lambda s: (-sum(len(d.mechanism.moved_s) for d in having[s]), names.index(s))
    )
    return [
        curves_at_a_rate(
            id=f"each-{metric.replace('_', '-')}-{names.index(series)}",
            title=f"{title}: {series}",
            note=f"{note} One seed; means over equal spans of time; the {MOST_CURVES} with most.",
            x=Axis("time since start", "duration"),
            y=axis,
            views={rate_key(d.rate_rps): _apart_view(d, metric) for d in having[series]},
        )
        for series in sorted(busiest[:MOST_FIGURES], key=names.index)
    ]


def _apart_view(detail: LevelDetail, metric: str) -> View:
    curves = detail.mechanism.apart[metric]
    busiest = sorted(curves, key=lambda entity: (-float(curves[entity][1].mean()), entity))[
        :MOST_CURVES
    ]
    shown = sorted(busiest)
    moved = [] if metric == "kv_gib" else detail.mechanism.moved_s
    return {
        "names": shown,
        "series": [curve(place, *curves[entity]) for place, entity in enumerate(shown)],
        "lines": [{"axis": "x", "value": at_s, "label": ""} for at_s in moved],
    }


def _waits(details: Sequence[LevelDetail], names: Sequence[str]) -> Figure | None:
    """The share of requests that began within a time, by the role of the instance that served."""
    if not any(len(d.waits) > 1 for d in details):
        return None
    views: dict[str, View] = {}
    for detail in sorted(details, key=lambda d: names.index(d.series)):
        view = views.setdefault(rate_key(detail.rate_rps), {"names": [], "series": [], "lines": []})
        for role, distribution in detail.waits.items():
            if len(distribution.value_s):
                # Waits of nothing at all cannot stand on a logarithmic axis.
                shown_s = np.maximum(distribution.value_s, _SHORTEST_S)
                view["series"].append(curve(len(view["names"]), shown_s, distribution.share))
                view["names"].append(f"{detail.series}: {role}" if role else detail.series)
    return curves_at_a_rate(
        id="waits",
        title="Waiting time by role",
        note="From arrival to the first batch, all seeds together, over the requests that ended "
        "on an instance of that role; a curve that ends below 100 % never served the rest.",
        x=Axis("wait", "seconds", scale="log"),
        y=Axis("requests within", "percent", top=1.0),
        views=views,
    )


def _activations(details: Iterable[LevelDetail], names: Sequence[str]) -> Figure | None:
    """The share of activations that took no longer than a time."""
    views: dict[str, View] = {}
    for detail in details:
        took_s = np.sort(np.array(detail.mechanism.activation_s))
        if len(took_s):
            share = np.arange(1, len(took_s) + 1) / len(took_s)
            view = views.setdefault(rate_key(detail.rate_rps), {"series": [], "lines": []})
            view["series"].append(curve(names.index(detail.series), took_s, share))
    if not views:
        return None
    return curves_at_a_rate(
        id="activations",
        title="Activation times",
        note="From the decision until the model serves, one seed; loads over the same host link "
        "follow each other.",
        x=Axis("until it serves", "seconds", scale="log"),
        y=Axis("activations within", "percent", top=1.0),
        views=views,
    )
