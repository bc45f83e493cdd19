"""Run folders against each other: what is matched, what stands in the way, what is said."""

import dataclasses
import io
import json

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from slo_bench import __version__
from slo_bench.reports.compare.comparing import (
    compare,
    judge_comparison,
    parse_regression,
    read_results,
)
from slo_bench.reports.compare.matching import match
from slo_bench.reports.compare.output import (
    comparison_json,
    comparison_page,
    comparison_text,
    write_comparison,
)
from slo_bench.reports.compare.results import NotComparableError, metrics_named
from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.request import Slo

TOML = 'arrivals = "poisson"\nrequests = 120\n'
SMALL = {"toml": TOML, "systems": ("vllm",), "rates": (3.0, 5.0), "seeds": 3}
BOTH = ("vllm", "orca")
METRICS = metrics_named("attainment,goodput,ttft_p50,tpot_p99")


@pytest.fixture
def make(make_run):
    """Run folders whose experiment is TOML of today."""

    def one(name, **settings):
        return make_run(name, **{**SMALL, **settings})

    return one


def slowed(folder, factor):
    """Every request of a run takes that much longer after its first token."""
    for path in (folder / "requests").iterdir():
        frame = pd.read_csv(path)
        decode_s = (frame["finish_s"] - frame["first_token_s"]) * factor
        frame["finish_s"] = frame["first_token_s"] + decode_s
        tpot = decode_s / (frame["output_tokens"] - 1).replace(0, np.nan)
        frame["slo_met"] = (frame["slo_met"].astype(bool) & ~(tpot > 0.06)).astype(int)
        frame.to_csv(path, index=False)
    return folder


def test_run_compared_with_its_copy_does_not_differ(make):
    a, b = (read_results(make(name, systems=BOTH)) for name in "ab")
    comparison = compare(a, b, metrics=METRICS)
    assert len(comparison.rows) == 2 * 2 * len(METRICS)
    assert {row.label for row in comparison.rows} == {"vllm", "orca"}
    assert all(row.paired and row.verdict == "none" and row.p_holm == 1 for row in comparison.rows)
    assert not comparison.obstacles
    assert judge_comparison(comparison, 0.0).passed


def test_compared_figures_equal_cells_csv(make):
    folder = make("a", systems=("vllm",), rates=(3.0,))
    comparison = compare(*[read_results(folder)] * 2, metrics=METRICS)
    cells = pd.read_csv(folder / "cells.csv")
    for row, column in zip(
        comparison.rows, ("attainment", "goodput_rps", "ttft_p50_s", "tpot_p99_s"), strict=True
    ):
        assert row.a == pytest.approx(cells[column].mean(), rel=1e-3)


def test_a_slower_candidate_fails_the_gate(make):
    a, b = read_results(make("a")), read_results(slowed(make("b"), 1.1))
    comparison = compare(a, b, metrics=metrics_named("tpot_p50,ttft_p50"))
    tpot = [row for row in comparison.rows if row.metric.name == "tpot_p50"]
    assert all(row.verdict == "worse" for row in tpot)
    assert all(row.relative == pytest.approx(0.1, abs=1e-4) for row in tpot)
    assert all(row.relative_bounds.low <= row.relative + 1e-9 for row in tpot)
    assert not judge_comparison(comparison, 0.05).passed
    assert judge_comparison(comparison, 0.2).passed
    better = compare(b, a, metrics=metrics_named("tpot_p50"))
    assert {row.verdict for row in better.rows} == {"better"}
    assert judge_comparison(better, 0.0).passed


def test_systems_of_one_run_are_compared(make):
    run = read_results(make("a", systems=BOTH))
    comparison = compare(run, run, systems=("vllm", "orca"), metrics=METRICS)
    assert (comparison.name_a, comparison.name_b) == ("vllm", "orca")
    assert len(comparison.rows) == 2 * len(METRICS)
    with pytest.raises(NotComparableError, match="no system 'nobody'"):
        compare(run, run, systems=("vllm", "nobody"))


