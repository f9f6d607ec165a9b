"""Models with states: checkpoints in memory under their budget, and on disk."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
from prefix.computed import compute, look, text
from prefix.lives import STATED as SPECS
from prefix.lives import Life
from thorough import seeds
from tier.lives import record_files

from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.kv.prompt_cache import sequence_of
from mlx_blockpool.spec import ModelCacheSpec


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
    life = Life(SPECS["hybrid"])
    found = life.prefix.acquire(prompt := text(1, 40), 20)
    compute(found.caches, prompt, 0)
    other = copy.deepcopy(found.caches)
    compute(other, longer := [*prompt, 7, 8], 40)
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
    life.write(tails=True)
    assert len([file for file in record_files(tmp_path) if "states" in file.parts]) == 3
    again = Life(SPECS["hybrid"], tmp_path)
    assert again.answer([*prompt[:300], 49]) == 300
    assert again.answer([*prompt[:-5], 49]) == len(prompt) - 5
    assert again.answer([*prompt, 1]) == len(prompt)


@pytest.mark.sampled
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_any_history_gives_the_right_states(
    tmp_path: Path, spec: ModelCacheSpec, seed: int
) -> None:
    """Forks at any token, small budgets, torn files and kills: a hit is never a wrong state."""
    rng = random.Random(seed)
    known: list[list[int]] = [[]]
    states = rng.choice([3, 5, 100]) * spec.fixed_bytes_per_agent()
    life = Life(spec, tmp_path, state_bytes=states)
    for _ in range(25):
        base = rng.choice(known)
        prompt = [
            *base[: rng.randrange(len(base) + 1)],
            *text(rng.randrange(5), rng.choice([3, 60, 400, 900])),
        ][:2500]
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
        elif what == 5 and life.store.flush() and (files := record_files(tmp_path)):
            file = rng.choice(sorted(files))
            data = bytearray(file.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
