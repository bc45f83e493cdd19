"""Options of vLLM and SGLang for the parallelism of one server."""

from __future__ import annotations

from collections.abc import Sequence

from ....workloads.errors import SloBenchError

_SIZES = {
    "vllm": ("--tensor-parallel-size", "--pipeline-parallel-size"),
    "sglang": ("--tp-size", "--pp-size"),
}
PARALLEL_SERVERS = tuple(_SIZES)


def stage_layers(backend: str, layers: Sequence[int]) -> dict[str, str]:
    """Environment of a server whose pipeline stages have so many layers each; empty: equal shares.

    vLLM: `vllm.distributed.utils.get_pp_indices`; SGLang: `sglang.srt.distributed.utils`.
    """
    if len(layers) < 2:
        return {}
    return {f"{backend.upper()}_PP_LAYER_PARTITION": ",".join(map(str, layers))}


def parallel_args(backend: str, tp: int = 1, pp: int = 1, ep: int = 1, dp: int = 1) -> list[str]:
    """Words of the command line of `backend` (vllm, sglang); what is 1 is left out.

    `tp` counts the GPUs of a data-parallel rank, as vLLM's option does; SGLang's counts all.

    Raises:
        SloBenchError: vLLM shares experts out to all GPUs or none.
    """
    words = []
    sizes = (tp * dp if backend == "sglang" else tp, pp)
    for option, size in zip(_SIZES[backend], sizes, strict=True):
        if size > 1:
            words += [option, str(size)]
    if backend == "sglang":
        words += ["--dp-size", str(dp), "--enable-dp-attention"] if dp > 1 else []
        return [*words, "--ep-size", str(ep)] if ep > 1 else words
    words += ["--data-parallel-size", str(dp)] if dp > 1 else []
    if ep == 1:
        return words
    if ep != tp * dp:
        raise SloBenchError(
            f"vLLM shares experts out to all GPUs: ep must be 1 or {tp * dp}, not {ep}"
        )
    return [*words, "--enable-expert-parallel"]
