"""Decode paths: each one gives stock's answers, the counter says which one ran, and no slab
moves.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel.emulation import why_not
from kernel.trusted import trust
from kv.arrays import make_slabs, numbered
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from models import make_model
from thorough import only, tried

from mlx_blockpool.config import DECODE_PATHS, KVBits, PoolConfig
from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.attach import bind
from mlx_blockpool.kv.attention import attend_cluster, group_queries
from mlx_blockpool.kv.batch_cache import PooledBatchCache
from mlx_blockpool.kv.build import describe, open_pool
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.cost_model import PathCosts
from mlx_blockpool.kv.decode_policy import DecodePolicy
from mlx_blockpool.kv.prompt_cache import batch_of, make_prompt_cache, pooled_caches
from mlx_blockpool.kv.rounded_caches import rounded
from mlx_blockpool.kv.shares import Cluster, Share, divide, find_clusters

# The kernel is emulated.
PATHS = [path for path in DECODE_PATHS[1:] if path != "kernel" or not why_not()]
MODELS = ["llama", "qwen2", "gemma3_text", "gpt_oss"]
BITS = [None, KVBits(8, 8), KVBits(4, 4, 32), KVBits(8, None), KVBits(None, 4)]
# Rows of models that are quantised have groups of 32.
WIDE = {"hidden_size": 128, "head_dim": 32}


def test_clusters_are_members_that_begin_with_the_same_blocks() -> None:
    tables = [[1, 2, 3], [9], [1, 2, 4], [7, 8], [7, 8, 5], []]
    assert find_clusters(tables) == [Cluster((0, 2), 2), Cluster((3, 4), 2)]


def test_a_block_at_another_place_of_the_table_is_not_shared() -> None:
    assert find_clusters([[1, 2], [2, 1], [3, 2]]) == []


def test_members_stay_together_where_what_all_share_saves_more() -> None:
    assert find_clusters([[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 5]]) == [Cluster((0, 1, 2, 3), 2)]


def test_members_part_where_their_longer_prefixes_save_more() -> None:
    tables = [[1, *a] for a in ([2, 3, 4], [2, 3, 4], [5, 6, 7], [5, 6, 7])]
    assert find_clusters(tables) == [Cluster((0, 1), 4), Cluster((2, 3), 4)]


@given(st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=7))
def test_clusters_are_disjoint_and_share_what_they_say(prefixes: list[list[int]]) -> None:
    # A block id says which blocks are before it, as ids of shared prefixes do.
    tables = [
        [int("1" + "".join(map(str, p[: i + 1])), 2) for i in range(len(p))] for p in prefixes
    ]
    clusters = find_clusters(tables)
    members = [i for c in clusters for i in c.members]
    assert len(members) == len(set(members))
    for c in clusters:
        assert c.blocks > 0
        assert len({tuple(tables[i][: c.blocks]) for i in c.members}) == 1


# Of a prefix that is read together two tokens of three are saved.
COSTS = PathCosts(100.0, 1.0, (300.0, 100.0, 0.0, 1 / 3, 1.0, 0.0))


def test_what_was_not_measured_stays_ragged() -> None:
    assert DecodePolicy("auto").choose(0, [5000] * 8, [Cluster(tuple(range(8)), 16)]) == "ragged"
    assert DecodePolicy("auto", {1: COSTS}).choose(0, [5, 5], []) == "ragged"


def test_the_cheapest_path_is_chosen() -> None:
    policy = DecodePolicy("auto", {0: COSTS})
    assert policy.choose(0, [5000] * 8, [Cluster(tuple(range(8)), 16)]) == "shared"
    assert policy.choose(0, [300, 300], [Cluster((0, 1), 1)]) == "shared"
    assert policy.choose(0, [5000] * 8, []) == "ragged"
    assert policy.choose(0, [45, 1], []) == "ragged"


def test_a_prefix_that_saves_less_than_a_cluster_costs_is_read_by_each_member() -> None:
    costs = PathCosts(100.0, 1.0, (400.0, 100.0, 0.0, 1 / 3, 1.0, 0.0))
    assert DecodePolicy("auto", {0: costs}).choose(0, [300, 300], [Cluster((0, 1), 1)]) == "ragged"
    assert DecodePolicy("auto", {0: costs}).choose(0, [600, 600], [Cluster((0, 1), 2)]) == "shared"


def test_own_scores_that_are_padded_to_the_longest_count() -> None:
    costs = PathCosts(100.0, 1.0, (0.0, 100.0, 0.0, 0.5, 1.0, 0.2))
    clusters = [Cluster((0, 1, 2, 3), 2)]
    policy = DecodePolicy("auto", {0: costs})
    assert policy.choose(0, [512 + 700] * 4, clusters) == "shared"
    assert policy.choose(0, [512 + 100] * 3 + [512 + 2500], clusters) == "ragged"


def test_paths_that_are_nearly_equal_are_ragged() -> None:
    costs = PathCosts(100.0, 1.0, (0.0, 99.0, 0.0, 0.99, 1.0, 0.0))
    assert DecodePolicy("auto", {0: costs}).choose(0, [4096] * 2, [Cluster((0, 1), 16)]) == "ragged"


def test_members_outside_of_clusters_are_counted_as_reading_alone() -> None:
    policy = DecodePolicy("auto", {0: COSTS})
    assert policy.choose(0, [300, 300, 9000], [Cluster((0, 1), 1)]) == "ragged", "saved 342 of 9900"
    assert policy.choose(0, [900, 900, 900], [Cluster((0, 1), 3)]) == "shared"


# What a step of the kernel costs is less than two members alone, and a token of another row costs
# nearly nothing.
KERNEL = replace(COSTS, kernel=(150.0, 1.0, 1.0, 0.05))


def kernel_policy(path: str = "auto", costs: PathCosts = KERNEL) -> DecodePolicy:
    return DecodePolicy(path, {0: costs, 1: costs})


def test_the_kernel_is_chosen_where_it_costs_less() -> None:
    policy = kernel_policy()
    assert policy.choose(0, [300, 300], [], has_kernel=True) == "kernel"
    assert policy.choose(0, [300], [], has_kernel=True) == "ragged"
    assert policy.choose(0, [5000, 5000], [], has_kernel=True) == "ragged", (
        "the kernel's tokens cost a twentieth more"
    )
    assert policy.choose(0, [5000] * 8, [Cluster(tuple(range(8)), 16)], has_kernel=True) == "kernel"
    assert kernel_policy(costs=COSTS).choose(0, [300, 300], [], has_kernel=True) == "ragged", (
        "it was not measured"
    )


def test_a_kernel_that_is_not_trusted_is_never_chosen() -> None:
    assert kernel_policy().choose(1, [300, 300], [], has_kernel=False) == "ragged"
    assert kernel_policy("kernel").choose(1, [300, 300], [], has_kernel=False) == "ragged"
    assert kernel_policy("kernel").choose(0, [300, 300], [], has_kernel=True) == "kernel"
    assert [kernel_policy("kernel").may_share(0, has_kernel) for has_kernel in (True, False)] == [
        True,
        False,
    ]


def test_rows_of_one_member_count_for_the_kernel() -> None:
    assert DecodePolicy("auto", {0: COSTS}).choose(0, [45, 45], [], [2, 1]) == "ragged"
    assert kernel_policy().choose(0, [300], [], [9], has_kernel=True) == "ragged", (
        "rows were not measured"
    )
    policy = kernel_policy(
        costs=replace(KERNEL, rows=(100.0, 0.0, 1.0), kernel_rows=(300.0, 1.0, 1.0, 0.1))
    )
    assert policy.choose(0, [300], [], [1], has_kernel=True) == "ragged"
    assert policy.choose(0, [300], [], [9], has_kernel=True) == "kernel"


def test_a_path_that_is_set_is_taken_whatever_it_costs() -> None:
    assert (
        DecodePolicy("shared", {0: COSTS}).choose(0, [300, 300, 9000], [Cluster((0, 1), 1)])
        == "shared"
    )
    assert DecodePolicy("shared", {0: COSTS}).choose(0, [5000] * 8, []) == "ragged", (
        "nothing is shared"
    )


@pytest.mark.parametrize(("costs", "path"), [(COSTS, "shared"), (None, "ragged")])
def test_forks_read_what_they_have_in_common_together_where_that_was_measured_as_cheaper(
    costs: PathCosts | None, path: str
) -> None:
    batch = Batch("llama", "auto", costs=costs)
    batch.join_forks(prompt(300), 4)
    batch.step()
    assert batch.took() == {path}


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_layer_groups_take_the_kernel_where_it_was_measured_as_cheaper() -> None:
    batch = Batch("gemma3_text", "auto", costs=KERNEL)
    trust(batch.arena, path=None)
    batch.join(*batch.prefill(prompt(280)), 5)
    batch.step()
    assert batch.took() == {"ragged"}
    batch.join(*batch.prefill(prompt(290, 1)), 6)
    batch.step()
    assert batch.arena.decode.path_counts == {"kernel": 2, "ragged": 2}, "windows were not measured"


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 4)), min_size=1, max_size=9),
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_dividing_keeps_every_head_of_every_member_once(
    readings: list[tuple[int, int]], heads: int, streams: int
) -> None:
    shares = [Share((i,), cost * n, (0, heads)) for i, (cost, n) in enumerate(readings)]
    loads = divide(shares, streams)
    assert len(loads) == streams
    found = sorted((s.members[0], h) for load in loads for s in load for h in range(*s.heads))
    assert found == [(i, h) for i in range(len(shares)) for h in range(heads)]
    assert sum(s.cost for load in loads for s in load) == pytest.approx(sum(s.cost for s in shares))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_cluster_attends_like_each_of_its_members(sinks: bool, dtype: mx.Dtype) -> None:
    lengths, kv_heads, heads = [3, 200, 40], 2, 6
    queries = mx.random.normal((3, heads, 1, 16)).astype(dtype)
    shared = [
        (mx.random.normal((1, kv_heads, n, 16)), mx.random.normal((1, kv_heads, n, 24)))
        for n in (256, 512)
    ]
    own = [
        [(mx.random.normal((1, kv_heads, n, 16)), mx.random.normal((1, kv_heads, n, 24)))]
        for n in lengths
    ]
    shared, own = (
        [(k.astype(dtype), v.astype(dtype)) for k, v in shared],
        [[(k.astype(dtype), v.astype(dtype)) for k, v in views] for views in own],
    )
    sink = mx.random.normal((heads,)).astype(dtype) if sinks else None
    grouped = group_queries(queries, kv_heads, 0.25)
    found = attend_cluster(
        grouped, shared, own, None if sink is None else sink.reshape(kv_heads, -1)
    ).reshape(3, heads, 1, -1)
    for i in range(3):
        keys, values = (
            mx.concatenate([pair[j] for pair in [*shared, *own[i]]], axis=2) for j in (0, 1)
        )
        expected = mx.fast.scaled_dot_product_attention(
            queries[i : i + 1], keys, values, scale=0.25, mask=None, sinks=sink
        )
        assert mx.allclose(found[i], expected[0], atol=1e-6 if dtype == mx.float32 else 2e-2)


@functools.cache
def stock_model(name: str, wide: bool) -> Any:
    return make_model(name, **(WIDE if wide else {}))


class Batch:
    """Sequences of a pool in one batch, and mlx-lm's own single caches, over rounded rows with
    `bits`, with the same tokens.
    """

    def __init__(
        self,
        name: str,
        path: str,
        streams: int = 1,
        pool_bytes: int = 60_000_000,
        bits: KVBits | None = None,
        costs: PathCosts | None = None,
    ) -> None:
        self.model, self.stock = (
            make_model(name, **(WIDE if bits else {})),
            stock_model(name, bits is not None),
        )
        self.arena = KVArena(describe(self.model).with_bits(bits), pool_bytes)
        assert self.arena.spec.bits == bits
        self.arena.capabilities = Capabilities(ragged=bool(bind(self.model)))
        self.arena.decode.path, self.arena.decode.streams = path, streams
        if path == "kernel":
            trust(self.arena)
        self.arena.decode.costs = (
            {} if costs is None else dict.fromkeys(self.arena.full_groups, costs)
        )
        self.caches: list[Any] = []
        self.needed: list[list[Any]] = []
        self.tokens: list[int] = []

    def prefill(self, tokens: list[int]) -> tuple[list[Any], list[Any]]:
        mine = make_prompt_cache(self.model, self.arena)
        needed = rounded(stock_prompt_cache(self.stock), self.arena.spec)
        for model, caches in ((self.model, mine), (self.stock, needed)):
            model(mx.array([tokens]), cache=caches)
            mx.eval([c.state for c in caches])
        return mine, needed

    def join(self, mine: list[Any], needed: list[Any], token: int) -> None:
        late = [type(c).merge([c]) for c in mine]
        if self.caches:
            for cache, other in zip(self.caches, late, strict=True):
                cache.extend(other)
        else:
            self.caches = late
        self.needed.append(needed)
        self.tokens.append(token)

    def join_forks(self, prompt: list[int], count: int) -> None:
        """`count` sequences on one prompt; each goes on with a token of its own."""
        mine, needed = self.prefill(prompt)
        for i in range(count):
            self.join(copy.deepcopy(mine), copy.deepcopy(needed), 3 + i)

    def leave(self, place: int) -> None:
        keep = [i for i in range(len(self.tokens)) if i != place]
        for cache in self.caches:
            cache.filter(keep)
        self.needed, self.tokens = [self.needed[i] for i in keep], [self.tokens[i] for i in keep]

    def step(self) -> None:
        """One token of each; logits and greedy tokens are those of single stock sequences."""
        logits = self.model(mx.array(self.tokens)[:, None], cache=self.caches)[:, -1]
        expected = mx.concatenate(
            [
                self.stock(mx.array([[t]]), cache=c)[:, -1]
                for t, c in zip(self.tokens, self.needed, strict=True)
            ]
        )
        # A word may be rounded the other way after another order of sums; other bits change these
        # models' logits by a fifth.
        tolerance = 2e-4 if self.arena.spec.bits is None else 1e-2
        assert mx.abs(logits - expected).max() < tolerance * mx.abs(expected).max()
        self.tokens = mx.argmax(expected, axis=-1).tolist()
        assert (
            mx.argmax(logits, axis=-1).tolist() == self.tokens or self.arena.spec.bits is not None
        )

    def took(self) -> set[str]:
        """The paths since the last call."""
        found = set(self.arena.decode.path_counts)
        self.arena.decode.path_counts.clear()
        return found


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(131) for _ in range(length)]


@pytest.mark.sampled
@pytest.mark.parametrize("name", only(MODELS, "llama", "gpt_oss"))
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("count", only([1, 2, 4, 8], 1, 4))
@pytest.mark.parametrize("bits", only(BITS, None, KVBits(8, 8)), ids=str)
def test_forced_paths_answer_as_stock_through_joins_and_leaves(
    name: str, path: str, count: int, bits: KVBits | None
) -> None:
    """Around 299 and 127 tokens the windows of gemma3_text and gpt_oss are before, at and after
    their wrap.
    """
    batch = Batch(name, path, streams=1 + count % 4 // 2, bits=bits)
    batch.join_forks(prompt(296), count)
    for _ in range(3):
        batch.step()
    batch.join(*batch.prefill(prompt(125, 1)), 5)
    for _ in range(5):
        batch.step()
    batch.leave(0)
    batch.step()
    assert path in batch.took() or (path == "shared" and count == 1)
    batch.arena.pool.check()


@pytest.mark.parametrize("path", PATHS)
def test_a_forced_path_is_the_one_that_ran_in_every_layer(path: str) -> None:
    batch = Batch("llama", path)
    batch.join_forks(prompt(300), 3)
    batch.step()
    assert batch.arena.decode.path_counts == {path: 2}, "once for each of two layers"


def test_shared_with_nothing_shared_is_ragged_and_counted_so() -> None:
    batch = Batch("llama", "shared")
    for seed in range(3):
        batch.join(*batch.prefill(prompt(300, seed)), 5)
    batch.step()
    assert batch.took() == {"ragged"}


def test_a_shared_partial_block_is_not_a_shared_run() -> None:
    batch = Batch("llama", "shared")
    batch.join_forks(prompt(200), 3)
    batch.step()
    assert batch.took() == {"ragged"}


def test_full_layers_share_and_windows_stay_ragged() -> None:
    batch = Batch("gemma3_text", "shared")
    batch.join_forks(prompt(280), 3)
    batch.step()
    assert batch.arena.decode.path_counts == {"shared": 2, "ragged": 2}


@pytest.mark.parametrize("streams", [1, 2])
def test_several_clusters_and_members_outside_of_them(streams: int) -> None:
    batch = Batch("llama", "shared", streams)
    first, second = batch.prefill(prompt(520)), batch.prefill(prompt(300, 1))
    for i in range(3):
        batch.join(*copy.deepcopy(first), 3 + i)
        batch.join(*batch.prefill(prompt(40 + i, 2 + i)), 7 + i)
        batch.join(*copy.deepcopy(second), 11 + i)
    for _ in range(3):
        batch.step()
    clusters = find_clusters(
        [c.sequence.tables[0].ids[: c.offset // 256] for c in batch.caches[0].members]
    )
    assert sorted(clusters, key=lambda c: c.members) == [
        Cluster((0, 3, 6), 2),
        Cluster((2, 5, 8), 1),
    ]
    assert batch.took() == {"shared"}


def test_a_shared_prefix_of_several_runs() -> None:
    batch = Batch("llama", "shared")
    mine, needed = batch.prefill(prompt(300))
    other = batch.prefill(prompt(300, 1))
    # The block after the prefix is taken: the next fork's goes elsewhere, and is shared in its
    # turn.
    forked = copy.deepcopy((mine, needed))
    for model, caches in ((batch.model, forked[0]), (batch.stock, forked[1])):
        mx.eval(model(mx.array([prompt(600, 2)]), cache=caches))
    batch.join(*other, 9)
    for i in range(3):
        batch.join(*copy.deepcopy(forked), 3 + i)
    members = batch.caches[0].members
    assert len(members[1].sequence.slab_runs(0, 768)) > 1
    for _ in range(3):
        batch.step()
    assert batch.took() == {"shared"}


def test_members_about_as_long_are_read_in_one_product_and_nothing_after_their_last_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of seven members that share a slab. What another sequence has left in their blocks
    would make all of them NaN.
    """
    batch = Batch("llama", "ragged")
    for i, length in enumerate((40, 47, 61, 44, 90, 52, 127)):
        mine, needed = batch.prefill(prompt(length, i))
        for cache in mine:
            ((slab, start, count),) = cache.sequence.slab_runs(cache.place.group, length)
            for array in slab.layers[cache.place.index]:
                array[:, :, start + count : start + 256] = mx.nan
        batch.join(mine, needed, 3 + i)
    products = Mock(wraps=mx.gather_mm)
    monkeypatch.setattr(mx, "gather_mm", products)
    for step in range(140):
        batch.step()
        if step == 70:
            batch.leave(5)
    rows = {call.args[0].shape[0] for call in products.call_args_list}
    assert rows == {2, 3, 4}
    assert batch.took() == {"ragged"}


