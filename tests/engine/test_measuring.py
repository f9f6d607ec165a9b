"""The cost curve and the decode paths of a loaded model are measured once for each device, model
and version, and remembered.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engine.engines import new_model
from mlx.utils import tree_map
from store.measured import measured_in

from mlx_blockpool.config import EngineConfig, KVBits, PoolConfig
from mlx_blockpool.drafts.curve import CostCurve
from mlx_blockpool.engine import measuring
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.measuring import measured_on
from mlx_blockpool.engine.opening import wrap
from mlx_blockpool.errors import MeasuringStoppedError, PoolExhaustedError, UnmeasurableError
from mlx_blockpool.kv import measuring as kv_measuring
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.build import describe, open_pool, open_served
from mlx_blockpool.kv.cost_model import PathCosts
from mlx_blockpool.spec import BLOCK_TOKENS
from mlx_blockpool.store.measurements import MeasuredOn, Measurements

AUTO = EngineConfig(measures=True, drafts="auto")
CURVE = CostCurve.from_points({1: 0.5, 2: 0.75}, {1: 0.25})
COSTS = PathCosts(1e-4, 1e-6, (1e-4, 1e-4, 0.0, 1e-6, 1e-6, 0.0), kernel=(1e-5, 1e-5, 1e-7, 1e-8))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that are measured, each with the same result."""
    found: list[Any] = []

    def measure(model: Any, arena: KVArena, **_: Any) -> CostCurve:
        found.append(model)
        return CURVE

    monkeypatch.setattr(measuring, "measure_curve", measure)
    return found


def opened(name: str = "llama", **config: Any) -> tuple[Any, KVArena]:
    model = new_model(name)
    return model, open_pool(model, 20_000_000, PoolConfig(**config))


def curve_of(
    model: Any, arena: KVArena, measurements: Measurements, name: str | None = None
) -> CostCurve | None:
    """The curve of an engine that measures nothing else."""
    arena.decode.path = "ragged"
    return measuring.measured(model, wrap(arena), AUTO, measurements, name).curve


def paths_of(model: Any, arena: KVArena, measurements: Measurements) -> dict[int, PathCosts]:
    """The costs of decode paths of a new engine that measures nothing else."""
    arena.decode.costs = {}
    measuring.measured(model, wrap(arena), replace(AUTO, drafts="off"), measurements)
    return arena.decode.costs


def test_a_model_is_measured_once(tmp_path: Path, measured: list[Any]) -> None:
    model, arena = opened()
    assert curve_of(model, arena, Measurements(tmp_path), name="tiny") == CURVE
    again, its_arena = opened()
    assert curve_of(again, its_arena, Measurements(tmp_path)) == CURVE
    assert measured == [model]
    assert [found.model for found in measured_in(tmp_path)] == ["tiny"]


@pytest.mark.parametrize(
    "figures",
    [
        None,
        {},
        {"rows": [], "pipelined": []},
        {"rows": [[1, -1.0]], "pipelined": []},
        {"rows": [[8, 1.0], [1, 2.0], [32, 3.0]]},
        {"rows": [[1, 1.0], [1, 2.0]]},
        {"rows": [[1, 1.0]], "pipelined": [[2, 1.0], [1, 2.0]]},
        {"rows": [[1, 1.0], [10**400, 2.0]]},
        {"rows": [[1, 1e300]]},
        {"rows": [[1, 5e-324], [2, 1.0]]},
        {"rows": [[1, 1.0]], "token": {"row": 1e300}},
    ],
)
def test_figures_that_are_no_curve_are_measured_again(
    tmp_path: Path, measured: list[Any], figures: Any
) -> None:
    model, arena = opened()
    Measurements(tmp_path).save(measured_on(model, arena), "tiny", {"curve": figures, "other": 3})
    assert curve_of(model, arena, Measurements(tmp_path)) == CURVE
    assert len(measured) == 1
    assert Measurements(tmp_path).figures(measured_on(model, arena)) == {
        "curve": json.loads(json.dumps(CURVE.to_json())),
        "other": 3,
    }


