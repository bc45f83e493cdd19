"""The openai backend: servers that already run (`--backend openai --base-url URL`).

Launched servers are measured in the same way: their backend makes an `Attached` of their addresses.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ....predictors.specs import gpu
from ....workloads.csv_text import csv_bytes
from ....workloads.errors import SloBenchError
from ....workloads.whole_file import write_whole
from ....workloads.workload import Workload
from ...load_generator.http.endpoint import Endpoint, is_loopback
from ...load_generator.http.faults import RequestFault
from ...load_generator.http.http_options import Api
from ...load_generator.http.request_columns import FAULTS
from ...load_generator.http.single_request import NoAnswerError, get
from ...load_generator.http.unserved import most_common_detail
from ...load_generator.listed_models import entry_of, folders_of, listed_models
from ...load_generator.load_progress import Progress
from ...load_generator.probe import reach
from ...load_generator.routed_load import Client, HttpResult, connections_note, measure
from ...load_generator.send_job import Senders
from ...load_generator.warm_cache import (
    CacheCounters,
    given_prompts,
    repeated_prompts,
    warm_cache_share,
)
from ...results.cell_files import Choice, Column, choice_of, gzip_csv
from ...results.metrics import Hardware
from ...results.run_columns import (
    API_COLUMN,
    FAULT_COLUMN,
    TOKENIZER_COLUMN,
    WARM_CACHE_COLUMN,
)
from ...results.run_folder import Value
from ...servers.launch.gpus import Gpu, visible_gpus
from ...servers.server_kinds import metrics_by_server
from ..config.tables import VLLM_JSON, ClientSchema
from ..execution.cell_specs import CellSpec
from .gpu_watch import GpuWatch, watching
from .measuring import CellMeasurement, Deployment, Say, silent
from .vllm_json import write_vllm_json

SERVED = "served"  # as a model's name: the first one that the server lists
UNKNOWN_GPU = "unknown"
_METRICS_S = 2.0
_MOST_ANSWER_BYTES = 16 << 20
_UNKNOWN_HARDWARE = Hardware(gpus=0, parameters=float("nan"), peak_flops=0.0)


@dataclass(frozen=True)
class HttpBackend:
    """Attaches to running servers; nothing is started or stopped."""

    client: ClientSchema
    name: str = "openai"
    senders: Senders | None = None
    say: Say = silent

    def check(self, spec: CellSpec) -> None:
        """Check that addresses are given and that no system parameters are set."""
        if not self.client.base_urls:
            raise SloBenchError(
                "backend openai needs the address of a server: --base-url http://127.0.0.1:8000"
            )
        _hardware(spec)
        if spec.parameters:
            raise SloBenchError(
                f"parameters of an attached server cannot be set; leave them out for {spec.system}"
            )

    def configuration(self, spec: CellSpec) -> Hashable:
        """All cells share the servers, so the value is always None."""
        return None

    def profiling(self, group: Sequence[CellSpec]) -> CellSpec | None:
        """None: attached servers have no step log to fit a profile to."""
        return None

    @contextlib.contextmanager
    def started(self, spec: CellSpec, folder: Path) -> Iterator[Attached]:
        """Ask each server for its models, and probe it; nothing is started."""
        client, endpoints = self.client, self.client.endpoints()
        paths = {endpoint.api_path for endpoint in endpoints} - {"", Api(client.api).path}
        for api in Api:
            if paths == {api.path} and client.api != api:
                client = client.model_copy(update={"api": api.value})
                self.say(f"the address is that of the API {api}, which is used")
        headers = client.options(model="", cell="").header_fields()
        requested_model = spec.placement.model
        self.say(f"asking {', '.join(endpoint.url for endpoint in endpoints)} for models")
        lists = [
            listed_models(endpoint, headers, needed=requested_model == SERVED)
            for endpoint in endpoints
        ]
        names = [str(entry.get("id", "")) for entry in lists[0]]
        if requested_model == SERVED:
            requested_model = next(iter(names), "")
        served = entry_of(endpoints[0], lists[0], requested_model)
        model = str(served.get("id", requested_model))
        if model != requested_model:
            self.say(f"the server serves {requested_model} as {model}")
        for folder_name in (requested_model, *folders_of(endpoints[0], served, headers)):
            client = with_tokenizer_of(folder_name, client)
        self.say("sending a first request")
        options = client.options(model=model, cell=spec.cell)
        reached = reach(endpoints, options, names)
        for note in reached.notes:
            self.say(note)
        most_tokens = served.get("max_model_len")
        yield Attached(
            reached.endpoints,
            client,
            model=model,
            gpu=spec.placement.gpu,
            hardware=_hardware(spec),
            senders=self.senders,
            reached=reached.changes,
            max_model_tokens=most_tokens if isinstance(most_tokens, int) else None,
            failures=[reached.failed_as] if reached.failed_as else [],
            say=self.say,
        )


def with_tokenizer_of(model: str, client: ClientSchema) -> ClientSchema:
    """Prompts are made of tokens that the model has, if it is a folder with its tokenizer."""
    try:
        has_tokenizer = (Path(model) / "tokenizer.json").is_file()
    except OSError:  # longer than names of files are
        has_tokenizer = False
    if client.tokenizer is None and has_tokenizer:
        return client.model_copy(update={"tokenizer": model})
    return client


@dataclass(frozen=True)
class Attached(Deployment):
    """Running servers. `values_field`: the request field for a policy's inputs; `senders`: the
    machines that send requests, None: this machine; `reached`: options that the servers need, found
    by probes; `max_model_tokens`: of prompt and answer, as the server says; `failures`: how the
    first request of each cell so far failed, empty where one of the cell was served; `say` is
    called with what may make a level invalid, before it.
    """

    endpoints: Sequence[Endpoint]
    client: ClientSchema
    values_field: str | None = None
    senders: Senders | None = None
    reached: Mapping[str, Any] = field(default_factory=dict)
    max_model_tokens: int | None = None
    failures: list[str] = field(default_factory=list)
    say: Say = silent

    def measure_cell(
        self, spec: CellSpec, workload: Workload, folder: Path, progress: Progress | None
    ) -> CellMeasurement:
        """Send the workload to the servers, and write the client's tables for the cell."""
        options = dataclasses.replace(
            self.client.options(model=self.model, cell=spec.cell, values_field=self.values_field),
            failed_before="".join(self.failures[-1:]),
            **self.reached,
        )
        self._check_lengths(workload)
        if spec.length_predictor != "oracle":
            options = dataclasses.replace(
                options,
                length_predictor=spec.length_predictor,
                length_seed=spec.seed,
                lengths_folder=folder / "lengths" / spec.cell,
            )
        if self.senders is None and (note := connections_note(workload, options)):
            self.say(note)
        before = CacheCounters.read(self._metrics(), metrics_by_server())
        with watching(self._gpus()) as watch, self._watched() as gone:
            http_result = measure(
                workload,
                self.endpoints,
                options,
                router=spec.router or "round-robin",
                progress=progress,
                senders=self.senders,
                gone=gone,
            )
        self.failures.append(http_result.failed_as)
        counters = CacheCounters.read(self._metrics(), metrics_by_server()).since(before)
        warm_share = warm_cache_share(workload, options, http_result.columns, counters)
        if len(http_result.clients) > 1 or self.senders is not None:
            _write_clients(folder / "clients" / f"{spec.cell}.csv", http_result.clients)
        if watch.samples:
            watch.write(folder / "servers" / f"{spec.cell}.gpus.csv", http_result.start_s)
        if self.client.save_token_times:
            _write_token_times(folder / "token_times" / f"{spec.cell}.csv.gz", http_result)
        if VLLM_JSON in self.client.export:
            path = folder / VLLM_JSON / f"{spec.cell}.json"
            write_vllm_json(path, workload, http_result, model=self.model, rate_rps=spec.rate_rps)
        return CellMeasurement(
            http_result.result,
            invalid_because=http_result.invalid_because,
            served=not http_result.failed_as,
            columns=_columns(http_result),
            figures={
                **_figures(workload, http_result),
                API_COLUMN: options.api.value,
                TOKENIZER_COLUMN: self.client.tokenizer,
                WARM_CACHE_COLUMN: None if warm_share is None else _rounded(warm_share),
                "given_prompts": int(given_prompts(workload, options).sum()),
                "repeated_prompts": repeated_prompts(workload, options),
                **_gpu_figures(watch, http_result),
                **_lengths_figures(http_result),
                **_machines_figures(http_result.clients),
            },
        )

    def _check_lengths(self, workload: Workload) -> None:
        """Raise SloBenchError if no request fits in the context of the served model."""
        most_tokens = self.max_model_tokens
        if most_tokens is None or not len(workload):
            return
        least_tokens = int((workload.prompt_tokens + workload.output_tokens).min())
        if least_tokens > most_tokens:
            raise SloBenchError(
                f"the server takes requests of {most_tokens:,} tokens (max_model_len), and the "
                f"shortest of the workload has {least_tokens:,}: --prompt-tokens and "
                "--output-tokens make them shorter"
            )

    @contextlib.contextmanager
    def _watched(self) -> Iterator[Callable[[], bool]]:
        """Whether a server has ended, as a function; of servers that ran before, nothing is known
        but what their connections show.
        """
        yield lambda: False

    def _metrics(self) -> list[str]:
        """The metrics of the servers that have some."""
        headers, pages = self.client.options(model="", cell="").header_fields(), []
        for endpoint in self.endpoints:
            with contextlib.suppress(NoAnswerError):
                status, page = get(
                    endpoint,
                    endpoint.page("/metrics"),
                    headers,
                    limit_s=_METRICS_S,
                    most_bytes=_MOST_ANSWER_BYTES,
                )
                if status == 200:
                    pages.append(page.decode("utf-8", "replace"))
        return pages

    def _gpus(self) -> Sequence[Gpu]:
        """The GPUs of this machine, if all servers run on it and on GPUs; else none."""
        if self.gpu == "cpu" or not all(is_loopback(endpoint.host) for endpoint in self.endpoints):
            return ()
        return visible_gpus()


