"""Faults of a user's policy: told as the user's, with file, line and hook.

Modules of policy files and of installed packages are handed to `hold_to_interface`. What their
hooks return is checked from then on, and `fault_text` recognises their errors.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import re
import sys
import threading
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from ...workloads.errors import SloBenchError
from ..core.decisions import Admission, Limits, Line, NextQueue, PreemptionMode, Timeout
from ..core.policy import Policy, StaticPolicy
from ..core.view import View

TRACEBACK_VARIABLE = "SLO_BENCH_TRACEBACK"
"""If this variable is set, the traceback of a policy's error is printed, too."""
LOOK_S = 5.0  # a hook or an import that runs at two looks in sequence is named
_PACKAGE = __name__.partition(".")[0]

_UNEXPECTED = re.compile(r"(\w+)(?:\.__\w+__)?\(\) got an unexpected keyword argument '(\w+)'")

_modules: set[str] = set()  # names of the modules that hold policies of the user's
_thread_faults: list[str] = []


class WrongAnswerError(TypeError):
    """A hook returned what it must not; the message names its file and line."""


# ---------------------------------------------------------------- what hooks must return


def _is_number(answer: object) -> bool:
    return isinstance(answer, Real) and not math.isnan(answer)


def _is_key(answer: object) -> bool:
    return _is_number(answer) or (isinstance(answer, tuple) and all(map(_is_key, answer)))


def _is_limits(answer: object) -> bool:
    return isinstance(answer, Limits) and all(
        isinstance(getattr(answer, name), Integral)
        for name in ("token_budget", "max_seqs", "watermark_blocks", "decode_headroom_blocks")
    )


def _one_of(kind: type) -> tuple[str, Callable[[object], bool]]:
    names = " or ".join(f"{kind.__name__}.{member.name}" for member in kind)  # type: ignore[attr-defined]
    return names, lambda answer: isinstance(answer, kind)


def _or_none(kind: type, text: str) -> tuple[str, Callable[[object], bool]]:
    return f"{text} or None", lambda answer: answer is None or isinstance(answer, kind)


_WHOLE = ("a whole number", lambda answer: isinstance(answer, Integral))
_KEY = ("a number or a tuple of numbers, none of them NaN", _is_key)
# By hook: what it must return, in words and as a test. Hooks that may return anything are left out.
_ANSWERS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "mechanisms": ("a dict of names and texts", lambda answer: isinstance(answer, dict)),
    "limits": ("Limits, with whole numbers", _is_limits),
    "admit": _one_of(Admission),
    "queue_key": _KEY,
    "queue_key_line": ("a Line", lambda answer: isinstance(answer, Line)),
    "victim_key": _KEY,
    "preemption_mode": _one_of(PreemptionMode),
    "next_queue": _one_of(NextQueue),
    "headroom_blocks": _WHOLE,
    "reserved_blocks": _WHOLE,
    "timeout": _or_none(Timeout, "a Timeout"),
    "form_batch": (
        "a list of at least one request",
        lambda answer: isinstance(answer, Sequence) and len(answer) > 0,
    ),
    "reserve_tokens": _WHOLE,
    "output_cap_tokens": _or_none(Integral, "a whole number"),
}


def hold_to_interface(module: ModuleType) -> None:
    """From now on errors in `module` are the user's, and answers of its policies are checked.

    Raises:
        SloBenchError: a hook takes other arguments than it is called with, or its name is misspelt.
    """
    add_module(module.__name__)
    if module.__name__ not in _modules:
        return
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            for base in (Policy, StaticPolicy):
                if issubclass(kind, base):
                    _check_names(kind, base, module)
                    _check_hooks(kind, base)


def add_module(name: str) -> None:
    """From now on errors in this module are the user's, unless it is one of slo-bench."""
    if name.partition(".")[0] == _PACKAGE:
        return
    if not _modules:
        _watch_threads()
        _tell_ends()
    _modules.add(name)


def _check_hooks(kind: type, base: type) -> None:
    for name, hook in list(vars(kind).items()):
        if name[0] == "_" or not isinstance(hook, FunctionType):
            continue
        if isinstance(vars(base).get(name), FunctionType):
            parameters = list(inspect.signature(vars(base)[name]).parameters)
            try:
                inspect.signature(hook).bind(*parameters)
            except TypeError:
                raise SloBenchError(
                    f"{_place(hook.__code__)}: it takes "
                    f"({', '.join(inspect.signature(hook).parameters)}) but is called "
                    f"with ({', '.join(parameters)})"
                ) from None
        if name in _ANSWERS and not hasattr(hook, "__wrapped__"):
            setattr(kind, name, _checked(hook, *_ANSWERS[name]))


