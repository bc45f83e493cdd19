"""Acceptance of speculation from counters, run folders and logs."""

from __future__ import annotations

import pytest

from slo_bench.harness.experiments.config.schema import ExperimentSchema
from slo_bench.harness.experiments.execution.experiment_plan import plan
from slo_bench.harness.results.acceptance import (
    speculation_counts,
    speculation_figures,
    with_acceptance,
)
from slo_bench.predictors.speculation import parse_speculation
from slo_bench.workloads.errors import SloBenchError

LABELS = 'engine="0",model_name="tiny"'


def metrics(drafts, proposed, by_position, output, first):
    lines = [
        "# TYPE vllm:spec_decode_num_drafts counter",
        f"vllm:spec_decode_num_drafts_total{{{LABELS}}} {drafts}.0",
        f"vllm:spec_decode_num_drafts_created{{{LABELS}}} 1.7e+09",
        f"vllm:spec_decode_num_draft_tokens_total{{{LABELS}}} {proposed}.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{LABELS}}} {sum(by_position)}.0",
    ]
    for position, accepted in enumerate(by_position):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f'{name}{{{LABELS},position="{position}"}} {accepted}.0')
    lines += [
        f"vllm:generation_tokens_total{{{LABELS}}} {output}.0",
        f"vllm:time_to_first_token_seconds_count{{{LABELS}}} {first}.0",
    ]
    return "\n".join(lines) + "\n"


BEFORE, AFTER = metrics(10, 20, [5, 0], 30, 5), metrics(110, 220, [85, 40], 355, 10)


def test_speculation_figures_of_counter_growth_by_hand():
    # 325 tokens, 5 of them first and 120 accepted: sequences took 200 steps, half with proposals.
    assert speculation_figures([BEFORE], [AFTER]) == {
        "server_drafts": 100,
        "server_draft_tokens": 200,
        "server_accepted_tokens": 120,
        "server_accepted_1": 80,
        "server_accepted_2": 40,
        "server_sequence_steps": 200,
        "acceptance_rate": 0.6,
    }
    plain = f"vllm:generation_tokens_total{{{LABELS}}} 30.0\n"
    assert speculation_figures([plain], [plain]) == {}
    assert not speculation_counts(plain)


def acceptance_of(source):
    return str(with_acceptance(parse_speculation(f"ngram:2@{source}<64")))


def test_acceptance_of_a_run_folder(tmp_path):
    figures = speculation_figures([BEFORE], [AFTER])
    rows = [["cell", *figures], ["one", *figures.values()], ["two", *figures.values()]]
    table = "\n".join(",".join(map(str, row)) for row in rows) + "\n"
    (tmp_path / "cells.csv").write_text(table)
    # 100 drafts in 200 steps; 80 of them pass position 1, 40 of those position 2.
    assert acceptance_of(tmp_path) == "ngram:2@0.8/0.5*0.5<64"
    experiment = ExperimentSchema(
        systems="vllm", gpu="h100-80g", rates=1, speculation=f"ngram:2@{tmp_path}<64"
    )
    planned = plan(experiment)
    assert planned.resolved.speculation == ("ngram:2@0.8/0.5*0.5<64",)
    assert {cell.placement.speculation for cell in planned.cells} == {"ngram:2@0.8/0.5*0.5<64"}
    settled = parse_speculation(acceptance_of(tmp_path))
    assert settled.tokens_per_step == pytest.approx((200 + 120) / 200)


def test_acceptance_of_one_method_counts_its_own_cells_only(tmp_path):
    """Of each only its own cells count."""
    cells = {"none": [0, 0, 0], "ngram:2": [100, 80, 40], "to/draft:2": [100, 50, 10]}
    rows = ["cell,speculation,server_drafts,server_accepted_1,server_accepted_2"]
    rows += [
        f"c{k},{name},{','.join(map(str, counters))}"
        for k, (name, counters) in enumerate(cells.items())
    ]
    (tmp_path / "cells.csv").write_text("\n".join(rows) + "\n")
    assert acceptance_of(tmp_path) == "ngram:2@0.8/0.5<64"
    draft = with_acceptance(parse_speculation(f"to/draft:2@{tmp_path}"))
    assert draft.acceptance == (0.5, 0.2)
    with pytest.raises(SloBenchError, match="with ngram, to/draft but none with eagle"):
        with_acceptance(parse_speculation(f"eagle:2@{tmp_path}"))


def test_acceptance_of_a_metrics_file(tmp_path):
    (tmp_path / "metrics").write_text(BEFORE)
    # 10 drafts, 5 pass position 1, none position 2; 30 - 5 - 5 steps.
    assert acceptance_of(tmp_path / "metrics") == "ngram:2@0.5/0*0.5<64"


def test_acceptance_of_a_server_log(tmp_path):
    line = (
        "INFO 01-01 00:00:00 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 2.20, "
        "Accepted throughput: 1.00 tokens/s, Drafted throughput: 1.00 tokens/s, Accepted: 120 "
        "tokens, Drafted: {} tokens, Per-position acceptance rate: {}, Avg Draft acceptance rate: "
        "60.0%\n"
    )
    text = line.format(100, "0.900, 0.600") + line.format(300, "0.500, 0.200")
    (tmp_path / "server.log").write_text(text)
    # Weighted by proposed tokens: 0.6 pass position 1 and 0.3 both.
    assert acceptance_of(tmp_path / "server.log") == "ngram:2@0.6/0.5<64"


def test_sources_without_acceptance_are_refused(tmp_path):
    (tmp_path / "cells.csv").write_text("cell,attainment\none,1.0\n")
    with pytest.raises(SloBenchError, match="no counts of speculation"):
        acceptance_of(tmp_path)
    with pytest.raises(SloBenchError, match="cannot be read"):
        acceptance_of(tmp_path / "nowhere")
