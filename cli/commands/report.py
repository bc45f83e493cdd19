"""`slo-bench report`: one HTML page from one or more run folders, or from a tuning run."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Literal

from ..options.parameters import OUT, VERBOSE, argument, option
from ..output.progress import phase

EXAMPLES = (
    "slo-bench report runs/quickstart",
    "slo-bench report runs/before runs/after --out comparison.html",
    "slo-bench report runs/tune-sarathi",
)


def report(
    run_dirs: list[Path] = argument(
        "DIR...", "Run folders; several are compared. Or one folder of `tune`."
    ),
    out: Path | None = option(
        "FILE",
        "File of the report. Default: report.html in the run folder; for several folders, in the "
        "current folder.",
        *OUT,
    ),
    plotly: Literal["inline", "cdn", "file"] = option(
        "SOURCE",
        "Where the page has plotly.js from: itself (opens without a network), a content delivery "
        "network (a smaller page), or a file beside it.",
        "--plotly",
        default="inline",
    ),
    verbose: bool = VERBOSE,
) -> None:
    """Write the report of finished runs and print a summary."""
    from ...harness.results.read_run import read_runs
    from ...harness.results.run_folder import TUNED
    from ...reports.pages.capacity_page import found_in, only_searches
    from ...reports.pages.run_page import write_report
    from ..output.console import print_lines, terminal
    from ..output.run_output import print_runs, print_searches

    if out is None:
        out = run_dirs[0] / "report.html" if len(run_dirs) == 1 else Path("report.html")
    console = terminal()
    if len(run_dirs) == 1 and (run_dirs[0] / TUNED).is_file():
        from ...reports.pages.tuning import rewrite_tuning
        from ..output.tune_output import print_tuning

        print_tuning(rewrite_tuning(run_dirs[0], out, plotly=plotly), run_dirs[0])
    else:
        with phase("writing the report"):
            write_report(run_dirs, out, plotly=plotly)
        runs = read_runs(run_dirs)
        searched = found_in(runs)
        if searched:
            print_searches(searched, runs, verbose=verbose)
        if not only_searches(searched, runs):
            print_runs(runs, verbose=verbose)
        for run in filter(attrgetter("unfinished"), runs):
            console.print(f"careful: {run.unfinished}.", markup=False, soft_wrap=True)
    print_lines(out)
