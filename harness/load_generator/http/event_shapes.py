"""Most events of a stream differ from each other in their text and token id alone.

One of them is parsed as JSON and gives a `Shape`; those after it are compared with the shape, many
at once. What is left of each, its text and id, is looked up, so a token that occurred before is not
parsed again.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

_TEXT_FIELD = re.compile(rb'"(text|content|reasoning_content|reasoning)": ?"([^"\\]+)"')
_ID_FIELD = re.compile(rb'"token_ids": ?\[([0-9]{1,18})\]')
_ID = re.compile(rb"0|[1-9][0-9]{0,17}")
_PLAIN = re.compile(rb"[ !#-\[\]-~]*")
# The start of an event's data: what differs between the events of two answers that are else alike.
_OPENING = re.compile(
    rb'(\{"id": ?")[ !#-\[\]-~]*("(?:, ?"object": ?"[a-z._]*")?, ?"created": ?)'
    rb"(?:0|[1-9][0-9]{0,17})(?=[,}])"
)
_DATA = b"data: "
_MOST_SHARED = 8
_LINE_ENDS = b"\r\n"
_MOST_KNOWN = 1 << 14  # middles that are remembered
_MOST_KNOWN_BYTES = 256  # of each

Middle = tuple[str, int]  # text, and token id; -1 if there is none


class Run(NamedTuple):
    """Events of one shape that follow each other: bytes of each on the wire, and what it holds."""

    lengths: list[int]
    middles: list[Middle]


class Shape:
    """Constant parts of an event around its middle: the text or, where the server returns token
    ids, the text, what stands between it and the id, and the id.

    `before` begins with the event, its other fields included, and ends with the quote before the
    text; `after` ends with the event. `middle` is that of the event that the shape was made of.
    """

    __slots__ = (
        *("_known", "after", "before", "between", "choice", "field", "is_content", "middle"),
        "reasons",
    )

    def __init__(
        self, field: str, before: bytes, middle: Middle, between: bytes, after: bytes
    ) -> None:
        self.field = field  # name of the text
        self.before = before
        self.between = between
        self.after = after
        self.middle = middle
        self.choice = 0
        self.is_content = False  # whether its text is part of the answer itself, if texts are kept
        self.reasons = False  # whether it is reasoning
        self._known = _known(between)

    @classmethod
    def of(cls, event: bytes, data_at: int) -> Shape | None:
        """Shape of an event whose data, which begin at `data_at`, have one text and no escapes in
        it; None for other events.
        """
        text_fields = list(_TEXT_FIELD.finditer(event, data_at))
        if len(text_fields) != 1:
            return None
        start, end = text_fields[0].span(2)
        field, text = (part.decode(errors="replace") for part in text_fields[0].groups())
        ids = list(_ID_FIELD.finditer(event, end))
        if len(ids) != 1:
            return cls(field, event[:start], (text, -1), b"", event[end:])
        first, last = ids[0].span(1)
        middle = text, int(ids[0][1])
        return cls(field, event[:start], middle, event[end:first], event[last:])

    def begun(self, before: bytes) -> Shape:
        """The same shape with another beginning, of another answer."""
        shape = Shape(self.field, before, self.middle, self.between, self.after)
        shape.choice, shape.is_content, shape.reasons = self.choice, self.is_content, self.reasons
        return shape

    def frames(self, event: bytes) -> bool:
        """Whether an event differs within this shape alone: its text is empty, say."""
        return event.startswith(self.before) and event.endswith(self.after)

    def events(self, body: bytes, position: int, until: int) -> Run:
        """Return the events of this shape that follow each other from `position` on."""
        parts, lengths = self._split(body[position:until], self.after)
        return self._run(parts, lengths, list(repeat(self.before, len(parts))))

    def chunks(self, body: bytes, position: int, until: int) -> Run:
        """Return the chunks that hold one event of this shape each and follow each other from
        `position` on; their lengths are those with what frames them.
        """
        parts, lengths = self._split(body[position:until], self.after + _LINE_ENDS)
        heads = {length: chunk_head(length) + self.before for length in set(lengths)}
        return self._run(parts, lengths, list(map(heads.__getitem__, lengths)))

    @staticmethod
    def _split(body: bytes, after: bytes) -> tuple[list[bytes], list[int]]:
        parts = body.split(after)
        parts.pop()  # what stands after the last of them
        return parts, list(map(len(after).__add__, map(len, parts)))

    def _run(self, parts: list[bytes], lengths: list[int], heads: list[bytes]) -> Run:
        cache = self._known
        if len(cache) > _MOST_KNOWN:
            cache.clear()
        begins = list(map(bytes.startswith, parts, heads))
        if False in begins:
            del parts[begins.index(False) :]
        middles = list(map(cache.__getitem__, map(bytes.removeprefix, parts, heads)))
        n = middles.index(None) if None in middles else len(middles)
        return Run(lengths[:n], middles[:n])  # type: ignore[arg-type]


def without_names(data: bytes) -> bytes | None:
    """The data of an event without its id and time; None where they do not begin with them."""
    opening = _OPENING.match(data)
    return None if opening is None else b"%b%b0%b" % (*opening.groups(), data[opening.end() :])


class SharedShapes:
    """Shapes of the answers before: a server sends the next ones in the same, with other ids."""

    def __init__(self) -> None:
        # The last first: what opens an event, what follows that, and the shape. Other threads read.
        self._shapes: tuple[tuple[tuple[bytes, ...], bytes, Shape], ...] = ()

    def add(self, shape: Shape) -> None:
        """Keep a shape that `of` did not have."""
        opening = _OPENING.match(shape.before, len(_DATA))
        if opening is not None and shape.before.startswith(_DATA):
            rest = shape.before[opening.end() :]
            latest = opening.groups(), rest, shape
            self._shapes = (latest, *self._shapes[: _MOST_SHARED - 1])

    def of(self, body: bytes, start: int, end: int) -> Shape | None:
        """The shape of an event from `start` to `end`, if another answer had it."""
        if not body.startswith(_DATA, start):
            return None
        opening = _OPENING.match(body, start + len(_DATA), end)
        if opening is not None:
            position = opening.end()
            for groups, rest, shape in self._shapes:
                if (
                    body.startswith(rest, position)
                    and body.startswith(shape.after, end - len(shape.after))
                    and opening.groups() == groups
                ):
                    return shape.begun(body[start:position] + rest)
        return None


class _Known(dict[bytes, Middle | None]):
    """What the middles of events hold; None if it is no token."""

    def __init__(self, between: bytes) -> None:
        super().__init__()
        self._between = between

    def __missing__(self, middle: bytes) -> Middle | None:
        parsed = self._parsed(middle)
        if len(middle) <= _MOST_KNOWN_BYTES:
            self[middle] = parsed
        return parsed

    def _parsed(self, middle: bytes) -> Middle | None:
        text, token_id = middle, b""
        if self._between:
            text, _, token_id = middle.partition(self._between)
            if _ID.fullmatch(token_id) is None:
                return None
        elif not text:
            return None
        if _PLAIN.fullmatch(text) is not None:
            return text.decode(), int(token_id or b"-1")
        try:
            return json.loads(f'"{text.decode()}"'), int(token_id or b"-1")
        except ValueError:
            return None


_known = lru_cache(maxsize=32)(_Known)  # by what stands between text and id


@lru_cache(maxsize=1 << 12)
def chunk_head(read_bytes: int) -> bytes:
    """How a read of this length begins if it is one whole chunk; too long if none has it."""
    for digits in range(1, 8):
        size = read_bytes - digits - 4
        if size > 0 and len(head := b"%x" % size) == digits:
            return head + b"\r\n"
    return b" " * (read_bytes + 1)
