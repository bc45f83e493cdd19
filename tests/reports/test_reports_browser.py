"""The page in a browser: drawn, silent, within its width, and deaf to hostile names."""

import pandas as pd
import pytest

from slo_bench.harness.validation.replay.run_replay import validate_run
from slo_bench.predictors.profiles.profile_format import Source
from slo_bench.predictors.profiles.whole_steps import LoggedStep, profile_of_steps
from slo_bench.reports.pages.run_page import write_report
from slo_bench.reports.pages.validation import write_validation

pytestmark = pytest.mark.browser

HOSTILE = '</script><script>window.owned=1</script><img src=x onerror="window.owned=1">'
FIGURES = "[...document.querySelectorAll('figure[data-figure]')]"
# Figures are drawn as they come into view; this is what follows when all have come.
ALL_DRAWN = "charts.forEach(c => { c.seen = true; c.draw(); })"
UNDRAWN = (
    f"{FIGURES}.filter(f => !f.querySelector('.plot :is(path.js-line, .bars .point path, "
    "path.point)')).map(f => f.dataset.figure)"
)


def curves(name):
    """How many curves a figure shows; bands are none."""
    return f"document.querySelectorAll('#figure-{name} .scatterlayer .trace:has(.point)').length"


@pytest.fixture
def report(make_run, tmp_path):
    """The address of a report with ordinary and hostile names, long names and classes."""
    folder = make_run(
        systems=["vllm", "orca", HOSTILE, "a-very-long-system-name-" * 4],
        model="<b>model</b>",
        toml="note = '" + "x" * 400 + "'\n",
        environment={"command": "slo-bench run " + "y" * 300, "step_time": {}},
    )
    return write_report([folder], tmp_path / "report.html").as_uri()


LONG = [
    f"mix(chat=synthetic(prompt=uniform(100,500),output=uniform(200,500),priority=1):{n},"
    f"{'batch' * 12}=synthetic(prompt=uniform(100,500)):{10 - n})"
    for n in (1, 5, 9)
]


def published(folder):
    """The settings of a run with a long table of published figures."""
    rows = "".join(f"[[row]]\nwhat = 'row {n}'\npublished = 1\nnote = 'why'\n" for n in range(30))
    (folder / "table.toml").write_text(f"title = 'A paper'\n{rows}")
    return f"published = '{folder / 'table.toml'}'\nslo = ''\n"


@pytest.fixture
def faceted(make_run, tmp_path):
    """The address of a report with long workloads and models, hostile ones among them."""
    axes = {"workload": [*LONG, HOSTILE], "model": ["x", "y" * 70], "vllm.parameter": ["1"]}
    folder = make_run(axes=axes, systems=["vllm", "orca"], seeds=1, toml=published(tmp_path))
    return write_report([folder], tmp_path / "report.html").as_uri()


@pytest.fixture
def at_once(make_run, tmp_path):
    """The address of a report on requests that all come at once, under several models."""
    folder = make_run(
        axes={"model": ["x", "y", "z"]}, rates=[4.0], rate_rps="", toml=published(tmp_path),
        attainment=1.0, weighted_turnaround=3.5,
    )  # fmt: skip
    return write_report([folder], tmp_path / "report.html").as_uri()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1100])
@pytest.mark.parametrize("kind", ["faceted", "at_once"])
def test_page_facets_stay_within_the_width(browser, request, kind, width, dark):
    page = browser.open(request.getfixturevalue(kind), width=width, dark=dark)
    page.run(ALL_DRAWN)
    assert page.run(UNDRAWN) == []
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.settle()
    too_wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert page.run(too_wide) is False
    outside = page.run(
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll *') && "
        "e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)"
        ".map(e => e.outerHTML.slice(0, 90))"
    )
    assert outside == []
    # What a reader came for is in sight without scrolling sideways.
    numbers = "document.querySelector('.summary tbody td').getBoundingClientRect().right"
    assert page.run(numbers) < width
    assert page.complaints() == []
    assert page.requests() == []
    assert page.run("typeof window.owned") == "undefined"
    page.close()


