"""Measures what forwards of a model cost on this device: decode steps by their members,
verification forwards by their rows.

The loaded model runs on scratch sequences in its own pool, and all their blocks are released
afterwards. Knows seconds, not what is decided by them. Owned by the generation thread.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from ..drafts.curve import CONTEXT, CostCurve, TokenCosts
from ..errors import PoolExhaustedError, UnmeasurableError
from ..spec import FullLayer
from .arena import KVArena
from .decode_policy import device
from .layer_caches import PooledLayer
from .pending_tokens import PendingRows, PendingTokens
from .prompt_cache import batch_of, leaves_of, make_prompt_cache, member_of
from .scratch import append, pipelined

K = TypeVar("K")
V = TypeVar("V")

SECONDS = 2.0
ROUNDS = 9
# Decode steps that are measured together: in all rounds a sequence that begins with CONTEXT tokens
# stays within its first block.
STEPS = 3
# Longer contexts are measured with this many tokens more, with one row and with these.
MORE_CONTEXT, MORE_ROWS = 1024, 16
MEMBERS = (1, 2, 4, 8)
ROWS = (1, 2, 4, 8, 16, 32, 64, 136)
# More rows than these belong to several members.
ROWS_OF_MEMBER = 17
# Cases that are measured even if they take up to LONGEST times the seconds: up to 8 members and 16
# rows, and those with a long context. A curve of fewer would be remembered, and few tokens drafted
# by it.
LEAST_CASES, LONGEST = 12, 5
# A model is not measured if a forward of one token takes more than this share of the seconds: the
# least cases are 22 forwards of 1 to 16 tokens, and each runs twice.
SLOW = 0.1


def no_interrupt() -> None:
    """The default `interrupt`: never stop measuring."""


def readings(
    cases: Mapping[K, Callable[[], V]],
    seconds: float,
    rounds: int = ROUNDS,
    at_least: int = 1,
    interrupt: Callable[[], None] = no_interrupt,
) -> dict[K, list[V]]:
    """What each case returns, time after time, measured in about `seconds`. They take turns, as
    devices slow down at times.

    `cases` begin with the cheapest. Those whose turn comes after half of the time are left out,
    except for the first `at_least`, which have LONGEST times as much. Each case runs once before it
    is measured, since devices compile what they have not run yet. `interrupt` is called before each
    run, and what it raises ends the measuring.
    """
    start = time.perf_counter()
    found: dict[K, list[V]] = {}
    for case, run in cases.items():
        half = seconds / 2 * (LONGEST if len(found) < at_least else 1)
        if found and time.perf_counter() - start > half:
            break
        interrupt()
        run()
        found[case] = []
    for done in range(rounds):
        if done and time.perf_counter() - start > seconds:
            break
        for case, taken in found.items():
            interrupt()
            taken.append(cases[case]())
    return found


def measure_curve(
    model: Any,
    arena: KVArena,
    seconds: float = SECONDS,
    *,
    interrupt: Callable[[], None] = no_interrupt,
) -> CostCurve:
    """The cost curve of a model that verifies drafts, measured in about `seconds`, or up to LONGEST
    times as long.

    Raises PoolExhaustedError if the pool cannot hold a sequence, and UnmeasurableError for a model
    that is too slow. `interrupt` is called between forwards. What it raises ends the measuring, and
    all blocks are released.
    """
    assert arena.capabilities.verifies is not None, "this model verifies no drafts"
    try:
        with arena.decode.uncounted():
            scratch = Scratch(model, arena)
            forward = scratch.forward_seconds()
            if forward > SLOW * seconds:
                raise UnmeasurableError(
                    f"a forward of one token takes {forward:.2g} seconds, too long to measure "
                    "others"
                )
            scratch.add(MEMBERS[-1], interrupt)
            long = _long(model, arena)
            taken = readings(_cases(scratch, long), seconds, ROUNDS, LEAST_CASES, interrupt)
            found = {case: statistics.median(each) for case, each in taken.items()}
    finally:
        arena.pool.settle()
        mx.clear_cache()
    rows, members = (
        {count: value for (kind, count), value in found.items() if kind == name}
        for name in ("rows", "members")
    )
    has_room = long is not None and (
        scratch.members >= MEMBERS[-1] or not arena.capabilities.ragged
    )
    return CostCurve.from_points(rows, members, _token_costs(found), is_whole=has_room)


def _token_costs(found: Mapping[tuple[str, int], float]) -> TokenCosts:
    """What longer contexts cost in addition; nothing if that was not measured."""

    def more(kind: str, count: int) -> float:
        return (found[f"long {kind}", count] - found[kind, count]) / MORE_CONTEXT

    if ("long rows", MORE_ROWS) not in found:
        return TokenCosts()
    one, many = more("rows", 1), more("rows", MORE_ROWS)
    row = max(0.0, (many - one) / (MORE_ROWS - 1))
    return TokenCosts(max(0.0, one - row), row, max(0.0, more("members", 1)))


def _long(model: Any, arena: KVArena) -> Scratch | None:
    """A sequence with a longer context, or None if the pool cannot hold it."""
    try:
        return Scratch(model, arena, more=MORE_CONTEXT)
    except PoolExhaustedError:
        return None


def _cases(scratch: Scratch, long: Scratch | None) -> dict[tuple[str, int], Callable[[], float]]:
    """Decode steps by their members and verification forwards by their rows, for all scratch
    sequences.
    """
    cases = dict[tuple[str, int], Callable[[], float]]()
    for count in ROWS:
        if count <= scratch.most_rows:
            cases["rows", count] = partial(scratch.verify, count)
        if count in MEMBERS and count <= scratch.members:
            cases["members", count] = partial(scratch.decode, count)
        if count == MORE_ROWS and long is not None:
            cases["long members", 1] = partial(long.decode, 1)
            for more in (1, MORE_ROWS):
                cases["long rows", more] = partial(long.verify, more)
    return cases


class Stopwatch:
    """Measures the `seconds` that its block takes on an otherwise idle device.

    On a CPU these are seconds of processor time, which other processes only delay: of this thread,
    which calls the model, and of the others, which compute. If both `overlap`, the longer one
    counts; otherwise they wait for each other.
    """

    def __init__(self, overlaps: bool = False) -> None:
        self.seconds = 0.0
        self._overlaps = overlaps

    def __enter__(self) -> Stopwatch:
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        wall, process, thread = (
            now - before for now, before in zip(self._now(), self._start, strict=True)
        )
        self.seconds = (
            wall
            if device() != "cpu"
            else max(thread, process - thread)
            if self._overlaps
            else process
        )

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), time.thread_time()


class Scratch:
    """Sequences to measure steps on: of random tokens, and of `more` zeros in their full layers, as
    no time depends on them.

    There is one at first. Raises PoolExhaustedError if the pool cannot hold it. A step computes
    random tokens, so that experts are chosen as in a batch of unlike texts; its method returns its
    seconds.
    """

    def __init__(self, model: Any, arena: KVArena, more: int = 0) -> None:
        self._model = model
        self._draw = random.Random(0)
        self._vocabulary: int = model(mx.zeros((1, 1), mx.int32)).shape[-1]
        first = make_prompt_cache(model, arena)
        mx.eval(model(self._tokens(1, CONTEXT), cache=first))
        append(
            [
                leaf
                for leaf in leaves_of(first)
                if isinstance(leaf, PooledLayer) and type(leaf.place.layer) is FullLayer
            ],
            more,
        )
        mx.eval(arena.arrays())
        self._sequences = [first]
        self._ragged = arena.capabilities.ragged
        self._by_rows = arena.capabilities.verifies == "rows"
        self._alone = arena.capabilities.verifies == "alone"

    def add(self, members: int, interrupt: Callable[[], None] = no_interrupt) -> None:
        """Add sequences until there are `members` or the pool is full; none if batches are not
        ragged.
        """
        while self._ragged and len(self._sequences) < members:
            interrupt()
            try:
                self._sequences.append(self._fork())
            except PoolExhaustedError:
                break

    @property
    def members(self) -> int:
        """How many sequences there are."""
        return len(self._sequences)

    @property
    def most_rows(self) -> int:
        """How many rows verify() can have."""
        return ROWS_OF_MEMBER * (1 if self._alone else self.members)

    def forward_seconds(self) -> float:
        """Seconds of the second of two forwards of one token, as devices compile what they have
        not run yet.
        """
        for _ in range(2):
            tokens, start = self._tokens(1, 1), time.perf_counter()
            with Stopwatch() as watch:
                mx.eval(self._model(tokens, cache=self._sequences[0]))
            wall = time.perf_counter() - start
        # Other processes make the wall time longer, and several cores at once the processor time.
        return min(wall, watch.seconds)

    def decode(self, members: int) -> float:
        """A decode step of `members`, encoded before the result of the previous one is read, as
        the engine does.
        """
        inputs, *following = [self._tokens(members, 1)[:, 0] for _ in range(STEPS + 1)]
        mx.eval(inputs, following)
        with self._batch(members) as batch:

            def step() -> tuple[mx.array, mx.array]:
                nonlocal inputs
                drawn, logprobs = _drawn(self._logits(inputs, batch))
                # The next step waits for the draw, as if it computed that.
                inputs = mx.where(drawn < 0, drawn, following.pop())
                return inputs, logprobs

            with Stopwatch(overlaps=True) as watch:
                pipelined(step, STEPS)
            return watch.seconds / STEPS

    def verify(self, rows: int) -> float:
        """A verification forward with `rows` rows of one member or of several, each of which
        keeps one. Padding counts as rows.
        """
        members = -(-rows // ROWS_OF_MEMBER)
        if not self._by_rows:
            # Padded members cost some models more than rows of one member: as many as there are.
            members = max(members, min(self.members, rows // 2, self.most_rows // ROWS_OF_MEMBER))
        counts = [rows // members + (i < rows % members) for i in range(members)]
        if not self._by_rows and members > 1 and counts[-1] > 1:
            counts[0], counts[-1] = counts[0] + 1, counts[-1] - 1
        drawn = iter(map(int, np.array(self._tokens(rows, 1)[:, 0])))
        given = [list(islice(drawn, count)) for count in counts]
        with self._batch(members) as batch, Stopwatch() as watch:
            pending = (
                PendingRows(batch, given, lambda inputs, _: (self._logits(inputs, batch), None))
                if self._by_rows
                else PendingTokens(self._model, batch, given)
            )
            mx.eval(_drawn(pending.logits))
            pending.accept([1] * members)
        return watch.seconds

    def _fork(self) -> list[Any]:
        """A sequence like the first one that shares none of the blocks it writes."""
        caches = deepcopy(self._sequences[0])
        mx.eval(self._model(self._tokens(1, 1), cache=caches))
        return caches

    def _logits(self, inputs: mx.array, batch: list[Any]) -> mx.array:
        """[rows, vocabulary] after inputs [rows]."""
        logits: mx.array = self._model(inputs[:, None], cache=batch)[:, -1, :]
        return logits

    def _tokens(self, rows: int, count: int) -> mx.array:
        return mx.array(
            [[self._draw.randrange(self._vocabulary) for _ in range(count)] for _ in range(rows)]
        )

    @contextmanager
    def _batch(self, members: int) -> Iterator[list[Any]]:
        """The caches of the first sequences side by side."""
        if not self._ragged:
            yield self._sequences[0]
            return
        batch = batch_of(self._sequences[:members])
        yield batch
        self._sequences[:members] = [member_of(batch, i) for i in range(members)]


def _drawn(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Tokens [rows] that are drawn from logits [rows, vocabulary], and the logprobs."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.argmax(logprobs, axis=-1), logprobs