@pytest.mark.parametrize("path", PATHS)
def test_forks_in_one_partial_block_continue_without_disturbing_each_other(path: str) -> None:
    batch = Batch("llama", path)
    batch.join_forks(prompt(256 + 30), 4)
    mine = [c.sequence for c in batch.caches[0].members]
    assert len({s.tables[0].ids[1] for s in mine}) == 1
    for _ in range(4):
        batch.step()
    assert len({s.tables[0].ids[0] for s in mine}) == 1
    assert len({s.tables[0].ids[1] for s in mine}) == 4
    assert batch.took() == {path}


@tried(3, 60)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(MODELS),
    path=st.sampled_from(["auto", *PATHS]),
    streams=st.integers(1, 2),
    bits=st.sampled_from(BITS),
)
def test_random_batches_answer_as_stock(
    seed: int, name: str, path: str, streams: int, bits: KVBits | None
) -> None:
    rng = random.Random(seed)
    batch = Batch(name, path, streams, bits=bits, costs=COSTS)
    lengths = [5, 126, 127, 128, 254, 255, 256, 290, 300, 511]
    batch.join_forks(prompt(rng.choice(lengths), seed), rng.randrange(1, 4))
    for step in range(12):
        action = rng.random()
        if action < 0.2 and len(batch.tokens) < 7:
            batch.join(*batch.prefill(prompt(rng.choice(lengths), step)), step)
        elif action < 0.4 and len(batch.tokens) < 7:
            i = rng.randrange(len(batch.tokens))
            fork = copy.deepcopy([c.extract(i) for c in batch.caches])
            batch.join(fork, copy.deepcopy(batch.needed[i]), 17 + step)
        elif action < 0.55 and len(batch.tokens) > 1:
            batch.leave(rng.randrange(len(batch.tokens)))
        batch.step()
    batch.arena.pool.check()


