"""Random schedules with drafts forced on: replies are those of the same requests with drafts
off, token for token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.drafts import Script
from engine.engines import TIE, VOCABULARY, Told, assert_nothing_held
from engine.forms import FLAGS, PERSON
from engine.schedules import CONFIG, CROWD, CROWDS, SCHEDULES, Arrival, Schedule, arrivals
from engine.test_schedules import OTHERS
from engine.test_seeds import sampler
from hypothesis import given
from hypothesis import strategies as st
from thorough import only, tried

from mlx_blockpool.drafts.draft import NOTHING, Draft
from mlx_blockpool.engine import caches as caches_module
from mlx_blockpool.engine.request import Request
from mlx_blockpool.kv.prompt_cache import leaves_of
from mlx_blockpool.spec import blocks_for

NAMES = ["llama", "qwen2", "gemma3_text", "gpt_oss", "lfm2", "qwen3_5"]
# What sums of float32 may differ by.
ROUNDING = 1e-6
SOURCES = ["right", "wrong", "mixed", "own"]
LENGTHS = [0, 1, 2, 3, 5, 8, 16]
PARTS: dict[str, Any] = {
    "seed": st.sampled_from([None, None, 1, 2]),
    "schema": st.sampled_from([None, None, None, PERSON, FLAGS]),
    "max_tokens": st.sampled_from([1, 2, 4, 6, 8, 12, 24]),
    "choices": st.sampled_from([1, 1, 1, 2, 3]),
    "breaks": st.sampled_from([None] * 9 + [3]),
}


class Watched:
    """A sampler with a seed, and how near each of its draws was to another token."""

    def __init__(self, seed: int) -> None:
        self._draw = sampler(seed)
        self._key = mx.random.key(seed)
        # Of each draw the thrown number, and of each token where its part of [0, 1) ends.
        self._throws: list[tuple[mx.array, mx.array] | None] = []
        self._drawn: list[mx.array] = []

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._key, key = mx.random.split(self._key)
        self._throws.append(
            (mx.random.uniform(shape=(1,), key=key), mx.cumsum(mx.softmax(logprobs[0])))
        )
        self._drawn.append(self._draw(logprobs))
        return self._drawn[-1]

    def skip(self, draws: int) -> None:
        self._draw.skip(draws)
        for _ in range(draws):
            self._key, _ = mx.random.split(self._key)
            self._throws.append(None)

    def margins(self) -> list[float]:
        """By how much each throw missed the next token; infinite for those that were skipped."""
        margins = [
            np.inf if each is None else mx.abs(each[1] - each[0]).min().item()
            for each in self._throws
        ]
        thrown = [(each, m) for each, m in zip(self._throws, margins, strict=True) if each]
        for ((throw, ends), missed), drawn in zip(thrown, self._drawn, strict=True):
            # Two sums of the same probabilities differ in their last bits.
            assert missed < ROUNDING or (ends < throw).sum().item() == drawn.item(), (
                "the sampler throws other numbers"
            )
        return margins


def margin(logprobs: mx.array) -> float:
    """By how much the likeliest token is likelier than the next one."""
    second, first = mx.sort(logprobs)[-2:].tolist()
    return float(first - second)


class Forced(Script):
    """Drafts of random lengths, right or wrong or both; behind a token that the reply does not
    have it is wrong.
    """

    def __init__(self, reply: Sequence[int], source: str, rng: random.Random) -> None:
        super().__init__(reply)
        self.source = source
        self.rng = rng

    def propose(self, next_token: int, at_most: int) -> Draft:
        length = min(at_most, self.rng.choice(LENGTHS))
        start = len(self.observed) + 1
        right = (
            self.reply[start : start + length]
            if [*self.observed, next_token] == self.reply[:start]
            else []
        )
        first_wrong = {"right": length, "wrong": 0, "mixed": self.rng.randint(0, length)}[
            self.source
        ]
        wrong = [self.rng.randrange(VOCABULARY) for _ in range(length)]
        if first_wrong < len(right):
            wrong[first_wrong] = (right[first_wrong] + 1) % VOCABULARY
        tokens = (right[:first_wrong] + wrong[min(first_wrong, len(right)) :])[:length]
        return Draft(tokens, [1.0] * length, "script") if tokens else NOTHING


def without_broken_forms(requests: list[Arrival]) -> list[Arrival]:
    """A sampler that breaks is in no form: how often it is called there depends on the runs that
    are appended without a draw.
    """
    return [
        replace(request, schema=None) if request.breaks is not None else request
        for request in requests
    ]


class Plain(Schedule):
    """Without drafts and hang-ups, so that every reply is whole."""

    def __init__(
        self,
        name: str,
        requests: list[Arrival],
        more_blocks: int,
        config: dict[str, Any],
        swaps: frozenset[int],
    ) -> None:
        self.samplers: dict[int, list[Watched]] = {}
        super().__init__(
            name,
            [replace(request, patience=None) for request in requests],
            more_blocks,
            config,
            swaps,
        )

    def choices(self, i: int) -> list[Request]:
        found, seed = super().choices(i), self.requests[i].seed
        if seed is None or self.requests[i].breaks is not None:
            return found
        self.samplers[i] = [Watched(seed + number) for number in range(len(found))]
        return [
            replace(each, sampler=own) for each, own in zip(found, self.samplers[i], strict=True)
        ]

    def certain(self, number: int, told: Told) -> int:
        """How many tokens of a reply come before the first tie: behind it both may be right."""
        i, choice = divmod(number, 1000)
        if i in self.samplers:
            margins = self.samplers[i][choice].margins()
        else:
            margins = [
                np.inf if row is None else margin(row) for row in told.logprobs.get(number, [])
            ]
        return next(
            (at for at, each in enumerate(margins) if each < TIE), len(told.tokens.get(number, []))
        )


class Drafted(Plain):
    """With drafts of known replies, and what must hold of blocks and slabs behind every step."""

    def __init__(
        self,
        name: str,
        requests: list[Arrival],
        more_blocks: int,
        config: dict[str, Any],
        swaps: frozenset[int],
        replies: Told,
        sources: list[str],
        seed: int,
    ) -> None:
        super().__init__(name, requests, more_blocks, {**config, "drafts": 16}, swaps)
        assert self.engine.steps.off is None
        self.requests = requests
        self.replies = replies
        self.sources = sources
        self.rng = random.Random(seed)
        self._verifications = 0
        self._slabs: tuple[int, list[int]] = (-1, [])

    def come_and_go(self) -> None:
        before = set(self.by_uid)
        super().come_and_go()
        for sequence in self.engine.scheduler.waiting:
            if sequence.uid not in before:
                number = self.by_uid[sequence.uid]
                source = self.sources[number % len(self.sources)]
                if source != "own":
                    reply = self.replies.tokens.get(number, [])
                    sequence.drafter = Forced(reply, source, self.rng)  # type: ignore[assignment]

    def check_step(self) -> None:
        super().check_step()
        self.prefix.check()
        self.prefix.pool.check()
        for sequence in self.engine.live:
            check_tables(sequence)
        if self._verifications != self.engine.counts["verifications"]:
            # Nothing is in flight then.
            self._verifications = self.engine.counts["verifications"]
            self.check_slabs()

    def check_slabs(self) -> None:
        """None has moved since the last time, if they are still the same ones."""
        pool = self.prefix.pool
        slabs = [
            (g, i * blocks.stride)
            for g, blocks in enumerate(pool.groups)
            for i, size in blocks.slabs.items()
            if size > 1
        ]
        # A slab of one block takes the buffer of what fills it.
        arrays = [
            array
            for slab in slabs
            for array in self.prefix.arena.locate(*slab)[0].arrays()
            if array.size
        ]
        found = (
            pool.layout_version,
            [np.asarray(memoryview(array.view(mx.uint8))).ctypes.data for array in arrays],
        )
        assert self._slabs[0] != found[0] or self._slabs == found, "a slab was copied"
        self._slabs = found


def check_tables(sequence: Any) -> None:
    """The caches hold the computed tokens, in as many blocks as these and the next one take."""
    for leaf in leaves_of(sequence.caches):
        if hasattr(leaf, "next_place"):
            assert leaf.offset == sequence.computed
            table = leaf.sequence.tables[leaf.place.group]
            assert (
                blocks_for(leaf.size())
                <= len(table)
                <= blocks_for(max(leaf.size() + 1, len(sequence.tokens)))
            )


def run(
    name: str, requests: list[Arrival], promised: int, sources: list[str], seed: int, **more: Any
) -> None:
    rest = more["more_blocks"], more["config"], more.get("swaps", frozenset())
    with pytest.MonkeyPatch.context() as patch:
        # The room that a request finds at its start; with little of it, short replies are swapped
        # out too.
        patch.setattr(caches_module, "BLOCK_TOKENS", promised)
        requests = without_broken_forms(requests)
        plain = Plain(name, requests, *rest)
        _, prefix, replies = plain.run()
        assert_nothing_held(prefix)
        drafted = Drafted(name, requests, *rest, replies=replies, sources=sources, seed=seed)
        engine, prefix, told = drafted.run()
    for number in [number for numbers in drafted.numbers.values() for number in numbers]:
        certain = plain.certain(number, replies)
        compare(number, replies, told, certain, number in drafted.cancelled)
    engine.close()
    assert_nothing_held(prefix)


def compare(number: int, replies: Told, told: Told, certain: int, is_cancelled: bool) -> None:
    """One reply, as far as it is certain and not cancelled: tokens, logprobs and its end."""
    expected, found = replies.tokens.get(number, []), told.tokens.get(number, [])
    count = min(certain, len(found))
    assert found[:certain] == expected[:count], f"request {number}"
    rows = zip(
        replies.logprobs.get(number, [])[:count], told.logprobs.get(number, []), strict=False
    )
    # Which runs of forced tokens are worth a pass depends on who else is in the batch.
    pairs = [(theirs, own) for theirs, own in rows if theirs is not None and own is not None]
    if pairs:
        assert mx.allclose(
            *(mx.stack(list(part)) for part in zip(*pairs, strict=True)), atol=1e-3, rtol=1e-3
        )
    if certain == len(expected) and not is_cancelled:
        assert found == expected
        assert told.reasons.get(number) == replies.reasons.get(number)
        assert type(told.failed.get(number)) is type(replies.failed.get(number))


DRAFTED: dict[str, Any] = {
    "sources": st.lists(st.sampled_from(SOURCES), min_size=1, max_size=3),
    "seed": st.integers(0, 999),
    "config": st.fixed_dictionaries({**CONFIG, "max_members": st.sampled_from([1, 2, 4, 8])}),
}


@pytest.mark.parametrize("name", only(NAMES, "gemma3_text", "lfm2"))
@tried(2, 45)
@given(**{**SCHEDULES, **DRAFTED, "requests": arrivals(**PARTS)})
def test_replies_of_a_schedule_with_drafts_are_those_without(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)


@pytest.mark.parametrize("name", only(OTHERS, "gemma2", "deepseek_v3"))
@tried(1, 30)
@given(**{**SCHEDULES, **DRAFTED, "requests": arrivals(**PARTS)})
def test_replies_of_a_schedule_with_drafts_and_attention_of_any_kind_are_too(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)


@pytest.mark.parametrize("name", only(NAMES, "gemma3_text", "lfm2"))
@tried(2, 30)
@given(
    **{
        **CROWDS,
        **DRAFTED,
        "requests": arrivals(**{**PARTS, **CROWD, "patience": st.sampled_from([None, None, 4, 9])}),
    }
)
def test_replies_of_a_swapped_out_crowd_with_drafts_are_too(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)
