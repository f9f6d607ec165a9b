"""What must not hurt the server: deadly prompts, bad bodies, clients that leave, prompts that do
not fit.
"""

from __future__ import annotations

import json
import random
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from thorough import only

from server.serving import Client, at_once, cached_tokens, stock_server, text_of

POOL = 1_000_000  # 7 blocks of the llama model: 1,792 tokens
pytestmark = pytest.mark.server(f"--pool-bytes {POOL} --prefill-step-size 128", model="llama")


@pytest.fixture(autouse=True)
def unharmed(server: Client) -> Iterator[None]:
    """After every test the server is well and no block is held."""
    yield
    status, health = server.send("/health")
    assert (status, health["status"]) == (200, "ok")
    server.settle()
    assert server.chat([{"role": "user", "content": "still there?"}], max_tokens=2)["choices"]
    server.settle()


def complete(server: Client, prompt: str, max_tokens: int) -> dict[str, Any]:
    status, answer = server.send("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens})
    assert status == 200, answer
    return answer  # type: ignore[no-any-return]


def test_prompt_that_kills_stock_is_answered(server: Client, model: Path) -> None:
    """The whole known sequence as prompt leaves stock nothing to compute, and its generation
    thread dies.
    """
    prompt = "The deadly prompt"
    first = complete(server, prompt, 1)["choices"][0]["text"]
    second = complete(server, prompt + first, 1)
    expected = complete(server, prompt, 2)["choices"][0]["text"]
    assert first + second["choices"][0]["text"] == expected
    assert cached_tokens(second["usage"]) == second["usage"]["prompt_tokens"] - 1


def test_stock_does_die_of_it(model: Path) -> None:
    """The hazard that the test above guards against is real."""
    with stock_server(model) as stock:
        first = complete(stock, "The deadly prompt", 1)["choices"][0]["text"]
        with pytest.raises((OSError, AssertionError, json.JSONDecodeError)):
            complete(stock, "The deadly prompt" + first, 1)
        assert stock.send("/health")[0] == 503


def test_exact_repeats_give_the_same_reply(server: Client) -> None:
    messages = [{"role": "user", "content": "repeat after me " * 30}]
    answers = [server.chat(messages, max_tokens=8) for _ in range(4)]
    assert len({text_of(a) for a in answers}) == 1
    cached = [cached_tokens(a["usage"]) for a in answers]
    assert cached[1:] == [answers[0]["usage"]["prompt_tokens"] - 1] * 3


def test_one_token_prompt(server: Client) -> None:
    assert complete(server, "x", 4)["usage"]["prompt_tokens"] == 1
    assert cached_tokens(complete(server, "x", 4)["usage"]) == 0


def test_empty_content_and_empty_prompt(server: Client) -> None:
    assert server.chat([{"role": "user", "content": ""}], max_tokens=2)["choices"]
    assert server.send("/v1/chat/completions", {"messages": []})[0] == 400
    status, answer = server.send("/v1/completions", {"prompt": ""})
    assert status == 400
    assert "at least one token" in answer["error"]["message"]


def test_prompt_longer_than_the_pool_is_refused_with_both_figures(server: Client) -> None:
    capacity = server.capacity()
    status, answer = server.send(
        "/v1/completions", {"prompt": "y" * (capacity + 50), "max_tokens": 5}
    )
    assert status == 400
    assert str(capacity + 51) in answer["error"]["message"]
    assert str(capacity) in answer["error"]["message"]


def test_max_tokens_beyond_the_pool_is_served_as_far_as_it_goes(server: Client) -> None:
    answer = complete(server, "z" * 1700, 100_000)
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert answer["usage"]["total_tokens"] <= server.capacity()


def test_more_work_than_fits_waits(server: Client) -> None:
    """Five prompts of 700 tokens where two fit: all are answered, with the replies that they get
    alone.
    """
    prompts = [f"{i} waits " * 88 for i in range(5)]
    together = at_once([lambda p=p: complete(server, p, 8) for p in prompts])
    alone = [complete(server, p, 8) for p in prompts]
    assert [a["choices"][0]["text"] for a in together] == [a["choices"][0]["text"] for a in alone]


def test_seeded_requests_and_batches_side_by_side(server: Client) -> None:
    def seeded() -> Any:
        return server.chat(
            [{"role": "user", "content": "dice"}], max_tokens=6, seed=3, temperature=1.0
        )

    def greedy() -> Any:
        return server.chat([{"role": "user", "content": "dice"}], max_tokens=6)

    answers = at_once([seeded, greedy, seeded, greedy])
    texts = [text_of(a) for a in answers]
    assert texts[0] == texts[2]
    assert texts[1] == texts[3]


def test_client_that_hangs_up_in_prefill_leaves_its_prefix(server: Client) -> None:
    prompt = "a long prompt that nobody waits for " * 40
    body = json.dumps({"prompt": prompt, "max_tokens": 500, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            f"{len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        assert b"keepalive" in read_until(connection, b"keepalive")
    server.settle()
    again = cached_tokens(complete(server, prompt, 2)["usage"])
    assert again >= 128, "nothing of the prefill was kept"


def read_until(connection: socket.socket, text: bytes) -> bytes:
    received = b""
    while text not in received:
        received += connection.recv(4096)
    return received


def test_sampling_that_mlx_refuses_fails_alone(server: Client) -> None:
    good = {"messages": [{"role": "user", "content": "fine"}], "max_tokens": 30}
    bad = [
        {**good, "top_k": 10**6, "temperature": 1.0},
        {**good, "logit_bias": {"99999": 1.0}},
        {**good, "temperature": float("nan")},
        {**good, "stop": [1, 2]},
        {**good, "stream_options": 7},
    ]
    answers = at_once(
        [lambda b=b: server.send("/v1/chat/completions", b) for b in [good, *bad, good]]
    )
    assert [status for status, _ in answers] == [200, 400, 400, 400, 400, 400, 200]
    assert all("error" in answer for status, answer in answers if status != 200)
    # What stock answers after a bad top_k, for ever: its random state is left without a value.
    assert server.chat(good["messages"], max_tokens=3, temperature=1.0)["choices"]


@pytest.mark.parametrize("count", only([80, 200], 80))
def test_random_bodies(server: Client, count: int) -> None:
    rng = random.Random(7)
    answers = [server.send(*random_request(rng)) for _ in range(count)]
    statuses = {status for status, _ in answers}
    assert statuses <= {200, 400, 404}, [answer for status, answer in answers if status >= 500]
    assert 200 in statuses
    assert 400 in statuses


def random_request(rng: random.Random) -> tuple[str, Any, bytes | None]:
    """A path and a body, right or wrong in a random way."""
    odd: list[Any] = [
        None,
        True,
        -1,
        0,
        10**12,
        1.5,
        "",
        "text",
        [],
        [1],
        {},
        {"a": 1},
        float("inf"),
        "\ud800",
    ]
    good = {
        "messages": [
            {
                "role": rng.choice(["user", "system", "tool", "assistant"]),
                "content": "hi " * rng.randrange(40),
            }
        ],
        "prompt": "go on " * rng.randrange(1, 40),
        "max_tokens": rng.randrange(1, 6),
        "stream": False,
    }
    fields = [
        "messages",
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "seed",
        "logit_bias",
        "tools",
    ]
    fields += [
        "stream_options",
        "logprobs",
        "top_logprobs",
        "model",
        "role_mapping",
        "chat_template_kwargs",
        "min_p",
    ]
    fields += ["n", "best_of", "cache_salt", "priority"]
    for _ in range(rng.randrange(3)):
        good[rng.choice(fields)] = rng.choice(odd)
    good.pop("model", None) if rng.random() < 0.9 else None
    path = rng.choice(["/v1/completions", "/v1/chat/completions", "/chat/completions"])
    raw = (
        rng.choice([b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"messages": 1}'])
        if rng.random() < 0.1
        else None
    )
    return path, good, raw


@pytest.mark.parametrize("count", only([20, 500], 20))
def test_pool_bytes_hold_over_many_requests(server: Client, count: int) -> None:
    """Bytes of the arrays themselves, after each of so many requests whose prefixes come and go."""
    rng = random.Random(1)
    server.send("/v1/completions", {"prompt": "the first loads the model", "max_tokens": 1})
    slabs = server.generator.model.prefix.arena
    for _ in range(count):
        family = rng.randrange(12)
        prompt = f"family {family} " * 40 + "x" * rng.randrange(300)
        assert complete(server, prompt, rng.randrange(1, 4))["choices"]
        assert slabs.nbytes <= POOL
    assert server.send("/v1/cache")[1]["cached_tokens"] > 0


def test_a_failure_in_mid_stream_is_told_and_is_that_requests_own(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_blockpool.server import replies

    text = replies.text_of
    calls = iter(range(1000))

    def failing(*args: Any) -> str:
        if next(calls) == 3:
            raise LookupError("no word for this")
        return text(*args)

    monkeypatch.setattr(replies, "text_of", failing)
    body = {"messages": [{"role": "user", "content": "speak"}], "max_tokens": 10, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/chat/completions", json.dumps(body).encode()
    )
    answer = urllib.request.urlopen(request).read().decode()
    assert "LookupError: no word for this" in answer
    monkeypatch.undo()
    assert server.chat([{"role": "user", "content": "speak"}], max_tokens=10)["choices"]


def test_a_broken_batch_fails_its_requests_and_not_the_next(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_blockpool.engine.engine import BlockPoolBatchEngine

    def broken(self: Any) -> None:
        raise MemoryError("out of something")

    monkeypatch.setattr(BlockPoolBatchEngine, "next", broken)
    status, answer = server.send("/v1/completions", {"prompt": "doomed", "max_tokens": 3})
    assert status == 503
    assert "out of something" in answer["error"]["message"]
    monkeypatch.undo()
    assert complete(server, "doomed no more", 3)["choices"]


def test_a_prompt_that_is_being_computed_is_waited_for_chunk_by_chunk(server: Client) -> None:
    """Both start cold at the same time: the second takes over what the first has computed of
    their common beginning.
    """
    common = "both prompts begin like this, and go on for a while. " * 10
    prompts = [common + "then the first goes on " * 20, common + "the second ends"]
    first, second = at_once([lambda p=p: complete(server, p, 2) for p in prompts])
    cached = [cached_tokens(a["usage"]) for a in (first, second)]
    assert max(cached) >= len(common) - 128
    assert [complete(server, p, 2)["choices"][0]["text"] for p in prompts] == [
        a["choices"][0]["text"] for a in (first, second)
    ]


def test_a_reply_that_cannot_be_kept_is_still_a_reply(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_blockpool.prefix.cache import PrefixCache

    expected = complete(server, "unkept", 3)["choices"][0]["text"]

    def broken(*args: Any, **kwargs: Any) -> None:
        raise LookupError("cannot keep this")

    monkeypatch.setattr(PrefixCache, "release", broken)
    assert complete(server, "unkept", 3)["choices"][0]["text"] == expected
    server.settle()
    monkeypatch.undo()
    assert complete(server, "kept again", 3)["choices"]
