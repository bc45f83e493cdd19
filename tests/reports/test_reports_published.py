"""Published results beside ours: what is compared, how it is judged, what is refused."""

from __future__ import annotations

import itertools
import math
import re
import tomllib

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.harness.experiments.config.experiment_file import read_toml
from slo_bench.harness.experiments.suite_files import suites
from slo_bench.reports.pages.published import Finding, JudgedTable, finding
from slo_bench.reports.pages.published_table import (
    SHIPPED,
    PublishedRow,
    PublishedTable,
    figure_text,
    load_published,
)
from slo_bench.reports.pages.verdicts import HOLDS, Interval, judgement, verdict
from slo_bench.workloads.errors import FileFormatError, UnknownNameError

SETTINGS = {"host_s": 0.03, "requests": 100, "parameters": {"a": {"cap": 8}}}


def run(**values):
    """Cells of `a` (0.8, 0.9, 0.85) and `b` (0.4, 0.5, 0.45), three seeds at 1 req/s."""
    shares = {"a": [0.8, 0.9, 0.85], "b": [0.4, 0.5, 0.45]}
    rows = [
        {"system": system, "workload": "w", "model": "m", "gpu": "g", "gpus": 1.0,
         "backend": "simulated", "rate_rps": 1.0, "seed": float(seed), "cap": "64", "own": "",
         "requests": 100.0, "attainment": share, "valid": True, "stationary": True}
        for system, of_system in shares.items()
        for seed, share in enumerate(of_system)
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(**values)


def row(published=85.0, **fields):
    return PublishedRow(
        what="what", published=published, **{"column": "attainment", "scale": 100.0, **fields}
    )


A = {"where": {"system": "a"}}
AGAINST_B = A | {"than": {"system": "b"}}


def judge(published_row, cells=None, knee=2.0):
    return finding(published_row, run() if cells is None else cells, SETTINGS, knee)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (A, "85.0 ± 12.4"),  # 4.303 · 5 / √3
        (A | {"where": {"system": "a", "cap": 64, "rate_rps": 1}}, "85.0 ± 12.4"),
        (A | {"where": {"system": "a", "own": ""}}, "85.0 ± 12.4"),
        (AGAINST_B | {"by": "difference"}, "+40.0 ± 0.00"),  # seed by seed
        (AGAINST_B | {"by": "ratio", "scale": 1.0}, "1.90 ± 0.25"),
        (AGAINST_B | {"by": "reduction", "scale": 1.0}, "-0.90 ± 0.25"),
        (A | {"unit": "%"}, "85.0 ± 12.4 %"),
    ],
)
def test_judge_gives_our_value_as_text(fields, text):
    assert judge(row(**fields)).text == text


def test_judge_of_a_row_without_a_column_is_not_run():
    assert judge(row(column=None)) == Finding("not run")
    judged = judge(row(where={"system": "c"}))
    assert judged.verdict == "not run"
    assert judged.remarks == ("no valid cell of c",)


def test_judge_ignores_invalid_cells():
    judged = judge(row(**A), run(valid=[False, True, True, True, True, True]))
    assert (judged.verdict, judged.text) == ("undecided", "87.5")  # two seeds
    assert "2 of 3 seeds have a value" in judged.remarks


def test_judge_names_seeds_without_a_value():
    judged = judge(row(**A), run(attainment=[0.8, math.nan, 0.85, 0.4, 0.5, 0.45]))
    assert (judged.text, judged.remarks[-1]) == ("82.5", "2 of 3 seeds have a value")


@pytest.mark.parametrize(
    ("where", "remark"),
    [
        ({"gpu": "h"}, "gpu: h is needed, the run has g"),
        ({"rate_rps": "knee"}, "rate_rps: 2 is needed, the run has 1"),
        ({"host_s": 0.1}, "host_s: 0.1 is needed, the run has 0.03"),
        ({"a.cap": 10}, "a.cap: 10 is needed, the run has 8"),
        ({"cap": 128}, "cap: 128 is needed, the run has 64"),
        ({"nothing": 1}, "nothing: 1 is needed, the run has none"),
    ],
)
def test_judge_of_another_setup_names_the_setting(where, remark):
    judged = judge(row(where={"system": "a", **where}))
    assert (judged.verdict, judged.remarks) == ("another set-up", (remark,))
    assert judged.text == "85.0 ± 12.4"  # what was run is still shown


