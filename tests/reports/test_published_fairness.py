"""Verdicts on claims: who may drop requests, and whether the mechanisms under test act at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pytest

from slo_bench.harness.experiments.config.schema import parameter_combinations
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.experiments.suite_files import suites
from slo_bench.harness.policies.systems import system
from slo_bench.harness.results.read_run import read_run
from slo_bench.reports.figures.levels import combine
from slo_bench.reports.pages.published import chosen_cells
from slo_bench.reports.pages.published_table import PublishedRow, load_published
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.parsing import parse_toml

KEPT = Path(__file__).parents[2] / "docs" / "papers" / "results"


def tables_with_claims(named):
    """(Suite, table) for each experiment file whose table has claims; `named` maps both."""
    tables = {name: parse_toml(path.read_text()).get("published") for name, path in named.items()}
    return [
        (name, str(table))
        for name, table in tables.items()
        if table and any(row.claim for row in load_published(str(table)).rows)
    ]


SUITES = tables_with_claims(suites())
RESULTS = tables_with_claims(
    {path.parent.name: path.parent / "experiment.toml" for path in sorted(KEPT.glob("*/cells.csv"))}
)


class Sides:
    """The systems that sides of rows stand for, as an experiment sets their parameters."""

    def __init__(self, experiment):
        self.variants = experiment.each_variant()
        self.by_pins = {}

    def systems(self, side):
        """Those with every combination of parameters that the pins of the side allow."""
        pins = {
            key: value for key, value in side.items() if key in ("system", "variant") or "." in key
        }
        key = tuple(pins.items())
        if key not in self.by_pins:
            self.by_pins[key] = list(self._systems(pins))
        return self.by_pins[key]

    def _systems(self, pins):
        named = [pins["variant"]] if "variant" in pins else self.variants
        for schema in (self.variants[name] for name in named):
            for name in {pins.get("system", name) for name in schema.systems} & {*schema.systems}:
                for parameters in parameter_combinations(schema, name):
                    pinned = (pins.get(f"{name}.{key}", v) for key, v in parameters.items())
                    if [*map(text, pinned)] == [*map(text, parameters.values())]:
                        yield system(name).with_parameters(**parameters)

    def unequal(self, row):
        """The sides that may drop no request although ours may; of an order, if any other may."""
        drops = [any(s.drop_rule for s in self.systems(side)) for side in row.sides]
        ours = any(drops) if row.order else drops[0]
        return [side for side, may in zip(row.sides, drops, strict=True) if ours and not may]


def text(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value).lower()


def short(side):
    return side.get("system") or side.get("variant") or side


@pytest.mark.parametrize(("suite", "table"), SUITES)
def test_rivals_may_drop_where_ours_may_or_the_row_says_that_it_is_unequal(suite, table):
    of_suite = Sides(Experiment.suite(suite))
    problems, unequal = [], set()
    for row in load_published(table).rows:
        if row.claim and (sides := of_suite.unequal(row)):
            unequal.add(row.unequal)
            if not row.unequal:
                may_not = ", ".join(str(short(side)) for side in sides)
                problems.append(f"{row.what!r} ({row.setup}): {may_not} may drop no request")
    remedy = f"name it in `unequal` of the row in {table}.toml, or compare with one that may"
    assert not problems, f"suite {suite}: {'; '.join(problems)}: {remedy}"
    declared = {row.unequal for row in load_published(table).rows if row.unequal}
    assert declared <= unequal, f"{table}.toml: `unequal` of rows whose sides may do the same"


@pytest.mark.parametrize(("suite", "table"), RESULTS)
def test_every_mechanism_under_test_acts_in_the_kept_results(suite, table):
    """Or the table says why, of a mechanism; of a system, why its counters were not kept."""
    run = read_run(KEPT / suite)
    settings, cells = parse_toml(run.experiment_toml), combine([run])
    of_suite = Sides(Experiment.load(KEPT / suite / "experiment.toml"))
    published = load_published(table)
    acts: dict[tuple[str, str], int] = {}  # by system and column: in how many cells
    for row in (row for row in published.rows if row.claim and row.column):
        side = {key: value for key, value in row.sides[0].items() if value != "knee"}
        try:
            of_row = chosen_cells(side, cells, settings)
        except SloBenchError as error:
            pytest.fail(f"suite {suite} has no cells of {row.what!r}, run it again: {error}")
        for tested in of_suite.systems(side):
            of_system = of_row[of_row["system"] == tested.name]
            for counter in tested.counters():
                n = int((pd.to_numeric(of_system[counter]) > 0).sum()) if counter in cells else 0
                key = tested.name, counter
                acts[key] = acts.get(key, 0) + n
    never, not_kept, reasons = set(), set(), set()
    for (name, counter), n in acts.items():
        mechanism = f"{name}.{counter.removeprefix('count_')}"
        reason = name if counter not in cells else mechanism
        if not n and reason in published.silent:
            reasons.add(reason)
        elif not n:
            (never if counter in cells else not_kept).add(mechanism)
    in_table = f"say why in [silent] of {table}.toml"
    assert not never, f"suite {suite}: never act in its claims: {sorted(never)}; {in_table}"
    again = f"scripts/paper_tables.py --suite {suite} keeps them; else name the system and"
    assert not not_kept, f"suite {suite}: no counters of {sorted(not_kept)}; {again} {in_table}"
    needless = published.silent.keys() - reasons
    assert not needless, f"[silent] of {table}.toml: {sorted(needless)} act, or no claim tests them"


def test_a_rival_that_must_serve_everything_is_unequal():
    of_suite = Sides(Experiment.suite("collocation"))
    row = PublishedRow(what="x", published="> 0", where={"system": "collocation"}, claim="y")
    for rival, sides in (("vllm", [{"system": "vllm"}]), ("vllm-drop", [])):
        assert of_suite.unequal(dataclasses.replace(row, than={"system": rival})) == sides
    pins = {"system": "collocation", "collocation.batch_texts": 53}
    assert [s.parameters()["batch_texts"] for s in of_suite.systems(pins)] == [53]
    assert of_suite.systems(pins | {"collocation.batch_texts": 54}) == []
