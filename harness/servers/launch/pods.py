"""Kubernetes objects that keep their pods in other places than a Deployment, as Deployments.

Known are LeaderWorkerSet (leaderworkerset.x-k8s.io), KServe's InferenceService and
LLMInferenceService (serving.kserve.io). Fields are those of their API references.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....workloads.errors import SloBenchError

_IMAGE = "vllm/vllm-openai"  # what KServe's runtimes of language models start
_SCHEMES = ("hf://", "oci://", "pvc://", "s3://", "gs://")
# Arguments of KServe's Hugging Face runtime, and vLLM's.
_RUNTIME_ARGUMENTS = {"--model_id": "--model", "--model_name": "--served-model-name"}
_MORE = "VLLM_ADDITIONAL_ARGS"  # a variable of LLMInferenceService's images
_PARALLELISM = {
    "tensor": "--tensor-parallel-size",
    "pipeline": "--pipeline-parallel-size",
    "data": "--data-parallel-size",
}
_RUNTIME_ONLY = ("--model_dir", "--backend", "--task")


def as_deployment(document: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """The object with its replicas and the pod of one server where a Deployment has them.

    Raises:
        SloBenchError: prefill and decode have servers of their own.
    """
    spec = as_mapping(document.get("spec"))
    match document.get("kind"):
        case "Pod":
            return {**document, "spec": {"replicas": 1, "template": document}}
        case "LeaderWorkerSet":
            group = as_mapping(spec.get("leaderWorkerTemplate"))
            template = group.get("leaderTemplate") or group.get("workerTemplate")
            size = group.get("size", 1)
            pod = _over(as_mapping(template), size if isinstance(size, int) else 1)
            return {**document, "spec": {"replicas": spec.get("replicas", 1), "template": pod}}
        case "InferenceService":
            predictor = as_mapping(spec.get("predictor"))
            pod = dict(predictor)
            if isinstance(model := predictor.get("model"), Mapping):
                pod["containers"] = [_runtime_container(model)]
            replicas = max(1, _number(predictor.get("minReplicas"), 1))
            template = {"metadata": document.get("metadata"), "spec": pod}
            return {**document, "spec": {"replicas": replicas, "template": template}}
        case "LLMInferenceService":
            if spec.get("prefill"):
                raise SloBenchError(
                    f"{place}: prefill and decode have servers of their own, which --like does "
                    "not read: give one of them as a command line"
                )
            pod = _served(as_mapping(spec.get("template")), spec)
            template = {"metadata": document.get("metadata"), "spec": pod}
            return {**document, "spec": {"replicas": spec.get("replicas", 1), "template": template}}
    return document


def _runtime_container(model: Mapping[str, Any]) -> dict[str, Any]:
    """The container of KServe's Hugging Face runtime, with vLLM's arguments."""
    words: list[str] = []
    arguments = (part for word in as_list(model.get("args")) for part in _parts(str(word)))
    name = ""
    for word in arguments:
        if word.startswith("-"):
            name = word
        if name not in _RUNTIME_ONLY:
            words.append(_RUNTIME_ARGUMENTS.get(word, word))
    if "--model" not in words:
        words = ["--model", _name(str(model.get("storageUri", ""))), *words]
    kept = {field: model[field] for field in ("env", "resources") if field in model}
    return {"image": _IMAGE, **kept, "args": words}


def _served(template: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """The pod of an LLMInferenceService: its main container serves the model of `spec`."""
    containers = as_list(template.get("containers")) or [{}]
    main = dict(as_mapping(containers[0]))
    if not main.get("command"):
        model, parallelism = as_mapping(spec.get("model")), as_mapping(spec.get("parallelism"))
        words = ["--model", _name(str(model.get("uri", "")))]
        if model.get("name"):
            words += ["--served-model-name", str(model["name"])]
        for field, option in _PARALLELISM.items():
            if field in parallelism:
                words += [option, str(parallelism[field])]
        if parallelism.get("expert"):
            words.append("--enable-expert-parallel")
        variables = [v for v in map(as_mapping, as_list(main.get("env"))) if v.get("name") == _MORE]
        words += [word for variable in variables for word in str(variable.get("value")).split()]
        main |= {"image": _IMAGE, "args": [*words, *as_list(main.get("args"))]}
    return {**template, "containers": [main]}


def _over(template: Mapping[str, Any], pods: int) -> dict[str, Any]:
    """The template of a pod with the GPUs of `pods` such pods, which one server spans."""
    spec = dict(as_mapping(template.get("spec")))
    containers = []
    for container in map(as_mapping, as_list(spec.get("containers"))):
        resources = {
            kind: {name: _times(value, pods) for name, value in as_mapping(amounts).items()}
            for kind, amounts in as_mapping(container.get("resources")).items()
        }
        containers.append({**container, "resources": resources})
    return {**template, "spec": {**spec, "containers": containers}}


def _times(amount: Any, pods: int) -> Any:
    return int(amount) * pods if str(amount).isdecimal() else amount


def _parts(word: str) -> list[str]:
    """An argument as its name and what stands after its `=`."""
    name, equals, value = word.partition("=")
    return [name, value] if equals and name.startswith("-") else [word]


def _name(uri: str) -> str:
    """A model's name or folder from its storage address."""
    for scheme in _SCHEMES:
        uri = uri.removeprefix(scheme)
    return uri.partition(":")[0]


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def as_mapping(value: Any) -> Mapping[str, Any]:
    """The value, or an empty mapping in place of anything else."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: Any) -> list[Any]:
    """The value, or an empty list in place of anything else."""
    return value if isinstance(value, list) else []
