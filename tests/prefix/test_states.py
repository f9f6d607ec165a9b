"""Models with states: checkpoints in memory under their budget, and on disk."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from prefix.test_prefix_machine import LAYER_STEP, keys_of, numbers
from store.disks import QuickDisk
from store.stores import open_store
from thorough import seeds

from mlx_blockpool.config import PoolConfig
from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.layer_caches import PooledKVCache, PooledRotatingKVCache
from mlx_blockpool.kv.parts import leaves_of, sequence_of
from mlx_blockpool.kv.state_caches import PooledArraysCache
from mlx_blockpool.spec import CompositeLayer, FullLayer, ModelCacheSpec, StateLayer, WindowLayer
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.tier.cache import TieredPrefixCache

STATE = StateLayer((((1, 3), "float32"), ((1, 2, 2), "int64")))
# 12 and 32 bytes.
STATE_BYTES = 44
FULL, WINDOW = FullLayer(1, 2, 2), WindowLayer(1, 2, 2, 300)
SPECS = {
    "hybrid": ModelCacheSpec("m", (STATE, FULL, STATE), "float32"),
    "composite": ModelCacheSpec("m", (CompositeLayer((STATE, FULL)), CompositeLayer((STATE, WINDOW))), "float32"),
    "states alone": ModelCacheSpec("m", (STATE, STATE), "float32"),
}


def state_of(tokens: Sequence[int], leaf: int) -> list[mx.array]:
    """What a model would have behind these tokens."""
    last = float(numbers(tuple(tokens))[-1]) + leaf * LAYER_STEP
    return [mx.array([[last, -last, float(len(tokens))]]), mx.full((1, 2, 2), len(tokens) * 1000 + leaf, mx.int64)]


class Life:
    """A prefix cache, over a store where a folder is given."""

    def __init__(self, spec: ModelCacheSpec, folder: Path | None = None, disk: Disk | None = None, **config: Any) -> None:
        self.arena = KVArena(spec, 4_000_000, PoolConfig(state_bytes=config.pop("state_bytes", 100_000)))
        self.arena.ragged = True
        store = None if folder is None else open_store(folder, disk or QuickDisk(), **config)
        self.prefix = TieredPrefixCache(self.arena, store=store)

    def answer(self, prompt: Sequence[int], places: Sequence[int] = (), kind: str = "assistant") -> int:
        """A request that is kept at `places` on its way. Returns its hit; what it took over is right."""
        found = self.prefix.acquire(list(prompt), 20)
        self.go_on(found.caches, prompt, found.lookup.hit, places)
        self.prefix.release(list(prompt), found.caches, kind)
        self.check()
        return found.lookup.hit

    def go_on(self, caches: list[Any], prompt: Sequence[int], at: int, places: Sequence[int]) -> None:
        look(caches, prompt, at)
        for end in [*(p for p in places if at < p < len(prompt)), len(prompt)]:
            for leaf, cache in enumerate(leaves_of(caches)):
                if isinstance(cache, PooledArraysCache):
                    cache.cache = state_of(prompt[:end], leaf)
                else:
                    keys = keys_of(prompt[:end], at, leaf)
                    mx.eval(cache.update_and_fetch(keys, keys + 1000))
            at = end
            if end < len(prompt):
                self.prefix.insert(list(prompt[:end]), caches, "user")
        look(caches, prompt, at)

    def check(self) -> None:
        self.prefix.check()
        assert self.arena.running_bytes + self.prefix.index.state_bytes <= self.arena.state_bytes

    def write(self, tails: bool = True) -> None:
        assert self.prefix.stored is not None
        for _ in range(2):
            self.prefix.stored.write_behind(1 << 40, at_once=tails)
            assert self.prefix.stored.store.flush()


def look(caches: list[Any], prompt: Sequence[int], count: int) -> None:
    """What caches have of the first `count` tokens is right."""
    for leaf, cache in enumerate(leaves_of(caches)):
        if not count:
            continue
        if isinstance(cache, PooledArraysCache):
            for found, wanted in zip(cache.cache, state_of(prompt[:count], leaf), strict=True):
                assert found.dtype == wanted.dtype
                assert np.array_equal(np.array(found), np.array(wanted)), f"leaf {leaf}"
            continue
        assert isinstance(cache, PooledKVCache | PooledRotatingKVCache)
        wanted = numbers(tuple(prompt))[:count] + leaf * LAYER_STEP
        keys = cache.keys
        if isinstance(cache, PooledRotatingKVCache):
            keys, wanted = cache._temporal_order(keys), wanted[-cache.max_size :]
        assert np.array_equal(np.array(keys)[0, 0, :, 0], wanted), f"leaf {leaf}"


def record_files(folder: Path) -> list[Path]:
    """Records of every kind."""
    return sorted(folder.glob("models/*/*/*/*.safetensors"))


def text(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(50), k=count)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_prefix_is_resumed_where_it_was_kept_and_nowhere_else(spec: ModelCacheSpec) -> None:
    life = Life(spec)
    system, one = text(1, 500), text(2, 300)
    assert life.answer([*system, *one], places=[500]) == 0
    assert life.answer([*system, *one, 1, 2]) == 800
    assert life.answer([*system, *text(3, 300)]) == 500
    assert life.answer([*system[:400], 49]) == 0
    lookup = life.prefix.look([*system[:450], 49, 49])
    assert (lookup.hit, lookup.cause) == (0, "no checkpoint")


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_oldest_states_make_room_and_running_ones_are_counted(spec: ModelCacheSpec) -> None:
    own = spec.fixed_bytes_per_agent()
    life = Life(spec, state_bytes=4 * own)
    prompts = [text(n, 100 + n) for n in range(10)]
    for prompt in prompts:
        life.answer(prompt)
    hits = [life.prefix.look([*prompt, 1]).hit for prompt in prompts]
    assert hits == [0] * 6 + [len(prompt) for prompt in prompts[6:]]
    running = [life.prefix.acquire(text(20 + n, 50), 20) for n in range(4)]
    assert life.prefix.index.state_bytes == 0
    with pytest.raises(PoolExhaustedError, match="States have"):
        life.prefix.acquire(text(30, 50), 20)
    for found in running:
        life.prefix.discard(found.caches)
    assert life.arena.running_bytes == 0
    assert life.answer(text(30, 50)) == 0


def test_a_pinned_state_stays() -> None:
    spec = SPECS["hybrid"]
    life = Life(spec, state_bytes=3 * spec.fixed_bytes_per_agent())
    system = text(1, 300)
    life.answer(system)
    assert life.prefix.pin(system) == 300
    for n in range(2, 9):
        life.answer(text(n, 90))
    assert life.prefix.look([*system, 1]).hit == 300


def test_a_fork_has_states_of_its_own() -> None:
    import copy

    life = Life(SPECS["hybrid"])
    found = life.prefix.acquire(prompt := text(1, 40), 20)
    life.go_on(found.caches, prompt, 0, ())
    other = copy.deepcopy(found.caches)
    life.go_on(other, longer := [*prompt, 7, 8], 40, ())
    look(found.caches, prompt, 40)
    look(other, longer, 42)
    assert sequence_of(other) is not sequence_of(found.caches)
    assert life.arena.running_bytes == 2 * life.arena.spec.fixed_bytes_per_agent()
    life.prefix.discard(other)
    life.prefix.discard(found.caches)
    assert life.arena.running_bytes == 0


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_states_come_back_after_a_restart(tmp_path: Path, spec: ModelCacheSpec) -> None:
    life = Life(spec, tmp_path)
    system = text(1, 700)
    agents = [[*system, *text(n, 60 * n)] for n in range(2, 5)]
    for agent in agents:
        life.answer(agent, places=[700])
    assert life.prefix.close()
    again = Life(spec, tmp_path)
    assert [again.answer([*agent, 7]) for agent in agents] == [len(agent) for agent in agents]
    assert again.answer([*system, 49, 48, 47]) == 700


def test_what_a_conversation_has_left_behind_is_not_written(tmp_path: Path) -> None:
    """The last place of each kind is enough; the system prompt's stays."""
    life = Life(SPECS["hybrid"], tmp_path)
    prompt = text(1, 300)
    life.answer(prompt, kind="system")
    for turn in range(2, 8):
        prompt = [*prompt, *text(turn, 90)]
        life.answer(prompt, places=[len(prompt) - 5])
    life.write()
    assert len([file for file in record_files(tmp_path) if "states" in file.parts]) == 3
    again = Life(SPECS["hybrid"], tmp_path)
    assert again.answer([*prompt[:300], 49]) == 300
    assert again.answer([*prompt[:-5], 49]) == len(prompt) - 5
    assert again.answer([*prompt, 1]) == len(prompt)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_any_history_gives_the_right_states(tmp_path: Path, spec: ModelCacheSpec, seed: int) -> None:
    """Forks at any token, small budgets, torn files and kills: a hit is never a wrong state."""
    rng = random.Random(seed)
    known: list[list[int]] = [[]]
    states = rng.choice([3, 5, 100]) * spec.fixed_bytes_per_agent()
    life = Life(spec, tmp_path, state_bytes=states)
    for _ in range(25):
        base = rng.choice(known)
        prompt = [*base[: rng.randrange(len(base) + 1)], *text(rng.randrange(5), rng.choice([3, 60, 400, 900]))][:2500]
        places = sorted(rng.sample(range(1, len(prompt) + 1), min(len(prompt), rng.randrange(3))))
        life.answer(prompt, places, rng.choice(["system", "user", "assistant"]))
        known.append(prompt)
        what = rng.randrange(7)
        if what == 0:
            life.prefix.trim_to(rng.choice([0, 20_000]))
        elif what < 3:
            life.write(tails=what == 1)
        elif what < 5:
            assert not rng.randrange(2) or life.prefix.close()
            life = Life(spec, tmp_path, state_bytes=states)
        elif what == 5 and (files := record_files(tmp_path)):
            file = rng.choice(sorted(files))
            data = bytearray(file.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
