"""Options of commands that run experiments, other than the settings of an experiment."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ...harness.experiments.config.setting import COMPARED, RUN
from ...workloads.errors import SloBenchError, UnknownNameError
from .names import listed
from .parameters import argument, flag, option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...harness.experiments.execution.ray_pool import OnRay
    from ...harness.experiments.execution.workers import WorkerPool

STORAGE = "Execution"
Found = TypeVar("Found")

File = Annotated[Path | None, argument("[FILE.toml]", "Experiment file.")]
Suite = Annotated[
    str | None,
    option(
        "NAME",
        "Predefined experiment (see `slo-bench list suites`). Default without any option: "
        "quickstart.",
        complete=listed("suites"),
    ),
]
Set = Annotated[
    list[str] | None,
    option(
        "NAME=VALUE",
        "Value of a setting (tp=2) or of a system's parameter (sarathi.chunk_tokens=512; with "
        "one system chunk_tokens=512). May be repeated.",
        "--set",
        panel=COMPARED,
    ),
]
Sweep = Annotated[
    list[str] | None,
    option(
        "NAME=A,B,…",
        "Run every combination with these values of a setting (tp=1,2) or of a system's "
        "parameter (sarathi.chunk_tokens=512,1024). May be repeated.",
        "--sweep",
        panel=COMPARED,
    ),
]
Variant = Annotated[
    str | None,
    option(
        "NAME",
        "Only this one of the file's [variants].",
        "--variant",
        panel=COMPARED,
    ),
]
PeerLink = Annotated[
    str | None,
    option(
        "LINK",
        "Measured link between the GPUs, such as 16gb/s@20us (bandwidth and latency): all-reduces "
        "of a profile with tp above 1 whose tables have none.",
        "--peer-link",
    ),
]
Validate = Annotated[
    bool,
    flag(
        "Validate the simulator against the measured server: simulate every level with step "
        "times fitted to the steps that the server logged at the other levels, and print the "
        "errors. Every level is measured three times, to separate simulation error from noise "
        "of the machine. With --profile FILE its step times are used instead; servers given "
        "by --base-url need it. --json prints the error rows.",
        "--validate",
        panel=RUN,
    ),
]
Out = Annotated[
    Path | None,
    option(
        "DIR", "Run folder, empty or new. Default: a new one under runs.", "--out", "-o", panel=RUN
    ),
]
Resume = Annotated[
    bool, flag("Skip cells that are already finished in --out.", "--resume", panel=RUN)
]
Jobs = Annotated[
    int | None,
    option(
        "N",
        "Number of parallel processes. Default: at most one per core.",
        "--jobs",
        "-j",
        panel=RUN,
    ),
]
Executor = Annotated[
    str,
    option(
        "local|ray",
        "Where simulations run and from where load is sent to running servers: this machine, "
        "or all machines of a Ray cluster (needs slo-bench[ray]).",
        panel=RUN,
    ),
]
Address = Annotated[
    str | None,
    option(
        "HOST:PORT|auto",
        "Address of the Ray cluster. Default: start one on this machine.",
        panel=RUN,
    ),
]
Live = Annotated[
    bool,
    flag(
        "Serve the report on this machine while cells finish; the address is printed.",
        "--live",
        panel=RUN,
    ),
]
NoReport = Annotated[bool, flag("Do not write report.html.", "--no-report", panel=RUN)]


@dataclass(frozen=True)
class Execution:
    """Options of `run` and `capacity`: the run folder, where runs are made, and the report."""

    out: Out = None
    resume: Resume = False
    jobs: Jobs = None
    executor: Executor = "local"
    address: Address = None
    no_report: NoReport = False
    live: Live = False

    @contextmanager
    def watched(self, folder: Path) -> Iterator[None]:
        """With --live the report of `folder` is served within the block."""
        if not self.live:
            yield
            return
        from ...reports.live import live_report

        with live_report(folder) as url:
            typer.echo(f"live report: {url}", err=True)
            yield

    @property
    def resumed(self) -> Path | None:
        """The folder to resume, or None without --resume."""
        return resumed_in(self.out, self.resume)

    @property
    def cluster(self) -> OnRay | None:
        """The Ray cluster, or None: this machine."""
        return executor_of(self.executor, self.address)


@dataclass(frozen=True)
class HtmlOrJson:
    """The options --html and --json of a command with one result."""

    html: Annotated[Path | None, option("FILE", "Also write an HTML page.", "--html")] = None
    as_json: Annotated[bool, flag("Print only JSON.", "--json")] = False

    def show(
        self,
        document: Found,
        write: Callable[[Found, Path], object],
        plain: Callable[[Found], Any],
        text: Callable[[Found], RenderableType],
        *files: Path | None,
    ) -> None:
        """Write the page of a result; print its JSON, or its text and the names of the files."""
        from ..output.console import print_result

        if self.html is not None:
            write(document, self.html)
        if self.as_json:
            typer.echo(json.dumps(plain(document), allow_nan=False, ensure_ascii=False))
        else:
            print_result(text(document), *files, self.html)


def resumed_in(out: Path | None, resume: bool) -> Path | None:
    """Return the folder to resume, or None without --resume.

    Raises:
        SloBenchError: no folder was named, or there is none of that name.
    """
    if resume and out is None:
        raise SloBenchError("--resume needs the folder to go on with: --out DIR")
    if resume and out is not None and not out.is_dir():
        raise SloBenchError(f"there is nothing to resume in {out}: no such folder")
    return out if resume else None


def executor_of(name: str, address: str | None) -> OnRay | None:
    """Return the Ray cluster of --executor and --address, or None for this machine.

    Raises:
        SloBenchError: the executor is unknown, or an address is given without Ray.
    """
    if name == "ray":
        from ...harness.experiments.execution.ray_pool import OnRay

        return OnRay(address)
    if name != "local":
        raise UnknownNameError("--executor", name, ("local", "ray"))
    if address is not None:
        raise SloBenchError("--address is that of a Ray cluster: add --executor ray")
    return None


def pool_of(where: OnRay | None, jobs: int) -> AbstractContextManager[WorkerPool | None]:
    """Return the executor of simulations: the Ray cluster, `jobs` local processes, or None (this
    process) for a single job.

    Raises:
        SloBenchError: `jobs` is below 1.
    """
    if where is not None:
        return where.pool()
    if jobs == 1:
        return nullcontext()
    from ...harness.experiments.execution.workers import LocalPool

    return LocalPool(jobs)
