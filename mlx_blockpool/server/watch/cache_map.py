"""GET /v1/cache/map: the blocks of a model's pool, its cached prefixes as a tree of agents, and the
requests in progress.

A named key sees its own agents, prefixes and requests; other blocks in use are `o`, without more.
Any thread may read it: one snapshot serves all clients, and takes at most a two-hundredth of the
time, however large the pool is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from queue import Empty
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ...errors import UnavailableError
from ..access import belongs, own_name
from ..bodies import Json
from ..jobs import Job, Steps
from ..routes import Route
from .snapshot import GroupSnapshot, ModelSnapshot, RequestState, read_model, requests_of

PATH = "/v1/cache/map"
# From one snapshot to the next: at least this long, and this many times as long as a snapshot
# takes.
LEAST_SECONDS = 0.25
REST = 200
# While the generation thread is busy for longer, such as with a large chunk, clients get the
# snapshot before.
WAIT_SECONDS = 1.0
# Segments of the tree in one answer.
MOST_SEGMENTS = 2000


class ServerSnapshot:
    """All loaded models at one time, which a job of the generation thread reads.

    ended:     when that was; None while it is read, and if it was stopped.
    rendered:  what the owners of keys see, by model and owner.
    """

    def __init__(self, generator: Any) -> None:
        self.by_model: dict[str, ModelSnapshot] = {}
        self.requests: list[RequestState] = []
        self.rendered: dict[tuple[str, str | None], Json] = {}
        self.ended: float | None = None
        self.job = Job(self._read(generator))

    def _read(self, generator: Any) -> Steps[None]:
        self.requests = requests_of(generator.registry)
        for served in list(generator.registry.loaded.values()):
            name = served.events.model
            running = [
                each for each in self.requests if each.model == name and each.tables is not None
            ]
            found = self.by_model[name] = ModelSnapshot(name, running=running)
            yield from read_model(served, found)
        self.ended = time.monotonic()


class CacheMaps:
    """The last snapshot of the models of `generator`, and what was rendered of it."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._changing = threading.Lock()
        self._rendering = threading.Lock()
        self._last: ServerSnapshot | None = None
        self._pending: ServerSnapshot | None = None
        self._requests: list[RequestState] = []
        self._due = 0.0

    def answer(self, owner: str | None, model: str | None = None) -> Json:
        """The map of a model, by default the one used last, for the owner of a key. Its age is in
        `seconds_ago`.

        Raises UnavailableError if the generation thread has ended.
        """
        if self._changing.acquire(timeout=WAIT_SECONDS):
            try:
                self._refresh()
            finally:
                self._changing.release()
        last, requests, used = self._last, self._requests, self._generator.model
        by_model = {} if last is None else last.by_model
        last_used = "" if used is None else used.events.model
        found = by_model.get(model or last_used) or next(iter(by_model.values()), None)
        return {
            "model": None if found is None else found.model,
            "models": list(by_model),
            "seconds_ago": None
            if last is None or last.ended is None
            else round(time.monotonic() - last.ended, 3),
            **(
                render(NO_MODEL, owner)
                if last is None or found is None
                else self._render(last, found, owner)
            ),
            "requests": [
                _request(each, owner) for each in requests if belongs(each.name or "", owner)
            ],
        }

    def _render(self, last: ServerSnapshot, found: ModelSnapshot, owner: str | None) -> Json:
        """render(), once for all clients of an owner. What it costs delays the next snapshot."""
        key = found.model, owner
        with self._rendering:
            if key not in last.rendered:
                start = time.thread_time()
                last.rendered[key] = render(found, owner)
                self._due += REST * (time.thread_time() - start)
            return last.rendered[key]

    def _refresh(self) -> None:
        """Take a snapshot of all models, if that is due."""
        if self._pending is None:
            if time.monotonic() < self._due:
                return
            self._pending = ServerSnapshot(self._generator)
            # stop() finds it from its first slice on.
            self._generator.requests.put(self._pending.job)
        taken = self._pending
        try:
            _, error = taken.job.results.get(timeout=WAIT_SECONDS)
        except Empty:
            if self._generator.generation_available():
                return
            error = UnavailableError("The generation thread has ended.")
        self._pending = None
        if error is not None:
            raise error
        self._requests = taken.requests
        if taken.ended is not None:
            self._last = taken
        self._due = time.monotonic() + max(LEAST_SECONDS, REST * taken.job.seconds)

    def stop(self) -> None:
        """End a snapshot that is being taken, which refers to caches, because models change.

        On the generation thread.
        """
        pending = self._pending
        if pending is not None:
            pending.job.stop()


# -- what one client sees --------------------------------------------------------------------------

# What is shown while no model is loaded.
NO_MODEL = ModelSnapshot("")


def render(found: ModelSnapshot, owner: str | None) -> Json:
    """A snapshot as the owner of a key sees it.

    `owner` is None where keys have no names: then every client sees all.
    """
    view = _View(found, owner)
    return {
        "agents": [_shown(name, owner) for name in view.names],
        "tokens": [found.tokens.get(name) for name in view.names],
        "pinned": [number for number, name in enumerate(view.names) if name in found.pinned],
        "groups": [
            {
                "name": group.name,
                "blocks": len(group.blocks),
                "bytes_per_block": group.bytes_per_block,
                **view.blocks(group, number),
            }
            for number, group in enumerate(found.groups)
        ],
        "trie": view.segments,
        "left_out": found.left_out + view.left_out,
    }


