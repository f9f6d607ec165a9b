"""mlx-lm's own words for what a cache holds: state, assignment, files, pickles and trim, next to
mlx-lm's own caches.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures.pooled import make_model as make_architecture
from kv.arrays import make_slabs, numbered
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from models import make_model
from thorough import only

from mlx_blockpool import attach, detach, from_stock, make_prompt_cache, open_pool
from mlx_blockpool.config import KVBits, PoolConfig
from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.prompt_cache import as_stock, leaves_of, pooled_caches
from mlx_blockpool.kv.rounded_caches import rounded

NAMES = ["llama", "gemma3_text", "gpt_oss", "lfm2"]
PROMPT = [i * 7 % 131 for i in range(290)]


def computed(name: str, tokens: list[int] = PROMPT) -> tuple[Any, KVArena, list[Any], list[Any]]:
    """A model, its pool, and caches that hold a prompt: pooled ones and mlx-lm's."""
    model = make_model(name)
    slabs = open_pool(model, 60_000_000)
    ours, stock = make_prompt_cache(model, slabs), stock_prompt_cache(model)
    for caches in (ours, stock):
        model(mx.array([tokens]), cache=caches)
        mx.eval([c.state for c in caches])
    return model, slabs, ours, stock


def stock_caches(model: Any, ours: list[Any]) -> list[Any]:
    """mlx-lm's caches as pooled ones are saved: quantised, or rounded where mlx-lm has none of
    words.
    """
    stock = rounded(stock_prompt_cache(model), ours[0].sequence.arena.spec)
    return [
        QuantizedKVCache(own.group_size, own.bits) if hasattr(own, "bits") else c
        for own, c in zip(ours, stock, strict=True)
    ]


def logits_after(model: Any, caches: list[Any], tokens: tuple[int, ...] = (3, 5, 8)) -> mx.array:
    for token in tokens:
        logits: mx.array = model(mx.array([[token]]), cache=caches)
    return logits


def in_two_runs(slabs: KVArena) -> list[Any]:
    """Caches of 600 tokens whose third block is somewhere else: where it was, a fork has its
    own.
    """
    caches = pooled_caches(slabs)
    for cache in caches:
        cache.update_and_fetch(*numbered(0, 590))
    fork = copy.deepcopy(caches)
    for cache in caches:
        cache.update_and_fetch(*numbered(590, 10))
    del fork
    assert len(caches[0].sequence.tables[0].runs) == 2
    return caches


@pytest.mark.parametrize("name", NAMES)
def test_mlx_lms_own_save_and_load_go_round_through_stock_and_back(
    name: str, tmp_path: Path
) -> None:
    model, slabs, ours, stock = computed(name)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, ours, {"who": "ann"})
    loaded, metadata = load_prompt_cache(file, return_metadata=True)
    assert metadata == {"who": "ann"}
    assert [type(c) for c in loaded] == [type(c) for c in stock]
    back = from_stock(loaded, slabs)
    expected = logits_after(model, stock)
    assert mx.array_equal(logits_after(model, loaded), expected)
    assert mx.allclose(logits_after(model, back), expected, atol=1e-4)
    assert mx.allclose(logits_after(model, ours), expected, atol=1e-4)


@pytest.mark.parametrize("name", only(["llama", "gemma3_text"], "gemma3_text"))
@pytest.mark.parametrize("bits", only([KVBits(8, 8), KVBits(4, 4), KVBits(8, 4)], KVBits(8, 8)))
def test_quantised_caches_continue_in_mlx_lms_generate_after_a_save_a_pickle_and_a_copy(
    name: str, bits: KVBits, tmp_path: Path
) -> None:
    model = make_model(name, **({"hidden_size": 128} if name == "llama" else {"head_dim": 64}))
    ours = make_prompt_cache(model, open_pool(model, 60_000_000, PoolConfig(bits=bits)))
    stock = stock_caches(model, ours)
    for caches in (ours, stock):
        for part in (PROMPT, PROMPT[:40]):
            model(mx.array([part]), cache=caches)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, ours)
    # What is saved of a window continues unquantised in mlx-lm.
    exact = [copy.copy(cache) for cache in stock]
    for cache in exact:
        cache.__class__ = next(
            cls for cls in type(cache).__mro__ if cls.__module__ == "mlx_lm.models.cache"
        )
    loaded, pickled = load_prompt_cache(file), pickle.loads(pickle.dumps(ours))
    assert [type(c) for c in loaded] == [type(c) for c in pickled] == [type(c) for c in exact]
    expected = [
        token
        for token, _ in generate_step(
            mx.array([5, 8]), model, max_tokens=6, prompt_cache=copy.deepcopy(exact)
        )
    ]
    for caches in (loaded, pickled, as_stock(ours)):
        assert [
            token
            for token, _ in generate_step(
                mx.array([5, 8]), model, max_tokens=6, prompt_cache=caches
            )
        ] == expected
    expected = [
        token
        for token, _ in generate_step(
            mx.array([5, 8]), model, max_tokens=6, prompt_cache=copy.deepcopy(stock)
        )
    ]
    for caches in (copy.deepcopy(ours), ours):
        same = (
            {"kv_bits": bits.keys, "kv_group_size": 64, "quantized_kv_start": 0}
            if bits.keys == bits.values
            else {}
        )
        said = generate_step(mx.array([5, 8]), model, max_tokens=6, prompt_cache=caches, **same)
        assert [token for token, _ in said] == expected


