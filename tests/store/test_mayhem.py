"""Thousands of damaged files, and whole folders of them: each is told, none is read wrong, and
nothing hangs.
"""

from __future__ import annotations

import random
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from store.chains import keep, note, path_of
from store.damages import ODD_FILES, make_sparse
from store.disks import StillDisk
from store.records import expected_of, make_buffers, make_file, make_record
from store.stores import open_store
from thorough import seeds

from mlx_blockpool.commands import store as store_command
from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.store.agents import Agents
from mlx_blockpool.store.fs import TEMPORARY, Disk
from mlx_blockpool.store.reader import read, read_header
from mlx_blockpool.store.record import SUFFIX, Part, header_size
from mlx_blockpool.tier.agent_records import AgentRecords

PARTS = (
    Part("layers.0.keys", "BF16", (1, 2, 9, 16)),
    Part("layers.0.values", "BF16", (1, 2, 9, 16)),
)
RECORD = make_record(parts=PARTS, bits="16")
FILE = make_file(RECORD)
HEADER = header_size(FILE)
OTHERS = [
    make_file(make_record((1, 2, 3), parts=PARTS, bits="16")),
    make_file(make_record(parts=PARTS, bits="16", namespace="fine-tuned")),
    make_file(make_record(parts=PARTS, bits="16", kind="window")),
    make_file(make_record(parts=PARTS[::-1], bits="16")),
    make_file(make_record(parts=(*PARTS, Part("more", "U8", (3,))), bits="16")),
]


def flip_header(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(HEADER)] ^= 1 << rng.randrange(8)


def flip_data(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 2, 3, 50))):
        data[rng.randrange(HEADER, len(data))] ^= 1 << rng.randrange(8)


def truncate(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def extend(rng: random.Random, data: bytearray) -> None:
    data += rng.choice((bytes, rng.randbytes))(rng.randrange(1, 5000))


def fill_with_zeros(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((0, 1, 16, 512, 4096)))
    data[start:end] = bytes(end - start)


def fill_with_noise(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 4, 64, 512)))
    data[start:end] = rng.randbytes(end - start)


def swap_files(rng: random.Random, data: bytearray) -> None:
    data[:] = rng.choice(OTHERS)


def swap_data(rng: random.Random, data: bytearray) -> None:
    data[HEADER:] = make_file(RECORD, first=rng.randrange(2, 200))[HEADER:]


def swap_parts(rng: random.Random, data: bytearray) -> None:
    half = (len(data) - HEADER) // 2
    data[HEADER:] = data[HEADER + half :] + data[HEADER : HEADER + half]


def move_bytes(rng: random.Random, data: bytearray) -> None:
    start, end = sorted(rng.randrange(len(data)) for _ in range(2))
    data[start:end] = data[start:end][::-1]


def grow_header(rng: random.Random, data: bytearray) -> None:
    data[:8] = struct.pack(
        "<Q", rng.choice((rng.randrange(1 << 64), HEADER - 8 + rng.randrange(1, 64), 1 << 20, 0))
    )


def double_part(rng: random.Random, data: bytearray) -> None:
    text = bytes(data[8:HEADER]).rstrip()
    entry = text[text.index(b'"layers.0.values"') : -1]
    text = text[:-1] + b"," + entry + b"}"
    data[:HEADER] = struct.pack("<Q", len(text)) + text


def change_word(rng: random.Random, data: bytearray) -> None:
    old, new = rng.choice(
        (
            (b"model", b"modem"),
            (b"BF16", b"I16"),
            (b"100 101", b"100 102"),
            (b"512", b"768"),
            (b"16", b"61"),
        )
    )
    data[:] = data.replace(old, new, 1)


def empty(rng: random.Random, data: bytearray) -> None:
    data.clear()


MUTATIONS: list[Callable[[random.Random, bytearray], None]] = [
    flip_header,
    flip_data,
    truncate,
    extend,
    fill_with_zeros,
    fill_with_noise,
    swap_files,
    swap_data,
    swap_parts,
    move_bytes,
    grow_header,
    double_part,
    change_word,
    empty,
]


def is_read(disk: Disk, path: Path) -> bool:
    """Whether there is a record: then it is the one that was written, to the last byte."""
    try:
        record, views, *_ = read(disk, path, expected_of(RECORD))
    except BadRecordError:
        return False
    assert record == read_header(StillDisk({path: FILE}), path, expected_of(RECORD))
    assert b"".join(views) == FILE[HEADER:]
    return True


def test_the_whole_file_is_read() -> None:
    path = Path(RECORD.file_name)
    assert is_read(StillDisk({path: FILE}), path)


