"""The options of commands that run experiments, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .completion import among, listed

SYSTEMS = "Systems"
WORKLOAD = "Workload"
DEPLOYMENT = "Deployment"
EXECUTION = "Execution"
CLIENT = "Client"

File = Annotated[Path | None, typer.Argument(metavar="[FILE.toml]", help="An experiment file.")]
Suite = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="An experiment that comes with slo-bench (see `slo-bench list suites`). "
        "Without any option at all: quickstart.",
        autocompletion=listed("suites"),
    ),
]
System = Annotated[
    list[str] | None,
    typer.Option(
        "--system",
        "-s",
        metavar="S",
        help="A system by name, or FILE.py[:CLASS] with one of your own. May be repeated.",
        autocompletion=listed("systems"),
        rich_help_panel=SYSTEMS,
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD=A,B,…",
        help="Run every combination with these values of a setting (tp=1,2) or of a system's "
        "parameter (sarathi.chunk_tokens=512,1024); one value just sets it. May be repeated.",
        rich_help_panel=SYSTEMS,
    ),
]
Workload = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        "-w",
        metavar="W",
        help="A catalogue name, a trace file, or mix(…). May be repeated.",
        autocompletion=listed("workloads"),
        rich_help_panel=WORKLOAD,
    ),
]
Models = Annotated[
    str | None,
    typer.Option(
        metavar="fleet(…)|zipf(…)|assign(…)",
        help="Which models requests ask for, as in fleet(llama-3.1-8b*4, qwen2.5-3b*4); for "
        "systems that serve several on --gpus GPUs.",
        rich_help_panel=WORKLOAD,
    ),
]
Arrivals = Annotated[
    str | None,
    typer.Option(
        metavar="PROCESS",
        help="poisson, gamma(cv=2), concurrency(16), …. Replaces a trace's own.",
        rich_help_panel=WORKLOAD,
    ),
]
Rates = Annotated[
    str | None,
    typer.Option(
        metavar="2,4,8|2:16:2",
        help="Offered rates in requests per second. Default: a ladder around the estimated "
        "capacity.",
        rich_help_panel=WORKLOAD,
    ),
]
LoadFactors = Annotated[
    str | None,
    typer.Option(
        metavar="0.5,1,1.5",
        help="Offered rates as shares of the estimated capacity of each cell.",
        rich_help_panel=WORKLOAD,
    ),
]
ReplaySpeed = Annotated[
    str | None,
    typer.Option(
        metavar="0.5,1,2",
        help="Replay a trace's own arrivals so much faster. Default for traces: 0.5,1,2.",
        rich_help_panel=WORKLOAD,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests",
        "-n",
        metavar="N",
        help="Requests in each cell. Default: 1000; of a trace all.",
        rich_help_panel=WORKLOAD,
    ),
]
Duration = Annotated[
    float | None,
    typer.Option(metavar="S", help="Seconds of arrivals, instead.", rich_help_panel=WORKLOAD),
]
Warmup = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help="Requests that arrive in the first S seconds do not count.",
        rich_help_panel=WORKLOAD,
    ),
]
Slo = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ttft=1,tpot=0.15",
        help="Bounds in seconds: any of ttft, tpot, e2e, deadline; e2e=uniform(1,350) draws; "
        "'chat:ttft=0.5; batch:e2e=60' sets them by class; '' keeps a trace's own. May be "
        "repeated, which compares them.",
        rich_help_panel=WORKLOAD,
    ),
]
SloScale = Annotated[
    float | None,
    typer.Option(metavar="F", help="Multiply every bound.", rich_help_panel=WORKLOAD),
]
Seeds = Annotated[
    int | None,
    typer.Option(metavar="N", help="Repetitions. Default: 3.", rich_help_panel=WORKLOAD),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", help="The first seed. Default: 0.", rich_help_panel=WORKLOAD),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="M",
        help="A catalogue name, or a folder with a config.json. Default: llama-3.1-8b.",
        autocompletion=listed("models"),
        rich_help_panel=DEPLOYMENT,
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        "-g",
        metavar="G",
        help="Default: a100-80g.",
        autocompletion=listed("gpus"),
        rich_help_panel=DEPLOYMENT,
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(metavar="N", help="In all: instances × tp × pp.", rich_help_panel=DEPLOYMENT),
]
Tp = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tensor parallel GPUs. Default: the fewest on which the model fits.",
        rich_help_panel=DEPLOYMENT,
    ),
]
Pp = Annotated[
    int | None,
    typer.Option(metavar="N", help="Pipeline stages. Default: 1.", rich_help_panel=DEPLOYMENT),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        metavar="MAP",
        help="Layers on devices: a file of `tune placement --out`, or a shipped map's name. In "
        "place of --gpu, --tp and --pp.",
        rich_help_panel=DEPLOYMENT,
    ),
]
Failures = Annotated[
    str | None,
    typer.Option(
        metavar="N@S..S,…",
        help="Instances that fail, from when to when: 2@30s..60s, or 0@90s for good. Simulated.",
        rich_help_panel=DEPLOYMENT,
    ),
]
Instances = Annotated[
    int | None,
    typer.Option(metavar="N", help="Copies of the model. Default: 1.", rich_help_panel=DEPLOYMENT),
]
Router = Annotated[
    str | None,
    typer.Option(
        metavar="R",
        help="Which instance gets a request. Default: the system's own.",
        autocompletion=listed("routers"),
        rich_help_panel=DEPLOYMENT,
    ),
]
Embedder = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The embedding model beside the language model, for workloads with embedding "
        "requests.",
        rich_help_panel=DEPLOYMENT,
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Measured step times in place of the fitted ones (see `slo-bench profile`); sets "
        "model, GPU and tp unless they are given.",
        rich_help_panel=DEPLOYMENT,
    ),
]
LengthPredictor = Annotated[
    str | None,
    typer.Option(
        metavar="P",
        help="What policies are told of answers' lengths: oracle (the truth), noisy(accuracy=0.8), "
        "constant(256), or a folder that `slo-bench predict-train` made. Default: oracle.",
        rich_help_panel=DEPLOYMENT,
    ),
]
OverlongRequests = Annotated[
    str | None,
    typer.Option(
        metavar="error|reject|truncate",
        autocompletion=among("error", "reject", "truncate"),
        help="What becomes of requests longer than the context or the KV cache: `reject` counts "
        "them as misses, as a server would turn them away. Default: reject.",
        rich_help_panel=DEPLOYMENT,
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        "-b",
        metavar="simulated|openai|vllm|sglang|torch",
        autocompletion=among("simulated", "openai", "vllm", "sglang", "torch"),
        help="What runs it: the simulator, real servers, or our own small engine (torch). Default: "
        "simulated; with --base-url openai.",
        rich_help_panel=EXECUTION,
    ),
]
BaseUrl = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="An OpenAI-compatible server that runs already. Repeated: all of them, behind "
        "the router.",
        rich_help_panel=CLIENT,
    ),
]
Api = Annotated[
    str | None,
    typer.Option(
        metavar="completions|chat|embeddings",
        help="Where requests go. Default: completions.",
        rich_help_panel=CLIENT,
    ),
]
Header = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Sent with every request; $NAME in the value is an environment variable. May be "
        "repeated.",
        rich_help_panel=CLIENT,
    ),
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The environment variable that holds the API key; the key is written nowhere.",
        rich_help_panel=CLIENT,
    ),
]
Body = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=JSON",
        help="A field of every request's body, in place of ours. May be repeated.",
        rich_help_panel=CLIENT,
    ),
]
PromptFormat = Annotated[
    str | None,
    typer.Option(
        metavar="auto|token-ids|text",
        help="What prompts without text are made of. Default: token ids; for chat: text.",
        rich_help_panel=CLIENT,
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of the served model's tokenizer: prompts use its vocabulary.",
        rich_help_panel=CLIENT,
    ),
]
ServerArg = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ARG",
        help="Passed on, as it is, to servers that we start (--server-arg=--dtype=float32). "
        "May be repeated.",
        rich_help_panel=CLIENT,
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help="A cell ends after so long; what is under way is then missed. Default: ten "
        "minutes after the last arrival.",
        rich_help_panel=CLIENT,
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Processes that send. Default: as many as the load needs; with --executor ray one on "
        "each machine at least.",
        rich_help_panel=CLIENT,
    ),
]
SaveTokenTimes = Annotated[
    bool,
    typer.Option(
        "--save-token-times", help="Keep the time of every token.", rich_help_panel=CLIENT
    ),
]
Export = Annotated[
    str | None,
    typer.Option(
        metavar="vllm",
        help="Also write each cell as `vllm bench serve --save-result --save-detailed` does.",
        rich_help_panel=CLIENT,
    ),
]
Validate = Annotated[
    bool,
    typer.Option(
        "--validate",
        help="Of servers that we start: simulate every level as well, with step times fitted to "
        "the server's steps in the other levels, and print how far off that is. Every level is "
        "measured three times, to tell errors from a machine that is not steady. With --profile "
        "FILE by those step times; servers that run already need it. --json prints those rows.",
        rich_help_panel=EXECUTION,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help="Run folder, empty or new. Default: a new one under runs.",
        rich_help_panel=EXECUTION,
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Run only what --out lacks.", rich_help_panel=EXECUTION),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N",
        help="Processes. Default: one per core.",
        rich_help_panel=EXECUTION,
    ),
]
Executor = Annotated[
    str,
    typer.Option(
        metavar="local|ray",
        help="Where cells are simulated, and from where servers that run already get their load: "
        "this machine, or all of a Ray cluster (extra slo-bench[ray]).",
        rich_help_panel=EXECUTION,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto",
        help="Of the Ray cluster. Default: one is started on this machine.",
        rich_help_panel=EXECUTION,
    ),
]
Records = Annotated[
    str | None,
    typer.Option(
        metavar="auto|csv|parquet|none",
        autocompletion=among("auto", "csv", "parquet", "none"),
        help="Per-request records. Default: Parquet if pyarrow is installed, else CSV.",
        rich_help_panel=EXECUTION,
    ),
]
NoReport = Annotated[
    bool, typer.Option("--no-report", help="Write no report.html.", rich_help_panel=EXECUTION)
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the rows of cells.csv as a JSON list, and nothing else.",
        rich_help_panel=EXECUTION,
    ),
]
