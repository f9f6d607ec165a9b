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
from collections.abc import Callable
from queue import Empty
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ...errors import UnavailableError
from ..access import belongs, own_name
from ..bodies import Json
from ..jobs import Job, Steps
from ..routes import Route
from .snapshot import Edge, GroupSnapshot, ModelSnapshot, RequestState, read_model, requests_of

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
        self._last = ServerSnapshot(generator)
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
        wanted = model or ("" if used is None else used.events.model)
        found = last.by_model.get(wanted) or next(iter(last.by_model.values()), NO_MODEL)
        return {
            "model": found.model or None,
            "models": list(last.by_model),
            "seconds_ago": None if last.ended is None else round(time.monotonic() - last.ended, 3),
            **self._render(last, found, owner),
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
    edges = found.edges
    running = [each for each in found.running if belongs(each.name or "", owner)]
    ends = {name: end for name, end in found.ends.items() if belongs(name, owner)}
    names = sorted({*ends, *(each.name for each in running if each.name is not None)})
    # Each agent has the bit of its number: by edge those of the agents whose paths it is in.
    bits: dict[str | None, int] = {name: 1 << number for number, name in enumerate(names)}
    users = [0] * len(edges)
    for name, end in ends.items():
        users[end] |= bits[name]
    # By edge the agent that has computed it, if the owner may see its name.
    by = [
        _shown(e.owner, owner) if e.owner is not None and belongs(e.owner, owner) else None
        for e in edges
    ]
    is_seen = [owner is None or name is not None for name in by]
    for number, edge in reversed(list(enumerate(edges))):
        is_seen[number] |= bool(users[number])
        if edge.parent >= 0:
            users[edge.parent] |= users[number]
            is_seen[edge.parent] |= is_seen[number]
    segments, segment_of = _divide(edges, by, users, is_seen)
    for number, name in enumerate(names):
        if (place := segment_of[ends[name]] if name in ends else None) is not None:
            segments[place]["ends"].append(number)

    def sees(edge: int | None) -> bool:
        return owner is None or (edge is not None and is_seen[edge])

    groups = []
    for number, group in enumerate(found.groups):
        # By block the running requests that hold it. One without an agent has its own bit.
        held: dict[int, int] = {}
        for place, each in enumerate(running, len(names)):
            for block in each.tables[number] if each.tables else ():
                held[block] = held.get(block, 0) | bits.get(each.name, 1 << place)
        groups.append(
            {
                "name": group.name,
                "blocks": len(group.blocks),
                "bytes_per_block": group.bytes_per_block,
                **_blocks(group, held, users, segment_of, sees, len(names)),
            }
        )
    return {
        "agents": [_shown(name, owner) for name in names],
        "tokens": [found.tokens.get(name) for name in names],
        "pinned": [number for number, name in enumerate(names) if name in found.pinned],
        "groups": groups,
        "trie": segments,
        "left_out": found.left_out + sum(is_seen) - sum(p is not None for p in segment_of),
    }


def _divide(
    edges: list[Edge], by: list[str | None], users: list[int], is_seen: list[bool]
) -> tuple[list[Json], list[int | None]]:
    """Divide the edges into segments, which the same agents use, at most MOST_SEGMENTS.

    Returns them and by edge the number of its segment.
    """
    segments: list[Json] = []
    segment_of: list[int | None] = [None] * len(edges)
    # Segments of which another owner's agent has computed a part.
    mixed: set[int] = set()
    children = Counter(edge.parent for edge, seen in zip(edges, is_seen, strict=True) if seen)
    for number, edge in enumerate(edges):
        if not is_seen[number]:
            continue
        parent, name = edge.parent, by[number]
        place = None if parent < 0 else segment_of[parent]
        # Records on disk do not name the agent that computed them.
        if not (
            place is not None
            and children[parent] == 1
            and users[parent] == users[number]
            and (name is None or segments[place]["by"] in (None, name))
        ):
            if (place is None and parent >= 0) or len(segments) >= MOST_SEGMENTS:
                continue
            segments.append(
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
            place = len(segments) - 1
        segment_of[number] = place
        if name is None and edge.owner is not None:
            mixed.add(place)
        segment, size = segments[place], edge.end - edge.start
        segment["by"] = None if place in mixed else segment["by"] or name
        segment["end"] = edge.end
        segment["in_memory"] += size * edge.in_memory
        segment["on_disk"] += size * edge.on_disk
    return segments, segment_of


def _blocks(
    group: GroupSnapshot,
    held: dict[int, int],
    users: list[int],
    segment_of: list[int | None],
    sees: Callable[[int | None], bool],
    num_agents: int,
) -> Json:
    """A letter for each block of a layer group, and by number what holds it.

    held:  by block the mask of the running requests that hold it. users, segment_of: by edge.
    sees:  whether the owner of the key may see what is on an edge.
    """
    letters: list[str] = []
    places: list[int] = []
    holders: dict[tuple[int | None, int], int] = {}
    for block in group.blocks:
        edge, mask = group.edges.get(block.id), held.get(block.id, 0)
        is_used = block.ref_count > 0 or block.cached_refs > 0
        if not (is_used and (mask or sees(edge))):
            letters.append("o" if is_used else "f")
            places.append(-1)
            continue
        sharers, segment = (mask, None) if edge is None else (mask | users[edge], segment_of[edge])
        letter = "r" if block.ref_count else "p" if block.pins else "c"
        letters.append(letter.upper() if sharers.bit_count() > 1 else letter)
        places.append(holders.setdefault((segment, mask), len(holders)))
    owners = [
        {"segment": segment, "running": [n for n in range(num_agents) if mask >> n & 1]}
        for segment, mask in holders
    ]
    return {"states": "".join(letters), "owners": owners, "owned": places}


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
