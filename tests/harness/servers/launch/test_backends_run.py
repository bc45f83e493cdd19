"""`slo-bench run --backend vllm`: servers started, measured and stopped, everything kept."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app
from slo_bench.harness.results.acceptance import with_acceptance
from slo_bench.harness.servers.launch.random_model import make_model, model_fields
from slo_bench.predictors.speculation import parse_speculation
from slo_bench.workloads.errors import SloBenchError

from .speculators import eagle3_head, eagle_head, embeddings_only, with_mtp_layer

pytestmark = pytest.mark.backends

HERE = Path(__file__).parent


@pytest.fixture
def run(installed, tiny_model, tmp_path):
    """Runs 12 requests with 40 to 51 prompt tokens on a backend; the folder of the run."""

    def one(backend, *words, output_tokens=20, models=("",), model=None):
        installed(backend)
        trace = tmp_path / "trace.csv"
        rows = [
            f"{k * 0.05},{40 + k},{output_tokens + k},{models[k % len(models)]}" for k in range(12)
        ]
        header = "arrival_s,prompt_tokens,output_tokens,model"
        trace.write_text("\n".join([header, *rows]) + "\n")
        load = ["--workload", trace, "--replay-speed", "1", "--seeds", "1", "--slo", "e2e=1000"]
        kept = ["--records", "csv", "--out", tmp_path / "out", "--no-report"]
        served = model or tiny_model(backend)
        arguments = ["run", "--backend", backend, "--model", served, *load, *kept, *words]
        done = CliRunner().invoke(app, [*map(str, arguments), "--sweep", "num_gpu_blocks=64"])
        assert done.exit_code == 0, done.output
        return tmp_path / "out"

    return one


def cells_of(folder):
    with (folder / "cells.csv").open() as file:
        return list(csv.DictReader(file))


def test_run_measures_stock_and_patched_servers(run):
    options = ["--server-arg=--no-enable-prefix-caching", "--sweep", "block_size=32"]
    ran = run("vllm", "--system", "vllm", "--system", "edf", *options)
    cells = cells_of(ran)
    assert [cell["system"] for cell in cells] == ["vllm", "edf"]
    for cell in cells:
        assert cell["backend"] == "vllm"
        assert cell["gpu"] == "cpu"
        assert float(cell["attainment"]) == 1.0
        assert int(cell["server_output_tokens"]) == sum(20 + k for k in range(12))
        assert int(cell["truncated_outputs"]) == 0
        [kept] = (ran / "servers").glob(f"{cell['cell']}.metrics")
        assert "vllm:generation_tokens_total" in kept.read_text()
    assert {path.name for path in (ran / "servers").glob("*.log")} == {"vllm.log", "edf.log"}
    assert "PolicyScheduler" in (ran / "servers" / "edf.log").read_text()
    assert "PolicyScheduler" not in (ran / "servers" / "vllm.log").read_text()
    assert json.loads((ran / "environment.json").read_text())["command"] is not None


@pytest.mark.weekly
def test_run_serves_adapters_beside_the_model(run, installed, tiny_model, tmp_path):
    adapters = {name: tmp_path / name for name in ("ada", "bob")}
    for seed, folder in enumerate(adapters.values()):
        words = [HERE / "make_tiny_adapter.py", tiny_model("vllm"), folder, str(seed)]
        subprocess.run([installed("vllm").python, *words], check=True, timeout=300)
    modules = [f"--server-arg={name}={folder}" for name, folder in adapters.items()]
    options = ["--sweep", "max_loras=2", "--sweep", "block_size=32"]
    models = ("ada", "bob", tiny_model("vllm").name)
    words = ["--server-arg=--lora-modules", *modules]
    ran = run("vllm", "--system", "vllm", *options, *words, models=models)
    (cell,) = cells_of(ran)
    assert {name: float(cell[f"attainment_{name}"]) for name in models} == dict.fromkeys(models, 1)
    assert int(cell["server_output_tokens"]) == sum(20 + k for k in range(12))
    [kept] = (ran / "servers").glob(f"{cell['cell']}.metrics")
    assert 'max_lora="2"' in kept.read_text()


@pytest.mark.weekly
def test_run_serves_an_embedder_beside_vllm_under_one_policy(installed, tiny_model, tmp_path):
    """Algorithms 1 to 3 on real servers: generation and embedding compete for 256 KV blocks."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    installed("vllm")
    sizes = {"vocab_size": 3000, "hidden_size": 128, "num_hidden_layers": 2}
    config = transformers.BertConfig(**sizes, num_attention_heads=4, intermediate_size=512)
    transformers.BertModel(config).save_pretrained(tmp_path / "encoder")
    words = ["--workload", "collocated(3:7,output=uniform(40,200),texts=uniform(16,128),tokens=16)"]
    words += ["--model", tiny_model("vllm"), "--embedder", tmp_path / "encoder", "--requests", 60]
    words += ["--rates", 20, "--seeds", 1, "--slo", "ttft=1000; embed:e2e=1000"]
    words += ["--sweep", "num_gpu_blocks=256", "--sweep", "block_size=32", "--records", "csv"]
    words += ["--step-log", "--no-report", "--out", tmp_path / "out"]
    systems = ["--system", "collocation", "--system", "collocated-fcfs", "--system", "vllm"]
    arguments = ["run", "--backend", "vllm", *systems, *words]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    cells = {cell["system"]: cell for cell in cells_of(tmp_path / "out")}
    requests = 0
    for name, cell in cells.items():
        assert float(cell["attainment"]) == 1.0
        with gzip.open(tmp_path / "out" / "requests" / f"{cell['cell']}.csv.gz", "rt") as file:
            rows = [row for row in csv.DictReader(file) if row["request_type"] == "1"]
        texts = [int(row["num_inputs"]) for row in rows]
        requests = len(rows)
        assert 16 <= min(texts) < max(texts) <= 128
        if name != "vllm":  # which nothing coordinates with the embedder
            assert int(cell["embed_pass_texts"]) == sum(texts)
            assert int(cell["embed_pass_requests"]) == len(rows)
            assert 1 <= int(cell["embed_passes"]) <= len(rows)
            log = (tmp_path / "out" / "servers" / f"{name}.steps.jsonl").read_text()
            passes = [json.loads(line) for line in log.splitlines() if '"pass"' in line]
            assert sum(embedding_pass["texts"] for embedding_pass in passes) == sum(texts)
            assert all(
                embedding_pass["duration_s"] > 0 and 0 < embedding_pass["blocks"] <= 256
                for embedding_pass in passes
            )
    assert requests > 20
    assert cells["vllm"].get("embed_passes", "") == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--system", "merged-batches"], "computes texts in the language model's batches"),
        (["--system", "collocation", "--instances", "2"], "beside one started server"),
        (["--system", "collocation", "--validate"], "cannot be validated"),
        (["--system", "distserve"], "has several servers"),
    ],
)
def test_run_refuses_an_embedder_where_none_can_run(installed, tiny_model, words, message):
    installed("vllm")
    load = ["--workload", "collocated(1:1)", "--rates", "2", "--seeds", "1", "--requests", "4"]
    served = ["--model", tiny_model("vllm"), "--embedder", "/nowhere"]
    arguments = ["run", "--backend", "vllm", *served, *load, *words]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert isinstance(done.exception, SloBenchError)
    assert message in str(done.exception)


