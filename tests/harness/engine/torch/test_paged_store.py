"""A store of KV in host memory and on disk, shared by processes: not a token changes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from reference.kv_block_ids import check_block_ids  # noqa: E402
from slo_bench.harness.core.policy import Policy  # noqa: E402
from slo_bench.harness.core.state import RequestState  # noqa: E402
from slo_bench.harness.engine.torch.batch import Piece  # noqa: E402
from slo_bench.harness.engine.torch.build_engine import Engine, KvCacheConfig  # noqa: E402
from slo_bench.harness.engine.torch.cache import KvCache  # noqa: E402
from slo_bench.harness.engine.torch.clock import RealClock  # noqa: E402
from slo_bench.harness.engine.torch.decoder import Decoder, unit_shape  # noqa: E402
from slo_bench.harness.engine.torch.distributed import Spread  # noqa: E402
from slo_bench.harness.engine.torch.execution import PagedInstance  # noqa: E402
from slo_bench.harness.engine.torch.load_decoder import load_decoder  # noqa: E402
from slo_bench.harness.engine.torch.pipeline import Pipeline, Traffic  # noqa: E402
from slo_bench.harness.engine.torch.runner import Runner  # noqa: E402
from slo_bench.harness.engine.torch.sequence import Sequence  # noqa: E402
from slo_bench.harness.engine.torch.tiers import TierFolder, Tiers, path_of  # noqa: E402
from slo_bench.harness.engine.torch.torch_kv_cache_manager import PagedStoreKVCacheManager  # noqa: E402
from slo_bench.harness.engine.torch.torch_workers import Workers  # noqa: E402
from slo_bench.harness.policies.systems import system  # noqa: E402
from slo_bench.workloads.errors import SloBenchError  # noqa: E402
from slo_bench.workloads.request import Slo  # noqa: E402

pytestmark = pytest.mark.torch

Folder = Callable[[str], Path]
Greedy = Callable[[str, list[int], int], list[int]]
BLOCK = 8
DEVICE = os.environ.get("SLO_BENCH_TEST_DEVICE", "cpu")  # cuda:0 on a machine that has one
NO_SLO = Slo()


@pytest.fixture(scope="module")
def decoder(model_folder: Folder) -> Decoder:
    return load_decoder(model_folder("qwen3"), DEVICE, "float32")


def folders(folder: Path, decoder: Decoder, *units: int) -> tuple[TierFolder, ...]:
    """Tiers that hold so many units of one block."""
    each = unit_shape(decoder, 1, BLOCK).size_bytes
    return tuple(TierFolder(folder / f"tier{k}", n * each) for k, n in enumerate(units))


def prompt_of(r: RequestState) -> list[int]:
    def drawn(seed: int, count: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(3, 160) for _ in range(count)]

    tokens = [token for block in r.prefix_blocks for token in drawn(block, BLOCK)]
    return (tokens + drawn(10_000 + r.id, 80))[: r.prompt_tokens]


def requests(count: int, seed: int) -> list[RequestState]:
    draw = random.Random(seed)
    request_states = []
    for row in range(count):
        prompt, first = draw.randint(1, 60), 100 * draw.randrange(3)
        blocks = tuple(range(first, first + min(6, prompt // BLOCK)))
        answer = draw.randint(1, 12)
        request_states.append(RequestState(row, 0.001 * row, prompt, answer, 30, NO_SLO, blocks))
    return request_states


class Served:
    """What an engine with a store made of requests; `carried` by its pipeline."""

    def __init__(
        self,
        decoder: Decoder,
        store: tuple[TierFolder, ...],
        request_states: list[RequestState],
        blocks: int,
    ) -> None:
        engine = Engine(decoder, KvCacheConfig(blocks, BLOCK, 0, BLOCK, store))
        policy = system("vllm").policy
        assert isinstance(policy, Policy)
        instance = engine.instance(policy, lambda r: Sequence(prompt_of(r)), RealClock())
        assert isinstance(instance, PagedInstance)
        self.answers: dict[int, list[int]] = {}
        instance.ended = lambda r, sequence: self.answers.update({r.id: sequence.tokens})
        instance.inbox.extend(request_states)
        instance.run(float("inf"), False)
        assert isinstance(instance.kv_manager, PagedStoreKVCacheManager)
        check_block_ids(instance.kv_manager)
        instance.kv_manager.store.flush()
        self.tiers = instance.kv_manager.store.tiers
        carrier = engine.runner.carrier
        assert isinstance(carrier, Pipeline)
        self.carried = carrier.carried


def expected(generated: Greedy, request_states: list[RequestState]) -> dict[int, list[int]]:
    return {r.id: generated("qwen3", prompt_of(r), r.output_tokens) for r in request_states}


def test_prefix_stored_by_one_engine_is_loaded_by_another(
    tmp_path: Path, decoder: Decoder, generated: Greedy
) -> None:
    store = folders(tmp_path, decoder, 100)
    first, again = requests(8, seed=1), requests(8, seed=1)
    served = Served(decoder, store, first, 100)
    assert served.answers == expected(generated, first)
    assert not served.carried.loaded_bytes
    units = {block for r in first for block in r.prefix_blocks}
    assert served.carried.stored_bytes
    assert set(served.tiers.places()[0]) <= units
    served = Served(decoder, store, again, 100)
    assert served.answers == expected(generated, again)
    assert served.carried.loaded_bytes
    assert sum(r.cached_tokens for r in again) > sum(r.cached_tokens for r in first)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    blocks=st.integers(12, 40),
    memory=st.integers(0, 6),
    disk=st.integers(1, 8),
)
def test_tokens_do_not_depend_on_tier_sizes(
    seed: int,
    blocks: int,
    memory: int,
    disk: int,
    decoder: Decoder,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    wide = folders(tmp_path_factory.mktemp("wide"), decoder, 99)
    plenty = Served(decoder, wide, requests(9, seed), 99)
    capacities = [n for n in (memory, disk) if n]
    store = folders(tmp_path_factory.mktemp("s"), decoder, memory, disk)
    for _ in range(2):
        served = Served(decoder, store, requests(9, seed), blocks)
        assert served.answers == plenty.answers
        places = served.tiers.places()
        assert all(len(units) <= n for units, n in zip(places, capacities, strict=True))
        flat = [unit for units in places for unit in units]
        assert len(flat) == len(set(flat))


def test_units_move_down_a_tier_and_are_loaded_again(tmp_path: Path, decoder: Decoder) -> None:
    tiers = Tiers(folders(tmp_path, decoder, 2, 2), unit_shape(decoder, 1, BLOCK), "m")

    def write(unit: int) -> None:
        tiers.shape.mapped(str(tiers.draft(unit)), new=True).fill_(unit)
        tiers.keep([unit])

    for unit in (1, 2, 3):
        write(unit)
    assert tiers.places() == [[2, 3], [1]]
    tiers.keep([1])
    assert tiers.places() == [[3, 1], [2]]
    held = tiers.open(2)
    assert held is not None
    for unit in (4, 5, 6):
        write(unit)
    assert tiers.places() == [[5, 6], [1, 4]]
    assert 2 not in tiers
    assert tiers.open(2) is None
    assert (tiers.shape.mapped(path_of(held)) == 2).all()  # whoever holds it reads on
    os.close(held)
    tiers.keep([2])  # gone
    assert tiers.places() == [[5, 6], [1, 4]]


class _HasAll:
    """A store that has every unit."""

    def __init__(self) -> None:
        self.new: dict[int, None] = {}

    def __contains__(self, unit: int) -> bool:
        return True

    def load_s(self, units: object) -> float:
        return 0.0

    def put(self, units: object) -> None:
        pass


def test_loaded_units_take_ids_of_idle_ones_where_a_step_has_ids_not_yet_counted() -> None:
    """A request that entered with the same step holds blocks that `free` does not know yet."""
    kv_manager = PagedStoreKVCacheManager(_HasAll(), 4, BLOCK, 0, BLOCK)  # type: ignore[arg-type]
    gone, entered, loading = (
        RequestState(row, 0.0, 2 * BLOCK, 1, row, NO_SLO, prefix_blocks=hashes)
        for row, hashes in enumerate([(1, 2), (7, 8), (3, 4)])
    )
    kv_manager.free, gone.blocks = 2, 2
    kv_manager.cache_scheduled(gone, 2 * BLOCK)
    kv_manager.release(gone)
    kv_manager.cache_scheduled(entered, 2 * BLOCK)  # all four ids are in use, two by idle units
    kv_manager.allocate(loading, 1)
    assert not set(kv_manager.table(loading)) & set(kv_manager.table(entered))
    assert list(kv_manager.idle) == [1]


def test_kv_store_of_another_model_is_refused(tmp_path: Path, decoder: Decoder) -> None:
    store = folders(tmp_path, decoder, 2)
    Tiers(store, unit_shape(decoder, 1, BLOCK), "one")
    with pytest.raises(SloBenchError, match="another model"):
        Tiers(store, unit_shape(decoder, 1, BLOCK), "two")
    with pytest.raises(SloBenchError, match="at least one unit"):
        Tiers(folders(tmp_path, decoder, 0), unit_shape(decoder, 1, BLOCK), "one")


def test_unfinished_units_of_a_dead_process_are_removed(tmp_path: Path, decoder: Decoder) -> None:
    store = folders(tmp_path, decoder, 2)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    Tiers(store, unit_shape(decoder, 1, BLOCK), "m")
    left = store[0].folder / f"7.{gone.pid}.draft"
    left.write_bytes(b"half")
    Tiers(store, unit_shape(decoder, 1, BLOCK), "m")
    assert not left.exists()


_OTHER = """
import sys
from pathlib import Path
here = Path(sys.argv[1])
sys.path[:0] = [str(here), str(here.parents[2])]
import test_paged_store as t
decoder = t.load_decoder(Path(sys.argv[2]))
store = t.folders(Path(sys.argv[3]), decoder, 5, 4)
t.Served(decoder, store, t.requests(12, int(sys.argv[4])), 30)
"""


def test_two_processes_share_a_kv_store(
    tmp_path: Path, decoder: Decoder, model_folder: Folder, generated: Greedy
) -> None:
    """Small tiers: each removes what the other has just found."""
    here = str(Path(__file__).parent)
    argv = [sys.executable, "-c", _OTHER, here, str(model_folder("qwen3")), str(tmp_path)]
    others = [subprocess.Popen([*argv, str(seed)]) for seed in (1, 2)]
    store = folders(tmp_path, decoder, 5, 4)
    loaded = 0
    while any(other.poll() is None for other in others):
        request_states = requests(6, seed=1)
        served = Served(decoder, store, request_states, 30)
        assert served.answers == expected(generated, request_states)
        loaded += served.carried.loaded_bytes
    assert [other.returncode for other in others] == [0, 0]
    assert loaded


def test_next_layer_loads_while_a_layer_is_computed(tmp_path: Path, decoder: Decoder) -> None:
    """Loading layer 1 goes on while layer 0 is computed, which it does not hold up."""
    shape = unit_shape(decoder, 1, BLOCK)
    cache = KvCache(decoder.config, 2, BLOCK, decoder.dtype, decoder.device)
    unit = shape.mapped(str(tmp_path / "unit"), new=True)
    unit.copy_(torch.rand(unit.shape))
    computing = threading.Event()

    def kv_of(layer: int) -> Any:
        if layer == 1:
            assert computing.wait(60.0)
        return cache.layers[layer]

    pipeline = Pipeline(kv_of, lambda: range(decoder.config.layers))
    new = str(tmp_path / "new")
    pipeline.begin(Traffic(shape, [(str(tmp_path / "unit"), [1])], [(new, [1])]))
    pipeline.ready(0)
    computing.set()  # layer 0 is computed only now
    pipeline.computed(0)
    pipeline.ready(1)
    pipeline.computed(1)
    pipeline.drain()
    for layer in (0, 1):
        assert torch.equal(cache.layers[layer][:, 1], unit[layer][:, 0])
    assert torch.equal(shape.mapped(new), unit)
    assert pipeline.carried.loaded_bytes == pipeline.carried.stored_bytes == shape.size_bytes


def test_moved_layers_and_heads_load_and_store_their_own_part(
    tmp_path: Path, model_folder: Folder, generated: Greedy
) -> None:
    draw = random.Random(3)
    prompt = [draw.randrange(3, 160) for _ in range(2 * BLOCK + 5)]
    decoder = load_decoder(model_folder("llama"))
    shape = unit_shape(decoder, 2, BLOCK)
    new = str(tmp_path / "unit")
    whole = generated("llama", prompt, 6)
    with Workers(2) as workers:
        for stores in (True, False):
            cache = KvCache(decoder.config, 8, BLOCK, decoder.dtype, decoder.device)
            fresh = load_decoder(model_folder("llama"))
            spread = Spread(fresh, cache, workers)
            runner = Runner(spread, cache)
            spread.move_layers([0], 1)
            spread.move_heads(1, 1, helper=2)
            sequence = Sequence(list(prompt), blocks=[5, 2, 7, 1])
            if stores:
                traffic = Traffic(shape, stores=[(new, [5, 2])])
                sequence.tokens += runner.run([], [Piece(sequence, 0, len(prompt))], traffic)
            else:
                traffic = Traffic(shape, loads=[(new, [5, 2])])
                sequence.tokens += runner.run([], [Piece(sequence, 2 * BLOCK, 5)], traffic)
            for _ in range(5):
                sequence.tokens += runner.run([sequence], [])
            assert sequence.tokens == whole
