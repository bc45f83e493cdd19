"""Whether a server can load what is named as its model, found before one is started."""

from __future__ import annotations

import os
from pathlib import Path

from ....predictors.specs import models
from ....workloads.errors import SloBenchError

_CONFIGS = ("config.json", "params.json")
_HUB_CACHE = "~/.cache/huggingface/hub"


def check_model(model: str) -> None:
    """Check that a model is a folder with a config, or a name that a hub of models can have.

    Raises:
        SloBenchError: it is neither; the message says what is there.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return  # a GGUF file
    if path.is_dir():
        if not any((path / name).is_file() for name in _CONFIGS):
            raise SloBenchError(
                f"the folder {model} holds no model: it has no config.json; `slo-bench model make "
                "FOLDER` makes a small one"
            )
        return
    if model in models():
        raise SloBenchError(
            f"{model} is a model of the simulator's catalogue, which has no weights: give a server "
            "the folder of a model, or its OWNER/NAME on a hub"
        )
    owner, slash, name = model.partition("/")
    is_path = not owner or owner in (".", "..", "~") or "/" in name or Path(owner).is_dir()
    if not slash or is_path or not name:
        raise SloBenchError(
            f"there is no folder {model}: give the folder of a model, or its OWNER/NAME on a hub"
        )
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") and not _is_cached(model):
        raise SloBenchError(
            f"{model} is not in the cache of models, and HF_HUB_OFFLINE forbids to download it"
        )


def _is_cached(model: str) -> bool:
    home = os.environ.get("HF_HOME")
    cache = os.environ.get("HF_HUB_CACHE") or (f"{home}/hub" if home else _HUB_CACHE)
    return (Path(cache).expanduser() / f"models--{model.replace('/', '--')}").is_dir()
