"""BurstGPT: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type` and, since
release 2.0, `Session ID` and `Elapsed time`.

Source: https://github.com/HPMLL/BurstGPT (CC-BY-4.0). Rows without response tokens are requests
that failed at the origin and are left out.
"""

from __future__ import annotations

from pathlib import Path

from .table import read_csv
from .trace import WorkloadTrace, in_order, served

HEADER = ("Timestamp", "Model", "Request tokens", "Response tokens")


def read_burstgpt(path: Path) -> WorkloadTrace:
    """Read the CSV; the log type becomes the class, the called model the model.

    Raises:
        FileFormatError: a row cannot be read.
    """
    table = read_csv(path)
    prompt_tokens, output_tokens = table.ints(HEADER[2]), table.ints(HEADER[3])
    kept = served(prompt_tokens, output_tokens, table)
    model_index, model_names = table.names("Model")
    columns = {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "model_index": model_index,
    }
    settings = {"model_names": model_names}
    if "Log Type" in table:
        columns["class_index"], settings["class_names"] = table.names("Log Type")
    return in_order(
        path.name,
        "burstgpt",
        table.floats(HEADER[0]),
        kept.rows,
        columns,
        notes=kept.notes,
        settings=settings,
    )
