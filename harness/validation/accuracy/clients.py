"""How those who measured closed loops sent their load, as far as their tables do not say.

InferenceX draws lengths evenly from 80 % to 100 % of the nominal ones and sends ten requests per
client (its published recipes). AIConfigurator's generator starts vLLM with steps of the prompt's
length, 1,500 and a token per client, and sends requests of equal lengths with AIPerf, which has 100
different prompts unless it is told otherwise (`--num-dataset-entries`) and warms up with two
requests per client: with vLLM's prefix cache most prompts of a sweep are computed once. vLLM keeps
KV in FP8 where the checkpoint says so. Rows with prompts of powers of two (Qwen3-32B) had neither.
Those of SGLang 0.5.1 stayed in step; those of later versions did not, for which lengths from 97 %
on stand (seen on the Qwen3-32B rows of H100).

The servers' options are those of InferenceX's recipes (`benchmarks/` there), where a recipe of the
model and GPU was found and they are not the engine's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ....predictors.model_spec import ModelSpec
from ....predictors.operators.server_version import version_numbers


@dataclass(frozen=True)
class Client:
    """The load generator of a closed loop.

    Attributes:
        shortest: the shortest length, as a share of the nominal one; lengths are drawn evenly.
        requests_each: requests of a client, one after the other; the first ones come together.
        stagger_s: seconds between the first requests of two clients.
        kv_dtypes: KV cache format of plain models by GPU, where it is not 16-bit.
        latent_kv_dtypes: the same of models with latent attention.
        async_scheduling: whether the next step is scheduled during the present one; None: by
            version.
        prompts: number of different prompts, which are sent in turn; None: all differ, or the
            server has no prefix cache.
        warm_up_each: requests of a client that are sent before those that are measured.
        step_tokens: tokens of a step of the server beyond a prompt's and one per client; None: the
            server's default.
    """

    shortest: float = 0.97
    requests_each: int = 10
    stagger_s: float = 0.0005
    kv_dtypes: Mapping[str, str] = field(default_factory=dict, hash=False)
    latent_kv_dtypes: Mapping[str, str] = field(default_factory=dict, hash=False)
    async_scheduling: bool | None = None
    prompts: int | None = None
    warm_up_each: int = 0
    step_tokens: int | None = None

    def token_budget(self, prompt_tokens: int, concurrency: int) -> int | None:
        """Tokens of a step of the server that this client's harness starts; None: the default."""
        if self.step_tokens is None:
            return None
        return prompt_tokens + self.step_tokens + concurrency

    def kv_dtype(self, gpu: str, model: ModelSpec) -> str:
        """KV cache format of a model on a GPU; 16 bits where no recipe says otherwise."""
        if model.latent:
            return self.latent_kv_dtypes.get(gpu, "bf16")
        return self.kv_dtypes.get(gpu, "bf16") if model.is_plain else "bf16"


@dataclass(frozen=True)
class Server:
    """Options of the server that a harness starts.

    Attributes:
        memory_share: share of a GPU's memory that it may use.
        step_tokens: tokens of a step; None: the client's, else the engine's default.
        step_prompts: tokens of a step as a multiple of the prompt's; 0: `step_tokens` say.
        kv_dtype: KV cache format; empty: the client's.
        polls: decode steps after which it looks for new requests: with up to 15 clients, and with
            more (`--scheduler-recv-interval` of SGLang).
        expert_parallel: whether experts are split over all GPUs, whatever the table says.
        experts_kernel: the kernel of experts that it is told to take; empty: its own choice.
    """

    memory_share: float = 0.9
    step_tokens: int | None = None
    step_prompts: int = 0
    kv_dtype: str = ""
    polls: tuple[int, int] = (1, 1)
    expert_parallel: bool = False
    experts_kernel: str = ""

    def token_budget(self, prompt_tokens: int) -> int | None:
        """Tokens of a step; None: the client's, else the engine's default."""
        return self.step_prompts * prompt_tokens or self.step_tokens

    def unseen_s(self, concurrency: int, step_s: float) -> float:
        """Mean seconds until the server looks for a request that has arrived, beyond one step."""
        few, many = self.polls
        return ((few if concurrency < 16 else many) - 1) / 2 * step_s


