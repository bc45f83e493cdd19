"""Most events of a stream differ from each other in their text and token id alone.

One of them is parsed as JSON and gives a `Shape`; those after it are compared with the shape, many
at once. What is left of each, its text and id, is looked up, so a token that occurred before is not
parsed again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from typing import NamedTuple

_TEXT_FIELD = re.compile(rb'"(text|content|reasoning_content|reasoning)": ?"([^"\\]+)"')
_ID_FIELD = re.compile(rb'"token_ids": ?\[([0-9]{1,18})\]')
_ID = re.compile(rb"0|[1-9][0-9]{0,17}")
_PLAIN = re.compile(rb"[ !#-\[\]-~]*")
_LINE_ENDS = b"\r\n"
_MOST_KNOWN = 1 << 14  # middles that are remembered
_MOST_KNOWN_BYTES = 256  # of each
_MOST_OTHER_ENDS = 3  # reads at the end of an answer that are no such chunks

Middle = tuple[str, int]  # text, and token id; -1 if there is none


class Run(NamedTuple):
    """Events of one shape that follow each other: bytes of each on the wire, and what it holds."""

    lengths: Sequence[int]
    middles: list[Middle]


class Shape:
    """Constant parts of an event around its middle: the text or, where the server returns token
    ids, the text, what stands between it and the id, and the id.

    `before` begins with the event, its other fields included, and ends with the quote before the
    text; `after` ends with the event. `middle` is that of the event that the shape was made of.
    """

    __slots__ = ("_known", "after", "before", "field", "middle")

    def __init__(
        self, field: str, before: bytes, middle: Middle, between: bytes, after: bytes
    ) -> None:
        self.field = field  # name of the text
        self.before = before
        self.after = after
        self.middle = middle
        self._known = _known(between)

    @classmethod
    def of(cls, event: bytes, data_at: int) -> Shape | None:
        """Shape of an event whose data, which begin at `data_at`, have one text and no escapes in
        it; None for other events.
        """
        found = list(_TEXT_FIELD.finditer(event, data_at))
        if len(found) != 1:
            return None
        start, end = found[0].span(2)
        field, text = found[0][1].decode(), found[0][2].decode()
        ids = list(_ID_FIELD.finditer(event, end))
        if len(ids) != 1:
            return cls(field, event[:start], (text, -1), b"", event[end:])
        first, last = ids[0].span(1)
        middle = text, int(ids[0][1])
        return cls(field, event[:start], middle, event[end:first], event[last:])

    def frames(self, event: bytes) -> bool:
        """Whether an event differs within this shape alone: its text is empty, say."""
        return event.startswith(self.before) and event.endswith(self.after)

    def events(self, body: bytes, at: int, until: int) -> Run:
        """Return the events of this shape that follow each other from `at` on."""
        before, after = self.before, self.after
        parts = body[at:until].split(after)
        parts.pop()  # what stands after the last of them
        begins = list(map(bytes.startswith, parts, repeat(before)))
        if not all(begins):
            del parts[begins.index(False) :]
        lengths = [len(part) + len(after) for part in parts]
        return self._run(list(map(bytes.removeprefix, parts, repeat(before))), lengths)

    def chunks(self, body: bytes, at: int, lengths: Sequence[int]) -> Run:
        """Return the chunks that hold one event of this shape each and follow each other from `at`
        on, where they have these lengths with what frames them.
        """
        after = self.after + _LINE_ENDS
        ends = list(accumulate(lengths, initial=at))
        n = len(lengths)
        while n and len(lengths) - n < _MOST_OTHER_ENDS and not body.endswith(after, at, ends[n]):
            n -= 1
        lengths = lengths[:n]
        head_of = {length: chunk_head(length) + self.before for length in set(lengths)}
        heads = list(map(head_of.__getitem__, lengths))
        cut = len(after)
        middles = [
            body[start + len(head) : end - cut]
            for start, head, end in zip(ends, heads, ends[1:], strict=False)
        ]
        whole = [after] * (3 * n)
        whole[::3], whole[1::3] = heads, middles
        if not body.startswith(b"".join(whole), at):
            n = next(
                k
                for k, head in enumerate(heads)
                if lengths[k] < len(head) + cut
                or not body.startswith(head, ends[k])
                or not body.endswith(after, at, ends[k + 1])
            )
        return self._run(middles[:n], lengths[:n])

    def _run(self, middles: list[bytes], lengths: Sequence[int]) -> Run:
        known = self._known
        if len(known) > _MOST_KNOWN:
            known.clear()
        found = list(map(known.__getitem__, middles))
        if None in found:
            n = found.index(None)
            return Run(lengths[:n], found[:n])  # type: ignore[arg-type]
        return Run(lengths, found)  # type: ignore[arg-type]


class _Known(dict[bytes, Middle | None]):
    """What the middles of events hold; None if it is no token."""

    def __init__(self, between: bytes) -> None:
        super().__init__()
        self._between = between

    def __missing__(self, middle: bytes) -> Middle | None:
        found = self._parsed(middle)
        if len(middle) <= _MOST_KNOWN_BYTES:
            self[middle] = found
        return found

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
