"""`slo-bench observe`: what a running server carries, from its metrics alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import typer

from ...harness.servers.server_kinds import LAUNCHED
from ...workloads.errors import SloBenchError
from ...workloads.parsing import finite, plain_fields
from ..interrupts import interruptible
from ..options.from_schema import Given, offer, with_options
from ..options.parameters import OUT, argument, flag, option
from ..output.progress import changing_line

if TYPE_CHECKING:
    from ...harness.experiments.experiment import Experiment
    from ...harness.load_generator.metrics_source import MetricsSource
    from ...harness.load_generator.observed import ObservedServer
    from ...harness.load_generator.server_metrics import MetricsSnapshot
    from ...predictors.model_spec import ModelSpec
    from ...tuner.planning.headroom import Change, Headroom

EXAMPLES = (
    "slo-bench observe http://127.0.0.1:8000 --model models/tiny --duration 120",
    "slo-bench observe http://127.0.0.1:8000 --model llama-3.1-8b --slo ttft=1,tpot=0.05",
    "slo-bench observe http://prometheus:9090 --only instance=10.0.0.1:8000 --duration 3600",
)
_LIVE_S, _LIVE_EVERY_S = 300.0, 2.0
_PAST_S, _PAST_EVERY_S = 3600.0, 15.0
_SIMULATED = 2000  # requests of a simulation
_LEAST_READINGS = 30
_FEW_READINGS = 3  # that may fail at the beginning


@with_options
def observe(
    url: str = argument(
        "URL", "Address of vLLM or SGLang, or of a Prometheus server that reads it."
    ),
    experiment_options: Given = offer(
        only=("systems", "set", "model", "slo", "slo_scale", "seed", "like"),
        changed={
            "systems": {
                "repeated": False,
                "help": "System that the server runs. "
                f"Default: {' or '.join(LAUNCHED)}, as it says.",
            },
            "model": {
                "help": "Model that it serves: a catalogue name, or a folder with a "
                "config.json. Default: the name that it says.",
            },
        },
    ),
    duration: float | None = option(
        "S", "Time to watch; of a Prometheus server the last S seconds. Default: 300; 3600.", min=1
    ),
    interval: float | None = option(
        "S",
        "Time between two readings; of a Prometheus server not below its scrape interval. "
        "Default: 2; 15.",
        min=0.1,
    ),
    target: float = option(
        "SHARE", "Target attainment: share of requests that must meet their SLO.", default=0.9
    ),
    only: list[str] | None = option(
        "LABEL=VALUE", "Label that metrics must have, to choose one server of several."
    ),
    api_key_env: str | None = option("NAME", "Environment variable with the API key (Bearer)."),
    out: Path | None = option(
        "DIR",
        "Folder for the fitted profile, the requests that were seen and an experiment file.",
        *OUT,
    ),
    as_json: bool = flag("Print only JSON.", "--json"),
) -> None:
    """Watch a running vLLM or SGLang and say what it carries, and which change is safest.

    Only its metrics are read; no request is sent. Capacity, headroom and changes are simulated with
    step times fitted to the metrics.
    """
    from ...reports.terminal.experiment_lines import slo_texts
    from ...reports.terminal.observe_answer import observe_screen
    from ...tuner.planning.headroom import headroom_of
    from ..options.like import with_like
    from ..output.console import print_result

    experiment_options = with_like(experiment_options, ("systems", "instances"))
    source = metrics_source(url, only or [], api_key_env)
    with interruptible("interrupted while it watched"), changing_line("first reading") as say:
        server = seen_server(source, duration, interval, say)
        with tempfile.TemporaryDirectory(prefix="slo-bench-") as scratch:
            folder = Path(scratch) if out is None else out
            experiment, trace_file = seen_experiment(server, experiment_options, folder)
            if out is not None:
                (folder / "experiment.toml").write_text(experiment.to_toml(), "utf-8")
            headroom = None
            if (unseen := _unseen_limit(server, experiment_options)) is None:
                headroom = headroom_of(server, experiment, str(trace_file), target, say)
            change = None if headroom is None else headroom.next_change
            files = []
            if out is not None:
                files = _write_recommended(out, experiment, change, server.last.model)
    if as_json:
        typer.echo(json.dumps(_json(server, headroom, unseen), allow_nan=False))
        return
    slos = slo_texts({"slo": experiment.slo, "slo_scale": experiment.slo_scale})
    print_result(observe_screen(server, list(slos), headroom, unseen))
    if out is not None:
        typer.echo(f"profile, requests and experiment: {out}")
    if files:
        names = ", ".join(path.name for path in files)
        typer.echo(f"the deployment to run next: {files[0].parent} ({names})")


def _write_recommended(
    folder: Path, experiment: Experiment, change: Change | None, served_model: str
) -> list[Path]:
    """Write the deployment with a change, or as it is; nothing for a change of the system."""
    from ...harness.experiments.backends.deployment_manifests import write_deployment

    if change is not None:
        if not (change.parameters or change.instances):
            return []
        name = experiment.systems[0]
        changed = {parameter: (value,) for parameter, value in change.parameters.items()}
        today = experiment.instances or (None,)
        experiment = experiment.model_copy(
            update={
                "parameters": {name: {**experiment.parameters.get(name, {}), **changed}},
                "instances": ((today[0] or 1) + change.instances,),
            }
        )
    # The KV blocks that were seen are those that the server finds room for by itself.
    experiment = experiment.model_copy(update={"num_gpu_blocks": (None,), "block_size": (16,)})
    comment = f"slo-bench observe: {'as observed' if change is None else change.what}"
    return write_deployment(folder / "deployment", experiment, comment, served_model)


def metrics_source(url: str, only: Sequence[str], api_key_env: str | None) -> MetricsSource:
    """Where metrics are read.

    Raises:
        SloBenchError: a label cannot be read, or the address does not answer.
    """
    from ...harness.load_generator.metrics_source import MetricsSource
    from ...harness.servers.server_kinds import metrics_by_server

    return MetricsSource(url, _labels(only), metrics_by_server(), _headers(api_key_env))


def seen_server(
    source: MetricsSource,
    duration: float | None,
    interval: float | None,
    say: Callable[[str], None],
) -> ObservedServer:
    """What was seen of a server in `duration` seconds, read every `interval` seconds.

    Raises:
        SloBenchError: readings failed, or too little happened.
    """
    from ...harness.load_generator.observed import observed

    duration_s = duration or (_PAST_S if source.is_prometheus else _LIVE_S)
    interval_s = interval or (_PAST_EVERY_S if source.is_prometheus else _LIVE_EVERY_S)
    if duration_s < _LEAST_READINGS * interval_s:
        interval_s = duration_s / _LEAST_READINGS if interval is None else interval_s
    if source.is_prometheus:
        return observed(list(source.history(duration_s, interval_s)))
    return observed(*_watched(source, duration_s, interval_s, say))


def seen_experiment(
    server: ObservedServer, experiment_options: Given, folder: Path
) -> tuple[Experiment, Path]:
    """An experiment like what was seen, and the file of the requests that were; files are written
    to `folder`.
    """
    from ..options.experiment_options import experiment_of

    settings, trace_file = _written(server, experiment_options, folder)
    settings |= experiment_options.settings
    return experiment_of(Given(settings, sets=_sets(server, experiment_options))), trace_file


def _labels(only: Sequence[str]) -> dict[str, str]:
    labels = {}
    for label in only:
        name, equals, value = label.partition("=")
        if not (name and equals):
            raise SloBenchError(f"cannot read --only {label!r}; write LABEL=VALUE")
        labels[name] = value
    return labels


def _headers(variable: str | None) -> dict[str, str]:
    from ...workloads.masking import environment_variable

    return {} if variable is None else {"authorization": f"Bearer {environment_variable(variable)}"}


def _watched(
    source: MetricsSource, duration_s: float, interval_s: float, say: Any
) -> tuple[list[MetricsSnapshot], list[str]]:
    """The readings, and of each that failed why.

    Raises:
        SloBenchError: the first reading failed, or most did.
    """
    begin_s = monotonic()
    snapshots: list[MetricsSnapshot] = []
    lost: list[str] = []
    while True:
        now_s = monotonic() - begin_s
        try:
            snapshots.append(source.read(now_s))
        except SloBenchError as error:
            lost.append(str(error))
            if len(lost) > max(len(snapshots), _FEW_READINGS * bool(snapshots)):
                raise
        if snapshots:
            say(_reading_text(snapshots, now_s, duration_s))
        if now_s >= duration_s:
            return snapshots, lost
        due_s = min(duration_s, (len(snapshots) + len(lost)) * interval_s)
        sleep(max(0.0, begin_s + due_s - monotonic()))


def _reading_text(snapshots: Sequence[MetricsSnapshot], now_s: float, duration_s: float) -> str:
    from ...harness.load_generator.observed import Window

    figures = snapshots[-1].figures
    line = f"{now_s:.0f} of {duration_s:.0f} s"
    if len(snapshots) > 1:
        recent = Window(snapshots[max(0, len(snapshots) - 6)], snapshots[-1])
        line += f" · {recent.arrivals / recent.span_s:.3g} req/s"
    line += f" · {figures.get('running', 0):.0f} running, {figures.get('waiting', 0):.0f} wait"
    if snapshots[-1].kv_usage is not None:
        line += f" · KV {snapshots[-1].kv_usage:.0%}"
    return line


def _written(
    server: ObservedServer, experiment_options: Given, folder: Path
) -> tuple[dict[str, Any], Path]:
    """Write profile and requests; return the settings of their experiment, and what was seen."""
    from ...harness.validation.calibration.calibrate_server import observed_profile
    from ...predictors.profiles.profile_format import write_profile

    named = experiment_options.settings.pop("model", (server.last.model,))
    name = named if isinstance(named, str) else named[0]
    folder.mkdir(parents=True, exist_ok=True)
    spec, file = served_model(name, folder / "model.json")  # beside the profile, which names it
    header = write_profile(observed_profile(server, spec, file), folder / "profile.toml")
    trace_file = folder / "seen.jsonl"
    trace_file.write_text("".join(f"{json.dumps(row)}\n" for row in server.trace()), "utf-8")
    settings: dict[str, Any] = {
        **server.load,
        "name": "observed",
        "systems": (server.last.engine,),
        "profile": str(header),
        "requests": _SIMULATED,
        "seeds": 1,
    }
    if server.last.kv_tokens:
        size = max(16, server.last.block_size)
        settings |= {"num_gpu_blocks": server.last.kv_tokens // size, "block_size": size}
    return settings, trace_file


def served_model(name: str, beside: Path) -> tuple[ModelSpec, str]:
    """A model of the catalogue, or that of a folder, whose shape is then written to `beside`; and
    the file of its shape, empty for one of the catalogue.

    Raises:
        SloBenchError: it is neither.
    """
    from ...predictors.specs import model, models

    if name in models():
        return model(name), ""
    path = Path(name).expanduser().absolute()
    config = path if path.suffix == ".json" else path / "config.json"
    if not config.is_file():
        raise SloBenchError(
            f"the model {name!r} is neither in `slo-bench list models` nor a folder with a "
            "config.json; name it by --model"
        )
    beside.write_bytes(config.read_bytes())
    return model(str(beside)), str(beside)


def _sets(server: ObservedServer, experiment_options: Given) -> tuple[str, ...]:
    """The batch's limit where it was seen and not given, beside what was."""
    from ...harness.servers.server_kinds import limits_of

    name, _ = limits_of(server.last.engine).get("max_num_seqs", ("", ""))
    has_batch_limit = any(
        text.partition("=")[0].rpartition(".")[2] == name for text in experiment_options.sets
    )
    if (
        not name
        or has_batch_limit
        or server.most_sequences is None
        or "systems" in experiment_options.settings
    ):
        return experiment_options.sets
    return (*experiment_options.sets, f"{name}={server.most_sequences}")


