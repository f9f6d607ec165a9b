"""Figures of a prefix cache, for people."""

from __future__ import annotations

from collections import Counter

from ..spec import ModelCacheSpec
from .known import KnownBlocks

# So many known tokens are enough to tell, and less than this part of them reused is an alarm.
ALARM_TOKENS = 20_000
ALARM_SHARE = 0.05


def alarm_of(known_tokens: int, hit_tokens: int, spec: ModelCacheSpec) -> str | None:
    """What is wrong if prompts are known again and again and next to nothing of them can be resumed."""
    if known_tokens < ALARM_TOKENS or hit_tokens > known_tokens * ALARM_SHARE:
        return None
    found = f"{hit_tokens} of {known_tokens} known tokens were reused"
    own = spec.bytes_per_checkpoint()
    return f"{found}: checkpoints are gone before they are asked for. One takes {own} bytes; raise --pool-bytes."


def by_type(known: KnownBlocks) -> dict[str, dict[str, int]]:
    """Sequences and bytes in memory by what they end with: assistant, user or system."""
    sequences = Counter(node.kind for node in known.ends())
    sizes = known.bytes_by_type()
    return {kind: {"n_sequences": sequences[kind], "n_bytes": sizes[kind]} for kind in ("assistant", "user", "system")}
