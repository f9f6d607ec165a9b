"""Whether a prompt is brought back from disk or computed is decided by what was measured; and
whoever waits for it is told.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.engines import assert_nothing_held, assert_stock, drive, serve, words
from engine.stored_engines import Machine, read_at_once, start

from mlx_blockpool.config import EngineConfig, StoreConfig
from mlx_blockpool.engine import caches as caches_module
from mlx_blockpool.engine.request import Request, RestoreBegun, RestoreEnded, Restoring
from mlx_blockpool.tier.restore import Rates

BLOCK = 256
LONG = words(5, 6 * BLOCK + 40)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def stored(folder: Path) -> None:
    machine = start(folder)
    serve(machine.engine, [LONG], 1)
    assert machine.prefix.close()


def cached(machine: Machine) -> int:
    """How much of the stored prompt a request finds; its reply is right."""
    uids, told = serve(machine.engine, [prompt := (*LONG, 3)], 4)
    assert told.failed == {}
    assert_stock("llama", prompt, told.tokens[uids[0]])
    assert_nothing_held(machine.prefix)
    return told.started[uids[0]].cached


def test_engines_measure_what_they_compute_and_bring_back(tmp_path: Path) -> None:
    machine = start(tmp_path)
    assert machine.stored.report()["prefill_tokens_per_s"] is None
    serve(machine.engine, [LONG], 1)
    assert machine.prefix.close()
    first = machine.stored.report()
    assert first["prefill_tokens_per_s"] > 0
    assert first["restore_bytes_per_s"] is None
    again = start(tmp_path)
    assert cached(again) == len(LONG)
    second = again.stored.report()
    assert second["restore_bytes_per_s"] > 0
    assert second["restored_tokens"] >= len(LONG)
    assert (second["cheaper_to_compute"], second["restoring"]) == (0, [])


def test_a_slow_disk_beside_a_fast_model_is_not_waited_for(tmp_path: Path) -> None:
    stored(tmp_path)
    machine = start(tmp_path)
    machine.stored.restores.rates = Rates(clock := Clock())
    machine.stored.restores.rates.computed(10**9, 1)
    machine.stored.restores.rates.restored(1, 1)
    assert cached(machine) == 0
    report = machine.stored.report()
    assert (report["cheaper_to_compute"], report["restored_tokens"]) == (1, 0)
    assert machine.store.counts["read"] == 0
    # What was computed is there now; once it is not, and after a while, the disk is tried again.
    machine.prefix.trim_to(0)
    clock.now += StoreConfig.slow_seconds + 1
    assert cached(machine) == len(LONG)
    assert machine.stored.report()["cheaper_to_compute"] == 1


def test_a_fast_disk_is_read_again_and_again(tmp_path: Path) -> None:
    stored(tmp_path)
    machine = start(tmp_path)
    machine.stored.restores.rates.computed(1, 1000)
    for turn in range(1, 4):
        assert cached(machine) == len(LONG)
        assert machine.store.counts["read"] == 7 * turn
        machine.prefix.trim_to(0)
    assert machine.stored.report()["cheaper_to_compute"] == 0


@pytest.mark.parametrize("name", ["gemma3_text", "lfm2"])
def test_windows_and_states_are_weighed_too(tmp_path: Path, name: str) -> None:
    machine = start(tmp_path, name=name)
    machine.engine.insert(Request(LONG, 1, breakpoints=[(4 * BLOCK + 7, "user")]))
    drive(machine.engine)
    assert machine.prefix.close()
    machine = start(tmp_path, name=name)
    wanted = machine.prefix.stored.restores.plan(machine.prefix.match((*LONG, 3)), len(LONG))
    assert wanted is not None
    assert (wanted.have, wanted.tokens) == (0, 4 * BLOCK + 7)
    files = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    machine.stored.restores.rates.computed(wanted.tokens, 1)
    # A little more than is needed, and a little less.
    machine.stored.restores.rates.restored(files + 1, 1)
    assert machine.stored.restores.is_worth_reading(wanted)
    slow = Rates()
    slow.computed(wanted.tokens, 1)
    slow.restored(
        sum(map(machine.store.size, machine.stored.records.keys(wanted.node, wanted.position))),
        1,
    )
    machine.stored.restores.rates = slow
    assert not machine.stored.restores.is_worth_reading(wanted)
    assert machine.prefix.stored.restores.plan(machine.prefix.match((*LONG, 3)), len(LONG)) is None


# -- progress --------------------------------------------------------------------------------------


def begun(machine: Machine) -> int:
    """A request that waits for the disk beside a reply that is under way."""
    first = machine.engine.insert(Request(words(50, 30), 60))
    drive(machine.engine, after=lambda told: first in told.tokens)
    return machine.engine.insert(Request((*LONG, 3), 4))


def test_whoever_waits_for_the_disk_is_told_how_far_it_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path)
    monkeypatch.setattr(EngineConfig, "restore_seconds", 0)
    monkeypatch.setattr(caches_module, "REPORT_SECONDS", 0)
    machine = start(tmp_path)
    read_at_once(machine.store)
    late = begun(machine)
    shown = []
    told = drive(machine.engine, after=lambda _: shown.append(machine.stored.report()["restoring"]))
    events = [event for event in told.order if event.uid == late]
    restoring = [event for event in events if isinstance(event, Restoring)]
    done = [event.done for event in restoring]
    assert events[1 : len(restoring) + 1] == restoring
    assert isinstance(events[0], RestoreBegun)
    assert isinstance(events[len(restoring) + 1], RestoreEnded)
    assert {event.total for event in restoring} == {told.started[late].cached} == {len(LONG)}
    assert done == sorted(set(done))
    assert 4 <= len(done) <= 7
    assert done[0] < BLOCK * 3
    assert [[{"tokens": len(LONG), "done": n}] for n in done] == shown[: len(done)]
    assert shown[-1] == []


def test_nobody_is_told_of_a_restore_that_takes_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path)
    monkeypatch.setattr(EngineConfig, "restore_seconds", 0)
    monkeypatch.setattr(caches_module, "REPORT_SECONDS", 1e9)
    machine = start(tmp_path)
    read_at_once(machine.store)
    late = begun(machine)
    told = drive(machine.engine)
    assert told.started[late].cached == len(LONG)
    assert not any(isinstance(event, Restoring) for event in told.order)


@pytest.mark.parametrize("how", ["cancel", "reset"])
def test_what_was_given_up_is_not_shown(tmp_path: Path, how: str) -> None:
    stored(tmp_path)
    machine = start(tmp_path)
    late = begun(machine)
    machine.engine.next()
    assert [found["tokens"] for found in machine.stored.report()["restoring"]] == [len(LONG)]
    if how == "cancel":
        machine.engine.cancel(late)
    else:
        machine.engine.reset()
    assert machine.stored.report()["restoring"] == []
