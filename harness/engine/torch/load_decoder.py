"""A model folder becomes a decoder on a device."""

from __future__ import annotations

from pathlib import Path

import torch

from ....predictors.specs import GIB
from .decoder import Decoder
from .decoder_config import read_config
from .torch_errors import DoesNotFitError, ModelError
from .weights import load_weights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_decoder(folder: Path, device: str = "cpu", dtype: str | None = None) -> Decoder:
    """The decoder in a folder of `config.json` and safetensors.

    Args:
        folder: as Hugging Face writes it; no code in it is run.
        device: `cpu`, `cuda` or `cuda:N`.
        dtype: of weights and KV; by default float32 on a CPU, else that of the checkpoint.

    Raises:
        ModelError: the folder holds no model that this engine runs, or its weights are not whole.
        DoesNotFitError: the device has no room for the weights.
    """
    config = read_config(folder)
    place = torch_device(device)
    chosen = dtype or ("float32" if place.type == "cpu" else config.dtype)
    if chosen not in _DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(_DTYPES)} but is {chosen!r}")
    needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    needed = round(needed * _DTYPES[chosen].itemsize / _DTYPES[config.dtype].itemsize)
    if config.tied and place.type == "cpu":
        needed += config.vocab * config.hidden * _DTYPES[chosen].itemsize
    check_room(needed, place, f"the weights of {folder.name}")
    with torch.inference_mode():
        return Decoder(config, load_weights(folder, config, _DTYPES[chosen], place))


def torch_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        SloBenchError: torch knows no such device, or it is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"device must be cpu, cuda or cuda:N but is {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device must be cpu, cuda or cuda:N but is {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"there is no {name}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def free_bytes(device: torch.device) -> int:
    """Memory that can be had on a device."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    for line in Path("/proc/meminfo").read_text("utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no MemAvailable in /proc/meminfo")


def check_room(needed: int, device: torch.device, contents: str) -> None:
    """Raise DoesNotFitError unless that many bytes are free."""
    free = free_bytes(device)
    if needed > free:
        raise DoesNotFitError(
            f"{contents} take {needed / GIB:.2f} GiB, but {device} has {free / GIB:.2f} GiB "
            "free; use fewer KV blocks, a smaller model or another device"
        )
