"""Who goes first in the engine, and who gives way. Requests share places and room, however many choices each of them has.

    line_up(waiting, sequences)     sequences wait in the order in which they are due
    first_of_agents(sequences)      the requests of one agent run in the order of their arrival
    in_turn(waiting, live)          the requests with the fewest live sequences first
    giver(sequence, live)           which live sequence makes room for one whose request has fewer
    last(live)                      which live sequence goes first when the next tokens have no room
    go_behind(waiting, ended, now)  a request whose choice has ended waits behind the others for the next one

Knows sequences, and no caches. Owned by the generation thread.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection

from .sequence import Sequence


def line_up(waiting: list[Sequence], sequences: Collection[Sequence]) -> None:
    """Let sequences wait: those that are due first come first."""
    for sequence in sequences:
        insort(waiting, sequence, key=lambda each: each.place)


def first_of_agents(sequences: Collection[Sequence]) -> dict[str | None, Sequence]:
    """The sequence of each agent that arrived first, whatever is due first: the agent's other requests wait for its end."""
    first: dict[str | None, Sequence] = {}
    for sequence in sequences:
        agent = sequence.request.agent
        if agent is not None and (agent not in first or sequence.uid < first[agent].uid):
            first[agent] = sequence
    return first


def in_turn(waiting: Collection[Sequence], live: Collection[Sequence]) -> list[Sequence]:
    """The waiting sequences as they start: each request gets its next place after those with fewer, equals in their order."""
    places = _places(live)

    def turn(sequence: Sequence) -> int:
        places[sequence.of] += 1
        return places[sequence.of]

    return sorted(waiting, key=turn)


def giver(sequence: Sequence, live: Collection[Sequence]) -> Sequence | None:
    """The live sequence that is preempted for a waiting one: the youngest of the request that has the most.

    None: no request keeps as many as that of `sequence` would then have, or only requests that go before it.
    """
    places = _places(live)
    least, first = places[sequence.of] + 2, sequence.request.priority
    crowding = [each for each in live if places[each.of] >= least and each.request.priority >= first]
    return max(crowding, key=lambda each: (places[each.of], each.uid), default=None)


def last(live: Collection[Sequence]) -> Sequence:
    """The live sequence that is preempted first: of the highest priority value, of the request with the most, the youngest."""
    places = _places(live)
    return max(live, key=lambda each: (each.request.priority, places[each.of], each.uid))


def go_behind(waiting: list[Sequence], ended: Sequence, now: float) -> None:
    """Let the other choices for the prompt of `ended` wait as if they had arrived `now`."""
    behind = [] if ended.request.group is None else [each for each in waiting if each.is_choice_beside(ended)]
    for each in behind:
        waiting.remove(each)
        each.come_again(now)
    line_up(waiting, behind)


def _places(live: Collection[Sequence]) -> Counter[int | str]:
    """How many live sequences each request has."""
    return Counter(each.of for each in live)
