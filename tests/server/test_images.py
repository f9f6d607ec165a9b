"""Images of requests: they are data URLs, and their sizes are checked before they are decoded."""

from __future__ import annotations

import base64
import copy
import io
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlx_lm.processors import PROCESSORS
from mlx_lm.server import CompletionRequest, ResponseGenerator
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_config
from models import CONFIGS, character_tokenizer, make_model, save_model, write_model

from mlx_blockpool.config import ImageConfig, PromptConfig
from mlx_blockpool.errors import UnavailableError
from mlx_blockpool.server.access import ByteBudget
from mlx_blockpool.server.bodies import InvalidRequestError
from mlx_blockpool.server.generator import BlockpoolGenerator
from mlx_blockpool.server.images import HeldPixels, check_images, processor_of
from mlx_blockpool.server.prompts.job import (
    PreparedImages,
    PreparedPrompt,
    PromptJob,
    TokenizerSource,
)
from mlx_blockpool.server.prompts.workers import PromptWorkers
from mlx_blockpool.server.sequential import tokenized
from server.serving import blockpool_server, until
from server.test_hang_ups import ask

DATA = "data:image/png;base64,AAAA"


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data URLs whose size was looked at; the library that does is not needed here."""
    seen: list[str] = []
    monkeypatch.setattr(
        "mlx_blockpool.server.images._check", lambda url, place, config: seen.append(url)
    )
    return seen


def shown(url: Any, text: str = "What is this?") -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": text},
                {"type": "image_url", "image_url": {"url": url}},
            ],
        }
    ]


def test_data_urls_stay_as_they_are(checked: list[str]) -> None:
    messages = shown(DATA)
    check_images(messages, "messages.0", ImageConfig())
    assert (messages, checked) == (shown(DATA), [DATA])


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/x", "https://images.example/x", "file:///etc/passwd", "http://[", ""]
)
def test_other_urls_are_refused(checked: list[str], url: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\.0: .*Send the image as a data URL"):
        check_images(shown(url), "messages.0", ImageConfig())
    assert checked == []


@pytest.mark.parametrize(
    ("config", "messages", "message"),
    [
        (ImageConfig(most=1), shown(DATA) * 2, "may have 1 images; found 2"),
        (ImageConfig(characters=5), shown(DATA, "123456"), "5 characters; found 6"),
        (ImageConfig(), shown(["x"]), "valid string"),
    ],
)
def test_bounds_of_images(
    checked: list[str], config: ImageConfig, messages: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_images(messages, "messages.0", config)
    assert not checked


def test_bytes_are_counted_before_an_image_is_read() -> None:
    pytest.importorskip("PIL.Image")
    with pytest.raises(InvalidRequestError, match="may have 1,000 bytes"):
        check_images(
            shown(f"data:image/png;base64,{'A' * 2000}"),
            "messages.0",
            ImageConfig(image_bytes=1000),
        )


def test_pixels_are_counted_before_an_image_is_decoded() -> None:
    image = pytest.importorskip("PIL.Image")
    written = io.BytesIO()
    image.new("RGB", (20, 30)).save(written, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
    check_images(shown(url), "messages.0", ImageConfig(pixels=600))
    with pytest.raises(InvalidRequestError, match="599 pixels; this one has 20 x 30"):
        check_images(shown(url), "messages.0", ImageConfig(pixels=599))
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        check_images(shown(DATA), "messages.0", ImageConfig())


def test_a_model_takes_images_where_mlx_lm_has_a_processor_for_it() -> None:
    assert processor_of({"model_type": "llama"}) is None
    assert processor_of({"model_type": "llama", "vision_config": {}}) is None
    assert processor_of({"model_type": "llama", "vision_config": {"x": 1}}) is None
    assert (
        processor_of(
            {"model_type": "llama", "vision_config": {"x": 1}, "processor_type": "muse_spark"}
        )
        == "muse_spark"
    )


# -- pixels ----------------------------------------------------------------------------------------


def pixels_of(count: int) -> PreparedImages:
    """One image with `count` bytes of pixels, at the second of three tokens."""
    return PreparedImages([np.arange(count, dtype=np.uint8)], [1], [1, -5, 3])


def test_requests_share_the_bytes_of_their_pixels() -> None:
    budget = ByteBudget(100)
    first, second = HeldPixels(budget), HeldPixels(budget)
    first.hold(pixels_of(60), "messages.0")
    with pytest.raises(UnavailableError, match="too many requests with images"):
        second.hold(pixels_of(41), "messages.0")
    with pytest.raises(
        InvalidRequestError, match=r"messages\.0: the images take 101 bytes .* at most 100"
    ):
        second.hold(pixels_of(101), "messages.0")
    second.hold(pixels_of(40), "messages.0")
    assert budget.left == 0
    first.release()
    second.release()
    assert budget.left == 100


def test_released_pixels_are_gone_wherever_their_request_waits() -> None:
    held = HeldPixels(ByteBudget(100))
    prompt = PreparedPrompt([1, 2, 3], [3], ["user"], images=pixels_of(60))
    assert prompt.images is not None
    held.hold(prompt.images, "messages.0")
    assert len(tokenized(prompt)[4].pixel_values) == 1
    held.release()
    assert prompt.images.nbytes == 0
    with pytest.raises(ConnectionAbortedError):
        tokenized(prompt)


# Writes the token of an image where one is.
WITH_IMAGES = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in "
    "m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|patch|>{% endif %}{% endfor %}{% "
    "endif %}<|im_end|>{% endfor %}"
)


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    """A model with an image processor."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens(["<|image_start|>", "<|patch|>", "<|image_end|>"])
    changes = {"vocab_size": tokenizer.get_vocab_size()}
    config = {
        **CONFIGS["llama"],
        **changes,
        "vision_config": {"patch_size": 4},
        "processor_type": "muse_spark",
    }
    return write_model(
        tmp_path / "seeing", make_model("llama", **changes), config, WITH_IMAGES, tokenizer
    )


