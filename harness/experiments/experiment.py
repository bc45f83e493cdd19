"""An experiment: read it, run it, look at what it found."""

from __future__ import annotations

import datetime
import math
import platform
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...workloads.errors import SloBenchError, UnknownNameError
from ..engine.compiled_core import core_is_compiled
from ..load_generator.machine import cores
from ..results.run_checkpoint import STEP_TIME
from ..results.run_folder import (
    CHECKSUMS,
    INPUTS,
    PLANNED,
    PROMPT_SALT,
    RESUMED,
    RunFolder,
    check_distinct,
    check_files,
    has_no_result,
    open_run_folder,
    read_rows,
)
from ..servers.launch.backend_names import SIMULATED, TORCH
from .config.schema import ExperimentSchema
from .execution.cell_specs import CellSpec
from .execution.experiment_plan import ExperimentPlan, plan
from .execution.offered_load import duration, offered_s
from .execution.refinement import first_answer, refined_cells
from .execution.workers import (
    CellDone,
    Event,
    Executor,
    LocalExecutor,
    LocalPool,
    Said,
    check_jobs,
)
from .suite_files import suites

if TYPE_CHECKING:
    import pandas as pd

    from ..load_generator.load_progress import LoadProgress
    from ..load_generator.send_job import Senders
    from .backends.measuring import Backend

_NO_PROMPTS = (SIMULATED, TORCH)  # backends that send none to a server
_REPORTED_PACKAGES = ("numpy", "pandas", "pyarrow", "pydantic")
_WORTH_A_PROCESS = 4000  # requests, simulated in about the second that a process takes to start


@dataclass(frozen=True)
class Progress:
    """Progress of a run. `running` is the number of requests processed in unfinished cells.

    `loads`: on real servers, what the requests of unfinished cells show so far. `note`: what goes
    on since now, to be shown as a line of its own.
    """

    finished: int
    cells: int
    running: Mapping[str, int]
    loads: Mapping[str, LoadProgress] = field(default_factory=dict)
    note: str = ""


class Experiment(ExperimentSchema):
    """An experiment: systems, deployment and load; `ExperimentSchema` lists the settings.

    >>> result = Experiment(systems=["vllm", "sarathi"], rates=[2, 4, 8]).run()  # doctest: +SKIP
    >>> result.cells[["system", "rate_rps", "attainment"]]  # doctest: +SKIP

    Raises:
        SloBenchError: a setting is unknown, has no sensible value, or contradicts another.
    """

    @classmethod
    def suite(cls, name: str, **changes: object) -> Experiment:
        """One of the experiments that come with the package.

        Raises:
            UnknownNameError: there is none of that name.
        """
        suite_files = suites()
        if name not in suite_files:
            raise UnknownNameError("suite", name, suite_files)
        return cls.load(suite_files[name], **changes)

    def plan(self) -> ExperimentPlan:
        """All cells, and the experiment with nothing left open; checked, not run.

        Raises:
            SloBenchError: a name is unknown, a model does not fit, a file cannot be read, or a
                setting has no effect with the backend.
        """
        self.check_effects()
        return plan(self)

    def run(
        self,
        out: str | Path | None = None,
        *,
        jobs: int | None = None,
        executor: Executor | None = None,
        resume: bool = False,
        progress: Callable[[Progress], None] | None = None,
        command: Sequence[str] = (),
    ) -> RunResult:
        """Run every cell and keep everything in a folder.

        Args:
            out: the folder, empty or new; by default a new one under `runs/`.
            jobs: processes; by default one per processor core, or fewer where so many would
                take longer to start than to simulate. With one, cells run in this one. Cells on
                real servers never run side by side.
            executor: where simulated cells run instead, and from where the load of servers that run
                already is sent, as in `ray_pool.OnRay()`.
            resume: finish what an interrupted run of this experiment left in `out`, and measure
                cells again of which no request was served.
            progress: called as the run goes on.
            command: what was typed, for `environment.json`.

        Raises:
            SloBenchError: the experiment or the folder cannot be used. Cells that finished before
                stay; a folder made for this run and still without any is removed.
        """
        planned = self.plan()
        check_jobs(jobs)
        folder = Path(out) if out is not None else new_folder(self.name)
        with open_run_folder(
            folder,
            cells=[spec.cell for spec in planned.cells],
            experiment_toml=planned.resolved.to_toml(),
            environment={**environment(planned, command), PLANNED: len(planned.cells)},
            resume=resume,
            again=has_no_result,
        ) as held:
            if planned.resolved.backend == SIMULATED:
                _simulate(planned, held, executor, jobs, progress)
            else:
                _measure(planned, held, executor, progress)
        return RunResult(folder)


