"""`slo-bench accuracy`: public measurements of real GPUs beside their predictions."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from ..options.from_schema import with_options
from ..options.parameters import JOBS, OUT, argument, flag, option

EXAMPLES = (
    "slo-bench accuracy",
    "slo-bench accuracy measurements --out errors.jsonl",
    "slo-bench accuracy measurements --out errors.jsonl --resume --json",
    "slo-bench accuracy --out errors.jsonl --resume --html accuracy.html",
)


@with_options
def accuracy(
    folder: Path | None = argument(
        "FOLDER",
        "Folder or file with measurements: closed-loop tables, open-loop levels, request logs, "
        "or a CSV of your own (docs/accuracy.md). Default: the measurements in the package.",
        default=None,
    ),
    out: Path | None = option(
        "FILE", "Write the prediction of every measurement to FILE, one JSON line each.", *OUT
    ),
    resume: bool = flag("Continue an interrupted run: predict only what FILE lacks.", "--resume"),
    without: str | None = option(
        "GPU", "Do not use the kernel tables of this GPU, to see what a GPU without tables gets."
    ),
    jobs: int | None = option(
        "N", "Number of parallel processes. Default: one per core.", *JOBS, min=1
    ),
    html: Path | None = option(
        "FILE", "Write a page that shows every measurement against its prediction."
    ),
    as_json: bool = flag("Print only the summary, as JSON.", "--json"),
) -> None:
    """Predict measurements of real GPUs and print the errors."""
    from ...harness.load_generator.machine import cores
    from ...harness.validation.accuracy.prediction_errors import judge, rows, summaries
    from ...harness.validation.accuracy.shipped import SHIPPED
    from ...predictors.specs import gpu
    from ...reports.pages.accuracy_page import accuracy_text, write_accuracy
    from ..interrupts import interruptible
    from ..options.declared import pool_of, resumed_in
    from ..output.console import print_result
    from ..output.progress import counted

    resumed_in(out, resume, "file")
    resume_hint = "" if out is None else f"continue with --out {out} --resume"
    with (
        interruptible(resume_hint),
        counted("measurements") as shown,
        pool_of(None, cores() if jobs is None else jobs) as pool,
    ):
        judged, skipped = judge(
            folder or SHIPPED,
            out,
            resume=resume,
            without=() if without is None else (gpu(without).name,),
            begin=None if pool is None else pool.begin,
            progress=shown,
        )
    page = None if html is None else write_accuracy(judged, skipped, html)
    if as_json:
        typer.echo(json.dumps(rows(summaries(judged)), allow_nan=False))
    else:
        print_result(accuracy_text(judged, skipped), out, page)
