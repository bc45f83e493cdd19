"""Deployments as others start them: what is written can be read back, and has the form it must."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slo_bench import Experiment
from slo_bench.harness.experiments.backends.deployment_manifests import (
    ServedDeployment,
    settings_of,
    write_deployment,
)
from slo_bench.harness.servers.launch.described_deployment import described
from slo_bench.harness.servers.server_kinds import server_kind

NAME = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
# The fields that are written, as Kubernetes and the Compose specification type them.
CONTAINER = {
    "name": NAME,
    "image": str,
    "command": [str],
    "ports": [{"containerPort": int}],
    "readinessProbe": {
        "httpGet": {"path": str, "port": int},
        "periodSeconds": int,
        "failureThreshold": int,
    },
    "resources": {"limits": {"nvidia.com/gpu": int}},
    "volumeMounts": [{"name": NAME, "mountPath": str}],
}
DEPLOYMENT = {
    "apiVersion": "^apps/v1$",
    "kind": "^Deployment$",
    "metadata": {"name": NAME, "labels": {"app": NAME}},
    "spec": {
        "replicas": int,
        "selector": {"matchLabels": {"app": NAME}},
        "template": {
            "metadata": {"labels": {"app": NAME}, "annotations": {"slo-bench.gpu": str}},
            "spec": {
                "containers": [CONTAINER],
                "volumes": [{"name": NAME, "emptyDir": {"medium": "^Memory$"}}],
            },
        },
    },
}
SERVICE = {
    "apiVersion": "^v1$",
    "kind": "^Service$",
    "metadata": {"name": NAME},
    "spec": {"selector": {"app": NAME}, "ports": [{"port": int}]},
}
COMPOSE_SERVICE = {
    "image": str,
    "entrypoint": [str],
    "command": [str],
    "ports": [r"^127\.0\.0\.1:\d+:\d+$"],
    "ipc": "^host$",
    "environment": {"HF_TOKEN": str, "HF_HOME": str},
    "volumes": [str],
    "labels": {"slo-bench.gpu": str},
    "deploy": {
        "resources": {
            "reservations": {
                "devices": [
                    {"driver": "^nvidia$", "device_ids": [r"^\d$"], "capabilities": ["^gpu$"]}
                ]
            }
        }
    },
}


def check(value, schema, place="") -> None:
    """Fail where a value has not exactly the form of a schema."""
    if isinstance(schema, dict):
        assert value.keys() == schema.keys(), place
        for name, member in schema.items():
            check(value[name], member, f"{place}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), place
        assert value, place
        for entry in value:
            check(entry, schema[0], place)
    elif isinstance(schema, str):
        assert re.search(schema, value), (place, value)
    else:
        assert type(value) is schema, (place, value)


def experiments(system: str):
    """Deployments with every setting that the server's command line has."""
    vllm = system == "vllm"
    parameters = (
        {
            "max_num_seqs": st.integers(1, 2000),
            "max_num_batched_tokens": st.integers(16, 65536),
            "async_scheduling": st.booleans(),
        }
        if vllm
        else {
            "chunked_prefill_tokens": st.integers(16, 65536),
            "max_running_requests": st.integers(1, 2000),
        }
    )
    optional = {
        "kv_dtype": st.just("fp8"),
        "weight_dtype": st.sampled_from(["fp8", "int8"] if vllm else ["fp8"]),
        "block_size": st.sampled_from([32, 64]),
        "num_gpu_blocks": st.integers(100, 10_000),
    }
    if vllm:
        optional |= {
            "kv_offload_gib": st.integers(1, 64).map(float),
            "max_loras": st.integers(1, 8),
            "speculation": st.sampled_from(
                ["ngram:4@0.5", "eagle3=head:3@0.6/0.4<64", "mtp:1@0.8"]
            ),
        }
    return st.builds(
        lambda parameters, **deployment: Experiment(
            systems=[system], parameters={system: parameters}, **deployment
        ),
        parameters=st.fixed_dictionaries({}, optional=parameters),
        model=st.sampled_from(["qwen3-8b", "llama-3.1-70b"]),
        gpu=st.sampled_from(["h100-80g", "a100-80g-pcie", "l40s"]),
        tp=st.sampled_from([1, 2, 4]),
        pp=st.sampled_from([1, 2]),
        memory_share=st.integers(50, 95).map(lambda percent: percent / 100),
        instances=st.integers(1, 4),
        **{
            name: strategy | st.just(Experiment.model_fields[name].get_default())
            for name, strategy in optional.items()
        },
    )