def _checked(hook: FunctionType, text: str, fits: Callable[[object], bool]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def called(*arguments: Any) -> Any:
        answer = hook(*arguments)
        if not fits(answer):
            raise WrongAnswerError(
                f"{_place(hook.__code__)}: it returned {_line(answer, repr, 60)} but must return "
                f"{text}"
            )
        return answer

    return called


def _check_names(kind: type, base: type, module: ModuleType) -> None:
    """Refuse a method that nothing calls and whose name is nearly that of a hook."""
    hooks = [name for name, value in vars(base).items() if isinstance(value, FunctionType)]
    codes = [value.__code__ for value in _functions(module)]
    called = {name for code in codes for name in code.co_names}
    for name, method in vars(kind).items():
        if name[0] == "_" or name in called or hasattr(base, name):
            continue
        if isinstance(method, FunctionType) and (near := _nearest(name, hooks, cutoff=0.85)):
            raise SloBenchError(f"{_place(method.__code__)}: no hook has that name{near}")


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else (value,)
        yield from (member for member in members if isinstance(member, FunctionType))


# ---------------------------------------------------------------- errors


@contextmanager
def policy_errors() -> Iterator[None]:
    """Errors of a user's policy are told as such, also those of its threads and of its end.

    Raises:
        SloBenchError: in place of another error that passed a user's policy.
    """
    try:
        with watched():
            yield
    except (Exception, SystemExit) as error:
        if (text := fault_text(error)) is None:
            raise
        raise SloBenchError(text) from error
    if _thread_faults:
        raise SloBenchError(_thread_faults.pop(0))


def fault_text(error: BaseException) -> str | None:
    """The error of a user's policy with file, line and hook; None: it is no error of one."""
    if isinstance(error, SloBenchError) and error.__cause__ is not None:
        return None  # told already
    frame, line = _user_frame(error)
    if isinstance(error, WrongAnswerError):
        text = str(error)
    elif frame is None or line is None:
        return None
    elif isinstance(error, SystemExit):
        text = f"{_place(frame.f_code, line)}: it ends the process (exit code {error.code})"
    elif isinstance(error, SloBenchError):
        text = f"{_place(frame.f_code, line)}: {error}"
    else:
        text = f"{_place(frame.f_code, line)}: {_error_line(error)}{_suggestion(error, frame)}"
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    return text


def load_fault_text(error: BaseException) -> str:
    """Why a module cannot be loaded, with the line if it is known."""
    frame, line = _user_frame(error)
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    where = "" if line is None else f" (line {line})"
    if isinstance(error, SystemExit):
        return f"it ends the process, exit code {error.code}{where}"
    hint = "" if frame is None else _suggestion(error, frame)
    return f"{_error_line(error)}{hint}{where}"


def _error_line(error: BaseException) -> str:
    """The error's class and message on one line."""
    return f"{type(error).__name__}: {_line(error, str, 300)}"


def _line(value: object, form: Callable[[object], str], limit: int) -> str:
    """The value's text on one line of `limit` characters, whatever its class does."""
    try:
        text = " ".join(form(value).split())
    except Exception:  # its own `__repr__` fails
        return f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[:limit]}…"


def _user_frame(error: BaseException) -> tuple[FrameType | None, int | None]:
    """The innermost frame of a user's policy that the error passed, and its line."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__") in _modules:
            return frame, line
    return None, None


def _place(code: CodeType, line: int | None = None) -> str:
    if line is None:
        line = code.co_firstlineno
    return f"{code.co_filename}, line {line}, in {code.co_name}"


def _suggestion(error: BaseException, frame: FrameType) -> str:
    """`; did you mean …?` for a misspelt name; empty if no name is near."""
    text = _line(error, str, 300)
    if isinstance(error, AttributeError) and error.name:
        names = [*dir(error.obj), *(dir(View) if hasattr(error.obj, "policy_state") else ())]
        return _nearest(error.name, names)
    if isinstance(error, NameError) and error.name:
        return _nearest(error.name, [*frame.f_locals, *frame.f_globals])
    if match := re.match(r"cannot import name '(\w+)' from '([\w.]+)'", text):
        return _nearest(match[1], dir(sys.modules.get(match[2])))
    if match := _UNEXPECTED.search(text):
        called = frame.f_globals.get(match[1])
        if callable(called):
            return _nearest(match[2], inspect.signature(called).parameters)
    return ""


def _nearest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    public = sorted({choice for choice in choices if not choice.startswith("_")})
    near = difflib.get_close_matches(name, public, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def _watch_threads() -> None:
    """What a thread of a policy raises is kept, and told by `policy_errors`."""
    others = threading.excepthook

    def hook(raised: threading.ExceptHookArgs) -> None:
        text = None if raised.exc_value is None else fault_text(raised.exc_value)
        if text is None:
            others(raised)
        else:
            _thread_faults.append(f"{text} (in a thread)")

    threading.excepthook = hook


def _tell_ends() -> None:
    """`os._exit` of a policy raises SystemExit, which says where; that of others ends as before."""
    end: Callable[[int], typing.NoReturn] = os._exit
    process = os.getpid()

    def leave(status: int) -> typing.NoReturn:
        caller = sys._getframe(1).f_globals.get("__name__")
        if caller in _modules and os.getpid() == process:
            raise SystemExit(status)
        end(status)

    os._exit = leave


@contextmanager
def watched() -> Iterator[None]:
    """Say on stderr where a policy is that does not return."""
    if not _modules:
        yield
        return
    done = threading.Event()
    thread = threading.get_ident()

    def look() -> None:
        last = None
        while not done.wait(LOOK_S):
            frames = [f for f, _ in traceback.walk_stack(sys._current_frames().get(thread))]
            frames = [f for f in frames if f.f_globals.get("__name__") in _modules]
            if frames and frames[-1] is last:  # the very same call of a hook
                place = _place(frames[0].f_code, frames[0].f_lineno)
                sys.stderr.write(f"{place}: has not returned for {LOOK_S:g} s; Ctrl-C ends it\n")
                return
            last = frames[-1] if frames else None

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        done.set()
