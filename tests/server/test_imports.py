"""Files from outside: whatever they hold, nobody but the agent that they were imported for goes on from them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import save_model

from mlx_blockpool.errors import StoreError
from mlx_blockpool.store.spool import MOST
from mlx_blockpool.transfer.cache_file import CacheFile
from server.serving import Client
from server.test_agents_http import Agent, Served, ask, call, listed

Changed = Callable[[bytes], bytes]


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its arrays."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: dict[str, Any], arrays: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + arrays


def keys_and_values(header: dict[str, Any]) -> Iterator[tuple[int, int, list[int]]]:
    """Of each array of keys or values its place and shape."""
    found = [entry for name, entry in header.items() if name != "__metadata__" and len(entry["shape"]) == 4]
    assert found
    assert {entry["dtype"] for entry in found} == {"F32"}
    yield from ((*entry["data_offsets"], entry["shape"]) for entry in found)


def noise(data: bytes) -> bytes:
    """Other keys and values behind the same header, byte for byte."""
    header, arrays = split(data)
    changed, random = bytearray(arrays), np.random.default_rng(1)
    for start, end, shape in keys_and_values(header):
        changed[start:end] = random.normal(size=shape).astype(np.float32).tobytes()
    return data[: -len(arrays)] + changed


def nobody(data: bytes) -> bytes:
    """The first 16 tokens' keys and values are right, the others are not, and nothing says of which weights they are."""
    header, arrays = split(data)
    texts = header["__metadata__"]
    del texts["0.weights"], texts["0.signature"]
    changed = bytearray(arrays)
    for start, end, shape in keys_and_values(header):
        array = np.frombuffer(arrays[start:end], np.float32).reshape(shape).copy()
        array[:, :, 16:] *= -3.0
        changed[start:end] = array.tobytes()
    return joined(header, bytes(changed))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(save_model(tmp_path_factory.mktemp("llama"), "llama"), "llama")


