"""Capabilities: what a model can do with the caches of a pool, as probe() has found.

Knows no model and no arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Capabilities:
    """What one model can do with one pool on this device.

    ragged:       whether several sequences run in one forward, in which attention reads the blocks
                  of each in place; otherwise they run one at a time.
    is_attached:  whether the model's attention attends through pooled caches, which quantised
                  blocks need.
    by_member:    whether some attention computes the members of a batch one after another.
    differs:      what the ways that were tried before this one got wrong, in words.
    verifies:     how several next tokens of a sequence are computed in one forward: as rows of a
                  batch; padded, next to other sequences, as prompts are; or of one sequence alone.
                  None if that is not possible.
    mixes:        whether chunks of prompts are computed in one forward with the next tokens of a
                  ragged batch, as further rows.
    pads_states:  whether the states of a model leave out padding, so that chunks of several lengths
                  are computed together; otherwise only those of one length are.
    is_stage:     whether the model is a stage of a pipeline, which assigns keys that it has read to
                  order what it sends.
    synchronous:  whether a step must end before the next one writes, as mlx would copy slabs
                  otherwise.
    kernels:      the layer groups whose kernel was tried on this device, and was right.
    no_kernel:    why the other groups have no kernel, in words.
    sample:       some tokens and their logits after each of the prompts by which a later load
                  confirms all this; empty if nothing was tried.
    """

    ragged: bool = False
    is_attached: bool = False
    by_member: bool = False
    differs: tuple[str, ...] = ()
    verifies: Literal["rows", "padded", "alone"] | None = None
    mixes: bool = False
    pads_states: bool = False
    is_stage: bool = False
    synchronous: bool = False
    kernels: frozenset[int] = frozenset()
    no_kernel: Mapping[int, str] = field(default_factory=dict)
    sample: tuple[tuple[tuple[int, float], ...], ...] = field(default=(), compare=False)

    @staticmethod
    def from_json(found: Any) -> Capabilities:
        """What to_json() has returned. Raises AttributeError, KeyError, TypeError or ValueError
        for what it has not; `sample` may be anything.
        """
        made = Capabilities(
            **{
                **found,
                "differs": tuple(found["differs"]),
                "kernels": frozenset(map(int, found["kernels"])),
                "no_kernel": {int(group): why for group, why in found["no_kernel"].items()},
                "sample": tuple(found["sample"]),
            }
        )
        defaults = vars(Capabilities())
        switches = {name: value for name, value in vars(made).items() if defaults[name] is False}
        if not all(isinstance(value, bool) for value in switches.values()):
            raise ValueError(f"neither true nor false: {switches}")
        if made.verifies not in (None, "rows", "padded", "alone"):
            raise ValueError(f"verifies: {made.verifies}")
        return made

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kernels": sorted(self.kernels)}


# Of a model that tests and benchmarks attach without a probe.
RAGGED = Capabilities(ragged=True, is_attached=True)
