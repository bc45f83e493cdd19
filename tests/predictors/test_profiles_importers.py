"""Importers: each project's layout, small and made up; then the real files where they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from slo_bench.predictors.profiles.fit_profile import fit
from slo_bench.predictors.profiles.formulas import profiled_step_time
from slo_bench.predictors.profiles.importers import ImportOptions, import_profile
from slo_bench.predictors.profiles.step_time_table import Host
from slo_bench.workloads.errors import FileFormatError, SloBenchError, UnknownNameError

SHARED = Path(os.environ.get("SLO_BENCH_SHARED", Path(__file__).parents[3] / "shared" / "data"))
PROFILES = SHARED / "profiles"
needs_data = pytest.mark.skipif(
    not PROFILES.is_dir(), reason=f"no {PROFILES}; SLO_BENCH_SHARED names its parent"
)


def test_import_of_an_unknown_source_is_refused():
    with pytest.raises(UnknownNameError, match="did you mean vidur"):
        import_profile("vidr", Path(), ImportOptions())


def test_import_of_a_path_that_is_not_there_says_what_the_source_is_read_from(tmp_path):
    with pytest.raises(SloBenchError, match=r"there is no .*; vidur is read from compute/GPU"):
        import_profile("vidur", tmp_path / "x.csv", ImportOptions())


def llmservingsim(folder: Path) -> Path:
    folder.mkdir()
    (folder / "meta.yaml").write_text(
        "vllm_version: 0.19.0\nhardware: RTX4090\nmodel: meta-llama/Llama-3.1-8B\nother:\n  a: 1\n"
    )
    (folder / "dense.csv").write_text(
        "layer,tokens,time_us\nqkv_proj,1,50\nqkv_proj,16,51\nlayernorm,1,2\nlayernorm,16,3\n"
        "embedding,1,4\nembedding,16,5\n"
    )
    (folder / "per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,1,700\n")
    (folder / "attention.csv").write_text(
        "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,9.5\n16,0,0,0,10\n"
    )
    return folder


def test_import_llmservingsim(tmp_path):
    profile = import_profile("llmservingsim", llmservingsim(tmp_path / "any"), ImportOptions())
    assert (profile.model, profile.gpu, profile.tp) == ("llama-3.1-8b", "rtx-4090", 1)
    assert profile.multiprocessors == 128
    assert profile.sources[0].version == "vLLM 0.19.0"
    linear = profile.tables["linear"]
    calls = dict(zip(linear.words["operator"].tolist(), linear["calls"], strict=True))
    assert calls == {"qkv_proj": 32, "layernorm": 64, "embedding": 1}
    assert profile.tables["per_sequence"]["calls"].tolist() == [1]
    assert profile.tables["attention"]["calls"].tolist() == [32, 32]


def test_import_llmservingsim_without_meta_uses_the_folder_name(tmp_path):
    folder = llmservingsim(tmp_path / "RTXPRO6000-Qwen3-32B-bf16-tp2")
    (folder / "meta.yaml").unlink()
    profile = import_profile("llmservingsim", folder, ImportOptions())
    assert (profile.model, profile.gpu, profile.tp) == ("qwen3-32b", "rtx-pro-6000", 2)
    assert import_profile("llmservingsim", folder, ImportOptions(gpu="h100-80g")).gpu == "h100-80g"


def test_import_llmservingsim_with_a_broken_table_is_refused(tmp_path):
    folder = llmservingsim(tmp_path / "any")
    (folder / "dense.csv").write_text("layer,tokens,time_us\nqkv_proj,one,50\n")
    with pytest.raises(FileFormatError, match="'one' is no number"):
        import_profile("llmservingsim", folder, ImportOptions())
    for text, problem in (("nan", "no size or time"), ("-5", "no size or time")):
        (folder / "dense.csv").write_text(f"layer,tokens,time_us\nqkv_proj,1,{text}\n")
        with pytest.raises(FileFormatError, match=problem):
            import_profile("llmservingsim", folder, ImportOptions())
    (folder / "dense.csv").write_text("layer,tokens,time_us\n")
    with pytest.raises(
        FileFormatError, match=r"has no rows .*; llmservingsim is read from a folder"
    ):
        import_profile("llmservingsim", folder, ImportOptions())
    (folder / "dense.csv").unlink()
    with pytest.raises(FileFormatError, match=r"dense\.csv"):
        import_profile("llmservingsim", folder, ImportOptions())


def test_experts_of_llmservingsim_take_the_time_of_those_that_a_step_activates(tmp_path):
    variant = tmp_path / "bf16"
    variant.mkdir()
    folder = llmservingsim(variant / "tp1")
    (folder / "meta.yaml").rename(variant / "meta.yaml")
    (folder / "skew.csv").write_text("n,skew\n1,2\n")
    model = ImportOptions(model="qwen3-30b-a3b")
    with pytest.raises(
        FileFormatError, match=r"experts .* would take no time.*--profile operators"
    ):
        import_profile("llmservingsim", variant, model)
    (folder / "moe.csv").write_text(
        "tokens,activated_experts,time_us\n1,8,50\n2,8,50\n2,16,130\n16,8,60\n16,16,140\n16,64,460\n"
    )
    profile = import_profile("llmservingsim", variant, model)
    assert (profile.gpu, profile.sources[0].version) == ("rtx-4090", "vLLM 0.19.0")
    assert profile.sources[0].note.endswith("not used: skew.csv")
    linear = profile.tables["linear"]
    experts = linear.rows(linear.words["operator"] == "moe")
    assert experts["tokens"].tolist() == [1, 16]
    assert experts["calls"].tolist() == [48, 48]
    # One token activates 8 experts; 16 tokens 128 (1 - (1 - 8 / 128) ** 16) = 82.4, of which 64
    # are measured.
    assert experts["time_us"] == pytest.approx([50, 460])
    with pytest.raises(SloBenchError, match="measured at tp 1, not 2"):
        import_profile("llmservingsim", folder, ImportOptions(model="qwen3-30b-a3b", tp=2))


VIDUR_OPERATORS = (
    *("input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "add", "emb"),
    *("post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj"),
)


def medians(file: Path, where: dict[str, list[float]], times_ms: dict[str, list[object]]) -> None:
    """A table of Vidur's profiler: medians in ms, then what they were measured at."""
    columns = {f"time_stats.{name}.median": cells for name, cells in times_ms.items()} | where
    rows = zip(*columns.values(), strict=True)
    file.write_text("\n".join(",".join(map(str, row)) for row in [list(columns), *rows]) + "\n")


