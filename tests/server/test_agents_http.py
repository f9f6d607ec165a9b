"""Agents over HTTP: what is said of them is true, and whatever is done to one, replies are those
of an undisturbed run.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from models import save_model
from thorough import only

from mlx_blockpool.store.agents import Agents
from server.serving import Client, blockpool_server, cached_tokens, text_of

TYPES = ["llama", "lfm2"]
# A pool that holds few of them.
SMALL = {"llama": "2MB", "lfm2": "2MB"}
SYSTEM = {"role": "system", "content": "All of them have this to begin with. " * 12}
Message = dict[str, str]


class Agent:
    """A conversation under a name.

    Its turns on a server that nothing is done to are what the others are compared with.
    """

    def __init__(self, name: str, about: str) -> None:
        self.name = name
        self.messages: list[Message] = [
            SYSTEM,
            {"role": "user", "content": f"{name} wants to know about {about}. " * 10},
        ]

    def turn(self, client: Client, name: str | None = None) -> tuple[str, int, dict[str, Any]]:
        """The reply, how many tokens of the prompt were known, and the usage."""
        answer = client.chat(
            self.messages, max_tokens=6, temperature=0.0, prompt_cache_key=name or self.name
        )
        reply = text_of(answer)
        more = {"role": "user", "content": f"And then, number {len(self.messages)}?"}
        self.messages += [{"role": "assistant", "content": reply}, more]
        client.settle()
        return reply, cached_tokens(answer["usage"]), answer["usage"]


class Served:
    """A model's folder, and what it answers to someone whom nothing happens to."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self._needed: dict[str, list[tuple[str, int]]] = {}

    def server(self, *options: str) -> Any:
        return blockpool_server(self.folder, "--pool-bytes", "30MB", *options)

    def needed(self, name: str, about: str, turns: int) -> list[tuple[str, int]]:
        """The first replies to an agent, and how many tokens of each prompt were known from its
        turns before.
        """
        if name not in self._needed:
            with self.server() as client:
                agent = Agent(name, about)
                self._needed[name] = [agent.turn(client)[:2] for _ in range(3)]
        return self._needed[name][:turns]


