"""The mock in a thread of this process, in a process of its own, or for as long as it is let."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import ssl
import urllib.request
from collections.abc import Callable, Iterator

from ....workloads.child_process import ChildProcess
from ....workloads.errors import SloBenchError
from ...load_generator.machine import run_event_loop
from ..http.http_server import Ready, Served, in_thread, serve
from .mock_answers import MockHandler
from .mock_config import MockConfig
from .service import Service, Truth


class Mock(Served):
    """A running mock server. `stop` ends it as if it had crashed."""

    def truths(self) -> list[Truth]:
        """True times of every request so far, in order of arrival.

        Raises:
            SloBenchError: it cannot be reached.
        """
        url = f"{self.url}/truth"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url) as answer:
                return [Truth(**record) for record in json.load(answer)]
        except OSError as error:
            raise SloBenchError(f"{url} cannot be reached: {error}") from error


async def serve_mock(
    config: MockConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    ready: Ready,
) -> None:
    """Serve until stopped; `ready` receives the address and the function that stops the server."""
    handler = MockHandler(Service(config, asyncio.get_running_loop()), lambda: None)

    def up(url: str, stop: Callable[[], None]) -> None:
        handler.die = stop
        ready(url, stop)

    await serve(handler.answer, host=host, port=port, tls=tls, ready=up)


@contextlib.contextmanager
def serving(config: MockConfig | None = None, tls: ssl.SSLContext | None = None) -> Iterator[Mock]:
    """A mock in a thread of this process, until the block is left."""
    config = config or MockConfig()
    with in_thread("mock server", lambda ready: serve_mock(config, tls=tls, ready=ready)) as up:
        yield Mock(up.url, up.stop)


@contextlib.contextmanager
def serving_apart(config: MockConfig | None = None) -> Iterator[Mock]:
    """A mock in a process of its own, until the block is left."""
    with ChildProcess(__package__, "--child") as child:
        child.send(dataclasses.asdict(config or MockConfig()))
        url = child.receive()
        if url is None:
            raise SloBenchError("the mock server did not start; its error is printed above")
        yield Mock(url, child.process.kill)


def serve_until_interrupted(
    config: MockConfig, host: str, port: int, say: Callable[[str], object]
) -> None:
    """Serve in this process; `say` receives the address."""

    def ready(url: str, stop: Callable[[], None]) -> None:
        say(url)

    gc.disable()  # a collection would be a late token
    run_event_loop(serve_mock(config, host=host, port=port, ready=ready))
