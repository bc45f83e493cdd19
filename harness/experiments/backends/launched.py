"""Backends of servers that are started and stopped for a run.

servers/<system>[-N].log          output of each server
servers/<system>[-N].steps.jsonl  its step log, if enabled or if a policy decides inside
servers/<cell>[-N].metrics        its own metrics before and after the cell
servers/<cell>.meta.json          its settings, and the part of its step log that belongs to the
cell
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ....predictors.device_map import read_device_map
from ....predictors.speculation import OFF, parse_speculation
from ....workloads.errors import SloBenchError
from ....workloads.whole_file import write_whole
from ....workloads.workload import Workload
from ...core.collocated_policy import Collocated
from ...core.counters import COUNT
from ...core.records.decision_counts import DECISIONS
from ...load_generator.http.endpoint import Endpoint
from ...load_generator.load_progress import Progress
from ...load_generator.machine import core_share
from ...load_generator.server_metrics import MetricNames, labels_of
from ...policies.routers import router as router_by_name
from ...results.acceptance import speculation_figures
from ...results.engine_logs import meta_path
from ...results.metrics import Hardware
from ...results.run_folder import Value
from ...servers.gateway import mechanism_counts, serving_apart
from ...servers.gateway.split import transfer_of
from ...servers.launch.compatibility import check, check_embedder
from ...servers.launch.environments import environment, home
from ...servers.launch.health_watch import health_watched
from ...servers.launch.model_names import check_model
from ...servers.launch.serve_settings import Serve
from ...servers.launch.server_kind import ServerKind
from ...servers.launch.server_process import ServerError, ServerProcess
from ...servers.plugin.contract import EMBED_PASSES
from ...servers.server_kinds import server_kind
from ...servers.torch.embedding_server import EmbeddingServer, embedding_server
from ..config.tables import ClientSchema, ServerSchema
from ..execution.cell_specs import CellSpec
from ..execution.cells import workload_of
from .attached import Attached, with_tokenizer_of
from .launched_models import model_servers, started_models
from .measuring import CellMeasurement, Say, profiling_level, silent

_BLOCK_SIZE = 16  # an experiment's default: the server then chooses itself
# The servers' own counters, summed over labels: their growth over a cell goes into its row.
_COUNTERS = ("preemptions", "prompt_tokens", "output_tokens")
_NO_METRICS = MetricNames(prefix="-")
_PROFILING_REQUESTS = 200


@dataclass(frozen=True)
class LaunchedBackend:
    """Starts servers of a kind. A system with the server's own name is the server without the
    plugin.
    """

    name: str
    client: ClientSchema = field(default_factory=ClientSchema)
    server: ServerSchema = field(default_factory=ServerSchema)
    say: Say = silent

    def check(self, spec: CellSpec) -> None:
        """Check that the server can run the system with its parameters and instances."""
        serve = self._serve(spec)
        if spec.workload.models is not None:
            self._check_models(spec, serve)
            return
        serve.check_system(spec.instances)
        if server_kind(self.name).loads_folders:
            check_model(spec.placement.model)
        serve.check(spec.instances)
        if spec.placement.embedder is not None:
            self._check_embedder(spec, serve)
        if self.server.validated and parse_speculation(spec.placement.speculation or OFF):
            raise SloBenchError(
                "a run with speculation cannot be validated: fitted step times have none; leave "
                "--validate or speculation out"
            )
        if self.server.validated and self._serve(spec).gateway:
            raise SloBenchError(
                f"{spec.system} cannot be validated: its servers have different roles"
            )

    def _check_models(self, spec: CellSpec, serve: Serve) -> None:
        check(serve.resolved_system(), self.name)
        if self.server.validated or self.server.step_log:
            raise SloBenchError(
                "a run of several models writes no step logs and cannot be validated; leave "
                "--validate and --step-log out"
            )
        model_servers(spec, serve, Path()).check()

    def _check_embedder(self, spec: CellSpec, serve: Serve) -> None:
        check_embedder(serve.resolved_system(), self.name)
        if spec.instances > 1:
            raise SloBenchError("an embedder stands beside one started server; leave instances out")
        if self.server.validated:
            raise SloBenchError(
                "a run with an embedder beside the server cannot be validated; leave --validate out"
            )

    def configuration(self, spec: CellSpec) -> Hashable:
        """The system, its parameters, the placement, and whether there is a gateway."""
        parameters = tuple(sorted(spec.parameters.items()))
        if spec.workload.models is not None:
            return spec.cell  # where models stand depends on the load, and on what was before
        return spec.system, parameters, spec.placement, spec.instances, self._through_gateway(spec)

    def _through_gateway(self, spec: CellSpec) -> bool:
        """Whether a gateway routes requests; else the client does."""
        serve = self._serve(spec)
        if spec.placement.embedder is not None:
            return True
        return serve.gateway or router_by_name(spec.router or serve.router).measures

    def profiling(self, group: Sequence[CellSpec]) -> CellSpec | None:
        """For a single cell: a level with another seed and at most 200 requests."""
        if not self.server.validated or len(group) > 1:
            return None
        spec = group[0]
        requests = min(len(workload_of(spec)), _PROFILING_REQUESTS)
        return profiling_level(spec, requests=requests, duration_s=None)

    @contextlib.contextmanager
    def started(self, spec: CellSpec, folder: Path) -> Iterator[Attached]:
        """Start the servers, and a gateway if the system needs one."""
        serve = self._serve(spec)
        log = _unused(folder / "servers" / f"{serve.label}.log")
        device = environment(serve.backend).device
        if spec.workload.models is not None:
            servers_of_models = model_servers(spec, serve, log)
            with contextlib.ExitStack() as stack:
                with _kept_logs(log.parent):
                    launched = started_models(servers_of_models, self.client, device)
                    launched_models = stack.enter_context(launched)
                yield launched_models
            return
        if self.server.step_log or self.server.validated or serve.patched:
            serve = replace(serve, step_log=log.with_suffix(".steps.jsonl"))
        with contextlib.ExitStack() as stack:
            embedder = None
            if spec.placement.embedder is not None:
                embedder = stack.enter_context(
                    embedding_server(spec.placement.embedder, device, serve.cores)
                )
                if isinstance(serve.resolved_system().policy, Collocated) and serve.patched:
                    serve = replace(serve, embedder=embedder.beside)
            with _kept_logs(log.parent):
                servers = serve.start(stack, log, instances=spec.instances, say=self.say)
            urls, gateway = [server.url for server in servers], None
            if self._through_gateway(spec):
                plan = serve.behind(servers, spec.router)
                if embedder is not None:
                    plan = replace(
                        plan,
                        embedder=Endpoint.parse(embedder.url),
                        scheduler_socket=None if serve.embedder is None else serve.embedder.socket,
                    )
                gateway = stack.enter_context(serving_apart(plan))
                urls = [gateway]
            gpus = 0 if device == "cpu" else len(servers) * spec.placement.gpus
            yield Launched(
                [Endpoint.parse(url) for url in urls],
                with_tokenizer_of(spec.placement.model, self.client),
                serve.values_field if serve.patched else None,
                model=_served_name(spec.placement.model),
                gpu="cpu" if device == "cpu" else "unknown",
                hardware=Hardware(gpus=gpus, parameters=math.nan, peak_flops=math.nan),
                servers=servers,
                step_logs=serve.step_logs(spec.instances),
                serve=serve,
                gateway=gateway,
                embedder=embedder,
                say=self.say,
            )

    def _serve(self, spec: CellSpec) -> Serve:
        place = spec.placement
        placed = None if place.device_map is None else read_device_map(place.device_map)
        pp = place.pp if placed is None else 1  # its stages are given with it
        kind = server_kind(self.name)
        args = [
            *self.server.args,
            *kind.parallel_args(tp=place.tp, pp=pp, ep=place.ep, dp=place.dp),
        ]
        # Where a kind has no words for a setting, `check_effects` refuses it.
        if kind.speculative_args and (speculation := parse_speculation(place.speculation or OFF)):
            args += kind.speculative_args(speculation)
        if kind.kv_offload_args and place.kv_offload_gib:
            args += kind.kv_offload_args(place.kv_offload_gib, place.gpus)
        if kind.lora_args and place.max_loras is not None:
            args += kind.lora_args(place.max_loras, place.lora_rank)
        own_blocks = place.num_gpu_blocks is not None or place.block_size != _BLOCK_SIZE
        version = place.server_version
        return Serve(
            backend=self.name if version is None else f"{self.name}=={version}",
            model=place.model,
            system=spec.system,
            parameters=spec.parameters,
            served_name=_served_name(place.model),
            num_gpu_blocks=place.num_gpu_blocks,
            block_size=place.block_size if own_blocks else None,
            max_model_tokens=self.server.max_model_tokens,
            num_cpu_blocks=place.num_cpu_blocks,
            server_args=tuple(args),
            startup_timeout_s=self.server.startup_timeout_s,
            transfer=transfer_of(self.server.kv_transfer),
            cores=core_share().server,
            kvcached=self.server.kvcached,
            device_map=placed,
        )


@dataclass(frozen=True, kw_only=True)
class Launched(Attached):
    """Running servers of a `LaunchedBackend`."""

    servers: Sequence[ServerProcess]
    step_logs: Sequence[Path]
    serve: Serve
    gateway: str | None  # its address
    embedder: EmbeddingServer | None

    def measure_cell(
        self, spec: CellSpec, workload: Workload, folder: Path, progress: Progress | None
    ) -> CellMeasurement:
        """Measure a cell, with the servers' own counters before and after it.

        A server that dies, swaps that were decided and not executed, and KV that expired before it
        was fetched make the level invalid.

        Raises:
            ServerError: a server had died before.
        """
        before = [server.metrics() for server in self.servers]
        tallies = self._tallies()
        begins = [_size(log) for log in self.step_logs]
        alone = len(self.endpoints) == 1  # or a gateway, which has the router
        client_spec = replace(spec, router=None) if alone else spec
        measured = super().measure_cell(client_spec, workload, folder, progress)
        self._write_meta(spec, folder, begins, before[0])
        try:
            after = [server.metrics() for server in self.servers]
        except ServerError as error:
            return replace(measured, invalid_because=str(error).partition("\n")[0])
        for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
            suffix = f"-{number}" if len(self.servers) > 1 else ""
            text = f"# before the cell\n{old}\n# after the cell\n{new}\n"
            write_whole(folder / "servers" / f"{spec.cell}{suffix}.metrics", [text.encode()])
        counted = growth(tallies, self._tallies())
        names = environment(self.serve.backend).kind.metrics or _NO_METRICS
        olds, news = ([names.totals(text) for text in side] for side in (before, after))
        grown = {
            **_grown(names, olds, news),
            **speculation_figures(before, after),
            **plugin_figures(counted),
            **_cores(),
        }
        problems = (
            measured.invalid_because,
            policy_problem(counted),
            swap_problem(counted),
            _expired_problem(names, olds, news),
            None if self.embedder is None else self.embedder.problem(),
        )
        reasons = "; ".join(filter(None, problems))
        figures = {**measured.figures, **grown, "invalid_because": reasons or None}
        return replace(measured, invalid_because=reasons or None, figures=figures)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[Callable[[], bool]]:
        urls = [server.health_url for server in self.servers if server.health_url]
        with health_watched(urls) as is_ill:
            yield lambda: is_ill() or not all(server.running for server in self.servers)

    def _metrics(self) -> list[str]:
        with contextlib.suppress(ServerError):
            return [server.metrics() for server in self.servers]
        return []

    def _tallies(self) -> list[Mapping[str, int]]:
        """Counters of each server's plugin, and of the gateway's controller."""
        tallies = [server.tally() for server in self.servers]
        if self.gateway is None:
            return tallies
        counts = mechanism_counts(self.gateway)
        return [*tallies, {COUNT + name: n for name, n in counts.items()}]

    def _write_meta(
        self, spec: CellSpec, folder: Path, begins: Sequence[int], metrics: str
    ) -> None:
        """Write the server's settings, which a simulation of the cell needs."""
        handshake = self.servers[0].handshake
        kind = environment(self.serve.backend).kind
        meta: dict[str, object] = {
            "server": kind.name,
            "model": self.model,
            "gpu": self.gpu,
            "system": spec.system,
            "parameters": dict(spec.parameters),
            "instances": len(self.servers),
            "router": spec.router or "round-robin",
            "engine_kwargs": handshake.get("engine_kwargs")
            or _command_line_settings(kind, self.serve, spec),
            "kv_cache": handshake.get("kv_cache")
            or _metrics_settings(kind.metrics or _NO_METRICS, metrics),
        }
        if version := handshake.get("version"):
            meta["version"] = version
            if kind.version_field:
                meta[kind.version_field] = version
        if self.step_logs:
            meta["steps"] = [
                {"file": os.path.relpath(log, folder), "begin": begin, "end": _size(log)}
                for log, begin in zip(self.step_logs, begins, strict=True)
            ]
        write_whole(meta_path(folder, spec.cell), [json.dumps(meta, indent=1).encode()])


