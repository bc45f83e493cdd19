"""Tables of published results: TOML files that say what a paper printed and which set-up it needs.

An experiment names its table: `published = "uellm"` is `uellm.toml` in the folder `published`
here, `published = "mine.toml"` a file. docs/file-formats.md describes the keys. Texts of a table
speak of the paper and of the set-up; whatever speaks of measured results is computed
(`published.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from ...harness.experiments.config.experiment_file import read_toml
from ...harness.experiments.config.schema import ExperimentSchema
from ...harness.experiments.config.setting import declared
from ...harness.results.run_columns import LEAD_COLUMNS
from ...workloads.errors import FileFormatError, SloBenchError, UnknownNameError

SHIPPED = Path(__file__).parent / "published"
COMPARISONS = ("ratio", "reduction", "difference")
PICKS = ("highest", "lowest")
SETUPS = ("published", "fair")
TOLERANCE = 0.1
"""How far a reproduced figure may be from the published one: a share of it, or of its distance from
"no difference" where it is a comparison."""

ORIGINS = ("printed", "authors' code", "authors' logs", "assumed")
"""Where a setting of a published comparison is from."""

Pins = Mapping[str, str | float | bool]
# Besides parameters, `system.parameter`.
_PINNED = {*LEAD_COLUMNS, "variant", *declared(ExperimentSchema)}
_NUMBER = re.compile(r"[+−-]?[\d.]+([–-][\d.]+)?")
_BOUND = re.compile(r"(<|>|≤|≥|≈)\s*([+−-]?[\d.]+)$")


@dataclass(frozen=True)
class PublishedFigure:
    """What was published, as numbers: a figure or a range (`low` to `high`), or a bound.

    An infinite end makes it a bound. `tolerance` is in the unit of the figure.
    """

    low: float
    high: float
    tolerance: float

    @property
    def bound(self) -> bool:
        """Whether only a bound was published."""
        return math.isinf(self.low) or math.isinf(self.high)


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One published figure or order, and what of a run stands beside it.

    `column` (of cells.csv, times `scale`) is read in the cells that `where` chooses; `per` names a
    column of the same cell that it is divided by. `than`: pins
    that differ in what it is compared with, as a `ratio`, a `reduction` (1 − ratio) or a
    `difference`. `order`: pins of each of several, the highest published value first. `reaches`:
    an attainment; the figure is then the `pick` value of `column` among the cells that reach it,
    the highest up to which all do.
    `best_of`: axes; of their values the best of the run is taken, for either side of a comparison.
    `vary`: axes of what the paper does not print. Where `where`, `than` or `order` pin one, the
    row is judged at its other values as well, one axis at a time.
    `claim` names what the paper claims, `setup` whose set-up the row is (the authors', or one with
    equal allowances), `decides` what makes the difference. `unequal`: what ours may and the others
    may not, where that is the claim's own set-up.
    """

    what: str
    published: float | str | list[float]
    unit: str = ""
    column: str | None = None
    per: str | None = None
    scale: float = 1.0
    where: Pins = dataclasses.field(default_factory=dict)
    than: Pins | None = None
    by: Literal["ratio", "reduction", "difference"] = "ratio"
    order: tuple[Pins, ...] = ()
    reaches: float | None = None
    pick: Literal["highest", "lowest"] = "highest"
    best_of: tuple[str, ...] = ()
    tolerance: float | None = None
    note: str = ""
    vary: tuple[str, ...] = ()
    claim: str = ""
    setup: Literal["published", "fair"] = "published"
    decides: str = ""
    unequal: str = ""

    @property
    def sides(self) -> list[Pins]:
        """The pins of each side that is compared, ours or the highest first."""
        compared: Sequence[Pins] = self.order or [{}, *([] if self.than is None else [self.than])]
        return [{**self.where, **pins} for pins in compared]

    @property
    def figure(self) -> PublishedFigure | None:
        """The published figure, range or bound; None where none was printed."""
        if isinstance(self.published, list):
            low, high = self.published
        elif isinstance(self.published, str):
            if (bound_match := _BOUND.match(self.published)) is None:
                return None
            value = float(bound_match[2].replace("−", "-"))
            low, high = {
                "<": (-math.inf, math.nextafter(value, -math.inf)),
                "≤": (-math.inf, value),
                ">": (math.nextafter(value, math.inf), math.inf),
                "≥": (value, math.inf),
                "≈": (value, value),
            }[bound_match[1]]
        else:
            low = high = float(self.published)
        none = self.null or 0.0
        widest = max(abs(end - none) for end in (low, high) if math.isfinite(end))
        tolerance = self.tolerance
        return PublishedFigure(low, high, TOLERANCE * widest if tolerance is None else tolerance)

    @property
    def published_text(self) -> str:
        """The published figure with its unit, as a table shows it."""
        if isinstance(self.published, str):
            return f"{self.published} {self.unit if self.figure else ''}".rstrip()
        if isinstance(self.published, list):
            return f"{self.published[0]:g}–{self.published[1]:g} {self.unit}".rstrip()
        signed = self.than is not None and self.by == "difference"
        return figure_text(self.published, self.unit, signed=signed)

    @property
    def null(self) -> float | None:
        """The value of a comparison that says "no difference"; None without a comparison."""
        if self.than is None:
            return None
        return self.scale if self.by == "ratio" else 0.0


