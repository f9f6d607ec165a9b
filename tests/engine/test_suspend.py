"""Requests that are taken out of an engine in mid-way go on in another one, with the replies
that they would have had.
"""

from __future__ import annotations

import pytest
from engine.engines import Told, assert_nothing_held, assert_stock, attached, make_engine, words
from thorough import only

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request

PROMPTS = [words(1, 300), words(2, 40), words(3, 500)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    only(["llama", "gemma3_text", "lfm2", "gpt_oss K8V8", "lfm2 K8V4"], "gemma3_text", "lfm2"),
)
@pytest.mark.parametrize("steps", only([0, 1, 3, 5, 9, 14], 0, 5))
@pytest.mark.parametrize("forgets", [False, True])
def test_requests_go_on_in_another_engine(name: str, steps: int, forgets: bool) -> None:
    """`forgets`: nothing of what was computed is known any more, as where nothing is on disk."""
    engine, prefix = make_engine(name, max_members=2)
    told = Told()
    uids = [engine.insert(Request(prompt, 12)) for prompt in PROMPTS]
    for _ in range(steps):
        told.take(engine.next())
    ended = dict(told.reasons)
    suspended = engine.suspend()
    assert [running.uid for running in suspended] == [uid for uid in uids if uid not in ended]
    assert len(engine) == 0
    assert_nothing_held(prefix)
    if forgets:
        prefix.clear()
    again = BlockPoolBatchEngine(
        attached(name)[0], PooledCaches(prefix), EngineConfig(prefill_tokens=128)
    )
    before = {running: running.uid for running in suspended}
    renamed = {again.resume(running): uid for running, uid in before.items()}
    later = Told()
    while len(again):
        later.take(again.next())
    for uid in uids:
        now = next((new for new, old in renamed.items() if old == uid), None)
        assert (uid in told.started) != (now in later.started), "it starts once"
        found = [*told.tokens.get(uid, []), *(later.tokens.get(now, []) if now is not None else [])]
        assert len(found) == 12
        assert_stock(name, PROMPTS[uids.index(uid)], found)
    assert later.failed == {}
    assert_nothing_held(prefix)
