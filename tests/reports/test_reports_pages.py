"""The page as text: escaped, whole, and saying where its numbers come from."""

import base64
import functools
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser

import pandas as pd
import pytest

from slo_bench.reports.pages.document import asset, json_for_html, plotly_version
from slo_bench.reports.pages.document import page as page_of
from slo_bench.reports.pages.run_page import write_report
from slo_bench.reports.pages.table import one_group
from slo_bench.workloads.errors import SloBenchError

HOSTILE = '</script><script>window.owned=1</script><img src=x onerror="window.owned=1">'


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the page's data."""

    def __init__(self, text):
        super().__init__()
        self.found, self._in_data, self.data_text = [], False, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._in_data = tag == "script" and dict(attrs).get("id") == "report-data"

    def handle_data(self, data):
        if self._in_data:
            self.data_text += data

    def handle_endtag(self, tag):
        self._in_data = False

    def of(self, tag):
        return [attributes for name, attributes in self.found if name == tag]

    @functools.cached_property
    def data(self):
        return json.loads(self.data_text)

    def plot(self, figure, key="only", facet=0):
        """What plotly draws for a view of a figure."""
        return self.opened(self.data["figures"][figure]["views"][facet][key])

    def opened(self, value):
        """A value of the page's data with what it refers to."""
        if isinstance(value, dict):
            if "$" in value:
                return self.opened(self.data["shared"][value["$"]])
            return {key: self.opened(inner) for key, inner in value.items()}
        return [self.opened(inner) for inner in value] if isinstance(value, list) else value


SMALL = {"rates": (1.0,), "seeds": 1, "requests": 20}
LADDER = {**SMALL, "rates": (1.0, 3.0)}


@pytest.fixture
def page(make_run, tmp_path):
    """A function from options of `make_run` to the page's text."""

    def write(**options):
        return write_report([make_run(**options)], tmp_path / "page.html").read_text()

    return write


@pytest.fixture(scope="module")
def whole_page(make_runs, tmp_path_factory):
    """The text of the page of a run with several rates and seeds."""
    folder = tmp_path_factory.mktemp("whole")
    return write_report([make_runs(folder)()], folder / "page.html").read_text()


def test_page_loads_nothing_from_outside(whole_page):
    elements = Elements(whole_page)
    assert "default-src 'none'" in elements.of("meta")[1]["content"]
    for tag, attributes in elements.found:
        assert attributes.get("src") is None, tag
        assert attributes.get("href", "#").startswith(("#", "data:")), tag
    assert len(elements.of("script")) == 3  # data, plotly.js, ours


@pytest.mark.parametrize("plotly", ["inline", "cdn", "file"])
def test_plotly_js_is_inline_linked_or_beside_the_page(make_run, tmp_path, plotly):
    page = write_report([make_run(**SMALL)], tmp_path / "page.html", plotly=plotly)
    elements = Elements(page.read_text())
    policy = elements.of("meta")[1]["content"]
    bundle = asset("plotly-basic.min.js").encode()
    beside = tmp_path / f"plotly-basic-{plotly_version()}.min.js"
    [library] = elements.of("script")[1:-1]
    assert ("unsafe" in policy.partition("script-src")[2]) is False
    assert beside.is_file() == (plotly == "file")
    if plotly == "inline":
        assert page.stat().st_size > len(bundle)
        assert base64.b64encode(hashlib.sha256(bundle).digest()).decode() in policy
        return
    assert page.stat().st_size < len(bundle) / 4
    if plotly == "cdn":
        digest = base64.b64encode(hashlib.sha384(bundle).digest()).decode()
        assert library["integrity"] == f"sha384-{digest}"
        assert library["src"] in policy
        assert f"@{plotly_version()}/" in library["src"]
    else:
        assert library["src"] == beside.name
        assert beside.read_bytes() == bundle


def test_page_shows_no_folder_of_the_machine(make_run, tmp_path):
    folder = "/home/somebody/a project"
    step_time = {f"{folder}/m on a100-80g tp1": {"fitted": True, "provenance": f"'{folder}/p'"}}
    environment = {
        "step_time": step_time,
        "inputs": {f"{folder}/t.csv": "ab"},
        "command": ["slo-bench", "run", "--model", f"{folder}/m"],
    }
    toml = f'name = "x"\nmodel = "{folder}/m"\nworkload = "{folder}/t.csv"\n'
    run = make_run("run", toml=toml, environment=environment)
    page = write_report([run], tmp_path / "page.html").read_text()
    assert "somebody" not in page
    assert "…/t.csv" in page


