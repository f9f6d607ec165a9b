"""Measurements on disk: remembered by all that they depend on, whole or absent, and never in the way."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from store.disks import BrokenDisk
from store.stores import temporaries

from mlx_blockpool.store import measurements as measurements_module
from mlx_blockpool.store.measurements import MeasuredOn, Measurements
from mlx_blockpool.store.paths import MEASUREMENTS_FILE
from mlx_blockpool.store.scan import Listing

ON = MeasuredOn("a device of 2 cores", "mlx 1", "fingerprint", "weights")
CURVE = {"rows": [1, 2], "seconds": [0.5, 0.75]}


def test_figures_are_those_of_the_same_device_versions_spec_and_weights(tmp_path: Path) -> None:
    Measurements(tmp_path).save(ON, "tiny", {"curve": CURVE})
    found = Measurements(tmp_path)
    assert found.figures(ON) == {"curve": CURVE}
    assert [found.figures(ON._replace(**{name: "another"})) for name in ON._fields] == [{}] * 4
    (measured,) = found.load()
    assert (measured.model, measured.date[:2], measured.date[-6:]) == ("tiny", "20", "+00:00")


def test_figures_of_another_name_stay_and_those_of_the_same_are_replaced(tmp_path: Path) -> None:
    found = Measurements(tmp_path)
    found.save(ON, "tiny", {"curve": CURVE, "paths": [1]})
    found.save(ON, "tiny", {"paths": [2]})
    assert found.figures(ON) == {"curve": CURVE, "paths": [2]}
    assert len(found.load()) == 1


def test_what_two_processes_measure_is_kept_of_both(tmp_path: Path) -> None:
    one, other = Measurements(tmp_path), Measurements(tmp_path)
    assert (one.load(), other.load()) == ([], [])
    one.save(ON, "tiny", {"curve": CURVE})
    other.save(ON._replace(spec="another"), "small", {"curve": CURVE})
    assert [measured.model for measured in one.load()] == ["tiny", "small"]


def test_the_models_measured_first_are_forgotten_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements_module, "MOST_MODELS", 2)
    found = Measurements(tmp_path)
    for name in ("a", "b", "a", "c"):
        found.save(ON._replace(weights=name), name, {"curve": CURVE})
    assert [measured.model for measured in found.load()] == ["a", "c"]


def damaged(**changes: Any) -> bytes:
    model = {"on": ON._asdict(), "model": "tiny", "date": "2026", "figures": {"curve": CURVE}} | changes
    return json.dumps({"format": measurements_module.FORMAT, "models": [model]}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"format": "another", "models": []}',
        damaged()[:-3],
        damaged(on={}),
        damaged(on=ON._asdict() | {"device": 3}),
        damaged(on=ON._asdict() | {"more": "x"}),
        damaged(figures=[]),
        damaged(model=None),
        damaged() + b" " * measurements_module.MAX_BYTES,
    ],
)
def test_a_bad_file_counts_as_absent_and_is_written_again(tmp_path: Path, data: bytes) -> None:
    (tmp_path / MEASUREMENTS_FILE).write_bytes(data)
    found = Measurements(tmp_path)
    assert found.load() == []
    found.save(ON, "tiny", {"curve": CURVE})
    assert found.figures(ON) == {"curve": CURVE}


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(damaged())
    (tmp_path / MEASUREMENTS_FILE).symlink_to(target)
    assert Measurements(tmp_path).figures(ON) == {}


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename"])
def test_a_disk_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, call: str) -> None:
    Measurements(tmp_path).save(ON, "tiny", {"curve": CURVE})
    Measurements(tmp_path, BrokenDisk(**{call: OSError(errno.ENOSPC, "full")})).save(ON, "tiny", {"curve": {}})
    assert Measurements(tmp_path).figures(ON) == {"curve": CURVE}
    assert temporaries(tmp_path) == []


def test_without_a_folder_figures_stay_in_memory() -> None:
    found = Measurements(None)
    found.save(ON, "tiny", {"curve": CURVE})
    assert found.figures(ON) == {"curve": CURVE}
    assert Measurements(None).load() == []


def test_the_file_belongs_to_the_store(tmp_path: Path) -> None:
    Measurements(tmp_path / "new").save(ON, "tiny", {"curve": CURVE})
    assert [path.name for path in (tmp_path / "new").iterdir()] == [MEASUREMENTS_FILE]
    assert Listing(tmp_path / "new").foreign == []
