"""How many drafted tokens of each member a verification forward takes, by what it costs and what
they bring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from .curve import CostCurve

# Drafts that promise less than this factor are not worth what cannot be known: the curve was
# measured at another time.
LEAST_GAIN = 1.03


def choose_lengths(chances: Sequence[Sequence[float]], curve: CostCurve, members: int) -> list[int]:
    """How many drafted tokens of each member to verify: all 0 where that does not pay.

    `chances`: of each draft the chances of its tokens, each that it and all before it are accepted:
    falling numbers. A forward with drafts emits on average E tokens of a member: 1 and the chances
    of its drafted ones. The product of the members' speeds is made as large as possible, so that no
    draft slows the others by more than it gains. `members` is the number of sequences in the batch;
    those beyond `chances` have no draft. Raises ValueError for more drafts than members.
    """
    if len(chances) > members:
        raise ValueError(
            f"There are {len(chances)} drafts for {members} members. Give at most one for each."
        )
    gains = [(gain, -number) for number, each in enumerate(chances) for gain in log_gains(each)]
    # Each member's gains fall from token to token, so the best tokens of any number are the first
    # ones in this order.
    gains.sort(reverse=True)
    best, best_count = members * (math.log(LEAST_GAIN) - math.log(curve.plain_seconds(members))), 0
    gained = 0.0
    for count, (gain, _) in enumerate(gains, 1):
        gained += gain
        speed = gained - members * curve.log_seconds(members + count)
        if speed > best:
            best, best_count = speed, count
    lengths = [0] * len(chances)
    for _, number in gains[:best_count]:
        lengths[-number] += 1
    return lengths


def choose_padded_lengths(
    chances: Sequence[Sequence[float]], curve: CostCurve, again: Sequence[int]
) -> list[int]:
    """choose_lengths() where a forward computes as many tokens of each member as of the one that
    has most: further members draft at no cost up to that.

    `again`: of each member, the tokens before its next one that the forward computes again. If a
    draft is partly rejected, the next forward computes its accepted tokens again, and that is
    counted here.
    """
    members, base = len(again), 1 + max(again)
    plain = curve.plain_seconds(members)
    without = curve.seconds(members * base) if base > 1 else plain
    best, best_lengths = members * (math.log(LEAST_GAIN) - math.log(without)), [0] * members
    # Of each member the tokens that a forward emits with each length of its draft.
    emitted = [list(accumulate(each, initial=1.0)) for each in chances]
    most = max(1 + known + len(each) for known, each in zip(again, chances, strict=True))
    for longest in range(base, most + 1):
        lengths = [
            min(len(each), longest - 1 - known) for known, each in zip(again, chances, strict=True)
        ]
        if not any(lengths):
            continue
        found = list(zip(again, chances, emitted, lengths, strict=True))
        certain = math.prod(each[n - 1] for _, each, _, n in found if n)
        accepted = max(known + counts[n] for known, _, counts, n in found if n)
        repeated = math.exp(curve.log_seconds(math.ceil(members * accepted))) - plain
        seconds = math.exp(curve.log_seconds(members * longest))
        seconds += (1 - certain) * max(0.0, repeated)
        gained = math.log(math.prod(counts[n] for _, _, counts, n in found))
        speed = gained - members * math.log(seconds)
        if speed > best:
            best, best_lengths = speed, lengths
    return best_lengths


def log_gains(chances: Sequence[float]) -> list[float]:
    """What each token of a draft adds to the logarithm of the tokens that a forward emits of its
    member: falling numbers.
    """
    gains: list[float] = []
    expected, last = 1.0, math.inf
    for chance in chances:
        # Rounding must not make a later token better than an earlier one.
        last = min(last, math.log1p(chance / expected))
        expected += chance
        gains.append(last)
    return gains


def least_chance(curve: CostCurve, members: int, most: int) -> float:
    """The least chance of a next token after which drafts of up to `most` tokens of each member can
    pay; inf where they cannot.

    As if all tokens after it were certain, and drafts were alike in all members, which gains most.
    """
    plain = curve.plain_seconds(members)
    slower = (
        (count, LEAST_GAIN * curve.seconds(members + count) / plain)
        for count in range(1, members * most + 1)
    )
    return min(((each - 1) * members / count for count, each in slower), default=math.inf)
