"""`slo-bench tune` as it is typed."""

import json

import pytest

from slo_bench.cli.commands.tune import SYSTEM_EXAMPLES

SMALL = ["--search", "chunk_tokens=256,2048", "--search", "max_num_seqs=4,256", "--trials", "3"]
SMALL += ["--requests", "200", "--tolerance", "0.3", "--set", "output_tokens=50"]


@pytest.mark.slow
def test_tune_prints_tables_and_writes_a_page(slo_bench, tmp_path):
    code, out, err = slo_bench("tune", "sarathi", *SMALL, "--out", "o")
    assert code == 0, err
    for text in ("(simulated)", "Best", "configuration", "slo-bench run o/winner.toml", "report:"):
        assert text in out
    page = (tmp_path / "o" / "report.html").read_text()
    assert "Default against tuned" in page
    assert 'badge">simulated' in page


@pytest.mark.slow
def test_tune_json_prints_only_the_outcome(slo_bench, tmp_path):
    code, out, _ = slo_bench(
        "tune", "sarathi", *SMALL, "--no-confirm", "--no-report", "--json", "--out", "o"
    )
    assert code == 0
    printed = json.loads(out)
    assert printed["system"] == "sarathi"
    assert len(printed["trials"]) == 3
    assert printed == json.loads((tmp_path / "o" / "tune.json").read_text())


@pytest.mark.slow
def test_tune_resume_needs_only_the_folder(slo_bench):
    whole = ["--no-confirm", "--no-report", "--json", "--out", "o"]
    code, first, _ = slo_bench("tune", "sarathi", *SMALL, *whole)
    assert code == 0
    code, second, err = slo_bench("tune", "--resume", *whole)
    assert code == 0, err
    assert json.loads(second)["trials"] == json.loads(first)["trials"]
    code, third, _ = slo_bench("tune", "--resume", "--trials", "4", *whole)
    assert code == 0
    assert len(json.loads(third)["trials"]) == 4


@pytest.mark.slow
def test_tune_takes_everything_from_a_file(slo_bench, tmp_path):
    (tmp_path / "t.toml").write_text(
        'systems = "sarathi"\nrequests = 200\noutput_tokens = "50"\n[tune]\ntrials = 2\n'
        'tolerance = 0.3\nconfirm = false\n[tune.search]\nchunk_tokens = "256..2048"\n'
    )
    code, out, err = slo_bench("tune", "t.toml", "--out", "o", "--json", "--no-report")
    assert code == 0, err
    assert json.loads(out)["space"] == {"chunk_tokens": "256..2048"}


