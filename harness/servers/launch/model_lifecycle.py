"""Models of which some stand on a device and the others wait: servers woken up, or started."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from ....workloads.errors import SloBenchError
from ...core.multi_model_policy import SharingPolicy
from ...load_generator.http.endpoint import Endpoint
from ...policies.systems import several_models
from ...policies.systems import system as system_by_name
from .environments import environment
from .serve_settings import Serve
from .server_kind import ServerKind
from .server_process import ServerError, ServerProcess

_SLEEP_LIMIT_S = 120.0

Say = Callable[[str], None]


def shared_policy(
    system: str, parameters: Mapping[str, bool | int | float | str], backend: str
) -> SharingPolicy | None:
    """The policy of a system for several models; None for other systems.

    Raises:
        SloBenchError: there is no such system, or a parameter is set that real servers do not have.
    """
    sharing = system_by_name(system).sharing
    if sharing is None:
        return None
    if not sharing.on_servers:
        able = " or ".join(several_models(on_servers=True))
        raise SloBenchError(
            f"{system} is simulated alone; of the systems for several models {able} can stand "
            f"before servers of {backend}"
        )
    for name in parameters:
        if name in sharing.bounds() and name not in sharing.on_servers:
            supported = ", ".join(sharing.on_servers)
            raise SloBenchError(
                f"{name} decides nothing before real servers: {system} has {supported} there"
            )
    policy: SharingPolicy = sharing.with_parameters(**parameters)
    return policy


def served_names(models: Sequence[str]) -> list[str]:
    """Names of the models for clients: the last part of each path."""
    return [model.rstrip("/").rpartition("/")[2] for model in models]


class ServerLifecycle:
    """Implements `gateway.models.ModelLifecycle` with servers that are started here.

    With a `sleeper` an evicted server sleeps as its kind does, and is woken up for the next request
    to its model. Otherwise it is stopped, and started again.
    """

    def __init__(
        self,
        serves: Mapping[str, Serve],
        log: Path,
        *,
        sleeper: ServerKind | None = None,
        say: Say = lambda line: None,
    ) -> None:
        sleeps = sleeper is not None
        self._serves = {name: replace(serve, sleeps=sleeps) for name, serve in serves.items()}
        self._log = log
        self._sleeper = sleeper
        self._say = say
        self._up: dict[str, ServerProcess] = {}
        self._stacks: dict[str, contextlib.ExitStack] = {}
        self._lock = threading.Lock()
        self._over = False

    @property
    def servers(self) -> list[ServerProcess]:
        """Running servers, awake or asleep."""
        return list(self._up.values())

    def activate(self, model: str) -> Endpoint:
        """Wake up or start the server of a model; returns its address."""
        server = self._up.get(model)
        if self._sleeper and server is not None and server.running:
            _post(server.url + self._sleeper.wake_path)
            return Endpoint.parse(server.url)
        self._stop(model)
        stack = contextlib.ExitStack()
        log = self._log.with_stem(f"{self._log.stem}-{model}")
        [server] = self._serves[model].start(stack, log, say=self._say)
        with self._lock:
            self._up[model], self._stacks[model] = server, stack
            over = self._over
        if over:  # everything was stopped while it came up
            self._stop(model)
        return Endpoint.parse(server.url)

    def evict(self, model: str) -> None:
        """Put the server of a model to sleep, or stop it."""
        server = self._up.get(model)
        if self._sleeper and server is not None and server.running:
            _post(server.url + self._sleeper.sleep_path)
        else:
            self._stop(model)

    def _stop(self, model: str) -> None:
        with self._lock:
            stack = self._stacks.pop(model, None)
            self._up.pop(model, None)
        if stack is not None:
            stack.close()

    def close(self) -> None:
        """Stop all servers."""
        with self._lock:
            self._over = True
        for model in list(self._stacks):
            self._stop(model)


def stage_of(
    models: Sequence[str],
    common: Serve,
    policy: SharingPolicy,
    log: Path,
    *,
    say: Say = lambda line: None,
) -> ServerLifecycle:
    """Servers of these models, none of them started; `common` holds the settings that they share.

    With `activation=pool` evicted servers sleep where the server can (vLLM on GPUs); with `naive`,
    and elsewhere, they are stopped.

    Raises:
        SloBenchError: one could not be started: no such server, or an option that it has not.
    """
    installation = environment(common.backend)
    kind = installation.kind
    parameters = {
        parameter: getattr(policy, limit) for limit, (parameter, _) in kind.limits.items()
    }
    serves = {
        name: replace(common, model=model, system=None, parameters=parameters, served_name=name)
        for name, model in zip(served_names(models), models, strict=True)
    }
    for serve in serves.values():
        serve.check()
    sleeps = installation.device in kind.sleeping_devices and policy.keeps_engines
    how = "sleep and are woken up" if sleeps else "are stopped and started"
    say(f"{len(serves)} models, which {how}")
    return ServerLifecycle(serves, log, sleeper=kind if sleeps else None, say=say)


def _post(url: str) -> None:
    """Send a POST request without a body.

    Raises:
        ServerError: it does not do it.
    """
    try:
        httpx.post(url, timeout=_SLEEP_LIMIT_S, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        why = str(error).partition("\n")[0]  # a link follows
        raise ServerError(f"{url} was not done: {why}") from error
