"""Topologies: from files, from what nvidia-smi prints; maps for launchers; Morphling."""

import subprocess
from pathlib import Path

import pytest

from slo_bench.predictors.device_map import read_device_map
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, link, model
from slo_bench.predictors.staged import staged_step_time
from slo_bench.tuner.placement import topology
from slo_bench.tuner.placement.compare_placements import answer, answers
from slo_bench.tuner.placement.exact import exact
from slo_bench.tuner.placement.launch import (
    accelerate_map,
    device_map,
    document,
    even_map,
    server_settings,
)
from slo_bench.tuner.placement.morphling import Bench, Setup, Stress, adapt, morphling
from slo_bench.tuner.placement.problem import LayerRange, problem_of, weights_of
from slo_bench.tuner.placement.topology import (
    alike,
    link_of,
    named_topology,
    parse_gpus,
    parse_topo,
    read_topology,
    this_machine,
)
from slo_bench.workloads.errors import SloBenchError, UnknownNameError

# Written after the format that nvidia-smi documents, for machines that do not exist.
NVSWITCH = """\
\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPIX\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\t0-55\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\t56-111\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
WORKSTATION = """\
        GPU0    GPU1    mlx5_0  GPU2    CPU Affinity    NUMA Affinity
GPU0     X      NV4     PHB     SYS     0-15            0
GPU1    NV4      X      PHB     PXB     0-15            0
mlx5_0  PHB     PHB      X      SYS
GPU2    SYS     PXB     SYS      X      16-31           1
"""
ONE = """\
        GPU0    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      0-23            0               N/A