def test_tune_leaves_a_set_parameter_out_of_the_search(slo_bench):
    words = [
        "--set",
        "max_num_seqs=64",
        "--search",
        "parameters",
        "--trials",
        "1",
        "--requests",
        "200",
        "--set",
        "output_tokens=50",
    ]
    words += ["--tolerance", "0.3", "--no-confirm", "--no-report", "--json", "--out", "o"]
    code, out, err = slo_bench("tune", "sarathi", *words)
    assert code == 0, err
    assert "max_num_seqs" not in json.loads(out)["space"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["sarathee"], "unknown system 'sarathee'; did you mean sarathi"),
        ([], ""),
        (["sarathi", "--search", "chunk=1..2"], "unknown parameter or setting in --search 'chunk'"),
        (["sarathi", "--search", "chunk_tokens=9..1"], "from 9 down to 1"),
        (["sarathi", "--search", "chunk_tokens=1..99999999"], "sarathi.chunk_tokens must be from"),
        (["sarathi", "--search", "=3"], "cannot read --search '=3'"),
        (["sarathi", "--search", "tp=1,2", "--search", "tp=4"], "--search tp is given twice"),
        (["sarathi", "--set", "tp"], "cannot read --set 'tp'; write NAME=VALUE"),
        (["sarathi", "--set", "tp=1,2"], "--set tp takes one value"),
        (["sarathi", "--set", "chunks=3"], "unknown parameter or setting in --set 'chunks'"),
        (["sarathi", "--objective", "goodput"], "give it (--rate 4)"),
        (["sarathi", "--rate", "3"], "leave --rate out, or choose goodput"),
        (["sarathi", "--objective", "speed"], "unknown objective 'speed'"),
        (["sarathi", "--trials", "0"], "trials must be greater than or equal to 1"),
        (["sarathi", "--sampler", "bo"], "unknown sampler 'bo'"),
        (["sarathi", "--storage", "nodb://x"], "the storage nodb://x cannot be used"),
        (["sarathi", "--confirm", "tgi"], "confirm_backend must be 'vllm' or 'sglang'"),
        (["sarathi", "--workload", "no-such"], "no-such"),
        (["sarathi", "--arrivals", "concurrency(4)"], "capacity is a rate, which a load with 4"),
        (["--resume"], "--resume needs the folder"),
        (["--resume", "--out", "nowhere"], "there is nothing to resume in nowhere"),
        (["missing.toml"], "cannot be read"),
        (["server", "--backend", "tgi", "--model", "m"], "--backend must be vllm or sglang"),
        (["server", "--backend", "vllm", "--model", "m", "--rate", "1"], "leave --rate out"),
    ],
)
def test_tune_wrong_options_are_refused_before_any_trial(slo_bench, tmp_path, words, problem):
    code, out, err = slo_bench("tune", *words)
    assert code == 2
    assert problem in err + out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("file", [False, True])
def test_tune_all_at_once_names_the_load_wherever_it_names_the_objective(slo_bench, tmp_path, file):
    words = ["--search", "max_batch=4,32", "--trials", "2", "--seeds", "2", "--out", "o"]
    words += ["--set", "output_tokens=uniform(8,64)", "--slo", "e2e=uniform(1,15)"]
    target = ["slo-odbs", "--arrivals", "concurrency(40)", "--requests", "40"]
    target += ["--objective", "attainment"]
    if file:
        (tmp_path / "t.toml").write_text(
            'systems = "slo-odbs"\narrivals = "concurrency(40)"\nrequests = 40\n'
            '[tune]\nobjectives = "attainment"\n'
        )
        target = ["t.toml"]
    code, out, err = slo_bench("tune", *target, *words)
    assert code == 0, err
    text = "with 40 requests at once"
    lines = " ".join(out.split())
    assert f"slo-odbs, share in SLO {text}: 2 configurations" in lines
    assert f"winner's value, {text} on the same requests" in lines
    assert text in (tmp_path / "o" / "report.html").read_text()
    code, printed, err = slo_bench("tune", "--resume", "--out", "o", "--json")
    assert code == 0, err
    results = json.loads(printed)
    assert (results["rate_rps"], results["load"]) == (None, text)
    assert results["requests"] == 2 * 2 * 40
    assert {row["objective"] for row in results["confirmed"]} == {"attainment"}
    assert all(row["requests"] == 5 * 40 for row in results["confirmed"])


def test_tune_commands_have_help(slo_bench):
    for words in ([], ["system"], ["server"]):
        code, out, _ = slo_bench("tune", *words, "--help")
        assert code == 0
        assert "Examples:" in out
    assert all(example.startswith("slo-bench tune ") for example in SYSTEM_EXAMPLES)


def test_tune_static_system_uses_e2e_and_names_no_serve_command(slo_bench):
    words = ["tune", "s3", "--trials", "1", "--requests", "200", "--no-confirm", "--no-report"]
    words += ["--seeds", "1", "--rate", "0.1", "--objective", "attainment"]
    code, out, err = slo_bench(*words, "--out", "a")
    assert code == 0, err
    assert "SLO: e2e=uniform(1,350) (UELLM, §3.6), because s3" in err
    assert "slo-bench run " in out
    assert "slo-bench serve" not in out
    code, _, err = slo_bench(*words, "--slo", "e2e=50", "--out", "b")
    assert code == 0, err
    assert "SLO: e2e=uniform" not in err