def data_url(width: int, height: int) -> str:
    image = pytest.importorskip("PIL.Image")
    written = io.BytesIO()
    image.linear_gradient("L").resize((width, height)).convert("RGB").save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def test_a_worker_renders_images_as_mlx_lm_does(seeing: Path) -> None:
    messages = [*shown(data_url(20, 30)), *shown(data_url(40, 8), "And this?")]
    tokenizer = load_tokenizer(seeing)
    processor = PROCESSORS["muse_spark"].from_config(load_config(seeing))
    generator = SimpleNamespace(
        model_provider=SimpleNamespace(
            processor=processor, cli_args=SimpleNamespace(chat_template_args={})
        )
    )
    request = CompletionRequest("chat", "", copy.deepcopy(messages), None, None)
    *expected, vision = ResponseGenerator._tokenize(
        generator, tokenizer, request, SimpleNamespace(chat_template_kwargs=None)
    )
    workers = PromptWorkers(PromptConfig())
    try:
        prepared = workers.prepare(
            PromptJob(
                TokenizerSource(str(seeing), {}), "chat", messages=messages, processor="muse_spark"
            )
        )
    finally:
        workers.close()
    *found, images = tokenized(prepared)
    assert found == expected
    assert (images.starts, images.cache_key) == (vision.starts, vision.cache_key)
    assert [pixels.tolist() for pixels in images.pixel_values] == [
        pixels.tolist() for pixels in vision.pixel_values
    ]


def test_counting_tokens_ships_no_pixels(seeing: Path) -> None:
    image = data_url(20, 30)
    workers = PromptWorkers(PromptConfig())
    try:
        whole, counted = (
            workers.prepare(
                PromptJob(
                    TokenizerSource(str(seeing), {}),
                    "chat",
                    messages=shown(image),
                    processor="muse_spark",
                    only_count=only,
                )
            )
            for only in (False, True)
        )
    finally:
        workers.close()
    assert (counted.tokens, counted.images) == (whole.tokens, None)


