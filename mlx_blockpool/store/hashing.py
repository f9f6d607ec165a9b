"""Token ids as bytes, and the hashes that name prefixes: the trie and the records on disk go by
the same ones.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from ..spec import BLOCK_TOKENS

# Token ids as 64-bit integers: image patches have negative ids of 60 bits.
TOKEN_BYTES = 8
EDGE_BYTES = BLOCK_TOKENS * TOKEN_BYTES
_FULL_EDGE = struct.Struct(f"{BLOCK_TOKENS}q")


def edge_hash(parent: bytes, edge: bytes) -> bytes:
    """The hash of a prefix, from that of its parent and its last tokens."""
    return hashlib.blake2b(parent + edge, digest_size=32).digest()


def encode(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes: compared and hashed many times faster than a list, and struct packs
    faster than array or numpy.
    """
    return (_FULL_EDGE if len(tokens) == BLOCK_TOKENS else struct.Struct(f"{len(tokens)}q")).pack(
        *tokens
    )


def decode(edge: bytes) -> list[int]:
    return list(struct.unpack(f"{len(edge) // TOKEN_BYTES}q", edge))