class _View:
    """What the owner of a key sees of a snapshot.

    names:    of the agents; each has the bit of its number in masks.
    users:    by edge the mask of the agents whose paths it is in.
    ends:     by edge the numbers of the agents whose last turn ends there.
    segments: stretches of edges that the same agents use. segment_of: by edge the number of its
    segment.
    """

    def __init__(self, found: ModelSnapshot, owner: str | None) -> None:
        edges = found.edges
        self._owner = owner
        self._running = [each for each in found.running if belongs(each.name or "", owner)]
        ends = {name: end for name, end in found.ends.items() if belongs(name, owner)}
        self.names = sorted(
            {*ends, *(each.name for each in self._running if each.name is not None)}
        )
        self._number = {name: number for number, name in enumerate(self.names)}
        self.ends: list[list[int]] = [[] for _ in edges]
        self.users = [0] * len(edges)
        for name in sorted(ends):
            self.ends[ends[name]].append(self._number[name])
            self.users[ends[name]] |= 1 << self._number[name]
        # By edge the agent that has computed it, if the owner may see its name.
        by = [
            _shown(e.owner, owner) if e.owner is not None and belongs(e.owner, owner) else None
            for e in edges
        ]
        self._is_seen = [owner is None or name is not None for name in by]
        for number, edge in reversed(list(enumerate(edges))):
            self._is_seen[number] |= bool(self.users[number])
            if edge.parent >= 0:
                self.users[edge.parent] |= self.users[number]
                self._is_seen[edge.parent] |= self._is_seen[number]
        self.segments: list[Json] = []
        self.segment_of: list[int | None] = [None] * len(edges)
        self.left_out = 0
        self._divide(found, by)

    def _divide(self, found: ModelSnapshot, by: list[str | None]) -> None:
        """Divide the edges into segments."""
        # Segments of which another owner's agent has computed a part.
        mixed: set[int] = set()
        children = Counter(
            edge.parent for number, edge in enumerate(found.edges) if self._is_seen[number]
        )
        for number, edge in enumerate(found.edges):
            if not self._is_seen[number]:
                continue
            parent, name = edge.parent, by[number]
            place = None if parent < 0 else self.segment_of[parent]
            # Records on disk do not name the agent that computed them.
            if not (
                place is not None
                and children[parent] == 1
                and self.users[parent] == self.users[number]
                and (name is None or self.segments[place]["by"] in (None, name))
            ):
                if (place is None and parent >= 0) or len(self.segments) >= MOST_SEGMENTS:
                    self.left_out += 1
                    continue
                self.segments.append(
                    {
                        "parent": place,
                        "start": edge.start,
                        "end": edge.end,
                        "in_memory": 0,
                        "on_disk": 0,
                        "by": None,
                        "ends": [],
                    }
                )
                place = len(self.segments) - 1
            self.segment_of[number] = place
            if name is None and edge.owner is not None:
                mixed.add(place)
            segment, size = self.segments[place], edge.end - edge.start
            segment["by"] = None if place in mixed else segment["by"] or name
            segment["end"] = edge.end
            segment["in_memory"] += size * edge.in_memory
            segment["on_disk"] += size * edge.on_disk
            segment["ends"] += self.ends[number]

    def blocks(self, group: GroupSnapshot, number: int) -> Json:
        """A letter for each block of a layer group, and by number what holds it."""
        held = self._holders(number)
        letters: list[str] = []
        places: list[int] = []
        holders: dict[tuple[int | None, int], int] = {}
        for block in group.blocks:
            edge = group.edges.get(block.id)
            mask, is_used = held.get(block.id, 0), block.ref_count > 0 or block.cached_refs > 0
            if not is_used or not (
                self._owner is None or mask or (edge is not None and self._is_seen[edge])
            ):
                letters.append("o" if is_used else "f")
                places.append(-1)
                continue
            sharers = mask | (0 if edge is None else self.users[edge])
            letter = "r" if block.ref_count else "p" if block.pins else "c"
            letters.append(letter.upper() if sharers.bit_count() > 1 else letter)
            key = (None if edge is None else self.segment_of[edge], mask)
            places.append(holders.setdefault(key, len(holders)))
        numbers = range(len(self.names))
        owners = [
            {"segment": segment, "running": [n for n in numbers if mask >> n & 1]}
            for segment, mask in holders
        ]
        return {"states": "".join(letters), "owners": owners, "owned": places}

    def _holders(self, group: int) -> dict[int, int]:
        """By block the mask of the running requests that hold it.

        A request without an agent has its own bit.
        """
        held: dict[int, int] = {}
        for place, each in enumerate(self._running, len(self.names)):
            bit = 1 << (place if each.name is None else self._number[each.name])
            for block in each.tables[group] if each.tables else ():
                held[block] = held.get(block, 0) | bit
        return held


def _shown(name: str, owner: str | None) -> str:
    return name if owner is None else own_name(name)


def _request(request: RequestState, owner: str | None) -> Json:
    figures = {
        key: value for key, value in request._asdict().items() if key not in ("name", "tables")
    }
    return {"agent": None if request.name is None else _shown(request.name, owner), **figures}


def answer_map(handler: Any) -> None:
    """Answer GET /v1/cache/map, for the model that its query names."""
    model = parse_qs(urlsplit(handler.path).query).get("model", [None])[0]
    handler.send_json(200, handler.scope.generator.maps.answer(handler.scope.owner, model))


ROUTES = (Route(PATH, answer_map),)
