"""Every page at three widths, light and dark: nothing overlaps, is cut without a hint or struck."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote_plus

import numpy as np
import pytest

from slo_bench.cli.main import main
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.validation.replay.run_replay import validate_run
from slo_bench.predictors.lengths.evaluate_predictor import (
    LORA,
    Bin,
    Latency,
    PredictorEvaluation,
    Score,
)
from slo_bench.predictors.lengths.predictor_config import Base, NetworkShape, PredictorConfig
from slo_bench.predictors.profiles.profile_format import Source
from slo_bench.predictors.profiles.whole_steps import LoggedStep, profile_of_steps
from slo_bench.reports.live import LiveStatus, live_report
from slo_bench.reports.pages.plan_page import write_plan
from slo_bench.reports.pages.predictor_page import write_evaluation, write_stream
from slo_bench.reports.pages.run_page import write_report
from slo_bench.reports.pages.validation import write_validation
from slo_bench.tuner.planning.plan_search import PlanOptions, TargetLoad, plan_cheapest

pytestmark = pytest.mark.browser

LAYOUT = (Path(__file__).parent / "layout.js").read_text("utf-8")
ALL_DRAWN = "charts.forEach(c => { c.seen = true; c.draw(); })"
FEW = "--requests 100 --seeds 1 --jobs 1 --slo ttft=1,tpot=0.15"
COMMANDS = {
    "run": "run --system vllm --system sarathi --rates 2,4,6 --requests 60 --seeds 2 --jobs 1 "
    "--slo ttft=1,tpot=0.15 --out run",
    "capacity": f"capacity --system sarathi {FEW} --max-requests 1500 --out capacity",
    "comparison": "compare run --systems vllm,sarathi --html comparison.html",
    "tuning": f"tune sarathi --trials 3 --tolerance 0.5 {FEW} --out tuning",
    "sensitivity": "sensitivity --system vllm --system orca --perturb step-time=0.8,1.2 "
    "--metric attainment --rate 3 --requests 60 --seeds 1 --html sensitivity.html",
    "placement": "tune placement --model llama-3.1-70b --gpu a100-80g --devices 4 "
    "--html placement.html",
    "accuracy": "accuracy mine --html accuracy.html",
}
PAGES = {
    "run": "run/report.html",
    "capacity": "capacity/report.html",
    "tuning": "tuning/report.html",
}
MEASURED = (
    "engine,gpu,model,tp,concurrency,prompt_tokens,output_tokens,ttft_mean_s,tpot_mean_s\n"
    "vllm,h100-80g,llama-3.1-8b,1,2,256,16,0.03,0.008\n"
    "vllm,h100-80g,llama-3.1-8b,1,8,1024,16,0.09,0.009\n"
)
PREDICTOR = PredictorConfig(
    shape=NetworkShape(),
    base=Base("sentence-transformers/all-MiniLM-L6-v2", "", ""),
    labels="counted by the model",
    conformal_offset=0.012,
    words_share=0.3,
    neighbours=0.4,
    confusion=(),
    training={},
)


def write_predictor(out: Path) -> Path:
    buckets = len(PREDICTOR.shape.edges)
    evaluation = PredictorEvaluation(
        scores=tuple(
            Score(
                *(corpus, predictor, 2048, 0.55 - 0.07 * place, 0.8, 61.5, 0.61, 0.5, 0.021),
                *(0.9, 8.1, 0.91),
            )
            for corpus in ("all", "gpt4", "natural_questions")
            for place, predictor in enumerate((LORA, "words", "prompt length", "mean"))
        ),
        reliability=tuple(Bin(0.15 + n / 11, 0.12 + n / 11, 90 + n) for n in range(9)),
        confusion=np.arange(buckets * buckets).reshape(buckets, buckets),
        latencies=(Latency(1, 0.004, 0.006, 0.004), Latency(32, 0.06, 0.08, 0.06)),
        leak={},
        left_out={},
        unknown_models=(),
        trained_on=frozenset({"gpt4"}),
    )
    return write_evaluation(evaluation, PREDICTOR, out)


def write_stream_page(out: Path) -> Path:
    """The page of what has the fields of `StreamEvaluation`, whose module needs torch."""
    windows = [
        SimpleNamespace(
            **{"first": 500 * place, "rows": 500, "as_trained": share, "update": None},
            **{"corrected": share + 0.04, "within_one": 0.8, "baseline": share + 0.06},
        )
        for place, share in enumerate((0.52, 0.48, 0.44, 0.41))
    ]
    stream = SimpleNamespace(windows=windows, old_rows=500, old_before=0.52, old_after=0.51)
    return write_stream(stream, PREDICTOR, out)


def write_plan_page(out: Path) -> Path:
    """The page of two plans."""
    experiment = Experiment(
        systems=["vllm"], slo="ttft=1,tpot=0.1", output_tokens="uniform(5,15)", tp=1
    )
    options = PlanOptions(kinds=("h100-80g", "l4"))
    return write_plan(plan_cheapest(experiment, TargetLoad(1, plans=2), options), experiment, out)


WRITTEN = {"plan": write_plan_page, "predictor": write_predictor, "stream": write_stream_page}
# A report with a section on its simulation, and the page of one level of it.
VALIDATED = ("validated", "validation")


def write_validated(make_run: Callable[..., Path], folder: Path) -> dict[str, Path]:
    """Both pages of a measured run that was simulated with step times fitted to its steps."""
    run = make_run("validated", systems=["vllm"], rates=[1.0, 3.0], seeds=1, backend="vllm")
    steps = [LoggedStep(n, 400 * n, [(0, 300)] * (n % 2), 0.03 + 4e-4 * n) for n in range(1, 90)]
    source = Source("test", "steps")
    profile = profile_of_steps(steps, model="llama-3.1-8b", gpu="a100-80g", source=source)
    level, _ = validate_run(run, profile)
    written = (
        write_report([run], folder / "validated.html"),
        write_validation(level.validation, folder / "validation.html"),
    )
    return dict(zip(VALIDATED, written, strict=True))


@pytest.fixture(scope="module")
def pages(
    tmp_path_factory: pytest.TempPathFactory, make_runs: Callable[[Path], Callable[..., Path]]
) -> dict[str, Path]:
    """Every kind of page, by name, as commands write them."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "mine").mkdir()
    (folder / "mine" / "mine.csv").write_text(MEASURED)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in COMMANDS.values():
            patch.setattr(sys, "argv", ["slo-bench", *command.split()])
            with pytest.raises(SystemExit) as ended:
                main()
            assert not ended.value.code, command
    paths = {name: folder / PAGES.get(name, f"{name}.html") for name in COMMANDS}
    paths |= {name: write(folder / f"{name}.html") for name, write in WRITTEN.items()}
    return paths | write_validated(make_runs(folder), folder)


