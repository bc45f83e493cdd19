"""Schema of an experiment file.

Every setting but the few that belong to the whole experiment may be a list: it is then an axis of
the experiment, every combination is run, and its column says which value a row had. `variants`
are named groups of settings that change together, each in place of the experiment's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ....predictors.dtypes import AUTO
from ....predictors.operators.server_version import ServerVersion
from ....workloads.errors import FileFormatError, SloBenchError
from ....workloads.trust import check as check_trust
from ...servers.server_kinds import BackendName
from .experiment_file import (
    TABLES,
    SettingError,
    all_anchored,
    line_of,
    read_toml,
    setting_error,
    to_toml,
)
from .setting import (
    ARRIVES,
    ARRIVES_MORE,
    COMPARED,
    NOT_ATTACHED,
    RUN,
    SERVES,
    SERVES_MORE,
    SIMULATOR,
    Axis,
    Count,
    CountFrom0,
    NotNegative,
    Positive,
    declared,
    listed,
    number_list,
    setting,
)
from .tables import ClientSchema, ServerSchema, TuningRecord

DEFAULT_REQUESTS = 1000  # where a workload has no end of its own
DEFAULT_SEEDS = 3
DEFAULT_REPLAY_SPEEDS = (0.5, 1.0, 2.0)
ALTERNATIVES = (
    ("rates", "replay_speeds", "load_factors"),
    ("requests", "duration_s"),
)  # one of each

Model = TypeVar("Model", bound=BaseModel)
Share = Annotated[float, Field(gt=0, le=1)]
PartShare = Annotated[float, Field(ge=0, lt=1)]
Parameter = bool | int | float | str
SloTable = dict[str, float | str | dict[str, float | str]]


def _short(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default load of the backend `torch` without a workload: about a minute on two
    cores.
    """
    load = {"workload": "alpaca", "seeds": 1, "systems": ("vllm", "sarathi")}
    if not any(name in settings for name in ("rates", "replay_speeds", "load_factors")):
        load["rates"] = (4.0, 8.0)
    if not any(name in settings for name in ("requests", "duration_s")):
        load["requests"] = 60
    return load