def test_systems_missing_in_one_run_are_named(make):
    a = read_results(make("a", systems=("vllm",)))
    b = read_results(make("b", systems=("orca",)))
    assert match(a, b).differs["system"] == ("vllm", "orca")
    c = read_results(make("c", systems=("orca", "fastertransformer")))
    with pytest.raises(NotComparableError, match="--systems"):
        match(a, c)


def test_rates_missing_in_one_run_are_named(make):
    a, b = read_results(make("a")), read_results(make("b", rates=(5.0, 7.0)))
    matched = match(a, b)
    assert {level.rate_rps for level in matched.levels} == {5.0}
    assert "no counterpart" in matched.notes[0]
    with pytest.raises(NotComparableError, match="no cell at 4"):
        match(a, b, rates=[4.0])
    with pytest.raises(NotComparableError, match="no rate in common"):
        match(read_results(make("c", rates=(1.0, 2.0))), b)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "llama-3-70b"}, "model differs: llama-3.1-8b in a, llama-3-70b in b"),
        ({"backend": "vllm"}, "backend differs.*--allow-different backend"),
        ({"toml": 'arrivals = "gamma(cv=4)"\nrequests = 120\n'}, "arrivals"),
        ({"requests": 60, "toml": TOML.replace("120", "60")}, "requests"),
        ({"requests": 60}, "requests of the same seed.*--allow-different workload"),
        ({"toml": f'{TOML}failures = "0@5..30"\n'}, "failures differs: none in a, 0@5..30 in b"),
        ({"toml": TOML + "[client]\nexact_output = false\n"}, "client.exact_output differs"),
    ],
)
def test_judge_comparison_refuses_unlike_conditions(make, changes, why):
    comparison = compare(
        read_results(make("a")), read_results(make("b", **changes)), metrics=METRICS
    )
    with pytest.raises(NotComparableError, match=why):
        judge_comparison(comparison, 0.05)


def gated(a, b, **options):
    comparison = compare(
        read_results(a), read_results(b), metrics=METRICS, replicates=100, **options
    )
    return comparison, judge_comparison(comparison, 0.05)


def test_a_condition_that_is_allowed_to_differ_is_what_is_compared(make):
    a, b = make("a"), make("b", toml=f'{TOML}failures = "0@5..30"\nadapters = "zipf(16)"\n')
    with pytest.raises(NotComparableError) as refusal:
        gated(a, b, allow_different=("adapters",))
    assert str(refusal.value).endswith("all the same: --allow-different failures")
    comparison, _ = gated(a, b, allow_different=("adapters", "failures"))
    assert comparison.matched.differs == {
        "adapters": ("none", "zipf(16)"),
        "failures": ("none", "0@5..30"),
    }
    assert not comparison.obstacles
    other = make("other", requests=60)
    assert gated(a, other, allow_different=("workload",))[0].rows


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("failure", "unknown condition 'failure'; did you mean failures"),
        ("kv_dtype", "no condition: it may differ without"),
    ],
)
def test_a_name_that_is_no_condition_is_refused(make, name, why):
    with pytest.raises(SloBenchError, match=why):
        gated(make("a"), make("b"), allow_different=(name,))


def test_the_deployment_and_parameters_are_what_is_compared(make):
    a = make("a", toml=TOML + "[parameters.vllm]\nmax_num_seqs = 64\n")
    b = make("b", toml=TOML + 'kv_dtype = "fp8"\n[parameters.vllm]\nmax_num_seqs = 128\n')
    comparison, _ = gated(a, b)
    assert comparison.matched.differs == {
        "kv_dtype": ("auto", "fp8"),
        "vllm.max_num_seqs": ("64", "128"),
    }
    assert any(
        "a does not name kv_dtype: taken as the default" in note for note in comparison.notes
    )


