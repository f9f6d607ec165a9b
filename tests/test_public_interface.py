"""What scripts of others call stays as it is, or is in the changelog."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest
from public_interface import LISTING, WHAT_TO_DO, render

import mlx_blockpool

ROOT = Path(__file__).parent.parent


def changes() -> str:
    """The lines of the listing that have changed; empty: none."""
    listed, now = LISTING.read_text(encoding="utf-8").splitlines(), render().splitlines()
    return "\n".join(difflib.unified_diff(listed, now, "listed", "now", n=0, lineterm=""))


def test_the_signatures_of_the_public_names_are_those_of_the_listing() -> None:
    assert not (found := changes()), f"{WHAT_TO_DO}\n{found}"


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda self, tokens: None, "    acquire(self, tokens)"),
        (lambda self, tokens, max_tokens=513: None, "    acquire(self, tokens, max_tokens=513)"),
        (None, None),
    ],
)
def test_a_parameter_a_default_or_a_method_that_changes_is_noticed(
    change: Any, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change is None:
        monkeypatch.delattr(mlx_blockpool.PrefixCache, "acquire")
    else:
        monkeypatch.setattr(mlx_blockpool.PrefixCache, "acquire", change)
    found = changes().splitlines()
    assert any(line.startswith("-    acquire(self, tokens: Tokens[int]") for line in found)
    # TieredPrefixCache inherits it.
    assert {line[1:] for line in found if line.startswith("+ ")} == ({shown} - {None})
