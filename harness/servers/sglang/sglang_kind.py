"""SGLang: all that is asked about it. Options are those of 0.5.23."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

from ....workloads.errors import SloBenchError
from ...core.policy import Policy
from ...core.wire import SGLANG_FIELD
from ...load_generator.server_metrics import MetricNames
from ..launch.server_kind import (
    TORCH_CPU_INDEX,
    Build,
    InstallStep,
    Launch,
    ServerKind,
    from_index,
)
from . import plugin
from .plugin import targets
from .plugin.sglang_compatibility import launch_args, limitation, refusal
from .sglang_flags import FLAGS, settle

_VERSION = "0.5.23"
_TORCH = "torch==2.13.0+cpu"
_STAGES = "--pp-size"
_GIB, _GB = 2**30, 10**9

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
    if isinstance(launch.policy, Policy):
        argv += launch_args(launch.policy)
    return [*argv, *launch.server_args]


def _environ(device: str, launch: Launch) -> Mapping[str, str]:
    variables = {
        # Being stopped looks like a crash to SGLang: without this it waits 5 s to look into it.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    }
    if device == "cpu":
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
    return variables


def _parallel_args(tp: int = 1, pp: int = 1, ep: int = 1, dp: int = 1) -> list[str]:
    words = []
    for option, size in (("--tp-size", tp * dp), (_STAGES, pp)):  # all GPUs, not a rank's
        words += [option, str(size)] if size > 1 else []
    words += ["--dp-size", str(dp), "--enable-dp-attention"] if dp > 1 else []
    return [*words, "--ep-size", str(ep)] if ep > 1 else words


def kv_offload_args(gib: float, gpus: int) -> list[str]:
    """Words of the command line, which count whole GB (10^9 bytes) of each of the server's `gpus`
    processes; a part of a GB is left out.

    Raises:
        SloBenchError: less than the smallest.
    """
    each_gb = math.floor(gib * _GIB / gpus / _GB + 0.001)  # as many as were read, rounded
    if not each_gb:
        raise SloBenchError(
            f"kv_offload_gib = {gib:g} is less than 1 GB for each of {gpus} GPUs; SGLang takes at "
            f"least {math.ceil(gpus * _GB / _GIB * 100) / 100:g}"
        )
    return ["--enable-hierarchical-cache", "--hicache-size", str(each_gb)]


def _stages_refusal(device: str, system: str | None, stages: int) -> str:
    if system is None:
        return ""
    return (
        f"{system} inside SGLang has no pipeline stages, but the device map has "
        f"{stages}; use the system sglang, or vllm"
    )


SGLANG = ServerKind(
    name="sglang",
    title="SGLang",
    builds={
        "cpu": Build(_VERSION, _cpu_steps, _PROBE, newest_python=(3, 12), finish=_add_stand_ins),
        # Not tested; from the project's own instructions.
        "cuda": Build(_VERSION, from_index("sglang"), _PROBE, newest_python=(3, 12)),
    },
    distributions=("sglang",),
    argv=_argv,
    own_environ=_environ,
    health_path="/model_info",  # /health generates a token, which would count as load
    command='python -m sglang.launch_server --model-path "$MODEL"',
    programs=(("-m", "sglang.launch_server"), ("sglang", "serve")),
    images=("lmsysorg/sglang", "sglang"),
    flags=FLAGS,
    settle=settle,
    limits={
        "max_num_batched_tokens": ("chunked_prefill_tokens", "--chunked-prefill-size"),
        "max_num_seqs": ("max_running_requests", "--max-running-requests"),
    },
    memory_option="--mem-fraction-static",
    weight_options={"fp32": ("--dtype", "float32"), "fp8": ("--quantization", "fp8")},
    kv_options={"fp8": ("--kv-cache-dtype", "fp8_e4m3")},
    parallel_args=_parallel_args,
    kv_offload_args=kv_offload_args,
    gpu_options=("--tp-size", _STAGES, "--dp-size"),
    stages_option=_STAGES,
    stage_layers_variable="SGLANG_PP_LAYER_PARTITION",  # `sglang.srt.distributed.utils`
    stages_refusal=_stages_refusal,
    policy_refusal=refusal,
    policy_limitation=limitation,
    values_field=SGLANG_FIELD,
    plugin=EntryPoint(
        "slo_bench", f"{plugin.__name__}.sglang_plugin:register", "sglang.srt.plugins"
    ),
    hooks=targets,
    metrics=MetricNames(prefix="sglang:"),
    residuals_engine="sglang",
    loads_folders=True,
    config_option="--config",
)
