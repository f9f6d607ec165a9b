"""Drafting of real text on measured curves, without a model: files written again with one name
replaced, and other files.

A forward with k drafted tokens takes the seconds of 1 + k rows, and emits what the reply agrees
with. The bound knows in advance how much of each draft is accepted, and takes the best of all ways
through the reply.
"""

from __future__ import annotations

import keyword
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from thorough import only

from mlx_blockpool.drafts.curve import CostCurve
from mlx_blockpool.drafts.draft import Draft
from mlx_blockpool.drafts.drafting import Drafting

CURVES = {
    "bfloat16 on a CPU": CostCurve.from_points({1: 1.0, 2: 1.3, 4: 1.9, 8: 3.4, 16: 6.1}),
    "bfloat16 on a CPU, pipelined": CostCurve.from_points(
        {1: 1.0, 2: 1.3, 4: 1.9, 8: 3.4, 16: 6.1}, {1: 0.92}
    ),
    "float32 on a CPU": CostCurve.from_points({1: 1.0, 2: 1.8, 4: 3.4, 8: 6.8, 16: 13.5}),
    "4 bits on a CPU": CostCurve.from_points({1: 1.0, 2: 1.9, 4: 3.5, 8: 6.7, 16: 13.0}),
    "flat, as where weights are read from memory": CostCurve.from_points(
        {1: 1.0, 2: 1.05, 4: 1.08, 8: 1.15, 16: 1.3, 32: 1.6}
    ),
}
QUICK = ("bfloat16 on a CPU", "flat, as where weights are read from memory")
MODULES = (
    "textwrap",
    "heapq",
    "shlex",
    "fnmatch",
    "queue",
    "sched",
    "graphlib",
    "string",
    "contextlib",
    "calendar",
)
FEW_MODULES = MODULES[:4]
MOST_CHARACTERS = 6000

Case = tuple[list[int], list[int]]


@dataclass
class Outcome:
    """Seconds and forwards of replies with drafts; `plain` and `bound` are the seconds without,
    and of the best drafts.
    """

    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    plain: float = 0.0
    bound: float = 0.0


@cache
def source_of(module: str) -> str:
    return (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text(encoding="utf-8")[
        :MOST_CHARACTERS
    ]


def tokenized(*texts: str) -> list[list[int]]:
    """Words, marks and indentations as tokens, numbered alike in all texts."""
    numbers: dict[str, int] = {}
    found = [re.findall(r"\n *|\w+|[^\w\s]| +", text) for text in texts]
    return [[numbers.setdefault(word, len(numbers)) for word in words] for words in found]


def edits(modules: tuple[str, ...]) -> list[Case]:
    """A file in the prompt, and in the reply the same with its most frequent name replaced."""
    cases = []
    for module in modules:
        text = source_of(module)
        names = Counter(
            name
            for name in re.findall(r"\b[a-z_]{3,}\b", text)
            if not keyword.iskeyword(name) and name != "self"
        )
        name = names.most_common(1)[0][0]
        prompt, reply = tokenized(
            f"Rename {name}:\n{text}\n", "Done:\n" + re.sub(rf"\b{name}\b", "renamed", text)
        )
        cases.append((prompt, reply))
    return cases


def fresh(modules: tuple[str, ...]) -> list[Case]:
    """A file in the prompt, and another one as the reply."""
    pairs = zip(modules, modules[1:] + modules[:1], strict=True)
    return [
        (prompt, reply)
        for one, other in pairs
        for prompt, reply in [tokenized(source_of(one), source_of(other))]
    ]


def num_accepted(draft: Draft, following: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(draft.tokens, following, strict=False)) if a != b),
        min(len(draft), len(following)),
    )


def simulate(case: Case, drafting: Drafting, outcome: Outcome) -> None:
    """Add what one reply takes, step by step as the engine does it."""
    prompt, reply = case
    assert drafting.curve is not None
    drafter, at = drafting.drafter(prompt), 0
    while at < len(reply):
        accepted, expects = 0, drafting.expects([drafter])
        draft = (
            drafting.propose([drafter], reply[at : at + 1], [len(reply) - at - 1])[0]
            if expects
            else Draft()
        )
        accepted = num_accepted(draft, reply[at + 1 :])
        outcome.seconds += (
            drafting.curve.seconds(1 + len(draft)) if expects else drafting.curve.plain_seconds(1)
        )
        outcome.forwards += 1
        drafter.observe(reply[at : at + 1 + accepted])
        at += 1 + accepted
    outcome.tokens += len(reply)
    outcome.plain += len(reply) * drafting.curve.plain_seconds(1)


def bound(case: Case, curve: CostCurve) -> float:
    """The seconds of the best way through a reply, where it is known how much of each draft is
    accepted.
    """
    prompt, reply = case
    drafter = Drafting().drafter(prompt)
    drafter.catch_up(len(prompt))
    accepted = []
    for at, token in enumerate(reply):
        accepted.append(num_accepted(drafter.propose(token, 16), reply[at + 1 :]))
        drafter.observe([token])
    best = [0.0] * (len(reply) + 1)
    for at in range(len(reply) - 1, -1, -1):
        drafted = [curve.seconds(1 + k) + best[at + 1 + k] for k in range(1, accepted[at] + 1)]
        best[at] = min([curve.plain_seconds(1) + best[at + 1], *drafted])
    return best[0]


def outcome_of(cases: list[Case], curve: CostCurve) -> Outcome:
    outcome, drafting = Outcome(), Drafting(curve=curve)
    for case in cases:
        simulate(case, drafting, outcome)
        outcome.bound += bound(case, curve)
    return outcome


SETS = only([FEW_MODULES, MODULES], FEW_MODULES)


@pytest.mark.parametrize("modules", SETS)
@pytest.mark.parametrize("name", only(CURVES, *QUICK))
def test_edits_reach_most_of_what_their_drafts_can_bring(
    name: str, modules: tuple[str, ...]
) -> None:
    found = outcome_of(edits(modules), CURVES[name])
    assert found.bound / found.seconds > 0.95
    assert found.seconds < 0.9 * found.plain


def test_edits_take_few_forwards_where_rows_cost_little() -> None:
    found = outcome_of(edits(FEW_MODULES), CURVES["bfloat16 on a CPU"])
    assert found.tokens / found.forwards > 10
    assert found.plain / found.seconds > 2.4


@pytest.mark.parametrize("modules", SETS)
@pytest.mark.parametrize("name", only(CURVES, *QUICK))
def test_fresh_text_is_as_fast_as_without_drafts(name: str, modules: tuple[str, ...]) -> None:
    found = outcome_of(fresh(modules), CURVES[name])
    assert found.plain / found.seconds > 0.995
