"""Several API keys: what one name leaves behind is not there for another."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mlx_blockpool.errors import BlockpoolError
from mlx_blockpool.server.access import belongs, noted_name, own_name
from mlx_blockpool.server.options import named_keys
from mlx_blockpool.store.agents import shown
from server.serving import Client, blockpool_server, cached_tokens

pytestmark = pytest.mark.server(
    "--pool-bytes 30MB", model="llama", keys="ann:key-of-ann\nbob:key-of-bob\n", is_stored=True
)

SECRET = "These are notes.\nThe safe opens with {}.\nThat is all. "


def ask(server: Client, who: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    return server.send(path, body, headers={"x-api-key": f"key-of-{who}", **headers})


def chat(text: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **options}


def agents(server: Client, who: str) -> dict[str, Any]:
    server.settle()
    found = ask(server, who, "/v1/agents")[1]
    return {agent["name"]: agent for agent in found["agents"]}


def test_agents_of_two_keys_with_one_name_do_not_meet(server: Client) -> None:
    for who in ("ann", "bob"):
        assert (
            ask(
                server,
                who,
                "/v1/chat/completions",
                chat(f"{who} begins like this. " * 30, user="same"),
            )[0]
            == 200
        )
    assert (
        ask(server, "ann", "/v1/chat/completions", chat("Ann alone. " * 9, user="ann's"))[0] == 200
    )
    found = {who: agents(server, who) for who in ("ann", "bob")}
    assert (set(found["ann"]), set(found["bob"])) == ({"same", "ann's"}, {"same"})
    assert found["ann"]["same"]["shown"] == "same"
    assert found["ann"]["same"]["tokens"] == found["bob"]["same"]["tokens"]
    for path in ("/v1/agents/ann's", "/v1/agents/ann%2Fann's"):
        status, answer = ask(server, "bob", path)
        assert (status, "same" in answer["error"], "but ann" in answer["error"]) == (
            404,
            True,
            False,
        )
    assert ask(server, "bob", "/v1/agents/ann's/fork", {"to": "mine"})[0] == 404
    assert ask(server, "bob", "/v1/agents/same/fork", {"to": "ann's"})[1]["agent"] == "ann's"
    assert ask(server, "bob", "/v1/agents/same/pin", {})[1]["agent"] == "same"
    assert [agents(server, who)["same"]["pinned"] for who in ("ann", "bob")] == [False, True]
    for who in ("ann", "bob"):
        figures = ask(server, who, "/v1/cache")[1]["agents"]
        assert set(figures) <= {"same", "ann's"}
    assert ask(server, "none", "/v1/agents")[0] == 401
    assert server.send("/v1/agents")[0] == 401


def test_responses_of_another_key_are_not_there(server: Client) -> None:
    asked = {"input": "The safe opens with 4711.", "max_output_tokens": 2}
    status, answer = ask(server, "ann", "/v1/responses", asked)
    assert status == 200
    going_on = {
        "input": "What was it?",
        "previous_response_id": answer["id"],
        "max_output_tokens": 2,
    }
    assert [ask(server, who, f"/v1/responses/{answer['id']}")[0] for who in ("ann", "bob")] == [
        200,
        404,
    ]
    assert [ask(server, who, "/v1/responses", going_on)[0] for who in ("ann", "bob")] == [200, 400]


def test_explanations_of_another_key_are_not_there(server: Client) -> None:
    ask(server, "ann", "/v1/chat/completions", chat(SECRET.format("4711"), user="teller"))
    ask(server, "ann", "/v1/chat/completions", chat(SECRET.format("4712"), user="teller"))
    listed = ask(server, "ann", "/v1/cache/explain")[1]["requests"]
    assert "4711" in listed[0]["why"]
    assert [
        ask(server, who, f"/v1/cache/explain/{listed[0]['id']}")[0] for who in ("ann", "bob")
    ] == [200, 404]
    # The same agent's name under another key is another agent.
    status, _ = ask(
        server,
        "bob",
        "/v1/chat/completions",
        chat(SECRET.format("471?"), user="teller"),
        **{"X-Explain": "1"},
    )
    assert status == 200
    own = ask(server, "bob", "/v1/cache/explain")[1]["requests"]
    assert not {request["id"] for request in own} & {request["id"] for request in listed}
    assert own[0]["cached_tokens"] > 0
    for answer in (own, ask(server, "bob", f"/v1/cache/explain/{own[0]['id']}")[1]):
        assert "4711" not in json.dumps(answer)
        assert "4712" not in json.dumps(answer)


def events(server: Client, who: str) -> list[dict[str, Any]]:
    """The events since the server's start that a key may see."""
    first = server.generator.registry.log.first
    url = f"http://127.0.0.1:{server.port}/v1/cache/events?follow=0&last_event_id={first - 1}"
    with urllib.request.urlopen(
        urllib.request.Request(url, headers={"x-api-key": f"key-of-{who}"}), timeout=60
    ) as stream:
        return [json.loads(line[6:]) for line in stream if line.startswith(b"data: ")]