@pytest.mark.parametrize("system", ["vllm", "sglang"])
def test_written_deployments_are_read_back_as_they_were(system, tmp_path):
    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(experiments(system))
    def read_back(experiment):
        folder = tmp_path / "written"
        for old in folder.glob("*"):
            old.unlink()
        expected = settings_of(experiment, server_kind(system)) | {"model": experiment.model[0]}
        expected = {k: v for k, v in expected.items() if k != "pp" or v > 1}
        if expected["tp"] == 1:
            del expected["tp"]
        instances = experiment.instances[0]
        for path in write_deployment(folder, experiment):
            deployment = described(str(path))
            parameters = {f"parameters.{k}": v for k, v in deployment.parameters.items()}
            of_file = {**deployment.settings, **parameters}
            if path.name != "command.sh":
                assert of_file.pop("gpu") == experiment.gpu[0]
                assert of_file.pop("instances", 1) == instances
            assert of_file == expected, path.name

    read_back()


def test_manifests_have_the_form_that_they_must(tmp_path):
    experiment = Experiment(systems=["vllm"], model="qwen3-8b", tp=2, instances=3)
    write_deployment(tmp_path, experiment, "two\nlines")
    deployment, service = yaml.safe_load_all((tmp_path / "kubernetes.yaml").read_text())
    check(deployment, DEPLOYMENT)
    check(service, SERVICE)
    compose = yaml.safe_load((tmp_path / "compose.yaml").read_text())
    assert list(compose) == ["services"]
    ids = []
    for entry in compose["services"].values():
        check(entry, COMPOSE_SERVICE)
        ids += entry["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
    assert ids == list("012345")
    assert (tmp_path / "command.sh").read_text().startswith("#!/usr/bin/env bash\n# two\n# lines\n")
    subprocess.run(["bash", "-n", tmp_path / "command.sh"], check=True)


def test_compose_file_is_of_one_host_and_policies_have_no_files(tmp_path):
    many = Experiment(systems=["vllm"], model="llama-3.1-70b", tp=4, instances=3)
    assert {path.name for path in write_deployment(tmp_path, many)} == {
        "command.sh",
        "kubernetes.yaml",
    }
    assert write_deployment(tmp_path, Experiment(systems=["edf"], model="qwen3-8b")) == []
    int4 = Experiment(systems=["vllm"], model="qwen3-8b", weight_dtype="int4", tp=1)
    deployment = ServedDeployment.of(int4)
    assert deployment is not None
    assert deployment.comments == ("The model must be a checkpoint with int4 weights.",)


def test_limits_of_ranks_are_written_as_sglang_divides_them():
    text = (
        "sglang serve Qwen/Qwen3-30B-A3B --tp 8 --dp 8 --enable-dp-attention --page-size 64 "
        "--chunked-prefill-size 8192 --max-running-requests 64 "
        "--enable-hierarchical-cache --hicache-size 30"
    )
    read = described(text)
    assert read.parameters == {"chunked_prefill_tokens": 1024, "max_running_requests": 8}
    experiment = Experiment(
        systems=["sglang"], parameters={"sglang": read.parameters}, **read.settings
    )
    deployment = ServedDeployment.of(experiment)
    words = " ".join(deployment.words)
    assert "--chunked-prefill-size 8192 --max-running-requests 64" in words
    assert "--hicache-size 30" in words
