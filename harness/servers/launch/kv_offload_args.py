"""Options of vLLM and SGLang for KV of prefixes in host memory."""

from __future__ import annotations

import math

from ....workloads.errors import SloBenchError

_GIB, _GB = 2**30, 10**9


def kv_offload_args(backend: str, gib: float, gpus: int) -> list[str]:
    """Words of the command line of `backend` (vllm, sglang) for `gib` GiB of one server.

    vLLM's option counts GiB of the server. SGLang's counts whole GB (10^9 bytes) of each of its
    `gpus` processes (0.5.23, `hicache_size`); a part of a GB is left out.

    Raises:
        SloBenchError: less than SGLang's smallest.
    """
    if not gib:
        return []
    if backend == "vllm":
        return ["--kv-offloading-size", f"{gib:g}"]
    each_gb = math.floor(gib * _GIB / gpus / _GB)
    if not each_gb:
        raise SloBenchError(
            f"kv_offload_gib = {gib:g} is less than 1 GB for each of {gpus} GPUs; SGLang takes at "
            f"least {math.ceil(gpus * _GB / _GIB * 100) / 100:g}"
        )
    return ["--enable-hierarchical-cache", "--hicache-size", str(each_gb)]
