"""Each row is quantised once, when its token is computed: words that were quantised again would
be others.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engine.engines import assert_nothing_held, drive, serve
from engine.stored_engines import start, write_all
from models import make_model

from mlx_blockpool import PrefixCache, attach, from_stock, make_prompt_cache
from mlx_blockpool.config import KVBits
from mlx_blockpool.engine.request import Request, Started
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.build import describe
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.kv.prompt_cache import as_stock, batch_of, member_of
from mlx_blockpool.spec import ModelCacheSpec

POOL_BYTES = 40_000_000
# A full layer and a window of 300 tokens.
LAYERS = 2
PROMPT = [i * 7 % 131 for i in range(800)]


@functools.cache
def made() -> tuple[Any, ModelCacheSpec]:
    model = make_model("gemma3_text", head_dim=32, num_hidden_layers=2)
    spec = describe(model).with_bits(KVBits(8, 8))
    assert attach(model, KVArena(spec, POOL_BYTES))
    return model, spec


def open_arena() -> KVArena:
    arena = KVArena(made()[1], POOL_BYTES)
    arena.capabilities = RAGGED
    return arena


class Count:
    """Tokens of the rows that were quantised since it was last read; keys and values of each
    layer count as one.
    """

    def __init__(self) -> None:
        self.rows = 0

    def read(self) -> int:
        tokens, rest = divmod(self.rows, 2 * LAYERS)
        assert rest == 0, f"{self.rows} rows are no multiple of {2 * LAYERS}"
        self.rows = 0
        return tokens


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> Count:
    count, quantize = Count(), mx.quantize

    def counted(rows: mx.array, **options: Any) -> Any:
        count.rows += rows.shape[0] * rows.shape[2]
        return quantize(rows, **options)

    made()
    monkeypatch.setattr(mx, "quantize", counted)
    return count


def run(caches: list[Any], *rows: list[int]) -> None:
    mx.eval(made()[0](mx.array(rows), cache=caches))
    mx.eval([cache.state for cache in caches])


def test_chunks_steps_and_batches(quantised: Count) -> None:
    arena = open_arena()
    caches = make_prompt_cache(made()[0], arena)
    # The second chunk ends beyond the windows, the third one is longer than they are.
    for start_, end in ((0, 200), (200, 340), (340, 700)):
        run(caches, PROMPT[start_:end])
        assert quantised.read() == end - start_
    for token in PROMPT[700:703]:
        run(caches, [token])
    assert quantised.read() == 3
    others = [copy.deepcopy(caches), make_prompt_cache(made()[0], arena)]
    run(others[1], PROMPT[:50])
    assert quantised.read() == 50
    batch = batch_of([caches, *others])
    for token in PROMPT[:3]:
        run(batch, [token], [token + 1], [token + 2])
    assert quantised.read() == 9
    run(member_of(batch, 1), PROMPT[:40])
    assert quantised.read() == 40


def test_forks_copies_and_other_pools(quantised: Count) -> None:
    arena = open_arena()
    caches = make_prompt_cache(made()[0], arena)
    run(caches, PROMPT[:290])
    assert quantised.read() == 290
    copy.deepcopy(caches)[0].trim(40)
    fork = copy.deepcopy(caches)
    for cache in fork:
        cache.trim(20)
    run(fork, PROMPT[270:275])
    assert quantised.read() == 5
    prefix = PrefixCache(arena)
    prefix.insert(PROMPT[:275], fork)
    acquired = prefix.acquire([*PROMPT[:275], 1, 2, 3], max_tokens=10)
    run(acquired.caches, acquired.rest)
    assert quantised.read() == len(acquired.rest) < 100
    moved = from_stock(caches, open_arena())
    assert [c.offset for c in moved] == [290] * LAYERS
    as_stock(caches)
    assert quantised.read() == 0


def test_requests_that_are_stored_restored_and_suspended(tmp_path: Path, quantised: Count) -> None:
    folder = tmp_path / "store"
    machine = start(folder, model=made())
    (uid,), told = serve(machine.engine, [PROMPT], 6)
    assert told.failed == {}
    reply = told.tokens[uid]
    assert quantised.read() == len(PROMPT) + 6
    write_all(machine)
    assert machine.prefix.close()
    assert quantised.read() == 0
    machine = start(folder, model=made())
    second = [*PROMPT, *reply, *PROMPT[:30]]
    uid = machine.engine.insert(Request(second, 6))
    told = drive(machine.engine, after=lambda found: len(found.tokens.get(uid, [])) == 2)
    (suspended,) = machine.engine.suspend()
    machine.engine.resume(suspended)
    told = drive(machine.engine, told)
    started = told.started[uid]
    assert isinstance(started, Started)
    assert started.cached >= 768, "blocks and windows come from disk"
    assert quantised.read() == len(second) - started.cached + 6
    machine.prefix.close()
    assert_nothing_held(machine.prefix)
