"""Azure LLM inference traces of 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`.

Source: https://github.com/Azure/AzurePublicDataset (CC-BY-4.0).
"""

from __future__ import annotations

from pathlib import Path

from .table import read_csv
from .trace import WorkloadTrace, in_order, served

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: Path) -> WorkloadTrace:
    """Read the CSV; timestamps have up to seven decimal digits.

    Raises:
        FileFormatError: a row cannot be read.
    """
    table = read_csv(path)
    prompt_tokens, output_tokens = table.ints(HEADER[1]), table.ints(HEADER[2])
    kept = served(prompt_tokens, output_tokens, table)
    return in_order(
        path.name,
        "azure",
        table.times_s(HEADER[0]),
        kept.rows,
        {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens},
        notes=kept.notes,
    )
