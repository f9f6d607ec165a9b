"""Drafter: drafts for one request, from the source that is likely to be right for longest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from .acceptance import Acceptance
from .asked import AskedSource
from .draft import NOTHING, Draft, DraftSource, Prediction
from .index import SuffixIndex
from .sources import TextSource

PREDICTION = "prediction"


class Drafter:
    """The sources of one request. It sees each token once it is emitted.

    priors: the acceptance of each source in all requests, by its name, which this one starts from and adds to.
    counts: tokens drafted and accepted, by source: `drafted <source>` and `accepted <source>`.
    learned: the acceptance of each source in this request, by its name; given, it goes on from there.
    is_behind: whether catch_up() has something to index.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        priors: dict[str, list[float]] | None = None,
        counts: Counter[str] | None = None,
        learned: Mapping[str, Acceptance] | None = None,
    ) -> None:
        self._priors = {} if priors is None else priors
        self.learned = dict(learned or {})
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.text = SuffixIndex(prompt)
        self._prediction: Prediction | None = None
        self.is_behind = True
        self.sources: list[TextSource] = []
        self.asked: list[AskedSource] = []
        self._indexes: list[SuffixIndex] = []
        self.follow("context", self.text)

    def follow(self, name: str, index: SuffixIndex, place: int = -1) -> None:
        """Add a source that follows a text, from `place` on if that is known to come next."""
        self._indexes.append(index)
        self.sources.append(TextSource(name, index, self.text, self._acceptance(name), place))

    def expect(self, prediction: Prediction) -> None:
        """Add a source that follows what the client expects, and count what is drafted from it. It goes before equal guesses."""
        self._prediction = prediction
        self._indexes.append(prediction.text)
        self.sources.insert(0, TextSource(PREDICTION, prediction.text, self.text, self._acceptance(PREDICTION), place=0))

    def ask(
        self,
        source: DraftSource,
        clock: Callable[[], float] = time.perf_counter,
        note_slow: Callable[[], None] = lambda: None,
    ) -> None:
        """Add the source of a plugin. `clock`, `note_slow`: as AskedSource has them."""
        self.asked.append(AskedSource(source, self._acceptance(source.name), clock, note_slow))

    def _acceptance(self, name: str) -> Acceptance:
        found = self.learned.get(name)
        if found is None:
            found = self.learned[name] = Acceptance(self._priors.get(name))
        found.prior = self._priors.setdefault(name, found.prior)
        return found

    def catch_up(self, at_most: int) -> int:
        """Index up to `at_most` more tokens of its texts. Returns how many."""
        left = at_most
        for index in self._indexes:
            left -= index.catch_up(left)
        self.is_behind = left == 0
        return at_most - left

    def observe(self, tokens: Sequence[int]) -> None:
        """Take in emitted tokens."""
        append, sources, asked = self.text.append, self.sources, self.asked
        for token in tokens:
            append(token)
            for source in sources:
                source.observe(token)
            for plugin in asked:
                plugin.observe(token)

    def expects(self) -> float:
        """The chance that the next token, which is not known yet, is as some source guesses it. 0: nothing is guessed."""
        return max([source.chance for source in self.sources] + [plugin.chance for plugin in self.asked])

    def outlook(self, at_most: int, least: float = 0.0) -> tuple[list[float], float]:
        """The chances of the tokens of propose() while the next token is not known, each that it and all before it are right.

        And the seconds that it takes to guess each of them. Empty where no source has at least the chance `least`.
        """
        likeliest = max(self.sources, key=_chance)
        for plugin in self.asked:
            if plugin.chance > likeliest.chance and plugin.chance >= least:
                return plugin.outlook(at_most), plugin.seconds or 0.0
        return (likeliest.outlook(at_most), 0.0) if likeliest.chance >= least else ([], 0.0)

    def propose(self, next_token: int, at_most: int) -> Draft:
        """Up to `at_most` tokens behind `next_token`, which is known and not emitted yet; empty: no source guesses any."""
        if at_most <= 0:
            return NOTHING
        best = max((source.guess(next_token, at_most) for source in self.sources), key=_promise)
        for plugin in self.asked:
            # Asking takes time.
            if sum(plugin.outlook(at_most)) > _promise(best):
                best = max(best, plugin.guess(next_token, at_most), key=_promise)
        return best

    def verified(self, draft: Draft, num_accepted: int) -> None:
        """Count the tokens of a draft that were verified, and of those the accepted ones. observe() learns from them."""
        if draft.tokens:
            self.counts[f"drafted {draft.source}"] += len(draft)
            self.counts[f"accepted {draft.source}"] += num_accepted
        if self._prediction is not None and draft.source == PREDICTION:
            self._prediction.accepted += num_accepted
            self._prediction.rejected += len(draft) - num_accepted


def _chance(source: TextSource) -> float:
    return source.chance


def _promise(draft: Draft) -> float:
    """How many tokens of a draft are accepted on average."""
    return sum(draft.chances)
