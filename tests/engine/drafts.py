"""Drafters with a script, and the same requests with drafts and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from engine.engines import VOCABULARY, Told, drive, make_engine

from mlx_blockpool.drafts.draft import NOTHING, Draft
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request
from mlx_blockpool.tier.cache import TieredPrefixCache

# Of the number of a token in its reply and that of a token in a draft: whether the draft has it
# wrong.
Mistakes = Callable[[int, int], bool]
MISTAKES: dict[str, Mistakes] = {
    "never": lambda at, number: False,
    "always": lambda at, number: True,
    "behind 2": lambda at, number: number >= 2,
    "every 5th": lambda at, number: at % 5 == 0,
}


class Script:
    """In the place of a Drafter: drafts `length` tokens of a known reply and, behind its end, a
    token that never ends.

    proposed, accepted: the lengths of its drafts that were verified, and how many tokens of each
    were accepted.
    """

    is_indexing = False
    head = None

    def __init__(
        self, reply: Sequence[int], length: int = 4, is_wrong: Mistakes = MISTAKES["never"]
    ) -> None:
        self.reply = list(reply)
        self.length = length
        self.is_wrong = is_wrong
        self.observed: list[int] = []
        self.proposed: list[int] = []
        self.accepted: list[int] = []

    def observe(self, tokens: Sequence[int]) -> None:
        self.observed += tokens

    def expects(self) -> float:
        return 1.0

    def propose(self, next_token: int, at_most: int) -> Draft:
        start = len(self.observed) + 1
        if at_most <= 0 or next_token != self.reply[start - 1]:
            # Behind a tie of logits the reply may be another one.
            return NOTHING
        tokens = (self.reply[start:] + [5] * self.length)[: self.length]
        tokens = [
            (t + 1) % VOCABULARY if self.is_wrong(start + i, i) else t for i, t in enumerate(tokens)
        ]
        return Draft(
            tokens[:at_most] if at_most < self.length else tokens, [1.0] * self.length, "script"
        )

    def verified(self, draft: Draft, num_accepted: int) -> None:
        self.proposed.append(len(draft))
        self.accepted.append(num_accepted)


def script(
    engine: BlockPoolBatchEngine,
    uid: int,
    reply: Sequence[int],
    length: int = 4,
    mistakes: str = "never",
) -> Script:
    """Have a request that waits drafted by a script."""
    (sequence,) = (each for each in engine.scheduler.waiting if each.uid == uid)
    made = Script(reply, length, MISTAKES[mistakes])
    sequence.drafter = made  # type: ignore[assignment]
    return made


def make_drafting(
    name: str, n_bytes: int | None = None, **config: Any
) -> tuple[BlockPoolBatchEngine, TieredPrefixCache]:
    """An engine that drafts what drafters propose."""
    engine, prefix = make_engine(
        name, *([] if n_bytes is None else [n_bytes]), **{"drafts": 16, **config}
    )
    assert engine.steps.off is None
    return engine, prefix


def plain(name: str, requests: Sequence[Request], **config: Any) -> Told:
    """What the requests get without drafts. Their uids are 1, 2, .."""
    engine, _ = make_engine(name, **config)
    for request in requests:
        engine.insert(request)
    told = drive(engine)
    assert engine.counts["verifications"] == 0
    return told


def assert_alike(expected: Told, found: Told) -> None:
    """The same tokens, ends and errors for all requests, and logprobs up to rounding."""
    assert found.tokens == expected.tokens
    assert found.reasons == expected.reasons
    assert {uid: type(error) for uid, error in found.failed.items()} == {
        uid: type(error) for uid, error in expected.failed.items()
    }
    for uid, rows in expected.logprobs.items():
        for row, own in zip(rows, found.logprobs[uid], strict=True):
            assert (row is None) == (own is None)
            assert row is None or own is None or mx.allclose(row, own, atol=1e-3, rtol=1e-3)
