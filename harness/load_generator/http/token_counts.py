"""The model of an answer: which events show something, and how many tokens each of them has.

An event *shows* something if a reader sees more after it: text, reasoning, a refusal, the name or
arguments of a tool, or tokens that it lists (`token_ids`, `logprobs`). Only such events begin an
answer, so TTFT is that of the first. What counts, best first: the tokens that every event lists;
the usage, spread over the events since the usage before it (all of them, if it comes once) by the
size of their texts; one token an event. Tokens that no event shows (reasoning that is not streamed)
are in no time per token. A usage that the events refute is not used. `docs/metrics.md` has a table
of the rules.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat
from typing import Any, NamedTuple

from .event_shapes import Middle

# Fields with text, by what a reader sees. Of reasoning, servers send the same under two names.
_REASONING = (
    *("reasoning_content", "reasoning", "thinking", "thought", "reasoning_text"),
    *("reasoning_details", "thinking_blocks"),
)
_CALLS = ("tool_calls", "function_call")
_ODD = frozenset((*_REASONING, *_CALLS, "refusal", "audio"))  # beside plain text
_WITHIN = (
    *("text", "thinking", "summary", "content", "transcript", "reasoning"),
    *("function", "name", "arguments", "input"),
)
_SPOKEN_REASONING = (b"</think>", b"<|channel|>")  # within the text of the answer
_LEAST_TOKEN_S = 50e-6  # tokens that follow each other faster were held back and came together
_SILENT_GAPS = 3  # an answer that opens and shows nothing for as many of its gaps may hide tokens


class Shown(NamedTuple):
    """What one choice of an event shows.

    Attributes:
        text: all of it but calls of tools; empty where there is none.
        content: the part of it that is the answer itself.
        size: bytes of what is shown; 0: nothing.
        listed: number of tokens that the event lists; -1 if it lists none.
        reasons: whether it shows reasoning.
    """

    text: str
    content: str
    size: int
    listed: int
    reasons: bool


def _size(text: str, listed: int) -> int:
    size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
    return max(size, listed)


def shown(choice: Mapping[str, Any], part: Mapping[str, Any]) -> Shown:
    """What a choice shows; `part` of it (its delta, its message or itself) holds the text."""
    content, reasoning, calls = part.get("content"), "", ""
    if isinstance(content, list):  # parts, of which some are thoughts
        reasoning = _text([item for item in content if _is_thought(item)])
        content = _text([item for item in content if not _is_thought(item)])
    elif not isinstance(content, str):
        content = ""
    if not _ODD.isdisjoint(part):
        for name in _REASONING:
            if (value := part.get(name)) and (reasoning := _text(value)):
                break
        content += _text(part.get("refusal")) + _text(part.get("audio"))
        calls = "".join(_text(part[name]) for name in _CALLS if part.get(name))
    if not content and not reasoning:
        content = _text(part.get("text"))
    text, listed = reasoning + content, _listed(choice)
    return Shown(text, content, _size(text + calls, listed), listed, bool(reasoning))


def _is_thought(item: object) -> bool:
    return isinstance(item, dict) and item.get("type") in ("thinking", "reasoning")


def _text(value: object) -> str:
    """All text within a value."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_text, value))
    if not isinstance(value, dict):
        return ""
    texts = []
    for name in _WITHIN:
        inner = value.get(name)
        if name in ("arguments", "input") and isinstance(inner, dict):  # not as text, but parsed
            texts.append(json.dumps(inner) if inner else "")
        elif inner:
            texts.append(_text(inner))
    return "".join(texts)


def _listed(choice: Mapping[str, Any]) -> int:
    if (ids := choice.get("token_ids")) and isinstance(ids, list):
        return len(ids)
    if (logprobs := choice.get("logprobs")) and isinstance(logprobs, dict):
        for name in ("tokens", "content", "refusal"):
            entries = logprobs.get(name)
            if isinstance(entries, list) and entries:
                return len(entries)
    return -1


