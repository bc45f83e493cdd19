"""`slo-bench tune`: search for the parameters, instances, placement and server settings that carry
the most load.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from ...harness.experiments.config.schema import ExperimentSchema
from ...harness.experiments.config.setting import RUN, SIMULATOR, declared
from ...harness.servers.server_kinds import LAUNCHED
from ...tuner.search.settings import TuneSettings
from ...workloads.errors import SloBenchError
from ..options import declared as options
from ..options.from_schema import Given, offer, with_options
from ..options.names import listed
from ..options.parameters import BACKEND, JOBS, MODEL, argument, epilog, flag, option
from ..options.tune_options import CHANGED, NOT_TUNED, StudyOptions, experiment_and_tuning
from ..short_help import short_help
from .tune_placement import PLACEMENT_EXAMPLES, tune_placement

SYSTEM_EXAMPLES = (
    "slo-bench tune sarathi",
    "slo-bench tune slo-odbs --slo 'e2e=uniform(1,350)' --search slo_weight=0..10 "
    "--search output_weight=0..10 --trials 30 --confirm-workload azure-conv",
    "slo-bench tune ascendra --gpus 4 --search n_lp=1..3 --search n_hp=1..3 --search threshold",
    "slo-bench tune vllm --objective capacity --objective cost --search instances=1..4 "
    "--search tp=1,2",
    "slo-bench tune vllm --objective ttft_p99 --rate 4 --search parameters --sampler random",
    "slo-bench tune --resume --out runs/tune-sarathi",
    "slo-bench tune tune.toml --trials 20",
    "slo-bench tune vllm --executor ray --address 10.0.0.1:6379 --jobs 8 --trials 100",
)
SERVER_EXAMPLES = (
    "slo-bench tune server --backend vllm --model models/tiny --objective goodput --rate 2 "
    "--search max_num_seqs=16,64,256",
    "slo-bench tune server --backend sglang --model models/tiny --search "
    "max_running_requests=8..64 --max-time 3600",
    "slo-bench tune server --backend vllm --model models/tiny --rate 2 --objective ttft_p99 "
    "--search server.gpu-memory-utilization=0.8,0.9 --search max_num_batched_tokens=2048,8192",
)
_SYSTEM = "system"  # the command for a system or a file
_NOT_OF_A_SERVER = (
    *(
        path
        for path, setting in declared(ExperimentSchema).items()
        if setting.setting.backends == SIMULATOR
    ),
    *("backend", "model", "gpu", "gpus", "device_map", "embedder", "embed_instances", "profile"),
    *("weight_dtype", "kv_dtype", "memory_share", "host_memory_gib", "host_s"),
    *("overlong_requests", "objective", "client.base_urls", "server.workers"),
    *("server.moving", "server.clock", "server.kv_store"),
)


# In `--help`; the others in `--help-all`.
_SEARCHED = ("--search", "--trials", "--max-time", "--objective", "--workload", "--slo", "--out")
SYSTEM_SHOWN = (*_SEARCHED, "--model", "--gpu", "--gpus", "--resume", "--jobs")
SERVER_SHOWN = (*_SEARCHED, "--backend", "--model", "--rate")
PLACEMENT_SHOWN = (
    *("--model", "--gpu", "--topology", "--devices", "--mode", "--method"),
    *("--reserve-gib", "--workload", "--out", "--html"),
)


class _SystemsByName(TyperGroup):
    """Command group in which `tune slo-odbs` means `tune system slo-odbs`, for every first word
    that is not a command.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the command `system` where the first word is not a command."""
        if _SYSTEM in self.commands and args and args[0] not in (*self.commands, "--help", "-h"):
            args = [_SYSTEM, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete command names and the arguments of `tune system`."""
        system = self.commands[_SYSTEM]
        within = system.context_class(system, info_name=_SYSTEM, parent=ctx)
        follows = system.shell_complete(within, incomplete)
        if not incomplete.startswith("-"):
            positional = next(
                parameter for parameter in system.params if parameter.param_type_name == "argument"
            )
            follows += positional.shell_complete(within, incomplete)
        return [*super().shell_complete(ctx, incomplete), *follows]


