"""`slo-bench calibrate`: from a log, a run or a running server to a profile that can be trusted."""

from __future__ import annotations

import dataclasses
import datetime
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...workloads.errors import FileFormatError, SloBenchError
from ..options.declared import PEER_LINK
from ..options.from_schema import with_options
from ..options.parameters import CELL, GPU, MODEL, OUT, argument, flag, option
from ..output.console import print_result, text_table
from .validate import Engine

if TYPE_CHECKING:
    from ...harness.results.engine_logs import EngineSettings, RealLog
    from ...harness.validation.calibration.base_profile import BaseOptions
    from ...harness.validation.calibration.calibrate import Calibrated

EXAMPLES = (
    "slo-bench calibrate requests.jsonl --gpu rtx-4090",
    "slo-bench calibrate runs/measured --profile 4090.toml --out 4090-here.toml",
    "slo-bench calibrate bench.json --model llama-3.1-8b --gpu h100-80g --server-version 0.19",
    "slo-bench calibrate closed-loops.csv --model llama-3.1-8b --gpu rtx-4090 --json",
    "slo-bench calibrate http://127.0.0.1:8000 --model llama-3.1-8b --duration 600",
)


@with_options
def calibrate(
    *,
    log: str = argument(
        "LOG|RUN|URL",
        "A run of this machine: a request log of an engine (JSONL, with meta.json and "
        "hash_ids.jsonl in the same folder, if any), a run folder, a result file of another load "
        "generator, or a closed-loop table (CSV); or the address of a running vLLM or SGLang, or "
        "of a Prometheus server that reads it.",
    ),
    overrides: Engine,
    profile: Path | None = option(
        "FILE",
        "Profile to begin with. Default: of a running server its metrics, else operators (kernel "
        "times) of the model on the GPU.",
        "--profile",
    ),
    out: Path = option("FILE", "Calibrated profile.", *OUT, default=Path("calibrated.toml")),
    model: str | None = option("M", "Catalogue name. Default: the log's.", *MODEL),
    gpu: str | None = option("G", "Catalogue name; needed without --profile.", *GPU),
    tp: int | None = option("N", "GPUs that share each layer. Default: the log's, else 1.", min=1),
    server_version: str | None = option(
        "VERSION", "Server that was measured (0.19 of vLLM, sglang-0.5.14). Default: the log's."
    ),
    engine: str | None = option("S", "System that simulates the engine. Default: the log's."),
    cell: str | None = option("C", "Cell of the run folder. Default: all.", *CELL),
    peer_link: str | None = PEER_LINK,
    duration: float | None = option(
        "S", "Time to watch a server; of a Prometheus server the last S seconds.", min=1
    ),
    as_json: bool = flag("Print only the calibration, as JSON.", "--json"),
) -> None:
    """Learn step times, front end and KV room from a log, a run or a running server.

    Each half of it in time is judged by what the other half tells; the answer says how good the
    profile is for these loads. run, capacity and plan take it with --profile FILE.
    """
    from ...harness.validation.calibration.base_profile import BaseOptions
    from ...predictors.profiles.profile_format import write_profile
    from ..output.progress import changing_line

    base = BaseOptions(profile, model, gpu, tp, peer_link)
    settings = _settings(overrides, server_version)
    is_server = "://" in log
    replayed = {"engine": engine, "cell": cell, "server-version": server_version}
    replayed |= {name.replace("_", "-"): value for name, value in asdict(overrides).items()}
    if is_server or _is_table(Path(log)):
        why = "metrics of a running server are" if is_server else "a closed-loop table is"
        _check_unused(replayed, f"{why} not replayed")
    if not is_server:
        _check_unused({"duration": duration}, "only a running server is watched")
    with changing_line("reading") as shown:
        if is_server:
            calibrated = _of_server(log, base, duration, out, shown)
        else:
            calibrated = _of_files(Path(log), base, settings, engine, cell, shown)
    written = write_profile(calibrated.profile, out)
    if as_json:
        scope, front_end = calibrated.profile.scope, calibrated.profile.front_end
        entry = calibrated.calibration.plain() | {
            "scope": None if scope is None else scope.plain(),
            "front_end": None if front_end is None else front_end.plain(),
            "verdict": calibrated.profile.verdict,
            "notes": list(calibrated.notes),
            "profile": str(written),
        }
        typer.echo(json.dumps(entry, allow_nan=False))
        return
    print_result(
        _table(calibrated),
        *_lines(calibrated),
        *(f"note: {note}" for note in calibrated.notes),
        f"{calibrated.profile.label}: {calibrated.profile.verdict}.",
        f"slo-bench run --profile {written}",
    )


def _check_unused(options: Mapping[str, object], why: str) -> None:
    """Refuse options that would change nothing."""
    for name, value in options.items():
        if value is not None:
            raise SloBenchError(f"{why}; leave --{name} out")


def _settings(overrides: Engine, server_version: str | None) -> EngineSettings:
    """Settings of the engine that count before those of a log."""
    from ...harness.results.engine_logs import EngineSettings
    from ...predictors.operators.server_version import ServerVersion

    settings = EngineSettings(**asdict(overrides))
    if server_version is None:
        return settings
    server = ServerVersion.parse(server_version)
    return dataclasses.replace(settings, server=server.engine, version=server.version)


