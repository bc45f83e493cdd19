"""What runs where, and how servers are told."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from slo_bench.cli.options.names import KINDS
from slo_bench.harness.core.policy import StaticPolicy
from slo_bench.harness.core.predictions import LearnedPredictions
from slo_bench.harness.experiments.config.schema import ExperimentSchema
from slo_bench.harness.experiments.execution.experiment_plan import plan
from slo_bench.harness.policies.systems import SYSTEMS, system
from slo_bench.harness.servers.launch import serve_settings as serve_module
from slo_bench.harness.servers.launch.compatibility import check, compatibility_of, refusal
from slo_bench.harness.servers.launch.environments import Environment
from slo_bench.harness.servers.launch.serve_settings import Serve
from slo_bench.harness.servers.launch.server_kind import KvTransfer, Launch
from slo_bench.harness.servers.launch.server_process import plugin_folder
from slo_bench.harness.servers.plugin.contract import PolicySpec
from slo_bench.harness.servers.sglang.sglang_kind import SGLANG
from slo_bench.harness.servers.vllm.vllm_kind import VLLM
from slo_bench.predictors.device_map import read_device_map
from slo_bench.workloads.errors import SloBenchError

SWAP_ALWAYS = str(Path(__file__).with_name("swap_always.py"))


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_is_simulated_and_static_ones_run_on_no_server(name):
    compatibility = compatibility_of(SYSTEMS[name])
    assert compatibility["simulated"] is None
    if isinstance(SYSTEMS[name].policy, StaticPolicy):
        assert "static batches" in (compatibility["vllm"] or "")
        assert "static batches" in (compatibility["sglang"] or "")


def test_split_systems_run_on_vllm_alone():
    compatibility = compatibility_of(SYSTEMS["distserve"])
    assert compatibility["vllm"] is None
    assert "vLLM alone" in (compatibility["sglang"] or "")


def test_split_system_starts_one_server_of_each_kind_by_default():
    serve = Serve("vllm", "m", "distserve", {"decode_instances": 2}, step_log=Path("s"))
    logs = [log.name for log in serve.step_logs()]
    assert logs == ["s-prefill-1", "s-decode-1", "s-decode-2"]


@pytest.mark.parametrize("backend", ["simulated", "vllm"])
def test_plan_of_a_split_counts_its_instances(backend):
    parameters = {"distserve": {"decode_instances": (1, 2)}}
    experiment = ExperimentSchema(
        systems=("vllm", "distserve"),
        parameters=parameters,
        backend=backend,
        rates=1,
        seeds=1,
        tp=1,
    )
    cells = {(c.columns["system"], c.columns["gpus"], c.instances) for c in plan(experiment).cells}
    if backend == "simulated":
        assert cells == {("vllm", 3, 3), ("distserve", 2, 2), ("distserve", 3, 3)}
    else:
        assert cells == {("vllm", 1, 1), ("distserve", 2, 1), ("distserve", 3, 1)}


def test_compatibility_marks_collocation_as_partial_on_servers():
    [shown] = [e for e in KINDS["compatibility"]() if e["name"] == "collocation"]
    assert shown["simulated"] == "yes"
    assert shown["vllm"] == "yes"
    assert str(shown["torch"]).startswith("part: it decides on generation requests alone")
    [merges] = [e for e in KINDS["compatibility"]() if e["name"] == "merged-batches"]
    assert str(merges["vllm"]).startswith("part: it decides on generation requests alone")
    assert shown["sglang"] == shown["torch"]
    [shown] = [e for e in KINDS["compatibility"]() if e["name"] == "edf"]
    assert not any("part" in str(value) for value in shown.values())


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_system_of_a_servers_name_runs_on_it(name):
    assert compatibility_of(SYSTEMS[name])[name] is None


def test_edf_runs_on_every_server():
    assert set(compatibility_of(SYSTEMS["edf"]).values()) == {None}


def test_host_full_stall_is_refused_with_the_remedy():
    swap = SYSTEMS["vllm-swap"].with_parameters(host_full="stall")
    assert "host_full=recompute" in (refusal(swap, "vllm") or "")
    assert refusal(swap.with_parameters(host_full="recompute"), "vllm") is None
    with pytest.raises(SloBenchError, match="vllm-swap cannot run on vllm"):
        check(swap, "vllm")


def test_static_fifo_is_refused_with_the_system_that_servers_run():
    assert "fastertransformer is what a server can run" in (refusal(SYSTEMS["fifo"], "vllm") or "")
    assert refusal(SYSTEMS["fastertransformer"], "vllm") is None


def test_serve_refuses_unsupported_systems_before_starting(tmp_path, monkeypatch):
    monkeypatch.setenv("SLO_BENCH_HOME", str(tmp_path))
    with pytest.raises(SloBenchError, match="backends install vllm"):
        Serve(backend="vllm", model="m", system="edf").check()


def argv(name=None, policy=None, **options) -> list[str]:
    policy = policy or (system(name).policy if name else None)
    launch = Launch(model="m", port=1, system=name, policy=policy, **options)
    return list(VLLM.argv(Path("/env/bin"), "cpu", launch))


def test_vllm_without_a_system_has_no_plugin_arguments():
    assert "--scheduler-cls" not in argv()
    assert "--no-async-scheduling" not in argv()


def connector_of(words: list[str]) -> dict[str, object]:
    return json.loads(words[words.index("--kv-transfer-config") + 1])


def test_prefill_instances_alone_compute_prompts_whole():
    prefill = argv(transfer=KvTransfer(True, folder=Path("/kv")), max_model_tokens=9000)
    assert "--no-enable-chunked-prefill" in prefill
    assert prefill[prefill.index("--max-num-batched-tokens") + 1] == "9000"
    decode = argv(transfer=KvTransfer(False, folder=Path("/kv")))
    assert "--no-enable-chunked-prefill" not in decode
    assert connector_of(prefill)["kv_role"] == "kv_producer"
    assert connector_of(decode)["kv_role"] == "kv_consumer"
    assert connector_of(decode)["kv_connector_extra_config"] == {"shared_storage_path": "/kv"}
    module = str(connector_of(decode)["kv_connector_module_path"])
    assert find_spec(module) is not None


def test_nixl_launch_has_port_and_connector():
    launch = Launch(model="m", port=1, transfer=KvTransfer(True, port=77))
    assert VLLM.environ("cpu", launch)["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "77"
    words = list(VLLM.argv(Path("/env/bin"), "cpu", launch))
    assert connector_of(words)["kv_buffer_device"] == "cpu"
    assert connector_of(words)["kv_connector_extra_config"] == {"kv_lease_duration": 3600}
    words = list(VLLM.argv(Path("/env/bin"), "cuda", launch))
    assert "kv_buffer_device" not in connector_of(words)
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in VLLM.environ("cpu", Launch(model="m", port=1))


def test_serve_of_a_split_has_a_log_for_each_instance():
    parameters = {"prefill_instances": 2, "decode_instances": 3}
    serve = Serve("vllm", "m", "distserve", parameters, step_log=Path("s.jsonl"))
    assert [log.name for log in serve.step_logs()] == [
        *("s-prefill-1.jsonl", "s-prefill-2.jsonl"),
        *("s-decode-1.jsonl", "s-decode-2.jsonl", "s-decode-3.jsonl"),
    ]
    with pytest.raises(SloBenchError, match="leave instances out"):
        serve.check(instances=2)
    assert [log.name for log in Serve("vllm", "m", step_log=Path("s")).step_logs(2)] == [
        "s-1",
        "s-2",
    ]


def test_vllm_launch_has_the_limits_of_the_policy():
    words = argv("edf", system("edf").policy.with_parameters(max_num_seqs=7), num_gpu_blocks=20)
    assert words[words.index("--max-num-seqs") + 1] == "7"
    assert words[words.index("--max-num-batched-tokens") + 1] == "2048"
    assert words[words.index("--num-gpu-blocks-override") + 1] == "21"  # one is vLLM's own
    assert "--kv-transfer-config" not in words
    assert "--kv-transfer-config" in argv(SWAP_ALWAYS, num_cpu_blocks=8)
    whole = argv("orca", max_model_tokens=9000)
    assert "--no-enable-chunked-prefill" in whole
    assert int(whole[whole.index("--max-num-batched-tokens") + 1]) >= 9000


@pytest.mark.parametrize("name", [*SYSTEMS, SWAP_ALWAYS])
def test_policy_spec_survives_json(name):
    policy = system(name).policy
    spec = PolicySpec.from_json(PolicySpec.of(name, policy).to_json())
    again = spec.load()
    assert again == policy
    assert type(again).__name__ == type(policy).__name__


def test_server_environment_finds_the_package_without_installation(tmp_path):
    folder = plugin_folder(tmp_path)
    assert plugin_folder(tmp_path) == folder
    code = (
        "import importlib.metadata as m, os\n"
        "[e] = [e for e in m.entry_points(group='vllm.general_plugins') if e.name == 'slo_bench']\n"
        "e.load()()\n"  # without a policy it does nothing, and needs no vLLM
        "print(os.path.realpath(__import__('slo_bench').__file__))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(Path(__file__).resolve().parents[4] / "__init__.py")


def test_learned_step_times_approach_the_linear_model():
    learned = LearnedPredictions()
    assert learned.step_s(1, 100, []) == 0.0
    draw = np.random.default_rng(0)
    for _ in range(300):
        seqs, kv, prompt = (int(n) for n in draw.integers(1, [64, 20_000, 2000]))
        learned.learn(seqs, kv, [(0, prompt)], 0.01 + 1e-4 * seqs + 1e-7 * kv + 2e-5 * prompt)
    expected = 0.01 + 1e-4 * 32 + 1e-7 * 5000 + 2e-5 * 100
    assert learned.step_s(32, 5000, [(0, 100)]) == pytest.approx(expected, rel=0.05)


def test_compatibility_of_ascendra_names_its_instances(tmp_path):
    compatibility = compatibility_of(SYSTEMS["ascendra"])
    assert compatibility["vllm"] is None
    assert "offload from LP to HP instances" in (compatibility["sglang"] or "")
    ascendra = SYSTEMS["ascendra"].with_parameters(performance_model="given")
    assert "performance_model=refitted" in (refusal(ascendra, "vllm") or "")
    parameters = {"n_lp": 2, "token_budget": 512, "hp_batch_tokens": 1024}
    serve = Serve("vllm", "m", "ascendra", parameters, step_log=tmp_path / "steps.jsonl")
    assert serve.gateway
    names = [log.name for log in serve.step_logs()]
    assert names == ["steps-lp-1.jsonl", "steps-lp-2.jsonl", "steps-hp-1.jsonl"]
    with pytest.raises(SloBenchError, match="set its parameters n_lp and n_hp"):
        serve.step_logs(4)
    policies = [part.policy for part in serve._parts(1)]
    assert policies[0] == policies[1]
    assert policies[0].worst_batch_tokens == 1024
    for policy in policies:
        spec = PolicySpec.of("ascendra", policy)
        assert PolicySpec.from_json(spec.to_json()).load() == policy
    lp, _, hp = (argv("ascendra", policy) for policy in policies)
    assert lp[lp.index("--max-num-batched-tokens") + 1] == "512"
    assert "--no-enable-chunked-prefill" in hp
    assert hp[hp.index("--max-num-batched-tokens") + 1] == "1024"
    assert int(hp[hp.index("--max-num-seqs") + 1]) <= 1024  # vLLM wants no more than the tokens


def test_plan_of_a_controller_counts_all_its_servers():
    parameters = {"ascendra": {"n_lp": (1, 2)}}
    experiment = ExperimentSchema(
        systems=("ascendra",), parameters=parameters, backend="vllm", rates=1, seeds=1, tp=1
    )
    assert {(c.columns["gpus"], c.instances) for c in plan(experiment).cells} == {(2, 1), (3, 1)}


LINK = {"bandwidth_gb_per_s": 12, "latency_us": 10}
STAGES = {
    "model": "m",
    "stages": [
        {"device": "a", "gpu": "a100-40g", "layers": 20, "link": LINK},
        {"device": "b", "gpu": "a40", "layers": 12},
    ],
    "vllm": {"environment": {"CUDA_VISIBLE_DEVICES": "2,0"}},
}


def test_device_map_becomes_pipeline_arguments(tmp_path, monkeypatch):
    path = tmp_path / "map.json"
    path.write_text(json.dumps(STAGES))
    placed = read_device_map(str(path))
    device = Environment(tmp_path, "vllm", "", "cuda")
    monkeypatch.setattr(serve_module, "environment", lambda name: device)
    serve = Serve("vllm", str(tmp_path), "edf", device_map=placed)
    serve._check_map(placed, 1)
    assert serve._gpus(1) == [("2", "0")]
    launch = serve._launch(1, None)
    words = list(VLLM.argv(Path("/env/bin"), "cuda", launch))
    assert words[words.index("--pipeline-parallel-size") + 1] == "2"
    assert VLLM.environ("cuda", launch)["VLLM_PP_LAYER_PARTITION"] == "20,12"
    assert SGLANG.environ("cuda", launch)["SGLANG_PP_LAYER_PARTITION"] == "20,12"
    assert "VLLM_PP_LAYER_PARTITION" not in VLLM.environ("cuda", Launch(model="m", port=1))
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30}')
    with pytest.raises(SloBenchError, match=r"has 32 layers, but .* has 30"):
        serve._check_map(placed, 1)
    with pytest.raises(SloBenchError, match="is for one server"):
        serve._check_map(placed, 2)
    device = Environment(tmp_path, "sglang", "", "cuda")
    with pytest.raises(SloBenchError, match="edf inside SGLang has no pipeline stages"):
        serve._check_map(placed, 1)
    device = Environment(tmp_path, "vllm", "", "cpu")
    with pytest.raises(SloBenchError, match="use a build for CUDA, or --backend torch"):
        serve._check_map(placed, 1)