@pytest.mark.parametrize("name", ["falcon_h1", "longcat_flash", "llama4", "deepseek_v32"])
def test_caches_of_several_parts_and_chunks_are_saved_and_pickled(
    name: str, tmp_path: Path
) -> None:
    model = make_architecture(name)
    slabs = open_pool(model, 60_000_000, attach=False)
    ours, stock = make_prompt_cache(model, slabs), stock_prompt_cache(model)
    tokens = [t % 100 for t in PROMPT]
    for caches in (ours, stock):
        model(mx.array([tokens]), cache=caches)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, ours)
    loaded = load_prompt_cache(file)
    assert [type(c) for c in loaded] == [type(c) for c in stock]
    assert [type(c) for c in leaves_of(loaded)] == [type(c) for c in leaves_of(stock)]
    pickled = pickle.loads(pickle.dumps(ours))
    stocks = [type(c).from_state(c.state) for c in ours]
    expected = logits_after(model, stock)
    for caches in (loaded, pickled, stocks, from_stock(pickled, slabs), ours):
        assert mx.allclose(logits_after(model, caches), expected, atol=1e-4)


def test_the_state_of_several_runs_is_mlx_lms_and_evaluating_it_gathers_nothing() -> None:
    slabs = make_slabs(blocks=64)
    caches = in_two_runs(slabs)
    state = caches[0].state
    keys, values, offset = state
    assert isinstance(state, tuple)
    assert (len(state), offset) == (3, 600)
    assert mx.array_equal(keys, numbered(0, 600)[0])
    assert mx.array_equal(mx.array(state[1]), values)
    assert [name for name, _ in tree_flatten([state])] == ["0.0", "0.1", "0.2"]
    del state, keys, values
    mx.clear_cache()
    states = [c.state for c in caches[:2]]
    before = mx.get_active_memory()
    mx.eval(states)
    assert mx.get_active_memory() == before


def test_stock_takes_a_pooled_state_and_pooled_takes_stocks() -> None:
    slabs = make_slabs((300, 4))
    for layer, stock in ((0, KVCache()), (2, RotatingKVCache(300, 4))):
        ours, third = pooled_caches(slabs)[layer], pooled_caches(slabs)[layer]
        for start, count in ((0, 200), (200, 250), (450, 1)):
            ours.update_and_fetch(*numbered(start, count))
        stock.state = ours.state
        third.state = stock.state
        results = [c.update_and_fetch(*numbered(451, 1)) for c in (ours, stock, third)]
        for found in results[1:]:
            assert all(mx.array_equal(a, b) for a, b in zip(found, results[0], strict=True))


def test_a_state_that_does_not_fit_is_refused_with_both_shapes() -> None:
    slabs = make_slabs((300, 4))
    full, window = pooled_caches(slabs)[0], pooled_caches(slabs)[2]
    keys, values = numbered(0, 9)
    with pytest.raises(
        ValueError, match=r"\(1, 2, 9, 4, mlx.core.float32\)\]; those given are \[\(1, 2, 9, 6"
    ):
        full.state = (values, keys, 9)
    with pytest.raises(ValueError, match="float16"):
        full.state = (keys.astype(mx.float16), values, 9)
    with pytest.raises(ValueError, match="window of 200 tokens"):
        window.state = RotatingKVCache(200).state
    assert (full.offset, window.offset) == (0, 0)


