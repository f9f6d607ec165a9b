"""mlx-blockpool store, called as a user calls it, on what real prefix caches of tiny models have
kept.
"""

from __future__ import annotations

import errno
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load
from models import save_model
from platformdirs.macos import MacOS
from platformdirs.unix import Unix
from ranks.threads import ThreadRanks, on_ranks

from mlx_blockpool.cli import main
from mlx_blockpool.config import KVBits, StoreConfig
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.plugins import spec_of_model
from mlx_blockpool.spec import FullLayer, ModelCacheSpec
from mlx_blockpool.store import fsck, record
from mlx_blockpool.store import headers as headers_module
from mlx_blockpool.store.agents import Agents
from mlx_blockpool.store.db import DATABASE_FILES
from mlx_blockpool.store.fs import TEMPORARY, Disk, Entry
from mlx_blockpool.store.paths import default_folder
from mlx_blockpool.tier import opening
from mlx_blockpool.tier.cache import TieredPrefixCache
from mlx_blockpool.tier.opening import open_store
from mlx_blockpool.tier.write_behind import StoredPrefixes

LONG_AGO = 1_000_000_000.0
FIRST = random.Random(0).choices(range(90), k=700)
# Shares two full blocks with the first.
SECOND = FIRST[:512] + random.Random(1).choices(range(90), k=300)


def open_prefix(root: Path, folder: Path, **limits: int) -> tuple[Any, TieredPrefixCache]:
    model, _, config = load(str(folder), return_config=True)
    spec = spec_of_model(model, config, folder.name)
    store = open_store(
        StoreConfig(root, min_free_bytes=0, flush_seconds=60, **limits),
        folder,
        None,
        spec,
        folder.name,
    )
    return model, TieredPrefixCache(KVArena(spec, 20_000_000), store=store)


def fill(root: Path, folder: Path, *prompts: list[int], **limits: int) -> str:
    """Compute prompts and close the store. Returns the namespace."""
    model, prefix = open_prefix(root, folder, **limits)
    for tokens in prompts:
        fetched = prefix.acquire(tokens, 1)
        model(mx.array([fetched.rest]), cache=fetched.caches)
        prefix.release(tokens, fetched.caches)
    assert prefix.close()
    assert isinstance(prefix.stored, StoredPrefixes)
    return prefix.stored.store.namespace


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "alpha", "llama")