@dataclass(frozen=True)
class PublishedTable:
    """Published values of one paper. `paper` is the key of `predictors.fitted_to_papers`.

    `sources` says of each setting of the experiment where it is from (`parameters`: of all that are
    not named); a text begins with one of `ORIGINS`. `silent`: systems under test, or
    mechanisms of them (`system.mechanism`), that no kept cell shows to act, each with the reason.
    """

    title: str
    rows: tuple[PublishedRow, ...]
    note: str = ""
    paper: str = ""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    silent: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def sources_text(self) -> str:
        """The settings by where they are from, what is unequal, and what does not act."""
        parts = []
        for origin in ORIGINS:
            names = []
            for setting, text in self.sources.items():
                if text.startswith(origin):
                    explanation = text.removeprefix(origin).lstrip(": ")
                    names.append(f"{setting} ({explanation})" if explanation else setting)
            if names:
                parts.append(f"{origin.capitalize()}: {', '.join(names)}.")
        unequal = dict.fromkeys(row.unequal for row in self.rows if row.unequal)
        parts.extend(f"Unequal as published: {text}." for text in unequal)
        parts.extend(f"Not seen to act: {name} ({why})." for name, why in self.silent.items())
        return " ".join(parts)


def load_published(name: str) -> PublishedTable:
    """The shipped table of that name, or the one in a file.

    Raises:
        UnknownNameError: no table of that name is shipped.
        FileFormatError: the file cannot be read or holds no such table; with the line.
    """
    path = Path(name) if name.endswith(".toml") else SHIPPED / f"{name}.toml"
    table_names = {table_file.stem for table_file in SHIPPED.glob("*.toml")}
    if not name.endswith(".toml") and name not in table_names:
        raise UnknownNameError("table of published results", name, table_names)
    table, text = read_toml(path)
    heads = [
        line_number for line_number, line in enumerate(text.splitlines(), 1) if _ROW.match(line)
    ]
    raw = table.pop("row", None)
    if not isinstance(table.get("title"), str) or not isinstance(raw, list) or not raw:
        raise FileFormatError(path, None, "a published table needs a title and [[row]]s")
    try:
        shared = _pins(table.pop("where", {}), "where")
        sources = _sources(table.pop("sources", {}))
        silent = _texts(table.pop("silent", {}), "silent")
        for key, value in table.items():
            if key not in ("title", "note", "paper"):
                raise UnknownNameError("key of a published table", key, _KEYS)
            if not isinstance(value, str):
                raise SloBenchError(f"{key} must be text but is {value!r}")
    except SloBenchError as error:
        raise FileFormatError(path, None, str(error)) from error
    rows: list[PublishedRow] = []
    for number, fields in enumerate(raw, start=1):
        line = heads[number - 1] if len(heads) == len(raw) else None
        try:
            rows.extend(_row(row_fields, shared) for row_fields in _each(fields))
        except SloBenchError as error:
            raise FileFormatError(path, line, f"row {number}: {error}") from error
    texts = cast("dict[str, str]", table)
    return PublishedTable(
        texts["title"],
        tuple(rows),
        texts.get("note", ""),
        texts.get("paper", ""),
        sources,
        silent,
    )


_KEYS = ("title", "note", "paper", "where", "sources", "silent", "row")
_ROW = re.compile(r"\s*\[\[\s*row\s*\]\]")
_TEXTS = ("what", "unit", "column", "per", "note", "claim", "decides", "unequal")
_NUMBERS = ("scale", "reaches", "tolerance")


