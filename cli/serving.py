"""What `slo-bench serve` needs beside its options."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from ..harness.backends.servers import Server
from ..workloads.errors import SloBenchError

if TYPE_CHECKING:
    from ..harness.backends.serve import Serve
    from ..harness.clusters.prism import Prism

_LOOK_EVERY_S = 0.5


def knobs_of(options: Sequence[str]) -> dict[str, bool | int | float | str]:
    """NAME=VALUE options.

    Raises:
        SloBenchError: one is no such pair.
    """
    found: dict[str, bool | int | float | str] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name or not text:
            raise SloBenchError(f"cannot read --knob {option!r}; write NAME=VALUE")
        found[name] = _value(text)
    return found


def _value(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def stop_on_signals(*numbers: int) -> None:
    """Leave by an exception, so that servers are stopped on the way out."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in numbers:
        signal.signal(number, leave)


def wait_while_served(groups: Sequence[Sequence[Server]], say: Callable[[str], None]) -> None:
    """Until every server of a group has ended by itself; of others it is only said.

    Raises:
        ServerError: it has; with the end of the last one's log.
    """
    ended: set[str] = set()
    while True:
        for group in groups:
            for server in group:
                if server.running or server.url in ended:
                    continue
                if not any(other.running for other in group):
                    server.check()
                ended.add(server.url)
                say(f"{server.name} at {server.url} has ended; its log is {server.log}")
        time.sleep(_LOOK_EVERY_S)


def only_one(models: Sequence[str], system: str) -> str | None:
    """The model of a system that serves one; None: none is named.

    Raises:
        SloBenchError: there are several.
    """
    if len(models) > 1:
        raise SloBenchError(f"{system} serves one model; several go with prism")
    return models[0] if models else None


def serve_models(
    models: Sequence[str], common: Serve, policy: Prism, log: Path, awake: int | None, port: int
) -> None:
    """Several models behind one queue, until Ctrl-C. They are started when they are asked for.

    Raises:
        SloBenchError: they cannot be served so.
    """
    from ..harness.backends.standing import served_names, stage_of
    from ..harness.gateway import serving as gateway
    from ..harness.gateway.models import SharedPlan

    def say(line: str) -> None:
        typer.echo(line, err=True)

    with contextlib.ExitStack() as stack:
        stage = stage_of(models, common, policy, log, say=say)
        stack.callback(stage.close)
        plan = SharedPlan(served_names(models), stage, policy, awake)
        typer.echo(stack.enter_context(gateway(plan, port=port, say=say)))
        say(f"logs: {log.parent.absolute()}; Ctrl-C stops")
        threading.Event().wait()


def serve_paged(
    system: str,
    model: str | None,
    knobs: Mapping[str, bool | int | float | str],
    **options: Any,
) -> None:
    """Our own engine, in this process, until Ctrl-C; `options` as `serving_model` has them.

    Raises:
        SloBenchError: the model or the system cannot be served so.
    """
    from ..harness.engines.paged.errors import need_torch

    need_torch()
    from ..harness.backends.paged import TINY
    from ..harness.backends.paged_http import serving_model

    if model is None:
        typer.echo(f"{TINY}: a tiny Llama with random weights, made here", err=True)
    with serving_model(system, knobs, model or TINY, **options) as url:
        typer.echo(url)
        typer.echo("Ctrl-C stops", err=True)
        threading.Event().wait()
