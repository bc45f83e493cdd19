"""`slo-bench capacity`: the highest rate at which requests meet their SLO, with an interval."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...harness.experiments.config.setting import declared
from ...tuner.capacity.capacity_options import (
    REAL_LEAST,
    REAL_SEEDS,
    SEARCH,
    SEEDS,
    SIMULATED_REQUESTS,
    CapacityOptions,
)
from ...workloads.errors import SloBenchError
from ..interrupts import interruptible
from ..options import declared as options
from ..options.from_schema import Given, offer, with_options
from ..options.parameters import VERBOSE, flag
from ..output.progress import changing_line

if TYPE_CHECKING:
    from ...reports.live import LiveStatus
    from ...tuner.capacity.folder import CapacityProgress

Note = Callable[[str], None]

EXAMPLES = (
    "slo-bench capacity",
    "slo-bench capacity --system vllm --system sarathi --workload azure-conv",
    "slo-bench capacity --system sarathi --target 0.95 --tolerance 0.02",
    "slo-bench capacity --system sarathi --sweep sarathi.chunk_tokens=512,2048",
    "slo-bench capacity --suite quickstart --jobs 2",
    "slo-bench capacity --resume --out results --max-requests 500000",
    "slo-bench capacity --system vllm,sarathi,orca --executor ray --address 10.0.0.1:6379",
    "slo-bench capacity --base-url http://127.0.0.1:8000 --rates 1,20 --max-time 900",
)
# In `--help`; the others in `--help-all`.
SHOWN = (
    *("--system", "--workload", "--slo", "--target", "--tolerance", "--max-time"),
    *("--model", "--gpu", "--backend", "--base-url", "--out"),
)

CHANGED = {
    "rates": {
        "panel": SEARCH,
        "metavar": "LOW,HIGH|START",
        "help": "Search between these rates, in requests per second; a single rate is the starting "
        "point. Default: start near the estimated capacity; on a real server below the throughput "
        "of bursts of 15 to 50 s.",
    },
    "requests": {
        "panel": SEARCH,
        "help": "Minimum number of requests in each cell; more where queueing correlates requests. "
        f"Default: {SIMULATED_REQUESTS}, on a real server {REAL_LEAST}; all "
        "requests of a trace.",
    },
    "seeds": {
        "panel": SEARCH,
        "help": f"Number of seeds at each rate before the next rate is chosen. Default: {SEEDS}, "
        f"on a real server {REAL_SEEDS}.",
    },
}


@with_options
def capacity(
    *,
    experiment_options: Given = offer(
        without=("replay_speeds", "load_factors", "duration_s"), changed=CHANGED
    ),
    search: Given = offer(CapacityOptions),
    execution: options.Execution,
    verbose: bool = VERBOSE,
    as_json: bool = flag("Print only the capacities, as a JSON list.", "--json"),
) -> None:
    """Find the highest rate at which enough requests meet their SLO, with its 95 % interval."""
    from ...harness.experiments.experiment import new_folder
    from ...harness.load_generator.machine import cores
    from ...harness.results.read_run import read_runs
    from ...harness.servers.launch.backend_names import SIMULATED
    from ...tuner.capacity.folder import search_capacity
    from ..options.experiment_options import experiment_of
    from ..output.console import print_lines, result_line
    from ..output.run_output import print_searches, write_page

    rates = experiment_options.settings.get("rates", ())
    if len(rates) > 2 or list(rates) != sorted(rates):
        raise SloBenchError(
            "capacity takes the lowest and the highest rate to try (--rates 1,20), or one to "
            f"begin at, but rates are {', '.join(f'{rate:g}' for rate in rates)}"
        )
    experiment = experiment_of(experiment_options, execution.resumed)
    folder = execution.out or new_folder(f"capacity-{experiment.name}")
    jobs, simulated = execution.jobs, experiment.backend == SIMULATED
    if jobs is not None and (execution.executor != "local" or not simulated):
        raise SloBenchError("--jobs are processes of this machine that simulate; leave it out here")
    cluster = execution.cluster
    with (
        interruptible(
            f"interrupted; go on with: slo-bench capacity --resume --out {shlex.quote(str(folder))}"
        ),
        execution.watched(folder) as status,
        _display(folder, status, lines=not simulated) as (watch, ended, note),
        options.pool_of(cluster, cores() if jobs is None else jobs)
        if simulated
        else contextlib.nullcontext() as pool,
        cluster.senders() if cluster and not simulated else contextlib.nullcontext() as senders,
    ):
        result = search_capacity(
            experiment,
            folder,
            options=CapacityOptions(**search.settings),
            resume=execution.resume,
            progress=watch,
            ended=ended,
            pool=pool,
            senders=senders,
            say=note,
            command=sys.argv[1:],
        )
    page = None if execution.no_report else write_page(folder)
    rows = result.rows()
    if as_json:
        typer.echo(json.dumps(rows, allow_nan=False))
        return
    print_searches(rows, read_runs([folder]), verbose=verbose)
    print_lines(_advice(rows, folder), result_line(folder, page))


def _advice(rows: Sequence[Mapping[str, Any]], folder: Path) -> str | None:
    """The command that decides or narrows the intervals, by what limited them, or None."""
    limits = {row["limited_by"] for row in rows} - {None}
    if not limits:
        return None
    if "requests" in limits:
        return "to decide: another search with longer runs (--requests N, in another folder)"
    settings = declared(CapacityOptions)
    more = " ".join(f"{settings[name].option} …" for name in sorted(limits))
    return (
        "to decide or for narrower intervals: "
        f"slo-bench capacity --resume --out {shlex.quote(str(folder))} {more}"
    )


@contextlib.contextmanager
def _display(
    folder: Path, status: LiveStatus | None, *, lines: bool
) -> Iterator[tuple[Callable[[CapacityProgress], None], Callable[[int, float], None], Note]]:
    """Return the callbacks for a finished run, for progress within a run and for a note: a status
    line, shown by `status` too.

    Where stderr is no terminal, `lines` prints a line for each run.
    """
    announced = sys.stderr.isatty()
    line = "first run"
    with contextlib.nullcontext() if lines and not announced else changing_line(line) as say:

        def show(text: str) -> None:
            nonlocal announced
            if not announced:  # now that nothing is refused any more
                announced = True
                typer.echo(f"searching into {folder}", err=True)
            if status is not None:
                status.running = [text]
            if say is not None:
                say(text)

        def watch(progress: CapacityProgress) -> None:
            nonlocal line
            line = _progress_text(progress)
            show(line)
            if say is None:
                typer.echo(line, err=True)

        def ended(requests: int, clock_s: float) -> None:
            show(f"{line} · running, {requests:,} ended")

        def note(text: str) -> None:
            if status is not None:
                status.begin(text)
            show(text)
            if say is None:
                typer.echo(text, err=True)

        yield watch, ended, note


def _progress_text(progress: CapacityProgress) -> str:
    """The last run and what is known of each target."""
    search = progress.search
    line = (
        f"{progress.number} of {progress.searches}: {progress.name} · "
        f"{search.requests_spent:,} requests · {search.sample.rate_rps:g} req/s: "
        f"{search.sample.attainment:.1%}"
    )
    for crossing in search.crossings:
        if crossing is not None:
            line += (
                f" · {crossing.target:g} at {crossing.rate_rps:.3g} "
                f"[{crossing.low_rps:.3g}, {crossing.high_rps:.3g}]"
            )
    return line
