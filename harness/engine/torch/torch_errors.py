"""What can be wrong with a model or the place where it shall run."""

from __future__ import annotations

from ....workloads.errors import SloBenchError


class ModelError(SloBenchError):
    """A model folder that this engine cannot load, with what is wrong and what would be right."""


class DoesNotFitError(SloBenchError):
    """Weights and KV cache need more memory than the device has."""


class WorkerError(SloBenchError):
    """A worker process that did not start, died, or does not answer."""
