"""The answer of a run on a terminal: what it names, in any width."""

import io
import itertools
import shutil

import pandas as pd
import pytest
from rich.console import Console

from slo_bench.harness.results.read_run import read_runs
from slo_bench.reports.compare.comparing import compare
from slo_bench.reports.compare.results import run_results
from slo_bench.reports.figures.levels import IN_SLO, combine
from slo_bench.reports.terminal.experiment_lines import lines_of_settings, slo_words
from slo_bench.reports.terminal.leads import (
    LeadJudge,
    groups_of_leads,
    lead_over_seeds,
    reality_text,
)
from slo_bench.reports.terminal.run_answer import run_screen
from slo_bench.workloads.source import catalogue

TOML = (
    'systems = ["vllm", "sarathi"]\nslo = "ttft=1s,tpot=60ms"\nseeds = 3\n'
    "[parameters.sarathi]\nchunk_tokens = 256\n"
)


def printed(folders, *, width=80, change=lambda cells: cells):
    runs = read_runs(folders)
    stream = io.StringIO()
    Console(file=stream, width=width).print(run_screen(runs, change(combine(runs))), soft_wrap=True)
    return stream.getvalue()


def test_run_screen_of_a_closed_loop_names_its_clients(make_run):
    folder = make_run(requests=60, toml=f'arrivals = "concurrency(16)"\n{TOML}')
    shown = " ".join(printed([folder]).split())
    assert ", concurrency(16): 1 to 5 req/s SLO:" in shown


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("", "sharegpt (mean 2,341 prompt, 438 output tokens)"),
        ('prompt_tokens = "100"', "sharegpt (prompt_tokens 100)"),
        ('output_tokens = ["5", "9"]', "sharegpt (output_tokens 5, output_tokens 9)"),
    ],
)
def test_means_of_a_catalogue_are_not_shown_where_lengths_are_replaced(setting, shown):
    assert f"workload: {shown}" in lines_of_settings(f'workload = "sharegpt"\n{setting}')


def test_run_screen_names_what_was_tested_and_ends_with_the_answer(make_run):
    folder = make_run(systems=["vllm", "sarathi"], seeds=3, requests=60, toml=TOML)
    lines = printed([folder]).splitlines()
    assert lines[0] == "simulated: llama-3.1-8b on 1 × a100-80g"
    assert lines[1].startswith("workload: sharegpt (mean ")
    assert "3 rates from 1 to 5 req/s" in " ".join(" ".join(lines[1:3]).split())
    text = "\n".join(lines)
    assert "SLO: TTFT ≤ 1 s, TPOT ≤ 60 ms" in text
    assert "3 seeds, 60 requests a run" in text
    assert "sarathi (chunk 256)" in text
    assert "vllm (budget 2,048)" in text
    assert " carries " in lines[-1] or " carries " in lines[-2]


def test_run_screen_shows_the_setting_of_each_of_two_runs(make_run):
    small = TOML.replace("256", "512")
    folders = [make_run(name, systems=["sarathi"], requests=30, toml=toml)
               for name, toml in (("large", TOML), ("small", small))]  # fmt: skip
    text = printed(folders)
    assert "large (chunk 256)" in text
    assert "small (chunk 512)" in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_run_screen_keeps_words_whole_in_any_width(make_run, width):
    axes = {"vllm.a_parameter": ["a value of words", "2"]}
    systems = ["vllm", "orca", "sarathi"]
    folder = make_run(systems=systems, axes=axes, requests=30, seeds=3)
    wide = set(printed([folder], width=500).split())
    text = printed([folder], width=width)
    assert max(map(len, text.splitlines())) <= min(width, 120)
    assert set(text.replace("─", "").split()) <= wide | {"not", "shown", "columns:", str(width)}


def test_run_screen_of_a_terminal_of_millions_of_columns_ends(make_run):
    folder = make_run(requests=30)
    assert len(printed([folder], width=99_999_999)) < 5_000


def test_run_screen_leaves_optional_columns_out_by_name(make_run):
    folder = make_run(requests=30, usd_per_slo_request=0.001)
    assert "US$ per 1,000" in printed([folder])
    assert "not shown in 24 columns: US$ per 1,000 in SLO" in " ".join(
        printed([folder], width=24).split()
    )


def test_run_screen_of_facets_and_of_runs_at_once(make_run):
    axes = {"workload": ["azure-conv", "sharegpt"]}
    text = printed([make_run(axes=axes, requests=30)])
    assert "azure-conv (mean" in text
    assert text.count(" carries ") + text.count("No system keeps") == 2
    at_once = make_run("once", rates=[4.0], requests=30, rate_rps="", toml='slo = ""\n')
    text = printed([at_once])
    assert "all requests at once" in text
    assert "finished req/s" in text


def test_lead_of_the_same_tested_rate_is_one_between_rates(make_run):
    folder = make_run(systems=["vllm", "sarathi"], seeds=3, requests=60, toml=TOML)
    shutil.rmtree(folder / "requests")  # judged by the seeds of what is shown
    attainment = {"vllm": {1: 1.0, 3: 0.99, 5: 0.8}, "sarathi": {1: 1.0, 3: 0.92, 5: 0.2}}

    def change(cells):
        pairs = zip(cells["system"], cells["level_rps"], strict=True)
        return cells.assign(attainment=[attainment[system][rate] for system, rate in pairs])

    answer = " ".join(printed([folder], change=change).split())
    assert (
        "vllm carries 3 req/s with 90 % in SLO, ahead of all others between tested rates." in answer
    )


