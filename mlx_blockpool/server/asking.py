"""What one HTTP request tells the generator beside its prompt, and what it is told back."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from .normalise import Normalisers


@dataclass
class Wishes:
    """What a request asks for beside its reply.

    id:     names the request, in the answer's headers, in explanations and in the log.
    agent:  who asks; requests of one agent run in order.
    """

    id: str = field(default_factory=lambda: f"req_{uuid.uuid4().hex[:24]}")
    agent: str | None = None


class Asking:
    """A ResponseGenerator as one request sees it: tells it who asks, remembers why its generate() failed and what it said."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.wishes = Wishes()
        self.error: Exception | None = None
        self.normalisers: tuple[str, ...] = ()
        self._sampled: list[str] = []
        self._content: list[str] = []
        self._calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """The generator's own, for this agent and with the prompt normalised as it was asked for."""
        try:
            if self.normalisers and request.request_type == "chat":
                request = replace(request, messages=self.known_normalisers.apply(self.normalisers, request.messages))
            request.wishes = self.wishes
            context, responses = self._generator.generate(request, *args, **kwargs)
        except Exception as error:
            self.error = error
            raise
        return context, self._heard(responses)

    def told(self, content: str | None, tool_calls: list[Any] | None, is_last: bool) -> None:
        """The client was told a part of the reply, in the form of OpenAI's API."""
        self._content.append(content or "")
        self._calls += tool_calls or []
        if is_last:
            message = {"role": "assistant", "content": "".join(self._content), "tool_calls": self._calls}
            self.known_normalisers.replies.remember(message, "".join(self._sampled))

    @property
    def known_normalisers(self) -> Normalisers:
        """All that there are."""
        known: Normalisers = self._generator.normalisers
        return known

    def _heard(self, responses: Iterator[Any]) -> Iterator[Any]:
        for response in responses:
            self._sampled.append(response.text)
            yield response
