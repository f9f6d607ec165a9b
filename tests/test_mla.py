"""The adapter for MLA: a step of a batch is one computation, and replies are those of single stock
sequences.
"""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from architectures.configs import CONFIGS
from architectures.configs_common import wide
from architectures.pooled import distance, make_model, prompt
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from thorough import only, tried

from mlx_blockpool.config import KVBits, PoolConfig
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.kv.pending_tokens import padded_forward
from mlx_blockpool.kv.prompt_cache import (
    batch_of,
    begin_rows,
    commit_rows,
    leaves_of,
    make_prompt_cache,
    member_of,
)
from mlx_blockpool.kv.rounded_caches import rounded
from mlx_blockpool.testing import tiny_model

POOL = 60_000_000
# An indexer of a tiny model chooses 16 tokens.
LENGTHS = (5, 300, 12, 40)
INDEXED = ["deepseek_v32", "glm_moe_dsa"]
FULL = ["deepseek_v3", "kimi_k25", "kimi_vl", "glm4_moe_lite", "longcat_flash", "mistral4"]
HYBRID = ["kimi_linear", "kimi_k3", "bailing_hybrid", "bailing_moe_v3"]
SOME = ["deepseek_v3", "mistral4", "deepseek_v32", "bailing_moe_v3"]
BITS = KVBits(8, 8)


def make(name: str, bits: KVBits | None) -> Any:
    return make_model.__wrapped__(name) if bits is None else tiny_model(wide(CONFIGS[name]))


unattached = functools.cache(make)


def opened(name: str, bits: KVBits | None = None) -> tuple[Any, KVArena]:
    model = make(name, bits)
    return model, open_pool(model, POOL, PoolConfig(bits=bits))


def needed(name: str, arena: KVArena, *parts: list[int]) -> mx.array:
    """The last logits of one sequence on mlx-lm's caches, which round as the blocks do."""
    return last_logits(unattached(name, arena.spec.bits), stock_caches(name, arena), *parts)


def stock_caches(name: str, arena: KVArena) -> list[Any]:
    caches: list[Any] = stock_prompt_cache(unattached(name, arena.spec.bits))
    return rounded(caches, arena.spec) if arena.spec.bits else caches


def last_logits(model: Any, caches: list[Any], *parts: list[int]) -> mx.array:
    for tokens in parts:
        logits = model(mx.array([tokens]), cache=caches)
        mx.eval(logits, [c.state for c in caches])
    found: mx.array = logits[0, -1]
    return found


def prefilled(model: Any, arena: KVArena, prompts: list[list[int]]) -> list[list[Any]]:
    sequences = [make_prompt_cache(model, arena) for _ in prompts]
    for caches, tokens in zip(sequences, prompts, strict=True):
        mx.eval(model(mx.array([tokens]), cache=caches), [c.state for c in caches])
    return sequences


