"""Prompts for requests that have lengths but no text, and the tokens they are made of.

A prompt follows from the request alone: its known prefix blocks from their hashes, so that
requests which share blocks share tokens, and the rest from its row. The same workload and salt
give the same prompts.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....workloads.arrays import Ints
from ....workloads.errors import FileFormatError, SloBenchError
from ....workloads.extras import is_installed
from ....workloads.parsing import read_json_object
from ....workloads.request import Request

Hashes = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ALL_BITS = (1 << 64) - 1
_MOST_IDS = 1 << 24  # larger than any vocabulary
_ROW_STREAM = 1 << 62  # keeps rows apart from block hashes

# Short and frequent: nearly every tokenizer has each of them, with its space, as one token.
_FREQUENT = (
    "the of and to in is you that it he was for on are as with his they at be this have from "
    "or one had by word but not what all were we when your can said there use an each which "
    "she do how their if will up other about out many then them these so some her would make "
    "like him into time has look two more write go see number no way could people my than "
    "first water"
)
FREQUENT_WORDS = tuple(_FREQUENT.split())


# Without non-ASCII escapes: what is sent is what a text holds, byte for byte.
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class PromptMaker:
    """Makes prompts of exact lengths in tokens."""

    def __init__(
        self, vocabulary: Vocabulary, block_size: int, salt: str, encoder: Any = None
    ) -> None:
        self._ids = vocabulary.ids
        self._block_size = block_size
        self._salt = np.uint64(zlib.crc32(salt.encode()) << 32)
        self._encoder = encoder
        self._places = np.empty(0, dtype=np.uint64)
        self._id_texts: NDArray[np.bytes_] | None = None  # of all ids, with a comma
        self._encoded = 0  # ids, before there were these texts

    def token_ids_json(self, request: Request) -> bytes:
        """Return `token_ids` as a list in JSON."""
        drawn = self._drawn(request) % np.uint64(len(self._ids))
        if self._id_texts is None:
            self._encoded += len(drawn)
            if self._encoded < len(self._ids):  # too few to be worth the text of each id
                return encode_json(self._ids[drawn].tolist()).encode()
            self._id_texts = np.array([b"%d," % token_id for token_id in self._ids.tolist()])
        # Shorter texts are filled up with zero bytes.
        return b"[%b]" % self._id_texts[drawn].tobytes().replace(b"\0", b"")[:-1]

    def token_ids(self, request: Request, first: int = 0) -> list[int]:
        """Return one token id per prompt token, from the `first` on."""
        drawn = self._drawn(request)[first:]
        ids: list[int] = self._ids[drawn % np.uint64(len(self._ids))].tolist()
        return ids

    def words(self, request: Request, first: int = 0) -> str:
        """Return a text with one word per token from the `first` on; with a tokenizer, of exactly
        as many tokens.
        """
        drawn = (self._drawn(request)[first:] % np.uint64(len(FREQUENT_WORDS))).tolist()
        text = " ".join([FREQUENT_WORDS[k] for k in drawn])
        return text if self._encoder is None else self._cut(text, len(drawn))

    def _cut(self, text: str, tokens: int) -> str:
        """Return the longest start of a text with this number of tokens, or the nearest possible
        number.
        """
        encode = self._encoder.encode
        words = text.split(" ")
        for _ in range(8):
            count = len(encode(" ".join(words), add_special_tokens=False).ids)
            if count == tokens:
                break
            if count > tokens:
                words = words[: max(1, len(words) - (count - tokens))]
            else:
                words += [FREQUENT_WORDS[k % len(FREQUENT_WORDS)] for k in range(tokens - count)]
        return " ".join(words)

    def _drawn(self, request: Request) -> Hashes:
        """Draw one number for each token of the prompt."""
        tokens = request.prompt_tokens
        row = _ROW_STREAM + request.id
        if not request.prefix_blocks:
            return self._of_row(row, tokens)
        size = self._block_size
        shared = request.prefix_blocks[: -(-tokens // size)]
        shared_tokens = min(tokens, len(shared) * size)
        blocks = np.array([hash_ & _ALL_BITS for hash_ in shared], dtype=np.uint64)
        place = np.arange(size, dtype=np.uint64)
        with np.errstate(over="ignore"):
            of_blocks = _mixed(_mixed(blocks + self._salt)[:, None] + place * _GOLDEN).ravel()
        return np.concatenate(
            [of_blocks[:shared_tokens], self._of_row(row, tokens - shared_tokens)]
        )

    def _of_row(self, row: int, tokens: int) -> Hashes:
        begin = _mixed_one(row + int(self._salt))
        if tokens > len(self._places):
            self._places = np.arange(2 * tokens, dtype=np.uint64) * _GOLDEN
        return _mixed(self._places[:tokens] + np.uint64(begin))


def _mixed(values: Hashes) -> Hashes:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a uniform hash."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


def _mixed_one(value: int) -> int:
    """The same of one number, modulo 2^64."""
    value &= _ALL_BITS
    value = (value ^ (value >> 30)) * _MIX_1 & _ALL_BITS
    value = (value ^ (value >> 27)) * _MIX_2 & _ALL_BITS
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Vocabulary:
    """Ids of ordinary tokens, in order."""

    ids: Ints

    @classmethod
    def span(cls, low: int, high: int) -> Vocabulary:
        """Vocabulary of all ids from `low` to below `high`.

        Raises:
            SloBenchError: there are fewer than two.
        """
        if not 0 <= low < high - 1:
            raise SloBenchError(f"token ids {low}:{high} should be LOW:HIGH, with two ids at least")
        return cls(np.arange(low, high, dtype=np.int64))

    @classmethod
    def read(cls, folder: Path) -> Vocabulary:
        """Read the ordinary tokens of `tokenizer.json`, or else all ids that `config.json` counts.

        Raises:
            FileFormatError: the folder has neither, or they cannot be read.
        """
        tokenizer = folder / "tokenizer.json"
        if tokenizer.is_file():
            table = read_json_object(tokenizer)
            model, added = table.get("model"), table.get("added_tokens") or []
            vocabulary = model.get("vocab") if isinstance(model, dict) else None
            vocabulary_ids: set[int]
            if isinstance(vocabulary, dict):
                vocabulary_ids = {_id(tokenizer, token_id) for token_id in vocabulary.values()}
            elif isinstance(vocabulary, list):  # unigram: position is id
                vocabulary_ids = set(range(len(vocabulary)))
            else:
                raise FileFormatError(tokenizer, None, "has no vocabulary in model.vocab")
            if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
                raise FileFormatError(tokenizer, None, "added_tokens must be a list of objects")
            special = {_id(tokenizer, entry.get("id")) for entry in added}
            ids = sorted(vocabulary_ids - special)
        else:
            config = folder / "config.json"
            if not config.is_file():
                raise FileFormatError(folder, None, "has neither tokenizer.json nor config.json")
            size = read_json_object(config).get("vocab_size")
            if not isinstance(size, int) or not 0 <= size <= _MOST_IDS:
                raise FileFormatError(config, None, "has no vocab_size")
            ids = list(range(min(3, size), size))  # the first are special more often than not
        if len(ids) < 2:
            raise FileFormatError(folder, None, "has fewer than two ordinary tokens")
        return cls(np.array(ids, dtype=np.int64))


def _id(path: Path, token_id: object) -> int:
    if not isinstance(token_id, int) or not 0 <= token_id <= _MOST_IDS:
        raise FileFormatError(path, None, f"a token's id is {token_id!r:.40}")
    return token_id


def load_encoder(folder: Path) -> Any:
    """Load the tokenizer; None if it or the `tokenizers` package is missing."""
    path = folder / "tokenizer.json"
    if not path.is_file() or not is_installed("tokenizers"):
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
