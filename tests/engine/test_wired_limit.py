"""What an engine has Metal keep in memory, and that it gives it back."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import utils
from models import make_model
from server.serving import parse

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine.engine import BlockPoolBatchEngine

RECOMMENDED = 700
BEFORE = 5


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device with Metal; the limits that it has had."""
    had = [BEFORE]

    def set_limit(n_bytes: int) -> int:
        had.append(n_bytes)
        return had[-2]

    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(utils, "maybe_set_recommended_wired_limit", lambda: set_limit(RECOMMENDED))
    return had


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("auto", [BEFORE, RECOMMENDED, BEFORE]),
        ("4MB", [BEFORE, 4_000_000, BEFORE]),
        ("off", [BEFORE]),
    ],
)
def test_the_limit_is_set_as_the_option_says_and_set_back(
    option: str, expected: list[int], limits: list[int]
) -> None:
    wired: Any = parse(["--wired-limit", option]).wired_limit
    engine = BlockPoolBatchEngine.open(make_model("llama"), 10**6, EngineConfig(wired_bytes=wired))
    engine.close()
    engine.close()
    assert limits == expected


def test_a_size_needs_a_device_that_has_such_a_limit(
    limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    BlockPoolBatchEngine.open(
        make_model("llama"), 10**6, EngineConfig(wired_bytes=4_000_000)
    ).close()
    assert limits == [BEFORE]


def test_the_default_is_mlx_lms() -> None:
    assert parse([]).wired_limit is None
    with pytest.raises(SystemExit):
        parse(["--wired-limit", "much"])
