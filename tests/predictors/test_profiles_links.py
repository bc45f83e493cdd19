"""Links and devices that a profile measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slo_bench.predictors.profiles.build_model import profiled_gpu, profiled_model
from slo_bench.predictors.profiles.fit_profile import fit_link, fit_links
from slo_bench.predictors.profiles.profile_format import (
    MeasuredDevice,
    MeasuredLink,
    Profile,
    read_profile,
    table_of,
    write_profile,
)
from slo_bench.predictors.specs import gpu, link
from slo_bench.workloads.errors import SloBenchError, UnknownNameError

_SIZES = [1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7]
_SHAPE = """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100,
"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
"max_position_embeddings": 512}"""


def test_link_is_parsed_from_bandwidth_and_latency() -> None:
    parsed = link("12.5gb/s@30us")
    assert parsed.bandwidth_bytes_per_s == 12.5e9
    assert parsed.transfer_s(12.5e6) == pytest.approx(1e-3 + 30e-6)
    for wrong in ("0gb/s@1us", "12gb/s", "gb/s@us"):
        with pytest.raises(UnknownNameError):
            link(wrong)


def test_fit_link_recovers_bandwidth_and_latency() -> None:
    moved = np.array(_SIZES)
    fitted = fit_link(moved, 20e-6 + moved / 2e9, np.random.default_rng(0)).link
    assert fitted.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert fitted.latency_s == pytest.approx(20e-6)
    assert fitted.held_out_percent == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(SloBenchError, match="too few"):
        fit_link(moved[:4], moved[:4], np.random.default_rng(0))


def test_profile_of_an_unknown_device_and_model_is_used(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(_SHAPE)
    moves = table_of("moves", [("layers", n, 100 + n / 1000) for n in _SIZES])
    profile = Profile(
        "small",
        "cpu",
        weight_dtype="fp32",
        model_file=str(tmp_path / "small.json"),
        device=MeasuredDevice(2e9, 1e9, 3e10, 5e10),
        tables={"moves": moves},
        links={**fit_links({"moves": moves}), "host": MeasuredLink(4e9, 1e-5)},
    )
    read = read_profile(write_profile(profile, tmp_path / "p.toml"))
    spec = profiled_gpu(read)
    assert spec.flops(32) == 5e10
    assert link(spec.peer_link).bandwidth_bytes_per_s == pytest.approx(1e9)
    assert link(spec.peer_link).latency_s == pytest.approx(1e-4)
    assert link(spec.host_link).bandwidth_bytes_per_s == pytest.approx(4e9)
    assert (profiled_model(read).name, profiled_model(read).layers) == ("small", 3)
    with pytest.raises(UnknownNameError, match="cpu"):
        profiled_gpu(Profile("small", "cpu"))


def test_measured_links_take_the_place_of_the_catalogue_s() -> None:
    profile = Profile("llama-3.1-8b", "h100-80g", links={"peer": MeasuredLink(7e9, 2e-6)})
    spec = profiled_gpu(profile)
    assert link(spec.peer_link).bandwidth_bytes_per_s == pytest.approx(7e9)
    assert spec.host_link == gpu("h100-80g").host_link
    with pytest.raises(SloBenchError, match="host and peer"):
        profiled_gpu(Profile("m", "h100-80g", links={"moon": MeasuredLink(1.0, 1.0)}))
