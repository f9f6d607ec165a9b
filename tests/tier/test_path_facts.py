"""What agents do to cached paths is done by all ranks, or at once by one that is alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefix.computed import family, text
from prefix.lives import SPECS, Life
from ranks.threads import ThreadRanks, on_ranks
from tier.lives import record_files

from mlx_blockpool.prefix.eviction import eviction_order
from mlx_blockpool.prefix.trie import PrefixRef
from mlx_blockpool.ranks import facts
from mlx_blockpool.ranks.driver import SharedPathFacts
from mlx_blockpool.ranks.facts import Uncache
from mlx_blockpool.ranks.group import ALONE, Ranks
from mlx_blockpool.ranks.head import Head
from mlx_blockpool.server.served_agents import ServedAgents
from mlx_blockpool.spec import ModelCacheSpec
from mlx_blockpool.store.record import STATE, WINDOW, Key
from mlx_blockpool.tier.path_facts import PathFacts, name_of

BLOCK = 256
ANN, BOB = (list(family(n, 3 * BLOCK + 30)) for n in (1, 2))
ANN_LATER = [*ANN, *range(5000, 5300)]


class Rank:
    """A prefix cache of one rank, with agents where clients are."""

    def __init__(self, ranks: Ranks, folder: Path, spec: ModelCacheSpec = SPECS["hybrid"]) -> None:
        self.ranks = ranks
        self.life = Life(spec, folder / str(ranks.rank), ranks=ranks)
        self.acts = (PathFacts if ranks.size == 1 else SharedPathFacts)(self.life.prefix)
        self.agents = ServedAgents("m", None)
        if ranks.rank == 0:
            self.agents.attend(self.acts)
        self.results: list[Any] = []

    def path(self, tokens: list[int]) -> PrefixRef:
        return self.life.prefix.match(tokens).detached()

    def act(self, change: Callable[[ServedAgents], object]) -> None:
        """rank 0: change agents.

        All: an exchange, and what it brings; nothing has changed before.
        """
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
        nodes = [(node.hash.hex(), node.in_memory, node.on_disk) for node in index.trie]
        order = [list(eviction_order(pool, group)) for group in range(len(pool.groups))]
        return [nodes, order, pool.settle(), sorted(self.life.store.pinned)]


def lead(rank: Rank) -> list[Any]:
    """The life of two agents; what is pinned, in memory and on disk, after each act."""
    life, found = rank.life, []

    def note(what: Any = None) -> None:
        counts = life.arena.pool.settle()
        files = len(record_files(life.store.root))
        found.append(
            (
                what,
                counts[0].pinned,
                len(list(life.prefix.index.trie)),
                files,
                dict(rank.agents.pinned),
            )
        )

    for prompt in (ANN, BOB):
        life.answer(prompt)
    rank.act(lambda agents: agents.note("ann", rank.path(ANN)))
    rank.act(lambda agents: agents.note("bob", rank.path(BOB)))
    rank.act(lambda agents: agents.pin("ann", rank.path(ANN)))
    note()
    life.answer(ANN_LATER)
    rank.act(lambda agents: agents.note("ann", rank.path(ANN_LATER)))
    note()
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
    note(taken and (taken.nodes, taken.kept))
    rank.act(lambda agents: agents.forget("ann"))
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


@pytest.mark.sampled
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("name", ["hybrid", "window"])
def test_a_checkpoint_inside_of_a_block_stays_for_the_other_agent(
    tmp_path: Path, name: str, gone: int, restarts: bool
) -> None:
    life = Life(SPECS[name], tmp_path)
    system = text(1, 300)
    life.answer(system, kind="system")
    agents = [[*system, *text(number, 80)] for number in (2, 3)]
    for tokens in agents:
        life.answer(tokens)
    life.write(tails=True)
    if restarts:
        assert life.prefix.close()
        life = Life(SPECS[name], tmp_path)
    other, next_agent = agents[1 - gone], [*system, *text(9, 50)]
    taken = PathFacts(life.prefix).apply(
        Uncache(name_of(life.prefix.match(agents[gone]).detached()), 1)
    )
    assert taken.nodes == 1
    life.write(tails=True)
    life.check()
    assert life.acquired(next_agent) == 300
    assert life.acquired([*other, 1]) == 380
    assert life.prefix.close()
    life = Life(SPECS[name], tmp_path)
    assert life.acquired(next_agent) == 300
    assert life.prefix.close()


@pytest.mark.parametrize(("name", "kind"), [("hybrid", STATE), ("window", WINDOW)])
def test_a_record_that_was_noted_at_an_edge_that_went_is_forgotten_at_the_other_one(
    tmp_path: Path, name: str, kind: str
) -> None:
    life = Life(SPECS[name], tmp_path)
    system = text(1, 300)
    agents = [[*system, *text(number, 80)] for number in (2, 3)]
    for tokens in (system, *agents):
        life.answer(tokens)
    life.write(tails=True)

    def has_record(tokens: list[int]) -> bool:
        return (kind, 300) in life.prefix.match(tokens).path[-1].records

    gone, other = sorted(agents, key=has_record, reverse=True)
    assert (has_record(gone), has_record(other)) == (True, False)
    record = Key(kind, life.prefix.match(system).hashes[-1])
    PathFacts(life.prefix).apply(Uncache(name_of(life.prefix.match(gone).detached()), 1))
    assert has_record(other)
    life.stored.records.forget([record])
    assert not has_record(other)
    assert life.prefix.close()
