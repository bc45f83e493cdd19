"""Programs that exchange lines of JSON with the process that started them."""

import queue
import subprocess
import sys
import time

import pytest

from slo_bench.workloads.child_process import ChildProcess, exit_reason

PATIENCE_S = 30
ECHO = """
from slo_bench.workloads.child_process import Parent
parent = Parent()
print("not a message")
for message in parent.messages():
    parent.send({"echo": message})
"""
HALF = """
import os, signal
from slo_bench.workloads.child_process import Parent
Parent()._answers.write('{"half": ')
os.kill(os.getpid(), signal.SIGKILL)
"""
LEAVES = """
import time
from slo_bench.workloads.child_process import Parent
parent = Parent()
parent.exit_with()
parent.send("ready")
time.sleep(600)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Starts a program."""
    monkeypatch.syspath_prepend(tmp_path)

    def start(code):
        (tmp_path / "the_child.py").write_text(code)
        return ChildProcess("the_child")

    return start


def test_a_conversation(child):
    with child(ECHO) as one:
        for message in ({"a": [1, "é"]}, 2.5):
            one.send(message)
            assert one.receive() == {"echo": message}
    assert one.process.poll() is not None


def test_a_listener_hears_the_end(child):
    heard = queue.SimpleQueue()
    with child(ECHO) as one:
        one.listen(heard.put)
        one.send(1)
        assert heard.get(timeout=PATIENCE_S) == {"echo": 1}
    assert heard.get(timeout=PATIENCE_S) is None


def test_nothing_is_sent_to_a_stopped_child(child):
    """A listener may still answer a message when another thread stops the child."""
    one = child(ECHO)
    one.stop(PATIENCE_S)
    one.send("too late")
    assert one.process.returncode == 0


def test_half_a_message_is_none(child):
    with child(HALF) as one:
        assert one.receive() is None
        assert "was killed (signal 9)" in exit_reason(one.process, "it")


def test_with_grace_it_ends_by_itself(child):
    one = child(ECHO)
    one.stop(PATIENCE_S)
    assert one.process.returncode == 0


def test_without_its_parent_it_exits(child):
    one = child(LEAVES)
    assert one.receive() == "ready"
    begin_s = time.monotonic()
    one.stop(PATIENCE_S)
    assert one.process.returncode == 1
    assert time.monotonic() - begin_s < PATIENCE_S


def test_what_it_needs_is_found_where_the_parent_finds_it(child):
    assert subprocess.run(
        [sys.executable, "-P", "-c", "import the_child"], capture_output=True, check=False
    ).returncode
    with child(ECHO) as one:
        one.send(0)
        assert one.receive() == {"echo": 0}