class ExperimentSchema(BaseModel):
    """An experiment as written: what is run, on what, under which load. Frozen.

    Where a setting is None: `tp` is the smallest that fits, `instances` 1 (or what the largest of
    its systems is made of), `gpus` = instances × tp × pp, `router` the system's own, `rates` a
    ladder up to the estimated capacity, which `refine` makes closer (a trace: its own arrivals at
    speeds 0.5, 1 and 2), `requests` 1,000 (a trace: all), `seeds` 3 (on real servers, and of a
    trace at its own arrivals: 1), `host_s` that of the step-time model, `num_gpu_blocks` and
    `num_cpu_blocks` what fits into the memory for them. With `backend = "openai"` there is one
    system, a name for what is attached (`server`); `model` is what the server serves (`served`),
    and `gpu` is `unknown`. With `backend = "torch"` a tiny Llama with random weights is the model
    if none is named, and `gpu` is the device (`cpu`, `cuda:0`); where no workload is named, a
    minute of `alpaca` is served (`_short`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, defer_build=True)

    # Systems.
    name: Annotated[str, Field(min_length=1)] = setting(
        RUN, "Name of the experiment, used for its run folder.", "experiment"
    )
    systems: Axis[str] = setting(
        COMPARED,
        "System by name, or FILE.py[:CLASS] with your own. May be repeated.",
        ("vllm", "sarathi", "sglang"),
        option="--system",
        short="-s",
        metavar="S",
        complete="systems",
        repeated=True,
        split=True,
        file="maybe",
    )
    parameters: dict[str, dict[str, Axis[Parameter]]] = {}  # by system
    combinations: Literal["all", "one-at-a-time"] = setting(
        COMPARED,
        "Combinations of a system's parameter values: all, or one-at-a-time, each value alone "
        "beside the first values of the others.",
        "all",
    )
    tuning: dict[str, TuningRecord] = {}  # how they were chosen, by system
    variants: dict[str, dict[str, Any]] = {}  # systems, parameters and deployment, by name
    published: str | None = setting(
        RUN,
        "Table of published results, shown in the report beside the measured ones.",
        metavar="FILE",
    )

    # Where requests come from.
    workload: Axis[str] = setting(
        ARRIVES,
        "Catalogue name, trace file, or mix(…). May be repeated.",
        ("sharegpt",),
        short="-w",
        metavar="W",
        complete="workloads",
        repeated=True,
        file="maybe",
        part="source",
    )
    arrivals: Axis[str] = setting(
        ARRIVES,
        "Arrival process: poisson, gamma(cv=2), concurrency(16), …. Replaces the arrivals of "
        "a trace.",
        ("poisson",),
        metavar="PROCESS",
        part="source",
    )
    redraw_arrivals: Axis[bool] = setting(
        ARRIVES_MORE,
        "Draw arrivals instead of using those of the trace; --arrivals implies it.",
        (False,),
        part="source",
    )
    prompt_tokens: Axis[str | None] = setting(
        ARRIVES_MORE,
        "Prompt lengths: a number or a distribution. Default: the workload's.",
        metavar="DIST",
        part="source",
    )
    output_tokens: Axis[str | None] = setting(
        ARRIVES_MORE,
        "Output lengths: a number or a distribution. Default: the workload's.",
        metavar="DIST",
        part="source",
    )
    sessions: Axis[str | None] = setting(
        ARRIVES_MORE,
        "Multi-turn conversations, as in sessions(turns=4, think_s=1), or tasks with sub-agents, "
        "as in agents(steps=8, spawn=0.2).",
        metavar="sessions(…)|agents(…)",
        part="source",
    )
    models: Axis[str | None] = setting(
        ARRIVES,
        "Models of the requests, as in fleet(llama-3.1-8b*4, qwen2.5-3b*4); for systems that "
        "serve several models on --gpus GPUs.",
        metavar="fleet(…)|zipf(…)|assign(…)",
        backends="several_models",
        part="source",
    )
    adapters: Axis[str | None] = setting(
        ARRIVES_MORE,
        "Low-rank adapters (LoRA) of the requests, as in zipf(16, exponent=1), in place of the "
        "models that a trace names; see --max-loras.",
        metavar="zipf(…)|fleet(…)|assign(…)",
        one_model=True,
    )
    trace_format: str | None = setting(
        ARRIVES_MORE,
        "Format of a trace file. Default: detected from its content.",
        metavar="FORMAT",
        complete="formats",
        part="source",
    )
    trace_columns: str | None = setting(
        ARRIVES_MORE,
        "A trace file's names of a workload's columns, as in arrival_s=timestamp:ms,"
        "prompt_tokens=usage.prompt_tokens. Default: by their names.",
        option="--columns",
        metavar="COLUMN=NAME[:UNIT],…",
        part="source",
    )
    rates: Axis[Positive] | None = setting(
        ARRIVES,
        "Offered rates in requests per second. Default: four up to the estimated capacity, then "
        "closer around those that are carried (--refine).",
        metavar="2,4,8|2:16:2",
        unit="req/s",
        read=number_list,
        condition=False,
    )
    refine: CountFrom0 | None = setting(
        ARRIVES_MORE,
        "Rounds of further rates, each between those at which a system's attainment falls below 99 "
        "and 90 %. Default: 2 where no rates are given.",
        condition=False,
        backends=SIMULATOR,
    )
    load_factors: Axis[Positive] | None = setting(
        ARRIVES,
        "Offered rates as multiples of the estimated capacity of each cell.",
        metavar="0.5,1,1.5",
        read=number_list,
        condition=False,
    )
    replay_speeds: Axis[Positive] | None = setting(
        ARRIVES,
        "Factor by which a trace's own arrivals are sped up. Default: for traces 0.5,1,2.",
        option="--replay-speed",
        metavar="0.5,1,2",
        read=number_list,
        condition=False,
    )

    # Deployment.
    model: Axis[str] = setting(
        SERVES,
        "Model: a catalogue name, or a folder with a config.json.",
        ("llama-3.1-8b",),
        short="-m",
        metavar="M",
        complete="models",
        file="maybe",
        role="workload",
    )
    gpu: Axis[str] = setting(
        SERVES, "GPU type.", ("a100-80g",), short="-g", metavar="G", complete="gpus", describes=True
    )
    tp: Axis[Count | None] = setting(
        SERVES,
        "GPUs that share each layer (tensor parallelism). Default: the fewest on which the "
        "model fits.",
        tunable=True,
        describes=True,
        one_model=True,
    )
    pp: Axis[Count] = setting(
        SERVES,
        "Pipeline stages of an instance (pipeline parallelism).",
        (1,),
        tunable=True,
        describes=True,
        one_model=True,
    )
    ep: Axis[Count] = setting(
        SERVES,
        "Groups of an instance's GPUs among which whole experts are shared out (expert "
        "parallelism); divides tp × dp. 1: every expert is on all of them.",
        (1,),
        tunable=True,
        describes=True,
    )
    dp: Axis[Count] = setting(
        SERVES,
        "Ranks of an instance, each with attention on tp GPUs and requests and KV of its own; all "
        "share out the experts (data-parallel attention). Limits of a batch hold for a rank.",
        (1,),
        tunable=True,
        describes=True,
        one_model=True,
    )
    expert_skew: Axis[NotNegative] = setting(
        SERVES_MORE,
        "Imbalance of experts: tokens choose expert i with probability proportional to i^-SKEW "
        "(0: balanced).",
        (0.0,),
        metavar="SKEW",
        backends=SIMULATOR,
    )
    speculation: Axis[str | None] = setting(
        SERVES_MORE,
        "Speculative decoding, METHOD:TOKENS@ACCEPTANCE: ngram, eagle, eagle3, mtp or a draft "
        "model, as eagle:3@0.8/0.6<64 (acceptance by position; off above 64 sequences), or "
        "ngram:4@RUN with the acceptance that a run folder or log holds. Simulated with step "
        "times from operators; backend vllm: ngram:4, eagle=FOLDER:3. Default: none.",
        metavar="S",
        file="within",
        backends="speculative_args",
    )
    max_loras: Axis[Count | None] = setting(
        SERVES_MORE,
        "Slots for adapters (LoRA) on an instance: the models that requests name are adapters of "
        "--model, and a batch has at most N of them. Default: no adapters.",
        tunable=True,
        backends="lora_args",
        one_model=True,
    )
    lora_rank: Axis[Count] = setting(
        SERVES_MORE, "Rank of every adapter.", (16,), backends="lora_args"
    )
    instances: Axis[Count | None] = setting(
        SERVES,
        "Number of instances, each a copy of the model. Default: 1.",
        tunable=True,
        describes=True,
        part="cell",
        one_model=True,
    )
    gpus: Axis[Count | None] = setting(
        SERVES, "Total number of GPUs: instances × dp × tp × pp.", describes=True, part="cell"
    )
    embed_instances: Axis[CountFrom0] = setting(
        SERVES_MORE,
        "Instances that serve only embedding requests; 0: every instance serves both.",
        (0,),
        tunable=True,
        part="cell",
    )
    router: Axis[str | None] = setting(
        SERVES,
        "Policy that selects the instance of a request. Default: the system's own.",
        metavar="R",
        complete="routers",
        tunable=True,
        part="cell",
        one_model=True,
    )
    failures: Axis[str | None] = setting(
        SERVES,
        "Instance failures: 2@30s..60s (instance 2 is down from 30 s to 60 s), or 0@90s (for "
        "good).",
        metavar="N@S..S,…",
        role="workload",
        backends=SIMULATOR,
        part="cell",
    )
    weight_dtype: Axis[str] = setting(
        SERVES_MORE,
        "Number format of the weights. auto: that of the model's checkpoint.",
        (AUTO,),
        metavar="D",
        tunable=True,
    )
    kv_dtype: Axis[str] = setting(
        SERVES_MORE,
        "Number format of the KV cache. auto: the checkpoint's, where it has scales, else bf16.",
        (AUTO,),
        metavar="D",
        tunable=True,
    )
    memory_share: Axis[Share] = setting(
        SERVES_MORE,
        "Share of GPU memory that an instance may use.",
        (0.9,),
        metavar="SHARE",
        tunable=True,
    )
    block_size: Axis[Count] = setting(
        SERVES_MORE, "Tokens in a KV cache block.", (16,), unit="tokens", tunable=True
    )
    host_memory_gib: Axis[NotNegative] = setting(
        SERVES_MORE, "Host memory for swapped KV, per GPU.", (4.0,), unit="GiB", tunable=True
    )
    kv_offload_gib: Axis[NotNegative] = setting(
        SERVES_MORE,
        "Host memory of an instance that keeps KV of prefixes beside the GPU's (vLLM's "
        "--kv-offloading-size, SGLang's --hicache-size). 0: none.",
        (0.0,),
        unit="GiB",
        tunable=True,
        backends="kv_offload_args",
    )
    kv_disk_gib: Axis[NotNegative] = setting(
        SERVES_MORE,
        "Disk of an instance that keeps KV of prefixes below --kv-offload-gib. 0: none.",
        (0.0,),
        unit="GiB",
        tunable=True,
        backends=SIMULATOR,
    )
    num_gpu_blocks: Axis[Count | None] = setting(
        SERVES_MORE,
        "KV cache blocks of an instance. Default: as many as fit into GPU memory.",
        tunable=True,
        one_model=True,
    )
    num_cpu_blocks: Axis[CountFrom0 | None] = setting(
        SERVES_MORE, "KV cache blocks in host memory, in place of --host-memory-gib.", tunable=True
    )
    host_s: Axis[NotNegative | None] = setting(
        SERVES_MORE,
        "Host (scheduling) time of an iteration. Default: that of the step-time model.",
        option="--host-time",
        unit="s",
    )
    prefill_overhead_s: Axis[NotNegative] = setting(
        SERVES_MORE,
        "Time added to every iteration that computes a prompt, an assumption.",
        (0.0,),
        unit="s",
        backends=SIMULATOR,
    )
    host_link: Axis[str | None] = setting(
        SERVES_MORE,
        "Link between GPU and host memory: a name of `slo-bench list links`, or 12gb/s@10us. "
        "Default: the GPU's.",
        metavar="LINK",
        backends=SIMULATOR,
    )
    profile: Axis[str | None] = setting(
        SERVES,
        "Profile with measured step times (see `slo-bench profile`); sets model, GPU and tp "
        "unless they are given. Default: `operators`, kernel times of AIConfigurator, or a fit "
        "where the GPU has none. `operators:ENGINE` (vllm, sglang, trtllm): its kernels and host "
        "times. `roofline`: coefficients fitted to kernels, else estimated.",
        metavar="FILE",
        file="maybe",
        backends=NOT_ATTACHED,
        one_model=True,
    )
    server_version: Axis[str | None] = setting(
        SERVES_MORE,
        "Version of the server: simulated (0.11 of vLLM, sglang-0.5.14), its host times and memory "
        f"(Default: the newest checked, {ServerVersion()}), or started, if several are installed.",
        metavar="VERSION",
    )
    front_end: Axis[Literal["server", "none"]] = setting(
        SERVES_MORE,
        "What requests pass before the engine and their answers after (HTTP, tokenizer, first "
        "chunk): that of the simulated server, or none. Profiles have the one that `calibrate` "
        "learned; `roofline` and device maps have none.",
        ("server",),
        backends=SIMULATOR,
    )
    embedder: Axis[str | None] = setting(
        SERVES,
        "Embedding model served beside the language model, for workloads with embedding requests. "
        "With vllm: folder of an encoder.",
        metavar="MODEL",
        file="maybe",
        backends=NOT_ATTACHED,
        role="workload",
        one_model=True,
    )
    device_map: Axis[str | None] = setting(
        SERVES,
        "Device map (layers to devices): a file written by `tune placement --out`, or the "
        "name of a shipped map. Replaces --gpu, --tp and --pp. With torch: a process for each "
        "stage; with vllm and sglang: pipeline stages.",
        metavar="MAP",
        file="maybe",
        backends=NOT_ATTACHED,
        one_model=True,
    )

    # How much of it, and what counts.
    requests: Axis[Count | None] = setting(
        ARRIVES,
        f"Requests in each cell. Default: {DEFAULT_REQUESTS}; all requests of a trace.",
        short="-n",
    )
    duration_s: Axis[Positive | None] = setting(
        ARRIVES, "Length of the arrival period in seconds, instead of --requests.", unit="s"
    )
    warmup_s: Axis[NotNegative] = setting(
        ARRIVES,
        "Warm-up: requests that arrive in the first S seconds are not counted.",
        (0.0,),
        unit="s",
    )
    warmup_share: Axis[PartShare] = setting(
        ARRIVES_MORE,
        "Warm-up as a share of the arrival period.",
        (0.0,),
        metavar="SHARE",
    )
    max_output_tokens: Axis[Count | None] = setting(
        ARRIVES_MORE,
        "Output limit (max_tokens) that requests declare. Default: the length of their output.",
        unit="tokens",
    )
    slo: Axis[str | SloTable] = setting(
        ARRIVES,
        "SLO: bounds of any of ttft, tpot, e2e, deadline, as 150ms, 2min or, in seconds, 0.15. "
        "e2e=uniform(1,350): drawn "
        "for each request; 'chat:ttft=0.5; batch:e2e=60': by request class; '': the trace's "
        "own. May be repeated to compare SLOs.",
        ("ttft=1,tpot=0.15",),
        metavar="ttft=1s,tpot=150ms",
        repeated=True,
    )
    slo_scale: Axis[Positive] = setting(
        ARRIVES, "Factor by which every SLO bound is multiplied.", (1.0,), metavar="F"
    )
    seeds: Count | None = setting(
        ARRIVES,
        f"Number of seeds (repetitions). Default: {DEFAULT_SEEDS}; on real servers 1.",
        condition=False,
    )
    seed: CountFrom0 = setting(ARRIVES, "First seed.", 0, condition=False)
    length_predictor: Axis[str] = setting(
        SERVES,
        "Predictor of output lengths for policies: oracle (the true length), "
        "noisy(accuracy=0.8), spread(correlation=0.5), constant(256), or a folder written by "
        "`slo-bench predict-train`.",
        ("oracle",),
        metavar="P",
        file="maybe",
        part="cell",
    )
    overlong_requests: Axis[Literal["error", "reject", "truncate"]] = setting(
        SERVES,
        "Handling of requests longer than the context or the KV cache. error: stop; reject: "
        "count them as missed, as a server rejects them; truncate: shorten them.",
        ("reject",),
        role="workload",
        backends=("simulated", "torch"),
        part="cell",
    )
    objective: Axis[str] = setting(
        ARRIVES_MORE,
        "Weights of the objective for workloads with embedding requests.",
        ("alpha=1,beta=1,gamma=1",),
        option="--objective-weights",
        metavar="alpha=1,beta=1,gamma=1",
    )

    # Execution.
    backend: BackendName = setting(
        RUN,
        "Backend: the simulator, a real server, or the built-in PyTorch engine (torch). "
        "Default: simulated; with --base-url openai.",
        "simulated",
        short="-b",
        role="deployment",
        condition=True,
    )
    client: ClientSchema = ClientSchema()  # of real servers
    server: ServerSchema = ServerSchema()  # where we start them
    records: Literal["auto", "csv", "parquet", "none"] = setting(
        RUN,
        "Format of the per-request records. Default: Parquet if pyarrow is installed, else CSV.",
        "auto",
    )

    @model_validator(mode="before")
    @classmethod
    def _attached(cls, settings: Any) -> Any:
        """Set the defaults that depend on the backend: names for a running server, a tiny model
        for torch.
        """
        if isinstance(settings, dict) and settings.get("backend") == "openai":
            return {"systems": "server", "model": "served", "gpu": "unknown", **settings}
        if isinstance(settings, dict) and settings.get("backend") == "torch":
            defaults = {"model": "tiny-llama", "gpu": "cpu"}
            return {**defaults, **({} if "workload" in settings else _short(settings)), **settings}
        return settings

    @field_validator("*")
    @classmethod
    def _no_repeats(cls, value: object) -> object:
        if isinstance(value, tuple):
            keys: set[int | float | str] = set()
            for entry in value:
                # Tables cannot be hashed, and numbers are equal whatever their type is.
                key = entry if isinstance(entry, int | float) else repr(entry)
                if key in keys:
                    raise ValueError(f"has {entry!r} twice")
                keys.add(key)
        return value

    @model_validator(mode="after")
    def _agreement(self) -> ExperimentSchema:
        for names in ALTERNATIVES:
            present = [name for name in names if any(getattr(self, name) or ())]
            if len(present) > 1:
                raise ValueError(f"{' and '.join(present)} contradict: give one of them")
        for table in ("parameters", "tuning"):
            strangers = set(getattr(self, table)) - set(self.systems)
            if strangers:
                raise ValueError(
                    f"{table} are set for {min(strangers)!r}, which is not among the systems"
                )
        for name, changes in self.variants.items():
            self._check_variant(name, changes)
        return self

    def _check_variant(self, name: str, changes: Mapping[str, Any]) -> None:
        declarations = declared(type(self))
        allowed = [axis for axis in self.axes() if declarations[axis].role == "deployment"]
        for setting_name in changes:
            if setting_name not in {"systems", "parameters", *allowed}:
                raise ValueError(
                    f"variant {name} sets {setting_name}: a variant has systems, parameters and "
                    f"settings of the deployment ({', '.join(allowed)})"
                )
        try:
            self.variant(name)
        except SettingError as error:
            raise ValueError(f"variant {name}: {error}") from None

    def variant(self, name: str) -> Self:
        """The experiment with the settings of one of its variants, and without variants."""
        changes = self.variants[name]
        plain = {field: getattr(self, field) for field in type(self).model_fields}
        settings = {**plain, **changes, "variants": {}}
        systems = listed(settings["systems"])
        settings["parameters"] = {
            **{system: choices for system, choices in self.parameters.items() if system in systems},
            **changes.get("parameters", {}),
        }
        settings["tuning"] = {
            system: record for system, record in self.tuning.items() if system in systems
        }
        return type(self)(**settings)

    def each_variant(self) -> dict[str, Self]:
        """The experiment as each of its variants; itself as "" where it has none."""
        return {name: self.variant(name) for name in self.variants} or {"": self}

    def refuse_variants(self, command: str) -> None:
        """Raise SloBenchError if there are variants, for a command that searches one experiment."""
        if self.variants:
            raise SloBenchError(
                f"{command} takes no variants ({', '.join(self.variants)}): take one of them, "
                "experiment.variant(NAME)"
            )

    def check_effects(self, tables: bool = True) -> None:
        """Reject settings that the backend would ignore; in `tables`, too (client, server).

        Not part of what a file must keep: the backend may be named on the command line alone, and
        `tune` measures on servers what it found in simulation.

        Raises:
            SloBenchError: there is one.
        """
        for path, declaration in declared(type(self)).items():
            table, _, name = path.rpartition(".")
            value = getattr(getattr(self, table) if table else self, name)
            if declaration.is_default(value) or (table and not tables):
                continue
            called = path if not declaration.option else f"{path} ({declaration.option})"
            if declaration.backends and self.backend not in declaration.backends:
                raise SloBenchError(
                    f"{called} has no effect with backend {self.backend}, only with "
                    f"{', '.join(declaration.backends)}: leave it out"
                )
            if self.backend == "openai" and declaration.setting.describes and len(value) > 1:
                raise SloBenchError(
                    f"{called} has {len(value)} values, but a server that runs already has one "
                    "deployment: give the one that it has"
                )

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise setting_error(error, type(self)) from None

    @classmethod
    def axes(cls) -> tuple[str, ...]:
        """The settings of which every combination is run."""
        declarations = declared(cls).values()
        return tuple(
            declaration.path
            for declaration in declarations
            if declaration.several
            and declaration.path in cls.model_fields
            and declaration.path != "systems"
        )

    @classmethod
    def load(cls, path: str | Path, **changes: object) -> Self:
        """The experiment in a TOML file, with `changes` in place of what the file says.

        Relative paths in the file start at its folder.

        Raises:
            FileFormatError: the file cannot be read, or a setting in it is wrong (with its line).
            SloBenchError: a change is wrong.
        """
        path = Path(path)
        table, text = read_toml(path)
        table |= all_anchored(table, path.resolve().parent, cls)
        for code in _policy_files(table):
            check_trust(code, f"{path} names {code}, a policy file that runs with your rights")
        try:
            whole = cls(**table)
        except SettingError as error:
            line = line_of(text, error.location)
            raise FileFormatError(path, line, str(error)) from None
        return cls(**{**table, **changes}) if changes else whole

    def anchored(self, folder: Path) -> Self:
        """The same with every relative path made absolute, starting at `folder`."""
        plain = {name: getattr(self, name).__dict__ for name in TABLES}
        anchored_settings = all_anchored(self.__dict__ | plain, folder, type(self))
        for name in TABLES:
            anchored_settings[name] = _changed(getattr(self, name), anchored_settings[name])
        return _changed(self, anchored_settings)

    def to_toml(self) -> str:
        """The experiment as a file; a setting with one value is written without brackets."""
        table: dict[str, object] = {}
        axes = self.axes()
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name == "parameters":
                value = {
                    system: {parameter: _single(v) for parameter, v in parameters.items()}
                    for system, parameters in value.items()
                }
            elif name == "tuning":
                value = {
                    system: record.model_dump(exclude_defaults=True)
                    for system, record in value.items()
                }
                value = value or None
            elif name in TABLES:
                value = value.model_dump(exclude_defaults=True)
            elif name in axes:
                value = _single(value)
            table[name] = value
        return to_toml(table)


def parameter_combinations(
    experiment: ExperimentSchema, system: str
) -> Iterator[dict[str, Parameter]]:
    """The values of a system's parameters in each of its configurations, in order."""
    choices = experiment.parameters.get(system, {})
    if experiment.combinations == "all":
        for values in itertools.product(*choices.values()):
            yield dict(zip(choices, values, strict=True))
        return
    first = {name: values[0] for name, values in choices.items()}
    yield first
    for name, values in choices.items():
        yield from ({**first, name: value} for value in values[1:])


def _changed(model: Model, values: Mapping[str, Any]) -> Model:
    """With other values; those that are as they were do not count as set."""
    update = {name: value for name, value in values.items() if value != getattr(model, name)}
    return model.model_copy(update=update)


def _single(value: object) -> object:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _policy_files(table: Mapping[str, Any]) -> list[str]:
    """The Python files among the systems of an experiment that was not checked yet."""
    variants = table.get("variants")
    of_variants = variants.values() if isinstance(variants, Mapping) else ()
    named = [
        name
        for section in (table, *of_variants)
        if isinstance(section, Mapping)
        for name in listed(section.get("systems"))
    ]
    files = (name.partition(":")[0] for name in named if isinstance(name, str))
    return [file for file in dict.fromkeys(files) if file.endswith(".py")]
