"""What one rank of a group has of a model: a part of each layer, or a stage of a pipeline, which is
some of its layers.

All ranks count bytes alike, and all of them attach their parts or none does, so that their pools
have equally many blocks and evict the same ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..errors import BlockpoolError, GroupError
from ..plugins import versions
from ..ranks.group import Ranks
from ..spec import Counted, ModelCacheSpec


def is_stage(model: Any) -> bool:
    """Return whether a model is a stage of a pipeline: it receives from other ranks, and sends
    to them.
    """
    return _stage(model) is not None


def need_whole(model: Any) -> None:
    """Raises GroupError for one rank's part of a model, which needs a pool that is like those of
    the other ranks.
    """
    groups = [getattr(module, "group", None) for _, module in model.named_modules()]
    if is_stage(model) or any(
        isinstance(group, mx.distributed.Group) and group.size() > 1 for group in groups
    ):
        raise GroupError(
            "This is one rank's part of a model. Open its pool with open_pool(model, "
            "group=group), on every rank."
        )


@contextmanager
def without_collectives(model: Any) -> Iterator[None]:
    """While this lasts, a stage computes its layers between the model's embedding and head without
    the other ranks.

    So a rank finds out what its layers can do, and what that raises leaves no other rank waiting.
    Any other model computes as it always does.
    """
    stage = _stage(model)
    if stage is None:
        yield
        return
    rank, size = stage.pipeline_rank, stage.pipeline_size
    stage.pipeline_rank, stage.pipeline_size = 0, 1
    try:
        yield
    finally:
        stage.pipeline_rank, stage.pipeline_size = rank, size


def placeholder_keys() -> mx.array:
    """What a stage reads as the keys of its last cache.

    The keys themselves would be views of slabs, or copies.
    """
    return mx.zeros(1)


def send_now(keys: mx.array) -> None:
    """What a stage does to keys to order what it sends: mx.depends(keys, sent). Send now.

    mlx-lm's prefill evaluates caches alone; in blocks nothing would be left that sends, and the
    next rank would wait for ever.
    """
    mx.async_eval(keys)  # type: ignore[no-untyped-call]


def on_all(ranks: Ranks, holds: bool) -> bool:
    """Return whether it holds on every rank. All ranks call this, or none."""
    return ranks.least([int(holds)]) == [1]


def agreed(describe: Callable[[], ModelCacheSpec], ranks: Ranks) -> ModelCacheSpec:
    """What `describe` returns of this rank's part, with blocks and states counted alike by all
    ranks. All call this, or none.

    Alone it raises what `describe` raises. In a group it raises GroupError on all ranks if one part
    cannot be described, if they have unlike kinds of layers, or other plugins: probes would reach
    other collectives.
    """
    if ranks.decides:
        return describe()
    spec, installed, problem = (
        None,
        "",
        "Another rank cannot describe its part of the model; its log says why.",
    )
    try:
        installed = ", ".join(versions()) or "none"
        spec = describe()
    except (BlockpoolError, ValueError) as error:
        problem = str(error)
    digest = 0 if spec is None else 1 + zlib.crc32(spec.kinds().encode())
    plugins = zlib.crc32(installed.encode())
    least, negated, *both = ranks.least([digest, -digest, plugins, -plugins])
    if spec is None or least == 0:
        raise GroupError(
            f"Several ranks serve a model only from a pool; mlx_lm.server serves others. {problem}"
        )
    if both[0] != -both[1]:
        raise GroupError(
            f"The ranks have different plugins; those of rank {ranks.rank}: {installed}. Install "
            "the same ones in the same versions on all machines."
        )
    if least != -negated:
        own = ", ".join(group.name for group in spec.groups) or "states only"
        raise GroupError(
            f"The ranks have unlike kinds of layers of {spec.model_id}; rank {ranks.rank} has "
            f"{own}. Start fewer ranks, so that "
            "each has layers of all kinds, or leave out --pipeline."
        )
    groups = sorted(spec.groups, key=lambda group: group.kind)
    sizes = [*map(spec.bytes_per_block, groups), spec.fixed_bytes_per_agent()]
    *blocks, state = (-size for size in ranks.least([-size for size in sizes]))
    return replace(
        spec, counted=Counted(tuple(group.kind for group in groups), tuple(blocks), state)
    )


def _stage(model: Any) -> Any:
    """The module of a stage that sends and receives, or None."""
    inner = getattr(model, "model", None)
    return inner if getattr(inner, "pipeline_size", 1) > 1 else None
