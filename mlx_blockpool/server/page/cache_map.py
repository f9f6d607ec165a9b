"""GET /v1/cache/map: the blocks of a model's pool, its cached prefixes as a tree of agents, and the requests in progress.

A named key sees its own agents, prefixes and requests; other blocks in use are `o`, without more. Any thread may ask: one survey
serves all clients, and takes at most a two-hundredth of the time, however large the pool is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable
from queue import Empty
from typing import Any

from ...errors import UnavailableError
from ..access import belongs, own_name
from ..jobs import Job
from .survey import BlockState, Edge, RequestView, Survey, requests_of, survey

PATH = "/v1/cache/map"
# Seconds of processor time that a survey takes between two decode steps.
STEP_SECONDS = 0.002
# From one survey to the next: at least this long, and this many times as long as a survey takes.
LEAST_SECONDS = 0.25
REST = 200
# While the generation thread is busy for longer, such as with a large chunk, clients get the survey before.
WAIT_SECONDS = 1.0
# Segments of the tree in one answer.
MOST_SEGMENTS = 2000


class CacheMaps:
    """The last survey of each model of `generator`, and what was rendered of it."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._changing = threading.Lock()
        self._rendering = threading.Lock()
        self._last: _Surveys | None = None
        self._pending: _Surveys | None = None
        self._requests: list[RequestView] = []
        self._due = 0.0

    def answer(self, owner: str | None, model: str | None = None) -> dict[str, Any]:
        """The map of a model, by default the one used last, for the owner of a key. Its age is in `seconds_ago`.

        Raises UnavailableError if the generation thread has ended.
        """
        if self._changing.acquire(timeout=WAIT_SECONDS):
            try:
                self._refresh()
            finally:
                self._changing.release()
        last, requests = self._last, self._requests
        surveys = {} if last is None else last.by_model
        found = surveys.get(model or self._last_used()) or next(iter(surveys.values()), None)
        return {
            "model": None if found is None else found.model,
            "models": list(surveys),
            "seconds_ago": None if last is None else round(time.monotonic() - last.ended, 3),
            **(_EMPTY if last is None or found is None else self._render(last, found, owner)),
            "requests": [_request(each, owner) for each in requests if _is_own(each.name, owner)],
        }

    def _render(self, last: _Surveys, found: Survey, owner: str | None) -> dict[str, Any]:
        """render(), once for all clients of an owner. What it costs puts the next survey off."""
        key = found.model, owner
        with self._rendering:
            if key not in last.rendered:
                start = time.thread_time()
                last.rendered[key] = render(found, owner)
                self._due += REST * (time.thread_time() - start)
            return last.rendered[key]

    def _last_used(self) -> str:
        used = self._generator.model
        return "" if used is None else str(self._generator.registry.catalog.id_of(used.key.model))

    def _refresh(self) -> None:
        """Survey all models, if that is due."""
        if self._pending is None:
            if time.monotonic() < self._due:
                return
            self._pending = _Surveys(self._generator)
        surveyed, until = self._pending, time.monotonic() + WAIT_SECONDS
        try:
            while (done := surveyed.wait(until)) is False:
                pass
        except Exception:
            self._pending = None
            raise
        if done is None:
            return
        self._pending, self._requests = None, surveyed.requests
        if not surveyed.is_stopped:
            self._last = surveyed
        self._due = surveyed.ended + max(LEAST_SECONDS, REST * surveyed.seconds)

    def stop(self) -> None:
        """End a survey under way, which refers to caches, because models change. On the generation thread."""
        pending = self._pending
        if pending is not None:
            pending.stop()


