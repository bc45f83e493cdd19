"""The ways in which `slo-bench serve` serves, each until it is stopped; and how it stops."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from ...harness.servers.launch.server_process import ServerProcess
from ...workloads.call_parser import value_of
from ...workloads.errors import SloBenchError
from ...workloads.extras import need

if TYPE_CHECKING:
    from ...harness.core.multi_model_policy import SharingPolicy
    from ...harness.policies.systems import System
    from ...harness.servers.gateway.running_gateway import GatewayTarget
    from ...harness.servers.launch.serve_settings import Serve

_LOOK_EVERY_S = 0.5


def say(line: str) -> None:
    """Print a line to standard error."""
    typer.echo(line, err=True)


def parameters_of(options: Sequence[str], system: str = "") -> dict[str, bool | int | float | str]:
    """Parse [SYSTEM.]NAME=VALUE options of one system.

    Raises:
        SloBenchError: one is no such pair.
    """
    parameters: dict[str, bool | int | float | str] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name or not text:
            raise SloBenchError(f"cannot read --set {option!r}; write NAME=VALUE")
        parameters[name.removeprefix(f"{system}.")] = value_of(text)
    return parameters


def stop_on_signals(*numbers: int) -> None:
    """Raise an exception, so that servers are stopped on exit; also at SIGINT where it is ignored,
    as in the background of a script, whose `kill -INT` would wait for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        numbers = (*numbers, signal.SIGINT)

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in numbers:
        signal.signal(number, leave)


def wait_while_served(
    groups: Sequence[Sequence[ServerProcess]],
    look: Callable[[], None] = lambda: None,
) -> None:
    """Wait until every server of a group has ended; print a line for each other server that ends.

    `look` is called again and again meanwhile.

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
        look()
        time.sleep(_LOOK_EVERY_S)


def only_one(models: Sequence[str], system: str) -> str | None:
    """Return the model of a system that serves one model; None if no model is given.

    Raises:
        SloBenchError: there are several.
    """
    if len(models) > 1:
        raise SloBenchError(f"{system} serves one model; several go with prism")
    return models[0] if models else None


def check_hears(server_launch: Serve, *, inside: bool) -> None:
    """Reject a length predictor that no policy receives; warn if the policy ignores lengths.

    Raises:
        SloBenchError: no policy decides `inside` the servers.
    """
    if not (inside and server_launch.patched):
        raise SloBenchError(
            f"{server_launch.system} has {server_launch.backend} as it is, and nothing in that "
            "looks at predicted lengths: leave --length-predictor out, or serve a system that "
            "decides inside"
        )
    say_whether_it_looks(server_launch.resolved_system())


def say_whether_it_looks(system: System) -> None:
    """Warn about a policy that ignores the predicted lengths it receives."""
    if not system.policy.uses_predicted_lengths:
        say(
            f"{system.name} does not use predicted lengths: each prediction takes time and "
            "changes nothing"
        )


def before(
    stack: contextlib.ExitStack, predictor: str | None, field: str | None
) -> Callable[[GatewayTarget], GatewayTarget]:
    """Return a function that puts a length predictor before servers; the identity without a
    predictor.

    Raises:
        SloBenchError: it cannot be had.
    """
    if predictor is None or field is None:
        return lambda plan: plan
    from ...harness.servers.gateway.foretold_lengths import LengthPredictionPlan, foretells

    length_predictor = foretells(predictor, say)
    stack.callback(length_predictor.close)
    return lambda plan: LengthPredictionPlan(plan, field, length_predictor)


def serve_models(
    models: Sequence[str],
    common: Serve,
    policy: SharingPolicy,
    log: Path,
    max_active_models: int | None,
    port: int,
    access: Mapping[str, Any],
) -> None:
    """Serve several models behind one queue until Ctrl-C; a model is started on its first request.

    Raises:
        SloBenchError: they cannot be served so.
    """
    from ...harness.servers.gateway import serving as gateway
    from ...harness.servers.gateway.served_models import plan_in_places
    from ...harness.servers.launch.model_lifecycle import served_names, stage_of

    with contextlib.ExitStack() as stack:
        names = served_names(models)
        stage = stage_of(dict(zip(names, models, strict=True)), common, policy, log, say=say)
        stack.callback(stage.close)
        plan = plan_in_places(names, stage, policy, max_active_models)
        typer.echo(stack.enter_context(gateway(plan, port=port, say=say, **access)))
        say(f"logs: {log.parent.absolute()}; Ctrl-C stops")
        threading.Event().wait()


def serve_torch(
    system: str,
    model: str | None,
    parameters: Mapping[str, bool | int | float | str],
    *,
    port: int,
    length_predictor: str | None,
    guarded: bool,
    access: Mapping[str, Any],
    **options: Any,
) -> None:
    """Serve with the built-in torch engine in this process until Ctrl-C; `options` as in
    `serving_model`.

    Raises:
        SloBenchError: the model or the system cannot be served so.
    """
    need("torch", "--backend torch")
    from ...harness.load_generator.http.endpoint import Endpoint
    from ...harness.policies.systems import system as system_by_name
    from ...harness.servers.gateway import GatewayPlan
    from ...harness.servers.gateway import serving as gateway
    from ...harness.servers.launch.random_model import TINY
    from ...harness.servers.torch.torch_kind import TORCH_ENGINE
    from ...harness.servers.torch.torch_server import serving_model

    if model is None:
        say(f"{TINY}: a tiny Llama with random weights, made here")
    with contextlib.ExitStack() as stack:
        alone = length_predictor is None and not guarded
        options |= {"port": port if alone else 0}
        if access["api_key"] is not None:  # others on this machine do not reach it past the gateway
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slo-bench-"))
            options["unix_socket"] = f"{folder}/server.sock"
        served = serving_model(system, parameters, model or TINY, say=say, **options)
        if alone:
            url = stack.enter_context(served)
        else:
            if length_predictor is not None:
                say_whether_it_looks(system_by_name(system))
            add_predictor = before(stack, length_predictor, TORCH_ENGINE.values_field)
            plan = GatewayPlan([Endpoint.parse(stack.enter_context(served))])
            url = stack.enter_context(gateway(add_predictor(plan), port=port, say=say, **access))
        typer.echo(url)
        say("Ctrl-C stops")
        threading.Event().wait()