def _worthwhile_processes(specs: Sequence[CellSpec]) -> int:
    """As many as have enough to simulate, each."""
    requests = sum(
        (spec.rate_rps or math.inf) * (spec.duration_s or math.inf)
        if spec.requests is None
        else spec.requests
        for spec in specs
    )
    return len(specs) if math.isinf(requests) else max(1, int(requests / _WORTH_A_PROCESS))


def _missing(held: RunFolder, specs: Sequence[CellSpec]) -> list[CellSpec]:
    missing = set(held.missing)
    return [spec for spec in specs if spec.cell in missing]


def _teller(
    held: RunFolder, progress: Callable[[Progress], None] | None
) -> Callable[[Event], None]:
    """A function that keeps the rows of finished cells, and passes on how far the run is."""
    running: dict[str, int] = {}
    loads: dict[str, LoadProgress] = {}

    def tell(event: Event) -> None:
        note = ""
        if isinstance(event, Said):
            note = event.text
        elif isinstance(event, CellDone):
            running.pop(event.cell, None)
            loads.pop(event.cell, None)
            held.add(event.cell, event.row)
        else:
            running[event.cell] = event.requests
            if event.load is not None:
                loads[event.cell] = event.load
        if progress is not None:
            progress(Progress(len(held.finished), len(held.cells), running, loads, note))

    return tell


