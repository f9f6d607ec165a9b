"""Measurements on disk: remembered by all that they depend on, whole or absent, and never in the
way.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from store.measured import measured_in

from mlx_blockpool.store import measurements as measurements_module
from mlx_blockpool.store.db import DATABASE_FILE
from mlx_blockpool.store.measurements import MeasuredOn, Measurements

ON = MeasuredOn("a device of 2 cores", "mlx 1", "fingerprint", "weights")
CURVE = {"rows": [1, 2], "seconds": [0.5, 0.75]}


def test_figures_are_those_of_the_same_device_versions_spec_and_weights(tmp_path: Path) -> None:
    Measurements(tmp_path).save(ON, "tiny", {"curve": CURVE})
    found = Measurements(tmp_path)
    assert found.figures(ON) == {"curve": CURVE}
    assert [found.figures(ON._replace(**{name: "another"})) for name in ON._fields] == [{}] * 4
    (measured,) = measured_in(tmp_path)
    assert (measured.model, measured.date[:2], measured.date[-6:]) == ("tiny", "20", "+00:00")


def test_figures_of_another_name_stay_and_those_of_the_same_are_replaced(tmp_path: Path) -> None:
    found = Measurements(tmp_path)
    found.save(ON, "tiny", {"curve": CURVE, "paths": [1]})
    found.save(ON, "tiny", {"paths": [2]})
    assert found.figures(ON) == {"curve": CURVE, "paths": [2]}
    assert len(measured_in(tmp_path)) == 1


def test_what_two_processes_measure_is_kept_of_both(tmp_path: Path) -> None:
    one, other = Measurements(tmp_path), Measurements(tmp_path)
    assert (one.figures(ON), other.figures(ON)) == ({}, {})
    assert measured_in(tmp_path) == []
    one.save(ON, "tiny", {"curve": CURVE})
    other.save(ON._replace(spec="another"), "small", {"curve": CURVE})
    assert [measured.model for measured in measured_in(tmp_path)] == ["tiny", "small"]


def test_the_models_measured_first_are_forgotten_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements_module, "MOST_MODELS", 2)
    found = Measurements(tmp_path)
    for name in ("a", "b", "a", "c"):
        found.save(ON._replace(weights=name), name, {"curve": CURVE})
    assert [measured.model for measured in measured_in(tmp_path)] == ["a", "c"]


def test_a_damaged_database_costs_the_time_to_measure_again(tmp_path: Path) -> None:
    (tmp_path / DATABASE_FILE).write_text("not a database")
    found = Measurements(tmp_path)
    assert found.figures(ON) == {}
    found.save(ON, "tiny", {"curve": CURVE})
    assert found.figures(ON) == {"curve": CURVE}


def test_a_folder_that_cannot_be_made_costs_the_time_to_measure_again(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = Measurements(tmp_path / "file")
    found.save(ON, "tiny", {"curve": CURVE})
    assert found.figures(ON) == {}


def test_without_a_folder_figures_stay_in_memory() -> None:
    found = Measurements(None)
    found.save(ON, "tiny", {"curve": CURVE})
    assert found.figures(ON) == {"curve": CURVE}
    assert Measurements(None).figures(ON) == {}


def test_a_damaged_row_costs_no_other(tmp_path: Path) -> None:
    found = Measurements(tmp_path)
    found.save(ON, "tiny", {"curve": CURVE})
    with found._database.transaction() as connection:
        connection.execute("INSERT INTO measurements VALUES ('damaged', 'small', '', 'damaged')")
    found.save(ON, "tiny", {"paths": [1]})
    assert found.figures(ON) == {"curve": CURVE, "paths": [1]}


def test_seconds_saved_are_added_up_over_starts(tmp_path: Path) -> None:
    first, other = Measurements(tmp_path), Measurements(tmp_path)
    assert first.add_saved(0.0) == 0.0
    assert [first.add_saved(2.5), other.add_saved(1.25), first.add_saved(0.5)] == [2.5, 3.75, 4.25]
    assert Measurements(tmp_path).add_saved(0.0) == 4.25
    assert Measurements(None).add_saved(1.0) == 1.0


def test_seconds_saved_that_cannot_be_written_are_not_taken_for_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Measurements(tmp_path / "file").add_saved(2.5) is None
