"""Parts of one model on several ranks: pools that are counted alike, attached on all ranks or on
none, and what a stage sends.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen2
from models import make_model
from prefix.computed import text
from prefix.lives import FULL, STATE, WINDOW, Life
from ranks.threads import ThreadRanks, on_ranks
from test_plugins import manager_with

from mlx_blockpool import plugins
from mlx_blockpool.config import KVBits
from mlx_blockpool.engine.opening import open_caches
from mlx_blockpool.errors import GroupError, SpecError
from mlx_blockpool.hooks import AttentionAdapter, hookimpl
from mlx_blockpool.kv import shards
from mlx_blockpool.kv.build import allocate, attach, describe, open_pool
from mlx_blockpool.kv.by_member import attend_by_member
from mlx_blockpool.kv.pool import BlockPool
from mlx_blockpool.kv.prompt_cache import batch_of, make_prompt_cache
from mlx_blockpool.kv.shards import agreed, is_stage, without_collectives
from mlx_blockpool.mlx_lm_compat import rebind
from mlx_blockpool.prefix.eviction import eviction_order
from mlx_blockpool.ranks.group import ALONE
from mlx_blockpool.spec import ModelCacheSpec, TokenArray
from mlx_blockpool.tier.opening import open_prefix

# Ranks with more and fewer layers of the same kinds, in several orders.
PARTS = [
    ModelCacheSpec("m", layers, "float32")
    for layers in (
        (STATE, FULL, WINDOW),
        (WINDOW, STATE, STATE, FULL, FULL),
        (FULL, WINDOW, WINDOW, STATE),
    )
]
POOL_BYTES = 300_000


def counted() -> list[ModelCacheSpec]:
    return on_ranks(len(PARTS), lambda ranks: agreed(lambda: PARTS[ranks.rank], ranks), "pipeline")


def test_ranks_with_different_plugins_open_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, str] = {}

    class Plugin:
        @hookimpl
        def attention_adapters(self) -> list[AttentionAdapter]:
            name = names[threading.current_thread().name]
            return [AttentionAdapter(name, lambda cls: True, attend_by_member)]

    manager = manager_with(Plugin())
    monkeypatch.setattr(plugins, "make_plugin_manager", lambda: manager)

    def fail(given: Sequence[str]) -> Callable[[ThreadRanks], str]:
        def fails(ranks: ThreadRanks) -> str:
            names[threading.current_thread().name] = given[ranks.rank]
            try:
                agreed(lambda: PARTS[0], ranks)
            except GroupError as error:
                return str(error)
            return ""

        return fails

    assert on_ranks(2, fail(["mine", "mine"])) == ["", ""]
    for rank, said in enumerate(on_ranks(2, fail(["mine", "other"]))):
        assert (
            f"different plugins; those of rank {rank}: adapter {['mine', 'other'][rank]}." in said
        )


def test_all_ranks_count_the_largest_blocks_and_states_in_one_order() -> None:
    specs = counted()
    assert [[group.layer for group in spec.groups] for spec in specs] == [[FULL, WINDOW]] * 3
    assert [[spec.bytes_per_block(group) for group in spec.groups] for spec in specs] == [
        [8192, 8192]
    ] * 3
    assert [spec.fixed_bytes_per_agent() for spec in specs] == [88] * 3
    assert [spec.fingerprint() for spec in specs] == [spec.fingerprint() for spec in PARTS]
    assert [BlockPool(spec, POOL_BYTES).sequence_capacity() for spec in specs] == [34 * 256] * 3
    assert len({BlockPool(spec, POOL_BYTES).sequence_capacity() for spec in PARTS}) > 1


def test_a_spec_that_is_changed_is_no_longer_counted() -> None:
    spec = counted()[1]
    assert spec.with_bits(None) is spec
    assert [other.counted for other in (spec.with_dtype("float16"), spec.with_windows(512, 4))] == [
        None,
        None,
    ]
    quantised = replace(
        spec, layers=(replace(FULL, key_dim=64, value_dim=64),), counted=None
    ).with_bits(KVBits())
    assert quantised.with_bits(None).counted is None


def test_ranks_with_unlike_numbers_of_layers_hit_and_evict_alike() -> None:
    """Blocks, windows, states and what is evicted of them, after every request."""

    def live(ranks: ThreadRanks) -> list[Any]:
        spec, rng = agreed(lambda: PARTS[ranks.rank], ranks), random.Random(3)
        life = Life(spec, pool_bytes=POOL_BYTES, state_bytes=5 * spec.fixed_bytes_per_agent())
        found = []
        for _ in range(16):
            prompt = [*text(rng.randrange(3), 600), *text(rng.randrange(50), rng.randrange(1, 500))]
            hit = life.answer(prompt, places=[600])
            pool, index = life.arena.pool, life.prefix.index
            counts = [astuple(replace(each, group="")) for each in pool.settle()]
            order = [eviction_order(pool, group) for group in range(len(pool.groups))]
            found.append(
                (
                    hit,
                    counts,
                    order,
                    [dict(each.slabs) for each in pool.groups],
                    index.state_bytes,
                    index.nbytes,
                )
            )
        assert life.arena.nbytes <= POOL_BYTES
        return found

    first, *others = on_ranks(len(PARTS), live, "pipeline")
    assert others == [first] * 2
    assert {hit for hit, *_ in first} > {0, 600}
    assert any(counts[0][-2] for _, counts, *_ in first), "nothing was evicted"


def test_ranks_with_unlike_kinds_of_layers_are_refused_by_all() -> None:
    def refuse(ranks: ThreadRanks) -> str:
        spec = replace(PARTS[0], layers=(FULL,) if ranks.rank else (FULL, WINDOW))
        with pytest.raises(GroupError) as error:
            agreed(lambda: spec, ranks)
        return str(error.value)

    messages = on_ranks(2, refuse, "pipeline")
    assert "rank 1 has full x1 (1 heads, dim 2). Start fewer ranks" in messages[1]


def test_ranks_with_other_arrays_are_refused_and_with_the_same_count_all_of_them() -> None:
    index = TokenArray("index", 1, 2, "float16")
    with_more = replace(FULL, more=(index,))

    def agree(ranks: ThreadRanks, second: TokenArray) -> ModelCacheSpec:
        layers = (replace(FULL, more=(second,)), WINDOW) if ranks.rank else (WINDOW, with_more)
        return agreed(lambda: replace(PARTS[0], layers=layers), ranks)

    specs = on_ranks(2, lambda ranks: agree(ranks, index), "pipeline")
    assert [[group.layer for group in spec.groups] for spec in specs] == [[with_more, WINDOW]] * 2
    assert [spec.bytes_per_block(spec.groups[0]) for spec in specs] == [4096 + 256 * 4] * 2
    for second in (replace(index, dim=4), replace(index, quantisable=False)):

        def refuse(ranks: ThreadRanks, second: TokenArray = second) -> str:
            with pytest.raises(GroupError) as error:
                agree(ranks, second)
            return str(error.value)

        assert "(1 heads, dim 2, index 1x2)" in on_ranks(2, refuse, "pipeline")[0]


def test_a_part_that_one_rank_cannot_describe_is_refused_by_all() -> None:
    def describe() -> ModelCacheSpec:
        raise SpecError("m: no layer kind has the cache class m.Own.")

    def refuse(ranks: ThreadRanks) -> str:
        with pytest.raises(GroupError) as error:
            agreed(describe if ranks.rank else lambda: PARTS[0], ranks)
        return str(error.value)

    messages = on_ranks(2, refuse)
    assert "Another rank cannot describe its part" in messages[0]
    assert "m: no layer kind has the cache class m.Own." in messages[1]
    with pytest.raises(SpecError):
        agreed(describe, ALONE)


def test_a_model_is_attached_on_all_ranks_or_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank finds other logits; the others detach theirs. The least pool counts."""
    tolerance = iter([1e-3, -1.0] * 2)
    monkeypatch.setattr("mlx_blockpool.kv.probe._tolerance", lambda *_: next(tolerance))

    def opened(ranks: ThreadRanks) -> tuple[bool, bool, int]:
        model = make_model("llama")
        caches: Any = open_caches(model, 4_000_000 + ranks.rank, ranks=ranks)
        is_attached = any(
            "_attached_from" in type(module).__dict__ for _, module in model.named_modules()
        )
        return caches.ragged, is_attached, caches.prefix.pool.pool_bytes

    assert on_ranks(2, opened) == [(False, False, 4_000_000)] * 2


