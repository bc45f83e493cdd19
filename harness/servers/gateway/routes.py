"""Paths of requests through a gateway: the router places generating requests; any server answers
others.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence
from typing import Protocol

from ..http.http_server import Clients, HttpRequest, Reply, refuse, respond
from ..http.prometheus import CONTENT_TYPE, Sample, exposition
from .health_checks import FAILURES, MECHANISMS

_ASIDE = ("/tokenize", "/detokenize")  # asked beside the work: they must not turn a round robin
_KINDS = {
    "slo_bench_gateway_connections": "gauge",
    "slo_bench_gateway_requests_received_total": "counter",
    "slo_bench_gateway_requests_total": "counter",  # by result: a status, cancelled, lost
    "slo_bench_gateway_requests_refused_total": "counter",  # before they were read whole
    "slo_bench_gateway_up": "gauge",
    "slo_bench_gateway_in_flight": "gauge",
    "slo_bench_gateway_answers_total": "counter",
    "slo_bench_gateway_losses_total": "counter",
    FAILURES: "counter",  # by instance and reason
    "slo_bench_gateway_dispatched_total": "counter",  # sent there on arrival, by a controller
    "slo_bench_gateway_offloaded_total": "counter",  # given back before their prefill had begun
    "slo_bench_gateway_queued": "gauge",
    "slo_bench_gateway_load": "gauge",  # U, where the router measures it
    "slo_bench_gateway_activations_total": "counter",
    "slo_bench_gateway_evictions_total": "counter",
    "slo_bench_gateway_embed_passes_total": "counter",
    "slo_bench_gateway_taken_over_total": "counter",  # sent there after that, or after a loss
    MECHANISMS: "counter",  # acts of the controller's mechanisms
    "slo_bench_gateway_lengths_requests_total": "counter",
    "slo_bench_gateway_lengths_batches_total": "counter",  # prompts that were read together
    "slo_bench_gateway_lengths_seconds_total": "counter",  # that requests waited for it
    "slo_bench_gateway_lengths_seconds": "gauge",  # of the last 1,000 requests
    "slo_bench_gateway_lengths_generation": "gauge",
    "slo_bench_gateway_lengths_updates_total": "counter",
    "slo_bench_gateway_lengths_window_exact": "gauge",  # of the last 50 answers, as told
    "slo_bench_gateway_lengths_window_plain": "gauge",  # without the correction
    "slo_bench_gateway_lengths_window_within_one": "gauge",
    "slo_bench_gateway_lengths_window_ratio": "gauge",  # true over predicted tokens
}


class ServerGroup(Protocol):
    """Servers that can replace each other."""

    @property
    def role(self) -> str:
        """Role of the servers, such as prefill."""

    @property
    def any_up(self) -> bool:
        """Whether at least one server is up."""

    async def forward(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a request that generates nothing, at a server that is up."""

    def metrics(self) -> Iterator[Sample]:
        """Prometheus samples: name, labels and value."""

    def close(self) -> None:
        """Close the connections to all servers."""


class Serving(Protocol):
    """Server groups and the path of a request through them."""

    @property
    def groups(self) -> Sequence[ServerGroup]:
        """All server groups; each needs a server that is up."""

    async def work(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a request that the router or controller places."""


async def answer(serving: Serving, clients: Clients, request: HttpRequest, reply: Reply) -> None:
    """Answer one request to the gateway.

    `/metrics` returns the gateway's own metrics: what became of its requests (each received one is
    in progress or has a result), which instance is up, its answers and its requests in progress.
    Each instance has its own metrics at its own address.
    """
    dead = [group.role for group in serving.groups if not group.any_up]
    if request.path == "/metrics":
        samples = [sample for group in serving.groups for sample in group.metrics()]
        text = exposition(_KINDS, [*_requests(clients), *samples])
        respond(reply, text.encode(), CONTENT_TYPE)
    elif dead:
        refuse(reply, 503, f"no instance is up (role: {', '.join(dead)})")
    elif request.method == "POST" and not request.path.endswith(_ASIDE):
        await serving.work(request, reply)
    else:
        await serving.groups[0].forward(request, reply)


async def answer_with_key(
    key: bytes, serving: Serving, clients: Clients, request: HttpRequest, reply: Reply
) -> None:
    """Answer a request with the header `authorization: key`; refuse others but for `/health`."""
    authorizations = [value for name, value in request.headers if name.lower() == b"authorization"]
    if request.path == "/health" or (
        len(authorizations) == 1 and hmac.compare_digest(authorizations[0], key)
    ):
        await answer(serving, clients, request, reply)
    else:
        refuse(reply, 401, "an API key is needed: send authorization: Bearer KEY")


def _requests(clients: Clients) -> Iterator[Sample]:
    yield "slo_bench_gateway_connections", "", len(clients.connections)
    yield "slo_bench_gateway_requests_received_total", "", clients.received
    for result, count in sorted(clients.ended.items()):
        yield "slo_bench_gateway_requests_total", f'{{result="{result}"}}', count
    for status, count in sorted(clients.refused.items()):
        yield "slo_bench_gateway_requests_refused_total", f'{{status="{status}"}}', count
