"""Deployments of others as settings: commands, launch scripts, Compose files, manifests."""

from __future__ import annotations

import json

import pytest

from slo_bench.harness.servers.launch.described_deployment import described, gpu_called
from slo_bench.workloads.errors import SloBenchError

SCRIPT = """\
#!/usr/bin/env bash
# vllm serve an/old-model
set -e
export MODEL=Qwen/Qwen3-8B TP=2
PORT=8000
CUDA_VISIBLE_DEVICES=$(seq -s, 0 1) nohup vllm serve "${MODEL}" \\
  --tensor-parallel-size $TP --max-num-seqs=${SEQS:-96} \\
  --port $((PORT + 1)) > server.log 2>&1 &
wait
"""
COMPOSE = """\
x-common: &common
  image: vllm/vllm-openai:v0.32.0
services:
  proxy: {image: nginx}
  vllm:
    <<: *common
    command: --model Qwen/Qwen3-8B --tensor-parallel-size 2 --max-num-seqs 96
    deploy:
      replicas: 2
      resources: {reservations: {devices: [{driver: nvidia, count: 2, capabilities: [gpu]}]}}
"""
MANIFEST = """\
apiVersion: v1
kind: Service
metadata: {name: llm}
spec: {ports: [{port: 80}]}
---
apiVersion: apps/v1
kind: %s
metadata: {name: llm}
spec:
  replicas: 3
  template:
    spec:
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
      containers:
        - name: sidecar
          image: busybox
          args: [sleep, inf]
        - name: llm
          image: docker.io/vllm/vllm-openai@sha256:0
          env: [{name: SEQS, value: "96"}, {name: TOKEN, valueFrom: {secretKeyRef: {name: t}}}]
          command: [/bin/sh, -c]
          args: ["vllm serve Qwen/Qwen3-8B -tp 2 --max-num-seqs $(SEQS)"]
          resources: {limits: {nvidia.com/gpu: "2"}}
---
"""


def read(text: str) -> dict[str, object]:
    deployment = described(text)
    return {"system": deployment.system, **deployment.settings, **deployment.parameters}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--max-num-seqs 64 --max_num_batched_tokens=4k",
            {"max_num_seqs": 64, "max_num_batched_tokens": 4000},
        ),
        ("-tp 4 -pp 2 --gpu-memory-utilization .85", {"tp": 4, "pp": 2, "memory_share": 0.85}),
        ("--max-model-len 32K", {"server.max_model_tokens": 32768}),
        (
            "--quantization fp8 --kv-cache-dtype fp8_e5m2",
            {"weight_dtype": "fp8", "kv_dtype": "fp8"},
        ),
        ("--kv-cache-dtype auto --dtype auto", {}),
        ("--quantization fp8 --dtype auto", {"weight_dtype": "fp8"}),
        ("--dtype auto --quantization fp8", {"weight_dtype": "fp8"}),
        (
            "--block-size 32 --num-gpu-blocks-override 101",
            {"block_size": 32, "num_gpu_blocks": 100},
        ),
        ("--enable-lora --max-loras 4 --max-lora-rank 64", {"max_loras": 4, "lora_rank": 64}),
        ("--no-async-scheduling", {"async_scheduling": False}),
        (
            "--speculative-config.method ngram --speculative-config.num_speculative_tokens 4",
            {"speculation": "ngram:4"},
        ),
        (
            '--speculative-config \'{"method":"eagle3","model":"h","num_speculative_tokens":3}\'',
            {"speculation": "eagle3=h:3"},
        ),
        ("--data-parallel-size 2", {"instances": 2}),
        ("--kv-offloading-size 30", {"kv_offload_gib": 30.0}),
    ],
)
def test_options_of_vllm_are_settings(words, expected):
    assert read(f"vllm serve Qwen/Qwen3-8B {words}") == {
        "system": "vllm",
        "model": "qwen3-8b",
        **expected,
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tp 8 --dp 8 --enable-dp-attention --ep-size 8", {"tp": 1, "dp": 8, "ep": 8}),
        ("--tp 8 --attn-dp-size 4", {"tp": 2, "dp": 4}),
        ("--tp-size 2 --dp-size 3", {"tp": 2, "instances": 3}),
        ("--mem-fraction-static 0.8 --page-size 64", {"memory_share": 0.8, "block_size": 64}),
        ("--page-size 16 --max-total-tokens 1600", {"block_size": 16, "num_gpu_blocks": 100}),
        (
            "--chunked-prefill-size 4096 --max-running-requests 9",
            {"chunked_prefill_tokens": 4096, "max_running_requests": 9},
        ),
        ("--chunked-prefill-size -1", {}),
        (
            "--tp 8 --dp 8 --enable-dp-attention --chunked-prefill-size 8192 "
            "--max-running-requests 64",
            {"tp": 1, "dp": 8, "chunked_prefill_tokens": 1024, "max_running_requests": 8},
        ),
        ("--enable-hierarchical-cache --disaggregation-mode null", {}),
        ("--mem-frac .7 --speculative-algo NEXTN", {"memory_share": 0.7, "speculation": "mtp:3"}),
        (
            "--kv-cache-dtype fp8_e4m3 --context-length 4096",
            {"kv_dtype": "fp8", "server.max_model_tokens": 4096},
        ),
        (
            "--speculative-algorithm EAGLE --speculative-num-steps 3 "
            "--speculative-num-draft-tokens 8",
            {"speculation": "eagle:3"},
        ),
    ],
)
def test_options_of_sglang_are_settings(words, expected):
    text = f"python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 {words}"
    assert read(text) == {"system": "sglang", "model": "deepseek-r1", **expected}