def test_a_model_that_verifies_nothing_has_no_curve(tmp_path: Path, measured: list[Any]) -> None:
    model, arena = opened()
    arena.capabilities = replace(arena.capabilities, verifies=None)
    assert curve_of(model, arena, Measurements(tmp_path)) is None
    assert measured == []


def test_figures_depend_on_the_device_the_shapes_the_types_and_the_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on(name: str, **config: Any) -> MeasuredOn:
        return measured_on(*opened(name, **config))

    plain = on("llama")
    assert plain == on("llama")
    assert on("llama K8V8", bits=None).weights != plain.weights
    assert on("llama K8V8", bits=KVBits(8, 8, 64)).spec != on("llama K8V8").spec
    model, arena = opened()
    model.update(tree_map(lambda array: array.astype(mx.float16), model.parameters()))
    assert measured_on(model, arena).weights != plain.weights
    monkeypatch.setattr(measuring.os, "cpu_count", lambda: 99)
    assert measured_on(model, arena).device != plain.device


@pytest.fixture
def measured_paths(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pools whose decode paths are measured, each with the same result."""
    found: list[Any] = []

    def measure(model: Any, arena: KVArena, **_: Any) -> dict[int, PathCosts]:
        found.append(arena)
        return {0: COSTS}

    monkeypatch.setattr(measuring, "measure_paths", measure)
    return found


def test_decode_paths_are_measured_once(tmp_path: Path, measured_paths: list[Any]) -> None:
    model, arena = opened()
    assert paths_of(model, arena, Measurements(tmp_path)) == {0: COSTS}
    assert paths_of(*opened(), Measurements(tmp_path)) == {0: COSTS}
    assert measured_paths == [arena]


def test_decode_paths_that_could_not_be_measured_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [{}, {0: COSTS}]
    monkeypatch.setattr(measuring, "measure_paths", lambda *_, **__: found.pop(0))
    assert paths_of(*opened(), Measurements(tmp_path)) == {}
    assert paths_of(*opened(), Measurements(tmp_path)) == {0: COSTS}


def test_costs_without_those_of_a_kernel_that_is_trusted_are_measured_again(
    tmp_path: Path, measured_paths: list[Any]
) -> None:
    model, arena = opened()
    Measurements(tmp_path).save(
        measured_on(model, arena), "tiny", {"paths": {"0": asdict(replace(COSTS, kernel=()))}}
    )
    paths_of(model, arena, Measurements(tmp_path))
    assert measured_paths == [], "no kernel is trusted"
    arena.capabilities = replace(arena.capabilities, kernels=frozenset([0]))
    assert (
        paths_of(model, arena, Measurements(tmp_path))
        == paths_of(model, arena, Measurements(tmp_path))
        == {0: COSTS}
    )
    assert measured_paths == [arena]


ODD: list[dict[str, Any]] = [
    {"shared": [1e-4] * 2},
    {"kernel": [1e-4]},
    {"rows": [0.0] * 4},
    {"kernel_rows": [0.0] * 3},
    {"token": 1e300},
]
OLDER = {name: costs for name, costs in asdict(COSTS).items() if name != "shared"}


@pytest.mark.parametrize(
    "figures",
    [
        None,
        [],
        {"0": {}},
        {"0": OLDER},
        {"x": asdict(COSTS)},
        {"0": {**asdict(COSTS), "read": -1.0}},
        *({"0": asdict(COSTS) | odd} for odd in ODD),
    ],
)
def test_figures_that_are_no_costs_are_measured_again(
    tmp_path: Path, measured_paths: list[Any], figures: Any
) -> None:
    model, arena = opened()
    Measurements(tmp_path).save(
        measured_on(model, arena), "tiny", {"paths": figures, "curve": CURVE.to_json()}
    )
    assert paths_of(model, arena, Measurements(tmp_path)) == {0: COSTS}
    assert len(measured_paths) == 1
    assert set(Measurements(tmp_path).figures(measured_on(model, arena))) == {"paths", "curve"}


@pytest.mark.parametrize(
    ("measures", "drafts", "path", "found"),
    [
        (False, "auto", "auto", (None, {})),
        (True, "off", "auto", (None, {0: COSTS})),
        (True, 4, "auto", (None, {0: COSTS})),
        (True, "auto", "auto", (CURVE, {0: COSTS})),
        (True, "auto", "ragged", (CURVE, {})),
    ],
)
@pytest.mark.usefixtures("measured", "measured_paths")
def test_an_engine_measures_what_it_decides_by(
    measures: bool, drafts: Any, path: str, found: Any
) -> None:
    model, arena = opened(decode_path=path)
    caches = measuring.measured(model, wrap(arena), EngineConfig(measures=measures, drafts=drafts))
    assert (caches.curve, arena.decode.costs) == found


def is_needed() -> None:
    raise MeasuringStoppedError


def test_where_the_thread_is_needed_nothing_is_measured_until_another_call(
    tmp_path: Path, measured: list[Any], measured_paths: list[Any]
) -> None:
    model, arena = opened()
    caches = wrap(arena)
    measuring.measured(model, caches, AUTO, Measurements(tmp_path), interrupt=is_needed)
    assert (caches.curve, arena.decode.costs, caches.is_unmeasured) == (None, {}, True)
    assert (measured, measured_paths, measured_in(tmp_path)) == ([], [], [])
    measuring.measured(model, caches, AUTO, Measurements(tmp_path))
    assert (caches.curve, arena.decode.costs, caches.is_unmeasured) == (CURVE, {0: COSTS}, False)
    assert set(Measurements(tmp_path).figures(measured_on(model, arena))) == {"curve", "paths"}


@pytest.mark.parametrize("remembered", ["curve", "paths"])
def test_what_is_remembered_is_taken_where_the_rest_is_not_measured(
    remembered: str, tmp_path: Path, measured: list[Any], measured_paths: list[Any]
) -> None:
    model, arena = opened()
    figures = {"curve": CURVE.to_json(), "paths": {"0": asdict(COSTS)}}
    Measurements(tmp_path).save(
        measured_on(model, arena), "tiny", {remembered: figures[remembered]}
    )
    caches = wrap(arena)
    measuring.measured(model, caches, AUTO, Measurements(tmp_path), interrupt=is_needed)
    found = {"curve": caches.curve == CURVE, "paths": arena.decode.costs == {0: COSTS}}
    assert [name for name, is_found in found.items() if is_found] == [remembered]
    assert caches.is_unmeasured
    measuring.measured(model, caches, AUTO, Measurements(tmp_path))
    assert (len(measured), len(measured_paths)) == ((0, 1) if remembered == "curve" else (1, 0))


def test_paths_are_measured_first_so_that_the_forwards_of_the_curve_take_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: list[dict[int, PathCosts]] = []
    monkeypatch.setattr(
        measuring,
        "measure_curve",
        lambda _, arena, **__: known.append(dict(arena.decode.costs)) or CURVE,
    )
    monkeypatch.setattr(measuring, "measure_paths", lambda *_, **__: {0: COSTS})
    model, arena = opened()
    measuring.measured(model, wrap(arena), AUTO)
    assert known == [{0: COSTS}]


def test_a_curve_without_room_for_all_of_it_is_used_and_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = replace(CURVE, is_whole=False)
    monkeypatch.setattr(measuring, "measure_curve", lambda *_, **__: part)
    assert curve_of(*opened(), Measurements(tmp_path)) is part
    assert measured_in(tmp_path) == []


BLOCKS = 6


def open_small(cached: int) -> tuple[Any, PooledCaches]:
    """A model and its caches in a pool of BLOCKS, of which so many are cached and the others
    free.
    """
    model = new_model("llama")
    spec = describe(model)
    caches = wrap(
        open_served(model, spec, BLOCKS * spec.bytes_per_block(spec.groups[0]), PoolConfig())
    )
    tokens = [1 + i % 100 for i in range(BLOCK_TOKENS * cached)]
    if tokens:
        acquired = caches.prefix.acquire(tokens, 0)
        mx.eval(model(mx.array([tokens]), cache=acquired.caches))
        caches.prefix.release(tokens, acquired.caches)
    return model, caches


def counts_of(caches: PooledCaches) -> tuple[int, int, int]:
    (counts,) = caches.prefix.pool.settle()
    return counts.held, counts.evictable, counts.evicted


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_measuring, "ROUNDS", 1)
    monkeypatch.setattr(kv_measuring, "ROWS", (1, 2))


@pytest.mark.usefixtures("few_cases", "measured_paths")
def test_a_pool_whose_blocks_are_all_cached_keeps_them_and_is_measured_once_some_are_free(
    tmp_path: Path,
) -> None:
    model, caches = open_small(cached=BLOCKS)
    for _ in range(2):
        measuring.measured(model, caches, AUTO, Measurements(tmp_path))
        assert (caches.curve, caches.prefix.arena.decode.costs, caches.is_unmeasured) == (
            None,
            {},
            True,
        )
        assert counts_of(caches) == (0, BLOCKS, 0)
        assert not caches.unmeasurable
    caches.prefix.clear()
    measuring.measured(model, caches, AUTO, Measurements(tmp_path))
    assert caches.curve is not None
    assert (caches.prefix.arena.decode.costs, caches.is_unmeasured) == ({0: COSTS}, False)


@pytest.mark.usefixtures("few_cases", "measured_paths")
def test_measuring_takes_the_blocks_that_are_free_and_evicts_none(tmp_path: Path) -> None:
    model, caches = open_small(cached=BLOCKS - 3)
    measuring.measured(model, caches, AUTO, Measurements(tmp_path))
    assert caches.curve is not None
    assert [count for count, _ in caches.curve.pipelined] == [1, 2]
    assert counts_of(caches) == (0, BLOCKS - 3, 0)
    assert [set(found.figures) for found in measured_in(tmp_path)] == [{"paths"}]


def raising(error: Exception, calls: list[Any]) -> Callable[..., Any]:
    def measure(model: Any, *_: Any, **__: Any) -> Any:
        calls.append(model)
        raise error

    return measure


@pytest.mark.parametrize(
    ("error", "why", "level"),
    [
        (PoolExhaustedError(1, 0, 0, "full"), "the pool is too small", None),
        (UnmeasurableError("a forward takes too long"), "a forward takes too long", "INFO"),
        (
            RuntimeError("[metal::malloc] no memory"),
            "RuntimeError: [metal::malloc] no memory",
            "WARNING",
        ),
    ],
)
def test_a_model_that_cannot_be_measured_is_served_without_and_not_tried_again(
    error: Exception,
    why: str,
    level: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    calls: list[Any] = []
    for name in ("measure_curve", "measure_paths"):
        monkeypatch.setattr(measuring, name, raising(error, calls))
    model, arena = opened()
    caches = wrap(arena)
    for _ in range(2):
        measuring.measured(model, caches, AUTO)
        assert len(calls) == 2
    assert (caches.curve, arena.decode.costs, caches.is_unmeasured) == (None, {}, False)
    assert caches.unmeasurable == {"curve": why, "paths": why}
    levels = [record.levelname for record in caplog.records if why in record.message]
    assert levels == ([] if level is None else [level] * 2)
    off = BlockPoolBatchEngine(model, caches, AUTO).steps.off
    assert off == f"it was not measured what forwards cost: {why}"


@pytest.mark.parametrize(("shape", "what"), [((2, 1), "curve"), ((1, 1), "paths")])
def test_a_model_that_fails_on_some_batch_has_its_blocks_back(
    shape: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        measuring, "measure_paths" if what == "curve" else "measure_curve", lambda *_, **__: None
    )
    model, arena = opened()
    caches = wrap(arena)
    forward = type(model).__call__

    def fail(self: Any, inputs: mx.array, cache: Any = None, **more: Any) -> Any:
        if inputs.shape == shape and cache is not None:
            raise ValueError("such a batch")
        return forward(self, inputs, cache=cache, **more)

    monkeypatch.setattr(type(model), "__call__", fail)
    gc.disable()
    try:
        measuring.measured(model, caches, AUTO)
        assert caches.unmeasurable[what] == "ValueError: such a batch"
        assert [(counts.held, counts.reserved) for counts in arena.pool.settle()] == [(0, 0)]
    finally:
        gc.enable()
