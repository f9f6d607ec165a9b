"""The replay of recorded sessions: its workload, what it is compared with, and the real cache between them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from documents import ROOT, section

BENCHMARKS = ROOT / "benchmarks"
SESSIONS = (10, 11)
DIVISOR = 16


def imported(name: str, folder: Path) -> ModuleType:
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return imported("bench_sessions", BENCHMARKS)


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    return imported("benchmarks.__main__", ROOT)


def test_the_table_of_sessions_has_the_figures_of_the_results(runner: ModuleType) -> None:
    lines = section("benchmarks/README.md", "Recorded sessions").splitlines()
    kinds = ("| full", "| window", "| hybrid")
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith(kinds)]
    assert table == imported("benchmarks.plots", ROOT).session_table(runner.read(BENCHMARKS / "results/cpu-xeon-2core.jsonl"))
    assert {row[0] for row in table} == {"full", "window", "hybrid"}


def test_a_later_line_of_a_case_takes_the_place_of_an_earlier_one(runner: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "machine.jsonl"
    runner.keep([{"bench": "b", "case": "x", "ms": 1}, {"bench": "b", "case": "y", "ms": 2}], path)
    runner.keep([{"bench": "b", "case": "x", "ms": 3}], path)
    assert runner.read(path) == [{"bench": "b", "case": "x", "ms": 3}, {"bench": "b", "case": "y", "ms": 2}]


def test_an_unknown_benchmark_is_an_error(runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["--quick", "pools"])
    assert "There is no benchmark pools." in capsys.readouterr().err


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