def test_assigned_keys_and_values_are_written() -> None:
    slabs = make_slabs((300, 0))
    for layer, stock in ((0, KVCache()), (2, RotatingKVCache(300))):
        ours = pooled_caches(slabs)[layer]
        for start, count in ((0, 290), (290, 1)):
            for cache in (ours, stock):
                cache.update_and_fetch(*numbered(start, count))
        fork = copy.copy(ours)
        for cache in (ours, stock):
            held = cache.keys_and_values()
            cache.keys = held[0][..., ::-1, :]
            cache.values = held[1] * 2
        assert all(
            mx.array_equal(a, b[..., :291, :])
            for a, b in zip(ours.keys_and_values(), stock.keys_and_values(), strict=True)
        )
        assert mx.array_equal(fork.keys, numbered(0, 291)[0]), "a fork does not see it"


def test_an_assignment_that_has_no_place_raises() -> None:
    ours = pooled_caches(make_slabs())[0]
    keys, values = numbered(0, 20)
    with pytest.raises(ValueError, match="empty"):
        ours.keys = keys
    ours.update_and_fetch(keys, values)
    with pytest.raises(ValueError, match=r"shape \(1, 2, 19, 4\)|those given are"):
        ours.keys = keys[:, :1]
    with pytest.raises(ValueError, match="empty"):
        ours.values = None
    assert mx.array_equal(ours.keys, keys)


def test_a_ring_that_is_put_in_order_by_hand_decodes_as_stock() -> None:
    model, _, ours, stock = computed("gemma3_text", PROMPT * 2)
    for caches in (ours, stock):
        logits_after(model, caches)
        for cache in caches:
            if isinstance(cache, RotatingKVCache):
                keys, values = cache.keys, cache.values
                cache.keys, cache.values = (
                    cache._temporal_order(keys),
                    cache._temporal_order(values),
                )
                cache._idx = cache.max_size
    found, needed = logits_after(model, ours), logits_after(model, stock)
    # The blocks of a ring may lie in several slabs, whose sums are added in another order.
    assert mx.allclose(found, needed, rtol=1e-5, atol=1e-5), mx.abs(found - needed).max()


def test_what_mlx_lms_models_put_back_is_let_be() -> None:
    """Their mx.depends() says when something is to be evaluated; writing it would copy the
    context in every step.
    """
    module = importlib.import_module("mlx_lm.models.llama")
    ours = pooled_caches(make_slabs())[0]
    ours.update_and_fetch(*numbered(0, 20))
    code = (
        "cache.keys = mx.depends(cache.keys, cache.values); cache.values = "
        "mx.zeros_like(cache.values)"
    )
    exec(compile(code, "model", "exec"), {"__name__": module.__name__, "mx": mx, "cache": ours})
    assert all(
        mx.array_equal(a, b) for a, b in zip(ours.keys_and_values(), numbered(0, 20), strict=True)
    )


def test_a_copy_of_some_layers_takes_none_of_a_copy_of_all() -> None:
    caches = pooled_caches(make_slabs())
    caches[0].update_and_fetch(*numbered(0, 20))
    some = copy.deepcopy(caches[:1])
    whole = copy.deepcopy(caches)
    assert len({id(cache.sequence) for cache in whole}) == 1
    assert some[0].sequence is not whole[0].sequence


def test_a_stage_gives_a_placeholder_to_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make_slabs()
    ours = pooled_caches(arena)[0]
    ours.update_and_fetch(*numbered(0, 20))
    monkeypatch.setattr(
        arena, "capabilities", dataclasses.replace(arena.capabilities, is_stage=True)
    )
    assert mx.array_equal(ours.keys, numbered(0, 20)[0])
    scope = {"__name__": "mlx_lm.models.llama", "cache": ours}
    assert eval("cache.keys", scope).shape == (1,)


@pytest.mark.parametrize("name", NAMES)
def test_pickled_caches_come_back_as_mlx_lms_own(name: str) -> None:
    model, slabs, ours, stock = computed(name)
    back = pickle.loads(pickle.dumps(ours))
    assert [type(c) for c in back] == [type(c) for c in stock]
    expected = logits_after(model, stock)
    assert mx.array_equal(logits_after(model, back), expected)
    assert mx.allclose(
        logits_after(model, from_stock(pickle.loads(pickle.dumps(ours)), slabs)),
        expected,
        atol=1e-4,
    )


def test_a_pickled_batch_is_refused() -> None:
    _, _, ours, _ = computed("llama")
    with pytest.raises(TypeError, match="extract"):
        pickle.dumps([type(c).merge([c]) for c in ours])