def test_one_value_is_matched_with_the_same_value_of_an_axis(make):
    plain = make("plain")
    axis = {"failures": ("", "0@5..30"), "slo_scale": ("1.0", "2.0")}
    swept = make("swept", axes=axis, toml=TOML + 'failures = ["0@5..30"]\nslo_scale = [1, 2]\n')
    comparison, judgement = gated(plain, swept)
    assert judgement.passed
    assert {(level.a[0].name, level.b[0].name) for level in comparison.matched.levels} == {
        ("000", "000"),
        ("003", "003"),
    }
    assert all(row.seeds_b == 3 for row in comparison.rows)
    failing = make("failing", toml=TOML + 'failures = "0@9..10"\n')
    with pytest.raises(NotComparableError, match="no failures in common"):
        gated(failing, swept)


def test_cells_that_nothing_tells_apart_are_refused(make):
    folder = make("a", rates=(3.0,), seeds=2)
    cells = pd.read_csv(folder / "cells.csv").assign(seed=0)
    cells.to_csv(folder / "cells.csv", index=False)
    with pytest.raises(NotComparableError, match="cells 0 and 1 have the same seed"):
        gated(folder, folder)


def unserved(folder, *, where=slice(None), **changes):
    """No request of these cells finishes."""
    table = folder / "cells.csv"
    cells = pd.read_csv(table, dtype={"cell": str})
    for cell in cells["cell"][where]:
        path = folder / "requests" / f"{cell}.csv.gz"
        frame = pd.read_csv(path).assign(outcome="failed", slo_met=0)
        frame[["first_scheduled_s", "first_token_s", "finish_s"]] = np.nan
        frame.to_csv(path, index=False)
    chosen = cells["cell"].isin(cells["cell"][where])
    for name, value in {"finished": 0, "attainment": 0.0, **changes}.items():
        cells[name] = cells[name].astype(object) if name in cells else None
        cells.loc[chosen, name] = value
    cells.to_csv(table, index=False)
    return folder


def test_runs_of_which_no_request_finished_are_nothing_to_compare(make):
    a, b = (unserved(make(name)) for name in "ab")
    with pytest.raises(NotComparableError, match="nothing to compare: no request finished"):
        gated(a, b)
    measured = unserved(make("c", backend="vllm"), fault_detail="connect: refused")
    why = r"nothing to compare: no cell of .*c is valid: none of 120 requests finished \(connect: "
    with pytest.raises(NotComparableError, match=why):
        gated(a, measured)


def test_a_policy_that_serves_nothing_is_worse(make):
    _, judgement = gated(make("a"), unserved(make("b")))
    assert not judgement.passed


def test_a_figure_that_only_the_candidate_lacks_does_not_pass(make):
    comparison = compare(
        read_results(make("a")),
        read_results(unserved(make("b"), where=slice(3, 6))),
        metrics=metrics_named("ttft_p50"),
    )
    assert {row.verdict for row in comparison.rows} == {"none", "unknown"}
    with pytest.raises(NotComparableError, match=r"b has no value of ttft_p50 \(5 req/s\)"):
        judge_comparison(comparison, 0.05)


def test_invalid_cells_are_named_and_left_out(make):
    a = make("a")
    b = unserved(make("b"), where=slice(5, 6), valid=False, invalid_because="the server ended")
    comparison, judgement = gated(a, b)
    assert judgement.passed
    note = "b: 1 of 6 cells are invalid and left out: the server ended (005)."
    assert note in comparison.notes
    level = unserved(make("c"), where=slice(3, 6), valid=False, invalid_because="the server ended")
    with pytest.raises(NotComparableError, match=r"only invalid cells at levels of a \(5 req/s\)"):
        gated(a, level)
    assert gated(a, level, rates=[3.0])[1].passed
    assert gated(level, a)[1].passed  # nothing to hold the other level against


def test_comparison_with_another_slo_is_named(make):
    a, b = make("a", rates=(3.0,)), make("b", rates=(3.0,))
    for path in (b / "requests").iterdir():
        pd.read_csv(path).assign(ttft_slo_s=2.0).to_csv(path, index=False)
    comparison = compare(read_results(a), read_results(b), metrics=METRICS)
    with pytest.raises(NotComparableError, match="SLOs differ"):
        judge_comparison(comparison, 0.05)
    held = compare(read_results(a), read_results(b), metrics=METRICS, slo=Slo(ttft_s=1.0))
    assert judge_comparison(held, 0.0).passed


