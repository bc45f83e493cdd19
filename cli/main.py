"""The command line `slo-bench`. A command's module is imported when the command is called."""

from __future__ import annotations

import os
import sys
from typing import Annotated, ClassVar

import typer

from ..workloads.errors import SloBenchError
from ..workloads.input_files import SIZE_VARIABLE, parse_size
from .interrupts import struck
from .lazy_group import LazyGroup
from .options.parameters import epilog


class _Commands(LazyGroup):
    """All commands; the help lists them in this order."""

    functions: ClassVar[dict[str, str]] = {
        "run": "run:run",
        "capacity": "capacity:capacity",
        "report": "report:report",
        "compare": "compare:compare",
        "gate": "gate:gate",
        "explain": "explain:explain",
        "sensitivity": "sensitivity:sensitivity",
        "validate": "validate:validate",
        "accuracy": "accuracy:accuracy",
        "derive-slo": "derive_slo:derive_slo",
        "plan": "plan:plan",
        "tune": "tune:app",
        "profile": "profile:app",
        "workload": "workload:app",
        "predict-train": "predict_train:predict_train",
        "predict-eval": "predict_eval:predict_eval",
        "backends": "backends:app",
        "serve": "serve:serve",
        "selftest": "selftest:selftest",
        "list": "list:list_names",
        "doctor": "doctor:doctor",
    }


app = typer.Typer(
    name="slo-bench",
    cls=_Commands,
    help="Measure, compare and tune LLM serving systems: the load that they carry while requests "
    "meet their SLOs, and the policy, placement and settings that carry the most.\n\n"
    "Exit codes: 0: success; 1: the check failed (gate, doctor, selftest); 2: usage or input "
    "error, the message says what to change; 130: interrupted by Ctrl-C.",
    epilog=epilog(["slo-bench run", "slo-bench list systems", "slo-bench run --help"]),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from .. import __version__

        typer.echo(f"slo-bench {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    max_input_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most bytes of an input file, also after it is unpacked: 300M, 8G. Default: what "
            "the available memory can hold.",
        ),
    ] = None,
) -> None:
    """Global options of `slo-bench`, such as --version."""
    if max_input_size is not None:
        parse_size(max_input_size)
        os.environ[SIZE_VARIABLE] = max_input_size  # for worker processes too


_OLD = {
    "--knob": "a parameter is fixed by --set [SYSTEM.]NAME=VALUE, compared by --sweep "
    "[SYSTEM.]NAME=A,B and searched by --search NAME=LOW..HIGH"
}


def main() -> None:
    """Run the command line; a usage or input error prints one line and exits with code 2."""
    try:
        for word in sys.argv[1:]:
            if word.partition("=")[0] in _OLD:
                raise SloBenchError(f"there is no {word}: {_OLD[word.partition('=')[0]]}")
        app()
    except SloBenchError as error:
        if struck():
            sys.exit(130)
        from .output.console import harmless

        typer.echo(f"error: {harmless(str(error))}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        if struck():
            sys.exit(130)
        raise


if __name__ == "__main__":
    main()