def test_events_of_requests_are_those_of_the_own_key(server: Client) -> None:
    for who in ("ann", "bob"):
        assert (
            ask(
                server,
                who,
                "/v1/chat/completions",
                chat(f"An event of {who}.", user=f"agent of {who}"),
            )[0]
            == 200
        )
        assert (
            ask(server, who, "/v1/completions", {"prompt": "No agent.", "max_tokens": 1})[0] == 200
        )
    server.settle()
    found = {who: events(server, who) for who in ("ann", "bob")}
    for who, other in (("ann", "bob"), ("bob", "ann")):
        own = {
            event["id"]: event["agent"] for event in found[who] if event["kind"] == "request_begun"
        }
        assert {f"agent of {who}", None} <= set(own.values())
        assert f"agent of {other}" not in own.values()
        assert not any(event.get("id") in own for event in found[other])
    blocks = [
        [event for event in found[who] if event["kind"].startswith("blocks")]
        for who in ("ann", "bob")
    ]
    assert blocks[0] == blocks[1] != []


def test_by_option_prefixes_are_not_shared_either(model: Path, keys: Path, tmp_path: Path) -> None:
    options = (
        "--pool-bytes",
        "30MB",
        "--api-key-file",
        str(keys),
        "--store-dir",
        str(tmp_path),
        "--private-prefixes",
    )
    for known in (0, None):
        with blockpool_server(model, *options) as server:
            for who in ("ann", "bob"):
                _, answer = ask(
                    server, who, "/v1/chat/completions", chat(SECRET.format("4711") * 9, user="one")
                )
                cached = cached_tokens(answer["usage"])
                assert cached == (answer["usage"]["prompt_tokens"] - 1 if known is None else 0)
            if known == 0:
                ask(server, "ann", "/v1/chat/completions", chat(SECRET.format("4712") * 9))
                found = ask(server, "ann", "/v1/cache/explain")[1]["requests"][0]
                assert "4711" in found["why"], "all that is known under its salt is its own"
            stored = [
                {h for event in events(server, who) for h in event.get("hashes", ())}
                for who in ("ann", "bob")
            ]
            assert all(stored)
            assert not stored[0] & stored[1]
            ask(server, "bob", "/v1/agents/one/save", {})
            ask(server, "ann", "/v1/agents/one/save", {})
            server.settle()


def test_keys_by_name() -> None:
    assert named_keys("ann:a-key\n\n b.2:other:key \n") == (("ann", "a-key"), ("b.2", "other:key"))
    assert named_keys("one:key") == (("one", "key"),)
    for text in ("a bare key", "bare", "", "has space:key", ":key"):
        assert named_keys(text) == ()
    for text in (
        "ann:key\nanother",
        "ann:key\nbob:key",
        "ann:key\nb ob:other",
        "ann:key\nbob:sch\u00f6n",
    ):
        with pytest.raises(BlockpoolError) as caught:
            named_keys(text)
        assert "sch" not in str(caught.value)


def test_private_prefixes_need_names(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("bare\n")
    with pytest.raises(BlockpoolError, match="--private-prefixes needs"):
        blockpool_server(model, "--api-key-file", str(file), "--private-prefixes").__enter__()


def test_names() -> None:
    noted = noted_name("ann", "x")
    assert (own_name(noted), own_name("x"), shown(noted), noted_name(None, "x")) == (
        "x",
        "x",
        "ann/x",
        "x",
    )
    assert [belongs(noted, owner) for owner in (None, "ann", "an", "bob")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_deleted_agent_names_only_its_owners_agents_among_those_that_need_its_records(
    server: Client,
) -> None:
    common = "All of them begin with these words. " * 30
    for who, agent in (("ann", "gone"), ("ann", "shown"), ("bob", "agents")):
        body = chat(f"{common}I am {agent}.", user=agent)
        assert ask(server, who, "/v1/chat/completions", body)[0] == 200
        server.settle()
        assert ask(server, who, f"/v1/agents/{agent}/save", {})[1]["agent"] == agent
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/agents/gone",
        headers={"x-api-key": "key-of-ann"},
        method="DELETE",
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        report = json.load(response)
    assert (report["agent"], report["clean"]) == ("gone", True)
    assert report["stays"]
    assert {tuple(stay["agents"]) for stay in report["stays"]} == {("shown",)}