def _each(fields: object) -> Iterator[object]:
    """The rows that a row stands for: one for each combination of the values of its `each`.

    `each.NAME.LABEL` are settings: the label stands for {NAME} in `what` and `claim`, the settings
    are added to `where`, and those of their `than` to `than`.
    """
    if not isinstance(fields, dict) or "each" not in fields:
        yield fields
        return
    common = {key: value for key, value in fields.items() if key != "each"}
    axes = fields["each"]
    if not isinstance(axes, dict) or not all(
        isinstance(axis, dict) and axis for axis in axes.values()
    ):
        raise SloBenchError("each must be tables of settings by label by name")
    for labels in itertools.product(*axes.values()):
        row = dict(common)
        for name, label in zip(axes, labels, strict=True):
            pins = dict(_pins_by_label(axes[name][label]))
            than = pins.pop("than", {})
            row["where"] = {**row.get("where", {}), **pins}
            if than or "than" in row:
                row["than"] = {**row.get("than", {}), **than}
            for key in ("what", "claim"):
                if isinstance(row.get(key), str):
                    row[key] = row[key].replace("{" + name + "}", label)
        yield row


def _pins_by_label(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("than", {}), dict):
        raise SloBenchError(f"each must hold tables of settings but has {value!r}")
    return value


def _row(fields: object, shared: Pins) -> PublishedRow:
    """A row of the file; `shared` are the pins of all rows."""
    if not isinstance(fields, dict) or not {"what", "published"} <= set(fields):
        raise SloBenchError("needs `what` and `published`")
    field_names = {f.name for f in dataclasses.fields(PublishedRow)}
    if strangers := set(fields) - field_names:
        raise UnknownNameError("key", min(strangers), field_names)
    for key in _TEXTS:
        if not isinstance(fields.get(key, ""), str):
            raise SloBenchError(f"{key} must be text but is {fields[key]!r}")
    if "per" in fields and fields.keys() & {"reaches", "best_of"}:
        raise SloBenchError("per goes with one cell, not with reaches or best_of")
    for key in _NUMBERS:
        if not _number(fields.get(key, 1)):
            raise SloBenchError(f"{key} must be a number but is {fields[key]!r}")
    for key, options in (("by", COMPARISONS), ("pick", PICKS), ("setup", SETUPS)):
        if fields.get(key, options[0]) not in options:
            raise SloBenchError(f"{key} must be {', '.join(options)} but is {fields[key]!r}")
    published = fields["published"]
    pair = isinstance(published, list) and len(published) == 2 and all(map(_number, published))
    if not (pair or isinstance(published, str) or _number(published)):
        problem = "must be a number, a range [low, high] or text but is"
        raise SloBenchError(f"published {problem} {published!r}")
    if isinstance(published, str) and _NUMBER.fullmatch(published):
        raise SloBenchError(f"published must be a number without quotes but is {published!r}")
    if "order" in fields and (not isinstance(fields["order"], list) or len(fields["order"]) < 2):
        raise SloBenchError("order must be a list of at least two tables of settings")
    row_fields = dict(fields)
    for key in ("best_of", "vary"):
        axes = fields.get(key, [])
        if not isinstance(axes, list) or not all(isinstance(axis, str) for axis in axes):
            raise SloBenchError(f"{key} must be a list of columns but is {axes!r}")
        row_fields[key] = tuple(axes)
    row_fields["where"] = {**shared, **_pins(fields.get("where", {}), "where")}
    if "than" in fields:
        row_fields["than"] = _pins(fields["than"], "than")
    row_fields["order"] = tuple(_pins(pins, "order") for pins in fields.get("order", ()))
    row = PublishedRow(**row_fields)
    if row.unequal and row.setup == "fair":
        raise SloBenchError("unequal goes with the authors' set-up, not with setup = 'fair'")
    for axis in row.vary:
        if not any(axis in pins for pins in row.sides):
            raise SloBenchError(f"vary needs the value at which the row stands: {axis} in where")
    return row


def _texts(value: object, key: str) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise SloBenchError(f"{key} must be a table of texts but is {value!r}")
    return value


def _sources(value: object) -> Mapping[str, str]:
    sources = _texts(value, "sources")
    for setting, text in sources.items():
        if "." not in setting and setting not in {*_PINNED, "parameters"}:
            raise UnknownNameError("setting in sources", setting, _PINNED)
        if not text.startswith(ORIGINS):
            raise SloBenchError(f"sources: {setting} must begin with {', '.join(ORIGINS)}")
    return sources


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _pins(value: object, key: str) -> Pins:
    if not isinstance(value, dict):
        raise SloBenchError(f"{key} must be a table of settings but is {value!r}")
    for name, pinned in value.items():
        if "." not in name and name not in _PINNED:
            raise UnknownNameError(f"setting in {key}", name, _PINNED)
        if not isinstance(pinned, str | int | float | bool):
            raise SloBenchError(f"{key}: {name} must be one value but is {pinned!r}")
    return value


def figure_text(value: float, unit: str, *, signed: bool = False) -> str:
    """A figure with its unit: three significant digits at least, two after the point at most."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    text = f"{value:{'+' if signed else ''},.{digits}f}" if math.isfinite(value) else "–"
    return f"{text} {unit}".rstrip()
