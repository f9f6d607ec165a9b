"""Ranks: the processes that run one model together, and what they do in common.

    exchange  every rank sends a head, and mail if it has any, and gets those of all
    least     a vote: the least of each number
    draw      the tokens of rank 0, on all ranks

A collective is reached by all ranks or by none, in one order, so it may only depend on conditions
that are equal on all ranks. All are called on one thread, in the stream in which the model runs:
two streams would mix up their order. Knows mx.distributed, bytes and numbers; no model and no
request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import GroupLostError
from .head import WORDS, Head

# How the errors of mlx's collectives begin, wherever an array that waits for one is read.
_OF_A_COLLECTIVE = re.compile(r"\[(ring|jaccl|mpi|nccl)\]")


@dataclass(frozen=True)
class Sent:
    """What one rank sends in an exchange."""

    head: Head
    mail: bytes = b""


class Ranks:
    """The processes that run one model together; this base class is for a single process, where
    nothing is sent.

    rank:     the number of this one; rank 0 has the clients.
    size:     their number.
    kind:     how they share a model: "tensor", "pipeline", or "" for a single process.
    group:    mlx's group, for the layers of a model; None for a single process.
    is_lost:  leave() was called, or a collective has failed: every further one raises
              GroupLostError and sends nothing.
    """

    rank: int = 0
    size: int = 1
    kind: str = ""
    group: Any = None
    is_lost: bool = False

    @property
    def decides(self) -> bool:
        """Whether this process decides by itself, and may do so by what it measures and tries."""
        return self.size == 1

    @property
    def shares(self) -> str:
        """How the model is shared, in words; empty for a single process."""
        return "" if self.size == 1 else f"{self.kind} of {self.size}"

    @property
    def own_share(self) -> str:
        """Which share of the model this rank has, in words; empty for a single process."""
        return "" if self.size == 1 else f"{self.kind} {self.rank} of {self.size}"

    def exchange(self, head: Head, mail: bytes = b"") -> list[Sent]:
        """Send this to all ranks.

        Returns what each has sent, in the order of the ranks. Raises GroupLostError.
        """
        return [Sent(replace(head, mail_bytes=len(mail)), mail)]

    def from_first(self, mail: bytes) -> bytes:
        """The mail of rank 0, on all ranks. Raises GroupLostError."""
        return self.exchange(Head(), b"" if self.rank else mail)[0].mail

    def least(self, values: Sequence[int]) -> list[int]:
        """The least value of any rank at each place; all ranks give the same number of values.

        Raises GroupLostError.
        """
        return list(values)

    def draw(self, tokens: mx.array | None, count: int, after: mx.array) -> mx.array:
        """The `count` tokens [count] of rank 0, on all ranks, lazily; other ranks give None. Raises
        GroupLostError.

        It runs after `after`, the logits, on all ranks. mlx raises RuntimeError where the array is
        evaluated and a rank is lost.
        """
        assert tokens is not None, "rank 0 draws"
        return tokens

    def leave(self) -> None:
        """Take part in no further collective: this rank has failed, or another one was lost."""


ALONE = Ranks()


class Joined(Ranks):
    """The ranks of one of mlx's groups, of at least two."""

    def __init__(self, group: Any, kind: str) -> None:
        self.group = group
        self.kind = kind
        self.rank = int(group.rank())
        self.size = int(group.size())

    def exchange(self, head: Head, mail: bytes = b"") -> list[Sent]:
        packed = mx.array(replace(head, mail_bytes=len(mail)).pack(), mx.int32)
        words: list[list[int]] = self._gather(packed, WORDS).tolist()
        heads = [Head.unpack(each) for each in words]
        longest = max(each.mail_bytes for each in heads)
        if not longest:
            return [Sent(each) for each in heads]
        padded = np.zeros(longest, np.uint8)
        padded[: len(mail)] = np.frombuffer(mail, np.uint8)
        found = self._gather(mx.array(padded), longest)
        return [
            Sent(each, row[: each.mail_bytes].tobytes())
            for each, row in zip(heads, found, strict=True)
        ]

    def least(self, values: Sequence[int]) -> list[int]:
        if not values:
            return []
        self._check()
        votes = mx.array(list(values), mx.int64)
        return [
            int(each)
            for each in np.array(self._evaluated(mx.distributed.all_min(votes, group=self.group)))
        ]

    def draw(self, tokens: mx.array | None, count: int, after: mx.array) -> mx.array:
        self._check()
        assert (tokens is None) == (self.rank > 0), "rank 0 draws, and no other"
        own = mx.zeros(count, mx.uint32) if tokens is None else tokens.astype(mx.uint32)
        return mx.distributed.all_sum(mx.depends(own, after), group=self.group)

    def leave(self) -> None:
        self.is_lost = True

    def _gather(self, own: mx.array, length: int) -> np.ndarray[Any, Any]:
        self._check()
        found = self._evaluated(mx.distributed.all_gather(own, group=self.group))
        return np.array(found).reshape(self.size, length)

    def _evaluated(self, found: mx.array) -> mx.array:
        try:
            mx.eval(found)
        except BaseException as error:
            # Another collective would hang for ever.
            self.leave()
            if isinstance(error, Exception):
                raise GroupLostError(
                    1 - self.rank if self.size == 2 else None, str(error)
                ) from error
            raise
        return found

    def _check(self) -> None:
        if self.is_lost:
            # It may have left by itself.
            raise GroupLostError()


def ranks_of(group: Any, kind: str) -> Ranks:
    """The ranks of `group`, as mx.distributed.init() returns it, that share a model by `kind`."""
    return Joined(group, kind) if group.size() > 1 else ALONE


def as_loss(error: Exception) -> Exception:
    """The GroupLostError that an error of a collective means; any other error as it is."""
    if type(error) is RuntimeError and _OF_A_COLLECTIVE.match(str(error)):
        return GroupLostError(None, f"RuntimeError: {error}")
    return error