def _gpu_figures(watch: GpuWatch, http_result: HttpResult) -> Mapping[str, Value]:
    """GPU metrics from the level's time zero to its last answer."""
    ended_s = http_result.columns.ended_s[np.isfinite(http_result.columns.ended_s)]
    return watch.figures(http_result.start_s, http_result.start_s + float(ended_s.max(initial=0.0)))


def _lengths_figures(http_result: HttpResult) -> Mapping[str, Value]:
    """The number of updates of an online length predictor, if one is used."""
    series = http_result.result.timeline.timeseries
    if not any(row.metric == "lengths" for row in series):
        return {}
    return {"length_updates": sum(row.metric == "taught" for row in series)}


def _machines_figures(clients: Sequence[Client]) -> Mapping[str, Value]:
    """Number and clock error of the machines that sent, if there are several."""
    machines = {client.machine for client in clients}
    if machines == {""}:
        return {}
    return {
        "client_machines": len(machines),
        "clock_error_s": _rounded(max(client.clock_error_s for client in clients)),
    }


def _write_clients(path: Path, clients: Sequence[Client]) -> None:
    """Write a CSV file with one line for each sending process."""
    names = [field.name for field in dataclasses.fields(Client)]
    rows: list[list[object]] = [["client", *names]]
    for number, client in enumerate(clients, 1):
        values = (getattr(client, name) for name in names)
        shown = (_rounded(v) if isinstance(v, float) else v for v in values)
        rows.append([number, *("" if value != value else value for value in shown)])
    write_whole(path, [csv_bytes(rows)])