INFERENCEX = "inferencex"
AICONFIGURATOR = "aiconfigurator"
# KV formats of plain models are told by the rows whose TTFT shows how many requests found room;
# those of others by the published recipes (DeepSeek-R1: FP8 on B200 alone; gpt-oss: 16 bits).
_INFERENCEX = Client(
    shortest=0.8, kv_dtypes={"h200-141g": "fp8", "b200": "fp8"}, async_scheduling=True
)
_INFERENCEX_SGLANG = replace(_INFERENCEX, latent_kv_dtypes={"b200": "fp8"})
_OTHER = Client()
_IN_STEP = Client(shortest=1.0)
_VLLM = Client(shortest=1.0, step_tokens=1500)
_VLLM_AIPERF = replace(
    _VLLM, kv_dtypes={"h100-80g": "fp8", "h200-141g": "fp8"}, prompts=100, warm_up_each=2
)


_QWEN35 = "qwen3.5-397b-a17b"
_POLLS = (10, 30)
_MINIMAX = Server(step_prompts=2, kv_dtype="fp8")
# Options by engine, GPU, model, weights and tp (0: any other).
_RECIPES = {
    ("sglang", "h200-141g", "deepseek-r1", "fp8", 0): Server(0.82, 32768),
    ("sglang", "b200", "deepseek-r1", "fp8", 0): Server(0.82, 32768, polls=_POLLS),
    ("sglang", "b200", "deepseek-r1", "fp8", 4): Server(0.95, 8192, polls=_POLLS),
    ("sglang", "b200", "deepseek-r1", "nvfp4", 0): Server(0.85, 16384, polls=_POLLS),
    ("sglang", "b300", "deepseek-r1", "fp8", 0): Server(0.82, 32768, polls=_POLLS, kv_dtype="fp8"),
    ("sglang", "b300", "deepseek-r1", "fp8", 4): Server(0.95, 8192, polls=(10, 10), kv_dtype="fp8"),
    ("sglang", "b300", "deepseek-r1", "nvfp4", 0): Server(
        0.85, 16384, polls=_POLLS, kv_dtype="fp8"
    ),
    ("sglang", "h200-141g", _QWEN35, "fp8", 0): Server(0.8, 16384),
    ("sglang", "b200", _QWEN35, "bf16", 0): Server(0.82, 32768, polls=_POLLS),
    ("sglang", "b200", _QWEN35, "fp8", 0): Server(0.82, 32768, polls=_POLLS),
    ("sglang", "b200", _QWEN35, "nvfp4", 0): Server(0.85, 32768, polls=(30, 30)),
    ("sglang", "b300", _QWEN35, "bf16", 0): Server(0.82, 32768, polls=_POLLS),
    ("sglang", "b300", _QWEN35, "fp8", 0): Server(0.8, 16384, polls=(10, 10)),
    ("sglang", "b300", _QWEN35, "nvfp4", 0): Server(0.8, 32768, polls=_POLLS),
    ("sglang", "h200-141g", "glm-5", "fp8", 0): Server(0.85),
    ("sglang", "b200", "glm-5", "fp8", 0): Server(0.85, 32768),
    ("sglang", "b200", "glm-5", "nvfp4", 0): Server(0.9, 32768, polls=(10, 10)),
    ("sglang", "b300", "glm-5", "fp8", 0): Server(0.85, 32768, kv_dtype="fp8"),
    ("vllm", "h200-141g", "minimax-m2.5", "fp8", 0): Server(0.95),
    ("vllm", "h200-141g", "minimax-m2.5", "fp8", 8): Server(0.95, expert_parallel=True),
    ("vllm", "b200", "minimax-m2.5", "fp8", 0): _MINIMAX,
    ("vllm", "b200", "minimax-m2.5", "nvfp4", 0): _MINIMAX,
    ("vllm", "b300", "minimax-m2.5", "fp8", 0): _MINIMAX,
    ("vllm", "b300", "minimax-m2.5", "nvfp4", 0): _MINIMAX,
    ("vllm", "b200", "kimi-k2.5", "int4", 0): Server(0.97),
    ("vllm", "b200", "kimi-k2.5", "nvfp4", 0): Server(step_prompts=2, kv_dtype="fp8"),
    # `VLLM_MXFP4_USE_MARLIN=1`
    ("vllm", "h100-80g", "gpt-oss-120b", "mxfp4", 0): Server(experts_kernel="marlin"),
    ("vllm", "h200-141g", "gpt-oss-120b", "mxfp4", 0): Server(experts_kernel="marlin"),
}
_TRTLLM_SPECULATES = ("2026-01-14", "2026-02-05", "2026-02-06")
_SAME_RECIPES = {"deepseek-v3": "deepseek-r1"}
# Recipes before a version. Of MiniMax-M2.5 they turned expert parallelism on in every case (a guard
# that is always true: github.com/SemiAnalysisAI/InferenceX/pull/966; on H200 with tp 8), on B200
# with `VLLM_USE_FLASHINFER_MOE_FP8=0` and `VLLM_MOE_USE_DEEP_GEMM=0`, which leaves Triton. Marlin
# for gpt-oss came with vLLM 0.13 (pull/327); FP8 KV and steps of two prompts for MiniMax-M2.5 on
# B200 with vLLM 0.19 (pull/947).
_TRITON = Server(0.95, expert_parallel=True, experts_kernel="triton")
_EARLIER = {
    ("vllm", "b200", "minimax-m2.5", "fp8"): ((0, 19), _TRITON),
    ("vllm", "h100-80g", "gpt-oss-120b", "mxfp4"): ((0, 13), Server()),
    ("vllm", "h200-141g", "gpt-oss-120b", "mxfp4"): ((0, 13), Server()),
}


