"""attach(): a model's own attention reads blocks, mlx-lm stays as it is, and batches answer as
stock's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from architectures.configs import CONFIGS as ARCHITECTURES
from architectures.configs_common import wide
from architectures.side_by_side import side_by_side
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import BatchKVCache
from models import make_model
from thorough import only, tried

from mlx_blockpool.config import KVBits
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.attach import bind, detach
from mlx_blockpool.kv.attention import attend_runs
from mlx_blockpool.kv.batch_cache import PooledBatchCache
from mlx_blockpool.kv.build import attach, describe, open_pool, quantised
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.pending_tokens import padded_forward
from mlx_blockpool.kv.probe import MEASURABLE_BYTES, copies_slabs
from mlx_blockpool.kv.prompt_cache import batch_of, make_prompt_cache, member_of, pooled_caches
from mlx_blockpool.kv.proof import distance, run
from mlx_blockpool.kv.rounded_caches import rounded
from mlx_blockpool.mlx_lm_compat import rebind
from mlx_blockpool.spec import FullLayer, ModelCacheSpec
from mlx_blockpool.testing import Subject, tiny_model

TOKENS = mx.array([[3, 1, 4, 1, 5]])
RAGGED = ["llama", "qwen2", "gemma3_text", "gpt_oss"]


def test_attach_touches_one_instance_and_detach_restores_it() -> None:
    model, other = make_model("llama"), make_model("llama")
    call = llama.Attention.__call__
    assert bind(model) == 2
    layer = model.layers[0].self_attn
    assert type(layer) is not llama.Attention
    assert isinstance(layer, llama.Attention)
    assert type(other.layers[0].self_attn) is llama.Attention
    assert llama.Attention.__call__ is call
    assert bind(model) == 2, "attached once is attached"
    detach(model)
    assert type(layer) is llama.Attention


@pytest.mark.parametrize("name", RAGGED)
def test_attached_model_gives_the_same_logits_on_stock_caches(name: str) -> None:
    model = make_model(name)
    before = model(TOKENS)
    bind(model)
    assert mx.array_equal(model(TOKENS), before)


@pytest.mark.parametrize("name", RAGGED)
def test_models_that_use_the_base_attention_are_ragged(name: str) -> None:
    model = make_model(name)
    assert attach(model, open_pool(model, 20_000_000, attach=False))


def own_attention(factor: float) -> Callable[..., mx.array]:
    """A function with the parameters of mlx-lm's, as packages have that copy it."""

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: Any = None,
    ) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=factor * scale, mask=mask, sinks=sinks
        )

    return scaled_dot_product_attention


@pytest.mark.parametrize(("factor", "by_member"), [(1.0, False), (2.0, True)])
def test_another_function_of_that_name_reads_blocks_if_it_computes_the_same(
    factor: float, by_member: bool
) -> None:
    model = make_model("llama")
    call = rebind(llama.Attention.__call__, scaled_dot_product_attention=own_attention(factor))
    for layer in model.layers:
        layer.self_attn.__class__ = type("Attention", (llama.Attention,), {"__call__": call})
    before = model(TOKENS)
    arena = open_pool(model, 20_000_000)
    assert (arena.capabilities.ragged, arena.capabilities.by_member) == (True, by_member)
    assert mx.array_equal(model(TOKENS), before)


def test_a_mask_of_a_longer_window_than_the_caches_have_is_that_of_each_member() -> None:
    """plamo3 makes the masks of its windows for one more token."""
    model, own = (tiny_model(ARCHITECTURES["plamo3"]) for _ in range(2))
    arena = open_pool(model, 60_000_000)
    assert (arena.capabilities.ragged, arena.capabilities.by_member) == (True, False)
    prompts = [[3 + (7 * i + n) % 100 for i in range(n)] for n in (90, 43, 41)]
    batch = batch_of([make_prompt_cache(model, arena) for _ in prompts])
    parts = [slice(40), slice(40, None)]
    for part in parts:
        mx.eval(padded_forward(model, [tokens[part] for tokens in prompts], batch))
    for token in (7, 9, 3):
        found = model(mx.array([[token]] * len(prompts)), cache=batch)[:, -1]
        mx.eval(found)
    for tokens, logits in zip(prompts, found, strict=True):
        caches = own.make_cache()
        needed = run(own, caches, [*(tokens[part] for part in parts), [7], [9], [3]])
        assert distance(needed[-1:], [logits]) < [1e-5]


