"""A deployment that somebody runs, read as settings of an experiment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....predictors.specs import entries, model
from ....workloads.errors import FileFormatError, SloBenchError
from .command_line import read_words
from .deployment_files import WrittenCommand, commands_in
from .server_flags import PARAMETER

# Ends of checkpoints' names that say the format of their weights.
_FORMATS = {
    "fp8": ("fp8", "fp8-dynamic", "w8a8-fp8"),
    "int4": ("awq", "awq-int4", "gptq", "gptq-int4", "w4a16", "int4"),
    "int8": ("w8a8", "gptq-int8", "int8"),
    "nvfp4": ("nvfp4", "fp4"),
}
_FORMAT_OF = {end: dtype for dtype, ends in _FORMATS.items() for end in ends}
_TUNED = re.compile(r"-(?:instruct|chat|it|hf|base|\d{4})$")
_CONFIG = "--config"  # vLLM's: options in a YAML file

# Options of a server's address, names, files, logs and parsing of answers.
_NO_PART = {
    *("host", "port", "root-path", "api-key", "api-keys", "uds", "fastapi-root-path"),
    *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "allowed-origins", "served-model-name"),
    *("trust-remote-code", "download-dir", "load-format", "tokenizer", "tokenizer-mode", "seed"),
    *("revision", "tokenizer-revision", "chat-template", "tool-call-parser", "reasoning-parser"),
    *("enable-auto-tool-choice", "uvicorn-log-level", "log-level", "log-requests", "random-seed"),
    *("disable-log-requests", "disable-log-stats", "enable-metrics", "disable-uvicorn-access-log"),
    *("chat-template-content-format", "generation-config", "enable-log-requests", "model-impl"),
}


@dataclass(frozen=True)
class DescribedDeployment:
    """Settings by path, parameters of its system, and lines that say how it was read."""

    system: str
    settings: Mapping[str, Any]
    parameters: Mapping[str, Any]
    lines: tuple[str, ...]


def described(text: str, *, has_model: bool = False) -> DescribedDeployment:
    """The deployment of a command line, launch script, Compose file or Kubernetes manifest.
    `has_model`: the model is known otherwise, and is not looked for.

    Raises:
        SloBenchError: it starts no server of ours, or servers that differ, or an option cannot be
            read, or the model is not known.
    """
    commands = commands_in(text)
    first = commands[0]
    kind = first.kind
    reads = [read_words(c.kind, _with_config(c.words, c.place)) for c in commands]
    for command, read in zip(commands, reads, strict=True):
        if command.kind is not kind or (read.settings, read.model) != (
            reads[0].settings,
            reads[0].model,
        ):
            raise SloBenchError(
                f"{first.place} and {command.place} start servers that differ: keep one of them, "
                "or give the command of one"
            )
    read = reads[0]
    settings = dict(read.settings)
    lines: list[str] = []
    name = read.model or first.environment.get("MODEL") or first.environment.get("MODEL_NAME")
    if not has_model:
        if name is None:
            raise SloBenchError(f"{first.place} names no model: give --model")
        settings["model"], more = _model(name)
        for setting, value in more.items():
            settings.setdefault(setting, value)
        if settings["model"] != name:
            lines.append(f"{name} is simulated as {settings['model']}")
    replicas = sum(command.replicas for command in commands)
    if replicas < 1:
        raise SloBenchError(f"{first.place} has no replicas")
    dp = settings.get("dp", 1)
    if dp > 1 and settings.get("ep", 1) == 1 and not has_model and _is_dense(settings["model"]):
        del settings["dp"]
        replicas *= dp
        lines.append(f"data parallelism of a dense model: {dp} instances of each server")
    replicas *= settings.pop("instances", 1)
    if replicas > 1:
        settings["instances"] = replicas
    if len(commands) > 1:
        lines.append(f"{len(commands)} such servers are started")
    lines += [*first.notes, *read.notes, *_add_gpu(settings, first)]
    parameters = {
        setting.removeprefix(PARAMETER): settings.pop(setting)
        for setting in list(settings)
        if setting.startswith(PARAMETER)
    }
    unused = dict.fromkeys(name for read in reads for name in read.unused)
    no_part = [name for name in unused if name.lstrip("-").replace("_", "-") in _NO_PART]
    if no_part:
        lines.append(f"no part in a simulation: {', '.join(no_part)}")
    if ignored := [name for name in unused if name not in no_part]:
        lines.append(f"not simulated: {', '.join(ignored)}")
    values = {**settings, **parameters}
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    head = f"read as {kind.name}" + (f": {shown}" if shown else "")
    return DescribedDeployment(kind.name, settings, parameters, (head, *lines))


def _with_config(words: Sequence[str], place: str) -> list[str]:
    """The words, after those of the file that `--config` names.

    Raises:
        FileFormatError: it is no YAML file of options.
    """
    words = list(words)
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != _CONFIG:
            continue
        rest = words[position + (1 if equals else 2) :]
        path = Path(value if equals else "".join(words[position + 1 : position + 2]))
        import yaml

        try:
            options = yaml.safe_load(path.read_text("utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            reason = str(error).partition("\n")[0]
            raise FileFormatError(
                path, None, f"({_CONFIG} of {place}) cannot be read: {reason}"
            ) from None
        if not isinstance(options, dict):
            raise FileFormatError(path, None, f"({_CONFIG} of {place}) must hold options")
        of_file = []
        for option, setting in options.items():
            if setting is True:
                of_file.append(f"--{option}")
            elif setting is not None and setting is not False:
                text = json.dumps(setting) if isinstance(setting, dict | list) else setting
                of_file.append(f"--{option}={text}")
        return [*of_file, *words[:position], *rest]
    return words


def _model(name: str) -> tuple[str, dict[str, str]]:
    """A model's name here, and settings that its name says.

    Raises:
        SloBenchError: neither the catalogue nor the disk has it.
    """
    if name in entries("models") or (Path(name).expanduser() / "config.json").is_file():
        return name, {}
    plain = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    settings: dict[str, str] = {}
    for end in sorted(_FORMAT_OF, key=len, reverse=True):
        if plain.endswith(f"-{end}"):
            plain, settings = plain.removesuffix(f"-{end}"), {"weight_dtype": _FORMAT_OF[end]}
            break
    if (catalogue_name := _catalogue_names().get(_plain(plain))) is not None:
        return catalogue_name, settings
    raise SloBenchError(
        f"the model {name!r} is neither in `slo-bench list models` nor a folder with a "
        "config.json: give --model"
    )


def _catalogue_names() -> dict[str, str]:
    """The catalogue's models by their names and those of their origins, without decoration."""
    names = {_plain(name): name for name in entries("models")}
    for name, entry in entries("models").items():
        origin = str(entry["origin"]).partition(" ")[0]
        if "/" in origin:
            names.setdefault(_plain(origin.rpartition("/")[2]), name)
    return names


