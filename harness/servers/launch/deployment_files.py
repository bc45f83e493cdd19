"""Where deployments are written down: command lines, launch scripts, Compose files and Kubernetes
manifests. Each becomes the words of the servers' commands, with the number of replicas.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from ....workloads.errors import FileFormatError, SloBenchError
from ....workloads.input_files import check_input
from ..server_kinds import LAUNCHED, server_kind
from .pods import as_deployment, as_list, as_mapping
from .server_kind import ServerKind

GPU_LABEL = "slo-bench.gpu"  # what our manifests say of the GPU, as the catalogue names it
_GPU_LABELS = (
    *("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator"),
    *("k8s.amazonaws.com/accelerator", "amd.com/gpu.product"),
)
_GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
_SHELLS = ("sh", "bash", "dash", "ash")
_SEPARATORS = frozenset(";&|()<>\n")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^}]*)|:?\?[^}]*)?\}|\$(\w+)")
_WHOLE_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(\[[@*]\])?\})")
_OTHER_EXPANSION = re.compile(r"\$\{[^}]*\}?")
_ARGUMENTS = ("$@", "$*")  # of the script, which it does not say
_COMMENT = re.compile(r"""^\s*#.*|(?<=\s)#[^'"\n]*$""", re.MULTILINE)
_ARRAY = re.compile(r"""\b([A-Za-z_]\w*\+?)=\(((?:[^()'"]|'[^']*'|"[^"]*")*)\)""")
_UNREAD_ARRAY = re.compile(r"\b([A-Za-z_]\w*)\+?=\(")
_VARIABLE_OF_PODS = re.compile(r"\$\((\w+)\)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARE = ("export", "local", "declare", "readonly")
_CLAUSES = ("then", "else", "do", "{", "exec")
_CONDITION = re.compile(r"^\s*(?:if|elif|case)\b|(?:&&|\|\|)\s*\w+\+?=", re.MULTILINE)
_LOOP = re.compile(r"(?:^|[;&])\s*(?:for|while|until)\b", re.MULTILINE)
_COMMAND_OF_MANIFESTS = re.compile(r"^(?:services|kind|apiVersion)\s*:", re.MULTILINE)


@dataclass(frozen=True)
class WrittenCommand:
    """A server's command: `words` from the one after the program's on; `gpu_name` and `gpus` as
    the file names them.
    """

    kind: ServerKind
    words: tuple[str, ...]
    place: str
    replicas: int = 1
    gpu_name: str = ""
    gpus: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def commands_in(text: str) -> list[WrittenCommand]:
    """The servers' commands in a file, or in a command line.

    Raises:
        SloBenchError: there is none.
        FileFormatError: the file cannot be read.
    """
    path = Path(text).expanduser()
    try:
        is_file = path.is_file()
    except OSError:  # too long for a name
        is_file = False
    if not is_file:
        commands = list(_script_commands(text, "the command"))
        if not commands:
            raise SloBenchError(
                f"--like {text!r:.80} is neither a file nor a command of {' or '.join(LAUNCHED)}: "
                "'vllm serve MODEL --max-num-seqs 64'"
            )
        return commands
    check_input(path)
    try:
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(path, None, f"cannot be read: {error}") from error
    if path.suffix in (".yaml", ".yml", ".json") or _COMMAND_OF_MANIFESTS.search(content):
        commands = list(_manifest_commands(path, content))
    else:
        commands = list(_script_commands(content, path.name))
    if not commands:
        raise FileFormatError(path, None, f"has no command that starts {' or '.join(LAUNCHED)}")
    return commands


def server_in(words: Sequence[str], place: str) -> WrittenCommand | None:
    """The server that the words of a command start; None if they start none of ours."""
    kinds = [server_kind(name) for name in LAUNCHED]
    names = [PurePosixPath(word).name for word in words]
    for kind in kinds:
        for program in kind.programs:
            for start in range(len(words) - len(program) + 1):
                if tuple(names[start : start + len(program)]) == program:
                    return WrittenCommand(kind, tuple(words[start + len(program) :]), place)
    if "run" in words:  # docker run IMAGE OPTIONS: the image's own program starts the server
        for position, word in enumerate(words):
            kind_of_image = _kind_of_image(word)
            if kind_of_image is not None and not word.startswith("-"):
                return WrittenCommand(kind_of_image, tuple(words[position + 1 :]), place)
    return None


def _kind_of_image(image: str) -> ServerKind | None:
    name = image.partition("@")[0]
    name = name.rpartition(":")[0] if ":" in PurePosixPath(name).name else name
    for kind in map(server_kind, LAUNCHED):
        if any(name == image_name or name.endswith(f"/{image_name}") for image_name in kind.images):
            return kind
    return None


def _script_commands(
    text: str, place: str, variables: Mapping[str, str] | None = None
) -> Iterator[WrittenCommand]:
    """The servers that a shell script starts; `variables` are set before it."""
    assigned = dict(variables or {})
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"\$\(\([^()]*(?:\([^()]*\)[^()]*)*\)\)", "0", text)  # arithmetic
    text = re.sub(r"\$\([^()]*\)", "", text)  # what another command prints
    notes = (f"conditions in {place} are taken as true",) if _CONDITION.search(text) else ()
    if _LOOP.search(text):
        notes = (*notes, f"loops in {place} are taken once")
    text = _ARRAY.sub(_line_of_array, _COMMENT.sub("", text))
    unread_arrays = _UNREAD_ARRAY.findall(text)
    for number, line in enumerate(text.splitlines(), 1):
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split, lexer.commenters = True, "#"
            words = list(lexer)
        except ValueError as error:
            if any("".join(program[-1:]) in line for program in _programs()):
                raise SloBenchError(f"{place}, line {number}: {error}") from None
            continue
        for command in _split(words):
            while command and (command[0] in _CLAUSES or _assign(command[0], assigned)):
                command = command[1:]
            if command[:1] and command[0] in _DECLARE:
                for word in command[1:]:
                    _assign(word, assigned)
                continue
            for name in unread_arrays:
                assigned.pop(name, None)
            command = _expanded(command, assigned, None)
            if (script := _script_of_shell(command)) is not None:
                yield from _script_commands(script, place, assigned)
                continue
            server_command = server_in(command, place)
            if server_command is not None:
                words = [word for word in server_command.words if word not in _ARGUMENTS]
                if len(words) < len(server_command.words):
                    notes = (*notes, f"arguments of {place} are taken as none")
                words = _expanded(words, assigned, f"{place}, line {number}")
                yield replace(server_command, words=tuple(words), environment=assigned, notes=notes)


