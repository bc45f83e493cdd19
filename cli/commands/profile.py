"""`slo-bench profile`: measured step times, imported, shown and fitted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...workloads.errors import SloBenchError
from ...workloads.extras import need
from ...workloads.parsing import finite, plain_fields
from ..options.declared import PEER_LINK
from ..options.from_schema import with_options
from ..options.parameters import GPU, MODEL, OUT, argument, epilog, flag, option
from ..output.console import print_result, text_table
from ..output.progress import phase
from .calibrate import EXAMPLES, calibrate
from .profile_costs import CostFitOptions, fit_costs_like
from .profile_run import RUNS, link_line, links_shown, profile_run

if TYPE_CHECKING:
    from ...predictors.profiles.fit_profile import ProfileFitQuality
    from ...predictors.profiles.profile_format import Profile
    from ...reports.terminal.screen import Screen

_IMPORTS = (
    "slo-bench profile import llmservingsim profiles/RTX4090-Llama-3.1-8B-bf16-tp1 --out 4090.toml",
    "slo-bench profile import llmservingsim RTXPRO6000-Qwen3-32B-bf16-tp2 "
    "--peer-link 16gb/s@20us --out qwen.toml",
    "slo-bench profile import vidur a100__meta-llama__Meta-Llama-3-8B__linear.csv --out a100.toml",
    "slo-bench profile import aiconfigurator aiconfigurator/a100_sxm --model llama-3-8b "
    "--out a100-aic.toml",
    "slo-bench profile import distserve profiler-a100-80g.vllm.json --model opt-13b --out opt.toml",
    "slo-bench profile import splitwise perf_model.csv --gpu a100-80g --tp 4 --model llama-2-70b "
    "--out llama-2-70b.toml",
)
_SHOWS = ("slo-bench profile show 4090.toml", "slo-bench profile show 4090.toml --json")
_CALIBRATES = [example.replace(" calibrate ", " profile calibrate ") for example in EXAMPLES]
_FITS = (
    "slo-bench profile fit 4090.toml",
    "slo-bench profile fit 4090.toml --dry-run --json",
    "slo-bench profile fit 4090.toml --like adaptivellm --out costs.npz",
)

app = typer.Typer(
    help="Step times: measure, import, show, fit and calibrate them. `run --profile` and "
    "`validate` use them.",
    no_args_is_help=True,
    epilog=epilog([_IMPORTS[0], _SHOWS[0], _FITS[0]]),
)


app.command("run", epilog=epilog(RUNS))(profile_run)
app.command("calibrate", epilog=epilog(_CALIBRATES))(calibrate)


@app.command("import", epilog=epilog(_IMPORTS))
def import_(
    source: str = argument(
        "SOURCE", "Project: llmservingsim, vidur, aiconfigurator, distserve or splitwise."
    ),
    path: Path = argument("PATH", "File or folder of that project."),
    out: Path = option(
        "FILE",
        "Profile file NAME.toml (its tables in the same folder), or a folder.",
        *OUT,
        default=...,
    ),
    model: str | None = option("M", "Catalogue name.", *MODEL),
    gpu: str | None = option("G", "Catalogue name.", *GPU),
    tp: int | None = option("N", "GPUs that share each layer (tensor parallelism).", min=1),
    peer_link: str | None = PEER_LINK,
    add: bool = flag(
        "Add missing tables to the profile --out; its existing tables are kept.", "--add"
    ),
    tables: str = option("csv|parquet", "File format of the tables.", default="csv"),
) -> None:
    """Convert another project's measurements to a profile."""
    if tables == "parquet":
        need("parquet", "--tables parquet")
    from ...predictors.profiles.build_model import with_peer_link
    from ...predictors.profiles.importers import ImportOptions, import_profile
    from ...predictors.profiles.profile_format import read_profile, write_profile

    profile = with_peer_link(import_profile(source, path, ImportOptions(model, gpu, tp)), peer_link)
    if add:
        profile = read_profile(out).joined(profile)
    written = write_profile(profile, out, tables)
    print_result(_summary(profile))
    typer.echo(str(written))


@app.command(epilog=epilog(_SHOWS))
def show(
    profile: Path = argument("FILE", "Profile file."),
    as_json: bool = flag("Print the profile as JSON, without the rows of its tables.", "--json"),
) -> None:
    """Show the content and origin of a profile, and step times of a few batches."""
    from ...predictors.profiles.profile_format import read_profile

    read = read_profile(profile)
    if as_json:
        typer.echo(json.dumps(_plain(read), allow_nan=False))
        return
    print_result(_summary(read))
    if samples := _samples(read):
        print_result(_sample_table(samples))


@app.command(epilog=epilog(_FITS))
@with_options
def fit(
    *,
    profile: Path = argument("FILE", "Profile file with tables."),
    out: Path | None = option("FILE", "Output file. Default: FILE itself.", *OUT),
    seed: int = option("N", "Seed of the selection of held-out rows.", default=0),
    costs: CostFitOptions,
    dry_run: bool = flag("Print the errors without writing a file.", "--dry-run"),
    as_json: bool = flag("Print only the errors, as JSON.", "--json"),
) -> None:
    """Fit step-time formulas, or with --like adaptivellm the costs of swaps and recomputations.

    Without --like: the nine-term and Ascendra's five-term formula and the tables are evaluated on
    held-out rows, and the best is kept.
    """
    if costs.like is not None:
        fit_costs_like(costs, profile, out=out, seed=seed, dry_run=dry_run, as_json=as_json)
        return
    for name, setting in vars(costs).items():
        if setting is not None:
            raise SloBenchError(f"--{name.replace('_', '-')} goes with --like adaptivellm only")
    from ...predictors.profiles.fit_profile import fit as fit_all
    from ...predictors.profiles.profile_format import read_profile, write_profile

    with phase("fitting"):
        profile_fit = fit_all(read_profile(profile), seed)
    written = None
    if not dry_run:
        written = write_profile(profile_fit.profile, out or profile)
    if as_json:
        best = profile_fit.profile.best
        rows = [plain_fields(q) | {"best": q.formula == best} for q in profile_fit.qualities]
        typer.echo(json.dumps(rows))
        return
    print_result(_quality_table(list(profile_fit.qualities), profile_fit.profile))
    links_shown(profile_fit.profile)
    if written is not None:
        typer.echo(str(written))