def _hardware(spec: CellSpec) -> Hardware:
    """GPUs and price, where the experiment names the GPU.

    Raises:
        UnknownNameError: the catalogue has no such GPU.
    """
    place = spec.placement
    if place.gpu == UNKNOWN_GPU:
        return _UNKNOWN_HARDWARE
    return Hardware(
        gpus=spec.instances * place.gpus,
        parameters=float("nan"),
        peak_flops=0.0,
        usd_per_gpu_hour=gpu(place.gpu).price_per_hour_usd or None,
    )


def _columns(http_result: HttpResult) -> dict[str, Column]:
    columns = http_result.columns
    details = [http_result.details.get(row, "") for row in range(len(columns.fault))]
    return {
        "sent_s": columns.sent_s,
        "first_byte_s": columns.first_byte_s,
        "ended_s": columns.ended_s,
        "status": columns.status,
        "fault": Choice(columns.fault, [fault.value for fault in FAULTS]),
        "detail": choice_of(details),
        "connections": columns.connections,
        "chunks": columns.chunks,
        "untimed_tokens": columns.untimed_tokens,
        "server_prompt_tokens": columns.prompt_tokens,
        "server_output_tokens": columns.completion_tokens,
    }


def _figures(workload: Workload, http_result: HttpResult) -> dict[str, Value]:
    client, columns = http_result.client, http_result.columns
    chunks = int(columns.chunks.sum())
    tokens = int(columns.output_tokens.sum())
    sent_ttft = columns.first_token_s - columns.sent_s
    answered = sent_ttft[np.isfinite(sent_ttft)]
    figures: dict[str, Value] = {
        # What only the server knows.
        "preemptions_swap": None,
        "preemptions_recompute": None,
        "prefix_hit_rate": _prefix_hit_rate(http_result),
        "invalid_because": http_result.invalid_because,
        "ttft_from_send_p50_s": _rounded(np.median(answered)) if len(answered) else None,
        "tokens_per_chunk": _rounded(tokens / chunks) if chunks else None,
        **_answers_figures(workload, http_result),
        "sent_rps": _rounded(client.sent_rps),
        "send_delay_p50_s": _rounded(client.send_delay_p50_s),
        "send_delay_p99_s": _rounded(client.send_delay_p99_s),
        "event_loop_lag_p99_s": _rounded(client.event_loop_lag_p99_s),
        "client_cpu_s": _rounded(client.cpu_s),
        "client_processes": client.processes,
    }
    counts = http_result.faults()
    figures[FAULT_COLUMN] = most_common_detail(http_result.columns, http_result.details)
    figures |= {
        f"fault_{fault.value.replace('-', '_')}": counts.get(fault, 0)
        for fault in RequestFault
        if fault
    }
    return figures


