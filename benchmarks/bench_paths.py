"""The decode path that is chosen by measured costs against the best of all paths, over 30 kinds of
batches.

Whole steps of a llama type with hidden size 512 and 4 layers. The costs are measured once for each
form of keys and values, as at load. Paths take turns and are compared round by round: a busy
machine is slower for some milliseconds, for all of them. On a CPU the times are processor times;
wall times are beside them.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
from measure import llama, options, report

from mlx_blockpool.config import KVBits
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.build import describe
from mlx_blockpool.kv.decode_policy import device
from mlx_blockpool.kv.measuring import Stopwatch
from mlx_blockpool.kv.path_measuring import measure_paths
from mlx_blockpool.kv.probe import probe
from mlx_blockpool.kv.prompt_cache import batch_of, make_prompt_cache
from mlx_blockpool.kv.scratch import pipelined
from mlx_blockpool.spec import blocks_for

FORMS = {
    "float32": (mx.float32, None),
    "bfloat16": (mx.bfloat16, None),
    "8 bits": (mx.float32, KVBits()),
}
OWN = {"short": [40] * 8, "long": [2000] * 8, "mixed": [60, 2000, 300, 1200, 100, 3000, 700, 150]}
PREFIXES, BATCHES = (0, 512, 4096), (2, 4, 8)
# A path that takes this many times as long as ragged is read once.
HOPELESS = 1.5
# On a GPU a step of these sizes is short.
STEPS = 2 if device() == "cpu" else 8


@dataclass(frozen=True)
class Case:
    """Members with own tokens, the first `sharing` of which begin with the same `prefix` tokens."""

    form: str
    contexts: str
    prefix: int
    batch: int
    sharing: int

    @property
    def name(self) -> str:
        prefix = f"{self.sharing} on a prefix of {self.prefix}" if self.prefix else "no prefix"
        return f"{self.form}, {self.batch} {self.contexts}, {prefix}"


def cases() -> list[Case]:
    """Each batch, kind of contexts and prefix with one of the forms, and for each form a batch
    of which half shares.
    """
    found = []
    for f, form in enumerate(FORMS):
        for p, prefix in enumerate(PREFIXES):
            for b, batch in enumerate(BATCHES):
                found.append(Case(form, list(OWN)[(f + p + b) % len(OWN)], prefix, batch, batch))
        found.append(Case(form, list(OWN)[f], 1024, 8, 4))
    return found


class Batch:
    """The members of one case in a pool."""

    def __init__(self, model: Any, arena: KVArena, case: Case, scale: int) -> None:
        self.model, self.arena = model, arena
        mx.random.seed(1)
        first = self._appended(make_prompt_cache(model, arena), case.prefix)
        sequences = []
        for i, own in enumerate(OWN[case.contexts][: case.batch]):
            caches = copy.deepcopy(first) if i < case.sharing else make_prompt_cache(model, arena)
            sequences.append(self._appended(caches, max(8, own // scale)))
        self.caches = batch_of(sequences)
        self.tokens = mx.array([[7]] * case.batch)

    def _appended(self, caches: list[Any], count: int) -> list[Any]:
        layer = self.arena.spec.groups[0].layer
        for cache in caches if count else []:
            cache.write(
                *mx.random.normal((2, 1, layer.kv_heads, count, layer.key_dim)).astype(
                    self.arena.dtype
                )
            )
        mx.eval(self.arena.arrays())
        return caches

    def seconds(self, path: str) -> tuple[float, float]:
        """Of one step on a path, by the clock of measuring and on the wall; the tokens that it
        appends are taken back.
        """
        self.arena.decode.path = path
        wall = time.perf_counter()
        with Stopwatch() as watch:
            pipelined(
                lambda: mx.argmax(self.model(self.tokens, cache=self.caches)[:, -1], axis=-1), STEPS
            )
        taken = watch.seconds / STEPS, (time.perf_counter() - wall) / STEPS
        for cache in self.caches:
            cache.trim(STEPS)
        return taken

    def path(self) -> str:
        """The path that a step takes by itself."""
        self.arena.decode.path_counts.clear()
        self.seconds("auto")
        (path,) = self.arena.decode.path_counts
        return path


def bench(args: Any, case: Case, model: Any, measured: KVArena, rounds: int, scale: int) -> float:
    """Report one case, decided by what was measured in another pool. Returns the share of the best
    path's speed that the chosen one has.
    """
    spec = describe(model).with_bits(FORMS[case.form][1])
    tokens = case.prefix + 256 * 2 * case.batch + sum(OWN[case.contexts][: case.batch])
    arena = KVArena(spec, 2 * blocks_for(tokens) * spec.bytes_per_block(spec.groups[0]))
    arena.capabilities, arena.decode = (
        measured.capabilities,
        replace(measured.decode, path_counts=Counter()),
    )
    batch = Batch(model, arena, case, scale)
    chosen = batch.path()
    paths = (
        ["ragged"] + ["shared"] * bool(case.prefix) + ["kernel"] * bool(arena.capabilities.kernels)
    )
    readings = {path: [batch.seconds(path)] for path in paths}
    paths = [path for path in paths if readings[path][0][0] < HOPELESS * readings["ragged"][0][0]]
    for _ in range(rounds):
        paths.reverse()
        for path in paths:
            readings[path].append(batch.seconds(path))
    relative = {}
    for path, found in readings.items():
        pairs = zip(found[1:] or found, readings["ragged"][1:], strict=False)
        relative[path] = statistics.median(own[0] / ragged[0] for own, ragged in pairs)
    share = min(relative.values()) / relative[chosen]
    report(
        args,
        "paths",
        case.name,
        chosen=chosen,
        share=round(share, 3),
        rounds=rounds,
        **{
            f"{path}_ms": round(1e3 * statistics.median(own for own, _ in found), 2)
            for path, found in readings.items()
        },
        **{
            f"{path}_wall_ms": round(1e3 * statistics.median(wall for _, wall in found), 2)
            for path, found in readings.items()
        },
        **{f"{path}_relative": round(figure, 3) for path, figure in relative.items()},
    )
    return share


def main() -> None:
    args = options(__doc__ or "")
    size, rounds, scale = ((64, 2, 4, 2), 2, 8) if args.quick else ((512, 4, 8, 4), 15, 1)
    shares = []
    for form, (dtype, bits) in FORMS.items():
        model = llama(*size, dtype)
        arena = KVArena(describe(model).with_bits(bits), 50_000_000)
        arena.capabilities = probe(model, arena)
        with Stopwatch() as watch:
            arena.decode.costs = measure_paths(model, arena)
        report(
            args, "paths", f"measuring, {form}", seconds=round(watch.seconds, 2),
            costs={str(group): asdict(costs) for group, costs in arena.decode.costs.items()},
            kernel=arena.capabilities.no_kernel.get(0, "trusted"),
        )  # fmt: skip
        own = [case for case in cases() if case.form == form]
        shares += [
            bench(args, case, model, arena, rounds, scale)
            for case in (own[:3] if args.quick else own)
        ]
    report(
        args,
        "paths",
        f"{len(shares)} kinds of batches",
        worst_share=round(min(shares), 3),
        median_share=round(statistics.median(shares), 3),
        right=sum(share >= 0.97 for share in shares),
    )


if __name__ == "__main__":
    main()
