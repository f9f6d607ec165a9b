"""Fixtures of the server's tests: a model that says what a test wants, its server, and the SDKs'
clients for it.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import mlx.core as mx
import mlx_lm.server
import openai
import pytest
from models import save_ending, save_endless, save_model

from mlx_blockpool.server import replies
from server.scripted import TEMPLATE, Say, anthropic_client, openai_client, save_agent
from server.serving import Client, blockpool_server

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SPECIAL: dict[str, Callable[[Path], Path]] = {
    "agent": save_agent,
    "endless": save_endless,
    "ending": lambda folder: save_ending(folder, TEMPLATE),
}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """saved(name): the folder of a tiny model, made once: an architecture or one of SPECIAL.

    No test changes it.
    """
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def save(name: str) -> Path:
        return SPECIAL[name](folder / name) if name in SPECIAL else save_model(folder / name, name)

    return save


@pytest.fixture(scope="session")
def agent(saved: Callable[[str], Path]) -> Path:
    return saved("agent")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Path:
    return saved(mark(request).kwargs.get("model", "llama"))


@pytest.fixture(scope="module")
def keys(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the API keys that the module's mark names."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(mark(request).kwargs["keys"])
    return file


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """The server that the module's mark describes: pytest.mark.server(options, model=name,
    keys=text, is_stored=True).
    """
    options = " ".join(mark(request).args).split()
    if "keys" in mark(request).kwargs:
        options += ["--api-key-file", str(request.getfixturevalue("keys"))]
    if mark(request).kwargs.get("is_stored"):
        options += ["--store-dir", str(tmp_path_factory.mktemp("store"))]
    with blockpool_server(model, *options) as running:
        yield running


def mark(request: pytest.FixtureRequest) -> pytest.Mark:
    return request.node.get_closest_marker("server") or pytest.mark.server.mark


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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless browser, in which names below .example are those of this machine."""
    sync_api: Any = pytest.importorskip(
        "playwright.sync_api", reason="needs the extra `browser`: pip install -e '.[browser]'"
    )
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser is installed: needs one of {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--host-resolver-rules=MAP *.example 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


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

        def failing(*args: Any) -> str:
            if next(calls) == 3:
                raise error
            return text_of(*args)

        monkeypatch.setattr(replies, "text_of", failing)

    return fail
