"""Where a known prefix can be resumed, and the layer caches that resume it. Owned by the generation thread."""

from __future__ import annotations

from typing import Any

from ..errors import PoolExhaustedError
from ..kv.factory import pooled_caches
from ..kv.layer_caches import PooledLayer, PooledRotatingKVCache
from ..kv.parts import leaves_of, state_caches
from ..kv.sequence import SequenceBlocks
from ..kv.slabs import KVArena
from ..spec import WindowLayer, blocks_for
from .admission import Admission
from .trie import Checkpoint, Node, Pin, PrefixRef


def resumable(slabs: KVArena, match: PrefixRef, most: int) -> tuple[int, Checkpoint | None]:
    """How many of the matched tokens can be taken over, `most` at most, and from which checkpoint where one is needed."""
    known = max(0, min(match.tokens, most))
    if not slabs.spec.needs_checkpoints or not known:
        return known, None
    node, position = match.last_checkpoint(known)
    if position < known:
        later = _unwrapped(slabs, match.path[-1], known)
        if later is not None:
            return known, later
    return position, None if node is None else node.checkpoints[position]


def pin_of(slabs: KVArena, ref: PrefixRef) -> Pin:
    """A pin of all that the whole of a prefix is resumed from."""
    return Pin(ref, *(ref.last_checkpoint() if slabs.spec.needs_checkpoints else ()))


def _unwrapped(slabs: KVArena, node: Node, known: int) -> Checkpoint | None:
    """A later checkpoint whose rings still hold every token: it can be cut back to `known`. A state cannot."""
    if slabs.state_leaves:
        return None
    sizes = [g.layer.max_size for g in slabs.spec.groups if isinstance(g.layer, WindowLayer)]
    near = [node, *node.children[:64]]
    return next((c for n in near for c in n.checkpoints.values() if known <= c.position < min(sizes)), None)


def lay_out(room: Admission, match: PrefixRef, hit: int, checkpoint: Checkpoint | None, prompt: int, total: int) -> list[Any]:
    """Caches that hold `hit` tokens of a match, with room for `total`. Raises PoolExhaustedError and holds nothing then."""
    sequence = SequenceBlocks(room.slabs)
    try:
        _adopt(sequence, match, hit, checkpoint)
        room.take(sequence, hit, prompt, total)
    except PoolExhaustedError:
        sequence.release()
        raise
    return _caches(room.slabs, sequence, hit, checkpoint)


def lay_out_to_read(slabs: KVArena, match: PrefixRef, hit: int, checkpoint: Checkpoint | None) -> list[Any]:
    """Caches that hold `hit` tokens of a match and are not written to: they need no room."""
    sequence = SequenceBlocks(slabs)
    _adopt(sequence, match, hit, checkpoint)
    return _caches(slabs, sequence, hit, checkpoint)


def _caches(slabs: KVArena, sequence: SequenceBlocks, hit: int, checkpoint: Checkpoint | None) -> list[Any]:
    caches = pooled_caches(slabs, sequence)
    for cache in leaves_of(caches):
        if isinstance(cache, PooledLayer):
            cache.offset = hit
        if isinstance(cache, PooledRotatingKVCache) and checkpoint is not None:
            cache.set_ring_index(hit if hit < checkpoint.position else checkpoint.rings[cache.place.group][1])
    if checkpoint is not None:
        for leaf, cache in state_caches(caches).items():
            cache.cache = list(checkpoint.states[leaf])
    return caches


def _adopt(sequence: SequenceBlocks, match: PrefixRef, hit: int, checkpoint: Checkpoint | None) -> None:
    """Hold the blocks of the hit, before anything is evicted for the rest."""
    path = [*match.nodes, match.partial][: blocks_for(hit)]
    for index, group in enumerate(sequence.slabs.full_groups):
        sequence.pool.append_shared(sequence.tables[group], [node.blocks[index] for node in path if node is not None])
    if checkpoint is not None:
        for group, (ids, _) in checkpoint.rings.items():
            sequence.pool.append_shared(sequence.tables[group], ids[: blocks_for(hit)])
