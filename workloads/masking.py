"""Keys and passwords, read from the environment and masked in all that comes from outside.

Whoever reads a secret registers it. Servers repeat what they are sent, in errors and answers: their
texts are masked where they enter, and what is printed once more on its way to the terminal.
"""

from __future__ import annotations

import os
import re

from .errors import SloBenchError

MASK = "[secret]"
_LONG = 8  # characters; a shorter secret is masked as a word of its own, and
_SHORTEST = 4  # never below so many, nor if it is but letters: EMPTY and test are in every text

_GAP = r"[\s\u200b-\u200d\u2060\ufeff\xad]*"  # where lines are broken, or may be
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # of a variable that a shell sets
_USER_INFO = re.compile(r"\w://([^/?#\s]*)@")  # of an address

_patterns: dict[str, str] = {}
_pattern: re.Pattern[str] | None = None


def environment_variable(name: str) -> str:
    """The secret in an environment variable, which is registered.

    Raises:
        SloBenchError: it is none or not set, or no header can carry it.
    """
    if not _NAME.fullmatch(name):  # perhaps the key itself, which is not said again
        raise SloBenchError("a key is given by the name of an environment variable that holds it")
    value = os.environ.get(name, "").strip()
    if not value:
        raise SloBenchError(f"the environment variable {name} is not set; it should hold a key")
    for place, character in enumerate(value, 1):
        if not " " <= character <= "~":
            raise SloBenchError(
                f"the environment variable {name} holds U+{ord(character):04X} as its character "
                f"{place}, which no key or header can have (pasted with typography or a line end?)"
            )
    register(value)
    return value


def register(secret: str) -> None:
    """Mask a secret from now on, in this process; and the password that it holds in base64."""
    global _pattern
    if secret in _patterns or len(secret) < _SHORTEST or (secret.isalpha() and len(secret) < _LONG):
        return
    forms = [_escaped(secret)]
    if len(secret) >= _LONG:
        once = _in_base64(secret.encode())
        twice = (form for inner in once for form in _in_base64(inner.encode()))
        forms += map(re.escape, (*once, *twice))
        forms.append("[: -]?".join(f"{byte:02x}" for byte in secret.encode()))
    whole = "|".join(forms)
    _patterns[secret] = whole if len(secret) >= _LONG else rf"(?<![\w/-])(?:{whole})(?![\w/-])"
    longest_first = sorted(_patterns, key=len, reverse=True)
    _pattern = re.compile("|".join(_patterns[s] for s in longest_first), re.IGNORECASE)
    if password := _password_in(secret.rpartition(" ")[2]):
        register(password)


def _password_in(credentials: str) -> str:
    """The password of `user:password` in base64, as of the scheme Basic; else empty."""
    import base64

    try:
        return base64.b64decode(credentials, validate=True).decode("ascii").partition(":")[2]
    except ValueError:
        return ""


def register_user_info(text: str) -> None:
    """Mask the user and password of an address within a text, as written and without escapes."""
    from urllib.parse import unquote

    for user_info in _USER_INFO.findall(text):
        user, colon, password = user_info.partition(":")
        for secret in (user_info, password if colon else user):
            register(secret)
            register(unquote(secret))


def masked(text: str) -> str:
    """The text with `MASK` in place of every registered secret, plain or encoded: as in a URL, JSON
    or HTML, in hexadecimal digits or within base64, in any case of letters.
    """
    return text if _pattern is None else _pattern.sub(MASK, text)


def masked_bytes(content: bytes) -> bytes:
    """The bytes of an answer, `masked`."""
    return content if _pattern is None else masked(content.decode("latin-1")).encode("latin-1")


def _escaped(secret: str) -> str:
    """A pattern for a text each of whose characters may be escaped, also twice."""
    return _GAP.join(map(_any_form, secret))


def _any_form(character: str) -> str:
    from html.entities import codepoint2name

    code = ord(character)
    forms = [
        character if character.isalnum() else rf"\\*{re.escape(character)}",
        rf"%(?:25)*{code:02x}",
        rf"\\+(?:(?:u00|x){code:02x}|0*{code:o})",
        rf"&(?:amp;)*#(?:0*{code}|x0*{code:x});",
    ]
    if character == " ":
        forms.append(r"\+")
    if name := codepoint2name.get(code):
        forms.append(f"&(?:amp;)*{name};")
    return f"(?:{'|'.join(forms)})"


def _in_base64(secret: bytes) -> set[str]:
    """What base64 of any text with the secret in it has in common, for each of three beginnings."""
    import base64  # not before there is a secret

    forms = set()
    for before in range(3):
        # A digit holds six bits: leave out those that hold bits of other bytes.
        first, last = -(-before * 8 // 6), (before + len(secret)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            forms.add(encode(bytes(before) + secret).decode()[first:last])
    return forms
