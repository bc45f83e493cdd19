"""Systems by name: stock, a user's file, an installed package, and parameters that are checked."""

from __future__ import annotations

import textwrap
from importlib.metadata import EntryPoint

import pytest

from slo_bench.cli.options.names import KINDS, in_brief, names
from slo_bench.harness.core.policy import Policy, StaticPolicy
from slo_bench.harness.policies import stock, systems
from slo_bench.harness.policies.systems import SYSTEMS, System, system
from slo_bench.harness.policies.vllm import Vllm
from slo_bench.workloads.errors import SloBenchError, UnknownNameError

STOCK = (
    "vllm", "vllm-v0", "vllm-swap", "sarathi", "orca", "fastertransformer", "fifo", "sjf", "ljf",
    "sglang",
)  # fmt: skip


@pytest.mark.parametrize("name", STOCK)
def test_stock_system_is_found_by_name(name):
    stock = system(name)
    assert stock is SYSTEMS[name]
    assert stock.name == name
    assert isinstance(stock.policy, Policy | StaticPolicy)
    assert stock.source


@pytest.mark.parametrize(
    ("name", "parameters", "limits"),
    [
        ("vllm", {}, {"batched_tokens": 2048, "sampled_sequences": 256}),
        ("sglang", {"max_running_requests": 64}, {"batched_tokens": 8192, "sampled_sequences": 64}),
        ("adaptivellm", {}, {"batched_tokens": 4096, "sampled_sequences": 256}),  # no chunks
        ("adaptivellm", {"chunk_tokens": 512}, {"batched_tokens": 512, "sampled_sequences": 256}),
        ("orca", {}, {}),
    ],
)
def test_limits_of_a_step_are_those_of_the_parameters(name, parameters, limits):
    assert system(name).with_parameters(**parameters).step_limits == limits


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_has_a_one_line_description(name):
    line = SYSTEMS[name].description
    assert 20 < len(line) < 100
    assert "\n" not in line
    assert stock.STOCK[name].description == line  # read from the source, not imported


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sarahti", "did you mean sarathi"),
        ("VLLM", "did you mean vllm"),
        ("vllm_swap", "did you mean vllm-swap"),
        ("#", "known: .*fifo.*sglang"),
    ],
)
def test_misspelt_system_is_refused_with_a_suggestion(name, hint):
    with pytest.raises(UnknownNameError, match=f"unknown system '{name}'; {hint}"):
        system(name)


# ---------------------------------------------------------------- a file of the user's

ONE = """
    from dataclasses import dataclass
    from slo_bench.harness.core.policy import Policy, parameter
    from slo_bench.harness.policies.vllm import Vllm

    @dataclass(frozen=True)
    class ShortestFirst(Policy):
        '''Shortest prompt first.'''
        weight: float = parameter(1.0, 0.0, 10.0)

        def queue_key(self, r, view):
            return self.weight * r.prompt_tokens
"""
TWO = (
    ONE
    + """
    @dataclass(frozen=True)
    class LongestFirst(ShortestFirst):
        def queue_key(self, r, view):
            return -r.prompt_tokens
"""
)


