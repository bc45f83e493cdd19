"""What decides AdaptiveLLM's Tables 3 and 4: the suite's set-up, one assumption changed at a time.

    python tests/benchmarks/adaptivellm_assumptions.py [MODEL] [SEEDS] [ONLY]

Prints, for every assumption and prompt length, how much faster AdaptiveLLM is than vLLM and
vLLM-swap, how often each preempts, and the mean weighted turnaround. ONLY: no assumption but
those whose names contain it. docs/papers.md quotes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from slo_bench import Experiment
from slo_bench.harness.core.policy import Key
from slo_bench.harness.core.records import Result
from slo_bench.harness.core.state import RequestState
from slo_bench.harness.core.view import View
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.experiments.execution.cells import workload_of
from slo_bench.harness.experiments.execution.lookup import placed
from slo_bench.harness.experiments.execution.specs import CellSpec
from slo_bench.harness.policies.adaptivellm import AdaptiveLlm
from slo_bench.harness.policies.systems import System, system
from slo_bench.harness.results.metrics import weighted_turnaround
from slo_bench.predictors.placement import Placement
from slo_bench.workloads.source import load_source
from slo_bench.workloads.workload import Workload

GB_PER_S = 1e9
DATASETS = ("Chatbot", "Alpaca", "Summary")  # in the order of the suite's prompt_tokens
SYSTEMS = ("vllm-v0", "vllm-swap", "adaptivellm")


@dataclass(frozen=True)
class HighestFirst(AdaptiveLlm):
    """Algorithm 1 to the letter: the highest priority is preempted."""

    def victim_key(self, r: RequestState, view: View) -> Key:
        return -self.priority(r, view)


@dataclass(frozen=True)
class Linked(Placement):
    """A placement whose blocks move at a given speed."""

    swap_bytes_per_s: float = GB_PER_S

    @property
    def swap_s_per_block(self) -> float:
        return self.block_bytes_per_gpu / self.swap_bytes_per_s


@dataclass(frozen=True)
class Assumptions:
    """What the paper leaves open; the defaults are the suite's."""

    name: str
    swap_gb_per_s: float | None = None
    prefill_step_ms: float = 0.0  # more than the step-time model says
    step_ms: float = 0.0  # the same for every step
    answers: str = "64"  # all 64 tokens; "alpaca": lengths of Alpaca's answers, cut at 64
    output_tokens: int = 64
    host_full: str = "admit-none"
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of AdaptiveLLM
    max_num_seqs: int = 256
    victim: str = "lowest"


UNFAIR = {"fair": False}  # memory decisions alone
CASES = (
    Assumptions("the suite's"),
    Assumptions("swap at 5 GB/s", swap_gb_per_s=5),
    Assumptions("swap at 12 GB/s", swap_gb_per_s=12),
    Assumptions("swap free of charge", swap_gb_per_s=1e6),
    Assumptions("prefill step + 10 ms", prefill_step_ms=10),
    Assumptions("prefill step + 20 ms", prefill_step_ms=20),
    Assumptions("prefill step + 40 ms", prefill_step_ms=40),
    Assumptions("every step + 20 ms", step_ms=20),
    Assumptions("answers as Alpaca's", answers="alpaca"),
    Assumptions("host full: recompute", host_full="recompute"),
    Assumptions("host full: stall", host_full="stall"),
    Assumptions("AdaptiveLLM unfair", parameters=UNFAIR),
    Assumptions("Alg. 1 to the letter", victim="highest"),
    Assumptions("unfair, swap free of charge", parameters=UNFAIR, swap_gb_per_s=1e6),
    Assumptions("Alg. 2 to the letter", parameters={"groups": "mean-priority"}),
    Assumptions("never swaps, fair", parameters={"adaptive": False}),
    *(
        Assumptions(f"unfair, prefill step + {ms} ms", parameters=UNFAIR, prefill_step_ms=ms)
        for ms in (10, 20, 30, 40)
    ),
    Assumptions("unfair, swap at 12 GB/s", parameters=UNFAIR, swap_gb_per_s=12),
    Assumptions(
        "unfair, prefill step + 30 ms, 12 GB/s",
        parameters=UNFAIR,
        prefill_step_ms=30,
        swap_gb_per_s=12,
    ),
    *(
        Assumptions(
            f"the most against vLLM-swap, {gb_per_s} GB/s",
            parameters=UNFAIR,
            swap_gb_per_s=gb_per_s,
        )
        for gb_per_s in (1, 2, 5, 12, 24.6)
    ),
    Assumptions("future work: overlapped swap", parameters={"overlap_swap": True}),
    Assumptions("future work: chunked recomputation", parameters={"chunk_tokens": 512}),
    Assumptions("future work: both", parameters={"overlap_swap": True, "chunk_tokens": 512}),
    Assumptions(
        "future work: overlapped swap, unfair", parameters={"overlap_swap": True, "fair": False}
    ),
    *(Assumptions(f"batch cap {n}", max_num_seqs=n) for n in (8, 16, 32, 64, 128)),
    *(Assumptions(f"{n} output tokens", output_tokens=n) for n in (16, 32, 128, 256)),
)


