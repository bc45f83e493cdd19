import json
from importlib.resources import files

import pytest

from slo_bench import Experiment
from slo_bench.harness.experiments.config.setting import (
    SERVES,
    SIMULATOR,
    Axis,
    declared,
    number_list,
    setting,
)
from slo_bench.harness.experiments.execution.cell_specs import (
    CellSpec,
    deployment_notes,
    file_notes,
    placed,
)
from slo_bench.harness.experiments.execution.offered_load import DEFAULT_REQUESTS, two_digits
from slo_bench.workloads.errors import SloBenchError


def cells(**settings):
    return Experiment(**{"systems": "vllm", "rates": 1, "seeds": 1, **settings}).plan().cells


def test_every_combination_is_a_cell_and_every_axis_a_column():
    specs = cells(systems=["vllm", "orca"], tp=[1, 2], rates=[1, 2], seeds=2, slo_scale=[1, 0.5])
    assert len(specs) == 2 * 2 * 2 * 2 * 2
    assert specs[0].cell == "vllm_tp-1_slo-scale-1_rate-1_seed-0"
    assert list(specs[0].columns)[8:] == ["replay_speed", "seed", "tp", "slo_scale"]
    assert {(c.columns["tp"], c.columns["gpus"]) for c in specs} == {(1, 1), (2, 2)}


def test_more_instances_than_any_system_has_are_refused_at_once():
    with pytest.raises(SloBenchError, match=r"1,000,000 instances or GPUs are more than the"):
        cells(instances=1_000_000)


def test_columns_hold_no_folders_of_the_machine(tmp_path):
    shipped = files("slo_bench.predictors") / "device_maps" / "two-sites-10ms.json"
    maps = [tmp_path / name / "map.json" for name in "ab"]
    for path in maps:
        path.parent.mkdir()
        path.write_text(shipped.read_text())
    specs = cells(model="llama-3.1-70b", device_map=[str(path) for path in maps])
    assert [cell.columns["device_map"] for cell in specs] == ["a/map.json", "b/map.json"]
    assert [cell.placement.device_map for cell in specs] == [str(path) for path in maps]


def test_setting_with_one_value_has_no_column():
    (cell,) = cells(tp=2, router="least-loaded", instances=2)
    assert "tp" not in cell.columns
    assert cell.columns["gpus"] == 4
    assert cell.router == "least-loaded"


def test_num_gpu_blocks_and_num_cpu_blocks_are_settings_and_axes():
    specs = cells(num_gpu_blocks=[128, 256], num_cpu_blocks=[0, 64])
    assert [(c.columns["num_gpu_blocks"], c.columns["num_cpu_blocks"]) for c in specs] == [
        (128, 0),
        (128, 64),
        (256, 0),
        (256, 64),
    ]
    places = [placed(c.placement).placement for c in specs]
    assert {(p.num_gpu_blocks, p.num_cpu_blocks) for p in places} == {
        (128, 0),
        (128, 64),
        (256, 0),
        (256, 64),
    }
    (cell,) = cells(num_gpu_blocks=128)
    assert "num_gpu_blocks" not in cell.columns
    assert placed(cell.placement).placement.num_cpu_blocks == 2048  # 4 GiB, as without the setting


def test_num_gpu_blocks_and_num_cpu_blocks_survive_the_file(tmp_path):
    path = tmp_path / "few.toml"
    experiment = Experiment(systems="vllm", num_gpu_blocks=128, num_cpu_blocks=[32, 64])
    path.write_text(experiment.to_toml())
    assert Experiment.load(path) == experiment


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_gpu_blocks": 0}, "num_gpu_blocks must be greater than or equal to 1 but is 0"),
        ({"num_cpu_blocks": -1}, "num_cpu_blocks must be greater than or equal to 0 but is -1"),
        ({"num_gpu_blocks": 10**7}, "10,000,000 KV blocks of 16 tokens do not fit"),
    ],
)
def test_impossible_block_numbers_are_refused(settings, complaint):
    with pytest.raises(SloBenchError, match=complaint):
        cells(**settings)


