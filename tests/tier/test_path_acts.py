"""What agents do to cached paths is done by all ranks, or at once by one that is alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache
from prefix.computed import family
from prefix.lives import SPECS, Life
from ranks.threads import ThreadRanks, on_ranks
from tier.lives import record_files

from mlx_blockpool.prefix.trie import PrefixRef
from mlx_blockpool.ranks import facts
from mlx_blockpool.ranks.facts import PathName
from mlx_blockpool.ranks.group import ALONE, Ranks
from mlx_blockpool.ranks.head import Head
from mlx_blockpool.server.agents.served import ServedAgents
from mlx_blockpool.spec import ModelCacheSpec
from mlx_blockpool.tier.path_acts import PathActs, name_of
from mlx_blockpool.transfer.cache_file import CacheFileWriter

BLOCK = 256
ANN, BOB = (list(family(n, 3 * BLOCK + 30)) for n in (1, 2))
ANN_LATER = [*ANN, *range(5000, 5300)]


class Rank:
    """A prefix cache of one rank, with agents where clients are."""

    def __init__(self, ranks: Ranks, folder: Path, spec: ModelCacheSpec = SPECS["hybrid"]) -> None:
        self.ranks = ranks
        self.life = Life(spec, folder / str(ranks.rank), ranks=ranks)
        self.acts = PathActs(self.life.prefix, ranks)
        self.agents = ServedAgents("m", None)
        if ranks.rank == 0:
            self.agents.attend(self.acts)
        self.results: list[Any] = []

    def path(self, tokens: list[int]) -> PrefixRef:
        return self.life.prefix.match(tokens).detached()

    def act(self, change: Callable[[ServedAgents], object]) -> None:
        """rank 0: change agents. All: an exchange, and what it brings; nothing has changed before."""
        before = self.state()
        if self.ranks.rank == 0:
            change(self.agents)
        if self.ranks.size > 1:
            assert self.state() == before
        self.exchange()

    def propose(self, fact: Any) -> Any:
        if self.ranks.rank == 0:
            self.acts.propose(fact, self.results.append)
        self.exchange()
        return self.results.pop() if self.ranks.rank == 0 else None

    def exchange(self) -> None:
        mail = facts.write([("m", fact) for fact in self.acts.outgoing()])
        for sent in self.ranks.exchange(Head(), mail) if self.ranks.size > 1 else ():
            for _, fact in facts.read(sent.mail):
                self.acts.take(fact)  # type: ignore[arg-type]
        states = self.ranks.exchange(Head(), repr(self.state()).encode())
        assert len({each.mail for each in states}) == 1
        self.life.check()

    def state(self) -> list[Any]:
        """What steers eviction and writing."""
        index, pool = self.life.prefix.index, self.life.arena.pool
        nodes = [(node.hash.hex(), node.residency.in_memory, node.residency.on_disk) for node in index.trie]
        order = [list(pool.eviction_order(group)) for group in range(len(pool.groups))]
        return [nodes, order, pool.settle(), sorted(self.life.store.pinned)]


def lead(rank: Rank) -> list[Any]:
    """The life of two agents; what is pinned, in memory and on disk, after each act."""
    life, found = rank.life, []

    def note(what: Any = None) -> None:
        counts = life.arena.pool.settle()
        files = len(record_files(life.store.root))
        found.append((what, counts[0].pinned, len(list(life.prefix.index.trie)), files, dict(rank.agents.pinned)))

    for prompt in (ANN, BOB):
        life.answer(prompt)
    rank.act(lambda agents: agents.note("ann", rank.path(ANN)))
    rank.act(lambda agents: agents.note("bob", rank.path(BOB)))
    rank.act(lambda agents: agents.pin("ann", rank.path(ANN)))
    note()
    life.answer(ANN_LATER)
    rank.act(lambda agents: agents.note("ann", rank.path(ANN_LATER)))
    note()
    rank.act(lambda agents: agents.rename("ann", "anna"))
    rank.act(lambda agents: agents.fork("carl", rank.path(BOB)))
    note()
    rank.propose(facts.Save(name_of(rank.path(ANN_LATER))))
    for _ in range(3):
        rank.propose(facts.WriteOut())
        assert life.store.flush()
    note(life.prefix.measure(rank.path(ANN_LATER), 0).tokens_on_disk)
    rank.propose(facts.Spare((life.hashes(ANN)[0], b"gone")))
    rank.propose(facts.Spare((), (b"gone",)))
    assert {key.hash for key in life.store.pinned} == {life.hashes(ANN)[0]}
    taken = rank.propose(facts.Uncache(name_of(rank.path(BOB)), 1))
    assert life.store.flush()
    note(taken and (taken.uncached.nodes, taken.uncached.kept))
    rank.act(lambda agents: agents.forget("anna"))
    note()
    return found


def test_two_ranks_do_what_one_does(tmp_path: Path) -> None:
    alone = lead(Rank(ALONE, tmp_path / "alone"))
    assert [pinned for _, pinned, *_ in alone] == [4, 5, 5, 5, 5, 0]
    assert [what for what, *_ in alone][3:5] == [len(ANN_LATER), (3, 1)]
    first, second = on_ranks(2, lambda ranks: lead(Rank(ranks, tmp_path)))
    assert first == alone
    # The other rank has no agents, and all else.
    assert [row[1:4] for row in second] == [row[1:4] for row in first]


def test_a_pin_beyond_the_limits_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def act(ranks: ThreadRanks) -> dict[str, bool]:
        rank = Rank(ranks, tmp_path)
        rank.life.prefix.retention.pins.most_bytes = 0
        rank.life.answer(ANN)
        rank.act(lambda agents: agents.pin("ann", rank.path(ANN)))
        assert rank.acts.pins == {"ann": None}
        return rank.agents.pinned

    assert on_ranks(2, act) == [{"ann": False}, {}]


def test_who_waits_for_a_fact_is_answered_when_the_model_goes(tmp_path: Path) -> None:
    def act(ranks: ThreadRanks) -> list[Any]:
        rank = Rank(ranks, tmp_path)
        if ranks.rank == 0:
            rank.acts.propose(facts.WriteOut(), rank.results.append)
        rank.acts.close()
        return rank.results

    assert on_ranks(2, act) == [[None], []]


@pytest.mark.parametrize("spec", ["full", "window"])
def test_the_heads_of_all_ranks_are_put_together_in_one_file(tmp_path: Path, spec: str) -> None:
    def export(ranks: Ranks) -> Path:
        rank = Rank(ranks, tmp_path, SPECS[spec])
        rank.life.answer(ANN)
        gathered = rank.propose(facts.Gather(7, name_of(rank.path(ANN))))
        held = [counts.held for counts in rank.life.arena.pool.settle()]
        assert any(held)
        # Rank 0 knows what there is to read: the other gets no more than the facts.
        named = [(place.name, place.head) for place in writer_of(gathered, ranks).places] if gathered else []
        places = json.loads(ranks.exchange(Head(), json.dumps(named).encode())[0].mail)
        file = tmp_path / f"{ranks.size}-{ranks.rank}.safetensors"
        parts = [rank.propose(facts.GatherPart(7, name, head)) for name, head in places]
        if gathered:
            writer = writer_of(gathered, ranks)
            with file.open("wb") as out:
                out.write(writer.head)
                for place, part in zip(writer.places, parts, strict=True):
                    for number, piece in enumerate(part):
                        out.seek(place.offset(number))
                        out.write(piece)
            assert (file.stat().st_size, gathered[1]) == (writer.nbytes, len(ANN))
        rank.propose(facts.GatherEnd(7))
        assert not any(counts.held for counts in rank.life.arena.pool.settle())
        return file

    alone = export(ALONE)
    both, none = on_ranks(2, export)
    assert not none.exists()
    # Here the heads of both ranks hold the same.
    caches = zip(load_prompt_cache(str(alone)), load_prompt_cache(str(both)), strict=True)
    for one, two in [pair for ours, theirs in caches for pair in zip(ours.state[:2], theirs.state[:2], strict=True)]:
        assert mx.array_equal(mx.concatenate([one, one], axis=1), two)


def writer_of(gathered: Any, ranks: Ranks) -> CacheFileWriter:
    return CacheFileWriter(gathered[0], "m", "weights", SPECS["full"], None, ANN, ranks=ranks.size)


def test_nothing_in_memory_is_nothing_to_gather(tmp_path: Path) -> None:
    rank = Rank(ALONE, tmp_path)
    rank.life.answer(ANN)
    assert rank.propose(facts.Gather(1, PathName((b"x",), 256))) is False
