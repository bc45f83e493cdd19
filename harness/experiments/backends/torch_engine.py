"""The torch backend: the small engine of `harness.engine.torch`, in this process; several instances
have a process each (`harness.engine.torch.executed_cluster`).

Requests arrive inside the process, on the engine's clock, so metrics include no client and no
network. `model` is a folder, or the name of the tiny random Llama; `gpu` is the device: `cpu`,
`cuda` or `cuda:N`.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ....predictors.device_map import read_device_map
from ....predictors.specs import GIB
from ....workloads.errors import SloBenchError
from ....workloads.extras import need
from ....workloads.request import RequestType
from ....workloads.request_bodies import check_simulated
from ....workloads.whole_file import write_whole
from ....workloads.workload import Workload
from ...core.policy import AnyPolicy, StaticPolicy, overrides
from ...core.predictions import Guess
from ...core.records.request_records import Result
from ...engine.loop.engine_instance import EngineInstance
from ...engine.loop.gc_control import collections_off, heap_frozen
from ...engine.loop.overlong_requests import fit
from ...engine.loop.timed import Ran, RecordedStepTime, TimedInstance
from ...engine.simulator.simulate import simulate
from ...engine.torch.execute import execute
from ...engine.torch.migrating import Migrator
from ...engine.torch.threads import CpuWait, ThreadLayout, thread_count
from ...load_generator.http.prompts import PromptMaker, Vocabulary
from ...load_generator.load_progress import LoadProgress, Progress
from ...policies.policy_faults import policy_errors
from ...policies.systems import System, module_policy
from ...results.engine_logs import meta_path
from ...results.metrics import Hardware
from ...results.run_columns import REASON_COLUMN
from ...results.run_folder import Value
from ...servers.launch.backend_names import TORCH
from ...servers.launch.compatibility import check as check_system
from ...servers.launch.random_model import model_folder
from ..config.tables import ServerSchema
from ..execution.cell_specs import CellSpec, PlacementSpec, configured
from ..execution.cells import output_tokens_p90, predicted_output_tokens
from .measuring import CellMeasurement, Deployment, profiling_level

if TYPE_CHECKING:
    from ...engine.torch.build_engine import Engine, KvCacheConfig
    from ...engine.torch.decoder import Decoder
    from ...engine.torch.executed_cluster import InstanceProcesses
    from ...engine.torch.tiers import TierFolder
    from ...engine.torch.torch_kv_cache_manager import TorchKVCacheManager
    from ...engine.torch.torch_workers import Workers

_SAMPLES = 300
_WARM_TOKENS = 64


@dataclass(frozen=True)
class TorchBackend:
    """One instance on one device, or several in processes. Cells of one model share its loading.

    With `server.validated` the steps of every cell are logged, for its simulation afterwards.
    """

    name: str = TORCH
    server: ServerSchema = field(default_factory=ServerSchema)

    def __post_init__(self) -> None:
        need("torch", "--backend torch")

    def check(self, spec: CellSpec) -> None:
        """Check that the engine can run the system and the cell's settings."""
        place = spec.placement
        if place.gpus > 1 and place.device_map is None:
            raise SloBenchError(
                "backend torch runs each instance on one device, or on the processes of a "
                "device_map; leave tp and pp at 1"
            )
        if place.device_map is not None and (self.server.workers or _in_processes(spec)):
            raise SloBenchError(
                "a device_map has a process for each stage of one instance; leave server.workers "
                "out and instances at 1"
            )
        if place.embedder is not None:
            raise SloBenchError("backend torch runs no embedder beside the language model")
        system = configured(spec.system, spec.parameters)
        check_system(system, TORCH)
        module_policy(self.server.moving)
        if _in_processes(spec):
            self._check_processes(spec, system)
        if self.server.workers and isinstance(system.policy, StaticPolicy):
            raise SloBenchError("layers move between iterations, and static batches have none")
        workers = self._workers(place)
        if self.server.clock == "cpu" and (workers or place.gpu != "cpu"):
            raise SloBenchError(
                "server.clock cpu is the time of one thread: gpu must be cpu, without "
                "server.workers and device_map"
            )
        if self.threads > 1 and self.server.clock == "cpu":
            raise SloBenchError(
                f"server.clock cpu is the time of one thread, but server.threads is "
                f"{self.server.threads}; leave it out or set it to 1"
            )
        if workers and place.gpu != "cpu":
            raise SloBenchError(
                "server.workers and the stages of a device_map compute on the CPU; leave gpu at cpu"
            )
        if self.server.kv_store:
            self._check_store(spec, system)

    def _check_processes(self, spec: CellSpec, system: System) -> None:
        """Several instances: each is executed in a process of its own."""
        server = self.server
        if spec.placement.gpu != "cpu":
            raise SloBenchError("several instances of backend torch are on the CPU: leave gpu out")
        if isinstance(system.policy, StaticPolicy):
            raise SloBenchError(f"{spec.system} forms static batches: leave instances at 1")
        if server.workers or server.moving:
            raise SloBenchError(
                "server.workers and server.moving are for the processes of one instance; between "
                "instances modules move by the parameters of the system, as banaserve.rise"
            )
        if server.validated or server.step_log:
            raise SloBenchError(
                "the steps of one instance can be logged and validated: leave instances at 1"
            )
        for name, bounds in (system.cluster.bounds() if system.cluster else {}).items():
            if bounds.environment and getattr(system.cluster, name) != getattr(
                type(system.cluster), name
            ):
                raise SloBenchError(
                    f"{spec.system}.{name} says what a simulated machine is like; here it is "
                    "measured: leave it out"
                )

    def _workers(self, place: PlacementSpec) -> int:
        """Worker processes: those of the settings, or one for each stage but the first."""
        if place.device_map is None:
            return self.server.workers
        return len(read_device_map(place.device_map).stages) - 1

    @property
    def threads(self) -> int:
        """Number of CPU threads that compute, without the workers.

        Raises:
            SloBenchError: more are asked for than there are cores.
        """
        requested_threads = self.server.threads or (1 if self.server.clock == "cpu" else None)
        return thread_count(requested_threads, self.server.workers)

    def _check_store(self, spec: CellSpec, system: System) -> None:
        from ...engine.torch.tiers import TierFolder

        for tier in self.server.kv_store:
            TierFolder.parse(tier)
        if not system.prefix_cache:
            raise SloBenchError(
                f"{spec.system} looks for no prefixes: there is nothing to keep in server.kv_store"
            )
        if self.server.clock == "cpu":
            raise SloBenchError(
                "server.clock cpu is the time of one thread; server.kv_store has threads of its own"
            )
        if self.server.validated:
            raise SloBenchError(
                "a run with server.kv_store cannot be validated: the store's content is not logged"
            )

    def configuration(self, spec: CellSpec) -> Hashable:
        """The settings of loading: cells with equal ones share a loaded model."""
        parameters = tuple(sorted(spec.parameters.items()))
        return spec.system, parameters, spec.placement, spec.instances

    def profiling(self, group: Sequence[CellSpec]) -> CellSpec | None:
        """For a single cell: the same level with another seed."""
        if not self.server.validated or len(group) > 1:
            return None
        return profiling_level(group[0])

    @contextlib.contextmanager
    def started(self, spec: CellSpec, folder: Path) -> Iterator[LoadedModel]:
        """Load the model onto the device."""
        from ...engine.torch.load_decoder import load_decoder
        from ...engine.torch.torch_workers import Workers

        place, server = spec.placement, self.server
        model = model_folder(place.model)
        count = spec.instances if _in_processes(spec) else self._workers(place)
        threads = ThreadLayout.choose(self.threads, count)
        with contextlib.ExitStack() as stack:
            workers = None
            if count:
                workers = stack.enter_context(Workers(count, cores=threads.worker_cores))
            stack.enter_context(threads.pinned())
            decoder = load_decoder(model, place.gpu, server.dtype)
            gpus = int(decoder.device.type == "cuda")
            yield LoadedModel(
                model=model.name,
                gpu=str(decoder.device),
                hardware=Hardware(gpus, math.nan, math.nan),
                decoder=decoder,
                folder=model,
                threads=threads,
                server=server,
                workers=workers,
            )


