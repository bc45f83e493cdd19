"""`slo-bench run`: an experiment from a file, a suite or options, with report."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from ...harness.experiments.config.setting import RUN
from ...workloads.errors import SloBenchError
from ..options import declared as options
from ..options.from_schema import Given, offer, with_options
from ..options.parameters import VERBOSE, flag

EXAMPLES = (
    "slo-bench run",
    "slo-bench run --system vllm --system sarathi --workload azure-conv --rates 2:10:2",
    "slo-bench run --model llama-3-70b --gpu h100-80g --gpus 8 --router least-loaded --seeds 1",
    "slo-bench run --system sarathi --sweep sarathi.chunk_tokens=512,2048 --requests 300",
    "slo-bench run --suite quickstart --out results --jobs 2",
    "slo-bench run --suite quickstart --executor ray --address 10.0.0.1:6379",
    "slo-bench run --resume --out results",
    "slo-bench run --base-url http://127.0.0.1:8000 --rates 1,2,4 --requests 200 --seeds 1",
    "slo-bench run --base-url http://10.0.0.9:8000 --rates 500,1000 --executor ray --address auto",
)
# In `--help`; the others in `--help-all`.
SHOWN = (
    *("--suite", "--system", "--workload", "--rates", "--slo"),
    *("--model", "--gpu", "--backend", "--base-url", "--out"),
)


@with_options
def run(
    *,
    experiment_options: Given = offer(),
    validate: bool = flag(
        "Validate the simulator against the measured server: simulate every level with step times "
        "fitted to the steps that the server logged at the other levels, and print the errors. "
        "Every level is measured three times, to separate simulation error from noise of the "
        "machine. With --profile FILE its step times are used instead; servers given by "
        "--base-url need it. --json prints the error rows.",
        "--validate",
        panel=RUN,
    ),
    execution: options.Execution,
    verbose: bool = VERBOSE,
    as_json: bool = flag("Print only the rows of cells.csv, as a JSON list.", "--json", panel=RUN),
) -> None:
    """Run an experiment: every system at every rate and seed. Writes a run folder with a report."""
    from ...predictors.profiles.profile_format import read_profile
    from ..options.experiment_options import experiment_of
    from ..output.console import print_result
    from ..output.progress import phase
    from ..output.run_output import (
        check_results,
        run_shown,
        summarise,
        validated,
        write_page,
    )

    judged = None
    if validate and "profile" in experiment_options.settings:  # judged, and no setting
        judged = Path(experiment_options.settings.pop("profile"))
    experiment = experiment_of(experiment_options, execution.resumed)
    if validate or experiment.server.validated:
        experiment = validated(experiment, judged)
        validate = True
    result = run_shown(experiment, execution)
    nothing_to_show = not any(row["valid"] for row in result.rows())
    levels, problem = [], None
    if validate:
        from ...harness.validation.replay.run_replay import validate_run

        try:
            profile = None if judged is None else read_profile(judged)
            with phase("simulating the levels"):
                levels = validate_run(result.folder, profile)
        except SloBenchError as error:
            problem = error  # what was measured is shown all the same
    if experiment.backend != "simulated":
        from ...harness.validation.replay.replayed_decisions import compare_decisions

        with phase("comparing decisions with the simulator's"):
            compare_decisions(result.folder)
    page = None
    if not (execution.no_report or nothing_to_show):
        with phase("writing the report"):
            page = write_page(result.folder)
    if as_json:
        rows = [row for level in levels for row in level.rows()] if validate else result.rows()
        typer.echo(json.dumps(rows, allow_nan=False))
    else:
        if levels:
            from ...reports.pages.validation import levels_text

            print_result(levels_text(levels))
        summarise(result, page, verbose=verbose)
    if problem is not None:
        raise problem
    check_results(result)
