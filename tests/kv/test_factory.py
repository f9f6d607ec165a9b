"""open_pool(): what a script gets without asking, and what it does to the model."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import BatchKVCache
from models import make_model

from mlx_blockpool.config import PoolConfig
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.attach import attach
from mlx_blockpool.kv.batch_cache import PooledBatchCache
from mlx_blockpool.kv.factory import make_prompt_cache, open_pool
from mlx_blockpool.prefix.cache import PrefixCache

ROOMY = 20_000_000


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "lfm2"])
def test_a_pool_is_attached_once_that_was_tried(name: str) -> None:
    model = make_model(name)
    slabs = open_pool(model, ROOMY)
    assert slabs.ragged
    assert not slabs.decode.path_counts, "what was tried is not counted"
    assert all(count.held == 0 for count in slabs.pool.settle())
    one, two = make_prompt_cache(model, slabs), make_prompt_cache(model, slabs)
    model(mx.array([[1, 2]]), cache=one)
    model(mx.array([[3, 4]]), cache=two)
    batch = [type(layer[0]).merge(list(layer)) for layer in zip(one, two, strict=True)]
    assert any(isinstance(layer, PooledBatchCache) for layer in batch)


def test_without_attach_the_model_is_left_as_it_is() -> None:
    model = make_model("llama")
    slabs = open_pool(model, ROOMY, attach=False)
    assert not slabs.ragged
    assert type(model.layers[0].self_attn) is llama.Attention
    caches = [make_prompt_cache(model, slabs) for _ in range(2)]
    for cache in caches:
        model(mx.array([[1, 2]]), cache=cache)
    assert isinstance(type(caches[0][0]).merge([c[0] for c in caches]), BatchKVCache)


def test_a_model_with_attention_of_its_own_is_left_as_it_is() -> None:
    model = make_model("gemma2")
    types = [type(module) for _, module in model.named_modules()]
    assert not open_pool(model, ROOMY).ragged
    assert [type(module) for _, module in model.named_modules()] == types


def test_a_pool_too_small_to_try_it_is_one_that_is_not_attached() -> None:
    model = make_model("llama")
    spec = open_pool(model, ROOMY, attach=False).spec
    slabs = open_pool(model, sum(map(spec.bytes_per_block, spec.groups)))
    assert not slabs.ragged
    assert type(model.layers[0].self_attn) is llama.Attention
    slabs.pool.check()
    assert PrefixCache(slabs).acquire([1, 2, 3], 10).rest == [1, 2, 3]


def test_a_pool_that_is_not_attached_takes_nothing_from_one_that_is() -> None:
    model = make_model("llama")
    first = open_pool(model, ROOMY)
    spec = first.spec
    small = KVArena(spec, sum(map(spec.bytes_per_block, spec.groups)), PoolConfig())
    with pytest.raises(Exception, match="blocks"):
        attach(model, small)
    assert not small.ragged
    assert first.ragged
    assert type(model.layers[0].self_attn) is not llama.Attention, "the first pool relies on it"


@pytest.mark.parametrize("attached", [True, False])
def test_a_fetch_copies_the_known_prefix_only_where_attention_needs_one_piece(attached: bool) -> None:
    model = make_model("llama")
    prefix = PrefixCache(open_pool(model, ROOMY, attach=attached))
    prompt = [i % 131 for i in range(1000)]
    first = prefix.acquire(prompt, 10)
    model(mx.array([prompt]), cache=first.caches)
    prefix.release(prompt, first.caches)
    known = {block for node in prefix.index.trie for block in node.residency.blocks}
    again = prefix.acquire([*prompt[:768], 5, 6], 10)
    assert again.lookup.hit == 768
    shared = [block for block in again.caches[0].sequence.tables[0].ids if block in known]
    assert len(shared) == (3 if attached else 0)
