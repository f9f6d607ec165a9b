"""GET /v1/cache/hour: how much of the prompts was cached, and how long the first token took, minute
by minute for an hour.

A named key sees its own requests. Any thread may record and read.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ...config import HistoryConfig
from ..access import belongs, own_name
from ..bodies import Json
from ..routes import Route

PATH = "/v1/cache/hour"
MINUTES = 60
# Times to the first token of which a minute computes its median: those of the last requests.
MOST_TIMES = 256


@dataclass
class Minute:
    """The requests of a minute or of an agent that have got their first token.

    `cached_tokens` of their `prompt_tokens` were not computed. `times`: seconds to the first token.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))

    def add(self, prompt_tokens: int, cached_tokens: int, ttft: float) -> None:
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.times.append(ttft)

    def as_dict(self) -> Json:
        figures = vars(self).copy()
        times = sorted(figures.pop("times"))
        ttft = {"median": round(median(times), 4), "p95": round(times[int(0.95 * len(times))], 4)}
        return {**figures, "ttft": ttft}


class LastHour:
    """The requests of one server by the minute in which they got their first token, and by agent
    since its start.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._changing = threading.Lock()
        # By minute since 1970, and there by the name of the key.
        self._minutes: OrderedDict[int, dict[str | None, Minute]] = OrderedDict()
        self._agents: OrderedDict[str, Minute] = OrderedDict()

    def record(
        self,
        owner: str | None,
        agent: str | None,
        prompt_tokens: int,
        cached_tokens: int,
        ttft: float,
    ) -> None:
        """Count a request.

        `agent`: the name that it is noted under; `ttft`: seconds from its arrival to its first
        token.
        """
        number = int(self._clock() // 60)
        with self._changing:
            self._minutes.setdefault(number, {}).setdefault(owner, Minute()).add(
                prompt_tokens, cached_tokens, ttft
            )
            if len(self._minutes) > MINUTES:
                self._minutes.popitem(last=False)
            if agent is not None:
                self._agents.setdefault(agent, Minute()).add(prompt_tokens, cached_tokens, ttft)
                self._agents.move_to_end(agent)
                if len(self._agents) > HistoryConfig.agents:
                    self._agents.popitem(last=False)

    def answer(self, owner: str | None) -> Json:
        """The minutes of the last hour that had requests, and the tokens of each agent, as the
        owner of a key sees them.
        """
        first = int(self._clock() // 60) - MINUTES + 1
        with self._changing:
            minutes = [
                {"time": 60 * number, **by[owner].as_dict()}
                for number, by in self._minutes.items()
                if number >= first and owner in by
            ]
            own = {
                name: found.as_dict()
                for name, found in self._agents.items()
                if belongs(name, owner)
            }
        return {
            "minutes": minutes,
            "agents": {
                name if owner is None else own_name(name): found for name, found in own.items()
            },
        }


def answer_hour(handler: Any) -> None:
    """Answer GET /v1/cache/hour."""
    handler.send_json(200, handler.scope.generator.hour.answer(handler.scope.owner))


ROUTES = (Route(PATH, answer_hour),)
