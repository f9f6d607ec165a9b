"""open_pool(): what a script gets without asking, and what it does to the model."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from architectures.configs import CONFIGS
from architectures.configs_common import wide
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from models import make_model

from mlx_blockpool.config import KVBits, PoolConfig
from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.kv import build, probe
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.batch_cache import PooledBatchCache
from mlx_blockpool.kv.build import attach, describe, open_pool, open_served, quantised
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.prompt_cache import make_prompt_cache
from mlx_blockpool.kv.rounded_caches import rounded
from mlx_blockpool.prefix.cache import PrefixCache
from mlx_blockpool.spec import ModelCacheSpec, StateLayer
from mlx_blockpool.testing import tiny_model

ROOMY = 20_000_000


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "lfm2"])
def test_a_pool_is_attached_once_that_was_tried(name: str) -> None:
    model = make_model(name)
    slabs = open_pool(model, ROOMY)
    assert slabs.capabilities.ragged
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
    assert not slabs.capabilities.ragged
    assert type(model.layers[0].self_attn) is llama.Attention
    caches = [make_prompt_cache(model, slabs) for _ in range(2)]
    for cache in caches:
        model(mx.array([[1, 2]]), cache=cache)
    assert isinstance(type(caches[0][0]).merge([c[0] for c in caches]), BatchKVCache)


def test_a_model_whose_attention_reads_no_blocks_is_left_as_it_is() -> None:
    model = make_model("unattachable")
    types = [type(module) for _, module in model.named_modules()]
    assert not open_pool(model, ROOMY).capabilities.ragged
    assert [type(module) for _, module in model.named_modules()] == types


def test_a_pool_too_small_to_try_it_is_one_that_is_not_attached() -> None:
    model = make_model("llama")
    spec = open_pool(model, ROOMY, attach=False).spec
    slabs = open_pool(model, sum(map(spec.bytes_per_block, spec.groups)))
    assert not slabs.capabilities.ragged
    assert type(model.layers[0].self_attn) is llama.Attention
    slabs.pool.check()
    assert PrefixCache(slabs).acquire([1, 2, 3], 10).rest == [1, 2, 3]


def test_a_probe_that_fails_after_the_model_is_attached_leaves_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "copies_slabs", Mock(side_effect=RuntimeError("out of memory")))
    model = make_model("llama")
    arena = open_pool(model, ROOMY)
    assert arena.capabilities == Capabilities()
    assert type(model.layers[0].self_attn) is llama.Attention
    assert [count.held for count in arena.pool.settle()] == [0]


def test_a_pool_that_is_not_attached_takes_nothing_from_one_that_is() -> None:
    model = make_model("llama")
    first = open_pool(model, ROOMY)
    spec = first.spec
    small = KVArena(spec, sum(map(spec.bytes_per_block, spec.groups)), PoolConfig())
    with pytest.raises(Exception, match="blocks"):
        attach(model, small)
    assert not small.capabilities.ragged
    assert first.capabilities.ragged
    assert type(model.layers[0].self_attn) is not llama.Attention, "the first pool relies on it"


@pytest.mark.parametrize("attached", [True, False])
def test_a_fetch_copies_the_known_prefix_only_where_attention_needs_one_piece(
    attached: bool,
) -> None:
    model = make_model("llama")
    prefix = PrefixCache(open_pool(model, ROOMY, attach=attached))
    prompt = [i % 131 for i in range(1000)]
    first = prefix.acquire(prompt, 10)
    model(mx.array([prompt]), cache=first.caches)
    prefix.release(prompt, first.caches)
    known = {block for node in prefix.index.trie for _, block in node.blocks}
    again = prefix.acquire([*prompt[:768], 5, 6], 10)
    assert again.lookup.hit == 768
    shared = [block for block in again.caches[0].sequence.tables[0].ids if block in known]
    assert len(shared) == (3 if attached else 0)


# -- quantised blocks ------------------------------------------------------------------------------

EIGHT = PoolConfig(bits=KVBits())


def test_a_pool_may_be_quantised() -> None:
    model = make_model("llama", head_dim=64)
    arena = open_pool(model, ROOMY, EIGHT)
    assert (arena.capabilities.ragged, arena.spec.bits) == (True, KVBits())
    prefix = PrefixCache(arena)
    prompt = [i * 7 % 131 for i in range(300)]
    expected = [
        token
        for token, _ in generate_step(
            mx.array(prompt), model, max_tokens=6, prompt_cache=stock(model, arena.spec)
        )
    ]
    for hit in (0, 299):
        found = prefix.acquire(prompt, 6)
        assert found.lookup.hit == hit
        assert [
            token
            for token, _ in generate_step(
                mx.array(found.rest), model, max_tokens=6, prompt_cache=found.caches
            )
        ] == expected
        prefix.release(prompt, found.caches)


def test_embeddings_of_images_are_attended_to_in_quantised_blocks() -> None:
    """As mlx-lm computes a prompt with images: embeddings next to the tokens, on caches that a
    prefix cache has laid out.
    """
    model = make_model("llama", head_dim=64)
    arena = open_pool(model, ROOMY, EIGHT)
    prompt = [i * 5 % 131 for i in range(40)]
    seen = model.model.embed_tokens(mx.array(prompt)) + mx.random.normal((40, 32))
    found = PrefixCache(arena).acquire(prompt, 6).caches
    assert reply(model, prompt, found, seen) == reply(model, prompt, stock(model, arena.spec), seen)


def reply(
    model: Any, prompt: list[int], caches: list[Any], embeddings: mx.array | None = None
) -> list[int]:
    """Greedy tokens."""
    steps = generate_step(
        mx.array(prompt), model, max_tokens=6, prompt_cache=caches, input_embeddings=embeddings
    )
    return [token for token, _ in steps]


def stock(model: Any, spec: ModelCacheSpec) -> list[Any]:
    return rounded(stock_prompt_cache(model), spec)


@pytest.mark.parametrize(
    ("name", "attached", "message"),
    [
        (
            "llama",
            False,
            "Only attached attention reads quantised blocks: leave out attach=False, or the bits",
        ),
        (
            "unattachable",
            True,
            "The attention of unattachable does not read quantised blocks: leave out the bits",
        ),
    ],
)
def test_a_quantised_pool_that_nothing_would_read_is_refused(
    name: str, attached: bool, message: str
) -> None:
    model = make_model(name, head_dim=64)
    types = [type(module) for _, module in model.named_modules()]
    with pytest.raises(ValueError, match=message):
        open_pool(model, ROOMY, EIGHT, attach=attached)
    assert [type(module) for _, module in model.named_modules()] == types


def test_a_quantised_pool_that_would_hold_all_as_it_is_is_refused() -> None:
    with pytest.raises(
        ValueError, match="llama has no keys or values whose size is a multiple of 32"
    ):
        open_pool(make_model("llama"), ROOMY, EIGHT)
    with pytest.raises(ValueError, match="states has no keys and values"):
        quantised(ModelCacheSpec("states", (StateLayer((((1, 2), "float32"),)),)), KVBits())
    assert (
        open_pool(make_model("llama"), ROOMY, PoolConfig(bits=KVBits(None, None))).spec.bits is None
    )


def test_a_quantised_pool_too_small_to_try_the_model_is_an_error() -> None:
    model = make_model("llama", head_dim=64)
    spec = open_pool(model, ROOMY, EIGHT).spec
    with pytest.raises(PoolExhaustedError):
        open_pool(
            make_model("llama", head_dim=64), sum(map(spec.bytes_per_block, spec.groups)), EIGHT
        )


@pytest.mark.parametrize(("name", "count"), [("phi3small", 2), ("llama4", 3), ("deepseek_v3", 1)])
def test_there_is_one_pool_at_a_time_while_a_model_is_tried_in_several_forms(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that is allocated whole would otherwise take its bytes twice."""
    pools: weakref.WeakSet[KVArena] = weakref.WeakSet()
    made = []

    def make(*args: Any) -> KVArena:
        assert not list(pools)
        pools.add(arena := KVArena(*args))
        made.append(args[1])
        return arena

    monkeypatch.setattr(build, "KVArena", make)
    model = tiny_model(wide(CONFIGS[name]))
    arena = open_served(model, describe(model), ROOMY, PoolConfig(bits=KVBits(), preallocate=True))
    assert list(pools) == [arena]
    assert made == [ROOMY] * count
