"""A profile of the torch engine on this machine: measured, kept row by row, fitted."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....predictors.profiles.fit_profile import fit_links
from ....predictors.profiles.profile_format import Profile, Source, table_of, write_profile
from ....predictors.profiles.whole_steps import LEAST_STEPS, LoggedStep, profile_of_steps
from ....predictors.specs import models
from ....workloads.errors import SloBenchError
from ....workloads.extras import need
from ..loop.gc_control import heap_frozen
from .threads import ThreadLayout
from .timing import Timing

if TYPE_CHECKING:
    from .decoder import Decoder
    from .distributed import CompletedMove
    from .measure import BatchShape

BUDGET_S = 540.0
_BLOCK_SIZE = 16
_MOST_BLOCKS = 8192  # KV blocks that are made for measuring
_NUM_CPU_BLOCKS = 2048

Tell = Callable[[int, int], None]  # rows done, rows in all


@dataclass(frozen=True)
class ProfilingOptions:
    """What to measure. `gpu` is the catalogue's name of the device; by default the device's own."""

    model: Path
    out: Path
    device: str = "cpu"
    gpu: str | None = None
    name: str | None = None  # of the model, in the profile; by default the folder's
    most_sequences: int = 64
    budget_s: float = BUDGET_S
    moves: bool = True  # measure migrations to a worker process too
    dtype: str | None = None  # of weights and KV; None: as `load_decoder`

    @property
    def model_name(self) -> str:
        """Name of the model in the profile."""
        return self.name or self.model.resolve().name

    @property
    def rows_file(self) -> Path:
        """File with one line for each measurement, next to the profile; an interrupted run resumes
        from it.
        """
        return self.out.with_name(f"{self.out.stem}.rows.jsonl")


@dataclass(frozen=True)
class ProfilingResult:
    """The profile and its path; `left` batches of the grid were not measured in time, and
    `steadiness` says how steady the machine was (empty: unknown). `recomputation`: number of
    measured steps that recomputed preempted sequences, and how many percent the profile is off on
    them; None: none was measured.
    """

    profile: Profile
    header: Path
    left: int
    host_s: float
    steadiness: str = ""
    recomputation: tuple[int, float] | None = None


def measure_profile(
    options: ProfilingOptions, tell: Tell = lambda done, total: None
) -> ProfilingResult:
    """Measure what the rows' file lacks, fit, and write the profile.

    Raises:
        SloBenchError: the model cannot be loaded, the rows are of something else, or the time did
            not suffice for a fit.
    """
    need("torch", "profile run --backend torch")
    from . import measure
    from .build_engine import Engine, KvCacheConfig, num_gpu_blocks
    from .load_decoder import load_decoder

    with ThreadLayout.choose().pinned():
        decoder = load_decoder(options.model, options.device, options.dtype)
        blocks = min(_MOST_BLOCKS, num_gpu_blocks(decoder, _BLOCK_SIZE))
        swapped = min(_NUM_CPU_BLOCKS, blocks)
        engine = Engine(decoder, KvCacheConfig(blocks, _BLOCK_SIZE, swapped))
        steps = [
            shape
            for shape in measure.grid(decoder.config.context, options.most_sequences)
            if shape.num_gpu_blocks(_BLOCK_SIZE) <= blocks
        ]
        # Copies are few and quick; they come first.
        shapes = [*measure.swaps(swapped // 4), *steps]
        about = {
            "model": str(options.model.resolve()),
            "device": options.device,
            "dtype": str(decoder.dtype).removeprefix("torch."),
        }
        if measure.by_cpu_time(decoder.device):
            about["clock"] = "CPU time of one thread"
        rows = _Rows(options.rows_file, about)
        begin_s, meter = time.monotonic(), measure.BatchTimer(engine)
        rounds = [(number, shape) for number in range(measure.ROUNDS) for shape in shapes]
        with heap_frozen():
            for done, (number, shape) in enumerate(rounds):
                if rows.rounds(shape) > number:
                    continue
                if time.monotonic() - begin_s > options.budget_s:
                    break
                tell(done, len(rounds))
                rows.add(shape, meter.timed(shape))
            host_s = measure.host_s(engine, steps[:40])
    profile = _profile(options, rows, shapes, host_s, decoder)
    moved = options.moves and decoder.device.type == "cpu"  # where workers compute
    profile = _with_links(profile, _moves(decoder) if moved else [])
    if options.gpu is None:
        kv_bytes = num_gpu_blocks(decoder, _BLOCK_SIZE) * decoder.block_bytes(_BLOCK_SIZE)
        device = measure.measured_device(decoder.device, decoder.dtype, kv_bytes)
        profile = dataclasses.replace(profile, device=device)
    left = sum(rows.time_s(shape) is None for shape in shapes)
    header = write_profile(with_shape(profile, options), options.out)
    return ProfilingResult(profile, header, left, host_s, rows.steadiness())


def _moves(decoder: Decoder) -> list[CompletedMove]:
    from .measure import measured_moves
    from .torch_workers import Workers

    with Workers(1, cores=ThreadLayout.choose(workers=1).worker_cores) as workers:
        return list(measured_moves(decoder, workers, _BLOCK_SIZE))


def _with_links(profile: Profile, moves: Sequence[CompletedMove]) -> Profile:
    tables = dict(profile.tables)
    if moves:
        quickest: dict[tuple[str, int, int], CompletedMove] = {}
        for move in moves:  # anything else that runs makes them longer
            key = (move.what, move.target, move.moved_bytes)
            if key not in quickest or move.seconds < quickest[key].seconds:
                quickest[key] = move
        rows = [(m.what, m.moved_bytes, 1e6 * m.seconds) for m in quickest.values()]
        tables["moves"] = table_of("moves", rows)
    return dataclasses.replace(profile, tables=tables, links=fit_links(tables))


def with_shape(profile: Profile, options: ProfilingOptions) -> Profile:
    """Write the model's configuration next to the profile, unless the catalogue has the model."""
    if options.model_name in models():
        return profile
    file = options.out.with_name(f"{options.model_name}.json")
    file.write_bytes((options.model / "config.json").read_bytes())
    return dataclasses.replace(profile, model_file=str(file))


