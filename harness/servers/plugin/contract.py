"""Contract between slo-bench and its plugin inside a server's process.

slo-bench starts a server with these variables; the plugin reads them. Without `SLO_BENCH_POLICY`
and `SLO_BENCH_STEP_LOG` it does nothing; with the log alone it changes no decision.

    SLO_BENCH_POLICY       a `PolicySpec` as JSON
    SLO_BENCH_HANDSHAKE    file that the plugin writes when all its hooks are in place
    SLO_BENCH_STEP_LOG     file for a line of JSON for each step (batch, duration); may be unset
    SLO_BENCH_NUM_CPU_BLOCKS  KV blocks of host memory for swapping; unset: none
    SLO_BENCH_EMBEDDER     an `EmbedderBeside` as JSON; unset: no embedder beside the model
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....workloads.errors import SloBenchError
from ...core.counters import COUNT, Counters
from ...core.decisions import NextQueue
from ...core.policy import AnyPolicy, Parameters, Policy, StaticPolicy
from ...core.predictions import LearnedPredictions
from ...core.state import RequestState
from ...core.view import Predictions

POLICY_VARIABLE = "SLO_BENCH_POLICY"
HANDSHAKE_VARIABLE = "SLO_BENCH_HANDSHAKE"
STEP_LOG_VARIABLE = "SLO_BENCH_STEP_LOG"
NUM_CPU_BLOCKS_VARIABLE = "SLO_BENCH_NUM_CPU_BLOCKS"
EMBEDDER_VARIABLE = "SLO_BENCH_EMBEDDER"

# Columns of `cells.csv` about an embedder's passes: how many, and what they held in all.
EMBED_PASSES = ("embed_passes", "embed_pass_requests", "embed_pass_texts", "embed_pass_blocks")


@dataclass(frozen=True)
class PolicySpec:
    """A policy by its module and class, with the values of all its parameters.

    `other_fields`: those that are no parameters, which a controller over several instances sets.
    """

    system: str
    module: str
    class_name: str
    file: str | None = None  # of a module that no package holds
    parameters: Mapping[str, Any] = field(default_factory=dict)
    other_fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, system: str, policy: Parameters) -> PolicySpec:
        """The spec of a policy object."""
        kind = type(policy)
        module = sys.modules[kind.__module__]
        built_in = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
        file = None if built_in else getattr(module, "__file__", None)
        parameters = {name: getattr(policy, name) for name in policy.bounds()}
        names = {attribute.name for attribute in dataclasses.fields(policy)} - set(parameters)
        other_fields = {name: getattr(policy, name) for name in names}
        return cls(system, kind.__module__, kind.__qualname__, file, parameters, other_fields)

    def to_json(self) -> str:
        """The spec as JSON, for the environment variable."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PolicySpec:
        """The spec from the text of `to_json`.

        Raises:
            SloBenchError: it is something else.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise SloBenchError(f"{POLICY_VARIABLE} cannot be read: {error}") from error

    def load(self) -> AnyPolicy:
        """Import the class and make the policy of an instance.

        Raises:
            SloBenchError: its module or class is not there, or the parameters are not its own.
        """
        policy = self.build()
        if not isinstance(policy, Policy | StaticPolicy):
            raise SloBenchError(f"{self.module}.{self.class_name} decides on no instance")
        return policy

    def build(self) -> Parameters:
        """Import the class and make the policy, also a cluster policy.

        Raises:
            SloBenchError: its module or class is not there, or the parameters are not its own.
        """
        kind = getattr(self._module(), self.class_name, None)
        if not (isinstance(kind, type) and issubclass(kind, Parameters)):
            raise SloBenchError(f"{self.module} has no policy {self.class_name}")
        policy: Parameters = dataclasses.replace(
            kind().with_parameters(**self.parameters), **self.other_fields
        )
        return policy

    def _module(self) -> Any:
        if self.file is None:
            return importlib.import_module(self.module)
        if self.module in sys.modules:
            return sys.modules[self.module]
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        if spec is None or spec.loader is None or not Path(self.file).is_file():
            raise SloBenchError(f"{self.file} cannot be loaded as Python")
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return module


def asked_for() -> PolicySpec | None:
    """The policy for this process; None: leave the server unchanged."""
    text = os.environ.get(POLICY_VARIABLE)
    return PolicySpec.from_json(text) if text else None


@dataclass(frozen=True)
class EmbedderBeside:
    """An embedding server on the device of a language model, whose passes the policy inside the
    language model's server decides on.

    `socket`: Unix socket at which that server listens for the gateway that holds the texts.
    `activation_bytes_per_token`: memory of a pass.
    """

    socket: str
    activation_bytes_per_token: int

    def to_json(self) -> str:
        """The values as JSON, for the environment variable."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def asked_for(cls) -> EmbedderBeside | None:
        """The embedder of this process; None: there is none."""
        text = os.environ.get(EMBEDDER_VARIABLE)
        return cls(**json.loads(text)) if text else None