def test_page_without_figures_has_no_plotly_js():
    methods = one_group("M", ("a",), [["b"]])
    shown = {"heading": "h", "answer": "a", "rows": [], "notes": [], "footer": "f"}
    data = {"series": [], "figures": {}}
    text = page_of("placement.html", data, layers=1, methods=methods, **shown)
    assert len(text) < 50_000


def test_page_figures_have_data_and_say_simulated(whole_page):
    text = whole_page
    elements = Elements(text)
    framed = [a["data-figure"] for a in elements.of("figure")]
    data = elements.data
    assert set(framed) == set(data["figures"])
    assert {"attainment", "goodput", "causes", "efficiency", "cost", "classes"} <= set(framed)
    assert data["origin"] == "simulated"
    badges = len(re.findall(r'<span class="badge">simulated</span>', text))
    assert badges == len(framed) + 3  # and all tables
    assert "<strong>Simulated.</strong>" in text


@pytest.mark.slow
def test_page_marks_measured_and_unfitted_runs(page):
    measured = page(name="m", **SMALL, backend="vllm 0.32")
    assert "Simulated.</strong>" not in measured
    assert '<span class="badge measured">measured</span>' in measured
    unfitted = page(name="u", **SMALL, step_time="unfitted")
    assert "simulated · unfitted</span>" in unfitted
    assert "Unfitted step times.</strong> llama-3.1-8b on a100-80g" in unfitted


def test_page_curves_equal_the_cells(page, tmp_path):
    elements = Elements(page(rates=[1.0, 3.0]))
    data = elements.data
    curve = next(t for t in elements.plot("attainment")["data"] if t["mode"] == "lines+markers")
    assert curve["x"] == [1, 3]
    shares = [share / 100 for share in curve["y"]]
    lines = (tmp_path / "run/cells.csv").read_text().splitlines()
    attainment, system = (lines[0].split(",").index(c) for c in ("attainment", "system"))
    rows = [r.split(",") for r in lines[1:]]
    of_first = [float(r[attainment]) for r in rows if r[system] == data["series"][0]]
    assert shares[0] == pytest.approx(sum(of_first[:2]) / 2, abs=1e-3)


def test_page_curves_have_at_most_two_hundred_points(page):
    elements = Elements(page(rates=(1.0, 3.0), seeds=1, requests=400))
    for name, figure in elements.data["figures"].items():
        for key in figure["views"][0]:
            traces = elements.plot(name, key)["data"]
            assert all(len(t["x"]) <= 200 for t in traces if t.get("mode") != "lines"), name


@pytest.mark.slow
def test_page_escapes_hostile_text(page):
    text = page(
        **LADDER,
        systems=[HOSTILE, "vllm"],
        model=HOSTILE,
        axes={"axis<b>": ["<script>1", "2"]},
        toml=f'name = "{HOSTILE}"\n',
        environment={HOSTILE: HOSTILE, "step_time": {HOSTILE: {"provenance": HOSTILE}}},
    )
    elements = Elements(text)
    assert len(elements.of("script")) == 3
    assert not elements.of("img")
    assert not [a for _, a in elements.found if any(k.startswith("on") for k in a)]
    assert any(HOSTILE in name for name in elements.data["series"])
    assert "&lt;/script&gt;&lt;script&gt;window.owned=1" in text


def test_embedded_json_has_no_markup_and_is_parsed_back():
    value = {"<b>": ["</script>", "a & b", "\u2028"]}
    text = json_for_html(value)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == value


def test_page_shows_the_configuration_verbatim(page):
    assert "<pre>a = 1 # &lt;x&gt;\n\nb = &#34;2&#34;\n</pre>" in page(
        **SMALL, toml='a = 1 # <x>\n\nb = "2"\n'
    )


