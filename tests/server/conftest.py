"""Fixtures of the server's tests: a model that says what a test wants, its server, and the SDKs' clients for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import mlx.core as mx
import mlx_lm.server
import openai
import pytest

from mlx_blockpool.server import replies
from server.scripted import Say, anthropic_client, openai_client, save_agent
from server.serving import Client, blockpool_server


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_agent(tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="module")
def server(agent: Path) -> Iterator[Client]:
    with blockpool_server(agent, "--pool-bytes", "20MB", "--prefill-step-size", "128") as running:
        yield running


@pytest.fixture
def well(server: Client) -> Iterator[Client]:
    """The server; after the test it holds no block and is well."""
    yield server
    server.settle()
    assert server.send("/health")[0] == 200


@pytest.fixture
def claude(well: Client) -> anthropic.Anthropic:
    return anthropic_client(well)


@pytest.fixture
def gpt(well: Client) -> Iterator[openai.OpenAI]:
    with openai_client(well) as client:
        yield client


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    def says(*texts: str) -> None:
        left = list(texts)
        # Samplers are tried before they are used; a request's own object stays the same until then.
        said: dict[int, tuple[Any, str]] = {}

        def make_sampler(args: Any, tokenizer: Any) -> Any:
            if id(args.sampling) not in said:
                said[id(args.sampling)] = args.sampling, left.pop(0) if len(left) > 1 else left[0]
            tokens = iter(tokenizer.encode(said[id(args.sampling)][1], add_special_tokens=False))

            def draw(logprobs: mx.array) -> mx.array:
                return mx.array([next(tokens, tokenizer.eos_token_id)])

            # What a form forces is said without a draw.
            draw.skip = lambda draws: [next(tokens, None) for _ in range(draws)]  # type: ignore[attr-defined]
            return draw

        monkeypatch.setattr(mlx_lm.server, "_make_sampler", make_sampler)

    return says


@pytest.fixture
def fourth_word_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """fourth_word_fails(error): the fourth text of a reply is not made."""
    text_of = replies.text_of

    def fail(error: Exception) -> None:
        calls = iter(range(1000))

        def failing(detokenizer: Any, response: Any) -> str:
            if next(calls) == 3:
                raise error
            return text_of(detokenizer, response)

        monkeypatch.setattr(replies, "text_of", failing)

    return fail
