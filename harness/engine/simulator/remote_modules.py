"""What another instance's GPUs compute of an instance's steps."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.device import Device, SplitStepTime


class Away:
    """Books on `device` what it computes of somebody else's steps."""

    __slots__ = ("_device", "_step_time")

    def __init__(self, step_time: SplitStepTime, device: Device) -> None:
        self._step_time = step_time
        self._device = device

    def step(
        self, decode_seqs: int, decode_kv_tokens: int, chunks: Sequence[tuple[int, int]]
    ) -> None:
        """One step."""
        self._device.owed_s += self._step_time.abroad_s(decode_seqs, decode_kv_tokens, chunks)

    def span(self, decode_seqs: int, decode_kv_tokens: int, steps: int) -> None:
        """Steps that only decode."""
        self._device.owed_s += self._step_time.span_abroad_s(decode_seqs, decode_kv_tokens, steps)
