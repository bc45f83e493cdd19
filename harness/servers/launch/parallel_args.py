"""Options of vLLM and SGLang for the parallelism of one server."""

from __future__ import annotations

from ....workloads.errors import SloBenchError

_SIZES = {
    "vllm": ("--tensor-parallel-size", "--pipeline-parallel-size"),
    "sglang": ("--tp-size", "--pp-size"),
}
PARALLEL_SERVERS = tuple(_SIZES)


def parallel_args(backend: str, tp: int = 1, pp: int = 1, ep: int = 1) -> list[str]:
    """Words of the command line of `backend` (vllm, sglang); what is 1 is left out.

    Raises:
        SloBenchError: vLLM shares experts out to all GPUs or none.
    """
    words = []
    for option, size in zip(_SIZES[backend], (tp, pp), strict=True):
        if size > 1:
            words += [option, str(size)]
    if ep == 1:
        return words
    if backend == "sglang":
        return [*words, "--ep-size", str(ep)]
    if ep != tp:
        raise SloBenchError(f"vLLM shares experts out to all GPUs: ep must be 1 or {tp}, not {ep}")
    return [*words, "--enable-expert-parallel"]
