"""What clients may take of a gateway, as options of `slo-bench serve`."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from ...harness.experiments.config.setting import setting
from ...harness.servers.http.http_limits import DEFAULT_LIMITS, HttpLimits

_limit = partial(setting, "Limits of the gateway (any of them puts one before a single server)")


class GatewayLimits(BaseModel):
    """Limits of the gateway, as `HttpLimits` has them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_mib: PositiveInt = _limit(
        "Maximum size of a request's body.", DEFAULT_LIMITS.body_bytes >> 20, unit="MiB"
    )
    max_bodies_mib: PositiveInt = _limit(
        "Maximum size of the bodies of all requests in progress.",
        DEFAULT_LIMITS.bodies_bytes >> 20,
        unit="MiB",
    )
    max_connections: PositiveInt = _limit(
        "Maximum number of connections of clients.", DEFAULT_LIMITS.connections
    )
    request_timeout_s: PositiveFloat = _limit(
        "Time within which a request must have arrived whole.", DEFAULT_LIMITS.request_s, unit="s"
    )
    idle_timeout_s: PositiveFloat | None = _limit(
        "Time after which a connection without a request is closed.",
        DEFAULT_LIMITS.idle_s,
        unit="s",
    )
    first_byte_timeout_s: PositiveFloat | None = _limit(
        "Time within which an answer must begin, else 504 and the request is cancelled.",
        DEFAULT_LIMITS.first_byte_s,
        unit="s",
    )


def limits_of(settings: dict[str, Any]) -> HttpLimits:
    """The limits that were given, and the defaults for the others."""
    limits = GatewayLimits(**settings)
    return HttpLimits(
        body_bytes=limits.max_body_mib << 20,
        bodies_bytes=limits.max_bodies_mib << 20,
        connections=limits.max_connections,
        request_s=limits.request_timeout_s,
        idle_s=limits.idle_timeout_s,
        first_byte_s=limits.first_byte_timeout_s,
    )