def _plain(name: str) -> str:
    name = name.lower().removeprefix("meta-").replace("_", "-")
    while _TUNED.search(name):
        name = _TUNED.sub("", name)
    return name


def _is_dense(name: str) -> bool:
    return model(name).experts is None


def _add_gpu(settings: dict[str, Any], command: WrittenCommand) -> list[str]:
    """Add the GPU that a manifest names; lines on what does not agree."""
    lines = []
    if command.gpu_name:
        gpu = gpu_called(command.gpu_name)
        if gpu is None:
            lines.append(f"the GPU {command.gpu_name!r} is not known here: give --gpu")
        else:
            settings["gpu"] = gpu
    used = settings.get("tp", 1) * settings.get("pp", 1) * settings.get("dp", 1)
    if command.gpus is not None and command.gpus != used:
        lines.append(f"{command.place} has {command.gpus} GPUs, its server uses {used}")
    return lines


def gpu_called(label: str) -> str | None:
    """The catalogue's GPU for a product's name, as NVIDIA-H100-80GB-HBM3; None: it is not there."""
    if label in entries("gpus"):
        return label
    words = set(re.split(r"[^a-z0-9]+", label.lower()))
    words |= {word.removesuffix("b") for word in words if word[:1].isdigit()}
    best: tuple[int, int, str] | None = None
    for name in entries("gpus"):
        parts = name.split("-")
        matched = sum(part in words for part in parts)
        if parts[0] in words or (len(parts) > 1 and {*parts[:2]} <= words):
            # As many parts as can be; of equals the name with the fewest others.
            rank = (matched, -len(parts), name)
            best = rank if best is None or rank[:2] > best[:2] else best
    return None if best is None else best[2]