@pytest.fixture(scope="module", params=TYPES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(save_model(tmp_path_factory.mktemp(request.param), request.param), request.param)


# What is the same whatever a model keeps of a prompt.
LLAMA = pytest.mark.parametrize("served", only(TYPES, "llama"), indirect=True)
# What is done to a path of blocks is done to these too, and to states.
LFM2 = pytest.mark.parametrize("served", only(TYPES, "lfm2"), indirect=True)


def call(
    client: Client, method: str, path: str, data: bytes | None = None, timeout: float = 60
) -> tuple[int, bytes]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{client.port}/v1/agents{path}", data, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ask(client: Client, method: str, path: str, body: Any = None, status: int = 200) -> Any:
    found, answer = call(client, method, path, None if body is None else json.dumps(body).encode())
    assert found == status, answer
    return json.loads(answer)


def listed(client: Client) -> dict[str, dict[str, Any]]:
    agents = ask(client, "GET", "")["agents"]
    return {agent["name"]: agent for agent in agents if agent["by"] == "name"}


def pressed(client: Client, count: int = 6) -> None:
    """Others fill the pool until whatever may go has gone."""
    for number in range(count):
        Agent(f"other {number}", f"something else, which is number {number}").turn(client)


@LLAMA
def test_what_is_said_of_agents(served: Served, tmp_path: Path) -> None:
    with served.server("--store-dir", str(tmp_path)) as client:
        one, two = Agent("one", "birds"), Agent("zwei/✓", "fish")
        usages = [agent.turn(client)[2] for agent in (one, two)]
        agents = listed(client)
        assert list(agents) == ["one", "zwei/✓"]
        for agent, usage in zip((one, two), usages, strict=True):
            found = agents[agent.name]
            assert 0 <= usage["total_tokens"] - found["tokens"] <= 1
            assert found["tokens_in_memory"] == found["resumes_from_memory"] == found["tokens"]
            assert (found["loaded"], found["pinned"], found["running"], found["waiting"]) == (
                True,
                False,
                0,
                0,
            )
            assert (
                found["created"]
                <= found["used"]
                <= time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            )
            assert min(found["memory"].values()) > 0
            assert ask(client, "GET", "/" + quote(agent.name, safe="")) == found
        missing = "There is no agent three. The agents are: one, zwei/✓. GET /v1/agents lists them."
        assert ask(client, "GET", "/three", status=404)["error"] == missing
        assert "printable" in ask(client, "GET", "/%00", status=400)["error"]
        assert "UTF-8" in ask(client, "GET", "/%ff", status=400)["error"]
        assert "Unknown request POST" in ask(client, "POST", "/one/dance", {}, status=404)["error"]
        assert "Unknown request DELETE" in ask(client, "DELETE", "/one/pin", status=404)["error"]
    with served.server("--store-dir", str(tmp_path)) as client:
        found = listed(client)["one"]
        assert (found["tokens_in_memory"], found["tokens_on_disk"]) == (0, agents["one"]["tokens"])
        assert found["disk"]["own_bytes"] > 0


@pytest.mark.sampled
@pytest.mark.parametrize("stored", [True, False])
def test_a_deleted_agent_leaves_nothing_that_only_it_stood_on(
    served: Served, tmp_path: Path, stored: bool
) -> None:
    with served.server(*(["--store-dir", str(tmp_path)] if stored else [])) as client:
        gone, stays = Agent("gone", "birds"), Agent("stays", "fish")
        needed = served.needed("stays", "fish", 2)
        replies = [stays.turn(client)[:2]]
        gone.turn(client)
        if stored:
            ask(client, "POST", "/gone/save", {})
            ask(client, "POST", "/stays/save", {})
        report = ask(client, "DELETE", "/gone")
        assert report["clean"]
        assert report["memory"]["blocks"] > 0
        assert listed(client).keys() == {"stays"}
        ask(client, "DELETE", "/gone", status=404)
        client.settle()
        prompt, messages = gone.messages[1]["content"], gone.messages[:2]
        if stored:
            assert report["removed"]["records"] > 0
            assert report["stays"], "the system prompt is others' too"
            assert "gone" not in [agent.name for agent in Agents(tmp_path).all()]
        usage = client.chat(messages, max_tokens=1, prompt_cache_key="new")["usage"]
        # What all begin with is still known, and nothing of what only the deleted one said.
        known = len("system" + SYSTEM["content"] + "user" + "gone wants") + 40
        assert cached_tokens(usage) <= known < len(prompt) + known
        replies.append(stays.turn(client)[:2])
        assert replies == needed


@LLAMA
def test_nothing_is_deleted_while_it_runs(served: Served) -> None:
    with served.server() as client:
        agent = Agent("busy", "birds")
        agent.turn(client)
        body = {
            "messages": agent.messages,
            "max_tokens": 3000,
            "stream": True,
            "prompt_cache_key": "busy",
            "logit_bias": {"95": -100},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{client.port}/v1/chat/completions", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            response.readline()
            assert "1 running" in ask(client, "DELETE", "/busy", status=409)["error"]
            assert listed(client)["busy"]["running"] == 1
        client.settle()
        assert ask(client, "DELETE", "/busy")["clean"]


@LFM2
def test_a_pin_outlives_the_pressure_of_others_and_follows(served: Served, tmp_path: Path) -> None:
    needed = served.needed("kept", "birds", 3)
    options = [
        "--pool-bytes",
        SMALL[served.name],
        *(["--store-dir", str(tmp_path)] if served.name == "llama" else []),
    ]
    with served.server(*options) as client:
        kept, loose = Agent("kept", "birds"), Agent("loose", "fish")
        replies = [kept.turn(client)[:2]]
        loose.turn(client)
        assert ask(client, "POST", "/kept/pin", {})["pinned_in_memory"]
        replies.append(kept.turn(client)[:2])
        pressed(client)
        found = listed(client)
        assert found["kept"]["resumes_from_memory"] == found["kept"]["tokens"]
        assert found["loose"]["resumes_from_memory"] < found["loose"]["tokens"]
        assert [*replies, kept.turn(client)[:2]] == needed
        ask(client, "POST", "/kept/unpin", {})
        pressed(client)
        found = listed(client)["kept"]
        assert (found["pinned"], found["resumes_from_memory"] < found["tokens"]) == (False, True)


@LFM2
def test_a_pin_on_disk_is_one_in_memory_again_once_it_is_restored(
    served: Served, tmp_path: Path
) -> None:
    stored = ("--store-dir", str(tmp_path), "--pool-bytes", SMALL[served.name])
    with served.server(*stored) as client:
        Agent("kept", "birds").turn(client)
        ask(client, "POST", "/kept/pin", {})
        ask(client, "POST", "/kept/save", {})
    with served.server(*stored) as client:
        assert listed(client)["kept"]["pinned"]
        assert ask(client, "POST", "/kept/restore", {})["restored_tokens"] > 0
        pressed(client)
        found = listed(client)["kept"]
        assert found["resumes_from_memory"] == found["tokens"]


@LFM2
def test_save_and_restore_over_a_restart(served: Served, tmp_path: Path) -> None:
    needed = served.needed("one", "birds", 3)
    agent = Agent("one", "birds")
    with served.server("--store-dir", str(tmp_path)) as client:
        replies = [agent.turn(client)[:2], agent.turn(client)[:2]]
        report = ask(client, "POST", "/one/save", {})
        assert report["tokens_on_disk"] == report["resumes_from_disk"] == report["tokens"]
        on_disk = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    # As after a crash: what was there when the answer came.
    crashed = tmp_path.with_name(tmp_path.name + "-crashed")
    for path, data in on_disk.items():
        copy = crashed / path.relative_to(tmp_path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(data)
    with served.server("--store-dir", str(crashed)) as client:
        report = ask(client, "POST", "/one/restore", {})
        assert report["tokens_in_memory"] == report["restored_tokens"] == report["tokens"] > 0
        assert report["restored_bytes"] > 0
        again = ask(client, "POST", "/one/restore", {})
        assert (again["restored_tokens"], again["restored_bytes"]) == (0, 0)
        assert [*replies, agent.turn(client)[:2]] == needed


@LLAMA
def test_what_cannot_be_saved_says_why(served: Served, tmp_path: Path) -> None:
    with served.server() as client:
        Agent("one", "birds").turn(client)
        assert "--no-store" in ask(client, "POST", "/one/save", {}, status=503)["error"]
    with served.server("--store-dir", str(tmp_path), "--store-bytes", "20000") as client:
        Agent("one", "birds").turn(client)
        assert "--store-bytes" in ask(client, "POST", "/one/save", {}, status=503)["error"]
        assert ask(client, "GET", "/one")["tokens_in_memory"] > 0


@LFM2
def test_fork(served: Served, tmp_path: Path) -> None:
    with served.server(
        *(["--store-dir", str(tmp_path)] if served.name == "lfm2" else [])
    ) as client:
        agent = Agent("one", "birds")
        agent.turn(client)
        tokens = listed(client)["one"]["tokens"]
        assert ask(client, "POST", "/one/fork", {"to": "two"})["tokens"] == tokens
        assert ask(client, "POST", "/two/fork", {"to": "zwei/2"})["of"] == "two"
        assert {name: found["tokens"] for name, found in listed(client).items()} == dict.fromkeys(
            ("one", "two", "zwei/2"), tokens
        )
        assert ask(client, "DELETE", "/zwei%2F2")["memory"]["blocks"] == 0
        assert "already" in ask(client, "POST", "/two/fork", {"to": "one"}, status=409)["error"]
        assert '"to"' in ask(client, "POST", "/two/fork", {}, status=400)["error"]
        assert (
            "Choose another"
            in ask(client, "POST", "/two/fork", {"to": "chat~" + "0" * 12}, status=400)["error"]
        )
        assert agent.turn(client, "two")[:2] == served.needed("one", "birds", 2)[1]
        assert {name: found["tokens"] > tokens for name, found in listed(client).items()} == {
            "one": False,
            "two": True,
        }
        # The one's path is a beginning of the other's: nothing goes with it.
        report = ask(client, "DELETE", "/one")
        assert (report["memory"]["blocks"], report["clean"]) == (0, True)
        assert listed(client)["two"]["tokens_in_memory"] == listed(client)["two"]["tokens"]


@LLAMA
def test_answers_name_no_folder(served: Served, tmp_path: Path) -> None:
    folders = (
        str(tmp_path).encode(),
        str(served.folder).encode(),
        str(Path.home()).encode() + b"/",
    )
    with served.server("--store-dir", str(tmp_path)) as client:
        Agent("one", "birds").turn(client)
        answers = [
            call(client, "GET", "")[1],
            call(client, "GET", "/one")[1],
            call(client, "DELETE", "/one")[1],
        ]
        answers.append(json.dumps(client.send("/v1/cache")).encode())
        for answer in answers:
            assert not [folder for folder in folders if folder in answer]
        client.settle()


@LLAMA
def test_they_are_reached_while_replies_run(served: Served, tmp_path: Path) -> None:
    with served.server("--store-dir", str(tmp_path)) as client:
        agent, other = Agent("one", "birds"), Agent("long", "fish")
        agent.turn(client)
        body = {
            "messages": other.messages,
            "max_tokens": 3000,
            "stream": True,
            "prompt_cache_key": "long",
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{client.port}/v1/chat/completions", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            response.readline()
            ask(client, "POST", "/one/save", {})
            ask(client, "POST", "/one/restore", {})
            assert ask(client, "DELETE", "/one")["clean"]
        client.settle()


@LLAMA
def test_agents_of_a_model_that_is_not_loaded(served: Served, tmp_path: Path) -> None:
    store, another = tmp_path / "store", save_model(tmp_path / "other", "qwen2")
    with served.server("--store-dir", str(store)) as client:
        Agent("one", "birds").turn(client)
        tokens = listed(client)["one"]["tokens"]
    with blockpool_server(another, "--pool-bytes", "30MB", "--store-dir", str(store)) as client:
        found = listed(client)["one"]
        assert (found["loaded"], found["tokens_in_memory"], found["tokens_on_disk"]) == (
            False,
            0,
            tokens,
        )
        assert found["disk"]["own_bytes"] > 0
        assert "loaded" in ask(client, "POST", "/one/restore", {}, status=409)["error"]
        assert ask(client, "POST", "/one/pin", {})["pinned_on_disk"]
        assert listed(client)["one"]["pinned"]
        report = ask(client, "DELETE", "/one")
        assert (report["clean"], report["removed"]["bytes"]) == (True, found["disk"]["own_bytes"])