@pytest.fixture
def file(tmp_path):
    def written(text: str, name: str = "my_policy.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return written


def test_system_of_a_file_with_one_policy(file):
    my_policy = system(file(ONE))
    assert my_policy.name == "my-policy"
    assert type(my_policy.policy).__name__ == "ShortestFirst"
    assert my_policy.parameters() == {"weight": 1.0}
    assert my_policy.description == "Shortest prompt first."


def test_system_of_a_file_serves_requests(file, serve, requests):
    workload = requests((0, 30, 2), (0.1, 30, 1), (0.2, 10, 1), (0.3, 20, 1))
    policy = system(file(ONE.replace("def queue_key", "def limits(self, view):\n"
        "            from slo_bench.harness.core.decisions import Limits\n"
        "            return Limits(max_seqs=1)\n\n        def queue_key")))  # fmt: skip
    assert serve(workload, policy).records.first_scheduled_s.tolist() == [0, 4, 2, 3]


def test_system_of_a_class_in_a_file(file):
    path = file(TWO)
    assert type(system(f"{path}:LongestFirst").policy).__name__ == "LongestFirst"
    with pytest.raises(SloBenchError, match=r"found: ShortestFirst, LongestFirst\); name it as"):
        system(path)
    with pytest.raises(SloBenchError, match=r"my_policy.py has no Middle"):
        system(f"{path}:Middle")


def test_system_object_in_a_file(file):
    path = file(
        """
        from slo_bench.harness.policies.vllm import Vllm
        from slo_bench.harness.policies.systems import System

        NARROW = System("narrow", Vllm(max_num_seqs=4), router="least-loaded")
        """
    )
    assert system(f"{path}:NARROW") == System("narrow", Vllm(max_num_seqs=4), "least-loaded")


def test_policy_file_is_loaded_once(file):
    path = file(ONE)
    assert system(path) == system(path)  # of the same class


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def broken(:", "cannot be loaded: SyntaxError"),
        ("import no_such_module", "cannot be loaded: ModuleNotFoundError: .*no_such_module"),
        ("1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("x = 1", r"must define one subclass of Policy or StaticPolicy \(found: none\)"),
        # What a file imports is not its own.
        ("from slo_bench.harness.policies.vllm import Vllm", r"\(found: none\)"),
        (ONE.replace("1.0, 0.0, 10.0", "99.0, 0.0, 10.0"), "ShortestFirst.weight must be from"),
        (ONE.replace("    @dataclass(frozen=True)\n", ""), "put @dataclass.* above the class"),
        (ONE.replace(" = parameter(1.0, 0.0, 10.0)", ""), "every parameter needs a default"),
    ],
)  # fmt: skip
def test_file_without_a_policy_is_refused(file, text, problem):
    with pytest.raises(SloBenchError, match=problem):
        system(file(text))


def test_file_name_that_is_no_policy_is_refused(file):
    with pytest.raises(SloBenchError, match="is neither a System nor a Policy but 1"):
        system(file("x = 1") + ":x")


def test_missing_policy_file_is_refused(tmp_path):
    with pytest.raises(SloBenchError, match=r"no file .*absent.py; --system takes"):
        system(str(tmp_path / "absent.py"))


# ---------------------------------------------------------------- an installed package


OF_ANOTHER_NAME = System("vllm", Vllm())


@pytest.fixture
def installed(monkeypatch):
    def offer(**values: str) -> None:
        entry_points = [EntryPoint(n, v, systems.ENTRY_POINT_GROUP) for n, v in values.items()]
        filters = {"group": systems.ENTRY_POINT_GROUP}
        monkeypatch.setattr(
            systems, "entry_points", lambda **kw: entry_points if kw == filters else []
        )

    return offer


def test_system_of_an_entry_point(installed):
    installed(theirs="slo_bench.harness.policies.vllm:Vllm")
    assert system("theirs").policy == Vllm()
    assert system("theirs").name == "theirs"


def test_entry_point_with_a_stock_name_is_refused(installed):
    installed(fifo="slo_bench.harness.policies.vllm:Vllm")
    assert system("fifo") is SYSTEMS["fifo"]


def test_installed_systems_are_listed_but_for_broken_ones(installed):
    installed(theirs="slo_bench.harness.policies.vllm:Vllm", broken="math:pi", fifo="math:pi")
    assert [listed.name for listed in systems.installed_systems()] == ["theirs"]
    assert [entry["name"] for entry in KINDS["systems"]()][-1] == "theirs"
    assert [entry["name"] for entry in KINDS["compatibility"]()][-1] == "theirs"


def test_installed_package_is_listed_in_brief_and_completed(tmp_path, monkeypatch):
    package = tmp_path / "theirs-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    entries = "theirs = slo_bench.harness.policies.vllm:Vllm\nbroken = math:pi\n"
    (package / "entry_points.txt").write_text(f"[{systems.ENTRY_POINT_GROUP}]\n{entries}")
    monkeypatch.syspath_prepend(tmp_path)
    briefly = {entry["name"]: entry["description"] for entry in in_brief("systems")}
    described = {entry["name"]: entry["description"] for entry in KINDS["systems"]()}
    assert briefly == described
    assert list(briefly) == [*SYSTEMS, "theirs"] == names("compatibility")
    assert briefly["theirs"] == SYSTEMS["vllm"].description


def test_systems_are_listed_in_brief_without_sources(monkeypatch):
    def absent(package, path):
        raise FileNotFoundError(path)

    described = in_brief("systems")
    monkeypatch.setattr(stock, "get_data", absent)
    assert in_brief("systems") == described


def test_misspelt_entry_point_is_suggested(installed):
    installed(theirs="slo_bench.harness.policies.vllm:Vllm")
    with pytest.raises(UnknownNameError, match="did you mean theirs"):
        system("their")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("no_such_package:Thing", r"system theirs \(no_such_package:Thing\) cannot be loaded"),
        ("slo_bench.harness.policies.vllm:Absent", "cannot be loaded: AttributeError"),
        ("math:pi", "is neither a System nor a Policy but 3.14"),
        (f"{__name__}:OF_ANOTHER_NAME", "is the system vllm, not theirs"),
    ],
)
def test_broken_entry_point_is_refused(installed, value, problem):
    installed(theirs=value)
    with pytest.raises(SloBenchError, match=problem):
        system("theirs")


