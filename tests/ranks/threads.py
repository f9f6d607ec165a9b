"""Ranks as threads of one process: what mx.distributed does between processes, a barrier does here.

Each rank has a whole model and an engine of its own. Ranks in different collectives are an
AssertionError on all of them, and one that does not come for some seconds is a GroupLostError on
the others, which print the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import mlx.core as mx

from mlx_blockpool.errors import GroupLostError
from mlx_blockpool.ranks.group import Ranks, Sent
from mlx_blockpool.ranks.head import Head

T = TypeVar("T")
# How long a rank waits for the others.
SECONDS = 10.0


class Meeting:
    """Where the ranks meet: in rounds, each of which has what every rank brings."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size = size
        self.seconds = seconds
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, tuple[str, Any]]] = {}
        self._has_left = False

    def meet(self, rank: int, number: int, name: str, value: Any) -> list[Any]:
        """What all ranks bring to a round, in their order.

        Raises GroupLostError if one leaves before.
        """
        with self._changed:
            given = self._rounds.setdefault(number, {})
            given[rank] = (name, value)
            self._changed.notify_all()
            has_ended = self._changed.wait_for(
                lambda: len(given) == self.size or self._has_left, self.seconds
            )
            # All are here, so that all have read the round before.
            self._rounds.pop(number - 1, None)
        if len(given) < self.size:
            if not has_ended:
                faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
            raise GroupLostError(None, f"rank {rank} waited in {name}")
        names = [given[each][0] for each in range(self.size)]
        assert len(set(names)) == 1, f"the ranks are in different collectives: {names}"
        return [given[each][1] for each in range(self.size)]

    def leave(self) -> None:
        with self._changed:
            self._has_left = True
            self._changed.notify_all()


class ThreadRanks(Ranks):
    """One rank of several threads. `calls` counts its collectives by name."""

    def __init__(self, rank: int, kind: str, meeting: Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self.kind = kind
        self.is_lost = False
        self.calls: Counter[str] = Counter()
        self._meeting = meeting

    def exchange(self, head: Head, mail: bytes = b"") -> list[Sent]:
        words = replace(head, mail_bytes=len(mail)).pack()
        return [Sent(Head.unpack(each), own) for each, own in self._meet("exchange", (words, mail))]

    def least(self, values: Sequence[int]) -> list[int]:
        given = self._meet(f"least of {len(values)}", list(values)) if values else []
        return [min(each) for each in zip(*given, strict=True)]

    def draw(self, tokens: mx.array | None, count: int, after: mx.array) -> mx.array:
        assert (tokens is None) == (self.rank > 0), "rank 0 draws, and no other"
        mx.eval(after)
        drawn = self._meet(f"draw of {count}", None if tokens is None else tokens.tolist())[0]
        assert len(drawn) == count, f"{len(drawn)} tokens drawn for {count} rows"
        return mx.array(drawn, mx.uint32)

    def leave(self) -> None:
        self.is_lost = True
        self._meeting.leave()

    def _meet(self, name: str, value: Any) -> list[Any]:
        if self.is_lost:
            raise GroupLostError()
        self.calls[name.partition(" ")[0]] += 1
        try:
            return self._meeting.meet(self.rank, self.calls.total(), name, value)
        except BaseException:
            self.leave()
            raise


def joined(size: int, kind: str = "tensor", seconds: float = SECONDS) -> list[ThreadRanks]:
    """The ranks of one group, one for each thread."""
    meeting = Meeting(size, seconds)
    return [ThreadRanks(rank, kind, meeting) for rank in range(size)]


def on_ranks(
    size: int, act: Callable[[ThreadRanks], T], kind: str = "tensor", seconds: float = SECONDS
) -> list[T]:
    """What `act` returns on each of `size` ranks.

    Raises the first error of a rank; the others then lose their group.
    """
    found: dict[int, T] = {}
    errors: list[Exception] = []

    def run(ranks: ThreadRanks) -> None:
        try:
            found[ranks.rank] = act(ranks)
        except Exception as error:
            errors.append(error)
            ranks.leave()

    threads = [
        threading.Thread(target=run, args=[ranks], daemon=True)
        for ranks in joined(size, kind, seconds)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, GroupLostError))
    return [found[rank] for rank in range(size)]
