"""Measuring decode paths: which groups are measured, what with, and that the model and its pool
stay as they were.
"""

from __future__ import annotations

from itertools import count
from unittest.mock import Mock

import mlx.core as mx
import pytest
from kernel.emulation import why_not
from kernel.trusted import trust
from models import make_model

from mlx_blockpool.config import KVBits
from mlx_blockpool.kv import measuring, path_measuring
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.attach import bind
from mlx_blockpool.kv.build import describe
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.cost_model import KernelWork, Shape
from mlx_blockpool.kv.path_measuring import measure_paths
from mlx_blockpool.kv.scratch import AttentionInputs
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, WindowLayer

FEW = (Shape(0, (16,) * 2), Shape(0, (16, 64)), Shape(256, (16,) * 2), Shape(256, (300, 16, 16)))


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few shapes, and a clock that counts how often it is read: every reading is as long,
    whatever the machine does.
    """
    ticks = count()
    monkeypatch.setattr(path_measuring, "SHAPES", FEW)
    monkeypatch.setattr(path_measuring, "KERNEL_SHAPES", (Shape(0, (40,)), Shape(0, (20, 300))))
    monkeypatch.setattr(path_measuring, "ROWS", ((1, 300, 5), (2, 40, 17)))
    monkeypatch.setattr(path_measuring, "WINDOWS", ((1, 16), (2, 40), (2, 4096)))
    monkeypatch.setattr(measuring.Stopwatch, "_now", lambda _: (next(ticks) * 1e-3,) * 3)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(ticks) * 1e-3)
    # Few passes over them.
    monkeypatch.setattr(path_measuring.measure_paths, "__defaults__", (0.5,))


def pool_of(name: str, bits: KVBits | None = None) -> tuple[object, KVArena]:
    model = make_model(name, **({"hidden_size": 128, "head_dim": 32} if bits else {}))
    arena = KVArena(describe(model).with_bits(bits), 30_000_000)
    arena.capabilities = Capabilities(ragged=bool(bind(model)))
    return model, arena


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("qwen2", None),
        ("gemma3_text", None),
        ("gpt_oss", None),
        ("lfm2", None),
        ("llama", KVBits()),
    ],
)
def test_full_layers_are_measured_and_windows_are_not(name: str, bits: KVBits | None) -> None:
    model, arena = pool_of(name, bits)
    found = measure_paths(model, arena)
    assert set(found) == {
        g for g, group in enumerate(arena.spec.groups) if not isinstance(group.layer, WindowLayer)
    }
    for costs in found.values():
        assert costs.of_ragged([16, 16]) > 0
        assert costs.of_cluster(Shape(256, (16, 16))) > 0


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(
    ("name", "bits"),
    [("gemma3_text", None), pytest.param("gpt_oss", KVBits(8, 4), marks=pytest.mark.thorough)],
    ids=str,
)
def test_a_kernel_that_is_trusted_is_measured_in_windows_too(
    name: str, bits: KVBits | None
) -> None:
    model, arena = pool_of(name, bits)
    trust(arena, path=None)
    found = measure_paths(model, arena, seconds=0.3)
    assert set(found) == {0, 1}
    for group, costs in found.items():
        is_window = isinstance(arena.spec.groups[group].layer, WindowLayer)
        assert costs.of_kernel(KernelWork(2, 32, 32)) > 0
        assert costs.rows_ratio([100], KernelWork(5, 100, 500)) > 0
        assert (costs.shared == ()) == is_window


@pytest.mark.usefixtures("ticking")
def test_a_kernel_of_one_layer_group_is_not_measured_in_others() -> None:
    model, arena = pool_of("llama")
    arena.decode.launch = Mock(side_effect=AssertionError)
    (costs,) = measure_paths(model, arena).values()
    assert costs.kernel == ()


def test_a_gpu_is_measured_with_the_layers_of_the_group_as_far_as_they_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = FullLayer(8, 128, 128)
    spec = ModelCacheSpec("of a GPU", (layer,) * 32, "float16")
    shapes = [(FEW[0], 2), (Shape(0, (4000,) * 2), 32), (Shape(0, (4000,) * 32), 512)]
    assert [path_measuring._layers(spec, 0, *each) for each in shapes] == [2, 1, 1]
    monkeypatch.setattr(path_measuring, "device", lambda: "metal")
    assert [path_measuring._layers(spec, 0, *each) for each in shapes] == [8, 8, 1]
    assert (
        path_measuring._layers(ModelCacheSpec("small", (layer,) * 3, "float16"), 0, *shapes[0]) == 3
    )


@pytest.mark.usefixtures("ticking")
def test_a_pool_is_left_as_it_was() -> None:
    model, arena = pool_of("llama")
    before = {group.group: group.free for group in arena.pool.settle()}
    measure_paths(model, arena)
    arena.pool.check()
    assert all(counts.held == 0 for counts in arena.pool.settle())
    assert set(before) == {counts.group for counts in arena.pool.settle()}
    assert (arena.decode.path, arena.decode.path_counts, arena.decode.costs) == ("auto", {}, {})


@pytest.mark.usefixtures("ticking")
def test_something_else_goes_before_each_trial_and_leaves_the_pool_as_it_was() -> None:
    model, arena = pool_of("llama")
    arena.decode.path_counts["ragged"] = 3
    looked = count()

    def interrupt() -> None:
        if next(looked) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        measure_paths(model, arena, interrupt=interrupt)
    arena.pool.check()
    assert all(counts.held == 0 for counts in arena.pool.settle())
    assert (arena.decode.path, arena.decode.path_counts) == ("auto", {"ragged": 3})
    assert set(measure_paths(model, arena, interrupt=interrupt)) == {0}
    assert arena.decode.path_counts == {"ragged": 3}


@pytest.mark.usefixtures("ticking")
def test_the_queries_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[AttentionInputs] = []
    rounds = path_measuring._rounds
    monkeypatch.setattr(
        path_measuring, "_rounds", lambda *given: asked.append(given[2]) or rounds(*given)
    )
    measure_paths(*pool_of("gpt_oss"))
    found = asked[0]
    assert all(each is found for each in asked)
    assert (found.queries.shape, found.queries.dtype, found.scale) == (
        (1, 4, 1, 16),
        mx.float32,
        0.25,
    )
    assert found.sinks is not None
    assert found.sinks.shape == (4,)


@pytest.mark.usefixtures("ticking")
def test_a_model_that_is_too_slow_is_not_measured() -> None:
    assert measure_paths(*pool_of("llama"), seconds=1e-3) == {}


def test_batches_that_are_not_ragged_are_not_measured() -> None:
    model, arena = pool_of("llama")
    arena.capabilities = Capabilities()
    assert measure_paths(model, arena) == {}


@pytest.mark.usefixtures("ticking")
def test_a_pool_without_room_for_a_sequence_is_not_measured() -> None:
    model, arena = pool_of("llama")
    blocks = arena.pool.groups[0]
    table = arena.pool.open_table(0)
    arena.pool.reserve([table], [arena.pool.pool_bytes // blocks.bytes_per_block])
    assert measure_paths(model, arena) == {}
    arena.pool.check()