@pytest.mark.parametrize("kind", ["faceted", "at_once"])
def test_facet_is_chosen_by_selector_steps_and_panel(browser, request, kind):
    page = browser.open(request.getfixturevalue(kind), width=1100)
    figure = "#load figure .plot"
    page.run(ALL_DRAWN)
    drawings = [page.run(f"document.querySelector('{figure}').innerHTML")]
    steps = "document.querySelectorAll('.facetbar button')"
    assert page.run(f"{steps}[0].disabled")
    page.run(f"{steps}[1].click()")
    assert page.run("document.getElementById('facet').selectedIndex") == 1
    drawings.append(page.run(f"document.querySelector('{figure}').innerHTML"))
    page.run("document.querySelectorAll('.panel button')[2].click()")
    assert page.run("document.getElementById('facet').selectedIndex") == 2
    drawings.append(page.run(f"document.querySelector('{figure}').innerHTML"))
    assert len(set(drawings)) == 3
    pressed = (
        "[...document.querySelectorAll('.panel button')].findIndex(b => b.ariaPressed === 'true')"
    )
    assert page.run(pressed) == 2
    names = "[...document.querySelectorAll('#rate-section .legend button')].map(b => b.innerText)"
    assert set(page.run(names)) == {"vllm", "orca"}
    assert page.complaints() == []
    page.close()


def test_chosen_rate_position_is_kept_between_facets(browser, make_run, tmp_path):
    folder = make_run(axes={"workload": LONG[:2]}, requests=40)
    frame = pd.read_csv(folder / "cells.csv", dtype={"cell": "str"})
    frame.loc[frame["workload"] == LONG[1], "rate_rps"] *= 10
    frame.to_csv(folder / "cells.csv", index=False)
    page = browser.open(write_report([folder], tmp_path / "r.html").as_uri(), width=1100)
    rates = "[...document.getElementById('rate').options].map(o => o.value)"
    assert page.run(rates) == ["1", "3", "5"]
    page.run("const s = document.getElementById('rate'); s.selectedIndex = 0;"
             "s.dispatchEvent(new Event('change'))")  # fmt: skip
    page.run("document.querySelectorAll('.facetbar button')[1].click()")
    assert page.run(rates) == ["10", "30", "50"]
    assert page.run("document.getElementById('rate').value") == "10"
    page.run(ALL_DRAWN)
    assert page.run(curves("ttft-distribution")) == 2
    page.close()


def test_bars_are_readable_by_keys_and_as_a_table(browser, at_once):
    page = browser.open(at_once, width=1100)
    figure = "document.querySelector('#figure-throughput')"
    focused(page, figure)
    page.key("ArrowRight")
    assert "finished requests" in page.run(f"{figure}.querySelector('[role=status]').textContent")
    page.run(f"{figure}.querySelector('details').open = true")
    page.settle()
    heads = page.run(f"[...{figure}.querySelectorAll('details thead th')].map(h => h.textContent)")
    assert heads == ["system", "finished requests, per s", "lowest", "highest"]
    page.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_charts_are_drawn_without_complaints_within_the_width(browser, report, width, dark):
    page = browser.open(report, width=width, dark=dark)
    page.run(ALL_DRAWN)
    assert page.run(UNDRAWN) == []
    lengths = page.run(
        "[...document.querySelectorAll('path.js-line')].map(p => p.getTotalLength())"
    )
    assert len(lengths) > 20
    assert sum(length > 40 for length in lengths) > len(lengths) / 2
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.settle()
    too_wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert page.run(too_wide) is False
    outside = page.run(
        f"{FIGURES}.flatMap(f => [...f.querySelectorAll('.plot text')].filter(t => {{"
        "const a = t.getBoundingClientRect(), b = f.getBoundingClientRect();"
        "return a.width && (a.left < b.left - 1 || a.right > b.right + 1);"
        "}).map(t => t.textContent))"
    )
    assert outside == []
    assert page.complaints() == []
    assert page.requests() == []
    assert page.run("typeof window.owned") == "undefined"
    page.close()


def wait_for(page, condition):
    for _ in range(600):
        if page.run(condition):
            return
        page.settle()
    raise AssertionError(condition)