def _line_of_array(match: re.Match[str]) -> str:
    """An array as a variable that holds its words."""
    try:
        words = shlex.split(match[2])
    except ValueError:
        return match[0]
    return f"{match[1]}={shlex.quote(' ' + shlex.join(words))}"


def _assign(word: str, assigned: dict[str, str]) -> bool:
    """Whether a word assigns a variable, which is done."""
    match = _ASSIGNMENT.fullmatch(word)
    if match is None:
        return False
    value = _VARIABLE.sub(lambda variable: _value(variable, assigned, variable[0]), match[3])
    assigned[match[1]] = assigned.get(match[1], "") * bool(match[2]) + value
    return True


def _value(match: re.Match[str], assigned: Mapping[str, str], otherwise: str) -> str:
    default = otherwise if match[2] is None else match[2]
    return assigned.get(match[1] or match[3], default)


def _script_of_shell(words: Sequence[str]) -> str | None:
    """The script in `bash -c SCRIPT`; None if no shell is started with one."""
    for position, word in enumerate(words):
        if PurePosixPath(word).name in _SHELLS:
            for option, script in pairwise(words[position + 1 :]):
                if re.fullmatch(r"-[a-z]*c", option):
                    return script
    return None


def _programs() -> list[tuple[str, ...]]:
    return [program for name in LAUNCHED for program in server_kind(name).programs]