def test_all_ranks_try_as_many_passes_of_a_quantised_model_as_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of layers meet in every pass: one rank finds other logits in the batch, and the
    others go no further either.
    """
    tolerance = iter([-1.0, 1.0] * 4)
    monkeypatch.setattr("mlx_blockpool.kv.probe._tolerance", lambda *_: next(tolerance))
    parts = [make_model("llama", head_dim=64) for _ in range(2)]
    passes = Counter[int]()

    class Counted(type(parts[0])):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            passes[id(self)] += 1
            return super().__call__(*args, **kwargs)

    def tried(ranks: ThreadRanks) -> bool:
        model = parts[ranks.rank]
        model.__class__ = Counted
        pool = allocate(describe(model, ranks=ranks).with_bits(KVBits()), 4_000_000, ranks=ranks)
        return attach(model, pool, ranks)

    assert on_ranks(2, tried) == [False, False]
    assert passes[id(parts[0])] == passes[id(parts[1])] > 0


# -- stages ----------------------------------------------------------------------------------------


class Wire:
    """Two stages in one process: the second one runs first, and what it sends is what the first
    one receives.
    """

    def __init__(self) -> None:
        self.sent: list[mx.array] = []

    def send(self, x: mx.array, to: int) -> mx.array:
        assert to == 0
        self.sent.append(x)
        return x + 0

    def recv_like(self, x: mx.array, source: int) -> mx.array:
        assert source == 1
        return self.sent.pop()

    def all_gather(self, x: mx.array) -> mx.array:
        return x


class _MX:
    """mlx.core with the wire in place of mlx.core.distributed."""

    def __init__(self, wire: Wire) -> None:
        self.distributed = wire

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


class _Group:
    def __init__(self, rank: int) -> None:
        self.rank, self.size = lambda: rank, lambda: 2


def stages() -> list[Any]:
    """The stages of a qwen2 of 3 layers, in the order of their ranks: the first one has the last
    two layers.
    """
    wire = Wire()
    call = rebind(qwen2.Qwen2Model.__call__, mx=_MX(wire))
    staged = type("Staged", (qwen2.Qwen2Model,), {"__call__": call})
    found = []
    for rank in range(2):
        model = make_model("qwen2", num_hidden_layers=3)
        model.model.pipeline(_Group(rank))
        model.model.__class__ = staged
        found.append(model)
    return found


def test_a_stage_computes_its_own_layers_apart() -> None:
    last, first = stages()
    tokens = mx.array([[1, 2, 3]])
    with without_collectives(last), without_collectives(first):
        assert not is_stage(last)
        assert last(tokens).shape == first(tokens).shape
    assert (last.model.pipeline_rank, first.model.pipeline_rank, first.model.pipeline_size) == (
        0,
        1,
        2,
    )


def test_a_part_of_a_model_needs_pools_on_all_ranks(tmp_path: Path) -> None:
    message = (
        r"This is one rank's part of a model. Open its pool with open_pool\(model, group=group\), "
        r"on every rank."
    )
    for open_it in (open_pool, open_caches, lambda part: open_prefix(part, tmp_path)):
        with pytest.raises(GroupError, match=message):
            open_it(stages()[0])


def test_stages_send_in_prefill_and_decode_as_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ragged batch and a sequence alone: what a stage puts back is evaluated, and is no view
    of a slab.
    """
    evaluated: list[mx.array] = []
    monkeypatch.setattr(shards, "send_now", evaluated.append)
    monkeypatch.setattr("mlx_blockpool.kv.batch_cache.send_now", evaluated.append)
    monkeypatch.setattr("mlx_blockpool.kv.layer_caches.send_now", evaluated.append)
    parts = stages()

    def opened(ranks: ThreadRanks) -> Any:
        model = parts[ranks.rank]
        pool = allocate(describe(model, ranks=ranks), 4_000_000, ranks=ranks)
        attach(model, pool, ranks)
        return pool

    pools = on_ranks(2, opened, "pipeline")
    assert [(pool.capabilities.ragged, pool.capabilities.is_stage) for pool in pools] == [
        (True, True)
    ] * 2
    whole = make_model("qwen2", num_hidden_layers=3)
    pool = open_pool(whole, 4_000_000)
    assert not pool.capabilities.is_stage
    caches = [
        [make_prompt_cache(model, own) for _ in range(2)]
        for model, own in zip((*parts, whole), (*pools, pool), strict=True)
    ]
    for own in zip(*caches, strict=True):
        prompt = mx.array([list(range(3, 70))])
        parts[1](prompt, cache=own[1])
        expected = whole(prompt, cache=own[2])
        assert mx.array_equal(parts[0](prompt, cache=own[0]), expected)
        assert [each.shape for each in evaluated] == [(1,)]
        evaluated.clear()
    batches = [batch_of(own) for own in caches]
    token = mx.array([[1], [2]])
    parts[1](token, cache=batches[1])
    assert mx.array_equal(parts[0](token, cache=batches[0]), whole(token, cache=batches[2]))
    assert [each.shape for each in evaluated] == [(1,)]
    assert not hasattr(batches[2][0], "keys")
