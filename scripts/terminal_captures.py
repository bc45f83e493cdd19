"""Write what a terminal of 80 x 24 shows at the end of eight commands, into docs/images/terminal/.

    python scripts/terminal_captures.py                  # all of them
    python scripts/terminal_captures.py run capacity gate

Each command is typed in tmux, in a folder that begins empty, and the last screen is written as
text, with the prompt below it. `observe` watches a vLLM with a tiny model under load, which needs
its environment (`slo-bench backends install`).
"""

from __future__ import annotations

import contextlib
import importlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "images" / "terminal"
COLUMNS, LINES = 80, 24
LOAD = (
    "--workload azure-conv --rates 4,7 --duration 120 --warmup 12 --seeds 2 --slo ttft=1,tpot=0.15"
)
COMMANDS = {
    "run": "slo-bench run",
    "capacity": "slo-bench capacity --system vllm --workload azure-conv --slo ttft=1,tpot=0.15 "
    "--target 0.9 --seeds 1",
    "tune": "slo-bench tune sarathi --workload azure-conv --slo ttft=1,tpot=0.15 --trials 12",
    "plan": "slo-bench plan --rate 10 --slo ttft=1,tpot=0.1 --gpu a100-80g,h100-80g --max-gpus 4 "
    "--html plans.html --out plans",
    "report": "slo-bench report baseline candidate --out both.html",
    "sensitivity": "slo-bench sensitivity --system vllm --system sarathi",
    "observe": "slo-bench observe http://127.0.0.1:8000 --model models/tiny --slo ttft=1,tpot=0.1 "
    "--duration 120 --set max_num_seqs=256",
    "gate": "slo-bench gate baseline candidate --max-regression 5%",
}
TWO_RUNS = (
    f"slo-bench run --system vllm {LOAD} --out baseline",
    f"slo-bench run --system vllm {LOAD} --set max_num_batched_tokens=512 --out candidate",
)
BEFORE = {"report": TWO_RUNS, "gate": TWO_RUNS}  # what a command's reader has run already


def last_screen(command: str, folder: Path) -> str:
    """What a terminal shows when a command typed in this folder has ended."""
    tmux = ("tmux", "-L", f"slo-bench-{folder.name}", "-f", "/dev/null")
    typed = (
        f"printf '$ %s\\n' {shlex.quote(command)}; {command}; printf '$ '; "
        f"{shlex.join(tmux)} wait-for -S ended; cat"
    )
    size = ("-x", str(COLUMNS), "-y", str(LINES))
    subprocess.run([*tmux, "new-session", "-d", *size, "-c", folder, typed], check=True)
    try:
        subprocess.run([*tmux, "wait-for", "ended"], check=True)
        shown = subprocess.run([*tmux, "capture-pane", "-p"], check=True, capture_output=True)
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
    return "\n".join(line.rstrip() for line in shown.stdout.decode().splitlines()).strip() + "\n"


def main() -> None:
    """Write the last screens of the named commands, or of all."""
    if shutil.which("tmux") is None:
        raise SystemExit("tmux is missing: apt-get install tmux")
    page_outputs = importlib.import_module("page_outputs")  # the script beside this one

    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        for name in sys.argv[1:] or COMMANDS:
            prepared = page_outputs.PREPARED.get(name, lambda _: contextlib.nullcontext())
            with prepared(folder):
                for command in BEFORE.get(name, ()):
                    if not (folder / command.split()[-1]).exists():
                        subprocess.run(shlex.split(command), cwd=folder, check=True)
                (OUT / f"{name}.txt").write_text(last_screen(COMMANDS[name], folder), "utf-8")
            print((OUT / f"{name}.txt").relative_to(ROOT))


if __name__ == "__main__":
    main()
