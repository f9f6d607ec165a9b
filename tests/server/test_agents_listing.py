"""GET /v1/agents and `store agents` read each file once, decode each agent once, and compare
nobody with everybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from models import save_model
from store.chains import keep, note
from store.disks import QuickDisk

from mlx_blockpool.prefix.sharing import SharedPaths
from mlx_blockpool.prefix.trie import Node, PrefixRef, Trie
from mlx_blockpool.server.served_agents import ServedAgents
from mlx_blockpool.store import agents as agents_module
from mlx_blockpool.store.agents import Agents
from mlx_blockpool.store.db import Database
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.fsck import judge
from mlx_blockpool.store.hashing import encode
from mlx_blockpool.store.scan import Listing
from mlx_blockpool.tier.agent_records import AgentRecords, StoredPaths
from server.serving import blockpool_server

SYSTEM = list(range(512))


class CountingDisk(QuickDisk):
    """`reads`: how often each file was read, by its name."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        self.reads[path.name] += 1
        return super().read(path, start, size)


def conversation(number: int) -> list[int]:
    """What all of them have, and an end of its own length in a block."""
    return [*SYSTEM, *range(1000 * number, 1000 * number + 20 + number % 20)]


def note_all(root: Path, count: int) -> None:
    for number in range(count):
        note(root, f"agent {number}", conversation(number))


def test_an_agent_that_has_not_changed_is_not_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_all(tmp_path / "store", 30)
    calls = counted(monkeypatch, [agents_module], "_agent")
    model = save_model(tmp_path / "model", "llama")
    with blockpool_server(
        model, "--store-dir", str(tmp_path / "store"), "--pool-bytes", "20MB"
    ) as client:
        client.generator.agent_files = Agents(tmp_path / "store")
        # The loaded model reads its own agents now and then.
        monkeypatch.setattr(ServedAgents, "_look", lambda _: None)

        def reads() -> int:
            before = calls.total()
            assert len(client.send("/v1/agents")[1]["agents"]) >= 30
            return calls.total() - before

        assert [reads(), reads(), reads()] == [30, 0, 0]
        Agents(tmp_path / "store").pin("agent 3")
        before = calls.total()
        assert client.send("/v1/agents/agent%203")[1]["pinned"]
        assert calls.total() - before == 1


def test_a_command_reads_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path, *(conversation(number) for number in range(12)))
    note_all(tmp_path, 12)
    # Without notes, so that every header is read.
    with Database(tmp_path).transaction() as connection:
        connection.execute("DELETE FROM headers")
    disk, read = CountingDisk(), Disk.read

    def counting(self: Disk, path: Path, *args: int) -> bytes:
        disk.reads[path.name] += 1
        return read(self, path, *args)

    monkeypatch.setattr(Disk, "read", counting)
    assert len(AgentRecords(tmp_path).listing()["agents"]) == 12
    records = {name: count for name, count in disk.reads.items() if name.endswith(".safetensors")}
    # Their headers, and the tokens of those whose beginnings other records may hold.
    assert len(records) == 2 + 12
    assert set(records.values()) <= {1, 2}


def counted(monkeypatch: pytest.MonkeyPatch, modules: list[object], name: str) -> Counter[str]:
    """How often something is called."""
    calls: Counter[str] = Counter()
    for module in modules:
        inner = getattr(module, name)

        def call(*args: object, inner: Callable[..., object] = inner) -> object:
            calls[name] += 1
            return inner(*args)

        monkeypatch.setattr(module, name, call)
    return calls


def hashed(monkeypatch: pytest.MonkeyPatch, count: int) -> int:
    """How many hashes are made to find `count` paths in a trie, and what each of them shares
    with the others.
    """
    known = Trie("n")
    paths = []
    for number in range(count):
        tokens, node = conversation(number), known.root
        for start in range(0, len(tokens), 256):
            edge = encode(tokens[start : start + 256])
            node = known.child(node, edge) or known.add(node, edge)[0]
        paths.append(PrefixRef(tuple(n.hash for n in node.path()), len(tokens)))
    with monkeypatch.context() as patch:
        calls = counted(patch, [Node], "hash_at")
        shared = SharedPaths({str(number): path for number, path in enumerate(paths)})
        for path in paths:
            match = known.find(path)
            assert match.tokens == path.tokens
            assert shared.num_shared(match.path, path) == 2
        return calls["hash_at"]


def test_paths_are_found_and_compared_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once ends of all lengths there are, an agent more costs as much as the ones before."""
    few, many = hashed(monkeypatch, 100), hashed(monkeypatch, 200)
    assert many <= 2.1 * few


def test_paths_are_compared_as_one_by_one(tmp_path: Path) -> None:
    """An end that is the beginning of another's block is stood on, also where a longer one has
    taken its place.
    """
    known = Trie("n")
    longer, shorter, apart = (
        [*SYSTEM, *range(1000, 1100)],
        [*SYSTEM, *range(1000, 1040)],
        [*SYSTEM, *range(1000, 1039), 7],
    )

    def path(tokens: list[int]) -> PrefixRef:
        node = known.root
        for start in range(0, len(tokens), 256):
            edge = encode(tokens[start : start + 256])
            node = known.child(node, edge) or known.add(node, edge)[0]
        hashes = [node.hash for node in node.path()]
        hashes[-1] = node.hash_at(len(tokens))
        return PrefixRef(tuple(hashes), len(tokens))

    paths = [path(shorter), path(longer), path(apart), path(SYSTEM)]
    shared = SharedPaths(dict(zip("abcd", paths, strict=True)))
    found = [known.find(each) for each in paths]
    assert [match.tokens for match in found] == [552, 612, 552, 512]
    assert [
        shared.num_shared(match.path, each) for match, each in zip(found, paths, strict=True)
    ] == [3, 3, 2, 2]
    assert SharedPaths({"a": paths[1]}).num_shared(found[1].path, paths[1]) == 0
    assert SharedPaths({"a": paths[1], "b": paths[1]}).num_shared(found[1].path, paths[1]) == 3


def named(root: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many hashes `store agents` makes for so many agents."""
    keep(root, *(conversation(number) for number in range(count)))
    note_all(root, count)
    judged = list(judge(Listing(root).records))
    agents = Agents(root).all()
    calls = counted(monkeypatch, [Node], "hash_at")
    found = StoredPaths(judged, agents)
    for agent in agents:
        assert found.tokens_on_disk(agent) == agent.tokens
        assert len(found.share(agent).own) == 1
    return calls["hash_at"]


def test_who_stands_on_which_records_is_found_in_linear_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = named(tmp_path / "few", 40, monkeypatch), named(tmp_path / "many", 80, monkeypatch)
    assert many <= 2.1 * few