@pytest.mark.sampled
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("streams", "bits"), [(1, None), (2, None), (2, KVBits(8, 8))], ids=str)
def test_pipelined_steps_move_no_slab(path: str, streams: int, bits: KVBits | None) -> None:
    batch = Batch("llama", path, streams, bits=bits)
    batch.join_forks(prompt(300), 4)
    batch.step()
    before = addresses(batch.arena)
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    tokens = mx.array(batch.tokens)[:, None]
    for _ in range(12):
        following = mx.argmax(batch.model(tokens, cache=batch.caches)[:, -1:], axis=-1)
        mx.async_eval(following)
        tokens = following
    mx.eval(tokens)
    assert addresses(batch.arena) == before
    assert batch.took() == {path}
    assert mx.get_peak_memory() - base < sum(a.nbytes for a in batch.arena.arrays()) // 2


def addresses(slabs: Any) -> list[int]:
    return [np.asarray(memoryview(a.view(mx.uint8))).ctypes.data for a in slabs.arrays()]


def merged(slabs: KVArena, lengths: list[int]) -> list[PooledBatchCache]:
    """A batch of sequences with numbered tokens, one batch cache for each layer."""
    sequences = [pooled_caches(slabs) for _ in lengths]
    for caches, n in zip(sequences, lengths, strict=True):
        for cache in caches:
            cache.update_and_fetch(*numbered(0, n))
    return [PooledBatchCache(list(layer)) for layer in zip(*sequences, strict=True)]


