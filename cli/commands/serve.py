"""`slo-bench serve`: a server with one of our policies inside, until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from ...harness.servers.launch.backend_names import TORCH
from ...harness.servers.server_kinds import DEFAULT_SERVER, LAUNCHED, server_kind
from ...workloads.errors import SloBenchError
from ..options.from_schema import Given, offer, with_options
from ..options.gateway_limits import GatewayLimits, limits_of
from ..options.names import listed
from ..options.parameters import BACKEND, MODEL, allow_host, argument, option

EXAMPLES = (
    "slo-bench serve vllm --backend vllm --model models/tiny --instances 2 --router prefix-aware",
    "slo-bench serve distserve --backend vllm --model models/tiny --set decode_instances=2",
    "slo-bench serve ascendra --backend vllm --model models/tiny --set n_lp=1",
    "slo-bench serve prism --backend vllm --model models/a --model models/b --max-active-models 1",
    "slo-bench serve edf --backend vllm --model models/tiny",
    "slo-bench serve slo-odbs-continuous --backend vllm --model M "
    "--length-predictor 'learned(lengths, online=200)'",
    "slo-bench serve vllm --backend vllm --model models/tiny --port 8000",
    "slo-bench serve vllm --backend torch",
    "slo-bench serve edf-drop --backend vllm --model M --num-gpu-blocks 200 "
    "--server-arg=--max-model-len=2048",
)


_TAKEN = (
    *("instances", "router", "length_predictor", "num_gpu_blocks", "block_size", "num_cpu_blocks"),
    *("embedder", "device_map", "server.kv_transfer", "server.kv_store", "server.kvcached"),
    *("server.args", "server.dtype", "server.threads", "server.startup_timeout_s"),
)
_CHANGED = {
    "instances": {"help": "Number of servers behind one address. Default: 1."},
    "router": {
        "help": "Router of several servers: round-robin, random, least-loaded, prefix-aware or "
        "load-aware. Default: the system's own."
    },
    "length_predictor": {
        "help": "Predictor of output lengths for the policy: a folder written by `slo-bench "
        "predict-train`; learned(DIR, model=NAME, online=200), which also learns online; or "
        "constant(N). Default: none."
    },
    "block_size": {"help": "Tokens in a KV block. Default: the server's own."},
    "num_cpu_blocks": {
        "help": "KV blocks in host memory for swapping. Default: 1024 if the system swaps."
    },
    "embedder": {"help": "With torch: embedding model served at /v1/embeddings."},
}

# In `--help`; the others in `--help-all`.
SHOWN = (
    *("--backend", "--model", "--set", "--port", "--instances", "--router", "--embedder"),
    *("--length-predictor", "--api-key-env", "--server-arg", "--served-name"),
)


@with_options
def serve(
    system: str = argument(
        "SYSTEM",
        "System by name, or FILE.py[:CLASS] with your own. The system with the server's own name "
        f"({', '.join(LAUNCHED)}) is the unpatched server.",
        complete=listed("systems"),
    ),
    server_options: Given = offer(only=_TAKEN, changed=_CHANGED),
    limits: Given = offer(GatewayLimits),
    model: list[str] | None = option(
        "PATH",
        "Model: a folder, or a name on the Hugging Face hub. With torch: a folder; default: a "
        "tiny Llama with random weights. With prism: may be repeated; the models share one queue.",
        *MODEL,
    ),
    max_active_models: int | None = option(
        "N",
        "With prism: maximum number of models active on the device; others sleep or are stopped. "
        "Default: all.",
        min=1,
    ),
    backend: str = option(
        "B",
        f"Server: {', '.join(LAUNCHED)} or {TORCH} (the built-in PyTorch engine); vllm==0.32.0 "
        "selects a version.",
        *BACKEND,
        default=DEFAULT_SERVER,
    ),
    parameter: list[str] | None = option(
        "NAME=VALUE", "Parameter of the system. May be repeated.", "--set"
    ),
    port: int | None = option("N", "Port of the server. Default: a free port."),
    served_name: str | None = option("NAME", "Model name for clients. Default: as --model."),
    device: str | None = option("D", "With torch: device: cpu (the default), cuda or cuda:N."),
    api_key_env: str | None = option(
        "NAME",
        "Environment variable with the API key that clients must send (authorization: Bearer "
        "KEY). Default: no key; only this machine reaches the address.",
    ),
    names: list[str] | None = allow_host(),
    step_log: Path | None = option(
        "FILE", "File for one JSON line per iteration (batch, duration)."
    ),
    log: Path | None = option("FILE", "File for the server's output. Default: servers/SYSTEM.log."),
) -> None:
    """Serve a model with a policy inside the server; print the address when it is ready.

    Several servers are placed behind a router; clients see one address.
    """
    import contextlib
    import signal

    from ...harness.load_generator.machine import core_share, cores
    from ...harness.policies.routers import router as router_by_name
    from ...harness.servers.gateway import serving as gateway
    from ...harness.servers.gateway.split import transfer_of
    from ...harness.servers.launch.environments import server_of
    from ...harness.servers.launch.model_lifecycle import shared_policy
    from ...harness.servers.launch.model_names import check_model
    from ...harness.servers.launch.serve_settings import Serve
    from ...harness.servers.launch.server_process import check_port
    from ...predictors.device_map import read_device_map
    from ...workloads.masking import environment_variable
    from ..output.serving import serving_display
    from .serve_until_stopped import (
        before,
        check_hears,
        only_one,
        parameters_of,
        say,
        serve_models,
        serve_torch,
        stop_on_signals,
        wait_while_served,
    )

    stop_on_signals(signal.SIGTERM, signal.SIGHUP)
    models = model or []
    api_key = None if api_key_env is None else environment_variable(api_key_env)
    guarded = api_key is not None or bool(limits.settings) or bool(names)
    access: dict[str, Any] = {
        "api_key": api_key,
        "limits": limits_of(limits.settings),
        "names": tuple(names or ()),
    }
    settings = server_options.settings
    instances, router = settings.get("instances", 1), settings.get("router")
    length_predictor, embedder = settings.get("length_predictor"), settings.get("embedder")
    mapped = settings.get("device_map")
    placed = None if mapped is None else read_device_map(mapped)
    kv_store, threads, dtype = (
        server_options.value(f"server.{name}") for name in ("kv_store", "threads", "dtype")
    )
    blocks: dict[str, Any] = {
        name: settings.get(name) for name in ("num_gpu_blocks", "block_size", "num_cpu_blocks")
    }
    if backend == TORCH:
        serve_torch(
            system,
            only_one(models, system),
            parameters_of(parameter or [], system),
            served_name=served_name,
            **{**blocks, "block_size": blocks["block_size"] or 16},
            embedder=embedder,
            stage_layers=() if placed is None else placed.layers,
            kv_store=kv_store,
            threads=threads,
            dtype=dtype,
            device=device or "cpu",
            port=port or 0,
            length_predictor=length_predictor,
            guarded=guarded,
            access=access,
        )
        return
    only_torch = {"--embedder": embedder, "--kv-store": kv_store or None, "--device": device}
    only_torch |= {"--threads": threads, "--dtype": dtype}
    for name, value in only_torch.items():
        if value is not None:
            raise SloBenchError(f"{name} goes with --backend torch only")
    kind = server_kind(server_of(backend))
    if not models:
        raise SloBenchError(f"--backend {backend} needs --model PATH")
    server_launch = Serve(
        backend=backend,
        model=models[0],
        system=system,
        parameters=parameters_of(parameter or [], system),
        served_name=served_name,
        **blocks,
        server_args=server_options.value("server.args"),
        step_log=step_log,
        startup_timeout_s=server_options.value("server.startup_timeout_s"),
        transfer=transfer_of(server_options.value("server.kv_transfer")),
        kvcached=server_options.value("server.kvcached"),
        device_map=placed,
        private=api_key is not None,
        # Without a key only clients on this machine reach it: they need a core of their own.
        cores=() if api_key is not None else core_share().server,
    )
    if server_launch.cores:
        say(f"the servers use {len(server_launch.cores)} of {cores()} cores, clients have the rest")
    router_by_name(router or "round-robin")
    if router is not None and server_launch.controller is not None:
        raise SloBenchError(f"{system} decides across instances itself; leave --router out")
    if port is not None:
        check_port(port)
    shared = shared_policy(system, server_launch.parameters, backend)
    if length_predictor is not None:
        check_hears(server_launch, inside=shared is None)
    if shared is not None:
        if served_name is not None or router is not None or instances > 1 or step_log is not None:
            raise SloBenchError(
                f"{system} names models as the last part of their paths, with a server each: leave "
                "--served-name, --router, --instances and --step-log out"
            )
        for model_name in models if kind.loads_folders else ():
            check_model(model_name)
        serve_models(
            models,
            server_launch,
            shared,
            log or Path("servers/prism.log"),
            max_active_models,
            port or 0,
            access,
        )
        return
    only_one(models, system)
    if max_active_models is not None:
        raise SloBenchError("--max-active-models goes with prism only")
    for model_name in models if kind.loads_folders else ():
        check_model(model_name)
    log = log or Path("servers") / f"{server_launch.label}.log"

    with contextlib.ExitStack() as stack:
        needs_no_gateway = length_predictor is None and not guarded
        alone = instances == 1 and not server_launch.gateway and needs_no_gateway
        add_predictor = before(stack, length_predictor, server_launch.values_field)
        servers = server_launch.start(
            stack, log, instances=instances, port=port if alone else None, say=say
        )
        if alone:
            url = servers[0].url
        else:
            plan = server_launch.behind(servers, router)
            url = stack.enter_context(
                gateway(add_predictor(plan), port=port or 0, say=say, **access)
            )
            for server in servers:
                say(f"{server.name} at {server.url}: {server.log}")
        typer.echo(url)
        say(f"logs: {log.parent.absolute()}; Ctrl-C stops")
        look = stack.enter_context(serving_display([server.url for server in servers]))
        wait_while_served(server_launch.stand_ins(servers), look)