def focused(page, figure):
    """Go to a figure by keys, as soon as it is drawn."""
    page.run("document.documentElement.style.scrollBehavior = 'auto'")
    page.run(f"{figure}.querySelector('.plot').focus()")
    wait_for(page, f"{figure}.chart.seen && !{figure}.chart.stale")


def test_figures_are_drawn_as_they_come_into_view(browser, report):
    page = browser.open(report, width=1280)
    page.run("document.documentElement.style.scrollBehavior = 'auto'")
    last = "document.querySelector('#figure-cost .js-line') !== null"
    assert page.run(last) is False
    page.run("document.querySelector('#figure-cost').scrollIntoView()")
    wait_for(page, last)
    # What changes out of sight is drawn when it comes back.
    page.run("scrollTo(0, 0)")
    wait_for(page, "document.querySelector('#figure-cost').chart.seen === false")
    before = page.run(curves("cost"))
    page.run("document.querySelector('#figure-attainment .legend button').click()")
    assert page.run(curves("cost")) == before
    page.run("document.querySelector('#figure-cost').scrollIntoView()")
    wait_for(page, f"{curves('cost')} === {before - 1}")
    assert page.complaints() == []
    page.close()


def test_figure_is_zoomed_and_saved_as_an_image(browser, report):
    page = browser.open(report, width=1280)
    page.run("window.saved = []; HTMLAnchorElement.prototype.click = "
             "function () { saved.push([this.download, this.href.slice(0, 5)]); }")  # fmt: skip
    chart = "document.querySelector('#figure-attainment').chart"
    page.run(ALL_DRAWN)
    axis = f"{chart}.plot.layout.xaxis.range"
    before = page.run(axis)
    page.run(f"{chart}.plot.querySelector('[data-attr=zoom][data-val=in]').dispatchEvent("
             "new MouseEvent('click', {bubbles: true}))")  # fmt: skip
    assert page.run(axis)[1] < before[1]
    for form in ("svg", "png"):
        page.run(f"{chart}.save('{form}')")
    assert [name for name, _ in page.run("saved")] == ["attainment.svg", "attainment.png"]
    whole = page.run(
        f"(() => {{ const c = {chart}, f = c.current();"
        " return Plotly.toImage({data: f.traces, layout: f.layout}, {format: 'svg'}); })()"
    )
    assert all(word in whole for word in ("Requests%20that%20met", "simulated", "orca", "vllm"))
    assert page.complaints() == []
    assert page.requests() == []
    page.close()


def test_printed_page_has_every_figure_in_light_colours(browser, report):
    page = browser.open(report, width=1280, dark=True)
    ground = "document.querySelector('#figure-cost .main-svg').style.background"
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.run(UNDRAWN) == []
    assert page.run(ground) == "rgb(255, 255, 255)"
    page.run("dispatchEvent(new Event('afterprint'))")
    page.run(ALL_DRAWN)
    assert page.run(ground) == "rgb(25, 29, 33)"
    assert page.complaints() == []
    page.close()


def test_page_loads_plotly_js_from_beside_it(browser, make_run, tmp_path):
    out = write_report([make_run()], tmp_path / "page.html", plotly="file")
    page = browser.open(out.as_uri(), width=1280)
    page.run(ALL_DRAWN)
    assert page.run(UNDRAWN) == []
    assert page.complaints() == []
    page.close()


def test_text_contrast_suffices_in_light_and_dark(browser, report):
    def luminance(colour):
        parts = [int(p) / 255 for p in colour[4:-1].split(",")]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for dark in (False, True):
        page = browser.open(report, width=1280, dark=dark)
        style = "getComputedStyle(document.querySelector('{}')).{}"
        page.run(ALL_DRAWN)
        ground = page.run(style.format("figure.figure", "backgroundColor"))
        assert (luminance(ground) < 0.2) == dark
        for selector, prop in ((".note", "color"), ("h3", "color"), (".plot text", "fill")):
            pair = sorted((luminance(ground), luminance(page.run(style.format(selector, prop)))))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (dark, selector)
        page.close()