def test_judge_of_equal_settings_has_no_remarks():
    where = {"system": "a", "host_s": 0.03, "a.cap": 8, "requests": 100, "gpu": "g"}
    assert judge(row(where=where)).remarks == ("about 20 seeds would decide",)


@pytest.mark.parametrize(
    ("slo", "same"), [("tpot=0.15, ttft=1.0", True), ("ttft=2,tpot=0.15", False), ("?", False)]
)
def test_judge_compares_slos_by_meaning(slo, same):
    judged = judge(row(where={"system": "a", "slo": "ttft=1,tpot=0.15"}), run(slo=slo))
    assert (judged.verdict != "another set-up") == same


def test_judge_does_not_average_over_an_axis():
    cells = pd.concat([run(), run(cap="128")])
    judged = judge(row(**A), cells)
    assert (judged.verdict, judged.text) == ("not unique", "–")
    assert judged.remarks == ("the run has several: cap 64, 128",)
    assert judge(row(where={"system": "a", "cap": 128}), cells).verdict != "not unique"


def test_judge_best_of_chooses_on_each_side():
    better_b = run(cap="128", attainment=[0.5, 0.5, 0.5, 0.7, 0.8, 0.75])
    judged = judge(
        row(**AGAINST_B, by="difference", best_of=("cap",)), pd.concat([run(), better_b])
    )
    assert judged.text == "+10.0 ± 0.00"
    assert judged.remarks == ("best of 2: cap 64", "best of 2: cap 128")


def test_judge_finds_the_highest_rate_that_reaches_a_share():
    share = [0.995] * 3 + [0.9] * 3
    cells = pd.concat([run(attainment=share), run(rate_rps=2.0), run(rate_rps=0.5, attainment=1.0)])
    highest = row(1.0, where={"system": "a"}, column="rate_rps", reaches=0.99, scale=1.0)
    assert judge(highest, cells) == Finding("reproduced", "1.00 ± 0.00")
    ratio = row(2.0, **AGAINST_B, column="rate_rps", reaches=0.99, scale=1.0)
    assert judge(ratio, cells).text == "2.00 ± 0.00"
    back = judge(highest, pd.concat([cells, run(rate_rps=3.0, attainment=1.0)]))
    assert back.text == "1.00 ± 0.00"
    none = judge(row(where={"system": "b"}, column="rate_rps", reaches=0.99), run())
    assert none.remarks == ("no rate_rps that was run reaches 99 %",)
    assert none.verdict == "undecided"


def test_judge_marks_cells_not_stationary():
    drifting = run(stationary=[True, True, False, True, True, True])
    remark = "overloaded: the figure depends on the run's length"
    assert judge(row(**AGAINST_B), drifting).remarks == (remark,)
    assert judge(row(where={"system": "b"}), drifting).remarks == ()


def test_judge_divides_a_column_by_another():
    cells = run(finished=50.0)
    assert (
        judge(row(2.0, column="requests", per="finished", scale=1.0, **A), cells).text
        == "2.00 ± 0.00"
    )
    lacking = judge(row(2.0, column="requests", per="nothing", scale=1.0, **A), cells)
    assert lacking.verdict == "not run"


def test_judge_of_a_ratio_to_zero_has_a_remark():
    judged = judge(row(**AGAINST_B), run(attainment=[1.0, 1.0, 1.0, 0.0, 0.5, 0.5]))
    assert judged.remarks == ("what it is compared with is 0",)


