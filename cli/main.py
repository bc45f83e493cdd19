"""`slo-bench`: the way in. Commands import what they need when they run, so that help is quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..workloads.errors import SloBenchError
from .commands.backends import app as backends
from .commands.capacity import EXAMPLES as CAPACITY_EXAMPLES
from .commands.capacity import capacity
from .commands.compare import EXAMPLES as COMPARE_EXAMPLES
from .commands.compare import compare
from .commands.derive_slo import EXAMPLES as DERIVE_SLO_EXAMPLES
from .commands.derive_slo import derive_slo
from .commands.doctor import EXAMPLES as DOCTOR_EXAMPLES
from .commands.doctor import doctor
from .commands.explain import EXAMPLES as EXPLAIN_EXAMPLES
from .commands.explain import explain
from .commands.gate import EXAMPLES as GATE_EXAMPLES
from .commands.gate import gate
from .commands.list import EXAMPLES as LIST_EXAMPLES
from .commands.list import list_names
from .commands.plan import EXAMPLES as PLAN_EXAMPLES
from .commands.plan import plan
from .commands.predict_eval import EXAMPLES as PREDICT_EVAL_EXAMPLES
from .commands.predict_eval import predict_eval
from .commands.predict_train import EXAMPLES as PREDICT_TRAIN_EXAMPLES
from .commands.predict_train import predict_train
from .commands.profile import app as profile
from .commands.report import EXAMPLES as REPORT_EXAMPLES
from .commands.report import report
from .commands.run import EXAMPLES as RUN_EXAMPLES
from .commands.run import run
from .commands.selftest import EXAMPLES as SELFTEST_EXAMPLES
from .commands.selftest import selftest
from .commands.sensitivity import EXAMPLES as SENSITIVITY_EXAMPLES
from .commands.sensitivity import sensitivity
from .commands.serve import EXAMPLES as SERVE_EXAMPLES
from .commands.serve import serve
from .commands.tune import app as tune
from .commands.validate import EXAMPLES as VALIDATE_EXAMPLES
from .commands.validate import validate
from .commands.workload import app as workload
from .interrupts import struck
from .options.examples import epilog

app = typer.Typer(
    name="slo-bench",
    help="Measure, compare and tune LLM serving systems: the load that they carry while requests "
    "meet their SLOs, and the policy, placement and settings that carry the most.\n\n"
    "Exit codes: 0: success; 1: the check failed (gate, doctor, selftest); 2: usage or input "
    "error, the message says what to change; 130: interrupted by Ctrl-C.",
    epilog=epilog(["slo-bench run", "slo-bench list systems", "slo-bench run --help"]),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=epilog(RUN_EXAMPLES))(run)
app.command(epilog=epilog(CAPACITY_EXAMPLES))(capacity)
app.command(epilog=epilog(REPORT_EXAMPLES))(report)
app.command(epilog=epilog(COMPARE_EXAMPLES))(compare)
app.command(epilog=epilog(GATE_EXAMPLES))(gate)
app.command(epilog=epilog(EXPLAIN_EXAMPLES))(explain)
app.command(epilog=epilog(SENSITIVITY_EXAMPLES))(sensitivity)
app.command(epilog=epilog(VALIDATE_EXAMPLES))(validate)
app.command("derive-slo", epilog=epilog(DERIVE_SLO_EXAMPLES))(derive_slo)
app.command(epilog=epilog(PLAN_EXAMPLES))(plan)
app.add_typer(tune, name="tune")
app.add_typer(profile, name="profile")
app.add_typer(workload, name="workload")
app.command("predict-train", epilog=epilog(PREDICT_TRAIN_EXAMPLES))(predict_train)
app.command("predict-eval", epilog=epilog(PREDICT_EVAL_EXAMPLES))(predict_eval)
app.add_typer(backends, name="backends")
app.command(epilog=epilog(SERVE_EXAMPLES))(serve)
app.command(epilog=epilog(SELFTEST_EXAMPLES))(selftest)
app.command("list", epilog=epilog(LIST_EXAMPLES))(list_names)
app.command(epilog=epilog(DOCTOR_EXAMPLES))(doctor)


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
) -> None:
    """Global options of `slo-bench`, such as --version."""


def main() -> None:
    """Run the command line; a usage or input error prints one line and exits with code 2."""
    try:
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