@pytest.mark.parametrize("seed", seeds(2, 10))
def test_no_damaged_file_is_read(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / RECORD.file_name
    damaged = dict.fromkeys(MUTATIONS, 0)
    for n in range(500):
        mutation = MUTATIONS[n % len(MUTATIONS)]
        data = bytearray(FILE)
        mutation(rng, data)
        path.write_bytes(data)
        assert is_read(Disk(), path) == (data == FILE), (
            f"{mutation.__name__} of seed {seed}, turn {n}"
        )
        damaged[mutation] += data != FILE
    assert min(damaged.values()) > 10


def test_every_flipped_bit_is_found() -> None:
    path = Path(RECORD.file_name)
    found = set()
    for bit in range(8 * len(FILE)):
        data = bytearray(FILE)
        data[bit // 8] ^= 1 << bit % 8
        if is_read(StillDisk({path: bytes(data)}), path):
            found.add(bit)
    assert found == set()


def test_two_swapped_files_are_both_found(tmp_path: Path) -> None:
    records = [make_record((n, n + 1), parts=PARTS) for n in range(2)]
    paths = [tmp_path / record.file_name for record in records]
    for path, record in zip(paths[::-1], records, strict=True):
        path.write_bytes(make_file(record))
    for path, record in zip(paths, records, strict=True):
        for reader in (read, read_header):
            with pytest.raises(BadRecordError, match=r"A record named: got .*, expected"):
                reader(Disk(), path, expected_of(record))


def test_a_file_that_shrinks_while_it_is_read_is_found(tmp_path: Path) -> None:
    class ShrinkingDisk(Disk):
        def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
            return super().read(path, start, size)[:-5]

    path = tmp_path / RECORD.file_name
    path.write_bytes(FILE)
    assert not is_read(ShrinkingDisk(), path)


# -- a whole folder --------------------------------------------------------------------------------

PATHS = [tuple(range(1000 * n, 1000 * n + 300 + 40 * n)) for n in range(5)]


def anything(root: Path, rng: random.Random) -> Path:
    """A file of any kind in a store's folder: records, notes of headers and agents, models, and
    what was bad before.
    """
    files = [
        path
        for path in sorted(root.rglob("*"))
        if stat.S_ISREG((found := path.lstat()).st_mode) and found.st_size < 1 << 20
    ]
    kinds = sorted({(path.suffix, path.parent.name == "quarantine") for path in files})
    kind = rng.choice(kinds)
    return rng.choice(
        [path for path in files if (path.suffix, path.parent.name == "quarantine") == kind]
    )


def damage(root: Path, rng: random.Random) -> None:
    """One file, or one that was not there before, becomes something else."""
    path = anything(root, rng)
    how = rng.choice(("bytes", "bytes", "odd", "sparse", "gone", "beside", "copy"))
    if how == "bytes":
        data = bytearray(path.read_bytes() or b"-")
        rng.choice(
            (
                flip_data_anywhere,
                truncate,
                extend,
                fill_with_zeros,
                fill_with_noise,
                move_bytes,
                empty,
            )
        )(rng, data)
        path.write_bytes(data)
    elif how == "copy":
        path.write_bytes(anything(root, rng).read_bytes())
    else:
        if how == "beside":
            path = path.with_name(
                rng.choice(
                    (
                        f"{rng.randbytes(32).hex()}.safetensors",
                        f"{TEMPORARY}1-a",
                        "notes.txt",
                        "x.json",
                    )
                )
            )
        path.unlink(missing_ok=True)
        if how == "sparse":
            make_sparse(path)
        elif how != "gone":
            ODD_FILES[rng.choice(sorted(ODD_FILES))](path)


def flip_data_anywhere(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def served(root: Path) -> int:
    """What a server finds is what was written, whatever it finds; it writes the rest anew.

    Returns how much it found.
    """
    store = open_store(root)
    hits = len(store.open())
    for record in (record for tokens in PATHS for record in path_of(tokens)):
        data = b"".join(make_buffers(record, record.start))
        try:
            found, views, *_ = store.read(record.key).result(60)
            assert found.tokens == record.tokens
            assert b"".join(bytes(view) for view in views) == data
        except (BadRecordError, FileNotFoundError):
            store.gone(record.key)
            copy = partial(make_buffers, record, record.start)
            assert store.write(record, copy).refusal is None
    assert store.close()
    return hits


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", seeds(1, 10))
def test_twenty_damages_of_a_folder_cost_what_was_damaged_and_nothing_hangs(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    keep(tmp_path, *PATHS)
    for number, tokens in enumerate(PATHS):
        note(tmp_path, f"agent {number}", tokens)
    total = sum(len(path_of(tokens)) for tokens in PATHS)
    assert served(tmp_path) == total
    for turn in range(20):
        damage(tmp_path, rng)
        if turn % 4 == 3:
            assert served(tmp_path) <= total
        with suppress(OSError):
            # The first one to find a damaged database sets it aside.
            Agents(tmp_path).all()
        for agent in Agents(tmp_path).all():
            number = int(agent.name.removeprefix("agent "))
            assert agent.hashes == tuple(record.hash for record in path_of(PATHS[number]))
        store_command.stats(tmp_path)
        AgentRecords(tmp_path).listing()
        store_command.check(tmp_path, with_data=turn % 2 == 1)
    assert store_command.check(tmp_path, with_data=True, fix=True)["failed"] == []
    report = store_command.check(tmp_path, with_data=True)
    assert (report["bad"], report["orphans"], report["leftovers"]) == ([], [], [])
    served(tmp_path)
    again = open_store(tmp_path)
    # A directory under the name of one record is in its way, and in nobody else's.
    ways = [
        path
        for path in tmp_path.glob(f"models/*/*/*/*{SUFFIX}")
        if path.is_dir() and not path.is_symlink()
    ]
    assert len(again.open()) >= total - len(ways)
    assert again.problem is None
    assert again.close()
