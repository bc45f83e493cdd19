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


def test_child_process_echoes_messages(child):
    with child(ECHO) as worker:
        for message in ({"a": [1, "é"]}, 2.5):
            worker.send(message)
            assert worker.receive() == {"echo": message}
    assert worker.process.poll() is not None


def test_child_process_listener_is_told_the_end(child):
    heard = queue.SimpleQueue()
    with child(ECHO) as worker:
        worker.listen(heard.put)
        worker.send(1)
        assert heard.get(timeout=PATIENCE_S) == {"echo": 1}
    assert heard.get(timeout=PATIENCE_S) is None


def test_send_to_a_stopped_child_does_nothing(child):
    """A listener may still answer a message when another thread stops the child."""
    worker = child(ECHO)
    worker.stop(PATIENCE_S)
    worker.send("too late")
    assert worker.process.returncode == 0


def test_unfinished_message_of_a_child_is_dropped(child):
    with child(HALF) as worker:
        assert worker.receive() is None
        assert "was killed (signal 9)" in exit_reason(worker.process, "it")


def test_stop_with_grace_lets_the_child_end_by_itself(child):
    worker = child(ECHO)
    worker.stop(PATIENCE_S)
    assert worker.process.returncode == 0


def test_child_process_exits_without_its_parent(child):
    worker = child(LEAVES)
    assert worker.receive() == "ready"
    begin_s = time.monotonic()
    worker.stop(PATIENCE_S)
    assert worker.process.returncode == 1
    assert time.monotonic() - begin_s < PATIENCE_S


def test_child_process_imports_from_the_parents_path(child):
    assert subprocess.run(
        [sys.executable, "-P", "-c", "import the_child"], capture_output=True, check=False
    ).returncode
    with child(ECHO) as worker:
        worker.send(0)
        assert worker.receive() == {"echo": 0}
