"""Listing of agents for GET /v1/agents: for each its size in memory and on disk, and how much of that no other agent needs.

On the socket's thread; memory is measured on the generation thread, a few agents between two decode steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict

from ...formatting import Report
from ...prefix.trie import Node
from ...prefix.uncache import exclusive_from
from ...store.agent_files import shown
from ...store.agent_records import utc
from ...tier.cache import TieredPrefixCache
from .conversation_id import is_conversation_id
from .service import AgentService, AgentView, Home, shared_with

# Agents are measured for this long between two decode steps.
STEP_SECONDS = 0.01


def listing(service: AgentService, views: dict[str, AgentView], names: Sequence[str]) -> list[Report]:
    """Figures of the agents `names` among all `views`; sizes in bytes, times in UTC."""
    chosen = [views[name] for name in names]
    running, waiting = service.requests()
    measured = _on_disk(service, {view.agent.namespace for view in chosen if view.home is None})
    for home in {id(view.home): view.home for view in chosen if view.home is not None}.values():
        measured |= _in_memory(service, home, views, [view for view in chosen if view.home is home])
    return [
        _about(view) | {"running": running[view.name], "waiting": waiting[view.name]} | measured.get(view.name, {})
        for view in chosen
    ]


def _about(view: AgentView) -> Report:
    agent, home = view.agent, view.home
    return {
        "name": view.name,
        "shown": shown(view.name),
        "by": "content" if is_conversation_id(view.name) else "name",
        "model": view.model,
        "namespace": agent.namespace or None,
        "loaded": home is not None,
        "tokens": agent.tokens,
        "created": utc(agent.created),
        "used": utc(agent.used),
        "pinned": agent.pinned,
        "pinned_in_memory": home is not None and home.pinned.get(view.name, False),
    }


def _in_memory(service: AgentService, home: Home, views: dict[str, AgentView], chosen: list[AgentView]) -> dict[str, Report]:
    """Figures of some agents of a loaded model. Blocks that only a running request shares count as the agent's own."""
    shared, left = shared_with(home, views), deque(chosen)
    sizes: dict[Node, tuple[int, int]] = {}
    measured: dict[str, Report] = {}

    def measure_some(prefix: TieredPrefixCache) -> None:
        until = time.monotonic() + STEP_SECONDS
        while left:
            view = left.popleft()
            own = exclusive_from(prefix.index, view.path, shared)
            measured[view.name] = asdict(prefix.measure(view.path, own, sizes))
            if time.monotonic() > until:
                return

    while left:
        service.at(home, lambda _, prefix: measure_some(prefix))
    return measured


def _on_disk(service: AgentService, namespaces: set[str]) -> dict[str, Report]:
    """Figures of the agents of models that are not loaded, from the headers of their records."""
    if not namespaces or service.records is None:
        return {}
    return {
        found["name"]: {
            "tokens_in_memory": 0,
            "tokens_on_disk": found["tokens_on_disk"],
            "resumes_from_memory": 0,
            "memory": {"own_bytes": 0, "shared_bytes": 0},
            "disk": {"own_bytes": found["own"]["bytes"], "shared_bytes": found["shared"]["bytes"]},
        }
        for found in service.records.listing(namespaces)["agents"]
    }