def vidur_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "compute" / "a100" / "meta-llama" / "Meta-Llama-3-8B"
    folder.mkdir(parents=True)
    both = {"num_tensor_parallel_workers": [1, 2, 2], "n_embd": [4096] * 3, "n_kv_head": [8] * 3}
    mlp = both | {"num_tokens": [8, 8, 64], "n_head": [32] * 3, "n_expanded_embd": [14336] * 3}
    medians(folder / "mlp.csv", mlp, {o: [0.2, 0.1, 0.3] for o in VIDUR_OPERATORS})
    attention = both | {
        "n_q_head": [32] * 3,
        "batch_size": [1, 4, 1],
        "prefill_chunk_size": [0, 0, 64],
        "kv_cache_size": [1, 31, 128],
    }
    times: dict[str, list[object]] = {
        "attn_decode": [9, 0.015, ""],
        "attn_prefill": ["", "", 0.05],
        "attn_kv_cache_save": [1, 0.001, 0.002],
    }
    medians(folder / "attention.csv", attention, times)
    reduce = {
        "num_workers": [2.0, 2, 4],
        "devices_per_node": [2.0, 1, 4],
        "size": [65536.0, 65536, 65536],
    }
    medians(folder / "all_reduce.csv", reduce, {"all_reduce": [0.02, 9, 9]})
    return folder


