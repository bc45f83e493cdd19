"""Model folders that the torch engine loads."""

from __future__ import annotations

import shutil
from pathlib import Path

from ....workloads.errors import SloBenchError
from .environments import home
from .random_model import make_model, model_fields

TINY = "tiny-llama"


def model_folder(model: str) -> Path:
    """Folder of a model; that of the tiny random Llama is made if it does not exist."""
    if model != TINY or Path(model).is_dir():
        return Path(model)
    folder = home() / "models" / "random" / TINY
    try:
        return make_model(folder, model_fields())
    except SloBenchError:
        shutil.rmtree(folder)  # an earlier version's, or unfinished
        return make_model(folder, model_fields())
