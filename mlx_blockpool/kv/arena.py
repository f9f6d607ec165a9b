"""The memory of a pool: for each layer, its arrays in slabs of neighbouring blocks.

Follows the layout of its BlockPool. Knows arrays and positions, no sequences. Owned by the
generation thread. No view of a slab may outlive the step that made it: a write would copy the whole
slab instead of going in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..config import PoolConfig
from ..errors import PoolExhaustedError
from ..spec import BLOCK_TOKENS, FullLayer, ModelCacheSpec, StateLayer, WindowLayer, leaves_of
from .capabilities import Capabilities
from .decode_policy import DecodePolicy
from .pool import UNBOUNDED, BlockPool, remedy
from .quantised import arrays_of, own_copy
from .slab import Slab


@dataclass(frozen=True)
class Place:
    """Where the blocks of a layer are: its group, and its index among the layers of the group."""

    group: int
    index: int
    layer: FullLayer


class KVArena:
    """`pool` says which blocks there are; this holds what is in them.

    capabilities: what the model can do with this pool.
    decode:       how decode steps run; `steps` has the last one of each layer group.
    first, last:  the first and the last leaf that live in blocks.
    unread:       the leaves whose writes are evaluated before the next ones.
    state_bytes:  what states of running sequences and checkpoints may take of `pool_bytes`.
    """

    def __init__(
        self, spec: ModelCacheSpec, pool_bytes: int, config: PoolConfig | None = None
    ) -> None:
        config = config or PoolConfig()
        self.state_bytes = state_share(spec, pool_bytes, config)
        # Those that live, which are SequenceBlocks.
        self.sequences: weakref.WeakSet[Any] = weakref.WeakSet()
        growth = spec.state_growth * BLOCK_TOKENS
        fits = (self.state_bytes - spec.fixed_bytes_per_agent()) // growth if growth else UNBOUNDED
        self.pool = BlockPool(spec, pool_bytes - self.state_bytes, config, fits * BLOCK_TOKENS)
        self.capabilities = Capabilities()
        self.decode = DecodePolicy(config.decode_path)
        self.spec = spec
        self.forget_steps()
        self.dtype = getattr(mx, self.spec.dtype)
        self._evictor: weakref.WeakMethod[Callable[[Mapping[int, int]], None]] | None = None
        self._slabs: dict[tuple[int, int], Slab] = {}
        self._layout = -1
        places = [
            (layer, Place(g, index, group.layer))
            for g, group in enumerate(self.spec.groups)
            for index, layer in enumerate(group.layers)
        ]
        self.places: dict[int, Place] = dict(places)
        self.first, self.last = min(self.places, default=0), max(self.places, default=0)
        arrays = self.places[self.first].layer.arrays if self.places else ()
        self._first_dtype = getattr(mx, spec.dtype_of(arrays[0])) if arrays else self.dtype
        self.unread = _unread(spec, self.places)
        self.state_leaves = [
            i for i, leaf in enumerate(spec.leaves) if isinstance(leaf, StateLayer)
        ]
        self.window_groups = [
            g for g, group in enumerate(self.spec.groups) if isinstance(group.layer, WindowLayer)
        ]
        self.full_groups = [g for g in range(len(self.spec.groups)) if g not in self.window_groups]
        self.strides = [blocks.stride for blocks in self.pool.groups]
        self.sync()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays themselves; what `pool_bytes` limits."""
        return sum(a.nbytes for a in self.arrays())

    @property
    def running_bytes(self) -> int:
        """Bytes that the states of running sequences are counted with."""
        return sum(sequence.state_bytes for sequence in self.sequences)

    def forget_steps(self) -> None:
        """Let the next step of each group be worked out anew."""
        self.steps: list[Any] = [None] * len(self.spec.groups)

    def sync(self) -> None:
        """Free arrays and make new ones until they match the pool's layout."""
        if self._layout == self.pool.layout_version:
            return
        # Steps hold slabs, whose memory would not be freed.
        self.forget_steps()
        wanted = {
            (g, i): n for g, blocks in enumerate(self.pool.groups) for i, n in blocks.slabs.items()
        }
        for key in [k for k, slab in self._slabs.items() if wanted.get(k) != slab.blocks]:
            del self._slabs[key]
        mx.clear_cache()
        for (g, i), blocks in wanted.items():
            if (g, i) not in self._slabs:
                self._slabs[g, i] = Slab(self.spec, self.spec.groups[g], blocks)
        self._layout = self.pool.layout_version

    def settle(self) -> None:
        """Give back empty slabs that the pool need not hold, and free their arrays."""
        self.pool.settle()
        self.sync()

    def evict_with(self, evict_for: Callable[[Mapping[int, int]], None]) -> None:
        """Let evict_for() call this method as long as its object lives."""
        self._evictor = weakref.WeakMethod(evict_for)

    @contextmanager
    def evicting_nothing(self) -> Iterator[None]:
        """Within this context evict_for() evicts nothing, so that writes take free blocks only."""
        evictor, self._evictor = self._evictor, None
        try:
            yield
        finally:
            self._evictor = evictor

    def evict_for(self, counts: Mapping[int, int]) -> None:
        """Evict what counts[group] more blocks need, if a prefix cache does that."""
        evict_for = None if self._evictor is None else self._evictor()
        if evict_for is not None:
            evict_for(counts)

    def check_dtype(self, keys: mx.array) -> None:
        """Raises ValueError for keys of the first layer, or what it has in place of them, that the
        pool cannot hold as they are.
        """
        if keys.dtype != self._first_dtype:
            raise ValueError(
                f"The model computes keys in {keys.dtype} and this pool holds {self._first_dtype}: "
                "the model's type was changed after the pool was opened. Open a pool for the model "
                "as it is now."
            )

    def locate(self, group: int, block: int) -> tuple[Slab, int]:
        """The slab of a block, and the place of the block's first token in it."""
        self.sync()
        index, position = divmod(block, self.strides[group])
        return self._slabs[group, index], position * BLOCK_TOKENS

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy one block in all layers of its group.

        Waits: a lazy copy, or a step in flight, would be a reader of the slab.
        """
        mx.synchronize()
        slab, start = self.locate(group, source)
        # mx.contiguous() would return the buffer of a small slab, which would be copied then.
        copies = [own_copy(array[:, :, start : start + BLOCK_TOKENS]) for array in slab.arrays()]
        mx.eval(copies)
        slab, start = self.locate(group, target)
        for array, copy in zip(slab.arrays(), copies, strict=True):
            array[:, :, start : start + BLOCK_TOKENS] = copy

    def evaluate_writes(self, place: Place) -> None:
        """Evaluate what was written into a layer that no attention may have read since, as the
        graph would grow with each step.
        """
        slabs = [slab for (group, _), slab in self._slabs.items() if group == place.group]
        mx.async_eval(  # type: ignore[no-untyped-call]
            [a for slab in slabs for rows in slab.layers[place.index] for a in arrays_of(rows)]
        )

    def arrays(self) -> list[mx.array]:
        return [array for slab in self._slabs.values() for array in slab.arrays()]


def _unread(spec: ModelCacheSpec, places: Mapping[int, Place]) -> set[int]:
    """The leaves in blocks next to another one of their layer, as an indexer's keys are, and those
    with further arrays: a step that attends to all tokens does not read them.
    """
    found, first = set[int](), 0
    for layer in spec.layers:
        after = first + len(list(leaves_of(layer)))
        own = [leaf for leaf in range(first, after) if leaf in places]
        found.update(own[1:], (leaf for leaf in own if places[leaf].layer.more))
        first = after
    return found


def state_share(spec: ModelCacheSpec, pool_bytes: int, config: PoolConfig) -> int:
    """Bytes for states: all where nothing lives in blocks, else a quarter, or more where that would
    not hold a few.

    Raises PoolExhaustedError if they would not hold those of one sequence.
    """
    own = spec.state_bytes(1)
    share = (
        max(pool_bytes // 4, min(pool_bytes // 2, config.states * own))
        if spec.groups
        else pool_bytes
    )
    if config.state_bytes is not None:
        share = min(config.state_bytes, pool_bytes)
    if own > share:
        hint = (
            f"The states of one sequence take {own} bytes, and {share} of {pool_bytes} are "
            f"theirs. {remedy(spec)}"
        )
        raise PoolExhaustedError(1, 0, 0, spec.model_id, hint)
    return share if own else 0
