"""Drafting: what the drafters of one engine share, and when a batch takes drafts; ReplyMemory: the last replies of agents."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from .acceptance import Acceptance
from .asked import MOST_SECONDS_TO_BEGIN, MOST_SLOW
from .curve import CostCurve
from .draft import NOTHING, Draft, Prediction, SourceFactory
from .drafter import Drafter
from .index import SuffixIndex
from .lengths import choose_lengths, least_chance
from .sources import BREAK

log = logging.getLogger(__name__)

# Tokens of prompts that are indexed between two steps, of all requests together: about 5 ms.
STEP_TOKENS = 8192
# Contexts of batches are told apart by so many tokens.
CONTEXT_TOKENS = 512
# Agents that are remembered, and the tokens of the replies of each.
MOST_AGENTS = 64
MOST_TOKENS = 8192


class Drafting:
    """`drafts`: "auto", as the curve says; or up to so many tokens of each member in each forward, whatever they cost.

    most:    the most tokens drafted of one member in auto.
    curve:   what forwards cost; None: not known, and auto drafts nothing.
    counts:  tokens `drafted <source>` and `accepted <source>`.
    priors:  what is known of each source's acceptance, by its name.
    replies: the last replies of agents.
    factories: make the sources of plugins for each request. `clock`: seconds, by which they are timed.
    """

    def __init__(
        self,
        drafts: str | int = "auto",
        most: int = 16,
        curve: CostCurve | None = None,
        counts: Counter[str] | None = None,
        factories: Collection[SourceFactory] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert drafts == "auto" or isinstance(drafts, int), f"drafts are {drafts!r}"
        self.fixed = None if isinstance(drafts, str) else drafts
        self.most = most if self.fixed is None else self.fixed
        self.curve = curve
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.priors: dict[str, list[float]] = {}
        self.replies = ReplyMemory()
        self.factories = list(factories)
        self._clock = clock
        # Of how many requests the sources were too slow, by factory.
        self._num_slow: Counter[SourceFactory] = Counter()
        # Of batches of so many members behind contexts of so many CONTEXT_TOKENS: the curve, and the least chance of a next token
        # behind which drafts can pay.
        self._curves: dict[tuple[int, int], tuple[CostCurve, float]] = {}

    def drafter(
        self,
        prompt: Sequence[int],
        agent: str | None = None,
        salt: bytes = b"",
        following: Sequence[int] = (),
        prediction: Prediction | None = None,
        learned: Mapping[str, Acceptance] | None = None,
    ) -> Drafter:
        """A drafter for one request. `following`: tokens that are known to have followed this very prompt.

        `learned`: that of an earlier drafter of the request.
        """
        made = Drafter(prompt, self.priors, self.counts, learned)
        if following:
            made.follow("prefix", SuffixIndex(following), place=0)
        replies = None if agent is None else self.replies.recall(agent, salt)
        if replies is not None:
            made.follow("replies", replies)
        if prediction is not None and prediction.text.tokens:
            made.expect(prediction)
        for factory in list(self.factories):
            self._make_source(factory, prompt, made)
        return made

    def _make_source(self, factory: SourceFactory, prompt: Sequence[int], drafter: Drafter) -> None:
        start, source = self._clock(), None
        try:
            source = factory(prompt)
            if source is not None:
                drafter.ask(source, self._clock, partial(self._note_slow, factory))
        except Exception as error:
            # As where a source is asked.
            log.warning("A draft source raised %s: %s. A request does without it.", type(error).__name__, error)
        if self._clock() - start > MOST_SECONDS_TO_BEGIN:
            self._note_slow(factory)

    def _note_slow(self, factory: SourceFactory) -> None:
        """Count a request that a source has held up; one that does so again and again is made no more."""
        self._num_slow[factory] += 1
        if self._num_slow[factory] == MOST_SLOW:
            self.factories.remove(factory)
            log.warning("A draft source has held up %d requests. It is made for no more of this model.", MOST_SLOW)

    def expects(self, drafters: Sequence[Drafter | None]) -> bool:
        """Whether it is likely to pay to read the tokens in flight of a batch, and to draft behind them. Takes microseconds."""
        if self.fixed is not None:
            self._catch_up(drafters)
            return self.most > 0 and any(drafter is not None and drafter.expects() > 0 for drafter in drafters)
        if self.curve is None:
            return False
        curve, least = self._curve_of(self.curve, drafters)
        if least > 1:
            # Not even tokens that are sure to be right would pay, so that nothing is indexed.
            return False
        self._catch_up(drafters)
        found = [each.outlook(self.most, least) for each in drafters if each is not None]
        chances = [each for each, _ in found]
        return any(chances) and any(choose_lengths(chances, curve, len(drafters), [seconds for _, seconds in found]))

    def propose(self, drafters: Sequence[Drafter | None], next_tokens: Sequence[int], at_most: Sequence[int]) -> list[Draft]:
        """A draft for each member behind its next token, as long as pays; all empty: nothing does.

        `at_most`: tokens that each member has room for and may still emit behind its next one.
        """
        members = zip(drafters, next_tokens, at_most, strict=True)
        drafts = [
            NOTHING if drafter is None else drafter.propose(token, min(most, self.most)) for drafter, token, most in members
        ]
        return [draft.first(count) for draft, count in zip(drafts, self._lengths(drafters, drafts), strict=True)]

    def _lengths(self, drafters: Sequence[Drafter | None], drafts: list[Draft]) -> list[int]:
        if self.fixed is not None:
            return [len(draft) for draft in drafts]
        if self.curve is None:
            return [0] * len(drafts)
        curve, _ = self._curve_of(self.curve, drafters)
        return choose_lengths([draft.chances for draft in drafts], curve, len(drafts))

    def _curve_of(self, measured: CostCurve, drafters: Sequence[Drafter | None]) -> tuple[CostCurve, float]:
        """The curve of a batch, and the least chance that pays by it. Members without a drafter count as the others do."""
        members, known = len(drafters), [len(drafter.text) for drafter in drafters if drafter is not None]
        stretch = sum(known) // max(1, len(known)) // CONTEXT_TOKENS
        found = self._curves.get((members, stretch))
        if found is None:
            curve = measured.behind(stretch * CONTEXT_TOKENS, members)
            found = self._curves[members, stretch] = curve, least_chance(curve, members, self.most)
        return found

    def _catch_up(self, drafters: Sequence[Drafter | None]) -> None:
        left = STEP_TOKENS
        for drafter in drafters:
            if drafter is not None and drafter.is_behind and left > 0:
                left -= drafter.catch_up(left)


class ReplyMemory:
    """The last replies of each agent as one text, a BREAK before each. Agents under unlike salts never meet.

    The least recently used agent is forgotten first.
    """

    def __init__(self, most_agents: int = MOST_AGENTS, most_tokens: int = MOST_TOKENS) -> None:
        self._most_agents, self._most_tokens = most_agents, most_tokens
        self._texts: OrderedDict[tuple[str, bytes], SuffixIndex] = OrderedDict()

    def __len__(self) -> int:
        return len(self._texts)

    def remember(self, agent: str, salt: bytes, reply: Sequence[int]) -> None:
        """Append a reply to those of an agent. Where they become too many tokens, the oldest are forgotten."""
        added = [BREAK, *reply[-(self._most_tokens - 1) :]]
        text = self._texts.get((agent, salt))
        if text is None:
            text = SuffixIndex()
        elif len(text) + len(added) > self._most_tokens:
            # Requests that run keep the longer text. Half of the room stays free, so that this is rare.
            text = SuffixIndex(_last_replies(text.tokens, max(0, self._most_tokens // 2 - len(added))))
        text.tokens += added
        self._texts[agent, salt] = text
        self._texts.move_to_end((agent, salt))
        while len(self._texts) > self._most_agents:
            self._texts.popitem(last=False)

    def recall(self, agent: str, salt: bytes) -> SuffixIndex | None:
        """The text of an agent's replies; None: there are none."""
        text = self._texts.get((agent, salt))
        if text is not None:
            self._texts.move_to_end((agent, salt))
        return text


def _last_replies(tokens: list[int], at_most: int) -> list[int]:
    """The last whole replies of a text that have together at most so many tokens, their BREAKs included."""
    starts = (number for number in range(max(0, len(tokens) - at_most), len(tokens)) if tokens[number] == BREAK)
    return tokens[next(starts, len(tokens)) :]
