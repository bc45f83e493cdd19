"""DATA of `predict-train` and `predict-eval`: files and run folders, with the answering model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...workloads.errors import SloBenchError
from ...workloads.extras import install_command, is_installed
from .parameters import argument, option

if TYPE_CHECKING:
    from ...workloads.labelled_prompts import LabelledPrompt

DATA = argument(
    "[MODEL=]DATA…",
    "JSON, JSON lines, CSV, a log of the chat API (messages, usage) or of vLLM, plain or gzip, "
    "with a prompt (prompt; instruction and input; question; conversations) and output_tokens or "
    "the answer; or a run folder of a workload with texts. MODEL: name of the answering model, "
    "for rows without one; default: the file's name.",
)
COLUMNS = option(
    "A,B",
    "Columns or paths (request.prompt) that form the prompt. One that holds the answer is refused.",
)
LENGTH_COLUMN = option(
    "COLUMN",
    "Column or path of the answer's length in tokens, as usage.completion_tokens.",
    "--length-column",
)
LABEL_TOKENIZER = option(
    "DIR",
    "Folder of the answering model's tokenizer, to count the tokens of answers without "
    "output_tokens. Default: four characters per token.",
    "--label-tokenizer",
)
BASE_AT = option(
    "PATH|NAME", "Present path of the base model. Default: the path used in training.", "--base"
)
device = partial(option, "D", "auto, cpu, cuda or cuda:N.")
THREADS = option("N", "Number of CPU threads. Default: torch's.", min=1)


@dataclass(frozen=True)
class ReadData:
    """All rows, the origin of their lengths, and notes for the user."""

    rows: list[LabelledPrompt]
    labels: str
    notes: list[str]
    named_by_file: frozenset[str] = frozenset()  # models that are names of files


def read_data(
    texts: Sequence[str], columns: str | None, tokenizer: str | None, length: str | None = None
) -> ReadData:
    """Read all rows of the given files and run folders.

    Raises:
        SloBenchError: something cannot be read, or an input column holds the answer.
    """
    from ...harness.experiments.labelled_run import read_run
    from ...workloads import labelled_prompts as labelled

    named = None if columns is None else [c.strip() for c in columns.split(",") if c.strip()]
    if named is not None:
        labelled.refuse_answers(named)
    tokens = labelled.APPROXIMATE
    if tokenizer is not None:
        tokens = labelled.tokenizer_count(Path(tokenizer))
    datasets = []
    for text in texts:
        model, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            model, path = "", text
        if Path(path).is_dir():
            if named is not None:
                raise SloBenchError(f"--columns goes with files; {path} is a run folder")
            datasets.append(read_run(Path(path), model=model or None))
        else:
            datasets.append(
                labelled.read_labelled_prompts(
                    Path(path), model=model or None, columns=named, tokens=tokens, length=length
                )
            )
    labels = list(dict.fromkeys(f"{data.labels} ({data.name})" for data in datasets))
    if len({data.labels for data in datasets}) == 1:
        labels = [datasets[0].labels]
    notes = [f"{data.name}: {note}" for data in datasets for note in data.notes]
    by_file = frozenset(data.name for data in datasets if getattr(data, "named_by_file", False))
    rows = [row for data in datasets for row in data.rows]
    return ReadData(rows, "; ".join(labels), notes, by_file)


def with_known_models(dataset: ReadData, models: Sequence[str]) -> ReadData:
    """Rows without a model answered by the predictor's only one; a warning where it is unknown.

    Args:
        dataset: the rows.
        models: models that the predictor was trained on.
    """
    if len(models) == 1:
        rows = [
            replace(row, model=models[0]) if row.model in dataset.named_by_file else row
            for row in dataset.rows
        ]
        dataset = replace(dataset, rows=rows)
    unknown = sorted({row.model for row in dataset.rows} - set(models))
    if not unknown or not models:
        return dataset
    which = f"{', '.join(unknown[:3])}{' …' if len(unknown) > 3 else ''}"
    why = " (the file's name, as rows say no model)" if set(unknown) & dataset.named_by_file else ""
    text = (
        f"WARNING: the predictor knows no model {which}{why}, so it predicts answers of an unknown "
        f"one, with larger errors. It knows {', '.join(models)}: say which answered, as "
        f"{models[0]}=FILE"
    )
    return replace(dataset, notes=[text, *dataset.notes])


def check_units(labels: str, dataset: ReadData) -> None:
    """Make sure that lengths are counted alike.

    Raises:
        SloBenchError: some are real tokens, others four characters each.
    """
    from ...workloads.labelled_prompts import APPROXIMATE

    rough = [APPROXIMATE.name in text for text in (labels, dataset.labels)]
    if rough[0] != rough[1]:
        remedy = "give --label-tokenizer DIR, or data with output_tokens"
        if rough[0]:
            remedy = "give data without output_tokens, or train the predictor on real counts"
        raise SloBenchError(
            f"the predictor's lengths are {labels}, those of the data are {dataset.labels}; they "
            f"cannot be compared: {remedy}"
        )


def need_base(base: str | None, folder: Path) -> None:
    """Check that the base model of a predictor is there, before anything is loaded.

    Raises:
        SloBenchError: it is not.
    """
    from ...predictors.lengths.predictor_config import PredictorConfig, find_base

    need_model(find_base(base, folder, PredictorConfig.load(folder)), f" or put it into {folder}")


def need_model(name: str, or_else: str = "") -> None:
    """Check that a base model is on this machine.

    Raises:
        SloBenchError: it is not; names what installs it.
    """
    from ...predictors.lengths.predictor_config import DEFAULT_BASE

    if (Path(name).expanduser() / "config.json").is_file() or where_installed(name):
        return
    if Path(name).expanduser().is_dir():
        raise SloBenchError(f"there is no model in {name}: it has no config.json")
    of_hub = name.count("/") == 1 and name[0] not in "./~"
    remedy = f", or download it: hf download {name}" if of_hub else ""
    if name == DEFAULT_BASE:
        remedy = f", or install it: {install_command('encoder')}{remedy}"
    raise SloBenchError(
        f"the base model {name} is not on this machine; give its folder with --base{or_else}"
        f"{remedy}"
    )


def where_installed(name: str) -> str | None:
    """Where a model of the hub is on this machine: `extra encoder`, `hub cache` or nowhere."""
    from ...predictors.lengths.predictor_config import packaged

    if packaged(name) is not None:
        return "extra encoder"
    return "hub cache" if in_hub_cache(name) else None


def in_hub_cache(name: str) -> bool:
    """Whether the Hugging Face cache of this machine has the model."""
    if not is_installed("huggingface_hub"):
        return False
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False
