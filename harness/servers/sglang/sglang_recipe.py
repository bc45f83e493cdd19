"""SGLang: how it is installed and started."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ....workloads.errors import SloBenchError
from ..launch.recipe import TORCH_CPU_INDEX, Build, InstallStep, Launch, Recipe, from_index

_VERSION = "0.5.23"
_TORCH = "torch==2.13.0+cpu"

_CPU_FILES = Path(__file__).with_name("cpu")  # what the CPU build lacks


def _cpu_steps(version: str) -> Sequence[InstallStep]:
    if version != _VERSION:
        raise SloBenchError(
            f"SGLang {version} has no recipe for CPU: it is put together from parts, and those of "
            f"{_VERSION} are known; leave --version out"
        )
    lines = (_CPU_FILES / "requirements.txt").read_text("utf-8").splitlines()
    needs = [line for line in lines if line and not line.startswith("#")]
    return (
        # Alone: PyTorch's CPU index is then asked for nothing else.
        InstallStep((_TORCH,), dependencies=False, index=TORCH_CPU_INDEX),
        InstallStep((f"sglang=={version}", "torchvision==0.28.0"), dependencies=False),
        InstallStep((_TORCH, *needs)),  # torch again, so that nothing replaces it
    )


def _add_stand_ins(site_packages: Path, version: str) -> None:
    """Add modules for packages without a CPU build: a `sgl_kernel` of names only, and operators of
    torchvision.
    """
    kernels = site_packages / "sgl_kernel"
    kernels.mkdir(exist_ok=True)
    shutil.copyfile(_CPU_FILES / "sgl_kernel.py", kernels / "__init__.py")
    name = "slo_bench_torchvision"
    shutil.copyfile(_CPU_FILES / f"{name}.py", site_packages / f"{name}.py")
    (site_packages / f"{name}.pth").write_text(f"import {name}\n", "utf-8")


_PROBE = (
    "import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, "
    "importlib.metadata as m; "
    "print(m.version('sglang'))"
)


def _argv(programs: Path, device: str, launch: Launch) -> Sequence[str]:
    argv = [
        *(str(programs / "python"), "-m", "sglang.launch_server", "--model-path", launch.model),
        *("--host", launch.host, "--port", str(launch.port), "--enable-metrics"),
    ]
    if launch.served_name is not None:
        argv += ["--served-model-name", launch.served_name]
    block_size = launch.block_size or 1
    if launch.block_size is not None:
        argv += ["--page-size", str(block_size)]
    if launch.num_gpu_blocks is not None:
        argv += ["--max-total-tokens", str(launch.num_gpu_blocks * block_size)]
    if launch.max_model_tokens is not None:
        argv += ["--context-length", str(launch.max_model_tokens)]
    if device == "cpu":
        argv += [
            *("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"),
            *("--grammar-backend", "none", "--skip-server-warmup", "--mem-fraction-static", "0.2"),
            "--sleep-on-idle",  # else a core is spent on polling, which clients share with it
        ]
    return [*argv, *launch.server_args]


def _environ(device: str, launch: Launch) -> Mapping[str, str]:
    variables = {
        # Being stopped looks like a crash to SGLang: without this it waits 5 s to look into it.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    }
    if device == "cpu":
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
    return variables


SGLANG = Recipe(
    backend="sglang",
    builds={
        "cpu": Build(
            version=_VERSION,
            steps=_cpu_steps,
            probe=_PROBE,
            newest_python=(3, 12),
            finish=_add_stand_ins,
        ),
        # Not tested; from the project's own instructions.
        "cuda": Build(
            version=_VERSION,
            steps=from_index("sglang"),
            probe=_PROBE,
            newest_python=(3, 12),
        ),
    },
    argv=_argv,
    own_environ=_environ,
    health_path="/model_info",  # /health generates a token, which would count as load
)
