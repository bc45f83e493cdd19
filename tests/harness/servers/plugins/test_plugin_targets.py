"""An upgrade of a server that moves what we hook into is told by name."""

from slo_bench.harness.servers.plugins.plugin_targets import moved

PLUGINS = "slo_bench.harness.servers.plugins"
CORE = "slo_bench.harness.core"
HERE = "slo_bench.harness.engine"


def test_what_is_as_we_know_it_is_no_problem():
    assert (
        moved(
            {
                f"{PLUGINS}.plugin_targets.moved": ("targets",),
                f"{PLUGINS}.plugin_targets:moved": (),
            }
        )
        == []
    )
    assert moved({f"{CORE}.predictions:LearnedPredictions.step_s": ("self", "decode_seqs")}) == []
    assert (
        moved({"slo_bench.harness.load_generator.http.faults:RequestFault.ABORTED": ()}) == []
    )  # nothing to call


def test_what_is_gone_or_takes_something_else_is_named():
    learn = f"{CORE}.predictions:LearnedPredictions.learn"
    problems = moved(
        {
            f"{HERE}.nowhere:f": (),
            f"{HERE}.known:f": (),
            learn: ("self", "decode_kv_tokens"),
        }
    )
    assert problems == [
        f"{HERE}.nowhere:f is gone",
        f"{HERE}.known:f is gone",
        f"{learn} takes (self, decode_seqs, decode_kv_tokens, chunks, duration_s), "
        "not (self, decode_kv_tokens, …)",
    ]
