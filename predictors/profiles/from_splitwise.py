"""Splitwise's measured prompts and tokens, end to end (Mutinifni/splitwise-sim, MIT)."""

from __future__ import annotations

from pathlib import Path

from ...workloads.errors import FileFormatError, SloBenchError
from .importers import ImportOptions, recognise
from .profile import Profile, Source, read_csv, table_of

_COLUMNS = (
    "model",
    "hardware",
    "tensor_parallel",
    "prompt_size",
    "batch_size",
    "token_size",
    "prompt_time",
    "token_time",
)


def read(path: Path, options: ImportOptions) -> Profile:
    """The rows of one model, GPU and tp: a prompt step and a decode step each (milliseconds).

    The decode step is the mean over the answer: its KV is the prompt and half of the answer.
    """
    columns = read_csv(path, _COLUMNS)
    rows = list(zip(*columns.values(), strict=True))
    try:
        kinds = sorted({(row[0], row[1], int(float(row[2]))) for row in rows})
    except (ValueError, OverflowError) as error:
        raise FileFormatError(path, None, f"{_COLUMNS[2]} is no whole number: {error}") from None
    fitting = [kind for kind in kinds if _fits(kind, options)]
    if len(fitting) != 1:
        there = "; ".join(f"{m} on {g} × tp {tp}" for m, g, tp in fitting or kinds)
        raise SloBenchError(
            f"{path} has {len(fitting)} that fit; choose with --model, --gpu and --tp: {there}"
        )
    kind = fitting[0]
    steps = []
    try:
        for model_name, gpu_name, tp, prompt, batch, answer, prompt_ms, token_ms in rows:
            if (model_name, gpu_name, int(float(tp))) != kind:
                continue
            n, tokens = float(batch), float(prompt)
            steps.append((n, tokens, 0.0, 0.0, 0.0, 1e3 * float(prompt_ms)))
            if float(answer) > 1:
                kv = tokens + float(answer) / 2
                steps.append((0.0, 0.0, 0.0, n, kv, 1e3 * float(token_ms)))
    except ValueError as error:
        raise FileFormatError(path, None, f"a field is no number: {error}") from None
    gpu = options.gpu_name(kind[1])
    return Profile(
        model=options.model_name(kind[0]),
        gpu=gpu,
        tp=kind[2],
        sources=(
            Source(
                "Splitwise (Mutinifni/splitwise-sim)",
                path.name,
                licence="MIT",
                note="whole steps, host included; rows of tp 2 are irregular",
            ),
        ),
        tables={"steps": table_of("steps", steps)},
    )


def _fits(kind: tuple[str, str, int], options: ImportOptions) -> bool:
    model_name, gpu_name, tp = kind
    if "pcap" in gpu_name:  # under a power cap
        return False
    pairs = ((options.model, model_name, "models"), (options.gpu, gpu_name, "gpus"))
    for wanted, found, section in pairs:
        if wanted is not None and wanted != found and wanted != _known(section, found):
            return False
    return options.tp is None or options.tp == tp


def _known(section: str, text: str) -> str:
    try:
        return recognise(section, text)
    except SloBenchError:
        return ""
