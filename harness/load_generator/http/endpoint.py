"""Address of a server: scheme, host, port and paths, and which certificates it may show."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ....workloads.errors import SloBenchError

if TYPE_CHECKING:
    import ssl

_LOCAL = "localhost"  # name of a server on a Unix socket
_SECRET = re.compile(  # in a query
    r"(?:^|&)([^=&]*(?:key|token|secret|passw|signature)[^=&]*)=.", re.IGNORECASE
)
_VERSION = re.compile(r"v\d\w*")  # a segment of a path: v1, v3, v1beta
_NAMED_FILES = "a file that SSL_CERT_FILE or SSLKEYLOGFILE names"
_API_PATHS = ("chat/completions", "completions", "embeddings", "responses", "messages")


@dataclass(frozen=True)
class Endpoint:
    """Address of an OpenAI-compatible server.

    Attributes:
        host: name or address.
        port: TCP port.
        tls: whether the connection is encrypted.
        prefix: path before the server's own pages (`/metrics`).
        version: path after it and before those of the API (`/chat/completions`).
        query: part of every address after `?`.
        api_path: the path of the API that the address ends with; empty: it is a base address.
        socket: path of a Unix socket in place of host and port.
        ca_file: certificates of authorities that are trusted; empty: those of the system.
        insecure: any certificate will do.
        api_key: key of the server that a gateway sends, in place of its clients'.
    """

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    version: str = "/v1"
    query: str = ""
    api_path: str = ""
    socket: str = ""
    ca_file: str = ""
    insecure: bool = False
    api_key: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Parse an address such as `http://host:8000`, `https://host/api/v3?api-version=1`,
        `https://host/v1/chat/completions` or `unix:/run/server.sock:/v1`.

        A path that names a version (`v1`, `v3`, `v1beta`) or `openai` is the base of the API's
        paths; after another one, and without one, comes `/v1`.

        Raises:
            SloBenchError: the address is malformed or contains a password or key.
        """
        text, socket = _without_socket(url)
        problem = f"{_without_password(url)!r} should look like http://127.0.0.1:8000"
        try:
            parts = urlsplit(text)
            port = parts.port
            (parts.hostname or "").encode("idna")
        except ValueError as error:
            raise SloBenchError(f"{problem}: {error}") from None
        if parts.username or parts.password:
            raise SloBenchError(
                f"{problem}: leave the credentials out; --api-key-env names a variable with a key, "
                "and --header 'authorization=Basic $VARIABLE' sends others"
            )
        if secret := _SECRET.search(parts.query):
            raise SloBenchError(
                f"{parts.scheme}://{parts.hostname}: run folders keep addresses, and "
                f"{secret[1]} in this one looks like a secret: --header '{secret[1]}=$VARIABLE' "
                "sends one that is kept nowhere"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SloBenchError(problem)
        if parts.fragment:
            raise SloBenchError(f"{problem}: without a fragment (#)")
        if re.search(r"[\s\x00-\x1f\x7f]", text):
            raise SloBenchError(f"{problem}: without spaces")
        tls = parts.scheme == "https"
        prefix, version, api_path = _split_path(parts.path)
        return cls(
            parts.hostname,
            port or (443 if tls else 80),
            tls,
            prefix,
            version,
            parts.query,
            api_path,
            socket,
        )

    @property
    def authority(self) -> str:
        """Host and port as in the header `host`."""
        host = f"[{self.host.partition('%')[0]}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Return the URL of the server in the form that `parse` accepts."""
        version = "" if self.version == "/v1" else self.version
        path = f"{self.prefix}{version}{'?' if self.query else ''}{self.query}"
        if self.socket:
            return f"unix:{self.socket}{':' if path else ''}{path}"
        return f"{'https' if self.tls else 'http'}://{self.authority}{path}"

    def target(self, api_path: str) -> str:
        """Return the target of a request to an API, whose path is `/chat/completions`, say."""
        return self._target(f"{self.prefix}{self.version}{api_path}")

    def page(self, path: str) -> str:
        """Return the target of a request to a page of the server: `/metrics`, say."""
        return self._target(f"{self.prefix}{path}")

    def _target(self, path: str) -> str:
        if not self.query:
            return path
        return f"{path}{'&' if '?' in path else '?'}{self.query}"

    def tls_context(self) -> ssl.SSLContext | None:
        """Return what checks the server's certificate; None without TLS.

        Raises:
            SloBenchError: the file of authorities cannot be read.
        """
        if not self.tls:
            return None
        import ssl  # for a simulation, a hundredth of a second of start-up

        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
        except OSError as error:  # SSLError is one
            files = f"--ca-file {self.ca_file}" if self.ca_file else _NAMED_FILES
            raise SloBenchError(f"{files} cannot be read: {error.strerror or error}") from None
        if self.ca_file:  # an authority below the root, or the server's own certificate
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def is_address(host: str) -> bool:
    """Return True for the number of an address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == _LOCAL


def _without_socket(url: str) -> tuple[str, str]:
    """Return an address over HTTP, and the path of its Unix socket or nothing.

    Sockets are written as nginx does (`unix:PATH:/v1`), or with the path encoded in place of the
    host (`http+unix://%2Frun%2Fserver.sock/v1`).
    """
    if url.startswith("http+unix://"):
        host, slash, path = url.removeprefix("http+unix://").partition("/")
        return f"http://{_LOCAL}{slash}{path}", unquote(host)
    if url.startswith("unix:"):
        rest = "/" + url.removeprefix("unix:").lstrip("/")
        socket, _, path = rest.partition(":")
        return f"http://{_LOCAL}{path}", socket
    return url if "://" in url else f"http://{url}", ""


def _split_path(path: str) -> tuple[str, str, str]:
    """Return prefix, version and the path of an API of an address's path."""
    base, api_path = path.rstrip("/"), ""
    for name in _API_PATHS:
        if base.endswith(f"/{name}"):
            base, api_path = base.removesuffix(f"/{name}").rstrip("/"), f"/{name}"
            break
    segments = base.split("/")
    version_at = next((k for k, name in enumerate(segments) if _VERSION.fullmatch(name)), None)
    if version_at is not None:
        return "/".join(segments[:version_at]), "/" + "/".join(segments[version_at:]), api_path
    is_whole = api_path or "openai" in segments
    return base, "" if is_whole else "/v1", api_path


def _without_password(url: str) -> str:
    before, separator, after = url.rpartition("@")
    return f"{before.partition('://')[0]}://…@{after}" if separator else after