def _cores() -> Mapping[str, Value]:
    """Columns of `cells.csv`: on how many cores servers and load generator run."""
    share = core_share()
    if not share.server:
        return {}
    return {"server_cores": len(share.server), "client_cores": len(share.client)}


def _size(log: Path) -> int:
    return log.stat().st_size if log.is_file() else 0


def _command_line_settings(kind: ServerKind, serve: Serve, spec: CellSpec) -> dict[str, Value]:
    """The engine's settings on the command line of a server without the plugin."""
    settings: dict[str, Value] = {"tensor_parallel_size": spec.placement.tp}
    if serve.max_model_tokens is not None:
        settings["max_model_len"] = serve.max_model_tokens
    names = {parameter: limit for limit, (parameter, _) in kind.limits.items()}
    return settings | {names[k]: v for k, v in serve.parameters.items() if k in names}


def _metrics_settings(names: MetricNames, metrics: str) -> dict[str, Value]:
    """The KV cache settings in a server's metrics."""
    label_texts = (labels for name, labels, _ in names.samples(metrics) if name == names.kv_cache)
    labels = labels_of(next(label_texts, ""))
    settings: dict[str, Value] = {
        name: int(labels[name])
        for name in ("num_gpu_blocks", "block_size")
        if labels.get(name, "").isdecimal()
    }
    caching = labels.get("enable_prefix_caching")
    return settings if caching is None else {**settings, "enable_prefix_caching": caching == "True"}


