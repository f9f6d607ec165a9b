"""Conversations that continue in mlx-lm's own BatchGenerator, with pooled caches next to
mlx-lm's, attached or not.
"""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures.pooled import make_model as make_architecture
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import ArraysCache, load_prompt_cache, save_prompt_cache
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from models import CONFIGS
from models import make_model as make_small
from thorough import only

from mlx_blockpool import BlockPoolBatchEngine, Request, Token, make_prompt_cache, open_pool
from mlx_blockpool.config import KVBits, PoolConfig
from mlx_blockpool.errors import ReleasedCacheError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.other_caches import PooledArraysCache, StateBatch
from mlx_blockpool.kv.prompt_cache import pooled_caches
from mlx_blockpool.kv.rounded_caches import rounded
from mlx_blockpool.spec import ModelCacheSpec, StateLayer

NAMES = only(
    ["llama", "gemma3_text", "gpt_oss", "lfm2", "mamba2", "qwen3_next"],
    "llama",
    "gpt_oss",
    "lfm2",
)
FIRST, SECOND = (5, 3, 8, 1), (2, 7, 4, 6)


def run(
    model: Any, prompts: list[list[int]], caches: list[Any]
) -> tuple[list[list[mx.array]], list[Any]]:
    """Logprobs of each step of each prompt, batched, and the caches that each reply ended with."""
    generator = BatchGenerator(
        model, max_tokens=10, prefill_batch_size=4, prefill_step_size=32, completion_batch_size=2
    )
    uids = generator.insert(prompts, caches=caches)
    logprobs: dict[int, list[mx.array]] = {uid: [] for uid in uids}
    ended: dict[int, Any] = {}
    while responses := generator.next_generated():
        for response in responses:
            logprobs[response.uid].append(response.logprobs)
            ended[response.uid] = response.prompt_cache
    return [logprobs[uid] for uid in uids], [ended[uid] for uid in uids]


