"""`slo-bench run`: an experiment from a file, a suite or options, with report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..workloads.errors import SloBenchError

EXAMPLES = (
    "slo-bench run",
    "slo-bench run --system vllm --system sarathi --workload azure-conv --rates 2:10:2",
    "slo-bench run --model llama-3-70b --gpu h100-80g --gpus 8 --router least-loaded --seeds 1",
    "slo-bench run --system sarathi --sweep sarathi.chunk_tokens=512,2048 --requests 300",
    "slo-bench run --suite quickstart --out results --jobs 2",
    "slo-bench run --resume --out results",
    "slo-bench run --base-url http://127.0.0.1:8000 --rates 1,2,4 --requests 200 --seeds 1",
)

_COMPARED = "What is compared"
_ARRIVES = "What arrives"
_SERVES = "What serves it"
_RUN = "How it is run"
_CLIENT = "How a real server is asked"


def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE.toml]", help="An experiment file.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="An experiment that comes with slo-bench (see `slo-bench list suites`). "
            "Without any option at all: quickstart.",
        ),
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option(
            "--system",
            "-s",
            metavar="S",
            help="A system by name, or FILE.py[:CLASS] with one of your own. May be repeated.",
            rich_help_panel=_COMPARED,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=A,B,…",
            help="Run every combination with these values of a setting (tp=1,2) or of a system's "
            "knob (sarathi.chunk_tokens=512,1024); one value just sets it. May be repeated.",
            rich_help_panel=_COMPARED,
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            "-w",
            metavar="W",
            help="A catalogue name, a trace file, or mix(…). May be repeated.",
            rich_help_panel=_ARRIVES,
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            metavar="PROCESS",
            help="poisson, gamma(cv=2), concurrency(16), …. Replaces a trace's own.",
            rich_help_panel=_ARRIVES,
        ),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="2,4,8|2:16:2",
            help="Offered rates in requests per second. Default: a ladder around the estimated "
            "capacity.",
            rich_help_panel=_ARRIVES,
        ),
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(
            metavar="0.5,1,2",
            help="Replay a trace's own arrivals so much faster. Default for traces: 0.5,1,2.",
            rich_help_panel=_ARRIVES,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Requests in each cell. Default: 1000; of a trace all.",
            rich_help_panel=_ARRIVES,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(metavar="S", help="Seconds of arrivals, instead.", rich_help_panel=_ARRIVES),
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Requests that arrive in the first S seconds do not count.",
            rich_help_panel=_ARRIVES,
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ttft=1,tpot=0.15",
            help="Bounds in seconds: any of ttft, tpot, e2e, deadline; e2e=uniform(1,350) draws; "
            "'chat:ttft=0.5; batch:e2e=60' sets them by class; '' keeps a trace's own. May be "
            "repeated, which compares them.",
            rich_help_panel=_ARRIVES,
        ),
    ] = None,
    slo_scale: Annotated[
        float | None,
        typer.Option(metavar="F", help="Multiply every bound.", rich_help_panel=_ARRIVES),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(metavar="N", help="Repetitions. Default: 3.", rich_help_panel=_ARRIVES),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="The first seed. Default: 0.", rich_help_panel=_ARRIVES),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="M",
            help="A catalogue name, or a folder with a config.json. Default: llama-3.1-8b.",
            rich_help_panel=_SERVES,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", "-g", metavar="G", help="Default: a100-80g.", rich_help_panel=_SERVES
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(metavar="N", help="In all: instances × tp × pp.", rich_help_panel=_SERVES),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tensor parallel GPUs. Default: the fewest on which the model fits.",
            rich_help_panel=_SERVES,
        ),
    ] = None,
    pp: Annotated[
        int | None,
        typer.Option(metavar="N", help="Pipeline stages. Default: 1.", rich_help_panel=_SERVES),
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(metavar="N", help="Copies of the model. Default: 1.", rich_help_panel=_SERVES),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            metavar="R",
            help="Which instance gets a request. Default: the system's own.",
            rich_help_panel=_SERVES,
        ),
    ] = None,
    oversize: Annotated[
        str | None,
        typer.Option(
            metavar="error|reject|truncate",
            help="What becomes of requests longer than the context or the KV cache. "
            "Default: error.",
            rich_help_panel=_SERVES,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="simulated|http|vllm|sglang",
            help="What runs it: the simulator, or real servers. Default: simulated; with "
            "--base-url http.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="An OpenAI-compatible server that runs already. Repeated: all of them, behind "
            "the router.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    api: Annotated[
        str | None,
        typer.Option(
            metavar="completions|chat|embeddings",
            help="Where requests go. Default: completions.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Sent with every request; $NAME in the value is an environment variable. May be "
            "repeated.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The environment variable that holds the API key; the key is written nowhere.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    body: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=JSON",
            help="A field of every request's body, in place of ours. May be repeated.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="auto|ids|words",
            help="What prompts without text are made of. Default: token ids, for chat words.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the served model's tokenizer: prompts use its vocabulary.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    server_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARG",
            help="Passed on, as it is, to servers that we start (--server-arg=--dtype=float32). "
            "May be repeated.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="A cell ends after so long; what is under way is then missed. Default: ten "
            "minutes after the last arrival.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Processes that send. Default: as many as the load needs.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    token_times: Annotated[
        bool,
        typer.Option(
            "--token-times", help="Keep the time of every token.", rich_help_panel=_CLIENT
        ),
    ] = False,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="vllm",
            help="Also write each cell as `vllm bench serve --save-result --save-detailed` does.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Run folder, empty or new. Default: a new one under runs.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Run only what --out lacks.", rich_help_panel=_RUN),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            metavar="N",
            help="Processes. Default: one per core.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    records: Annotated[
        str | None,
        typer.Option(
            metavar="auto|csv|parquet|none",
            help="Per-request records. Default: Parquet if pyarrow is installed, else CSV.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Write no report.html.", rich_help_panel=_RUN)
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the rows of cells.csv as a JSON list, and nothing else.",
            rich_help_panel=_RUN,
        ),
    ] = False,
) -> None:
    """Run an experiment: every system at every rate and seed. Writes a folder with a report."""
    from .asked import client_of, experiment_of, numbers
    from .running import run_shown, summarise, write_page

    asked: dict[str, Any] = {
        "systems": tuple(name for one in system or () for name in one.split(",")),
        "workload": tuple(workload or ()),
        "arrivals": arrivals,
        "redraw_arrivals": None if arrivals is None else True,
        "rates": numbers(rates, "--rates"),
        "speeds": numbers(speed, "--speed"),
        "requests": requests,
        "duration_s": duration,
        "warmup_s": warmup,
        "slo": tuple(slo or ()),
        "slo_scale": slo_scale,
        "seeds": seeds,
        "seed": seed,
        "model": model,
        "gpu": gpu,
        "gpus": gpus,
        "tp": tp,
        "pp": pp,
        "instances": instances,
        "router": router,
        "oversize": oversize,
        "records": records,
        "backend": backend or ("http" if base_url else None),
        "server": {"args": tuple(server_arg)} if server_arg else None,
        "client": client_of(
            base_url=base_url,
            api=api,
            header=header,
            api_key_env=api_key_env,
            body=body,
            prompts=prompts,
            tokenizer=tokenizer,
            time_limit_s=time_limit,
            processes=processes,
            token_times=token_times or None,
            export=export,
        )
        or None,
    }
    asked = {name: value for name, value in asked.items() if value not in (None, ())}
    if resume and out is None:
        raise SloBenchError("--resume needs the folder to go on with: --out DIR")
    experiment = experiment_of(
        file=file, suite=suite, asked=asked, sweeps=sweep or [], resumed=out if resume else None
    )
    result = run_shown(experiment, out, jobs=jobs, resume=resume)
    nothing_to_show = not any(row["valid"] for row in result.rows())
    page = None if no_report or nothing_to_show else write_page(result)
    if as_json:
        typer.echo(json.dumps(result.rows(), allow_nan=False))
    else:
        summarise(result, page)
