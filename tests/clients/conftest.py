"""A server of a random model that ends its replies, the SDKs' clients for it, and where other
clients are installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest
from models import save_ending
from server.scripted import TEMPLATE, anthropic_client, openai_client
from server.serving import Client, blockpool_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = save_ending(tmp_path_factory.mktemp("ending"), TEMPLATE)
    with blockpool_server(model, "--pool-bytes", "20MB", "--prefill-step-size", "128") as running:
        yield running
        running.settle()


@pytest.fixture(scope="module")
def gpt(server: Client) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: Client) -> anthropic.Anthropic:
    return anthropic_client(server)


@pytest.fixture(scope="session")
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not request.config.getoption("--clients"):
        pytest.skip("needs --clients, and package registries")
    chosen = os.environ.get("BLOCKPOOL_CLIENTS")
    return Path(chosen) if chosen else tmp_path_factory.mktemp("clients")
