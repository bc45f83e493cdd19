"""The samples that a predictor was trained on, stored next to it for replay, baselines and
checks.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...workloads.arrays import Ints
from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.labelled_prompts import LabelledPrompt, prompt_key
from ...workloads.parsing import parse_json

Parts = dict[str, list[LabelledPrompt]]
TRAIN, VALIDATION, CALIBRATION, TEST = "train", "validation", "calibration", "test"


@dataclass(frozen=True)
class Prompt:
    """What is known of a request before it is answered."""

    text: str
    tokens: int
    model: str = ""


def prompts_of(rows: Sequence[LabelledPrompt]) -> list[Prompt]:
    """Inputs of the predictor for these rows."""
    return [Prompt(row.prompt, row.prompt_tokens, row.model) for row in rows]


def tokens_of(rows: Sequence[LabelledPrompt]) -> Ints:
    """Lengths of the answers of these rows."""
    return np.array([row.output_tokens for row in rows], dtype=np.int64)


def pack(parts: Mapping[str, Sequence[LabelledPrompt]]) -> bytes:
    """Gzip JSON lines, without the answers' texts; the same rows give the same bytes."""
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
        for part, rows in parts.items():
            for row in rows:
                plain = {"part": part, **asdict(row)}
                del plain["answer"]
                file.write(json.dumps(plain, ensure_ascii=False).encode() + b"\n")
    return raw.getvalue()


def read_samples(path: Path) -> Parts:
    """What `pack` packed.

    Raises:
        SloBenchError: there is no such file.
        FileFormatError: it is damaged.
    """
    parts: Parts = {TRAIN: [], VALIDATION: [], CALIBRATION: [], TEST: []}
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                plain = parse_json(line)
                parts[plain.pop("part")].append(labelled_prompts_of(plain))
    except FileNotFoundError:
        raise SloBenchError(f"the predictor's samples are missing: {path}") from None
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise FileFormatError(path, None, f"damaged: {error}") from error
    return parts


def without_answer(row: LabelledPrompt) -> dict[str, Any]:
    """A row as it is written, without the text of the answer."""
    return {**asdict(row), "answer": None}


def labelled_prompts_of(plain: Mapping[str, Any]) -> LabelledPrompt:
    """A row as it was written.

    Raises:
        TypeError: it is none.
    """
    row = LabelledPrompt(**plain)
    if not (isinstance(row.prompt, str) and isinstance(row.model, str)):
        raise TypeError("prompt and model must be texts")
    if not (_is_count(row.prompt_tokens) and _is_count(row.output_tokens)):
        raise TypeError("token counts must be whole numbers of at least 0")
    return row


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40


def seen_in(parts: Parts, *, test: bool = False) -> Callable[[LabelledPrompt], bool]:
    """Whether a row's prompt took part in training, in stopping it or in calibration, or with
    `test` was kept back from them.
    """
    keys = {prompt_key(row.prompt) for part in parts if test or part != TEST for row in parts[part]}
    return lambda row: prompt_key(row.prompt) in keys
