"""Fixtures of the tests of tier/."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from store.disks import GatedDisk


@pytest.fixture
def gated() -> Iterator[GatedDisk]:
    disk = GatedDisk()
    yield disk
    disk.writes.set()
    disk.reads.set()