"""


def test_parse_topo_of_a_machine_with_nvswitch():
    names, kinds = parse_topo(NVSWITCH, "here")
    assert names == ["GPU0", "GPU1", "GPU2"]
    assert kinds == [["X", "NV18", "NV18"], ["NV18", "X", "NV18"], ["NV18", "NV18", "X"]]


def test_parse_topo_with_a_network_card_between_gpus():
    names, kinds = parse_topo(WORKSTATION, "here")
    assert names == ["GPU0", "GPU1", "GPU2"]
    assert kinds == [["X", "NV4", "SYS"], ["NV4", "X", "PXB"], ["SYS", "PXB", "X"]]


def test_parse_topo_of_one_gpu():
    assert parse_topo(ONE, "here") == (["GPU0"], [["X"]])


def test_parse_topo_without_a_matrix_is_refused():
    with pytest.raises(SloBenchError, match="here holds no matrix"):
        parse_topo("  \n", "here")
    with pytest.raises(SloBenchError, match="no row for GPU1"):
        parse_topo("GPU0 GPU1\nGPU0 X PIX\n", "here")


def test_link_of_each_kind():
    h100, a100, b200, v100 = map(gpu, ("h100-80g", "a100-80g", "b200", "v100-16g"))
    for kind, spec in (("NV18", h100), ("NV12", a100), ("NV18", b200), ("NV6", v100)):
        usual = link(spec.peer_link).bandwidth_bytes_per_s
        assert link_of(kind, spec).bandwidth_bytes_per_s == pytest.approx(usual)
    assert link_of("NODE", a100) == link("node")
    assert link_of("PIX", h100).bandwidth_bytes_per_s == 2 * link("pix").bandwidth_bytes_per_s
    with pytest.raises(SloBenchError, match="unknown connection 'NVX'"):
        link_of("NVX", a100)


def test_parse_gpus_by_name_memory_and_power_cap():
    gpus = parse_gpus(
        "0, NVIDIA H200, 143771, 700.00, 700.00\n"
        "1, NVIDIA A100-SXM4-40GB, 40960, 400.00, 400.00\n"
        "2, NVIDIA A100 80GB PCIe, 81920, [N/A], [N/A]\n"
        "3, NVIDIA GeForce RTX 3090, 24576, 250.00, 350.00\n"
        "4, Tesla V100-SXM2-32GB, 32768, 300.00, 300.00\n"
    )
    names = ["h200-141g", "a100-40g", "a100-80g-pcie", "rtx-3090@250w", "v100-32g"]
    assert [spec.name for spec in gpus] == names


def test_parse_gpus_refuses_unknown_gpus():
    with pytest.raises(SloBenchError, match="has no GPU 'NVIDIA Titan Zeta'"):
        parse_gpus("0, NVIDIA Titan Zeta, 1000, 1, 1")
    with pytest.raises(SloBenchError, match="cannot read"):
        parse_gpus("NVIDIA-SMI has failed")


def test_topology_of_this_machine(monkeypatch):
    def run(command, **_):
        query = "0, NVIDIA A100-SXM4-80GB, 81920, 400.00, 400.00\n" * 3
        return subprocess.CompletedProcess(command, 0, NVSWITCH if "topo" in command else query, "")

    monkeypatch.setattr(topology.subprocess, "run", run)
    machine = this_machine()
    assert [device.gpu.name for device in machine.devices] == ["a100-80g"] * 3
    assert machine.links[0][0] is None
    assert machine.links[0][1].name == "nv18"


def test_topology_of_a_machine_without_gpus_is_refused(monkeypatch):
    def run(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(topology.subprocess, "run", run)
    with pytest.raises(SloBenchError, match=r"--topology FILE\.toml"):
        this_machine()


def written(tmp_path, text):
    path = tmp_path / "topology.toml"
    path.write_text(text, encoding="utf-8")
    return path


MIXED = """
[[device]]
name = "a"
gpu = "a100-40g"
count = 2
[[device]]
gpu = {like = "l4", memory_gib = 20}
layer_extra_ms = 0.5
[links]
default = "ethernet-25g"
[[link]]
between = ["a", "a"]
link = "nvlink3"
[[link]]
between = ["a-0", "GPU1"]
link = {bandwidth_gb_per_s = 5, latency_us = 9}
"""


def test_read_topology_of_a_file(tmp_path):
    parsed = read_topology(written(tmp_path, MIXED))
    assert [device.name for device in parsed.devices] == ["a-0", "a-1", "GPU1"]
    assert parsed.devices[2].gpu.memory_bytes == 20 * 2**30
    assert parsed.devices[2].layer_extra_s == 0.0005
    assert parsed.links[0][1].name == parsed.links[1][0].name == "nvlink3"
    assert (
        parsed.links[0][2].bandwidth_bytes_per_s == parsed.links[2][0].bandwidth_bytes_per_s == 5e9
    )
    assert parsed.links[1][2].name == "ethernet-25g"
    assert parsed.links[0][0] is None


def test_read_topology_of_the_docs_example(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "placement.md").read_text(encoding="utf-8")
    example = page.split("```toml")[1].split("```")[0]
    parsed = read_topology(written(tmp_path, example))
    assert [device.name for device in parsed.devices] == ["GPU0", "A-0", "A-1"]
    kinds = [[link and link.name for link in row] for row in parsed.links]
    assert kinds == [
        [None, "node", "ethernet-25g"],
        ["node", None, "nvlink3"],
        ["ethernet-25g", "nvlink3", None],
    ]


def test_topology_of_the_papers_test_bed():
    test_bed = named_topology("uellm")
    assert [device.gpu.power_w for device in test_bed.devices] == [350, 300, 250, 150]
    kinds = [[None if hop is None else hop.name for hop in row] for row in test_bed.links]
    assert kinds[0] == [None, "pix", "node", "node"]
    assert kinds[3] == ["node", "node", "pix", None]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "needs \\[\\[device\\]\\]s"),
        ('[[device]]\nname = "x"', "device 0 needs gpu"),
        ('[[device]]\ngpu = "l4"\ncount = 0', "count of GPU0"),
        ('[[device]]\ngpu = "l4"\nlayer_extra_ms = -1', "layer_extra_ms of GPU0"),
        ('[[device]]\nname = "x"\ngpu = "l4"\n' * 2, "two devices are called 'x'"),
        ('[[device]]\ngpu = "l4"\n' * 2, "no link between GPU0 and GPU1"),
        ('[[device]]\ngpu = "l4"\n[links]\nusual = "pix"', "may set default and topo"),
        ('[[device]]\ngpu = "l4"\n[links]\ntopo = "GPU7\\nGPU7 X"', "links.topo names no device"),
        ('[[device]]\ngpu = "l4"\n[[link]]\nbetween = ["GPU0"]', "needs between"),
        (
            '[[device]]\ngpu = "l4"\n[[link]]\nbetween = ["GPU0", "b"]\nlink = "pix"',
            "names 'b', no device",
        ),
        ('[[devices]]\ngpu = "l4"', "unknown 'devices'"),
    ],
)
def test_read_topology_refuses_malformed_files(tmp_path, text, problem):
    with pytest.raises(SloBenchError, match=problem):
        read_topology(written(tmp_path, text))


def test_unknown_topology_and_gpu_names_are_refused(tmp_path):
    with pytest.raises(UnknownNameError, match="topology"):
        named_topology("uelm")
    with pytest.raises(UnknownNameError, match="GPU"):
        read_topology(written(tmp_path, '[[device]]\ngpu = "l44"'))
    with pytest.raises(SloBenchError, match="at least one device"):
        alike(gpu("l4"), 0)


def test_placement_problem_has_the_simulators_times_and_memory():
    spec, topology = model("qwen2.5-14b"), named_topology("uellm-table-2-1")
    problem = problem_of(spec, topology, batch=8, context_tokens=256, host_s=0.01)
    placed = exact(problem, weights_of("balanced"))
    assert len(placed) > 1
    mapped = device_map(spec, topology, placed)
    place = Placement(spec, mapped.stages[0].gpu, pp=len(placed), split=mapped.stages)
    step_s = staged_step_time(place, 0.01).model.step_s(8, 8 * 256, ())
    assert problem.latency_s(placed) == pytest.approx(step_s, rel=1e-6)
    place.check()
    # One layer more on a full stage does not fit.
    full = [
        n
        for n, held in enumerate(placed)
        if held.layers
        == problem.devices[held.device].holds(first=n == 0, last=n == len(placed) - 1)
    ]
    assert full
    for n in full:
        stages = list(mapped.stages)
        other = next(m for m in range(len(placed)) if m != n and stages[m].layers > 1)
        stages[n] = type(stages[n])(stages[n].gpu, stages[n].layers + 1, stages[n].link)
        stages[other] = type(stages[n])(
            stages[other].gpu, stages[other].layers - 1, stages[other].link
        )
        crowded = Placement(spec, stages[0].gpu, pp=len(placed), split=tuple(stages))
        assert crowded.kv_tokens < 2048 + crowded.block_size


def test_placement_problem_of_an_encoder_is_refused():
    with pytest.raises(SloBenchError, match="bge-m3 is an encoder"):
        problem_of(model("bge-m3"), named_topology("uellm"))


def test_reserve_for_kv_takes_more_devices():
    spec, topology = model("chatglm2-6b"), named_topology("uellm")
    used = [
        len(exact(problem_of(spec, topology, reserve_bytes=gib * 2**30), weights_of("he")))
        for gib in (0, 10, 15)
    ]
    assert used == [1, 2, 3]
    with pytest.raises(SloBenchError, match="28 layers do not fit"):
        exact(problem_of(spec, topology, reserve_bytes=19 * 2**30), weights_of("he"))


def test_modes_differ_where_speed_costs_devices():
    topology = named_topology("uellm-table-2-1")
    problem = problem_of(model("chatglm2-6b"), topology, reserve_bytes=6 * 2**30)
    he, lr = (exact(problem, weights_of(mode)) for mode in ("he", "lr"))
    assert len(he) <= len(lr)
    assert problem.latency_s(lr) <= problem.latency_s(he)


def test_accelerate_map_by_hand():
    placed = (LayerRange(2, 20), LayerRange(0, 8))
    devices = accelerate_map(model("chatglm2-6b"), placed)
    assert len(devices) == 28 + 4
    assert devices["transformer.embedding"] == devices["transformer.encoder.layers.19"] == 2
    assert devices["transformer.encoder.layers.20"] == devices["transformer.output_layer"] == 0
    tied = accelerate_map(model("qwen2.5-0.5b"), (LayerRange(0, 20), LayerRange(1, 4)))
    assert (tied["lm_head"], tied["model.norm"]) == (0, 1)


def test_server_settings_of_a_map():
    settings = server_settings((LayerRange(2, 20), LayerRange(0, 8)))
    assert settings["vllm"]["environment"] == {
        "CUDA_VISIBLE_DEVICES": "2,0",
        "VLLM_PP_LAYER_PARTITION": "20,8",
    }
    assert settings["vllm"]["arguments"] == ["--pipeline-parallel-size", "2"]
    assert settings["sglang"]["environment"]["SGLANG_PP_LAYER_PARTITION"] == "20,8"
    assert (
        "VLLM_PP_LAYER_PARTITION"
        not in server_settings((LayerRange(1, 28),))["vllm"]["environment"]
    )


def test_even_map_divides_layers_or_refuses():
    assert [held.layers for held in even_map(28, 3)] == [10, 9, 9]
    with pytest.raises(SloBenchError, match="cannot be shared out"):
        even_map(2, 3)


def test_placement_methods_are_compared():
    problem = problem_of(model("chatglm2-6b"), named_topology("uellm"))
    weights = weights_of("balanced")
    best, paper, even = answers(problem, weights, ("exact", "helr", "even"))
    assert best.cost == paper.cost < even.cost
    assert even.gap(best) > 1
    with pytest.raises(SloBenchError, match="unknown method"):
        answer(problem, weights, "guess")
    many = problem_of(model("chatglm2-6b"), alike(gpu("l4"), 40))
    refused = answers(many, weights, ("helr", "even"))
    assert "at most 10" in refused[0].refused
    assert "cannot be shared out" in refused[1].refused


SETUPS = [Setup(gpus, batch) for gpus in (1, 2, 4) for batch in (1, 4, 10)]


def pretend(factor, gpu_power=-0.1):
    def test(setup):
        return Stress(setup, factor * setup.gpus**gpu_power * setup.batch**0.8, 10.0)

    return test


def test_morphling_taught_by_like_models_needs_one_test():
    taught = [[pretend(factor)(setup) for setup in SETUPS] for factor in (3.0, 5.0, 8.0)]
    trials = adapt(SETUPS, pretend(20.0), taught, tests=5)
    assert [test.setup for test in trials] == [Setup(1, 10)]


def test_morphling_of_an_unlike_model_takes_more_tests():
    # The teachers got slower by GPUs, some more and some less; this one gets faster.
    powers = (-0.4, -0.1, 0.1)
    taught = [[pretend(5.0, power)(setup) for setup in SETUPS] for power in powers]
    trials = adapt(SETUPS, pretend(5.0, 0.6), taught, tests=9)
    assert trials[0].setup == Setup(1, 10)
    assert max(trials, key=lambda test: test.tokens_per_s).setup.batch == 10


def test_morphling_charges_its_tests():
    spec, topology = model("chatglm2-6b"), named_topology("uellm")
    bench = Bench(topology, requests=20, host_s=0.03)
    solution = morphling(spec, bench, tests=2, batches=(1, 4))
    assert solution.best == Setup(1, 4)
    assert solution.placed == (LayerRange(0, 28),)
    assert solution.took_s == pytest.approx(sum(test.took_s for test in solution.tests))
    assert solution.took_s > 15
    with pytest.raises(SloBenchError, match="at least 1 test"):
        morphling(spec, bench, tests=0)
    with pytest.raises(SloBenchError, match="fits on none"):
        morphling(model("llama-2-70b"), bench)


OF_THE_AUTHORS = {"even": (6, 8, 8, 6), "even-2-gpus": (13, 15), "even-3-gpus": (8, 10, 10)}


@pytest.mark.parametrize("name", ["helr", *OF_THE_AUTHORS])
def test_shipped_maps_equal_those_made_now(name):
    spec, topology = model("chatglm2-6b"), named_topology("uellm")
    if name == "helr":
        problem = problem_of(spec, topology, host_s=0.014)
        placed = answer(problem, weights_of("balanced"), "exact").placed
    else:
        placed = tuple(LayerRange(*range_) for range_ in enumerate(OF_THE_AUTHORS[name]))
    again = document(spec, topology, placed, lanes=1)
    shipped = read_device_map(f"uellm-{name}")
    assert shipped.plain() == {key: again[key] for key in shipped.plain()}


def test_shipped_morphling_map_has_the_time_of_its_tests():
    solution = morphling(model("chatglm2-6b"), Bench(named_topology("uellm"), host_s=0.014))
    shipped = read_device_map("uellm-morphling")
    assert shipped.layers == tuple(held.layers for held in solution.placed)
    assert shipped.ready_s == pytest.approx(solution.took_s, abs=1e-3)


def test_table_2_1_throughputs_within_a_tenth():
    """Tokens a second with so many of 33 modules on a 3090 and the rest on a V100, one sequence."""
    published = {16: 11.19, 20: 13.09, 24: 14.85, 28: 17.23, 32: 22.55}
    spec, first, second = model("chatglm2-6b"), gpu("rtx-3090"), gpu("v100-16g")
    extra_s = named_topology("uellm-table-2-1").devices[1].layer_extra_s
    kind = type(device_map(spec, alike(first, 1), (LayerRange(0, 28),)).stages[0])
    for modules, tokens_per_s in published.items():
        layers = round(28 * modules / 33)
        slow = kind(second, 28 - layers, None, extra_s * 33 / 28)
        stages = (kind(first, layers, link("node")), slow)
        place = Placement(spec, first, pp=2, split=stages)
        ours = 1 / staged_step_time(place, 0.028).model.step_s(1, 100, ())
        assert ours == pytest.approx(tokens_per_s, rel=0.1)