@pytest.mark.sampled
@pytest.mark.parametrize("bits", [None, KVBits()])
@pytest.mark.parametrize("name", ["iquestloopcoder", "minimax_m3_vl"])
def test_attention_in_several_methods_reads_blocks(name: str, bits: KVBits | None) -> None:
    """The first calls mlx-lm's function in a method; the second has one that chooses what is read,
    by keys of an index.
    """
    assert "ragged" in side_by_side(Subject(wide(ARCHITECTURES[name])), bits)


def test_attention_that_reads_no_blocks_is_found_out_and_left_as_it_is() -> None:
    model = make_model("unattachable")
    types = [type(module) for _, module in model.named_modules()]
    slabs = open_pool(model, 20_000_000, attach=False)
    assert not attach(model, slabs)
    assert [type(module) for _, module in model.named_modules()] == types
    caches = [pooled_caches(slabs) for _ in range(2)]
    for cache in (c for pair in caches for c in pair):
        cache.update_and_fetch(*mx.random.normal((2, 1, 2, 5, 16)))
    assert isinstance(type(caches[0][0]).merge([c[0] for c in caches]), BatchKVCache)


# -- quantised blocks ------------------------------------------------------------------------------


def quantised_arena(model: Any, bits: int = 8) -> KVArena:
    return KVArena(quantised(describe(model), KVBits(bits, bits)), 20_000_000)


@pytest.mark.sampled
@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("bits", [8, 4])
def test_models_that_use_the_base_attention_read_quantised_blocks(name: str, bits: int) -> None:
    model = make_model(name, **({"hidden_size": 256} if name == "qwen2" else {"head_dim": 64}))
    arena = quantised_arena(model, bits)
    assert attach(model, arena)
    assert arena.capabilities.ragged


def test_logits_are_compared_with_those_of_caches_that_are_rounded_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("llama", head_dim=64)
    monkeypatch.setattr(
        "mlx_blockpool.kv.probe.rounded",
        lambda caches, spec: rounded(caches, spec.with_bits(KVBits(4, 4))),
    )
    assert not attach(model, quantised_arena(model))
    assert type(model.layers[0].self_attn) is llama.Attention


def test_attention_that_does_not_read_quantised_blocks_is_found_out() -> None:
    model = make_model("unattachable", head_dim=64)
    types = [type(module) for _, module in model.named_modules()]
    arena = quantised_arena(model)
    assert not attach(model, arena)
    assert not arena.capabilities.is_attached
    assert [type(module) for _, module in model.named_modules()] == types


def test_a_model_without_batches_reads_quantised_blocks_of_one_sequence() -> None:
    model = tiny_model(wide(ARCHITECTURES["llama4"]))
    arena = quantised_arena(model)
    assert not attach(model, arena)
    assert arena.capabilities.is_attached
    assert not arena.capabilities.ragged
    caches = [make_prompt_cache(model, arena) for _ in range(2)]
    with pytest.raises(
        ValueError, match="A padded batch of mlx-lm's cannot hold quantised keys and values"
    ):
        type(caches[0][-1]).merge([c[-1] for c in caches])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_runs_attend_like_one_piece(sinks: bool, dtype: mx.Dtype) -> None:
    queries = mx.random.normal((1, 8, 1, 16)).astype(dtype)
    keys, values = mx.random.normal((2, 1, 2, 900, 16)).astype(dtype)
    sink = mx.random.normal((8,)).astype(dtype) if sinks else None
    cuts = [(0, 256), (256, 700), (700, 900)]
    found = attend_runs(
        queries, [(keys[..., a:b, :], values[..., a:b, :]) for a, b in cuts], 0.25, sink
    )
    expected = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=0.25, mask=None, sinks=sink
    )
    assert mx.allclose(found, expected, atol=1e-6 if dtype == mx.float32 else 2e-3)


