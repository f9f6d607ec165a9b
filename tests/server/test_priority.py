"""Priority in requests: in the body of every protocol, and by the headers of clients whose
sub-agents come behind them.
"""

from __future__ import annotations

import json
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from mlx_blockpool.server.generator import BlockpoolGenerator
from mlx_blockpool.server.models.queue import ModelQueue, ModelUsage, QueueEntry
from mlx_blockpool.server.scope import RequestScope, is_of_sub_agent
from mlx_blockpool.server.validation import Serving
from server.serving import Client

pytestmark = pytest.mark.server("--pool-bytes 20MB --prefill-step-size 128", model="agent")

CAPTURED = Path(__file__).parent / "sub_agents.json"
CHAT = {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "A", "max_tokens": 1}),
    ("/v1/messages", CHAT),
    ("/v1/responses", {"input": "A", "max_output_tokens": 1}),
    ("/api/chat", {"messages": CHAT["messages"], "stream": False, "options": {"num_predict": 1}}),
    ("/api/generate", {"prompt": "A", "stream": False, "options": {"num_predict": 1}}),
]


@pytest.fixture
def priorities(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The priorities of all requests, as the generation thread gets them."""
    seen: list[int] = []
    generate = BlockpoolGenerator.generate_choices

    def watching(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(request.options.priority)
        return generate(self, request, *args, **kwargs)

    monkeypatch.setattr(BlockpoolGenerator, "generate_choices", watching)
    return seen


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_each_protocol_has_it(
    server: Client, priorities: list[int], path: str, body: dict[str, Any]
) -> None:
    sub = {"X-Claude-Code-Agent-Id": "a1b2"}
    for more, headers in (({}, {}), ({"priority": -3}, {}), ({}, sub), ({"priority": 0}, sub)):
        assert server.send(path, {**body, **more}, headers=headers)[0] == 200
    assert priorities == [0, -3, 1, 0]
    status, answer = server.send(path, {**body, "priority": "high"})
    assert (status, "priority: " in str(answer["error"])) == (400, True)


@pytest.mark.parametrize(
    ("headers", "is_sub"),
    [
        ({"X-Claude-Code-Agent-Id": "a1b2", "X-Claude-Code-Session-Id": "s"}, True),
        ({"X-Claude-Code-Session-Id": "s"}, False),
        ({"X-Claude-Code-Agent-Id": " "}, False),
        ({"X-OpenAI-Subagent": "review"}, True),
        ({"X-Codex-Parent-Thread-Id": "t"}, True),
        ({"X-Parent-Session-Id": "s"}, True),
    ],
)
def test_which_headers_tell_of_a_sub_agent(headers: dict[str, str], is_sub: bool) -> None:
    assert is_of_sub_agent(headers) is is_sub


@pytest.mark.parametrize("seen", json.loads(CAPTURED.read_text()), ids=lambda seen: seen["client"])
def test_headers_of_real_clients_tell_main_threads_from_sub_agents(
    seen: dict[str, Any], server: Client
) -> None:
    """What each sent as it started a sub-agent in a session."""
    scopes = []
    for kind in ("main", "sub"):
        headers, body = Message(), seen[kind]["body"]
        for name, value in seen[kind]["headers"].items():
            headers[name] = value
        scopes.append(RequestScope(server.generator))
        scopes[-1].parse_headers(headers, body)
        scopes[-1].take_options(headers, Serving())
    main, sub = (scope.options for scope in scopes)
    assert (main.priority, sub.priority) == (0, 1)
    # Requests of one agent would wait for each other.
    assert main.agent != sub.agent or main.agent is None
    assert main.agent == seen["main"]["body"].get("prompt_cache_key")


def test_a_model_without_batches_takes_lower_values_first() -> None:
    now = [0.0]
    queue = ModelQueue(30.0, clock=lambda: now[0])
    for item, priority in (("late", 2), ("first", 0), ("urgent", -1)):
        queue.add("model", item, priority)
    now[0] = 25.0
    queue.add("model", "newer", 0)
    order = []
    while (entry := queue.next([ModelUsage("model", False, 0.0, 0.0)])) is not None:
        order.append(entry.item)
        queue.remove(entry)
    # What has waited for twenty seconds more is due before what has come by two steps more
    # important.
    assert order == ["urgent", "first", "late", "newer"]


def test_no_request_overtakes_an_earlier_one_of_its_agent() -> None:
    queue = ModelQueue(30.0, clock=lambda: 0.0)
    for item, priority, agent in (
        ("first", 1, "ann"),
        ("second", -1, "ann"),
        ("bob's", 0, "bob"),
        ("nobody's", -1, None),
    ):
        queue.add("model", item, priority, agent)
    assert [entry.item for entry in queue] == ["nobody's", "bob's", "first", "second"]


def test_the_oldest_request_decides_which_model_is_loaded_next() -> None:
    now = [0.0]
    queue = ModelQueue(30.0, clock=lambda: now[0])
    for key, priority in (("old", 5), ("new", -5)):
        queue.add(key, key, priority)
        now[0] += 1
    assert queue.plan([], lambda key: True).load == "old"


def test_a_start_looks_at_one_of_many_that_wait() -> None:
    looks = []

    class Usage(ModelUsage):
        def takes(self, entry: QueueEntry) -> bool:
            looks.append(entry)
            return super().takes(entry)

    queue = ModelQueue(30.0, clock=lambda: 0.0)
    for item in range(100):
        queue.add("model", item)
    while (entry := queue.next([Usage("model", False, 0.0, 0.0)])) is not None:
        queue.remove(entry)
    assert len(looks) == 100
