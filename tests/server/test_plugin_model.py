"""The package in tests/plugin_model brings a model that mlx-lm does not have: the server says what
is missing without it, and serves the model with it.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from forks import server_forks
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_tokenizer
from models import character_tokenizer, write_model

from mlx_blockpool.mlx_lm_compat import installed
from mlx_blockpool.plugins import empty_plugin_manager
from mlx_blockpool.testing import tiny_model
from server.processes import SERVE, needs_proc, process, send, turn, written

PACKAGE = Path(__file__).parents[1] / "plugin_model"
CONFIG = {
    "model_type": "slopes",
    "vocab_size": character_tokenizer().get_vocab_size(),
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "torch_dtype": "float32",
}
AGENTS = range(4)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package, which only those that add it to their path have."""
    folder, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source") / "slopes"
    # pip builds in the folder of the source.
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__"))
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(folder)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *offline, str(source)],
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def model(site: Path) -> Any:
    sys.path.insert(0, str(site))
    try:
        manager = empty_plugin_manager()
        manager.register(importlib.import_module("blockpool_slopes"))
        return tiny_model(CONFIG, manager)
    finally:
        sys.path.remove(str(site))


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "slopes", model, CONFIG)


def stock_reply(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """16 greedy tokens on the model's caches, as mlx-lm generates them."""
    prompt = mx.array(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    found = []
    for (token, _), _ in zip(generate_step(prompt, model), range(16), strict=False):
        if token in tokenizer.eos_token_ids:
            break
        found.append(token)
    return str(tokenizer.decode(found))


def test_without_the_package_the_server_says_what_is_missing(folder: Path) -> None:
    ran = server_forks().run(SERVE, "--model", str(folder), "--port", "0", "--no-store")
    assert ran.returncode != 0
    needed = f"neither mlx-lm {installed()} nor an installed plugin has model_type 'slopes'"
    assert needed in ran.stderr + ran.stdout


@needs_proc
def test_with_the_package_the_model_is_served_ragged_and_resumes_after_a_restart(
    folder: Path, site: Path, model: Any, tmp_path: Path
) -> None:
    has_package = f"import site; site.addsitedir({str(site)!r})"
    tokenizer = load_tokenizer(folder)
    chats: list[list[dict[str, str]]] = [
        [{"role": "system", "content": "Rules of the house. " * 20}] for _ in AGENTS
    ]

    def turns(port: int) -> list[dict[str, Any]]:
        with ThreadPoolExecutor() as pool:
            used = list(
                pool.map(lambda i: turn(port, chats[i], i, temperature=0), AGENTS)  # type: ignore[arg-type]
            )
        for chat in chats:
            assert chat[-1]["content"] == stock_reply(model, tokenizer, chat[:-1])
        return used

    with process(folder, tmp_path / "store", before=has_package) as (port, _):
        turns(port)
        assert send(port, "/v1/cache")["ragged"] is True
        written(port)
    with process(folder, tmp_path / "store", before=has_package) as (port, _):
        for used in turns(port):
            assert used["prompt_tokens_details"]["cached_tokens"] >= 256