def systems_under(a: Assumptions) -> dict[str, System]:
    """The three systems."""
    cap = {"max_num_seqs": a.max_num_seqs}
    swap = system("vllm-swap").with_parameters(**cap, host_full=a.host_full)
    ours = system("adaptivellm").with_parameters(**cap, **a.parameters)
    if a.victim == "highest":
        ours = System("adaptivellm", HighestFirst(max_num_seqs=a.max_num_seqs))
    return {
        "vllm-v0": system("vllm-v0").with_parameters(**cap),
        "vllm-swap": swap,
        "adaptivellm": ours,
    }


def workload_under(a: Assumptions, cell: CellSpec) -> Workload:
    """The suite's requests with other answers."""
    made = workload_of(cell)
    output = np.full(len(made), a.output_tokens)
    if a.answers == "alpaca":
        drawn = load_source("alpaca").make(rate_rps=1.0, requests=len(made), seed=cell.seed)
        output = np.minimum(drawn.output_tokens, a.output_tokens)
    longest = 2016 - a.output_tokens  # what 128 blocks less watermark and headroom leave
    prompts = np.minimum(made.prompt_tokens, longest)
    most = np.full(len(made), a.output_tokens)
    return replace(made, prompt_tokens=prompts, output_tokens=output, max_output_tokens=most)


def run(a: Assumptions, cell: CellSpec) -> dict[str, Result]:
    """The three systems on one prompt length."""
    place = placed(cell.placement)
    placement = place.placement
    if a.swap_gb_per_s is not None:
        same = {f.name: getattr(placement, f.name) for f in fields(placement)}
        placement = Linked(**same, swap_bytes_per_s=a.swap_gb_per_s * GB_PER_S)
    model = place.step_time.model
    step_time = replace(
        model,
        prefill_s=model.prefill_s + a.prefill_step_ms / 1e3,
        memory_s=model.memory_s + a.step_ms / 1e3,
        compute_s=model.compute_s + a.step_ms / 1e3,
    )
    workload = workload_under(a, cell)
    return {
        name: simulate(workload, one, placement, step_time)
        for name, one in systems_under(a).items()
    }


def cells(model: str, seeds: int) -> Iterator[tuple[str, list[CellSpec]]]:
    """The suite's cells of one model and system, by prompt length."""
    planned = Experiment.suite("adaptivellm").plan()
    found = [c for c in planned.cells if c.placement.model == model and c.system == "vllm-v0"]
    lengths = dict.fromkeys(c.workload.prompt_tokens for c in found)
    for dataset, length in zip(DATASETS, lengths, strict=True):
        yield dataset, [c for c in found if c.workload.prompt_tokens == length][:seeds]


def figures(results: Mapping[str, list[Result]]) -> str:
    """One line of figures, means over the seeds."""

    def mean(name: str, figure: Any) -> float:
        return float(np.mean([figure(r) for r in results[name]]))

    seconds = {n: mean(n, lambda r: np.nanmax(r.records.finish_s)) for n in SYSTEMS}
    swaps = {n: mean(n, lambda r: r.records.preemptions_swap.sum()) for n in SYSTEMS}
    again = {n: mean(n, lambda r: r.records.preemptions_recompute.sum()) for n in SYSTEMS}
    turnaround = {
        n: mean(n, lambda r: weighted_turnaround(r.records, np.isfinite(r.records.finish_s)))
        for n in SYSTEMS
    }
    ours, v0, swap = "adaptivellm", "vllm-v0", "vllm-swap"
    change = 100 * (turnaround[ours] / turnaround[v0] - 1)
    return (
        f"{seconds[v0] / seconds[ours]:.2f} / {seconds[swap] / seconds[ours]:.2f} | "
        f"{again[ours]:.0f} + {swaps[ours]:.0f} | {again[v0]:.0f} | "
        f"{swaps[swap]:.0f} + {again[swap]:.0f} | "
        f"{turnaround[ours]:.1f}, {turnaround[v0]:.1f}, {turnaround[swap]:.1f} ({change:+.0f} %)"
    )


def main(model: str = "opt-13b", seeds: str = "1", only: str = "") -> None:
    print(
        "assumption | dataset | speed-up over vLLM / vLLM-swap | AdaptiveLLM recomputes + swaps | "
        "vLLM recomputes | vLLM-swap swaps + recomputes | weighted turnaround: ours, v, s"
    )
    for case in (c for c in CASES if only in c.name):
        for dataset, chosen in cells(model, int(seeds)):
            runs = [run(case, cell) for cell in chosen]
            results = {name: [r[name] for r in runs] for name in SYSTEMS}
            print(f"{case.name} | {dataset} | {figures(results)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
