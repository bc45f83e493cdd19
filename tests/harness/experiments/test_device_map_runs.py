"""A device map in an experiment: from the setting to the row."""

import json

import pandas as pd
import pytest

from slo_bench.harness.experiments.execution.cell_specs import PlacementSpec, placed
from slo_bench.harness.experiments.experiment import Experiment
from slo_bench.harness.experiments.explain.trace import replay
from slo_bench.workloads.errors import SloBenchError

MAP = {
    "model": "chatglm2-6b",
    "lanes": 1,
    "stages": [
        {"gpu": "rtx-3090@350w", "layers": 14, "link": "pix"},
        {"gpu": "rtx-3090@150w", "layers": 14},
    ],
}


@pytest.fixture
def file(tmp_path):
    def write(**changes):
        path = tmp_path / f"map{len(list(tmp_path.glob('*.json')))}.json"
        path.write_text(json.dumps({**MAP, **changes}), encoding="utf-8")
        return str(path)

    return write


def ask(**settings):
    return Experiment(
        **{
            "systems": ("fifo",),
            "model": "chatglm2-6b",
            "workload": "alpaca",
            "slo": "e2e=300",
            "rates": (1.0,),
            "requests": 40,
            "seeds": 1,
            **settings,
        }
    )


def rows(tmp_path, **settings):
    return ask(**settings).run(tmp_path / "run", jobs=1).cells


def test_one_lane_keeps_one_gpu_busy_at_a_time(tmp_path, file):
    cells = rows(tmp_path, device_map=(file(), file(lanes=2)), rates=(50.0,))
    assert cells["gpus"].tolist() == [2, 2]
    assert set(cells["gpu"]) == {"rtx-3090@350w+rtx-3090@150w"}
    one_lane, two_lanes = cells["gpu_utilisation"]
    assert one_lane == pytest.approx(0.5, abs=0.01)
    assert 0.5 < two_lanes <= 1


def test_requests_wait_until_the_maps_ready_s(tmp_path, file):
    cells = rows(tmp_path, device_map=(file(), file(ready_s=100.0)))
    soon, late = cells["e2e_mean_s"]
    assert late > soon + 60  # all 40 come within about 40 s
    assert cells["finished"].tolist() == [40, 40]


def test_an_even_map_of_equal_gpus_is_pp(tmp_path, file):
    equal = [{"gpu": "rtx-3090", "layers": 14, "link": "pix"}, {"gpu": "rtx-3090", "layers": 14}]
    mapped = rows(tmp_path, device_map=file(stages=equal, lanes=2))
    plain = rows(tmp_path / "plain", gpu="rtx-3090", tp=1, pp=2, profile="roofline")
    for name in ("makespan_s", "e2e_mean_s", "gpu_utilisation", "iterations"):
        assert mapped[name][0] == pytest.approx(plain[name][0], rel=0.01)


def test_mapped_instance_is_slower_than_its_fastest_gpu_alone(file):
    spec = PlacementSpec("chatglm2-6b", "ignored", tp=1, pp=2, device_map=file())
    alone = [{"gpu": "rtx-3090@350w", "layers": 28}]
    fast = PlacementSpec("chatglm2-6b", "ignored", 1, device_map=file(stages=alone))
    step = (4, 400, ())
    assert placed(spec).step_time.model.step_s(*step) > placed(fast).step_time.model.step_s(*step)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model": "llama-3.1-8b"}, "is for chatglm2-6b, but model is llama-3.1-8b"),
        ({"pp": 2}, "leave tp and pp out"),
        ({"systems": ("distserve",)}, "distserve places layers itself"),
    ],
)
def test_settings_impossible_with_a_device_map_are_refused(file, settings, problem):
    with pytest.raises(SloBenchError, match=problem):
        ask(device_map=file(), **settings).plan()


def test_device_map_column_names_the_map(tmp_path, file):
    cells = pd.DataFrame(rows(tmp_path, device_map=(file(), file(ready_s=1.0))))
    assert cells["device_map"].str.endswith(".json").all()


def test_replayed_cell_starts_at_the_maps_ready_s(tmp_path, file):
    cells = rows(tmp_path, device_map=file(ready_s=100.0))
    again = replay(tmp_path / "run", cells["cell"][0])
    assert len(again.trace.instances) == 1  # one lane
    assert again.result.totals.makespan_s == pytest.approx(cells["makespan_s"][0], rel=0.05)
    assert again.result.records.first_scheduled_s.min() >= 100.0