def _summary(profile: Profile) -> Screen:
    from ...predictors.profiles.formulas import available

    rows = [
        ("profile", profile.label),
        ("dtypes", f"weights {profile.weight_dtype}, KV {profile.kv_dtype}"),
    ]
    for source in profile.sources:
        parts = (source.project, source.path, source.version, source.licence, source.note)
        rows.append(("source", "; ".join(part for part in parts if part)))
    for kind, table in profile.tables.items():
        rows.append(("table", f"{kind}, {len(table):,} rows{_ranges(table)}"))
    for name, fitted in profile.fits.items():
        errors = []
        if math.isfinite(fitted.held_out_percent):
            errors.append(f"{fitted.held_out_percent:.1f} % off on held-out rows")
        if math.isfinite(fitted.extrapolated_percent):
            errors.append(f"{fitted.extrapolated_percent:.1f} % beyond the range")
        rows.append(("fit", ", ".join([name, *errors])))
    for name, link in profile.links.items():
        rows.append(("link", link_line(f"{name} link", link)))
    if profile.calibration is not None:
        calibration = profile.calibration
        smallest, largest = min(calibration.factors), max(calibration.factors)
        origin = ", ".join(calibration.origin)
        rows.append(("calibrated", f"factors {smallest:.2f} to {largest:.2f}, from {origin}"))
        when = "" if profile.scope is None else f" ({profile.scope.server}, {profile.scope.date})"
        rows.append(("scope", f"{profile.verdict}{when}"))
    if profile.front_end is not None:
        rows.append(("passed", str(profile.front_end)))
    formulas = available(profile)
    used = profile.best or (
        formulas[0] if formulas else "nothing yet (attention or a fit is missing)"
    )
    return text_table(("", " "), [*rows, ("used", used)], unbroken=("",))


def _ranges(table: Any) -> str:
    texts = [
        f"{name} {column.min():g}–{column.max():g}"
        for name, column in table.columns.items()
        if name not in ("calls", "time_us")
    ]
    return f": {', '.join(texts)}" if texts else ""


# Steps to show: decoding sequences, their mean KV tokens, a chunk of prefill.
_SAMPLES = ((1, 1024, 0), (32, 1024, 0), (128, 1024, 0), (0, 0, 512), (0, 0, 2048), (32, 1024, 512))


def _samples(profile: Profile) -> list[tuple[str, dict[str, float]]]:
    """Step times of a few batches by formula, in seconds; empty if the profile has no step
    times.
    """
    from ...predictors.profiles.formulas import available, profiled_step_time
    from ...predictors.profiles.step_time_table import Host

    models = {name: profiled_step_time(profile, Host(), name).model for name in available(profile)}
    samples = []
    for sequences, kv, chunk in _SAMPLES:
        parts = [f"{sequences} decoding at {kv} KV tokens"] if sequences else []
        parts += [f"{chunk} tokens of prefill"] if chunk else []
        chunks = [(0, chunk)] if chunk else []
        times = {
            name: model.step_s(sequences, sequences * kv, chunks) for name, model in models.items()
        }
        samples.append((" + ".join(parts), times))
    return samples if models else []


def _sample_table(samples: list[tuple[str, dict[str, float]]]) -> Screen:
    rows = [
        (label, *(f"{1e3 * seconds:.2f}" for seconds in times.values())) for label, times in samples
    ]
    heads = ("step", *samples[0][1])
    title = "Step times without host overhead, ms"
    return text_table(heads, rows, numbers=heads[1:], title=title)


def _plain(profile: Profile) -> dict[str, Any]:
    import dataclasses

    return {
        "model": profile.model,
        "gpu": profile.gpu,
        "tp": profile.tp,
        "weight_dtype": profile.weight_dtype,
        "kv_dtype": profile.kv_dtype,
        "best": profile.best or None,
        "sources": [dataclasses.asdict(source) for source in profile.sources],
        "tables": {kind: len(table) for kind, table in profile.tables.items()},
        "fits": {
            name: {
                "coefficients": dict(fitted.coefficients),
                "held_out_percent": finite(fitted.held_out_percent),
                "extrapolated_percent": finite(fitted.extrapolated_percent),
            }
            for name, fitted in profile.fits.items()
        },
        **{
            name: None if learned is None else learned.plain()
            for name, learned in (
                ("calibration", profile.calibration),
                ("front_end", profile.front_end),
                ("scope", profile.scope),
            )
        },
        "steps": [{"step": label, "seconds": times} for label, times in _samples(profile)],
    }


def _quality_table(qualities: list[ProfileFitQuality], profile: Profile) -> Screen:
    def percent(value: float) -> str:
        return f"{value:.1f} %" if math.isfinite(value) else "–"

    numbers = ("rows", "held out", "p95", "beyond the range")
    rows = [
        (
            q.formula,
            f"{q.rows:,}",
            *map(percent, (q.held_out_percent, q.held_out_p95_percent, q.extrapolated_percent)),
            "best, kept" if q.formula == profile.best else "",
        )
        for q in qualities
    ]
    title = f"{profile.label}: error of step times"
    return text_table(("formula", *numbers, ""), rows, numbers=numbers, title=title)