def test_expert_parallelism_of_vllm_spans_all_ranks():
    text = "vllm serve deepseek-ai/DeepSeek-V3 -tp 2 -dp 4 --enable-expert-parallel"
    settings = read(text)
    assert (settings["tp"], settings["dp"], settings["ep"]) == (2, 4, 8)


def test_script_compose_file_and_manifests_are_read_alike(tmp_path):
    shared = {"system": "vllm", "model": "qwen3-8b", "tp": 2, "max_num_seqs": 96}
    files = {"start.sh": (SCRIPT, shared), "compose.yaml": (COMPOSE, {**shared, "instances": 2})}
    for kind in ("Deployment", "StatefulSet"):
        files[f"{kind}.yaml"] = (MANIFEST % kind, {**shared, "instances": 3, "gpu": "h100-80g"})
    for name, (text, expected) in files.items():
        path = tmp_path / name
        path.write_text(text)
        assert read(str(path)) == expected, name
    path = tmp_path / "pod"  # neither its name nor its end says what it is
    pod = {
        "kind": "Pod",
        "spec": {
            "containers": [
                {"image": "vllm/vllm-openai:latest", "args": ["--model", "Qwen/Qwen3-8B"]}
            ]
        },
    }
    path.write_text(f"kind: List\nitems: [{json.dumps(pod)}]\n")
    assert read(str(path)) == {"system": "vllm", "model": "qwen3-8b"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('ARGS=(-tp 2 --max-num-seqs 9)\nvllm serve $M "${ARGS[@]}"', {"tp": 2, "max_num_seqs": 9}),
        (
            "A=(\n  # many (of them)\n  -tp 2  # GPUs\n"
            """  --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'\n)\n"""
            'A+=(--max-num-seqs "$SEQS")\nexec vllm serve $M ${A[*]}',
            {"tp": 2, "max_num_seqs": 9, "speculation": "ngram:3"},
        ),
        ("MORE='-tp 2'\nMORE+=' --max-num-seqs 9'\nvllm serve $M ${MORE}", None),
        ('CMD=(vllm serve $M)\nCMD+=(-tp 2 --max-num-seqs 9)\nenv "${CMD[@]}"', None),
        ("""srun -N1 bash -lc "vllm serve $M -tp 2 --max-num-seqs $SEQS" &""", None),
        ("docker run vllm/vllm-openai:v1 sh -c 'vllm serve $M -tp 2 --max-num-seqs 9'", None),
        ("vllm serve $M --tensor-parallel-siz 2 --max-num-s=9", None),
        ('vllm serve "${M:?no model}" -tp ${TP:=2} --max-num-seqs 9', None),
        ("vllm serve $M -tp 2 --max-num-seqs 9 --max-model-len auto --kv-cache-dtype auto", None),
    ],
)
def test_arrays_variables_shells_and_short_names_of_scripts_are_read(tmp_path, text, expected):
    path = tmp_path / "start.sh"
    path.write_text(f"M=Qwen/Qwen3-8B SEQS=9\n{text}\n")
    expected = expected or {"tp": 2, "max_num_seqs": 9}
    assert read(str(path)) == {"system": "vllm", "model": "qwen3-8b", **expected}


