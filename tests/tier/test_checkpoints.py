"""Checkpoints of models with windows on disk: every piece is written once, and what comes back
is what the ring had.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from prefix.computed import keys_of, text
from prefix.lives import STATED, Life
from store.disks import BrokenDisk, QuickDisk, WatchedDisk
from thorough import only, seeds
from tier.lives import record_files, wanted

from mlx_blockpool.config import KVBits
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, TokenArray, WindowLayer
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.record import Part, decode_header, encode
from mlx_blockpool.tier import restore

# Arrays of other heads and types, one of which blocks must not quantise.
MORE = (
    TokenArray("index", 3, 2, quantisable=False),
    TokenArray("wide", 2, 2, "float16"),
    TokenArray("flags", 1, 2, "uint8"),
)
BITS = [None, KVBits(8, 8, 32), KVBits(8, 4, 32)]
SPECS = {
    "mixed": ModelCacheSpec(
        "m", (WindowLayer(1, 2, 2, 300), FullLayer(1, 2, 2), WindowLayer(1, 2, 2, 300)), "float32"
    ),
    "two windows": ModelCacheSpec(
        "m", (WindowLayer(1, 2, 2, 100), FullLayer(1, 2, 2), WindowLayer(1, 2, 2, 600)), "float32"
    ),
    "no full": ModelCacheSpec(
        "m", (WindowLayer(1, 2, 2, 256), WindowLayer(1, 2, 2, 256)), "float32"
    ),
    "more arrays": ModelCacheSpec(
        "m",
        (WindowLayer(1, 2, 2, 300, more=MORE), FullLayer(0, 0, 0, more=MORE), FullLayer(1, 2, 2)),
        "float32",
    ),
}
NAMES = {spec: name for name, spec in SPECS.items()}


@pytest.mark.sampled
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("length", [1, 99, 100, 255, 256, 257, 300, 301, 512, 700, 1300])
def test_a_conversation_goes_on_after_a_restart(
    tmp_path: Path, spec: ModelCacheSpec, length: int
) -> None:
    life = Life(spec, tmp_path)
    prompt = text(1, length)
    life.answer(prompt)
    assert life.prefix.close()
    again = Life(spec, tmp_path)
    assert again.answer([*prompt, *text(2, 50)]) == length
    assert again.stored.restores.num_unread == 0


@pytest.mark.parametrize("spec", only(SPECS.values(), SPECS["no full"]), ids=NAMES.get)
def test_what_was_written_behind_serves_after_a_kill(tmp_path: Path, spec: ModelCacheSpec) -> None:
    """Turns that are shorter than the window: the last whole block can be resumed though no tail
    was written.
    """
    life = Life(spec, tmp_path)
    prompt = text(1, 700)
    for turn in range(2, 7):
        life.answer(prompt, step=7)
        life.write()
        prompt = [*prompt, *text(turn, 90)]
    again = Life(spec, tmp_path)
    assert again.answer([*prompt, 1, 2]) >= (len(prompt) - 90) // 256 * 256


def test_states_alone_are_written_before_a_kill_and_seldom(tmp_path: Path) -> None:
    life = Life(STATED["states alone"], tmp_path)
    prompt: list[int] = []
    for turn in range(50):
        prompt = [*prompt, *text(turn, 90)]
        life.answer(prompt)
        life.write()
        if turn in (0, 49):
            again = Life(STATED["states alone"], tmp_path)
            assert len(prompt) - again.answer([*prompt, 1, 2]) < 1024
    # A state for each 1024 tokens of 4500, each with the tokens of a block that is not whole.
    assert life.store.counts["written"] - len(prompt) // 256 <= 10


def test_a_state_that_is_forgotten_before_it_is_read_is_a_miss(tmp_path: Path) -> None:
    life = Life(STATED["hybrid"], tmp_path)
    prompt = text(1, 700)
    life.answer(prompt)
    assert life.prefix.close()
    again = Life(STATED["hybrid"], tmp_path)
    plan = wanted(again, prompt)
    assert plan.node is not None
    job = again.stored.restores.begin(plan)
    for key in again.stored.records.keys(plan.node, plan.position):
        again.store.gone(key)
        again.stored.records.forget([key])
    while not job.advance():
        pass
    again.check()


def test_a_first_prompt_can_be_resumed_at_once(tmp_path: Path) -> None:
    """No whole block of it has all that the window needs: the piece at its end does not wait."""
    life = Life(SPECS["mixed"], tmp_path)
    system = text(1, 1000)
    life.answer(system)
    life.write()
    again = Life(SPECS["mixed"], tmp_path)
    assert again.answer([*system, *text(2, 30)]) == 1000


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_agents_share_what_their_system_prompt_left_on_disk(
    tmp_path: Path, spec: ModelCacheSpec
) -> None:
    system = text(1, 900)
    life = Life(spec, tmp_path)
    agents = [[*system, *text(n, 40 * n)] for n in range(2, 6)]
    for agent in agents:
        life.answer(agent, [900])
    assert life.prefix.close()
    again = Life(spec, tmp_path)
    assert [again.answer([*agent, 7]) for agent in agents] == [len(agent) for agent in agents]
    assert again.answer([*system, 49, 48, 47]) == 900


@pytest.mark.parametrize("spec", only(SPECS.values(), SPECS["two windows"]), ids=NAMES.get)
def test_each_token_is_written_about_once(tmp_path: Path, spec: ModelCacheSpec) -> None:
    disk = WatchedDisk(tmp_path)
    life = Life(spec, tmp_path, disk)
    prompt: list[int] = []
    for turn in range(40):
        prompt = [*prompt, *text(turn, 130)]
        life.answer(prompt)
        life.write()
    tokens = len(prompt)
    assert life.store.counts["written_bytes"] - 3500 * life.store.counts[
        "written"
    ] <= 1.1 * tokens * sum(map(spec.bytes_per_token_per_layer, spec.layers))


def quantised(spec: ModelCacheSpec, kv: KVBits) -> ModelCacheSpec:
    """The same layers with rows of two groups, which tests/prefix/computed.py makes exact."""
    layers = tuple(
        replace(
            layer,
            key_dim=64 * layer.kv_heads,
            value_dim=64 * layer.kv_heads,
            more=tuple(
                replace(array, dim=64) if array.name == "wide" else array for array in layer.more
            ),
        )
        for layer in spec.layers
        if isinstance(layer, FullLayer)
    )
    return replace(spec, layers=layers).with_bits(kv)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "spec", only(SPECS.values(), SPECS["mixed"], SPECS["no full"]), ids=NAMES.get
)
@pytest.mark.parametrize("kv", only(BITS, None, BITS[2]))
@pytest.mark.parametrize("seed", seeds(1, 6))
def test_any_history_with_kills_in_between_gives_the_right_keys(
    tmp_path: Path, spec: ModelCacheSpec, seed: int, kv: KVBits | None
) -> None:
    """Forks at any token, eviction, a small disk budget, torn files and kills: a hit is never a
    wrong key.
    """
    rng = random.Random(f"{seed} {kv}")
    spec, few = (spec, 60_000) if kv is None else (quantised(spec, kv), 600_000)
    known: list[list[int]] = [[]]
    life = Life(spec, tmp_path, store_bytes=rng.choice([few, 1 << 30]))
    hits = 0
    for _ in range(25):
        base = rng.choice(known)
        prompt = [
            *base[: rng.randrange(len(base) + 1)],
            *text(rng.randrange(5), rng.choice([3, 60, 400, 900])),
        ][:2500]
        places = sorted(rng.sample(range(1, len(prompt) + 1), min(len(prompt), rng.randrange(3))))
        hits += life.answer(prompt, places, step=rng.choice([0, 0, 5])) > 0
        known.append(prompt)
        what = rng.randrange(7)
        if what == 0:
            life.prefix.trim_to(rng.choice([0, 20_000]))
        elif what < 3:
            life.write(tails=what == 1)
        elif what < 5:
            assert not rng.randrange(2) or life.prefix.close()
            life.store.flush()
            life = Life(spec, tmp_path, store_bytes=rng.choice([few, 1 << 30]))
        elif what == 5 and (files := record_files(tmp_path)):
            file = rng.choice(sorted(files))
            data = bytearray(file.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
    assert hits
    life.prefix.check()


def test_records_of_one_checkpoint_do_not_displace_each_other(tmp_path: Path) -> None:
    """Whatever the budget, writing ends: the checkpoint is on disk whole, or it is given up."""
    for budget in range(20_000, 64_000, 1_500):
        life = Life(SPECS["more arrays"], tmp_path / str(budget), store_bytes=budget)
        for n in range(3):
            life.answer(text(n, 821))
        life.write(tails=True)
        assert life.store.counts["written"] <= 30


def test_a_piece_that_could_not_be_written_is_tried_again(tmp_path: Path) -> None:
    disk = BrokenDisk()
    life = Life(SPECS["mixed"], tmp_path, disk, retry_seconds=0.0)
    life.answer(prompt := text(1, 700))
    life.stored.write_tails()
    assert life.store.flush()
    disk.broken["rename"] = OSError(28, "full")
    life.answer(longer := [*prompt, *text(2, 400)])
    life.write(tails=True)
    disk.broken.clear()
    life.write(tails=True)
    life.write(tails=True)
    assert Life(SPECS["mixed"], tmp_path).answer([*longer, 1]) == len(longer)


def test_a_ring_that_always_keeps_its_first_tokens_stays_in_memory(tmp_path: Path) -> None:
    spec = ModelCacheSpec("m", (WindowLayer(1, 2, 2, 300, keep=4), FullLayer(1, 2, 2)), "float32")
    life = Life(spec, tmp_path)
    found = life.prefix.acquire(prompt := text(1, 700), 20)
    for layer, cache in enumerate(found.caches):
        mx.eval(cache.update_and_fetch(*[keys_of(prompt, 0, layer)] * 2))
    life.prefix.release(prompt, found.caches)
    assert life.prefix.close()
    again = Life(spec, tmp_path)
    assert again.prefix.look([*prompt, 1]).hit == 0


def test_evicted_from_memory_it_comes_back_from_disk(tmp_path: Path) -> None:
    life = Life(SPECS["two windows"], tmp_path)
    prompt = text(1, 1500)
    life.answer(prompt)
    life.write(tails=True)
    for _ in range(3):
        life.prefix.trim_to(0)
        assert life.prefix.nbytes == 0
        assert life.answer([*prompt, 1]) == 1500


def test_an_end_that_went_on_stays_on_disk_until_the_new_one_is_there(tmp_path: Path) -> None:
    """Evicted, or killed, before the longer end was written."""
    life = Life(SPECS["mixed"], tmp_path)
    prompt = text(1, 700)
    life.answer(prompt)
    life.write(tails=True)
    longer = [*prompt, *text(2, 30)]
    life.answer(longer)
    life.write()
    assert Life(SPECS["mixed"], tmp_path).prefix.look(longer).matched == 700
    life.prefix.trim_to(0)
    assert life.answer(longer) == 700
    life.write(tails=True)
    assert Life(SPECS["mixed"], tmp_path).answer([*longer, 1]) == 730
    assert len([file for file in record_files(tmp_path) if "blocks" in file.parts]) == 3


class CountingDisk(QuickDisk):
    """Looks after every call at all that records take, whole or being written; `most`: bytes."""

    def __init__(self, root: Path) -> None:
        self.root, self.most = root, 0

    def write(self, fd: int, buffers: Any) -> None:
        super().write(fd, buffers)
        self.look()

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.look()

    def look(self) -> None:
        files = [path for path in self.root.glob("models/*/*/*/*") if path.is_file()]
        self.most = max(self.most, sum(path.stat().st_size for path in files))


@pytest.mark.parametrize("spec", only(SPECS.values(), SPECS["more arrays"]), ids=NAMES.get)
def test_the_budget_holds_for_records_of_every_kind(tmp_path: Path, spec: ModelCacheSpec) -> None:
    budget = 60_000
    disk = CountingDisk(tmp_path)
    life = Life(spec, tmp_path, disk, store_bytes=budget)
    written = 0
    for n in range(30):
        life.answer([*text(n % 5, 300), *text(n, 700)], [300])
        life.write(tails=n % 3 == 0)
        written = life.store.counts["written_bytes"]
    assert written > 6 * budget
    assert 0 < disk.most <= budget


# More than the models here have for any record, and enough to be seen among what is read.
CLAIMED = 1 << 20


def claims_much(file: Path) -> None:
    """Another record under the same name: its header, seal and checksum are right."""
    record = replace(
        decode_header(file.read_bytes()), parts=(Part("much", "U8", (CLAIMED,)),), checksums=()
    )
    file.write_bytes(b"".join(encode(record, [bytes(CLAIMED)])))


@pytest.mark.parametrize("kind", ["windows", "states"])
def test_what_claims_more_than_the_model_has_is_a_miss_and_is_not_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> Any:
        return (
            Life(SPECS["mixed"], tmp_path)
            if kind == "windows"
            else Life(STATED["hybrid"], tmp_path)
        )

    prompt = text(1, 700)
    life = start()
    life.answer(prompt)
    assert life.prefix.close()
    for file in [file for file in record_files(tmp_path) if kind in file.parts]:
        claims_much(file)
    sizes: list[int] = []
    whole, into = Disk.read, Disk.read_into

    def read(disk: Disk, path: Path, start: int = 0, size: int | None = None) -> bytes:
        data = whole(disk, path, start, size)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(Disk, "read", read)
    monkeypatch.setattr(
        Disk, "read_into", lambda disk, path, give, most: into(disk, path, sized(give, sizes), most)
    )
    again = start()
    assert again.answer([*prompt, 7]) == 0
    assert again.stored.restores.num_unread == 1
    assert again.store.counts["quarantined"] > 0
    assert max(sizes) < CLAIMED // 2


def sized(give: Any, sizes: list[int]) -> Any:
    def gives(size: int) -> Any:
        sizes.append(size)
        return give(size)

    return gives


@pytest.mark.parametrize("where", ["reading", "taking"])
def test_no_memory_for_a_record_is_a_miss_and_it_stays(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = text(1, 700)
    life = Life(SPECS["mixed"], tmp_path)
    life.answer(prompt)
    assert life.prefix.close()
    before = record_files(tmp_path)

    def none_left(*_: Any) -> None:
        raise MemoryError

    again = Life(SPECS["mixed"], tmp_path, retry_seconds=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(restore._Scratch, "take", none_left) if where == "reading" else patch.setattr(
            restore, "copy_in", none_left
        )
        assert again.prefix.acquire([*prompt, 7], 20).lookup.hit == 0
    assert again.stored.restores.num_unread == 1
    assert record_files(tmp_path) == before
    assert again.answer([*prompt, 7]) == 700
