import dataclasses

import numpy as np
import pytest

from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.readers.formats import read
from slo_bench.workloads.slo import parse_slo
from slo_bench.workloads.source import load_source
from slo_bench.workloads.workload import Workload
from slo_bench.workloads.writer import write_csv

SOURCES = [
    ("azure-conv", {}),
    ("mooncake-conversation", {}),
    ("longbench", {"models": "zipf(3)"}),
    ("alpaca", {"sessions": "sessions(turns=uniform(1,4), system_prompt_tokens=40)"}),
    ("mix(chat=azure-conv:1, code=azure-code:2)", {}),
]


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
@pytest.mark.parametrize(("name", "settings"), SOURCES)
def test_written_csv_is_read_back(tmp_path, name, settings, suffix):
    source = load_source(name, **settings)
    slo = parse_slo("ttft=1,e2e=uniform(1,9)")
    workload = source.make(rate_rps=3, requests=200, seed=4, slo=slo)
    # A trace begins at 0, so that only times since the first arrival can come back.
    workload = dataclasses.replace(workload, arrival_s=workload.arrival_s - workload.arrival_s[0])
    path = tmp_path / f"w{suffix}"
    write_csv(workload, path)
    back = read(path).workload
    for a, b in zip(workload, back, strict=True):
        assert a == b


def test_written_csv_repeats_the_same_bytes(tmp_path):
    workload = load_source("alpaca").make(rate_rps=3, requests=50)
    write_csv(workload, tmp_path / "a.csv.gz")
    write_csv(workload, tmp_path / "b.csv.gz")
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()


def test_write_csv_leaves_out_constant_default_columns(tmp_path):
    workload = Workload(np.array([0.0, 1.5]), np.array([3, 4]), np.array([5, 6]))
    write_csv(workload, tmp_path / "a.csv")
    text = (tmp_path / "a.csv").read_text()
    assert text == "arrival_s,prompt_tokens,output_tokens\n0.0,3,5\n1.5,4,6\n"


def test_write_csv_refuses_a_closed_loop(tmp_path):
    workload = load_source("alpaca", arrivals="concurrency(4)").make(requests=5)
    with pytest.raises(SloBenchError, match="closed loop"):
        write_csv(workload, tmp_path / "a.csv")
    assert not list(tmp_path.iterdir())


def test_write_csv_to_an_unwritable_folder_leaves_nothing(tmp_path):
    workload = load_source("alpaca").make(rate_rps=1, requests=5)
    (tmp_path / "file").touch()
    with pytest.raises(SloBenchError, match="cannot write"):
        write_csv(workload, tmp_path / "file" / "a.csv")
    (tmp_path / "taken.csv").mkdir()
    with pytest.raises(SloBenchError, match="cannot write"):
        write_csv(workload, tmp_path / "taken.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken.csv"]