def _simulate(
    planned: ExperimentPlan,
    held: RunFolder,
    executor: Executor | None,
    jobs: int | None,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Simulate what is missing; then, round by round, the cells at further rates."""
    tell = _teller(held, progress)
    cells: Sequence[CellSpec] = planned.cells
    rounds = planned.resolved.refine or 0
    by_rate = all(spec.rate_rps is not None for spec in cells) and not planned.resolved.load_factors
    count = jobs or min(cores(), _worthwhile_processes(_missing(held, cells) or cells))
    with LocalPool(count) as pool:
        local = LocalExecutor(count, pool)
        for left in range(rounds if by_rate else 0, -1, -1):
            todo = _missing(held, cells)
            (executor or local).run(todo, held.path, records=planned.resolved.records, tell=tell)
            if left:
                if todo and left == rounds:
                    tell(Said(first_answer(cells, held.finished)))
                cells = refined_cells(planned, cells, held.finished)
                held.extend([spec.cell for spec in cells])


def _measure(
    planned: ExperimentPlan,
    held: RunFolder,
    executor: Executor | None,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Measure what is missing on real servers."""
    from .backends.measuring import measure_cells

    tell, todo = _teller(held, progress), _missing(held, planned.cells)
    tell(Said(_how_long(todo, planned.resolved.server.repetitions)))
    with nullcontext() if executor is None else executor.senders() as senders:
        measure_cells(
            backend_of(
                salted(planned.resolved, held.environment),
                senders,
                lambda text: tell(Said(text)),
            ),
            todo,
            held.path,
            records=planned.resolved.records,
            repetitions=planned.resolved.server.repetitions,
            tell=tell,
        )


def _how_long(specs: Sequence[CellSpec], repetitions: int) -> str:
    """How many cells real servers measure, and how long their requests arrive."""
    cells = f"{len(specs):,} cell{'' if len(specs) == 1 else 's'}"
    cells += f", each measured {repetitions} times" * (repetitions > 1)
    arrivals_s = offered_s(specs)
    if arrivals_s is None:
        return cells
    return f"{cells}; requests arrive during {duration(arrivals_s * repetitions)} in all"


def salted(experiment: ExperimentSchema, environment: Mapping[str, object]) -> ExperimentSchema:
    """The experiment with the prompt salt that its run folder keeps, unless it has one itself or
    sends no prompts to a server.

    A resumed run adds which time it is: a cell that was interrupted has sent prompts already.
    """
    if experiment.client.prompt_salt is not None or experiment.backend in _NO_PROMPTS:
        return experiment
    earlier = environment.get(RESUMED)
    salt = str(environment.get(PROMPT_SALT, ""))
    if isinstance(earlier, list) and earlier:
        salt += f" {len(earlier)}"
    client = experiment.client.model_copy(update={"prompt_salt": salt})
    return experiment.model_copy(update={"client": client})


def backend_of(
    experiment: ExperimentSchema,
    senders: Senders | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Backend:
    """The backend that measures the experiment's cells; not for simulated ones.

    `senders` are the machines that send the load to servers that already run; None: this machine.
    `say` is called with what goes on: a server starts, it is probed.

    Raises:
        SloBenchError: settings contradict each other.
    """
    if senders is not None and experiment.backend != "openai":
        raise SloBenchError(
            "several machines can send the load only to running servers (--base-url); "
            f"leave --executor out with {experiment.backend}"
        )
    experiment.check_effects()
    if experiment.backend == "openai":
        from .backends.attached import HttpBackend

        return HttpBackend(experiment.client, senders=senders, say=say)
    if experiment.backend == TORCH:
        from .backends.torch_engine import TorchBackend

        return TorchBackend(server=experiment.server)
    from .backends.launched import LaunchedBackend

    return LaunchedBackend(experiment.backend, experiment.client, experiment.server, say)


@dataclass(frozen=True)
class RunResult:
    """A finished run, on disk at `folder`."""

    folder: Path

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `cells.csv`, numbers as numbers, None where a cell has no value."""
        return list(read_rows(self.folder / "cells.csv"))

    @cached_property
    def cells(self) -> pd.DataFrame:
        """Table with one row per cell."""
        import pandas as pd

        table = self.folder / "cells.csv"
        cells = pd.read_csv(table)
        check_distinct(table, cells["cell"])
        return cells

    def requests(self, cell: str) -> pd.DataFrame:
        """Return the per-request records of a cell, named as in `cells["cell"]`.

        Raises:
            UnknownNameError: there is no such cell, or it was run without records.
            FileFormatError: the file is damaged.
        """
        return self._details("requests", cell)

    def timeline(self, cell: str) -> pd.DataFrame:
        """Queue, batch and KV use of a cell over time.

        Raises:
            UnknownNameError: there is no such cell.
            FileFormatError: the file is damaged.
        """
        return self._details("timelines", cell)

    def _details(self, kind: str, cell: str) -> pd.DataFrame:
        from ..results.read_run import read_table

        for row in self.rows():
            if row["cell"] == cell:
                check_files(self.folder, cell, row.get(CHECKSUMS))
        folder = self.folder / kind
        for path in (folder / f"{cell}.csv.gz", folder / f"{cell}.parquet"):
            if path.is_file():
                return read_table(path)
        cells = {path.name.split(".csv.gz")[0] for path in (self.folder / kind).glob("*.csv.gz")}
        cells |= {path.stem for path in (self.folder / kind).glob("*.parquet")}
        raise UnknownNameError(f"cell with {kind}", cell, cells)


def new_folder(name: str, under: Path = Path("runs")) -> Path:
    """A folder for a run that does not exist yet."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    plain = "".join(c if c.isalnum() or c in "-." else "-" for c in name)
    plain = plain.encode()[:150].decode(errors="ignore")  # a name has at most 255 bytes

    def candidates() -> Iterator[Path]:
        yield under / f"{plain}-{stamp}"
        for number in range(2, 1000):
            yield under / f"{plain}-{stamp}-{number}"

    return next(path for path in candidates() if not path.exists())


def environment(
    planned: ExperimentPlan, command: Sequence[str], results: str | None = None
) -> dict[str, object]:
    """Return the environment of the run: versions, hardware and sources needed to judge or repeat
    it.

    `results` is a file that the folder has besides those of every run.
    """
    return {
        **({} if results is None else {"results": results}),
        **simulator_of(planned.step_times()),
        "core": "compiled" if core_is_compiled() else "source",
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in _REPORTED_PACKAGES},
        "command": list(command),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        INPUTS: planned.inputs(),
        **_prompt_salt(planned.resolved),
        **_cpu(planned),
    }


def simulator_of(step_times: Mapping[str, object]) -> dict[str, object]:
    """What `check_same_simulator` compares: the version, and where step times come from."""
    return {"slo_bench": _version("slo-bench"), STEP_TIME: step_times}


def _prompt_salt(experiment: ExperimentSchema) -> dict[str, object]:
    if experiment.backend in _NO_PROMPTS:
        return {}
    salt = experiment.client.prompt_salt
    return {PROMPT_SALT: secrets.token_hex(8) if salt is None else salt}


def _cpu(planned: ExperimentPlan) -> dict[str, object]:
    experiment = planned.resolved
    if experiment.backend != TORCH:
        return {}
    from .backends.torch_engine import TorchBackend

    return {"cpu_threads": TorchBackend(server=experiment.server).threads, "cpu_cores": cores()}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
