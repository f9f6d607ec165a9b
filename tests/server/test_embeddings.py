"""Embeddings: the vectors of a model that is made for them, over every protocol, and the refusal
of one that is not.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import ollama
import pytest
from mlx_lm import load

from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.server import embedding
from mlx_blockpool.server.api.embeddings import tokens_of
from mlx_blockpool.server.bodies import InvalidRequestError
from mlx_blockpool.server.embedding import (
    CHUNK_TOKENS,
    NoEmbeddingsError,
    Pooling,
    pooling_of,
    shortened,
    vector_steps,
)
from mlx_blockpool.server.jobs import Steps
from mlx_blockpool.server.provider import ModelKey
from server.scripted import openai_client
from server.serving import Client, at_once, blockpool_server, until

SHORT, LONG = "What is a block?", "Agents share the beginning of their prompts. " * 12


def write_pooling(folder: Path, mode: str, *more: str) -> Path:
    kinds = ["Transformer", "Pooling", *more]
    types = [
        {"idx": i, "type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(types))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(
        json.dumps({"pooling_mode_cls_token": False, mode: True})
    )
    return folder


@pytest.fixture(scope="module")
def folder(agent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedding") / "embedder"
    shutil.copytree(agent, folder)
    return write_pooling(folder, "pooling_mode_lasttoken", "Normalize")


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[Client]:
    with blockpool_server(folder, "--pool-bytes", "20MB") as running:
        yield running


@pytest.fixture(scope="module")
def states(folder: Path) -> Any:
    """states(text): the hidden states that the model has of a text, computed in one piece."""
    model, tokenizer = load(str(folder))[:2]
    return lambda text: model.model(mx.array([tokenizer.encode(text)]))[0]


def expected(states: Any, text: str) -> list[float]:
    last = states(text)[-1]
    return list((last / mx.linalg.norm(last)).tolist())


def test_vectors_are_the_models_last_states(embedder: Client, states: Any) -> None:
    assert len(states(LONG)) > 2 * CHUNK_TOKENS
    with openai_client(embedder) as gpt:
        answer = gpt.embeddings.create(model="default_model", input=[SHORT, LONG])
        one = gpt.embeddings.create(model="default_model", input=SHORT, encoding_format="float")
    for data, text in zip(answer.data, (SHORT, LONG), strict=True):
        assert data.embedding == pytest.approx(expected(states, text), abs=1e-5)
    assert one.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-6)
    assert answer.usage.prompt_tokens == len(states(SHORT)) + len(states(LONG))
    assert [data.index for data in answer.data] == [0, 1]
    embedder.settle()


def test_the_other_shapes(embedder: Client, states: Any) -> None:
    vector = expected(states, SHORT)
    client = ollama.Client(host=f"http://127.0.0.1:{embedder.port}")
    embedded = client.embed("default_model", [SHORT, LONG])
    assert list(embedded.embeddings[0]) == pytest.approx(vector, abs=1e-5)
    assert embedded.prompt_eval_count == len(states(SHORT)) + len(states(LONG))
    assert list(client.embeddings("default_model", SHORT).embedding) == pytest.approx(
        vector, abs=1e-5
    )
    tokens = embedder.send("/tokenize", {"prompt": SHORT})[1]["tokens"]
    for given in (tokens, [tokens]):
        status, answer = embedder.send(
            "/v1/embeddings", {"input": given, "encoding_format": "base64"}
        )
        assert status == 200
        packed = base64.b64decode(answer["data"][0]["embedding"])
        assert list(struct.unpack(f"<{len(vector)}f", packed)) == pytest.approx(vector, abs=1e-5)
    status, answer = embedder.send("/v1/embeddings", {"input": SHORT, "dimensions": 4})
    assert answer["data"][0]["embedding"] == pytest.approx(shortened(vector, 4), abs=1e-5)


def test_replies_and_vectors_at_once_are_those_of_each_alone(embedder: Client, states: Any) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    alone = embedder.chat(chat, max_tokens=20)["choices"][0]["message"]
    jobs = [
        lambda: embedder.chat(chat, max_tokens=20),
        *[lambda: embedder.send("/v1/embeddings", {"input": LONG})] * 2,
    ]
    reply, *answers = at_once(jobs)
    assert reply["choices"][0]["message"] == alone
    for _, answer in answers:
        assert answer["data"][0]["embedding"] == pytest.approx(expected(states, LONG), abs=1e-5)
    embedder.settle()


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"input": ""}, 400, "input: Input should not be empty"),
        ({"input": ["a", ""]}, 400, "input[1]: Input should not be empty"),
        ({"input": [1.5]}, 400, "input[0]"),
        ({"input": "a", "dimensions": 10_000}, 400, "dimensions: the model's vectors have"),
        ({"input": "a", "model": "no/such"}, 404, "There is no model"),
        ({"input": [[99_999_999]]}, 400, "vocabulary has no token 99999999"),
        ({"input": [[1] * 40_000]}, 400, "40000"),
    ],
)
def test_what_cannot_be_done_is_named(
    body: dict[str, Any], status: int, says: str, embedder: Client
) -> None:
    found, answer = embedder.send("/v1/embeddings", body)
    assert (found, says in answer["error"]["message"]) == (status, True), answer


def test_the_pooling_is_that_of_the_folder(tmp_path: Path) -> None:
    assert pooling_of(write_pooling(tmp_path, "pooling_mode_mean_tokens")) == Pooling("mean", False)
    assert pooling_of(write_pooling(tmp_path, "pooling_mode_cls_token", "Normalize")) == Pooling(
        "first", True
    )
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode": "lasttoken"}')
    assert pooling_of(tmp_path) == Pooling("last", True)
    with pytest.raises(NoEmbeddingsError, match="Dense"):
        pooling_of(write_pooling(tmp_path, "pooling_mode_mean_tokens", "Dense"))
    for path in ("../elsewhere", "/etc", 3):
        (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": path}]))
        with pytest.raises(NoEmbeddingsError):
            pooling_of(tmp_path)


def test_a_mean_is_that_of_all_chunks(embedder: Client, folder: Path, states: Any) -> None:
    write_pooling(folder, "pooling_mode_mean_tokens")
    try:
        _, answer = embedder.send("/v1/embeddings", {"input": LONG})
    finally:
        write_pooling(folder, "pooling_mode_lasttoken", "Normalize")
    assert answer["data"][0]["embedding"] == pytest.approx(
        states(LONG).mean(axis=0).tolist(), abs=1e-5
    )


def test_a_shorter_vector_has_length_one() -> None:
    assert shortened([3.0, 4.0, 12.0], 2) == pytest.approx([0.6, 0.8])
    assert shortened([3.0, 4.0], None) == [3.0, 4.0]


def after_each_chunk(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    """Call a function after each chunk of any text."""

    def watched(*given: Any) -> Steps[Any]:
        steps = vector_steps(*given)
        try:
            while True:
                pause = next(steps)
                act()
                yield pause
        except StopIteration as end:
            return end.value
        finally:
            steps.close()

    monkeypatch.setattr(embedding, "vector_steps", watched)


@pytest.fixture
def chunks(embedder: Client, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that are held after each chunk."""
    held: list[int] = []
    pool = embedder.generator.model.prefix.pool
    after_each_chunk(monkeypatch, lambda: held.append(sum(counts.held for counts in pool.counts())))
    return held


