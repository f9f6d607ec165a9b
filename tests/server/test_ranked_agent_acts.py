"""What clients do to agents is done on all ranks of a server: the ranks are threads here, of
which each has a whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.ranked import Group, ranked_server
from server.serving import cached_tokens
from server.test_agents_http import Agent, call

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def group(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with ranked_server(
        model, "--pool-bytes", "20MB", "--store-dir", str(tmp_path_factory.mktemp("store"))
    ) as found:
        yield found


def act(group: Group, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
    """The answer of an act that all ranks have carried out, and have the same after it."""
    status, data = call(
        group.client, method, path, json.dumps(body or {}).encode() if method == "POST" else None
    )
    assert status == 200, data
    group.settle()
    return json.loads(data)


def pinned(group: Group) -> list[int]:
    """The pinned blocks of each rank."""
    prefixes = [model.prefix for registry in group.registries for model in registry.loaded.values()]
    return [
        sum(counts.pinned for counts in prefix.pool.settle())
        for prefix in prefixes
        if prefix is not None
    ]


def test_agents_are_pinned_forked_saved_and_deleted_on_all_ranks(group: Group) -> None:
    ann, bob = Agent("ann", "blocks"), Agent("bob", "slabs")
    for agent in (ann, bob):
        agent.turn(group.client)
    assert act(group, "/ann/pin")["pinned_in_memory"]
    first = pinned(group)
    assert first[0] == first[1] > 0
    ann.turn(group.client)
    group.settle()
    later = pinned(group)
    assert later[0] == later[1] >= first[0]
    saved = act(group, "/ann/save")
    assert saved["tokens_on_disk"] == saved["tokens"]
    assert act(group, "/bob/fork", {"to": "carl"})["of"] == "bob"
    # Its path is now carl's.
    assert act(group, "/bob", method="DELETE")["memory"]["blocks"] == 0
    gone = act(group, "/carl", method="DELETE")
    assert gone["memory"]["blocks"] > 0
    assert gone["clean"]
    act(group, "/ann/unpin")
    assert pinned(group) == [0, 0]
    assert act(group, "/ann/restore")["tokens_in_memory"] == saved["tokens"]


def test_a_model_that_is_loaded_again_reads_from_disk_what_all_ranks_vote_for(
    group: Group, model: Path
) -> None:
    emil = Agent("emil", "loading again")
    before = emil.turn(group.client)[1]
    assert group.client.send("/admin/unload", {"model": str(model)})[0] == 200
    prompt = emil.messages[:2]
    answer = group.client.chat(prompt, max_tokens=6, temperature=0.0)
    group.settle()
    assert answer["choices"][0]["message"] == {
        **answer["choices"][0]["message"],
        **emil.messages[2],
    }
    assert cached_tokens(answer["usage"]) > before
    for registry in group.registries:
        (loaded,) = registry.loaded.values()
        assert loaded.prefix is not None
        assert (loaded.ranks.size, loaded.prefix.num_hit_tokens > 0) == (2, True)
