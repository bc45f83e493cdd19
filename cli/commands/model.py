"""`slo-bench model`: show how a model is read and what fits, or make a small one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from ...predictors.families import random_types
from ..options.names import listed
from ..options.parameters import GPU, argument, epilog, flag, option

SHOW_EXAMPLES = (
    "slo-bench model show qwen3-next-80b-a3b",
    "slo-bench model show llama-3.3-70b --gpu h100-80g --tp 2 --server vllm:0.16",
    "slo-bench model show gpt-oss-120b --gpu h200-141g --kv-dtype fp8 --json",
)
MAKE_EXAMPLES = (
    "slo-bench model make models/tiny",
    "slo-bench model make models/small --like qwen3 --size 100m",
    "slo-bench model make models/encoder --like bert",
)

EXAMPLES = (SHOW_EXAMPLES[0], *MAKE_EXAMPLES)

_DECODERS, _ENCODERS = (", ".join(random_types(kind)) for kind in ("decoder", "encoder"))

app = typer.Typer(
    help="Show how a model is read and what fits, or make a small one to try servers with.",
    no_args_is_help=True,
    epilog=epilog(EXAMPLES),
)


@app.callback()
def model() -> None:
    """Show how a model is read and what fits, or make a small one to try servers with."""


@app.command(epilog=epilog(SHOW_EXAMPLES))
def show(
    name: str = argument(
        "MODEL", "Name of the catalogue, or a folder with config.json.", complete=listed("models")
    ),
    gpu: str | None = option("NAME", "Also what fits on this GPU.", *GPU, complete=listed("gpus")),
    tp: int | None = option("N", "GPUs that share each layer (default: the fewest).", min=1),
    server: str = option(
        "NAME[:VERSION]",
        "Take what vllm or sglang (of a version) takes of memory beside weights and KV.",
        default="any",
    ),
    weight_dtype: str = option("D", "Format of the weights.", default="auto"),
    kv_dtype: str = option("D", "Format of the KV cache.", default="auto"),
    memory_share: float = option("SHARE", "Share of GPU memory to use.", default=0.9),
    as_json: bool = flag("Print JSON.", "--json"),
) -> None:
    """Show how a model is read: layers by kind, parameters, formats, KV and state bytes.

    With --gpu also what each GPU holds, how many tokens of KV are left, and the longest context.
    `auto` formats are those of the checkpoint.
    """
    from ...predictors import specs
    from ...predictors.model_facts import memory_facts, model_facts, placed_as_served
    from ...predictors.placement import smallest_tp, uneven_kv_heads
    from ...workloads.errors import SloBenchError

    spec = specs.model(name)
    kv = spec.kv_dtype_of(kv_dtype)
    facts: dict[str, Any] = model_facts(spec, kv)
    if gpu is None and (tp is not None or server != "any"):
        raise SloBenchError("--tp and --server say what fits on a GPU; name it with --gpu")
    if gpu is not None:
        device = specs.gpu(gpu)
        if tp is None:
            tp = smallest_tp(spec, device, 1, weight_dtype, kv, memory_share)
        kind, _, version = server.partition(":")
        place = placed_as_served(spec, device, tp, weight_dtype, kv, memory_share, kind, version)
        place.check_tp()
        if note := uneven_kv_heads(spec, tp):
            typer.echo(note, err=True)
        facts["memory"] = memory_facts(place)
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=2))
    else:
        from ..output.model_output import print_model

        print_model(facts)


@app.command(epilog=epilog(MAKE_EXAMPLES))
def make(
    folder: Path = argument("DIR", "Folder to write: new or empty."),
    like: str = option(
        "NAME", f"Architecture: {_DECODERS} or {_ENCODERS}, an encoder.", default="llama"
    ),
    size: str = option("N", "Number of parameters: 4m, 100m, 1.5b.", default="4m"),
    seed: int = option("N", "Seed of the weights.", default=0, min=0),
) -> None:
    """Write a model with random weights, a tokenizer and a chat template, in float32.

    vLLM, SGLang, transformers and `--backend torch` load it. Its speed is that of a model of its
    shape; its answers are nonsense and end at their token limit. `bert` has no answers: it is a
    model for `--embedder`.
    """
    from ...harness.servers.launch import random_model

    fields = random_model.model_fields(like, random_model.parse_parameters(size))
    shape = random_model.shape_of(fields)
    random_model.make_model(folder, fields, seed)
    typer.echo(
        f"{folder}: {like}, {random_model.parameter_count(fields) / 1e6:,.1f} million parameters "
        f"({shape.layers} layers of {shape.hidden})"
    )
