"""What steps pass to the kernel: whole slabs, each once, and a plan that all layers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernel.emulation import why_not
from kernel.trusted import emulator, trust

from mlx_blockpool.kernel.source import KernelText
from mlx_blockpool.kv import kernel_attention
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.kv.prompt_cache import batch_of, pooled_caches
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, WindowLayer

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


HEADS, KEY_DIM, VALUE_DIM = 2, 16, 24
FULL, WINDOW = FullLayer(HEADS, KEY_DIM, VALUE_DIM), WindowLayer(HEADS, KEY_DIM, VALUE_DIM, 300, 4)


def make_arena(*layers: FullLayer) -> KVArena:
    spec = ModelCacheSpec("test", layers, "float32")
    arena = KVArena(spec, 16 * sum(spec.bytes_per_block(group) for group in spec.groups))
    arena.capabilities = RAGGED
    trust(arena)
    return arena


def random(batch: int, heads: int, tokens: int, dim: int, seed: int) -> mx.array:
    return mx.random.normal((batch, heads, tokens, dim), key=mx.random.key(seed))


def rows(batch: int, tokens: int) -> tuple[mx.array, mx.array]:
    return random(batch, HEADS, tokens, KEY_DIM, tokens), random(
        batch, HEADS, tokens, VALUE_DIM, 1000 + tokens
    )


def address(array: mx.array) -> int:
    return int(np.asarray(memoryview(array.view(mx.uint8))).ctypes.data)


class Watched:
    """The emulator, and the inputs of each launch."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.addresses: list[list[int]] = []

    def __call__(self, text: KernelText, inputs: Sequence[mx.array], *rest: Any) -> list[mx.array]:
        self.names.append(text.name)
        mx.eval(*inputs)
        self.addresses.append([address(array) for array in inputs])
        return emulator()(text, inputs, *rest)


def batch_in(arena: KVArena, lengths: Sequence[int]) -> list[Any]:
    sequences = [pooled_caches(arena) for _ in lengths]
    for caches, length in zip(sequences, lengths, strict=True):
        for cache in caches:
            cache.update_and_fetch(*rows(1, length))
    return list(batch_of(sequences))


def step(batch: list[Any], members: int) -> list[mx.array]:
    """The attention of one step in each layer."""
    found = []
    for layer in batch:
        keys, values = rows(members, 1)
        layer.update_and_fetch(keys, values)
        found.append(
            layer.attend(random(members, 2 * HEADS, 1, KEY_DIM, 3), keys, values, 0.5, None, None)
        )
    mx.eval(found)
    return found


@pytest.mark.parametrize("layer", [FULL, WINDOW])
def test_slabs_are_passed_where_they_lie_and_once(layer: FullLayer) -> None:
    arena = make_arena(layer, layer)
    watched = arena.decode.launch = Watched()
    out = step(batch_in(arena, [100, 256, 700, 40]), 4)
    assert [each.shape for each in out] == [(4, 2 * HEADS, 1, VALUE_DIM)] * 2
    slabs = {address(array) for array in arena.arrays()}
    assert len(slabs) == len(arena.arrays())
    attends = [
        found
        for name, found in zip(watched.names, watched.addresses, strict=True)
        if "attend" in name
    ]
    assert len(attends) == 2
    assert len({work for _, work, *_ in attends}) == 1, "one work list for both layers"
    for _, _, _, *sources in attends:
        read = [source for source in sources if source in slabs]
        assert len(set(read)) == len(read)
        # Sources of which nothing is read make it a power of two.
        assert len(read) > len(sources) // 2
        assert read == sources[: len(read)]


def test_a_plan_is_made_once_for_the_layers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    made = kernel_attention.plan_of
    monkeypatch.setattr(
        kernel_attention, "plan_of", lambda *given: plans.append(given) or made(*given)
    )
    batch = batch_in(make_arena(FULL, FULL), [100, 256])
    step(batch, 2)
    assert len(plans) == 1
    step(batch, 2)
    assert len(plans) == 2
