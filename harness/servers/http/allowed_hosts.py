"""The names under which a server answers."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from ...load_generator.http.endpoint import is_address, is_loopback


@dataclass(frozen=True)
class AllowedHosts:
    """Names under which a server that is bound to `address` answers.

    A web page can give its own name an address of this machine, and then ask the server as if it
    were the page's (DNS rebinding). So only names of this machine are answered, the address, and
    `names`; None: those without a dot, too, which no page of the internet has.
    """

    address: str
    names: tuple[str, ...] | None = ()

    def allows(self, host: str) -> bool:
        """Return True if a request with this `Host` is answered."""
        name = _name_of(host)
        if not name or is_loopback(name) or name.endswith(".localhost"):
            return True
        names = () if self.names is None else self.names
        if name in (self.address.lower(), *map(str.lower, names)):
            return True
        if self.names is None and "." not in name and ":" not in name:
            return True
        if is_loopback(self.address):
            return False
        return is_address(name) or name == socket.gethostname().lower()


def _name_of(host: str) -> str:
    """The name in a `Host` header, without port and brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name if not port.removeprefix(":").strip("0123456789") else host
    return host.partition(":")[0].removesuffix(".")
