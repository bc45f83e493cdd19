"""One measurement of a real server: what was run, and what was measured."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ....workloads.arrays import Floats, Ints, Mask
from ....workloads.prefixes import PrefixRows

CLOSED_LOOP = "closed-loop"
OPEN_LOOP = "open-loop"
MAX_RATE = "max-rate"
LOG = "log"


@dataclass(frozen=True)
class ClosedLoop:
    """A fixed number of clients, each with one request in flight; all requests of one length."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class OpenLoop:
    """Requests with their own arrival times (s) and lengths (tokens), in order of arrival.

    `answered` says of which requests latencies were measured: not of those without an answer, nor
    of those sent before a level. `prefix_blocks`: the 16-token blocks
    of each request, where it is recorded which prompts share a prefix.
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    answered: Mask
    prefix_blocks: PrefixRows | None = None

    @property
    def span_s(self) -> float:
        """Seconds from the first answered request to the last."""
        sent_s = self.arrival_s[self.answered]
        return float(np.ptp(sent_s)) if len(sent_s) else 0.0


@dataclass(frozen=True)
class HighestRate:
    """Poisson arrivals of requests of one length, at the highest rate that keeps bounds.

    `bounds`: seconds by figure, such as `("ttft_p99", 0.5)`.
    """

    prompt_tokens: int
    output_tokens: int
    bounds: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Case:
    """What was run: all that a prediction may use.

    `gpu` and `model` are names of the catalogues. `token_budget` and `max_num_seqs` limit an
    iteration of the server; None: the source does not tell. `harness` names who measured from
    outside, over HTTP; empty: a log of the engine, or not told.
    """

    engine: str
    version: str
    gpu: str
    model: str
    load: ClosedLoop | OpenLoop | HighestRate
    tp: int = 1
    pp: int = 1
    ep: int = 1
    instances: int = 1
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    memory_share: float = 0.9
    token_budget: int | None = None
    max_num_seqs: int | None = None
    async_scheduling: bool | None = None
    num_gpu_blocks: int | None = field(default=None, repr=False)
    peer_link: str | None = field(default=None, repr=False)
    harness: str = ""
    dp: int = field(default=1, repr=False)

    @property
    def identity(self) -> str:
        """The same for cases that get the same prediction."""
        text = [repr(self)]
        text += [str(x) for x in (self.num_gpu_blocks, self.peer_link) if x is not None]
        text += [f"dp {self.dp}"] if self.dp > 1 else []
        if isinstance(self.load, OpenLoop):
            text += [self.load.arrival_s.tobytes().hex(), self.load.output_tokens.tobytes().hex()]
        return "\0".join(text)

    def __str__(self) -> str:
        """Version, formats, parallelism and load on one line."""
        load = self.load
        parts = [f"{self.engine} {self.version}".strip(), self.weight_dtype, f"tp {self.tp}"]
        parts += [f"pp {self.pp}"] if self.pp > 1 else []
        parts += [f"dp {self.dp}"] if self.dp > 1 else []
        parts += [f"{self.instances} servers"] if self.instances > 1 else []
        if isinstance(load, ClosedLoop):
            parts += [f"{load.prompt_tokens} + {load.output_tokens} tokens"]
            parts += [f"{load.concurrency} clients"]
        elif isinstance(load, HighestRate):
            parts += [f"{load.prompt_tokens} + {load.output_tokens} tokens"]
            parts += [f"{name} ≤ {bound_s:g} s" for name, bound_s in load.bounds]
        else:
            n = int(load.answered.sum())
            parts += [f"{n} requests at {n / max(load.span_s, 1e-9):.3g} req/s"]
        return ", ".join(parts)


@dataclass(frozen=True)
class Measurement:
    """A case and what was measured: seconds, tokens/s (`throughput`) or req/s (`max_rate`).

    `set` is the stem of the file, `row` what tells the measurement from the others of the file.
    """

    set: str
    row: str
    mode: str
    case: Case
    measured: Mapping[str, float] = field(hash=False)

    @property
    def key(self) -> str:
        """Identifies the measurement in the results of an interrupted run."""
        text = [self.set, self.row, self.mode, self.case.identity]
        return hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Skipped:
    """A row that is not predicted, and why."""

    set: str
    reason: str
