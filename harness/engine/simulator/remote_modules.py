"""What another instance's GPUs compute of an instance's steps."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.device import SplitStepTime, StageDevice


class Away:
    """Books on `device` its part of the steps of other instances."""

    __slots__ = ("_device", "_step_time")

    def __init__(self, step_time: SplitStepTime, device: StageDevice) -> None:
        self._step_time = step_time
        self._device = device

    def step(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> None:
        """Book one step."""
        self._device.owed_s += self._step_time.abroad_s(decode_seqs, decode_kv_tokens, chunks)

    def span(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> None:
        """Book steps that only decode."""
        self._device.owed_s += self._step_time.span_abroad_s(decode_seqs, decode_kv_tokens, steps)