Totals = Sequence[Mapping[str, float]]  # of the metrics of each server


def _grown(names: MetricNames, olds: Totals, news: Totals) -> Mapping[str, Value]:
    """Growth of each server counter, summed over all servers; None where no server has it."""
    return {f"server_{counter}": _growth(names, counter, olds, news) for counter in _COUNTERS}


def _growth(names: MetricNames, counter: str, olds: Totals, news: Totals) -> int | None:
    if all(names.first(counter, sums) is None for sums in news):
        return None
    now, then = (sum(names.first(counter, sums) or 0.0 for sums in side) for side in (news, olds))
    return int(now - then)


def _expired_problem(names: MetricNames, olds: Totals, news: Totals) -> str | None:
    """Prompts whose KV a prefill instance freed before it was fetched: their answers are wrong."""
    if not (expired := _growth(names, "expired", olds, news)):
        return None
    return f"the KV of {expired} prompts expired before a decode instance fetched it"


@contextlib.contextmanager
def _kept_logs(folder: Path) -> Iterator[None]:
    """Copy the logs of a failed start out of the run folder, which is removed if no cell finished.

    Raises:
        ServerError: the error of the block, with the new path of the log.
    """
    try:
        yield
    except ServerError as error:
        kept = home() / "logs" / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        raise ServerError(str(error).replace(str(folder), str(kept))) from error