@pytest.mark.slow
def test_answer_names_the_winner(page):
    text = page(rates=[1.0, 3.0], requests=400)
    answer = re.search(r'<p class="answer">(.*?)</p>', text).group(1)
    assert answer.startswith("<strong>vllm</strong> carries <strong>3 req/s</strong>")
    none = page(name="none", **LADDER, attainment=0.2)
    assert "No system kept 90\xa0%" in none


LONG = [f"mix(chat=synthetic(prompt=uniform({n},500)):1,code=azure-code:9)" for n in (1, 2, 3)]


def answer_of(text):
    return re.sub("<[^>]+>|&nbsp;", " ", re.search(r'<p class="answer">(.*?)</p>', text).group(1))


@pytest.mark.slow
def test_page_has_figures_and_rates_for_each_facet(page):
    text = page(axes={"workload": LONG, "model": ["x", "y"]}, seeds=1, requests=20)
    elements = Elements(text)
    data = elements.data
    assert sorted(data["series"]) == ["orca", "vllm"]
    assert len(data["facets"]) == 6
    assert [rate for rate, _ in data["facets"][0]["rates"]] == ["1", "3", "5"]
    for figure in data["figures"].values():
        assert len(figure["views"]) == 6
        for views in figure["views"]:
            for plot in map(elements.opened, views.values()):
                assert {t["meta"]["s"] for t in plot["data"] if "meta" in t} <= {0, 1}
    panels = [a for a in elements.of("figure") if "data-facet" in a]
    assert [a["data-facet"] for a in panels] == list("012345")
    assert text.count('<option value="0" selected>chat prompt uniform(1,500) · x</option>') == 1
    for workload in LONG:  # in the legend, and nowhere else
        assert text.count(workload) == 1
    assert "of 6</strong> cases" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "changes", "sentence"),
    [
        ({"model": ["x", "y"]}, {"attainment": 0.95},
         "By highest rate with at least 90 % of requests in their SLO both systems are level in  "
         "2 of 2  models. vllm has the highest goodput"),
        ({"model": ["x", "y"]}, {"attainment": 0.2},
         "No system kept 90 % of requests in their SLO in any model."),
        ({"model": ["x", "y"]}, {"rate_rps": "", "throughput_rps": 2.5},
         "By finished requests per second both systems are level in 2 of 2  models."),
        ({}, {"rate_rps": "", "throughput_rps": 2.5}, "vllm and orca  finish  2.5 req/s ."),
        ({}, {"rate_rps": 4.0, "attainment": 0.875},
         "vllm and orca  keep  87.5 %  of requests in their SLO at 4 req/s."),
    ],
)  # fmt: skip
def test_answer_describes_the_run(page, axes, changes, sentence):
    text = answer_of(page(axes=axes, requests=60, rates=[4.0, 5.0], **changes))
    assert " ".join(sentence.split()) in " ".join(text.split())


@pytest.mark.slow
def test_answer_names_few_systems_and_counts_many(page):
    few = answer_of(page(name="few", systems=["a", "b", "c"], attainment=1.0, **LADDER))
    assert few.strip().startswith("a, b and c  carry")
    many = answer_of(page(name="many", systems=list("abcd"), attainment=1.0, **LADDER))
    assert many.strip().startswith("4 systems  carry")
    axes = {"router": list("abcd")}
    swept = answer_of(page(name="swept", systems=["x"], axes=axes, attainment=1.0, **LADDER))
    assert swept.strip().startswith("4 configurations  carry")


@pytest.mark.slow
def test_answer_counts_the_facets_of_the_best(make_run, tmp_path):
    folder = make_run(axes={"model": ["x", "y", "z"]}, rates=[1.0, 2.0], seeds=1, requests=30)
    cells = pd.read_csv(folder / "cells.csv", dtype={"cell": "str"})
    # vllm carries 2 req/s of x and z, orca of z; of y orca 1 req/s and vllm nothing.
    best = {
        ("vllm", "x"): 2,
        ("vllm", "z"): 2,
        ("orca", "x"): 1,
        ("orca", "y"): 1,
        ("orca", "z"): 2,
    }
    cells["attainment"] = [
        1.0 if rate <= best.get((system, model), 0) else 0.5
        for system, model, rate in zip(cells.system, cells.model, cells.rate_rps, strict=True)
    ]
    cells["goodput_rps"] = cells["rate_rps"] * (1 + (cells["system"] == "orca"))
    cells.to_csv(folder / "cells.csv", index=False)
    answer_text = answer_of(write_report([folder], tmp_path / "r.html").read_text())
    assert "vllm and orca each carry the most load" in " ".join(answer_text.split())
    assert "2 of 3 models. orca has the highest goodput in 3 of 3 models." in " ".join(
        answer_text.split()
    )


