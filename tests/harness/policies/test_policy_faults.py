"""Faults of a user's policy are told with file, line and hook, in whatever process it runs."""

from __future__ import annotations

import textwrap
import threading

import pytest

from slo_bench.harness.engine.compiled_core import core_is_compiled
from slo_bench.harness.policies import policy_faults
from slo_bench.harness.policies.policy_faults import TRACEBACK_VARIABLE, fault_text, policy_errors
from slo_bench.harness.policies.systems import system
from slo_bench.workloads.errors import SloBenchError

HEAD = """\
import os, sys, threading, time
from dataclasses import dataclass
from slo_bench.policy import *
@dataclass(frozen=True)
class Faulty(Policy):
"""  # the class' body begins on line 6
KEY = "def queue_key(self, r, view):"
LIMITS = "def limits(self, view):"


# Compiled classes do not always say which parameters they have.
NEAREST = "" if core_is_compiled() else r"; did you mean max_seqs\?"


@pytest.fixture
def policy_file(tmp_path):
    """Writes a policy whose class has these lines."""

    def written(*lines: str) -> str:
        path = tmp_path / "faulty.py"
        path.write_text(HEAD + textwrap.indent("\n".join(lines), "    ") + "\n")
        return str(path)

    return written


@pytest.fixture
def simulated(policy_file, serve, requests):
    """Simulates four requests on such a policy, as a cell of an experiment is."""

    def run(*lines: str) -> None:
        policy = system(policy_file(*lines))
        workload = requests((0, 30, 2), (0.1, 30, 1), (0.2, 10, 1), (0.3, 20, 1))
        with policy_errors():
            serve(workload, policy)

    return run


@pytest.mark.parametrize(
    ("hook", "statement", "problem"),
    [
        (KEY, "return r.promt_tokens", r"AttributeError: .*; did you mean prompt_tokens\?"),
        (LIMITS, "return Limits(max_seqs=view.n_wating)", r"AttributeError: .* mean n_waiting\?"),
        (LIMITS, "return Limits(max_seq=3)", rf"TypeError: .*'max_seq'{NEAREST}"),
        (KEY, "weight = 1.0; return wieght", r"NameError: .*; did you mean weight\?"),
        (KEY, "return self.queue_key(r, view)", "RecursionError"),
        (KEY, "sys.exit(3)", r"it ends the process \(exit code 3\)"),
        (KEY, "os._exit(0)", r"it ends the process \(exit code 0\)"),
        (KEY, "view.counters.add('unheard_of')", "unknown mechanism 'unheard_of'"),
    ],
)
def test_error_of_a_hook_is_told_with_its_line_and_a_suggestion(
    simulated, hook, statement, problem
):
    with pytest.raises(SloBenchError, match=rf"faulty.py, line 8, in \w+: {problem}"):
        simulated("dynamic_limits = True", hook, f"    {statement}")


@pytest.mark.parametrize(
    ("hook", "statement", "problem"),
    [
        (KEY, "pass", "None but must return a number or a tuple of numbers, none of them NaN"),
        (KEY, "return (1.0, 'a')", r"\(1.0, 'a'\) but must return a number"),
        (KEY, "return float('nan')", "nan but must return a number"),
        (LIMITS, "return {}", "{} but must return Limits"),
        pytest.param(
            *(LIMITS, "return Limits(max_seqs=2.5)", "Limits.* with whole numbers"),
            marks=pytest.mark.skipif(core_is_compiled(), reason="compiled Limits refuse 2.5"),
        ),
        ("def admit(self, r, view):", "return False", "False but must return Admission.ADMIT or"),
        ("def next_queue(self, view):", "return None", "None but must return NextQueue.WAITING"),
        ("def headroom_blocks(self, r, view):", "return 'x'", "'x' but must return a whole number"),
        ("def timeout(self, r, view):", "return 3.0", "3.0 but must return a Timeout or None"),
    ],
)
def test_wrong_answer_of_a_hook_names_what_it_must_return(simulated, hook, statement, problem):
    with pytest.raises(SloBenchError, match=rf"faulty.py, line 6, in \w+: it returned {problem}"):
        simulated(hook, f"    {statement}")


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        ("def queue_key(self, r):", r"takes \(self, r\) but is called with \(self, r, view\)"),
        ("def queue_kye(self, r, view):", r"no hook has that name; did you mean queue_key\?"),
    ],
)
def test_hook_that_would_not_be_called_is_refused_whenever_the_file_is_loaded(
    policy_file, hook, problem
):
    path = policy_file(hook, "    return 1.0")
    for _ in range(2):
        with pytest.raises(SloBenchError, match=rf"faulty.py, line 6, in \w+: .*{problem}"):
            system(path)