@pytest.mark.parametrize(
    ("published", "mean", "half", "null", "expected"),
    [
        (50.0, 53, 3, None, "reproduced"),  # meets 50 ± 5
        (50.0, 57, 3, None, "reproduced"),
        (50.0, 59, 3, None, "not reproduced"),
        (50.0, 50, 6, None, "undecided"),  # wider than ± 5
        (50.0, 50, math.inf, None, "undecided"),
        ([40.0, 60.0], 63, 3, None, "reproduced"),
        (19.1, 40, 5, 0.0, "same order"),
        (19.1, 20, 5, 0.0, "same order"),
        (19.1, 20, 25, 0.0, "undecided"),
        (19.1, 1, 3, 0.0, "not reproduced"),
        (19.1, -20, 3, 0.0, "not reproduced"),
        (0.5, 0.8, 0.1, 1.0, "same order"),
        ("> 0", 5, 3, 0.0, "same order"),
        ("> 0", 5, 6, 0.0, "undecided"),
        ("> 0", -5, 3, 0.0, "not reproduced"),
        ("> 0", 0, 0, 0.0, "not reproduced"),  # equal is not more
        ("≥ 99", 99, 0, None, "reproduced"),
        ("≥ 99", 99.5, 0.2, None, "reproduced"),
        ("< 99", 99.5, 0.2, None, "not reproduced"),
        (1.27, 1.12, 0.02, 1.0, "same order"),  # a comparison: 1.27 ± 0.027
        (1.27, 1.25, 0.02, 1.0, "reproduced"),
        (1.09, 0.98, 0.01, 1.0, "not reproduced"),
        ([1.0, 3.9], 0.95, 0.03, 1.0, "not reproduced"),  # the other direction
        ([1.0, 3.9], 1.05, 0.03, 1.0, "reproduced"),
        ([1.1, 1.2], 1.9, 0.3, 1.0, "same order"),
        ("not given", 1, 0, None, "no figure published"),
    ],
)
def test_verdict_of_intervals(published, mean, half, null, expected):
    by = {None: {}, 0.0: AGAINST_B | {"by": "difference"}, 1.0: AGAINST_B | {"scale": 1.0}}[null]
    published_row = row(published, **by)
    assert verdict(Interval(mean, half), published_row.figure, published_row.null) == expected


def test_claim_about_equal_needs_a_tolerance():
    published_row = row("≈ 1", **AGAINST_B, scale=1.0, tolerance=0.1)
    assert verdict(Interval(1.05, 0.01), published_row.figure, published_row.null) == "reproduced"
    assert (
        verdict(Interval(1.5, 0.01), published_row.figure, published_row.null) == "not reproduced"
    )


@pytest.mark.parametrize(
    ("attainment", "text", "expected"),
    [
        ([0.8, 0.9, 0.85, 0.4, 0.5, 0.45], "85.0 > 45.0 %", "same order"),
        ([0.4, 0.5, 0.45, 0.8, 0.9, 0.85], "45.0, 85.0 %", "not reproduced"),
        ([0.8, 0.4, 0.6, 0.5, 0.5, 0.7], "60.0 > 56.7 %", "undecided"),
    ],
)
def test_judge_of_an_order(attainment, text, expected):
    published_row = row("a > b", order=({"system": "a"}, {"system": "b"}), unit="%")
    judged = judge(published_row, run(attainment=attainment))
    assert (judged.verdict, judged.text) == (expected, text)


def joined(*runs):
    return pd.concat(runs, ignore_index=True)


NINE = joined(run(), run(seed=[3.0, 4.0, 5.0] * 2), run(seed=[6.0, 7.0, 8.0] * 2))


def test_a_set_of_seeds_that_disagrees_leaves_a_row_undecided():
    """Seeds 2, 5, 8 are a set of their own: their mean is below what the claim allows."""
    points = [50.0, 50.0, 45.0] * 3
    cells = NINE.assign(attainment=[*(p / 100 for p in points[:3]), 0.4, 0.4, 0.4] * 3)
    judged = judge(row(52.0, **A), cells)
    assert judged.verdict == "undecided"
    assert judged.remarks[0].startswith(
        "three sets of seeds say: reproduced, reproduced, not reproduced; about "
    )
    alike = cells.assign(attainment=[0.50, 0.51, 0.49, 0.4, 0.4, 0.4] * 3)
    assert judge(row(52.0, **A), alike) == Finding("reproduced", "50.0 ± 0.67")


