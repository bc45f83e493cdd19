"""Device and model that a profile is about: the catalogue's, or as the profile measured them."""

from __future__ import annotations

import dataclasses

from ...workloads.errors import SloBenchError, UnknownNameError
from ..dtypes import weight_dtype
from ..model_spec import ModelSpec
from ..specs import GpuSpec, entries, gpu, link, model
from .profile import MeasuredLink, Profile

_BITS_OF_FLOPS = 16
_NO_LINK = "pcie4-x16"  # where none was measured


def profiled_model(profile: Profile) -> ModelSpec:
    """The model that the profile is about.

    Raises:
        SloBenchError: neither the catalogue nor the profile has its shape.
    """
    if not profile.model_file:
        return model(profile.model)
    return dataclasses.replace(model(profile.model_file), name=profile.model)


def profiled_gpu(profile: Profile) -> GpuSpec:
    """The GPU (or CPU) that it is about, with the links that were measured on it.

    Raises:
        SloBenchError: neither the catalogue nor the profile has it.
    """
    try:
        spec = gpu(profile.gpu)
    except UnknownNameError:
        if profile.device is None:
            raise
        spec = _measured(profile)
    named = {name: _named(one) for name, one in profile.links.items()}
    unknown = set(named) - {"host", "peer"}
    if unknown:
        raise SloBenchError(f"a profile's links are host and peer, not {min(unknown)}")
    host, peer = named.get("host", spec.host_link), named.get("peer", spec.peer_link)
    return dataclasses.replace(spec, host_link=host, peer_link=peer)


def with_peer_link(profile: Profile, text: str | None) -> Profile:
    """With a measured link between GPUs, such as `16gb/s@20us` (bandwidth and latency); as it is
    where `text` is None.

    Raises:
        SloBenchError: `text` is not of that form; a name of the catalogue is a data sheet's link.
    """
    if text is None:
        return profile
    found = None if text in entries("links") or "@" not in text else link(text)
    if found is None:
        raise SloBenchError(
            f"--peer-link must be a measured bandwidth and latency such as 16gb/s@20us but is "
            f"{text!r}"
        )
    measured = MeasuredLink(found.bandwidth_bytes_per_s, found.latency_s)
    return dataclasses.replace(profile, links={**profile.links, "peer": measured})


def _measured(profile: Profile) -> GpuSpec:
    device = profile.device
    assert device is not None
    bits = weight_dtype(profile.weight_dtype).compute_bits
    return GpuSpec(
        name=profile.gpu,
        memory_bytes=int(device.memory_bytes),
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        flops_16bit=device.flops * bits / _BITS_OF_FLOPS,
        flops_8bit=0.0,
        flops_4bit=0.0,
        host_link=_NO_LINK,
        peer_link=_NO_LINK,
        power_w=1.0,
        price_per_hour_usd=0.0,
        origin=f"measured: {profile.label}",
    )


def _named(link: MeasuredLink) -> str:
    """By a name that says its figures."""
    return f"{link.bandwidth_bytes_per_s / 1e9:.9g}gb/s@{1e6 * link.latency_s:.9g}us"
