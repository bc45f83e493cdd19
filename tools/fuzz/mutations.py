"""Broken versions of good files: a seed and some edits, which a few drawn bytes say."""

from __future__ import annotations

from hypothesis import strategies as st

NASTY = (
    *(b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r", b"\r\n\r\n", b'"', b"'", b","),
    *(b"-1", b"0", b"1", b"2.5", b"1e999", b"-1e999", b"nan", b"NaN", b"inf", b"Infinity"),
    *(b"1_000", b"0x10", b"9" * 12, b"9" * 19, b"9" * 25, b"9" * 400, b"9" * 5000, b"1e-400"),
    *(b"true", b"null", b"None", b"{}", b"[]", b"[[]]", b"[{}]", b'[""]', b'""', b'"x"', b'"-1"'),
    *(b"[1]", b"[null]", b"[-1, 1e999]", b'{"a": 1}', b'{"a": {"b": []}}', b'"\\ud800"', b"-0.0"),
    *(b"[" * 3000, b'{"a":' * 3000, b"(" * 3000, b"../../etc/passwd", b"/etc/passwd", b"NaT"),
    *(b"=1+1", b"\x1b[31m", "\u202e\U0001f600".encode(), b"A" * 5000, b"\xed\xa0\x80", b"%s%n"),
    *(b"\x1f\x8b\x08", b"PK\x03\x04", b"0-99999999999", b"-5\r\n", b"-4\r\n", b"0\r\n\r\n"),
    *(b"ffffffffffffffff\r\n", b"data: ", b"data: {}\n\n", b"<script>", b"__class__", b"\x80"),
    *(b"1970-13-45 99:99:99", b"9999-12-31 23:59:59", b"(", b")", b"=", b":", b";", b"[", b"]"),
)
EDIT_BYTES = 5
draws = st.binary(min_size=EDIT_BYTES, max_size=6 * EDIT_BYTES)


def edited(good: bytes, drawn: bytes) -> bytes:
    """The good file with an edit for every five drawn bytes: which, where (two), how much, what."""
    data = good
    for k in range(0, len(drawn) - EDIT_BYTES + 1, EDIT_BYTES):
        kind, high, low, length, content = drawn[k : k + EDIT_BYTES]
        position = (256 * high + low) * (len(data) + 1) >> 16
        data = _edit(data, kind % 10, position, length % 64, NASTY[content % len(NASTY)])
    return data


def _edit(data: bytes, kind: int, position: int, length: int, content: bytes) -> bytes:
    end = min(len(data), position + length)
    match kind:
        case 0:
            return data[:position] + content + data[position:]
        case 1:
            return data[:position] + content + data[end:]
        case 2:
            return data[:position] + data[end:]
        case 3:
            return data[:position] + data[position:end] * 20 + data[end:]
        case 4:
            return data[:position]
        case 5:
            flipped = bytes(byte ^ (1 << length % 8) for byte in data[position : position + 1])
            return data[:position] + flipped + data[position + 1 :]
        case 6:
            lines = data.splitlines(keepends=True)
            if lines:
                a, b = position % len(lines), length % len(lines)
                lines[a], lines[b] = lines[b], lines[a]
            return b"".join(lines)
        case _:
            return _in_place_of_a_value(data, position, content)


def _in_place_of_a_value(data: bytes, position: int, content: bytes) -> bytes:
    """Put `content` where a value of JSON, CSV or TOML stands: the first after `position`, or the
    whole bracket that begins there.
    """
    begin = next((k + 1 for k in range(position, len(data)) if data[k] in b",:[=\n("), None)
    if begin is None:
        return content
    while begin < len(data) and data[begin] in b" ":
        begin += 1
    end, depth = begin, 0
    while end < len(data):
        depth += (data[end] in b"[{(") - (data[end] in b"]})")
        if depth < 0 or (depth == 0 and data[end] in b",\n\r;"):
            break
        end += 1
    return data[:begin] + content + data[end:]
