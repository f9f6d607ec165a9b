"""What mlx-lm documents of its caches: a batch, an extract and a copy go on by themselves, and
the caller's caches stay.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from kv.arrays import make_slabs, numbered
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from models import make_model
from thorough import only

from mlx_blockpool import PrefixCache, attach, make_prompt_cache, open_pool
from mlx_blockpool.errors import ReleasedCacheError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.batch_cache import PooledBatchCache
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.kv.prompt_cache import pooled_caches, sequence_of
from mlx_blockpool.spec import CompositeLayer, FullLayer, ModelCacheSpec, StateLayer

ATTACHED = only(["llama", "gemma3_text", "gpt_oss", "lfm2"], "gemma3_text", "lfm2")
SYSTEM = [i * 7 % 131 for i in range(290)]
QUESTIONS = ([5, 9, 2, 77], [8, 8, 120])


def copy_each(caches: list[Any]) -> list[Any]:
    return [copy.copy(cache) for cache in caches]


def attached(name: str) -> tuple[Any, KVArena]:
    model = make_model(name)
    slabs = open_pool(model, 60_000_000)
    assert attach(model, slabs)
    return model, slabs


def replies(model: Any, prompts: Any, caches: Any, count: int = 12) -> list[list[int]]:
    """Greedy replies of mlx-lm's own generator, all prompts in one batch."""
    generator = BatchGenerator(model, max_tokens=count)
    uids = generator.insert([list(p) for p in prompts], caches=caches)
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    return [found[uid] for uid in uids]


def alone(model: Any, question: list[int], make_caches: Any) -> list[int]:
    caches = make_caches()
    model(mx.array([SYSTEM]), cache=caches)
    return replies(model, [question], [caches])[0]


def offsets(caches: list[Any]) -> list[int]:
    return [c.offset for c in caches if hasattr(c, "offset")]


@pytest.mark.parametrize("name", ATTACHED)
def test_one_cache_twice_in_a_batch_answers_as_stock_and_stays(name: str) -> None:
    model, slabs = attached(name)
    expected = [alone(model, q, lambda: stock_prompt_cache(model)) for q in QUESTIONS]
    caches = make_prompt_cache(model, slabs)
    model(mx.array([SYSTEM]), cache=caches)
    for _ in range(2):
        assert replies(model, QUESTIONS, [caches, caches]) == expected
        assert set(offsets(caches)) == {len(SYSTEM)}
    assert replies(model, QUESTIONS[:1], [caches])[0] == expected[0]
    del caches
    slabs.forget_steps()
    slabs.pool.check()
    assert [c.held for c in slabs.pool.settle()] == [0] * len(slabs.pool.settle())


def test_a_merged_cache_shares_its_whole_blocks_and_copies_the_last_one() -> None:
    slabs = make_slabs()
    slabs.capabilities = RAGGED
    caches = pooled_caches(slabs)
    for cache in caches:
        cache.update_and_fetch(*numbered(0, 600))
    batch = [type(c).merge([c, c]) for c in caches]
    first, second = (batch[0].members[i].sequence for i in (0, 1))
    assert [m.sequence for m in batch[1].members] == [first, second], (
        "both layers of a member are one sequence"
    )
    assert first.tables[0].ids == second.tables[0].ids == caches[0].sequence.tables[0].ids
    for layer in batch:
        layer.update_and_fetch(*numbered(5000, 1, batch=2))
    mine, theirs, source = (s.tables[0].ids for s in (first, second, caches[0].sequence))
    assert mine[:2] == theirs[:2] == source[:2]
    assert len({mine[2], theirs[2], source[2]}) == 3
    assert caches[1].keys[0, 0, -1, 0].item() == 599
    assert [batch[1].members[i].keys[0, 0, 600, 0].item() for i in (0, 1)] == [5000, 105000]
    slabs.pool.check()


