"""Model folders that the torch engine loads."""

from __future__ import annotations

from pathlib import Path

from .environments import home

TINY = "tiny-llama"


def model_folder(model: str) -> Path:
    """Folder of a model; that of the tiny random Llama is made if it does not exist."""
    if model != TINY or Path(model).is_dir():
        return Path(model)
    from ...engine.torch.tiny import make_tiny

    folder = home() / "models" / TINY
    return folder if (folder / "tokenizer_config.json").is_file() else make_tiny(folder)
