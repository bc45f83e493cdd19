"""Servers of several models with their gateway, in a process of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ...core.multi_model_policy import ServedModel, SharingPolicy
from ..gateway.running_gateway import serving, serving_apart
from ..gateway.served_gpus import MeasuredPrefill, PlainMemory
from ..gateway.served_models import SharedPlan
from ..plugin.contract import PolicySpec
from .model_lifecycle import Say, ServerLifecycle, stage_of
from .serve_settings import Serve
from .server_process import ServerError

_LOOK_EVERY_S = 0.5
_STOP_S = 120.0  # its servers included
_DECODE_SEQS = 8  # as `ServedModel.work_s` has it
_SERVE = (
    *("backend", "model", "max_model_tokens", "server_args", "startup_timeout_s", "cores"),
    "kvcached",
)


@dataclass(frozen=True)
class ModelServers:
    """Models by name, each with the folder that it is in, on `gpus` GPUs of `pages` pages.

    `common` has the settings of all servers; the gateway's messages go to `log`, and what a server
    prints to a file beside it.
    """

    models: Sequence[ServedModel]
    folders: Mapping[str, str]
    policy: SharingPolicy
    common: Serve
    gpus: int
    pages: int
    log: Path

    def check(self) -> None:
        """Raise SloBenchError if the servers cannot be started."""
        self._stage(lambda line: None)

    def to_plain(self) -> dict[str, Any]:
        """The plan as JSON values, for another process."""
        return {
            "models": [_plain(model) for model in self.models],
            "folders": dict(self.folders),
            "policy": dataclasses.asdict(PolicySpec.of("sharing", self.policy)),
            "common": {name: getattr(self.common, name) for name in _SERVE},
            "gpus": self.gpus,
            "pages": self.pages,
            "log": str(self.log),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> ModelServers:
        """The plan from the values of `to_plain`."""
        common: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in plain["common"].items()
        }
        policy = PolicySpec(**plain["policy"]).build()
        assert isinstance(policy, SharingPolicy)
        return cls(
            [_model(fields) for fields in plain["models"]],
            plain["folders"],
            policy,
            Serve(**common),
            plain["gpus"],
            plain["pages"],
            Path(plain["log"]),
        )

    def _stage(self, say: Say) -> ServerLifecycle:
        return stage_of(self.folders, self.common, self.policy, self.log, gpus=self.gpus, say=say)

    @contextlib.contextmanager
    def served(self) -> Iterator[str]:
        """Serve in this process; yields the address, which answers before a model has come up."""
        with self.log.open("a", encoding="utf-8") as file, contextlib.ExitStack() as stack:

            def say(line: str) -> None:
                file.write(f"{line}\n")
                file.flush()

            stage = self._stage(say)
            stack.callback(stage.close)
            plan = SharedPlan(self.models, stage, self.policy, self.pages, self.gpus, begins=True)
            yield stack.enter_context(serving(plan, say=say))

    @contextlib.contextmanager
    def started(self) -> Iterator[str]:
        """Serve in another process; yields the address when the models that stand from the start
        have come up.

        Raises:
            ServerError: one does not come up.
        """
        with serving_apart(self, stop_s=_STOP_S) as url:
            self._wait(url)
            yield url

    def _wait(self, url: str) -> None:
        end_s = time.monotonic() + self.common.startup_timeout_s
        while True:
            answer = httpx.get(f"{url}/health", timeout=10, trust_env=False)
            if answer.status_code == 200:
                return
            if answer.status_code == 500 or time.monotonic() > end_s:
                why = answer.json()["error"]["message"]
                raise ServerError(f"a model does not come up: {why}; the log is {self.log}")
            time.sleep(_LOOK_EVERY_S)


def _plain(model: ServedModel) -> dict[str, Any]:
    """A model as JSON values; of its step times what a gateway needs before it has measured."""
    step_s, place = model.step_time.step_s, model.placement
    kv_tokens = int(model.prompt_tokens + model.output_tokens / 2)
    names = [field.name for field in dataclasses.fields(PlainMemory)]
    return {
        "memory": {name: getattr(place, name) for name in names},
        "s_per_token": model.prefill_s(1, 2048),
        "decode_s": step_s(_DECODE_SEQS, _DECODE_SEQS * kv_tokens, ()),
        "fields": {
            name: getattr(model, name)
            for name in ("index", "name", "rate_rps", "prompt_tokens", "output_tokens", "slo_s")
        },
    }


def _model(plain: Mapping[str, Any]) -> ServedModel:
    return ServedModel(
        placement=PlainMemory(**plain["memory"]),
        step_time=MeasuredPrefill(plain["s_per_token"], plain["decode_s"]),
        **plain["fields"],
    )
