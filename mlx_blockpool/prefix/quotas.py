"""How much of the pool the beginnings may take that one agent has brought in, and which of them go where it is more.

Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Iterator

from .charges import ANONYMOUS
from .known import KnownBlocks
from .owned import is_pinned, rings_of
from .placed import is_superseded
from .trie import Checkpoint, Node


class Quotas:
    """The most bytes of `known` for each agent, and for all together that name none; None: no limit.

    What is over goes from memory, and stays on disk where it is: first checkpoints that a conversation has left behind, then the
    ends of sequences, the one used longest ago first, then other checkpoints. Nothing of another agent goes, nothing that is
    pinned, in use, or what others of its blocks lead on from.
    """

    def __init__(self, known: KnownBlocks, agent_bytes: int | None, anonymous_bytes: int | None) -> None:
        self.known = known
        self.agent_bytes = agent_bytes
        self.anonymous_bytes = anonymous_bytes
        self.num_forgotten = 0

    def limit(self, account: str) -> int | None:
        return self.anonymous_bytes if account == ANONYMOUS else self.agent_bytes

    def enforce(self, account: str) -> None:
        """Forget what is over the limit of an account, as far as it may go."""
        if not self._is_over(account):
            return
        self._forget_checkpoints(account, only_left_behind=True)
        self._forget_ends(account)
        self._forget_checkpoints(account)

    def _is_over(self, account: str) -> bool:
        limit = self.limit(account)
        return limit is not None and self.known.charges.nbytes(account) > limit

    def _forget_ends(self, account: str) -> None:
        went = True
        # Where an end has gone, what it stood on may be one.
        while went and self._is_over(account):
            went = False
            for node in self._ends(account):
                if self._is_over(account):
                    self.known.let_go(node)
                    self.num_forgotten, went = self.num_forgotten + 1, True

    def _ends(self, account: str) -> Iterator[Node]:
        """Nodes of this account that nothing in memory stands on."""
        known = self.known
        for group in known.full_groups[:1]:
            for block in known.pool.evictable(group):
                node = known.owner_of((group, block))
                if node is not None and known.charges.account_of((group, block)) == account and _is_alone(node, account):
                    yield node

    def _forget_checkpoints(self, account: str, only_left_behind: bool = False) -> None:
        if not self._is_over(account):
            return
        nodes = {checkpoint: node for node in self.known.trie for checkpoint in node.checkpoints.values()}
        for checkpoint in [what for what in self.known.charges.of(account) if isinstance(what, Checkpoint)]:
            node = nodes[checkpoint]
            may_go = not only_left_behind or is_superseded(node, checkpoint)
            if self._is_over(account) and may_go and not is_pinned(node, checkpoint) and self._frees(account, checkpoint):
                self.known.drop_checkpoint(node, checkpoint)
                self.num_forgotten += 1

    def _frees(self, account: str, checkpoint: Checkpoint) -> bool:
        """Whether anything of the account is in it."""
        charges = self.known.charges
        return checkpoint.nbytes > 0 or any(charges.account_of(owned) == account for owned in rings_of([checkpoint]))


def _is_alone(node: Node, account: str) -> bool:
    """Whether no block in memory and no other agent's checkpoint goes with a node."""
    others = any(checkpoint.account not in (account, None) for checkpoint in node.checkpoints.values())
    return not others and not any(child.resident or child.checkpoints for child in node.children)