class _Alike(NamedTuple):
    """Events of one choice that follow each other: bytes that each shows, or its text and id."""

    shown: Sequence[int | Middle]
    choice: int
    listed: int  # tokens of each; -1 if they list none

    def sizes(self) -> list[int]:
        return [value if isinstance(value, int) else _size(value[0], self.listed)
                for value in self.shown]  # fmt: skip


@dataclass
class Counted:
    """Tokens of an answer.

    Attributes:
        token_s: times of the tokens, in order.
        sequences: the same of each choice, if there are several.
        chunks: number of events with tokens.
        untimed_tokens: those that have no part in TPOT = (last − first) / (tokens − these): the
            tokens of the first event. All of them where no time per token is known; of several
            choices such that it is the mean of theirs.
        unsure: whether that is because their number is not known.
        refuted: whether the usage counts fewer tokens than the events show, and is not used.
        silent: whether tokens may have come before the first text, of which nothing tells.
    """

    token_s: array[float]
    sequences: list[array[float]] = field(default_factory=list)
    chunks: int = 0
    untimed_tokens: float = 0
    unsure: bool = False
    refuted: bool = False
    silent: bool = False


class _Shares(NamedTuple):
    """Tokens of each event, and what is true of them as in `Counted`."""

    tokens: list[int]
    unsure: bool = False
    refuted: bool = False


