"""`slo-bench selftest`: measurement errors of the load generator on this machine."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ...workloads.errors import SloBenchError
from ..options.parameters import flag, option

if TYPE_CHECKING:
    from rich.console import Console

    from ...harness.validation.selftest import SelfTest, SelfTestLevel

EXAMPLES = ("slo-bench selftest", "slo-bench selftest --rates 10,50 --no-search --json")


def selftest(
    rates: Annotated[
        str | None, option("50,200", "Rates to measure, in requests per second.")
    ] = None,
    seconds: Annotated[
        float, option("S", "Length of the arrival period at each rate, in seconds.")
    ] = 4.0,
    search: Annotated[
        bool, flag("Search for the highest rate with valid measurements.", "--search/--no-search")
    ] = True,
    as_json: Annotated[bool, flag("Print only the levels, as JSON.", "--json")] = False,
) -> None:
    """Measure the load generator against a mock server with known latencies: its errors, its
    cost and its maximum rate on this machine.
    """
    from ...harness.experiments.config.setting import number_list
    from ...harness.validation.selftest import RATES_RPS, self_test

    if not 0 < seconds < math.inf:
        raise SloBenchError(f"--seconds must be positive but is {seconds:g}")
    asked = number_list(rates) if rates is not None else RATES_RPS
    if not all(0 < rate < math.inf for rate in asked):
        raise SloBenchError("--rates must be positive")

    def done(level: SelfTestLevel) -> None:
        if sys.stderr.isatty():
            word = "true" if level.truthful else level.problem
            typer.echo(f"{level.rate_rps:g} req/s, {level.tokens} tokens: {word}", err=True)

    found = self_test(rates_rps=asked, seconds=seconds, search=search, done=done)
    if as_json:
        typer.echo(json.dumps(_as_table(found), indent=2))
    else:
        _show(found)


def _as_table(found: SelfTest) -> dict[str, object]:
    def rows(levels: Sequence[SelfTestLevel]) -> list[dict[str, object]]:
        return [{**dataclasses.asdict(one), "truthful": one.truthful} for one in levels]

    return {
        **dataclasses.asdict(found),
        "levels": rows(found.levels),
        "beside_server": rows(found.beside_server),
        "highest_beside_server_rps": found.highest_beside_server_rps,
    }


def _show(found: SelfTest) -> None:
    from ..output.console import terminal, text_table

    title = "Measured minus true, in milliseconds; against a mock server on this machine"
    numbers = (
        *("req/s", "tokens", "TTFT p50", "p99", "token p50", "p99", "late p99", "CPU ms", "MB"),
        "procs",
    )
    rows: list[tuple[object, ...]] = []
    for one in found.levels:
        seconds = (
            one.ttft_error_p50_s,
            one.ttft_error_p99_s,
            one.token_error_p50_s,
            one.token_error_p99_s,
            one.send_delay_p99_s,
            one.cpu_per_request_s,
        )
        times = (f"{value * 1e3:.2f}" for value in seconds)
        size, mark = f"{one.peak_rss_bytes / 1e6:.0f}", "" if one.truthful else "✗"
        rows.append((f"{one.rate_rps:g}", one.tokens, *times, size, one.processes, mark))
    console = terminal()
    console.print(
        text_table((*numbers, ""), rows, numbers=numbers, title=title, title_justify="left")
    )
    for one in found.levels:
        if not one.truthful:
            console.print(f"✗ {one.rate_rps:g} req/s: {one.problem}", highlight=False)
    costs = f"{found.request_cpu_s * 1e3:.2f} ms a request and {found.token_cpu_s * 1e6:.1f} µs"
    console.print(f"Client CPU: {costs} a token.", highlight=False)
    _show_beside_server(found, console)
    if found.highest_rps is None:
        console.print("No level was true: is the machine busy with something else?")
    else:
        more = " or more" if found.at_the_end else ""
        answers = f"with {found.levels[-1].tokens} tokens an answer"
        console.print(
            f"This machine sends {found.highest_rps:g}{more} req/s {answers} truthfully.",
            highlight=False,
        )


def _show_beside_server(found: SelfTest, console: Console) -> None:
    """Which rates are true while a server on this machine computes."""
    share = found.cores
    if share.server:
        places = f"on {len(share.server)} of {len(share.server) + len(share.client)} cores"
    else:
        places = "on the same core"
    last = found.beside_server[-1]
    late = f"send delay {last.send_delay_p99_s * 1e3:.1f} ms at p99"
    highest = found.highest_beside_server_rps
    if last.truthful:
        told = f"true up to {last.rate_rps:g} req/s or more ({late})"
    elif highest is None:
        told = f"no rate is true; at {last.rate_rps:g} req/s: {last.problem}"
    else:
        told = f"true up to {highest:g} req/s; at {last.rate_rps:g} req/s: {last.problem}"
    console.print(f"Beside a server that computes {places}: {told}.", highlight=False)