@pytest.fixture(scope="module")
def filled(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("filled") / "store"
    fill(root, llama, FIRST, SECOND)
    return root


@pytest.fixture
def root(filled: Path, tmp_path: Path) -> Path:
    """Five records: two full blocks that are shared, then a tail, and a full block with a tail."""
    return Path(shutil.copytree(filled, tmp_path / "store"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def store(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str, status: int = 0) -> Any:
    """What an action reports."""
    capsys.readouterr()
    assert main(["store", *arguments, "--store-dir", str(root), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def said(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str, status: int = 0) -> str:
    """What an action prints for people."""
    capsys.readouterr()
    assert main(["store", *arguments, "--store-dir", str(root)]) == status
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> str:
    """The one line of an error."""
    capsys.readouterr()
    assert main(["store", *arguments, "--store-dir", str(root)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mlx-blockpool: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("mlx-blockpool: error: ")


def records(root: Path) -> list[Path]:
    return sorted((root / "models").rglob("*.safetensors"))


def headers(path: Path) -> dict[str, str]:
    data = path.read_bytes()
    found: dict[str, str] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[
        "__metadata__"
    ]
    return found


def at(root: Path, start: int) -> list[Path]:
    """The records that begin at a token."""
    return [path for path in records(root) if headers(path)["start"] == str(start)]


def ids(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


# -- path and stats --------------------------------------------------------------------------------


def test_path_prints_the_folder_that_need_not_be_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert said(capsys, tmp_path / "none", "path") == f"{tmp_path / 'none'}\n"
    assert main(["store", "path"]) == 0
    assert capsys.readouterr().out == f"{default_folder()}\n"


@pytest.mark.parametrize(("system", "below"), [(MacOS, "Library/Caches"), (Unix, ".cache")])
def test_the_default_folder_is_in_the_users_caches(
    system: type, below: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("platformdirs.PlatformDirs", system)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == Path(os.environ["XDG_CACHE_HOME"]) / "mlx-blockpool"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == tmp_path / below / "mlx-blockpool"


def test_stats_of_two_models(
    capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    name = fill(root, save_model(tmp_path / "beta", "llama", seed=1), FIRST[:300])
    found = store(capsys, root, "stats")
    beta = next(m for m in found["models"] if m["namespace"] == name)
    alpha = next(m for m in found["models"] if m["namespace"] != name)
    assert (alpha["model"]["model_id"], alpha["records"], alpha["tokens"]) == (
        "alpha",
        5,
        512 + 188 + 300,
    )
    assert (beta["model"]["model_id"], beta["records"], beta["tokens"]) == ("beta", 2, 300)
    assert beta["model"].keys() == {
        "model_id",
        "adapter",
        "weights",
        "spec",
        "dtype",
        "format",
        "created_by",
    }
    assert found["total"]["bytes"] == sum(path.stat().st_size for path in records(root))
    assert (found["total"]["orphans"], found["total"]["bad"]) == (0, 0)
    assert alpha["oldest_use"] <= alpha["newest_use"] <= beta["newest_use"]


def test_stats_for_people(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    found = said(capsys, root, "stats")
    lines = found.splitlines()
    assert lines[0] == f"{root}: 5 records (518.7 kB)"
    assert lines[2].split()[:6] == ["model", "namespace", "bits", "records", "tokens", "size"]
    assert lines[3].split()[0] == "alpha"
    assert lines[3].split()[2:7] == ["32", "5", "1,000", "518.7", "kB"]
    assert lines[4].split()[:3] == ["all", "5", "1,000"]
    assert lines[-1] == "Quarantine: 0 files (0 B); leftovers: 0 files (0 B); 0 agents."


def test_stats_say_in_how_many_bits_keys_and_values_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = ModelCacheSpec("alpha", (FullLayer(2, 64, 64),), "bfloat16")
    forms = {
        None: "16",
        KVBits(8, 8): "8",
        KVBits(8, 4): "keys 8, values 4",
        KVBits(None, 4): "keys 16, values 4",
    }
    for kv in forms:
        prompts = open_store(
            StoreConfig(tmp_path, min_free_bytes=0),
            tmp_path,
            None,
            spec.with_bits(kv),
            "alpha",
            "w",
        )
        prompts.open()
        prompts.close()
    rows = [re.split("  +", line) for line in said(capsys, tmp_path, "stats").splitlines()[3:7]]
    assert sorted(row[2] for row in rows) == sorted(forms.values())


def test_stats_name_the_rank_whose_records_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def open_one(ranks: ThreadRanks) -> None:
        spec = ModelCacheSpec("alpha", (FullLayer(2, 64, 64),), "bfloat16")
        prompts = open_store(
            StoreConfig(tmp_path, min_free_bytes=0), tmp_path, None, spec, "alpha", "w", ranks
        )
        prompts.open()
        prompts.close()

    on_ranks(2, open_one, "pipeline")
    rows = said(capsys, tmp_path, "stats").splitlines()[3:5]
    assert sorted(row.partition("  ")[0] for row in rows) == [
        "alpha (pipeline 0 of 2)",
        "alpha (pipeline 1 of 2)",
    ]


def test_stats_count_what_is_of_no_use(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    at(root, 0)[0].unlink()
    next(root.glob("models/*/model.json")).unlink()
    Agents(root).note("coder", "n", "m", [], 0)
    (root / "quarantine").mkdir()
    (root / "quarantine/0123456789abcdef-a.safetensors").write_text("{}")
    found = store(capsys, root, "stats")
    assert (found["models"][0]["model"], found["models"][0]["orphans"]) == (None, 4)
    assert found["agents"] == ["coder"]
    assert found["quarantine"] == {"files": 1, "bytes": 2}
    text = said(capsys, root, "stats")
    assert "unknown" in text
    assert text.endswith("Some files cannot be used; `mlx-blockpool store check` lists them.\n")


def test_an_empty_store_has_no_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert store(capsys, tmp_path, "stats")["models"] == []
    assert said(capsys, tmp_path, "stats").startswith(f"{tmp_path}: 0 records (0 B)\n")
    assert store(capsys, tmp_path, "check")["clean"] is True


@pytest.mark.parametrize("action", ["stats", "check", "scrub", "clear"])
def test_a_folder_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, action: str
) -> None:
    found = refusal(capsys, tmp_path / "none", action)
    assert found.startswith(f"{tmp_path / 'none'} is not a folder. Give --store-dir")


# -- check and scrub -------------------------------------------------------------------------------


def test_check_of_a_good_store_changes_nothing(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    before = {path: path.stat() for path in root.rglob("*")}
    for action in ("check", "scrub"):
        assert store(capsys, root, action, "--fix")["clean"] is True
    assert "no problems." in said(capsys, root, "check")
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == {
        p: s.st_mtime_ns for p, s in before.items()
    }


def damage(root: Path) -> None:
    """A truncated record with two records behind it, a leftover, an empty folder and something
    of somebody else's.
    """
    tail = min(at(root, 512), key=lambda path: path.stat().st_size)
    tail.write_bytes(tail.read_bytes()[:-1])
    at(root, 256)[0].unlink()
    leftover = tail.with_name(f"{TEMPORARY}1-2")
    leftover.write_bytes(b"x")
    os.utime(leftover, (LONG_AGO, LONG_AGO))
    (tail.parent.parent / "00").mkdir(exist_ok=True)
    (root / "models/mine.txt").write_text("mine")


def test_check_finds_what_is_wrong_and_fix_mends_it(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    damage(root)
    found = store(capsys, root, "check", status=1)
    assert (len(found["bad"]), len(found["orphans"]), len(found["leftovers"])) == (1, 2, 1)
    assert found["foreign"] == [str(root / "models/mine.txt")]
    text = said(capsys, root, "check", status=1)
    assert "Bytes of the file: got" in text
    assert text.endswith(
        "1 bad record, 2 orphans, 1 leftover. --fix moves bad records to quarantine and removes "
        "the others.\n"
    )
    assert len(records(root)) == 4

    found = store(capsys, root, "check", "--fix")
    assert (found["clean"], found["fixed"], found["failed"]) == (True, True, [])
    assert len(records(root)) == 1
    assert [path for path in root.rglob("*") if path.is_dir() and not any(path.iterdir())] == []
    assert (root / "models/mine.txt").exists()
    for action in ("check", "scrub"):
        again = store(capsys, root, action)
        assert (again["bad"], again["orphans"], again["leftovers"], again["clean"]) == (
            [],
            [],
            [],
            True,
        )
    assert store(capsys, root, "stats")["quarantine"]["files"] == 1


def test_only_scrub_reads_the_data(
    capsys: pytest.CaptureFixture[str], root: Path, llama: Path
) -> None:
    path = at(root, 256)[0]
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    assert store(capsys, root, "check")["clean"] is True
    assert "Checksum of layers.1.values" in said(capsys, root, "scrub", status=1)
    assert "Fixed." in said(capsys, root, "scrub", "--fix")
    # What the bad block led to cannot be reached any more.
    assert store(capsys, root, "scrub")["clean"] is True
    assert records(root) == at(root, 0)
    _, prefix = open_prefix(root, llama)
    assert prefix.acquire(FIRST, 1).lookup.hit == 256
    prefix.close()


@pytest.fixture
def older(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with records of format 1."""
    root = tmp_path / "older"
    with monkeypatch.context() as patch:
        for module in (record, opening, headers_module):
            patch.setattr(module, "VERSION", 1)
        fill(root, llama, FIRST, SECOND)
    return root


def test_records_of_an_older_format_are_misses_and_logged_once(
    older: Path, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = records(older)
    with caplog.at_level("INFO", "mlx_blockpool.store.prompt_store"):
        for _ in range(2):
            _, prefix = open_prefix(older, llama)
            assert prefix.acquire(FIRST, 1).lookup.hit == 0
            prefix.close()
    (logged,) = (
        record.message
        for record in caplog.records
        if record.name == "mlx_blockpool.store.prompt_store"
    )
    assert f"`mlx-blockpool store check --fix --store-dir {older}`" in logged
    assert records(older) == before
    assert not (older / "quarantine").exists()


def test_check_names_records_of_another_format_and_fix_sets_them_aside(
    capsys: pytest.CaptureFixture[str], older: Path, llama: Path
) -> None:
    before = records(older)
    fill(older, llama, FIRST)
    for action in ("check", "scrub"):
        found = store(capsys, older, action, status=1)
        assert sorted(item["path"] for item in found["bad"]) == sorted(map(str, before))
        assert all("Format: got mlx-blockpool 1" in item["reason"] for item in found["bad"])
    said(capsys, older, "check", "--fix")
    assert not set(records(older)) & set(before)
    assert store(capsys, older, "check")["records"] == 3


def test_the_budget_removes_records_of_an_older_format(older: Path, llama: Path) -> None:
    before = records(older)
    size = sum(path.stat().st_size for path in before)
    fill(older, llama, SECOND, store_bytes=size + size // 2)
    assert 0 < len(set(records(older)) & set(before)) < len(before)
    assert len(set(records(older)) - set(before)) == 4


def test_a_young_temporary_file_may_be_a_servers_and_stays(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    live = records(root)[0].with_name(f"{TEMPORARY}1-2")
    live.write_bytes(b"x")
    assert store(capsys, root, "check", "--fix")["leftovers"] == []
    assert live.exists()


def test_a_parent_that_a_server_writes_meanwhile_leaves_no_orphans(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = at(root, 0)[0]
    late = first.rename(root.parent / first.name)

    whole = fsck.judge

    def judge(*arguments: Any) -> Any:
        if late.exists():
            late.rename(first)
        return whole(*arguments)

    monkeypatch.setattr(fsck, "judge", judge)
    assert store(capsys, root, "check", "--fix")["clean"] is True
    assert len(records(root)) == 5


def test_a_bar_is_shown_where_somebody_watches(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(capsys, root, "scrub")
    assert capsys.readouterr().err == ""
    watched = Terminal()
    monkeypatch.setattr("sys.stderr", watched)
    said(capsys, root, "scrub")
    assert "checksums:" in watched.getvalue()
    assert "/5" in watched.getvalue()


def test_what_cannot_be_mended_is_said(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(root)

    def fail(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("mlx_blockpool.store.quarantine.Quarantine.set_aside", fail)
    text = said(capsys, root, "check", "--fix", status=1)
    assert "failed: " in text
    assert text.endswith("1 problem could not be fixed.\n")


def test_it_works_while_a_server_has_the_store(
    capsys: pytest.CaptureFixture[str], root: Path, llama: Path
) -> None:
    _, prefix = open_prefix(root, llama)
    assert store(capsys, root, "scrub", "--fix")["clean"] is True
    store(capsys, root, "clear", "--yes")
    assert prefix.acquire(FIRST, 1).lookup.hit == 0
    prefix.check()
    prefix.close()


# -- clear -----------------------------------------------------------------------------------------


def test_clear_without_a_terminal_needs_yes(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    assert refusal(capsys, root, "clear") == (
        f"Refusing to remove 5 records (518.7 kB) from {root} without confirmation: stdin is not "
        "a terminal. Pass --yes.\n"
    )
    assert len(records(root)) == 5


@pytest.mark.parametrize(
    ("answer", "left"), [("y\n", 0), ("Yes\n", 0), ("n\n", 5), ("\n", 5), ("", 5)]
)
def test_clear_asks_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    left: int,
) -> None:
    asked = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stderr", asked)
    assert store(capsys, root, "clear")["records"] == 5 - left
    assert asked.getvalue() == f"Remove 5 records (518.7 kB) from {root}? [y/N] "
    assert len(records(root)) == left


def test_clear_of_one_model_leaves_the_others(
    capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    name = fill(root, save_model(tmp_path / "beta", "llama", seed=1), FIRST[:300])
    assert store(capsys, root, "clear", "--model", "alpha", "--yes")["records"] == 5
    assert [path.name for path in (root / "models").iterdir()] == [name]
    assert refusal(capsys, root, "clear", "--model", "alpha", "--yes").startswith(
        "The store has no records of 'alpha', but those of beta."
    )
    assert (
        said(capsys, root, "clear", "--model", name, "--yes")
        == f"Removed 2 records (156.0 kB) from {root}.\n"
    )
    assert {path.name for path in root.rglob("*")} - set(DATABASE_FILES) == {"models"}


def test_clear_removes_nothing_that_is_not_the_stores(
    capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    own = [
        root / "notes.txt",
        records(root)[0].with_name("x.safetensors"),
        root / "agents/a.txt",
        outside / "x.safetensors",
    ]
    (root / "agents").mkdir()
    for path in own:
        path.write_text("mine")
    (root / "models/linked").symlink_to(outside)
    store(capsys, root, "check", "--fix")
    own[1].write_text("mine")
    assert store(capsys, root, "clear", "--yes")["records"] == 5
    assert all(path.read_text() == "mine" for path in own)
    left = {path for path in root.rglob("*") if path.is_file() and path.name not in DATABASE_FILES}
    assert left == {*own[:3], *root.glob("models/*/model.json")}


def test_a_linked_folder_of_bad_files_is_left_alone(
    capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    file = tmp_path / "documents/package.json"
    file.parent.mkdir()
    file.write_text("mine")
    (root / "quarantine").symlink_to(file.parent)
    assert store(capsys, root, "stats")["agents"] == []
    report = store(capsys, root, "check", "--fix")
    assert (report["foreign"], report["clean"]) == ([str(root / "quarantine")], True)
    assert file.read_text() == "mine"


def test_a_file_in_place_of_the_folder_of_bad_files_is_not_the_stores(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    (root / "quarantine").write_text("mine")
    for action in (("stats",), ("check",), ("check", "--fix")):
        assert store(capsys, root, *action)["foreign"] == [str(root / "quarantine")]
    assert (root / "quarantine").read_text() == "mine"


def test_a_folder_of_bad_files_that_cannot_be_read_is_reported(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = Disk.scan

    def refusing(disk: Disk, path: Path) -> list[Entry]:
        if path == root / "quarantine":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(disk, path)

    (root / "quarantine").mkdir()
    monkeypatch.setattr(Disk, "scan", refusing)
    needed = [str(root / "quarantine")]
    assert [item["path"] for item in store(capsys, root, "stats")["unreadable"]] == needed
    for action in (("check",), ("check", "--fix")):
        assert [item["path"] for item in store(capsys, root, *action, status=1)["failed"]] == needed


# -- export and import -----------------------------------------------------------------------------


def greedy(folder: Path, tokens: list[int], caches: list[Any] | None = None) -> list[int]:
    model, _ = load(str(folder))
    steps = generate_step(mx.array(tokens), model, max_tokens=8, prompt_cache=caches)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("known", [700, 600, 300])
def test_an_export_goes_on_with_the_tokens_of_a_fresh_prefill(
    capsys: pytest.CaptureFixture[str], root: Path, llama: Path, tmp_path: Path, known: int
) -> None:
    prompt = [*FIRST[:known], 5, 6, 7]
    found = store(
        capsys,
        root,
        "export",
        "--model",
        str(llama),
        "--tokens",
        ids(prompt),
        str(tmp_path / "out"),
    )
    assert (found["tokens"], found["given"]) == (known, known + 3)
    caches, metadata = load_prompt_cache(str(tmp_path / "out.safetensors"), return_metadata=True)
    assert [type(cache).__name__ for cache in caches] == ["KVCache", "KVCache"]
    assert [cache.offset for cache in caches] == [known, known]
    assert metadata["tokens"] == ids(prompt[:known])
    assert metadata["model"] == str(llama)
    assert greedy(llama, prompt[known:], caches) == greedy(llama, prompt)
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_export_takes_a_prompt_as_text(
    capsys: pytest.CaptureFixture[str], llama: Path, tmp_path: Path
) -> None:
    text = "Say what a block pool is. " * 20
    tokens = load(str(llama))[1].encode(text)
    fill(tmp_path / "store", llama, tokens)
    (tmp_path / "prompt.txt").write_text(text + "More.")
    arguments = (
        "export",
        "--model",
        str(llama),
        "--prompt-file",
        str(tmp_path / "prompt.txt"),
        str(tmp_path / "o.safetensors"),
    )
    count = f"{len(tokens):,} of {len(tokens) + 5:,}"
    assert (
        said(capsys, tmp_path / "store", *arguments)
        == f"Wrote {count} tokens to {tmp_path / 'o.safetensors'}.\n"
    )


def test_export_of_what_is_not_stored_is_refused(
    capsys: pytest.CaptureFixture[str], root: Path, llama: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    assert refusal(
        capsys, root, "export", "--model", str(llama), "--tokens", "89,88", str(out)
    ).startswith(f"{root} has no prefix of these 2 tokens for alpha.")
    other = save_model(tmp_path / "other", "llama", seed=3)
    assert "has no prefix of these 700 tokens" in refusal(
        capsys, root, "export", "--model", str(other), "--tokens", ids(FIRST), str(out)
    )
    assert not out.exists()


def test_an_import_is_found_by_the_next_server(
    capsys: pytest.CaptureFixture[str], root: Path, llama: Path, tmp_path: Path
) -> None:
    out, empty = tmp_path / "out.safetensors", tmp_path / "empty"
    store(capsys, root, "export", "--model", str(llama), "--tokens", ids(FIRST), str(out))
    found = store(capsys, empty, "import", "--model", str(llama), str(out))
    assert (found["tokens"], found["blocks"]) == (700, 3)
    assert {path.name: path.read_bytes() for path in records(empty)} == {
        path.name: path.read_bytes()
        for path in records(root)
        if path.name in {p.name for p in records(empty)}
    }
    model, prefix = open_prefix(empty, llama)
    fetched = prefix.acquire([*FIRST, 7], 20)
    assert fetched.lookup.hit == 700
    steps = generate_step(mx.array(fetched.rest), model, max_tokens=8, prompt_cache=fetched.caches)
    assert [int(token) for token, _ in steps] == greedy(llama, [*FIRST, 7])
    prefix.close()


def test_a_file_of_another_program_is_refused(
    capsys: pytest.CaptureFixture[str], llama: Path, tmp_path: Path
) -> None:
    """mlx_lm.cache_prompt names neither the tokens nor the weights."""
    path, root = tmp_path / "stock.safetensors", tmp_path / "store"
    model, _ = load(str(llama))
    caches = make_prompt_cache(model)
    model(mx.array([FIRST[:300]]), cache=caches)
    save_prompt_cache(str(path), caches, {"model": str(llama)})
    assert "its metadata does not name its model and tokens" in refusal(
        capsys, root, "import", "--model", str(llama), str(path)
    )
    path.write_bytes(b"none")
    assert refusal(capsys, root, "import", "--model", str(llama), str(path)).startswith(
        f"Cannot read {path}: "
    )
    assert records(root) == []


def test_an_export_says_whose_it_is(
    capsys: pytest.CaptureFixture[str], root: Path, llama: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    store(capsys, root, "export", "--model", str(llama), "--tokens", ids(FIRST), str(out))
    other = save_model(tmp_path / "other", "llama", seed=3)
    assert refusal(capsys, root, "import", "--model", str(other), str(out)).startswith(
        f"{out} is of {llama}, with other weights"
    )


def test_an_import_over_its_limit_is_refused_with_both_figures(
    capsys: pytest.CaptureFixture[str], root: Path, llama: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    store(capsys, root, "export", "--model", str(llama), "--tokens", ids(FIRST), str(out))
    arguments = ("import", "--model", str(llama), "--store-bytes", "200kB", str(out))
    found = refusal(capsys, tmp_path / "small", *arguments)
    assert found.startswith("Stored 256 of 700 tokens: the store holds 1")
    assert "of 200000 bytes" in found


def test_models_that_cannot_be_loaded_are_refused(
    capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    window = save_model(tmp_path / "window", "gpt_oss")
    out = str(tmp_path / "out.safetensors")
    assert refusal(
        capsys, root, "export", "--model", str(tmp_path / "none"), "--tokens", "1", out
    ).startswith(f"{tmp_path / 'none'} is not a folder")
    assert refusal(
        capsys, root, "export", "--model", str(tmp_path), "--tokens", "1", out
    ).startswith(f"Cannot read {tmp_path}/")
    assert refusal(
        capsys, root, "export", "--model", str(window), "--tokens", "1,x", out
    ).startswith("Cannot read the prompt: ")


@pytest.mark.parametrize("module", ["commands.store", "store.fsck"])
def test_importing_it_imports_no_mlx(module: str) -> None:
    code = (
        f"import sys, mlx_blockpool.{module}; print([m for m in sys.modules if "
        "m.partition('.')[0] in ('mlx', 'mlx_lm')])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_the_command_ends_cleanly_in_a_process_of_its_own(
    root: Path, llama: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    command = [
        sys.executable,
        "-m",
        "mlx_blockpool.cli",
        "store",
        "export",
        "--store-dir",
        str(root),
        "--model",
        str(llama),
    ]
    done = subprocess.run(
        [*command, "--tokens", ids(FIRST), str(out)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"Wrote 700 of 700 tokens to {out}.\n"), (
        done.stderr
    )
