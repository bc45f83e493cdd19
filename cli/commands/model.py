"""`slo-bench model`: make a small model to try servers with."""

from __future__ import annotations

from pathlib import Path

import typer

from ...predictors.families import random_types
from ..options.parameters import argument, epilog, option

EXAMPLES = (
    "slo-bench model make models/tiny",
    "slo-bench model make models/small --like qwen3 --size 100m",
    "slo-bench model make models/encoder --like bert",
)

_DECODERS, _ENCODERS = (", ".join(random_types(kind)) for kind in ("decoder", "encoder"))

app = typer.Typer(
    help="Make a small model to try servers with.",
    no_args_is_help=True,
    epilog=epilog(EXAMPLES),
)


@app.callback()
def model() -> None:
    """Make a small model to try servers with."""


@app.command(epilog=epilog(EXAMPLES))
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
