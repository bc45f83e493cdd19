"""Batches of UELLM and S3 on a server, which has no static ones: formed alike, run to completion.

    slo-bench run --backend vllm --model models/tiny --system scripts/static_batches.py:S3Batches

A batch forms when the server is idle, and no other request enters until its last answer is out. In
contrast to the static batches of the simulator (`s3`, `slo-odbs`) nothing is padded, and each
answer is returned when it ends.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from slo_bench.harness.core.decisions import UNLIMITED
from slo_bench.harness.policies.uellm.s3 import S3
from slo_bench.harness.policies.uellm.slo_odbs import SloOdbs
from slo_bench.policy import Key, Limits, Policy, RequestState, StaticPolicy, View, parameter


class Batches:
    """What an instance keeps: the state of the static policy, and the requests of its batch."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.batch: set[int] = set()


class StaticView:
    """The view as the static policy sees it: with its own state."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.policy_state = view.policy_state.state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


@dataclass(frozen=True)
class RunToCompletion(Policy):
    """The batches that `static` forms, one after the other."""

    queue_order: ClassVar[Literal["dynamic"]] = "dynamic"
    dynamic_limits: ClassVar[bool] = True
    uses_predicted_lengths: ClassVar[bool] = True

    max_batch: int = parameter(10, 1, 4096, log=True)

    @property
    def static(self) -> StaticPolicy:
        """The policy that forms batches."""
        raise NotImplementedError

    def new_state(self) -> Batches:
        """No batch has formed."""
        return Batches(self.static.new_state())

    def mechanisms(self) -> dict[str, str]:
        """Those of the static policy."""
        return self.static.mechanisms()

    def _entering(self, view: View) -> set[int]:
        """Requests of the batch that have not entered; a new batch forms where there is none."""
        batches: Batches = view.policy_state
        waiting = sorted(view.waiting(), key=lambda r: r.seq)
        if waiting and not view.n_running and not any(r.id in batches.batch for r in waiting):
            formed = self.static.form_batch(waiting, StaticView(view))
            batches.batch = {r.id for r in formed}
        return {r.id for r in waiting if r.id in batches.batch}

    def limits(self, view: View) -> Limits:
        """Room for what runs and for the rest of its batch."""
        seqs = view.n_running + len(self._entering(view))
        return Limits(UNLIMITED, seqs or self.max_batch, mixed_batches=False, chunked=False)

    def queue_key(self, r: RequestState, view: View) -> Key:
        """The batch goes first, in order of arrival."""
        return float(r.id not in self._entering(view)), r.seq

    def on_finished(self, r: RequestState, view: View) -> None:
        """The static policy learns from the answer."""
        self.static.on_finished(r, StaticView(view))


@dataclass(frozen=True)
class S3Batches(RunToCompletion):
    """S3's batches; that of the shortest answers, or with the oldest request, goes first."""

    first: str = parameter("shortest", choices=("oldest", "shortest"))

    @property
    def static(self) -> S3:
        """S3 with these parameters."""
        return S3(max_batch=self.max_batch, first=self.first)


@dataclass(frozen=True)
class SloOdbsBatches(RunToCompletion):
    """SLO-ODBS's batches, with the authors' order and weights."""

    slo_weight: float = parameter(1.0, 0.0, 100.0)
    output_weight: float = parameter(0.5, 0.0, 100.0)
    threshold: float = parameter(15_000.0, 1.0, 1e9, log=True)

    @property
    def static(self) -> SloOdbs:
        """SLO-ODBS with these parameters."""
        return SloOdbs(
            max_batch=self.max_batch,
            slo_weight=self.slo_weight,
            output_weight=self.output_weight,
            threshold=self.threshold,
            sort_by="weighted",
            length_term="signed",
        )