def test_a_batch_that_finds_no_block_changes_no_member() -> None:
    slabs = make_slabs(blocks=3)
    batch = merged(slabs, [100, 256, 256])
    with pytest.raises(PoolExhaustedError):
        batch[0].update_and_fetch(*numbered(500, 1, batch=3))
    assert [m.offset for m in batch[0].members] == [100, 256, 256]
    assert mx.array_equal(batch[0].members[0].keys, numbered(0, 100)[0])


def test_every_member_writes_its_own_token_wherever_its_slab_is() -> None:
    slabs = make_slabs((300, 0), blocks=16)
    batch = merged(slabs, [100, 255, 256, 700, 1])
    for layer in batch:
        layer.update_and_fetch(*numbered(5000, 1, batch=5))
        for row, member in enumerate(layer.members):
            place = member.ring_index - 1 if hasattr(member, "ring_index") else member.offset - 1
            assert mx.array_equal(
                member.keys[:, :, place : place + 1], numbered(5000, 1, batch=5)[0][row : row + 1]
            )


def test_a_step_is_worked_out_once_for_the_layers_of_a_group() -> None:
    slabs = make_slabs(layers=3)
    batch = merged(slabs, [10, 20])
    steps = []
    for layer in batch:
        layer.update_and_fetch(*numbered(5000, 1, batch=2))
        steps.append(slabs.steps[0])
    assert steps[0] is steps[1] is steps[2]
    batch[0].update_and_fetch(*numbered(5001, 1, batch=2))
    assert slabs.steps[0] is steps[0]
    assert steps[0].offsets.tolist() == [11, 21], "the step of the next tokens"


