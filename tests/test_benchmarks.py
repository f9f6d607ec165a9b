"""The replay of recorded sessions: its workload, what it is compared with, and the real cache between them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SESSIONS = (10, 11)
DIVISOR = 16


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("bench_sessions")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_recorded_prompts_begin_as_their_parents_do(bench: ModuleType) -> None:
    requests = list(bench.recorded(SESSIONS, DIVISOR))
    assert [request.at for request in requests] == sorted(request.at for request in requests)
    for i, request in enumerate(requests):
        earlier = [other.prompt.tolist() + other.output.tolist() for other in requests[:i]]
        shared = [next((n for n, (a, b) in enumerate(zip(request.prompt, o, strict=False)) if a != b), len(o)) for o in earlier]
        assert request.known == min(max(shared, default=0), len(request.prompt) - 1)


@pytest.mark.parametrize("kind", ["full", "window", "hybrid"])
def test_memory_for_all_reuses_what_is_known(bench: ModuleType, kind: str) -> None:
    blocks = bench.Blocks(bench.recorded(SESSIONS, DIVISOR))
    spec = bench.SPECS[kind]
    with bench.caches_of(spec, 4 * blocks.working_set * spec.bytes_per_block(spec.groups[0]), None) as caches:
        reused = bench.replay(bench.recorded(SESSIONS, DIVISOR), caches).reused
        caches.prefix.check()
    assert reused >= (0.99 if kind == "full" else 0.9) * blocks.known


def test_the_order_of_eviction_is_between_plain_lru_and_the_optimum(bench: ModuleType) -> None:
    blocks = bench.Blocks(bench.recorded(SESSIONS, DIVISOR))
    capacity, spec = blocks.working_set * 3 // 4, bench.SPECS["full"]
    with bench.caches_of(spec, capacity * spec.bytes_per_block(spec.groups[0]), None) as caches:
        ours = bench.replay(bench.recorded(SESSIONS, DIVISOR), caches).reused
    plain, optimum = bench.PlainLRU(blocks, capacity).reuse(), bench.Optimum(blocks, capacity).reuse()
    assert plain <= ours
    assert 0.9 * optimum <= ours <= blocks.known
