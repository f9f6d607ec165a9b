"""Every architecture of mlx-lm on pooled caches: the logits of mlx-lm's own caches, alone and in
a batch, cold and warm.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from thorough import only

from architectures.configs import CONFIGS, QUICK, RUNNABLE
from architectures.configs_common import wide
from architectures.pooled import POOL, distance, logits, make_model, prompt, stock
from architectures.side_by_side import BITS, side_by_side
from architectures.table import in_readme, row_of, rows_in
from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Failed, Request, Started, Token
from mlx_blockpool.kv.attach import detach
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.kv.prompt_cache import pooled_caches
from mlx_blockpool.testing import NotCheckedError, Subject, run_check

# Quantised in batches and alone, and one whose attention touches keys between cache and softmax.
QUICK_IN_8_BITS = ("lfm2", "gpt_bigcode", "stablelm", "phi3small", "longcat_flash_ngram")
REWRITE = "run python -m architectures.table in tests/"
CHUNK = 64
TOKENS = 8
# Two logits nearer than this may change places when sums are added in another order.
TIE = 1e-2


def test_every_row_of_the_table_has_a_type_that_is_always_tested() -> None:
    rows = rows_in(in_readme())
    assert {rows[name] for name in (*QUICK, *QUICK_IN_8_BITS)} == set(rows.values())


# States that take padding in (recurrent_gemma's, where a sequence begins with it), with prompts of
# one length alone computed together.
UNPADDED = {"baichuan_m1", "recurrent_gemma"}
RAGGED_STATES = [
    name
    for name, row in sorted(rows_in(in_readme()).items())
    if row.batch == "ragged" and "state" in row.kinds
]


@pytest.mark.parametrize("name", only(RAGGED_STATES, "lfm2", "baichuan_m1"))
def test_prompts_of_hybrid_models_are_computed_together_after_a_shared_prefix(name: str) -> None:
    model, common = make_model(name), prompt(1, 200)
    engine = BlockPoolBatchEngine.open(model, POOL)
    # As if a forward took as long however many tokens it has.
    engine.caches.forward_seconds = lambda tokens: 1.0
    try:
        engine.insert(Request([*common, 7], 1, breakpoints=[(200, "system")]))
        while len(engine):
            engine.next()
        before = engine.counts["chunks"]
        prompts = [[*common, *prompt(i, count)] for i, count in enumerate((40, 60, 90, 60, 120), 2)]
        found: dict[int, list[mx.array]] = {engine.insert(Request(p, 3)): [] for p in prompts}
        replies = {uid: list[int]() for uid in found}
        while len(engine):
            for event in engine.next():
                if isinstance(event, Token):
                    found[event.uid].append(event.logprobs)
                    replies[event.uid].append(event.token)
                elif isinstance(event, Started):
                    assert event.cached == len(common)
        # 5 prompts of at most 120 tokens are more than the 512 of a chunk.
        assert engine.counts["chunks"] - before == (4 if name in UNPADDED else 2)
        for given, uid in zip(prompts, found, strict=True):
            chunks = [given[: len(common)], given[len(common) : -1], given[-1:]]
            caches = stock(model)
            needed = [_last(model, caches, chunk) for chunk in chunks][-1:]
            needed += [_last(model, caches, [token]) for token in replies[uid][:2]]
            assert distance([row - mx.logsumexp(row) for row in needed], found[uid]) <= 1e-5
    finally:
        engine.close()
        detach(model)


def _last(model: Any, caches: list[Any], tokens: list[int]) -> mx.array:
    logits: mx.array = model(mx.array([tokens]), cache=caches)[0, -1]
    mx.eval(logits, [cache.state for cache in caches])
    return logits


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", only(RUNNABLE, "gpt_oss", "falcon_h1", "deepseek_v32", "baichuan_m1")
)
@pytest.mark.parametrize("attached", [False, True])
def test_logits_are_those_of_stock(name: str, attached: bool) -> None:
    """A prefill in two parts, beyond every window and chunk, and 16 tokens more, in a script
    that attaches or not.
    """
    model = make_model(name)
    chunks = [prompt(1, 37), prompt(2, 40)]
    needed = logits(model, stock(model), chunks, 16)
    found = logits(model, pooled_caches(open_pool(model, POOL, attach=attached)), chunks, 16)
    assert distance(needed, found) <= 1e-5


class Agents:
    """An engine over a pool of its own, and what stock says alone."""

    def __init__(self, name: str) -> None:
        self.model = make_model(name)
        self.engine = BlockPoolBatchEngine.open(
            self.model, POOL, EngineConfig(prefill_tokens=CHUNK)
        )

    def ask(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Greedy replies to prompts that are served together, and how many tokens of each were
        cached.
        """
        uids = {self.engine.insert(Request(p, TOKENS)): i for i, p in enumerate(prompts)}
        replies: list[list[int]] = [[] for _ in prompts]
        cached = [0] * len(prompts)
        while len(self.engine):
            for event in self.engine.next():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Token):
                    replies[uids[event.uid]].append(event.token)
                elif isinstance(event, Started):
                    cached[uids[event.uid]] = event.cached
        return replies, cached

    def close(self) -> None:
        self.engine.close()
        detach(self.model)


def stock_reply(model: Any, tokens: list[int]) -> list[int]:
    """mlx-lm's tokens before the first tie: there mlx-lm itself replies otherwise after chunks
    of another length.
    """
    found = []
    for token, logprobs in generate_step(
        mx.array(tokens), model, max_tokens=TOKENS, prefill_step_size=CHUNK
    ):
        second, first = mx.sort(logprobs)[-2:].tolist()
        if first - second < TIE:
            break
        found.append(int(token))
    return found


def assert_stock(model: Any, prompts: list[list[int]], replies: list[list[int]]) -> None:
    assert [len(reply) for reply in replies] == [TOKENS] * len(replies)
    expected = [stock_reply(model, p) for p in prompts]
    assert expected == [reply[: len(e)] for e, reply in zip(expected, replies, strict=True)]


@pytest.mark.parametrize("name", only(RUNNABLE, *QUICK))
def test_agents_get_what_each_gets_alone_and_turn_two_reuses_turn_one(name: str) -> None:
    agents = Agents(name)
    try:
        row = rows_in(in_readme())[name]
        assert row == row_of(agents.engine.caches, row.bits), REWRITE
        prompts = [prompt(1, 77), prompt(1, 50) + prompt(3, 41), prompt(4, 9)]
        replies, _ = agents.ask(prompts)
        assert_stock(agents.model, prompts, replies)
        later = [p + reply + prompt(9, 20) for p, reply in zip(prompts, replies, strict=True)]
        again, cached = agents.ask(later)
        assert_stock(agents.model, later, again)
        assert cached == [len(p) + TOKENS for p in prompts]
    finally:
        agents.close()


@pytest.mark.parametrize("name", only(RUNNABLE, *QUICK_IN_8_BITS))
def test_agents_in_quantised_blocks_get_what_each_gets_alone(name: str) -> None:
    """As the table says."""
    row = rows_in(in_readme())[name]
    subject = Subject(wide(CONFIGS[name]))
    if row.bits == "yes":
        said = side_by_side(subject, BITS)
        assert row.batch in said, REWRITE
    else:
        text = (
            "No keys or values"
            if row.bits == "nothing to quantise"
            else "attention does not read quantised blocks"
        )
        with pytest.raises(NotCheckedError, match=text):
            run_check("quantised", subject)
    assert not any(
        "_attached_from" in vars(type(module)) for _, module in subject.model.named_modules()
    )
