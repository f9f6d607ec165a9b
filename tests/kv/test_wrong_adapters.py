"""An attention adapter that is wrong, always or now and then, is caught when a model is loaded: the
replies are those of the model's own caches, and a sentence names the plugin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from architectures.configs import CONFIGS
from kv.test_proof import ROOMY, replies
from mlx_lm.generate import generate_step
from mlx_lm.models import base, llama
from test_plugins import manager_with
from thorough import only

from mlx_blockpool import plugins
from mlx_blockpool.config import KVBits
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.hooks import AttentionAdapter, hookimpl
from mlx_blockpool.kv.batch_cache import PooledBatchCache
from mlx_blockpool.kv.by_member import attend_by_member
from mlx_blockpool.mlx_lm_compat import rebind
from mlx_blockpool.testing import tiny_model

CONFIG = {
    **CONFIGS["llama"],
    "head_dim": 32,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
}


def is_llama(cls: type) -> bool:
    return cls is llama.Attention


def offsets(cache: Any) -> list[int]:
    found: Any = [] if cache is None else mx.array(cache.offset).reshape(-1).tolist()
    return list(found)


def is_batch(cache: Any) -> bool:
    return isinstance(cache, PooledBatchCache)


def is_mixed(cache: Any) -> bool:
    return len(set(offsets(cache))) > 1


def is_long(cache: Any) -> bool:
    return max(offsets(cache), default=0) > 300


def explode(*_: Any) -> Any:
    raise KeyError("rotation")


def swapped(queries: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    return base.scaled_dot_product_attention(queries, values, keys, *args, **kwargs)


def with_swapped(module: Any, call: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
    return attend_by_member(
        module, rebind(call, scaled_dot_product_attention=swapped), x, mask, cache
    )


def spoiled(when: Callable[[Any, int], bool], spoil: Callable[[mx.array], Any]) -> Any:
    """An attention whose right output is spoiled for some caches and numbers of tokens."""

    def attend(module: Any, call: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        is_wrong = when(cache, x.shape[1])
        out = attend_by_member(module, call, x, mask, cache)
        return spoil(out) if is_wrong else out

    return attend


def half(out: mx.array) -> mx.array:
    return out * 0.5


NAMED = f"with adapter mine of provider ({__name__}."
DIFFER = "logits after .* differ by"
WRONG: dict[str, tuple[Any, str]] = {
    "always": (spoiled(lambda *_: True, half), DIFFER),
    "keys and values swapped": (with_swapped, DIFFER),
    "rows of another member": (
        spoiled(lambda cache, _: is_mixed(cache), lambda out: out[::-1]),
        DIFFER,
    ),
    "past 300 tokens": (spoiled(lambda cache, _: is_long(cache), half), DIFFER),
    "past 300 tokens, alone": (
        spoiled(lambda cache, _: is_long(cache) and not is_batch(cache), half),
        "logits after token",
    ),
    "past 300 tokens, several": (spoiled(lambda cache, n: is_long(cache) and n > 1, half), DIFFER),
    "raises": (explode, "KeyError: 'rotation'"),
    "raises in a batch": (spoiled(lambda cache, _: is_batch(cache), explode), "KeyError"),
    "raises for several tokens": (spoiled(lambda _, n: n > 1, explode), "KeyError"),
}


def served(
    attend: Any, bits: KVBits | None, patch: pytest.MonkeyPatch, applies: Any = None
) -> BlockPoolBatchEngine:
    """The engine of a tiny model for which a plugin has this adapter."""

    class Plugin:
        @hookimpl
        def attention_adapters(self) -> list[AttentionAdapter]:
            return [AttentionAdapter("mine", applies or is_llama, attend)]

    patch.setattr(plugins, "make_plugin_manager", lambda: manager_with(Plugin()))
    return BlockPoolBatchEngine.open(tiny_model(CONFIG), ROOMY, bits=bits)


PROMPTS = [[3 + i % 50 for i in range(320)], [7, 8, 9]]


QUICK = ("past 300 tokens", "rows of another member", "raises for several tokens")


@pytest.mark.parametrize("case", only(WRONG, *QUICK))
def test_replies_are_those_of_the_models_own_caches(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, said = WRONG[case]
    needed = [
        [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=8)]
        for model in [tiny_model(CONFIG)]
        for prompt in PROMPTS
    ]
    engine = served(attend, None, monkeypatch)
    sentence = engine.caches.capabilities.differs[0]
    assert NAMED in sentence
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(sentence)
    assert engine.caches.ragged
    assert replies(engine, PROMPTS) == needed
    assert [replies(engine, [prompt])[0] for prompt in PROMPTS] == needed


@pytest.mark.parametrize("case", only(WRONG, QUICK[0]))
def test_quantised_blocks_catch_it_too(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = served(WRONG[case][0], KVBits(), monkeypatch)
    assert engine.caches.prefix.arena.spec.bits == KVBits()
    assert NAMED in engine.caches.capabilities.differs[0]


@pytest.mark.parametrize("bits", only([None, KVBits()], None))
def test_a_right_adapter_is_used(bits: KVBits | None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = served(attend_by_member, bits, monkeypatch)
    assert not engine.caches.capabilities.differs
    assert engine.caches.ragged


def test_an_adapter_that_cannot_say_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = served(attend_by_member, None, monkeypatch, explode)
    assert engine.caches.ragged
    (sentence,) = engine.caches.capabilities.differs
    assert NAMED.removeprefix("with ") in sentence
    assert "raised KeyError: 'rotation'" in sentence


def test_a_pool_too_small_to_prove_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOMY", 650_000)
    engine = served(attend_by_member, None, monkeypatch)
    assert "the pool is too small to prove it" in engine.caches.capabilities.differs[0]
    assert replies(engine, [[7, 8, 9]])
