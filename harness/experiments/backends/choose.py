"""Which backend an experiment asks for."""

from __future__ import annotations

from ....workloads.errors import SloBenchError
from ...load_generator.send_job import Senders
from ...servers.launch.backend_names import PAGED
from ..config.schema import ExperimentSchema
from .attached import HttpBackend
from .base import Backend
from .launched import LaunchedBackend
from .torch_engine import PagedBackend


def backend_of(asked: ExperimentSchema, senders: Senders | None = None) -> Backend:
    """The backend that measures the experiment's cells; not for simulated ones.

    `senders` say where the load of servers that run already is sent from; None: this machine.

    Raises:
        SloBenchError: settings contradict each other.
    """
    if senders is not None and asked.backend != "http":
        raise SloBenchError(
            "a load is sent from several machines only to servers that run already (--base-url); "
            f"leave --executor out with {asked.backend}"
        )
    if asked.backend != PAGED and asked.server.clock != "real":
        raise SloBenchError(f"server.clock goes with backend paged, not with {asked.backend}")
    if asked.backend != PAGED and asked.server.workers:
        raise SloBenchError(f"server.workers go with backend paged, not with {asked.backend}")
    if asked.backend != PAGED and asked.server.kv_store:
        raise SloBenchError(f"server.kv_store goes with backend paged, not with {asked.backend}")
    if asked.backend == "http":
        return HttpBackend(asked.client, senders=senders)
    if asked.backend == PAGED:
        return PagedBackend(server=asked.server)
    return LaunchedBackend(asked.backend, asked.client, asked.server)
