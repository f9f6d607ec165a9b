"""GET /v1/cache/hour: how much of the prompts was cached, and how long the first token took, minute by minute for an hour.

A named key sees its own requests. Any thread may record and read.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..access import belongs, own_name

PATH = "/v1/cache/hour"
MINUTES = 60
# Times to the first token that a minute keeps for its median; of more requests every other one, and so on.
MOST_TIMES = 256
# Agents whose tokens are counted since the start; the one used longest ago is dropped.
MOST_AGENTS = 2000


@dataclass
class Tokens:
    """Requests that have got their first token. `cached_tokens` of their `prompt_tokens` were not computed."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens


@dataclass
class Minute(Tokens):
    """`times`: seconds to the first token of a sample of the requests, one in `step`."""

    times: list[float] = field(default_factory=list)
    step: int = 1
    _seen: int = 0

    def add_time(self, seconds: float) -> None:
        if self._seen % self.step == 0:
            self.times.append(seconds)
        self._seen += 1
        if len(self.times) > MOST_TIMES:
            self.times, self.step = self.times[::2], 2 * self.step

    def as_dict(self, number: int) -> dict[str, Any]:
        times = sorted(self.times)
        ttft = {"median": round(median(times), 4), "p95": round(times[int(0.95 * len(times))], 4)}
        figures = {"requests": self.requests, "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens}
        return {"time": 60 * number, **figures, "ttft": ttft}


class Hour:
    """The requests of one server by the minute in which they got their first token, and by agent since its start."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._changing = threading.Lock()
        # By minute since 1970, and there by the name of the key.
        self._minutes: OrderedDict[int, dict[str | None, Minute]] = OrderedDict()
        self._agents: OrderedDict[str, Tokens] = OrderedDict()

    def record(self, owner: str | None, agent: str | None, prompt_tokens: int, cached_tokens: int, ttft: float) -> None:
        """Count a request. `agent`: the name that it is noted under; `ttft`: seconds from its arrival to its first token."""
        number = int(self._clock() // 60)
        with self._changing:
            minute = self._minutes.setdefault(number, {}).setdefault(owner, Minute())
            minute.add(prompt_tokens, cached_tokens)
            minute.add_time(ttft)
            while len(self._minutes) > MINUTES:
                self._minutes.popitem(last=False)
            if agent is not None:
                self._agents.setdefault(agent, Tokens()).add(prompt_tokens, cached_tokens)
                self._agents.move_to_end(agent)
                while len(self._agents) > MOST_AGENTS:
                    self._agents.popitem(last=False)

    def answer(self, owner: str | None) -> dict[str, Any]:
        """The minutes of the last hour that had requests, and the tokens of each agent, as the owner of a key sees them."""
        first = int(self._clock() // 60) - MINUTES + 1
        with self._changing:
            minutes = [(number, by[owner]) for number, by in self._minutes.items() if number >= first and owner in by]
            listed = [minute.as_dict(number) for number, minute in minutes]
            own = {name: vars(tokens).copy() for name, tokens in self._agents.items() if belongs(name, owner)}
        return {"minutes": listed, "agents": {name if owner is None else own_name(name): found for name, found in own.items()}}