def test_parameters_are_swept_for_their_own_system_only():
    specs = cells(
        systems=["vllm", "sarathi"],
        parameters={"sarathi": {"chunk_tokens": [256, 512], "max_num_seqs": 64}},
    )
    assert [(c.system, dict(c.parameters)) for c in specs] == [
        ("vllm", {}),
        ("sarathi", {"chunk_tokens": 256, "max_num_seqs": 64}),
        ("sarathi", {"chunk_tokens": 512, "max_num_seqs": 64}),
    ]
    assert specs[1].columns["sarathi.chunk_tokens"] == 256
    assert specs[1].cell == "sarathi_chunk-tokens-256_rate-1_seed-0"
    assert "sarathi.max_num_seqs" not in specs[1].columns


def test_tp_and_instances_are_chosen_from_model_and_gpus():
    (cell,) = cells(model="llama-3-70b", gpu="a100-80g", gpus=8)
    assert cell.placement.tp * cell.instances == 8
    assert cell.placement.tp > 1
    (cell,) = cells(gpus=4)
    assert (cell.placement.tp, cell.instances) == (1, 4)
    (cell,) = cells(tp=2, pp=2)
    assert cell.columns["gpus"] == 4


def test_slo_tables_have_readable_columns():
    specs = cells(slo=[{"ttft": 1, "tpot": 0.1, "chat": {"ttft": 0.5}}, "e2e=10"])
    assert [c.columns["slo"] for c in specs] == ["ttft=1,tpot=0.1; chat:ttft=0.5", "e2e=10"]


def test_cell_names_are_distinct_file_names():
    specs = cells(slo=["ttft=1", "ttft=1;", "ttft=2"])
    names = [c.cell for c in specs]
    assert len(set(names)) == 3
    assert not any("/" in name or "=" in name for name in names)


def test_levels_by_default_straddle_the_capacity():
    planned = Experiment(systems="vllm").plan()
    rates = planned.resolved.rates
    assert len(rates) == 4
    assert rates[-1] / rates[0] == pytest.approx(5.5, rel=0.1)
    assert {c.requests for c in planned.cells} == {DEFAULT_REQUESTS}
    twice = Experiment(systems="vllm", instances=2).plan().resolved.rates
    assert twice[0] == pytest.approx(2 * rates[0], rel=0.1)
    assert planned.resolved.seeds == 3


def test_cell_survives_conversion_to_plain_values():
    import json

    (cell,) = cells(slo={"ttft": 1})
    plain = json.loads(json.dumps(cell.plain()))
    assert CellSpec.from_plain(plain) == cell


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("2", (2,)),
        ("2,4,8", (2, 4, 8)),
        ("2:8:2", (2, 4, 6, 8)),
        ("0.1:0.3:0.1", (0.1, 0.2, 0.3)),
        ("1:3", (1, 2, 3)),
        ("0.5,2:4", (0.5, 2, 3, 4)),
    ],
)
def test_number_list_reads_ranges_and_lists(text, rates):
    assert number_list(text) == pytest.approx(rates)


@pytest.mark.parametrize("text", ["", "a", "1,,2", "4:2", "1:2:0", "1:2:3:4", "1:inf", "0:1:1e-9"])
def test_number_list_refuses_unreadable_rates(text):
    with pytest.raises(SloBenchError):
        number_list(text)


@pytest.mark.parametrize(
    ("value", "rounded"), [(3.4313, 3.4), (0.0567, 0.057), (123.4, 120), (1.0, 1.0)]
)
def test_two_digits_rounds_rates(value, rounded):
    assert two_digits(value) == pytest.approx(rounded)


def test_warmup_may_be_a_share_of_the_requests():
    experiment = Experiment(
        systems="vllm", workload="alpaca", rates=[2.0, 4.0], requests=100, warmup_share=0.2
    )
    assert {c.rate_rps: c.warmup_s for c in experiment.plan().cells} == {2.0: 10.0, 4.0: 5.0}
    with pytest.raises(SloBenchError, match="warmup_share needs rates or load_factors"):
        Experiment(workload="alpaca", arrivals="concurrency(8)", warmup_share=0.2).plan()


