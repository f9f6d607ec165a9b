"""The signature of a thinking block, which clients send back unread.

It does not prove an author, and may carry the thinking.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from hashlib import blake2b

# Before the packed text of a block whose thinking the client did not want to see.
PACKED = "packed:"
MAX_BYTES = 4_000_000


def signature_of(thinking: str, shown: bool) -> str:
    """A digest of thinking that the client sees, or the packed thinking that it does not see."""
    data = thinking.encode("utf-8", "surrogatepass")
    if shown:
        return blake2b(data, digest_size=24).hexdigest()
    return PACKED + base64.b64encode(zlib.compress(data)).decode()


def thinking_in(thinking: str, signature: str) -> str:
    """The thinking of a block that a client sends back; "" if neither its text nor its signature
    has any.
    """
    if thinking or not signature.startswith(PACKED):
        return thinking
    try:
        data = base64.b64decode(signature[len(PACKED) :], validate=True)
        return zlib.decompressobj().decompress(data, MAX_BYTES).decode("utf-8", "surrogatepass")
    except (binascii.Error, zlib.error, UnicodeDecodeError):
        # Another server's signature.
        return ""
