"""Names of strangers, keys and paths: what a server or a run folder may not do to us."""

import contextlib
import csv
import os
import re
import sys
import threading
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench import Experiment, SloBenchError, write_report
from slo_bench.cli.main import main
from slo_bench.cli.output.console import harmless
from slo_bench.harness.experiments.execution.workers import unpack
from slo_bench.harness.results.run_folder import read_rows, write_rows
from slo_bench.harness.servers.mock import MockConfig, serving
from slo_bench.reports.pages.published_table import load_published
from slo_bench.workloads.csv_text import guarded, unguarded
from slo_bench.workloads.readers.formats import read

ESCAPES = "\x1b]0;owned\x07\x1b[31m\x9b31m\u202e"
FORMULA = "=HYPERLINK(1)"
HOSTILE = f"{FORMULA}{ESCAPES}</script><script>window.owned=1</script>"


@pytest.fixture
def slo_bench(tmp_path, monkeypatch, capfd):
    """Exit code, stdout and stderr of a command that was run in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["slo-bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfd.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call


def control_characters(text):
    return re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)


EXPERIMENT = """
workload = "sharegpt"
rates = 200
seeds = 1
requests = 5
[client]
send_delay_limit_s = 60.0
"""


def ask(url, *more):
    """A measurement that stays valid on a busy machine."""
    Path("x.toml").write_text(EXPERIMENT)
    return ["run", "x.toml", "--base-url", url, "-o", "out", *more]


@pytest.fixture
def asked_hostile(slo_bench):
    """A run against a server whose model has a hostile name; what the command printed."""
    with serving(MockConfig(model=HOSTILE, ttft_s=0.001, itl_s=0.0005)) as server:
        code, out, err = slo_bench(*ask(server.url))
    assert code in (0, 1), err
    return out + err


@pytest.mark.slow
def test_escape_sequences_of_a_server_do_not_reach_the_terminal(asked_hostile, slo_bench):
    assert control_characters(asked_hostile) == []
    code, out, err = slo_bench("report", "out")
    assert code in (0, 2)
    assert control_characters(out + err) == []


@pytest.mark.slow
def test_csv_cells_are_no_spreadsheet_formulas(asked_hostile, tmp_path):
    with (tmp_path / "out" / "cells.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert f"'{HOSTILE}" in rows[0]
    numbers = r"[-+]?[0-9.]+(e[-+]?[0-9]+)?|-?inf"
    for cell in (*header, *(cell for row in rows for cell in row)):
        assert cell[:1] not in ("=", "+", "-", "@") or re.fullmatch(numbers, cell), cell
    assert read_rows(tmp_path / "out" / "cells.csv")[0]["model"] == HOSTILE


def test_error_message_contains_no_escape_sequence(slo_bench):
    code, _, err = slo_bench("run", "-s", f"x{ESCAPES}")
    assert code == 2
    assert control_characters(err) == []
    assert "unknown system" in err


@pytest.mark.slow
@given(st.text())
def test_guarded_csv_word_is_restored_by_unguarded(tmp_path_factory, word):
    assert unguarded(guarded(word)) == word
    assert guarded(word)[:1] not in ("=", "+", "-", "@", "\t", "\r")
    assert control_characters(harmless(word)) == []


def test_formula_like_names_survive_tables_and_traces(tmp_path):
    rows = [{"cell": "a", "system": FORMULA, "=x": "-1+1", "n": -1.5}]
    write_rows(tmp_path / "cells.csv", rows)
    assert read_rows(tmp_path / "cells.csv") == rows
    (tmp_path / "t.csv").write_text("prompt_tokens,output_tokens,class\n1,1,'=a\n")
    assert read(tmp_path / "t.csv").workload.class_names == ("=a",)


@pytest.mark.slow
def test_api_key_is_in_no_file_process_list_or_report(slo_bench, tmp_path, monkeypatch):
    """Also not in temporary files while it runs."""
    monkeypatch.setenv("MY_KEY", "sesame-open")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    leaks, over = [], threading.Event()

    def look():
        while not over.wait(0.01):
            for path in [*tmp_path.rglob("*"), *Path("/proc").glob("[0-9]*/cmdline")]:
                with contextlib.suppress(OSError):
                    if path.is_file() and b"sesame" in path.read_bytes():
                        leaks.append(path)

    watch = threading.Thread(target=look)
    watch.start()
    try:
        with serving(MockConfig(ttft_s=0.001, itl_s=0.0005)) as server:
            keys = ["--api-key-env", "MY_KEY", "--header", "x-key=$MY_KEY", "--processes", "2"]
            code, out, err = slo_bench(*ask(server.url, *keys, "--export", "vllm"))
    finally:
        over.set()
        watch.join()
    assert code in (0, 1), err
    assert "sesame" not in out + err
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "report.html" for path in written)
    leaks += [path for path in written if b"sesame" in path.read_bytes()]
    assert leaks == []


@pytest.mark.parametrize("name", ["../../README", "/etc/passwd", "..", "a/b", ""])
def test_published_table_name_that_is_a_path_is_refused(name):
    with pytest.raises(SloBenchError, match="unknown table"):
        load_published(name)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ""])
def test_cell_name_that_is_a_path_is_refused(tmp_path, name):
    run = Experiment(systems="vllm", rates=[2], seeds=1, requests=5).run(tmp_path / "run", jobs=1)
    table = run.folder / "cells.csv"
    table.write_text(table.read_text().replace("\nvllm_rate-2_seed-0", f"\n{name}"))
    with pytest.raises(SloBenchError, match="plain"):
        write_report([run.folder], tmp_path / "report.html")
    with pytest.raises(SloBenchError, match="plain"):
        read_rows(table)


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs Linux")  # noqa: PTH110
def test_servers_listen_on_loopback_by_default():
    with serving(MockConfig()) as server:
        port = int(server.url.rpartition(":")[2])
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "requests/../../x"])
def test_files_unpacked_from_workers_stay_in_the_run_folder(tmp_path, name):
    with pytest.raises(SloBenchError, match="in no run folder"):
        unpack({"requests/good.csv.gz": b"", name: b""}, tmp_path / "run")
    assert list(tmp_path.rglob("*")) == []


RUNS_CODE = re.compile(
    r"^\s*(import|from) (pickle|cPickle|dill|cloudpickle|joblib|shelve|marshal)\b"
    r"|from yaml\b|yaml\.(?!safe_load|dump_all|SafeDumper|YAMLError)\w+"
    r"|\b(eval|exec)\("
    r"|allow_pickle=True|trust_remote_code=True|weights_only=False"
    r"|torch\.load\((?!.*weights_only=True)"
    r"|np\.load\((?!.*allow_pickle=False)",
    re.MULTILINE,
)


def test_package_never_unpickles_or_evaluates_input():
    """Unpickling and the like; `FILE.py` as a policy is loaded by name, and is code by intent."""
    root = Path(str(files("slo_bench")))
    rooms = ("cli", "harness", "predictors", "reports", "tuner", "workloads")
    calls = [
        f"{path.relative_to(root)}: {match.group(0).strip()}"
        for room in rooms
        for path in (root / room).rglob("*.py")
        for match in RUNS_CODE.finditer(path.read_text("utf-8"))
        if not path.read_text("utf-8")[: match.start()].endswith(".")  # a network's .eval()
    ]
    # An empty text, which clears a flag of the interpreter. And sending processes exchange jobs and
    # results in a folder of mode 0700 that their parent makes.
    assert calls == [
        "cli/interrupts.py: exec(",
        "harness/load_generator/send_job.py: import pickle",
    ]


POLICY = """
from pathlib import Path
from slo_bench.policy import Policy
Path("owned").touch()
class Mine(Policy): pass
"""
STUDY = '{"storage": "sqlite:////nowhere/study.db", "study": "s"}'


@pytest.fixture
def of_a_stranger(slo_bench):
    """A run folder whose experiment names a policy file."""
    Path("theirs.py").write_text(POLICY)
    options = ["--rates", "2", "--requests", "5", "--seeds", "1", "--no-report", "-o", "theirs"]
    code, _, err = slo_bench("run", "--system", "theirs.py", *options)
    assert code == 0, err  # named by the user, so not asked
    Path("owned").unlink()
    for name in [name for name in sys.modules if name.startswith("slo_bench_user_theirs")]:
        del sys.modules[name]
    return Path("theirs")


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "theirs", "slowest"],
        ["run", "--resume", "--out", "theirs"],
        ["run", "theirs/experiment.toml", "--out", "again"],
        ["tune", "theirs/experiment.toml", "--requests", "100", "--out", "tuned"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_policy_file_in_a_foreign_folder_needs_trust_code(slo_bench, of_a_stranger, words):
    code, _, err = slo_bench(*words)
    assert code == 2
    assert "theirs.py" in err
    assert "runs with your rights; add --trust-code if you trust its author" in err
    assert not Path("owned").exists()


@pytest.mark.slow
def test_report_runs_no_policy_file_of_the_run_folder(slo_bench, of_a_stranger):
    code, _, err = slo_bench("report", "theirs")
    assert code == 0, err
    assert not Path("owned").exists()


def test_trust_code_names_and_runs_the_policy_file(slo_bench, of_a_stranger):
    code, _, err = slo_bench("explain", "theirs", "slowest", "--trust-code")
    assert code == 0, err
    assert "theirs.py, a policy file that runs with your rights" in err
    assert Path("owned").exists()


def test_study_storage_outside_its_folder_needs_trust_code(slo_bench):
    from slo_bench.tuner.search.storage import study_location
    from slo_bench.workloads import trust

    Path("theirs").mkdir()
    Path("theirs/study.json").write_text(STUDY)

    def refuse(claim):
        raise SloBenchError(claim)

    with trust.asking(refuse, ()), pytest.raises(SloBenchError, match="outside the folder"):
        study_location(Path("theirs"), None, None, resume=True)
    with trust.asking(refuse, ()):
        same = study_location(Path("theirs"), "sqlite:////nowhere/study.db", None, resume=True)
    assert same.storage == "sqlite:////nowhere/study.db"
