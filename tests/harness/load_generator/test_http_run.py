import csv
import json
import shlex

import numpy as np
import pytest

from slo_bench.cli.commands.run import EXAMPLES
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.results.read_run import read_runs
from slo_bench.harness.servers.launch.random_model import make_model, model_fields
from slo_bench.harness.servers.mock import InjectedFault, MockConfig, serving
from slo_bench.predictors.specs import gpu
from slo_bench.workloads.errors import FileFormatError, SloBenchError
from slo_bench.workloads.source import load_source

QUICK = MockConfig(ttft_s=0.002, itl_s=0.0005)
SHORT = {
    "workload": "sharegpt",
    "prompt_tokens": "fixed(8)",
    "output_tokens": "fixed(5)",
    "requests": 12,
    "rates": 200.0,
    "seeds": 1,
    "records": "csv",
}


def experiment(*urls, client=(), **settings):
    """One whose levels stay valid on a busy machine."""
    table = {"base_urls": urls, "send_delay_limit_s": 60.0, **dict(client)}
    return Experiment(**{**SHORT, "backend": "openai", "client": table, **settings})


def test_run_over_http_writes_the_files_of_a_simulation(tmp_path):
    with serving(QUICK) as server:
        result = experiment(server.url, client={"save_token_times": True}).run(tmp_path / "run")
    (row,) = result.rows()
    assert (row["system"], row["backend"], row["model"]) == ("server", "openai", "mock")
    assert (row["gpu"], row["step_time"], row["valid"]) == ("unknown", "measured", True)
    assert (row["requests"], row["finished"], row["tokens_per_chunk"]) == (12, 12, 1.0)
    assert row["preemptions_swap"] is row["kv_cache_usage_peak"] is row["mfu"] is None
    assert row["client_processes"] == 1
    requests = result.requests(row["cell"])
    assert (requests["output_tokens"] == 5).all()
    assert (requests["server_prompt_tokens"] == 8).all()
    assert (requests["sent_s"] <= requests["first_byte_s"]).all()
    assert (requests["status"] == 200).all()
    assert requests["fault"].isna().all()
    path = tmp_path / "run" / "token_times" / f"{row['cell']}.csv.gz"
    import pandas as pd

    times = pd.read_csv(path)
    assert times.groupby("id").size().tolist() == [5] * 12
    first = times.groupby("id")["token_s"].min()
    np.testing.assert_allclose(first, requests["first_token_s"], atol=2e-6)
    assert (tmp_path / "run" / "timelines" / f"{row['cell']}.csv.gz").is_file()


def test_run_takes_and_records_the_tokenizer_of_the_model_folder(tmp_path):
    model = make_model(tmp_path / "model", model_fields())
    with serving(QUICK) as server:
        with_model = experiment(server.url, model=str(model)).run(tmp_path / "own")
        none = experiment(server.url).run(tmp_path / "none")
    assert with_model.rows()[0]["prompt_tokenizer"] == str(model)
    assert with_model.rows()[0]["model"] == "mock"  # the name that the server gives it
    assert none.rows()[0]["prompt_tokenizer"] is None
    (read,) = read_runs([tmp_path / "own"])
    assert read.cells["prompt_tokenizer"].tolist() == [str(model)]


def test_recorded_requests_are_read_as_a_workload(tmp_path):
    config = MockConfig(ttft_s=0.002, itl_s=0.0005, fault=InjectedFault.BROKEN, fault_every=3)
    with serving(config) as server:
        result = experiment(server.url).run(tmp_path / "run")
        (row,) = result.rows()
        records = tmp_path / "run" / "requests" / f"{row['cell']}.csv.gz"
        again = experiment(
            server.url, workload=str(records), rates=None, replay_speeds=1.0, requests=None,
            prompt_tokens=None, output_tokens=None,
        ).run(tmp_path / "again")  # fmt: skip
    assert row["fault_status"] == 4
    assert row["unfinished"] == 4
    workload = load_source(str(records)).make()
    assert workload.prompt_tokens.tolist() == [8] * 12
    assert workload.output_tokens.tolist() == [5] * 12
    requests = result.requests(row["cell"])
    since_first = requests["arrival_s"] - requests["arrival_s"].iloc[0]
    np.testing.assert_allclose(workload.arrival_s, since_first, atol=1e-9)
    assert requests["detail"].value_counts().to_dict() == {"500: out of order": 4}
    assert again.rows()[0]["requests"] == 12


