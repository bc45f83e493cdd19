"""The mock in a thread of this process, in a process of its own, or for as long as it is let."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import ssl
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ....workloads.child_process import ChildProcess
from ....workloads.errors import SloBenchError
from .config import MockConfig
from .protocol import MockProtocol
from .service import Service, Truth

_START_S = 20.0


@dataclass(frozen=True)
class Served:
    """A mock that is up. `stop` ends it as if it had crashed."""

    url: str
    stop: Callable[[], None]

    def truths(self) -> list[Truth]:
        """What really happened to every request so far, in order of arrival."""
        with urllib.request.urlopen(f"{self.url}/truth") as answer:
            return [Truth(**one) for one in json.load(answer)]


async def serve(
    config: MockConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    ready: Callable[[str, Callable[[], None]], None],
) -> None:
    """Serve until stopped; `ready` is told the address and how to stop."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    service = Service(config, loop)
    connections: set[MockProtocol] = set()

    class Connected(MockProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connections.add(self)
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.discard(self)
            super().connection_lost(exc)

    server = await loop.create_server(
        lambda: Connected(service, over.set), host, port, ssl=tls, backlog=4096
    )
    found = server.sockets[0].getsockname()[1]
    scheme = "http" if tls is None else "https"
    name = "localhost" if tls is not None else host

    def stop() -> None:
        loop.call_soon_threadsafe(over.set)

    ready(f"{scheme}://{name}:{found}", stop)
    await over.wait()
    server.close()
    for connection in list(connections):
        connection.abort()
    await asyncio.sleep(0)


def run(main: Any) -> None:
    """Run a coroutine on the fastest loop there is."""
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        import uvloop

        uvloop.run(main)


@contextlib.contextmanager
def serving(
    config: MockConfig | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[Served]:
    """A mock in a thread of this process, until the block is left."""
    up: list[Served] = []
    is_up = threading.Event()

    def ready(url: str, stop: Callable[[], None]) -> None:
        up.append(Served(url, stop))
        is_up.set()

    thread = threading.Thread(
        target=run, args=(serve(config or MockConfig(), tls=tls, ready=ready),), daemon=True
    )
    thread.start()
    if not is_up.wait(_START_S):
        raise SloBenchError(f"the mock server did not start within {_START_S:g} s")
    try:
        yield up[0]
    finally:
        # It may be gone already, with its loop.
        with contextlib.suppress(RuntimeError):
            up[0].stop()
        thread.join(_START_S)


@contextlib.contextmanager
def serving_apart(config: MockConfig | None = None) -> Iterator[Served]:
    """A mock in a process of its own, until the block is left."""
    with ChildProcess(__package__, "--child") as child:
        child.send(dataclasses.asdict(config or MockConfig()))
        url = child.receive()
        if url is None:
            raise SloBenchError("the mock server did not start; its error stands above")
        yield Served(url, child.process.kill)


def serve_until_interrupted(
    config: MockConfig, host: str, port: int, say: Callable[[str], object]
) -> None:
    """Serve in this process; `say` is told the address."""

    def ready(url: str, stop: Callable[[], None]) -> None:
        say(url)

    gc.disable()  # a collection would be a late token
    run(serve(config, host=host, port=port, ready=ready))
