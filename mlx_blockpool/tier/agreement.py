"""What the ranks of a group agree on when they open their stores: one name for the prefixes, and which records count.

Every rank calls these functions, or none does. Knows records; no trie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from ..prefix.checkpoints import CUT
from ..ranks.group import Ranks
from ..ranks.head import Head
from ..store.paths import FOLDERS
from ..store.record import HASH_BYTES, Key, Record

_NAME_BYTES = 16


def name_for_all(ranks: Ranks, name: str) -> str:
    """The name that rank 0 gives."""
    return ranks.exchange(Head(), b"" if ranks.rank else name.encode())[0].mail.decode()


def spared(ranks: Ranks, keys: Iterable[Key]) -> set[Key]:
    """The records of the prefixes, of every kind, that the budget of rank 0 spares: those of all ranks spare them too."""
    given = b"" if ranks.rank else b"".join({key.hash for key in keys})
    found = ranks.exchange(Head(), given)[0].mail
    hashes = [found[at : at + HASH_BYTES] for at in range(0, len(found), HASH_BYTES)]
    return {Key(kind, digest) for digest in hashes for kind in FOLDERS}


def common(ranks: Ranks, records: Sequence[Record]) -> list[Record]:
    """Those of this rank's records that all ranks have, in the order in which rank 0 gives them."""
    own = {_name(record): record for record in records}
    offered = ranks.exchange(Head(), b"" if ranks.rank else b"".join(own))[0].mail
    names = [offered[at : at + _NAME_BYTES] for at in range(0, len(offered), _NAME_BYTES)]
    agreed = ranks.least([name in own for name in names])
    return [own[name] for name, all_have_it in zip(names, agreed, strict=True) if all_have_it]


def _name(record: Record) -> bytes:
    """The same for records that the ranks have written for the same tokens. Records of windows differ by where they were cut."""
    facts = f"{record.kind} {record.extra.get(CUT, '')} ".encode()
    return hashlib.blake2b(facts + record.hash, digest_size=_NAME_BYTES).digest()
