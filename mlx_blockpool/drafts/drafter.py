"""Drafter: drafts for one request, from the source that is likely to be right for longest.

Does not know models or arrays. Owned by the generation thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

from .acceptance import AcceptanceRates
from .draft import NOTHING, Draft, Prediction
from .head_source import HEAD, HEAD_ASSUMED, HeadSource
from .index import SuffixIndex
from .text_source import TextDraftSource

PREDICTION = "prediction"


class Drafter:
    """The sources of one request. It sees each token once it is emitted.

    priors: the acceptance of each source in all requests, by its name, which this one starts from
    and adds to.
    counts: tokens drafted and accepted, by source: `drafted <source>` and `accepted <source>`.
    head:   the guesses of the model's prediction head; None without one.
    is_indexing: whether catch_up() has tokens left to index.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        priors: dict[str, list[float]] | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        self._priors = {} if priors is None else priors
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.text = SuffixIndex(prompt)
        self._prediction: Prediction | None = None
        self.is_indexing = True
        self.head: HeadSource | None = None
        self.sources: list[TextDraftSource] = []
        self.add_text("context", self.text)

    def add_text(self, name: str, index: SuffixIndex, place: int = -1) -> None:
        """Add a source that follows a text, from `place` on if that is known to come next."""
        self.sources.append(TextDraftSource(name, index, self.text, self._acceptance(name), place))

    def add_head(self) -> None:
        """Add the guesses of the model's prediction head."""
        self.head = HeadSource(self._priors.setdefault(HEAD, list(HEAD_ASSUMED)))

    def add_prediction(self, prediction: Prediction) -> None:
        """Add a source that follows what the client expects, and count what is drafted from it.

        It goes before equal guesses.
        """
        self._prediction = prediction
        self.add_text(PREDICTION, prediction.text, place=0)
        self.sources.insert(0, self.sources.pop())

    def _acceptance(self, name: str) -> AcceptanceRates:
        found = AcceptanceRates(self._priors.get(name))
        found.prior = self._priors.setdefault(name, found.prior)
        return found

    def catch_up(self, at_most: int) -> int:
        """Index up to `at_most` more tokens of its texts. Returns how many."""
        left = at_most
        for source in self.sources:
            left -= source.index.catch_up(left)
        self.is_indexing = left == 0
        return at_most - left

    def observe(self, tokens: Sequence[int]) -> None:
        """Observe emitted tokens."""
        append, sources = self.text.append, self.sources
        for token in tokens:
            append(token)
            for source in sources:
                source.observe(token)
            if self.head is not None:
                self.head.observe(token)

    def expects(self) -> float:
        """The chance that the next token, which is not known yet, is as some source guesses it.

        0: nothing is guessed.
        """
        return max(source.chance for source in self.sources)

    def outlook(self, at_most: int, least: float = 0.0) -> list[float]:
        """The chances of the tokens of propose() while the next token is not known, each that it
        and all before it are right.

        Empty where no source has at least the chance `least`.
        """
        likeliest = max(self.sources, key=attrgetter("chance"))
        return likeliest.outlook(at_most) if likeliest.chance >= least else []

    def propose(self, next_token: int, at_most: int) -> Draft:
        """Up to `at_most` tokens after `next_token`, which is known and not emitted yet; empty:
        no source guesses any.
        """
        if at_most <= 0:
            return NOTHING
        found = [source.guess(next_token, at_most) for source in self.sources]
        if self.head is not None:
            found.append(self.head.guess(next_token, at_most))
        return max(found, key=_promise)

    def verified(self, draft: Draft, num_accepted: int) -> None:
        """Count the tokens of a draft that were verified, and of those the accepted ones.
        observe() learns from them.
        """
        if draft.tokens:
            self.counts[f"drafted {draft.source}"] += len(draft)
            self.counts[f"accepted {draft.source}"] += num_accepted
        if self._prediction is not None and draft.source == PREDICTION:
            self._prediction.accepted += num_accepted
            self._prediction.rejected += len(draft) - num_accepted


def _promise(draft: Draft) -> float:
    """How many tokens of a draft are accepted on average."""
    return sum(draft.chances)
