"""Sessions on real servers: a follow-up holds the real answer, so the prefix cache has it."""

from __future__ import annotations

import csv
import gzip

import pytest
from typer.testing import CliRunner

from slo_bench.cli.main import app

pytestmark = pytest.mark.backends
BLOCK = 32
ANSWER = 2 * BLOCK + 1  # the last token's KV is never computed
CACHED_TOKENS = {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"}
TURNS = ((2 * BLOCK, -1), (5 * BLOCK, 0), (8 * BLOCK, 1))


@pytest.mark.weekly
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_follow_up_prompt_hits_the_cached_answer(backend, installed, tiny_model, tmp_path):
    installed(backend)
    trace = tmp_path / "trace.csv"
    rows = [f"0,{prompt},{ANSWER},0,{follows},0" for prompt, follows in TURNS]
    header = "arrival_s,prompt_tokens,output_tokens,session,follows,think_s"
    trace.write_text("\n".join([header, *rows]) + "\n")
    words = ["run", "--backend", backend, "--model", tiny_model(backend), "--system", backend]
    words += ["--workload", trace, "--replay-speed", 1, "--seeds", 1, "--slo", "e2e=1000"]
    words += ["--records", "csv", "--no-report", "--out", tmp_path / "out"]
    words += ["--sweep", f"block_size={BLOCK}", "--sweep", "num_gpu_blocks=64"]
    words += [f"--server-arg={CACHED_TOKENS[backend]}"]
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 0, done.output
    [kept] = (tmp_path / "out" / "requests").glob("*.csv.gz")
    with gzip.open(kept, "rt") as file:
        rows = list(csv.DictReader(file))
    assert [row["outcome"] for row in rows] == ["finished"] * 3
    for row, (prompt, _) in zip(rows, TURNS, strict=True):
        assert int(row["server_prompt_tokens"]) == prompt
    # All of the prompt before and of its answer, not the prompt alone.
    assert [int(row["cached_tokens"]) for row in rows] == [0, 4 * BLOCK, 7 * BLOCK]
