"""Figures of agents for GET /v1/agents: where each is, how much of it is in memory and on disk, and what only it stands on.

On the socket's thread; what is in memory is measured by errands, a few agents in each.
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
from .service import AgentService, Home, Subject, shared_with

# So long some are measured between two steps.
STEP_SECONDS = 0.01


def listing(service: AgentService, subjects: dict[str, Subject], names: Sequence[str]) -> list[Report]:
    """Figures of the named ones among all agents; sizes in bytes, times in UTC."""
    chosen = [subjects[name] for name in names]
    running, waiting = service.requests()
    measured: dict[str, Report] = {}
    for home in {id(s.home): s.home for s in chosen if s.home is not None}.values():
        shared = shared_with(home, subjects)
        left = deque(subject for subject in chosen if subject.home is home)
        sizes: dict[Node, tuple[int, int]] = {}
        while left:
            measured |= service.do(partial(_measured, service, home, left, shared, sizes))
    measured |= _on_disk(service, [subject for subject in chosen if subject.home is None])
    return [_about(s, running, waiting) | measured.get(s.name, {}) for s in chosen]


def _about(subject: Subject, running: Counter[str], waiting: Counter[str]) -> Report:
    return {
        "name": subject.name,
        "shown": shown(subject.name),
        "by": "content" if is_by_content(subject.name) else "name",
        "model": subject.model,
        "namespace": subject.namespace,
        "loaded": subject.home is not None,
        "tokens": subject.path.tokens,
        "created": utc(subject.noted.created),
        "used": utc(subject.noted.used),
        "pinned": subject.is_pinned,
        "pinned_in_memory": subject.home is not None and subject.name in subject.home.in_memory,
        "running": running[subject.name],
        "waiting": waiting[subject.name],
    }


def _measured(
    service: AgentService, home: Home, left: deque[Subject], shared: SharedPaths, sizes: dict[Node, tuple[int, int]]
) -> dict[str, Report]:
    """On the generation thread. What only a running request needs besides is not looked for."""
    _, prefix = service.served(home)
    until = time.monotonic() + STEP_SECONDS
    measured: dict[str, Report] = {}
    while left and (not measured or time.monotonic() < until):
        subject = left.popleft()
        own = own_from(prefix.index, subject.path, shared)
        measured[subject.name] = in_words(measure(prefix, subject.path, own, sizes))
    return measured


def in_words(found: Measure) -> Report:
    """Sizes of what is its own and of what others need too, in memory and on disk."""
    figures = asdict(found)
    sizes = {where: {whose: figures.pop(f"{whose}_{key}") for whose in ("own", "shared")} for where, key in _PLACES}
    return figures | {where: {f"{whose}_bytes": size for whose, size in own.items()} for where, own in sizes.items()}


_PLACES = (("memory", "bytes"), ("disk", "disk_bytes"))


def _on_disk(service: AgentService, subjects: list[Subject]) -> dict[str, Report]:
    """Of models that are not loaded, from the headers of their records."""
    if not subjects or service.records is None:
        return {}
    listed: list[Report] = service.records.listing({s.namespace for s in subjects if s.namespace})["agents"]
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
