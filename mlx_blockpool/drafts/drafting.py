"""Drafting: what the drafters of one engine share, and when a batch takes drafts; ReplyMemory: the
last replies of agents.

Does not know models or arrays. Owned by the generation thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from .curve import CostCurve
from .draft import NOTHING, Draft, Prediction
from .drafter import Drafter
from .index import SuffixIndex
from .lengths import choose_lengths, choose_padded_lengths, least_chance
from .text_source import BREAK

# Tokens of prompts that are indexed between two steps, of all requests together: about 5 ms.
STEP_TOKENS = 8192
# Contexts of batches are distinguished by this many tokens.
CONTEXT_TOKENS = 512
# Agents that are remembered, and the tokens of the replies of each.
MOST_AGENTS = 64
MOST_TOKENS = 8192


class Drafting:
    """`drafts`: "auto", as the curve says; or up to this many tokens of each member in each
    forward, whatever they cost.

    padded:  a forward computes as many tokens of each member as of the one that has most.
    most:    the most tokens drafted of one member in auto.
    curve:   what forwards cost; None: not known, and auto drafts nothing.
    counts:  tokens `drafted <source>` and `accepted <source>`.
    priors:  what is known of each source's acceptance, by its name.
    replies: the last replies of agents.
    has_head: the model has a prediction head, which guesses too.
    guess_share: the part of a plain step that a guess takes, until one was timed.
    """

    def __init__(
        self,
        drafts: str | int = "auto",
        most: int = 16,
        curve: CostCurve | None = None,
        counts: Counter[str] | None = None,
        padded: bool = False,
        has_head: bool = False,
        guess_share: float = 0.1,
    ) -> None:
        assert drafts == "auto" or isinstance(drafts, int), f"drafts are {drafts!r}"
        self.fixed = None if isinstance(drafts, str) else drafts
        self.most = most if self.fixed is None else self.fixed
        self.curve = curve
        self._padded = padded
        self._has_head, self._guess_share = has_head, guess_share
        # The seconds of a guess of the head, by the members of the batch.
        self._guesses: dict[int, float] = {}
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.priors: dict[str, list[float]] = {}
        self.replies = ReplyMemory()
        # By the members of a batch and their context in CONTEXT_TOKENS: the curve, and the least
        # chance of a next token after which drafts can pay.
        self._curves: dict[tuple[int, int], tuple[CostCurve, float]] = {}

    def drafter(
        self,
        prompt: Sequence[int],
        agent: str | None = None,
        salt: bytes = b"",
        following: Sequence[int] = (),
        prediction: Prediction | None = None,
    ) -> Drafter:
        """A drafter for one request.

        `following`: tokens that are known to have followed this very prompt.
        """
        made = Drafter(prompt, self.priors, self.counts)
        if following:
            made.add_text("prefix", SuffixIndex(following), place=0)
        replies = None if agent is None else self.replies.recall(agent, salt)
        if replies is not None:
            made.add_text("replies", replies)
        if self._has_head:
            made.add_head()
        if prediction is not None and prediction.text.tokens:
            made.add_prediction(prediction)
        return made

    def expects(
        self, drafters: Sequence[Drafter | None], again: Sequence[int] | None = None
    ) -> bool:
        """Whether it is likely to pay to read the tokens in flight of a batch, and to draft
        after them. Takes microseconds.

        `again`: how many tokens of each member are computed again; None: none.
        """
        if self.fixed is not None:
            self._catch_up(drafters)
            return self.most > 0 and any(
                drafter is not None and (drafter.head is not None or drafter.expects() > 0)
                for drafter in drafters
            )
        if self.curve is None:
            return False
        curve, least = self._curve_of(self.curve, drafters)
        if least > 1:
            # Not even tokens that are sure to be right would pay, so that nothing is indexed.
            return False
        self._catch_up(drafters)
        found = [[] if each is None else each.outlook(self.most, least) for each in drafters]
        if any(found) and any(self._chosen(found, curve, again)):
            return True
        return self.num_guesses(drafters, again) > 0

    def num_guesses(
        self, drafters: Sequence[Drafter | None], again: Sequence[int] | None = None
    ) -> int:
        """How many tokens after the next one the head should guess for each member, by what that
        costs and by how often it was right; 0 where that does not pay, or texts promise more.

        `again`: as in expects().
        """
        heads = [None if drafter is None else drafter.head for drafter in drafters]
        if not any(heads) or self.curve is None or self.fixed is not None:
            return self.most if any(heads) and self.fixed is not None else 0
        curve, least = self._curve_of(self.curve, drafters)
        if least > 1:
            return 0
        found: list[list[float]] = []
        for drafter, head in zip(drafters, heads, strict=True):
            guesses = [] if head is None else head.outlook(self.most)
            texts = [] if drafter is None else drafter.outlook(self.most, least)
            found.append([] if sum(texts) >= sum(guesses) else guesses)
        members = len(drafters)
        seconds = self._guesses.get(members, curve.plain_seconds(members) * self._guess_share)
        return max(self._chosen(found, curve.with_guesses(members, seconds), again), default=0)

    def note_guesses(self, members: int, guesses: int, seconds: float) -> None:
        """Note how long the head took for some guesses for each of `members`."""
        each = seconds / guesses
        # One that is disturbed counts less.
        self._guesses[members] = min(each, (self._guesses.get(members, each) + each) / 2)

    def propose(
        self,
        drafters: Sequence[Drafter | None],
        next_tokens: Sequence[int],
        at_most: Sequence[int],
        again: Sequence[int] | None = None,
    ) -> list[Draft]:
        """A draft for each member after its next token, as long as it pays; all are empty where
        nothing does.

        `at_most`: tokens that fit into each member's blocks and that it may still emit after its
        next one. `again`: as in expects().
        """
        members = zip(drafters, next_tokens, at_most, strict=True)
        drafts = [
            NOTHING if drafter is None else drafter.propose(token, min(most, self.most))
            for drafter, token, most in members
        ]
        if self.fixed is not None:
            return drafts
        if self.curve is None:
            return [NOTHING] * len(drafts)
        curve, _ = self._curve_of(self.curve, drafters)
        counts = self._chosen([draft.chances for draft in drafts], curve, again)
        return [draft.first(count) for draft, count in zip(drafts, counts, strict=True)]

    def forced_lengths(
        self, drafters: Sequence[Drafter | None], forced: Sequence[int]
    ) -> list[int]:
        """How many of the `forced` tokens of each member to compute in one forward after a step,
        while the others wait.

        Chosen as drafts are, with tokens that are certain to be accepted: all 0 where that does not
        pay, and without a curve.
        """
        if self.curve is None:
            return [0] * len(forced)
        curve, _ = self._curve_of(self.curve, drafters)
        return choose_lengths(
            [[1.0] * count for count in forced],
            curve.with_second_forward(len(drafters)),
            len(drafters),
        )

    def _chosen(
        self,
        chances: Sequence[Sequence[float]],
        curve: CostCurve,
        again: Sequence[int] | None,
    ) -> list[int]:
        if self._padded:
            return choose_padded_lengths(chances, curve, again or [0] * len(chances))
        return choose_lengths(chances, curve, len(chances))

    def _curve_of(
        self, measured: CostCurve, drafters: Sequence[Drafter | None]
    ) -> tuple[CostCurve, float]:
        """The curve of a batch, and the least chance that pays by it.

        Members without a drafter count as the others do.
        """
        members, known = (
            len(drafters),
            [len(drafter.text) for drafter in drafters if drafter is not None],
        )
        stretch = sum(known) // max(1, len(known)) // CONTEXT_TOKENS
        found = self._curves.get((members, stretch))
        if found is None:
            curve = measured.at_context(stretch * CONTEXT_TOKENS, members)
            found = self._curves[members, stretch] = curve, least_chance(curve, members, self.most)
        return found

    def _catch_up(self, drafters: Sequence[Drafter | None]) -> None:
        left = STEP_TOKENS
        for drafter in drafters:
            if drafter is not None and drafter.is_indexing and left > 0:
                left -= drafter.catch_up(left)


class ReplyMemory:
    """The last replies of each agent as one text, a BREAK before each. Agents under unlike salts
    never meet.

    The least recently used agent is forgotten first.
    """

    def __init__(self, most_agents: int = MOST_AGENTS, most_tokens: int = MOST_TOKENS) -> None:
        self._most_agents, self._most_tokens = most_agents, most_tokens
        self._texts: OrderedDict[tuple[str, bytes], SuffixIndex] = OrderedDict()

    def __len__(self) -> int:
        return len(self._texts)

    def remember(self, agent: str, salt: bytes, reply: Sequence[int]) -> None:
        """Append a reply to those of an agent.

        Where they become too many tokens, the oldest are forgotten.
        """
        added = [BREAK, *reply[-(self._most_tokens - 1) :]]
        text = self._texts.get((agent, salt))
        if text is None:
            text = SuffixIndex()
        elif len(text) + len(added) > self._most_tokens:
            # Requests that run keep the longer text. Half of the bound stays free, so that this is
            # rare.
            text = SuffixIndex(
                _last_replies(text.tokens, max(0, self._most_tokens // 2 - len(added)))
            )
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
    """The last whole replies of a text that have together at most `at_most` tokens, their BREAKs
    included.
    """
    starts = (
        number
        for number in range(max(0, len(tokens) - at_most), len(tokens))
        if tokens[number] == BREAK
    )
    return tokens[next(starts, len(tokens)) :]
