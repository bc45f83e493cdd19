"""Models of which some stand on a device and the others wait: servers woken up, or started."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from ....workloads.errors import SloBenchError
from ...core.multi_model_policy import Gpus, SharingPolicy
from ...load_generator.http.endpoint import Endpoint
from ...policies.systems import several_models
from ...policies.systems import system as system_by_name
from .environments import environment
from .gpus import visible_gpus
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
        SloBenchError: there is no such system, or it is simulated alone.
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
        if name in (sharing.in_places or ()):
            raise SloBenchError(
                f"{name} decides nothing here: of the device only the number of models is known "
                "that it holds (--max-active-models)"
            )
    policy: SharingPolicy = sharing.with_parameters(**parameters)
    return policy


def served_names(models: Sequence[str]) -> list[str]:
    """Names of the models for clients: the last part of each path."""
    return [model.rstrip("/").rpartition("/")[2] for model in models]


class ServerLifecycle:
    """Implements `gateway.served_gpus.ModelLifecycle` with servers that are started here.

    With a `sleeper` an evicted server sleeps as its kind does, and is woken up for the next request
    to its model on these GPUs. Otherwise it is stopped, and started again. `gpu_names`: the UUIDs
    of the GPUs by number; empty: a server sees all of the machine.
    """

    def __init__(
        self,
        serves: Mapping[str, Serve],
        log: Path,
        *,
        sleeper: ServerKind | None = None,
        gpu_names: Sequence[str] = (),
        block_size: int = 16,
        say: Say = lambda line: None,
    ) -> None:
        sleeps = sleeper is not None
        self._serves = {name: replace(serve, sleeps=sleeps) for name, serve in serves.items()}
        self._log = log
        self._sleeper = sleeper
        self._gpu_names = gpu_names
        self._block_size = block_size
        self._say = say
        self._up: dict[tuple[str, Gpus], ServerProcess] = {}
        self._stacks: dict[tuple[str, Gpus], contextlib.ExitStack] = {}
        self._lock = threading.Lock()
        self._over = False

    @property
    def servers(self) -> list[ServerProcess]:
        """Running servers, awake or asleep."""
        return list(self._up.values())

    def activate(self, model: str, gpus: Gpus, kv_tokens: int | None) -> Endpoint:
        """Wake up or start the server of a model; returns its address."""
        place = model, gpus
        server = self._up.get(place)
        if self._sleeper and server is not None and server.running:
            _post(server, self._sleeper.wake_path)
            return server.endpoint
        self._stop(place)
        serve = replace(
            self._serves[model],
            own_gpus=tuple(self._gpu_names[gpu] for gpu in gpus) if self._gpu_names else (),
        )
        if kv_tokens is not None:
            blocks = max(1, kv_tokens // self._block_size)
            serve = replace(serve, num_gpu_blocks=blocks, block_size=self._block_size)
        stack = contextlib.ExitStack()
        on = f".{'-'.join(map(str, gpus))}" if gpus != (0,) else ""
        log = self._log.with_stem(f"{self._log.stem}-{served_names([model])[0]}{on}")
        [server] = serve.start(stack, log, say=self._say)
        with self._lock:
            self._up[place], self._stacks[place] = server, stack
            over = self._over
        if over:  # everything was stopped while it came up
            self._stop(place)
        return server.endpoint

    def evict(self, model: str, gpus: Gpus) -> None:
        """Put the server of a model to sleep, or stop it."""
        server = self._up.get((model, gpus))
        if self._sleeper and server is not None and server.running:
            _post(server, self._sleeper.sleep_path)
        else:
            self._stop((model, gpus))

    def _stop(self, place: tuple[str, Gpus]) -> None:
        with self._lock:
            stack = self._stacks.pop(place, None)
            self._up.pop(place, None)
        if stack is not None:
            stack.close()

    def close(self) -> None:
        """Stop all servers."""
        with self._lock:
            self._over = True
        for place in list(self._stacks):
            self._stop(place)


def stage_of(
    models: Mapping[str, str],
    common: Serve,
    policy: SharingPolicy,
    log: Path,
    *,
    gpus: int = 1,
    say: Say = lambda line: None,
) -> ServerLifecycle:
    """Servers of these models, by their names for clients, none of them started; `common` holds the
    settings that they share.

    With `activation=pool` evicted servers sleep where the server can (vLLM on GPUs); with `naive`,
    and elsewhere, they are stopped.

    Raises:
        SloBenchError: one could not be started: no such server, or an option that it has not; or
            the machine has fewer GPUs.
    """
    installation = environment(common.backend)
    kind = installation.kind
    parameters = {
        parameter: getattr(policy, limit) for limit, (parameter, _) in kind.limits.items()
    }
    serves = {
        name: replace(common, model=model, system=None, parameters=parameters, served_name=name)
        for name, model in models.items()
    }
    for serve in serves.values():
        serve.check()
    gpu_names: Sequence[str] = ()
    if gpus > 1 and installation.device == "cuda":
        gpu_names = [gpu.uuid for gpu in visible_gpus()]
        if len(gpu_names) < gpus:
            raise SloBenchError(f"there are {len(gpu_names)} GPUs here, not {gpus}")
    sleeps = installation.device in kind.sleeping_devices and policy.keeps_engines
    how = "sleep and are woken up" if sleeps else "are stopped and started"
    say(f"{len(serves)} models, which {how}")
    block_size = max(16, kind.builds[installation.device].block_size_multiple)
    return ServerLifecycle(
        serves,
        log,
        sleeper=kind if sleeps else None,
        gpu_names=gpu_names,
        block_size=block_size,
        say=say,
    )


def _post(server: ServerProcess, path: str) -> None:
    """Send a POST request without a body.

    Raises:
        ServerError: it does not do it.
    """
    try:
        with server.http(_SLEEP_LIMIT_S) as client:
            client.post(path).raise_for_status()
    except httpx.HTTPError as error:
        why = str(error).partition("\n")[0]  # a link follows
        raise ServerError(f"{server.url}: {path} was not done: {why}") from error
