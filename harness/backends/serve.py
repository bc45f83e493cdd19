"""From what a user asks for to servers that answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...workloads.errors import SloBenchError
from ..core.policy import Policy, overrides
from ..systems import System
from ..systems import system as system_by_name
from .environments import environment
from .matrix import check
from .recipe import Launch
from .recipes import recipe
from .servers import READY_S, Server, free_port, serving

HOST_BLOCKS = 1024  # for swapping, where nothing is said
_OWN_OPTIONS = {
    "vllm": {
        "max_num_batched_tokens": "--max-num-batched-tokens",
        "max_num_seqs": "--max-num-seqs",
    },
    "sglang": {
        "chunked_prefill_tokens": "--chunked-prefill-size",
        "max_running_requests": "--max-running-requests",
    },
}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Serve:
    """A server with a policy inside.

    With no `system`, or the one of the server's own name, it is the server as it is, unpatched;
    knobs are then options of its own. A step log is then written by a plugin that only watches.

    Raises:
        SloBenchError: on `check`: the server is not installed, there is no such system, or it
            cannot run in this server; says why.
    """

    backend: str
    model: str
    system: str | None = None
    knobs: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    served_name: str | None = None
    kv_blocks: int | None = None
    block_tokens: int | None = None
    max_model_tokens: int | None = None
    host_blocks: int | None = None
    server_args: tuple[str, ...] = ()
    step_log: Path | None = None
    ready_s: float = READY_S

    @property
    def label(self) -> str:
        """For file names."""
        name = Path(self.system).stem if self.system else self.backend
        return re.sub(r"[^\w.-]+", "-", name)

    @property
    def patched(self) -> bool:
        """Does a policy of ours run inside?"""
        return self.system is not None and self.system != environment(self.backend).backend

    def check(self) -> None:
        """Refuse what cannot be started, before anything is."""
        found = environment(self.backend)
        name = found.backend
        multiple = recipe(name).builds[found.device].block_tokens_multiple
        if self.block_tokens is not None and self.block_tokens % multiple:
            raise SloBenchError(
                f"{name} on {found.device} needs block_tokens that are a multiple of {multiple}, "
                f"but they are {self.block_tokens}"
            )
        if self.patched:
            check(self._found(), name)
        else:
            self._own_options(name)
        for what in ("kv_blocks", "block_tokens", "max_model_tokens"):
            value = getattr(self, what)
            if value is not None and value < 1:
                raise SloBenchError(f"{what} must be at least 1 but is {value}")

    def start(
        self,
        stack: ExitStack,
        log: Path,
        *,
        instances: int = 1,
        port: int | None = None,
        say: Say = lambda line: None,
    ) -> list[Server]:
        """Start one server after the other; closing `stack` stops them.

        With several, `-1`, `-2`, … is added to the name of the log, and 1, 2, … to the port.

        Raises:
            SloBenchError: what `check` refuses, or a server that does not come up.
        """
        self.check()
        servers = []
        for number in range(instances):
            own_log = log
            step_log = self.step_log
            if instances > 1:
                own_log = log.with_stem(f"{log.stem}-{number + 1}")
                step_log = step_log and step_log.with_stem(f"{step_log.stem}-{number + 1}")
            launch = self._launch(free_port() if port is None else port + number, step_log)
            say(f"starting {self.label} on {self.backend}: {launch.model} at port {launch.port}")
            found = environment(self.backend)
            server = serving(
                recipe(found.backend), found, launch, log=own_log, ready_s=self.ready_s, say=say
            )
            servers.append(stack.enter_context(server))
        return servers

    def _found(self) -> System:
        assert self.system is not None
        return system_by_name(self.system).with_knobs(**self.knobs)

    def _own_options(self, backend: str) -> tuple[str, ...]:
        """The knobs of the unpatched server, as its own options."""
        if self.system is not None:
            self._found()  # checks names and bounds
        options = _OWN_OPTIONS.get(backend, {})
        strangers = set(self.knobs) - set(options)
        if strangers:
            raise SloBenchError(f"{min(strangers)} is no option of an unpatched {backend}")
        return tuple(word for k, v in self.knobs.items() for word in (options[k], str(v)))

    def _launch(self, port: int, step_log: Path | None) -> Launch:
        launch = Launch(
            model=self.model,
            port=port,
            served_name=self.served_name,
            kv_blocks=self.kv_blocks,
            block_tokens=self.block_tokens,
            max_model_tokens=self.max_model_tokens,
            server_args=self.server_args,
        )
        if not self.patched:
            options = self._own_options(environment(self.backend).backend)
            args = (*options, *self.server_args)
            return replace(launch, server_args=args, step_log=step_log)
        policy = self._found().policy
        host_blocks = None
        if isinstance(policy, Policy) and overrides(policy, "preempt_by"):
            host_blocks = HOST_BLOCKS if self.host_blocks is None else self.host_blocks
        return replace(
            launch,
            system=self.system,
            knobs=self.knobs,
            step_log=step_log,
            host_blocks=host_blocks,
        )
