"""Which blocks are free, held, evictable or pinned. Knows block ids and their order of use; no tokens, arrays or disk."""

from .blocks import BlockCounts
from .pool import BlockPool
from .table import BlockTable

__all__ = ["BlockCounts", "BlockPool", "BlockTable"]
