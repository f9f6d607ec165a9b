"""Cache classes that mlx-lm does not have: models are served as their adapters say, and wrong
adapters are caught.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from kv.test_proof import replies
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache
from thorough import only

from mlx_blockpool import plugins
from mlx_blockpool.config import KVBits
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.stock import StockCaches
from mlx_blockpool.hooks import CacheAdapter, hookimpl
from mlx_blockpool.kv.build import allocate
from mlx_blockpool.kv.probe import _Trials
from mlx_blockpool.kv.prompt_cache import make_prompt_cache
from mlx_blockpool.kv.rounded_caches import rounded
from mlx_blockpool.ranks.group import ALONE
from mlx_blockpool.testing import tiny_model

PACKAGE = Path(__file__).parents[1] / "plugin_model"
CONFIG = {
    "model_type": "slopes",
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
ROOMY = 30_000_000
PROMPTS = [[3 + i % 50 for i in range(300)], [3 + i % 50 for i in range(280)], [7, 8, 9]]


@pytest.fixture
def slopes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PACKAGE))
    from blockpool_slopes import model

    return model


def plugin_of(slopes: Any, adapters: Callable[[], Any]) -> Any:
    """A plugin that brings the model with other adapters."""

    class Plugin:
        @hookimpl
        def model_classes(self, config: dict[str, Any]) -> Any:
            is_ours = config.get("model_type") == "slopes"
            return (slopes.Model, slopes.ModelArgs) if is_ours else None

        @hookimpl
        def cache_adapters(self) -> Any:
            return adapters()

    return Plugin()


def install(slopes: Any, monkeypatch: pytest.MonkeyPatch, adapters: Callable[[], Any]) -> None:
    make, plugin = plugins.make_plugin_manager, plugin_of(slopes, adapters)

    def manager() -> Any:
        made = make()
        made.register(plugin, "slopes")
        return made

    monkeypatch.setattr(plugins, "make_plugin_manager", manager)


def opened(
    slopes: Any,
    monkeypatch: pytest.MonkeyPatch,
    adapters: Callable[[], Any],
    bits: KVBits | None = None,
) -> BlockPoolBatchEngine:
    install(slopes, monkeypatch, adapters)
    model = tiny_model(CONFIG, plugins.make_plugin_manager())
    return BlockPoolBatchEngine.open(model, ROOMY, bits=bits)


def stock_replies(model: Any, caches: Callable[[], Any]) -> list[list[int]]:
    return [
        [
            int(token)
            for token, _ in generate_step(
                mx.array(prompt), model, max_tokens=8, prompt_cache=caches()
            )
        ]
        for prompt in PROMPTS
    ]


def right(slopes: Any) -> Callable[[], Any]:
    return lambda: [CacheAdapter(slopes.Rows, slopes.Rows.all, write="append", size="length")]


@pytest.mark.parametrize("bits", only([None, KVBits()], KVBits()))
def test_batches_on_blocks_reply_as_the_models_own_caches(
    slopes: Any, monkeypatch: pytest.MonkeyPatch, bits: KVBits | None
) -> None:
    engine = opened(slopes, monkeypatch, right(slopes), bits)
    caches = engine.caches
    assert isinstance(caches, PooledCaches)
    assert caches.ragged
    assert caches.capabilities.differs == ()
    spec, model = caches.prefix.arena.spec, tiny_model(CONFIG, plugins.make_plugin_manager())
    assert spec.bits == bits
    assert replies(engine, PROMPTS) == stock_replies(
        model,
        lambda: model.make_cache() if bits is None else rounded(model.make_cache(), spec),
    )
    # The second prompt begins like the first one.
    assert caches.prefix.num_hit_tokens > 200


def few_heads(cache: Any) -> Any:
    return [array[:, :1] for array in cache.all()]


def fails(cache: Any) -> Any:
    raise ZeroDivisionError("by nothing")


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another method": (
        lambda rows: [CacheAdapter(rows, rows.all, write="add", size="length")],
        "append",
    ),
    "another attribute": (
        lambda rows: [CacheAdapter(rows, rows.all, write="append", size="count")],
        "length",
    ),
    "few heads": (
        lambda rows: [CacheAdapter(rows, few_heads, write="append", size="length")],
        "keys",
    ),
    "raises": (
        lambda rows: [CacheAdapter(rows, fails, write="append", size="length")],
        "the adapter for Rows .* failed: ZeroDivisionError: by nothing",
    ),
    "one array": (
        lambda rows: [CacheAdapter(rows, lambda cache: cache.all()[:1], write="append")],
        "the adapter for Rows .* failed: ValueError",
    ),
    "no adapter": (lambda rows: [SimpleNamespace(cls=rows)], "no layer kind has the cache class"),
    "of another class": (lambda rows: [CacheAdapter(dict, fails)], "no layer kind has"),
}


@pytest.mark.parametrize("case", WRONG)
def test_with_a_wrong_adapter_the_model_runs_on_its_own_caches(
    slopes: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> None:
    adapters, said = WRONG[case]
    engine = opened(slopes, monkeypatch, lambda: adapters(slopes.Rows))
    assert isinstance(engine.caches, StockCaches)
    sentences = " ".join([*engine.caches.capabilities.differs, caplog.text])
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(sentences)
    model = tiny_model(CONFIG, plugins.make_plugin_manager())
    assert replies(engine, PROMPTS) == stock_replies(model, model.make_cache)


@pytest.mark.parametrize("bits", only([None, KVBits(), KVBits(4)], None))
def test_a_class_that_keeps_fewer_rows_than_a_prompt_of_the_proof_is_not_pooled(
    slopes: Any, monkeypatch: pytest.MonkeyPatch, bits: KVBits | None
) -> None:
    append = slopes.Rows.append

    def forgets(self: Any, *rows: mx.array) -> Any:
        append(self, *rows)
        # A number of the code, which no cache shows.
        self.parts = [tuple(mx.where(_is_old(a), 0, a) for a in self.all())]
        return self.all()

    monkeypatch.setattr(slopes.Rows, "append", forgets)
    engine = opened(slopes, monkeypatch, right(slopes), bits)
    assert isinstance(engine.caches, StockCaches)
    assert "rows that were appended" in " ".join(engine.caches.capabilities.differs)


def _is_old(array: mx.array) -> mx.array:
    return (mx.arange(array.shape[2]) < array.shape[2] - 900)[:, None]


def test_states_that_grow_next_to_such_a_cache_are_no_rows_of_a_batch(
    slopes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model:
        def make_cache(self) -> list[Any]:
            return [slopes.Rows(), ArraysCache(1)]

        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            rows = mx.zeros((1, 2, tokens.shape[1], 8))
            before = 0 if cache[1][0] is None else cache[1][0].shape[1]
            cache[1][0] = mx.zeros((1, min(before + tokens.shape[1], 3), 4))
            return cache[0].append(rows, rows)[0]

    install(slopes, monkeypatch, right(slopes))
    spec = plugins.traced_spec(Model(), "grows")
    assert spec.source
    arena = allocate(spec, ROOMY)
    caches = make_prompt_cache(Model(), arena)
    Model()(mx.array([[1]]), caches)
    trials = _Trials(Model(), arena, ALONE)
    with pytest.raises(NotImplementedError, match="grow"):
        trials._need_states_of_one_size(caches)
    assert trials.grows