def _served_name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def _unused(path: Path) -> Path:
    """The path, with a number if a server of the same system has used it."""
    candidates = [path, *(path.with_stem(f"{path.stem}.{number}") for number in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def growth(
    before: Sequence[Mapping[str, int]], after: Sequence[Mapping[str, int]]
) -> Mapping[str, int]:
    """Growth of each counter, summed over all servers; empty without plugins."""
    grown: Counter[str] = Counter()
    for old, new in zip(before, after, strict=True):
        grown.update({name: count - old.get(name, 0) for name, count in new.items()})
    return grown


def plugin_figures(grown: Mapping[str, int]) -> Mapping[str, Value]:
    """Columns of `cells.csv`; empty without plugins."""
    if not grown:
        return {}
    named = {*DECISIONS, *EMBED_PASSES}
    return {
        "preemptions_swap": grown.get("preempted_swap"),
        "preemptions_recompute": grown.get("preempted_recompute"),
        **({"policy_errors": grown["policy_errors"]} if "policy_errors" in grown else {}),
        **{name: n for name, n in grown.items() if name.startswith(COUNT) or name in named},
    }


def policy_problem(grown: Mapping[str, int]) -> str | None:
    """Errors that a policy raised inside a server, as text; None if there are none."""
    errors = grown.get("policy_errors", 0)
    if not errors:
        return None
    raised = f"{errors} error{'' if errors == 1 else 's'}"
    return (
        f"the policy raised {raised} inside the server; the requests that failed and the server's "
        "log name them"
    )


def swap_problem(grown: Mapping[str, int]) -> str | None:
    """Differences between decided and executed swaps, as text; None if there are none."""
    wrong = [
        f"{grown.get(f'executed_{way}', 0)} swaps {way} were executed, but "
        f"{grown.get(f'decided_{way}', 0)} decided"
        for way in ("out", "in")
        if grown.get(f"executed_{way}", 0) != grown.get(f"decided_{way}", 0)
    ]
    return "; ".join(wrong) or None