def _rounded(value: float) -> float:
    return round(float(value), 6)


def _prefix_hit_rate(http_result: HttpResult) -> float | None:
    columns = http_result.columns
    reported = (columns.cached_tokens >= 0) & (columns.prompt_tokens > 0)
    if not reported.any():
        return None
    return _rounded(columns.cached_tokens[reported].sum() / columns.prompt_tokens[reported].sum())


def _answers_figures(workload: Workload, http_result: HttpResult) -> dict[str, Value]:
    """Numbers of whole answers of which there is something to say, and the median ratio of the
    server's prompt tokens to the workload's.
    """
    columns = http_result.columns
    tokens = columns.output_tokens
    whole = (columns.fault == FAULTS.index(RequestFault.NONE)) & (tokens > 0)
    unsure = columns.unsure > 0
    together = (tokens > 1) & (columns.untimed_tokens >= tokens) & ~unsure
    all_tokens = np.maximum(tokens, columns.completion_tokens)  # those not shown included
    shorter = whole & (all_tokens < workload.output_tokens)
    uncounted = shorter & (columns.completion_tokens < 0)
    prompts = whole & (columns.prompt_tokens > 0) & (workload.prompt_tokens > 0)
    ratios = columns.prompt_tokens[prompts] / workload.prompt_tokens[prompts]
    return {
        "truncated_outputs": int(shorter.sum()),
        "unreported_outputs": int(uncounted.sum()),
        "surplus_outputs": int((whole & (columns.surplus > 0)).sum()),
        "unstreamed_answers": int((whole & together).sum()),
        "uncounted_answers": int((whole & unsure).sum()),
        "silent_openings": int((whole & (columns.silent > 0)).sum()),
        "split_token_answers": int((whole & (columns.chunks > tokens)).sum()),
        "refuted_usages": int((whole & (columns.refuted > 0)).sum()),
        "prompt_tokens_ratio": _rounded(np.median(ratios)) if len(ratios) else None,
    }


def _write_token_times(path: Path, http_result: HttpResult) -> None:
    rows = np.arange(len(http_result.columns.output_tokens))
    columns: Mapping[str, Column] = {
        "id": np.repeat(rows, http_result.columns.output_tokens),
        "token_s": http_result.token_s,
    }
    write_whole(path, gzip_csv(columns))