@pytest.fixture(scope="module")
def exported(served: Served, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A store and what an agent of it was exported as, after two turns."""
    store = tmp_path_factory.mktemp("store")
    with served.server("--store-dir", str(store)) as client:
        agent = Agent("one", "birds")
        agent.turn(client)
        agent.turn(client)
        status, data = call(client, "GET", "/one/export")
        assert status == 200
        client.settle()
    return store, data


def turns(client: Client, name: str) -> list[tuple[str, int]]:
    """Three turns of the exported conversation, under another name."""
    agent = Agent("one", "birds")
    return [agent.turn(client, name)[:2] for _ in range(3)]


@pytest.mark.parametrize("change", [noise, nobody])
def test_changed_keys_and_values_reach_no_other_agent(
    change: Changed, served: Served, exported: tuple[Path, bytes], tmp_path: Path
) -> None:
    options = ("--store-dir", str(tmp_path / "store"))
    needed = [reply for reply, _ in served.needed("one", "birds", 3)]
    with served.server(*options) as client:
        report = json.loads(call(client, "POST", "/mallory/import", change(exported[1]))[1])
        assert (report["imported"], report["private"], "sign" in report["why"]) == (True, True, True)
        before = turns(client, "victim")
        assert ([reply for reply, _ in before], before[0][1]) == (needed, 0)
        assert ask(client, "POST", "/mallory/fork", {"to": "fork"})["tokens"] == report["tokens"]
        for name in ("mallory", "fork", "victim"):
            ask(client, "POST", f"/{name}/save", {})
        client.settle()
    with served.server(*options) as client:
        later = turns(client, "stranger")
        assert [reply for reply, _ in later] == needed
        # They go on from the file, and what it holds is what makes their replies.
        for name in ("mallory", "fork"):
            found = turns(client, name)
            assert found[0][1] > 0
            assert [reply for reply, _ in found] != needed
        assert [reply for reply, _ in turns(client, "another")] == needed
        ask(client, "POST", "/mallory/rename", {"to": "renamed"})
        status, data = call(client, "GET", "/renamed/export")
        assert (status, split(data)[0]["__metadata__"]["0.signature"]) == (200, "0" * 64)
        # What it stands on is not proven by a detour through this store.
        assert json.loads(call(client, "POST", "/detour/import", data)[1])["private"]
        client.settle()


def test_an_agent_that_is_there_is_not_overwritten_by_what_cannot_be_proven(
    served: Served, exported: tuple[Path, bytes], tmp_path: Path
) -> None:
    with served.server("--store-dir", str(tmp_path)) as client:
        Agent("one", "birds").turn(client)
        status, answer = call(client, "POST", "/one/import", noise(exported[1]))
        assert (status, "under another name" in json.loads(answer)["error"]) == (409, True)
        assert call(client, "POST", f"/content-{'0' * 32}/import", noise(exported[1]))[0] == 409
        for _ in range(2):
            # The one that goes on from such a file already may have another.
            assert call(client, "POST", "/mallory/import", noise(exported[1]))[0] == 200
        client.settle()


def test_a_file_of_this_store_comes_back_for_everybody(served: Served, exported: tuple[Path, bytes]) -> None:
    store, data = exported
    with served.server("--store-dir", str(store)) as client:
        ask(client, "DELETE", "/one")
        report = json.loads(call(client, "POST", "/eins/import", data)[1])
        assert (report["private"], report["tokens"]) == (False, report["resumes_from_memory"])
        known = turns(client, "another")
        assert [reply for reply, _ in known] == [reply for reply, _ in served.needed("one", "birds", 3)]
        assert known[0][1] > 0
        again = json.loads(call(client, "POST", "/zwei/import", noise(data))[1])
        assert again["private"]
        key = store / "export.key"
        assert (key.stat().st_mode & 0o777, key.stat().st_size) == (0o600, 32)
        client.settle()


def test_what_says_nonsense_is_refused(served: Served, exported: tuple[Path, bytes]) -> None:
    header, arrays = split(exported[1])
    texts = header["__metadata__"]
    first = next(name for name in header if name != "__metadata__")
    beyond = {**texts, "0.tokens": ",".join(["90000", *texts["0.tokens"].split(",")[1:]])}
    large = {**texts, "0.tokens": "9" * 5000}
    bad = {
        "a list": {**header, "__metadata__": ["0.tokens"]},
        "no texts": {**header, "__metadata__": {**texts, "0.tokens": 5}},
        "a token beyond": {**header, "__metadata__": beyond},
        "digits": {**header, "__metadata__": large},
        "outside": {**header, first: {**header[first], "data_offsets": [0, len(arrays) + 4]}},
        "too short": {**header, first: {**header[first], "shape": [1, 1, 1, 1]}},
        "no dtype": {**header, first: {**header[first], "dtype": "F17"}},
        "no entry": {**header, first: 5},
        "digits in a shape": json.loads(json.dumps(header).replace('"shape": [1', f'"shape": [{"9" * 4000}', 1)),
    }
    with served.server() as client:
        for what, changed in bad.items():
            status, answer = call(client, "POST", "/bad/import", joined(changed, arrays))
            assert (what, status in (400, 409), "error" in json.loads(answer)) == (what, True, True), answer
        text = joined(header, arrays).replace(b'"shape": [1', b'"shape": [' + b"9" * 5000, 1)
        text = (int.from_bytes(text[:8], "little") + 4999).to_bytes(8, "little") + text[8:]
        assert call(client, "POST", "/bad/import", text)[0] == 400
        assert listed(client) == {}
        client.settle()


@pytest.mark.parametrize(("kind", "needed"), [(StoreError, 400), (RuntimeError, 503)])
def test_an_answer_to_a_bad_file_calls_it_the_body(
    kind: type[Exception], needed: int, served: Served, exported: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(file: CacheFile, *_: Any) -> bool:
        raise kind(f"Cannot read {file.path}: {file.path.name} has an end.")

    monkeypatch.setattr(CacheFile, "why_private", failing)
    with served.server() as client:
        status, answer = call(client, "POST", "/bad/import", exported[1])
        assert (status, json.loads(answer)["error"]) == (needed, "Cannot read the body: the body has an end.")
        status, answer = call(client, "POST", "/bad/import", exported[1][:300])
        assert (status, json.loads(answer)["error"][:21]) == (400, "Cannot read the body:")
        client.settle()


def test_a_store_without_a_key_takes_no_file(served: Served, exported: tuple[Path, bytes], tmp_path: Path) -> None:
    (tmp_path / "export.key").write_bytes(b"short")
    with served.server("--store-dir", str(tmp_path)) as client:
        status, answer = call(client, "POST", "/one/import", exported[1])
        assert (status, json.loads(answer)["error"]) == (
            400,
            "export.key holds no key of 32 bytes. Remove it: a new one will be made.",
        )
        client.settle()


def test_answers_and_files_name_no_folder(served: Served, exported: tuple[Path, bytes]) -> None:
    store, data = exported
    folders = (str(store).encode(), str(served.folder).encode(), str(Path.home()).encode() + b"/")
    with served.server("--store-dir", str(store)) as client:
        Agent("one", "birds").turn(client)
        answers = [data, call(client, "GET", "")[1], call(client, "GET", "/one")[1]]
        answers += [call(client, "POST", "/one/import", data[:300])[1], call(client, "DELETE", "/one")[1]]
        answers.append(json.dumps(client.send("/v1/cache")).encode())
        for answer in answers:
            assert not [folder for folder in folders if folder in answer]
        client.settle()


def test_a_file_that_nobody_takes_holds_no_blocks(served: Served, exported: tuple[Path, bytes]) -> None:
    store, _ = exported
    with served.server("--store-dir", str(store)) as client:
        Agent("one", "birds").turn(client)
        generator = client.generator
        with generator.spool.file(10), generator.spool.file(10), generator.spool.file(10), generator.spool.file(10):
            assert MOST == 4
            assert call(client, "GET", "/one/export")[0] == 503
            assert call(client, "POST", "/x/import", b"x" * 100)[0] == 503
        assert not [name for name in os.listdir(store) if name.startswith(".writing-")]
        client.settle()
