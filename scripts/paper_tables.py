#!/usr/bin/env python3
"""Tables of results on pages of the documentation, from runs of the suites.

Usage: scripts/paper_tables.py [--pages-only] [--suite NAME]... [--jobs N] [--work DIR]

Without options every suite that a page shows is run again, its results are kept in
docs/papers/results/SUITE (a run folder with the columns that the pages need, and the commit that
made it), and the marked blocks of all pages are written again. `--suite` runs one suite and writes
its blocks, `--pages-only` runs none. The pages are docs/papers.md and those of docs/papers and
docs/measurements. Runs last up to hours: with `--work DIR` they stand in
DIR/SUITE until they end, and the same command continues one that was stopped. A block of a page
stands between two comments:

    <!-- published: suite = "ascendra" -->
    <!-- table: suite = "ascendra", rows = ["system"], columns = "rate_rps", value = "attainment",
         scale = 100, where = { model = "mistral-7b" } -->
    <!-- map: suite = "parallelism-map", value = "tpot_p99_s" -->
    <!-- claims: paper = "uellm" -->
    <!-- fitted: paper = "prism" -->
    <!-- backends: systems = ["prism", "prism-queue"] -->
    <!-- output: name = "step-times-ascendra", command = ["sensitivity", "--rate", "10", …] -->
    …
    <!-- end -->

`published` is the suite's table of published results with its verdicts. `claims` begins a page:
each claim of the paper's published tables (or those named by `only`), as published and in a fair
set-up, and what decides it. `table` shows the mean over seeds of a column for each value of the
axes `rows` (parameters of a system as `system.parameter`) and `columns`. `map` names the best
series by workload (facet) and rate, with those level with it. `fitted` lists what was fitted to a
paper. `backends` says where systems run, as `slo-bench list compatibility`. `output` is what a
command prints, kept in docs/papers/results/NAME; `--suite NAME` runs it again. `lines = 20` shows
its first twenty lines.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from slo_bench.harness.policies.systems import SYSTEMS, System, system
from slo_bench.harness.results.read_run import read_run
from slo_bench.harness.results.run_columns import NUMBER_COLUMNS, TEXT_COLUMNS
from slo_bench.harness.servers.launch.compatibility import compatibility_of, limitation
from slo_bench.predictors.fitted_to_papers import fitted_to
from slo_bench.reports.figures.facets import abbreviated
from slo_bench.reports.figures.levels import combine, levels
from slo_bench.reports.pages import winners
from slo_bench.reports.pages.published import Finding, JudgedTable, chosen_cells, tables_of
from slo_bench.reports.pages.published_table import SETUPS, Pins, PublishedRow, load_published
from slo_bench.reports.pages.verdicts import VERDICTS
from slo_bench.workloads.errors import SloBenchError, UnknownNameError

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "papers"
RESULTS = PAGES / "results"
FOLDERS = (PAGES, ROOT / "docs" / "measurements")
_BLOCK = re.compile(
    r"(<!-- (published|table|map|claims|fitted|backends|output): (.*?) -->\n)(.*?)(<!-- end -->)",
    re.DOTALL,
)
_ALWAYS = {
    *TEXT_COLUMNS,
    *NUMBER_COLUMNS,
    *("requests", "valid", "stationary", "load_factor", "models_unplaced"),
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a `table` block asks for."""

    suite: str
    rows: Sequence[str]
    columns: str
    value: str
    scale: float = 1.0
    digits: int = 1
    where: Pins = field(default_factory=dict)


def block_fields(text: str) -> dict[str, Any]:
    """The fields of a block's comment: an inline table of TOML without its braces.

    Raises:
        SloBenchError: it is no such table.
    """
    try:
        return dict(tomllib.loads(f"block = {{ {' '.join(text.split())} }}")["block"])
    except tomllib.TOMLDecodeError as error:
        raise SloBenchError(f"block {text!r} is not TOML: {error}") from error


def all_pages() -> list[Path]:
    """The pages that may have blocks."""
    return [PAGES.with_suffix(".md"), *(p for f in FOLDERS for p in sorted(f.glob("*.md")))]


def source_of(fields: Mapping[str, Any]) -> str | None:
    """The folder of the results that a block shows, or None if it shows none."""
    source = fields.get("suite", fields.get("name"))
    return None if source is None else str(source)