def test_a_remembered_step_keeps_no_blocks() -> None:
    slabs = make_slabs()
    batch = merged(slabs, [300, 20])
    batch[0].update_and_fetch(*numbered(5000, 1, batch=2))
    del batch
    assert all(c.held == 0 for c in slabs.pool.settle())
    slabs.pool.check()


@pytest.mark.parametrize(("bits", "most"), [(None, 220), (KVBits(8, 8), 244)], ids=str)
def test_a_step_of_two_members_makes_few_python_calls(bits: KVBits | None, most: int) -> None:
    """Counted for two layers with Python 3.11; later versions make fewer, as they inline
    comprehensions.
    """
    model = make_model("llama", **(WIDE if bits else {}))
    arena = open_pool(model, 30_000_000, PoolConfig(bits=bits, preallocate=True))
    arena.decode.streams = 1
    sequences = [make_prompt_cache(model, arena) for _ in range(2)]
    for caches, length in zip(sequences, (20, 21), strict=True):
        mx.eval(model(mx.array([prompt(length)]), cache=caches))
    batch, token = batch_of(sequences), mx.array([[1], [1]])
    mx.eval(model(token, cache=batch))
    names: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "mlx_blockpool" in frame.f_code.co_filename:
            names.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        out = model(token, cache=batch)
    finally:
        sys.setprofile(before)
    mx.eval(out)
    assert 0 < len(names) <= most, Counter(names).most_common(20)
