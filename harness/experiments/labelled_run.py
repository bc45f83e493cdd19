"""Reads a run folder as prompts with lengths of answers, from which a predictor can learn."""

from __future__ import annotations

from pathlib import Path

from ...workloads.errors import SloBenchError, UnknownNameError
from ...workloads.labelled_prompts import LabelledPrompt, LabelledPrompts
from .execution.cells import workload_of
from .experiment import Experiment, RunResult


def read_run(folder: Path, *, model: str | None = None) -> LabelledPrompts:
    """Return finished requests with prompt texts of all cells, each prompt and length once.

    Lengths are measured output lengths: in a simulation those of the workload, on a real server
    those of its answers. `model` names the model that answered; by default the workload's name for
    it, else the model of the run.

    Raises:
        SloBenchError: the folder is no run folder or has no requests, or the workload has no texts.
    """
    file = folder / "experiment.toml"
    if not file.is_file():
        raise SloBenchError(f"{folder} is no run folder: it has no experiment.toml")
    result = RunResult(folder)
    prompts: dict[tuple[str, str, int], LabelledPrompt] = {}
    for spec in Experiment.load(file).plan().cells:
        workload = workload_of(spec)
        if workload.texts is None:
            continue
        try:
            requests = result.requests(spec.cell)
        except UnknownNameError:
            continue  # not run yet, or kept no requests
        for row, outcome, tokens in zip(
            requests["id"], requests["outcome"], requests["output_tokens"], strict=True
        ):
            text = workload.texts[int(row)]
            if text is None or outcome != "finished" or tokens < 1:
                continue
            named = workload.model_names[workload.model_index[int(row)]]
            answered_by = model or named or spec.placement.model
            prompts[answered_by, text, int(tokens)] = LabelledPrompt(
                text, int(workload.prompt_tokens[int(row)]), int(tokens), answered_by, folder.name
            )
    if not prompts:
        raise SloBenchError(
            f"{folder} has no finished request with a text: run a workload that has texts, and "
            "keep --records"
        )
    return LabelledPrompts(folder.name, tuple(prompts.values()), "tokens that came out")