app = typer.Typer(
    cls=_SystemsByName,
    help="Search for the parameters, instances, placement and server settings that carry the most.",
    no_args_is_help=True,
    epilog=epilog([*SYSTEM_EXAMPLES, SERVER_EXAMPLES[0], "slo-bench tune system --help"]),
)


@app.command(_SYSTEM, epilog=epilog(SYSTEM_EXAMPLES), cls=short_help(SYSTEM_SHOWN))
@with_options
def tune_system(
    *,
    experiment_options: Given = offer(without=(*NOT_TUNED, "client.base_urls"), changed=CHANGED),
    tuning: Given = offer(TuneSettings),
    study_options: StudyOptions,
    system_or_file: str | None = argument(
        "[SYSTEM|FILE.toml]",
        "System by name, FILE.py[:CLASS] with your own, or an experiment file with a table "
        "\\[tune].",
        default=None,
        complete=listed("systems"),
    ),
    resume: bool = flag(
        "Continue the study in --out, or join another process that runs it.",
        "--resume",
        panel=options.STORAGE,
    ),
    where: options.Executor,
    jobs: int | None = option(
        "N",
        "Number of parallel trials, each in its own process. Default: 1; with --executor ray the "
        "number of cores of the cluster.",
        *JOBS,
        panel=RUN,
    ),
    no_report: bool = options.NO_REPORT,
) -> None:
    """Tune a system: every parameter, or those given by --search; the word `system` may be left
    out.
    """
    from ..output.tune_output import tuned

    if system_or_file is not None and system_or_file.endswith(".toml"):
        experiment_options = replace(experiment_options, file=Path(system_or_file))
        system_or_file = None
    experiment, settings = experiment_and_tuning(
        experiment_options, tuning, system_or_file, options.resumed_in(study_options.out, resume)
    )
    tuned(
        experiment, settings, study_options, where.cluster, jobs, no_report=no_report, resume=resume
    )


@app.command("server", epilog=epilog(SERVER_EXAMPLES), cls=short_help(SERVER_SHOWN))
@with_options
def tune_server(
    *,
    backend: str = option("|".join(LAUNCHED), "Server to start.", *BACKEND, default=...),
    model: str = option(
        "PATH", "Model: a folder, or a name on the Hugging Face hub.", *MODEL, default=...
    ),
    experiment_options: Given = offer(without=(*NOT_TUNED, *_NOT_OF_A_SERVER), changed=CHANGED),
    tuning: Given = offer(TuneSettings, without=("confirm_backend",)),
    study_options: StudyOptions,
    no_report: bool = options.NO_REPORT,
) -> None:
    """Tune a real server: it is started, measured and stopped for every configuration.

    Parameters are the server's own options (see `slo-bench list systems vllm`); others are searched
    as server.NAME=A,B, where NAME is the server's option without its dashes. A configuration with
    which the server does not start or dies is a failed trial; its log is kept. To resume:
    `slo-bench tune --resume --out DIR`.
    """
    from ..output.tune_output import tuned

    if backend not in LAUNCHED:
        raise SloBenchError(f"--backend must be {' or '.join(LAUNCHED)} but is {backend!r}")
    experiment_options.settings.update(backend=backend, model=model)
    experiment, settings = experiment_and_tuning(experiment_options, tuning, backend)
    tuned(experiment, settings, study_options, no_report=no_report)


app.command("placement", epilog=epilog(PLACEMENT_EXAMPLES), cls=short_help(PLACEMENT_SHOWN))(
    tune_placement
)
app.command(  # UELLM's name for it, by which readers of the paper look for it
    "helr",
    help="The same command as `tune placement`; UELLM calls its procedure HELR.",
    epilog=epilog([PLACEMENT_EXAMPLES[0].replace(" placement ", " helr ")]),
    cls=short_help(PLACEMENT_SHOWN),
)(tune_placement)