def test_the_pixels_of_waiting_requests_are_bounded(
    seeing: Path, checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request is served and the second waits for it; a third finds no room until one
    of them has ended.
    """
    starts, ends = threading.Event(), threading.Event()

    def serve(self: Any, request: Any, stream: Any) -> None:
        starts.set()
        ends.wait()
        request[0].put(ValueError("the model computes no images"))

    prepared = PreparedPrompt([1, 2, 3], [3], ["user"])
    monkeypatch.setattr(BlockpoolGenerator, "_serve_single", serve)
    monkeypatch.setattr(
        PromptWorkers, "prepare", lambda self, job: replace(prepared, images=pixels_of(100))
    )
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    message = {
        "max_tokens": 4,
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
    }
    chat = {"max_tokens": 4, "messages": shown(DATA)}
    with blockpool_server(seeing) as client:
        client.generator.wait_until_loaded()
        budget = client.generator.pixels = ByteBudget(250)
        try:
            with ask(client, "/v1/chat/completions", chat):
                starts.wait()
                with ask(client, "/v1/chat/completions", chat):
                    until(lambda: budget.left == 50)
                    status, answer = client.send("/v1/chat/completions", chat)
                    assert (status, answer["error"]["type"]) == (503, "server_error")
                    status, answer = client.send("/v1/messages", message)
                    assert (status, answer["error"]["type"]) == (503, "api_error")
                    assert client.send("/v1/messages/count_tokens", message) == (
                        200,
                        {"input_tokens": 3},
                    )
                until(lambda: budget.left == 150)
        finally:
            ends.set()
        until(lambda: budget.left == 250)
        status, answer = client.send("/v1/chat/completions", chat)
        assert (status, answer["error"]["message"]) == (400, "the model computes no images")
        until(lambda: budget.left == 250)


def test_a_request_with_images_is_rendered_before_it_is_queued(
    seeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply itself needs a model that computes images."""
    served: list[Any] = []

    def serve(self: Any, request: Any, stream: Any) -> None:
        served.append(self._tokenize(None, request[1], request[2]))
        request[0].put(ValueError("the model computes no images"))

    monkeypatch.setattr(BlockpoolGenerator, "_serve_single", serve)
    with blockpool_server(seeing) as client:
        status, answer = client.send(
            "/v1/chat/completions", {"messages": shown("https://images.example/x"), "max_tokens": 4}
        )
        assert (status, "Send the image as a data URL" in answer["error"]["message"]) == (400, True)
        body = {"messages": shown(data_url(20, 30)), "max_tokens": 4}
        status, answer = client.send("/v1/chat/completions", body)
        assert (status, answer["error"]["message"]) == (400, "the model computes no images")
        broken = shown(data_url(20, 30)[:-40])
        status, answer = client.send("/v1/chat/completions", {"messages": broken, "max_tokens": 4})
        assert (status, answer["error"]["message"][:13]) == (400, "messages[0]: ")
        monkeypatch.setattr(client.generator.registry.template, "ranks", SimpleNamespace(size=2))
        status, answer = client.send("/v1/chat/completions", body)
        refused = (
            "messages[0]: a server of several ranks computes no images; start one without "
            "mlx.launch for them"
        )
        assert (status, answer["error"]["message"]) == (400, refused)
    ((tokens, *_, vision),) = served
    assert vision.pixel_values[0].shape[0] == 3
    assert len(vision.cache_key) == len(tokens)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_text_model_takes_no_images(tmp_path: Any, path: str) -> None:
    url = "http://127.0.0.1/3"
    parts: dict[str, Any] = {
        "/v1/chat/completions": {"messages": shown(url)},
        "/v1/messages": {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "url", "url": url}}],
                }
            ]
        },
        "/v1/responses": {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
        },
    }
    model = save_model(tmp_path / "model", "llama")
    with blockpool_server(model) as client:
        # Before the model is loaded, and after.
        for _ in range(2):
            status, answer = client.send(path, {"max_tokens": 16, **parts[path]})
            assert (status, "takes no images" in str(answer)) == (400, True), answer
            client.generator.wait_until_loaded() if not client.generator.registry.loaded else None
