"""Short labels for long settings: a name that was given, what differs, or a letter.

`mix(chat=azure-conv:1,code=azure-code:9)` beside `mix(chat=azure-conv:5,code=azure-code:5)` are
`chat:code 1:9` and `chat:code 5:5`. What is short stays as it is.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Mapping, Sequence

from ...workloads.call_parser import parse_call, parse_values, split_outside
from ...workloads.errors import SloBenchError

SHORT = 28
"""Longest text (characters) that needs no label."""

LONGEST = 60
"""Longest label (characters); beyond it, letters are the labels."""

_Leaves = dict[str, str]


def labels(texts: Sequence[str]) -> dict[str, str]:
    """A label for each of some distinct texts; distinct as well."""
    if not any(map(_name, texts)) and all(len(text) <= SHORT for text in texts):
        return {text: text for text in texts}
    named = {text: _name(text) or text for text in texts}  # one without a name keeps itself
    for candidate in (named, _differing(texts) if len(texts) > 1 else _headed(texts)):
        if _are_labels(candidate):
            return candidate
    return {text: _letter(place) for place, text in enumerate(texts)}


def _are_labels(label_of: Mapping[str, str]) -> bool:
    lengths = {label: SHORT if label == text else LONGEST for text, label in label_of.items()}
    return len(lengths) == len(label_of) and all(
        0 < len(t) <= limit for t, limit in lengths.items()
    )


def is_letter(label: str) -> bool:
    """Whether a label says nothing of what it stands for."""
    return label.isupper() and label.isalpha() and len(label) <= 2


def stand_alone(texts: Sequence[str]) -> bool:
    """Whether the labels of the texts say what they are, not only how they differ."""
    return len(texts) == 1 or all(len(text) <= SHORT or _name(text) for text in texts)


def _name(text: str) -> str:
    try:
        return parse_call(text).named.get("name", "")
    except SloBenchError:
        return ""


def _headed(texts: Sequence[str]) -> dict[str, str]:
    heads = {text: text.partition("(") for text in texts}
    return {text: f"{head}(…)" if bracket else text for text, (head, bracket, _) in heads.items()}


def _letter(place: int) -> str:
    more, last = divmod(place, 26)
    return (string.ascii_uppercase[more - 1] if more else "") + string.ascii_uppercase[last]


def _differing(texts: Sequence[str]) -> dict[str, str]:
    """Labels from the few settings that distinguish the texts; common values are left out."""
    read = {text: _leaves(text) for text in texts}
    chosen = _telling(list(read.values()))
    usual = {
        key: Counter(leaves.get(key, "") for leaves in read.values()).most_common(1)
        for key in chosen
    }

    def label(text: str, *, whole: bool) -> str:
        leaves = read[text]
        shown = [
            f"{key.strip()} {leaves[key]}".strip()
            for place, key in enumerate(chosen)
            if key in leaves and (whole or not place or leaves[key] != usual[key][0][0])
        ]
        return ", ".join(shown) or (text if len(text) <= SHORT else "")

    brief = {text: label(text, whole=False) for text in texts}
    if len(set(brief.values())) == len(texts) and all(brief.values()):
        return brief
    return {text: label(text, whole=True) for text in texts}


def _telling(read: Sequence[_Leaves]) -> list[str]:
    """Keys whose values together are different for all: at each turn the one that splits most."""
    keys = list(dict.fromkeys(key for leaves in read for key in leaves))
    chosen: list[str] = []
    split = 1
    while split < len(read):
        counts = {
            key: len({tuple(leaves.get(k, "") for k in (*chosen, key)) for leaves in read})
            for key in keys
        }
        best = max(counts, key=counts.__getitem__, default="")
        if not counts or counts[best] == split:
            break
        chosen.append(best)
        split = counts[best]
    return chosen


def _leaves(text: str) -> _Leaves:
    """The settings of a text by their path: `chat prompt` → `uniform(100,500)`.

    The shares of a mix are one setting, `chat:code` → `1:9`, since one alone says little.
    """
    leaves: _Leaves = {}
    shares: dict[str, str] = {}
    try:
        _collect(text, "", leaves, shares)
    except SloBenchError:
        return {"": text}
    if not shares:
        return leaves
    return {":".join(shares): ":".join(shares.values()), **leaves}


def _collect(text: str, path: str, leaves: _Leaves, shares: dict[str, str]) -> None:
    pieces = [piece for piece in split_outside(text, ";") if piece]
    if len(pieces) > 1:
        for piece in pieces:
            _collect(piece, path, leaves, shares)
        return
    head, *rest = split_outside(text, ":")
    if rest and all(map(_is_number, (head, *rest))):
        leaves["ratio"] = text
    elif rest and _is_number(rest[-1]):
        shares[path or head] = rest[-1]
        _collect(":".join([head, *rest[:-1]]), path, leaves, shares)
    elif rest:
        _collect(":".join(rest), f"{path} {head}".strip(), leaves, shares)
    elif len(split_outside(text, "=")) > 1:
        _collect_values(text, path, leaves, shares)
    elif "(" in text and any(mark in text for mark in "=:"):
        leaves[f"{path} ".lstrip()] = parse_call(text).name
        _collect_values(text.partition("(")[2][:-1], path, leaves, shares)
    else:
        leaves[path] = text


def _collect_values(text: str, path: str, leaves: _Leaves, shares: dict[str, str]) -> None:
    positional, named = parse_values(text)
    if positional:
        parts = [split_outside(value, ":") for value in positional]
        for value, (head, *rest) in zip(positional, parts, strict=True):
            below = f"{path} {head}".strip() if rest else path
            _collect(value, below, leaves, shares)
    for key, value in named.items():
        _collect(value, f"{path} {key}".strip(), leaves, shares)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
