"""DATA of `predict-train` and `predict-eval`: files and run folders, with the answering model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...workloads.errors import SloBenchError
from .parameters import argument, option

if TYPE_CHECKING:
    from ...workloads.labelled_prompts import LabelledPrompt, TokenCount

Data = Annotated[
    list[str],
    argument(
        "[MODEL=]DATA…",
        "JSON or JSON lines, plain or gzip, with a prompt (prompt; instruction and input; "
        "question; conversations) and output_tokens or the answer; or a run folder of a "
        "workload with texts. MODEL: name of the answering model, for rows without one; "
        "default: the file's name.",
    ),
]
Columns = Annotated[
    str | None,
    option("A,B", "Columns that form the prompt. A column that holds the answer is refused."),
]
Counted = Annotated[
    str | None,
    option(
        "DIR",
        "Folder of the answering model's tokenizer, to count the tokens of answers without "
        "output_tokens. Default: four characters per token.",
        "--label-tokenizer",
    ),
]
BaseAt = Annotated[
    str | None,
    option(
        "PATH|NAME", "Present path of the base model. Default: the path used in training.", "--base"
    ),
]
Device = Annotated[str, option("D", "auto, cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, option("N", "Number of CPU threads. Default: torch's.", min=1)]


@dataclass(frozen=True)
class ReadData:
    """All rows, the origin of their lengths, and notes for the user."""

    rows: list[LabelledPrompt]
    labels: str
    notes: list[str]


def read_data(texts: Sequence[str], columns: str | None, tokenizer: str | None) -> ReadData:
    """Read all rows of the given files and run folders.

    Raises:
        SloBenchError: something cannot be read, or an input column holds the answer.
    """
    from ...harness.validation.labelled_run import read_run
    from ...workloads.labelled_prompts import APPROXIMATE, read_labelled_prompts, refuse_answers

    named = None if columns is None else [c.strip() for c in columns.split(",") if c.strip()]
    if named is not None:
        refuse_answers(named)
    tokens = APPROXIMATE if tokenizer is None else _tokenizer(tokenizer)
    found = []
    for text in texts:
        model, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            model, path = "", text
        if Path(path).is_dir():
            if named is not None:
                raise SloBenchError(f"--columns goes with files; {path} is a run folder")
            found.append(read_run(Path(path), model=model or None))
        else:
            found.append(
                read_labelled_prompts(Path(path), model=model or None, columns=named, tokens=tokens)
            )
    labels = list(dict.fromkeys(f"{data.labels} ({data.name})" for data in found))
    if len({data.labels for data in found}) == 1:
        labels = [found[0].labels]
    notes = [f"{data.name}: {note}" for data in found for note in data.notes]
    return ReadData([row for data in found for row in data.rows], "; ".join(labels), notes)


def _tokenizer(folder: str) -> TokenCount:
    from ...predictors.lengths.counting import tokenizer_count

    return tokenizer_count(Path(folder))


def need_torch() -> None:
    """Check that the packages of the extra `torch` are installed.

    Raises:
        SloBenchError: one is missing; names the command that installs it.
    """
    from importlib.util import find_spec

    needed = {"torch": "torch", "transformers": "transformers", "peft": "peft"}
    needed |= {"safetensors": "safetensors", "sklearn": "scikit-learn"}
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        raise SloBenchError(
            f"learnt predictors need {', '.join(missing)}: pip install 'slo-bench[torch]'"
        )
