"""How long a prompt may be and how long a reply gets: by the request, the options, the model's
positions and the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from models import character_tokenizer, save_model

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.server.options import CHANGED_OPTIONS
from mlx_blockpool.server.replies import fit
from server.serving import Client, blockpool_server, parse

PROMPT = "x" * 40
LAST = character_tokenizer().token_to_id("<|im_end|>")


@dataclass(frozen=True)
class Asked:
    max_tokens: int


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 positions, and a model that has never learned to stop."""
    return save_model(tmp_path_factory.mktemp("small"), "llama", max_position_embeddings=300)


def complete(client: Client, prompt: str = PROMPT, **options: Any) -> dict[str, Any]:
    # Without a last token of its own the reply ends where something else ends it.
    body = {"prompt": prompt, "logit_bias": {str(LAST): -1e9}, **options}
    status, answer = client.send("/v1/completions", body)
    assert status == 200, answer
    return answer  # type: ignore[no-any-return]


def test_a_reply_without_a_limit_ends_where_the_model_has_no_more_positions(small: Path) -> None:
    with blockpool_server(small, "--pool-bytes", "30MB", "--max-tokens", "auto") as ours:
        answers = [complete(ours, **named) for named in ({}, {"max_tokens": None})]
        bounded = complete(ours, max_completion_tokens=None, max_tokens=5)
        ours.settle()
    assert bounded["usage"]["completion_tokens"] == 5
    for answer in answers:
        assert answer["usage"]["total_tokens"] == 300
        assert answer["choices"][0]["finish_reason"] == "length"


def test_auto_is_the_default() -> None:
    assert CHANGED_OPTIONS["--max-tokens"]["default"] == parse(["--max-tokens", "auto"]).max_tokens


def test_a_reply_without_a_limit_ends_where_the_pool_is_full(tmp_path: Path) -> None:
    """A model whose config.json names no limit."""
    with blockpool_server(
        save_model(tmp_path / "m", "llama"), "--pool-bytes", "500KB", "--max-tokens", "auto"
    ) as ours:
        answer = complete(ours)
        capacity = ours.capacity()
        ours.settle()
    assert answer["usage"]["total_tokens"] == capacity > 512 + len(PROMPT)


def test_max_tokens_bounds_a_reply_whose_request_names_no_limit(small: Path) -> None:
    with blockpool_server(small, "--pool-bytes", "30MB", "--max-tokens", "30") as ours:
        assert complete(ours)["usage"]["completion_tokens"] == 30
        assert complete(ours, max_tokens=50)["usage"]["completion_tokens"] == 50, (
            "the request's own word counts"
        )


def test_where_nothing_has_a_limit_a_reply_has_one() -> None:
    args = parse(["--max-tokens", "auto"])
    assert fit(Asked(args.max_tokens), [1], None).max_tokens == EngineConfig.endless_tokens
    assert fit(Asked(10**9), [1], None).max_tokens == 10**9, "a request's own limit is its own"


def test_a_reply_by_itself_reserves_room_for_so_much(tmp_path: Path) -> None:
    model, draft = (
        save_model(tmp_path / name, "llama", seed=i) for i, name in enumerate(("model", "draft"))
    )
    with blockpool_server(
        model, "--draft-model", str(draft), "--pool-bytes", "30MB", "--max-tokens", "auto"
    ) as ours:
        ours.generator._config = replace(ours.generator._config, alone_tokens=90)
        assert complete(ours)["usage"]["completion_tokens"] == 90


# -- the prompt ------------------------------------------------------------------------------------


def test_a_prompt_beyond_the_positions_is_refused_in_each_protocol(small: Path) -> None:
    said = [{"role": "user", "content": "y" * 400}]
    with blockpool_server(small, "--pool-bytes", "30MB") as ours:
        status, answer = ours.send("/v1/chat/completions", {"messages": said})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "its model has 300" in answer["error"]["message"]
        status, answer = ours.send("/v1/responses", {"input": "y" * 400})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        status, answer = ours.send("/v1/messages", {"messages": said, "max_tokens": 4})
        assert status == 400
        assert answer["error"]["message"].startswith("prompt is too long: ")
        assert " tokens > 300 maximum" in answer["error"]["message"]
        assert (
            ours.send("/v1/completions", {"prompt": "y" * 299, "max_tokens": 9})[1]["usage"][
                "completion_tokens"
            ]
            == 1
        )
        assert ours.send("/v1/completions", {"prompt": "y" * 300})[0] == 400


@pytest.mark.parametrize(("given", "expected"), [("450", 450), ("off", None)])
def test_max_positions_counts_in_place_of_the_config(
    small: Path, given: str, expected: int | None
) -> None:
    with blockpool_server(small, "--pool-bytes", "30MB", "--max-positions", given) as ours:
        assert ours.send("/v1/completions", {"prompt": "y" * 400, "max_tokens": 2})[0] == 200
        assert ours.send("/v1/completions", {"prompt": "y" * 475, "max_tokens": 2})[0] == (
            400 if expected else 200
        )


def test_a_config_without_positions_refuses_nothing(tmp_path: Path) -> None:
    with blockpool_server(
        save_model(tmp_path / "m", "llama", num_hidden_layers=1), "--pool-bytes", "30MB"
    ) as ours:
        assert ours.send("/v1/completions", {"prompt": "y" * 5000, "max_tokens": 2})[0] == 200
