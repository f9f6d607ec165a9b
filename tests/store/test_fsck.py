"""A store's folder as files alone: what is listed, what is judged bad, and what may be removed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from store.records import PARENT, make_file, make_record, prefix_hash

from mlx_blockpool.store.fs import TEMPORARY
from mlx_blockpool.store.fsck import Judged, judge, remove, remove_empty, set_aside
from mlx_blockpool.store.hashing import encode
from mlx_blockpool.store.record import Record
from mlx_blockpool.store.scan import Listing
from mlx_blockpool.tier.agent_records import StoredPaths

LONG_AGO = 1_000_000_000.0


def place(root: Path, record: Record) -> Path:
    path = root / "models" / record.namespace / "blocks" / record.hash.hex()[:2] / record.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(make_file(record))
    return path


def chain(lengths: list[int], namespace: str = "model") -> list[Record]:
    """Records of one sequence, each behind the one before."""
    found: list[Record] = []
    parent, start = PARENT, 0
    for length in lengths:
        tokens = tuple(range(start, start + length))
        base = make_record(tokens, namespace=namespace)
        record = Record(
            base.kind,
            namespace,
            prefix_hash(parent, tokens),
            parent,
            start,
            encode(tokens),
            base.parts,
        )
        found.append(record)
        parent, start = record.hash, start + length
    return found


def judged(root: Path, with_data: bool = False) -> list[Judged]:
    return list(judge(Listing(root).records, with_data))


def problem(root: Path, with_data: bool = False) -> str | None:
    (only,) = judged(root, with_data)
    return only.problem


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    listing = Listing(tmp_path / "none")
    assert (listing.models, listing.records, listing.unreadable) == ({}, [], [])


def test_listing_sorts_files_by_what_their_names_say(tmp_path: Path) -> None:
    path = place(tmp_path, make_record())
    (tmp_path / "models/model/model.json").write_text('{"model_id": "small"}')
    (tmp_path / "models/other").mkdir()
    for name in (
        "store.db",
        "store.db-wal",
        "quarantine/0123456789abcdef-x.safetensors",
        "notes.txt",
        "models/model/blocks/x.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    listing = Listing(tmp_path)
    assert listing.models == {"model": {"model_id": "small"}, "other": None}
    assert [file.path for file in listing.records] == [path]
    assert [file.path.name for file in listing.quarantined] == ["0123456789abcdef-x.safetensors"]
    assert sorted(path.name for path in listing.foreign) == ["notes.txt", "x.txt"]
    assert listing.of("other") == []


def test_old_temporary_files_are_leftovers_and_young_ones_are_live(tmp_path: Path) -> None:
    shard = place(tmp_path, make_record()).parent
    for folder in (shard, tmp_path, tmp_path / "models/model"):
        (folder / f"{TEMPORARY}1-old").write_bytes(b"x")
        os.utime(folder / f"{TEMPORARY}1-old", (LONG_AGO, LONG_AGO))
        (folder / f"{TEMPORARY}1-young").write_bytes(b"x")
    listing = Listing(tmp_path)
    assert {file.path.parent for file in listing.leftovers} == {
        shard,
        tmp_path,
        tmp_path / "models/model",
    }
    assert {file.path.name for file in listing.leftovers} == {f"{TEMPORARY}1-old"}
    assert listing.foreign == []


def test_links_and_pipes_are_foreign_and_never_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    shard = place(root, make_record()).parent
    away = place(outside, make_record(tuple(range(7))))
    (shard / ("0" * 64 + ".safetensors")).symlink_to(away)
    os.mkfifo(shard / ("1" * 64 + ".safetensors"))
    (root / "models/linked").symlink_to(outside / "models/model")
    (root / "agents").symlink_to(outside)
    listing = Listing(root)
    assert len(listing.records) == 1
    assert list(listing.models) == ["model"]
    assert len(listing.foreign) == 4


def test_a_good_record_is_known_by_its_place(tmp_path: Path) -> None:
    record = make_record()
    place(tmp_path, record)
    for with_data in (False, True):
        (found,) = judged(tmp_path, with_data)
        assert found.problem is None
        assert found.header == replace(record, parts=())


def test_a_flipped_bit_in_the_data_is_found_by_its_checksum_only(tmp_path: Path) -> None:
    path = place(tmp_path, make_record())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert problem(tmp_path) is None
    assert "Checksum of ring" in (problem(tmp_path, with_data=True) or "")


def test_what_a_header_scan_finds(tmp_path: Path) -> None:
    path = place(tmp_path, make_record())
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert "Bytes of the file" in (problem(tmp_path) or "")
    path.write_bytes(data.replace(b"512", b"513", 1))
    assert "Header" in (problem(tmp_path) or "")
    path.write_bytes(data)
    other = path.rename(path.with_name("f" * 64 + ".safetensors"))
    assert "A record named" in (problem(tmp_path) or "")
    wrong = path.parent.with_name("00")
    wrong.mkdir()
    other.rename(wrong / path.name)
    assert "Folder: got 00" in (problem(tmp_path) or "")


def test_a_record_under_another_namespace_is_bad(tmp_path: Path) -> None:
    place(tmp_path, make_record())
    (tmp_path / "models/model").rename(tmp_path / "models/other")
    assert "Namespace: got model, expected other." in (problem(tmp_path) or "")


def test_a_file_that_goes_away_is_neither_good_nor_bad(tmp_path: Path) -> None:
    path = place(tmp_path, make_record())
    files = Listing(tmp_path).records
    path.unlink()
    assert list(judge(files)) == [Judged(files[0])]


def test_orphans_are_what_no_chain_of_full_blocks_leads_to(tmp_path: Path) -> None:
    records = chain([256, 256, 20, 5])
    paths = [place(tmp_path, record) for record in records]
    # Nothing goes on behind a partial block.
    assert [file.path for file in StoredPaths(judged(tmp_path)).orphans] == [paths[3]]
    paths[0].unlink()
    assert {file.path for file in StoredPaths(judged(tmp_path)).orphans} == set(paths[1:])


def test_remove_takes_records_and_leaves_what_is_not_the_stores(tmp_path: Path) -> None:
    path = place(tmp_path, make_record())
    named = path.with_name("notes.safetensors")
    named.write_bytes(b"mine")
    listing = Listing(tmp_path)
    assert {file.path for file in listing.records} == {path, named}
    assert [file.path for file in remove(listing.records)] == [path]
    assert named.exists()
    assert remove(listing.records) == []


def test_remove_does_not_unlink_a_link_that_took_a_records_name(tmp_path: Path) -> None:
    path = place(tmp_path, make_record())
    files = Listing(tmp_path).records
    kept = path.rename(tmp_path / "kept")
    path.symlink_to(kept)
    assert remove(files) == []
    assert path.is_symlink()


def test_remove_empty_works_inwards_out_and_keeps_what_holds_something(tmp_path: Path) -> None:
    path = place(tmp_path, make_record())
    place(tmp_path, make_record(namespace="other"))
    path.unlink()
    gone = remove_empty(Listing(tmp_path).folders)
    assert gone == [path.parent, path.parent.parent, tmp_path / "models/model"]
    assert (tmp_path / "models/other/blocks").is_dir()


def test_set_aside_moves_a_bad_file_with_its_reason(tmp_path: Path) -> None:
    path = place(tmp_path, make_record())
    path.write_bytes(b"short")
    (bad,) = judged(tmp_path)
    assert bad.problem is not None
    set_aside(tmp_path, bad.file.path, bad.problem)
    assert not path.exists()
    aside, reason = sorted((tmp_path / "quarantine").iterdir())
    assert aside.read_bytes() == b"short"
    assert "Bytes of the file: got 5" in reason.read_text()
    assert len(Listing(tmp_path).quarantined) == 2


def test_a_folder_that_cannot_be_read_is_said_so(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    ((path, reason),) = Listing(file).unreadable
    assert path == file
    assert "Not a directory" in str(reason)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_a_model_file_that_says_nothing_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "models/model").mkdir(parents=True)
    (tmp_path / "models/model/model.json").write_text(text)
    assert Listing(tmp_path).models == {"model": None}
