"""From the names that other projects use to those of the catalogues."""

from __future__ import annotations

import re

from ...workloads.errors import SloBenchError
from ..catalogue import entries

# Streaming multiprocessors, from the makers' data sheets.
MULTIPROCESSORS = {
    "a100-40g": 108,
    "a100-80g": 108,
    "a100-80g-pcie": 108,
    "a800-80g-pcie": 108,
    "h100-80g": 132,
    "h100-80g-pcie": 114,
    "h200-141g": 132,
    "b200": 148,
    "v100-16g": 80,
    "v100-32g": 80,
    "t4": 40,
    "rtx-3090": 82,
    "rtx-4090": 128,
    "rtx-pro-6000": 188,
    "a10": 72,
    "a40": 84,
    "a6000": 84,
    "l4": 58,
    "l40s": 142,
}
# What stands around the name proper, in Hugging Face ids and in device names.
_NOISE = re.compile(r"nvidia|geforce|meta(?=llama)|hf$|instruct|chat|base$|sxm\d?|hbm\d*e?|gpu")


def recognise(section: str, text: str) -> str:
    """The catalogue's name in `section` (gpus, models) for what another project calls `text`.

    Raises:
        SloBenchError: none fits, or several do.
    """
    wanted = _plain(text)
    known = {_plain(name): name for name in entries(section)}
    if wanted in known:
        return known[wanted]
    begins = [name for plain, name in known.items() if wanted and plain.startswith(wanted)]
    holds = [name for plain, name in known.items() if plain in wanted]
    for found in (begins, sorted(holds, key=len)[-1:]):
        if len(found) == 1:
            return found[0]
        if found:
            # `a100`: the plainest of its kind, and the larger, is what data centres hold.
            best = [n for n in found if n in ("a100-80g", "h100-80g", "v100-32g")]
            if len(best) == 1:
                return best[0]
            raise SloBenchError(
                f"{text!r} may be any of {', '.join(found)}; say which with --{section[:-1]}"
            )
    raise SloBenchError(
        f"no {section[:-1]} of the catalogue looks like {text!r}; name it with --{section[:-1]} "
        f"(`slo-bench list {section}`)"
    )


def _plain(text: str) -> str:
    name = re.sub(r"[^a-z0-9]", "", text.rsplit("/", 1)[-1].lower())
    return _NOISE.sub("", name)