def far_apart(one: list[list[mx.array]], two: list[list[mx.array]]) -> float:
    """The largest difference of two runs' logprobs, up to where rounding has chosen another
    token.
    """
    worst = 0.0
    for mine, theirs in zip(one, two, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            worst = max(worst, float(mx.abs(a - b).max()))
            if mx.argmax(a) != mx.argmax(b):
                break
    return worst


@pytest.mark.sampled
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_conversations_that_continue_in_a_batch_give_stocks_logprobs(
    name: str, attached: bool
) -> None:
    model = make_small(name) if name in CONFIGS else make_architecture(name)
    slabs = open_pool(model, 60_000_000, attach=False)
    if attached:
        slabs = open_pool(model, 60_000_000)
        assert slabs.capabilities.ragged
    assert_conversations_continue(model, slabs)


@pytest.mark.parametrize("bits", only([KVBits(8, 8), KVBits(4, 8)], KVBits(8, 8)))
@pytest.mark.parametrize("name", only(["llama", "gemma3_text", "gpt_oss"], "gpt_oss"))
def test_quantised_conversations_that_continue_in_a_batch_give_logprobs_of_rounded_caches(
    name: str, bits: KVBits
) -> None:
    model = make_small(name, **({"hidden_size": 128} if name == "llama" else {"head_dim": 64}))
    assert_conversations_continue(model, open_pool(model, 60_000_000, PoolConfig(bits=bits)))


def assert_conversations_continue(model: Any, slabs: KVArena) -> None:
    rng = random.Random(0)
    prompts = [
        [[rng.randrange(120) for _ in range(n)] for n in lengths] for lengths in (FIRST, SECOND)
    ]
    expected: list[list[mx.array]] = []
    for first, second in zip(*prompts, strict=True):
        caches = rounded(stock_prompt_cache(model), slabs.spec)
        said = [
            token
            for token, _ in generate_step(
                mx.array(first), model, max_tokens=10, prompt_cache=caches
            )
        ]
        assert len(said) == 10
        expected.append(
            [
                row
                for _, row in generate_step(
                    mx.array(second), model, max_tokens=10, prompt_cache=caches
                )
            ]
        )
    _, ended = run(model, prompts[0], [make_prompt_cache(model, slabs) for _ in FIRST])
    before = [[getattr(c, "offset", None) for c in caches] for caches in ended]
    again, _ = run(model, prompts[1], ended)
    assert far_apart(again, expected) < 1e-3
    assert [[getattr(c, "offset", None) for c in caches] for caches in ended] == before
    for i, caches in enumerate(ended):
        single = [
            row
            for _, row in generate_step(
                mx.array(prompts[1][i]), model, max_tokens=10, prompt_cache=caches
            )
        ]
        assert far_apart([single], [again[i]]) < 1e-3


def state_slabs() -> KVArena:
    return KVArena(
        ModelCacheSpec(
            "test", (StateLayer((((1, 3), "float32"), ((1, 2), "float32"))),), "float32"
        ),
        1_000_000,
    )


def states(cls: Any, slabs: KVArena, *filled: float | None) -> list[Any]:
    found = [
        pooled_caches(slabs)[0] if cls is PooledArraysCache else ArraysCache(2) for _ in filled
    ]
    for cache, value in zip(found, filled, strict=True):
        if value is not None:
            cache[0], cache[1] = mx.full((1, 3), value), mx.full((1, 2), value + 1)
    return found


@pytest.mark.parametrize("values", [(None, None), (1.0, None, 3.0), (None, 2.0), (4.0,), (None,)])
def test_empty_states_merge_extend_and_filter_as_mlx_lms(values: tuple[float | None, ...]) -> None:
    slabs = state_slabs()
    batches = []
    for cls in (PooledArraysCache, ArraysCache):
        batch = cls.merge(states(cls, slabs, *values))
        for more in ((7.0,), (None, None)):
            batch.extend(cls.merge(states(cls, slabs, *more)))
        batch.filter(mx.array([0, len(values), len(values) + 1]))
        batches.append(batch)
    ours, stock = batches
    assert isinstance(ours, StateBatch)
    assert (ours.batch_size, len(ours.members)) == (3, 3)
    for mine, theirs in zip(ours.cache, stock.cache, strict=True):
        assert mx.array_equal(mine, theirs)
    row = ours.extract(1)
    assert [a.tolist() for a in row.cache] == [[[7.0] * 3], [[8.0] * 2]]


def test_a_stock_state_that_joins_a_pooled_batch_is_refused_by_name() -> None:
    batch = PooledArraysCache.merge(states(PooledArraysCache, state_slabs(), 1.0))
    with pytest.raises(ValueError, match="cannot be extended by a ArraysCache"):
        batch.extend(ArraysCache.merge(states(ArraysCache, state_slabs(), 2.0)))


def test_a_batch_of_states_is_copied_pickled_and_saved_as_mlx_lms(tmp_path: Path) -> None:
    batch = PooledArraysCache.merge(states(PooledArraysCache, state_slabs(), 1.0, 2.0))
    expected = [array.tolist() for array in batch.cache]
    twins = [copy.copy(batch), copy.deepcopy(batch)]
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, [batch])
    batch[0] = batch[0] + 10
    for twin in (*twins, pickle.loads(pickle.dumps(twins[0])), *load_prompt_cache(file)):
        assert [array.tolist() for array in twin.cache] == expected
        assert twin.batch_size == 2


def test_a_batch_of_states_raises_once_a_member_was_given_back() -> None:
    batch = PooledArraysCache.merge(states(PooledArraysCache, state_slabs(), 1.0, 2.0))
    batch.members[1].sequence.release("finish()")
    for use in (
        lambda: batch[0],
        lambda: batch.__setitem__(0, mx.zeros((2, 3))),
        lambda: batch.extract(1),
    ):
        with pytest.raises(ReleasedCacheError, match="finish"):
            use()


def test_states_of_two_sequences_in_one_pooled_cache_are_refused_by_name() -> None:
    cache = pooled_caches(state_slabs())[0]
    cache[0], cache[1] = mx.zeros((2, 3)), mx.zeros((2, 2))
    with pytest.raises(ValueError, match="has the states of 2"):
        PooledArraysCache.merge([cache])


@pytest.mark.parametrize("attached", [True, False])
def test_padding_that_would_reach_a_state_is_refused(attached: bool) -> None:
    """A batch of this model gives other logits for prompts of several lengths than for each
    alone.
    """
    model = make_architecture("baichuan_m1")
    slabs = open_pool(model, 60_000_000, attach=attached)
    with pytest.raises(ValueError, match="one at a time"):
        run(model, [[1, 2, 3, 4], [5, 6]], [make_prompt_cache(model, slabs) for _ in range(2)])


