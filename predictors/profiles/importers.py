"""The importers: each reads one project's measurements into a `Profile`. They turn the names that
other projects use into those of the catalogues.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...workloads.errors import FileFormatError, SloBenchError, UnknownNameError
from ..specs import entries, gpus
from .profile_format import Profile


@dataclass(frozen=True)
class ImportOptions:
    """What the user names, for files that hold or are about several; None: find out."""

    model: str | None = None
    gpu: str | None = None
    tp: int | None = None

    def model_name(self, name_in_file: str | None) -> str:
        """Name of the model: as given, else that of the file's name for it."""
        return self.model or recognise("models", name_in_file or "")

    def gpu_name(self, name_in_file: str | None) -> str:
        """The GPU's name, in the same way."""
        return self.gpu or recognise("gpus", name_in_file or "")


# The meaning of each source's path; `read_SOURCE(path, options) -> Profile` reads it.
IMPORTERS = {
    "llmservingsim": "a folder with dense.csv, per_sequence.csv, attention.csv (and moe.csv), or "
    "with tp1, tp2, … of these",
    "vidur": "compute/GPU/ORG/MODEL/mlp.csv, attention.csv and all_reduce.csv beside it; or "
    "GPU__ORG__MODEL__linear.csv",
    "aiconfigurator": "systems/data/SYSTEM, or SYSTEM/FAMILY/BACKEND/VERSION in it to choose these "
    "(needs --model)",
    "distserve": "a profiler JSON of fitted coefficients",
    "splitwise": "perf_model.csv",
}


def import_profile(source: str, path: Path, options: ImportOptions) -> Profile:
    """Read the measurements of `source` at `path`.

    Raises:
        UnknownNameError: no importer has that name.
        SloBenchError: the files are missing, malformed, or hold several models or GPUs and the
            options choose none.
    """
    if source not in IMPORTERS:
        raise UnknownNameError("source of profiles", source, IMPORTERS)
    packed = path.with_name(f"{path.name}.gz") if path.name else path
    if source != "aiconfigurator" and not path.exists() and not packed.exists():
        raise SloBenchError(f"there is no {path}; {source} is read from {IMPORTERS[source]}")
    alone = source in ("aiconfigurator", "vidur")  # in a module of its own
    module = importlib.import_module(f".from_{source if alone else 'projects'}", __package__)
    read: Callable[[Path, ImportOptions], Profile] = getattr(module, f"read_{source}")
    try:
        profile = read(path, options)
    except FileFormatError as error:
        error.args = (f"{error}; {source} is read from {IMPORTERS[source]}",)
        raise
    catalogued = gpus().get(profile.gpu)
    return replace(profile, multiprocessors=catalogued.multiprocessors if catalogued else 0)


_MEASUREMENTS = (".csv", ".gz", ".parquet", ".json", ".txt")
_NAMED = 8  # of what is not used


def measurements_beside(folder: Path, used: Iterable[Path]) -> list[str]:
    """Names of the files of measurements in a folder, but for those that are used."""
    names = {file.name for file in folder.iterdir() if file.suffix in _MEASUREMENTS}
    return sorted(names - {file.name for file in used})


def unused_note(note: str, names: Sequence[str]) -> str:
    """`note`, and after it the names of what a profile does not use."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    not_used = f"not used: {', '.join(names[:_NAMED])}{more}" if names else ""
    return "; ".join(filter(None, (note, not_used)))


# What stands around the name proper, in Hugging Face ids and in device names.
_NOISE = re.compile(r"nvidia|geforce|meta(?=llama)|hf$|instruct|chat|base$|sxm\d?|hbm\d*e?|gpu")


def recognise(section: str, text: str) -> str:
    """The catalogue's name in `section` (gpus, models) for what another project calls `text`.

    Raises:
        SloBenchError: none fits, or several do.
    """
    plain_text = _plain(text)
    names = {_plain(name): name for name in entries(section)}
    if plain_text in names:
        return names[plain_text]
    begins = [name for plain, name in names.items() if plain_text and plain.startswith(plain_text)]
    holds = [name for plain, name in names.items() if plain in plain_text]
    for matches in (begins, sorted(holds, key=len)[-1:]):
        if len(matches) == 1:
            return matches[0]
        if matches:
            # `a100`: the plainest of its kind, and the larger, is what data centres hold.
            best = [n for n in matches if n in ("a100-80g", "h100-80g", "v100-32g")]
            if len(best) == 1:
                return best[0]
            raise SloBenchError(
                f"{text!r} may be any of {', '.join(matches)}; say which with --{section[:-1]}"
            )
    raise SloBenchError(
        f"no {section[:-1]} of the catalogue looks like {text!r}; name it with --{section[:-1]} "
        f"(`slo-bench list {section}`)"
    )


def _plain(text: str) -> str:
    name = re.sub(r"[^a-z0-9]", "", text.rsplit("/", 1)[-1].lower())
    return _NOISE.sub("", name)