def test_conditions_arguments_and_numbers_of_servers_of_scripts_are_named(tmp_path):
    path = tmp_path / "start.sh"
    path.write_text(
        'A=(-tp 2)\n[ -n "$X" ] && A+=(--max-num-seqs 9)\n'
        'for k in 1 2; do\n  vllm serve Qwen/Qwen3-8B "${A[@]}" "$@" &\ndone\n'
        'vllm serve Qwen/Qwen3-8B "${A[@]}"\n'
    )
    assert described(str(path)).lines[2:6] == (
        "2 such servers are started",
        "conditions in start.sh are taken as true",
        "loops in start.sh are taken once",
        "arguments of start.sh are taken as none",
    )


def test_compose_file_with_a_shell_and_options_in_yaml_are_read(tmp_path):
    path = tmp_path / "compose.yaml"
    path.write_text(
        "services:\n  llm:\n    image: lmsysorg/sglang:latest\n    entrypoint: [bash, -lc]\n"
        "    environment: {MODEL: Qwen/Qwen3-8B}\n"
        "    command: \"'sglang serve --model-path $$MODEL --tp 2'\"\n"
    )
    assert read(str(path)) == {"system": "sglang", "model": "qwen3-8b", "tp": 2}
    config = tmp_path / "config.yaml"
    config.write_text("speculative-config: {method: ngram, num_speculative_tokens: 3}\n")
    settings = read(f"vllm serve Qwen/Qwen3-8B --config {config}")
    assert settings == {"system": "vllm", "model": "qwen3-8b", "speculation": "ngram:3"}


def test_docker_run_and_config_file_are_read(tmp_path):
    text = "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.32.0 --model Qwen/Qwen3-8B -tp 2"
    assert read(text) == {"system": "vllm", "model": "qwen3-8b", "tp": 2}
    config = tmp_path / "config.yaml"
    config.write_text("model: Qwen/Qwen3-8B\nmax-num-seqs: 7\nenforce-eager: true\nport: 1\n")
    settings = read(f"vllm serve --config {config} --max-num-seqs 9")
    assert settings == {"system": "vllm", "model": "qwen3-8b", "max_num_seqs": 9}


def test_options_with_several_values_and_labels_of_clouds_are_read(tmp_path):
    words = "--model Qwen/Qwen3-8B --enable-lora --lora-modules a=/a b=/b --max-loras 2 --port 1"
    path = tmp_path / "d.yaml"
    text = MANIFEST.replace("nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3", "LABEL")
    text = text.replace("LABEL", "k8s.amazonaws.com/accelerator: nvidia-l4")
    path.write_text(
        (text % "Deployment").replace(
            "vllm serve Qwen/Qwen3-8B", f"python3 -m vllm.entrypoints.openai.api_server {words}"
        )
    )
    settings = read(str(path))
    assert (settings["model"], settings["max_loras"]) == ("qwen3-8b", 2)
    assert (settings["gpu"], settings["instances"]) == ("l4", 3)


