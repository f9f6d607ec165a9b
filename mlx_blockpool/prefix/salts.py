"""Salts: what keeps prefixes apart that begin with the same tokens. Knows bytes; no tokens, no trie.

A salt is mixed into the hash of a root, so that nothing under it has a hash in common with anything else. SHARED is no salt.
The first byte of a salt says what it comes from: an import, an API key, or the `cache_salt` of requests.
"""

from __future__ import annotations

import hashlib
import secrets

SALT_BYTES = 32
SHARED = b""

_IMPORT, _KEY, _REQUEST = b"I", b"K", b"S"
# The digest of a cache_salt in a salt that comes from one; behind it stands that of the key, or zeros.
MARK_BYTES = 16


def salt_of_import() -> bytes:
    """A salt that nothing was kept under yet, for what came from outside and cannot be proven."""
    return _IMPORT + secrets.token_bytes(SALT_BYTES - 1)


def is_of_import(salt: bytes) -> bool:
    """Return whether keys and values under this salt may stand on some that came from outside and were not proven."""
    return salt.startswith(_IMPORT)


def is_of_one_client(salt: bytes) -> bool:
    """Return whether all that is kept under this salt is one client's. A `cache_salt` may be known to several."""
    return salt.startswith((_IMPORT, _KEY))


def salt_of(key: str | None = None, cache_salt: str | None = None) -> bytes:
    """The salt of requests with a `cache_salt`. `key`: the API key that shares with no other; None: keys share."""
    mark = b"" if cache_salt is None else _digest(cache_salt, MARK_BYTES)
    return salt_marked(mark, key)


def salt_marked(mark: bytes, key: str | None = None) -> bytes:
    """salt_of() for the cache_salt with this mark."""
    if not mark:
        return SHARED if key is None else _KEY + _digest(key, SALT_BYTES - 1)
    left = SALT_BYTES - 1 - MARK_BYTES
    return _REQUEST + mark + (bytes(left) if key is None else _digest(key, left))


def mark_of(salt: bytes) -> bytes:
    """The mark of the `cache_salt` that a salt comes from; empty where it comes from none."""
    return salt[1 : 1 + MARK_BYTES] if salt.startswith(_REQUEST) else b""


def _digest(text: str, n_bytes: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=n_bytes).digest()
