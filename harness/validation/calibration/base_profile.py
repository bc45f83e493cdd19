"""The profile that a calibration begins with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....predictors.operators.assembly import OPERATORS
from ....predictors.profiles.build_model import with_peer_link
from ....predictors.profiles.profile_format import Profile, Source, read_profile
from ....predictors.specs import gpu, model
from ....workloads.errors import SloBenchError
from ...results.engine_logs import EngineSettings
from ..replay.log_replay import catalogue_name


@dataclass(frozen=True)
class BaseOptions:
    """A profile's file, or what it is made of without one; None: as the log says."""

    profile: Path | None = None
    model: str | None = None
    gpu: str | None = None
    tp: int | None = None
    peer_link: str | None = None


def base_profile(options: BaseOptions, settings: EngineSettings) -> Profile:
    """The profile of the file, or one whose step times are operators of a log's model on the GPU.

    Raises:
        SloBenchError: the file cannot be read, a name is unknown, or model or GPU are not told.
        FileFormatError: the file is no profile.
    """
    if options.profile is not None:
        for name in ("model", "gpu", "tp"):
            if getattr(options, name) is not None:
                raise SloBenchError(f"{name} is that of the profile; leave --{name} out")
        return _linked(read_profile(options.profile), options.peer_link)
    logged_name = settings.model and catalogue_name(settings.model)
    for name, logged, chosen in (
        ("model", logged_name, options.model and model(options.model).name),
        ("tp", settings.tp, options.tp),
    ):
        if logged and chosen and logged != chosen:
            raise SloBenchError(f"the log is of {name} {logged}; leave --{name} {chosen} out")
    served_name = options.model or logged_name
    if not served_name:
        raise SloBenchError("the log does not tell its model; name it with --model M")
    if options.gpu is None:
        raise SloBenchError(
            "name the GPU that served the log (--gpu G), or give a profile to begin with "
            "(--profile FILE)"
        )
    served = model(served_name)
    profile = Profile(
        served.name,
        gpu(options.gpu).name,
        tp=options.tp or settings.tp or 1,
        weight_dtype=served.dtype_of("auto"),
        kv_dtype=served.kv_dtype_of("auto"),
        best=OPERATORS,
        sources=(Source("slo-bench", OPERATORS, note="kernel times of AIConfigurator"),),
    )
    return _linked(profile, options.peer_link)


def _linked(profile: Profile, peer_link: str | None) -> Profile:
    if profile.tp == 1 and peer_link is not None:
        raise SloBenchError("one GPU (tp 1) has no peers; leave --peer-link out")
    return with_peer_link(profile, peer_link)
