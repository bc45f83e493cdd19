"""`slo-bench serve` as a user starts it, and what its gateway says of itself."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

PATIENCE_S = 300
READY_S = 900  # machines that run tests are busy
# Ctrl-C must stop it also where whoever runs the tests passes on that it is ignored.
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from slo_bench.cli.main import main; main()"
)


@dataclass(frozen=True)
class Gateway:
    """What `slo-bench serve` has started; `stderr_file` has its messages."""

    url: str
    stderr_file: Path

    @property
    def urls(self) -> Sequence[str]:
        """Of the servers, in order."""
        return re.findall(r" at (http://\S+): ", self.stderr_file.read_text())

    def counts(self, name: str) -> list[int]:
        """A count of the gateway's, for each server in order."""
        return [round(value) for value in self.values(name)]

    def values(self, name: str) -> list[float]:
        """A metric of the gateway's, for each server in order."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        samples = re.findall(rf"^slo_bench_gateway_{name}{{.*}} (\S+)$", text, re.MULTILINE)
        return [float(value) for value in samples]


@pytest.fixture(autouse=True, scope="session")
def one_process_less() -> Iterator[None]:
    """vLLM's engine runs the model in its own process: servers start in two thirds of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


@pytest.fixture
def started_serve(tmp_path: Path) -> Callable[..., AbstractContextManager[Gateway]]:
    """`slo-bench serve WORD…`, logs in `servers/`; stopped by Ctrl-C, and nothing is left."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    @contextlib.contextmanager
    def up(*words: object) -> Iterator[Gateway]:
        stderr_file = tmp_path / "said.txt"
        arguments = [*words, "--log", tmp_path / "servers" / "s.log", "--startup-timeout", READY_S]
        with (
            stderr_file.open("w") as errors,
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "serve", *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # vLLM's sockets have paths of at most 107 characters.
                env={
                    **os.environ,
                    "TMPDIR": str(temporary),
                    "VLLM_RPC_BASE_PATH": tempfile.gettempdir(),
                },
            ) as process,
        ):
            try:
                assert process.stdout is not None
                url = process.stdout.readline().strip()
                assert url, stderr_file.read_text()
                yield Gateway(url, stderr_file)
            except BaseException:
                for log in sorted((tmp_path / "servers").glob("*.log")):
                    lines = log.read_text().splitlines()
                    print(log.name, *[line for line in lines if "ERROR" in line][:60], sep="\n")
                raise
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(PATIENCE_S)
        assert process.returncode == 130
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(url, timeout=5)
        assert not list(temporary.glob("slo-bench-*"))

    return up
