"""Ways in which a record file is not what was written, and what is left of a folder of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from store.stores import record_files

from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.prefix.trie import naming
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.record import BLOCK, Expected
from mlx_blockpool.store.verify import read


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes() or b"-")
    data[rng.randrange(len(data) // 2, len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _flip_header(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes() or b"-")
    data[rng.randrange(min(len(data), 200))] ^= 1 << rng.randrange(7)
    path.write_bytes(data)


def _truncate(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(max(1, path.stat().st_size))])


def _delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def _swap(path: Path, rng: random.Random) -> None:
    """With any other record there is; a twin of itself is no damage."""
    others = [other for other in record_files(path.parents[4]) if other != path]
    if not others:
        return _truncate(path, rng)
    other = rng.choice(others)
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)
    return None


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "flip": _flip,
    "flip header": _flip_header,
    "truncate": _truncate,
    "delete": _delete,
    "swap": _swap,
}


def remove_bad(folder: Path) -> int:
    """Every record that cannot be read goes. Returns how many that were."""
    bad = [path for path in record_files(folder) if not _is_good(path)]
    for path in bad:
        path.unlink()
    return len(bad)


def _is_good(path: Path) -> bool:
    try:
        read(Disk(), path, Expected(path.parents[2].name, BLOCK, bytes.fromhex(path.stem)), naming)
    except BadRecordError:
        return False
    return True