def _profile(
    options: ProfilingOptions,
    rows: _Rows,
    shapes: Sequence[BatchShape],
    host_s: float,
    decoder: Decoder,
) -> Profile:
    dtype, block_bytes = decoder.dtype_name, decoder.block_bytes(_BLOCK_SIZE)
    timed = [(shape, rows.time_s(shape)) for shape in shapes]
    steps = [
        LoggedStep(
            s.sequences,
            s.sequences * s.kv_tokens,
            [(s.before, s.tokens)] * s.chunks,
            seconds,
        )
        for s, seconds in timed
        if seconds is not None and not s.blocks
    ]
    if len(steps) < LEAST_STEPS:
        raise SloBenchError(
            f"{len(steps)} steps were measured in {options.budget_s:g} s, too few to fit "
            f"({LEAST_STEPS} are needed); go on with the same command, or raise --budget"
        )
    source = Source(
        "slo-bench profile run",
        str(options.model.name),
        note=f"backend torch on {options.device}, {dtype}; putting a batch together takes "
        f"{1e6 * host_s:.0f} µs of each step; times are {rows.clock}, of moves real time; "
        f"{rows.steadiness()}",
    )
    device = options.gpu or options.device
    profile = profile_of_steps(steps, model=options.model_name, gpu=device, source=source)
    copies = [
        (s.direction, s.blocks * block_bytes, 1e6 * seconds)
        for s, seconds in timed
        if seconds is not None and s.blocks
    ]
    tables = {**profile.tables, "transfers": table_of("transfers", copies)}
    return dataclasses.replace(profile, tables=tables, weight_dtype=dtype, kv_dtype=dtype)


class _Rows:
    """Measurements in a file, a line each, flushed as they are made."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self._path = path
        self.clock = about.get("clock", "real time")
        self._known: dict[tuple[Any, ...], list[Timing]] = {}
        if path.is_file():
            self._read(about)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(about) + "\n", "utf-8")

    def _read(self, about: dict[str, Any]) -> None:
        first, *lines = self._path.read_text("utf-8").splitlines()
        if json.loads(first) != about:
            raise SloBenchError(
                f"{self._path} holds measurements of something else ({first}); choose another "
                "--out, or remove it"
            )
        for line in lines:
            try:
                key, seconds, reference_s = json.loads(line)
            except ValueError:
                continue  # cut off when a run was interrupted
            self._known.setdefault(tuple(key), []).append(Timing(seconds, reference_s))

    def rounds(self, shape: BatchShape) -> int:
        """In how many it was measured."""
        return len(self._known.get(tuple(shape.key), ()))

    def time_s(self, shape: BatchShape) -> float | None:
        """Seconds, if measured. For a step, the median over rounds at the machine's usual speed:
        each round's time is divided by that of the reference in the same round and multiplied by
        the reference's median over all rounds. For a copy, the minimum.
        """
        timings = self._known.get(tuple(shape.key))
        if timings is None:
            return None
        ratios = _ratios(timings)
        if not ratios:
            return min(timing.seconds for timing in timings)
        return statistics.median(self._references()) * statistics.median(ratios)

    def _references(self) -> list[float]:
        timings = (timing for shape_timings in self._known.values() for timing in shape_timings)
        return [timing.reference_s for timing in timings if timing.reference_s is not None]

    def steadiness(self) -> str:
        """How far the reference wandered, and rows in relation to it."""
        deciles = statistics.quantiles(self._references(), n=10)
        apart = [
            max(ratios) / min(ratios) - 1
            for timings in self._known.values()
            if len(ratios := _ratios(timings)) > 1
        ]
        summary = (
            f"a batch that never changes took {1e3 * deciles[0]:.2f} to {1e3 * deciles[-1]:.2f} ms "
            "(first to last decile), and its median is the speed that all steps are reduced to"
        )
        if not apart:
            return summary
        return (
            f"{summary}; reduced so, a step differs by {statistics.median(apart):.1%} between "
            "rounds"
        )

    def add(self, shape: BatchShape, timing: Timing) -> None:
        """Keep the timing of a batch shape, in memory and in the file."""
        self._known.setdefault(tuple(shape.key), []).append(timing)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([shape.key, timing.seconds, timing.reference_s]) + "\n")


def _ratios(timings: Sequence[Timing]) -> list[float]:
    """What the speed of the machine in each round has less to do with."""
    return [t.seconds / t.reference_s for t in timings if t.reference_s is not None]
