"""Who gives no name is known again by how a conversation begins: over turns, over a restart, in
both protocols.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.plugins import make_plugin_manager
from mlx_blockpool.server import options
from mlx_blockpool.server.conversation_id import conversation_id, is_conversation_id
from mlx_blockpool.server.normalise import Normalisers
from mlx_blockpool.store.agents import Agents, shown
from server.serving import Client, at_once, blockpool_server, cached_tokens, until

pytestmark = pytest.mark.server("--pool-bytes 20MB", model="llama")

SYSTEM = {"role": "system", "content": "You help with all sorts of things. " * 6}
HELLO = {"role": "user", "content": "Tell me about birds."}
MODEL = ("folder", None, None)


@pytest.fixture(scope="module")
def normalisers() -> Normalisers:
    return Normalisers(make_plugin_manager())


def found(server: Client) -> dict[str, dict[str, Any]]:
    agents = server.send("/v1/agents")[1]["agents"]
    return {agent["name"]: agent for agent in agents if agent["by"] == "content"}


def chat(server: Client, *messages: dict[str, Any], **options: Any) -> str:
    """The name that the turn is noted under, which was used last."""
    before = {name: agent["tokens"] for name, agent in found(server).items()}
    server.chat(list(messages), max_tokens=2, **options)
    server.settle()
    changed = [name for name, agent in found(server).items() if before.get(name) != agent["tokens"]]
    assert len(changed) == 1, changed
    return changed[0]


@pytest.mark.parametrize("pad", [0, 1 << 17])
def test_a_long_message_counts_to_its_end_and_not_for_its_volatile_beginning(
    pad: int, normalisers: Normalisers
) -> None:
    def name(header: str, end: str) -> str:
        text = f"x-anthropic-billing-header: {header}\n{'word ' * pad}{end}"
        return conversation_id(MODEL, [{"role": "system", "content": text}, HELLO], normalisers)

    assert name("one", "birds") == name("two", "birds")
    assert name("one", "birds") != name("one", "fish")


def test_turns_of_one_conversation_are_one_agent(server: Client) -> None:
    first = chat(server, SYSTEM, HELLO)
    reply, more = (
        {"role": "assistant", "content": "They fly."},
        {"role": "user", "content": "All of them?"},
    )
    assert chat(server, SYSTEM, HELLO, reply, more) == first
    edited = {"role": "user", "content": "And what do they eat?"}
    assert chat(server, SYSTEM, HELLO, reply, edited, reply, more) == first
    agent = found(server)[first]
    assert (agent["tokens_in_memory"], agent["running"]) == (agent["tokens"], 0)
    others = [
        chat(server, SYSTEM, {"role": "user", "content": "Tell me about fish."}),
        chat(server, {"role": "system", "content": "A sub-agent."}, HELLO),
        chat(server, HELLO),
    ]
    assert len({first, *others}) == 4
    server.chat([SYSTEM, HELLO], max_tokens=2, prompt_cache_key="named")
    assert len(found(server)) == 4


def test_both_protocols_find_the_same_agent(server: Client) -> None:
    hello = "The same in both of them."
    name = chat(server, SYSTEM, {"role": "user", "content": hello})
    tokens = found(server)[name]["tokens"]
    message = {
        "role": "user",
        "content": [{"type": "text", "text": hello, "cache_control": {"type": "ephemeral"}}],
    }
    answer = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Really?"}]
    body = {"max_tokens": 2, "system": SYSTEM["content"], "messages": [message, *answer]}
    assert server.send("/v1/messages", body)[0] == 200
    server.settle()
    assert found(server)[name]["tokens"] > tokens


def test_they_order_nothing(server: Client) -> None:
    asked = [
        [SYSTEM, HELLO, {"role": "assistant", "content": "x"}, {"role": "user", "content": f"{n}"}]
        for n in range(3)
    ]
    answers = at_once(
        [lambda m=m: server.chat(m, max_tokens=40, logit_bias={"95": -100}) for m in asked]
    )
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"length"}
    steps = server.generator.registry.loaded.values()
    counts = [served.engine.counts for served in steps]
    # One after the other they take a step for each token.
    assert counts[0]["decode_steps"] < counts[0]["tokens"]


def test_after_a_restart_it_goes_on(model: Path, tmp_path: Path) -> None:
    stored = ("--store-dir", str(tmp_path), "--pool-bytes", "20MB")
    with blockpool_server(model, *stored) as one:
        name = chat(one, SYSTEM, HELLO)
        tokens = found(one)[name]["tokens"]
    with blockpool_server(model, *stored) as two:
        assert found(two)[name]["tokens_on_disk"] == tokens
        answer = two.chat([SYSTEM, HELLO], max_tokens=8)
        two.settle()
        # All but the last token, which is always computed.
        assert cached_tokens(answer["usage"]) == answer["usage"]["prompt_tokens"] - 1
        assert found(two).keys() == {name}


@dataclass(frozen=True)
class Few(StoreConfig):
    agents: int = 4
    conversations: int = 3


def test_names_that_clients_give_do_not_grow_without_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "StoreConfig", Few)
    with blockpool_server(model, "--store-dir", str(tmp_path), "--pool-bytes", "20MB") as client:

        def say(name: str) -> None:
            client.chat(
                [{"role": "user", "content": f"My name is {name}"}],
                max_tokens=2,
                prompt_cache_key=name,
            )
            client.settle()

        say("pinned")
        assert client.send("/v1/agents/pinned/pin", {})[0] == 200
        for number in range(7):
            say(f"number {number}")
        listed = {agent["name"] for agent in client.send("/v1/agents")[1]["agents"]}
        assert listed == {"pinned", *(f"number {number}" for number in range(3, 7))}
        for number in range(3):
            assert client.send("/v1/agents/pinned/fork", {"to": f"fork {number}"})[0] == 200
        assert {agent.name for agent in Agents(tmp_path).all()} >= {"pinned", "fork 2"}
        assert len(Agents(tmp_path).all()) == 5
    assert len(list(tmp_path.glob("models/*/blocks/*/*"))) >= 8, "records stay"


def test_only_the_last_ones_are_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "StoreConfig", Few)
    with blockpool_server(model, "--store-dir", str(tmp_path), "--pool-bytes", "20MB") as client:
        pinned = chat(client, {"role": "user", "content": "pinned"})
        assert client.send(f"/v1/agents/{pinned}/pin", {})[0] == 200
        for number in range(5):
            client.chat([{"role": "user", "content": f"number {number}"}], max_tokens=2)
        client.chat([{"role": "user", "content": "named"}], max_tokens=2, prompt_cache_key="named")
        client.settle()
        # What is on disk is listed too, and is removed by the thread that writes.
        until(lambda: len(found(client)) <= 4)
        assert pinned in found(client)
        assert len(found(client)) == 4
    assert {agent.name for agent in Agents(tmp_path).all()} >= {pinned, "named"}
    assert len(Agents(tmp_path).all()) == 5
    assert len(list(tmp_path.glob("models/*/blocks/*/*"))) >= 7, "records stay"


def test_what_changes_from_turn_to_turn_is_no_part_of_the_name(normalisers: Normalisers) -> None:
    def named(system: str, hello: Any) -> str:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": hello}]
        before = copy.deepcopy(messages)
        name = conversation_id(MODEL, messages, normalisers)
        assert messages == before
        return name

    billed = (
        "x-anthropic-billing-header: cc_version=2.1; cch={};\nYou are an agent.\nToday's date: "
        "2026-0{}-01\nBe brief."
    )
    reminder = "<system-reminder>\nToday's date is 2026-0{}-02.\n</system-reminder>"
    names = {
        named(
            billed.format(f"a{n}", n),
            [{"type": "text", "text": reminder.format(n)}, {"type": "text", "text": "Hello"}],
        )
        for n in range(1, 4)
    }
    assert len(names) == 1
    assert named("You are an agent.", "Hello") == named(
        "You are an agent.", [{"type": "text", "text": "Hello"}]
    )
    assert named("You are an agent.", "Hello") != named("You are an agent.", "Hallo")
    image = {"type": "image_url", "image_url": {"url": "data:a"}}
    other = {"type": "image_url", "image_url": {"url": "data:b"}}
    assert named("s", [image]) != named("s", [other])
    assert named("s", [image]) == named("s", [{**image, "cache_control": {"type": "ephemeral"}}])


@pytest.mark.parametrize(
    ("user_agent", "content", "readable"),
    [
        (
            "claude-cli/2.1 (external, cli)",
            "Fix the failing test in a.py",
            "claude-cli-fix-the-failing",
        ),
        ("", "Tell me about birds.", "tell-me-about-birds"),
        ("OpenAI/Python 2.0", [{"type": "text", "text": "<a-b>\n1\n</a-b>"}], "openai"),
        ("a-very-long-name-of-a-client/1", "Ja, größer!", "a-very-long-na-ja-größer"),
        ("", "İstanbul is large", "i-stanbul-is-large"),
    ],
)
def test_a_name_begins_with_the_client_and_the_first_words(
    user_agent: str, content: Any, readable: str, normalisers: Normalisers
) -> None:
    messages = [SYSTEM, {"role": "user", "content": content}]
    name = conversation_id(MODEL, messages, normalisers, user_agent=user_agent)
    assert name.rpartition("~")[0] == readable
    assert shown(name) == name
    assert is_conversation_id(name)
    (digest,) = {
        conversation_id(MODEL, messages, normalisers, user_agent=each).rpartition("~")[2]
        for each in ("", "curl/8", user_agent)
    }
    assert name.endswith(digest)


def test_a_name_is_the_models_too(normalisers: Normalisers) -> None:
    assert conversation_id(MODEL, [HELLO], normalisers) != conversation_id(
        ("another", None, None), [HELLO], normalisers
    )
    assert conversation_id(MODEL, [SYSTEM], normalisers) != conversation_id(MODEL, [], normalisers)
