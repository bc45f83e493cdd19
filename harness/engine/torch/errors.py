"""What can be wrong with a model or the place where it shall run."""

from __future__ import annotations

from ....workloads.errors import SloBenchError


class ModelError(SloBenchError):
    """A model folder that this engine cannot load, with what is wrong and what would be right."""


class DoesNotFitError(SloBenchError):
    """Weights and KV cache need more memory than the device has."""


def need_torch() -> None:
    """Raise SloBenchError where the extra `torch` is not installed."""
    try:
        import safetensors  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        raise SloBenchError(
            f"backend torch needs {error.name}: pip install 'slo-bench[torch]'"
        ) from None


class WorkerError(SloBenchError):
    """A worker process that did not start, died, or does not answer."""
