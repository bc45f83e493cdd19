"""Device maps as files."""

import json
from dataclasses import replace

import pytest

from slo_bench.predictors.device_map import DeviceMap, read_device_map, shipped_device_maps
from slo_bench.predictors.placement import PipelineStage
from slo_bench.predictors.specs import LinkSpec, gpu, link, model
from slo_bench.workloads.errors import FileFormatError, UnknownNameError

TWO = {
    "model": "chatglm2-6b",
    "stages": [
        {"device": "a", "gpu": "rtx-3090@350w", "layers": 20, "link": "pix"},
        {"gpu": {"like": "l4", "memory_gib": 11, "bandwidth_gb_per_s": 250}, "layers": 8},
    ],
}


def written(tmp_path, table):
    path = tmp_path / "map.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table), encoding="utf-8")
    return str(path)


def test_device_map_is_read(tmp_path):
    device_map = read_device_map(written(tmp_path, {**TWO, "lanes": 1, "ready_s": 90}))
    assert (device_map.layers, device_map.devices, device_map.lanes, device_map.ready_s) == (
        (20, 8),
        ("a", "1"),
        1,
        90,
    )
    assert device_map.stages[0] == PipelineStage(gpu("rtx-3090@350w"), 20, link("pix"))
    small = device_map.stages[1].gpu
    assert (small.memory_bytes, small.bandwidth_bytes_per_s) == (11 * 2**30, 250e9)
    assert small.flops_16bit == gpu("l4").flops_16bit
    assert device_map.gpus_text == "rtx-3090@350w+l4*"


def test_device_map_survives_its_file(tmp_path):
    link_spec = LinkSpec("given", 3e9, 7e-6)
    slow = replace(gpu("l4"), name="l4*", bandwidth_bytes_per_s=2e11)
    stages = (
        PipelineStage(gpu("a100-80g"), 3, link_spec),
        PipelineStage(slow, 4, link("node")),
        PipelineStage(slow, 21),
    )
    whole = DeviceMap("chatglm2-6b", stages, ("x", "y", "z"), lanes=2, ready_s=1.5)
    again = read_device_map(written(tmp_path, whole.plain()))
    assert replace(again.stages[1].gpu, origin="") == replace(slow, origin="")
    assert again.stages[0].link.transfer_s(1e6) == pytest.approx(link_spec.transfer_s(1e6))
    assert (again.layers, again.lanes, again.ready_s) == ((3, 4, 21), 2, 1.5)
    assert whole.gpus_text == "a100-80g+2×l4*"


def stage(**changes):
    return {**TWO, "stages": [{**TWO["stages"][0], **changes}, TWO["stages"][1]]}


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("{", "is not JSON"),
        ({"model": "m"}, 'needs a list "stages"'),
        ({**TWO, "stages": []}, "is empty"),
        (stage(layers=0), "stage 0 needs layers"),
        ({**TWO, "stages": [{"gpu": "l4", "layers": 2}] * 2}, "stage 0 needs gpu, and link"),
        (stage(gpu={"memory_gib": 3}), "gpu must be a name or"),
        (stage(gpu={"like": "l4", "memory": 3}), "gpu has no 'memory'"),
        (stage(gpu={"like": "l4", "memory_gib": 0}), "memory_gib must be a number above 0"),
        (stage(link={"bandwidth_gb_per_s": -1}), "bandwidth_gb_per_s must be a number above 0"),
        (stage(link=3), "link must be a name or"),
        ({**TWO, "lanes": 3}, "lanes must be 1 to 2"),
        ({**TWO, "ready_s": -1}, "ready_s must be a number from 0 on"),
        ({**TWO, "model": 3}, "model must be a name"),
    ],
)
def test_device_map_with_an_error_is_refused(tmp_path, table, problem):
    with pytest.raises(FileFormatError, match=problem):
        read_device_map(written(tmp_path, table))


def test_device_map_of_unknown_names_is_refused(tmp_path):
    with pytest.raises(UnknownNameError, match="device map"):
        read_device_map("uellm-hler")
    with pytest.raises(UnknownNameError, match="GPU"):
        read_device_map(written(tmp_path, stage(gpu="l44")))
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_device_map(str(tmp_path / "none.json"))


def test_shipped_maps_hold_every_layer():
    for name in shipped_device_maps():
        device_map = read_device_map(name)
        assert sum(device_map.layers) == model(device_map.model).layers