def test_import_of_vidurs_own_tables_takes_medians_of_one_tp_with_attention(tmp_path):
    folder = vidur_folder(tmp_path)
    (folder / "cpu_overhead.csv").write_text("a\n1\n")
    profile = import_profile("vidur", folder, ImportOptions(tp=2))
    assert (profile.model, profile.gpu, profile.tp) == ("llama-3-8b", "a100-80g", 2)
    linear = profile.tables["linear"]
    sizes = linear.rows(linear.words["operator"] == "mlp_act")
    assert sizes["tokens"].tolist() == [8, 64]
    assert sizes["time_us"] == pytest.approx([100, 300])
    reduces = linear.rows(linear.words["operator"] == "all_reduce")
    assert (reduces["tokens"].tolist(), reduces["calls"].tolist()) == ([8], [64])
    attention = profile.tables["attention"]
    assert attention["n_decode"].tolist() == [4, 0]
    assert attention["kv_decode"].tolist() == [32, 0]
    assert attention["kv_prefill"].tolist() == [0, 128]
    assert attention["time_us"] == pytest.approx([16, 52])
    assert profile.sources[0].note.endswith("no output head; not used: cpu_overhead.csv")


def test_import_of_vidurs_own_tables_says_what_is_missing(tmp_path):
    folder = vidur_folder(tmp_path)
    for name in ("attention", "all_reduce"):
        (folder / f"{name}.csv").unlink()
    profile = import_profile("vidur", folder / "mlp.csv", ImportOptions(tp=2))
    assert "no attention; without all-reduces" in profile.sources[0].note
    with pytest.raises(FileFormatError, match="no rows of tp 4; it has tp 1, 2"):
        import_profile("vidur", folder, ImportOptions(tp=4))
    with pytest.raises(FileFormatError, match="no rows of n_head 64; it has n_head 32"):
        import_profile("vidur", folder, ImportOptions(model="llama-3-70b"))


def test_import_vidur_linear_layers_alone(tmp_path):
    operators = VIDUR_OPERATORS
    names = ["num_tokens", "num_tensor_parallel_workers", *(f"{o}_ms" for o in operators)]
    rows = [[8, tp, *[0.1 / tp] * len(operators)] for tp in (1, 2)]
    file = tmp_path / "a100__meta-llama__Meta-Llama-3-8B__linear.csv"
    file.write_text("\n".join(",".join(map(str, row)) for row in [names, *rows]))
    profile = import_profile("vidur", file, ImportOptions(tp=2))
    assert (profile.model, profile.gpu, profile.tp) == ("llama-3-8b", "a100-80g", 2)
    table = profile.tables["linear"]
    calls = dict(zip(table.words["operator"].tolist(), table["calls"], strict=True))
    assert calls["add"] == 64
    assert calls["emb"] == 1
    assert table["time_us"] == pytest.approx(np.full(len(operators), 50.0))
    with pytest.raises(SloBenchError, match="has no rows of tp 4; it has tp 1, 2"):
        import_profile("vidur", file, ImportOptions(tp=4))
    other = file.rename(tmp_path / "mlp.csv")
    with pytest.raises(SloBenchError, match="--model"):
        import_profile("vidur", other, ImportOptions(gpu="a40"))


