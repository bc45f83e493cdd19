"""Servers that we start and stop: `--backend vllm` and `--backend sglang`.

servers/<system>[-N].log          what each server said
servers/<system>[-N].steps.jsonl  its steps, where asked for
servers/<cell>[-N].metrics        its own metrics before and after the cell
"""

from __future__ import annotations

import contextlib
import datetime
import math
import re
import shutil
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...workloads.workload import Workload
from ..cells import CellSpec
from ..client_schema import ClientSchema
from ..core.wire import SGLANG_FIELD, VLLM_FIELD
from ..engines.over_http.endpoint import Endpoint
from ..metrics import Hardware
from ..server_schema import ServerSchema
from ..store import Value, write_whole
from . import tally
from .attached import Attached
from .base import Measured, Progress
from .environments import environment, home
from .serve import Serve
from .servers import Server, ServerError

_BLOCK_TOKENS = 16  # an experiment's default: the server then chooses itself
_VALUES_FIELD = {"vllm": VLLM_FIELD, "sglang": SGLANG_FIELD}
_TP = {"vllm": "--tensor-parallel-size", "sglang": "--tp-size"}
_PP = {"vllm": "--pipeline-parallel-size", "sglang": "--pp-size"}
# The servers' own counters, summed over labels: their growth over a cell goes into its row.
_COUNTERS = {
    "server_preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    "server_prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "server_output_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
}
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class LaunchedBackend:
    """Starts what a cell asks for. The system of the server's own name is the server unpatched."""

    name: str
    client: ClientSchema = field(default_factory=ClientSchema)
    server: ServerSchema = field(default_factory=ServerSchema)

    def check(self, spec: CellSpec) -> None:
        """See `Backend`."""
        self._wanted(spec).check()

    def configuration(self, spec: CellSpec) -> Hashable:
        """See `Backend`."""
        return spec.system, tuple(sorted(spec.knobs.items())), spec.placement, spec.instances

    @contextlib.contextmanager
    def started(self, spec: CellSpec, folder: Path) -> Iterator[Launched]:
        """See `Backend`."""
        wanted = self._wanted(spec)
        log = _unused(folder / "servers" / f"{wanted.label}.log")
        if self.server.step_log and wanted.patched:
            wanted = replace(wanted, step_log=log.with_suffix(".steps.jsonl"))
        with contextlib.ExitStack() as stack:
            with _kept_logs(log.parent):
                servers = wanted.start(stack, log, instances=spec.instances)
            device = environment(wanted.backend).device
            attached = Attached(
                [Endpoint.parse(server.url) for server in servers],
                self._client_for(spec.placement.model),
                model=_served_name(spec.placement.model),
                gpu="cpu" if device == "cpu" else "unknown",
                values_field=_VALUES_FIELD[self.name] if wanted.patched else None,
                hardware=Hardware(
                    gpus=0 if device == "cpu" else spec.placement.tp * spec.placement.pp,
                    parameters=math.nan,
                    peak_flops=math.nan,
                ),
            )
            yield Launched(attached, servers)

    def _wanted(self, spec: CellSpec) -> Serve:
        place = spec.placement
        args = list(self.server.args)
        for flags, size in ((_TP, place.tp), (_PP, place.pp)):
            if size > 1:
                args += [flags[self.name], str(size)]
        own_blocks = place.kv_blocks is not None or place.block_tokens != _BLOCK_TOKENS
        version = self.server.version
        return Serve(
            backend=self.name if version is None else f"{self.name}=={version}",
            model=place.model,
            system=spec.system,
            knobs=spec.knobs,
            served_name=_served_name(place.model),
            kv_blocks=place.kv_blocks,
            block_tokens=place.block_tokens if own_blocks else None,
            max_model_tokens=self.server.max_model_tokens,
            host_blocks=place.host_blocks,
            server_args=tuple(args),
            ready_s=self.server.ready_s,
        )

    def _client_for(self, model: str) -> ClientSchema:
        """Prompts are made of tokens that this model has, if its tokenizer is at hand."""
        known = (Path(model) / "tokenizer.json").is_file()
        if self.client.tokenizer is None and known:
            return self.client.model_copy(update={"tokenizer": model})
        return self.client


@dataclass(frozen=True)
class Launched:
    """Servers of ours that are up."""

    attached: Attached
    servers: Sequence[Server]
    model: str = field(init=False)
    gpu: str = field(init=False)
    hardware: Hardware = field(init=False)

    def __post_init__(self) -> None:
        for name in ("model", "gpu", "hardware"):
            object.__setattr__(self, name, getattr(self.attached, name))

    def measure_cell(
        self, spec: CellSpec, workload: Workload, folder: Path, progress: Progress | None
    ) -> Measured:
        """See `Deployment`. A server that dies meanwhile makes the level invalid, and so do swaps
        that were decided and not executed.

        Raises:
            ServerError: one has died before.
        """
        before = [server.metrics() for server in self.servers]
        tallies = [server.tally() for server in self.servers]
        measured = self.attached.measure_cell(spec, workload, folder, progress)
        try:
            after = [server.metrics() for server in self.servers]
        except ServerError as error:
            return replace(measured, invalid_because=str(error).partition("\n")[0])
        for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
            suffix = f"-{number}" if len(self.servers) > 1 else ""
            text = f"# before the cell\n{old}\n# after the cell\n{new}\n"
            write_whole(folder / "servers" / f"{spec.cell}{suffix}.metrics", [text.encode()])
        counted = tally.growth(tallies, [server.tally() for server in self.servers])
        grown = {**_grown(before, after), **tally.figures(counted)}
        if problem := tally.swap_problem(counted):
            measured = replace(measured, invalid_because=measured.invalid_because or problem)
        return replace(measured, figures={**measured.figures, **grown})


def _grown(before: Sequence[str], after: Sequence[str]) -> Mapping[str, Value]:
    """By how much each counter has grown, all servers together; None where there is none."""
    olds = [_sums(text) for text in before]
    news = [_sums(text) for text in after]
    found: dict[str, Value] = {}
    for figure, names in _COUNTERS.items():
        known = [name for name in names if any(name in sums for sums in news)]
        found[figure] = None
        if known:
            now, then = (sum(s.get(known[0], 0.0) for s in side) for side in (news, olds))
            found[figure] = int(now - then)
    return found


def _sums(text: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        with contextlib.suppress(ValueError):
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


@contextlib.contextmanager
def _kept_logs(folder: Path) -> Iterator[None]:
    """A run folder without a finished cell is removed; logs of a failed start are kept elsewhere.

    Raises:
        ServerError: what was raised within, with the place where the log is kept.
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
    """The path, or with a number if another start of the same system has used it."""
    candidates = [path, *(path.with_stem(f"{path.stem}.{number}") for number in range(2, 1000))]
    return next(one for one in candidates if not one.exists())
