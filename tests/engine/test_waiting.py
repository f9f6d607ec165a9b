"""Requests that wait for what others bring back from disk: they are told, they do not spin, and
a disk that hangs is computed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.engines import Told, assert_nothing_held, assert_stock, bytes_of, drive, words
from engine.stored_engines import Machine, start
from store.disks import GatedDisk

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine import caches as caches_module
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request
from mlx_blockpool.tier.restore import RestoreJob

LONG = words(5, 6 * 256 + 40)


class Clock:
    """What the restores of one machine take for the time."""

    def __init__(self, machine: Machine) -> None:
        self.now = machine.stored.restores.clock()
        machine.stored.restores.clock = lambda: self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    machine = start(tmp_path)
    machine.engine.insert(Request(LONG, 1))
    drive(machine.engine)
    assert machine.prefix.close()
    return tmp_path


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> GatedDisk:
    """Closed. Nobody waits for it longer than need be."""
    monkeypatch.setattr(caches_module, "WAIT_SECONDS", 0.0)
    return GatedDisk()


def by_somebody_else(machine: Machine) -> RestoreJob:
    """What an agent's owner asks for, outside of the engine."""
    wanted = machine.prefix.stored.restores.plan(machine.prefix.match(LONG), len(LONG) - 1)
    assert wanted is not None
    return machine.stored.restores.begin(wanted)


def steps(engine: BlockPoolBatchEngine, told: Told, count: int) -> int:
    """How many of `count` calls of next() an owner would make: not those that have nothing to
    do.
    """
    called = 0
    for _ in range(count):
        if not engine.is_blocked:
            called += 1
            told.take(engine.next())
    return called


def check(machine: Machine, uid: int, told: Told, cached: int) -> None:
    assert told.failed == {}
    assert_stock("llama", LONG, told.tokens[uid])
    assert told.started[uid].cached == cached
    assert machine.engine.is_blocked
    assert_nothing_held(machine.prefix)
    machine.store.close()


def test_a_request_starts_when_the_restore_of_somebody_else_has_ended(
    folder: Path, disk: GatedDisk
) -> None:
    machine, told = start(folder, disk=disk), Told()
    disk.reads.clear()
    restore = by_somebody_else(machine)
    uid = machine.engine.insert(Request(LONG, 4))
    assert steps(machine.engine, told, 1000) == 1, "it spins"
    assert machine.engine.progress == 0
    disk.reads.set()
    while not restore.advance(wait=1.0):
        pass
    restore.release()
    told.take(machine.engine.next())
    assert uid in told.started
    check(machine, uid, drive(machine.engine, told), len(LONG) - 1)


def test_a_request_whose_blocks_the_restore_of_somebody_else_holds_waits_for_it(
    folder: Path, disk: GatedDisk
) -> None:
    machine, told = start(folder, bytes_of("llama", len(LONG) + 300), disk=disk), Told()
    disk.reads.clear()
    restore = by_somebody_else(machine)
    other = words(77, 900)
    uid = machine.engine.insert(Request(other, 4))
    assert steps(machine.engine, told, 1000) == 1
    disk.reads.set()
    restore.release()
    told.take(machine.engine.next())
    assert uid in told.started
    drive(machine.engine, told)
    assert told.failed == {}
    assert_stock("llama", other, told.tokens[uid])
    machine.store.close()


def test_a_restore_that_somebody_else_has_forgotten_is_not_waited_for(
    folder: Path, disk: GatedDisk
) -> None:
    machine, told = start(folder, disk=disk), Told()
    clock = Clock(machine)
    disk.reads.clear()
    restore = by_somebody_else(machine)
    uid = machine.engine.insert(Request(LONG, 4))
    steps(machine.engine, told, 10)
    clock.now += machine.store.config.answer_seconds + 0.1
    told.take(machine.engine.next())
    assert told.started[uid].cached == 0
    drive(machine.engine, told)
    disk.reads.set()
    restore.release()
    check(machine, uid, told, 0)


def test_what_a_hanging_disk_does_not_give_is_computed(folder: Path, disk: GatedDisk) -> None:
    machine, told = start(folder, disk=disk), Told()
    clock = Clock(machine)
    disk.reads.clear()
    first, second = [machine.engine.insert(Request(LONG, 4)) for _ in range(2)]
    steps(machine.engine, told, 10)
    assert (told.started, machine.engine.progress) == ({}, 0)
    clock.now += machine.store.config.answer_seconds + 0.1
    drive(machine.engine, told)
    # Who comes while the disk is left alone does not ask it.
    third = machine.engine.insert(Request((*LONG, 1, 2, 3), 4))
    drive(machine.engine, told)
    assert told.failed == {}
    assert [told.started[uid].cached for uid in (first, third)] == [0, len(LONG)]
    assert told.started[second].cached >= 1024, "it did not wait for what the first computes"
    assert machine.stored.restores.num_arrived == 0
    disk.reads.set()
    check(machine, first, told, 0)


def test_a_disk_that_is_slow_is_waited_for(
    folder: Path, disk: GatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record comes just in time."""
    machine, told = start(folder, disk=disk), Told()
    clock = Clock(machine)
    uid = machine.engine.insert(Request(LONG, 4))
    monkeypatch.setattr(caches_module, "WAIT_SECONDS", 5.0)
    monkeypatch.setattr(EngineConfig, "restore_seconds", 0.0)
    while uid not in told.started:
        clock.now += machine.store.config.answer_seconds - 0.1
        told.take(machine.engine.next())
    assert machine.stored.restores.num_arrived >= 6
    check(machine, uid, drive(machine.engine, told), len(LONG) - 1)
