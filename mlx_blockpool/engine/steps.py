"""DecodeSteps: the decode steps of an engine, which verify drafts where that pays.

A step with drafts waits for the step before it, and each of its rows costs time. So it is asked first whether drafts would pay if
the tokens in flight are those that were guessed; only then they are read. Drafts take what room there is and preempt nobody.
Owned by the generation thread.
"""

from __future__ import annotations

import logging
from collections import Counter

from ..config import EngineConfig
from ..drafts.draft import Draft
from ..drafts.drafting import Drafting
from ..ranks.group import Ranks
from .caches import Caches
from .decode import DecodeBatch
from .masks import Forced, fits
from .sequence import Sequence
from .verify import Emitted

log = logging.getLogger(__name__)

# The most tokens that are copied of what has followed a prompt before.
MOST_FOLLOWING = 2048


class DecodeSteps:
    """`drafting`: the drafters' common part; None where nothing is drafted, and `off` says why.

    counts: the engine's, with verifications, the forwards over drafts, and the tokens `drafted <source>` and `accepted <source>`.
    """

    def __init__(self, config: EngineConfig, caches: Caches, ranks: Ranks, counts: Counter[str]) -> None:
        self.counts = counts
        self._caches = caches
        self._config, self._ranks = config, ranks
        self.drafting: Drafting | None = None
        self.off: str | None = None
        self.decide()

    def decide(self) -> None:
        """Decide whether to draft, by what the caches know now; once more of that is known, decide again."""
        config, caches = self._config, self._caches
        self.off = _why_off(config, caches, self._ranks)
        if self.off is None and self.drafting is None:
            self.drafting = Drafting(config.drafts, config.most_drafted, caches.curve, self.counts, caches.sources)
        elif self.off is not None and config.drafts != "off":
            log.info("Nothing is drafted: %s", self.off)

    def start(self, sequence: Sequence) -> None:
        """Draft for a sequence that has started, or has started again."""
        if self.drafting is not None and sequence.drafter is None:
            request, known = sequence.request, sequence.tokens[: sequence.emitted]
            following = self._caches.following(sequence, MOST_FOLLOWING)
            sequence.drafter = self.drafting.drafter(
                known, request.agent, request.salt, following, request.prediction, sequence.learned
            )

    def end(self, sequence: Sequence) -> None:
        """Remember the reply of a sequence that has ended, for its agent's next one."""
        agent = sequence.request.agent
        if self.drafting is not None and agent is not None:
            self.drafting.replies.remember(agent, sequence.request.salt, sequence.generated(0))

    def run(self, batch: DecodeBatch) -> tuple[list[Emitted], dict[Sequence, Exception], Forced]:
        """One step of the batch: its run(), or its verify() where drafts pay."""
        drafts = {} if self.drafting is None else self._choose(batch, self.drafting)
        if not drafts:
            return batch.run()
        found = {member: list(draft.tokens) for member, draft in drafts.items()}
        verify = batch.verify if self._caches.verifies == "rows" else batch.verify_alone
        verified = verify(found, self._least_forced(batch))
        self.counts["verifications"] += 1
        for member, draft in drafts.items():
            if member.drafter is not None:
                member.drafter.verified(draft, verified.accepted[member])
        return verified.emitted, verified.failed, verified.forced

    def jumps(self, batch: DecodeBatch, forced: Forced) -> Forced:
        """The runs of forced tokens that are worth a pass, for which all members wait, with room reserved for them."""
        runs: Forced = {}
        for member, run in forced.items():
            is_worth_it = len(run) >= self._least_forced(batch) and fits(run, runs)
            if is_worth_it and member in batch.members and self._caches.reserve_run(member, len(run)):
                runs[member] = run
        return runs

    def _least_forced(self, batch: DecodeBatch) -> int:
        return max(self._config.forced_tokens, len(batch))

    def _choose(self, batch: DecodeBatch, drafting: Drafting) -> dict[Sequence, Draft]:
        """The drafts of those members for which they pay in this step."""
        if len(batch) > 1 and self._caches.verifies == "alone" and drafting.fixed is None:
            # A forward for each member takes about as long as one for all of them, so that the others would lose too much.
            return {}
        # Behind the last token of a prompt nothing is drafted: its drafter has seen that token.
        drafters = [member.drafter if emits else None for member, emits in zip(batch.members, batch.emitting, strict=True)]
        if not drafting.expects(drafters):
            return {}
        known = batch.known()
        left = [member.left_to_emit() - 1 for member in batch.members]
        chosen: dict[Sequence, Draft] = {}
        for member, token, draft in zip(batch.members, known, drafting.propose(drafters, known, left), strict=True):
            length = member.until_end([token, *batch.possible(draft.tokens)]) - 1
            if length and self._caches.reserve_rows(member, 1 + length):
                chosen[member] = draft.first(length)
        return chosen


def _why_off(config: EngineConfig, caches: Caches, ranks: Ranks) -> str | None:
    """Why nothing is drafted; None: drafts are on."""
    if config.drafts == "off":
        return "drafts are off"
    if ranks.size > 1:
        return "several ranks run the model together"
    if caches.verifies is None:
        return "the model does not compute several tokens of a sequence as it computes them one by one"
    if config.drafts == "auto" and caches.curve is None:
        why = caches.unmeasurable.get("curve")
        if why is not None:
            return f"it was not measured what forwards cost: {why}"
        return "it is measured later what forwards cost" if caches.is_unmeasured else "it was not measured what forwards cost"
    return None
