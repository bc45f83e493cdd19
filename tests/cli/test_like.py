"""`--like`: settings of a deployment below those that are options."""

from __future__ import annotations

import pytest

from slo_bench.cli.options.experiment_options import experiment_of
from slo_bench.cli.options.from_schema import Given
from slo_bench.cli.options.like import with_like
from slo_bench.workloads.errors import SloBenchError

COMMAND = (
    "vllm serve Qwen/Qwen3-8B -tp 2 --max-num-seqs 64 --max-model-len 4096 "
    "--gpu-memory-utilization .8"
)


def test_settings_of_a_deployment_make_the_experiment(capsys):
    experiment = experiment_of(Given({}, like=COMMAND))
    assert (experiment.systems, experiment.model, experiment.tp) == (("vllm",), ("qwen3-8b",), (2,))
    assert experiment.memory_share == (0.8,)
    assert experiment.parameters == {"vllm": {"max_num_seqs": (64,)}}
    assert "--like: of started servers alone: server.max_model_tokens" in capsys.readouterr().err
    launched = experiment_of(Given({"backend": "vllm"}, like=COMMAND))
    assert launched.server.max_model_tokens == 4096


def test_options_beside_it_count_first(capsys):
    options = Given(
        {"tp": (4,), "model": ("llama-3.1-8b",), "systems": ("sarathi", "vllm")},
        sets=("memory_share=0.7", "vllm.max_num_seqs=9"),
        like=COMMAND,
    )
    experiment = experiment_of(options)
    assert (experiment.model, experiment.tp) == (("llama-3.1-8b",), (4,))
    assert experiment.memory_share == (0.7,)
    assert experiment.parameters == {"vllm": {"max_num_seqs": (9,)}}
    other = experiment_of(Given({"systems": ("sarathi",)}, like=COMMAND))
    assert other.parameters == {}
    assert "max_num_seqs: not those of sarathi" in capsys.readouterr().err


def test_what_a_command_chooses_itself_is_left_out(capsys):
    options = with_like(Given({}, like=COMMAND), searched=("tp", "gpu", "instances"))
    assert options.settings["server.max_model_tokens"] == 4096  # for the files of the plan
    assert "tp" not in options.settings
    assert "chosen by this command: tp" in capsys.readouterr().err
    assert with_like(options) is options


def test_deployment_that_cannot_be_read_is_an_error():
    with pytest.raises(SloBenchError, match="neither a file nor a command"):
        experiment_of(Given({}, like="python server.py"))
