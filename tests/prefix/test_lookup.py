"""Why a lookup found no more: each cause where it is true, and the tokens around the place."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefix.computed import answer
from prefix.test_cache import LONG, compute, prefix_cache, serve
from tier.lives import BLOCK, ONE, start

from mlx_blockpool.prefix.lookup import CAUSES, SHOWN, Lookup
from mlx_blockpool.server.sequential import DraftedPrefix


def test_the_tokens_ahead_go_on_in_the_next_block() -> None:
    prefix = prefix_cache()
    serve(prefix, LONG)
    lookup = prefix.look([*LONG[: BLOCK - 3], *range(99)])
    assert (lookup.cause, lookup.matched, lookup.given) == (
        "differs",
        BLOCK - 3,
        tuple(range(SHOWN)),
    )
    assert lookup.expected == tuple(LONG[BLOCK - 3 : BLOCK - 3 + SHOWN])
    at_the_edge = prefix.look([*LONG[:BLOCK], 7])
    assert (at_the_edge.cause, at_the_edge.hit) == ("all", BLOCK)
    at_the_edge = prefix.look([*LONG[:BLOCK], 7, 8])
    assert (at_the_edge.cause, at_the_edge.given, at_the_edge.expected[:2]) == (
        "differs",
        (7, 8),
        (10_256, 10_257),
    )


def test_a_shorter_known_prompt_and_a_longer_one() -> None:
    prefix = prefix_cache()
    serve(prefix, LONG)
    assert prefix.look([*LONG, 1, 2]) == Lookup(702, 700, 700, "longer")
    assert prefix.look([1, 2]) == Lookup(2, 0, 0, "new")
    assert prefix.look(LONG[:300]) == Lookup(300, 300, 299, "all")


def test_without_a_checkpoint_the_tokens_are_told_too() -> None:
    prefix = prefix_cache((1, 100))
    serve(prefix, LONG)
    lookup = prefix.look([*LONG[:600], 7, 8])
    assert (lookup.hit, lookup.matched, lookup.cause) == (0, 600, "no checkpoint")
    assert (lookup.given, lookup.expected[0]) == ((7, 8), 10_600)


def test_what_stays_on_disk_is_not_said_to_be_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path)
    answer(first.prefix, ONE)
    assert first.prefix.close()
    again = start(tmp_path)
    monkeypatch.setattr(again.stored.restores, "is_worth_reading", lambda wanted: False)
    for prompt in ([*ONE, 1], [*ONE[: BLOCK + 9], 1, 2, 3], [*ONE[:9], 1, 2]):
        acquired = again.prefix.acquire(prompt, 20)
        again.prefix.discard(acquired.caches)
        assert (acquired.lookup.hit, acquired.lookup.cause, acquired.lookup.expected) == (
            0,
            "on disk",
            (),
        )
    assert again.prefix.look([*range(7, 90)]).cause == "new"


def test_a_draft_that_knows_less() -> None:
    model, draft = prefix_cache(), prefix_cache()
    serve(model, LONG)
    drafted = DraftedPrefix(model, draft)
    acquired = drafted.acquire(LONG, 10)
    assert (acquired.lookup.hit, acquired.lookup.matched, acquired.lookup.cause) == (
        0,
        700,
        "draft",
    )
    drafted.discard(acquired.caches)
    serve(draft, LONG)
    acquired = drafted.acquire(LONG, 10)
    assert (acquired.lookup.hit, acquired.lookup.cause) == (699, "all")
    assert compute(acquired)
    drafted.discard(acquired.caches)


def test_every_cause_has_words() -> None:
    for cause in CAUSES:
        assert CAUSES[cause] in str(Lookup(2, 1, 1, cause))