def without_attention(model, copy):
    """The model with output projections of attention of 0: the next token follows from the last
    alone, so that answers come to repeat themselves.
    """
    shutil.copytree(model, copy)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, tensor in json.loads(data[8:begin]).items():
        if name.endswith("o_proj.weight"):
            first, last = tensor["data_offsets"]
            data[begin + first : begin + last] = bytes(last - first)
    weights.write_bytes(data)
    return copy


def proposals(cell, tokens):
    """Drafts, and how many were accepted up to each position, from counts that agree."""
    drafts, proposed, accepted, steps = (
        int(cell[f"server_{name}"])
        for name in ("drafts", "draft_tokens", "accepted_tokens", "sequence_steps")
    )
    reached = [int(cell[f"server_accepted_{position}"]) for position in range(1, tokens + 1)]
    output_tokens = int(cell["server_output_tokens"])
    assert float(cell["attainment"]) == 1.0
    assert drafts < proposed <= tokens * drafts
    assert [drafts, *reached] == sorted([drafts, *reached], reverse=True)
    assert sum(reached) == accepted
    assert steps == output_tokens - 12 - accepted  # the first token of each answer is no step's
    assert float(cell["acceptance_rate"]) == pytest.approx(accepted / proposed)
    return drafts, reached


@pytest.mark.weekly
def test_run_measures_n_gram_speculation(run, tiny_model, tmp_path):
    options = ["--sweep", "speculation=ngram:3", "--sweep", "block_size=32"]
    model = without_attention(tiny_model("vllm"), tmp_path / "repeats")
    ran = run("vllm", "--system", "vllm", *options, output_tokens=150, model=model)
    (cell,) = cells_of(ran)
    drafts, reached = proposals(cell, 3)
    assert reached[2] > 0
    assert int(cell["server_output_tokens"]) == sum(150 + k for k in range(12))
    # A simulation takes the acceptance of this run.
    settled = with_acceptance(parse_speculation(f"ngram:3@{ran}"))
    assert settled.acceptance[0] == pytest.approx(reached[0] / drafts, abs=1e-4)
    assert 1 < settled.tokens_per_step <= 4


