"""Salts: what keeps prefixes apart that begin with the same tokens. Knows bytes; no tokens, no trie.

A salt is mixed into the hash of a root, so that nothing under it has a hash in common with anything else. SHARED is no salt.
"""

from __future__ import annotations

import hashlib
import secrets

SALT_BYTES = 32
SHARED = b""

_IMPORT, _KEY = b"I", b"K"


def salt_of_import() -> bytes:
    """A salt that nothing was kept under yet, for what came from outside and cannot be proven."""
    return _IMPORT + secrets.token_bytes(SALT_BYTES - 1)


def is_of_import(salt: bytes) -> bool:
    """Whether keys and values under this salt may stand on some that came from outside and were not proven."""
    return salt.startswith(_IMPORT)


def salt_of_key(name: str) -> bytes:
    """The salt of all that requests with the API key of this name keep for themselves."""
    return _KEY + hashlib.blake2b(name.encode(), digest_size=SALT_BYTES - 1).digest()
