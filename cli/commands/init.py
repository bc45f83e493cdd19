"""`slo-bench init`: a commented experiment file."""

from __future__ import annotations

from pathlib import Path

import typer

from ...workloads.errors import SloBenchError, UnknownNameError
from ..options.names import listed
from ..options.parameters import argument, option

EXAMPLES = (
    "slo-bench init",
    "slo-bench init ascendra.toml --suite ascendra",
)


def init(
    file: Path = argument("[FILE.toml]", "File to write.", default=Path("experiment.toml")),
    suite: str = option(
        "NAME",
        "Predefined experiment to begin with (see `slo-bench list suites`).",
        default="quickstart",
        complete=listed("suites"),
    ),
) -> None:
    """Write an experiment file with a comment on every setting, to edit and to run."""
    from ...harness.experiments.config.experiment_file import read_toml
    from ...harness.experiments.config.template import template
    from ...harness.experiments.suite_files import suites
    from ...workloads.whole_file import write_whole

    suite_files = suites()
    if suite not in suite_files:
        raise UnknownNameError("suite", suite, suite_files)
    if file.exists():
        raise SloBenchError(f"{file} exists; name another file")
    table, _ = read_toml(suite_files[suite])
    write_whole(file, [template(str(file), table).encode()])
    typer.echo(f"{file}: the experiment {suite}; run it with `slo-bench run {file}`")
