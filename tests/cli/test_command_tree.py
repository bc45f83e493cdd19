"""Every command there is: help, examples that parse, names that are close, and how it ends."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.main import get_command

from slo_bench.cli import main as cli_main

CLI = get_command(cli_main.app)


def commands(command, path=()):
    """All commands below, each with the words that lead to it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


TREE = dict(commands(CLI))
IDS = [" ".join(path) or "slo-bench" for path in TREE]


def examples(command):
    head, *lines = [line.strip() for line in (command.epilog or "").split("\n\n")]
    assert head == "Examples:", command.name
    return lines


def parse(words):
    """Read the words as the command line would, without running anything; what they lead to."""
    command, context, rest, name = CLI, None, list(words), "slo-bench"
    path = []
    while True:
        if {"--help", "-h"} & set(rest[:1]):
            return tuple(path)
        context = command.make_context(name, list(rest), parent=context)
        if not hasattr(command, "resolve_command"):
            return tuple(path)
        left = [*getattr(context, "_protected_args", []), *context.args]
        name, command, rest = command.resolve_command(context, left)
        path.append(name)


def slo_bench(*arguments, cwd, **environ):
    return subprocess.run(
        [sys.executable, "-m", "slo_bench.cli.main", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
    )


def test_command_tree_has_nested_commands():
    assert {("run",), ("profile", "import"), ("backends", "list"), ("tune",)} <= set(TREE)


@pytest.mark.parametrize("path", TREE, ids=IDS)
def test_every_command_has_help_and_examples_that_parse(path):
    command = TREE[path]
    assert command.help, "says what it does"
    help_examples = examples(command)
    assert help_examples
    for example in help_examples:
        words = shlex.split(example)
        assert words[0] == "slo-bench"
        ends_at = parse(words[1:])
        if path:
            assert ends_at[: len(path)] == path, f"{example} is an example of another command"


@pytest.mark.parametrize("path", TREE, ids=IDS)
def test_every_option_has_help_and_a_regular_name(path):
    for parameter in TREE[path].params:
        assert parameter.help or parameter.name == "help", f"{parameter.name} has no help"
        for name in parameter.opts if parameter.param_type_name == "option" else ():
            assert re.fullmatch(r"--[a-z][a-z0-9-]*|-[a-zA-Z]", name), name


def test_short_option_letter_has_one_meaning_in_all_commands():
    meanings = {}
    for command in TREE.values():
        for parameter in command.params:
            for name in parameter.opts:
                if re.fullmatch("-[a-zA-Z]", name):
                    meanings.setdefault(name, set()).add(parameter.name)
    several = {name: parameters for name, parameters in meanings.items() if len(parameters) > 1}
    assert not several


def test_an_option_has_its_short_letter_in_every_command():
    letters = {}
    for command in TREE.values():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                short = frozenset(name for name in parameter.opts if name[:2] != "--")
                letters.setdefault(max(parameter.opts, key=len), set()).add(short)
    assert not {name: shorts for name, shorts in letters.items() if len(shorts) > 1}


MISSPELT = [
    (["rnu"], "run"),
    (["profile", "imprt"], "import"),
    (["backends", "instal"], "install"),
    (["run", "--sytem", "vllm"], "--system"),
    (["capacity", "--targt", "0.9"], "--target"),
    (["run", "-s", "sarthi"], "sarathi"),
    (["run", "--model", "llama-3-8"], "llama-3-8b"),
    (["run", "--gpu", "a100-80"], "a100-80g"),
    (["run", "--workload", "sharegtp"], "sharegpt"),
    (["run", "--suite", "quickstrat"], "quickstart"),
    (["run", "--router", "round-robn"], "round-robin"),
    (["run", "--arrivals", "poison"], "poisson"),
    (["run", "--sweep", "sarathi.chunk_token=1"], "chunk_tokens"),
    (["run", "--backend", "vlm"], "vllm"),
    (["run", "--records", "parqet"], "parquet"),
    (["capacity", "-s", "sarthi"], "sarathi"),
    (["tune", "sarthi"], "sarathi"),
    (["tune", "sarathi", "--search", "chunk_token"], "chunk_tokens"),
    (["tune", "sarathi", "--objective", "capcity"], "capacity"),
    (["plan", "--rate", "1", "--slo", "ttft=1", "--gpu", "h100"], "h100-80g"),
    (["serve", "edff", "--backend", "vllm", "--model", "x"], "edf"),
    (["serve", "edf", "--backend", "vlm", "--model", "x"], "vllm"),
    (["run", "--slo", "ttf=1"], "ttft"),
    (["sensitivity", "--perturb", "step-tim=1"], "step-time"),
    (["run", "--length-predictor", "orcle"], "oracle"),
    (["list", "sytems"], "systems"),
    (["list", "systems", "orka"], "orca"),
    (["workload", "show", "sharegtp"], "sharegpt"),
    (["profile", "import", "vidr", "x", "--out", "y"], "vidur"),
]


@pytest.mark.parametrize(("words", "suggestion"), MISSPELT, ids=[" ".join(w) for w, _ in MISSPELT])
def test_misspelt_name_is_refused_with_a_suggestion(
    words, suggestion, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["slo-bench", *words])
    with pytest.raises(SystemExit) as ended:
        cli_main.main()
    error = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().err).split())
    assert ended.value.code == 2
    assert suggestion in error
    assert "Traceback" not in error


