"""Arguments of a started server: no secrets in them, and variables in their place."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ....workloads.errors import SloBenchError
from ....workloads.masking import environment_variable

SECRET = re.compile(  # an option that holds one
    r"--?(?:.*[-_])?(?:api[-_]?key|password|secret|(?:hf|auth|access|hub)[-_]?token)", re.IGNORECASE
)
_VARIABLE = re.compile(r"(--?[\w-]+=)?\$(\w+)")


def check_no_secrets(args: Sequence[str]) -> None:
    """Reject a secret written in plain text, since run folders and logs keep the arguments.

    Raises:
        SloBenchError: with what to write instead.
    """
    for place, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if not SECRET.fullmatch(name):
            continue
        value = value if equals else next(iter(args[place + 1 :]), "")
        if value and not _VARIABLE.fullmatch(value):
            raise SloBenchError(
                f"the server argument {name} holds a secret, and logs and run folders keep "
                f"arguments as written; put it into an environment variable and write "
                f"--server-arg '{name}=$THAT_VARIABLE'"
            )


def expanded(argv: Sequence[str]) -> list[str]:
    """The arguments with `$NAME` or `--option=$NAME` replaced by the environment variable NAME,
    which is a secret where the option is one.

    Raises:
        SloBenchError: a variable is not set, or holds a secret that no header can carry.
    """
    words = []
    for before, word in zip(("", *argv), argv, strict=False):
        if variable := _VARIABLE.fullmatch(word):
            option, name = variable[1] or "", variable[2]
            if SECRET.fullmatch(option.removesuffix("=") or before):
                word = option + environment_variable(name)
            elif value := os.environ.get(name):
                word = option + value
            else:
                raise SloBenchError(
                    f"the environment variable {name} of a server argument is not set"
                )
        words.append(word)
    return words
