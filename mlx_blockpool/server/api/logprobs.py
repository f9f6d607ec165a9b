"""Log probabilities of the tokens of a reply, in the shapes of OpenAI's protocols.

Knows the tokens of a tokenizer; no caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ...forms.token_bytes import bytes_of
from ..bodies import Json
from ..request import ParsedRequest

# In place of what JSON cannot say, such as minus infinity, as in OpenAI's API.
LOWEST = -9999.0


class Logprobs:
    """Entries for the tokens of one reply, in the order of its responses; drain() returns those
    that were not returned yet.
    """

    def __init__(self, tokenizer: Any, top: int) -> None:
        self._entries: list[Json] = []
        self._tokenizer = tokenizer
        self._top = max(top, 0)

    def add(self, response: Any) -> None:
        """`response`: mlx-lm's. It has the most likely tokens in no order."""
        top = sorted(response.top_tokens, key=lambda other: -other["logprob"])[: self._top]
        others = [self._entry(other["id"], other["logprob"]) for other in top]
        self._entries.append(
            {**self._entry(response.token, response.logprob), "top_logprobs": others}
        )

    def drain(self) -> list[Json]:
        drained, self._entries = self._entries, []
        return drained

    def skip(self) -> None:
        """Drop all entries but the last."""
        self._entries = self._entries[-1:]

    def _entry(self, token: int, logprob: float) -> Json:
        written = bytes_of(self._tokenizer, [token])[0]
        text = written.decode("utf-8", "replace")
        return {"id": token, "token": text, "logprob": max(logprob, LOWEST), "bytes": list(written)}


def in_lists(entries: Sequence[Json], start: int = 0) -> Json:
    """`entries` in the shape of OpenAI's completions.

    `start`: the characters of the reply's text before them.
    """
    tokens = [entry["token"] for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {one["token"]: one["logprob"] for one in (entry, *entry["top_logprobs"])}
            for entry in entries
        ],
        "text_offset": list(accumulate(map(len, tokens), initial=start))[:-1],
    }


def logprobs_of(parsed: ParsedRequest) -> Logprobs | None:
    """Returns None for a request without them."""
    arguments = parsed.arguments
    if not (arguments.logprobs or arguments.top_logprobs > 0):
        return None
    return Logprobs(parsed.request.tokenizer, arguments.top_logprobs)
