"""Drafts from prediction heads: tiny models whose heads were trained on texts in which each token
has one successor, for 1 and 4 streams.

Tokens that a stream emits in a forward of the model, with 1 to 3 guesses in every step, and how
many of them are accepted; and the speed with `--drafts auto` against the same model without its
head, which is about 1 on devices where a second row costs as much as the first.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from measure import interleave, options, report

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.measuring import measured
from mlx_blockpool.engine.opening import open_caches
from mlx_blockpool.engine.request import Request
from mlx_blockpool.kv.prediction_head import drop_head

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import heads

POOL_BYTES = 10**8
STREAMS = (1, 4)


class Streams:
    """An engine that writes `tokens` tokens of each of `count` replies, anew each time."""

    def __init__(self, model: Any, drafts: str | int, count: int, tokens: int) -> None:
        self._config = EngineConfig(drafts=drafts, measures=drafts == "auto")
        self._model = model
        self._caches = measured(model, open_caches(model, POOL_BYTES), self._config)
        self._prompts = [[(7 * i + j) % heads.VOCABULARY for j in range(20)] for i in range(count)]
        self._tokens = tokens
        self.counts: dict[str, int] = {}

    def __call__(self) -> float:
        engine = BlockPoolBatchEngine(self._model, self._caches, self._config)
        # A new salt, so that no round finds what an earlier one has computed.
        salt = os.urandom(32)
        engine.insert_all([Request(prompt, self._tokens, salt=salt) for prompt in self._prompts])
        start = time.perf_counter()
        while len(engine):
            engine.next()
        self.counts = engine.counts
        return time.perf_counter() - start


def bench_accepted(args: Any, name: str, count: int, tokens: int) -> None:
    for guesses in (1, 2, 3):
        streams = Streams(heads.load(name), guesses, count, tokens)
        streams()
        counts = streams.counts
        drafted, accepted = counts["drafted head"], counts["accepted head"]
        report(
            args,
            "heads",
            f"{name}, {count} streams, {guesses} guesses",
            tokens_per_forward=round(tokens / counts["decode_steps"], 2),
            accepted=round(accepted / drafted, 3),
            guesses=counts["guesses"],
            from_texts=sum(counts[f"drafted {text}"] for text in ("context", "prefix")),
        )


def bench_auto(args: Any, name: str, count: int, tokens: int) -> None:
    without = heads.load(name)
    drop_head(without)
    systems = {
        "head": Streams(heads.load(name), "auto", count, tokens),
        "without": Streams(without, "auto", count, tokens),
    }
    seconds = interleave(dict(systems), 3 if args.quick else 9)
    report(
        args,
        "heads",
        f"{name}, {count} streams, auto",
        head_ms=round(seconds["head"] * 1000, 1),
        without_ms=round(seconds["without"] * 1000, 1),
        ratio=round(seconds["without"] / seconds["head"], 3),
        guesses=systems["head"].counts["guesses"],
    )


def main() -> None:
    args = options(__doc__ or "")
    tokens = 40 if args.quick else 100
    for name in heads.NAMES[-1:] if args.quick else heads.NAMES:
        for count in STREAMS:
            bench_accepted(args, name, count, tokens)
            bench_auto(args, name, count, tokens)


if __name__ == "__main__":
    main()