@pytest.mark.sampled
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("size", [5, 40, 300])
def test_max_kv_size_makes_mlx_lms_windows(size: int, attached: bool) -> None:
    model = make_small("qwen2")
    slabs = open_pool(model, 60_000_000, attach=attached, max_kv_size=size)
    assert slabs.capabilities.ragged is attached
    prompt = [i * 7 % 131 for i in range(350)]
    for tokens in (prompt[:3], prompt):
        ours, stock = (
            make_prompt_cache(model, slabs, max_kv_size=size),
            stock_prompt_cache(model, max_kv_size=size),
        )
        assert [(c.max_size, c.keep) for c in ours] == [(c.max_size, c.keep) for c in stock]
        replies = [
            [
                token
                for token, _ in generate_step(
                    mx.array(tokens), model, max_tokens=60, prompt_cache=caches
                )
            ]
            for caches in (ours, stock)
        ]
        assert replies[0] == replies[1]
    assert max(len(c.sequence.tables[0]) for c in ours) == -(-size // 256)


def test_max_kv_size_in_a_batch_keeps_what_a_single_sequence_keeps() -> None:
    model = make_small("qwen2")
    slabs = open_pool(model, 60_000_000, max_kv_size=40)
    prompts = [[i * step % 131 for i in range(n)] for step, n in ((7, 30), (11, 60))]
    expected = []
    for prompt in prompts:
        caches = stock_prompt_cache(model, max_kv_size=40)
        expected.append(
            [
                row
                for _, row in generate_step(
                    mx.array(prompt), model, max_tokens=10, prompt_cache=caches
                )
            ]
        )
    found, _ = run(model, prompts, [make_prompt_cache(model, slabs) for _ in prompts])
    assert far_apart(found, expected) < 1e-3


def test_an_engine_with_max_kv_size_answers_as_mlx_lms_windows_also_from_a_known_prefix() -> None:
    model = make_small("qwen2")
    engine = BlockPoolBatchEngine.open(model, 60_000_000, max_kv_size=64)
    prompt = [i * 7 % 131 for i in range(100)]
    stock = stock_prompt_cache(model, max_kv_size=64)
    expected = [
        t
        for t, _ in generate_step(
            mx.array(prompt), model, max_tokens=30, prompt_cache=stock, prefill_step_size=512
        )
    ]
    for _ in range(2):
        engine.insert(Request(prompt, max_tokens=30))
        said: list[int] = []
        while len(engine):
            said += [event.token for event in engine.next() if isinstance(event, Token)]
        assert said == expected
    engine.close()


def test_a_pool_of_another_max_kv_size_is_refused_and_models_with_own_caches_do_without() -> None:
    model = make_small("qwen2")
    with pytest.raises(ValueError, match=r"open_pool\(model, max_kv_size=64\)"):
        make_prompt_cache(model, open_pool(model, 60_000_000), max_kv_size=64)
    with pytest.raises(ValueError, match="keeps the first 4 tokens"):
        open_pool(model, 60_000_000, max_kv_size=4)
    own = make_small("gemma3_text")
    slabs = open_pool(own, 60_000_000, max_kv_size=64)
    expected = [type(c) for c in stock_prompt_cache(own, max_kv_size=64)]
    assert [
        type(c).__bases__[-1] for c in make_prompt_cache(own, slabs, max_kv_size=64)
    ] == expected


def test_input_embeddings_and_batches_in_one_cache() -> None:
    model = make_small("llama")
    slabs = open_pool(model, 60_000_000)
    tokens = mx.array([i * 7 % 131 for i in range(80)])
    embeddings = model.model.embed_tokens(tokens)
    replies = [
        [
            t
            for t, _ in generate_step(
                tokens, model, max_tokens=8, prompt_cache=caches, input_embeddings=embeddings
            )
        ]
        for caches in (make_prompt_cache(model, slabs), stock_prompt_cache(model))
    ]
    assert replies[0] == replies[1]
    without = [
        [
            t
            for t, _ in generate_step(
                mx.array([], mx.int32),
                model,
                max_tokens=8,
                prompt_cache=caches,
                input_embeddings=embeddings,
            )
        ]
        for caches in (make_prompt_cache(model, slabs), stock_prompt_cache(model))
    ]
    assert without == replies
    with pytest.raises(ValueError, match="merge"):
        model(mx.array([[1, 2], [3, 4]]), cache=make_prompt_cache(model, slabs))