def test_pointer_and_keys_show_values(browser, report):
    page = browser.open(report, width=1280)
    page.run("document.documentElement.style.scrollBehavior = 'auto'")
    page.run(ALL_DRAWN)
    for name in ("attainment", "ttft-distribution", "efficiency", "causes", "classes"):
        figure = f"document.querySelector('#figure-{name}')"
        place = page.run(
            f"(() => {{ {figure}.scrollIntoView({{block: 'center'}});"
            f"const r = {figure}.querySelector('.nsewdrag').getBoundingClientRect();"
            "return [r.left + r.width * .6, r.top + r.height * .5]; })()"
        )
        page.move(*place)
        page.settle()
        tip = f"{figure}.querySelector('.hoverlayer').textContent.length"
        wait_for(page, f"{tip} > 10")
        page.move(2, 2)
        wait_for(page, f"{tip} === 0")
        focused(page, figure)
        page.key("ArrowRight")
        assert page.run(f"{figure}.querySelector('[role=status]').textContent.length > 10"), name
    assert page.complaints() == []
    page.close()


def test_rate_and_percentile_can_be_chosen(browser, report):
    page = browser.open(report, width=1280)
    drawn = "document.querySelector('#figure-{} .js-line').getAttribute('d')"
    page.run(ALL_DRAWN)
    before = page.run(drawn.format("time-running"))
    rate = page.run("document.getElementById('rate').value")
    page.run("document.querySelector('.ratebar button:not(:disabled)').click()")
    assert page.run("document.getElementById('rate').value") != rate
    assert page.run(drawn.format("time-running")) != before
    before = page.run(drawn.format("ttft-rate"))
    page.run("document.querySelector('#figure-ttft-rate .choices button').click()")
    assert page.run(drawn.format("ttft-rate")) != before
    page.close()


def test_legend_hides_a_system_in_every_figure(browser, report):
    page = browser.open(report, width=1280)
    page.run(ALL_DRAWN)
    before = [page.run(curves(name)) for name in ("attainment", "goodput")]
    page.run("document.querySelector('#figure-attainment .legend button').click()")
    after = [page.run(curves(name)) for name in ("attainment", "goodput")]
    assert after == [n - 1 for n in before]
    pressed = "document.querySelector('#figure-goodput .legend button').ariaPressed"
    assert page.run(pressed) == "false"
    page.close()


def test_figure_numbers_open_as_a_table(browser, report):
    page = browser.open(report, width=400)
    page.run("document.querySelectorAll('figure details').forEach(d => { d.open = true; })")
    page.settle()
    empty = page.run(
        f"{FIGURES}.filter(f => !f.querySelector('details td')).map(f => f.dataset.figure)"
    )
    assert empty == []
    assert page.complaints() == []
    page.close()


def test_many_series_show_the_best_ten_first(browser, make_run, tmp_path):
    folder = make_run(systems=[f"s{i}" for i in range(15)], rates=[1.0, 2.0], seeds=1, requests=30)
    page = browser.open(write_report([folder], tmp_path / "many.html").as_uri(), width=1280)
    page.run(ALL_DRAWN)
    assert page.run(curves("attainment")) == 10
    page.run("document.querySelector('#figure-attainment .legend .more').click()")
    assert page.run("document.querySelectorAll('#figure-attainment .legend button').length") == 15
    assert page.complaints() == []
    page.close()


def test_each_facet_shows_its_own_best_ten_first(browser, make_run, tmp_path):
    small = {"rates": [1.0, 2.0], "seeds": 1, "requests": 30}
    first = make_run("one", systems=[f"a{i}" for i in range(9)], model="x", **small)
    second = make_run("two", systems=[f"b{i}" for i in range(12)], model="y", **small)
    page = browser.open(write_report([first, second], tmp_path / "many.html").as_uri(), width=1280)
    page.run(ALL_DRAWN)
    assert page.run(curves("attainment")) == 9
    page.run("document.querySelectorAll('.facetbar button')[1].click()")
    assert page.run(curves("attainment")) == 10
    assert page.run("document.querySelectorAll('#figure-attainment .legend button').length") == 12
    assert page.complaints() == []
    page.close()