def shown_outputs(text: str) -> Iterator[tuple[str, list[str]]]:
    """The names and commands of a page's `output` blocks."""
    for _, kind, fields_text, _, _ in _BLOCK.findall(text):
        if kind == "output":
            fields = block_fields(fields_text)
            yield fields["name"], fields["command"]


def shown_suites(text: str) -> Iterator[tuple[str, set[str]]]:
    """The suites of a page's blocks, each with the columns that the block needs.

    Of claims these are the counters of the systems under test, too.
    """
    for _, kind, fields_text, _, _ in _BLOCK.findall(text):
        fields = block_fields(fields_text)
        if kind in ("table", "map"):
            yield fields["suite"], {fields["value"]}
        suites = [fields["suite"]] if kind == "published" else []
        for suite in _suites_of(fields["paper"]) if kind == "claims" else suites:
            rows = load_published(_published(suite)).rows
            read = {name for row in rows for name in (row.column, row.per) if name is not None}
            tested = {row.sides[0].get("system") for row in rows if row.claim} & SYSTEMS.keys()
            yield suite, read.union(*(system(str(name)).counters() for name in tested))


def _suites_of(paper: str, results: Path = RESULTS) -> Iterator[str]:
    """The suites with results whose table of published results has claims of this paper."""
    for folder in sorted(path for path in results.iterdir() if (path / "cells.csv").is_file()):
        named = tomllib.loads((folder / "experiment.toml").read_text()).get("published")
        if named is not None:
            table = load_published(str(named))
            if table.paper == paper and any(row.claim for row in table.rows):
                yield folder.name


def _published(suite: str) -> str:
    """The name of the table of published results of a suite: kept results say it themselves."""
    kept = RESULTS / suite / "experiment.toml"
    named = tomllib.loads(kept.read_text()) if kept.is_file() else {}
    return str(named.get("published", suite))  # kept before it had a table: as all suites have it


def run_suite(
    name: str,
    columns: set[str],
    jobs: int,
    *,
    results: Path = RESULTS,
    options: Sequence[str] = (),
    work: Path | None = None,
) -> None:
    """Run a suite and keep what the pages need of it.

    Args:
        name: the suite.
        columns: columns of cells.csv that are kept besides those of every run.
        jobs: processes.
        results: where the suite's folder is put.
        options: of `slo-bench run`, besides the suite.
        work: where the run stands until it ends, to be continued if it is stopped.
    """
    from slo_bench.cli.main import app

    with tempfile.TemporaryDirectory() as temporary:
        folder = (work or Path(temporary)) / name
        command = ["run", "--suite", name, *options]
        kept_out = ["--records", "none", "--no-report", "--jobs", str(jobs), "--out", str(folder)]
        if (folder / "environment.json").is_file():
            kept_out.append("--resume")
        app([*command, *kept_out], standalone_mode=False)
        kept = results / name
        kept.mkdir(parents=True, exist_ok=True)
        text = (folder / "experiment.toml").read_text(encoding="utf-8")
        (kept / "experiment.toml").write_text(text, encoding="utf-8")
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        provenance = {
            "slo_bench": environment["slo_bench"],
            "commit": _commit(),
            "command": command,
            "created": environment["created"],
            "step_time": environment["step_time"],
        }
        _write_provenance(kept, provenance)
        _keep_columns(folder / "cells.csv", kept / "cells.csv", columns)
        shutil.rmtree(folder)


def _write_provenance(folder: Path, provenance: Mapping[str, Any]) -> None:
    text = json.dumps(provenance, indent=2) + "\n"
    (folder / "environment.json").write_text(text, encoding="utf-8")


