"""FIFO static batching: what a plain generate() call over a batch does.

Source: the baseline of UELLM (§3.5) and S3; padded batches, given back as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core.policy import StaticPolicy, parameter
from ..core.state import RequestState
from ..core.view import View


@dataclass(frozen=True)
class Fifo(StaticPolicy):
    """The first `max_batch` that wait, in order of arrival."""

    continuous: ClassVar[str] = "fastertransformer"

    max_batch: int = parameter(32, 1, 4096, log=True)

    def form_batch(self, waiting: Sequence[RequestState], view: View) -> list[RequestState]:
        return list(waiting[: self.max_batch])
