"""StepDriver: how the generation thread runs the steps of its models on one machine.

The driver of a group, ranked.leader, runs them on all machines. Knows models; no waiting requests.
For the generation thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..config import EngineConfig
from ..ranks.head import Condition
from .model import LoadedModel
from .provider import ModelKey
from .replies import Reply

# How long an idle thread waits for a request at a time.
IDLE_SECONDS = 0.1


class StepDriver:
    """Runs the steps of models.

    nap_seconds: how long the thread may wait for arrivals while there is no work.
    stop:        what stops the server in order, once it listens.
    condition:   the ranks of a group as of their last exchange.
    most_seconds: the thread hangs if nothing is computed for longer.
    """

    most_seconds = EngineConfig.end_seconds

    def __init__(self) -> None:
        self.nap_seconds = IDLE_SECONDS
        self.stop: Callable[[], None] | None = None
        self.condition = Condition()

    def begin(self) -> None:
        """Prepare for the first step. Raises GroupError if the ranks cannot serve together."""

    def step(self, served: LoadedModel) -> bool:
        """Run a step of a model, or several short ones. Returns whether it has made progress."""
        return served.step()

    def idle(self, models: Collection[LoadedModel], rests: bool = False) -> None:
        """Let idle models write records.

        `rests`: there is no work, and the next step may come later.
        """
        for served in models:
            if not served.live:
                served.idle()

    def drop(self, key: ModelKey, reply: Reply) -> None:
        """Note that a request which waits for its model to be loaded again is dropped."""

    def lose(self, error: BaseException) -> None:
        """After an error in the generation thread: end the process if other ranks cannot know
        how far this one is.
        """

    def end(self) -> None:
        """Clean up after the last step."""
