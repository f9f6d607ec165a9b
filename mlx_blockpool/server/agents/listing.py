"""Listing of agents for GET /v1/agents: for each its size in memory and on disk, and how much of that no other agent needs.

On the socket's thread; memory is measured on the generation thread, a few agents between two decode steps.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from ...formatting import Report
from ...prefix.ref import SharedPaths, own_from
from ...prefix.trie import Node
from ...store.agent_records import utc
from ...store.manifest import shown
from ...tier.measure import Measure, measure
from .by_content import is_by_content
from .service import AgentService, AgentView, Home, shared_with

# Agents are measured for so long between two decode steps.
STEP_SECONDS = 0.01


def listing(service: AgentService, views: dict[str, AgentView], names: Sequence[str]) -> list[Report]:
    """Figures of the agents `names` among all `views`; sizes in bytes, times in UTC."""
    chosen = [views[name] for name in names]
    running, waiting = service.requests()
    measured: dict[str, Report] = {}
    for home in {id(s.home): s.home for s in chosen if s.home is not None}.values():
        shared = shared_with(home, views)
        left = deque(view for view in chosen if view.home is home)
        sizes: dict[Node, tuple[int, int]] = {}
        while left:
            measured |= service.do(partial(_measured, service, home, left, shared, sizes))
    measured |= _on_disk(service, [view for view in chosen if view.home is None])
    return [_about(s, running, waiting) | measured.get(s.name, {}) for s in chosen]


def _about(view: AgentView, running: Counter[str], waiting: Counter[str]) -> Report:
    return {
        "name": view.name,
        "shown": shown(view.name),
        "by": "content" if is_by_content(view.name) else "name",
        "model": view.model,
        "namespace": view.namespace,
        "loaded": view.home is not None,
        "tokens": view.path.tokens,
        "created": utc(view.noted.created),
        "used": utc(view.noted.used),
        "pinned": view.is_pinned,
        "pinned_in_memory": view.home is not None and view.name in view.home.in_memory,
        "running": running[view.name],
        "waiting": waiting[view.name],
    }


def _measured(
    service: AgentService, home: Home, left: deque[AgentView], shared: SharedPaths, sizes: dict[Node, tuple[int, int]]
) -> dict[str, Report]:
    """On the generation thread. Takes agents from `left`. Blocks that only a running request shares count as the agent's own."""
    _, prefix = service.served(home)
    until = time.monotonic() + STEP_SECONDS
    measured: dict[str, Report] = {}
    while left and (not measured or time.monotonic() < until):
        view = left.popleft()
        own = own_from(prefix.index, view.path, shared)
        measured[view.name] = in_words(measure(prefix, view.path, own, sizes))
    return measured


def in_words(found: Measure) -> Report:
    """A measure as reports show it: own and shared bytes in memory and on disk."""
    figures = asdict(found)
    sizes = {where: {whose: figures.pop(f"{whose}_{key}") for whose in ("own", "shared")} for where, key in _PLACES}
    return figures | {where: {f"{whose}_bytes": size for whose, size in own.items()} for where, own in sizes.items()}


_PLACES = (("memory", "bytes"), ("disk", "disk_bytes"))


def _on_disk(service: AgentService, views: list[AgentView]) -> dict[str, Report]:
    """Of models that are not loaded, from the headers of their records."""
    if not views or service.records is None:
        return {}
    listed: list[Report] = service.records.listing({s.namespace for s in views if s.namespace})["agents"]
    return {
        found["name"]: {
            "tokens_in_memory": 0,
            "tokens_on_disk": found["tokens_on_disk"],
            "resumes_from_memory": 0,
            "memory": {"own_bytes": 0, "shared_bytes": 0},
            "disk": {"own_bytes": found["own"]["bytes"], "shared_bytes": found["shared"]["bytes"]},
        }
        for found in listed
    }
