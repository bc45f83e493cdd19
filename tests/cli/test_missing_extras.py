"""A command whose extra is missing says so in one line, before it does anything."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slo_bench.predictors.lengths.predictor_config import Base, NetworkShape, PredictorConfig
from slo_bench.workloads.extras import module_of, requirements

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
METADATA = PROJECT["dependencies"] + [
    f"{requirement}; extra == '{extra}'"
    for extra, group in PROJECT["optional-dependencies"].items()
    for requirement in group
]
PROMPTS = "".join(f'{{"prompt": "say {n} words", "output_tokens": {n}}}\n' for n in range(1, 30))


@pytest.fixture
def without(monkeypatch):
    """A function that makes the modules of an extra fail to import."""

    def block(extra: str) -> None:
        for name in requirements(extra):
            module = module_of(name)
            for loaded in [key for key in sys.modules if key.partition(".")[0] == module]:
                monkeypatch.delitem(sys.modules, loaded)
            monkeypatch.setitem(sys.modules, module, None)

    monkeypatch.setattr("importlib.metadata.requires", lambda name: METADATA)
    requirements.cache_clear()
    yield block
    requirements.cache_clear()


@pytest.fixture
def folder(tmp_path):
    """Prompts with lengths, and a length predictor without its network."""
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    predictor = tmp_path / "lengths"
    predictor.mkdir()
    config = PredictorConfig(
        shape=NetworkShape("softmax", (0, 8, 16), ("prompts",), 64, 4),
        base=Base("no/model", "", ""),
        labels="tokens",
        conformal_offset=0.0,
        words_share=0.0,
        neighbours=0.0,
        confusion=((9, 1, 0), (1, 9, 1), (0, 1, 9)),
        training={},
    )
    for name in (config.weights_file, config.samples_file):
        (predictor / name).touch()
    config.save(predictor)
    return tmp_path


TUNE = ("tune", "sarathi", "--requests", "100", "--trials", "2", "--out", "out")
RUN = ("run", "--requests", "20", "--seeds", "1", "--jobs", "1", "--out", "out")
READS = (*RUN, "--workload", "prompts.jsonl", "--rates", "5", "--length-predictor")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("parquet", (*RUN, "--records", "parquet")),
        (
            "parquet",
            ["profile", "import", "vidur", "nowhere", "--out", "out", "--tables", "parquet"],
        ),
        ("ray", (*RUN, "--executor", "ray")),
        ("ray", (*TUNE, "--executor", "ray")),
        ("ray", ["capacity", "--executor", "ray", "--out", "out"]),
        ("torch", (*RUN, "--backend", "torch")),
        ("torch", ["serve", "vllm", "--backend", "torch"]),
        ("torch", (*TUNE, "--sampler", "gp")),
        ("torch", ["profile", "run", "--model", "nowhere", "--out", "out"]),
        ("torch", ["predict-train", "prompts.jsonl", "--out", "out"]),
        ("torch", ["predict-eval", "lengths", "prompts.jsonl"]),
        ("torch", (*READS, "lengths")),
        ("regressors", (*READS, "tfidf(lengths)")),
        ("postgres", (*TUNE, "--storage", "postgresql+psycopg://user@127.0.0.1/studies")),
    ],
)
def test_a_command_names_its_missing_extra_before_it_begins(
    slo_bench, without, folder, extra, words
):
    without(extra)
    code, out, err = slo_bench(*words)
    assert (code, out) == (2, "")
    *_, last = err.splitlines()
    assert last.startswith("error: ")
    assert last.endswith(f": pip install 'slo-bench[{extra}]'")
    assert "Traceback" not in err
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_a_report_of_parquet_records_names_its_extra(slo_bench, without):
    assert slo_bench(*RUN, "--rates", "5", "--records", "parquet")[0] == 0
    without("parquet")
    code, _, err = slo_bench("explain", "out", "slowest")
    assert code == 2
    assert err.endswith("pip install 'slo-bench[parquet]'\n")


def test_a_predictor_draws_lengths_without_torch_where_requests_have_no_texts(
    slo_bench, without, folder
):
    without("torch")
    words = (*RUN, "--rates", "5", "--workload", "azure-conv", "--length-predictor", "lengths")
    assert slo_bench(*words, "--no-report")[0] == 0


@pytest.mark.parametrize(
    ("module", "words", "error"),
    [
        (
            "scipy",
            "tune placement --model qwen2.5-14b --topology uellm",
            "scipy is not installed: pip install 'scipy>=1.11'",
        ),
        ("typer", "--help", "typer is not installed: pip install 'typer>=0.15'"),
    ],
)
def test_a_missing_package_that_is_always_needed_is_named(module, words, error):
    code = (
        f"import sys\nsys.modules[{module!r}] = None\nsys.argv[1:] = {words.split()}\n"
        "import importlib.metadata\n"
        f"importlib.metadata.requires = lambda name: {METADATA}\n"
        "from slo_bench.cli.entry import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {error}\n")
