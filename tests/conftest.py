"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import os
import tempfile

import pytest
from hypothesis import HealthCheck, settings
from store.clock import Clock

# No test may look for a model or a cache outside of what it made.
os.environ["HF_HUB_OFFLINE"] = "1"
CACHES = tempfile.TemporaryDirectory(prefix="mlx-blockpool-tests-")
os.environ["XDG_CACHE_HOME"] = CACHES.name

# How fast a shared machine is at the moment says nothing about the code.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--clients", action="store_true", help="Run real clients from package registries against the server.")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the prompt store."""
    return Clock(monkeypatch)