def test_what_has_no_meaning_is_named():
    deployment = described(
        "VLLM_USE_V1=1 vllm serve RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8 --host 0.0.0.0 "
        "--api-key secret --enforce-eager --quantization awq --enable-prefix-caching"
    )
    assert deployment.settings == {"model": "llama-3.1-8b", "weight_dtype": "fp8"}
    assert "secret" not in " ".join(deployment.lines)
    assert deployment.lines[-2:] == (
        "no part in a simulation: --host, --api-key",
        "not simulated: --enforce-eager, --quantization awq, --enable-prefix-caching",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("llama-server -m x", "neither a file nor a command of vllm or sglang"),
        ("vllm serve --port 1", "names no model"),
        ("vllm serve nobody/has-this", "neither in .slo-bench list models. nor a folder"),
        ("vllm serve Qwen/Qwen3-8B --max-num-seqs", "--max-num-seqs has no value"),
        ("vllm serve Qwen/Qwen3-8B --max-num-seqs many", "--max-num-seqs 'many' cannot be read"),
        ("vllm serve Qwen/Qwen3-8B --speculative-config {}", "num_speculative_tokens"),
        ("vllm serve Qwen/Qwen3-8B --max-num-seqs $SEQS", "the variable SEQS is not set in it"),
        ("vllm serve 'Qwen/Qwen3-8B", "No closing quotation"),
        ("vllm serve Qwen/Qwen3-8B --config nowhere.yaml", "cannot be read: .*nowhere.yaml"),
        ("vllm serve Qwen/Qwen3-8B ${ARGS[@]}", "the variable ARGS is not set in it"),
        ("A=(-x (y)); vllm serve Qwen/Qwen3-8B ${A[@]}", "the variable A is not set in it"),
        (
            """vllm serve Qwen/Qwen3-8B --kv-transfer-config '{"kv_role": "kv_producer"}'""",
            "prefill or decode alone",
        ),
        ("sglang serve Qwen/Qwen3-8B --disaggregation-mode decode", "prefill or decode alone"),
        ("vllm serve Qwen/Qwen3-8B & vllm serve Qwen/Qwen3-4B", "start servers that differ"),
    ],
)
def test_bad_commands_are_refused(text, problem):
    with pytest.raises(SloBenchError, match=problem):
        described(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("services: [", "is no YAML.*line"),
        ("services: {a: {image: nginx}}", "has no command that starts vllm or sglang"),
        ("kind: Deployment\nspec: 3", "has no command"),
        (
            "kind: Deployment\nspec: {template: {spec: {containers: [null, 3, {args: x}]}}}",
            "has no command",
        ),
        (
            MANIFEST.replace("replicas: 3", "replicas: many") % "Deployment",
            "'many' is no whole number",
        ),
        (MANIFEST.replace("replicas: 3", "replicas: 0") % "Deployment", "has no replicas"),
        ("#!/bin/sh\necho hello\n", "has no command"),
        ("kind: " + "[" * 1500, "line|deeply"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, problem):
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    with pytest.raises(SloBenchError, match=problem):
        described(str(path))


def test_reserved_gpus_that_the_server_does_not_use_are_named(tmp_path):
    path = tmp_path / "d.yaml"
    path.write_text((MANIFEST % "Deployment").replace('gpu: "2"', 'gpu: "4"'))
    assert any("has 4 GPUs, its server uses 2" in line for line in described(str(path)).lines)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("NVIDIA-H100-80GB-HBM3", "h100-80g"),
        ("NVIDIA-A100-SXM4-40GB", "a100-40g"),
        ("nvidia-a100-80gb", "a100-80g"),
        ("nvidia-l4", "l4"),
        ("NVIDIA-L40S", "l40s"),
        ("NVIDIA-H200", "h200-141g"),
        ("nvidia-tesla-t4", "t4"),
        ("h100-80g-pcie", "h100-80g-pcie"),
        ("TPU-v5e", None),
    ],
)
def test_products_are_gpus_of_the_catalogue(label, name):
    assert gpu_called(label) == name