def test_browser_fixture_notices_complaints_and_requests(browser, tmp_path):
    """What the other tests rely on."""
    path = tmp_path / "bad.html"
    path.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('no')</script>")
    page = browser.open(path.as_uri(), width=400)
    assert page.requests() == ["http://127.0.0.1:9/x.png"]
    assert any("'no'" in complaint for complaint in page.complaints())
    page.close()


def test_page_of_one_cell_is_drawn(browser, make_run, tmp_path):
    folder = make_run(systems=["vllm"], rates=[2.0], seeds=1, requests=1)
    page = browser.open(write_report([folder], tmp_path / "one.html").as_uri(), width=400)
    assert page.complaints() == []
    page.run(ALL_DRAWN)
    bars = "document.querySelectorAll('#figure-attainment .bars .point path').length"
    assert page.run(bars) == 1
    page.close()


@pytest.fixture(scope="module")
def validations(make_runs, tmp_path_factory):
    """The addresses of a report with a section on its simulation, and of a page of its own."""
    parent = tmp_path_factory.mktemp("validations")
    folder = make_runs(parent)(systems=["vllm"], rates=[1.0, 3.0], seeds=1, backend="vllm")
    steps = [LoggedStep(n, 400 * n, [(0, 300)] * (n % 2), 0.03 + 4e-4 * n) for n in range(1, 90)]
    source = Source("test", "steps")
    profile = profile_of_steps(steps, model="llama-3.1-8b", gpu="a100-80g", source=source)
    level, _ = validate_run(folder, profile)
    page = write_validation(level.validation, parent / "validation.html")
    return write_report([folder], parent / "report.html").as_uri(), page.as_uri()


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("own_page", [False, True], ids=["section", "own page"])
def test_scatter_of_measured_against_simulated_is_drawn(browser, validations, own_page, width):
    page = browser.open(validations[own_page], width=width)
    page.settle()
    page.run(ALL_DRAWN)
    for metric in ("ttft", "tpot", "e2e"):
        figure = f"document.querySelector('#figure-scatter-{metric}')"
        assert page.run(f"{figure}.querySelectorAll('path.point').length") > 20
        # The one line is the diagonal, as wide and as high as the points may lie.
        [[wide, high]] = page.run(
            f"[...{figure}.querySelectorAll('path.js-line')].map(l => [l.getBBox().width,"
            " l.getBBox().height])"
        )
        assert wide / page.run(f"{figure}.querySelector('.nsewdrag').getBBox().width") > 0.9
        assert high / page.run(f"{figure}.querySelector('.nsewdrag').getBBox().height") > 0.9
        assert page.run(f"{figure}.querySelector('.badge').textContent") == "simulated and measured"
    too_wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert page.run(too_wide) is False
    if not own_page:
        cells = page.run("document.querySelectorAll('#validation tbody tr').length")
        assert cells == 6
        second = "document.querySelectorAll('#figure-scatter-ttft .choices button')[1]"
        before = page.run("document.querySelector('#figure-scatter-ttft .plot').innerHTML")
        page.run(f"{second}.click()")
        page.settle()
        assert page.run("document.querySelector('#figure-scatter-ttft .plot').innerHTML") != before
    assert page.complaints() == []
    assert page.requests() == []
    page.close()


@pytest.mark.parametrize(("end_s", "says"), [(40, "20 s"), (1500, "20 min"), (86_400, "20 h")])
def test_time_axis_uses_seconds_minutes_or_hours(browser, make_run, tmp_path, end_s, says):
    folder = make_run(systems=["vllm", "orca"], rates=(2, 4), seeds=1)
    for path in (folder / "timelines").iterdir():
        timeline = pd.read_csv(path)
        timeline["time_s"] *= end_s / timeline["time_s"].max()
        timeline.to_csv(path, index=False)
    page = browser.open(write_report([folder], tmp_path / "report.html").as_uri(), width=1100)
    page.run(ALL_DRAWN)
    labels = page.run(
        "[...document.querySelectorAll('#figure-time-waiting .plot text')].map(t => t.textContent)"
    )
    assert says in labels
    assert page.complaints() == []
    page.close()
