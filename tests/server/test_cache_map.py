"""GET /v1/cache/map: letters and owners of blocks, the tree of prefixes, and what each key sees
of them.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from models import save_model

from mlx_blockpool.server.access import noted_name
from mlx_blockpool.server.watch import cache_map
from mlx_blockpool.server.watch.cache_map import CacheMaps, render
from mlx_blockpool.server.watch.snapshot import (
    BlockState,
    Edge,
    GroupSnapshot,
    ModelSnapshot,
    RequestState,
)
from server.serving import at_once, blockpool_server

ANN, BOB = noted_name("ann", "x"), noted_name("bob", "x")


def running(name: str | None, tables: list[list[int]]) -> RequestState:
    return RequestState(name, "m", "decode", 1000, 512, 1000, 1, 9, 0.1, tables)


def two_conversations() -> ModelSnapshot:
    """A beginning of 512 tokens that two agents share, their own ends, and an edge that neither
    continues from.
    """
    edges = [
        Edge(-1, 0, 256, True, True, ANN),
        Edge(0, 256, 512, True, True, ANN),
        Edge(1, 512, 768, True, False, ANN),
        Edge(1, 512, 700, True, False, BOB),
        Edge(1, 512, 600, False, True, None),
    ]
    blocks = [
        BlockState(0, 1, 1, 0),
        BlockState(1, 1, 1, 0),
        BlockState(2, 1, 1, 0),
        BlockState(3, 0, 1, 1),
    ]
    blocks += [BlockState(4, 1, 0, 0), BlockState(8, 0, 0, 0)]
    group = GroupSnapshot("full", 100, blocks, {0: 0, 1: 1, 2: 2, 3: 3})
    tokens = {ANN: 800, BOB: 650, "elsewhere": 9}
    return ModelSnapshot(
        "m",
        [group],
        edges,
        {ANN: 2, BOB: 3},
        tokens,
        frozenset([BOB]),
        [running(ANN, [[0, 1, 2, 4]])],
    )


def test_a_client_of_a_server_without_names_sees_all() -> None:
    found = render(two_conversations(), None)
    (group,) = found["groups"]
    assert (group["blocks"], group["states"]) == (6, "RRrprf")
    assert (found["agents"], found["tokens"], found["pinned"]) == ([ANN, BOB], [800, 650], [1])
    starts = [
        (s["parent"], s["start"], s["end"], s["in_memory"], s["on_disk"], s["ends"])
        for s in found["trie"]
    ]
    assert starts == [
        (None, 0, 512, 512, 512, []),
        (0, 512, 768, 256, 0, [0]),
        (0, 512, 700, 188, 0, [1]),
        (0, 512, 600, 0, 88, []),
    ]
    owners = [None if place < 0 else group["owners"][place] for place in group["owned"]]
    running = {"running": [0]}
    assert owners[:3] == [
        {"segment": 0, **running},
        {"segment": 0, **running},
        {"segment": 1, **running},
    ]
    assert owners[3:] == [{"segment": 2, "running": []}, {"segment": None, **running}, None]


def test_a_named_key_sees_its_own_alone() -> None:
    ann, bob = (render(two_conversations(), owner) for owner in ("ann", "bob"))
    assert [found["groups"][0]["states"] for found in (ann, bob)] == ["rrrorf", "rropof"]
    assert ann["agents"] == bob["agents"] == ["x"]
    assert (ann["tokens"], bob["tokens"]) == ([800], [650])
    # No boundary of another's path, nor its name, shows where they part.
    assert [(s["start"], s["end"], s["by"]) for s in ann["trie"]] == [(0, 768, "x")]
    assert [(s["start"], s["end"], s["by"]) for s in bob["trie"]] == [(0, 700, None)]
    assert "ann" not in json.dumps(bob)
    assert [found["pinned"] for found in (ann, bob)] == [[], [0]]
    assert bob["groups"][0]["owned"][2] == -1
    nobody = render(two_conversations(), "carl")
    assert (nobody["groups"][0]["states"], nobody["trie"], nobody["agents"]) == ("ooooof", [], [])


def test_running_requests_without_an_agent_are_told_apart() -> None:
    found = two_conversations()
    found.running = [running(None, [[4]]), running(None, [[4, 8]])]
    found.groups[0].blocks[-1] = BlockState(8, 1, 0, 0)
    found.groups[0].blocks[4] = BlockState(4, 2, 0, 0)
    assert render(found, None)["groups"][0]["states"][-2:] == "Rr"
    assert render(found, "ann")["groups"][0]["states"][-2:] == "oo"


def test_an_agent_whose_first_turn_runs_has_no_tokens_yet() -> None:
    found = two_conversations()
    found.running.append(running(noted_name("ann", "a new one"), [[4]]))
    assert render(found, "ann")["tokens"] == [None, 800]


def test_many_segments_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_map, "MOST_SEGMENTS", 2)
    found = render(two_conversations(), None)
    assert (len(found["trie"]), found["left_out"]) == (2, 2)


class Slow:
    """A generator whose thread never comes to a job."""

    def __init__(self) -> None:
        self.requests: Any = self
        self.model = None
        self.jobs: list[Any] = []

    def put(self, job: Any) -> None:
        self.jobs.append(job)

    def generation_available(self) -> bool:
        return True


def test_while_the_thread_is_busy_clients_get_the_map_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_map, "WAIT_SECONDS", 0.01)
    generator = Slow()
    maps = CacheMaps(generator)
    answers = at_once([lambda: maps.answer(None)] * 3)
    assert [answer["seconds_ago"] for answer in answers] == [None] * 3
    assert len(generator.jobs) == 1


def test_clients_that_come_together_get_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_map, "WAIT_SECONDS", 0.01)
    maps, rendered = CacheMaps(Slow()), []

    def slowly(found: ModelSnapshot, owner: str | None) -> dict[str, Any]:
        rendered.append(owner)
        threading.Event().wait(0.05)
        return render(found, owner)

    monkeypatch.setattr(cache_map, "render", slowly)
    maps._last = cache_map.ServerSnapshot(maps._generator)
    maps._last.by_model["m"] = two_conversations()
    answers = at_once([lambda owner=owner: maps.answer(owner) for owner in ("ann", "bob") * 4])
    assert sorted(rendered) == ["ann", "bob"]
    assert [answer["agents"] for answer in answers] == [["x"]] * 8


@pytest.mark.thorough
def test_the_tree_of_a_model_with_windows_has_its_blocks(tmp_path: Path) -> None:
    model = save_model(tmp_path / "gemma3_text", "gemma3_text")
    with blockpool_server(model, "--pool-bytes", "30MB") as client:
        client.chat([{"role": "user", "content": "Windows. " * 200}], max_tokens=2, user="ann")
        client.settle()
        found = client.send("/v1/cache/map")[1]
    assert len(found["groups"]) >= 2
    for group in found["groups"]:
        used = [
            place
            for letter, place in zip(group["states"], group["owned"], strict=True)
            if letter != "f"
        ]
        assert used
        assert -1 not in used
    assert found["trie"][0]["ends"] == [0]