def test_run_screen_says_overloaded_not_stationary(make_run):
    def drifting(cells):
        late = cells["level_rps"] == 5
        flags = [not is_late for is_late in late]
        attainment = cells["attainment"].mask(late, 0.1)
        return cells.assign(
            stationary=pd.Series(flags, cells.index, dtype=object), attainment=attainment
        )

    text = " ".join(printed([make_run(requests=30)], change=drifting).split())
    assert "overloaded (the queue grows for as long as load lasts): from 5 req/s" in text
    assert "stationary" not in text


def test_run_screen_of_a_run_without_a_valid_cell(make_run):
    text = printed([make_run(requests=30, valid=False, invalid_because="late client")])
    assert "6 of 12 cells" not in text
    assert "12 of 12 cells are invalid and left out: late client." in " ".join(text.split())
    assert "No cell is valid: nothing was measured." in text


def grouped(values):
    return groups_of_leads(values, lambda a, b: lead_over_seeds(values[a], values[b]).is_level)


def test_groups_of_leads_hold_what_differs_within_its_interval():
    values = {
        "a": {0: 3.0, 1: 3.1, 2: 3.2},
        "b": {0: 3.1, 1: 3.0, 2: 3.15},
        "c": {0: 2.0, 1: 2.1, 2: 2.2},
    }
    assert grouped(values) == [["a", "b"], ["c"]]


def test_groups_of_leads_of_one_seed_hold_equal_values_alone():
    assert grouped({"a": {0: 3.0}, "b": {0: 3.0}, "c": {0: 2.9}}) == [["a", "b"], ["c"]]


@pytest.mark.parametrize("rates", [[1.0, 4.0, 8.0], [5.0]])
def test_lead_judge_says_what_compare_says_of_the_same_pair(make_run, rates):
    systems = ["vllm", "orca", "fastertransformer"]
    folder = make_run(systems=systems, rates=rates, seeds=3, requests=60, toml=TOML)
    runs, results = read_runs([folder]), run_results(folder)
    cells = combine(runs)
    judge = LeadJudge(runs, cells, None if len(rates) > 1 else IN_SLO)
    verdicts = []
    for a, b in itertools.permutations(systems, 2):
        comparison = compare(results, results, systems=(a, b))
        rows = [row for row in comparison.rows if row.metric.short == "attainment"]
        (said,) = [n.verdict for n in (comparison.leads.values() if len(rates) > 1 else rows)]
        assert judge.lead("", a, b).is_level == (said == "none")
        verdicts.append(said)
    assert "better" in verdicts


def test_lead_is_by_paired_requests_where_seeds_alone_tell_nothing(make_run):
    systems = ["vllm", "fastertransformer"]
    runs = read_runs([make_run(systems=systems, rates=[1.0, 4.0, 8.0], seeds=3, requests=60)])
    assert lead_over_seeds({0: 3.0, 1: 9.0, 2: 5.0}, {0: 5.5, 1: 4.0, 2: 5.1}).is_level
    assert not LeadJudge(runs, combine(runs), None).lead("", *systems).is_level


@pytest.mark.parametrize(
    ("in_reality", "n_others", "text"),
    [
        ({"b": True, "c": True}, 2, " The lead holds in reality."),
        ({"b": True}, 2, " The lead over b holds in reality."),
        ({"b": False}, 1, " The lead over b is inside the model's error."),
        (
            {"b": True, "c": False},
            2,
            " The lead over b holds in reality, that over c is inside the model's error.",
        ),
        ({"b": None}, 1, ""),
        ({}, 0, ""),
    ],
)
def test_reality_text_names_which_leads_hold(in_reality, n_others, text):
    assert reality_text(in_reality, n_others) == text


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        ("ttft=1,tpot=0.15", "TTFT ≤ 1 s, TPOT ≤ 150 ms"),
        ("ttft=500ms; batch:e2e=1min", "TTFT ≤ 500 ms; batch: E2E ≤ 60 s"),
        ("e2e=uniform(1s,350s)", "E2E ≤ 1 s to 350 s by request"),
        ({"ttft": 2, "chat": {"tpot": "80ms"}}, "TTFT ≤ 2 s; chat: TPOT ≤ 80 ms"),
        ("", ""),
    ],
)
def test_slo_words_of_each_form(slo, words):
    assert slo_words(slo).replace("\xa0", " ") == words


def test_answer_of_five_systems_has_at_most_24_lines_of_80_columns(make_run):
    systems = ["vllm", "vllm-v0", "sglang", "orca", "sarathi"]
    toml = f"systems = {systems}\nslo = 'ttft=1,tpot=0.15'\n"
    bands = {"band_low_attainment": 0.85, "band_high_attainment": 1.0, "band_basis": "kernels"}
    folder = make_run(
        systems=systems, seeds=3, requests=60, toml=toml, usd_per_slo_request=0.0004, **bands
    )

    def overloaded(cells):
        late = cells["level_rps"] == 5
        flags = pd.Series([not is_late for is_late in late], cells.index, dtype=object)
        return cells.assign(stationary=flags, attainment=cells["attainment"].mask(late, 0.1))

    lines = printed([folder], change=overloaded).splitlines()
    assert len(lines) < 24  # and a line that names the report
    assert max(map(len, lines)) <= 80
    assert "< 1 to ≥ 5" in "\n".join(lines)


@pytest.mark.parametrize("width", [1, 10, 30])
def test_run_screen_of_a_tiny_terminal_keeps_words_and_ends(make_run, width):
    folder = make_run(requests=30)
    assert set(printed([folder], width=width).split()) >= {"system", "orca", "SLO:"}


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_means_of_a_workload_without_records_are_told_where_its_origin_tells_both(name):
    source = catalogue()[name]
    both = None not in (source.mean_prompt_tokens, source.mean_output_tokens)
    [line] = [t for t in lines_of_settings(f'workload = "{name}"') if t.startswith("workload")]
    assert line.endswith("tokens)") == both
