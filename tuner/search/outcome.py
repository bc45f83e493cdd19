"""Results of a tuning run: `tune.json`, and an experiment file and commands for each winner."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...harness.experiments.backends.deployment_manifests import write_deployment
from ...harness.experiments.experiment import Experiment
from ...harness.policies.systems import system
from ...harness.servers.launch.backend_names import SIMULATED
from ...harness.servers.server_kinds import LAUNCHED, SERVERS, server_kind
from ...workloads.checksums import sealed, unsealed
from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.parsing import finite, read_json_object
from ...workloads.whole_file import write_whole
from .confirm import MOST_WINNERS, Ablation, Confirmed, Confirming, ablated, confirm
from .evaluate_configuration import ConfigurationEvaluator
from .settings import TuneSettings
from .space import SETTINGS, Space
from .study_results import StudyResults, TrialRow
from .trial_leases import one_at_a_time

FILE = "tune.json"
ASKED_FILE = "tune.toml"


@dataclass(frozen=True)
class Winner:
    """One of the best trials, its experiment as a file, and the commands that run and serve it."""

    row: TrialRow
    file: Path
    commands: tuple[str, ...]


@dataclass(frozen=True)
class TuningOutcome:
    """Results of a tuning run: all trials, the winners, and their confirmation."""

    folder: Path
    experiment: Experiment
    settings: TuneSettings
    study: StudyResults
    winners: tuple[Winner, ...]
    confirmed: tuple[Confirmed, ...]
    ablations: tuple[Ablation, ...] = ()

    def plain(self) -> dict[str, Any]:
        """The results as plain values for JSON."""
        study = self.study
        return {
            "system": study.space.system,
            "backend": self.experiment.backend,
            "workload": self.experiment.workload[0],
            "model": self.experiment.model[0],
            "gpu": self.experiment.gpu[0],
            "objectives": list(study.aim.names),
            "target": study.aim.target,
            "rate_rps": study.aim.load and study.aim.load.rate_rps,
            "load": study.aim.load and study.aim.load.text,
            "sampler": self.settings.sampler,
            "space": {dimension.name: str(dimension) for dimension in study.space.dimensions},
            "requests": study.requests,
            "trials": [vars(row) for row in study.trials],
            "best": [row.number for row in study.best],
            "importances": study.importances,
            "winners": [
                {
                    "trial": winner.row.number,
                    "values": winner.row.values,
                    "configuration": dict(winner.row.configuration),
                    "file": winner.file.name,
                    "commands": list(winner.commands),
                }
                for winner in self.winners
            ],
            "ablations": [vars(row) for row in self.ablations],
            "confirmed": [vars(row) for row in self.confirmed],
        }


def concluded(
    tuned: ConfigurationEvaluator,
    settings: TuneSettings,
    study: StudyResults,
    progress: Confirming = lambda done, total: None,
) -> TuningOutcome:
    """Confirm the winners and write all result files.

    Raises:
        SloBenchError: no configuration could be evaluated; gives the last one's reason.
    """
    experiment, folder = tuned.experiment, tuned.folder
    if not study.best:
        reasons = [row.reason for row in study.trials if row.reason]
        last = reasons[-1] if reasons else "no trial has ended"
        raise SloBenchError(f"none of {len(study.trials)} configurations can be used: {last}")
    with one_at_a_time(folder):
        winners, ablations = list[Winner](), list[Ablation]()
        for place, best in enumerate(study.best[:MOST_WINNERS]):
            row = best
            if settings.confirm and tuned.simulated:
                row, rows = ablated(tuned, best, folder / "ablation")
                ablations += rows
            name = "winner.toml" if len(study.best) == 1 else f"winner-{place + 1}.toml"
            applied = study.space.applied(experiment, row.configuration)
            write_whole(folder / name, [applied.to_toml().encode()])
            commands = launch_commands(applied, study.space, folder / name)
            deployment = folder / name.replace("winner", "deployment").removesuffix(".toml")
            if write_deployment(deployment, applied, f"{name} of slo-bench tune"):
                commands = (*commands, shlex.quote(str(deployment / "command.sh")))
            winners.append(Winner(row, folder / name, commands))
        confirmed: list[Confirmed] = []
        evaluators = [tuned] if settings.confirm else []
        if settings.confirm_backend is not None:
            real = on_backend(experiment, settings.confirm_backend)
            evaluators.append(replace(tuned, experiment=real, pool=None))
        for evaluator in evaluators:
            confirmed += confirm(
                evaluator,
                [winner.row for winner in winners],
                settings.confirm_workloads,
                folder / "confirm" / evaluator.experiment.backend,
                progress,
            )
        outcome = TuningOutcome(
            folder, experiment, settings, study, tuple(winners), tuple(confirmed), tuple(ablations)
        )
        plain = sealed(_finite(outcome.plain()), folder / ASKED_FILE)
        text = json.dumps(plain, allow_nan=False, ensure_ascii=False, indent=1)
        write_whole(folder / FILE, [text.encode(), b"\n"])
    return outcome


def on_backend(experiment: Experiment, backend: str) -> Experiment:
    """The experiment with another backend."""
    return Experiment(**{**experiment.model_dump(exclude_unset=True), "backend": backend})


def launch_commands(applied: Experiment, space: Space, path: Path) -> tuple[str, ...]:
    """Commands that run the winner again, and that serve it if a real server can."""
    commands = [f"slo-bench run {shlex.quote(str(path))}"]
    stock = system(space.system)
    parameters = {
        name: values[0]
        for name, values in applied.parameters.get(space.system, {}).items()
        if values[0] != stock.parameters()[name]
    }
    backend: str = applied.backend
    if backend == SIMULATED:
        backend = _server_for(space.system) or ""
    if not backend:
        return tuple(commands)
    words = ["slo-bench", "serve", space.system, "--backend", backend, "--model", applied.model[0]]
    if backend == space.system:  # the server as it is, with options of its own
        parameters = {
            name: value
            for name, value in parameters.items()
            if name in server_kind(backend).own_options
        }
    for name, value in parameters.items():
        words += ["--set", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    for name in ("instances", "router", "num_gpu_blocks", "block_size", "num_cpu_blocks"):
        value = getattr(applied, name)
        if value not in (SETTINGS[name].default, (None,)):
            words += [SETTINGS[name].option, str(value[0])]
    args = list(applied.server.args)
    if backend in LAUNCHED:
        try:
            args += server_kind(backend).parallel_args(
                applied.tp[0] or 1, applied.pp[0], applied.ep[0], applied.dp[0]
            )
        except SloBenchError:  # no server shares experts out like that
            return tuple(commands)
    words += [f"--server-arg={arg}" for arg in args]
    return (*commands, shlex.join(words))


def _server_for(name: str) -> str | None:
    """A real server that can run the system; None for static batches, which none streams."""
    from ...harness.core.policy import StaticPolicy
    from ...harness.servers.launch.compatibility import refusal

    if isinstance(system(name).policy, StaticPolicy):
        return None
    backends = (name,) if name in SERVERS else SERVERS
    return next((backend for backend in backends if refusal(system(name), backend) is None), None)


def _finite(value: Any) -> Any:
    """A value for JSON: None in place of NaN and infinity."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {name: _finite(member) for name, member in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(member) for member in value]
    return value


def read_tuning(folder: Path) -> dict[str, Any] | None:
    """The `tune.json` of a folder; None if there is none.

    Raises:
        FileFormatError: the file is damaged or no result of a tuning run.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    kept = read_json_object(path)
    if "trials" not in kept:
        raise FileFormatError(path, None, "is not what a tuning run writes")
    return unsealed(path, kept, folder / ASKED_FILE)