class TokenEvents:
    """The events of one answer that may have brought tokens, in their order.

    Attributes:
        times_s: when they came.
        reasons: whether some of them show reasoning.
        calls: whether some of them show a call of a tool and no text.
        opened_s: time of the first event that was read as JSON, whatever it shows.
    """

    def __init__(self) -> None:
        self.times_s: array[float] = array("d")
        self.reasons = False
        self.calls = False
        self.opened_s = float("inf")
        self._alike: list[_Alike] = []
        self._showing = 0
        self._listing = 0  # of those that show something
        self._several = False  # choices, or tokens that one event lists
        self._totals: dict[int, int] = {}  # tokens in all, by the number of events before

    def __bool__(self) -> bool:
        return bool(self.times_s)

    def take(self, middles: Sequence[Middle], choice: int, listed: int) -> None:
        """Add events that all show something; their times are added to `times_s`."""
        self._add(_Alike(middles, choice, listed), len(middles))

    def add(self, time_s: float, size: int, choice: int, listed: int) -> None:
        """Add an event that shows `size` bytes."""
        self.times_s.append(time_s)
        self._add(_Alike((size,), choice, listed), size > 0)

    def _add(self, alike: _Alike, showing: int) -> None:
        self._alike.append(alike)
        self._showing += showing
        if alike.listed >= 0:
            self._listing += showing
        self._several |= alike.choice > 0 or alike.listed > 1

    def total(self, tokens: int) -> None:
        """Note the usage so far: tokens in all."""
        self._totals[len(self.times_s)] = tokens

    def counts_prompt(self, prompt_tokens: int, whole: int, most_tokens: int | None) -> bool:
        """Whether the usage counts the prompt as part of the answer.

        So it is if two of three say so: without the prompt it has a token an event; its sum,
        `whole`, is the answer's; it exceeds the bound of the request, but not without the prompt.
        One alone is not enough: reasoning and speculation exceed bounds, too.
        """
        reported = max(self._totals.values(), default=-1)
        rest, showing = reported - prompt_tokens, self._showing
        if prompt_tokens < 1 or not 0 < showing <= rest:
            return False
        exceeds = most_tokens is not None and rest <= most_tokens < reported
        return (rest == showing) + (whole == reported) + exceeds > 1

    def count(
        self, hidden_tokens: int, body: bytes, *, hides: bool = False, prompt_tokens: int = 0
    ) -> Counted:
        """Count the tokens; `hidden_tokens` of the usage are reasoning, if the server says so, and
        `prompt_tokens` the prompt.

        `hides`: the request asks for reasoning not to be shown.
        """
        if prompt_tokens:
            self._totals = {k: max(0, n - prompt_tokens) for k, n in self._totals.items()}
        times_s, showing, n = self.times_s, self._showing, len(self.times_s)
        last = self._totals.get(n, -1)
        plain = showing == n and not self._several
        if plain and (last == n or not self._totals) and not (hidden_tokens and not self.reasons):
            return _counted(times_s, n)
        if self.reasons or any(mark in body for mark in _SPOKEN_REASONING):
            hidden_tokens = 0
        sizes = [size for alike in self._alike for size in alike.sizes()]
        if showing and self._listing == showing:
            shares = _Shares([max(0, listed) for listed in self._of_each("listed")])
        else:
            shares = self._shares(sizes, hidden_tokens)
        silent = not hidden_tokens and self._may_hide(shares.tokens)
        unsure = shares.unsure or (silent and hides)
        token_s = _times(times_s, shares.tokens)
        chunks = max(showing, sum(map(bool, shares.tokens)))
        counted = _counted(token_s, chunks, unsure=unsure)
        counted.refuted, counted.silent = shares.refuted, silent and self._is_silent(sizes)
        sequences: dict[int, array[float]] = {}
        for choice, time_s, share in zip(
            self._of_each("choice"), times_s, shares.tokens, strict=True
        ):
            sequences.setdefault(choice, array("d")).extend(repeat(time_s, share))
        if len(sequences) > 1:
            counted.sequences = [sequences[choice] for choice in sorted(sequences)]
            # TPOT is the mean of those of the choices.
            each = [_counted(sequence, 0, unsure=unsure) for sequence in counted.sequences]
            paces_s = [
                (part.token_s[-1] - part.token_s[0]) / timed
                for part in each
                if (timed := len(part.token_s) - part.untimed_tokens)
            ]
            pace_s = sum(paces_s) / max(1, len(paces_s))
            timed = (token_s[-1] - token_s[0]) / pace_s if pace_s else 0
            counted.untimed_tokens = len(token_s) - timed
        return counted

    def _of_each(self, name: str) -> list[int]:
        return [getattr(alike, name) for alike in self._alike for _ in alike.shown]

    def _may_hide(self, shares: Sequence[int]) -> bool:
        """Whether a usage at the end may count tokens that no event shows: more than events."""
        if self.reasons or self.calls or self._listing or len(self._totals) > 1:
            return False
        return sum(shares) > self._showing > 1

    def _is_silent(self, sizes: Sequence[int]) -> bool:
        """Whether the answer opened, and was then silent for longer than it ever was later."""
        shown_s = [time_s for time_s, size in zip(self.times_s, sizes, strict=True) if size]
        longest_s = max(later_s - time_s for time_s, later_s in pairwise(shown_s))
        return shown_s[0] - self.opened_s > _SILENT_GAPS * longest_s

    def _shares(self, sizes: Sequence[int], hidden_tokens: int) -> _Shares:
        """Tokens of each event by the usage; one each that shows something without one."""
        showing = len(sizes) - sizes.count(0)
        first = next((k for k, size in enumerate(sizes) if size), len(sizes))
        ones = [1 if size else 0 for size in sizes]
        totals = {k: total for k, total in self._totals.items() if k > first or not showing}
        reported = max(totals.values(), default=-1)
        if not totals or (not showing and reported <= hidden_tokens):
            return _Shares(ones)
        grows = _grows(totals, sizes)
        if len(totals) > 1 and (self._several_choices or not grows[-1]):
            # Each choice has its own, or it says the same in all events: not a running one.
            totals = {len(sizes): reported}
            if reported < showing and (self._several_choices or 2 * sum(grows) < len(grows)):
                return _Shares(ones, refuted=not self._several_choices)
        # One token does not come in several events: such a usage counts something else.
        if reported < min(2, showing):
            return _Shares(ones, refuted=True)
        if reported - hidden_tokens < showing:
            hidden_tokens = 0  # they were shown after all
        return self._spread(sizes, totals, hidden_tokens)

    @property
    def _several_choices(self) -> bool:
        return len({alike.choice for alike in self._alike}) > 1

    def _spread(
        self, sizes: Sequence[int], totals: Mapping[int, int], hidden_tokens: int
    ) -> _Shares:
        """Spread the tokens between two usages over the events between them."""
        showing = len(sizes) - sizes.count(0)
        first = next((k for k, size in enumerate(sizes) if size), len(sizes))
        shares: list[int] = []
        unsure = False
        before = 0
        for place, total in sorted(totals.items()):
            start, tokens = len(shares), max(0, total - before)
            part = sizes[start:place]
            # What was thought in silence came before what is shown.
            least = sum(1 for size in part if size)
            silent = min(hidden_tokens, max(0, tokens - least))
            hidden_tokens -= silent
            tokens -= silent
            lead = max(0, first - start) if showing else 0
            capacity = sum(part) + part.count(0) - lead
            if tokens > capacity:  # some were not shown; how many of each event is not known
                unsure |= least != 1 or showing == 1
                tokens = least or capacity
            shares += [0] * lead + spread(tokens, part[lead:])
            before = max(before, total)
        return _Shares(shares + [1 if size else 0 for size in sizes[len(shares) :]], unsure)


