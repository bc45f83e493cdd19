import io

import pytest
from rich.console import Console

from slo_bench.reports.figures.drawing import plots
from slo_bench.reports.figures.tuning_figures import MARKS, parallel_coordinates
from slo_bench.reports.pages.tuning import (
    confirmed_sentence,
    headline,
    result_sentence,
    tuning_text,
    write_tuning,
)
from slo_bench.workloads.errors import SloBenchError


def trial(number, state, values, configuration, **more):
    return {
        "number": number,
        "state": state,
        "configuration": configuration,
        "values": values,
        "default": number == 0,
        "requests": 1000,
        "figures": {},
        "reason": None,
        **more,
    }


def confirmed(workload, configuration, value, verdict="", backend="simulated", after_s=None):
    return {
        "backend": backend,
        "workload": workload,
        "configuration": configuration,
        "objective": "capacity",
        "value": value,
        "low": None if value is None else value - 0.1,
        "high": None if value is None else value + 0.1,
        "requests": 5000,
        "verdict": verdict,
        "problem": None,
        "drifting_after_s": after_s,
    }


@pytest.fixture
def tuning():
    return {
        "system": "sarathi",
        "backend": "simulated",
        "workload": "sharegpt",
        "model": "llama-3.1-8b",
        "gpu": "a100-80g",
        "objectives": ["capacity"],
        "target": 0.9,
        "rate_rps": None,
        "sampler": "tpe",
        "space": {"chunk_tokens": "64..8192:log", "order": "a,<b>"},
        "requests": 4000,
        "trials": [
            trial(0, "finished", [2.0], {"chunk_tokens": 512, "order": "a"}),
            trial(1, "lost", [1.5], {"chunk_tokens": 64, "order": "<b>"}),
            trial(2, "finished", [3.0], {"chunk_tokens": 2048, "order": "a"}),
            trial(3, "failed", None, {"chunk_tokens": 9, "order": "a"}, reason="<OOM>\nmore"),
        ],
        "best": [2],
        "importances": {"capacity": {"chunk_tokens": (0.9, 0.7, 0.95)}},
        "ablations": [
            {
                "trial": 2,
                "parameter": "chunk_tokens",
                "value": 2048,
                "default": 512,
                "objective": "attainment",
                "rate_rps": 3.0,
                "change": -0.21,
                "low": -0.25,
                "high": -0.17,
                "matters": True,
                "problem": None,
            }
        ],
        "winners": [
            {
                "trial": 2,
                "values": [3.0],
                "configuration": {"chunk_tokens": 2048, "order": "a"},
                "file": "winner.toml",
                "commands": ["slo-bench run winner.toml", "slo-bench serve sarathi <x>"],
            }
        ],
        "confirmed": [
            confirmed("sharegpt", "default", 2.0),
            confirmed("sharegpt", "trial 2", 2.8, "better"),
            confirmed("azure-conv", "default", 5.0),
            confirmed("azure-conv", "trial 2", 5.05, "not distinguishable"),
        ],
    }


def test_tuning_headline_names_a_load_without_a_rate(tuning):
    tuning |= {"objectives": ["attainment"], "load": "with 8 users"}
    tuning["trials"] = [trial(0, "finished", [0.9], {"chunk_tokens": 512, "order": "a"})]
    assert headline(tuning).startswith("sarathi, share in SLO with 8 users: 1 configurations")


def printed(tuning):
    written = io.StringIO()
    Console(file=written, width=120).print(tuning_text(tuning))
    return written.getvalue()


def test_tuning_headline_counts_trials_cut_short(tuning):
    assert headline(tuning) == (
        "sarathi, capacity, req/s with 0.9 in SLO: 4 configurations (2 searched to the end, "
        "1 stopped early, 1 failed), 4,000 requests (simulated)"
    )


def test_tuning_text_gives_the_duration_of_trials_not_stationary(tuning):
    assert "tationary" not in printed(tuning)
    for number in (1, 2):  # 1 is neither the best nor the default
        tuning["trials"][number]["figures"] = {"drifting_after_s": 540.0}
    assert "Overloaded: trial 2 after 540 s. The queue grows" in printed(tuning)


def test_confirmed_sentence_names_workloads_not_told_apart(tuning):
    assert confirmed_sentence(tuning) == (
        "trial 2 on sharegpt: better than the default, +40.0 %; "
        "trial 2 on azure-conv: not distinguishable, +1.0 %"
    )
    tuning["best"] = [0]
    tuning["confirmed"] = [confirmed("sharegpt", "default", 2.0)]
    assert confirmed_sentence(tuning) == "nothing that was tried is better than the default"


def test_tuning_text_says_before_its_answer_how_many_requests_failed(tuning, tmp_path):
    faults = {"failed": 90, "failed_because": "malformed: usage", "surplus_outputs": 910}
    none_failed = {"failed": 0, "failed_because": "", "surplus_outputs": 1000}
    tuning["trials"][0]["figures"] = {"faults": none_failed}
    tuning["trials"][2]["figures"] = {"faults": faults}
    written = io.StringIO()
    Console(file=written, width=200).print(tuning_text(tuning))
    lines = written.getvalue().splitlines()
    first = lines.index("90 of 4,000 requests failed (malformed: usage), in trial 2.")
    assert lines[first + 1] == "1,910 of 4,000 answers have more tokens than requested."
    assert lines[first + 2] == headline(tuning)
    page = write_tuning(tuning, tmp_path / "page.html").read_text()
    assert "90 of 4,000 requests failed" in page