def test_parameters_one_at_a_time_vary_each_beside_the_first_values():
    """Each value alone beside the first ones of the others; a column only where it differs."""
    experiment = Experiment(
        systems=["ascendra"],
        parameters={"ascendra": {"value": ["edf", "sjf", "fcfs"], "tickets": [True, False]}},
        combinations="one-at-a-time",
        instances=3,
        rates=[4],
        seeds=1,
    )
    cells = experiment.plan().cells
    assert [(c.parameters["value"], c.parameters["tickets"]) for c in cells] == [
        ("edf", True),
        ("sjf", True),
        ("fcfs", True),
        ("edf", False),
    ]
    swept_columns = [
        {k: v for k, v in c.columns.items() if k.startswith("ascendra.")} for c in cells
    ]
    assert swept_columns == [
        {},
        {"ascendra.value": "sjf"},
        {"ascendra.value": "fcfs"},
        {"ascendra.tickets": False},
    ]
    assert len(experiment.model_copy(update={"combinations": "all"}).plan().cells) == 6


def test_version_whose_host_times_the_roofline_has_not_is_refused():
    named = {"systems": "vllm", "rates": 1, "profile": "roofline", "server_version": "0.11"}
    with pytest.raises(SloBenchError, match=r"1 ms of host, not the host times of vLLM 0\.11"):
        placed(Experiment(**named).plan().cells[0].placement)
    assert placed(Experiment(**named, host_s=0.002).plan().cells[0].placement)


def test_host_link_and_prefill_overhead_lengthen_steps():
    """A slower host link makes swaps longer, a fixed time those iterations that prefill."""
    usual, slow = (
        placed(
            Experiment(systems="vllm", rates=1, profile="roofline", **more)
            .plan()
            .cells[0]
            .placement
        )
        for more in ({}, {"host_link": "5gb/s@0us", "prefill_overhead_s": 0.02})
    )
    link = usual.placement.host_link.bandwidth_bytes_per_s / 5e9
    ratio = slow.placement.swap_s_per_block / usual.placement.swap_s_per_block
    assert ratio == pytest.approx(link)
    step_s, slower_s = usual.step_time.model.step_s, slow.step_time.model.step_s
    assert slower_s(4, 400, ((0, 100),)) - step_s(4, 400, ((0, 100),)) == pytest.approx(0.02)
    assert slower_s(4, 400, ()) == step_s(4, 400, ())
    with pytest.raises(SloBenchError, match="did you mean pcie3"):
        Experiment(systems="vllm", rates=1, host_link="pcie3").plan()


SIMULATED_ONLY = {
    "refine": 1,
    "expert_skew": 1.0,
    "failures": "0@1",
    "kv_disk_gib": 1.0,
    "prefill_overhead_s": 0.02,
    "host_link": "pcie3-x16",
    "front_end": "none",
}


def test_settings_of_the_simulator_alone_say_so_in_their_help():
    settings = declared(Experiment)
    only = {name for name, setting in settings.items() if setting.backends == SIMULATOR}
    assert only == set(SIMULATED_ONLY)
    assert all("Simulated backend only." in settings[name].help for name in only)


@pytest.mark.parametrize("name", SIMULATED_ONLY)
@pytest.mark.parametrize("backend", ["openai", "vllm"])
def test_settings_of_the_simulator_alone_are_refused_elsewhere(name, backend):
    problem = rf"{name} .*has no effect with backend {backend}, only with simulated"
    setting = {name: SIMULATED_ONLY[name]}
    with pytest.raises(SloBenchError, match=problem):
        Experiment(systems="vllm", backend=backend, rates=1, **setting).plan()


