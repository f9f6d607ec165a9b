"""OpenAI's `prediction`: the reply is the same, what is right of it comes faster, and the usage
says how much was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from mlx_blockpool.config import RequestConfig
from server.serving import Client, blockpool_server, text_of

pytestmark = pytest.mark.server("--pool-bytes 20MB --drafts 5", model="endless")

MESSAGES = [{"role": "user", "content": "Write it again."}]


@pytest.fixture(scope="module")
def reply(model: Path) -> str:
    """What the model replies without drafts."""
    with blockpool_server(model, "--pool-bytes", "20MB") as client:
        return text_of(ask(client))


def ask(client: Client, content: Any = None, salt: str = "plain", **options: Any) -> dict[str, Any]:
    """A reply of 40 tokens. Under each salt only the prediction is known."""
    prediction = {} if content is None else {"prediction": {"type": "content", "content": content}}
    return client.chat(MESSAGES, max_tokens=40, cache_salt=salt, **prediction, **options)


def counts(answer: dict[str, Any]) -> tuple[int, int]:
    details = answer["usage"]["completion_tokens_details"]
    assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def test_a_right_prediction_is_accepted(server: Client, reply: str) -> None:
    answer = ask(server, reply, "right")
    assert text_of(answer) == reply
    accepted, rejected = counts(answer)
    assert accepted >= 24
    assert rejected == 0
    assert answer["usage"]["completion_tokens"] == 40
    assert server.send("/v1/cache")[1]["drafts"]["sources"]["prediction"]["accepted"] >= accepted


def test_text_may_come_in_parts_and_what_differs_is_rejected(server: Client, reply: str) -> None:
    parts = [{"type": "text", "text": reply[:15]}, {"type": "text", "text": "#" + reply[16:]}]
    answer = ask(server, parts, "parts")
    assert text_of(answer) == reply
    accepted, rejected = counts(answer)
    assert accepted > 12
    assert rejected > 0


def test_a_wrong_prediction_changes_nothing(server: Client, reply: str) -> None:
    answer = ask(server, "#" * 60, "wrong")
    assert text_of(answer) == reply
    assert counts(answer)[0] == 0


def test_choices_count_together_and_a_stream_has_the_counts_at_its_end(
    server: Client, reply: str
) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="default_model",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=40,
        n=2,
        prediction={"type": "content", "content": reply},
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": "choices"},
    )
    usage = [chunk.usage for chunk in stream if chunk.usage is not None][-1]
    assert usage.completion_tokens_details is not None
    assert (usage.completion_tokens_details.accepted_prediction_tokens or 0) >= 48
    assert usage.completion_tokens_details.rejected_prediction_tokens == 0


def test_without_drafts_nothing_is_accepted_and_without_a_prediction_nothing_is_counted(
    model: Path, reply: str
) -> None:
    with blockpool_server(model, "--pool-bytes", "20MB") as client:
        answer = ask(client, reply)
        assert text_of(answer) == reply
        assert counts(answer) == (0, 0)
        assert "completion_tokens_details" not in ask(client)["usage"]


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ({"type": "content"}, "prediction.content: Field required"),
        ({"type": "text", "content": "x"}, "prediction.type: Input should be 'content'"),
        (
            {"type": "content", "content": [{"type": "image", "text": "x"}]},
            "prediction.content[0].type: Input should be 'text'",
        ),
        ({"type": "content", "content": 3}, "prediction.content: Input should be a valid list"),
        ("text", "prediction: Input should be a valid dictionary"),
        (
            {"type": "content", "content": "x" * (RequestConfig.prediction_characters + 1)},
            "prediction.content: a prediction may have 262,144 characters; this one has 262,145",
        ),
    ],
)
def test_what_is_no_prediction_is_refused(server: Client, prediction: Any, message: str) -> None:
    status, answer = server.send(
        "/v1/chat/completions", {"messages": MESSAGES, "prediction": prediction}
    )
    assert status == 400
    assert answer["error"]["message"].startswith(message)
