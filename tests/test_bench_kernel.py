"""bench_kernel in sizes that take no time: what it compares, what it counts, and that it leaves
a batch as it was.
"""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from documents import ROOT
from kernel.emulation import why_not
from kernel.trusted import trust

from mlx_blockpool.kv import decode_policy
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.attach import bind
from mlx_blockpool.kv.build import describe
from mlx_blockpool.kv.capabilities import RAGGED, Capabilities
from mlx_blockpool.kv.cost_model import PathCosts

OPTIONS = argparse.Namespace(quick=True, out=None)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bench_kernel")


@pytest.fixture
def size(bench: ModuleType) -> Any:
    return replace(
        bench.QUICK, hidden=64, heads=4, kv_heads=2, divisor=1, steps=2, array_bytes=1 << 12
    )


def offsets(system: Any) -> list[Any]:
    return [cache.offset.tolist() for cache in system.batch]


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_batch_is_as_it_was_after_each_measurement(
    bench: ModuleType, size: Any, pooled: bool, rows: int
) -> None:
    system = bench.System(pooled, bench.Case("", (20, 300), rows=rows), size)
    assert offsets(system) == [[20, 300]] * 2
    for run in (system.attention_seconds, system.step_seconds, system.logits):
        run()
        assert offsets(system) == [[20, 300]] * 2


def test_keys_of_a_prefix_are_read_once_and_those_of_a_window_as_it_holds_them(
    bench: ModuleType, size: Any
) -> None:
    # 2 kv heads of 64 keys and 64 values: 512 bytes of a token in 16 bits, 272 in 8 bits with a
    # scale and a bias for each head.
    own, prefix = (300, 20), 512
    for changes, per_layer in (
        ({}, [(512 + 320) * 512] * 2),
        ({"bits": 8}, [(512 + 320) * 272] * 2),
        ({"window": 600}, [(600 + 532) * 512, (512 + 320) * 512]),
    ):
        system = bench.System(True, bench.Case("", own, prefix, **changes), size)
        assert bench.bytes_read(system) == sum(per_layer) / 2