@given(
    values=st.lists(st.floats(0.01, 2), min_size=3, max_size=12),
    published=st.sampled_from([1.27, 0.5, [1.1, 1.2], "> 1", "≈ 1"]),
)
def test_a_verdict_is_that_of_every_set_of_seeds(values, published):
    published_row = row(published, **AGAINST_B, scale=1.0)

    def decide(intervals):
        return verdict(intervals[0], published_row.figure, published_row.null)

    judged = judgement([values], decide)
    holds = HOLDS.get(judged.verdict)
    if holds is not None:
        means = [sum(part) / len(part) for part in (values[0::3], values[1::3], values[2::3])]
        assert {HOLDS[decide([Interval(mean, 0)])] for mean in means} == {holds}
    else:
        assert "would decide" in judged.remark or "would not decide" in judged.remark


def test_a_verdict_that_flips_with_an_assumed_setting_depends_on_it():
    better_b = run(cap="128", attainment=[0.4, 0.5, 0.45, 0.8, 0.9, 0.85])
    fields = {"where": {"system": "a", "cap": 64}, "than": {"system": "b"}, "by": "difference"}
    published_row = row("> 0", **fields, vary=("cap",))
    judged = judge(published_row, joined(run(), better_b))
    assert judged.verdict == "depends on what is assumed"
    assert judged.remarks == ("depends on cap: 64 same order; 128 not reproduced, -40.0 ± 0.00",)
    steady = joined(run(), run(cap="128"))
    assert judge(published_row, steady) == Finding("same order", "+40.0 ± 0.00")


def test_a_varied_row_says_where_its_comparison_equals_the_published_figure():
    """`a` leads by 40 points at cap 64 and by 20 at 128: by 30 at 96, in every seed."""
    cells = joined(run(), run(cap="128", attainment=[0.8, 0.9, 0.85, 0.6, 0.7, 0.65]))
    fields = {"where": {"system": "a", "cap": 64}, "than": {"system": "b"}, "by": "difference"}
    judged = judge(row(30.0, **fields, vary=("cap",)), cells)
    assert judged == Finding("same order", "+40.0 ± 0.00", ("equals +30.0 at cap 96 (96 to 96)",))
    assert judge(row(50.0, **fields, vary=("cap",)), cells).remarks == ()


def test_a_setting_that_one_side_lacks_is_varied_on_the_other_alone():
    of_b = ["", "", "", "64", "64", "64"]
    cells = joined(run(own=of_b), run(own=["", "", "", "9", "9", "9"])[3:])
    fields = {"where": {"system": "a", "own": ""}, "than": {"system": "b", "own": 64}}
    judged = judge(row("> 0", **fields, by="difference", vary=("own",)), cells)
    assert judged == Finding("same order", "+40.0 ± 0.00")
    worse = cells.assign(attainment=[0.8, 0.9, 0.85, 0.4, 0.5, 0.45, 0.9, 1.0, 0.95])
    judged = judge(row("> 0", **fields, by="difference", vary=("own",)), worse)
    assert judged.remarks == ("depends on own: 64 same order; 9 not reproduced, -10.00 ± 0.00",)


def test_a_parameter_at_its_default_is_varied_on_the_side_of_its_system():
    of_a = ["", "", "", "", "", ""]
    cells = joined(run(), run(attainment=[0.3, 0.4, 0.35] * 2)[:3]).assign(
        **{"a.cap": [*of_a, "64", "64", "64"]}
    )
    fields = {"where": {"system": "a", "a.cap": ""}, "than": {"system": "b"}, "by": "difference"}
    judged = judge(row("> 0", **fields, vary=("a.cap",)), cells)
    remark = "depends on a.cap: default same order; 64 not reproduced, -10.0 ± 0.00"
    assert judged.remarks == (remark,)


def test_the_weaker_verdict_stands_where_an_assumed_setting_weakens_it():
    cells = joined(run(attainment=[1.0, 1.0, 1.0, 0.5, 0.5, 0.5]), run(cap="128"))
    fields = {"where": {"system": "a", "cap": 64}, "than": {"system": "b"}, "scale": 1.0}
    assert judge(row(2.0, **fields), cells).verdict == "reproduced"
    assert judge(row(2.0, **fields, vary=("cap",)), cells).verdict == "same order"