@dataclass(frozen=True, kw_only=True)
class LoadedModel(Deployment):
    """A model in memory. With `server.workers`, layers and heads move to them.

    Of the tiers in `server.kv_store` each cell has some of its own while it is measured. A cell
    whose threads waited for a core for a larger share than `server.cpu_wait_limit` is invalid.
    """

    decoder: Decoder
    folder: Path
    threads: ThreadLayout
    server: ServerSchema
    workers: Workers | None

    @policy_errors()
    def measure_cell(
        self, spec: CellSpec, workload: Workload, folder: Path, progress: Progress | None
    ) -> CellMeasurement:
        """Run the workload on the engine.

        Raises:
            SloBenchError: the KV blocks do not fit, the workload has embedding requests, or a
                request is too long under `overlong_requests = "error"`.
        """
        if (workload.request_type == RequestType.EMBED).any():
            raise SloBenchError(f"{workload.name} has embedding requests; backend torch has none")
        check_simulated(workload.bodies)  # no images and no tools here either
        system = configured(spec.system, spec.parameters)
        cached = system.prefix_cache and workload.prefix_blocks is not None
        if self.server.kv_store and not cached:
            raise SloBenchError(
                f"no requests of {workload.name} share a prefix: there is nothing to keep in "
                "server.kv_store"
            )
        unit = workload.prefix_block_size if cached else 0
        with _own_tiers(self.server.kv_store) as tiers:
            room = replace(self._room(spec, system.policy, unit), store=tiers)
            if _in_processes(spec):
                return self._measured_processes(spec, workload, folder, progress, system, room)
            return self._measured(spec, workload, folder, progress, system.policy, room)

    def _measured_processes(
        self,
        spec: CellSpec,
        workload: Workload,
        folder: Path,
        progress: Progress | None,
        system: System,
        room: KvCacheConfig,
    ) -> CellMeasurement:
        """Several instances under the system's cluster policy, or behind a router."""
        from ...engine.torch.executed_cluster import (
            ExecutedCluster,
            InstanceProcesses,
            spare_blocks,
        )
        from ...engine.torch.sequence import Sequence as Tokens

        assert self.workers is not None
        if system.cluster is not None and system.cluster.control_interval_s < math.inf:
            room = replace(room, spare_blocks=spare_blocks(self.folder, self.decoder, room))
        predicted, longest, guess = _predictions(spec, workload)
        prompts = PromptMaker(Vocabulary.read(self.folder), workload.prefix_block_size, spec.cell)
        processes = InstanceProcesses(
            self.decoder,
            self.folder,
            room,
            self.workers,
            # A prompt that was cut lacks its front.
            lambda r: Tokens(prompts.token_ids(workload[r.id])[-r.prompt_tokens :]),
            guess,
            cpu_time=self.server.clock == "cpu",
        )
        with heap_frozen():
            cpu_wait = CpuWait(self.threads, self.workers.pids)
            result = simulate(
                workload,
                system,
                processes.placement,
                processes.step_time,
                instances=spec.instances,
                router=spec.router,
                overlong_requests=spec.overlong_requests,
                predicted_output_tokens=predicted,
                output_tokens_p90=longest,
                engine=processes.make,
                cluster=ExecutedCluster,
                progress=_counted(progress),
            )
            wait_share = cpu_wait.share()
        processes.flush()
        if moves := list(_moves_of(processes)):
            _write_moves(folder, spec, moves)
        return self._measurement(result, wait_share, {})

    def _measured(
        self,
        spec: CellSpec,
        workload: Workload,
        folder: Path,
        progress: Progress | None,
        policy: AnyPolicy,
        room: KvCacheConfig,
    ) -> CellMeasurement:
        from ...engine.torch.build_engine import Engine
        from ...engine.torch.clock import CpuClock, RealClock
        from ...engine.torch.sequence import Sequence as Tokens

        engine = Engine(self.decoder, room, self.workers)
        if spec.placement.device_map is not None and self.workers is not None:
            engine.place(read_device_map(spec.placement.device_map).layers)
        most_tokens = engine.most_tokens(policy)
        offered = workload
        workload, rejected = fit(
            workload,
            most_tokens,
            spec.overlong_requests,
            reserved=isinstance(policy, StaticPolicy) or overrides(policy, "reserved_blocks"),
        )
        _, _, guess = _predictions(spec, workload)
        prompts = PromptMaker(Vocabulary.read(self.folder), workload.prefix_block_size, spec.cell)
        self._warm_up(engine)
        clock = RealClock() if self.server.clock == "real" else CpuClock()
        instance = engine.instance(
            policy,
            lambda r: Tokens(prompts.token_ids(workload[r.id])),
            clock,
            predictions=guess,
            sample_s=max(workload.span_s, 1.0) / _SAMPLES,
        )
        migrator = self._migrator(engine, instance) if self.server.workers else None
        lines: list[str] = []
        logged = self.server.step_log or self.server.validated
        if logged and isinstance(instance, TimedInstance):
            _log_steps(instance, lines)
        with heap_frozen(), collections_off():
            cpu_wait = CpuWait(self.threads, self.workers.pids if self.workers else ())
            clock.begin()
            result = execute(workload, instance, rejected=rejected, progress=_counted(progress))
            wait_share = cpu_wait.share()
        if workload is not offered:
            result = replace(result, served=workload)
        if migrator is not None:
            _write_moves(folder, spec, [moved.line() for moved in migrator.history])
        if logged:
            _keep_log(folder, spec, self, engine, lines, most_tokens)
        return self._measurement(result, wait_share, _store_figures(engine, instance.kv_manager))

    def _measurement(
        self, result: Result, wait_share: float | None, figures: Mapping[str, Value]
    ) -> CellMeasurement:
        """A measured cell; invalid if other programs took the engine's cores. By the CPU clock
        waiting takes no time.
        """
        invalid, limit = None, self.server.cpu_wait_limit
        if wait_share is not None and wait_share > limit and self.server.clock != "cpu":
            invalid = (
                f"other programs had the engine's cores: its threads waited for one for "
                f"{wait_share:.0%} of their busy time, {limit:.0%} is the limit "
                "(server.cpu_wait_limit)"
            )
        engine_columns: dict[str, Value] = {
            "cpu_threads": self.threads.threads,
            "cpu_wait_share": wait_share,
            REASON_COLUMN: invalid,
        }
        return CellMeasurement(result, invalid, figures={**engine_columns, **figures})

    def _migrator(self, engine: Engine, instance: EngineInstance) -> Migrator | None:
        from ...engine.torch.execution import Execution

        if engine.spread is None or not isinstance(instance, TimedInstance):
            return None
        execution, kv_manager = instance.step_time, instance.kv_manager
        assert isinstance(execution, Execution)
        migrator = Migrator(
            engine.spread,
            lambda: kv_manager.total - kv_manager.free,
            module_policy(self.server.moving),
            execution.clock.now_s,
        )
        execution.between = migrator.look
        return migrator

    def _room(self, spec: CellSpec, policy: AnyPolicy, prefix_block_size: int) -> KvCacheConfig:
        from ...engine.torch.build_engine import KvCacheConfig, num_gpu_blocks, swaps

        place = spec.placement
        blocks = place.num_gpu_blocks
        if blocks is None:
            all_blocks = num_gpu_blocks(self.decoder, place.block_size, place.memory_share)
            blocks = max(1, all_blocks // spec.instances)
        num_cpu_blocks = 0
        if swaps(policy):
            each = self.decoder.block_bytes(place.block_size)
            room = int(place.host_memory_gib * GIB) // each
            num_cpu_blocks = room if place.num_cpu_blocks is None else place.num_cpu_blocks
        return KvCacheConfig(blocks, place.block_size, num_cpu_blocks, prefix_block_size)

    def _warm_up(self, engine: Engine) -> None:
        """One prompt and one token: what torch sets up only once is no step of the cell."""
        from ...engine.torch.batch import Piece
        from ...engine.torch.sequence import Sequence as Tokens

        size = min(_WARM_TOKENS, engine.room.blocks * engine.room.block_size - 1)
        blocks = list(range(-(-(size + 1) // engine.room.block_size)))
        sequence = Tokens([1] * size, blocks=blocks)
        sequence.tokens += engine.runner.run([], [Piece(sequence, 0, size)])
        engine.runner.run([sequence], [])


def _counted(progress: Progress | None) -> Callable[[int, float], None] | None:
    """The engine counts requests that ended, and knows no more of them before the end."""
    if progress is None:
        return None
    return lambda ended, clock_s: progress(LoadProgress(ended), clock_s)


def _predictions(
    spec: CellSpec, workload: Workload
) -> tuple[np.ndarray | None, np.ndarray | None, Guess]:
    """Predicted lengths and their 90 % quantiles, each None for the true ones; and what policies
    read them from.
    """
    predicted = predicted_output_tokens(spec, workload)
    longest = output_tokens_p90(spec, workload)
    lengths = workload.output_tokens if predicted is None else predicted
    p90_lengths = lengths if longest is None else longest
    guess = Guess(lambda r: int(lengths[r.id]), lambda r: int(p90_lengths[r.id]))
    return predicted, longest, guess


def _in_processes(spec: CellSpec) -> bool:
    """Whether every instance of the cell has a process of its own."""
    return spec.instances > 1 or configured(spec.system, {}).cluster is not None


def _moves_of(processes: InstanceProcesses) -> Iterator[str]:
    """A line for each move of modules between instances."""
    for instance in processes.instances:
        for time_s, helper, move in instance.moves:
            entry = {"time_s": time_s, "owner": instance.index, "helper": helper, **asdict(move)}
            yield json.dumps({**entry, "source": move.source - 1, "target": move.target - 1})


def _write_moves(folder: Path, spec: CellSpec, lines: Sequence[str]) -> None:
    log = "".join(f"{line}\n" for line in lines)
    write_whole(folder / "servers" / f"{spec.cell}.moves.jsonl", [log.encode()])


def _log_steps(instance: TimedInstance, lines: list[str]) -> None:
    """Log steps in the format of the plugin inside servers."""

    def heard(seqs: int, kv_tokens: int, chunks: Sequence[tuple[int, int]], ran: Ran) -> None:
        begin_s = instance.now_s
        batch = {"decode_seqs": seqs, "decode_kv_tokens": kv_tokens, "chunks": list(chunks)}
        lines.append(json.dumps({"event": "step", "time_s": begin_s, **batch}))
        end_s = begin_s + ran.duration_s
        lines.append(json.dumps({"event": "done", "time_s": end_s, "left": 0, "ran": ran}))

    recorder = instance.step_time
    assert isinstance(recorder, RecordedStepTime)
    recorder.heard = heard


def _keep_log(
    folder: Path,
    spec: CellSpec,
    loaded: LoadedModel,
    engine: Engine,
    lines: Sequence[str],
    most_tokens: int,
) -> None:
    """Write the step log of a cell and the settings that a simulation of it needs."""
    log = folder / "servers" / f"{spec.cell}.steps.jsonl"
    text = "".join(f"{line}\n" for line in lines).encode()
    write_whole(log, [text])
    room, context = engine.room, loaded.decoder.config.context
    meta = {
        "server": TORCH,
        "clock": loaded.server.clock,
        "model": loaded.model,
        "gpu": loaded.gpu,
        "system": spec.system,
        "parameters": dict(spec.parameters),
        "instances": 1,
        "router": "round-robin",
        "engine_kwargs": {"max_model_len": context, "async_scheduling": False},
        "kv_cache": {
            "num_gpu_blocks": room.blocks + 1,  # as vLLM counts them, with one for itself
            "block_size": room.block_size,
            "enable_prefix_caching": bool(room.prefix_block_size),
        },
        "room": {
            "blocks": room.blocks,
            "block_size": room.block_size,
            "num_cpu_blocks": room.num_cpu_blocks,
            "prefix_block_size": room.prefix_block_size,
            "most_tokens": most_tokens,
        },
        "steps": [{"file": f"servers/{log.name}", "begin": 0, "end": len(text)}],
    }
    write_whole(meta_path(folder, spec.cell), [json.dumps(meta, indent=1).encode()])


@contextlib.contextmanager
def _own_tiers(store: Sequence[str]) -> Iterator[tuple[TierFolder, ...]]:
    """Make an empty sub-folder in each folder of the KV store, removed after the block.

    KV blocks of an earlier cell would change the hit rate of this one.

    Raises:
        SloBenchError: a folder cannot be made.
    """
    from ...engine.torch.tiers import TierFolder

    with contextlib.ExitStack() as stack:
        tiers = []
        for tier in map(TierFolder.parse, store):
            try:
                tier.folder.mkdir(parents=True, exist_ok=True)
                temporary = tempfile.TemporaryDirectory(dir=tier.folder, prefix="cell-")
            except OSError as error:
                raise SloBenchError(f"the KV store cannot be made: {error}") from None
            tiers.append(replace(tier, folder=Path(stack.enter_context(temporary))))
        yield tuple(tiers)


def _store_figures(engine: Engine, kv_manager: TorchKVCacheManager) -> dict[str, Value]:
    if not engine.room.store:
        return {}
    kv_manager.flush()
    carried = engine.runner.carrier.carried
    return {
        "kv_store_loaded_bytes": carried.loaded_bytes,
        "kv_store_stored_bytes": carried.stored_bytes,
        "kv_store_waited_s": carried.waited_s,
    }
