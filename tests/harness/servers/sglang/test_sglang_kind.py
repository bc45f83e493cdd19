"""How SGLang is installed and started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slo_bench.harness.policies.systems import SYSTEMS
from slo_bench.harness.servers.launch.server_kind import Launch
from slo_bench.harness.servers.server_kinds import server_kind
from slo_bench.workloads.errors import SloBenchError

SGLANG = server_kind("sglang")
CPU = SGLANG.builds["cpu"]


def _value(argv, option):
    return argv[list(argv).index(option) + 1]


def test_sglang_launch_turns_blocks_into_tokens_and_pages():
    launch = Launch("m", 8000, num_gpu_blocks=10, block_size=16, max_model_tokens=512)
    argv = SGLANG.argv(Path("bin"), "cuda", launch)
    assert _value(argv, "--max-total-tokens") == "160"
    assert _value(argv, "--page-size") == "16"
    assert _value(argv, "--context-length") == "512"
    assert "--device" not in argv


def test_sglang_cpu_launch_uses_torch_and_ends_with_user_arguments():
    launch = Launch("m", 8000, served_name="n", server_args=("--dtype", "float32"))
    argv = SGLANG.argv(Path("bin"), "cpu", launch)
    assert _value(argv, "--attention-backend") == "torch_native"
    assert _value(argv, "--served-model-name") == "n"
    assert "--page-size" not in argv
    assert list(argv[-2:]) == ["--dtype", "float32"]
    assert SGLANG.environ("cpu", launch)["SGLANG_USE_CPU_ENGINE"] == "1"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (None, []),
        ("edf", ["--enable-mixed-chunk"]),
        ("adaptivellm", ["--chunked-prefill-size", "-1"]),
        ("ascendra-lp", ["--enable-mixed-chunk"]),
    ],
)
def test_sglang_launch_has_prompts_as_the_policy_has_them(name, words):
    policy = name and SYSTEMS[name].policy
    argv = SGLANG.argv(Path("bin"), "cuda", Launch("m", 8000, system=name, policy=policy))
    stock = SGLANG.argv(Path("bin"), "cuda", Launch("m", 8000))
    assert list(argv) == [*stock, *words]


def test_sglang_health_path_generates_no_token():
    assert SGLANG.health_path != "/health"


def test_sglang_cpu_recipe_does_not_replace_torch():
    torch, server, needs = CPU.steps(CPU.version)
    assert not torch.dependencies
    assert not server.dependencies
    assert torch.packages[0] in needs.packages
    assert server.packages[0] == f"sglang=={CPU.version}"


def test_sglang_cpu_recipe_refuses_an_unknown_version():
    with pytest.raises(SloBenchError, match=r"0\.4\.1 has no recipe for CPU"):
        CPU.steps("0.4.1")


def test_sglang_cpu_stand_ins_are_importable_and_not_callable(tmp_path):
    # `torchvision` as from PyPI: its import dies unless the operators' schemas are declared.
    (tmp_path / "torchvision.py").write_text(
        "import torch\n"
        "if 'torchvision::nms' not in torch.library.defined:\n"
        "    raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    (tmp_path / "torch.py").write_text(
        "import types\n"
        "library = types.SimpleNamespace(defined=[])\n"
        "library.define = lambda name, schema: library.defined.append(name)\n"
    )
    CPU.finish(tmp_path, CPU.version)
    code = (
        f"import site; site.addsitedir({str(tmp_path)!r})\n"
        "import torchvision\n"
        "from sgl_kernel import anything\n"
        "from sgl_kernel.deeper import more\n"
        "for kernel in (anything, more, more.still):\n"
        "    try:\n"
        "        kernel()\n"
        "    except NotImplementedError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "sgl_kernel.anything",
        "sgl_kernel.deeper.more",
        "sgl_kernel.deeper.more.still",
    ]
