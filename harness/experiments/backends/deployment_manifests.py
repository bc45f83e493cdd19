"""A deployment as others start it: the server's command line, a Compose file, Kubernetes manifests.

`servers.launch.described_deployment` reads the same settings out of each of them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....predictors.specs import model
from ....workloads.errors import SloBenchError
from ....workloads.whole_file import write_whole
from ...servers.launch.command_line import flags_of, words_of
from ...servers.launch.deployment_files import GPU_LABEL
from ...servers.launch.server_flags import PARAMETER
from ...servers.launch.server_kind import ServerKind
from ...servers.server_kinds import LAUNCHED, server_kind
from ..config.schema import ExperimentSchema

GPUS_OF_A_HOST = 8
PORT = 8000
_HUB = "/huggingface"  # in a container: where models of the hub are kept
_SIXTEEN_BIT = ("bf16", "fp16")
_SETTINGS = (
    *("tp", "pp", "ep", "dp", "memory_share", "weight_dtype", "kv_dtype", "block_size"),
    *("num_gpu_blocks", "kv_offload_gib", "max_loras", "lora_rank", "speculation"),
)
_ALWAYS = ("tp", "memory_share")  # also where they are our defaults, which servers' may not be


@dataclass(frozen=True)
class ServedDeployment:
    """`instances` servers of one command line, which follows the program and the model."""

    kind: ServerKind
    model: str  # as the server takes it
    gpu: str
    gpus: int  # of an instance
    instances: int
    words: tuple[str, ...]
    comments: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, experiment: ExperimentSchema, comment: str = "", served_model: str = ""
    ) -> ServedDeployment | None:
        """What an experiment deploys, by the first value of each setting; None if its system is no
        server as it is. `served_model`: how the server calls the model, if that is known.

        Raises:
            SloBenchError: the server has no words for a setting.
        """
        name = experiment.systems[0]
        if name not in LAUNCHED or not server_kind(name).images:
            return None
        kind = server_kind(name)
        settings = settings_of(experiment, kind)
        spec = model(experiment.model[0])
        comments = [*filter(None, [comment])]
        dtype = settings.get("weight_dtype", spec.checkpoint_dtype)
        if dtype not in (spec.checkpoint_dtype, *_SIXTEEN_BIT, *kind.weight_options):
            comments.append(f"The model must be a checkpoint with {dtype} weights.")
        gpus = 1
        for degree in ("tp", "pp", "dp"):
            gpus *= settings.get(degree) or 1
        return cls(
            kind,
            served_model or model_reference(experiment.model[0]),
            experiment.gpu[0],
            gpus,
            _first(experiment.instances) or 1,
            tuple(words_of(kind, settings)),
            tuple(comments),
        )

    @property
    def command(self) -> str:
        """The command line of an instance."""
        program = self.kind.command.replace('"$MODEL"', shlex.quote(self.model))
        return f"{program} {shlex.join(self.words)}".strip()

    @property
    def _container_program(self) -> list[str]:
        """Program and model in a container, in words."""
        program = self.kind.command.replace('"$MODEL"', shlex.quote(self.model))
        words = shlex.split(program)
        words[0] = "python3" if words[0] == "python" else words[0]
        return words

    @property
    def _container_options(self) -> list[str]:
        """Options of the program in a container."""
        return ["--host", "0.0.0.0", "--port", str(PORT), *self.words]

    @property
    def _image(self) -> str:
        return f"{self.kind.images[0]}:v{self.kind.builds['cuda'].version}"

    def files(self) -> dict[str, str]:
        """Texts of the files by name: `command.sh` of one instance, `compose.yaml` where one host
        has all, `kubernetes.yaml` where a host has an instance.
        """
        head = "".join(f"# {line}\n" for comment in self.comments for line in comment.splitlines())
        files = {"command.sh": f"#!/usr/bin/env bash\n{head}exec {self.command}\n"}
        if self.gpus <= GPUS_OF_A_HOST:
            files["kubernetes.yaml"] = head + _yaml(self._deployment(), self._service())
        if self.gpus * self.instances <= GPUS_OF_A_HOST:
            files["compose.yaml"] = head + _yaml(self._compose())
        return files

    def _compose(self) -> dict[str, Any]:
        services = {}
        for k in range(self.instances):
            ids = [str(gpu) for gpu in range(k * self.gpus, (k + 1) * self.gpus)]
            device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
            services[f"{self.kind.name}-{k + 1}"] = {
                "image": self._image,
                "entrypoint": self._container_program,
                "command": self._container_options,
                "ports": [f"127.0.0.1:{PORT + k}:{PORT}"],
                "ipc": "host",
                "environment": {"HF_TOKEN": "${HF_TOKEN:-}", "HF_HOME": _HUB},
                "volumes": [f"${{HF_HOME:-~/.cache/huggingface}}:{_HUB}"],
                "labels": {GPU_LABEL: self.gpu},
                "deploy": {"resources": {"reservations": {"devices": [device]}}},
            }
        return {"services": services}

    @property
    def _name(self) -> str:
        plain = re.sub(r"[^a-z0-9]+", "-", Path(self.model).name.lower()).strip("-")
        return f"{self.kind.name}-{plain}"[:63].rstrip("-")

    def _deployment(self) -> dict[str, Any]:
        labels = {"app": self._name}
        container = {
            "name": self.kind.name,
            "image": self._image,
            "command": [*self._container_program, *self._container_options],
            "ports": [{"containerPort": PORT}],
            "readinessProbe": {
                "httpGet": {"path": self.kind.health_path, "port": PORT},
                "periodSeconds": 5,
                "failureThreshold": 240,
            },
            "resources": {"limits": {"nvidia.com/gpu": self.gpus}},
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        }
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": self._name, "labels": labels},
            "spec": {
                "replicas": self.instances,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels, "annotations": {GPU_LABEL: self.gpu}},
                    "spec": {
                        "containers": [container],
                        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
                    },
                },
            },
        }

    def _service(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self._name},
            "spec": {"selector": {"app": self._name}, "ports": [{"port": PORT}]},
        }


def settings_of(experiment: ExperimentSchema, kind: ServerKind) -> dict[str, Any]:
    """Settings of an experiment that a server's command line has, by path; those that are our
    defaults are left to the server.
    """
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        value = _first(getattr(experiment, name))
        default = _first(type(experiment).model_fields[name].get_default())
        if value is not None and (name in _ALWAYS or value != default):
            settings[name] = value
    if "num_gpu_blocks" in settings:  # a number that means nothing without their size
        settings["block_size"] = _first(experiment.block_size)
    if "max_loras" in settings:
        settings["lora_rank"] = _first(experiment.lora_rank)
    if experiment.server.max_model_tokens is not None:
        settings["server.max_model_tokens"] = experiment.server.max_model_tokens
    if "speculation" in settings:  # a server has an acceptance of its own
        settings["speculation"] = re.sub(r"@[^<]*", "", settings["speculation"])
    written = {flag.setting for flag in flags_of(kind).values() if flag.write is not None}
    parameters: Mapping[str, Any] = experiment.parameters.get(experiment.systems[0], {})
    for name, values in parameters.items():
        if PARAMETER + name in written:
            settings[PARAMETER + name] = values[0]
    return settings


def _first(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) else values


def model_reference(name: str) -> str:
    """How a server calls a model: by its origin on the hub, or its folder."""
    path = Path(name).expanduser()
    if path.suffix == ".json":
        return str(path.parent)
    origin = model(name).origin.partition(" ")[0]
    return origin if "/" in origin and not path.exists() else name


def write_deployment(
    folder: Path, experiment: ExperimentSchema, comment: str = "", served_model: str = ""
) -> list[Path]:
    """Write the files of what an experiment deploys; none if its system is no server as it is, or
    the server has no words for a setting.

    Raises:
        SloBenchError: they cannot be written.
    """
    try:
        deployment = ServedDeployment.of(experiment, comment, served_model)
    except SloBenchError:
        return []
    if deployment is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in deployment.files().items():
        write_whole(folder / name, [text.encode()])
        paths.append(folder / name)
    (folder / "command.sh").chmod(0o755)
    return paths


def _yaml(*documents: Mapping[str, Any]) -> str:
    import yaml

    # Without anchors, which lists that stand twice would get.
    dumper = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    text: str = yaml.dump_all(documents, Dumper=dumper, sort_keys=False, width=1000)
    return text
