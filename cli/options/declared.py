"""Options of commands that run experiments, other than the settings of an experiment."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from ...harness.experiments.config.setting import COMPARED, RUN, SERVES
from ...workloads.errors import SloBenchError, UnknownNameError
from .names import listed
from .parameters import JOBS, OUT, allow_host, argument, flag, option, option_group

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...harness.experiments.execution.ray_pool import OnRay
    from ...harness.experiments.execution.workers import WorkerPool
    from ...reports.live import LiveStatus

STORAGE = "Execution"
Found = TypeVar("Found")

PEER_LINK = option(
    "LINK",
    "Measured link between the GPUs, such as 16gb/s@20us (bandwidth and latency): all-reduces of "
    "a profile with tp above 1 whose tables have none.",
    "--peer-link",
)
NO_REPORT = flag("Do not write report.html.", "--no-report", panel=RUN)


@option_group
class BesideSettings:
    """What an experiment is made from beside its settings."""

    file: Path | None = argument("[FILE.toml]", "Experiment file.", default=None)
    suite: str | None = option(
        "NAME",
        "Predefined experiment (see `slo-bench list suites`). Default without any option: "
        "quickstart.",
        complete=listed("suites"),
    )
    set: list[str] | None = option(
        "NAME=VALUE",
        "Value of a setting (tp=2) or of a system's parameter (sarathi.chunk_tokens=512; with one "
        "system chunk_tokens=512). May be repeated.",
        "--set",
        panel=COMPARED,
    )
    sweep: list[str] | None = option(
        "NAME=A,B,…",
        "Run every combination with these values of a setting (tp=1,2) or of a system's parameter "
        "(sarathi.chunk_tokens=512,1024). May be repeated.",
        "--sweep",
        panel=COMPARED,
    )
    variant: str | None = option(
        "NAME", "Only this one of the file's [variants].", "--variant", panel=COMPARED
    )
    like: str | None = option(
        "COMMAND|FILE",
        "Deployment to take settings from: a command ('vllm serve M --max-num-seqs 64'), launch "
        "script, Compose file or Kubernetes manifest. Options given beside it count first.",
        "--like",
        panel=SERVES,
    )


@option_group
class RunFolder:
    """Options of a folder that is filled by the processes of this machine."""

    out: Path | None = option(
        "DIR", "Run folder, empty or new. Default: a new one under runs.", *OUT, panel=RUN
    )
    resume: bool = flag("Skip cells that are already finished in --out.", "--resume", panel=RUN)
    jobs: int | None = option(
        "N", "Number of parallel processes. Default: at most one per core.", *JOBS, panel=RUN
    )

    @property
    def resumed(self) -> Path | None:
        """The folder to resume, or None without --resume."""
        return resumed_in(self.out, self.resume)


@option_group
class Executor:
    """Options of where simulations run."""

    executor: str = option(
        "local|ray",
        "Where simulations run and from where load is sent to running servers: this machine, or "
        "all machines of a Ray cluster (needs slo-bench[ray]).",
        default="local",
        panel=RUN,
    )
    address: str | None = option(
        "HOST:PORT|auto",
        "Address of the Ray cluster. Default: start one on this machine.",
        panel=RUN,
    )

    @property
    def cluster(self) -> OnRay | None:
        """The Ray cluster, or None: this machine.

        Raises:
            SloBenchError: the executor is unknown, or an address is given without Ray.
        """
        if self.executor == "ray":
            from ...harness.experiments.execution.ray_pool import OnRay

            return OnRay(self.address)
        if self.executor != "local":
            raise UnknownNameError("--executor", self.executor, ("local", "ray"))
        if self.address is not None:
            raise SloBenchError("--address is that of a Ray cluster: add --executor ray")
        return None


@option_group
class Execution(Executor, RunFolder):
    """Options of `run` and `capacity`: the run folder, where runs are made, and the report."""

    no_report: bool = NO_REPORT
    live: bool = flag(
        "Serve the report on this machine while cells finish; the address is printed.",
        "--live",
        panel=RUN,
    )
    names: list[str] | None = allow_host(panel=RUN)

    @contextmanager
    def watched(self, folder: Path) -> Iterator[LiveStatus | None]:
        """With --live the report of `folder` is served within the block; yields what it shows
        above it.
        """
        if not self.live:
            if self.names:
                raise SloBenchError("--allow-host goes with --live")
            yield None
            return
        from ...reports.live import LiveStatus, live_report

        status = LiveStatus()
        with live_report(folder, status, names=tuple(self.names or ())) as url:
            typer.echo(f"live report: {url}", err=True)
            yield status


@option_group
class HtmlOrJson:
    """The options --html and --json of a command with one result."""

    html: Path | None = option("FILE", "Also write an HTML page.", "--html")
    as_json: bool = flag("Print only JSON.", "--json")

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


def resumed_in(out: Path | None, resume: bool, kind: str = "folder") -> Path | None:
    """Return the folder (or `kind` "file") to resume, or None without --resume.

    Raises:
        SloBenchError: none was named, or there is none of that name.
    """
    if not resume:
        return None
    if out is None:
        word = "DIR" if kind == "folder" else kind.upper()
        raise SloBenchError(f"--resume needs the {kind} to go on with: --out {word}")
    if not (out.is_dir() if kind == "folder" else out.is_file()):
        raise SloBenchError(f"there is nothing to resume in {out}: no such {kind}")
    return out


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
