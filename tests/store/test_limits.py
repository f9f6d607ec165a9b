"""FolderWatcher: when to scan again.

WriteLimits: what may be written at present.
"""

from __future__ import annotations

import errno

import pytest
from store.clock import Clock

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.store.limits import FolderWatcher, WriteLimits
from mlx_blockpool.store.problems import StoreProblems


@pytest.fixture
def watch(clock: Clock) -> FolderWatcher:
    return FolderWatcher(100, 60)


def is_due(watch: FolderWatcher, has_news: bool = False, at_once: bool = False) -> bool:
    return watch.is_due(has_news, at_once)


def test_a_look_is_due_after_so_much_was_written(watch: FolderWatcher) -> None:
    watch.add(99)
    assert not is_due(watch)
    watch.add(1)
    assert is_due(watch)
    watch.begin()
    watch.add(100)
    assert not is_due(watch), "one is under way"
    watch.is_looking = False
    assert is_due(watch)


def test_or_after_so_long_if_there_is_anything_to_tell_or_to_lose(
    watch: FolderWatcher, clock: Clock
) -> None:
    clock.now += 61
    assert not is_due(watch)
    assert is_due(watch, has_news=True)
    watch.add(1)
    assert is_due(watch)
    watch.begin()
    watch.is_looking = False
    watch.add(1)
    assert not is_due(watch)
    clock.now += 61
    assert is_due(watch)


def test_or_at_once_where_nothing_was_seen_yet(watch: FolderWatcher) -> None:
    assert is_due(watch, at_once=True)
    watch.begin()
    assert not is_due(watch, at_once=True)


def test_no_look_is_due_where_nothing_is_written_whatever_the_budget(clock: Clock) -> None:
    assert not is_due(FolderWatcher(0, 60))


def test_no_more_is_handed_over_while_a_look_is_under_way(watch: FolderWatcher) -> None:
    watch.add(500)
    assert watch.allows(1000)
    watch.begin()
    assert watch.allows(1000), "a record that is larger goes alone"
    watch.add(60)
    assert [watch.allows(size) for size in (40, 41)] == [True, False]
    watch.is_looking = False
    assert watch.allows(1000)


# -- limits ----------------------------------------------------------------------------------------


def test_what_was_refused_is_refused_until_it_would_be_taken(clock: Clock) -> None:
    limits = WriteLimits(StoreConfig(), StoreProblems())
    assert limits.still(queue_takes=False) is None
    assert limits.refusal(11, queue_takes=False) == "queue full"
    assert limits.refused == 11
    assert limits.still(queue_takes=False) == "queue full"
    assert limits.still(queue_takes=True) is None
    assert limits.still(queue_takes=False) is None, "it was not asked for since"


def test_a_disk_that_failed_refuses_before_anything_is_made(clock: Clock) -> None:
    limits = WriteLimits(StoreConfig(retry_seconds=30), StoreProblems())
    limits.suspend(OSError(errno.EIO, "broken"))
    assert limits.still(queue_takes=True) == "disk failed"
    clock.now += 30
    assert limits.still(queue_takes=True) is None
    limits.charge(1)
    assert limits.refusal(1, queue_takes=True) == "disk failed", "one record tries"
    limits.resume()
    assert limits.refusal(1, queue_takes=True) is None
