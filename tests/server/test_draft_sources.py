"""What plugins offer to draft with, as a loaded model takes it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_blockpool import plugins
from mlx_blockpool.config import EngineConfig
from mlx_blockpool.errors import PluginError
from mlx_blockpool.server.models.caches import draft_sources


def provider(ranks: int = 1) -> Any:
    return SimpleNamespace(model="model", config={"model_type": "m"}, name="m", ranks=SimpleNamespace(size=ranks))


def test_plugins_are_asked_unless_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "source_factories", lambda model, config: [model, config])
    assert draft_sources(provider(), EngineConfig(drafts="auto")) == ["model", {"model_type": "m"}]
    assert draft_sources(provider(), EngineConfig(drafts="off")) == []
    assert draft_sources(provider(ranks=2), EngineConfig(drafts="auto")) == []


def test_a_model_is_served_without_plugins_that_fail(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(model: Any, config: Any) -> list[Any]:
        raise PluginError("provider p raised KeyError")

    monkeypatch.setattr(plugins, "source_factories", fails)
    with caplog.at_level(logging.WARNING):
        assert draft_sources(provider(), EngineConfig(drafts=4)) == []
    assert "No drafts of plugins for m: provider p raised KeyError" in caplog.text