@pytest.mark.slow
def test_title_counts_workloads_with_dependent_labels(page):
    title = (
        page(axes={"workload": LONG}, systems=["vllm"], **SMALL)
        .partition("<h1>")[2]
        .partition("</h1>")[0]
    )
    assert title == "llama-3.1-8b on a100-80g, 3 workloads"
    named = [text.replace("mix(", f"mix(name=load {n},") for n, text in enumerate(LONG)]
    text = page(name="given", axes={"workload": named}, systems=["vllm"], **SMALL)
    assert text.partition("<h1>")[2].startswith("llama-3.1-8b on a100-80g, load 0, load 1, load 2")
    alone = page(name="alone", axes={"workload": LONG[:1]}, systems=["vllm"], **SMALL)
    assert alone.partition("<h1>")[2].startswith("llama-3.1-8b on a100-80g, mix(…)<")


def test_answer_counts_facets_without_an_offered_rate_apart(make_run, tmp_path):
    ladder = make_run("ladder", model="x", **LADDER, attainment=1.0)
    at_once = make_run("once", model="y", **SMALL, rate_rps="", attainment=1.0)
    text = write_report([ladder, at_once], tmp_path / "both.html").read_text()
    answer_text = " ".join(answer_of(text).split())
    assert "in 1 of 1 model. In 1 all requests arrive at once." in answer_text
    assert "≥ 0" not in text
    assert [facet["rates"] for facet in Elements(text).data["facets"]][1] == [["0", "0 req/s"]]


def test_page_at_once_has_bars_and_does_not_mention_capacity(page):
    text = page(rates=[4.0], rate_rps="", requests=60, toml='slo = ""\n', attainment=1.0)
    elements = Elements(text)
    data = elements.data
    assert "carr" not in answer_of(text)
    assert "≥ " not in text.partition("Definitions")[0]
    assert "Against load" not in text
    assert 'id="rate"' not in text
    assert "no SLO" in text
    assert {"throughput", "makespan", "ttft-compared", "e2e-compared"} <= set(data["figures"])
    assert not {"attainment", "ttft-rate", "causes", "classes"} & set(data["figures"])
    bars = [t for t in elements.plot("throughput")["data"] if t["type"] == "bar"]
    assert [bar["meta"]["s"] for bar in bars] == [0, 1]
    assert all(low <= bar["x"][0] <= high for bar in bars for low, high in bar["customdata"])


def test_published_table_follows_the_summary(make_run, tmp_path):
    table = tmp_path / "mine.toml"
    rows = "".join(f"[[row]]\nwhat = 'row {n}'\npublished = 1\nnote = 'why'\n" for n in range(30))
    table.write_text(f"title = 'A paper'\n{rows}")
    folder = make_run(toml=f"published = '{table}'\n", **LADDER)
    text = write_report([folder], tmp_path / "r.html").read_text()
    places = [text.index(f'id="{name}"') for name in ("published", "load", "worth", "setup")]
    assert places == sorted(places)
    assert text.index("summary rates") < places[0]
    assert "30 rows: 30 not run." in text
    assert "the knee" not in text.partition('id="load"')[0]


def test_page_of_several_runs_joins_them(make_run, tmp_path):
    simulated = make_run("sim", **LADDER, systems=["vllm"])
    measured = make_run("real", **LADDER, systems=["vllm"], backend="vllm 0.32")
    text = write_report([simulated, measured], tmp_path / "both.html").read_text()
    assert sorted(Elements(text).data["series"]) == ["vllm · simulated", "vllm · vllm 0.32"]
    assert "simulated and measured" in text
    assert text.count("<summary>Configuration of ") == 2


