"""What is named as a server's model is looked at before a server is started."""

import pytest

from slo_bench.harness.experiments.backends.launched import LaunchedBackend
from slo_bench.harness.experiments.backends.server_profile import _dtype
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.servers.launch.model_names import check_model
from slo_bench.harness.servers.vllm.vllm_kind import _context_tokens
from slo_bench.workloads.errors import SloBenchError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    (tmp_path / "models" / "empty").mkdir()
    (tmp_path / "a.gguf").write_text("")
    return tmp_path


@pytest.mark.parametrize("model", ["models/tiny", "./models/tiny/", "a.gguf", "org/name"])
def test_a_folder_with_a_config_a_file_and_a_name_on_a_hub_are_models(here, model):
    check_model(model)


def test_config_with_a_byte_order_mark_tells_context_and_dtype(here):
    fields = '\ufeff{"max_position_embeddings": 4096, "torch_dtype": "float32"}'
    folder = here / "models" / "tiny"
    (folder / "config.json").write_text(fields, "utf-8")
    assert (_context_tokens(str(folder)), _dtype(folder)) == (4096, "fp32")


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
def test_context_of_a_config_that_holds_no_object_is_not_known(here, content):
    folder = here / "models" / "tiny"
    (folder / "config.json").write_text(content)
    assert _context_tokens(str(folder)) == 0


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("llama-3.1-8b", "of the simulator's catalogue"),
        ("models/empty", "has no config.json"),
        ("models/tiyn", "there is no folder models/tiyn"),
        ("/no/such", "there is no folder /no/such"),
        ("./tiny", "there is no folder"),
        ("tiny", "there is no folder tiny"),
        ("a/b/c", "there is no folder a/b/c"),
        ("org/", "there is no folder"),
    ],
)
def test_what_no_server_can_load_is_refused(here, model, problem):
    with pytest.raises(SloBenchError, match=problem):
        check_model(model)


def test_a_name_on_a_hub_that_is_not_cached_is_refused_offline(here, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(here / "hf"))
    with pytest.raises(SloBenchError, match="HF_HUB_OFFLINE"):
        check_model("org/name")
    (here / "hf" / "hub" / "models--org--name").mkdir(parents=True)
    check_model("org/name")


def test_backend_refuses_a_simulated_model_before_it_looks_for_a_server():
    experiment = Experiment(systems="edf", backend="vllm", model="llama-3.1-8b", rates=1)
    with pytest.raises(SloBenchError, match="of the simulator's catalogue"):
        LaunchedBackend("vllm").check(experiment.plan().cells[0])
