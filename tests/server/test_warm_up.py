"""Prompts that a server computes when it starts: the first real request finds them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from models import save_model

from mlx_blockpool.errors import BlockpoolError
from mlx_blockpool.server.agents.warm_up import read_prompts
from server.serving import Client, blockpool_server, cached_tokens, text_of

SYSTEM = {"role": "system", "content": "All that agents have to know. " * 40}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
TYPES = ["llama", "lfm2"]


@pytest.fixture(scope="module", params=TYPES)
def each_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


def warmed(client: Client) -> dict[str, Any]:
    """The figures once it is through."""
    while (report := client.send("/v1/agents")[1]["warm_up"])["running"]:
        threading.Event().wait(0.02)
    client.settle()
    return report  # type: ignore[no-any-return]


def ask(client: Client, text: str) -> tuple[str, int]:
    answer = client.chat([SYSTEM, {"role": "user", "content": text}], max_tokens=4, temperature=0.0)
    return text_of(answer), cached_tokens(answer["usage"])


def test_the_first_request_finds_what_was_computed(each_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {
            "messages": [SYSTEM, {"role": "user", "content": "Are you there?"}],
            "agent": "first",
            "pin": True,
        },
        {"messages": [{"role": "user", "content": "Hello"}], "model": "/nowhere"},
        {"prompt": "Once upon a time"},
        "A text by itself.",
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    options = ("--pool-bytes", "20MB", "--store-dir", str(tmp_path / "store"))
    with blockpool_server(each_model, "--pool-bytes", "20MB") as undisturbed:
        needed = ask(undisturbed, "What is it?")[0]
    with blockpool_server(each_model, *options, "--warm-up", str(file)) as client:
        report = warmed(client)
        assert (report["prompts"], report["done"], report["failed"]) == (4, 3, 1)
        assert report["failures"][0].startswith("line 2 of")
        assert "There is no model '/nowhere'" in report["failures"][0]
        # Of three prompts that have nothing in common next to nothing was known.
        assert report["cached_tokens"] < 10 < len(SYSTEM["content"]) < report["tokens"]
        reply, cached = ask(client, "What is it?")
        assert (reply, cached >= len(SYSTEM["content"])) == (needed, True)
        agents = {agent["name"]: agent for agent in client.send("/v1/agents")[1]["agents"]}
        assert (agents["first"]["pinned"], agents["first"]["pinned_in_memory"]) == (True, True)
        answer = client.send("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 1})[1]
        # All but the last token, where it can be resumed at any.
        assert cached_tokens(answer["usage"]) in (answer["usage"]["prompt_tokens"] - 1, 0)
    with blockpool_server(each_model, *options, "--warm-up", str(file)) as again:
        report = warmed(again)
        assert report["cached_tokens"] >= len(SYSTEM["content"])
        assert again.send("/v1/cache")[1]["store"]["restored_tokens"] >= len(SYSTEM["content"])
        assert again.generator.registry.loaded.popitem()[1].engine.counts["prompt_tokens"] < 200


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"prompt": "x"}\n\nnonsense', "cannot read line 3 of"),
        ('"good"\n5', "cannot read line 2 of"),
        ('[["prompt", "x"]]', "cannot read line 1 of"),
    ],
)
def test_a_bad_line_is_told_before_the_server_listens(
    tmp_path: Path, text: str, problem: str
) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(BlockpoolError, match=problem):
        read_prompts(file)
    before = set(threading.enumerate())
    with (
        pytest.raises(BlockpoolError, match=problem),
        blockpool_server(tmp_path, "--warm-up", str(file)),
    ):
        pass
    assert set(threading.enumerate()) <= before


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BlockpoolError, match="cannot read"):
        read_prompts(tmp_path / "nothing")
    lines = [{"messages": [SYSTEM], "tools": TOOLS}, "A text\u2028of two lines"]
    (tmp_path / "lines").write_text(
        "\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8"
    )
    prompts = read_prompts(tmp_path / "lines").values()
    assert list(prompts) == [lines[0], {"prompt": lines[1]}]


def test_no_body_has_more_generated_than_a_token_and_a_text_without_an_agent_is_pinned_too(
    each_model: Path, tmp_path: Path
) -> None:
    chat = {
        "messages": [SYSTEM],
        "max_tokens": 50,
        "max_completion_tokens": 50,
        "n": 2,
        "agent": "ann",
    }
    text = {"prompt": "Once upon a time", "max_tokens": 50, "best_of": 3, "pin": True}
    file = tmp_path / "prompts"
    file.write_text("\n".join(map(json.dumps, [chat, text])))
    with blockpool_server(each_model, "--pool-bytes", "20MB", "--warm-up", str(file)) as client:
        assert warmed(client)["done"] == 2
        (served,) = client.generator.registry.loaded.values()
        assert served.engine.counts["tokens"] <= 2
        pinned = {
            agent["name"]: agent["pinned"] for agent in client.send("/v1/agents")[1]["agents"]
        }
        assert pinned.pop("ann") is False
        assert list(pinned.values()) == [True]