def test_keys_and_values_are_in_the_pool_as_long_as_the_text_is_computed(
    embedder: Client, chunks: list[int]
) -> None:
    assert embedder.send("/v1/embeddings", {"input": LONG})[0] == 200
    assert len(chunks) == 3
    assert set(chunks) == {3}
    embedder.settle()


def test_a_text_waits_for_room_as_long_as_replies_run() -> None:
    def lend(count: int) -> list[Any]:
        raise PoolExhaustedError(count, 0, 0, "full")

    key, live = ModelKey("a"), {1: "a reply"}
    served: Any = SimpleNamespace(
        key=key, live=live, prefix=SimpleNamespace(lend=lend), provider=SimpleNamespace(model=None)
    )
    generator = SimpleNamespace(registry=SimpleNamespace(loaded={key: served}), health=None)
    with pytest.raises(StopIteration) as ended:
        next(vector_steps(generator, served, Pooling("last", True), [1, 2, 3]))
    assert ended.value.value is None
    live.clear()
    with pytest.raises(PoolExhaustedError):
        next(vector_steps(generator, served, Pooling("last", True), [1, 2, 3]))


def test_a_text_that_waits_for_room_lets_others_pass(
    embedder: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended, tries = threading.Event(), list[str](), iter(range(20))

    def crowded(generator: Any, served: Any, pooling: Pooling, tokens: list[int]) -> Steps[Any]:
        """The long text has room when the short one is computed, or at the last try."""
        if len(tokens) > CHUNK_TOKENS and not ended and next(tries, None) is not None:
            begun.set()
            return None
        return (yield from vector_steps(generator, served, pooling, tokens))

    def ask(text: str) -> None:
        assert embedder.send("/v1/embeddings", {"input": text})[0] == 200
        ended.append(text)

    def ask_later() -> None:
        begun.wait()
        ask(SHORT)

    monkeypatch.setattr(embedding, "vector_steps", crowded)
    at_once([lambda: ask(LONG), ask_later])
    assert ended == [SHORT, LONG]


def test_too_many_values_are_refused_before_a_text_is_computed(
    embedder: Client, chunks: list[int]
) -> None:
    assert embedder.send("/v1/embeddings", {"input": LONG, "dimensions": 10_000})[0] == 400
    assert chunks == []


def test_all_texts_together_have_a_limit() -> None:
    asked: list[Any] = []

    def convert(job: Any, model: Any) -> Any:
        asked.append(job)
        return SimpleNamespace(tokens=array("i", bytes(4 * 200_000)))

    says = re.escape("at most 300,000 tokens in all; the first 2 of 9 texts have 400,000")
    with pytest.raises(InvalidRequestError, match=says):
        tokens_of(SimpleNamespace(convert=convert), None, ["a"] * 9)  # type: ignore[arg-type]
    assert len(asked) == 2


def test_a_model_is_kept_until_all_texts_are_computed(embedder: Client, states: Any) -> None:
    status, answer = embedder.send("/api/embed", {"input": [SHORT, LONG], "keep_alive": 0})
    assert status == 200, answer
    assert answer["embeddings"][1] == pytest.approx(expected(states, LONG), abs=1e-5)
    registry = embedder.generator.registry
    until(lambda: not (registry.loaded or registry.swap))


def test_a_model_is_kept_although_another_request_wants_it_gone(
    embedder: Client, states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = embedder.generator.registry
    after_each_chunk(
        monkeypatch, lambda: [registry.use(model, None, 0) for model in registry.loaded.values()]
    )
    status, answer = embedder.send("/v1/embeddings", {"input": LONG})
    assert status == 200, answer
    assert answer["data"][0]["embedding"] == pytest.approx(expected(states, LONG), abs=1e-5)
    assert [model.is_busy for model in registry.loaded.values()] == [False]
