"""Several next tokens of each member in one forward: their logits are stock's, and what is kept
goes on as if alone.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from architectures.pooled import make_model as make_architecture
from hypothesis import given
from hypothesis import strategies as st
from kernel.emulation import why_not
from kernel.trusted import trust
from kv.arrays import HEADS, KEY_DIM, VALUE_DIM, make_slabs
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from models import make_model
from thorough import only, tried

from mlx_blockpool.config import KVBits, PoolConfig
from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.attention import attend_causally, attend_cluster
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.kv.prompt_cache import (
    batch_of,
    begin_rows,
    commit_rows,
    make_prompt_cache,
    pooled_caches,
)
from mlx_blockpool.kv.rounded_caches import rounded
from mlx_blockpool.kv.step import Step, _clusters_of, missing_blocks
from mlx_blockpool.spec import FullLayer, WindowLayer, blocks_for

MODELS = ["llama", "qwen2", "gemma3_text", "gpt_oss"]
# The kernel is emulated.
PATHS = ["auto", "ragged", "shared", *([] if why_not() else ["kernel"])]
# Rows of models that are quantised have groups of 32.
WIDE = {"hidden_size": 128, "head_dim": 32}


@functools.cache
def stock_model(name: str, wide: bool) -> Any:
    return made(name, wide)


def made(name: str, wide: bool) -> Any:
    return make_model(name, **(WIDE if wide else {})) if name in MODELS else make_architecture(name)


class Verified:
    """Sequences of a pool in one batch, and mlx-lm's own single caches, over rounded rows with
    `bits`, with the same tokens.
    """

    def __init__(
        self, name: str, bits: KVBits | None = None, max_kv_size: int | None = None
    ) -> None:
        self.model, self.stock = made(name, bits is not None), stock_model(name, bits is not None)
        self.arena: KVArena = open_pool(
            self.model, 60_000_000, PoolConfig(bits=bits), max_kv_size=max_kv_size
        )
        assert self.arena.capabilities.verifies == "rows"
        self.max_kv_size = max_kv_size
        self.batch: list[Any] = []
        self.needed: list[list[Any]] = []

    def prefill(self, *prompts: list[int], forks: int = 1) -> None:
        """Start with these sequences, `forks` of each on the same blocks."""
        mine = []
        for prompt in prompts:
            own = make_prompt_cache(self.model, self.arena)
            stock = rounded(stock_prompt_cache(self.stock, self.max_kv_size), self.arena.spec)
            mx.eval(
                self.model(mx.array([prompt]), cache=own),
                self.stock(mx.array([prompt]), cache=stock),
            )
            mine += [copy.deepcopy(own) for _ in range(forks)]
            self.needed += [copy.deepcopy(stock) for _ in range(forks)]
        self.batch = batch_of(mine)

    def verify(self, rows: Sequence[list[int]], kept: Sequence[int]) -> None:
        """One forward over rows[i] of each sequence, of which kept[i] are kept.

        All logits are stock's.
        """
        begin_rows(self.batch, [len(mine) for mine in rows])
        logits = self.model(
            mx.array([token for mine in rows for token in mine])[:, None], cache=self.batch
        )[:, -1]
        mx.eval(logits)
        commit_rows(self.batch, kept)
        expected = mx.concatenate(
            [self._alone(*each) for each in zip(self.needed, rows, kept, strict=True)]
        )
        self.compare(logits, expected)

    def step(self, tokens: list[int]) -> None:
        """One plain step."""
        logits = self.model(mx.array(tokens)[:, None], cache=self.batch)[:, -1]
        self.compare(
            logits,
            mx.concatenate(
                [self._alone(c, [t], 1) for c, t in zip(self.needed, tokens, strict=True)]
            ),
        )

    def compare(self, logits: mx.array, expected: mx.array) -> None:
        # A word may be rounded the other way after another order of sums; other bits change these
        # models' logits by a fifth.
        tolerance = 2e-4 if self.arena.spec.bits is None else 1e-2
        assert mx.abs(logits - expected).max() < tolerance * mx.abs(expected).max()

    def _alone(self, caches: list[Any], tokens: list[int], kept: int) -> mx.array:
        """Logits [tokens, vocabulary], one token after the other; `caches` keep the first ones."""
        logits, trial = [], caches
        for i, token in enumerate(tokens):
            trial = copy.deepcopy(caches) if i == kept else trial
            logits.append(self.stock(mx.array([[token]]), cache=trial)[:, -1])
        return mx.concatenate(logits)


def drawn(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(131) for _ in range(length)]


@pytest.mark.parametrize("name", only(MODELS, "gemma3_text", "llama"))
def test_rows_have_the_logits_of_single_tokens(name: str) -> None:
    """Around 300 and 128 tokens the windows of gemma3_text and gpt_oss are before, at and after
    their wrap.
    """
    batch = Verified(name)
    batch.prefill(drawn(296), drawn(122, 1), drawn(5, 2), drawn(254, 3))
    batch.verify([drawn(n, 4 + n) for n in (1, 9, 3, 5)], [1, 3, 0, 5])
    batch.step([7, 8, 9, 10])
    batch.verify([drawn(n, 5 + n) for n in (17, 2, 4, 1)], [17, 2, 3, 1])
    batch.step([7, 8, 9, 10])
    assert batch.batch[0].offset.tolist() == [316, 129, 10, 262]
    assert batch.arena.decode.path_counts["rows"] == 2 * len(batch.batch)
    batch.arena.pool.check()


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.sampled
@pytest.mark.parametrize("name", only(MODELS, "llama"))
@pytest.mark.parametrize(
    "bits",
    only([None, KVBits(8, 8), KVBits(4, 4, 32), KVBits(8, None)], None, KVBits(4, 4, 32)),
    ids=str,
)
def test_rows_of_the_kernel_have_the_logits_of_single_tokens(
    name: str, bits: KVBits | None
) -> None:
    """Forks share blocks; windows are before, at and after their wrap."""
    batch = Verified(name, bits)
    trust(batch.arena)
    batch.prefill(drawn(296), drawn(122, 1), forks=2)
    batch.verify([drawn(n, 4 + n) for n in (1, 9, 3, 5)], [1, 3, 0, 5])
    batch.step([7, 8, 9, 10])
    batch.verify([drawn(n, 5 + n) for n in (17, 2, 4, 1)], [17, 2, 3, 1])
    layers = len(batch.batch)
    assert batch.arena.decode.path_counts == {"kernel_rows": 2 * layers, "kernel": layers}
    batch.arena.pool.check()


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_rows_through_the_kernel_of_other_devices(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_blockpool.kv.step.device", lambda: "metal")
    kernel = Mock(wraps=attend_causally)
    monkeypatch.setattr("mlx_blockpool.kv.step.attend_causally", kernel)
    batch = Verified(name)
    batch.arena.decode.streams = 1
    batch.prefill(drawn(296), drawn(122, 1))
    kernel.reset_mock()
    batch.verify([drawn(9), drawn(1)], [3, 1])
    assert kernel.call_count == 2 * len(
        [leaf for leaf in batch.arena.spec.leaves if type(leaf) is FullLayer]
    )
    batch.verify([drawn(2), drawn(17)], [2, 17])


@pytest.mark.parametrize("name", only(["gemma3_text", "gpt_oss"], "gpt_oss"))
def test_forks_read_what_they_share_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = Mock(wraps=attend_cluster)
    monkeypatch.setattr("mlx_blockpool.kv.step.attend_cluster", together)
    batch = Verified(name)
    batch.arena.decode.path, batch.arena.decode.streams = "shared", 1
    batch.prefill(drawn(522), drawn(280, 1), forks=2)
    members = batch.batch[1].members
    assert not isinstance(members[0].place.layer, WindowLayer)
    assert [c.members for c in _clusters_of(members)] == [(0, 1), (2, 3)]
    for seed in range(3):
        batch.verify([drawn(n, n + seed) for n in (1, 5, 3, 2)], [1, 2, 3, 0])
    full = [leaf for leaf in batch.arena.spec.leaves if type(leaf) is FullLayer]
    shared = [call for call in together.call_args_list if call.args[1]]
    assert len(shared) == 3 * 2 * len(full), "in each full layer, for each of two clusters"
    tables = [member.sequence.tables[member.place.group].ids for member in members]
    assert tables[0][:2] == tables[1][:2], "full blocks stay shared"
    assert tables[0][2] != tables[1][2], "a block that is written does not"


@tried(2, 40)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(MODELS),
    path=st.sampled_from(PATHS),
    streams=st.integers(1, 2),
    bits=st.sampled_from([None, KVBits(8, 8), KVBits(4, 4, 32), KVBits(8, 4), KVBits(None, 4)]),
    max_kv_size=st.sampled_from([None, None, 24, 262]),
)
def test_random_rows_answer_as_stock(
    seed: int, name: str, path: str, streams: int, bits: KVBits | None, max_kv_size: int | None
) -> None:
    rng = random.Random(seed)
    # Models with windows make their own caches, whatever max_kv_size says.
    batch = Verified(name, bits, max_kv_size if name in ("llama", "qwen2") else None)
    batch.arena.decode.path, batch.arena.decode.streams = path, streams
    if path == "kernel":
        trust(batch.arena)
    lengths = rng.sample([3, 20, 126, 127, 128, 250, 256, 290, 300, 511], 2)
    batch.prefill(*(drawn(n, n + seed) for n in lengths), forks=rng.randrange(1, 3))
    members = len(batch.needed)
    for _ in range(4):
        counts = [rng.choice([1, 1, 2, 5, 9, 17]) for _ in range(members)]
        batch.verify(
            [drawn(n, rng.randrange(999)) for n in counts], [rng.randint(0, n) for n in counts]
        )
        if rng.random() < 0.4:
            batch.step(drawn(members, seed))
    batch.arena.pool.check()


# (max_size, keep) of windows; most are smaller than the runs of rows that go through them.
WINDOWS = [(12, 0), (300, 0), (9, 4), (5, 4), (257, 4)]


def random_rows(count: int, seed: int) -> tuple[mx.array, mx.array]:
    """Keys and values [1, heads, count, dim]."""
    keys, values = mx.split(
        mx.random.normal((1, HEADS, count, KEY_DIM + VALUE_DIM), key=mx.random.key(seed)),
        [KEY_DIM],
        3,
    )
    return mx.contiguous(keys), mx.contiguous(values)


def sequences(arena: KVArena, lengths: Sequence[int]) -> tuple[list[list[Any]], list[list[Any]]]:
    """Pooled and stock caches of sequences of these lengths, whose last tokens came one by one,
    so that rings have turned.
    """
    mine, stock = [pooled_caches(arena) for _ in lengths], []
    for i, (caches, length) in enumerate(zip(mine, lengths, strict=True)):
        leaves = arena.spec.leaves
        stock.append(
            [
                RotatingKVCache(e.max_size, e.keep) if isinstance(e, WindowLayer) else KVCache()
                for e in leaves
            ]
        )
        singles = min(length, 1 + length % 6)
        for n, seed in ((length - singles, 2 * i), *((1, 100 + j) for j in range(singles))):
            for cache in (*caches, *stock[-1]) if n else ():
                cache.update_and_fetch(*random_rows(n, seed))
    return mine, stock


def blocks_needed(arena: KVArena, batch: Sequence[Any]) -> list[int]:
    """Blocks of each group that hold what the members of a batch hold, none of them shared."""
    firsts = [batch[group.layers[0]].members for group in arena.spec.groups]
    return [sum(blocks_for(member.size()) for member in members) for members in firsts]


def check_layer(
    layer: Any,
    alone: Sequence[Any],
    counts: Sequence[int],
    kept: Sequence[int],
    seed: int,
    group: int = 2,
) -> None:
    """One run of rows through one layer: what they attend to, and what is held afterwards, is
    what stock has one by one.
    """
    rows = sum(counts)
    keys, values = (mx.contiguous(part.swapaxes(0, 2)) for part in random_rows(rows, seed))
    queries = mx.random.normal((rows, group * HEADS, 1, KEY_DIM), key=mx.random.key(seed))
    layer.begin_rows(counts)
    assert layer.offset.tolist() == [
        m.offset + j for m, n in zip(layer.members, counts, strict=True) for j in range(n)
    ]
    layer.update_and_fetch(keys, values)
    found = layer.attend(queries, keys, values, 0.5, None, None)
    mx.eval(found)
    layer.commit_rows(kept)
    row = 0
    for cache, member, count, taken in zip(alone, layer.members, counts, kept, strict=True):
        trial = cache
        for j in range(count):
            trial = copy.deepcopy(cache) if j == taken else trial
            read = trial.update_and_fetch(keys[row : row + 1], values[row : row + 1])
            one = mx.fast.scaled_dot_product_attention(
                queries[row : row + 1], *read, scale=0.5, mask=None
            )
            assert mx.allclose(found[row : row + 1], one, atol=1e-5), f"row {j} of {count}"
            row += 1
        assert member.offset == cache.offset
        assert getattr(member, "ring_index", None) == getattr(cache, "_idx", None)
        for own, needed in ((member.keys, cache.keys), (member.values, cache.values)):
            assert mx.array_equal(own, needed[:, :, : member.size()])


@pytest.mark.parametrize(
    "before", only([1, 4, 8, 11, 12, 250, 255, 256, 290, 300, 700], 11, 255, 300)
)
@pytest.mark.parametrize(
    "run", only([*((17, k) for k in range(18)), (1, 0), (1, 1), (5, 3)], (17, 9), (5, 3))
)
def test_what_is_kept_lies_where_stock_has_it(before: int, run: tuple[int, int]) -> None:
    """A number of rows, and how many of them are kept."""
    count, kept = run
    arena = make_slabs(*WINDOWS, layers=1)
    arena.capabilities = RAGGED
    mine, stock = sequences(arena, [before, 20])
    batch = batch_of(mine)
    for seed, (layer, *alone) in enumerate(zip(batch, *stock, strict=True)):
        check_layer(layer, alone, [count, 3], [kept, 2], seed)
    arena.pool.check()
    assert [group.held for group in arena.pool.settle()] == blocks_needed(arena, batch)


def test_layers_of_one_group_may_have_other_numbers_of_query_heads() -> None:
    arena = make_slabs(layers=2)
    arena.capabilities = RAGGED
    mine, stock = sequences(arena, [20, 9])
    for group, layer, *alone in zip((2, 4), batch_of(mine), *stock, strict=True):
        check_layer(layer, alone, [3, 2], [2, 1], 0, group)


def addresses(arena: KVArena) -> list[int]:
    return [np.asarray(memoryview(array.view(mx.uint8))).ctypes.data for array in arena.arrays()]


@pytest.mark.sampled
@pytest.mark.parametrize("path", PATHS[1:])
@pytest.mark.parametrize(
    ("name", "bits"), [("llama", None), ("gemma3_text", None), ("gpt_oss", KVBits(8, 4))], ids=str
)
def test_rows_move_no_slab(name: str, bits: KVBits | None, path: str) -> None:
    batch = Verified(name, bits)
    batch.arena.decode.path = path
    if path == "kernel":
        trust(batch.arena)
    batch.prefill(drawn(290), drawn(125, 1))
    before = addresses(batch.arena)
    for step in range(6):
        rows = [drawn(9, step), drawn(3, step)]
        begin_rows(batch.batch, [9, 3])
        drew = mx.argmax(
            batch.model(mx.array(rows[0] + rows[1])[:, None], cache=batch.batch)[:, -1], axis=-1
        )
        mx.eval(drew)
        commit_rows(batch.batch, [step, 2])
        # What was kept is written by the next step, which is encoded before it is read.
        mx.async_eval(batch.model(mx.array([[1], [2]]), cache=batch.batch))
        mx.eval(batch.arena.arrays())
    assert addresses(batch.arena) == before


def test_a_batch_without_room_for_its_rows_is_as_it_was() -> None:
    arena = make_slabs((300, 0), layers=1, blocks=5)
    arena.capabilities = RAGGED
    mine, stock = sequences(arena, [250, 255])
    batch = batch_of(mine)
    held = [group.held for group in arena.pool.settle()]
    with pytest.raises(PoolExhaustedError):
        begin_rows(batch, [17, 800])
    assert [group.held for group in arena.pool.settle()] == held
    assert [layer.offset.tolist() for layer in batch] == [[250, 255], [250, 255]]
    check_layer(batch[0], [caches[0] for caches in stock], [17, 3], [8, 3], 0)
    arena.pool.check()


def test_a_forward_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Verified("gemma3_text")
    batch.prefill(drawn(250), drawn(299, 1))
    held = [group.held for group in batch.arena.pool.settle()]
    begin_rows(batch.batch, [17, 5])
    with monkeypatch.context() as patched:
        patched.setattr(
            type(batch.model.model.layers[2].mlp), "__call__", Mock(side_effect=RuntimeError)
        )
        with pytest.raises(RuntimeError):
            batch.model(mx.zeros((22, 1), mx.int32), cache=batch.batch)
    commit_rows(batch.batch, [0, 0])
    assert [group.held for group in batch.arena.pool.settle()] == held
    batch.verify([drawn(9), drawn(2)], [4, 2])
    batch.step([3, 4])


def test_members_of_several_pools_write_their_rows_into_their_own_slabs() -> None:
    arenas = [make_slabs((12, 0), (300, 4), layers=1) for _ in range(2)]
    mine, stock = [], []
    for arena, lengths in zip(arenas, ([250, 9], [299]), strict=True):
        arena.capabilities = RAGGED
        made = sequences(arena, lengths)
        mine += made[0]
        stock += made[1]
    for seed, (layer, *alone) in enumerate(
        zip(batch_of([mine[0], mine[2], mine[1]]), stock[0], stock[2], stock[1], strict=True)
    ):
        check_layer(layer, alone, [9, 4, 17], [8, 2, 13], seed)
        check_layer(layer, alone, [1, 9, 2], [0, 9, 2], seed + 9)
    for arena in arenas:
        arena.pool.check()


def test_blocks_of_cached_prefixes_are_copied_before_rows_go_into_them() -> None:
    """A ring and the last block of a prompt may be those of a checkpoint and of a trie."""
    arena = make_slabs((300, 4), layers=2)
    arena.capabilities = RAGGED
    mine, stock = sequences(arena, [299])
    kept = copy.deepcopy(mine[0])
    before = [mx.array(np.array(cache.keys)) for cache in kept]
    batch = batch_of(mine)
    missing = [missing_blocks(caches[0], 17) for caches in (mine[0], mine[0][2:])]
    held = [group.held for group in arena.pool.settle()]
    begin_rows(batch, [17])
    assert (
        [group.held - old for group, old in zip(arena.pool.settle(), held, strict=True)]
        == missing
        == [1, 2]
    )
    commit_rows(batch, [0])
    for seed, (layer, alone) in enumerate(zip(batch, stock[0], strict=True)):
        check_layer(layer, [alone], [17], [11], seed)
    assert all(mx.array_equal(cache.keys, keys) for cache, keys in zip(kept, before, strict=True))
    arena.pool.check()


def test_a_model_is_not_verified_by_rows_that_see_what_follows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("llama")
    assert open_pool(model, 60_000_000).capabilities.verifies == "rows"
    monkeypatch.setattr(
        Step, "_seen", lambda self, member: np.ones((self.counts[member],) * 2, bool)
    )
    arena = open_pool(model, 60_000_000)
    assert arena.capabilities.ragged
    assert arena.capabilities.verifies != "rows"


@pytest.mark.parametrize(
    ("name", "verifies"),
    [
        ("gemma3n", "rows"),
        ("falcon_h1", "padded"),
        ("longcat_flash_ngram", "alone"),
        ("baichuan_m1", None),
    ],
)
def test_how_drafted_tokens_of_a_model_are_verified(name: str, verifies: str | None) -> None:
    """The states of falcon_h1 leave padding out, and those of longcat_flash_ngram take it in.
    baichuan_m1 has windows, too.
    """
    assert open_pool(make_architecture(name), 60_000_000).capabilities.verifies == verifies


@pytest.mark.parametrize(
    "name", only(["mimo_v2_flash", "llama4_text", "exaone4", "step3p5"], "mimo_v2_flash")
)
def test_rows_of_other_architectures(name: str) -> None:
    batch = Verified(name)
    batch.prefill(drawn(29), drawn(6, 1))
    batch.verify([drawn(9), drawn(17)], [4, 9])
    batch.step([3, 4])
    batch.verify([drawn(2), drawn(1)], [2, 1])
