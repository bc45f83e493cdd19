"""What becomes a facet and what a series, by hand-made cells."""

import pandas as pd
import pytest

from slo_bench.harness.results.read_run import read_runs
from slo_bench.reports.figures.facets import (
    Division,
    abbreviated,
    division,
    facet_noun,
    facets_of,
    full_names,
)
from slo_bench.reports.figures.levels import combine, with_series

LONG = [f"mix(chat=sharegpt:{n},code=azure-code:{10 - n})" for n in (1, 5, 9)]


def cells_of(systems=("a", "b"), **axes):
    """A cell for each system and combination of the axes."""
    points = [{}]
    for axis, values in axes.items():
        points = [{**point, axis: value} for point in points for value in values]
    rows = [
        {
            "system": system, "backend": "simulated", "workload": "w", "model": "m", "gpu": "g",
            "gpus": 1.0, "rate_rps": 1.0, "seed": 0, **point, "requests": 10.0,
            "attainment": 1.0, "valid": True,
        }
        for system in systems
        for point in points
    ]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (cells_of(), Division((), ())),
        (cells_of(model=["x", "y"]), Division(("model",), ())),
        (cells_of(router=["x", "y"]), Division((), ("router",))),
        (cells_of(workload=["x", "y"], **{"a.k": ["1", "2"]}), Division(("workload",), ("a.k",))),
        (cells_of(model=["x", "y"], slo=["s", "t"]), Division(("model", "slo"), ())),
        # One series in each facet: then there is nothing to compare in any.
        (cells_of("a", model=["x", "y"]), Division((), ("model",))),
        # More series than colours: setups make facets, parameters never.
        (cells_of(pp=list("123"), **{"a.k": list("1234")}), Division(("pp",), ("a.k",))),
        (cells_of("a", **{"a.k": list("123456789")}), Division((), ("a.k",))),
        # The number of GPUs follows from another axis, and is left out.
        (cells_of(tp=["1", "2"]).assign(gpus=[1.0, 2.0, 1.0, 2.0]), Division((), ("tp",))),
        # A GPU for each model: that says nothing more.
        (
            cells_of(model=["x", "y"]).assign(gpu=["g", "h", "g", "h"]),
            Division(("model",), ()),
        ),
        (
            cells_of(model=["x", "y"]).assign(backend=["simulated", "vllm", "simulated", "vllm"]),
            Division(("model",), ("backend",)),
        ),
    ],
)
def test_division_into_facets_and_series(cells, expected):
    assert division(cells) == expected


def test_facets_are_ordered_as_their_settings():
    cells = cells_of(prompt_tokens=["7", "5"], model=["y", "x"])
    assert facets_of(with_series(cells)) == [
        "y · prompt_tokens 7",
        "y · prompt_tokens 5",
        "x · prompt_tokens 7",
        "x · prompt_tokens 5",
    ]
    assert facet_noun(cells) == "case"
    assert facet_noun(cells_of(model=["x", "y"])) == "model"


def test_parameter_is_named_only_for_its_system():
    cells = cells_of(**{"a.k": ["1", "2"]})
    assert list(with_series(cells)["series"]) == ["a · k 1", "a · k 2", "b", "b"]


def test_abbreviated_facets_have_their_full_names():
    cells = cells_of(workload=LONG)
    assert facets_of(with_series(cells)) == [f"chat:code {n}:{10 - n}" for n in (1, 5, 9)]
    assert abbreviated(cells) == dict(zip(facets_of(with_series(cells)), LONG, strict=True))
    letters = cells_of(workload=["x" * 99, "y" * 99])
    assert facets_of(with_series(letters)) == ["workload A", "workload B"]
    assert abbreviated(cells_of(model=["x", "y"])) == {}


def test_full_names_are_distinct_over_facets():
    cells = with_series(cells_of(model=["x", "y"]))
    assert set(full_names(cells)) == {"x · a", "x · b", "y · a", "y · b"}
    assert list(full_names(with_series(cells_of()))) == ["a", "b"]


def test_joined_runs_keep_their_facets(make_run):
    axes = {"model": ["x", "y"]}
    first, second = (make_run(n, axes=axes, requests=20, rates=[1.0]) for n in ("one", "two"))
    cells = combine(read_runs([first, second]))
    assert facets_of(cells) == ["x", "y"]
    assert set(cells["series"]) == {f"{s} · {r}" for s in ("vllm", "orca") for r in ("one", "two")}
    plain = make_run("plain", axes={"arrivals": ["s", "t"]}, requests=20, rates=[1.0])
    both = combine(read_runs([first, plain]))
    assert "llama-3.1-8b · arrivals s" in facets_of(both)
    assert "x · no arrivals" in facets_of(both)