def test_systems_that_are_equal_in_every_cell_are_one_policy():
    twins = run(attainment=[0.8, 0.9, 0.85, 0.8, 0.9, 0.85])
    against = {"than": {"system": "b"}, "by": "difference", "tolerance": 1.0}
    assert judge(row("≈ 0", **A, **against), twins).verdict == "same policy here"
    at_one = {"system": "a", "rate_rps": 1}
    apart_elsewhere = joined(twins, run(rate_rps=2.0))
    assert judge(row("≈ 0", where=at_one, **against), apart_elsewhere).verdict == "reproduced"


@pytest.mark.parametrize("share", [0.0, 1.0, 0.101])
def test_a_load_at_which_both_sides_have_the_same_share_tells_nothing(share):
    cells = joined(run(attainment=share), run(rate_rps=2.0))
    fields = {"where": {"system": "a", "rate_rps": 1}, "than": {"system": "b"}, "by": "difference"}
    judged = judge(row("> 0", **fields), cells)
    assert judged == Finding("tells nothing", "+0.00 ± 0.00", ("the same share in every seed",))
    order = ({"system": "a"}, {"system": "b"})
    judged = judge(row("a > b", where={"rate_rps": 1}, order=order), cells)
    assert judged.verdict == "tells nothing"
    assert judge(row("≈ 0", **fields, tolerance=1.0), cells).verdict == "reproduced"
    apart = joined(run(attainment=[share, share, share, share, share, 0.5]), run(rate_rps=2.0))
    assert judge(row("> 0", **fields), apart).verdict != "tells nothing"


@pytest.mark.parametrize("published", [1.0, "> 1", [0.9, 1.1]])
def test_an_interval_that_is_no_number_leaves_a_row_undecided(published):
    endless = judge(
        row(published, **AGAINST_B, scale=1e308), run(attainment=[1e5] * 3 + [1e-5] * 3)
    )
    assert endless.verdict == "undecided"


def test_unequal_allowances_are_named_below_the_table():
    rows = (row(**AGAINST_B, unequal="a rejects, b may not"),) * 2
    table = PublishedTable("x", rows, sources={"gpu": "assumed"})
    assert table.sources_text == "Assumed: gpu. Unequal as published: a rejects, b may not."


def test_headline_counts_verdicts():
    rows = (row(**A), row(column=None), row(**AGAINST_B, by="difference"))
    table = JudgedTable(
        PublishedTable("x", rows), tuple(judge(published_row) for published_row in rows), None
    )
    assert table.headline == "3 rows: 1 same order, 1 undecided, 1 not run"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(51.84, "%", "51.8 %"), (1130, "", "1,130"), (1.234, "×", "1.23 ×"), (-3, "", "-3.00")],
)
def test_figure_text_of_values_and_units(value, unit, text):
    assert figure_text(value, unit) == text


TABLES = [path.stem for path in SHIPPED.glob("*.toml")]
OF_OURS = re.compile(
    r"\b(ours?|here|we|us|holds?|reproduces?d?|ahead|behind|wins?|loses?|beaten|collapses)\b", re.I
)
A_RESULT = re.compile(r"\d\s*(%|points?|×|times|req/s)", re.I)
OF_THE_PAPER = re.compile(r"\b(published|paper|thesis|printed|fig|table)\b|§", re.I)
SET_UP = re.compile(r"^(chosen|sLO|weights were tuned)\b", re.I)


def of_ours(text):
    """Sentences on our results: by a word, or by a figure that is not the paper's."""
    sentences = re.split(r"(?<=[a-z0-9)]\.)(?<!Fig\.)\s+", text)
    return [
        sentence
        for sentence in sentences
        if OF_OURS.search(sentence)
        or (
            A_RESULT.search(sentence)
            and not OF_THE_PAPER.search(sentence)
            and not SET_UP.match(sentence)
        )
    ]


@pytest.mark.parametrize(
    "sentence",
    [
        "Ours: at scale 5 both pass at 4 and fail at 6.",
        "The order of Table 3-2 holds at 2 req/s.",
        "At 150 % it turns.",
        "Two GPUs for embeddings are more than they need and one is too few (29 %).",
        "Past the knee; up to 2.25 req/s the two LP instances are 3 to 5 points behind.",
    ],
)
def test_of_ours_finds_sentences_about_our_results(sentence):
    assert of_ours(f"Published: 51 % at 2 req/s. {sentence}")


