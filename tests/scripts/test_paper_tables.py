"""Tables on docs/papers/*.md are those of the kept results, and no other table passes for one."""

import re
import shutil
import tomllib

import pandas as pd
import pytest

from slo_bench.cli.main import app
from slo_bench.reports.pages.published_table import load_published
from slo_bench.workloads.errors import SloBenchError

MARK = re.compile(r"^\*Measured by hand up to commit [0-9a-f]{7}, not generated:\*$", re.M)
NUMBERS = re.compile(r"^\|(.*\|)?( *[<+−-]?\d[\d.,]*\*? *\|){2,}", re.M)


@pytest.fixture(scope="session")
def tables(paper_tables):
    return paper_tables


def pages(tables):
    return sorted(tables.PAGES.glob("*.md"))


@pytest.mark.slow
def test_pages_equal_those_written_from_kept_results(tables):
    """After a change: scripts/paper_tables.py --pages-only."""
    for page in tables.all_pages():
        text = page.read_text()
        assert tables.written(text) == text, page.name


def test_mechanisms_that_published_rows_read_act_in_some_cell(tables):
    """A claim about a mechanism that never acts in its suite would be judged by its absence."""
    for folder in sorted(tables.RESULTS.iterdir()):
        named = {}
        if (folder / "cells.csv").is_file():
            named = tomllib.loads((folder / "experiment.toml").read_text())
        if "published" not in named:
            continue
        cells = pd.read_csv(folder / "cells.csv")
        for row in load_published(named["published"]).rows:
            if (row.column or "").startswith("count_"):
                assert cells[row.column].max() > 0, (folder.name, row.what)


@pytest.mark.slow
def test_a_changed_result_changes_the_page(tables, results, tmp_path):
    page = tables.written(PAGE, results)
    assert "| 12.3" not in page
    shutil.copytree(results, tmp_path, dirs_exist_ok=True)
    cells = tmp_path / "ascendra" / "cells.csv"
    header, *rows = cells.read_text().splitlines()
    at = header.split(",").index("attainment")
    changed = [
        ",".join([*row.split(",")[:at], "0.1234", *row.split(",")[at + 1 :]]) for row in rows
    ]
    cells.write_text("\n".join([header, *changed]) + "\n")
    again = tables.written(PAGE, tmp_path)
    assert "| 12.3" in again
    assert again != page
    assert tables.written(again, tmp_path) == again


TINY = (
    "--requests 40 --warmup 0 --rates 2,3 --seeds 1 --router least-loaded"
    " --sweep sarathi.chunk_tokens=512,8192"
)


PAGE = """<!-- published: suite = "ascendra" -->
<!-- end -->
<!-- table: suite = "ascendra", rows = ["system", "sarathi.chunk_tokens"], columns = "rate_rps",
     value = "attainment", scale = 100 -->
<!-- end -->
<!-- fitted: paper = "prism" -->
<!-- end -->
"""


@pytest.fixture(scope="module")
def results(tables, tmp_path_factory):
    """The results of a suite with few requests, which `PAGE` shows. No test changes them."""
    folder = tmp_path_factory.mktemp("results")
    tables.run_suite("ascendra", {"attainment"}, 1, results=folder, options=TINY.split())
    return folder


@pytest.mark.slow
def test_stopped_suite_run_is_continued(tables, results, tmp_path):
    begun = tmp_path / "work" / "ascendra"
    asked = ["run", "--suite", "ascendra", *TINY.split(), "--records", "none", "--no-report"]
    app([*asked, "--out", str(begun)], standalone_mode=False)
    lines = (begun / "cells.csv").read_text().splitlines(keepends=True)
    (begun / "cells.csv").write_text("".join(lines[:-2]))
    tables.run_suite(
        "ascendra",
        {"attainment"},
        1,
        results=tmp_path / "again",
        options=TINY.split(),
        work=tmp_path / "work",
    )
    whole, again = (
        sorted((folder / "ascendra" / "cells.csv").read_text().splitlines())
        for folder in (results, tmp_path / "again")
    )
    assert again == whole
    assert not begun.exists()


@pytest.mark.slow
def test_suite_run_keeps_the_files_that_its_page_needs(tables, results):
    assert {path.name for path in (results / "ascendra").iterdir()} == {
        "cells.csv", "environment.json", "experiment.toml",
    }  # fmt: skip
    page = tables.written(PAGE, results)
    assert "| req/s | 2 | 3 |" in page
    assert "| sarathi, chunk_tokens 8192 | " in page
    assert "24 another set-up" in page  # 10 req/s is needed
    assert "- Bandwidth of a host link, 11.4 GB/s" in page
    assert "`slo-bench run --suite ascendra --requests 40 --warmup 0 --rates 2,3" in page
    assert re.search(r" at [0-9a-f]{7,}", page)


def test_table_block_with_an_error_is_refused(tables, results):
    def block(text):
        return tables.written(f"<!-- table: {text} -->\n<!-- end -->", results)

    asked = 'suite = "ascendra", columns = "rate_rps", value = "attainment"'
    with pytest.raises(SloBenchError, match="is not TOML"):
        block("suite =")
    other = asked.replace("ascendra", "uellm") + ', rows = ["system"]'
    assert block(other) == f"<!-- table: {other} -->\n<!-- end -->"  # no results: as it is
    with pytest.raises(SloBenchError, match="has no column nothing"):
        block(asked + ', rows = ["nothing"]')
    with pytest.raises(SloBenchError, match="needs more in rows or where"):
        block(asked + ', rows = ["system"]')
    with pytest.raises(SloBenchError, match="model: x is needed, the run has mistral-7b"):
        block(asked + ', rows = ["system"], where = { model = "x" }')


