"""Write what commands print into README and the pages of docs/, in both languages.

    python scripts/page_outputs.py                     # every page that shows an output
    python scripts/page_outputs.py guide-gate README

A block of commands that `<!-- output -->` follows is run as it stands, a page's blocks in order in
one empty folder; what the last command prints stands up to `<!-- end -->`, at 80 columns, and up to
`MOST_LINES` lines. The Chinese page gets the same. What a page's reader has already (a trace, a
running server) is made first (`PREPARED`). A command that ends in a way other than the page tells
(`EXIT_CODES`) changes no page. `observe` needs vLLM's environment (`slo-bench backends install`),
`guide-predictor` the extra `encoder`.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from slo_bench.harness.servers.mock import MockConfig, serving

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("SLO_BENCH_SHARED", ROOT.parent / "shared" / "data"))
MOST_LINES = 40
BLOCK = re.compile(
    r"```(?:sh|console)\n(?P<commands>[^`]*?)```\n\n<!-- output -->\n(?P<output>.*?)<!-- end -->",
    re.DOTALL,
)
EXIT_CODES = {"slo-bench gate": 1}  # of commands that do not end with 0
INSTALLED = re.compile(r".* && \.venv/bin/(?=slo-bench)")  # README's first line installs first
PORT_OF_SERVER, PORT_OF_CAPTURE = 8000, 9000


def pages(name: str) -> list[Path]:
    """The English page and, where there is one, the Chinese page of a name."""
    if name == "README":
        return [ROOT / "README.md", ROOT / "README.zh-CN.md"]
    folders = (ROOT / "docs", ROOT / "docs" / "zh")
    return [page for folder in folders if (page := folder / f"{name}.md").exists()]


def names_with_outputs() -> list[str]:
    """README, if it shows an output, and the names of the pages that do."""
    shown = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page.stem for page in shown if BLOCK.search(page.read_text("utf-8"))]


def outputs_of(page: Path) -> list[str]:
    """What the commands of a page print, by block.

    Raises:
        SystemExit: a command ended otherwise than the page tells.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for step in test_module("docs", "test_commands").steps(page):
            if step.file is not None:
                (Path(folder) / step.file).write_text(step.text, encoding="utf-8")
        if page.stem in PREPARED:
            stack.enter_context(PREPARED[page.stem](Path(folder)))
        blocks = BLOCK.finditer(page.read_text("utf-8").replace("\\\n", " "))
        return [_output(block["commands"], Path(folder)) for block in blocks]


def _output(commands: str, folder: Path) -> str:
    """What the last of some commands prints; all are run, in order."""
    text = ""
    for line in filter(None, commands.splitlines()):
        words = shlex.split(INSTALLED.sub("", line), comments=True)
        done = _run(words, folder)
        expected = EXIT_CODES.get(" ".join(words[:2]), 0)
        if done.returncode != expected:
            raise SystemExit(f"{line}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        text = done.stdout.replace(f"{folder}/", "")
    lines = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").splitlines()
    return "\n".join([*lines[:MOST_LINES], *["…"] * (len(lines) > MOST_LINES)])


def _run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)


def with_outputs(text: str, outputs: list[str]) -> str:
    """The text of a page with these outputs in its blocks.

    Raises:
        ValueError: the page has more or fewer blocks.
    """
    blocks = list(BLOCK.finditer(text))
    if len(blocks) != len(outputs):
        raise ValueError(f"{len(blocks)} blocks for {len(outputs)} outputs")
    for block, output in reversed(list(zip(blocks, outputs, strict=True))):
        start, end = block.span("output")
        text = f"{text[:start]}\n```text\n{output}\n```\n\n{text[end:]}"
    return text


# ---- what a page's reader has already ----------------------------------------------------------
@contextlib.contextmanager
def _captured_day(folder: Path) -> Iterator[None]:
    """`monday.jsonl`: requests of a workload, captured before a server that answers like one."""
    with serving(MockConfig(ttft_s=0.05, itl_s=0.005)) as server:
        capture = ["slo-bench", "capture", server.url, "--port", str(PORT_OF_CAPTURE)]
        with _process([*capture, "--out", "monday.jsonl"], folder, PORT_OF_CAPTURE):
            url = f"http://127.0.0.1:{PORT_OF_CAPTURE}"
            load = ["slo-bench", "run", "--base-url", url, "--workload", "azure-conv"]
            load += ["--rates", "4", "--requests", "240", "--seeds", "1", "--out", "load"]
            done = _run(load, folder)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
    yield


@contextlib.contextmanager
def _kernel_tables(folder: Path) -> Iterator[None]:
    """LLMServingSim's tables of one GPU, from the shared data."""
    name = "RTX4090-Llama-3.1-8B-bf16-tp1"
    shutil.copytree(SHARED / "profiles" / "llmservingsim" / name, folder / name)
    yield


@contextlib.contextmanager
def _answered_prompts(folder: Path) -> Iterator[None]:
    """Prompts with lengths of their answers: to train on, to evaluate with, to replay."""
    rows = {
        name: gzip.decompress((SHARED / "prompts" / f"{name}.jsonl.gz").read_bytes()).splitlines()
        for name in ("alpaca_5000", "alpaca_en_demo")
    }
    chats = rows["alpaca_en_demo"]
    (folder / "alpaca.json").write_bytes(b"[" + b",".join(rows["alpaca_5000"][:400]) + b"]")
    (folder / "chats.jsonl").write_bytes(b"\n".join(chats[:300]))
    (folder / "held-out.jsonl").write_bytes(b"\n".join(chats[500:]))
    (folder / "prompts.jsonl").write_bytes(b"\n".join(chats[500:]))
    yield


@contextlib.contextmanager
def _loaded_server(folder: Path) -> Iterator[None]:
    """A vLLM with a tiny model at the port that the page names, under a load that rises."""
    _run(["slo-bench", "model", "make", "models/tiny"], folder)
    serve = ["slo-bench", "serve", "vllm", "--backend", "vllm", "--model", "models/tiny"]
    url = f"http://127.0.0.1:{PORT_OF_SERVER}"
    load = ["slo-bench", "run", "--base-url", url, "--workload", "alpaca"]
    load += ["--rates", "1,2,4", "--duration", "50", "--seeds", "1", "--out", "load"]
    with (
        _process([*serve, "--port", str(PORT_OF_SERVER)], folder, PORT_OF_SERVER),
        _process(load, folder, PORT_OF_SERVER),
    ):
        yield


@contextlib.contextmanager
def _process(words: list[str], folder: Path, port: int) -> Iterator[None]:
    """A process that runs meanwhile, once something answers at `port`; ended by Ctrl-C."""
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(
            ["env", "--default-signal=INT", *words], cwd=folder, stdout=log, stderr=log
        )
        try:
            while True:
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                    break
                if process.poll() is not None:
                    raise SystemExit((folder / "log.txt").read_text())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


PREPARED: dict[str, Callable[[Path], contextlib.AbstractContextManager[None]]] = {
    "guide-predictor": _answered_prompts,
    "guide-profile": _kernel_tables,
    "guide-replay": _captured_day,
    "observe": _loaded_server,
}


def test_module(folder: str, name: str) -> ModuleType:
    """A module in a folder of the tests, which are no package."""
    sys.path.insert(0, str(ROOT / "tests" / folder))
    return importlib.import_module(name)


def main() -> None:
    """Run the commands of the named pages, or of all, and write their outputs into the pages."""
    for name in sys.argv[1:] or names_with_outputs():
        outputs = outputs_of(pages(name)[0])
        for page in pages(name):
            page.write_text(with_outputs(page.read_text("utf-8"), outputs), encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