def test_closed_loops_are_matched_without_rates(make):
    toml = 'arrivals = "concurrency(8)"\n'
    a = make("a", rates=(3.0,), toml=toml)
    b = make("b", rates=(3.3,), toml=toml)
    (level, *_) = match(read_results(a), read_results(b)).levels
    assert level.rate_rps is None


def test_comparison_leaves_warmup_out(make):
    folder = make("a", systems=("vllm",), rates=(3.0,), seeds=1, toml=TOML + "warmup_s = 10.0\n")
    (cell,) = read_results(folder).cells
    requests = cell.read()
    counted = (requests.arrival_s >= 10).sum()
    assert 0 < counted < len(requests)
    assert len(requests.sample("scheduled", None)) == counted


def test_late_sending_shows_on_the_arrival_clock_only(make):
    folder = make("a", systems=("vllm",), rates=(3.0,), seeds=1)
    for path in (folder / "requests").iterdir():
        frame = pd.read_csv(path)
        frame.assign(sent_s=frame["arrival_s"] + 0.05).to_csv(path, index=False)
    (cell,) = read_results(folder).cells
    requests = cell.read()
    due, sent = (
        requests.sample(clock, None).requests.records.ttft_s for clock in ("scheduled", "sent")
    )
    assert np.nanmax(np.abs(due - sent - 0.05)) < 1e-9


def test_read_results_refuses_runs_that_cannot_be_compared(make, tmp_path):
    folder = make("a", valid=False)
    with pytest.raises(SloBenchError, match="valid"):
        read_results(folder)
    bare = make("b")
    for path in (bare / "requests").iterdir():
        path.unlink()
    (bare / "requests").rmdir()
    with pytest.raises(SloBenchError, match="per-request"):
        read_results(bare)
    with pytest.raises(SloBenchError, match="confidence"):
        compare(*[read_results(make("c"))] * 2, confidence=1.5)


def test_comparison_as_text_and_json(make):
    a, b = read_results(make("a")), read_results(slowed(make("b"), 1.1))
    comparison = compare(a, b, metrics=METRICS)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(comparison_text(comparison))
    text = console.export_text()
    assert "b against a: worse in" in " ".join(text.splitlines()[-2:])
    assert "+10.0 %" in text
    assert "Goodput divides by the window of arrivals" in text
    plain = json.loads(json.dumps(comparison_json(comparison), allow_nan=False))
    assert len(plain["rows"]) == len(comparison.rows)
    assert plain["worse"] == sum(row["verdict"] == "worse" for row in plain["rows"])


def banded(folder, systems, shares):
    """Bands of cells.csv, of `systems`' engines: attainment by four errors from slow to fast."""
    cells = pd.read_csv(folder / "cells.csv", dtype={"cell": str})
    for system, engine in systems.items():
        rows = cells["system"] == system
        cells.loc[rows, "band_basis"] = f"{engine}, kernel tables, a100-80g, tp 1, seen"
        draws = [
            " ".join(f"{share * attainment:.4g}" for share in shares)
            for attainment in cells.loc[rows, "attainment"]
        ]
        cells.loc[rows, "band_draws"] = draws
    cells.assign(band_level=0.9).to_csv(folder / "cells.csv", index=False)


def test_comparison_names_the_highest_rates_and_whether_their_lead_holds_in_reality(make):
    systems = ["vllm", "fastertransformer"]
    folder = make("banded", systems=systems, rates=[1.0, 4.0, 8.0], seeds=3)
    texts = []
    for engines in (("vllm", "vllm"), ("vllm", "sglang")):
        banded(folder, dict(zip(systems, engines, strict=True)), (1.0, 0.97, 0.94, 0.3))
        results = read_results(folder)
        comparison = compare(results, results, systems=(systems[1], systems[0]))
        (lead,) = comparison.leads.values()
        assert lead.verdict == "better"
        assert lead.b_rps > lead.a_rps
        assert comparison_json(comparison)["rates_in_slo"][0]["in_reality"] is lead.in_reality
        console = Console(file=io.StringIO(), width=200)
        console.print(comparison_text(comparison))
        texts.append(" ".join(console.file.getvalue().split()))
    assert "req/s with 90% in SLO: " in texts[0]
    assert ": better, holds in reality." in texts[0]
    assert "inside the model's error" not in texts[0]
    assert ": better, inside the model's error." in texts[1]
    assert "errors that both share cancel" in texts[1]


