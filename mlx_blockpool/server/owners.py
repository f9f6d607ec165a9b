"""Owners: with several API keys each has a name, and owns the agents of its requests. Knows names only.

An agent of an owner is noted under both names, with a character between them that no client can send: agents of two owners never
have the same one, and where there are no owners names are what clients say.
"""

from __future__ import annotations

import json
from typing import Any

from ..store.agent_files import SEPARATOR


def noted_name(owner: str | None, agent: str) -> str:
    """The name that an agent of an owner is noted under."""
    return agent if owner is None else f"{owner}{SEPARATOR}{agent}"


def own_name(name: str) -> str:
    """The owner's name for the agent that is noted under this name."""
    return name.rpartition(SEPARATOR)[2]


def belongs(name: str, owner: str | None) -> bool:
    """Whether an agent is one of this owner's; without owners every agent is every client's."""
    return owner is None or name.startswith(f"{owner}{SEPARATOR}")


def as_told(owner: str | None, report: Any) -> Any:
    """A report with the names of an owner's agents as the owner knows them."""
    if owner is None:
        return report
    own = json.loads(json.dumps(report).replace(json.dumps(f"{owner}{SEPARATOR}")[1:-1], ""))
    return _without_others(owner, own)


def _without_others(owner: str, report: Any) -> Any:
    """Names that are shown with their owner's: only this owner's, and without it."""
    if isinstance(report, list):
        return [_without_others(owner, item) for item in report]
    if not isinstance(report, dict):
        return report
    found = {name: _without_others(owner, item) for name, item in report.items()}
    if "shown" in found:
        found["shown"] = found["shown"].removeprefix(f"{owner}/")
    if "behind" in found and isinstance(found.get("agents"), list):
        found["agents"] = [name.removeprefix(f"{owner}/") for name in found["agents"] if name.startswith(f"{owner}/")]
    return found


def own_figures(owner: str | None, report: dict[str, Any]) -> dict[str, Any]:
    """The figures of GET /v1/cache with an owner's own agents alone."""
    if owner is None:
        return report
    own = {own_name(name): figures for name, figures in (report.get("agents") or {}).items() if belongs(name, owner)}
    models = {name: own_figures(owner, model) for name, model in (report.get("models") or {}).items()}
    return report | ({"agents": own} if "agents" in report else {}) | ({"models": models} if models else {})
