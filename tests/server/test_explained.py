"""Every request can be asked why not more of it was cached: in headers, at an address of its
own, and in one line of the log.
"""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from models import save_model

from mlx_blockpool.prefix.lookup import Lookup
from mlx_blockpool.server.watch.divergence import Chat
from mlx_blockpool.server.watch.explain import (
    Explained,
    Explanation,
    ExplanationReader,
    Explanations,
    plain,
)
from server.serving import Client, blockpool_server

pytestmark = pytest.mark.server("--pool-bytes 2MB --prefill-step-size 256", model="llama")

EXPLAIN = "/v1/cache/explain"
SESSION = "session id: {}; of 4711"


def post(
    server: Client, path: str, body: dict[str, Any], **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers by their lower names, and body of an answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", json.dumps(body).encode(), named
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return (
                answer.status,
                {name.lower(): value for name, value in answer.headers.items()},
                answer.read(),
            )
    except urllib.error.HTTPError as error:
        return (
            error.code,
            {name.lower(): value for name, value in error.headers.items()},
            error.read(),
        )


def chat(*texts: str, system: str = "", **options: Any) -> dict[str, Any]:
    roles = [{"role": "user", "content": text} for text in texts]
    return {
        "messages": ([{"role": "system", "content": system}] if system else []) + roles,
        "max_tokens": 2,
        **options,
    }


def explained(
    server: Client, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str
) -> dict[str, Any]:
    """What its agent is told of a request, once it is answered."""
    _, told, _ = post(server, path, body, **headers)
    status, found = server.send(
        f"{EXPLAIN}/{told['x-request-id']}",
        headers={"X-Agent-Id": body.get("prompt_cache_key", "")},
    )
    assert status == 200
    return found  # type: ignore[no-any-return]


# -- causes ----------------------------------------------------------------------------------------


def test_a_first_and_a_second_time(server: Client) -> None:
    body = {"prompt": "Nobody has begun like this. " * 9, "max_tokens": 2}
    first, second = (explained(server, body, "/v1/completions") for _ in range(2))
    assert (first["cause"], first["cached_tokens"], first["known_tokens"], first["state"]) == (
        "new",
        0,
        0,
        "started",
    )
    assert first["why"] == "0 of 252 tokens cached: nothing with this beginning was seen before"
    assert (
        second["cause"],
        second["cached_tokens"],
        second["prompt_tokens"],
        second["difference"],
    ) == ("all", 251, 252, None)
    assert (second["path"], second["model"], second["agent"]) == (
        "/v1/completions",
        server.generator.model_provider.name,
        None,
    )


def test_the_lines_that_differ_and_what_would_keep_them(server: Client) -> None:
    rest = "You look things up.\n" * 12
    before, after = (
        chat("Go.", system=f"Be brief.\n{SESSION.format(c)}\n{rest}", prompt_cache_key="liner")
        for c in ("a0c1", "b1f2")
    )
    post(server, "/v1/chat/completions", before)
    found = explained(server, after)
    told = found["difference"]
    assert (found["cause"], told["line"], told["known_line"]) == (
        "differs",
        SESSION.format("b1f2"),
        SESSION.format("a0c1"),
    )
    same = len("<|im_start|>system\nBe brief.\n" + SESSION[: SESSION.index("{")])
    at = same - len("<|im_start|>") + 1
    assert (told["position"], told["normaliser"], found["cached_tokens"]) == (at, "bookkeeping", at)
    assert found["why"].endswith("--normalise bookkeeping would keep it")
    again = chat("Go.", system=f"Be brief.\n{SESSION.format('c2a3')}\n{rest}")
    post(server, "/v1/chat/completions", before, X_Normalise="bookkeeping")
    assert explained(server, again, X_Normalise="bookkeeping")["cause"] == "all", "it does keep it"


def test_what_no_normaliser_keeps_is_not_said_to_be_kept(server: Client) -> None:
    """The same line in what the user says is not theirs, and another line is nobody's."""
    for of, cause in ((SESSION, "user"), ("Room {} is free.", "system")):
        for value in ("one", "two"):
            text = f"{cause} says:\n{of.format(value)}\nGo on. " * 3
            found = explained(server, chat("Go.", system=text) if cause == "system" else chat(text))
        assert (found["difference"]["line"], found["difference"]["normaliser"]) == (
            of.format("two"),
            None,
        )
        assert "--normalise" not in found["why"]


def test_a_date_and_a_long_line(server: Client) -> None:
    rest = "Work.\n" * 9
    for day in ("2026-03-01", "2026-03-02"):
        found = explained(
            server, chat("Hi.", system=f"Agent of dates.\nToday's date is {day}.\n{rest}")
        )
    assert (found["difference"]["normaliser"], found["difference"]["line"]) == (
        "date",
        "Today's date is 2026-03-02.",
    )
    for word in ("left", "right"):
        body = {
            "prompt": "long " * 60 + word + " on" * 200,
            "max_tokens": 1,
            "prompt_cache_key": "long",
        }
        found = explained(server, body, "/v1/completions")
    lines = found["difference"]["line"], found["difference"]["known_line"]
    assert all(
        line.startswith("... ") and line.endswith(" ...") and len(line) < 210 for line in lines
    )
    assert ["left" in line for line in lines] == [False, True]


def test_a_longer_prompt_and_an_evicted_one(server: Client) -> None:
    begun = "This goes on and on. " * 20
    post(server, "/v1/completions", {"prompt": begun, "max_tokens": 1})
    longer = explained(
        server, {"prompt": begun + "And further. " * 30, "max_tokens": 1}, "/v1/completions"
    )
    assert longer["cause"] in ("longer", "differs")
    assert longer["cached_tokens"] >= len(begun)
    for i in range(4):
        post(server, "/v1/completions", {"prompt": f"{i} pushes it out. " * 70, "max_tokens": 1})
    gone = explained(
        server, {"prompt": begun + "And further. " * 30, "max_tokens": 1}, "/v1/completions"
    )
    assert (gone["cause"], gone["cached_tokens"]) == ("evicted", 0)


def test_a_window_without_a_checkpoint_tells_where_the_prompts_part(tmp_path: Path) -> None:
    with blockpool_server(save_model(tmp_path, "gemma3_text"), "--pool-bytes", "8MB") as windowed:
        for word in ("one", "two"):
            prompt = (
                "A window forgets what it has seen. " * 20
                + f"\nIt is {word}.\n"
                + "Then it goes on. " * 30
            )
            found = explained(windowed, {"prompt": prompt, "max_tokens": 1}, "/v1/completions")
        assert (found["cause"], found["difference"]["line"]) == ("no checkpoint", "It is two.")
        assert found["cached_tokens"] < found["known_tokens"] == found["difference"]["position"]


def test_what_comes_from_disk_and_what_was_computed_elsewhere(model: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", "llama", seed=1)
    body = chat("The agent talks about birds. " * 30, prompt_cache_key="scout")
    with blockpool_server(
        model, "--store-dir", str(tmp_path / "store"), "--pool-bytes", "8MB"
    ) as first:
        post(first, "/v1/chat/completions", body)
        first.settle()
    with blockpool_server(
        model, "--store-dir", str(tmp_path / "store"), "--pool-bytes", "8MB"
    ) as again:
        found = explained(again, body)
        assert found["restored_tokens"] > 0
        assert found["restored_tokens"] <= found["cached_tokens"] == found["prompt_tokens"] - 1
        again.settle()
    with blockpool_server(
        other, "--store-dir", str(tmp_path / "store"), "--pool-bytes", "8MB"
    ) as swapped:
        found = explained(swapped, body)
        assert (found["cause"], found["agent"], found["cached_tokens"]) == (
            "other namespace",
            "scout",
            0,
        )
        assert f"was with {model.name}" in found["why"]
        assert explained(swapped, chat("Nobody knows me."))["elsewhere"] is None


# -- headers and the log ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_headers_tell_the_request_and_its_cache(server: Client, path: str, stream: bool) -> None:
    body = chat(f"Tell {path} {stream} what is cached: “exactly”, née.\r\nWell?", stream=stream)
    post(server, path, body)
    status, told, _ = post(server, path, body)
    total = server.send(f"{EXPLAIN}/{told['x-request-id']}")[1]["prompt_tokens"]
    assert (status, told["x-cache-tokens"]) == (200, f"{total - 1}/{total}")
    assert told["request-id"] == told["x-request-id"]
    assert "x-cache-why" not in told
    body["messages"][0]["content"] += "!\r\n"
    _, told, _ = post(server, path, body, X_Explain="1")
    assert told["x-cache-cause"] == "differs"
    assert told["x-cache-why"].startswith(told["x-cache-tokens"].split("/")[0])
    assert told["x-cache-why"].isascii()
    assert told["x-cache-why"].isprintable()


def test_requests_that_run_alone_are_explained_too(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind a draft model requests do not go through the engine."""
    with (
        blockpool_server(model, "--draft-model", str(model), "--pool-bytes", "8MB") as drafted,
        caplog.at_level(logging.INFO),
    ):
        body = chat("A draft goes ahead. " * 20, stream=True)
        post(drafted, "/v1/chat/completions", body)
        _, told, _ = post(drafted, "/v1/chat/completions", body, X_Explain="true")
        found = drafted.send(f"{EXPLAIN}/{told['x-request-id']}")[1]
        assert told["x-cache-tokens"] == f"{found['cached_tokens']}/{found['prompt_tokens']}"
        assert found["cached_tokens"] > 300
    assert sum(told["x-request-id"] in record.getMessage() for record in caplog.records) == 1


def test_a_refused_request_is_explained(server: Client) -> None:
    too_long = {"prompt": "y" * 5000, "max_tokens": 5}
    status, told, _ = post(server, "/v1/completions", too_long, X_Explain="1")
    found = server.send(f"{EXPLAIN}/{told['x-request-id']}")[1]
    assert (status, found["state"], told["x-cache-cause"]) == (400, "failed", "failed")
    assert "the pool holds at most" in found["error"]
    assert told["x-cache-why"] == f"refused: {found['error']}"
    for path, body in (
        ("/v1/completions", {"prompt": "x", "top_p": 7}),
        ("/v1/messages", {"messages": "x", "max_tokens": 1}),
        ("/v1/chat/completions", chat("x", model="/no/such")),
    ):
        found = explained(server, body, path)
        assert (found["state"], found["path"]) == ("failed", path)
        assert found["why"] == f"refused: {found['error']}"
        assert found["error"]


def test_counting_tokens_is_no_request_to_explain(server: Client) -> None:
    _, told, _ = post(
        server, "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}
    )
    assert server.send(f"{EXPLAIN}/{told['x-request-id']}")[0] == 404


def test_one_line_of_the_log_for_each_request(
    server: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for text in ("The log\nhas one line of Ann.", "The log\nhas one line of Bob."):
            _, told, _ = post(server, "/v1/chat/completions", chat(text, prompt_cache_key="logger"))
        _, refused, _ = post(server, "/v1/completions", {"prompt": ""})
    lines = [
        r.getMessage()
        for r in caplog.records
        if told["x-request-id"] in r.getMessage() and r.levelno == logging.INFO
    ]
    assert len(lines) == 1
    for part in (
        "logger",
        "differs",
        "of Ann.",
        "of Bob.",
        "tokens cached",
        server.generator.model_provider.name,
    ):
        assert part in lines[0]
    assert "\n" not in lines[0]
    assert sum(refused["x-request-id"] in r.getMessage() for r in caplog.records) == 1


def test_what_comes_from_disk_is_told_before_it_is_there(server: Client) -> None:
    asked = Explained(
        Explanation("req_1", 0.0, "/", "m", None), Chat([], server.generator.normalisers, ())
    )
    assert asked.now.headers(True) == {
        "X-Cache-Cause": "waiting",
        "X-Cache-Why": "it waits to start",
    }
    asked.restore("llama", 5020, 4812)
    assert asked.now.headers(False) == {"X-Cache-Tokens": "restoring"}
    assert (
        asked.now.headers(True)["X-Cache-Why"]
        == "4,812 of 5,020 tokens are being restored from disk"
    )
    lookup = Lookup(5020, 4812, 4812, "longer", restored=4608)
    asked.start(server.generator.model, b"", range(5020), 4812, lookup)
    assert asked.now.headers(False) == {"X-Cache-Tokens": "4812/5020"}
    assert asked.now.why.startswith(
        "4,812 of 5,020 tokens cached (4,608 of them restored from disk): the prompt continues"
    )
    asked.fail(RuntimeError("no\nmore"))
    assert (asked.now.state, asked.now.cached_tokens, asked.now.why[-21:]) == (
        "failed",
        4812,
        "; it failed: no\\nmore",
    )


# -- whose text it is ------------------------------------------------------------------------------

SECRET = "Notes.\nThe password of the safe is hunter{}.\nKeep it."


@pytest.mark.parametrize("name", ["guesser", None])
def test_known_text_of_others_is_told_nobody(
    server: Client, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is guessed: the place and the own line, in headers, by the id and in the list;
    the log has both.
    """
    mine, named = (
        chat(f"{name}\n" + SECRET.format("2, and nothing else"), user="owner"),
        {} if name is None else {"user": name},
    )
    post(server, "/v1/chat/completions", mine)
    with caplog.at_level(logging.INFO):
        guess = chat(f"{name}\n" + SECRET.format("3?"), **named)
        _, told, _ = post(server, "/v1/chat/completions", guess, X_Explain="1")
    asked = {} if name is None else {"X-Agent-Id": name}
    found = server.send(f"{EXPLAIN}/{told['x-request-id']}", headers=asked)[1]
    listed = server.send(EXPLAIN, headers=asked)[1]
    assert (found["cause"], found["difference"]["known_line"]) == ("differs", None)
    assert found["difference"]["line"].startswith("The password of the safe is hunter3?")
    assert "where other text was known before" in told["x-cache-why"]
    for answer in (told, found, listed):
        assert "hunter2" not in json.dumps(answer)
    assert any("hunter2" in record.getMessage() for record in caplog.records)
    # Its own last turn is its own.
    again = post(
        server, "/v1/chat/completions", mine | chat(f"{name}\n" + SECRET.format("4")), X_Explain="1"
    )[1]
    assert "hunter2, and nothing else" in again["x-cache-why"]


def test_of_several_ways_on_an_agent_is_told_its_own(server: Client) -> None:
    text = "Several know this beginning.\nIt is {} that they say.\n"
    for number, user in enumerate(("b", "own", "a")):
        post(server, "/v1/chat/completions", chat(text.format(f"{number}{user}"), user=user))
    found = explained(server, chat(text.format("9"), prompt_cache_key="own"))
    assert found["difference"]["known_line"] == "It is 1own that they say."


@pytest.mark.parametrize("user", ["ann", None])
def test_others_see_figures_of_a_request_and_nothing_that_it_says(
    server: Client, user: str | None
) -> None:
    named = {} if user is None else {"user": user}
    post(server, "/v1/chat/completions", chat(f"A secret question of {user}", **named))
    _, told, _ = post(server, "/v1/chat/completions", chat(f"A secret quest of {user}", **named))
    for headers in ({}, {"X-Agent-Id": "bob"}):
        newest = server.send(EXPLAIN, headers=headers)[1]["requests"][0]
        assert newest["id"] == (None if user is None else told["x-request-id"])
        assert (newest["agent"], newest["cause"]) == (user, "differs")
        assert "secret" not in json.dumps(newest)
        if user is not None:
            found = server.send(f"{EXPLAIN}/{newest['id']}", headers=headers)[1]
            assert "secret" not in json.dumps(found)
            assert (found["difference"]["line"], found["difference"]["known_line"]) == ("", None)


# -- the list --------------------------------------------------------------------------------------


def test_the_last_requests_newest_first(server: Client) -> None:
    bodies = [{"prompt": f"{i}", "max_tokens": 1, "user": "one"} for i in range(22)]
    ids = [post(server, "/v1/completions", body)[1]["x-request-id"] for body in bodies]
    status, found = server.send(f"{EXPLAIN}/?x=1")
    assert (status, [request["id"] for request in found["requests"]]) == (200, ids[:1:-1])
    assert set(found["requests"][0]) >= {
        "time",
        "agent",
        "model",
        "prompt_tokens",
        "cached_tokens",
        "cause",
        "why",
    }


def test_an_unknown_request_is_404(server: Client) -> None:
    for name in ("req_0", "x" * 500, "%00"):
        status, answer = server.send(f"{EXPLAIN}/{name}")
        assert status == 404
        assert "X-Request-Id" in json.dumps(answer)
        assert len(json.dumps(answer)) < 400


def test_avoidable_misses_are_kept_apart_from_later_requests(server: Client) -> None:
    kept = Explanations(3)
    for i, cause in enumerate(("differs", "new", "evicted", *["all"] * 3)):
        first = Explanation(f"req_{i}", float(i), "/", "m", None, cause=cause)
        kept.add(Explained(first, Chat([], server.generator.normalisers, ())))
    missed = kept.latest(9, ExplanationReader(), are_avoidable=True)
    assert [each.cause for each in missed] == ["evicted", "differs"]
    assert [each.cause for each in kept.latest(9, ExplanationReader())] == ["all"] * 3


def test_the_oldest_are_forgotten(server: Client) -> None:
    kept = Explanations(3)
    for i in range(5):
        kept.add(
            Explained(
                Explanation(f"req_{i}", 0.0, "/", "m", None),
                Chat([], server.generator.normalisers, ()),
            )
        )
    assert [explanation.id for explanation in kept.latest(9, ExplanationReader())] == ["", "", ""]
    assert [kept.get(f"req_{i}", ExplanationReader()) is not None for i in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_text_for_a_line() -> None:
    assert plain("a\nb\x00c\u2028é") == "a\\nb\\x00c\\u2028é"