CLAIMS = """title = "A paper"
paper = "ascendra"
[[row]]
claim = "Within SLO"
decides = "The cap."
what = "Ascendra"
published = "> 0"
unit = "%"
column = "attainment"
scale = 100
where = { system = "ascendra", rate_rps = 2 }
[[row]]
claim = "Within SLO"
setup = "fair"
what = "Sarathi"
published = "> 0"
unit = "%"
column = "attainment"
scale = 100
where = { system = "sarathi", "sarathi.chunk_tokens" = 8192, rate_rps = 2 }
[[row]]
claim = "Elsewhere"
what = "Energy"
published = 3
"""


def test_claims_block_shows_both_setups_of_a_claim(tables, results, tmp_path):
    shutil.copytree(results, tmp_path, dirs_exist_ok=True)
    (tmp_path / "table.toml").write_text(CLAIMS)
    experiment = tmp_path / "ascendra" / "experiment.toml"
    named = f'published = "{tmp_path / "table.toml"}"'
    experiment.write_text(experiment.read_text().replace('published = "ascendra"', named))

    def block(fields):
        return tables.written(f"<!-- claims: {fields} -->\n<!-- end -->", tmp_path)

    page = block('paper = "ascendra"')
    head, _, first, second = [line for line in page.splitlines() if line.startswith("|")]
    assert head == "| claim | as published | fair | what decides it |"
    claim, published, fair, decides = first.strip("| ").split(" | ")
    assert (claim, decides) == ("Within SLO: > 0 %", "The cap.")
    assert re.fullmatch(r"[\d.]+ %, undecided", published)  # one seed
    assert re.fullmatch(r"[\d.]+ %, undecided", fair)
    assert second == "| Elsewhere: 3.00 | not run | not run |  |"
    assert "From `slo-bench run --suite ascendra`." in page
    assert "Elsewhere" not in block('paper = "ascendra", only = ["Within SLO"]')
    with pytest.raises(SloBenchError, match="did you mean Within SLO"):
        block('paper = "ascendra", only = ["Within SLOs"]')


def test_page_sections_with_handwritten_figures_say_so(tables):
    for page in [*pages(tables), tables.PAGES.with_suffix(".md")]:
        text = tables._BLOCK.sub("", page.read_text())
        for section in re.split(r"^(?=## )", text, flags=re.M):
            if NUMBERS.search(section):
                assert MARK.search(section), f"{page.name}: {section.splitlines()[0]}"


NOT_YET = "*Not generated yet.*"


def test_blocks_without_results_say_so(tables):
    for page in tables.all_pages():
        for _, kind, given, content, _ in tables._BLOCK.findall(page.read_text()):
            suite = tables.source_of(tables.block_fields(given))
            missing = suite is not None and not (tables.RESULTS / suite).is_dir()
            assert (content.strip() == NOT_YET) == missing, f"{page.name}: {kind} {suite}"


def test_kept_runs_cover_the_rows_of_their_tables(tables):
    """No row of a suite's table asks for another set-up than the suite has."""
    for page in tables.all_pages():
        for _, kind, _, content, _ in tables._BLOCK.findall(page.read_text()):
            if kind == "published":
                assert "another set-up" not in content
                assert "not unique" not in content


def test_kept_results_are_small_and_shown(tables):
    texts = [page.read_text() for page in tables.all_pages()]
    shown = {suite for text in texts for suite, _ in tables.shown_suites(text)}
    shown |= {name for text in texts for name, _ in tables.shown_outputs(text)}
    kept = {folder.name for folder in tables.RESULTS.iterdir()}
    assert kept <= shown
    for path in tables.RESULTS.rglob("*.csv"):
        assert path.stat().st_size < 350_000, path


def test_output_block_shows_the_output_of_its_command(tables, tmp_path):
    head = '<!-- output: name = "version", command = ["--version"] -->'
    [(name, command)] = tables.shown_outputs(f"{head}\n<!-- end -->")
    tables.run_output(name, command, results=tmp_path)
    page = tables.written(f"{head}\n<!-- end -->", tmp_path)
    assert "    slo-bench --version\n\n```text\nslo-bench 0." in page
    assert tables.written(page, tmp_path) == page


def test_output_block_with_lines_shows_the_first_ones(tables, tmp_path):
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "environment.json").write_text('{"command": ["x"], "commit": "0a7969c"}')
    (tmp_path / "three" / "output.txt").write_text("first\nsecond\nthird\n")
    head = '<!-- output: name = "three", command = ["x"], lines = 2 -->'
    page = tables.written(f"{head}\n<!-- end -->", tmp_path)
    assert "```text\nfirst\nsecond\n```" in page


@pytest.mark.parametrize(
    "page", ["adaptivellm", "ascendra", "banaserve", "collocation", "prism", "uellm"]
)
def test_each_papers_page_has_the_table_of_where_it_runs(tables, page):
    text = (tables.PAGES / f"{page}.md").read_text(encoding="utf-8")
    blocks = [match for match in tables._BLOCK.finditer(text) if match[2] == "backends"]
    assert blocks
    for block in blocks:
        fields = tables.block_fields(block[3])
        assert block[4].strip() == tables._backends_block(fields, tables.RESULTS).strip()
        assert "| system | simulated | vllm | sglang | torch |" in block[4]


def test_backends_of_a_system_with_parameters_are_its_own(tables):
    plain, routing = "banaserve", "banaserve with store=false layer_moves=false head_moves=false"
    block = tables._backends_block({"systems": [plain, routing]}, tables.RESULTS)
    assert f"| `{plain}` | yes | no | no | yes |" in block
    assert f"| `{routing}` | yes | yes | no | yes |" in block