def test_tuning_text_names_failures(tuning):
    text = printed(tuning)
    assert "trial 3 failed: <OOM>" in text
    assert "chunk_tokens 2048" in text
    assert "90.0 %" in text
    assert "70.0 % to 95.0 %" in text
    assert "-21.00 points" in text
    assert "matters" in text


def test_tuning_page_escapes_and_shows_all_trials(tuning, tmp_path):
    page = write_tuning(tuning, tmp_path / "r.html").read_text()
    assert "<b>" not in page.replace("<b></b>", "")
    assert "&lt;b&gt;" in page
    assert "slo-bench serve sarathi &lt;x&gt;" in page
    for figure in ("history", "importances", "compared-capacity", "parallel"):
        assert f'data-figure="{figure}"' in page
    assert "failed: &lt;OOM&gt;" in page
    assert "simulated" in page


def test_tuning_page_has_a_figure_of_the_front(tuning, tmp_path):
    tuning["objectives"] = ["capacity", "cost"]
    tuning["importances"]["cost"] = {}
    for row in tuning["trials"]:
        row["values"] = row["values"] and [*row["values"], 1.0]
    assert 'data-figure="front"' in write_tuning(tuning, tmp_path / "r.html").read_text()


def test_parallel_coordinates_hold_a_line_a_trial_the_best_on_top(tuning):
    (figure,) = parallel_coordinates(tuning, MARKS)
    assert len(figure.x.names) == 3  # two dimensions and the objective
    (view,) = figure.views.values()
    lines = view["series"]
    assert len(lines) == 3
    assert MARKS[lines[-1]["s"]] == "tuned"
    assert "opacity" not in lines[-1]
    assert [line["y"][-1] for line in lines[:: len(lines) - 1]] == [0.0, 1.0]  # the objective
    (plot,) = plots(figure, MARKS, "simulated").values()
    assert plot["layout"]["xaxis"]["tickvals"] == [0, 1, 2]
    assert "&lt;" in "".join(plot["data"][0]["text"]) + "".join(plot["layout"]["xaxis"]["ticktext"])


@pytest.mark.browser
def test_parallel_coordinates_are_drawn_in_a_browser(tuning, tmp_path, browser):
    page = browser.open(write_tuning(tuning, tmp_path / "r.html").as_uri(), width=700)
    page.run("charts.forEach(c => { c.seen = true; c.draw(); })")
    page.settle()
    figure = "document.querySelector('[data-figure=parallel]')"
    assert page.run(f"{figure}.querySelectorAll('path.js-line').length") == 3
    page.run(f"{figure}.querySelector('details').open = true")
    page.settle()
    rows = page.run(f"[...{figure}.querySelectorAll('tbody tr')].map(r => r.textContent)")
    assert len(rows) == 9
    assert any("order <b> – a (trial 1: order <b>)" in row for row in rows)


def test_parallel_coordinates_need_two_trials(tuning, tmp_path):
    tuning["trials"] = tuning["trials"][:1]
    assert parallel_coordinates(tuning, MARKS) == []
    page = write_tuning(tuning, tmp_path / "r.html").read_text()
    assert 'data-figure="parallel"' not in page


def test_write_tuning_to_a_missing_folder_is_an_error(tuning, tmp_path):
    with pytest.raises(SloBenchError, match="cannot write"):
        write_tuning(tuning, tmp_path / "missing" / "r.html")


def test_tuning_text_marks_confirmation_runs_not_stationary(tuning, tmp_path):
    tuning["confirmed"] = [
        confirmed("sharegpt", "default", 2.0, after_s=214.0),
        confirmed("sharegpt", "trial 2", 2.8, "better", after_s=198.0),
    ]
    page = write_tuning(tuning, tmp_path / "page.html").read_text("utf-8")
    shown = " ".join(printed(tuning).split())
    for text in (page, shown):
        assert "overloaded after 214 s" in text
        assert "better, overloaded after 198 s" in text
        assert "Overloaded: The queue grows" in text
    for row in tuning["confirmed"]:
        row["drifting_after_s"] = None
    page = write_tuning(tuning, tmp_path / "page.html").read_text("utf-8")
    assert "overloaded" not in page.lower()


def test_tuning_page_begins_with_its_result(tuning, tmp_path):
    text = write_tuning(tuning, tmp_path / "page.html").read_text("utf-8")
    answer = text.partition('<p class="answer">')[2].partition("</p>")[0]
    assert "configurations" not in answer
    assert "than the default" in answer or "not told apart" in answer
    assert "Capacity, req/s on sharegpt 2 with default; capacity, req/s on sharegpt 2.8" in answer
    unconfirmed = result_sentence({**tuning, "confirmed": []})
    assert unconfirmed.startswith("Not confirmed on fresh seeds. trial 0 (default): capacity")


def test_default_that_was_only_raced_is_shown_as_an_estimate(tuning):
    tuning["trials"][0]["state"] = "lost"
    console = Console(width=100, file=io.StringIO())
    console.print(tuning_text(tuning))
    assert "0 (default, estimated)" in console.file.getvalue()