def server_of(
    harness: str, engine: str, version: str, gpu: str, model: str, weights: str, tp: int
) -> Server:
    """What is known of the options of the server that a harness started."""
    if harness != INFERENCEX:
        return Server()
    key = engine, gpu, _SAME_RECIPES.get(model, model), weights
    if version and key in _EARLIER:
        changed, earlier = _EARLIER[key]
        if version_numbers(version) < changed:
            return earlier
    return _RECIPES.get((*key, tp)) or _RECIPES.get((*key, 0), Server())


def other_setup(
    engine: str, gpu: str, model: str, weights: str, gpus: tuple[int, int], source: str
) -> str:
    """Why a row of InferenceX's is not of the set-up that its table tells; empty: it is.

    Its daily tables hold servers with and without multi-token prediction and do not say which;
    `perf-changelog.yaml` there tells the recipes that were run on a day (pull/392, 632, 642, 898,
    943). On 25 March 2026 DeepSeek-R1 ran on B200 with and without; the rows without are in the
    dumps of the database, which have no others. For four days 512 clients sent ten requests for
    each sequence that the server was told to hold at once, a number that is lost (mended in
    pull/310). `gpus`: tp and ep; `source`: a row's `silicon_data_source`.
    """
    if (engine, gpu, model) == ("vllm", "h100-80g", "gpt-oss-120b"):
        limit_lost = "silicon_concurrency=512" in source and "measured=2025-12-0" in source
        return "512 clients, an unknown limit of sequences" if limit_lost else ""
    if "source_file" not in source:
        return ""
    speculates = False
    if (engine, model) == ("trtllm", "deepseek-r1"):
        speculates = any(f"measured={day}" in source for day in _TRTLLM_SPECULATES)
    elif (engine, gpu, weights, model) == ("sglang", "b200", "fp8", "deepseek-r1"):
        speculates = gpus == (8, 1) and "measured=2026-03-25" in source
    elif (engine, gpu, weights, model) == ("sglang", "b200", "fp8", _QWEN35):
        speculates = gpus == (4, 1)
    return "speculative decoding" if speculates else ""


def client_of(harness: str, engine: str, version: str) -> Client:
    """The client of a harness before an engine; what is usual for an unknown harness."""
    if harness == INFERENCEX:
        return _INFERENCEX_SGLANG if engine == "sglang" else _INFERENCEX
    if engine == "vllm" and harness:
        return _VLLM_AIPERF if harness == AICONFIGURATOR else _VLLM
    in_step = harness and engine == "sglang" and version.startswith("0.5.1.")
    return _IN_STEP if in_step else _OTHER