def test_models_go_with_servers_that_come_and_go_and_systems_for_several():
    fleet = {"models": "fleet(llama-3.1-8b*2)", "rates": 1}
    for backend in ("openai", "sglang", "torch"):
        with pytest.raises(SloBenchError, match=r"models .* only with simulated, vllm"):
            Experiment(systems="prism", backend=backend, **fleet).plan()
    with pytest.raises(SloBenchError, match="vllm serves one model"):
        Experiment(systems="vllm", backend="vllm", **fleet).plan()
    with pytest.raises(SloBenchError, match="say which"):
        Experiment(systems="prism", backend="vllm", rates=1).plan()


def test_a_variant_cannot_set_what_has_no_effect():
    variants = {"plain": {}, "slower": {"host_link": "pcie3-x16"}}
    with pytest.raises(SloBenchError, match=r"host_link .*no effect with backend vllm"):
        Experiment(systems="vllm", backend="vllm", rates=1, variants=variants).plan()


@pytest.mark.parametrize(
    ("name", "value"),
    [("tp", 2), ("dp", 2), ("instances", 2), ("num_gpu_blocks", 9), ("max_loras", 4)],
)
def test_settings_that_the_schema_marks_for_one_model_are_refused_with_several(name, value):
    fleet = Experiment(
        systems="prism", models="fleet(qwen2.5-3b*2)", gpus=2, rates=1, **{name: value}
    )
    assert declared(Experiment)[name].setting.one_model
    with pytest.raises(SloBenchError, match=f"{name} is for one model; several share"):
        fleet.plan()


def test_a_setting_that_is_marked_for_one_model_is_refused_without_further_code():
    class More(Experiment):
        rack: Axis[int | None] = setting(SERVES, "Rack.", one_model=True, part="cell")

    fleet = More(systems="prism", models="fleet(qwen2.5-3b*2)", gpus=2, rates=1, rack=3)
    with pytest.raises(SloBenchError, match="rack is for one model"):
        fleet.plan()


def test_deployment_notes_say_what_servers_refuse(tmp_path):
    config = {"model_type": "llama", "hidden_size": 5120, "num_hidden_layers": 4, "vocab_size": 320}
    config |= {"max_position_embeddings": 4096}
    config |= {"num_attention_heads": 40, "num_key_value_heads": 10, "intermediate_size": 13824}
    (tmp_path / "config.json").write_text(json.dumps(config))
    notes = deployment_notes(Experiment(model=str(tmp_path), tp=[2, 4], rates=1))
    assert len(notes) == 1
    assert "which tp 4 does not divide" in notes[0]


def test_file_notes_say_what_was_read_of_a_trace(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("ts,in_tokens,out_tokens,who\n0,9,1,a\n5,8,2,b\n")
    both = Experiment(systems="vllm", workload=(str(trace), "azure-conv"), seeds=1)
    assert file_notes(both) == [
        "t.csv: arrival_s is read from ts (s)",
        "t.csv: prompt_tokens is read from in_tokens",
        "t.csv: output_tokens is read from out_tokens",
        "t.csv: not used: who",
    ]
    mix = Experiment(systems="vllm", workload=f"mix(a={trace}:0.5, b=azure-conv:0.5)", seeds=1)
    assert file_notes(mix) == file_notes(both)


@pytest.mark.parametrize(
    ("settings", "server"),
    [
        ({}, "vLLM"),
        ({"server_version": "sglang-0.5.9"}, "SGLang 0.5.9"),
        ({"gpu": "rtx-4090", "model": "llama-3.1-8b"}, "vLLM"),  # a fit, without kernel tables
        ({"front_end": "none"}, None),
        ({"profile": "roofline"}, None),
    ],
)
def test_a_simulation_has_the_front_end_of_its_server_and_tells_it(settings, server):
    [cell] = Experiment(systems="vllm", rates=1, seeds=1, **settings).plan().cells
    deployment = placed(cell.placement)
    assert (deployment.front_end is None) == (server is None)
    told = "front end of " in deployment.step_time.provenance
    assert told == (server is not None)
    if server is not None:
        assert f"front end of {server}" in deployment.step_time.provenance
