"""Address of a server: scheme, host, port and path prefix."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from ....workloads.errors import SloBenchError


@dataclass(frozen=True)
class Endpoint:
    """Address of an OpenAI-compatible server; `prefix` precedes `/v1/...` in its paths."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Parse an address such as `http://host:8000`, also with a path, with or without `/v1`.

        Raises:
            SloBenchError: the address is malformed or contains a password.
        """
        text = url if "://" in url else f"http://{url}"
        problem = f"{_without_password(url)!r} should look like http://127.0.0.1:8000"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise SloBenchError(f"{problem}: {error}") from None
        if parts.username or parts.password:
            raise SloBenchError(
                f"{problem}: leave the credentials out; --api-key-env names a variable with a key"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SloBenchError(problem)
        if parts.query or parts.fragment:
            raise SloBenchError(f"{problem}: without a query")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    @property
    def authority(self) -> str:
        """Host and port as in the header `host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Return the URL in the form that `parse` accepts."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _without_password(url: str) -> str:
    before, separator, after = url.rpartition("@")
    return f"{before.partition('://')[0]}://…@{after}" if separator else after
