"""Pods of LeaderWorkerSet and KServe as deployments."""

from __future__ import annotations

import json

import pytest

from slo_bench.harness.servers.launch.described_deployment import described
from slo_bench.workloads.errors import SloBenchError

MODEL = "Qwen/Qwen3-8B"
RESOURCES = {"limits": {"nvidia.com/gpu": "2"}}
LEADER = {
    "containers": [
        {
            "image": "vllm/vllm-openai:latest",
            "command": ["sh", "-c"],
            "args": [
                "bash multi-node-serving.sh leader --ray_cluster_size=$(LWS_GROUP_SIZE); "
                f"vllm serve {MODEL} --tensor-parallel-size 2 --pipeline_parallel_size 2"
            ],
            "resources": RESOURCES,
        }
    ]
}
WORKER = {
    "containers": [
        {
            "image": "vllm/vllm-openai:latest",
            "command": ["sh", "-c", "bash multi-node-serving.sh worker"],
            "resources": RESOURCES,
        }
    ]
}


def deployment(tmp_path, kind, spec):
    path = tmp_path / "object.yaml"
    path.write_text(json.dumps({"kind": kind, "metadata": {"name": "llm"}, "spec": spec}))
    return described(str(path))


def test_leader_of_a_group_is_the_server_and_spans_the_gpus_of_all_its_pods(tmp_path):
    group = {"size": 2, "leaderTemplate": {"spec": LEADER}, "workerTemplate": {"spec": WORKER}}
    spec = {"replicas": 3, "leaderWorkerTemplate": group}
    read = deployment(tmp_path, "LeaderWorkerSet", spec)
    assert read.settings == {"model": "qwen3-8b", "tp": 2, "pp": 2, "instances": 3}
    assert not any("GPUs" in line for line in read.lines)
    spec["leaderWorkerTemplate"]["size"] = 4
    lines = deployment(tmp_path, "LeaderWorkerSet", spec).lines
    assert any("8" in line and "4" in line and "GPUs" in line for line in lines)


@pytest.mark.parametrize(
    "model",
    [
        {"args": ["--model_name=q", "--model_dir=/mnt", "-tp=2", "--max-num-seqs", "96"]},
        {"args": ["--model_dir", "/mnt", "--model_name", "q", "-tp", "2", "--max-num-seqs=96"]},
        {"args": [f"--model_id={MODEL}", "-tp", "2", "--max-num-seqs=96"]},
    ],
)
def test_arguments_of_an_inference_service_are_those_of_vllm(tmp_path, model):
    if not any("--model_id" in word for word in model["args"]):
        model["storageUri"] = f"hf://{MODEL}:main"
    predictor = {"minReplicas": 2, "model": {**model, "resources": RESOURCES}}
    read = deployment(tmp_path, "InferenceService", {"predictor": predictor})
    assert read.settings == {"model": "qwen3-8b", "tp": 2, "instances": 2}
    assert read.parameters == {"max_num_seqs": 96}


def test_model_and_parallelism_of_an_llm_inference_service_are_read(tmp_path):
    variable = {"name": "VLLM_ADDITIONAL_ARGS", "value": "--max-num-seqs 96"}
    spec = {
        "model": {"uri": f"hf://{MODEL}", "name": "q"},
        "replicas": 2,
        "parallelism": {"tensor": 2},
        "template": {"containers": [{"env": [variable], "resources": RESOURCES}]},
    }
    read = deployment(tmp_path, "LLMInferenceService", spec)
    assert read.settings == {"model": "qwen3-8b", "tp": 2, "instances": 2}
    assert read.parameters == {"max_num_seqs": 96}
    with pytest.raises(SloBenchError, match="prefill and decode have servers of their own"):
        deployment(tmp_path, "LLMInferenceService", {**spec, "prefill": {"replicas": 1}})