@pytest.mark.parametrize("name", ATTACHED)
def test_an_extract_in_mid_reply_is_a_snapshot(name: str) -> None:
    model, slabs = attached(name)
    expected = alone(model, QUESTIONS[0], lambda: stock_prompt_cache(model))
    generator = BatchGenerator(model, max_tokens=12)
    uids = generator.insert(
        [SYSTEM + q for q in QUESTIONS], caches=[make_prompt_cache(model, slabs) for _ in QUESTIONS]
    )
    told: list[int] = []
    while len(told) < 5:
        told += [r.token for r in generator.next_generated() if r.uid == uids[0]]
    caches, tokens = generator.extract_cache(uids[:1])[uids[0]]
    before = offsets(caches)
    assert set(before) <= {len(tokens)}
    rest = list(told)
    while responses := generator.next_generated():
        rest += [r.token for r in responses if r.uid == uids[0]]
    assert rest == expected
    assert offsets(caches) == before
    count = len(told)
    assert (
        replies(model, [expected[count : count + 1]], [caches])[0][: 11 - count]
        == expected[count + 1 :]
    )


def test_a_snapshot_in_mlx_lms_prompt_cache_answers_as_stock() -> None:
    model, slabs = attached("llama")
    expected = alone(model, QUESTIONS[1], lambda: stock_prompt_cache(model))
    known = LRUPromptCache()
    generator = BatchGenerator(model, max_tokens=12)
    (uid,) = generator.insert([SYSTEM], caches=[make_prompt_cache(model, slabs)])
    generator.next_generated()
    caches, tokens = generator.extract_cache([uid])[uid]
    known.insert_cache("model", tokens, caches)
    while generator.next_generated():
        pass
    found, rest = known.fetch_nearest_cache("model", SYSTEM + QUESTIONS[1])
    assert found is not None
    assert replies(model, [rest], [found])[0] == expected


@pytest.mark.parametrize("path", only(["auto", "ragged", "shared"], "auto"))
def test_two_pools_of_one_model_in_one_batch(path: str) -> None:
    model, slabs = attached("llama")
    other = open_pool(model, 60_000_000)
    other.capabilities = RAGGED
    prompts = [[(i * step + 1) % 131 for i in range(300)] for step in (7, 11, 13)]
    expected = [replies(model, [p], [stock_prompt_cache(model)])[0] for p in prompts]
    slabs.decode.path = other.decode.path = path
    caches = [make_prompt_cache(model, pool) for pool in (slabs, other, slabs)]
    assert replies(model, prompts, caches) == expected


@pytest.mark.sampled
@pytest.mark.parametrize("name", ATTACHED)
@pytest.mark.parametrize("pooled_first", [True, False])
def test_pooled_and_stock_caches_in_one_batch_answer_as_stock(
    name: str, pooled_first: bool
) -> None:
    model, slabs = attached(name)
    expected = [alone(model, q, lambda: stock_prompt_cache(model)) for q in QUESTIONS]
    caches = [make_prompt_cache(model, slabs), stock_prompt_cache(model)]
    for own in caches:
        model(mx.array([SYSTEM]), cache=own)
    prompts = QUESTIONS if pooled_first else QUESTIONS[::-1]
    assert replies(model, QUESTIONS, caches if pooled_first else caches[::-1]) == expected, prompts


def test_a_stock_sequence_that_joins_a_pooled_batch_is_refused_by_name() -> None:
    slabs = make_slabs()
    slabs.capabilities = RAGGED
    batch = type(pooled_caches(slabs)[0]).merge([pooled_caches(slabs)[0]])
    stock = stock_prompt_cache(make_model("llama"))[0]
    with pytest.raises(ValueError, match="cannot be extended by a BatchKVCache"):
        batch.extend(type(stock).merge([stock]))
    stock.update_and_fetch(*numbered(0, 3))
    with pytest.raises(AttributeError, match="lie in blocks"):
        type(stock).merge([stock]).extend(batch)


