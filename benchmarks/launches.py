"""Counts the operations of a decode step that launch something on a GPU: of mlx-lm's padded batch,
and of ours on each path.

The graph of a step is exported before it is evaluated. What a GPU has as one operation and this CPU
as several is replaced by one that computes nothing: mlx's fast operations, and the kernel. Views
launch nothing, a concatenation copies each of its inputs, and mx.contiguous() counts though it
mostly finds nothing to copy.
"""

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_blockpool.config import EngineConfig, PoolConfig
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request
from mlx_blockpool.kv import step
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.tier.cache import TieredPrefixCache

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from models import make_model

MEMBERS = 8
# The path of each case of ours, and how many tokens the prompts have in common.
CASES = {
    "ragged": ("ragged", 0),
    "ragged, one prefix": ("ragged", 512),
    "shared, one prefix": ("shared", 512),
    "kernel": ("kernel", 0),
    "kernel, one prefix": ("kernel", 512),
}
VIEWS = frozenset(
    (
        *("AsStrided", "Broadcast", "BroadcastAxes", "ExpandDims", "Flatten"),
        *("Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View"),
    )
)


def launches(outputs: Sequence[mx.array]) -> Counter[str]:
    """The operations that launch something, of the graph of arrays that are not evaluated."""
    file = io.StringIO()
    mx.export_to_dot(file, *outputs)
    text = file.getvalue()
    inputs = Counter(re.findall(r'^"\w+" -> (\d+)$', text, re.M))
    found = Counter[str]()
    for node, label in re.findall(r'\{ (\d+) \[label ="([^"]*)"', text):
        if label not in VIEWS:
            found[label] += inputs[node] if label == "Concatenate" else 1
    return found


def one_operation(shapes: Callable[..., list[tuple[Any, mx.Dtype]]]) -> Callable[..., Any]:
    """An operation that computes nothing, on all arrays that it is given."""

    def run(*args: Any, **more: Any) -> Any:
        arrays = [each for each in (*args, *more.values()) if isinstance(each, mx.array)]
        outputs = [mx.zeros(shape, dtype) for shape, dtype in shapes(*args, **more)]
        mx.eval(outputs)
        found = mx.depends(outputs, arrays)
        return found if len(outputs) > 1 else found[0]

    return run


def launch(
    text: Any, inputs: Any, grid: Any, threads: Any, shapes: Any, dtypes: Any
) -> list[mx.array]:
    """In place of a kernel of the device."""
    found = one_operation(lambda *_: list(zip(shapes, dtypes, strict=True)))(*inputs)
    return found if len(shapes) > 1 else [found]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    like_first = one_operation(lambda x, *_, **__: [(x.shape, x.dtype)])
    attention = one_operation(lambda q, k, v, **_: [((*q.shape[:-1], v.shape[-1]), q.dtype)])
    fast = {"rms_norm": like_first, "layer_norm": like_first, "rope": like_first}
    with (
        patch.multiple(mx.fast, scaled_dot_product_attention=attention, **fast),
        patch.object(step, "device", lambda: "gpu"),
    ):
        yield


def prompts(members: int, common: int = 0) -> list[list[int]]:
    """Of mixed lengths, with this many tokens in common."""
    return [[7] * common + [i + 8] * (30 + 7 * i) for i in range(members)]


def stock_step(model: Any, members: int) -> Counter[str]:
    """Of mlx-lm's padded batch."""
    made = []
    for prompt in prompts(members):
        made.append(make_prompt_cache(model))
        model(mx.array([prompt]), cache=made[-1])
    caches = [type(own[0]).merge(list(own)) for own in zip(*made, strict=True)]
    inputs = mx.ones((members, 1), mx.int32)
    # The first step after the prompts takes blocks.
    mx.eval(model(inputs, cache=caches), [cache.state for cache in caches])
    with as_on_a_gpu():
        logits = model(inputs, cache=caches)
        return launches([logits, *(each for c in caches for each in (c.keys, c.values))])


def our_step(model: Any, members: int, path: str, common: int) -> Counter[str]:
    """Of a batch in a pool, on this path, where prompts have this many tokens in common."""
    # Blocks in one slab: a slab more has two writes more in each layer.
    arena = open_pool(model, 10_000_000, PoolConfig(preallocate=True))
    engine = BlockPoolBatchEngine(
        model, PooledCaches(TieredPrefixCache(arena)), EngineConfig(decode_share=0)
    )
    for prompt in prompts(members, common):
        engine.insert(Request(prompt, 1000))
    while len(engine.scheduler.batch) < members:
        engine.next()
    engine.next()
    arena.decode.path, arena.decode.streams, arena.decode.launch = path, 1, launch
    if path == "kernel":
        arena.capabilities = replace(
            arena.capabilities, kernels=frozenset(range(len(arena.spec.groups)))
        )
    arena.decode.path_counts.clear()
    mx.eval(arena.arrays())
    with as_on_a_gpu():
        logits = model(mx.ones((members, 1), mx.int32), cache=engine.scheduler.batch._layers)
        found = launches([logits, *arena.arrays()])
    assert set(arena.decode.path_counts) == {path}, dict(arena.decode.path_counts)
    return found


def per_layer(members: int = MEMBERS, few: int = 2, many: int = 4) -> dict[str, Counter[str]]:
    """The operations that one more layer of a tiny llama adds, of each kind of batch."""
    found: dict[str, list[Counter[str]]] = {name: [] for name in ("stock", *CASES)}
    for layers in (few, many):
        found["stock"].append(stock_step(make_model("llama", num_hidden_layers=layers), members))
        for name, (path, common) in CASES.items():
            model = make_model("llama", num_hidden_layers=layers)
            found[name].append(our_step(model, members, path, common))
    counts: dict[str, Counter[str]] = {}
    for name, (less, more) in found.items():
        counts[name] = Counter()
        for label in more:
            count, rest = divmod(more[label] - less[label], many - few)
            assert rest == 0, f"{label} of {name}: {more[label] - less[label]} in {many - few}"
            counts[name][label] = count
    return counts


def main() -> None:
    counts = per_layer()
    labels = sorted({label for found in counts.values() for label in found if found[label]})
    print(f"| launches of a layer, {MEMBERS} members |", " | ".join(counts), "|")
    print("|---" * (1 + len(counts)) + "|")
    for label in labels:
        name = {"Depends": "fast operations and kernels"}.get(label, label)
        name = "compiled" if name.startswith("Compiled") else name
        print(f"| {name} |", " | ".join(str(found[label]) for found in counts.values()), "|")
    print("| all |", " | ".join(str(found.total()) for found in counts.values()), "|")


if __name__ == "__main__":
    main()