def test_page_names_invalid_cells_and_leaves_them_out(make_run, tmp_path):
    folder = make_run(systems=["vllm"], rates=[1.0, 2.0], seeds=1)
    cells = (folder / "cells.csv").read_text().splitlines()
    cells[2] = cells[2].replace(",True,", ",False,")
    (folder / "cells.csv").write_text("\n".join(cells) + "\n")
    text = write_report([folder], tmp_path / "r.html").read_text()
    assert "Invalid cells.</strong> 1 of 2" in text
    [curve] = Elements(text).plot("attainment")["data"]
    assert curve["x"] == [1]
    cells[1] = cells[1].replace(",True,", ",False,")
    (folder / "cells.csv").write_text("\n".join(cells) + "\n")
    with pytest.raises(SloBenchError, match=r"no cell of .* is valid"):
        write_report([folder], tmp_path / "s.html")


def test_page_of_a_run_without_request_records(make_run, tmp_path):
    folder = make_run(**LADDER)
    for file in (folder / "requests").iterdir():
        file.unlink()
    (folder / "requests").rmdir()
    text = write_report([folder], tmp_path / "r.html").read_text()
    assert "No per-request records" in text
    assert "cost" not in Elements(text).data["figures"]


def test_page_without_a_price_has_no_cost_figure(page):
    text = page(**LADDER, cost_usd_per_hour="")
    assert "cost" not in Elements(text).data["figures"]
    assert "no price is known" in text


@pytest.mark.slow
def test_write_report_to_an_unwritable_place_leaves_nothing(make_run, tmp_path):
    with pytest.raises(SloBenchError, match="cannot write"):
        write_report([make_run(**SMALL)], tmp_path / "absent" / "report.html")
    assert not (tmp_path / "absent").exists()
    (tmp_path / "folder").mkdir()
    with pytest.raises(SloBenchError, match="cannot write"):
        write_report([make_run("b", **SMALL)], tmp_path / "folder")
    assert not list(tmp_path.glob(".*.part"))


def test_write_report_repeats_the_same_bytes(make_run, tmp_path):
    folder = make_run(seeds=1, requests=60)
    first, second = (write_report([folder], tmp_path / f"{n}.html").read_bytes() for n in "ab")
    assert first == second


@pytest.mark.slow
def test_page_of_a_cpu_run_counts_no_gpus(page, whole_page):
    assert "<li>1 GPU</li>" in whole_page
    assert "GPU</li>" not in page(**SMALL, gpu="cpu", backend="torch")


def test_page_answers_before_it_warns_and_shows_bands_unfolded(page):
    bands = {"band_low_attainment": 0.85, "band_high_attainment": 1.0, "band_basis": "tables"}
    text = page(**LADDER, **bands)
    places = [text.index(mark) for mark in ('class="answer"', "<table>", 'class="notice"')]
    assert places == sorted(places)
    assert "90\xa0% prediction band" in text
    assert '<span class="range">&lt; 1 to ≥ 3</span>' in text
    assert 'data-range="0.0 100.0"' in text
    assert "Prediction bands" not in "".join(re.findall("<summary>(.*?)</summary>", text))
    assert '<section id="bands">' in text


def test_page_of_several_seeds_shows_their_range_where_no_cell_has_a_band(page):
    text = page(rates=(1.0, 5.0), seeds=2, requests=60)
    assert "lowest to highest seed" in text


def test_page_without_request_records_names_the_slo_of_the_experiment(make_run, tmp_path):
    toml = 'systems = ["vllm"]\nslo = "ttft=1,tpot=0.15"\nslo_scale = 2\n'
    folder = make_run(**SMALL, toml=toml)
    shutil.rmtree(folder / "requests")
    text = write_report([folder], tmp_path / "page.html").read_text()
    assert "SLO: TTFT ≤ 1 s, TPOT ≤ 150 ms" not in text
    assert "SLO: TTFT ≤ 2 s, TPOT ≤ 300 ms" in text


def test_allowed_table_prints_values_of_parameters_at_their_default(page):
    toml = 'systems = ["vllm"]\n[parameters.vllm]\nmax_num_seqs = 8\n'
    text = page(**SMALL, systems=["vllm"], toml=toml)
    assert "max_num_seqs=8, max_num_batched_tokens=2048, async_scheduling=false" in text
