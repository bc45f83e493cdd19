"""Arguments of a started server: parallelism, speculation, KV offload, and secrets in them.

Options are those of vLLM 0.27 and 0.32 and of SGLang 0.5.23.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence

from ....predictors.speculation import Speculation
from ....workloads.errors import SloBenchError

_SIZES = {
    "vllm": ("--tensor-parallel-size", "--pipeline-parallel-size"),
    "sglang": ("--tp-size", "--pp-size"),
}
PARALLEL_SERVERS = tuple(_SIZES)
_MOST_SEQS = 1 << 20  # more than any batch
_GIB, _GB = 2**30, 10**9
_SECRET = re.compile(
    r"--?(?:.*[-_])?(?:api[-_]?key|password|secret|(?:hf|auth|access|hub)[-_]?token)", re.IGNORECASE
)
_VARIABLE = re.compile(r"(--?[\w-]+=)?\$(\w+)")


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


def speculative_args(speculation: Speculation | None) -> list[str]:
    """Words of vLLM's command line (`vllm.config.SpeculativeConfig`).

    The acceptance is the server's own.

    Raises:
        SloBenchError: EAGLE without the folder of its head.
    """
    if speculation is None:
        return []
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
        config["num_speculative_tokens_per_batch_size"] = [*ranges, [max_seqs + 1, _MOST_SEQS, 0]]
    return [f"--speculative-config={json.dumps(config)}"]


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


def check_no_secrets(args: Sequence[str]) -> None:
    """Reject a secret written in plain text, since run folders and logs keep the arguments.

    Raises:
        SloBenchError: with what to write instead.
    """
    for place, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if not _SECRET.fullmatch(name):
            continue
        value = value if equals else next(iter(args[place + 1 :]), "")
        if value and not _VARIABLE.fullmatch(value):
            raise SloBenchError(
                f"the server argument {name} holds a secret, and logs and run folders keep "
                f"arguments as written; put it into an environment variable and write "
                f"--server-arg '{name}=$THAT_VARIABLE'"
            )


def expanded(argv: Sequence[str]) -> list[str]:
    """The arguments with `$NAME` or `--option=$NAME` replaced by the environment variable NAME.

    Raises:
        SloBenchError: a variable is not set.
    """
    return [_VARIABLE.sub(_value, arg) if _VARIABLE.fullmatch(arg) else arg for arg in argv]


def _value(match: re.Match[str]) -> str:
    name = match[2]
    if not os.environ.get(name):
        raise SloBenchError(f"the environment variable {name} of a server argument is not set")
    return (match[1] or "") + os.environ[name]
