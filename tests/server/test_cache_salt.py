"""cache_salt: requests share prefixes with those of the same salt, in memory, on disk and in
files, and with no others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import save_model

from mlx_blockpool.prefix.salts import MARK_BYTES, SALT_BYTES, SHARED, mark_of, salt_marked, salt_of
from server.scripted import anthropic_client, openai_client
from server.serving import Client, blockpool_server
from server.test_agents_http import ask

pytestmark = pytest.mark.server("--pool-bytes 20MB --prefill-step-size 128", model="agent")

TEXT = "All {0}.\nThe safe opens with {0} and {0}.\nThat is all. " * 5


def is_known(client: Client, salt: str | None, name: str, **options: Any) -> bool:
    """Whether most of a chat was cached. Chats with different names have little in common."""
    salted = {} if salt is None else {"cache_salt": salt}
    usage = client.chat(
        [{"role": "user", "content": TEXT.format(name)}], max_tokens=2, **salted, **options
    )["usage"]
    return 2 * cached(usage) > int(usage["prompt_tokens"])


def is_found(client: Client, salt: str | None, name: str) -> bool:
    """Whether a chat is cached or on disk."""
    known = is_known(client, salt, name)
    return known or client.send("/v1/cache/explain")[1]["requests"][0]["cause"] == "on disk"


def cached(usage: dict[str, Any]) -> int:
    return int(
        (usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))["cached_tokens"]
    )


def latest(client: Client) -> dict[str, Any]:
    listed = client.send("/v1/cache/explain")[1]["requests"][0]
    found: dict[str, Any] = client.send(f"/v1/cache/explain/{listed['id']}")[1]
    return found


def of_every_protocol(client: Client, salt: str | None) -> list[int]:
    """Cached tokens of one text, as the clients of each protocol ask for it."""
    extra: Any = {"extra_body": {} if salt is None else {"cache_salt": salt}}
    text, model = TEXT.format(1), "default_model"
    message: Any = [{"role": "user", "content": text}]
    asked = {"messages": message, "stream": False, "options": {"num_predict": 1}}
    assert (
        client.send("/api/chat", asked if salt is None else asked | {"cache_salt": salt})[0] == 200
    )
    ollamas = client.send("/v1/cache/explain")[1]["requests"][0]["cached_tokens"]
    with openai_client(client) as gpt:
        chat = gpt.chat.completions.create(model=model, messages=message, max_tokens=1, **extra)
        plain = gpt.completions.create(model=model, prompt=text, max_tokens=1, **extra)
        response = gpt.responses.create(model=model, input=text, max_output_tokens=1, **extra)
    claude = anthropic_client(client).messages.create(
        model=model, messages=message, max_tokens=1, **extra
    )
    found = [
        cached(chat.usage.to_dict()),
        cached(plain.usage.to_dict()),
        cached(response.usage.to_dict()),
    ]  # type: ignore[union-attr]
    return [ollamas, *found, claude.usage.cache_read_input_tokens or 0]


def test_salts_share_nothing_in_memory_and_on_disk(tmp_path: Path) -> None:
    model = save_model(tmp_path / "llama", "llama")
    options = ("--pool-bytes", "30MB", "--store-dir", str(tmp_path / "store"))
    salts = (None, "ann", "bob")
    with blockpool_server(model, *options) as client:
        for salt in (None, "ann"):
            first_hit, chat_hit, plain_hit, *other_hits = of_every_protocol(client, salt)
            # One prompt is the chat of four protocols; a completion is another.
            assert first_hit == plain_hit == 0 < chat_hit
            assert other_hits == [chat_hit] * 2
        for known in (False, True):
            assert [is_known(client, salt, "birds", user="one") for salt in salts] == [known] * 3
        # The agent's last turn was bob's: another salt is told why nothing of it is of use, and not
        # what it said.
        assert not is_known(client, "cid", "trees", user="one")
        told = latest(client)
        assert (told["cause"], told["difference"], "birds" in told["why"]) == (
            "other salt",
            None,
            False,
        )
        client.settle()
        names = {agent["name"] for agent in client.send("/v1/agents")[1]["agents"]}
        # Chats without a name are recognised by how they begin, and by their salt.
        assert [is_known(client, salt, "bees") for salt in (None, "ann")] == [False, False]
        client.settle()
        assert len({agent["name"] for agent in client.send("/v1/agents")[1]["agents"]} - names) == 2
        ask(client, "POST", "/one/save", {})
    with blockpool_server(model, *options) as client:
        # What a tiny model computes faster than a busy disk gives it is computed, and still found
        # on disk.
        assert [is_found(client, salt, "birds") for salt in ("dan", *salts)] == [
            False,
            True,
            True,
            True,
        ]
        assert ask(client, "DELETE", "/one")["clean"]


def test_a_response_is_continued_with_its_own_salt(server: Client) -> None:
    asked = {"input": "The safe opens with 4711.", "max_output_tokens": 2, "cache_salt": "ann"}
    status, first = server.send("/v1/responses", asked)
    assert status == 200
    going_on = {
        "input": "What was it?",
        "previous_response_id": first["id"],
        "max_output_tokens": 2,
    }
    for salt in ({}, {"cache_salt": "bob"}):
        status, answer = server.send("/v1/responses", going_on | salt)
        assert (status, answer["error"]["param"]) == (400, "previous_response_id")
        assert "another cache_salt" in answer["error"]["message"]
        reference = {
            "input": [{"type": "item_reference", "id": first["output"][0]["id"]}],
            "max_output_tokens": 2,
        }
        assert server.send("/v1/responses", reference | salt)[0] == 400
    status, second = server.send("/v1/responses", going_on | {"cache_salt": "ann"})
    assert (status, cached(second["usage"]) > 0) == (200, True)
    server.settle()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A"}]}),
        ("/v1/completions", {"prompt": "A"}),
        ("/v1/responses", {"input": "A"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1}),
    ],
)
def test_a_salt_is_a_text_of_bounded_length(
    server: Client, path: str, body: dict[str, Any]
) -> None:
    for salt, words in (
        ("", "not be empty"),
        ("x" * 1025, "at most 1,024; found 1,025"),
        (7, "a valid string; found 7"),
    ):
        status, answer = server.send(path, {**body, "cache_salt": salt})
        assert (
            status,
            words in answer["error"]["message"],
            "cache_salt" in answer["error"]["message"],
        ) == (400, True, True), answer
    assert (
        server.send(
            path, {**body, "cache_salt": "\ud800" * 1024, "max_tokens": 1, "max_output_tokens": 1}
        )[0]
        == 200
    )


def test_salts_of_all_kinds_are_different() -> None:
    found = [
        salt_of(),
        salt_of("ann"),
        salt_of(None, "ann"),
        salt_of("ann", "ann"),
        salt_of("bob", "ann"),
        salt_of("ann", "bob"),
    ]
    assert len(set(found)) == len(found)
    assert found[0] == SHARED
    assert {len(salt) for salt in found[1:]} == {SALT_BYTES}
    assert [len(mark_of(salt)) for salt in found] == [0, 0, *[MARK_BYTES] * 4]
    # What a file says of a cache_salt leads to the salt of whoever imports it.
    assert salt_marked(mark_of(found[3]), "bob") == found[4]