def test_import_distserve(tmp_path):
    entry = {
        "decoding_large_small_bs_threshold": 95,
        "prefill": [22.0, 0.14, 8e-06],
        "decoding_smallbs": [23.0, 0.0006, 0.06],
        "decoding_largebs": [20.0, 0.0005, 0.12],
    }
    file = tmp_path / "fits.json"
    file.write_text(json.dumps({"facebook/opt-13b": {"1": entry}, "facebook/opt-66b": {}}))
    profile = import_profile("distserve", file, ImportOptions(model="opt-13b"))
    assert (profile.model, profile.gpu, profile.best) == ("opt-13b", "a100-80g", "distserve")
    timed = profiled_step_time(profile, Host()).model
    assert timed.step_s(10, 4000, ()) == pytest.approx(0.023 + 0.0006e-3 * 4000 + 0.06e-3 * 10)
    with pytest.raises(SloBenchError, match="2 models that fit; name one with --model"):
        import_profile("distserve", file, ImportOptions())
    with pytest.raises(SloBenchError, match="has no tp 2"):
        import_profile("distserve", file, ImportOptions(model="opt-13b", tp=2))
    del entry["prefill"]
    file.write_text(json.dumps({"facebook/opt-13b": {"1": entry}}))
    with pytest.raises(FileFormatError, match="not a DistServe profile"):
        import_profile("distserve", file, ImportOptions())


def test_import_splitwise(tmp_path):
    file = tmp_path / "perf_model.csv"
    file.write_text(
        "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel\n"
        "llama2-70b,a100-80gb,512,2,128,196,54,4\n"
        "llama2-70b,a100-80gb,512,2,1,190,0,4\n"
        "llama2-70b,h100-80gb,512,1,128,96,34,8\n"
        "llama2-70b,h100-80gb-pcap,512,1,128,99,39,8\n"
    )
    profile = import_profile("splitwise", file, ImportOptions(gpu="a100-80g"))
    assert (profile.model, profile.gpu, profile.tp) == ("llama-2-70b", "a100-80g", 4)
    steps = profile.tables["steps"]
    assert steps["time_us"].tolist() == [196e3, 54e3, 190e3]
    assert steps["chunks"].tolist() == [2, 0, 2]
    assert steps["kv_decode"].tolist() == [0, 576, 0]
    with pytest.raises(SloBenchError, match=r"2 that fit; choose with .*h100-80gb × tp 8"):
        import_profile("splitwise", file, ImportOptions())


SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))