@pytest.fixture
def projected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each projection to latents."""
    rows: list[int] = []
    projection = type(make_model("deepseek_v3").layers[0].self_attn.kv_a_proj_with_mqa)
    call = projection.__call__

    def counted(module: Any, x: mx.array) -> Any:
        if getattr(module, "_is_latent", False):
            rows.append(x.shape[0] * x.shape[1])
        return call(module, x)

    monkeypatch.setattr(projection, "__call__", counted)
    return rows


@pytest.mark.sampled
@pytest.mark.parametrize("name", only([*FULL, *HYBRID, *INDEXED], *SOME))
@pytest.mark.parametrize("bits", [None, BITS], ids=str)
def test_a_step_projects_all_members_at_once_and_has_the_logits_of_each_alone(
    name: str, bits: KVBits | None, projected: list[int]
) -> None:
    model, arena = opened(name, bits)
    assert arena.capabilities.ragged
    assert not arena.capabilities.by_member
    assert arena.capabilities.differs == ()
    layers = [module for key, module in model.named_modules() if key.endswith("kv_a_proj_with_mqa")]
    for module in layers:
        module._is_latent = True
    prompts = [prompt(i, length) for i, length in enumerate(LENGTHS)]
    batch = batch_of(prefilled(model, arena, prompts))
    projected.clear()
    for token in (7, 9, 3):
        logits = model(mx.array([[token]] * len(prompts)), cache=batch)
        mx.eval(logits)
    assert projected == [len(prompts)] * 3 * len(layers)
    tolerance = 1e-5 if bits is None else 2e-2
    for tokens, own in zip(prompts, logits[:, -1], strict=True):
        expected = needed(name, arena, tokens, [7], [9], [3])
        assert distance([expected], [own]) < tolerance


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "path"),
    [("deepseek_v3", "ragged"), ("deepseek_v3", "shared"), ("deepseek_v32", "ragged")],
)
@pytest.mark.parametrize("preallocate", [True, False])
@pytest.mark.parametrize("bits", [None, BITS], ids=str)
def test_members_read_a_common_prefix_in_several_runs(
    name: str, path: str, preallocate: bool, bits: KVBits | None
) -> None:
    """In one slab or in several."""
    model = make(name, bits)
    arena = open_pool(model, POOL, PoolConfig(bits=bits, preallocate=preallocate))
    prefix, tails = prompt(1, 600), [prompt(2, 5), prompt(3, 70), prompt(4, 1)]
    (first,) = prefilled(model, arena, [prefix])
    sequences = [copy.deepcopy(first) for _ in tails]
    for caches, tail in zip(sequences, tails, strict=True):
        mx.eval(model(mx.array([tail]), cache=caches))
    batch = batch_of(sequences)
    arena.decode.path = path
    logits = model(mx.array([[7]] * 3), cache=batch)
    # Chosen tokens are gathered.
    assert arena.decode.path_counts == ({} if name in INDEXED else {path: len(model.layers)})
    stock, read = stock_caches(name, arena), unattached(name, bits)
    last_logits(read, stock, prefix)
    most = 5e-2 if name in INDEXED else 2e-2
    for tail, own in zip(tails, logits[:, -1], strict=True):
        expected = last_logits(read, copy.deepcopy(stock), tail, [7])
        assert distance([expected], [own]) < (1e-5 if bits is None else most)


@pytest.mark.sampled
@pytest.mark.parametrize("name", only([*FULL, *INDEXED], "glm4_moe_lite", "deepseek_v32"))
@pytest.mark.parametrize("bits", [None, BITS], ids=str)
def test_rows_of_drafts_have_the_logits_of_each_alone(name: str, bits: KVBits | None) -> None:
    model, arena = opened(name, bits)
    assert arena.capabilities.verifies == "rows"
    for lengths in ((5, 9), (300, 9)):
        prompts = [prompt(i, length) for i, length in enumerate(lengths)]
        batch = batch_of(prefilled(model, arena, prompts))
        begin_rows(batch, [3, 2])
        mx.eval(model(mx.array([[7], [8], [9], [7], [6]]), cache=batch))
        commit_rows(batch, [2, 1])
        begin_rows(batch, [1, 2])
        logits = model(mx.array([[3], [4], [2]]), cache=batch)
        mx.eval(logits)
        commit_rows(batch, [1, 2])
        kept = [[7, 8, 3], [7, 4, 2]]
        for start, tokens, own in zip(prompts, kept, logits[mx.array([0, 2]), -1], strict=True):
            expected = needed(name, arena, start, *([t] for t in tokens))
            assert distance([expected], [own]) < (1e-5 if bits is None else 2e-2)


@pytest.mark.parametrize("bits", only([None, BITS], None), ids=str)
def test_an_indexer_chooses_for_each_member_that_has_more_tokens(
    bits: KVBits | None, projected: list[int]
) -> None:
    """Members pass its 16 tokens one after the other."""
    model, arena = opened("deepseek_v32", bits)
    for layer in model.layers:
        layer.self_attn.kv_a_proj_with_mqa._is_latent = True
    prompts = [prompt(i, length) for i, length in enumerate((9, 13, 15, 40))]
    batch = batch_of(prefilled(model, arena, prompts))
    projected.clear()
    tokens = [[token] for token in prompt(9, 10)]
    read = unattached("deepseek_v32", bits)
    alone = [stock_caches("deepseek_v32", arena) for _ in prompts]
    for start, caches in zip(prompts, alone, strict=True):
        last_logits(read, caches, start)
    for token in tokens:
        logits = model(mx.array([token] * len(prompts)), cache=batch)
        for caches, own in zip(alone, logits[:, -1], strict=True):
            expected = last_logits(read, caches, token)
            assert distance([expected], [own]) < (1e-5 if bits is None else 5e-2)
    batched = [rows for rows in projected if rows == len(prompts)]
    assert len(batched) == len(tokens) * len(model.layers)


@pytest.mark.parametrize("name", only(["glm4_moe_lite", "deepseek_v32"], "glm4_moe_lite"))
def test_a_quantised_sequence_alone_reads_its_words(name: str) -> None:
    model, arena = opened(name, BITS)
    for length in (5, 300):
        tokens = prompt(length, length)
        caches = make_prompt_cache(model, arena)
        own = last_logits(model, caches, tokens, [7], [9])
        expected = needed(name, arena, tokens, [7], [9])
        assert distance([expected], [own]) < 2e-2


@pytest.mark.parametrize("name", only([*FULL, *HYBRID, *INDEXED], "deepseek_v3", "deepseek_v32"))
def test_a_sequence_alone_is_bit_equal_to_mlx_lms(name: str) -> None:
    model, arena = opened(name)
    tokens = prompt(1, 290)
    parts = (tokens[:100], tokens[100:], [7], [9])
    own = last_logits(model, make_prompt_cache(model, arena), *parts)
    assert mx.array_equal(own, needed(name, arena, *parts))


@pytest.mark.parametrize(
    "name", only(["deepseek_v3", "deepseek_v32", "kimi_linear"], "deepseek_v32")
)
def test_steps_prompts_joins_and_leaves_copy_no_slab(name: str) -> None:
    model, arena = opened(name)
    sequences = prefilled(model, arena, [prompt(i, 40 + 200 * i) for i in range(4)])
    mx.eval(arena.arrays())
    before = addresses(arena)
    batch, late = batch_of(sequences[:3]), batch_of(sequences[3:])
    for layer, other in zip(batch, late, strict=True):
        layer.extend(other)
        layer.filter([0, 2, 3])
    token = mx.array([[1]] * 3)
    for _ in range(5):
        following = mx.argmax(model(token, cache=batch)[:, -1:], axis=-1)
        mx.async_eval(following)  # type: ignore[no-untyped-call]
        mx.eval(token)
        token = following
    mx.eval(token, arena.arrays())
    mx.eval(padded_forward(model, [prompt(1, 20), prompt(2, 7), prompt(3, 90)], batch))
    mx.eval(arena.arrays())
    assert addresses(arena) == before
    assert member_of(batch, 1)[-1] is sequences[2][-1] or name == "deepseek_v32"


def addresses(arena: KVArena) -> list[int]:
    return [np.asarray(memoryview(a.view(mx.uint8))).ctypes.data for a in arena.arrays()]


@pytest.mark.parametrize("name", only([*FULL, *HYBRID, *INDEXED], "deepseek_v32"))
@tried(2, 20)
@given(seed=st.integers(0, 10_000))
def test_random_joins_leaves_prompts_and_drafts_have_the_logits_of_each_alone(
    name: str, seed: int
) -> None:
    rng = random.Random(seed)
    model, arena = opened(name)
    by_rows = arena.capabilities.verifies == "rows"
    batch: list[Any] = []
    told: list[list[list[int]]] = []
    for _ in range(12):
        act = rng.choice(["join", "leave", "step", "step", "rows", "prompts"])
        if act == "join" or not told:
            tokens = [rng.randrange(1, 120) for _ in range(rng.choice([1, 14, 70, 255, 260]))]
            (caches,) = prefilled(model, arena, [tokens])
            told.append([tokens])
            joining = batch_of([caches])
            batch = _extended(batch, joining) if batch else joining
            continue
        if act == "leave" and len(told) > 1:
            left = rng.randrange(len(told))
            staying = [i for i in range(len(told)) if i != left]
            told.pop(left)
            for layer in batch:
                layer.filter(staying)
            continue
        counts = [1] * len(told)
        if act in ("rows", "prompts"):
            counts = [rng.choice([1, 2, 5]) for _ in told]
        new = [[rng.randrange(1, 120) for _ in range(count)] for count in counts]
        if act == "rows" and by_rows:
            kept = [rng.randint(1, count) for count in counts]
            begin_rows(batch, counts)
            rows = [[token] for tokens in new for token in tokens]
            mx.eval(model(mx.array(rows), cache=batch))
            commit_rows(batch, kept)
            new = [tokens[:count] for tokens, count in zip(new, kept, strict=True)]
        elif max(counts) > 1:
            mx.eval(padded_forward(model, new, batch))
        else:
            mx.eval(model(mx.array(new), cache=batch))
        for parts, tokens in zip(told, new, strict=True):
            parts.append(tokens)
    logits = model(mx.array([[5]] * len(told)), cache=batch)
    for parts, own in zip(told, logits[:, -1], strict=True):
        expected = needed(name, arena, *parts, [5])
        assert distance([expected], [own]) < 1e-5


def _extended(batch: list[Any], joining: list[Any]) -> list[Any]:
    for layer, other in zip(batch, joining, strict=True):
        layer.extend(other)
    return batch


@pytest.mark.parametrize("members", only([1, 2], 2))
def test_keys_of_an_indexer_that_chooses_nothing_are_evaluated_in_each_step(members: int) -> None:
    model = tiny_model({**CONFIGS["deepseek_v32"], "index_topk": 2048})
    arena = open_pool(model, POOL)
    batch = batch_of(prefilled(model, arena, [[3, 4, 5]] * members))
    used = []
    for _ in range(60):
        mx.eval(model(mx.array([[1]] * members), cache=batch))
        used.append(mx.get_active_memory())
    # A step that is not evaluated holds hundreds of bytes.
    assert used[-1] - used[9] < 50 * 100


@pytest.mark.thorough
def test_five_agents_with_one_prefix_need_a_third_of_stocks_bytes() -> None:
    """Each has 40 tokens after a prefix of 2048."""
    model = tiny_model({**CONFIGS["deepseek_v3"], "num_hidden_layers": 1})
    arena = open_pool(model, POOL)
    (first,) = prefilled(model, arena, [prompt(1, 2048)])
    agents = [[cache.fork() for cache in first] for _ in range(5)]
    del first
    for i, caches in enumerate(agents):
        mx.eval(model(mx.array([prompt(2 + i, 40)]), cache=caches))
    (counts,) = arena.pool.settle()
    held = counts.held * arena.spec.bytes_per_block(arena.spec.groups[0])
    caches = stock_prompt_cache(model)
    last_logits(model, caches, prompt(1, 2048), prompt(2, 40))
    assert held * 3 <= 5 * sum(c.nbytes for c in caches)


@pytest.mark.parametrize("bits", [None, BITS], ids=str)
def test_parts_of_queries_are_scored_by_their_arrays_and_one_array_is_summed(
    bits: KVBits | None,
) -> None:
    """attend_parts() with what it is documented to compute, of all tokens and of some."""
    model, arena = opened("deepseek_v3", bits)
    sequences = prefilled(model, arena, [prompt(1, 30), prompt(2, 7)])
    (layer, *_) = leaves_of(batch_of(sequences))
    spec = layer.members[0].place.layer
    mx.random.seed(1)
    queries = [mx.random.normal((2, 4, 1, dim)) for dim in (spec.key_dim, spec.value_dim)]
    rows = [mx.random.normal((2, 1, 1, dim)) for dim in (spec.key_dim, spec.value_dim)]
    layer.update_and_fetch(*rows)
    for value in (0, 1):
        for chosen in (None, [mx.array([3, 30, 8]), None]):
            found = layer.attend_parts(queries, 0.3, value, chosen)
            for i, member in enumerate(layer.members):
                held = member.state[:2]
                if chosen is not None and chosen[i] is not None:
                    held = [mx.take(array, chosen[i], axis=2) for array in held]
                products = [
                    q[i : i + 1] @ array.swapaxes(-1, -2)
                    for q, array in zip(queries, held, strict=True)
                ]
                weights = mx.softmax(0.3 * sum(products), axis=-1)
                assert mx.allclose(found[i : i + 1], weights @ held[value], atol=1e-5)