def run_output(name: str, command: Sequence[str], *, results: Path = RESULTS) -> None:
    """Run a command and keep what it prints."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    shown = subprocess.run(
        (sys.executable, "-c", "from slo_bench.cli.main import app; app()", *command),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    ).stdout
    kept = results / name
    kept.mkdir(parents=True, exist_ok=True)
    provenance = {"commit": _commit(), "command": list(command), "created": started}
    _write_provenance(kept, provenance)
    lines = [line.rstrip() for line in shown.splitlines()]
    (kept / "output.txt").write_text("\n".join(lines).strip() + "\n", encoding="utf-8")


def _keep_columns(source: Path, kept: Path, columns: set[str]) -> None:
    """Copy the columns that are needed, numbers to five digits.

    Cells are numbered: what their names say stands in the columns.
    """
    with source.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = list(rows[0])
    lead = names[: names.index("requests")]
    kept_names = [name for name in names if name in lead or name in _ALWAYS | columns]
    with kept.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(kept_names)
        for number, row in enumerate(rows, 1):
            row["cell"] = str(number)
            writer.writerow([row[n] if n in lead else _five_digits(row[n]) for n in kept_names])


def _five_digits(text: str) -> str:
    try:
        return f"{float(text):.5g}"
    except ValueError:
        return text


def _commit() -> str:
    """The commit of the working tree, with `-dirty` where files other than pages differ from it."""

    def git(*arguments: str) -> str:
        completed = subprocess.run(
            ("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True
        )
        return completed.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return git("rev-parse", "--short=7", "HEAD") + "-dirty" * bool(changed)


def written(text: str, results: Path = RESULTS, suites: Sequence[str] | None = None) -> str:
    """A page with its blocks, or those of some suites, written from the results.

    A block whose suite has no results stays as it is.

    Raises:
        SloBenchError: a block is malformed, or does not fit the results.
    """
    makers: Mapping[str, Callable[[Mapping[str, Any], Path], str]] = {
        "published": _published_block,
        "table": _table_block,
        "map": _map_block,
        "claims": _claims_block,
        "fitted": _fitted_block,
        "backends": _backends_block,
        "output": _output_block,
    }

    def again(match: re.Match[str]) -> str:
        head, kind, fields_text, _, end = match.groups()
        fields = block_fields(fields_text)
        suite = source_of(fields)
        if suites is not None and suite is not None and suite not in suites:
            return match[0]
        if suite is not None and not (results / suite).is_dir():
            return match[0]
        return f"{head}\n{makers[kind](fields, results)}\n\n{end}"

    return _BLOCK.sub(again, text)


@functools.cache
def _results(folder: Path) -> tuple[Any, pd.DataFrame]:
    run = read_run(folder)
    return run, combine([run])


def _source(folder: Path) -> str:
    """Where a block comes from: command, version, commit, seeds, step times."""
    run, cells = _results(folder)
    provenance = run.environment
    command = provenance["command"]
    plain = command[:-1] == ["run", "--suite"]
    origin = f"Suite `{command[-1]}`" if plain else f"`slo-bench {' '.join(command)}`"
    kinds = sorted(set(cells["step_time"].replace("unfitted", "estimated")))
    step_times = f"{' and '.join(kinds)} step times"
    seeds = cells["seed"].nunique()
    return f"{origin} at {provenance['commit']}: {seeds} seeds, {step_times}."


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    head, *others = (f"| {' | '.join(row)} |" for row in (heads, *rows))
    return [head, "|---" * len(heads) + "|", *others]


def _published_block(fields: Mapping[str, Any], results: Path) -> str:
    run, cells = _results(results / fields["suite"])
    (table,) = tables_of([run], cells, levels(cells))
    if not isinstance(table, JudgedTable):
        raise SloBenchError(table)
    rows = []
    for row, judgement in table.rows:
        verdict = "; ".join((judgement.verdict, *judgement.remarks))
        rows.append((row.what, row.published_text, judgement.text, verdict))
    lines = _markdown(("what", "published", "ours", "verdict"), rows)
    parts = (table.table.note, table.table.sources_text, _source(results / fields["suite"]))
    note = " ".join(part for part in parts if part)
    return "\n".join([f"{table.title}. {table.headline}.", "", *lines, "", note])


def _claims_block(fields: Mapping[str, Any], results: Path) -> str:
    """Every claim of a paper: what was published, the verdicts of both set-ups, what decides."""
    claims: dict[str, list[tuple[PublishedRow, Finding]]] = {}
    suites: dict[str, dict[str, None]] = {}  # by claim
    for suite in _suites_of(fields["paper"], results):
        run, cells = _results(results / suite)
        (table,) = tables_of([run], cells, levels(cells))
        if not isinstance(table, JudgedTable):
            raise SloBenchError(table)
        for row, judged in table.rows:
            if row.claim:
                claims.setdefault(row.claim, []).append((row, judged))
                suites.setdefault(row.claim, {})[suite] = None
    rows, shown, above = [], set[str](), ""
    for claim in fields.get("only", claims):
        if (of_claim := claims.get(claim)) is None:
            raise UnknownNameError(f"claim of {fields['paper']} with results", claim, claims)
        shown |= suites[claim].keys()
        published = dict.fromkeys(row.published_text for row, _ in of_claim)
        setups = [
            _verdicts([(row, judged) for row, judged in of_claim if row.setup == setup])
            for setup in SETUPS
        ]
        decides = " ".join(dict.fromkeys(row.decides for row, _ in of_claim if row.decides))
        above, decides = decides, "as above" if decides and decides == above else decides
        figures = ", ".join(published)
        if len(published) > _MANY_FIGURES:
            figures = f"{len(published)} figures"
        rows.append((f"{claim}: {figures}", *(text or "not run" for text in setups), decides))
    heads = ("claim", "as published", "fair", "what decides it")
    commands = ", ".join(f"`slo-bench run --suite {suite}`" for suite in sorted(shown))
    return "\n".join([*_markdown(heads, rows), "", f"From {commands}."])


_MANY_ROWS = 4  # of a claim and a set-up: more are counted
_MANY_FIGURES = 9  # published ones of a claim: more are counted


def _verdicts(rows: Sequence[tuple[PublishedRow, Finding]]) -> str:
    """Verdict and figure of each row, or how many have which verdict."""
    if len(rows) > _MANY_ROWS:
        counts = Counter(judged.verdict for _, judged in rows)
        return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    texts = []
    for row, judged in rows:
        name = f"{row.what}: " if len(rows) > 1 else ""
        figure = f"{judged.text}, " if judged.text != "–" else ""
        depends = [remark for remark in judged.remarks if remark.startswith("depends on")]
        equals = [f", {remark}" for remark in judged.remarks if remark.startswith("equals ")]
        texts.append(f"{name}{figure}{' and '.join(depends) or judged.verdict}{''.join(equals)}")
    return "; ".join(texts)


def _table_block(fields: Mapping[str, Any], results: Path) -> str:
    spec = Table(**fields)
    run, cells = _results(results / spec.suite)
    cells = chosen_cells(spec.where, cells, tomllib.loads(run.experiment_toml))
    for column in (*spec.rows, spec.columns, spec.value):
        if column not in cells:
            raise SloBenchError(f"suite {spec.suite} has no column {column}")
    keys = [*spec.rows, spec.columns]
    if cells.duplicated([*keys, "seed"]).any():
        raise SloBenchError(f"a table of suite {spec.suite} needs more in rows or where: {keys}")
    heads = list(dict.fromkeys(cells[spec.columns]))
    rows = []
    drifts = False
    cells = cells[[*dict.fromkeys((*keys, spec.value, "valid", "stationary"))]]
    for key, of_row in cells.groupby(list(spec.rows), sort=False, dropna=False):
        values: dict[object, list[float]] = {head: [] for head in heads}
        drifting = set()
        columns = (of_row[name] for name in (spec.columns, spec.value, "valid", "stationary"))
        for head, value, valid, stationary in zip(*columns, strict=True):
            if valid and not math.isnan(value):
                values[head].append(value * spec.scale)
            if stationary is False:  # None: not known
                drifting.add(head)
        drifts |= bool(drifting)
        texts = [
            (f"{np.mean(of_head):,.{spec.digits}f}" if of_head else "–") + "*" * (head in drifting)
            for head, of_head in values.items()
        ]
        rows.append((_row_name(spec.rows, key), *texts))
    lines = _markdown((_label(spec.columns), *map(_value, heads)), rows)
    note = "*: overloaded. " * drifts
    return "\n".join([*lines, "", f"{note}{_source(results / spec.suite)}"])


def _map_block(fields: Mapping[str, Any], results: Path) -> str:
    _, cells = _results(results / fields["suite"])
    (measure,) = (m for m in winners.MEASURES if m.column == fields["value"])
    rates = sorted(set(cells["level_rps"]))
    rows = (
        (facet, *(by_rate[rate].text(measure) if rate in by_rate else "–" for rate in rates))
        for facet, by_rate in winners.best_map(cells, measure).items()
    )
    lines = _markdown((measure.head, *(f"{rate:g} req/s" for rate in rates)), rows)
    names = [f"{short}: `{text}`." for short, text in abbreviated(cells).items()]
    notes = [winners.NOTE, _source(results / fields["suite"]), *names]
    return "\n".join([*lines, "", " ".join(notes)])


def _row_name(columns: Sequence[str], key: tuple[object, ...]) -> str:
    """`sarathi, chunk_tokens 2048`: values; numbers and those of parameters with their names."""
    parts = []
    for column, value in zip(columns, key, strict=True):
        text = _value(value)
        if text in ("", "nan"):
            continue
        named = "." in column or re.fullmatch(r"[\d.]+", text)
        parts.append(f"{_label(column.rpartition('.')[2])} {text}" if named else text)
    return ", ".join(parts)


def _label(column: str) -> str:
    return {"rate_rps": "req/s", "load_factor": "load"}.get(column, column)


def _value(value: object) -> str:
    try:
        return f"{float(str(value)):g}"
    except ValueError:
        return str(value)


def _fitted_block(fields: Mapping[str, Any], results: Path) -> str:
    constants = fitted_to(fields["paper"])
    if not constants:
        return "No constant of the code is fitted to a result of this paper."
    return "\n".join(
        ["Fitted to results of this paper:", "", *(f"- {f.sentence()}" for f in constants)]
    )


def _backends_block(fields: Mapping[str, Any], results: Path) -> str:
    """Where each system runs; below the table what is left out there, or why it does not run."""
    rows, backends = [], list[str]()
    limited: dict[str, dict[str, list[str]]] = {}  # by reason and system: the backends
    for name in fields["systems"]:
        where = _configured(name)
        marks, refusals = [], compatibility_of(where)
        backends = list(refusals)
        for backend, refusal in refusals.items():
            reason = refusal or limitation(where, backend)
            marks.append("no" if refusal else "part" if reason else "yes")
            if reason:
                limited.setdefault(reason, {}).setdefault(name, []).append(backend)
        rows.append((f"`{name}`", *marks))
    reasons = (f"- {_placed(systems)}: {reason}." for reason, systems in limited.items())
    return "\n".join([*_markdown(("system", *backends), rows), "", *reasons])


def _configured(name: str) -> System:
    """A system of `NAME` or `NAME with PARAMETER=VALUE …`; true, false, or text."""
    name, _, settings = name.partition(" with ")
    values: dict[str, Any] = {}
    for setting in settings.split():
        parameter, _, text = setting.partition("=")
        values[parameter] = {"true": True, "false": False}.get(text, text)
    return system(name).with_parameters(**values)


def _placed(systems: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"`{name}` ({', '.join(backends)})" for name, backends in systems.items())


def _output_block(fields: Mapping[str, Any], results: Path) -> str:
    kept = results / fields["name"]
    provenance = json.loads((kept / "environment.json").read_text(encoding="utf-8"))
    text = (kept / "output.txt").read_text(encoding="utf-8")
    text = "".join(text.splitlines(keepends=True)[: fields.get("lines")])
    command = f"slo-bench {shlex.join(provenance['command'])}"
    return f"    {command}\n\n```text\n{text}```\n\nCommit {provenance['commit']}, simulated."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites and write the pages; 2 where a block or a suite is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pages-only", action="store_true", help="run no suite")
    parser.add_argument("--suite", action="append", help="run this suite or command only")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--work", type=Path, help="folder for runs that may be continued")
    options = parser.parse_args(arguments)
    pages = all_pages()
    try:
        columns: dict[str, set[str]] = {}
        commands: dict[str, list[str]] = {}
        for page in pages:
            commands.update(shown_outputs(page.read_text(encoding="utf-8")))
            for suite, needed in shown_suites(page.read_text(encoding="utf-8")):
                columns.setdefault(suite, set()).update(needed)
        names = [*columns, *commands]
        for name in [] if options.pages_only else options.suite or names:
            if name not in names:
                raise SloBenchError(f"no page shows {name}; shown: {', '.join(names)}")
            if name in columns:
                run_suite(name, columns[name], options.jobs, work=options.work)
            else:
                run_output(name, commands[name])
        for page in pages:
            text = written(page.read_text(encoding="utf-8"), suites=options.suite)
            page.write_text(text, encoding="utf-8")
    except SloBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
