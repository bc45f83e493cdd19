"""What strangers wrote, in the pages that we make of it: nothing of it runs, loads or goes out."""

import dataclasses
import json
import subprocess
import sys

import pytest

from slo_bench import Experiment, write_report
from slo_bench.harness.servers.mock import MockConfig, serving
from slo_bench.reports.compare.comparing import compare, read_results
from slo_bench.reports.compare.output import write_comparison

pytestmark = pytest.mark.browser

ATTACKS = (
    "</script><script>window.owned=1</script>",
    '"><img src=x onerror="window.owned=1">',
    "<svg/onload=window.owned=1>",
    "javascript:window.owned=1",
    "&lt;script&gt;window.owned=1&lt;/script&gt;",
    "</style><style>@import 'http://127.0.0.1:9/x'</style>",
    "<link rel=stylesheet href=http://127.0.0.1:9/x>",
    "<iframe srcdoc='<script>parent.owned=1</script>'>",
    "<base href=http://127.0.0.1:9/>",
    "{{constructor.constructor('window.owned=1')()}}",
    "\u2028window.owned=1\u2029",
)
HOSTILE = " ".join(ATTACKS)


def opened_and_used(browser, path):
    """Open the page and everything on it that opens, hover over the figures, press every button."""
    page = browser.open(path.as_uri(), width=1100)
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.run("charts.forEach(c => { c.seen = true; c.draw(); })")
    page.run("document.querySelectorAll('button').forEach(b => b.click())")
    page.run(
        "document.querySelectorAll('select').forEach(s => [...s.options].forEach((o, k) => {"
        "s.selectedIndex = k; s.dispatchEvent(new Event('change')); }))"
    )
    for x in range(50, 1050, 200):
        page.move(x, 600)
    page.settle()
    assert page.run("typeof window.owned") == "undefined"
    assert page.requests() == []
    assert page.run("document.querySelectorAll('main :is(img, iframe, link, base)').length") == 0
    text = page.run("document.body.innerText")
    page.close()
    return text


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A server with a hostile name, hostile prompts and a hostile class; two runs."""
    folder = tmp_path_factory.mktemp("hostile")
    rows = [{"prompt": f"{HOSTILE} {n}", "output_tokens": 3} for n in range(12)]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = MockConfig(model=HOSTILE, ttft_s=0.001, itl_s=0.0005)
    with serving(config) as server:
        experiment = Experiment(
            backend="openai",
            name=HOSTILE,
            workload=str(prompts),
            rates=[100, 200],
            seeds=1,
            client={"base_urls": [server.url], "send_delay_limit_s": 60.0},
        )
        return [experiment.run(folder / name).folder for name in ("a", "b")]


def test_report_does_not_execute_names_of_servers_and_prompts(browser, measured, tmp_path):
    text = opened_and_used(browser, write_report(measured[:1], tmp_path / "report.html"))
    assert "window.owned" in text  # the name is shown, as text


def test_joined_report_and_comparison_do_not_execute_names(browser, measured, tmp_path):
    opened_and_used(browser, write_report(measured, tmp_path / "several.html"))
    comparison = compare(*map(read_results, measured), replicates=50)
    comparison = dataclasses.replace(comparison, name_a=HOSTILE, notes=(*comparison.notes, HOSTILE))
    opened_and_used(browser, write_comparison(comparison, tmp_path / "comparison.html"))


def test_report_does_not_execute_server_errors(browser, measured, tmp_path):
    """Why a level must not be used is what a server said."""
    folder = measured[0]
    table = folder / "cells.csv"
    script = (
        "import sys; from slo_bench.harness.results.run_folder import read_rows, write_rows\n"
        "from pathlib import Path\n"
        "path = Path(sys.argv[1]); rows = read_rows(path)\n"
        "rows = [{k: v for k, v in row.items() if k != 'checksums'} for row in rows]\n"
        "rows[0] |= {'valid': False, 'invalid_because': sys.argv[2]}\n"
        "write_rows(path, rows)\n"
    )
    before = table.read_bytes()
    subprocess.run([sys.executable, "-c", script, table, HOSTILE], check=True)
    try:
        text = opened_and_used(browser, write_report([folder], tmp_path / "report.html"))
    finally:
        table.write_bytes(before)
    assert "window.owned" in text
