"""The page as text: escaped, whole, and saying where its numbers come from."""

import json
import re
from html.parser import HTMLParser

import pytest

from slo_bench.reports.html import json_for_html, write_report
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
        return [attributes for found, attributes in self.found if found == tag]

    @property
    def data(self):
        return json.loads(self.data_text)


@pytest.fixture
def page(make_run, tmp_path):
    """A function from options of `make_run` to the page's text."""

    def write(**options):
        return write_report([make_run(**options)], tmp_path / "page.html").read_text()

    return write


def test_the_page_asks_for_nothing_outside_itself(page):
    elements = Elements(page())
    assert "default-src 'none'" in elements.of("meta")[1]["content"]
    for tag, attributes in elements.found:
        assert attributes.get("src") is None, tag
        assert attributes.get("href", "#").startswith(("#", "data:")), tag
    assert len(elements.of("script")) == 2


def test_every_figure_on_the_page_has_data_and_says_simulated(page):
    text = page()
    elements = Elements(text)
    framed = [a["data-figure"] for a in elements.of("figure")]
    data = elements.data
    assert set(framed) == set(data["figures"])
    assert {"attainment", "goodput", "causes", "efficiency", "cost", "classes"} <= set(framed)
    assert data["origin"] == "simulated"
    badges = len(re.findall(r'<span class="badge">simulated</span>', text))
    assert badges == len(framed) + 2  # and both tables
    assert "<strong>Simulated.</strong>" in text


def test_measured_and_unfitted_pages_say_so(page):
    measured = page(name="m", backend="vllm 0.32")
    assert "Simulated.</strong>" not in measured
    assert '<span class="badge measured">measured</span>' in measured
    unfitted = page(name="u", step_time="unfitted")
    assert "simulated · unfitted</span>" in unfitted
    assert "Unfitted step times.</strong> llama-3.1-8b on a100-80g" in unfitted


def test_curves_hold_what_the_cells_say(page, tmp_path):
    data = Elements(page(rates=[1.0, 3.0])).data
    curve = data["figures"]["attainment"]["views"]["only"]["series"][0]
    assert data["arrays"][curve["x"]] == [1, 3]
    shares = data["arrays"][curve["y"]]
    lines = (tmp_path / "run/cells.csv").read_text().splitlines()
    at, system = (lines[0].split(",").index(c) for c in ("attainment", "system"))
    rows = [r.split(",") for r in lines[1:]]
    of_first = [float(r[at]) for r in rows if r[system] == data["series"][0]]
    assert shares[0] == pytest.approx(sum(of_first[:2]) / 2, rel=1e-3)


def test_no_curve_has_more_than_two_hundred_points(page):
    data = Elements(page(requests=400)).data
    assert max(map(len, data["arrays"])) <= 200


def test_hostile_text_is_escaped_everywhere(page):
    text = page(
        systems=[HOSTILE, "vllm"],
        model=HOSTILE,
        axes={"axis<b>": ["<script>1", "2"]},
        toml=f'name = "{HOSTILE}"\n',
        environment={HOSTILE: HOSTILE, "step_time": {HOSTILE: {"provenance": HOSTILE}}},
    )
    elements = Elements(text)
    assert len(elements.of("script")) == 2
    assert not elements.of("img")
    assert not [a for _, a in elements.found if any(k.startswith("on") for k in a)]
    assert any(HOSTILE in name for name in elements.data["series"])
    assert "&lt;/script&gt;&lt;script&gt;window.owned=1" in text


def test_embedded_json_has_no_markup_and_reads_back():
    value = {"<b>": ["</script>", "a & b", "\u2028"]}
    text = json_for_html(value)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == value


def test_the_configuration_is_shown_verbatim(page):
    assert "<pre>a = 1 # &lt;x&gt;\n\nb = &quot;2&quot;\n</pre>" in page(
        toml='a = 1 # <x>\n\nb = "2"\n'
    )


def test_the_answer_names_the_winner(page):
    text = page(rates=[1.0, 3.0], requests=400)
    answer = re.search(r'<p class="answer">(.*?)</p>', text).group(1)
    assert answer.startswith("<strong>vllm</strong> carries <strong>3 req/s</strong>")
    none = page(name="none", attainment=0.2)
    assert "No system kept 90&nbsp;%" in none


def test_several_runs_make_one_page(make_run, tmp_path):
    simulated = make_run("sim", systems=["vllm"])
    measured = make_run("real", systems=["vllm"], backend="vllm 0.32")
    text = write_report([simulated, measured], tmp_path / "both.html").read_text()
    assert sorted(Elements(text).data["series"]) == ["vllm · simulated", "vllm · vllm 0.32"]
    assert "simulated and measured" in text
    assert text.count("<summary>Configuration of ") == 2


def test_invalid_cells_are_named_and_left_out(make_run, tmp_path):
    folder = make_run(systems=["vllm"], rates=[1.0, 2.0], seeds=1)
    cells = (folder / "cells.csv").read_text().splitlines()
    cells[2] = cells[2].replace(",True,", ",False,")
    (folder / "cells.csv").write_text("\n".join(cells) + "\n")
    text = write_report([folder], tmp_path / "r.html").read_text()
    assert "Invalid cells.</strong> 1 of 2" in text
    assert Elements(text).data["arrays"][0] == [1]
    cells[1] = cells[1].replace(",True,", ",False,")
    (folder / "cells.csv").write_text("\n".join(cells) + "\n")
    with pytest.raises(SloBenchError, match=r"no cell of .* is valid"):
        write_report([folder], tmp_path / "s.html")


def test_a_run_without_request_records_is_reported(make_run, tmp_path):
    folder = make_run()
    for file in (folder / "requests").iterdir():
        file.unlink()
    (folder / "requests").rmdir()
    text = write_report([folder], tmp_path / "r.html").read_text()
    assert "No per-request records" in text
    assert "cost" not in Elements(text).data["figures"]


def test_no_price_no_cost_figure(page):
    text = page(cost_usd_per_hour="")
    assert "cost" not in Elements(text).data["figures"]
    assert "no price is known" in text


def test_an_unwritable_place_leaves_nothing(make_run, tmp_path):
    with pytest.raises(SloBenchError, match="cannot write the report"):
        write_report([make_run()], tmp_path / "absent" / "report.html")
    assert not (tmp_path / "absent").exists()
    (tmp_path / "folder").mkdir()
    with pytest.raises(SloBenchError, match="cannot write the report"):
        write_report([make_run("b")], tmp_path / "folder")
    assert not list(tmp_path.glob(".*.part"))


def test_the_same_run_gives_the_same_bytes(make_run, tmp_path):
    folder = make_run()
    one, two = (write_report([folder], tmp_path / f"{n}.html").read_bytes() for n in "ab")
    assert one == two
