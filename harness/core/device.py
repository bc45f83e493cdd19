"""What executes: a group of GPUs that compute one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...predictors.step_time import StepTime


class StageDevice:
    """Compute time of one pipeline stage (its tensor-parallel GPUs together).

    Instances placed on the same device take turns, step by step, so that together they never get
    more than the device's throughput. What it computes for instances of other devices goes first,
    and is owed by the steps of its own (`owed_s`). `share` is what part of the computation of a
    step that passes through several stages it takes. The step then travels for `hop_s` to the next
    stage, while this one is free.
    """

    __slots__ = ("free_at_s", "hop_s", "name", "owed_s", "share")

    def __init__(self, name: str, share: float = 1.0, hop_s: float = 0.0) -> None:
        self.name = name
        self.share = share
        self.hop_s = hop_s
        self.free_at_s = 0.0
        self.owed_s = 0.0

    def settle(self, begin_s: float) -> float:
        """Seconds that a step which begins now is longer for; idle time has paid its part."""
        owed_s = max(0.0, self.owed_s - max(0.0, begin_s - self.free_at_s))
        self.owed_s = 0.0
        return owed_s


def occupy(stages: tuple[StageDevice, ...], begin_s: float, duration_s: float) -> float:
    """Run a step of `duration_s`, hops included, through the stages in turn; the moment at which it
    ends.

    Each stage takes its share, and begins when the step reaches it and it is free.
    """
    now_s, computed_s = begin_s, duration_s
    for stage in stages:
        computed_s -= stage.hop_s
    for stage in stages:
        owed_s = stage.settle(now_s) if stage.owed_s else 0.0
        if stage.free_at_s > now_s:
            now_s = stage.free_at_s
        stage.free_at_s = now_s = now_s + owed_s + computed_s * stage.share
        now_s += stage.hop_s
    return now_s


def free_after(stages: tuple[StageDevice, ...], end_s: float, duration_s: float) -> None:
    """A step of `duration_s` that met no other ended at `end_s`: when that left each stage free."""
    computed_s = duration_s
    for stage in stages:
        computed_s -= stage.hop_s
    for stage in reversed(stages):
        stage.free_at_s = end_s - stage.hop_s
        end_s = stage.free_at_s - computed_s * stage.share


class SplitStepTime(StepTime, Protocol):
    """`StepTime` of an instance with a part of its model on another GPU, and the time of that
    part.
    """

    def parts_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> tuple[float, float]:
        """Seconds of one step, and of what the other GPUs compute for it."""

    def span_abroad_s(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> float:
        """The same of `steps` steps that only decode."""


class Away:
    """Books on `device` its part of the steps of other instances."""

    __slots__ = ("_device", "_step_time")

    def __init__(self, step_time: SplitStepTime, device: StageDevice) -> None:
        self._step_time = step_time
        self._device = device

    def step_s(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Seconds of one step; what of it this device computes is added to what it owes."""
        step_s, abroad_s = self._step_time.parts_s(decode_seqs, decode_kv_tokens, chunks)
        self._device.owed_s += abroad_s
        return step_s

    def span(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> None:
        """Book steps that only decode."""
        self._device.owed_s += self._step_time.span_abroad_s(decode_seqs, decode_kv_tokens, steps)
