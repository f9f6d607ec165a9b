"""Layers with states that take padding in: each computes the members of a padded batch one after
another, without their padding, and everything else of the model computes the batch.

mlx-lm's own code of these layers does not leave padding out: it has no mask, or does not use the
lengths of the members. Batches without padding are computed as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_blockpool.hooks import AttentionAdapter, hookimpl

# The classes of such layers, in the modules of mlx_lm.models.
CLASSES = {
    "bailing_moe_linear.LinearAttention",
    "jamba.JambaMambaMixer",
    "mamba.MambaBlock",
    "nemotron_h.NemotronHMamba2Mixer",
    "olmo_hybrid.GatedDeltaNet",
    "recurrent_gemma.RecurrentBlock",
    "rwkv7.Rwkv7ChannelMixing",
    "rwkv7.Rwkv7TimeMixing",
}


@hookimpl
def attention_adapters() -> list[AttentionAdapter]:
    return [AttentionAdapter("states without padding", _applies, _attend)]


def _applies(cls: type) -> bool:
    package, _, module = cls.__module__.rpartition(".")
    return package == "mlx_lm.models" and f"{module}.{cls.__name__}" in CLASSES


class _Member(ArraysCache):  # type: ignore[misc]
    """The states of one member of a batch. advanced: how many tokens were counted."""

    def __init__(self, states: list[Any]) -> None:
        super().__init__(len(states))
        self.cache = states
        self.advanced = 0

    def advance(self, count: int) -> None:
        self.advanced = count


def _attend(module: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = [*args, *kwargs.values()]
    batch = next((each for each in given if isinstance(each, ArraysCache)), None)
    if batch is None or batch.lengths is None:
        return call(module, *args, **kwargs)
    length = next(each.shape[1] for each in given if isinstance(each, mx.array) and each.ndim > 1)
    counts = [min(count, length) for count in batch.lengths.tolist()]
    members, outputs = [], []
    for i, count in enumerate(counts):
        # A member without tokens computes its padding, and keeps its state.
        own = max(count, 1)
        member = _Member([None if state is None else state[i : i + 1] for state in batch.cache])
        outputs.append(
            call(
                module,
                *(_part(each, i, own, batch, member) for each in args),
                **{name: _part(each, i, own, batch, member) for name, each in kwargs.items()},
            )
        )
        members.append(member if count > 0 else None)
    _put(batch, members)
    if any(member is not None and member.advanced for member in members):
        batch.advance(length)
    return _joined(outputs, length)


def _part(value: Any, member: int, count: int, batch: Any, own: _Member) -> Any:
    """What the call for one member gets in place of an argument for the batch."""
    if value is batch:
        return own
    if not isinstance(value, mx.array) or not value.ndim:
        return value
    if value.dtype == mx.bool_:
        # The mask of the padding, which the member does not have.
        return None
    rows = value[member : member + 1]
    return rows[:, :count] if value.ndim > 1 else rows


def _put(batch: Any, members: Sequence[_Member | None]) -> None:
    """Give the batch the states of its members; those of None stay."""
    for j, before in enumerate(batch.cache):
        after = [None if member is None else member.cache[j] for member in members]
        found = next((state for state in after if state is not None), None)
        if found is None:
            continue
        rows = [
            mx.zeros_like(found) if before is None else before[i : i + 1]
            for i in range(len(members))
        ]
        batch[j] = mx.concatenate(
            [row if own is None else own for row, own in zip(rows, after, strict=True)]
        )


def _joined(outputs: Sequence[Any], length: int) -> Any:
    """The outputs of the members as one of the batch, padded on the right."""
    if isinstance(outputs[0], tuple):
        return tuple(_joined(parts, length) for parts in zip(*outputs, strict=True))
    return mx.concatenate(
        [
            mx.pad(out, [(0, 0), (0, length - out.shape[1]), *[(0, 0)] * (out.ndim - 2)])
            for out in outputs
        ]
    )
