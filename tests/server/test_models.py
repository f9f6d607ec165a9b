"""Models and options that go another way through the server: attention of another kind, states,
drafts.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import make_model, save_model
from thorough import only

from mlx_blockpool.kv.build import describe
from mlx_blockpool.server.model_caches import leave_out_draft
from mlx_blockpool.server.provider import BlockpoolModelProvider
from server.serving import Client, at_once, blockpool_server, cached_tokens, stock_server, text_of

MESSAGES = [
    [
        {"role": "system", "content": "Common to both. " * 25},
        {"role": "user", "content": f"Question {i} " * (3 + 4 * i)},
    ]
    for i in range(3)
]


def replies(client: Client, **options: Any) -> list[str]:
    answers = at_once([lambda m=m: client.chat(m, max_tokens=12, **options) for m in MESSAGES])
    return [text_of(a) for a in answers]


@pytest.mark.parametrize("name", only(["gemma2", "lfm2"], "lfm2"))
def test_models_with_attention_or_states_of_their_own_answer_as_stock(
    name: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path / name, name)
    with stock_server(model) as stock:
        # One at a time: stock's thread dies of a batch of gemma2.
        expected = [text_of(stock.chat(m, max_tokens=12)) for m in MESSAGES]
    with blockpool_server(model, "--pool-bytes", "40MB") as ours:
        assert replies(ours) == expected
        assert replies(ours) == expected, "from what the first round left behind"
        ours.settle()
        report = ours.send("/v1/cache")[1]
    assert (report["backend"], report["ragged"]) == ("blockpool", True)


def test_state_models_survive_the_prompt_that_kills_stock(tmp_path: Path) -> None:
    model = save_model(tmp_path / "lfm2", "lfm2")
    with blockpool_server(model) as ours:
        status, first = ours.send("/v1/completions", {"prompt": "deadly", "max_tokens": 1})
        assert status == 200
        status, _ = ours.send(
            "/v1/completions", {"prompt": "deadly" + first["choices"][0]["text"], "max_tokens": 1}
        )
        assert status == 200
        assert ours.send("/health")[0] == 200


def test_a_draft_changes_no_reply_whatever_was_cached_before(tmp_path: Path) -> None:
    """In stock it does: what it stores behind a draft is ahead of the tokens that it stores it
    under.
    """
    model = save_model(tmp_path / "llama", "llama", head_dim=32)
    draft = save_model(tmp_path / "draft", "llama", seed=1, num_hidden_layers=1)
    with stock_server(model) as stock:
        expected = replies(stock)
    with blockpool_server(model, "--draft-model", str(draft)) as ours:
        for _ in range(3):
            assert replies(ours) == expected


@pytest.mark.parametrize(
    ("name", "draft", "stays"),
    [
        ("llama", "llama", True),
        ("llama", "gemma3_text", False),
        ("llama", "lfm2", False),
        ("lfm2", "llama", False),
    ],
)
def test_a_draft_is_left_out_where_its_wrong_tokens_cannot_be_taken_back(
    name: str, draft: str, stays: bool
) -> None:
    provider: Any = SimpleNamespace(
        draft_model=make_model(draft), name=name, model_key=(name, None, draft)
    )
    leave_out_draft(provider, describe(make_model(name)))
    assert (provider.draft_model is not None) == stays


def test_another_model_takes_the_pool_over_and_gives_it_back(tmp_path: Path) -> None:
    one, two = (
        save_model(tmp_path / "one", "llama"),
        save_model(tmp_path / "two", "gemma3_text", seed=2, num_hidden_layers=2),
    )
    with blockpool_server(one, "--allow-models", str(two), "--pool-bytes", "30MB") as ours:
        first = replies(ours)
        other = replies(ours, model=str(two))
        groups = {g["group"] for g in ours.send("/v1/cache")[1]["groups"]}
        assert any(g.startswith("window 300") for g in groups)
        assert replies(ours) == first
        assert other != first
        ours.settle()
    with blockpool_server(two, "--pool-bytes", "30MB") as alone:
        assert replies(alone) == other


def test_the_old_model_and_its_pool_are_gone_before_the_new_one_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = save_model(tmp_path / "one", "llama"), save_model(tmp_path / "two", "llama", seed=2)
    read, alive = BlockpoolModelProvider.read, []
    with blockpool_server(one, "--allow-models", str(two), "--pool-bytes", "30MB") as ours:
        ours.chat(MESSAGES[0], max_tokens=2)
        ours.settle()
        old = [
            weakref.ref(ours.generator.model_provider.model),
            weakref.ref(ours.generator.model.prefix.arena),
        ]

        def spying(*args: Any, **kwargs: Any) -> Any:
            alive.extend(ref() is not None for ref in old)
            return read(*args, **kwargs)

        monkeypatch.setattr(BlockpoolModelProvider, "read", spying)
        assert ours.chat(MESSAGES[0], max_tokens=2, model=str(two))["choices"]
    assert alive == [False, False]


def test_requests_for_two_models_at_once_are_all_answered(tmp_path: Path) -> None:
    one, two = save_model(tmp_path / "one", "llama"), save_model(tmp_path / "two", "qwen2", seed=2)
    with blockpool_server(one, "--allow-models", str(two), "--pool-bytes", "30MB") as ours:
        jobs = [
            lambda m=m: ours.chat(MESSAGES[0], max_tokens=6, model=str(m))
            for m in (one, two, one, two)
        ]
        answers = [text_of(a) for a in at_once(jobs)]
        ours.settle()
    assert answers[0] == answers[2]
    assert answers[1] == answers[3]
    assert answers[0] != answers[1]


def test_a_model_that_is_not_there_leaves_the_old_one_and_what_it_knows(tmp_path: Path) -> None:
    model = save_model(tmp_path / "llama", "llama")
    with blockpool_server(model, "--pool-bytes", "30MB") as ours:
        ours.chat(MESSAGES[0], max_tokens=2)
        status, answer = ours.send(
            "/v1/chat/completions", {"messages": MESSAGES[0], "model": "no/such-model"}
        )
        assert status == 404
        assert answer["error"]["message"]
        assert cached_tokens(ours.chat(MESSAGES[0], max_tokens=2)["usage"]) > 300
        status, listed = ours.send("/v1/models")
        assert status == 200
        assert [m["id"] for m in listed["data"]] == ["llama", "default_model"]
        ours.settle()


def test_stream_carries_usage_and_keepalives(tmp_path: Path) -> None:
    import json
    import urllib.request

    model = save_model(tmp_path / "llama", "llama")
    with blockpool_server(model, "--pool-bytes", "30MB") as ours:
        body = {
            "messages": MESSAGES[1],
            "max_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{ours.port}/v1/chat/completions", json.dumps(body).encode()
        )
        lines = urllib.request.urlopen(request).read().decode().split("\n\n")
        whole = ours.chat(MESSAGES[1], max_tokens=5)
        ours.settle()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(c["delta"].get("content", "") for e in events for c in e["choices"])
    assert text == text_of(whole)
    assert events[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert any(line.startswith(": keepalive") for line in lines)
    assert lines[-2] == "data: [DONE]"