def aiconfigurator(folder: Path) -> Path:
    """The tables of an A100 for llama-3-8b."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True)

    def write(name: str, rows: list[dict[str, object]]) -> None:
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")

    device = {"device": "NVIDIA A100-SXM4-80GB", "version": "0.14.0"}
    write(
        "gemm_perf",
        [
            {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": 0.001 * m + n * k * 1e-9}
            for n, k in SHAPES
            for m in (1, 64)
        ],
    )
    heads = {
        "num_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attn_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
    }
    write(
        "context_attention_perf",
        [
            {**heads, "batch_size": b, "isl": n, "latency": n * 1e-4}
            for b in (1, 2)
            for n in (16, 1024)
        ],
    )
    write(
        "generation_attention_perf",
        [
            {**device, **heads, "batch_size": b, "step": s, "latency": 0.01 + b * s * 1e-6 * slow}
            for b in (1, 8)
            for s in (1, 1023)
            for slow in (1, 2)  # two kernels: the faster one counts
        ],
    )
    return folder


def test_import_aiconfigurator(tmp_path):
    folder = aiconfigurator(tmp_path / "a100_sxm_all")
    profile = import_profile("aiconfigurator", folder, ImportOptions(model="llama-3-8b"))
    assert (profile.gpu, profile.tp) == ("a100-80g", 1)
    assert profile.sources[0].version == "vLLM 0.14.0"
    attention = profile.tables["attention"]
    assert attention["prefill_chunk"].tolist() == [16, 1024, 0, 0, 0, 0]
    assert attention["kv_decode"].tolist() == [0, 0, 2, 1024, 2, 1024]
    assert attention["time_us"][-1] == pytest.approx(10 + 8 * 1023e-3)
    timed = profiled_step_time(profile, Host()).model
    linear_us = 32 * sum(8 + n * k * 1e-6 for n, k in SHAPES[:4])  # between 1 and 64 rows
    head_us = 8 + 128256 * 4096e-6
    expected_us = linear_us + 32 * attention["time_us"][-1] + head_us
    assert timed.step_s(8, 8 * 1024, ()) == pytest.approx(expected_us * 1e-6)
    with pytest.raises(SloBenchError, match="--model"):
        import_profile("aiconfigurator", folder, ImportOptions())
    with pytest.raises(
        SloBenchError, match="has no rows with num_heads 32, num_key_value_heads 32"
    ):
        import_profile("aiconfigurator", folder, ImportOptions(model="opt-1.3b"))
    with pytest.raises(SloBenchError, match=r"has no gemm_perf\.parquet"):
        import_profile("aiconfigurator", tmp_path / "nothing", ImportOptions(model="llama-3-8b"))


def test_import_aiconfigurator_by_family_backend_and_version(tmp_path):
    tables = list(aiconfigurator(tmp_path / "tables").iterdir())
    system = tmp_path / "data" / "a100_sxm"
    for release in ("vllm/0.9.0", "vllm/0.14.0", "vllm/0.14.0rc2", "sglang/0.5.14"):
        for table in tables:
            family = "gemm" if table.stem == "gemm_perf" else "attention"
            copy = system / family / release / table.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(table.read_bytes())
    moe = system / "moe/vllm/0.14.0/moe_perf.parquet"
    moe.parent.mkdir(parents=True)
    moe.write_bytes(tables[0].read_bytes())

    def source(path: Path) -> tuple[str, str]:
        profile = import_profile("aiconfigurator", path, ImportOptions(model="llama-3-8b"))
        assert profile.gpu == "a100-80g"
        return profile.sources[0].version, profile.sources[0].note.partition("not used: ")[2]

    others = "vllm 0.14.0rc2, vllm 0.9.0"
    newest = ("vLLM 0.14.0", f"sglang 0.5.14, {others}, moe_perf.parquet")
    assert source(system) == source(system / "attention") == source(system / "moe") == newest
    assert source(system / "gemm/vllm/0.9.0")[0] == "vLLM 0.9.0"
    assert source(system / "gemm/sglang") == ("SGLang 0.5.14", f"vllm 0.14.0, {others}")
    (tmp_path / "data" / "h200_sxm").symlink_to(system)
    with pytest.raises(SloBenchError, match=r"several systems; name one, .*such as a100_sxm"):
        source(tmp_path / "data")


@needs_data
@pytest.mark.parametrize(
    ("source", "path", "options", "most_percent"),
    [
        ("llmservingsim", "llmservingsim/RTX4090-Llama-3.1-8B-bf16-tp1", ImportOptions(), 3.5),
        ("aiconfigurator", "aiconfigurator/a100_sxm", ImportOptions(model="llama-3-8b"), 3.0),
        ("splitwise", "splitwise/perf_model.csv", ImportOptions("llama-2-70b", "h100-80g", 8), 8.0),
    ],
)
def test_imported_real_profiles_are_fitted(source, path, options, most_percent):
    if source == "aiconfigurator":
        pytest.importorskip("pyarrow")
    refit = fit(import_profile(source, PROFILES / path, options))
    best = {q.formula: q for q in refit.qualities}[refit.profile.best]
    assert best.held_out_percent < most_percent
    timed = profiled_step_time(refit.profile, Host()).model
    assert 0.001 < timed.step_s(8, 8 * 1024, ()) < 0.1


@needs_data
def test_every_shared_linear_profile_is_recognised():
    files = sorted((PROFILES / "vidur").glob("*__linear.csv"))
    unknown = {"internlm", "microsoft"}  # models that the catalogue does not have
    for file in files:
        if not any(f"__{name}__" in file.name for name in unknown):
            profile = import_profile("vidur", file, ImportOptions())
            assert profile.tables["linear"]["tokens"].max() >= 1024