def test_called_helper_with_nearly_a_hooks_name_is_no_fault(simulated):
    simulated(KEY, "    return self.queue_keys(r)", "def queue_keys(self, r):", "    return 1.0")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("class E(BaseException): pass\nraise E(1)", r"E: 1 \(line 2\)"),
        ("import sys\nsys.exit(0)", r"it ends the process, exit code 0 \(line 2\)"),
        ("import os\nos._exit(0)", r"it ends the process, exit code 0 \(line 2\)"),
        ("from slo_bench.policy import Polcy", r"ImportError: .*did you mean Policy\? \(line 1\)"),
        (
            "from slo_bench.policy import parameter\nx = parameter(1, lo=0)",
            r"TypeError: .*'lo'; did you mean low\? \(line 2\)",
        ),
        ("\ndef broken(:", r"SyntaxError: .* \(line 2\)"),
    ],
)
def test_policy_file_that_cannot_be_loaded_is_told_with_its_line(tmp_path, lines, problem):
    path = tmp_path / "unloadable.py"
    path.write_text(lines)
    with pytest.raises(SloBenchError, match=f"unloadable.py cannot be loaded: {problem}"):
        system(str(path))


def test_error_in_a_thread_of_a_policy_is_told_at_the_end(simulated, capsys):
    body = [
        "    worker = threading.Thread(target=lambda: 1 / 0)",
        "    worker.start()",
        "    worker.join()",
        "    return 1.0",
    ]
    problem = r"faulty.py, line 7, in <lambda>: ZeroDivisionError: .*\(in a thread\)"
    with pytest.raises(SloBenchError, match=problem):
        simulated(KEY, *body)
    policy_faults._thread_faults.clear()  # one for each key
    assert "Traceback" not in capsys.readouterr().err


def test_hook_that_does_not_return_is_named_while_it_runs(simulated, monkeypatch):
    written = threading.Event()

    class Listening:
        text = ""

        def write(self, text):
            self.text += text
            written.set()

    listening = Listening()
    monkeypatch.setattr(policy_faults, "LOOK_S", 0.001)
    monkeypatch.setattr("sys.stderr", listening)
    monkeypatch.setattr("time.sleep", lambda _: written.wait())
    simulated(KEY, "    time.sleep(1)", "    return 1.0")
    assert "faulty.py, line 7, in queue_key: has not returned for" in listening.text


def test_traceback_of_a_policys_error_is_printed_on_request(simulated, monkeypatch, capsys):
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    with pytest.raises(SloBenchError):
        simulated(KEY, "    return 1 / 0")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("raise ValueError('a\\n  b\\x00' + 999 * 'c')", "ValueError: a b\x00c{290,}…$"),
        ("raise Mute('?')", "Mute: <Mute>$"),
        ("return Mute('?')", "it returned <Mute> but must return a number"),
    ],
)
def test_text_of_an_error_or_answer_is_one_line_whatever_its_class_does(
    simulated, statement, problem
):
    mute = [
        "class Mute(Exception):",
        "    def __repr__(self): return 1 / 0",
        "    __str__ = __repr__",
    ]
    with pytest.raises(SloBenchError, match=problem):
        simulated(KEY, *(f"    {line}" for line in [*mute, statement]))


def test_error_of_slo_bench_is_no_fault_of_a_policy():
    with pytest.raises(KeyError) as raised:
        {}["ours"]
    assert fault_text(raised.value) is None
