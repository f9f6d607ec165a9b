"""Salts: what separates prefixes that begin with the same tokens. Knows bytes; no tokens, no trie.

A salt is mixed into the hash of a root, so that no hash under it occurs elsewhere. SHARED stands
for no salt. The first byte of a salt says what it comes from: an API key, the `cache_salt` of
requests, or the origin of a page.
"""

from __future__ import annotations

import hashlib

SALT_BYTES = 32
SHARED = b""

_KEY, _REQUEST, _ORIGIN = b"K", b"S", b"O"
# The digest of a cache_salt in a salt that comes from one; that of the key, or zeros, follow it.
MARK_BYTES = 16


def is_of_one_client(salt: bytes) -> bool:
    """Return whether all prefixes under this salt are one client's.

    Several clients may use the same `cache_salt`.
    """
    return salt.startswith(_KEY)


def salt_of(
    key: str | None = None, cache_salt: str | None = None, origin: str | None = None
) -> bytes:
    """The salt of a request's prefixes, by all that it must have in common with others to share
    them.

    key: the API key that shares with no other, or None where keys share. origin: of the page of
    another site that sent it.
    """
    mark = b"" if cache_salt is None else _digest(cache_salt, MARK_BYTES)
    salt = salt_marked(mark, key)
    if origin is None:
        return salt
    return (
        _ORIGIN
        + hashlib.blake2b(salt + _digest(origin, SALT_BYTES), digest_size=SALT_BYTES - 1).digest()
    )


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