def test_comparison_by_another_slo_than_that_of_the_bands_has_no_model_error(make):
    systems = ["vllm", "orca"]
    folder = make("banded", systems=systems, rates=[1.0, 4.0, 8.0], seeds=3)
    banded(folder, dict.fromkeys(systems, "vllm"), (1.0, 0.97, 0.94, 0.91))
    results = read_results(folder)
    comparison = compare(results, results, systems=tuple(systems), slo=Slo(ttft_s=2.0))
    assert {row.in_reality for row in comparison.rows} == {None}


def test_comparison_rows_not_stationary_have_their_duration(make):
    steady = make("a", rates=(3.0,))
    drifting = make("b", rates=(3.0,), stationary=False, arrival_window_s=540.0)
    comparison = compare(read_results(steady), read_results(drifting), metrics=METRICS)
    assert {row.drifting_after_s for row in comparison.rows} == {540.0}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(comparison_text(comparison))
    assert "not distinguishable, overloaded after 540 s" in console.export_text()
    assert {row["drifting_after_s"] for row in comparison_json(comparison)["rows"]} == {540.0}
    same = compare(*[read_results(steady)] * 2, metrics=METRICS)
    assert {row["drifting_after_s"] for row in comparison_json(same)["rows"]} == {None}


def test_simulations_of_other_versions_and_step_times_are_told(make):
    """Equal settings of two versions differed without a word of why."""
    a = read_results(make("a", seeds=1))
    assert a.made_by["slo-bench"] == __version__
    (name,) = (name for name in a.made_by if name.startswith("step times of "))
    assert a.made_by[name]
    b = dataclasses.replace(a, made_by={"slo-bench": "0.1", name: "roofline"})
    notes = compare(a, b, metrics=METRICS).notes
    assert f"slo-bench differs, so that results may: {__version__}; then 0.1." in notes
    assert f"{name} differs, so that results may: {a.made_by[name]}; then roofline." in notes
    assert not any("differs, and" in note for note in compare(a, a, metrics=METRICS).notes)


def test_comparison_of_one_seed_has_a_note(make):
    a = read_results(make("a", seeds=1))
    assert any("one seed" in note for note in compare(a, a, metrics=METRICS).notes)


def test_comparison_page_escapes_names(make):
    nasty = "</script><script>alert(1)</script>"
    a = read_results(make("a", systems=("vllm", nasty)))
    b = read_results(slowed(make("b", systems=("vllm", nasty)), 1.2))
    page = comparison_page(compare(a, b, metrics=METRICS))
    assert "<script>alert" not in page
    assert page.count("<script") == 3  # data, plotly.js, ours
    assert "Content-Security-Policy" in page
    assert page.count('data-figure="change-') == len(METRICS)


def test_comparison_page_is_written_whole_or_not_at_all(make, tmp_path):
    a = read_results(make("a", rates=(3.0,)))
    comparison = compare(a, a, metrics=METRICS)
    out = write_comparison(comparison, tmp_path / "page.html")
    assert 'data-figure="' not in out.read_text()  # one rate: no line to draw
    with pytest.raises(SloBenchError, match="cannot write"):
        write_comparison(comparison, tmp_path / "no" / "page.html")


def test_parse_regression_reads_shares_and_percentages():
    assert parse_regression("5%") == 0.05
    assert parse_regression("0.05") == 0.05
    assert parse_regression("150 %") == 1.5
    for text in ("5", "-1%", "five", "nan", "inf%"):
        with pytest.raises(SloBenchError, match="5%"):
            parse_regression(text)