def test_a_step_is_compared_with_that_of_mlx_lm(
    bench: ModuleType, size: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = bench.Case("", (30, 12), prefix=256)
    ours, stock = bench.System(True, case, size), bench.System(False, case, size)
    bench.check(ours, stock, ["ragged", "shared"])
    other = stock.logits() * 1.2
    monkeypatch.setattr(stock, "logits", lambda: other)
    with pytest.raises(AssertionError, match="ragged: other logits than mlx-lm's"):
        bench.check(ours, stock, ["ragged"])


def test_a_path_that_did_not_run_is_an_error(bench: ModuleType, size: Any) -> None:
    system = bench.System(True, bench.Case("", (30, 12)), size)
    with pytest.raises(AssertionError, match="another path ran"):
        system.on("shared", system.step_seconds)
    assert system.on("ragged", system.step_seconds) > 0


def test_the_bandwidth_is_the_faster_of_a_sum_and_a_copy(bench: ModuleType) -> None:
    bandwidth = bench.Bandwidth(4000)
    assert all(run() > 0 for run in bandwidth.runs().values())
    assert bandwidth.of({"sum": 1.0, "copy": 1.0}) == 8000
    assert bandwidth.of({"sum": 1.0, "copy": 4.0}) == 4000


def test_what_is_built_is_not_measured(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def clock() -> float:
        happened.append("clock")
        return float(len(happened))

    def build() -> mx.array:
        happened.append("built")
        return mx.zeros(8)

    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(bench.mx, "eval", lambda *_: happened.append("evaluated"))
    assert bench.evaluation_seconds(build) == 2.0
    assert happened == ["built", "clock", "evaluated", "clock"]


@pytest.mark.parametrize(
    ("number", "fields"),
    [
        (0, {"ragged", "stock"}),
        (2, {"ragged", "shared", "stock"}),
        (3, {"ragged", "stock"}),
        (5, {"ragged"}),
        (7, {"ragged", "stock"}),
    ],
)
def test_lines_without_a_kernel(
    bench: ModuleType, size: Any, capsys: pytest.CaptureFixture[str], number: int, fields: set[str]
) -> None:
    bench.bench(OPTIONS, bench.CASES[number], replace(size, divisor=16, steps=1))
    attention, step = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert step["case"] == f"step, {bench.CASES[number].name}, divided by 16, without the kernel"
    for line in (attention, step):
        assert {name.removesuffix("_ms") for name in line if name.endswith("_ms")} == fields
        assert {
            name.removeprefix("ratio_") for name in line if name.startswith("ratio_")
        } == fields - {"ragged"}
    assert {name.removesuffix("_share") for name in attention if name.endswith("_share")} == fields
    assert "needed" not in attention


def test_the_figures_that_are_asked_for_are_among_those_of_a_case(bench: ModuleType) -> None:
    needed = {case.name: dict(case.needed) for case in bench.CASES if case.needed}
    assert needed == {
        "8 of 4,096 tokens": {"kernel_share": 0.7},
        "8 of 300 to 4,000 tokens": {"ratio_ragged": 1.5, "ratio_stock": 2.0},
    }


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(
    "changes",
    [
        {"needed": (("kernel_share", 0.7), ("ratio_stock", 2.0))},
        *(
            pytest.param(c, marks=pytest.mark.thorough)
            for c in ({"rows": 3}, {"window": 40}, {"bits": 8, "prefix": 256})
        ),
    ],
)
def test_lines_with_the_kernel(
    bench: ModuleType,
    size: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: Any,
) -> None:
    def probe(model: Any, arena: KVArena) -> Capabilities:
        bind(model)
        arena.capabilities = RAGGED
        return trust(arena, None).capabilities

    monkeypatch.setattr(bench, "probe", probe)
    case = bench.Case("two", (30, 50), **changes)
    assert bench.bench(OPTIONS, case, replace(size, steps=1)) is None
    attention, step = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [line["case"] for line in (attention, step)] == ["attention, two", "step, two"]
    paths = (
        {"kernel", "ragged"}
        | ({"shared"} if case.prefix else set())
        | (set() if case.bits else {"stock"})
    )
    for line in (attention, step):
        assert {name.removesuffix("_ms") for name in line if name.endswith("_ms")} == paths
        assert {
            name.removeprefix("ratio_") for name in line if name.startswith("ratio_")
        } == paths - {"kernel"}
    assert attention.get("needed") == (dict(case.needed) or None)
    assert set(attention.get("needed", {})) <= attention.keys()


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_kernel_is_one_of_the_paths_of_the_grid(
    bench: ModuleType,
    size: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = importlib.import_module("bench_paths")
    monkeypatch.setattr(grid, "STEPS", 1)
    model = bench.llama(size.hidden, size.layers, size.heads, size.kv_heads)
    bind(model)
    measured = KVArena(describe(model), 10_000_000)
    measured.capabilities = RAGGED
    trust(measured, None)
    # Costs with which the kernel is free.
    measured.decode.costs = {0: PathCosts(1.0, 1.0, (), kernel=(0.0,) * 4)}
    for prefix, paths in ((0, {"ragged", "kernel"}), (512, {"ragged", "kernel", "shared"})):
        assert (
            grid.bench(OPTIONS, grid.Case("float32", "short", prefix, 2, 2), model, measured, 1, 4)
            <= 1.0
        )
        line = json.loads(capsys.readouterr().out)
        assert line["chosen"] == "kernel"
        assert {
            name.removesuffix("_wall_ms") for name in line if name.endswith("_wall_ms")
        } == paths


def test_a_kernel_that_is_not_trusted_is_not_measured(
    bench: ModuleType,
    size: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*_: Any) -> list[mx.array]:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(decode_policy, "device_launcher", lambda: broken)
    why = bench.bench(OPTIONS, replace(bench.CASES[0], own=(30, 50)), replace(size, steps=1))
    assert why == "it failed: RuntimeError: no compiler"
    attention = json.loads(capsys.readouterr().out.splitlines()[0])
    assert attention["case"].endswith("without the kernel")
    assert "kernel_ms" not in attention
    assert "needed" not in attention
