"""The backend for the settings of an experiment."""

from __future__ import annotations

from ....workloads.errors import SloBenchError
from ...load_generator.send_job import Senders
from ...servers.launch.backend_names import TORCH
from ..config.schema import ExperimentSchema
from .attached import HttpBackend
from .base import Backend
from .launched import LaunchedBackend
from .torch_engine import TorchBackend


def backend_of(asked: ExperimentSchema, senders: Senders | None = None) -> Backend:
    """The backend that measures the experiment's cells; not for simulated ones.

    `senders` are the machines that send the load to servers that already run; None: this machine.

    Raises:
        SloBenchError: settings contradict each other.
    """
    if senders is not None and asked.backend != "openai":
        raise SloBenchError(
            "several machines can send the load only to running servers (--base-url); "
            f"leave --executor out with {asked.backend}"
        )
    if asked.backend != TORCH and asked.server.clock != "real":
        raise SloBenchError(f"server.clock goes with backend torch, not with {asked.backend}")
    if asked.backend != TORCH and asked.server.workers:
        raise SloBenchError(f"server.workers go with backend torch, not with {asked.backend}")
    if asked.backend != TORCH and asked.server.kv_store:
        raise SloBenchError(f"server.kv_store goes with backend torch, not with {asked.backend}")
    if asked.backend == "openai":
        return HttpBackend(asked.client, senders=senders)
    if asked.backend == TORCH:
        return TorchBackend(server=asked.server)
    return LaunchedBackend(asked.backend, asked.client, asked.server)
