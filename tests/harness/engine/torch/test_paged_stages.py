"""Device maps deployed: a process for each stage of unequal layers, and not a token changes."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from slo_bench.cli.main import app  # noqa: E402
from slo_bench.harness.core.policy import StaticPolicy  # noqa: E402
from slo_bench.harness.core.state import RequestState  # noqa: E402
from slo_bench.harness.engine.torch.build_engine import Engine, KvCacheConfig  # noqa: E402
from slo_bench.harness.engine.torch.clock import RealClock  # noqa: E402
from slo_bench.harness.engine.torch.load_decoder import load_decoder  # noqa: E402
from slo_bench.harness.engine.torch.sequence import Sequence  # noqa: E402
from slo_bench.harness.engine.torch.torch_errors import ModelError  # noqa: E402
from slo_bench.harness.engine.torch.torch_workers import Workers  # noqa: E402
from slo_bench.harness.policies.systems import system  # noqa: E402
from slo_bench.harness.servers.launch.random_model import make_model, model_fields  # noqa: E402
from slo_bench.harness.servers.torch.torch_server import serving_model  # noqa: E402
from slo_bench.workloads.request import Slo  # noqa: E402

pytestmark = pytest.mark.torch

LAYERS = (2, 1, 3)
LINK = {"bandwidth_gb_per_s": 12, "latency_us": 10}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {**model_fields(), "num_hidden_layers": sum(LAYERS), "hidden_size": 64}
    return make_model(tmp_path_factory.mktemp("models") / "six", fields)


def map_file(folder: Path, layers: tuple[int, ...]) -> Path:
    stages = [
        {"device": f"GPU#{n}", "gpu": "a40", "layers": count, "link": LINK}
        for n, count in enumerate(layers)
    ]
    path = folder / "map.json"
    path.write_text(json.dumps({"model": "six", "stages": stages}))
    return path


def answers(model: Path, name: str, layers: tuple[int, ...]) -> dict[int, list[int]]:
    """Tokens of twelve requests on 40 blocks, on stages of so many layers; (): one process."""
    policy = system(name).policy
    answer_tokens: dict[int, list[int]] = {}

    def opened(r: RequestState) -> Sequence:
        draw = random.Random(r.id)
        sequence = Sequence([draw.randrange(3, 160) for _ in range(r.prompt_tokens)])
        answer_tokens[r.id] = sequence.tokens
        return sequence

    with Workers(max(1, len(layers) - 1)) as workers:
        decoder = load_decoder(model)
        engine = Engine(decoder, KvCacheConfig(40, 8, 20), workers if layers else None)
        if layers:
            engine.place(layers)
        instance = engine.instance(policy, opened, RealClock())
        draw = random.Random(5)
        for row in range(12):
            instance.inbox.append(
                RequestState(row, 0.0, draw.randint(1, 60), draw.randint(4, 20), 20, Slo())
            )
        instance.run(float("inf"), False)
        assert len(instance.finished) == 12
    return answer_tokens


@pytest.mark.parametrize("name", ["vllm", "vllm-swap", "slo-odbs"])
def test_tokens_over_pipeline_stages_equal_those_of_one_process(model: Path, name: str) -> None:
    assert isinstance(system("slo-odbs").policy, StaticPolicy)
    alone, placed = answers(model, name, ()), answers(model, name, LAYERS)
    assert placed == alone


def test_device_map_for_another_model_is_refused(model: Path) -> None:
    with Workers(1) as workers:
        engine = Engine(load_decoder(model), KvCacheConfig(10, 8), workers)
        with pytest.raises(ModelError, match="has 7 layers, but the model has 6"):
            engine.place((3, 4))


def test_run_with_a_device_map(model: Path, tmp_path: Path) -> None:
    out, mapped = tmp_path / "run", map_file(tmp_path, LAYERS)
    words = ["run", "--backend", "torch", "--model", model, "--device-map", mapped]
    words += ["--system", "slo-odbs", "--workload", "synthetic", "--rates", 20]
    words += ["--prompt-tokens", 20, "--output-tokens", 8]
    words += ["--requests", 4, "--seeds", 1, "--num-gpu-blocks", 40, "--cpu-wait-limit", 1]
    done = CliRunner().invoke(app, [*map(str, words), "--no-report", "--out", str(out)])
    assert done.exit_code == 0, done.output
    with (out / "cells.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["gpus"], row["finished"]) for row in rows] == [("3", "4")]


def test_a_server_with_a_device_map_answers_the_same(model: Path) -> None:
    ask = {"prompt": "once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    texts = []
    for layers in ((), LAYERS):
        with serving_model("vllm", {}, str(model), num_gpu_blocks=60, stage_layers=layers) as url:
            answer = httpx.post(f"{url}/v1/completions", json=ask, timeout=60)
            texts.append(answer.json()["choices"][0]["text"])
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "2"], "leave tp and pp out"),
        (["--workers", "1"], "leave server.workers out"),
        (["--instances", "2"], "leave server.workers out and instances at 1"),
        (["--clock", "cpu"], "without server.workers and device_map"),
    ],
)
def test_settings_impossible_with_a_device_map_are_refused(
    model: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    mapped = map_file(tmp_path, LAYERS)
    arguments = ["run", "--backend", "torch", "--model", str(model), "--device-map", str(mapped)]
    arguments += [
        "--workload",
        "alpaca",
        "--rates",
        "20",
        "--requests",
        "6",
        "--seeds",
        "1",
        *words,
    ]
    done = CliRunner().invoke(app, arguments)
    assert message in f"{done.exception} {done.output}"