def announce(server: str, version: str, hooks: Sequence[str], **more: Any) -> None:
    """Report that every hook is in place, for the process that started the server.

    It is called last, after everything that can fail.
    """
    path = os.environ.get(HANDSHAKE_VARIABLE)
    if not path:
        return
    report = {
        "server": server,
        "version": version,
        "hooks": list(hooks),
        "pid": os.getpid(),
        **more,
    }
    part = Path(f"{path}.{os.getpid()}")
    part.write_text(json.dumps(report) + "\n", "utf-8")
    part.replace(path)


def tally_file(handshake: Path) -> Path:
    """File of the counters that belong to this handshake."""
    return handshake.with_suffix(".tally.json")


class Tally:
    """Counters of preemptions, swaps and mechanisms, in a file that the starter of the server
    reads.
    """

    def __init__(self) -> None:
        handshake = os.environ.get(HANDSHAKE_VARIABLE)
        self._path = tally_file(Path(handshake)) if handshake else None
        self._written: dict[str, int] = {}

    def write(self, counters: Counters, **totals: int) -> None:
        """Write all counters at once, if any changed; of `counters` those of the policy."""
        if self._path is None:
            return
        totals |= {COUNT + name: n for name, n in counters.of_policy().items()}
        if totals != self._written:
            part = self._path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(totals), "utf-8")
            part.replace(self._path)
            self._written = totals


def num_cpu_blocks() -> int:
    """Number of KV blocks in host memory for swapping."""
    return int(os.environ.get(NUM_CPU_BLOCKS_VARIABLE) or 0)


class StepLog:
    """Step log: one JSON line for each event; nothing is written if no file is set."""

    def __init__(self) -> None:
        path = os.environ.get(STEP_LOG_VARIABLE)
        self._file = Path(path).open("a", buffering=1, encoding="utf-8") if path else None  # noqa: SIM115

    @property
    def wanted(self) -> bool:
        """Whether a file is set."""
        return self._file is not None

    def write(self, event: str, **values: Any) -> None:
        """Append one event with its values."""
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **values}) + "\n")


@dataclass(frozen=True)
class Composition:
    """Composition of a batch. `chunks` are (tokens in KV before, tokens prefilled)."""

    decode_seqs: int
    decode_kv_tokens: int
    chunks: list[tuple[int, int]]

    def teach(self, predictions: LearnedPredictions, duration_s: float) -> None:
        """Let the predictions learn how long this batch took."""
        predictions.learn(self.decode_seqs, self.decode_kv_tokens, self.chunks, duration_s)


def moved_targets(targets: Mapping[str, Iterable[str]]) -> list[str]:
    """Names in a server that do not exist or take other parameters than expected, as texts; empty
    if all do.

    Args:
        targets: names for `pkgutil.resolve_name`, each with its expected first parameters in
            order; a target without parameters only needs to exist.
    """
    problems = (_problem(name, tuple(first)) for name, first in targets.items())
    return [problem for problem in problems if problem]


def _problem(name: str, first: tuple[str, ...]) -> str:
    try:
        target = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return f"{name} is gone"
    if not first:
        return ""
    parameters = tuple(inspect.signature(target).parameters)
    if parameters[: len(first)] != first:
        return f"{name} takes ({', '.join(parameters)}), not ({', '.join(first)}, …)"
    return ""


class IdleView:
    """Implements `harness.core.view.View` for an instance without requests: a policy's limits are
    known before a server starts.
    """

    now_s = 0.0
    host_free_blocks = 0
    n_waiting = n_swapped = n_prefilling = n_decoding = n_running = 0
    decode_kv_tokens = max_future_kv_tokens = remaining_prefill_tokens = 0

    def __init__(self, policy: Policy, num_gpu_blocks: int = 10_000, block_size: int = 16) -> None:
        self.predict: Predictions = LearnedPredictions()
        self.policy_state: Any = policy.new_state()
        self.counters = Counters(policy.mechanisms())
        self.total_blocks = self.free_blocks = num_gpu_blocks
        self.block_size = block_size

    def waiting(self) -> Iterable[RequestState]:
        return ()

    def running(self) -> Iterable[RequestState]:
        return ()

    def admissible(self, group: NextQueue) -> list[RequestState]:
        return []

    def kv_tokens(self, r: RequestState) -> int:
        return 0

    def emitted_tokens(self, r: RequestState) -> int:
        return 0

    def held_blocks(self, r: RequestState) -> int:
        return 0

    def cached_tokens(self, r: RequestState) -> int:
        return 0
