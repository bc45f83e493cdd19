"""AIConfigurator's predictions of the closed loops of `silicon.csv.gz`, kept beside ours.

    python scripts/aiconfigurator_predictions.py
    python scripts/aiconfigurator_predictions.py measurements/silicon.csv.gz --resume

Installs AIConfigurator (PyPI, Apache-2.0) into an environment of its own, as servers are, and asks
it there for TTFT and TPOT of each row: model, GPU, engine, formats, lengths, concurrency and
parallelism, by the kernel times that come with it. What it cannot predict is kept with the reason.
Rows go to `harness/validation/accuracy/data/aiconfigurator.csv`, which `slo-bench accuracy` reads.
"""

from __future__ import annotations

import csv
import importlib
import json
import logging
import random
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

VERSION = "0.12.0"
DATA = Path(__file__).parents[1] / "harness" / "validation" / "accuracy" / "data"
OUT = DATA / "aiconfigurator.csv"
COLUMNS = ("set", "row", "version", "ttft_mean_s", "tpot_mean_s", "reason")
# Names of models whose shapes come with AIConfigurator; it would download others.
MODELS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B-FP8",
    "deepseek-r1": "deepseek-ai/DeepSeek-R1",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "kimi-k2.5": "moonshotai/Kimi-K2.5",
    "minimax-m2.5": "MiniMaxAI/MiniMax-M2.5",
}
# Formats of experts; matrix multiplications beside them are in 16 bits where these are in 4.
EXPERTS = {"fp8": "fp8_block", "nvfp4": "nvfp4", "mxfp4": "w4a16_mxfp4", "int4": "int4_wo"}
SYSTEMS = {"h100-80g": "h100_sxm", "h200-141g": "h200_sxm", "b200": "b200_sxm"}


def main(file: Path, resume: bool) -> None:
    """Ask for every row of a model of `MODELS`, and append the answers to `OUT`."""
    from slo_bench.harness.validation.accuracy.measurement import ClosedLoop, Measurement
    from slo_bench.harness.validation.accuracy.readers import read_folder
    from slo_bench.predictors.specs import model

    answered = set()
    if resume and OUT.exists():
        with OUT.open(encoding="utf-8") as answers_file:
            answered = {(row["set"], row["row"]) for row in csv.DictReader(answers_file)}
    question_rows = []
    for measured_row in read_folder(file):
        if (
            not isinstance(measured_row, Measurement)
            or (measured_row.set, measured_row.row) in answered
        ):
            continue
        case, load = measured_row.case, measured_row.case.load
        if case.model not in MODELS:
            continue
        assert isinstance(load, ClosedLoop)
        experts = model(case.model).experts
        gemm = {"bf16": "bfloat16", "fp8": "fp8_block" if case.engine == "sglang" else "fp8"}
        if experts:
            gemm |= {"fp8": "fp8_block", "mxfp4": "bfloat16", "int4": "bfloat16"}
        question_rows.append(
            {
                "set": measured_row.set,
                "row": measured_row.row,
                "model_path": MODELS[case.model],
                "system_name": SYSTEMS.get(case.gpu, case.gpu),
                "backend_name": case.engine,
                "isl": load.prompt_tokens,
                "osl": load.output_tokens,
                "batch_size": load.concurrency // case.dp,  # of a data-parallel rank
                "tp_size": case.tp,
                "pp_size": case.pp,
                "attention_dp_size": case.dp,
                "moe_tp_size": case.tp * case.dp // case.ep if experts else None,
                "moe_ep_size": case.ep if experts else None,
                "moe_quant_mode": EXPERTS.get(case.weight_dtype, "bfloat16") if experts else None,
                "gemm_quant_mode": gemm.get(case.weight_dtype, case.weight_dtype),
                "kvcache_quant_mode": {"bf16": "bfloat16"}.get(case.kv_dtype, case.kv_dtype),
            }
        )
    random.Random(0).shuffle(question_rows)  # what an interrupted run leaves out is drawn, too
    question_rows.sort(
        key=lambda row: row["backend_name"] == "trtllm"
    )  # which is the least like ours
    with tempfile.TemporaryFile("w+") as questions:
        questions.writelines(json.dumps(row) + "\n" for row in question_rows)
        questions.seek(0)
        command = [str(_python()), __file__, "--answer"]
        child = subprocess.Popen(command, stdin=questions, stdout=subprocess.PIPE, text=True)
    with child, OUT.open("a" if answered else "w", encoding="utf-8", newline="") as out:
        rows = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        if not answered:
            rows.writeheader()
        assert child.stdout is not None
        for line in child.stdout:
            rows.writerow(json.loads(line))
            out.flush()
    if child.returncode:
        raise SystemExit(f"AIConfigurator ended with {child.returncode}; go on with --resume")


def _python() -> Path:
    """The interpreter of AIConfigurator's environment, which is made if it is not there."""
    from slo_bench.harness.servers.launch.environments import home

    folder = home() / "environments" / f"aiconfigurator-{VERSION}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        requirement = f"aiconfigurator=={VERSION}"
        subprocess.run([python, "-m", "pip", "install", "-q", requirement], check=True)
    return python


def answer() -> None:
    """In AIConfigurator's environment: a question a line of stdin, an answer a line of stdout."""
    # Not in our environment.
    cli_estimate = importlib.import_module("aiconfigurator.cli.api").cli_estimate

    logging.disable(logging.WARNING)
    out = sys.stdout
    sys.stdout = sys.stderr  # what the library prints
    for line in sys.stdin:
        question = json.loads(line)
        row = {name: question.pop(name) for name in ("set", "row")}
        try:
            estimate = cli_estimate(**question)
            kernels = f"{VERSION} ({question['backend_name']} {estimate.backend_version})"
            row |= {"version": kernels, "tpot_mean_s": round(estimate.tpot / 1e3, 6)}
            row |= {"ttft_mean_s": round(estimate.ttft / 1e3, 6), "reason": ""}
        except Exception as error:  # whatever it cannot do is a row without figures
            row |= {"version": VERSION, "reason": " ".join(str(error).split())[:120]}
        out.write(json.dumps(row) + "\n")
        out.flush()


if __name__ == "__main__":
    if "--answer" in sys.argv:
        answer()
    else:
        files = [Path(name) for name in sys.argv[1:] if not name.startswith("-")]
        main(files[0] if files else DATA / "silicon.csv.gz", "--resume" in sys.argv)