@pytest.mark.parametrize("name", TABLES)
def test_published_texts_do_not_state_our_results(name):
    """What they say of our results would stay as it is when results change."""
    raw = tomllib.loads((SHIPPED / f"{name}.toml").read_text())
    texts = [raw["title"], raw["note"], *(raw_row.get("note", "") for raw_row in raw["row"])]
    assert [sentence for text in texts for sentence in of_ours(text)] == []


@pytest.mark.parametrize("name", TABLES)
def test_shipped_published_tables_are_complete(name):
    table = load_published(name)
    assert table.paper
    for published_row in table.rows:
        assert published_row.note or published_row.column, published_row.what
        assert published_row.column is None or published_row.where, published_row.what


def test_suites_name_existing_published_tables():
    named = [read_toml(path)[0].get("published") for path in suites().values()]
    assert "uellm-at-once" in named
    for name in filter(None, named):
        load_published(str(name))


EACH = """title = "x"
[[row]]
what = "{mix} against {rival}"
published = "> 0"
column = "attainment"
where = { system = "edf" }
claim = "more than {rival}"
[row.each.mix]
"1:9" = { workload = "collocated(1:9)" }
"3:7" = { workload = "collocated(3:7)" }
[row.each.rival]
vLLM = { than = { system = "vllm" } }
"""


def test_each_makes_a_row_of_every_combination(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(EACH)
    rows = load_published(str(path)).rows
    assert [r.what for r in rows] == ["1:9 against vLLM", "3:7 against vLLM"]
    assert rows[0].where == {"system": "edf", "workload": "collocated(1:9)"}
    assert [r.than for r in rows] == [{"system": "vllm"}] * 2
    assert {r.claim for r in rows} == {"more than vLLM"}


OF_THE_RUN = {"name", "published", "seeds", "seed", "records", "tuning", "combinations"}


@pytest.mark.parametrize("name", TABLES)
def test_claims_say_where_every_setting_is_from(name):
    table = load_published(name)
    if not any(published_row.claim for published_row in table.rows):
        return
    for path in suites().values():
        settings = read_toml(path)[0]
        if settings.get("published") == name:
            names: set[str] = set()
            for section in (settings, *settings.pop("variants", {}).values()):
                of_systems = section.pop("parameters", {})
                names |= {f"server.{key}" for key in section.pop("server", {})}
                names |= section.keys() - OF_THE_RUN
                names |= {f"{s}.{key}" for s, values in of_systems.items() for key in values}
            if "parameters" in table.sources:  # of all that no source of its own names
                unnamed = {name for name in names if "." in name} - table.sources.keys()
                names = (names - unnamed) | {"parameters"}
            assert names == table.sources.keys(), path.stem


ROW = "title = 'x'\n[[row]]\nwhat = 'y'\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("title = 'x'", r"needs a title and \[\[row\]\]s"),
        ("[[row]]\nwhat = 'x'\npublished = 1", "needs a title"),
        (ROW, "row 1: needs `what` and `published` .*mine.toml, line 2"),
        (ROW + "published = 1\nunits = 's'", "row 1: unknown key 'units'; did you mean unit"),
        (ROW + "published = 1\nby = 'half'", "by must be ratio, reduction, difference but is"),
        (ROW + "published = '1.74'", "published must be a number without quotes but is '1.74'"),
        (ROW + "published = [1]", "published must be a number, a range"),
        (ROW + "published = nan", "published must be a number, a range"),
        (ROW + "published = 1\nscale = inf", "scale must be a number but is inf"),
        (ROW + "published = 1\nsetup = 'fair'\nunequal = 'a'", "unequal goes with the authors'"),
        ("silent = { a = 3 }\n" + ROW + "published = 1", "silent must be a table of texts"),
        (ROW + "published = 1\nwhere = 3", "where must be a table of settings but is 3"),
        (ROW + "published = 1\nwhere = { gpu = ['a'] }", "where: gpu must be one value"),
        (ROW + "published = 1\nwhere = { gpuu = 'a' }", "unknown setting in where 'gpuu'; did you"),
        (ROW + "published = 1\nscale = 'x'", "scale must be a number"),
        (ROW + "published = 1\norder = [{}]", "order must be a list of at least two"),
        (ROW + "published = 1\nbest_of = 'gpu'", "best_of must be a list of columns"),
        (ROW + "published = 1\nvary = 'gpu'", "vary must be a list of columns"),
        (
            ROW + "published = 1\nvary = ['gpu']",
            "vary needs the value at which the row stands",
        ),
        (ROW + "published = 1\nsetup = 'best'", "setup must be published, fair but is"),
        (ROW + "published = 1\n[row.each]\nmix = 3", "each must be tables of settings by label"),
        (
            ROW + "published = 1\n[row.each.mix]\na = 3",
            "each must hold tables of settings but has 3",
        ),
        ("sources = { gpu = 'guess' }\n" + ROW + "published = 1", "gpu must begin with printed"),
        ("sources = { gpuu = 'printed' }\n" + ROW + "published = 1", "setting in sources 'gpuu'"),
        ("note = 3\n" + ROW + "published = 1", "note must be text but is 3"),
        ("notes = 'x'\n" + ROW + "published = 1", "did you mean note"),
        ("title = ", "is not TOML"),
    ],
)
def test_published_table_with_an_error_is_refused(text, problem, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=problem):
        load_published(str(path))


