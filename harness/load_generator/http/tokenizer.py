"""Tokenizer of the served model: valid token ids, and texts of exact length."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....workloads.errors import FileFormatError, SloBenchError
from ....workloads.parsing import parse_json

Ints = NDArray[np.int64]
_MOST_IDS = 1 << 24  # more than any vocabulary has


@dataclass(frozen=True)
class Vocabulary:
    """Ids of ordinary tokens, in order."""

    ids: Ints

    @classmethod
    def span(cls, low: int, high: int) -> Vocabulary:
        """All ids from `low` to below `high`.

        Raises:
            SloBenchError: there are fewer than two.
        """
        if not 0 <= low < high - 1:
            raise SloBenchError(f"token ids {low}:{high} should be LOW:HIGH, with two ids at least")
        return cls(np.arange(low, high, dtype=np.int64))

    @classmethod
    def read(cls, folder: Path) -> Vocabulary:
        """The ordinary tokens of `tokenizer.json`, or else all ids that `config.json` counts.

        Raises:
            FileFormatError: the folder has neither, or they cannot be read.
        """
        tokenizer = folder / "tokenizer.json"
        if tokenizer.is_file():
            table = _json(tokenizer)
            model, added = table.get("model"), table.get("added_tokens") or []
            vocabulary = model.get("vocab") if isinstance(model, dict) else None
            known: set[int]
            if isinstance(vocabulary, dict):
                known = {_id(tokenizer, found) for found in vocabulary.values()}
            elif isinstance(vocabulary, list):  # unigram: position is id
                known = set(range(len(vocabulary)))
            else:
                raise FileFormatError(tokenizer, None, "has no vocabulary in model.vocab")
            if not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
                raise FileFormatError(tokenizer, None, "added_tokens must be a list of objects")
            special = {_id(tokenizer, one.get("id")) for one in added}
            ids = sorted(known - special)
        else:
            config = folder / "config.json"
            if not config.is_file():
                raise FileFormatError(folder, None, "has neither tokenizer.json nor config.json")
            size = _json(config).get("vocab_size")
            if not isinstance(size, int) or not 0 <= size <= _MOST_IDS:
                raise FileFormatError(config, None, "has no vocab_size")
            ids = list(range(min(3, size), size))  # the first are special more often than not
        if len(ids) < 2:
            raise FileFormatError(folder, None, "has fewer than two ordinary tokens")
        return cls(np.array(ids, dtype=np.int64))


def _id(path: Path, found: object) -> int:
    if not isinstance(found, int) or not 0 <= found <= _MOST_IDS:
        raise FileFormatError(path, None, f"a token's id is {found!r:.40}")
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise FileFormatError(path, None, "is no JSON object")
    return found


def load_encoder(folder: Path) -> Any:
    """The tokenizer itself, where the `tokenizers` package is installed; else None."""
    path = folder / "tokenizer.json"
    if not path.is_file() or find_spec("tokenizers") is None:
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