def reply(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of one sequence with mlx-lm's own caches."""
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


MODELS = {name: make_model(name) for name in RAGGED}


@pytest.mark.parametrize("name", only(RAGGED, "llama", "gpt_oss"))
@tried(2, 30)
@given(seed=st.integers(0, 10_000))
def test_batches_with_joins_and_leaves_answer_as_single_stock_sequences(
    name: str, seed: int
) -> None:
    """Prompts of mixed length join at random steps; some are taken out; windows wrap or not."""
    rng = random.Random(seed)
    stock = MODELS[name]
    model = make_model(name)
    slabs = open_pool(model, 40_000_000, attach=False)
    assert attach(model, slabs)
    generator = BatchGenerator(model, max_tokens=12, prefill_step_size=128)
    prompts: dict[int, list[int]] = {}
    replies: dict[int, list[int]] = {}
    removed: set[int] = set()
    for step in range(60):
        if step < 12 and rng.random() < 0.4:
            prompt = [
                rng.randrange(131) for _ in range(rng.choice([1, 5, 60, 127, 128, 129, 290, 305]))
            ]
            (uid,) = generator.insert([prompt], caches=[make_prompt_cache(model, slabs)])
            prompts[uid] = prompt
        live = [u for u in prompts if u not in removed and len(replies.get(u, [])) < 12]
        if live and rng.random() < 0.05:
            uid = rng.choice(live)
            generator.remove([uid])
            removed.add(uid)
        response = None
        for response in generator.next()[1]:
            replies.setdefault(response.uid, []).append(response.token)
    for uid, tokens in replies.items():
        assert tokens == reply(stock, prompts[uid], 12)[: len(tokens)]
        assert len(tokens) == 12 or uid in removed
    # The last response holds the caches of a finished sequence.
    del generator, response
    slabs.pool.check()
    assert all(c.held == 0 for c in slabs.pool.settle())


def test_joining_and_leaving_copies_no_slab() -> None:
    model = make_model("llama")
    slabs = open_pool(model, 20_000_000, attach=False)
    attach(model, slabs)
    caches = [make_prompt_cache(model, slabs) for _ in range(4)]
    for i, cache in enumerate(caches):
        model(mx.array([[7] * (50 + 300 * i)]), cache=cache)
    mx.eval([c.state for cache in caches for c in cache])
    before = addresses(slabs)
    batch = batch_of(caches[:3])
    for layer, late in zip(batch, batch_of(caches[3:]), strict=True):
        assert isinstance(layer, PooledBatchCache)
        layer.extend(late)
        layer.filter([0, 2, 3])
    for _ in range(5):
        mx.eval(model(mx.array([[1]] * 3), cache=batch))
    assert member_of(batch, 1)[0] is caches[2][0]
    assert addresses(slabs) == before


def addresses(slabs: Any) -> list[int]:
    return [np.asarray(memoryview(a.view(mx.uint8))).ctypes.data for a in slabs.arrays()]


class OneAttention:
    """Nothing but attention over a long cache: mlx encodes its next step before the last has
    run.
    """

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        x = mx.ones((1, 8, 1, 64)) + tokens.reshape(1, 1, 1, 1)
        keys, values = cache[0].update_and_fetch(x, x)
        return mx.fast.scaled_dot_product_attention(x, keys, values, scale=1.0).reshape(1, 1, -1)


def test_new_slabs_are_large_enough_for_copies_of_them_to_show() -> None:
    spec = ModelCacheSpec("one", (FullLayer(8, 64, 64),), "float32")
    arena = KVArena(spec, 200 * spec.bytes_per_block(spec.groups[0]))
    sizes: list[int] = []

    def model(token: mx.array, cache: list[Any]) -> mx.array:
        cache[0].update_and_fetch(*mx.zeros((2, 1, 8, 1, 64)))
        sizes.append(arena.arrays()[0].nbytes)
        return mx.zeros((1, 1, 4))

    copies_slabs(model, arena)
    assert min(sizes) > MEASURABLE_BYTES
    assert arena.pool.settle()[0].total <= 1


def test_steps_in_flight_that_copy_slabs_are_found_out_and_forbidden() -> None:
    spec = ModelCacheSpec("one", (FullLayer(8, 64, 64),), "float32")
    slabs = KVArena(spec, 64 * spec.bytes_per_block(spec.groups[0]))
    model = OneAttention()
    seed = pooled_caches(slabs)
    seed[0].update_and_fetch(*mx.zeros((2, 1, 8, 12_000, 64)))
    mx.eval([c.state for c in seed])
    assert copies_slabs(model, slabs, caches=seed)
    slabs.capabilities = Capabilities(synchronous=True)
    before = addresses(slabs)
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    previous = mx.zeros((1, 1), mx.int32)
    for _ in range(10):
        following = mx.argmax(model(previous, seed)[:, -1:], axis=-1)
        mx.async_eval(following)
        previous = following
    mx.eval(previous)
    assert addresses(slabs) == before
    assert mx.get_peak_memory() - base < slabs.arrays()[0].nbytes