def test_full_and_window_caches_are_not_one_batch() -> None:
    slabs = make_slabs((300, 0))
    slabs.capabilities = RAGGED
    caches = pooled_caches(slabs)
    with pytest.raises(ValueError, match=r"cannot (hold|be extended)"):
        type(caches[0]).merge([caches[0], caches[2]])


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("ended_by", ["release()", "discard()", "release_all()"])
def test_use_after_the_blocks_were_given_back_raises_and_says_by_what(
    name: str, ended_by: str
) -> None:
    model = make_model(name)
    prefix = PrefixCache(open_pool(model, 60_000_000))
    caches = prefix.acquire(SYSTEM, max_tokens=50).caches
    model(mx.array([SYSTEM]), cache=caches)
    {
        "release()": lambda: prefix.release(SYSTEM, caches),
        "discard()": lambda: prefix.discard(caches),
        "release_all()": prefix.release_all,
    }[ended_by]()
    uses = {
        "forward": lambda: model(mx.array([[1]]), cache=caches),
        "state": lambda: [c.state for c in caches],
        "merge": lambda: [type(c).merge([c]) for c in caches],
        "deepcopy": lambda: copy.deepcopy(caches),
        "keys": lambda: [getattr(c, "keys", None) for c in caches],
        "nbytes": lambda: [
            c.nbytes for c in caches if hasattr(c, "sequence") and hasattr(c, "place")
        ],
        "insert": lambda: prefix.insert(SYSTEM, caches),
    }
    for use in uses.values():
        with pytest.raises(ReleasedCacheError, match=ended_by[:-2]):
            use()
    prefix.check()


def test_a_batch_whose_member_was_given_back_raises() -> None:
    model, slabs = attached("llama")
    prefix = PrefixCache(slabs)
    acquired = [prefix.acquire(SYSTEM + q, max_tokens=20) for q in QUESTIONS]
    batch = [
        PooledBatchCache(list(layer)) for layer in zip(*(f.caches for f in acquired), strict=True)
    ]
    model(mx.array([[1], [2]]), cache=batch)
    prefix.discard(acquired[0].caches)
    with pytest.raises(ReleasedCacheError, match="discard"):
        model(mx.array([[1], [2]]), cache=batch)


@pytest.mark.parametrize("copier", only([copy.deepcopy, copy_each], copy.deepcopy))
def test_copies_of_a_batch_and_of_single_layers_continue_separately(copier: Any) -> None:
    model, slabs = attached("gemma3_text")
    caches = make_prompt_cache(model, slabs)
    model(mx.array([SYSTEM]), cache=caches)
    twin = copier(caches)
    assert len({id(c.sequence) for c in twin}) == 1
    assert twin[0].sequence is not caches[0].sequence
    batch = [type(c).merge([c]) for c in caches]
    other = copy.deepcopy(batch)
    tokens = [mx.array([[t]]) for t in range(20)]
    for token in tokens:
        mx.eval(model(mx.array([[130]]), cache=twin))
        mine = model(token, cache=batch)
    for token in tokens:
        theirs = model(token, cache=other)
    assert mx.allclose(mine, theirs, atol=1e-5)
    assert offsets(caches) == [len(SYSTEM)] * len(caches)


@pytest.mark.parametrize("copier", [copy.deepcopy, copy_each])
def test_copies_of_a_batch_write_into_blocks_of_their_own(copier: Any) -> None:
    slabs = make_slabs()
    slabs.capabilities = RAGGED
    caches = pooled_caches(slabs)
    for cache in caches:
        cache.update_and_fetch(*numbered(0, 300))
    batch = [type(c).merge([c, c]) for c in caches]
    twin = copier(batch)
    for layers, start in ((batch, 5000), (twin, 7000)):
        for layer in layers:
            layer.update_and_fetch(*numbered(start, 1, batch=2))
    assert [layers[1].extract(1).keys[0, 0, -1, 0].item() for layers in (batch, twin)] == [
        105000,
        107000,
    ]
    assert {m.offset for layers in (batch, twin) for layer in layers for m in layer.members} == {
        301
    }


