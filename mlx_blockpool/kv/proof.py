"""Proves what an installed plugin says of a model's caches: a prompt past the end of its windows
and chunks and past two blocks, and one that is resumed, give the logits of the model's own caches.

The bundled provider reads specs off the model, so that its specs need no such proof. Owned by the
generation thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import mlx.core as mx

from ..errors import PoolExhaustedError
from ..spec import (
    BLOCK_TOKENS,
    ChunkLayer,
    FullLayer,
    LayerSpec,
    ModelCacheSpec,
    StateLayer,
    WindowLayer,
    blocks_for,
)
from .arena import KVArena
from .attach import detached
from .layer_caches import PooledRotatingKVCache
from .own_states import OwnState
from .prompt_cache import leaves_of, make_prompt_cache, resumed, sequence_of, state_caches
from .quantised import own_copies

# Windows and chunks up to here are always passed. Longer ones of a spec are passed unless the
# model's own cache has the same; whatever else a cache of another class has, up to the second.
MOST_TOKENS, MOST_UNCOMPARED = 1100, 8300
# The most tokens of one forward: logits of all are computed.
MOST_AT_ONCE = 2048
# How what differs begins where only the pool is to blame.
TOO_SMALL = "the pool is too small to prove it"
# Sums in another order stay far below the first, and one wrong key of a few hundred is far above
# it. Models in 16 bits round every sum.
TOLERANCE, COARSE = 1e-5, 1e-2
# The next tokens after each of which a state of another class is saved and restored: it may hold
# groups of tokens.
SAVED_ONCE_EACH = 16
# The tokens by which a model that can resume anywhere is cut back.
CUT = 3

Parts = Sequence[Sequence[int]]


def run(model: Any, caches: list[Any], parts: Parts) -> list[mx.array]:
    """Logits [vocabulary] after each part of a prompt."""
    found = []
    for part in parts:
        found.append(model(mx.array([list(part)]), cache=caches)[0, -1].astype(mx.float32))
        mx.eval([getattr(c, "state", []) for c in caches if len(part) > 1], found[-1])
    return found


def cut(tokens: Sequence[int], places: Iterable[int]) -> list[list[int]]:
    """Split tokens at `places`."""
    ends = [*sorted({p for p in places if 0 < p < len(tokens)}), len(tokens)]
    return [list(tokens[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def distance(needed: Sequence[mx.array], found: Sequence[mx.array]) -> list[float]:
    """The largest difference of each pair of rows, as a fraction of the largest finite logit;
    infinite if only one is finite.
    """
    scale = max(float(mx.abs(mx.where(mx.isfinite(row), row, 0)).max()) for row in needed) or 1.0
    return [_apart(a, b) / scale for a, b in zip(needed, found, strict=True)]


def _apart(needed: mx.array, found: mx.array) -> float:
    finite = mx.isfinite(needed)
    if needed.shape != found.shape or not bool((finite == mx.isfinite(found)).all()):
        return float("inf")
    return float(mx.abs(mx.where(finite, needed - found, 0)).max())


def sizes_of(*leaves: LayerSpec) -> list[int]:
    """The lengths of windows and chunks, in tokens."""
    windows = {leaf.max_size for leaf in leaves if isinstance(leaf, WindowLayer)}
    return sorted(windows | {leaf.chunk_size for leaf in leaves if isinstance(leaf, ChunkLayer)})


def _passed(spec: ModelCacheSpec, own: list[Any], pooled: list[Any]) -> list[int]:
    """The tokens that a prompt must pass: the sizes of the spec, and whatever else may be the size
    of a window in the empty caches that the model makes itself.
    """
    sizes = {size for size in sizes_of(*spec.leaves) if size <= MOST_TOKENS}
    for leaf, theirs, mine in zip(spec.leaves, leaves_of(own), leaves_of(pooled), strict=False):
        # A state of the model's own class is saved and restored.
        is_compared = isinstance(mine, type(theirs)) and not isinstance(mine, OwnState)
        most = MOST_TOKENS if is_compared else MOST_UNCOMPARED
        counts = {value for value in vars(theirs).values() if type(value) is int}
        sizes |= {count for count in counts if 1 < count <= most}
        sizes |= {size for size in sizes_of(leaf) if not (is_compared and size in counts)}
    return sorted(sizes)


def long_prompts(model: Any, arena: KVArena, own: list[Any]) -> list[list[int]]:
    """Two prompts for a batch: one passes two blocks and twice every window and chunk up to
    MOST_UNCOMPARED, the other the shortest one.

    own: empty caches that the model makes itself.
    """
    passed = _passed(arena.spec, own, make_prompt_cache(model, arena))
    sizes = [size for size in passed if size <= MOST_UNCOMPARED]
    with detached(model):
        vocabulary = model(mx.zeros((1, 1), mx.int32)).shape[-1]
    longest = max([2 * BLOCK_TOKENS + 20, *(2 * size + 20 for size in sizes)])
    return [_tokens(1, longest, vocabulary), _tokens(2, min(sizes, default=30) + 9, vocabulary)]


def difference_alone(
    model: Any,
    arena: KVArena,
    make_stock: Callable[[], list[Any]],
    tolerance: float | None = None,
) -> str | None:
    """What differs between one sequence on pooled caches and on the model's own, in words; None if
    nothing does.

    make_stock: makes empty caches of the model. tolerance: by default that of blocks that are not
    quantised, whose caches hold exactly what the model's do.
    """
    try:
        return _difference_alone(model, arena, make_stock, tolerance)
    except PoolExhaustedError as error:
        sizes = _passed(arena.spec, make_stock(), make_prompt_cache(model, arena))
        return too_small(error, arena.spec, max([2 * BLOCK_TOKENS, *sizes]))
    except Exception as error:
        # Code of a plugin may raise anything.
        return f"{type(error).__name__}: {str(error)[:200]}"


def too_small(error: PoolExhaustedError, spec: ModelCacheSpec, tokens: int) -> str:
    """What differs where a pool cannot hold the prompts of a proof, in words.

    tokens: of the longest one.
    """
    # Two long sequences. States may take half of a pool.
    needed = 2 * spec.bytes_per_agent(2 * tokens)
    needed *= 1 + bool(spec.fixed_bytes_per_agent() and spec.groups)
    return (
        f"{TOO_SMALL}: {error.needed} blocks of {error.group} do not fit. Raise --pool-bytes to "
        f"{needed} or more"
    )


def _difference_alone(
    model: Any, arena: KVArena, make_stock: Callable[[], list[Any]], tolerance: float | None
) -> str | None:
    spec, own = arena.spec, make_stock()
    if len(own) != len(spec.layers):
        return f"the spec has {len(spec.layers)} layers and the model makes {len(own)} caches"
    vocabulary = model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model, arena)).shape[-1]
    caches = make_prompt_cache(model, arena)
    why = _lost_rows(spec, leaves_of(make_stock()), leaves_of(caches))
    if why is not None:
        return why
    sizes = _passed(spec, own, caches)
    tokens = _tokens(3, max([2 * BLOCK_TOKENS, *sizes]) + 30, vocabulary)
    places = [7, *range(MOST_AT_ONCE, len(tokens), MOST_AT_ONCE)]
    places += [*(size + d for size in sizes for d in (-1, 3))]
    saves = any(isinstance(leaf, OwnState) for leaf in leaves_of(caches))
    singles = SAVED_ONCE_EACH if saves else 4
    parts = [*cut(tokens, places), *([token] for token in _tokens(4, singles, vocabulary))]
    with detached(model):
        needed = run(model, own, parts)
    found = []
    for part in parts:
        found += run(model, caches, [part])
        if saves:
            # As a cached prefix is resumed.
            caches = deepcopy(caches)
    if tolerance is None:
        is_exact = model(mx.zeros((1, 1), mx.int32)).dtype == mx.float32
        tolerance = TOLERANCE if is_exact else COARSE
        different = _difference_held(leaves_of(own), leaves_of(caches))
    else:
        different = None
    why = (
        _first_beyond(needed, found, parts, tolerance)
        or different
        or _uncounted(arena, caches, sum(map(len, parts)))
    )
    if why is not None:
        return why
    whole = [token for part in parts for token in part]
    hit = len(whole) if spec.needs_checkpoints else len(whole) - CUT
    tail = [_tokens(5, 5, vocabulary), *([token] for token in _tokens(6, 2, vocabulary))]
    with detached(model):
        if hit < len(whole):
            own = make_stock()
            run(model, own, cut(whole[:hit], places))
        needed = run(model, own, tail)
    sequence = sequence_of(caches)
    assert sequence is not None, "caches of a pool without a sequence"
    leaves = leaves_of(caches)
    rings = {
        leaf.place.group: leaf.ring_index
        for leaf in leaves
        if isinstance(leaf, PooledRotatingKVCache)
    }
    states = {i: own_copies(leaf.saved_arrays()) for i, leaf in state_caches(leaves).items()}
    continued = resumed(sequence.fork(), hit, rings, states)
    found = run(model, continued, tail)
    why = _first_beyond(needed, found, tail, tolerance, hit)
    return None if why is None else f"resumed at {hit} tokens, {why}"


def _lost_rows(spec: ModelCacheSpec, own: list[Any], pooled: list[Any]) -> str | None:
    """The first cache of a class that mlx-lm does not have that does not return all rows that were
    appended, as a FullLayer says, in words: a prompt only passes what it knows the size of.
    """
    for i, (leaf, theirs, mine) in enumerate(zip(spec.leaves, own, pooled, strict=True)):
        if type(leaf) is not FullLayer or isinstance(mine, type(theirs)):
            continue
        rows = [
            mx.random.uniform(0.5, 1, (1, a.heads, MOST_UNCOMPARED, a.dim), key=mx.random.key(n))
            .astype(getattr(mx, spec.dtype_of(a)))
            for n, a in enumerate(leaf.arrays)
        ]  # fmt: skip
        for at in range(0, MOST_UNCOMPARED, MOST_AT_ONCE):
            part = [array[:, :, at : at + MOST_AT_ONCE] for array in rows]
            found = getattr(theirs, leaf.names[0])(*part)
            end = at + part[0].shape[2]
            # Rows of 4 bits are this far from those that were appended.
            if not all(
                a.shape == b[:, :, :end].shape and mx.allclose(a, b[:, :, :end], rtol=0, atol=0.1)
                for a, b in zip(found, rows, strict=True)
            ):
                return f"layer cache {i} does not return all of {end} rows that were appended"
    return None


def _first_beyond(
    needed: Sequence[mx.array],
    found: Sequence[mx.array],
    parts: Parts,
    tolerance: float,
    start: int = 0,
) -> str | None:
    """The first logits that are further apart than `tolerance`, in words."""
    for i, gap in enumerate(distance(needed, found)):
        if not gap <= tolerance:
            at = start + sum(map(len, parts[: i + 1]))
            return (
                f"logits after token {at} differ by {gap:.2g} of the largest from those of the "
                f"model's own caches ({tolerance:.0e} is allowed)"
            )
    return None


def _difference_held(own: list[Any], pooled: list[Any]) -> str | None:
    """The first leaf whose cache holds other figures than the model's own: heads, dims and types
    of its arrays, its position, its window. Logits in 16 bits do not show one token less.
    """
    for i, (mine, theirs) in enumerate(zip(pooled, own, strict=True)):
        if not isinstance(mine, type(theirs)):
            continue
        held, needed = _figures(mine), _figures(theirs)
        if held != needed:
            return (
                f"layer cache {i} ({type(theirs).__name__}) holds {held}, and the model's own "
                f"holds {needed}"
            )
    return None


def _figures(cache: Any) -> list[Any]:
    state = getattr(cache, "state", ())
    parts = state if isinstance(state, tuple | list) else [state]
    return [
        # mlx-lm's caches return the tokens that they have memory for.
        (*part.shape[:2], *part.shape[3:], str(part.dtype)) if isinstance(part, mx.array) else part
        for part in parts
        if isinstance(part, mx.array | int | str)
    ]


def _uncounted(arena: KVArena, caches: list[Any], tokens: int) -> str | None:
    """The first state layer that takes more bytes after this many tokens than the spec says, which
    budgets count.
    """
    for i, cache in state_caches(caches).items():
        leaf = arena.spec.leaves[i]
        assert isinstance(leaf, StateLayer)
        n_bytes = sum(array.nbytes for array in cache.saved_arrays() if array is not None)
        most = leaf.nbytes + leaf.growth * BLOCK_TOKENS * blocks_for(tokens)
        if n_bytes > most:
            return f"states of layer cache {i} take {n_bytes} bytes; the spec says {most}"
    return None


def _tokens(seed: int, count: int, vocabulary: int) -> list[int]:
    """Random tokens, without the last ones of the vocabulary, which are often special."""
    return random.Random(seed).choices(range(1, max(2, vocabulary * 9 // 10)), k=count)