# ---------------------------------------------------------------- parameters


def test_with_parameters_gives_a_changed_copy():
    wide = SYSTEMS["vllm"].with_parameters(max_num_seqs=512)
    assert wide.parameters() == {**SYSTEMS["vllm"].parameters(), "max_num_seqs": 512}
    assert SYSTEMS["vllm"].parameters()["max_num_seqs"] == 256  # unchanged
    assert (wide.name, wide.prefix_cache) == ("vllm", True)


def test_parameter_of_a_whole_float_is_an_integer():
    seqs = SYSTEMS["vllm"].with_parameters(max_num_seqs=8.0).parameters()["max_num_seqs"]
    assert seqs == 8
    assert isinstance(seqs, int)


@pytest.mark.parametrize(
    ("name", "parameters", "problem"),
    [
        ("vllm", {"max_num_seq": 8}, "unknown parameter of Vllm 'max_num_seq'; did you mean"),
        ("vllm", {"max_num_seqs": 0}, "max_num_seqs must be from 1 to 8192 but is 0"),
        ("vllm", {"max_num_seqs": 8.5}, "max_num_seqs must be a whole number but is 8.5"),
        ("vllm", {"max_num_seqs": "many"}, "max_num_seqs must be a whole number but is 'many'"),
        ("vllm", {"max_num_seqs": True}, "max_num_seqs must be a number from 1 to 8192"),
        ("vllm", {"max_num_seqs": float("nan")}, "max_num_seqs must be a whole number but is nan"),
        ("sarathi", {"watermark": -0.1}, "watermark must be from 0.0 to 0.5 but is -0.1"),
        ("sarathi", {"watermark": float("nan")}, "watermark must be from 0.0 to 0.5 but is nan"),
        ("sarathi", {"watermark": "low"}, "watermark must be a number from 0.0 to 0.5"),
        ("vllm-swap", {"host_full": "wait"}, "host_full must be one of admit-none, stall"),
    ],
)
def test_with_parameters_refuses_impossible_values(name, parameters, problem):
    with pytest.raises(SloBenchError, match=problem):
        SYSTEMS[name].with_parameters(**parameters)