def test_unknown_published_table_is_refused_with_a_suggestion():
    with pytest.raises(UnknownNameError, match="did you mean uellm"):
        load_published("uelm")


def test_report_shows_the_published_table(tmp_path):
    from slo_bench.harness.experiments.experiment import Experiment
    from slo_bench.reports.pages.run_page import write_report

    table = tmp_path / "mine.toml"
    table.write_text(
        "title = 'A paper & more'\npaper = 'prism'\n"
        "[[row]]\nwhat = 'Within SLO'\npublished = 99\nunit = '%'\n"
        "column = 'attainment'\nscale = 100\nwhere = { system = 'fifo', model = 'x' }\n"
        "note = 'Load <unknown>'\n"
        "[[row]]\nwhat = 'Elsewhere'\npublished = '<9>'\nnote = 'Later'\n"
    )
    experiment = Experiment(
        published=str(table), systems=["fifo"], workload="alpaca", slo="e2e=100", requests=20,
        rates=[1], seeds=1, records="csv",
    )  # fmt: skip
    result = experiment.run(tmp_path / "run", jobs=1)
    page = write_report([result.folder], tmp_path / "report.html").read_text()
    assert "A paper &amp; more" in page
    assert "<td>99.0 %</td><td>100 %</td>" in page
    assert "2 rows: 1 another set-up, 1 not run." in page
    assert "model: x is needed, the run has llama-3.1-8b" in page
    assert "Bandwidth of a host link, 11.4 GB/s" in page  # fitted to that paper
    assert "Load &lt;unknown&gt;" in page
    assert "<td>&lt;9&gt;</td>" in page


AXES = {"rate_rps": "rates", "load_factor": "load_factors", "system": "systems"}


@pytest.mark.parametrize("path", suites().values(), ids=lambda path: path.stem)
def test_suite_runs_every_pinned_value_of_its_table(path):
    """Each pin is a value that the suite runs; else the suite's own report says another set-up."""
    settings = read_toml(path)[0]
    if "published" not in settings:
        pytest.skip("no table")
    for published_row in filter(
        lambda row: row.column, load_published(str(settings["published"])).rows
    ):
        pins = (published_row.where, published_row.than or {}, *published_row.order)
        for key, pinned in itertools.chain(*(side.items() for side in pins)):
            if key == "variant":
                assert pinned in settings["variants"], published_row.what
            elif pinned not in ("knee", ""):
                sections = (settings, *settings.get("variants", {}).values())
                values = itertools.chain(*(values_of(section, key) for section in sections))
                assert any(same(v, pinned) for v in values), f"{published_row.what}: {key}"


def values_of(settings, key):
    value = settings.get("parameters", {}) if "." in key else settings
    for part in AXES.get(key, key).split("."):
        value = value.get(part, {})
    return value if isinstance(value, list) else [] if value == {} else [value]


def same(value, pinned):
    try:
        return float(value) == float(pinned)
    except ValueError:
        return value == pinned
