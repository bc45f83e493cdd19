"""`slo-bench selftest`: measurement errors of the load generator on this machine."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from ...workloads.errors import SloBenchError
from ..options.parameters import flag, option

if TYPE_CHECKING:
    from ...harness.validation.load_generator_selftest import SelfTest, SelfTestLevel

EXAMPLES = ("slo-bench selftest", "slo-bench selftest --rates 10,50 --no-search --json")


def selftest(
    rates: str | None = option("50,200", "Rates to measure, in requests per second."),
    seconds: float = option(
        "S", "Length of the arrival period at each rate, in seconds.", default=4.0
    ),
    search: bool = flag(
        "Search for the highest rate with valid measurements.", "--search/--no-search", default=True
    ),
    as_json: bool = flag("Print only the levels, as JSON.", "--json"),
) -> None:
    """Measure the load generator against a mock server with known latencies: its errors, its
    cost and its maximum rate on this machine.
    """
    from ...harness.experiments.config.setting import number_list
    from ...harness.validation.load_generator_selftest import RATES_RPS, self_test

    if not 0 < seconds < math.inf:
        raise SloBenchError(f"--seconds must be positive but is {seconds:g}")
    rates_rps = number_list(rates) if rates is not None else RATES_RPS
    if not all(0 < rate < math.inf for rate in rates_rps):
        raise SloBenchError("--rates must be positive")

    def done(level: SelfTestLevel) -> None:
        if sys.stderr.isatty():
            word = "true" if level.truthful else level.problem
            typer.echo(f"{level.rate_rps:g} req/s, {level.tokens} tokens: {word}", err=True)

    report = self_test(rates_rps=rates_rps, seconds=seconds, search=search, done=done)
    if as_json:
        typer.echo(json.dumps(_as_table(report), indent=2))
    else:
        _show(report)


def _as_table(report: SelfTest) -> dict[str, object]:
    def rows(levels: Sequence[SelfTestLevel]) -> list[dict[str, object]]:
        return [{**dataclasses.asdict(level), "truthful": level.truthful} for level in levels]

    return {
        **dataclasses.asdict(report),
        "levels": rows(report.levels),
        "beside_server": rows(report.beside_server),
        "highest_beside_server_rps": report.highest_beside_server_rps,
    }


def _show(report: SelfTest) -> None:
    from ...reports.terminal.screen import Column, Group, Screen
    from ..output.console import print_result

    heads = ("req/s", "tokens", "TTFT p50", "p99", "token p50", "p99", "late p99", "CPU ms", "MB")
    rows = []
    for level in report.levels:
        seconds = (
            level.ttft_error_p50_s,
            level.ttft_error_p99_s,
            level.token_error_p50_s,
            level.token_error_p99_s,
            level.send_delay_p99_s,
            level.cpu_per_request_s,
        )
        times = (f"{value * 1e3:.2f}" for value in seconds)
        size, mark = f"{level.peak_rss_bytes / 1e6:.0f}", "" if level.truthful else "✗"
        rate, tokens, processes = f"{level.rate_rps:g}", f"{level.tokens}", f"{level.processes}"
        rows.append((rate, tokens, *times, size, processes, mark))
    problems = [
        f"✗ {level.rate_rps:g} req/s: {level.problem}"
        for level in report.levels
        if not level.truthful
    ]
    costs = f"{report.request_cpu_s * 1e3:.2f} ms a request and {report.token_cpu_s * 1e6:.1f} µs"
    columns = [*map(Column, heads), Column("procs", optional=True), Column("", words=True)]
    print_result(
        Screen(
            ["Measured minus true, in milliseconds; against a mock server on this machine"],
            columns,
            [Group(rows)],
            [*problems, f"Client CPU: {costs} a token."],
            [_beside_server_text(report), _highest_text(report)],
        )
    )


def _highest_text(report: SelfTest) -> str:
    """Which rate this machine sends truthfully."""
    if report.highest_rps is None:
        return "No level was true: is the machine busy with something else?"
    more = " or more" if report.at_the_end else ""
    answers = f"with {report.levels[-1].tokens} tokens an answer"
    return f"This machine sends {report.highest_rps:g}{more} req/s {answers} truthfully."


def _beside_server_text(report: SelfTest) -> str:
    """Which rates are true while a server on this machine computes."""
    share = report.cores
    if share.server:
        places = f"on {len(share.server)} of {len(share.server) + len(share.client)} cores"
    else:
        places = "on the same core"
    last = report.beside_server[-1]
    late = f"send delay {last.send_delay_p99_s * 1e3:.1f} ms at p99"
    highest = report.highest_beside_server_rps
    if last.truthful:
        verdict = f"true up to {last.rate_rps:g} req/s or more ({late})"
    elif highest is None:
        verdict = f"no rate is true; at {last.rate_rps:g} req/s: {last.problem}"
    else:
        verdict = f"true up to {highest:g} req/s; at {last.rate_rps:g} req/s: {last.problem}"
    return f"Beside a server that computes {places}: {verdict}."
