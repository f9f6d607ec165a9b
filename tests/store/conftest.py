"""Fixtures that several tests of the store share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from forks import Forks, forks
from store import children


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with forks(children.IMPORTS, tmp_path_factory.mktemp("forks")) as found:
        yield found
