"""`slo-bench workload`: look at workloads, write them, fetch public originals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..options.from_schema import Given, offer, with_options
from ..options.names import listed
from ..options.parameters import OUT, argument, epilog, flag, option
from ..output.progress import phase

if TYPE_CHECKING:
    from ...reports.terminal.screen import Screen
    from ...workloads.base import WorkloadSource
    from ...workloads.summary import ColumnFigures, GroupFigures, WorkloadSummary
    from ...workloads.workload import Workload

_SHOWS = (
    "slo-bench workload show azure-conv",
    "slo-bench workload show mooncake-conversation --replay-speed 2",
    "slo-bench workload show synthetic --prompt-tokens 800 --output-tokens 256 --rate 4",
)
_MAKES = (
    "slo-bench workload make sharegpt --rate 4 --requests 500 --out chat.csv",
    'slo-bench workload make "mix(chat=azure-conv:0.7, code=azure-code:0.3)" --rate 2 --out m.csv',
)
_FETCHES = ("slo-bench workload fetch", "slo-bench workload fetch azure-2023-conv")

app = typer.Typer(
    help="Look at workloads, write them as CSV, fetch public traces.",
    no_args_is_help=True,
    epilog=epilog([_SHOWS[0], _MAKES[0], _FETCHES[0]]),
)

SHOWN_REQUESTS = 10_000  # of a workload without arrivals of its own

SOURCE = argument(
    "SOURCE",
    "Catalogue name, trace file, `synthetic`, `hot-prefixes(…)` or `mix(chat=azure-conv:0.7, …)`.",
    complete=listed("workloads"),
)
RATE = option("R", "Mean arrival rate, req/s.")
REPLAY_SPEED = option("F", "Factor by which a trace is sped up.")
_TAKEN = (
    *("requests", "duration_s", "seed", "slo", "arrivals", "prompt_tokens", "output_tokens"),
    *("sessions", "models", "trace_format", "trace_columns"),
)
_CHANGED = {
    "requests": {"help": "Number of requests."},
    "seed": {"help": "Seed of all random numbers. Default: 0."},
    "slo": {"repeated": False, "help": "SLO bounds in seconds, as in `run`. Default: none."},
    "trace_format": {"option": "--format"},
}


@app.command(epilog=epilog(_SHOWS))
@with_options
def show(
    source: str = SOURCE,
    workload_options: Given = offer(only=_TAKEN, without=("slo",), changed=_CHANGED),
    rate: float | None = RATE,
    replay_speed: float | None = REPLAY_SPEED,
    as_json: bool = flag("Print the statistics as JSON.", "--json"),
) -> None:
    """Show counts, quantiles, burstiness and histograms of a workload."""
    import dataclasses
    import json

    from ...workloads.summary import summarise
    from ..output.console import print_result

    loaded = _loaded(source, workload_options)
    requests, duration = workload_options.value("requests"), workload_options.value("duration_s")
    if not loaded.has_arrivals:
        if requests is None and duration is None:
            requests = SHOWN_REQUESTS
        if rate is None and not loaded.closed_loop:
            rate = loaded.natural_rate_rps or 1.0
    with phase("drawing the requests"):
        workload = loaded.make(
            rate_rps=rate,
            replay_speed=replay_speed,
            requests=requests,
            duration_s=duration,
            seed=workload_options.value("seed"),
        )
        summary = summarise(workload, has_arrivals=not loaded.closed_loop)
    if as_json:
        plain = dataclasses.asdict(summary)
        plain["origin"], plain["notes"] = loaded.origin, list(loaded.notes)
        typer.echo(json.dumps(plain, indent=2))
        return
    tested = [f"{loaded.name} ({loaded.origin})", *loaded.notes]
    if not loaded.has_arrivals:
        load = "closed loop" if rate is None else f"{rate:g} requests/s"
        tested.append(
            f"drawn: {len(workload):,} requests, {load}, seed {workload_options.value('seed')}"
        )
    _print_histograms(workload)
    for screen in _summary_screens(tested, summary):
        print_result(screen)


@app.command(epilog=epilog(_MAKES))
@with_options
def make(
    source: str = SOURCE,
    workload_options: Given = offer(only=_TAKEN, changed=_CHANGED),
    out: Path = option("FILE", "CSV file; compressed if the name ends in .gz.", *OUT, default=...),
    rate: float | None = RATE,
    replay_speed: float | None = REPLAY_SPEED,
) -> None:
    """Write a workload as CSV; every command accepts the file as a trace."""
    from ...workloads.slo import parse_slo
    from ...workloads.writer import write_csv

    loaded = _loaded(source, workload_options)
    workload = loaded.make(
        rate_rps=rate,
        replay_speed=replay_speed,
        **{name: workload_options.value(name) for name in ("requests", "duration_s", "seed")},
        slo=parse_slo(workload_options.settings.get("slo", "")),
    )
    with phase("writing"):
        write_csv(workload, out)
    typer.echo(f"{out}: {len(workload):,} requests over {workload.span_s:,.1f} s")


def _loaded(source: str, workload_options: Given) -> WorkloadSource:
    from ...workloads.source import load_source

    names = ("arrivals", "prompt_tokens", "output_tokens", "sessions", "models")
    return load_source(
        source,
        **{name: workload_options.value(name) for name in names},
        format=workload_options.value("trace_format"),
        columns=workload_options.value("trace_columns"),
        redraw_arrivals="arrivals" in workload_options.settings,
    )


@app.command(epilog=epilog(_FETCHES))
def fetch(
    name: str | None = argument(
        "NAME", "Dataset name. Without it: list the available ones.", default=None
    ),
) -> None:
    """Download a public dataset into the cache and print its path."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from ...workloads import fetch as fetching
    from ..output.console import print_result, terminal, text_table

    errors = terminal(stderr=True)
    if name is None:
        rows = [
            (dataset.name, dataset.about, dataset.licence)
            for dataset in fetching.originals().values()
        ]
        print_result(text_table(("name", "what", "licence"), rows, unbroken=("name",)))
        return
    original = fetching.find(name)
    with Progress(
        "{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=errors
    ) as bar:
        task = bar.add_task(original.file_name, total=None)
        fetched = fetching.fetch(
            original,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if not fetched.pinned:
        errors.print(
            f"no checksum is known for {name}; sha256 {fetched.sha256} is kept beside the file",
            highlight=False,
            soft_wrap=True,
        )
    typer.echo(fetched.path)


def _print_histograms(workload: Workload) -> None:
    from ..output.console import print_lines, terminal

    width = max(10, min(terminal().width, 100) - 26)
    for title, column in (
        ("prompt tokens", workload.prompt_tokens),
        ("output tokens", workload.output_tokens),
    ):
        print_lines(title, *histogram(column.tolist(), width=width), "")


def _summary_screens(tested: Sequence[str], summary: WorkloadSummary) -> list[Screen]:
    """Classes and models, if any, and then what the workload is."""
    from ...reports.terminal.screen import Column, Group, Screen

    heads = ("mean", "cv", "min", "p5", "p25", "p50", "p75", "p90", "p99", "max")
    lengths = {"prompt": summary.prompt_tokens, "output": summary.output_tokens}
    rows = [(name, *_cells(figures)) for name, figures in lengths.items()]
    columns = [Column("tokens", words=True), *map(Column, heads)]
    groups = [("class", summary.classes), ("model", summary.models)]
    screens = [_groups_table(kind, members) for kind, members in groups if members]
    return [*screens, Screen(tested, columns, [Group(rows)], answer=[*_facts(summary)])]


def _facts(summary: WorkloadSummary) -> Iterator[str]:
    """Sentences on sessions, shared prefixes, and arrivals."""
    sessions = f", {summary.sessions:,} sessions" if summary.sessions else ""
    if summary.prefixes is not None:
        yield (
            f"shared prefixes: {summary.prefixes.token_hit_share:.1%} of prompt tokens and "
            f"{summary.prefixes.request_hit_share:.1%} of requests find blocks of "
            f"{summary.prefixes.block_size} tokens that came before"
        )
    if summary.arrivals is None:
        yield f"{summary.requests:,} requests{sessions}"
        return
    spread = ", ".join(
        f"{value:.2f} in {window:g}\xa0s" for window, value in summary.arrivals.dispersion.items()
    )
    yield (
        f"{summary.requests:,} requests{sessions}, over {summary.arrivals.span_s:,.1f}\xa0s: "
        f"{summary.arrivals.rate_rps:.3f}\xa0req/s, cv of the gaps "
        f"{summary.arrivals.gap_cv:.2f} (Poisson 1)"
        + (f", index of dispersion {spread} (Poisson 1)" if spread else "")
    )


def _cells(figures: ColumnFigures) -> list[str]:
    values = [figures.min, *figures.quantiles.values(), figures.max]
    mean = f"{figures.mean:,.1f}" if figures.mean < 1000 else f"{figures.mean:,.0f}"
    return [mean, f"{figures.cv:.2f}", *(f"{v:,.0f}" for v in values)]


def _groups_table(kind: str, groups: tuple[GroupFigures, ...]) -> Screen:
    from ..output.console import text_table

    heads = ("requests", "share", "mean prompt", "mean output")
    rows = [
        (
            group.name or "-",
            *(f"{group.requests:,}", f"{group.share:.1%}"),
            *(f"{mean:,.1f}" for mean in (group.mean_prompt_tokens, group.mean_output_tokens)),
        )
        for group in groups
    ]
    return text_table((kind, *heads), rows, numbers=heads)


def histogram(values: list[int], width: int) -> list[str]:
    """Return a text histogram with bins of doubling width from the smallest to the largest
    value.
    """
    counts: dict[int, int] = {}
    for value in values:
        bin_ = value.bit_length()
        counts[bin_] = counts.get(bin_, 0) + 1
    largest_count = max(counts.values())
    lines = []
    for bin_ in range(min(counts), max(counts) + 1):
        here = counts.get(bin_, 0)
        label = f"{1 << max(bin_ - 1, 0):>7,} - {(1 << bin_) - 1:<7,}"
        eighths = round(here / largest_count * width * 8)
        bar = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
        lines.append(f"{label} {here / len(values):>6.1%} {bar}".rstrip())
    return lines