def test_a_padded_batch_of_several_parts_is_copied() -> None:
    spec = ModelCacheSpec(
        "test",
        (CompositeLayer((StateLayer((((1, 3), "float32"),)), FullLayer(2, 4, 6))),),
        "float32",
    )
    (cache,) = pooled_caches(KVArena(spec, 10 * spec.bytes_per_block(spec.groups[0])))
    cache[0][0] = mx.ones((1, 3))
    cache[1].update_and_fetch(*numbered(0, 30))
    batch = type(cache).merge([cache, cache])
    twin = copy.deepcopy(batch)
    batch[1].update_and_fetch(*numbered(5000, 1, batch=2))
    assert twin.extract(1)[1].offset == 30
    assert mx.array_equal(twin.extract(1)[0][0], mx.ones((1, 3)))


@pytest.mark.parametrize("state_first", [True, False])
@pytest.mark.parametrize("before", ["a padded batch", "a copy of the last layer"])
def test_layers_that_are_copied_in_one_go_are_one_sequence_whatever_was_made_before(
    state_first: bool, before: str
) -> None:
    layers = (StateLayer((((1, 3), "float32"),)), FullLayer(2, 4, 6))
    spec = ModelCacheSpec("test", layers if state_first else layers[::-1], "float32")
    caches = pooled_caches(KVArena(spec, 10 * spec.bytes_per_block(spec.groups[0])))
    caches[0 if state_first else 1][0] = mx.ones((1, 3))
    caches[1 if state_first else 0].update_and_fetch(*numbered(0, 30))
    kept = (
        [type(c).merge([c, c]) for c in caches]
        if before == "a padded batch"
        else [copy.copy(caches[1])]
    )
    assert sequence_of([copy.copy(c) for c in caches]) is not caches[0].sequence
    del kept


def test_a_layer_that_is_copied_after_a_write_is_a_sequence_of_its_own() -> None:
    slabs = make_slabs()
    caches = pooled_caches(slabs)
    for cache in caches:
        cache.update_and_fetch(*numbered(0, 300))
    early = copy.copy(caches[0])
    for cache in caches:
        cache.update_and_fetch(*numbered(300, 10))
    late = copy.copy(caches[1])
    assert early.sequence is not late.sequence
    assert (early.offset, late.offset) == (300, 310)
    assert late.keys[0, 0, -1, 0].item() == 309
    with pytest.raises(ValueError, match="several sequences"):
        PrefixCache(slabs).release(list(range(300)), [early, late])


def test_room_that_was_made_for_a_reply_goes_with_the_batch() -> None:
    model = make_model("llama")
    size = open_pool(model, 60_000_000).pool.counts()[0].bytes_per_block
    slabs = open_pool(model, 2 * size)
    attach(model, slabs)
    prefix = PrefixCache(slabs)
    acquired = prefix.acquire(SYSTEM[:200], max_tokens=150)
    expected = replies(model, [SYSTEM[:200]], [stock_prompt_cache(model)], 150)[0]
    assert replies(model, [SYSTEM[:200]], [acquired.caches], 150)[0] == expected


def test_a_batch_of_mlx_lms_evicts_what_nobody_uses_for_the_copies_that_it_needs() -> None:
    model = make_model("llama")
    size = open_pool(model, 60_000_000).pool.counts()[0].bytes_per_block
    slabs = open_pool(model, 5 * size)
    prefix = PrefixCache(slabs)
    for step in range(5):
        tokens = [(i * 3 + step) % 131 for i in range(256)]
        known = prefix.acquire(tokens, max_tokens=0).caches
        model(mx.array([tokens]), cache=known)
        prefix.release(tokens, known)
    assert slabs.pool.counts()[0].evictable == 5
    acquired = prefix.acquire(SYSTEM[:200], max_tokens=50)
    model(mx.array([acquired.rest[:-1]]), cache=acquired.caches)
    expected = replies(model, [SYSTEM[:200]], [stock_prompt_cache(model)], 40)[0]
    assert replies(model, [SYSTEM[199:200]] * 3, [acquired.caches] * 3, 40) == [expected] * 3
    prefix.check()
