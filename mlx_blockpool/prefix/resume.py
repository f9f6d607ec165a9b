"""Where a cached prefix can be resumed, and the layer caches that resume it. Owned by the generation thread."""

from __future__ import annotations

from typing import Any

from ..errors import PoolExhaustedError
from ..kv.arena import KVArena
from ..kv.factory import pooled_caches
from ..kv.layer_caches import PooledLayer, PooledRotatingKVCache
from ..kv.parts import leaves_of, state_caches
from ..kv.sequence import SequenceBlocks
from ..spec import BLOCK_TOKENS, WindowLayer, blocks_for
from .admission import Admission
from .index import Pin
from .residency import Checkpoint
from .trie import Node, PrefixRef


def in_memory(ref: PrefixRef) -> PrefixRef:
    """As much of a prefix as has its blocks in the pool, without a gap from the first token on."""
    count = next((index for index, node in enumerate(ref.path) if not node.residency.in_memory), len(ref.path))
    return ref if count == len(ref.path) else ref.first(count * BLOCK_TOKENS)


def last_checkpoint(ref: PrefixRef, at_most: int) -> tuple[Node | None, int]:
    """The position of the last checkpoint in the first `at_most` tokens, and the node that has it; (None, 0): none."""
    for on_path in reversed(ref.path):
        near = ((node, min(at_most, alike)) for node, alike in on_path.near_siblings())
        placed = [(node, position) for node, limit in near for position in node.residency.checkpoints if position <= limit]
        if placed:
            return max(placed, key=lambda found: found[1])
    return None, 0


def resumable(arena: KVArena, match: PrefixRef, most: int) -> tuple[int, Checkpoint | None]:
    """How many of the matched tokens can be taken over, `most` at most, and from which checkpoint where one is needed."""
    count = max(0, min(match.tokens, most))
    if not arena.spec.needs_checkpoints or not count:
        return count, None
    node, position = last_checkpoint(match, count)
    if position < count:
        later = _unwrapped(arena, match.path[-1], count)
        if later is not None:
            return count, later
    return position, None if node is None else node.residency.checkpoints[position]


def pin_of(arena: KVArena, ref: PrefixRef) -> Pin:
    """A pin of all that the whole of a prefix is resumed from."""
    return Pin(ref, *(last_checkpoint(ref, ref.tokens) if arena.spec.needs_checkpoints else ()))


def _unwrapped(arena: KVArena, node: Node, count: int) -> Checkpoint | None:
    """A later checkpoint whose rings still hold every token: it can be cut back to `count`. A state cannot."""
    if arena.state_leaves:
        return None
    sizes = [g.layer.max_size for g in arena.spec.groups if isinstance(g.layer, WindowLayer)]
    near = [node, *node.children[:64]]
    return next((c for n in near for c in n.residency.checkpoints.values() if count <= c.position < min(sizes)), None)


def lay_out(
    admission: Admission, match: PrefixRef, hit: int, checkpoint: Checkpoint | None, prompt: int, total: int
) -> list[Any]:
    """Caches that hold `hit` tokens of a match, with room for `total`. Raises PoolExhaustedError and holds nothing then."""
    sequence = SequenceBlocks(admission.arena)
    try:
        _append_shared(sequence, match, hit, checkpoint)
        admission.admit(sequence, hit, prompt, total)
    except PoolExhaustedError:
        sequence.release()
        raise
    return _caches(admission.arena, sequence, hit, checkpoint)


def lay_out_to_read(arena: KVArena, match: PrefixRef, hit: int, checkpoint: Checkpoint | None) -> list[Any]:
    """Caches that hold `hit` tokens of a match and are not written to: they need no room."""
    sequence = SequenceBlocks(arena)
    _append_shared(sequence, match, hit, checkpoint)
    return _caches(arena, sequence, hit, checkpoint)


def _caches(arena: KVArena, sequence: SequenceBlocks, hit: int, checkpoint: Checkpoint | None) -> list[Any]:
    caches = pooled_caches(arena, sequence)
    for cache in leaves_of(caches):
        if isinstance(cache, PooledLayer):
            cache.offset = hit
        if isinstance(cache, PooledRotatingKVCache) and checkpoint is not None:
            cache.set_ring_index(hit if hit < checkpoint.position else checkpoint.rings[cache.place.group][1])
    if checkpoint is not None:
        for leaf, cache in state_caches(caches).items():
            cache.cache = list(checkpoint.states[leaf])
    return caches


def _append_shared(sequence: SequenceBlocks, match: PrefixRef, hit: int, checkpoint: Checkpoint | None) -> None:
    """Hold the blocks of the hit, before anything is evicted for the rest."""
    path = match.path[: blocks_for(hit)]
    for index, group in enumerate(sequence.arena.full_groups):
        sequence.pool.append_shared(sequence.tables[group], [node.residency.blocks[index] for node in path])
    if checkpoint is not None:
        for group, (ids, _) in checkpoint.rings.items():
            sequence.pool.append_shared(sequence.tables[group], ids[: blocks_for(hit)])