class _Surveys:
    """Surveys of all loaded models at one time, which the generation thread makes job by job.

    seconds, ended:  the processor time that they took, and when that was. is_stopped: they ended before their time.
    rendered:        what the owners of keys see, by model and owner.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.by_model: dict[str, Survey] = {}
        self.requests: list[RequestView] = []
        self.rendered: dict[tuple[str, str | None], dict[str, Any]] = {}
        self.seconds = self.ended = 0.0
        self.is_stopped = self._has_begun = self._has_ended = False
        self._steps = self._run()
        self._job = self._send()

    def wait(self, until: float) -> bool | None:
        """Wait for the next step. Returns whether it was the last one; None: it has not run in time, and may be waited for again.

        Raises UnavailableError if the generation thread has ended.
        """
        try:
            is_done, error = self._job.results.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            if not self._generator.generation_available():
                raise UnavailableError("The generation thread has ended.") from None
            return None
        if error is not None:
            raise error
        if not is_done:
            self._job = self._send()
        return bool(is_done)

    def stop(self) -> None:
        self.is_stopped = self.is_stopped or (self._has_begun and not self._has_ended)
        if self.is_stopped:
            self._steps.close()

    def _send(self) -> Job[bool]:
        job = Job(self._step)
        self._generator.requests.put(job)
        return job

    def _step(self) -> bool:
        start = time.thread_time()
        is_done = True
        for _ in self._steps:
            if time.thread_time() - start > STEP_SECONDS:
                is_done = False
                break
        self.seconds += time.thread_time() - start
        self.ended = time.monotonic()
        return is_done

    def _run(self) -> Generator[None]:
        registry, self._has_begun = self._generator.registry, True
        self.requests = requests_of(registry)
        for served in list(registry.loaded.values()):
            name = registry.catalog.id_of(served.key.model)
            found = self.by_model[name] = Survey(name)
            yield from survey(served, found)
        self._has_ended = True


# -- what one client sees ----------------------------------------------------------------------------------------------

_EMPTY: dict[str, Any] = {"agents": [], "pinned": [], "groups": [], "trie": [], "left_out": 0}


def render(found: Survey, owner: str | None) -> dict[str, Any]:
    """A survey as the owner of a key sees it; None: keys have no names, and every client sees all."""
    users = _Users(found, owner)
    tree = _Tree(found.edges, users)
    return {
        "agents": [own_name(name) if owner is not None else name for name in users.names],
        "pinned": [number for number, name in enumerate(users.names) if name in found.pinned],
        "groups": [
            {
                "name": group.name,
                "blocks": len(group.blocks),
                "bytes_per_block": group.bytes_per_block,
                **_blocks(group.blocks, group.edges, users.holders(number), tree, users),
            }
            for number, group in enumerate(found.groups)
        ],
        "trie": tree.segments,
        "left_out": found.left_out + tree.left_out,
    }


class _Users:
    """Who uses which edge: a bit for each agent that the owner sees. `of`: by edge the bits of the agents whose paths it is in.

    names:    of the agents, in the order of their bits. ends: by edge the numbers of the agents whose last turn ends there.
    """

    def __init__(self, found: Survey, owner: str | None) -> None:
        self.owner = owner
        self.running = [each for each in found.running if _is_own(each.name, owner)]
        own = {name for name in found.ends if belongs(name, owner)}
        self.names = sorted(own | {each.name for each in self.running if each.name is not None})
        self._number = {name: number for number, name in enumerate(self.names)}
        self.ends: dict[int, list[int]] = {}
        self.of = [0] * len(found.edges)
        for name in sorted(own):
            self.ends.setdefault(found.ends[name], []).append(self._number[name])
            self.of[found.ends[name]] |= 1 << self._number[name]
        self.is_seen = [
            owner is None or bool(mask) or self.shown(edge) is not None for mask, edge in zip(self.of, found.edges, strict=True)
        ]
        for number in range(len(found.edges) - 1, -1, -1):
            parent = found.edges[number].parent
            if parent >= 0:
                self.of[parent] |= self.of[number]
                self.is_seen[parent] = self.is_seen[parent] or self.is_seen[number]

    def shown(self, edge: Edge) -> str | None:
        """The agent that has computed an edge, if the owner may see its name."""
        if edge.owner is None or not belongs(edge.owner, self.owner):
            return None
        return edge.owner if self.owner is None else own_name(edge.owner)

    def holders(self, group: int) -> dict[int, int]:
        """Return for each block the bits of the running requests that hold it. One without an agent has a bit of its own."""
        held: dict[int, int] = {}
        for place, each in enumerate(self.running, len(self.names)):
            bit = 1 << (place if each.name is None else self._number[each.name])
            for block in each.tables[group] if each.tables else ():
                held[block] = held.get(block, 0) | bit
        return held

    def numbers(self, mask: int) -> list[int]:
        """The numbers of the agents among the bits."""
        return [number for number in range(len(self.names)) if mask >> number & 1]


class _Tree:
    """The edges that a client sees as `segments`: stretches that the same agents use. `of`: by edge the number of its segment."""

    def __init__(self, edges: list[Edge], users: _Users) -> None:
        self.segments: list[dict[str, Any]] = []
        self.of: list[int | None] = [None] * len(edges)
        self.left_out = 0
        self._mixed: set[int] = set()
        children = Counter(edge.parent for number, edge in enumerate(edges) if users.is_seen[number])
        for number, edge in enumerate(edges):
            if not users.is_seen[number]:
                continue
            parent = edge.parent
            by, above = users.shown(edge), None if parent < 0 else self.of[parent]
            goes_on = above is not None and children[parent] == 1 and users.of[parent] == users.of[number]
            # Records on disk do not name the agent that computed them.
            if goes_on and (by is None or self.segments[above or 0]["by"] in (None, by)):
                self._extend(number, edge, above or 0, by)
            elif (above is None and parent >= 0) or len(self.segments) >= MOST_SEGMENTS:
                self.left_out += 1
                continue
            else:
                self._extend(number, edge, self._begin(edge, above), by)
            self.segments[self.of[number] or 0]["ends"] += users.ends.get(number, [])

    def _begin(self, edge: Edge, above: int | None) -> int:
        self.segments.append(
            {"parent": above, "start": edge.start, "end": edge.end, "in_memory": 0, "on_disk": 0, "by": None, "ends": []}
        )
        return len(self.segments) - 1

    def _extend(self, number: int, edge: Edge, place: int, by: str | None) -> None:
        segment, size = self.segments[place], edge.end - edge.start
        self.of[number] = place
        if by is None and edge.owner is not None:
            # Another owner's agent has computed a part of it.
            self._mixed.add(place)
        segment["by"] = None if place in self._mixed else segment["by"] or by
        segment["end"] = edge.end
        segment["in_memory"] += size * edge.in_memory
        segment["on_disk"] += size * edge.on_disk


def _blocks(
    blocks: Iterable[BlockState], edges: dict[int, int], held: dict[int, int], tree: _Tree, users: _Users
) -> dict[str, Any]:
    """A letter for each block, and by number what holds it."""
    letters: list[str] = []
    places: list[int] = []
    holders: dict[tuple[int | None, int], int] = {}
    for block in blocks:
        number = edges.get(block.id)
        mask, is_used = held.get(block.id, 0), block.ref_count > 0 or block.cached_refs > 0
        is_seen = users.owner is None or mask > 0 or (number is not None and users.is_seen[number])
        if not (is_used and is_seen):
            letters.append("o" if is_used else "f")
            places.append(-1)
            continue
        sharers = mask | (0 if number is None else users.of[number])
        letter = "r" if block.ref_count else "p" if block.pins else "c"
        letters.append(letter.upper() if sharers.bit_count() > 1 else letter)
        key = (None if number is None else tree.of[number], mask)
        places.append(holders.setdefault(key, len(holders)))
    owners = [{"segment": segment, "running": users.numbers(mask)} for segment, mask in holders]
    return {"states": "".join(letters), "owners": owners, "owned": places}


def _request(request: RequestView, owner: str | None) -> dict[str, Any]:
    name = request.name if owner is None or request.name is None else own_name(request.name)
    seconds = None if request.seconds is None else round(request.seconds, 1)
    figures = {key: value for key, value in vars(request).items() if key != "name"}
    return {"agent": name, **figures, "seconds": seconds}


def _is_own(name: str | None, owner: str | None) -> bool:
    """Return whether a request may be shown to an owner: to a named key only one whose agent has its name."""
    return owner is None or (name is not None and belongs(name, owner))