def _grows(totals: Mapping[int, int], sizes: Sequence[int]) -> list[bool]:
    """Whether the usage grows with each part of the events that shows something, in order."""
    grows = []
    start = highest = 0
    for place, total in sorted(totals.items()):
        if any(sizes[start:place]):
            grows.append(total > highest)
        start, highest = place, max(highest, total)
    return grows or [True]


def spread(tokens: int, sizes: Sequence[int]) -> list[int]:
    """Spread tokens over events that show so many bytes each; 0 shows nothing.

    Each event that shows something has one, then those that show nothing (their text was held back
    until it was a whole character), and the rest is shared by size. Fewer tokens than events: the
    text of a token was cut, and a token is where it begins.
    """
    n = len(sizes)
    showing = [k for k in range(n) if sizes[k]] or list(range(n))
    if not showing:
        return []
    shares = [0] * n
    if tokens < len(showing):
        begins = list(accumulate(max(1, sizes[k]) for k in showing))
        for token in range(tokens):
            # The first token is in the first event, and the last in the last.
            where = token * (begins[-1] - 1) / max(1, tokens - 1)
            shares[showing[bisect_right(begins, where)]] += 1
        return shares
    for k in showing:
        shares[k] = 1
    rest = tokens - len(showing)
    for k in range(n):
        if rest and not shares[k]:
            shares[k], rest = 1, rest - 1
    room = list(accumulate((max(0, sizes[k] - 1) for k in showing), initial=0))
    if not room[-1]:  # nothing shows: evenly
        room = list(range(len(showing) + 1))
    for k, start, end in zip(showing, room, room[1:], strict=False):
        shares[k] += round(rest * end / room[-1]) - round(rest * start / room[-1])
    return shares


def _times(times_s: array[float], shares: Sequence[int]) -> array[float]:
    token_s: array[float] = array("d")
    for time_s, tokens in zip(times_s, shares, strict=True):
        if tokens:
            token_s.extend(repeat(time_s, tokens))
    return token_s


def _counted(token_s: array[float], chunks: int, *, unsure: bool = False) -> Counted:
    tokens = len(token_s)
    if tokens < 2:
        return Counted(token_s, [], chunks, tokens)
    untimed = 1 if token_s[1] > token_s[0] else bisect_right(token_s, token_s[0])
    together = token_s[-1] - token_s[0] < (tokens - untimed) * _LEAST_TOKEN_S
    return Counted(token_s, [], chunks, tokens if unsure or together else untimed, unsure)