def _of_files(
    path: Path,
    base: BaseOptions,
    settings: EngineSettings,
    engine: str | None,
    cell: str | None,
    shown: Callable[[str], None],
) -> Calibrated:
    from ...harness.policies.systems import DEFAULT_SYSTEM, SYSTEMS
    from ...harness.results.engine_logs import EngineSettings
    from ...harness.validation.calibration.base_profile import base_profile
    from ...harness.validation.calibration.calibrate import calibrate as calibrate_logs

    if _is_table(path):
        from ...harness.validation.calibration.calibrate_table import calibrate_table

        return calibrate_table(
            path, base_profile(base, EngineSettings()), day=_today(), progress=shown
        )
    logs = _logs(path, cell)
    server = settings.server or logs[0].engine.server
    usual = server if server is not None and server in SYSTEMS else DEFAULT_SYSTEM
    return calibrate_logs(
        logs,
        base_profile(base, logs[0].engine),
        engine or logs[0].engine.system or usual,
        overrides=settings,
        day=_today(),
        progress=shown,
    )


def _is_table(path: Path) -> bool:
    """A closed-loop table, and no request file?"""
    from ...harness.results.engine_logs import is_log

    return path.is_file() and path.name.endswith((".csv", ".csv.gz")) and not is_log(path)


def _logs(path: Path, cell: str | None) -> list[RealLog]:
    """The logs of a run folder, of an engine's file, or of another load generator's results."""
    from ...harness.results.engine_logs import EngineSettings, is_log, log_of_columns, measured_logs
    from ...reports.compare.external import external_results
    from ...reports.compare.request_files import is_database

    is_foreign = path.is_file() and path.suffix != ".parquet"
    if not is_foreign or (not is_database(path) and is_log(path)):
        return measured_logs(path, cell)
    if cell is not None:
        raise SloBenchError(f"--cell is for run folders, but {path} is a file")
    logs = []
    for entry in external_results(path).cells:
        requests = entry.read()
        if requests.duration_s is not None:
            raise FileFormatError(
                path, None, "does not tell when requests were sent, which a replay needs"
            )
        names = ("prompt_tokens", "output_tokens", "first_token_s", "finish_s")
        columns = {name: getattr(requests, name).tolist() for name in names}
        sent_s = requests.arrival_s if requests.sent_s is None else requests.sent_s
        columns["arrival_s"] = sent_s.tolist()
        settings = EngineSettings(model=entry.identity["model"] or None)
        logs.append(dataclasses.replace(log_of_columns(path, columns, settings), name=entry.name))
    return logs


def _table(calibrated: Calibrated) -> Any:
    """The errors of each metric before and after, and on requests not seen."""
    calibration = calibrated.calibration

    def shown(percent: float | None, form: str) -> str:
        return "–" if percent is None else form.format(percent)

    heads = ("", "mean before", "mean after (in-sample)", "worst on the half not seen")
    rows = [
        (
            metric.upper(),
            shown(calibration.before_percent.get(metric), "{:+.1f} %"),
            f"{after:+.1f} %",
            shown(calibration.held_out_percent.get(metric), "± {:.1f} %"),
        )
        for metric, after in calibration.after_percent.items()
    ]
    return text_table(heads, rows, numbers=heads[1:])


def _lines(calibrated: Calibrated) -> Iterator[str]:
    """What was learned, from what."""
    calibration, profile = calibrated.calibration, calibrated.profile
    steps = f", {calibration.steps:,} steps" if calibration.steps else ""
    yield f"learned from {', '.join(calibration.origin)}: {calibration.requests:,} requests{steps}"
    if len(calibration.factors) > 1:
        pairs = zip(calibration.tokens, calibration.factors, strict=True)
        factors = ", ".join(f"{tokens:,.0f}: {factor:.2f}" for tokens, factor in pairs)
        yield f"factor on step times by tokens of a step: {factors}"
    if profile.front_end is not None:
        yield str(profile.front_end)
    if calibration.num_gpu_blocks:
        yield f"KV: {calibration.num_gpu_blocks:,} blocks of {calibration.block_size} tokens"


def _of_server(
    url: str, base: BaseOptions, duration: float | None, out: Path, shown: Callable[[str], None]
) -> Calibrated:
    """What the metrics of a running server tell."""
    from ...harness.validation.calibration.calibrate_server import calibrate_server
    from ..options.from_schema import Given
    from .observe import metrics_source, seen_experiment, seen_server, served_model

    for name in ("profile", "gpu", "tp", "peer_link"):
        if getattr(base, name) is not None:
            raise SloBenchError(
                f"step times of a running server are those of its metrics; leave "
                f"--{name.replace('_', '-')} out"
            )
    server = seen_server(metrics_source(url, (), None), duration, None, shown)
    model = base.model or server.last.model
    with tempfile.TemporaryDirectory(prefix="slo-bench-") as scratch:
        folder = Path(scratch)
        experiment, _ = seen_experiment(server, Given({"model": model}), folder)
        spec, file = served_model(model, folder / "model.json")
        calibrated = calibrate_server(
            server, spec, file, experiment, folder, day=_today(), progress=shown
        )
        if not file:
            return calibrated
        beside = out.with_suffix(".model.json")
        beside.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(Path(file).read_bytes())
        profile = dataclasses.replace(calibrated.profile, model_file=str(beside))
        return dataclasses.replace(calibrated, profile=profile)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
