"""Terminals, pipes, disks and limits that are not as usual: one line, and the right exit code."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slo_bench import SloBenchError
from slo_bench.cli.output.console import for_terminal

COMMAND = [sys.executable, "-m", "slo_bench.cli.entry"]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="file descriptors and signals")


def call(*words, fds="", env=None, **options):
    """Run a command by a shell with redirections `fds`; exit code, stdout and stderr."""
    line = ["sh", "-c", f'exec "$@" {fds}', "sh", *COMMAND, *words]
    options = {"capture_output": True, "check": False, "timeout": 120} | options
    ended = subprocess.run(line, env={**os.environ, **(env or {})}, **options)
    return ended.returncode, ended.stdout, ended.stderr


def full_device(tmp_path):
    """A device that is always full, of our own: as root a fault would replace the real one."""
    path = tmp_path / "full"
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 7))
        path.write_bytes(b"")
    except OSError:
        pytest.skip("no device can be made here")
    return path


@pytest.mark.parametrize("encoding", ["ascii:strict", "latin-1"])
def test_output_in_a_narrow_encoding_replaces_missing_characters(encoding):
    code, out, err = call("run", "--help-all", env={"PYTHONIOENCODING": encoding})
    assert code == 0, err
    assert b"--sweep" in out
    assert b"NAME=A,B,..." in out


def test_rules_and_marks_are_no_question_marks_in_ascii():
    code, out, err = call("list", "gpus", env={"PYTHONIOENCODING": "ascii:strict"})
    assert code == 0, err
    assert b"----" in out
    assert b"?" not in call("doctor", env={"PYTHONIOENCODING": "ascii:strict"})[1]


@pytest.mark.parametrize("fds", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_cause_no_error(fds):
    code, out, err = call("list", "models", fds=fds)
    assert code == 0
    assert (b"llama" in out) == (">&-" not in fds.replace("2>&-", ""))
    assert b"rror" not in err


def test_full_stdout_is_an_error_and_full_stderr_is_ignored(tmp_path):
    full = full_device(tmp_path)
    code, _, err = call("list", "models", "--json", fds=f">{full}")
    assert (code, err) == (2, b"error: cannot write the output: No space left on device\n")
    assert call("list", "no-such-thing", fds=f"2>{full}")[0] == 2


def test_closed_pipe_on_stdout_ends_the_command_like_sigpipe():
    read, write = os.pipe()
    os.close(read)
    code, _, err = call("run", "--help", capture_output=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (code, err) == (128 + signal.SIGPIPE, b"")


@pytest.mark.slow
def test_removed_working_directory_is_an_error_line(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    line = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *COMMAND]
    ended = subprocess.run([*line, "run", "--out", "o"], cwd=gone, capture_output=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.endswith(b"error: the working directory does not exist any more\n")


def test_file_name_outside_utf_8_is_refused(tmp_path):
    code, _, err = call("run", "--out", b"x\xff", env={"PYTHONUTF8": "1"}, cwd=tmp_path)
    assert code == 2
    assert err.startswith(b"error: x\\udcff is not valid in the encoding utf-8")
    assert list(tmp_path.iterdir()) == []


def test_out_of_memory_is_an_error_line():
    limit = 200 << 20

    def limited():
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    code, _, err = call("list", "models", preexec_fn=limited)
    assert code == 2
    assert b"memory is limited to 200 MiB (ulimit -v)" in err


STRUCK = """
import os, signal, sys
from slo_bench.cli import main as cli
from slo_bench.cli.interrupts import interruptible, watch
watch()

def command():
    with interruptible("go on so"):
        try:
            os.kill(os.getpid(), signal.{first})
        finally:  # a second one, while the first is being handled
            os.kill(os.getpid(), signal.{second})

cli.app = command
cli.main()
"""


@pytest.mark.parametrize(
    ("first", "second", "code"), [("SIGINT", "SIGINT", 130), ("SIGTERM", "SIGINT", 143)]
)
def test_interrupted_command_prints_its_resume_hint_once(first, second, code):
    line = [sys.executable, "-c", STRUCK.format(first=first, second=second)]
    ended = subprocess.run(
        line,
        capture_output=True,
        check=False,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (ended.returncode, ended.stderr) == (code, b"go on so\n")


WITHIN_EXEC = """
from slo_bench.cli import main as cli
from slo_bench.cli.interrupts import watch
watch()
cli.app = lambda: exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
cli.main()
"""
SWALLOWED = """
import os, signal
from slo_bench.cli import main as cli
from slo_bench.cli.interrupts import watch
from slo_bench.cli.output.progress import counted
watch()

def command():
    with counted("steps") as progress:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            pass
        progress(1, 2)
        print("goes on")

cli.app = command
cli.main()
"""
WHILE_ENDING = """
import atexit, os, signal
from slo_bench.cli import entry, main
main.main = lambda: print("done")
atexit.register(os.kill, os.getpid(), signal.{signal})
entry.main()
"""


@pytest.mark.parametrize(
    ("script", "code", "out"),
    [
        (SWALLOWED, 130, b""),
        (WITHIN_EXEC, 130, b""),  # and not by the signal, as Python itself would
        (WHILE_ENDING.format(signal="SIGINT"), 0, b"done\n"),
        (WHILE_ENDING.format(signal="SIGTERM"), 0, b"done\n"),
    ],
)
def test_signal_at_the_end_does_not_change_exit_code_and_output(script, code, out, tmp_path):
    (tmp_path / "struck.py").write_text(script)
    ended = subprocess.run(
        [sys.executable, "-m", "struck"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, out, b"")


def test_internal_error_exits_70():
    line = "from slo_bench.cli import main as cli; cli.app = lambda: 1 / 0; cli.main()"
    ended = subprocess.run([sys.executable, "-c", line], capture_output=True, check=False)
    assert ended.returncode == 70
    assert b"ZeroDivisionError" in ended.stderr
    assert b"this is a fault of slo-bench" in ended.stderr


def test_record_of_requests_on_a_full_disk_is_an_error(monkeypatch):
    from slo_bench.harness.results.run_checkpoint import Checkpoint

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint = Checkpoint(Path("p") / "plan.jsonl", "")
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(SloBenchError, match=r"cannot write p.plan\.jsonl: No space left"):
        checkpoint.append({})


def test_a_terminal_of_absurd_width_gets_its_help():
    code, out, _ = call("run", "--help", env={"COLUMNS": "99999999"})
    assert code == 0
    assert max(map(len, out.decode().splitlines())) < 10_000


def test_lines_for_a_terminal_end_between_words_and_commands_stay_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert for_terminal("a workload that has no name at all") == (
        "a workload that has\nno name at all"
    )
    command = "slo-bench run --resume --out runs/quickstart"
    assert for_terminal(command) == command
    assert for_terminal(f"it was interrupted; go on with: {command}") == (
        f"it was interrupted;\ngo on with:\n{command}"
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert for_terminal(f"go on with: {command}") == f"go on with: {command}"
