"""A server's command line as settings of ours, and settings as words of its command line.

What a kind declares for starting a server (`limits`, `memory_option`, `weight_options`, …) is read
backwards here; `ServerKind.flags` adds other spellings and what only a command line has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....predictors.dtypes import AUTO
from ....predictors.speculation import OFF, parse_speculation
from ....workloads.errors import SloBenchError
from .server_flags import PARAMETER, Flag, ServerCommand, count, named
from .server_kind import ServerKind

# Beginnings of names of options without a value.
_SWITCHES = ("--enable-", "--no-", "--disable-", "--trust-", "--enforce-", "--skip-", "--use-")


def flags_of(kind: ServerKind) -> dict[str, Flag]:
    """The options of a server by every spelling."""
    flags = [
        *(
            Flag((name,), PARAMETER + parameter, count, named(name))
            for parameter, name in kind.limits.values()
        ),
        Flag((kind.memory_option,), "memory_share", float),
        *_format_flags(kind.weight_options, "weight_dtype"),
        *_format_flags(kind.kv_options, "kv_dtype"),
        *kind.flags,
    ]
    return {name: flag for flag in flags for name in flag.names}


def _format_flags(options: Mapping[str, Sequence[str]], setting: str) -> Iterator[Flag]:
    """Options for number formats: what a value means by the words for each format."""
    by_name: dict[str, dict[str, str]] = {}
    for dtype, (name, word) in options.items():
        by_name.setdefault(name, {})[word] = dtype
    for name, formats in by_name.items():
        yield Flag((name,), setting, formats.get)


def read_words(kind: ServerKind, words: Sequence[str]) -> ServerCommand:
    """Settings of a command line, from the word after the program's on.

    Raises:
        SloBenchError: an option has no value, or one that cannot be read.
    """
    flags = flags_of(kind)
    values: dict[str, Any] = {}
    unused: dict[str, None] = {}
    model: str | None = None
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-"):
            model = word if model is None else model
            continue
        name, equals, text = word.partition("=")
        name, dot, inner = name.partition(".")  # vLLM: --speculative-config.method=ngram
        name = f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name
        flag = flags.get(name) or _abbreviated(name, flags)
        if not (equals or flag.switch):
            has_value = position < len(words) and not _is_option(words[position])
            if has_value:
                text = words[position]
                position += 1
            elif flag.setting:
                raise SloBenchError(f"{name} has no value")
        if not flag.setting:
            unused[name] = None
        elif dot:
            values[flag.setting] = {**values.get(flag.setting, {}), inner: _inner(text)}
        else:
            values[flag.setting] = _value(name, flag, text, values, unused)
    model = values.pop("model", model)
    settings = {name: value for name, value in values.items() if value is not None}
    return kind.settle(ServerCommand(model, settings, tuple(unused)))


def _value(
    name: str, flag: Flag, text: str, values: Mapping[str, Any], unused: dict[str, None]
) -> Any:
    if flag.switch:
        return flag.read(text)
    try:
        value = flag.read(text)
    except (ValueError, IndexError):
        raise SloBenchError(f"{name} {text!r} cannot be read") from None
    if value is None:
        if text != AUTO:
            unused[f"{name} {text}"] = None
        value = values.get(flag.setting)  # of another option: --quantization fp8 --dtype auto
    return value


def _abbreviated(name: str, flags: Mapping[str, Flag]) -> Flag:
    """The option whose name begins so, as servers take it; else one without a setting."""
    matches = {flag for full, flag in flags.items() if name[:2] == "--" and full.startswith(name)}
    if len(matches) == 1:
        return matches.pop()
    return Flag((name,), switch=name.startswith(_SWITCHES))


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _inner(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def words_of(kind: ServerKind, settings: Mapping[str, Any]) -> list[str]:
    """Words of the command line for settings, by path as in `ServerCommand`.

    Raises:
        SloBenchError: the server has no words for one.
    """
    words: list[str] = []
    sizes = {name: settings.get(name) or 1 for name in ("tp", "pp", "ep", "dp")}
    words += kind.parallel_args(**sizes)
    if kind.memory_option and settings.get("memory_share") is not None:
        words += [kind.memory_option, f"{settings['memory_share']:g}"]
    words += kind.weight_options.get(settings.get("weight_dtype", AUTO), ())
    words += kind.kv_options.get(settings.get("kv_dtype", ""), ())
    gib, slots = settings.get("kv_offload_gib"), settings.get("max_loras")
    if gib:
        words += _words_for(kind, "kv_offload_args", gib, sizes["tp"] * sizes["pp"] * sizes["dp"])
    if slots is not None:
        words += _words_for(kind, "lora_args", slots, settings.get("lora_rank", 16))
    if (speculation := parse_speculation(settings.get("speculation") or OFF)) is not None:
        words += _words_for(kind, "speculative_args", speculation)
    written = {flag.setting: flag for flag in flags_of(kind).values() if flag.write is not None}
    for setting, flag in written.items():
        value = settings.get(setting)
        if value is not None and flag.write is not None:
            words += flag.write(value, settings)
    return words


def _words_for(kind: ServerKind, name: str, *values: Any) -> Sequence[str]:
    function = getattr(kind, name)
    if function is None:
        raise SloBenchError(f"{kind.title} has no words for {name.removesuffix('_args')}")
    words: Sequence[str] = function(*values)
    return words