@pytest.mark.weekly
@pytest.mark.parametrize("draft", ["the same model", "another", "eagle", "eagle3", "mtp"])
def test_run_measures_acceptance_of_draft_models(run, tiny_model, tmp_path, draft):
    """Drafts of the model itself and of heads that are right by construction are accepted; those
    of other weights are not.
    """
    model = tiny_model("vllm")
    method = str(model)
    if draft == "another":
        method = str(make_model(tmp_path / "draft", model_fields(), seed=1))
    elif draft == "mtp":
        model, method = with_mtp_layer(tmp_path / "model"), "mtp"
    elif draft != "the same model":
        model = tmp_path / "model"
        head = {"eagle": eagle_head, "eagle3": eagle3_head}[draft]
        method = f"{draft}={head(tmp_path / 'head', model, embeddings_only(model))}"
    options = ["--sweep", f"speculation={method}:3", "--sweep", "block_size=32"]
    options += ["--server-arg=--dtype", "--server-arg=float32"]  # in 16 bits two tokens may tie
    ran = run("vllm", "--system", "vllm", *options, output_tokens=40, model=model)
    (cell,) = cells_of(ran)
    drafts, reached = proposals(cell, 3)
    assert int(cell["server_draft_tokens"]) == 3 * drafts
    settled = with_acceptance(parse_speculation(f"{method}:3@{ran}"))
    if draft == "another":
        assert reached[0] < 0.05 * drafts
        assert settled.tokens_per_step < 1.05
    else:
        assert reached[2] > 0.9 * drafts
        assert 3.7 < settled.tokens_per_step <= 4


@pytest.mark.weekly
@pytest.mark.parametrize(("backend", "block_size"), [("vllm", 32), ("sglang", 16)])
def test_run_row_has_counters_of_the_policy_in_the_server(run, backend, block_size):
    policy = f"{HERE / 'counts_long.py'}:CountsLong"
    ran = run(backend, "--system", policy, "--sweep", f"block_size={block_size}")
    (cell,) = cells_of(ran)
    assert int(cell["count_long"]) == 6  # 46 to 51 of 40 to 51 prompt tokens
    assert int(cell["preemptions_recompute"]) == 0
    assert float(cell["attainment"]) == 1.0
