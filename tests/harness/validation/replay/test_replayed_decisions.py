"""Decisions inside a server beside those of a simulation.

The "server" is a simulation, whose decisions are written as the plugin writes them: the same
simulation again must treat every request alike, and a changed log must not.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from rich.console import Console

from slo_bench.harness.core.records.judging import judge
from slo_bench.harness.core.records.request_records import Outcome
from slo_bench.harness.engine.loop.traced_instance import EngineTrace, State
from slo_bench.harness.engine.simulator.simulate import simulate
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.experiments.explain.trace import MeasuredCell
from slo_bench.harness.policies.systems import system
from slo_bench.harness.results.cell_files import gzip_csv, request_columns
from slo_bench.harness.results.compared_decisions import TABLE, decisions_on, read_decisions
from slo_bench.harness.validation.replay import replayed_decisions as decisions
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.profiles.formulas import profiled_step_time
from slo_bench.predictors.profiles.profile_format import Source, write_profile
from slo_bench.predictors.profiles.whole_steps import LoggedStep, profile_of_steps
from slo_bench.predictors.specs import gpu, model
from slo_bench.reports.pages import decisions_page as page
from slo_bench.reports.pages.explain_page import (
    explain_measured,
    explanation_json,
    explanation_text,
)
from slo_bench.workloads.whole_file import write_whole
from slo_bench.workloads.workload import Workload

CELL = "edf_rate-8_seed-0"
REQUESTS = 80


def profile():
    """Step times that are linear in the batch."""
    steps = []
    for seqs in range(0, 24, 2):
        for tokens in (0, 40, 200, 400):
            chunks = [(0, tokens)] if tokens else []
            kv = 150 * seqs
            if seqs or chunks:
                time_s = 0.01 + 4e-4 * seqs + 1e-4 * tokens + 1e-6 * kv
                steps.append(LoggedStep(seqs, kv, chunks, time_s))
    source = Source(project="test", path="steps", version="1", note="made up")
    return profile_of_steps(steps, model="tiny", gpu="cpu", tp=1, source=source)


def requests():
    rng = np.random.default_rng(3)
    return Workload(
        np.cumsum(rng.exponential(1 / 8, REQUESTS)),
        rng.integers(100, 300, REQUESTS),
        rng.integers(20, 120, REQUESTS),
        ttft_slo_s=rng.choice([0.2, 2.0, 20.0], REQUESTS),
    )


def serve(name, load, kept):
    """Requests on a "server" with little KV memory, with a trace of its decisions."""
    place = Placement(
        model("llama-3.1-8b"), gpu("a100-80g"), block_size=32, fixed_num_gpu_blocks=40
    )
    trace = EngineTrace()
    served = system(name).with_parameters(max_num_seqs=16, max_num_batched_tokens=512)
    result = simulate(
        load,
        served,
        place,
        profiled_step_time(kept).model,
        overlong_requests="reject",
        trace=trace,
    )
    return result.records, trace


def log_lines(records, trace):
    """What the plugin would have written."""
    rid = "cmpl-slo-bench-{}-0-ab12"
    for request, changes in trace.instances[0].moves.items():
        before = None
        for time_s, state in changes:
            line = {"event": "step", "time_s": time_s, "decode_seqs": 0, "chunks": []}
            if state in (State.PREEMPTED, State.SWAPPED):
                by = "swap" if state is State.SWAPPED else "recompute"
                yield line | {"preempted": [{"id": rid.format(request), "by": by}]}
            elif before in (None, State.PREEMPTED, State.SWAPPED):
                yield line | {"entered": [rid.format(request)]}
            before = state
    for request in np.flatnonzero(records.outcome == Outcome.DROPPED).tolist():
        yield {"event": "away", "id": rid.format(request), "reason": "slo_bench: dropped"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder of a server with the policy `name`."""

    def made(name, change=lambda lines: lines):
        folder, load, kept = tmp_path / "run", requests(), profile()
        records, trace = serve(name, load, kept)
        columns = request_columns(load, records, judge(load, records))
        columns["sent_s"] = columns["arrival_s"]
        columns["server_prompt_tokens"] = load.prompt_tokens
        write_whole(folder / "requests" / f"{CELL}.csv.gz", gzip_csv(columns))
        write_profile(kept, folder / "validation" / f"{CELL}.toml")
        lines = sorted(log_lines(records, trace), key=lambda line: line.get("time_s", 0.0))
        text = "".join(json.dumps(line) + "\n" for line in change(lines)).encode()
        write_whole(folder / "servers" / "edf.steps.jsonl", [text])
        meta = {
            "server": "vllm",
            "model": "tiny",
            "gpu": "cpu",
            "system": name,
            "parameters": {},
            "engine_kwargs": {
                "max_num_seqs": 16,
                "max_num_batched_tokens": 512,
                "max_model_len": 1024,
                "async_scheduling": False,
                "enforce_eager": True,
            },
            "kv_cache": {"num_gpu_blocks": 41, "block_size": 32, "enable_prefix_caching": False},
            "steps": [{"file": "servers/edf.steps.jsonl", "begin": 0, "end": len(text)}],
        }
        (folder / "servers" / f"{CELL}.meta.json").write_text(json.dumps(meta))
        counts = decisions.counts_of(records, trace)
        names = ["cell", "backend", "requests", *counts]
        values = [CELL, "vllm", REQUESTS, *counts.values()]
        (folder / "cells.csv").write_text(f"{','.join(names)}\n{','.join(map(str, values))}\n")
        (spec,) = Experiment(systems=[name], rates=8, requests=REQUESTS, seeds=1).plan().cells
        monkeypatch.setattr(decisions, "planned_cells", lambda _: {CELL: spec})
        monkeypatch.setattr(
            "slo_bench.harness.validation.replay.measured_level.workload_of", lambda _: load
        )
        return folder

    return made