# Each change of width or colours draws anew, so that one thing changes at a time.
VIEWS = ((390, False), (390, True), (768, True), (768, False), (1440, False), (1440, True))


def layout_problems(page: Any, kind: str, pictures: Path) -> list[str]:
    """What is wrong with the layout at three widths, light and dark; pictures of what is."""
    problems = []
    for width, dark in VIEWS:
        page.resize(width)
        page.prefer(dark=dark)
        page.settle()
        if wrong := page.run(LAYOUT):
            name = f"{width} px, {'dark' if dark else 'light'}"
            problems += [f"{name}: {problem}" for problem in wrong]
            page.screenshot(pictures / f"{kind}, {name}.png")
    return problems


@pytest.mark.parametrize("kind", [*COMMANDS, *WRITTEN, *VALIDATED])
def test_page_layout_has_no_overlap_and_no_unmarked_cut(browser, pages, kind, tmp_path):
    page = browser.open(pages[kind].as_uri(), width=390)
    page.run("document.querySelectorAll('main details').forEach(d => { d.open = true; })")
    page.run(ALL_DRAWN)
    assert layout_problems(page, kind, tmp_path) == [], f"pictures are in {tmp_path}"
    assert page.complaints() == []
    page.close()


def test_live_page_layout_has_no_overlap_and_no_cut(browser, pages, tmp_path):
    status = LiveStatus()
    for phase in ("starting vllm on port 8,000", "sending a first request", "the cells run"):
        status.begin(phase)
    status.running = [f"12 ended, 3 in flight, 91.0 % in SLO, vllm_rate-1_{'seed-' * 20}"]
    with live_report(pages["run"].parent, status) as url:
        page = browser.open(url, width=390)
        page.run(
            "new Promise(done => { const look = () => document.getElementById('running')"
            ".innerText.includes('in flight') ? done() : setTimeout(look, 20); look(); })"
        )
        assert layout_problems(page, "live", tmp_path) == [], f"pictures are in {tmp_path}"
        page.close()


def test_address_keeps_what_is_hidden_and_chosen(browser, make_run, tmp_path):
    names = ["vllm", "orca", "a,b&hide=vllm", "<img src=x>"]
    out = write_report([make_run(systems=names)], tmp_path / "report.html").as_uri()
    page = browser.open(out, width=1100)
    pressed = (
        "[...document.querySelectorAll('#figure-attainment .legend button')]"
        ".filter(b => b.ariaPressed === 'false').map(b => b.textContent).sort()"
    )
    view = "document.querySelector('#figure-ttft-rate .choices [aria-pressed=true]').textContent"
    rate = "document.getElementById('rate').value"
    assert page.run("location.hash") == ""
    page.run(
        "for (const button of document.querySelectorAll('#figure-attainment .legend button'))"
        " if (!button.textContent.startsWith('v') && !button.textContent.startsWith('o'))"
        " [...document.querySelectorAll('#figure-attainment .legend button')]"
        ".find(b => b.textContent === button.textContent).click()"
    )
    page.run("document.querySelector('#figure-ttft-rate .choices button').click()")
    page.run("document.querySelector('.ratebar button:not(:disabled)').click()")
    chosen = [page.run(script) for script in (pressed, view, rate)]
    assert chosen[:2] == [sorted(names[2:]), "p50"]
    address = page.run("location.href")
    page.close()
    again = browser.open(address, width=1100)
    again.run(ALL_DRAWN)
    assert [again.run(script) for script in (pressed, view, rate)] == chosen
    again.run("[...document.querySelectorAll('nav a')].find(a => a.hash === '#worth').click()")
    again.settle()
    kept = unquote_plus(again.run("location.hash"))
    assert "hide=<img src=x>" in kept
    assert "at=worth" in kept
    assert again.complaints() == []
    assert again.requests() == []
    again.close()


def test_address_with_unknown_names_is_ignored(browser, make_run, tmp_path):
    out = write_report([make_run()], tmp_path / "report.html").as_uri()
    page = browser.open(f"{out}#hide=nobody&rate=77&facet=x&view=no:p1&at=nowhere", width=1100)
    page.run(ALL_DRAWN)
    assert page.run("document.querySelectorAll('.legend [aria-pressed=false]').length") == 0
    assert page.complaints() == []
    page.close()
