"""What clients may take of a gateway, as options of `slo-bench serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from ...harness.experiments.config.setting import setting

if TYPE_CHECKING:
    from ...harness.servers.http_server import HttpLimits

_PANEL = "Limits of the gateway (any of them puts one before a single server)"


class GatewayLimits(BaseModel):
    """Limits of the gateway; None: as `HttpLimits` has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_mib: PositiveInt | None = setting(
        _PANEL, "Maximum size of a request's body. Default: 256.", unit="MiB"
    )
    max_bodies_mib: PositiveInt | None = setting(
        _PANEL, "Maximum size of the bodies of all requests in progress. Default: 4096.", unit="MiB"
    )
    max_connections: PositiveInt | None = setting(
        _PANEL, "Maximum number of connections of clients. Default: 10000."
    )
    request_timeout_s: PositiveFloat | None = setting(
        _PANEL, "Time within which a request must have arrived whole. Default: 120.", unit="s"
    )
    idle_timeout_s: PositiveFloat | None = setting(
        _PANEL, "Time after which a connection without a request is closed. Default: 600.", unit="s"
    )
    first_byte_timeout_s: PositiveFloat | None = setting(
        _PANEL,
        "Time within which an answer must begin, else 504 and the request is cancelled. Default: "
        "no limit.",
        unit="s",
    )


def limits_of(settings: dict[str, Any]) -> HttpLimits:
    """The limits that were given, and the defaults for the others."""
    from ...harness.servers.http_server import HttpLimits

    asked = GatewayLimits(**settings)
    found: dict[str, Any] = {
        "body_bytes": asked.max_body_mib and asked.max_body_mib << 20,
        "bodies_bytes": asked.max_bodies_mib and asked.max_bodies_mib << 20,
        "connections": asked.max_connections,
        "request_s": asked.request_timeout_s,
        "idle_s": asked.idle_timeout_s,
        "first_byte_s": asked.first_byte_timeout_s,
    }
    return HttpLimits(**{name: value for name, value in found.items() if value is not None})