def test_compare_decisions_of_equal_runs_are_equal(run):
    folder = run("edf-drop")
    (level,) = decisions.compare_decisions(folder)
    assert level.simulated == level.server
    assert level.server["decisions_overtaking"] > 0
    assert level.server["decisions_release"] > 0
    assert level.server["preemptions_recompute"] > 0
    assert level.differing == {name: pytest.approx([]) for name in decisions.ASPECTS}
    (kept,) = read_decisions(folder)
    assert kept["alike"] == REQUESTS
    (line,) = page.beside_sentences([kept])
    assert f"{REQUESTS} of {REQUESTS} requests were treated alike." in line
    assert (
        page.beside_table([kept], "measured").groups[0][1][0][1:]
        == (page.beside_table([kept], "measured").groups[0][1][1][1:])
    )


def test_compare_decisions_counts_differences(run):
    def without_a_victim(lines):
        index = next(k for k, line in enumerate(lines) if line.get("preempted"))
        return [*lines[:index], *lines[index + 1 :]]

    folder = run("edf", without_a_victim)
    (level,) = decisions.compare_decisions(folder)
    (victim,) = level.differing["recomputations"].tolist()
    (kept,) = read_decisions(folder)
    assert kept["alike"] == REQUESTS - 1
    (line,) = page.beside_sentences([kept])
    assert f"different: recomputations of 1 ({victim})" in line
    both = decisions_on(folder, CELL, victim)
    assert both["simulated"]["recomputations"] == both["server"]["recomputations"] + 1
    explanation = explain_measured(MeasuredCell.read(folder, CELL), victim, both)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(explanation_text(explanation))
    assert "Inside the server: entered a batch as number" in captured.get()
    assert "They treated it differently." in captured.get()
    assert explanation_json(explanation)["decisions"] == both


def test_compare_decisions_without_request_ids_uses_counts(run):
    def renamed(lines):
        return [json.loads(json.dumps(line).replace("slo-bench-", "x")) for line in lines]

    folder = run("edf", renamed)
    (level,) = decisions.compare_decisions(folder)
    assert level.simulated == level.server
    (kept,) = read_decisions(folder)
    assert kept["alike"] is None
    assert "does not name requests" in page.beside_sentences([kept])[0]
    assert decisions_on(folder, CELL, 0) == {}


def test_compare_decisions_without_records_has_no_simulation(run):
    folder = run("edf")
    next((folder / "requests").iterdir()).unlink()
    (level,) = decisions.compare_decisions(folder)
    assert level.simulated is None
    assert "not simulated: its requests are not known" in level.note
    assert level.note in page.beside_sentences(read_decisions(folder))[0]


def test_compare_decisions_of_servers_without_policy_is_empty(run):
    folder = run("edf")
    (folder / "cells.csv").write_text("cell,backend,requests\nx,vllm,3\n")
    assert decisions.compare_decisions(folder) == []
    assert not (folder / TABLE).exists()