def test_run_writes_the_json_of_vllm_bench(tmp_path):
    config = MockConfig(ttft_s=0.002, itl_s=0.0005, fault=InjectedFault.BROKEN, fault_every=12)
    with serving(config) as server:
        result = experiment(server.url, client={"export": "vllm"}).run(tmp_path / "run")
    (row,) = result.rows()
    report = json.loads((tmp_path / "run" / "vllm" / f"{row['cell']}.json").read_text())
    assert (report["completed"], report["failed"], report["num_prompts"]) == (11, 1, 12)
    assert report["model_id"] == "mock"
    assert report["total_output_tokens"] == sum(report["output_lens"]) == 55
    assert report["total_input_tokens"] == 88
    assert report["input_lens"] == [8] * 12
    assert sorted(map(len, report["itls"])) == [0] + [4] * 11
    assert report["errors"].count("") == 11
    assert report["generated_texts"].count(" tok" * 5) == 11
    assert len(report["ttfts"]) == len(report["start_times"]) == 12
    whole = [
        ttft for ttft, error in zip(report["ttfts"], report["errors"], strict=True) if not error
    ]
    assert report["mean_ttft_ms"] == pytest.approx(1e3 * sum(whole) / 11)
    assert report["request_throughput"] == pytest.approx(11 / report["duration"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert report[f"median_{name}_ms"] <= report[f"p99_{name}_ms"]


@pytest.mark.slow
def test_run_writes_no_api_key_to_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame-open")
    with serving(QUICK) as server:
        client = {
            "api_key_env": "MY_KEY",
            "headers": {"x-token": "$MY_KEY"},
            "processes": 2,
            "export": "vllm",
        }
        result = experiment(server.url, client=client).run(tmp_path / "run")
    assert result.rows()[0]["client_processes"] == 2
    text = (tmp_path / "run" / "experiment.toml").read_text()
    assert 'x-token = "$MY_KEY"' in text
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"sesame" not in path.read_bytes()


def test_http_experiment_survives_its_toml(tmp_path):
    http_experiment = experiment(
        "http://h:1", "http://h:2", client={"body": {"a": {"b": [1, "x"]}}}
    )
    path = tmp_path / "x.toml"
    path.write_text(http_experiment.to_toml())
    assert Experiment.load(path) == http_experiment
    planned = http_experiment.plan()
    assert planned.cells[0].instances == 2
    assert planned.resolved.model == ("served",)


def test_run_with_a_gpu_has_the_cost_of_the_server(tmp_path):
    with serving(QUICK) as server:
        http_experiment = experiment(server.url, gpu="h100-80g", tp=2, requests=2)
        (row,) = http_experiment.run(tmp_path / "run").rows()
    assert (row["gpu"], row["gpus"]) == ("h100-80g", 2)
    assert row["cost_usd_per_hour"] == 2 * gpu("h100-80g").price_per_hour_usd


def test_tokenizer_path_is_relative_to_the_experiment_file(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('backend = "openai"\n[client]\ntokenizer = "tok"\n')
    assert Experiment.load(path).client.tokenizer == str(tmp_path / "tok")
    http_experiment = Experiment(backend="openai", client={"tokenizer": "tok"})
    assert http_experiment.anchored(tmp_path).client.tokenizer == str(tmp_path / "tok")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"systems": ["a", "b"]}, "takes one system"),
        ({"rates": None}, "give rates"),
        ({"client": {"base_urls": "ftp://h"}}, "should look like"),
        (
            {"client": {"base_urls": "http://h", "apy": 1}},
            "unknown setting 'apy'",
        ),
        ({"client": {"body": {"stop": [None]}}}, "cannot hold null"),
        ({"client": {"body": {"api_key": "sk-1"}}}, "api_key looks like a secret"),
        ({"client": {"headers": {"api-key": "x"}}}, "looks like a secret"),
        ({"client": {}}, "needs the address of a server"),
        ({"client": {"base_urls": "http://h"}, "gpu": "h10"}, "unknown GPU 'h10'"),
        ({"client": {"base_urls": "http://127.0.0.1:1"}}, "no OpenAI-compatible server answers"),
    ],
)
def test_http_experiment_refuses_impossible_settings(settings, problem, tmp_path):
    with pytest.raises(SloBenchError, match=problem):
        Experiment(**{**SHORT, "backend": "openai", **settings}).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_client_setting_with_an_error_names_its_line(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('backend = "openai"\n[client]\nbase_urls = "http://h"\ntime_limit_s = -1\n')
    with pytest.raises(FileFormatError, match=r"client\.time_limit_s must be .*x\.toml, line 4"):
        Experiment.load(path)


@pytest.mark.slow
def test_http_example_of_the_help_runs(slo_bench, tmp_path):
    (example,) = [e for e in EXAMPLES if "--base-url" in e and "--executor" not in e]
    arguments = shlex.split(example)[1:]
    with serving(QUICK) as server:
        arguments[arguments.index("--base-url") + 1] = server.url
        arguments[arguments.index("--rates") + 1] = "100,200"  # as written it takes minutes
        arguments[arguments.index("--requests") + 1] = "10"
        code, out, err = slo_bench(*arguments, "--out", "o")
    assert code == 0, err
    rows = list(csv.DictReader((tmp_path / "o" / "cells.csv").read_text().splitlines()))
    assert [float(row["rate_rps"]) for row in rows] == [100, 200]
    # On a busy machine a level may be invalid; then it says so, and why.
    for row in rows:
        assert (row["valid"] == "True") == (row["invalid_because"] == "")
    if any(row["valid"] == "True" for row in rows):
        assert out.strip().splitlines()[-1] == "report: o/report.html"
    else:
        assert rows[0]["invalid_because"] in " ".join(out.split())


def test_run_takes_client_options(slo_bench, tmp_path):
    (tmp_path / "x.toml").write_text("[client]\nsend_delay_limit_s = 60\n")
    with serving(QUICK) as server:
        code, out, err = slo_bench(
            *("run", "x.toml", "--base-url", server.url, "--api", "chat", "--rates", "200"),
            *("--requests", "5", "--seeds", "1", "-s", "mine", "--header", "x-a=b"),
            *("--body", "top_k=3", "--body", "user=me", "--time-limit", "99", "--json"),
            *("--prompt-format", "text", "--sweep", "output_tokens=fixed(3)", "--out", "o"),
        )
    assert code == 0, err
    (row,) = json.loads(out)
    assert (row["system"], row["finished"], row["valid"]) == ("mine", 5, True)
    kept = Experiment.load(tmp_path / "o" / "experiment.toml").client
    assert kept.api == "chat"
    assert kept.body == {"top_k": 3, "user": "me"}
    assert kept.headers == {"x-a": "b"}
    assert (kept.time_limit_s, kept.send_delay_limit_s) == (99.0, 60.0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--backend", "openai"], "needs the address of a server"),
        (["--base-url", "http://h", "--header", "x"], "write NAME=VALUE"),
        (["--base-url", "http://h", "--body", "a={"], "is no JSON"),
        (["--base-url", "http://h", "--api", "x"], "client.api must be"),
        (["--base-url", "http://h", "--export", "x"], "client.export"),
    ],
)
def test_run_refuses_wrong_client_options(slo_bench, options, problem):
    code, _, err = slo_bench("run", "--rates", "1", "--requests", "1", *options)
    assert code == 2
    assert problem in err
    assert "Traceback" not in err
