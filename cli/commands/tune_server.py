"""`slo-bench tune server`: a real server's own settings, measured on the real server."""

from __future__ import annotations

from typing import Annotated

import typer

from ...tuner.search.settings import TuneSettings
from ...workloads.errors import SloBenchError
from ..options import tune as tune_options
from ..options.from_schema import Given, Offer, with_options

EXAMPLES = (
    "slo-bench tune server --backend vllm --model path/to/model --objective goodput --rate 2 "
    "--search max_num_seqs=16,64,256",
    "slo-bench tune server --backend sglang --model path/to/model --search "
    "max_running_requests=8..64 --max-time 3600",
    "slo-bench tune server --backend vllm --model path/to/model --rate 2 --objective ttft_p99 "
    "--search server.gpu-memory-utilization=0.8,0.9 --search max_num_batched_tokens=2048,8192",
)

Backend = Annotated[
    str, typer.Option("--backend", "-b", metavar="vllm|sglang", help="Server to start.")
]
Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="PATH", help="Model: a folder, or a name on the Hugging Face hub."
    ),
]


_NOT_OF_A_SERVER = (
    *("backend", "model", "models", "gpu", "gpus", "device_map", "failures", "embedder"),
    *("embed_instances", "profile", "weight_dtype", "kv_dtype", "memory_share", "host_memory_gib"),
    *(
        "host_s",
        "overlong_requests",
        "objective",
        "client.base_urls",
        "server.workers",
        "server.moving",
    ),
    *("server.clock", "server.kv_store"),
)


@with_options
def tune_server(
    backend: Backend,
    model: Model,
    given: Annotated[
        Given,
        Offer(without=(*tune_options.NOT_TUNED, *_NOT_OF_A_SERVER), changed=tune_options.CHANGED),
    ],
    tuning: Annotated[Given, Offer(TuneSettings, without=("confirm_backend",))],
    storage: tune_options.Storage = None,
    study: tune_options.Study = None,
    out: tune_options.Out = None,
    no_report: tune_options.NoReport = False,
    as_json: tune_options.AsJson = False,
) -> None:
    """Tune a real server: it is started, measured and stopped for every configuration.

    Parameters are the server's own options (see `slo-bench list systems vllm`); others are searched
    as server.NAME=A,B, where NAME is the server's option without its dashes. A configuration with
    which the server does not start or dies is a failed trial; its log is kept. To resume:
    `slo-bench tune --resume --out DIR`.
    """
    from ..output.tune import Kept, tuned

    if backend not in ("vllm", "sglang"):
        raise SloBenchError(f"--backend must be vllm or sglang but is {backend!r}")
    given.settings.update(backend=backend, model=model)
    experiment, settings = tune_options.asked_of(given, tuning, backend)
    tuned(experiment, settings, Kept(out, storage, study), no_report=no_report, as_json=as_json)
