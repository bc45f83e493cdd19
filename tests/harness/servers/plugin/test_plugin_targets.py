"""An upgrade of a server that moves what we hook into is told by name."""

from slo_bench.harness.servers.plugin.contract import moved_targets

PLUGINS = "slo_bench.harness.servers.plugin"
CORE = "slo_bench.harness.core"
HERE = "slo_bench.harness.engine"


def test_moved_targets_of_known_signatures_is_empty():
    assert (
        moved_targets(
            {
                f"{PLUGINS}.contract.moved_targets": ("targets",),
                f"{PLUGINS}.contract:moved_targets": (),
            }
        )
        == []
    )
    assert (
        moved_targets({f"{CORE}.predictions:LearnedPredictions.step_s": ("self", "decode_seqs")})
        == []
    )
    assert (
        moved_targets({"slo_bench.harness.load_generator.http.faults:RequestFault.ABORTED": ()})
        == []
    )  # nothing to call


def test_moved_targets_names_missing_and_changed_functions():
    learn = f"{CORE}.predictions:LearnedPredictions.learn"
    problems = moved_targets(
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
