"""The protocols that the server speaks, each with and without a stream, for conversations of
plain text.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, str]]


class CutError(Exception):
    """A stream that ended before its end."""


@dataclass(frozen=True)
class Reply:
    """Its text, all tokens of its prompt, and those of them that were cached."""

    text: str
    prompt: int
    cached: int


@dataclass(frozen=True)
class Protocol:
    """`body`: from messages and the most tokens of a reply. `whole`: the reply of an answer's JSON.
    `delta`: the text that an event of a stream adds; `ends`: whether it is the last one, or it is
    None, where `[DONE]` is.
    """

    name: str
    path: str
    streams: bool
    body: Callable[[Messages, int], dict[str, Any]]
    whole: Callable[[Any], str]
    delta: Callable[[Any], str]
    ends: Callable[[Any], bool]

    def ask(
        self, port: int, messages: Messages, most: int, headers: dict[str, str], hang_up: int | None
    ) -> Reply | None:
        """One reply; None: the client has hung up after so many lines of its stream."""
        body = {"temperature": 0, **self.body(messages, most), "stream": self.streams}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request(
                "POST", self.path, json.dumps(body), {"Content-Type": "application/json", **headers}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"{self.path} answers {response.status}: {response.read(300)!r}")
            if hang_up is not None:
                for _ in range(hang_up):
                    response.readline()
                return None
            return self._streamed(response) if self.streams else self._answered(response)
        finally:
            connection.close()

    def _answered(self, response: http.client.HTTPResponse) -> Reply:
        answer = json.loads(response.read())
        return Reply(self.whole(answer), *tokens(answer["usage"]))

    def _streamed(self, response: http.client.HTTPResponse) -> Reply:
        text, usage, ended = [], None, False
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event.get("error") or event.get("type") == "error":
                    raise ValueError(f"{self.path}: {event}")
                text.append(self.delta(event))
                usage = event.get("usage") or event.get("response", {}).get("usage") or usage
                ended = ended or self.ends(event)
            ended = ended or line.startswith(b"data: [DONE]")
        if not ended or usage is None:
            raise CutError(f"{self.path}: the stream ended after {len(text)} events")
        return Reply("".join(text), *tokens(usage))


def tokens(usage: dict[str, Any]) -> tuple[int, int]:
    """All tokens of a prompt, and the cached ones, in any protocol's words."""
    if "cache_read_input_tokens" in usage:
        read = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + usage["cache_creation_input_tokens"] + read, read
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def rendered(messages: Messages) -> str:
    """The prompt of a conversation, as the template writes it."""
    said = "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages
    )
    return f"{said}<|im_start|>assistant\n"


def _chat(messages: Messages, most: int) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": most, "stream_options": {"include_usage": True}}


def _completion(messages: Messages, most: int) -> dict[str, Any]:
    return {
        "prompt": rendered(messages),
        "max_tokens": most,
        "stream_options": {"include_usage": True},
    }


def _anthropic(messages: Messages, most: int) -> dict[str, Any]:
    return {
        "model": "default_model",
        "system": messages[0]["content"],
        "messages": messages[1:],
        "max_tokens": most,
    }


def _responses(messages: Messages, most: int) -> dict[str, Any]:
    return {
        "instructions": messages[0]["content"],
        "input": messages[1:],
        "max_output_tokens": most,
    }


def _chosen(event: Any, of: Callable[[Any], str | None]) -> str:
    return "".join(of(choice) or "" for choice in event.get("choices", ()))


def _texts(blocks: list[Any]) -> str:
    return "".join(block.get("text") or "" for block in blocks)


def _both(name: str, path: str, body: Any, whole: Any, delta: Any, ends: Any) -> list[Protocol]:
    return [
        Protocol(name, path, False, body, whole, delta, ends),
        Protocol(f"{name}_stream", path, True, body, whole, delta, ends),
    ]


PROTOCOLS = [
    *_both(
        "chat", "/v1/chat/completions", _chat,
        lambda answer: _chosen(answer, lambda choice: choice["message"].get("content")),
        lambda event: _chosen(event, lambda choice: choice["delta"].get("content")),
        lambda event: False,
    ),
    *_both(
        "completions", "/v1/completions", _completion,
        lambda answer: _chosen(answer, lambda choice: choice["text"]),
        lambda event: _chosen(event, lambda choice: choice["text"]),
        lambda event: False,
    ),
    *_both(
        "anthropic", "/v1/messages", _anthropic,
        lambda answer: _texts(answer["content"]),
        lambda event: event.get("delta", {}).get("text") or "",
        lambda event: event["type"] == "message_stop",
    ),
    *_both(
        "responses", "/v1/responses", _responses,
        lambda answer: "".join(_texts(item.get("content") or []) for item in answer["output"]),
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        lambda event: event["type"] in ("response.completed", "response.incomplete"),
    ),
]  # fmt: skip
