"""What state machines of prefix caches have in common: conversations that hold caches, and what
is always right of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant
from prefix.computed import look
from prefix.replica import Follower

from mlx_blockpool.prefix.cache import PrefixCache

LENGTHS = (1, 40, 255, 256, 257, 300, 310, 512, 600)


@dataclass(eq=False)
class Conversation:
    """`tokens` of which the caches hold the first `fed`. `room`: tokens that may still come after
    the prompt.

    `forked`: it shares blocks that it did not expect to share, so that its room is not certain any
    more.
    """

    tokens: list[int]
    caches: list[Any]
    fed: int
    prompt: int
    room: int
    forked: bool = False


class ConversationMachine(RuleBasedStateMachine):
    prefix: PrefixCache
    live: list[Conversation]
    follower: Follower | None = None

    def look_into(self, conversation: Conversation) -> None:
        for cache in conversation.caches:
            assert cache.offset == conversation.fed
            assert cache.empty() == (not conversation.fed)
        look(conversation.caches, conversation.tokens, conversation.fed)

    @invariant()
    def nobody_writes_into_what_others_read(self) -> None:
        for conversation in self.live:
            self.look_into(conversation)

    @invariant()
    def trie_and_pool_agree(self) -> None:
        self.prefix.check()

    @invariant()
    def the_changes_of_the_trie_make_a_replica(self) -> None:
        if self.follower is None or self.follower.index is not self.prefix.index:
            self.follower = Follower(self.prefix.index)
        self.follower.check()
