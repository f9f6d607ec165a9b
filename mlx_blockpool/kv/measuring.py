"""Measures what a step of a model costs on this device: decode steps by their members, verification forwards by their rows.

The loaded model runs on scratch sequences in its own pool, which gets all their blocks back. Knows seconds; where they are kept
and what they decide is known to others. Owned by the generation thread.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx

from ..drafts.curve import CONTEXT, CostCurve, TokenCosts
from ..errors import PoolExhaustedError, UnmeasurableError
from ..spec import FullLayer
from .alone import Unsettled
from .arena import KVArena
from .decode_policy import device
from .factory import make_prompt_cache
from .layer_caches import PooledLayer
from .parts import batch_of, begin_rows, commit_rows, leaves_of, member_of

K = TypeVar("K")

SECONDS = 2.0
ROUNDS = 9
# Steps of decode that are measured together: through all rounds a sequence that begins with CONTEXT tokens stays within its first
# block.
STEPS = 3
# What longer contexts cost is measured behind so many tokens more, with one row and with these.
MORE_CONTEXT, MORE_ROWS = 1024, 16
MEMBERS = (1, 2, 4, 8)
ROWS = (1, 2, 4, 8, 16, 32, 64, 136)
# More rows than these are those of several members.
ROWS_OF_MEMBER = 17
# Cases that are measured though they take up to LONGEST times the seconds: up to 8 members and 16 rows, and those behind a long
# context. A curve of fewer would be remembered, and little drafted by it.
LEAST_CASES, LONGEST = 12, 5
# A model is not measured if a forward of one token takes more than this share of the seconds: the least cases are 22 forwards of
# 1 to 16 tokens, and each runs twice.
SLOW = 0.1


def proceed() -> None:
    """Between two readings, where nothing else needs the thread."""


def medians(
    cases: Mapping[K, Callable[[], float]],
    seconds: float,
    rounds: int = ROUNDS,
    at_least: int = 1,
    look: Callable[[], None] = proceed,
) -> dict[K, float]:
    """The median of what each case returns, measured in about so many seconds. They take turns, as devices slow down at times.

    `cases` begin with the cheapest. Those whose turn comes when half of the time is over are left out, but for the first
    `at_least`, for which there is LONGEST times as much. Each case runs once before it is measured, since devices compile what
    they have not run yet. `look` is called before each run, and what it raises ends the measuring.
    """
    start = time.perf_counter()
    found: dict[K, list[float]] = {}
    for case, run in cases.items():
        half = seconds / 2 * (LONGEST if len(found) < at_least else 1)
        if found and time.perf_counter() - start > half:
            break
        look()
        run()
        found[case] = []
    for done in range(rounds):
        if done and time.perf_counter() - start > seconds:
            break
        for case, taken in found.items():
            look()
            taken.append(cases[case]())
    return {case: statistics.median(taken) for case, taken in found.items()}


def measure_curve(model: Any, arena: KVArena, seconds: float = SECONDS, *, look: Callable[[], None] = proceed) -> CostCurve:
    """The cost curve of a model that verifies drafts, measured in about so many seconds, LONGEST times as many at most.

    Raises PoolExhaustedError where a sequence has no room, and UnmeasurableError for a model that is too slow. `look` is called
    between forwards. What it raises ends the measuring, and the pool has its blocks back.
    """
    assert arena.verifies is not None, "this model verifies no drafts"
    counts = dict(arena.decode.path_counts)
    try:
        scratch = Scratch(model, arena)
        taken = scratch.forward_seconds()
        if taken > SLOW * seconds:
            raise UnmeasurableError(f"a forward of one token takes {taken:.2g} seconds, too long to measure others")
        scratch.add(MEMBERS[-1], look)
        long = _long(model, arena)
        found = medians(_cases(scratch, arena, long), seconds, at_least=LEAST_CASES, look=look)
    finally:
        arena.pool.settle()
        arena.decode.path_counts.clear()
        arena.decode.path_counts.update(counts)
        mx.clear_cache()
    rows, members = ({count: value for (kind, count), value in found.items() if kind == name} for name in ("rows", "members"))
    has_room = long is not None and (scratch.members >= MEMBERS[-1] or not arena.ragged)
    return CostCurve.of(rows, members, _token_costs(found), is_whole=has_room)


def _token_costs(found: Mapping[tuple[str, int], float]) -> TokenCosts:
    """What is more behind a long context; nothing, where that was not measured."""

    def more(kind: str, count: int) -> float:
        return (found[f"long {kind}", count] - found[kind, count]) / MORE_CONTEXT

    if ("long rows", MORE_ROWS) not in found:
        return TokenCosts()
    one, many = more("rows", 1), more("rows", MORE_ROWS)
    row = max(0.0, (many - one) / (MORE_ROWS - 1))
    return TokenCosts(max(0.0, one - row), row, max(0.0, more("members", 1)))


def _long(model: Any, arena: KVArena) -> Scratch | None:
    """A sequence with a longer context; None: there is no room for it."""
    try:
        return Scratch(model, arena, more=MORE_CONTEXT)
    except PoolExhaustedError:
        return None


def _cases(scratch: Scratch, arena: KVArena, long: Scratch | None) -> dict[tuple[str, int], Callable[[], float]]:
    """Decode steps by their members and verification forwards by their rows, for as many members as have room."""
    by_rows, cases = arena.verifies == "rows", dict[tuple[str, int], Callable[[], float]]()
    for count in ROWS:
        if by_rows and count <= ROWS_OF_MEMBER * scratch.members:
            cases["rows", count] = partial(scratch.verify_rows, count)
        elif not by_rows and count <= ROWS_OF_MEMBER:
            cases["rows", count] = partial(scratch.verify_alone, count)
        if count in MEMBERS and count <= scratch.members:
            cases["members", count] = partial(scratch.decode, count)
        if count == MORE_ROWS and long is not None:
            cases["long members", 1] = partial(long.decode, 1)
            for more in (1, MORE_ROWS):
                cases["long rows", more] = partial(long.verify_rows if by_rows else long.verify_alone, more)
    return cases


class Stopwatch:
    """Measures the block that it is the context of: `seconds` that it takes on a device that has nothing else to do.

    On a CPU that is time of this process on its processors, which other processes only delay: that of this thread, which calls
    the model, and that of the others, which compute. Where it `overlaps`, the longer of both; else they wait for each other.
    """

    def __init__(self, overlaps: bool = False) -> None:
        self.seconds = 0.0
        self._overlaps = overlaps

    def __enter__(self) -> Stopwatch:
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        wall, process, thread = (now - before for now, before in zip(self._now(), self._start, strict=True))
        self.seconds = wall if device() != "cpu" else max(thread, process - thread) if self._overlaps else process

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), time.thread_time()


class Scratch:
    """Sequences to measure steps on: of random tokens, and of `more` zeros in their full layers, as no time depends on them.

    There is one at first. Raises PoolExhaustedError where it has no room.
    A step computes random tokens, so that experts are chosen as in a batch of unlike texts, and its method returns its seconds.
    """

    def __init__(self, model: Any, arena: KVArena, more: int = 0) -> None:
        self._model = model
        self._draw = random.Random(0)
        self._vocabulary: int = model(mx.zeros((1, 1), mx.int32)).shape[-1]
        first = make_prompt_cache(model, arena)
        mx.eval(model(self._tokens(1, CONTEXT), cache=first))
        self._lengthen(first, more)
        self._sequences = [first]
        self._ragged = arena.ragged

    def add(self, members: int, look: Callable[[], None] = proceed) -> None:
        """Add sequences until there are `members`, or as many as have room; none where batches are not ragged."""
        while self._ragged and len(self._sequences) < members:
            look()
            try:
                self._sequences.append(self._fork())
            except PoolExhaustedError:
                break

    @property
    def members(self) -> int:
        """How many sequences there are."""
        return len(self._sequences)

    def forward_seconds(self) -> float:
        """Seconds of a forward of one token behind another one, as devices compile what they have not run yet."""
        for _ in range(2):
            tokens, start = self._tokens(1, 1), time.perf_counter()
            with Stopwatch() as watch:
                mx.eval(self._model(tokens, cache=self._sequences[0]))
            wall = time.perf_counter() - start
        # Of other processes the wall has more, and of several cores at once the watch.
        return min(wall, watch.seconds)

    def decode(self, members: int) -> float:
        """A decode step of so many members, encoded before the one before it is read, as the engine does."""
        following = [self._tokens(members, 1) for _ in range(STEPS + 1)]
        mx.eval(following)
        with self._batch(members) as batch:
            inputs = following[0]
            with Stopwatch(overlaps=True) as watch:
                for tokens in following[1:]:
                    drawn, logprobs = self._forward(inputs, batch)
                    # The next step waits for the draw, as if it computed that.
                    drawn = mx.where(drawn[:, None] < 0, drawn[:, None], tokens)
                    mx.async_eval(drawn, logprobs)  # type: ignore[no-untyped-call]
                    mx.eval(inputs)
                    inputs = drawn
                mx.eval(inputs)
            return watch.seconds / STEPS

    def verify_rows(self, rows: int) -> float:
        """A verification forward with so many rows, of one member or of several, each of which keeps one."""
        members = -(-rows // ROWS_OF_MEMBER)
        counts = [rows // members + (i < rows % members) for i in range(members)]
        tokens = self._tokens(rows, 1)
        mx.eval(tokens)
        with self._batch(members) as batch, Stopwatch() as watch:
            begin_rows(batch, counts)
            mx.eval(self._forward(tokens, batch))
            commit_rows(batch, [1] * members)
        return watch.seconds

    def verify_alone(self, count: int) -> float:
        """A verification forward with so many tokens of one sequence, which keeps half of them: states are computed again."""
        caches = self._fork()
        tokens = [self._draw.randrange(self._vocabulary) for _ in range(count)]
        with Stopwatch() as watch:
            found = Unsettled(self._model, caches, tokens)
            mx.eval(mx.argmax(found.logits, axis=-1))
            found.settle((count + 1) // 2)
        return watch.seconds

    def _lengthen(self, caches: list[Any], tokens: int) -> None:
        """Append zeros to the layers that keep all tokens."""
        for leaf in leaves_of(caches) if tokens else []:
            if isinstance(leaf, PooledLayer) and type(leaf.place.layer) is FullLayer:
                layer, arena = leaf.place.layer, leaf.sequence.arena
                leaf.write(*(mx.zeros((1, layer.kv_heads, tokens, dim), arena.dtype) for dim in (layer.key_dim, layer.value_dim)))
                mx.eval(arena.arrays())

    def _fork(self) -> list[Any]:
        """A sequence like the first one, with blocks of its own."""
        caches = deepcopy(self._sequences[0])
        mx.eval(self._model(self._tokens(1, 1), cache=caches))
        return caches

    def _forward(self, inputs: mx.array, batch: list[Any]) -> tuple[mx.array, mx.array]:
        """Tokens [rows] drawn behind inputs [rows, 1], and logprobs [rows, vocabulary]."""
        logits = self._model(inputs, cache=batch)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return mx.argmax(logprobs, axis=-1), logprobs

    def _tokens(self, rows: int, count: int) -> mx.array:
        return mx.array([[self._draw.randrange(self._vocabulary) for _ in range(count)] for _ in range(rows)])

    @contextmanager
    def _batch(self, members: int) -> Iterator[list[Any]]:
        """The caches of the first sequences side by side."""
        if not self._ragged:
            yield self._sequences[0]
            return
        batch = batch_of(self._sequences[:members])
        yield batch
        self._sequences[:members] = [member_of(batch, i) for i in range(members)]
