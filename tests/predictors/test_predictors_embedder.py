"""Time and memory of an embedder's passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo_bench.predictors.embedder import embedder, own_weight_bytes
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model
from slo_bench.predictors.step_time import step_time
from slo_bench.workloads.errors import SloBenchError

LLAMA = model("llama-2-7b")
A100 = gpu("a100-80g")
BESIDE = Placement(LLAMA, A100)
ENCODERS = ("bge-m3", "e5-large", "gte-large")

batches = st.lists(st.tuples(st.integers(1, 64), st.integers(1, 512)), min_size=1, max_size=5)


@pytest.mark.parametrize("name", ENCODERS)
def test_embedder_workspace_bytes_by_hand(name):
    """BERT-large's shape: (4 * 1024 + 2 * 4096) values of 2 bytes."""
    assert embedder(model(name), BESIDE).workspace_bytes([(3, 100)]) == 300 * 12288 * 2


@pytest.mark.parametrize(
    ("name", "millions"), [("bge-m3", 567.75), ("e5-large", 335.14), ("gte-large", 335.14)]
)
def test_embedder_parameters_equal_public_checkpoints(name, millions):
    assert model(name).parameters / 1e6 == pytest.approx(millions, abs=0.01)


def test_embedder_blocks_round_up():
    beside = embedder(model("bge-m3"), BESIDE)
    assert beside.block_bytes == 16 * LLAMA.kv_bytes_per_token()
    assert beside.blocks([(1, 1)]) == 1
    assert beside.blocks([(16, 256)]) == 12  # 96 MiB in blocks of 8 MiB
    assert beside.blocks([]) == 0


def test_padded_pass_computes_every_text_at_the_longest_length():
    padded, packed = (embedder(model("bge-m3"), BESIDE, padded=p) for p in (True, False))
    batch = [(3, 10), (1, 400)]
    assert padded.workspace_bytes(batch) == packed.workspace_bytes([(4, 400)])
    assert packed.workspace_bytes(batch) == packed.workspace_bytes([(1, 430)])
    assert padded.pass_s(batch) == pytest.approx(packed.pass_s([(4, 400)]))
    assert packed.pass_s(batch) < padded.pass_s(batch)


@pytest.mark.parametrize("padded", [True, False])
@given(batch=batches, more=st.tuples(st.integers(1, 64), st.integers(1, 512)))
def test_more_texts_take_more_time_and_memory(padded, batch, more):
    beside = embedder(model("e5-large"), BESIDE, padded=padded)
    assert 0 < beside.pass_s(batch) < beside.pass_s([*batch, more])
    assert 0 < beside.workspace_bytes(batch) < beside.workspace_bytes([*batch, more])


@given(batch=batches)
def test_one_pass_takes_no_longer_than_separate_passes(batch):
    beside = embedder(model("bge-m3"), BESIDE, padded=False)
    apart = sum(beside.pass_s([texts]) for texts in batch)
    assert beside.pass_s(batch) <= apart + 1e-12


def test_pass_is_never_faster_than_the_hardware():
    encoder = model("bge-m3")
    tokens = 64 * 512
    operations = 2 * encoder.streamed_parameters * tokens
    operations += 64 * 512 * 512 * 4 * encoder.hidden * encoder.layers
    pass_s = embedder(encoder, BESIDE).pass_s([(64, 512)])
    assert 1 < pass_s * A100.flops_16bit / operations < 3


def test_encoder_attention_has_twice_the_causal_pairs():
    """Beside equal linear work, twice the pairs of a causal prefill of the same length."""
    beside = embedder(model("bge-m3"), BESIDE)
    time = beside.time
    causal = time.step_s(0, 0, [(0, 8192)])
    assert beside.pass_s([(1, 8192)]) - causal == pytest.approx(
        time.prefill_pair_s * 8192 * 8192 / 2
    )


def test_language_model_as_embedder_takes_its_prefill_time():
    llama_embedder = embedder(LLAMA, BESIDE)
    assert llama_embedder.pass_s([(3, 100)]) == pytest.approx(
        step_time(BESIDE).model.step_s(0, 0, [(0, 100)] * 3)
    )
    assert own_weight_bytes(LLAMA, LLAMA) == 0
    assert own_weight_bytes(model("bge-m3"), LLAMA) == model("bge-m3").weight_bytes()


def test_embedder_replicas_divide_the_texts():
    two = Placement(LLAMA, A100, tp=2)
    alone, shared = (embedder(model("bge-m3"), place) for place in (BESIDE, two))
    assert shared.pass_s([(64, 256)]) == alone.pass_s([(32, 256)])
    assert shared.workspace_bytes([(63, 256)]) == alone.workspace_bytes([(32, 256)])


def test_embedder_weights_leave_fewer_kv_blocks():
    added = own_weight_bytes(model("bge-m3"), LLAMA)
    less = Placement(LLAMA, A100, beside_bytes=added)
    lost = BESIDE.num_gpu_blocks - less.num_gpu_blocks
    assert lost == pytest.approx(added / BESIDE.block_bytes_per_gpu, abs=1)
    with pytest.raises(SloBenchError, match=r"70\.0 GB of another model's weights"):
        Placement(LLAMA, A100, beside_bytes=70 * 10**9).check()
    with pytest.raises(SloBenchError, match="beside_bytes must be at least 0"):
        Placement(LLAMA, A100, beside_bytes=-1)


def test_embedder_refuses_unsupported_models_and_placements():
    with pytest.raises(SloBenchError, match="opt-13b is a decoder: as an embedder only an encoder"):
        embedder(model("opt-13b"), BESIDE)
    with pytest.raises(SloBenchError, match="use pp 1"):
        embedder(model("bge-m3"), Placement(LLAMA, A100, pp=2))