def test_a_batch_that_is_saved_or_assigned_is_refused_and_other_sequences_stay_where_they_are(
    tmp_path: Path,
) -> None:
    """The blocks of a batch lie among those of others, which no file may hold."""
    _, _, ours, _ = computed("llama")
    batch = [type(c).merge([c]) for c in ours]
    mx.eval([c.state for c in batch])
    with pytest.raises(ValueError, match=r"not serializable: a batch of pooled caches.*extract"):
        save_prompt_cache(str(tmp_path / "cache.safetensors"), batch)
    for stock in (KVCache(), RotatingKVCache(64)):
        with pytest.raises(ValueError, match="not enough values"):
            stock.state = batch[0].state
    assert not list(tmp_path.iterdir())


def test_an_attached_model_is_pickled_and_copied_attached() -> None:
    model = make_model("llama")
    slabs = open_pool(model, 60_000_000)
    assert attach(model, slabs)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(other.layers[0].self_attn) is type(model.layers[0].self_attn)
        assert mx.array_equal(
            logits_after(other, make_prompt_cache(other, slabs)),
            logits_after(model, make_prompt_cache(model, slabs)),
        )
        detach(other)
        assert type(other.layers[0].self_attn).__module__ == "mlx_lm.models.llama"
        assert "_attached_from" not in type(other.layers[0].self_attn).__dict__


def test_caches_of_another_model_are_refused_by_name() -> None:
    _, slabs, ours, _ = computed("llama")
    with pytest.raises(ValueError, match="These are 1 layer caches"):
        from_stock(ours[:1], slabs)
    with pytest.raises(ValueError, match="Cache 1 is a RotatingKVCache"):
        from_stock([KVCache(), RotatingKVCache(64)], slabs)
    with pytest.raises(ValueError, match="Cache 0 is a QuantizedKVCache"):
        from_stock([QuantizedKVCache(), QuantizedKVCache()], slabs)


def test_trim_gives_whole_blocks_back() -> None:
    slabs = make_slabs((2000, 0), layers=2)
    caches = pooled_caches(slabs)
    for cache in caches:
        cache.update_and_fetch(*numbered(0, 1500))
    assert [c.held for c in slabs.pool.settle()] == [6, 6]
    caches[0].trim(1400)
    assert [c.held for c in slabs.pool.settle()] == [6, 6], (
        "the other layer of the group still reads them"
    )
    for cache in caches[1:]:
        cache.trim(1400)
    assert [c.held for c in slabs.pool.settle()] == [1, 1]
    for cache in caches:
        cache.update_and_fetch(*numbered(100, 300))
        assert mx.array_equal(cache.keys, numbered(0, 400)[0])
    slabs.pool.check()


def test_trimming_a_full_window_is_refused() -> None:
    window = pooled_caches(make_slabs((300, 0)))[2]
    window.update_and_fetch(*numbered(0, 301))
    with pytest.raises(ValueError, match="300 tokens that is full"):
        window.trim(1)
    assert window.trim(0) == 0


def test_trimmed_room_that_was_promised_stays_promised() -> None:
    slabs = make_slabs(layers=1, blocks=6)
    (mine,), (other,) = pooled_caches(slabs), pooled_caches(slabs)
    slabs.pool.reserve([mine.sequence.tables[0]], [6])
    mine.update_and_fetch(*numbered(0, 1500))
    mine.trim(1400)
    with pytest.raises(PoolExhaustedError):
        other.update_and_fetch(*numbered(0, 1))
    mine.update_and_fetch(*numbered(100, 1400))
    slabs.pool.check()


def test_a_model_whose_type_was_changed_is_refused() -> None:
    model = make_model("llama")
    slabs = open_pool(model, 60_000_000)
    model.set_dtype(mx.float16)
    for caches in (
        make_prompt_cache(model, slabs),
        [type(c).merge([c]) for c in make_prompt_cache(model, slabs)],
    ):
        with pytest.raises(ValueError, match=r"float16 and this pool holds mlx\.core\.float32"):
            model(mx.array([[1, 2, 3]]), cache=caches)
    fresh = make_prompt_cache(model, open_pool(model, 60_000_000))
    assert mx.array_equal(
        logits_after(model, fresh), logits_after(model, stock_prompt_cache(model))
    )


def test_as_stock_and_cache_list_from_state_hold_mlx_lms_parts() -> None:
    model = make_architecture("falcon_h1")
    ours = make_prompt_cache(model, open_pool(model, 60_000_000))
    model(mx.array([[1, 2, 3]]), cache=ours)
    for found in (as_stock(ours)[0], type(ours[0]).from_state(ours[0].state)):
        assert type(found) is CacheList
        assert {type(part).__module__ for part in found.caches} == {"mlx_lm.models.cache"}