def _split(words: Sequence[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in words:
        if word and set(word) <= _SEPARATORS:
            yield command
            command = []
        else:
            command.append(word)
    yield command


def _expanded(words: Sequence[str], assigned: Mapping[str, str], place: str | None) -> list[str]:
    """Words with variables replaced, which may be several words each.

    Raises:
        SloBenchError: one is not set, and `place` is where; without it such a word is left.
    """
    expanded_words = []
    for word in words:
        whole = _WHOLE_VARIABLE.fullmatch(word)
        value = None if whole is None else assigned.get(whole[1] or whole[2])
        if whole is not None and value is not None and (whole[3] or value.lstrip()[:1] == "-"):
            expanded_words += _words(value)
            continue
        text = _VARIABLE.sub(lambda match: _value(match, assigned, match[0]), word)
        if place is not None and (left := _VARIABLE.search(text) or _OTHER_EXPANSION.search(text)):
            name = re.sub(r"^\W+|\W.*", "", left[0])
            raise SloBenchError(f"{place}: the variable {name} is not set in it; write its value")
        if text or not _VARIABLE.search(word):
            expanded_words.append(text)
    return expanded_words


def _manifest_commands(path: Path, text: str) -> Iterator[WrittenCommand]:
    import yaml

    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = None if mark is None else mark.line + 1
        problem = getattr(error, "problem", None) or "cannot be read"
        raise FileFormatError(path, line, f"is no YAML: {problem}") from None
    except RecursionError:
        raise FileFormatError(path, None, "is nested too deeply") from None
    for document in documents:
        if not isinstance(document, Mapping):
            continue
        if isinstance(document.get("services"), Mapping):
            for name, service in document["services"].items():
                if isinstance(service, Mapping):
                    yield from _service_commands(service, f"{path.name}, service {name}")
        elif document.get("kind") == "List":
            for item in as_list(document.get("items")):
                yield from _object_commands(item, path)
        else:
            yield from _object_commands(document, path)


def _service_commands(service: Mapping[str, Any], place: str) -> Iterator[WrittenCommand]:
    """The server of a Compose service."""
    words = [*_words(service.get("entrypoint")), *_words(service.get("command"))]
    words = [word.replace("$$", "$") for word in words]
    environment = _environment(service.get("environment"))
    deploy = as_mapping(service.get("deploy"))
    resources = as_mapping(as_mapping(deploy.get("resources")).get("reservations"))
    gpus = None
    for device in as_list(resources.get("devices")):
        ids = as_list(as_mapping(device).get("device_ids"))
        gpus = len(ids) or _whole(as_mapping(device).get("count"), place)
    replicas = service.get("scale", deploy.get("replicas", 1))
    labels = _environment(service.get("labels"))
    for command in _container_commands(words, str(service.get("image", "")), environment, place):
        yield replace(
            command,
            replicas=_whole(replicas, place) or 1,
            gpus=gpus,
            gpu_name=labels.get(GPU_LABEL, ""),
        )


def _object_commands(document: Any, path: Path) -> Iterator[WrittenCommand]:
    """The servers of a Kubernetes object that has pods."""
    document = as_mapping(document)
    name = as_mapping(document.get("metadata")).get("name", "?")
    place = f"{path.name}, {document.get('kind')} {name}"
    spec = as_mapping(as_deployment(document, place).get("spec"))
    replicas = _whole(spec.get("replicas", 1), place)
    template = as_mapping(spec.get("template"))
    pod = as_mapping(template.get("spec"))
    labels = {
        **as_mapping(pod.get("nodeSelector")),
        **as_mapping(as_mapping(template.get("metadata")).get("labels")),
        **as_mapping(as_mapping(template.get("metadata")).get("annotations")),
    }
    gpu_name = next((str(labels[n]) for n in (GPU_LABEL, *_GPU_LABELS) if n in labels), "")
    for container in as_list(pod.get("containers")):
        container = as_mapping(container)
        entries = map(as_mapping, as_list(container.get("env")))
        environment = {str(e.get("name")): str(e["value"]) for e in entries if "value" in e}
        words = [*_words(container.get("command")), *_words(container.get("args"))]
        resources = as_mapping(container.get("resources"))
        limits = {**as_mapping(resources.get("requests")), **as_mapping(resources.get("limits"))}
        gpus = next((_whole(limits[n], place) for n in _GPU_RESOURCES if n in limits), None)
        for command in _container_commands(
            words, str(container.get("image", "")), environment, place
        ):
            yield replace(
                command, replicas=1 if replicas is None else replicas, gpus=gpus, gpu_name=gpu_name
            )


def _container_commands(
    words: Sequence[str], image: str, environment: Mapping[str, str], place: str
) -> Iterator[WrittenCommand]:
    """The servers that a container starts with these words, or its image with them."""
    words = [
        _VARIABLE_OF_PODS.sub(lambda match: environment.get(match[1], match[0]), word)
        for word in words
    ]
    if (script := _script_of_shell(words)) is not None:
        yield from _script_commands(script, place, environment)
        return
    command = server_in(words, place)
    if command is None and (kind := _kind_of_image(image)) is not None:
        command = WrittenCommand(kind, tuple(words), place)
    if command is not None:
        words = _expanded(command.words, environment, place)
        yield replace(command, words=tuple(words), environment=environment)


def _words(command: Any) -> list[str]:
    """Words of a command that is a list, or a line as a shell reads it."""
    if isinstance(command, str):
        try:
            return shlex.split(command)
        except ValueError as error:
            raise SloBenchError(f"cannot read the command {command!r:.60}: {error}") from None
    return [str(word) for word in as_list(command)]


def _environment(variables: Any) -> dict[str, str]:
    """Variables of Compose, as a mapping or a list of NAME=VALUE."""
    if isinstance(variables, Mapping):
        return {str(name): str(value) for name, value in variables.items() if value is not None}
    pairs = (str(pair).partition("=") for pair in as_list(variables))
    return {name: value for name, equals, value in pairs if equals}


def _whole(value: Any, place: str) -> int | None:
    """A number, also as text; None for `all` or nothing.

    Raises:
        SloBenchError: it is neither.
    """
    if value is None or value == "all":
        return None
    try:
        return int(str(value))
    except ValueError:
        raise SloBenchError(f"{place}: {value!r:.40} is no whole number; write it") from None