def _unseen_limit(server: ObservedServer, experiment_options: Given) -> str | None:
    """The parameter for the batch's limit where it was neither seen nor given, else None."""
    from ...harness.servers.server_kinds import limits_of

    name, _ = limits_of(server.last.engine).get("max_num_seqs", ("", ""))
    sets = {text.partition("=")[0].rpartition(".")[2] for text in experiment_options.sets}
    has_limit = server.most_sequences is not None or name in sets
    return None if has_limit or not name or "systems" in experiment_options.settings else name


def _json(server: ObservedServer, headroom: Headroom | None, unseen: str | None) -> dict[str, Any]:
    from ...workloads.lengths import mean_tokens

    def lengths(name: str) -> dict[str, Any]:
        distribution = server.lengths(name)
        return {
            "mean_tokens": mean_tokens(distribution),
            "quantiles": [
                list(knot)
                for knot in zip(distribution.probabilities, distribution.tokens, strict=True)
            ],
        }

    kv_mean, kv_peak = server.kv_usage
    observation = {
        "engine": server.last.engine,
        "model": server.last.model,
        "observed_s": server.span_s,
        "arrival_rps": server.arrival_rps,
        "burstiness_cv": server.burstiness,
        "prompt": lengths("prompt"),
        "output": lengths("output"),
        "latency_mean_s": {
            metric: finite(server.mean_s(metric)) for metric in ("ttft", "itl", "e2e", "queue")
        },
        "running_mean": server.mean("running"),
        "running_peak": server.peak("running"),
        "waiting_mean": server.mean("waiting"),
        "waiting_peak": server.peak("waiting"),
        "kv_cache_usage_mean": kv_mean,
        "kv_cache_usage_peak": kv_peak,
        "kv_cache_tokens": server.last.kv_tokens,
        "prefix_cache_hit_share": server.cached_share,
        "preemptions": server.total("preemptions"),
    }
    if headroom is None:
        return {**observation, "capacity_rps": None, "unseen": unseen, "notes": list(server.notes)}
    capacity = headroom.capacity
    return {
        **observation,
        "target": capacity.target,
        "capacity_rps": capacity.capacity_rps,
        "capacity_low_rps": capacity.low_rps,
        "capacity_high_rps": finite(capacity.high_rps),
        "capacity_band_rps": [finite(rate_rps) for rate_rps in headroom.band_rps],
        "headroom": headroom.headroom,
        "headroom_band": [finite(bound) for bound in headroom.headroom_band],
        "step_time_factors": list(headroom.step_time_factors),
        "seen_over_simulated": dict(headroom.seen_over_simulated),
        "changes": [plain_fields(change) for change in headroom.changes],
        "next_change": None if headroom.next_change is None else plain_fields(headroom.next_change),
        "notes": list(headroom.notes),
    }