COMPLETED = [
    ("slo-bench run --system sar", {"sarathi", "sarathi-drop"}),
    ("slo-bench run -s vllm,sar", {"vllm,sarathi", "vllm,sarathi-drop"}),
    ("slo-bench run --workload sha", {"sharegpt"}),
    ("slo-bench run --suite quick", {"quickstart"}),
    ("slo-bench capacity --gpu a100-80g-", {"a100-80g-pcie"}),
    ("slo-bench run --router le", {"least-loaded"}),
    ("slo-bench run --records pa", {"parquet"}),
    ("slo-bench list rou", {"routers"}),
    ("slo-bench list systems ascendra-", {"ascendra-lp"}),
    ("slo-bench list nothing a", set()),
    ("slo-bench serve sglan", {"sglang"}),
    ("slo-bench tune serv", {"server"}),
    ("slo-bench tune sara", {"sarathi", "sarathi-drop"}),
    ("slo-bench tune --tria", {"--trials"}),
    ("slo-bench tune sarathi --tria", {"--trials"}),
    ("slo-bench pro", {"profile"}),
]


@pytest.mark.parametrize(("line", "completions"), COMPLETED, ids=[line for line, _ in COMPLETED])
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shell_completion_offers_names(line, completions, shell, monkeypatch, capsys):
    monkeypatch.setenv("_SLO_BENCH_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setattr(sys, "argv", ["slo-bench"])
    with pytest.raises(SystemExit):
        cli_main.app(prog_name="slo-bench")
    output = capsys.readouterr().out
    offers = re.findall(r'"([^"]+)"', output) if shell == "zsh" else output.split()
    assert {word.partition(":")[0] for word in offers if not word.startswith("(")} >= completions
    if not completions:
        assert not output.strip(" \n_files")


@pytest.mark.skipif(os.name == "nt", reason="bash")
def test_installed_completion_works_in_bash(tmp_path):
    environ = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    install = "slo-bench --install-completion; true"  # two commands: bash stays, and is seen
    subprocess.run(["bash", "-c", install], env=environ, check=True, capture_output=True)
    [script] = tmp_path.rglob("slo-bench.sh")
    assert str(script) in (tmp_path / ".bashrc").read_text()
    press = (
        f"source {script}; COMP_WORDS=(slo-bench run --workload sha); COMP_CWORD=3; "
        "_slo_bench_completion slo-bench; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", press], env=environ, check=True, capture_output=True)
    assert done.stdout.decode().strip() == "sharegpt"


RUN = ["run", "-s", "vllm", "--rates", "2", "--seeds", "1", "--requests", "10", "--no-report"]


@pytest.mark.slow
def test_run_without_a_terminal_has_no_colour_and_no_bar(tmp_path):
    done = slo_bench(*RUN, cwd=tmp_path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr.startswith("running 1 cell into runs/")


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_terminal_without_colour_gets_no_escape_codes(variable, tmp_path):
    """A terminal that would show colours, told not to."""
    pty = pytest.importorskip("pty")
    value = {"NO_COLOR": "1", "TERM": "dumb"}[variable]
    read, write = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", variable: value}
    running = subprocess.Popen(
        [sys.executable, "-m", "slo_bench.cli.main", "list", "systems"],
        cwd=tmp_path, stdout=write, stderr=write, env=environ,
    )  # fmt: skip
    os.close(write)
    shown = b""
    while True:
        try:
            part = os.read(read, 65536)
        except OSError:  # what Linux says of a terminal whose other end is closed
            break
        if not part:
            break
        shown += part
    os.close(read)
    assert running.wait() == 0
    assert b"sarathi" in shown
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]m", shown)


def test_exit_codes_are_documented():
    assert "Exit codes" in CLI.help
    for code in ("0", "1", "2", "70", "130", "143"):
        assert re.search(rf"\b{code}\b", CLI.help)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize(
    "words",
    [
        ["capacity", "-s", "vllm", "--out", "o"],
        ["tune", "vllm", "--out", "o"],
        ["run", "--seeds", "400", "--requests", "2000", "--out", "o"],
    ],
    ids=lambda words: words[0],
)
def test_command_interrupted_by_ctrl_c_ends_cleanly(words, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "slo_bench.cli.entry", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until_s = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < until_s:
        if (tmp_path / "o").exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("*.part"))


def test_options_of_a_command_have_distinct_parameter_names():
    """Which would give each the value of the other."""
    for path, command in commands(CLI):
        names = [param.name for param in command.params]
        assert len(set(names)) == len(names), path
