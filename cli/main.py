"""The command line `slo-bench`. A command's module is imported when the command is called."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from ..workloads.errors import SloBenchError
from ..workloads.extras import import_failure
from ..workloads.input_files import SIZE_VARIABLE, parse_size
from ..workloads.masking import register_user_info
from ..workloads.trust import asking
from .interrupts import leave, struck
from .lazy_group import LazyGroup
from .options.parameters import epilog
from .trust_code import consent, named_code


class _Commands(LazyGroup):
    """All commands; the help lists them in this order."""

    names: ClassVar[tuple[str, ...]] = (
        *("init", "run", "capacity", "report", "export", "watch", "compare"),
        *("gate", "explain", "sensitivity", "validate", "accuracy", "derive-slo"),
        *("plan", "observe", "calibrate", "tune", "profile", "workload", "predict-train"),
        *("predict-eval", "model", "backends", "serve", "capture", "selftest", "list", "doctor"),
    )


app = typer.Typer(
    name="slo-bench",
    cls=_Commands,
    help="Measure, compare and tune LLM serving systems: the load that they carry while requests "
    "meet their SLOs, and the policy, placement and settings that carry the most.\n\n"
    "Exit codes: 0: success; 1: the check failed (gate, doctor, selftest); 2: usage or input "
    "error, the message says what to change; 70: a fault of slo-bench; 130: interrupted by Ctrl-C; "
    "143: by SIGTERM.",
    epilog=epilog(["slo-bench run", "slo-bench list systems", "slo-bench run --help"]),
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_set: bool) -> None:
    if is_set:
        from .. import __version__

        typer.echo(f"slo-bench {__version__}")
        raise typer.Exit


_FIRST = """\
slo-bench measures, compares and tunes how LLM serving systems meet their
latency objectives (SLOs).

  slo-bench run                     compare schedulers in simulation
  slo-bench capacity --system vllm  find the load that vLLM carries in its SLO
  slo-bench run --base-url URL      measure a running server

All commands: slo-bench --help. An experiment file to edit: slo-bench init."""


@app.callback()
def options(
    context: typer.Context,
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
    if context.invoked_subcommand is None:
        typer.echo(_FIRST)
    if max_input_size is not None:
        parse_size(max_input_size)
        os.environ[SIZE_VARIABLE] = max_input_size  # for worker processes too


_OLD = {
    "--knob": "a parameter is fixed by --set [SYSTEM.]NAME=VALUE, compared by --sweep "
    "[SYSTEM.]NAME=A,B and searched by --search NAME=LOW..HIGH"
}


_INTERRUPTED = 130  # what typer makes of Ctrl-C
_FAULT = 70  # as in sysexits.h: distinct from 1, a check that failed
_LEAST_MEMORY_BYTES = 350 << 20  # address space of a small simulation with the libraries it loads


def main() -> None:
    """Run the command line; a usage or input error prints one line and exits with code 2."""
    try:
        _check_surroundings()
        for word in sys.argv[1:]:
            register_user_info(word)
            if word.partition("=")[0] in _OLD:
                raise SloBenchError(f"there is no {word}: {_OLD[word.partition('=')[0]]}")
        with asking(consent, named_code(sys.argv[1:])):
            app()
    except SystemExit as ended:
        if ended.code and (struck() or ended.code == _INTERRUPTED):
            leave()
        if _policy_fault(ended) is None:
            raise
        sys.exit(_exit_code(ended))
    except KeyboardInterrupt:
        leave()
    except Exception as error:
        if struck():
            leave()
        sys.exit(_exit_code(error))


def _check_surroundings() -> None:
    """Reject arguments and limits with which no command can work.

    Raises:
        SloBenchError: with what to change.
    """
    for word in sys.argv[1:]:
        try:
            word.encode()
        except UnicodeEncodeError:
            shown = word.encode(errors="backslashreplace").decode()
            raise SloBenchError(
                f"{shown} is not valid in the encoding {sys.getfilesystemencoding()}; rename the "
                "file, or set LC_ALL=C.UTF-8"
            ) from None
    if sys.platform != "win32":
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY and limit < _LEAST_MEMORY_BYTES:
            raise SloBenchError(
                f"memory is limited to {limit >> 20} MiB (ulimit -v) and at least "
                f"{_LEAST_MEMORY_BYTES >> 20} MiB are needed"
            )


def _policy_fault(error: BaseException) -> SloBenchError | None:
    """The error of a policy file as one line; None: it did not come from one."""
    faults = sys.modules.get(f"{__package__.rpartition('.')[0]}.harness.policies.policy_faults")
    text = None if faults is None else faults.fault_text(error)
    return None if text is None else SloBenchError(text)


def _exit_code(error: BaseException) -> int:
    """Print an error; return 2 for one that the user can mend, else 70 with its traceback."""
    if isinstance(error, ImportError):
        error = import_failure(error) or error
    error = _policy_fault(error) or error
    if isinstance(error, SloBenchError):
        from .output.console import harmless, tell

        tell(f"error: {harmless(str(error))}")
        return 2
    if isinstance(error, MemoryError):
        typer.echo("error: memory is exhausted; use fewer requests, cells or --jobs", err=True)
        return 2
    if isinstance(error, OSError):
        from .standard_streams import exit_code_of, lost_output

        if (lost := lost_output()) is not None:
            return exit_code_of(lost)
        try:
            Path.cwd()
        except OSError:
            typer.echo("error: the working directory does not exist any more", err=True)
            return 2
    traceback.print_exception(error)
    typer.echo("error: this is a fault of slo-bench; please report the lines above", err=True)
    return _FAULT


if __name__ == "__main__":
    main()
