"""The agents of the loaded model: each is a name for the path of its last turn, noted on disk where there is a store.

Files are written by a thread of their own: the generation thread never waits for a disk.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ..errors import BlockpoolError
from ..store.agents import Agents

log = logging.getLogger(__name__)


class ServedAgents:
    """Notes turns of agents in the store's folder `root` under the namespace of one model.

    `failures` counts turns that could not be noted; the replies themselves are not touched by that.
    """

    def __init__(self, root: Path, namespace: str, model_id: str) -> None:
        self.files = Agents(root)
        self.namespace = namespace
        self.model_id = model_id
        self.failures = 0
        self._pending: dict[str, tuple[list[bytes], int]] = {}
        self._changing = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "agents")

    def note(self, name: str, hashes: list[bytes], tokens: int) -> None:
        """An agent has ended a turn: the hashes of its path, and its tokens. Of several turns the last one is written."""
        with self._changing:
            first = name not in self._pending
            self._pending[name] = hashes, tokens
        if first:
            self._writer.submit(self._write, name)

    def pinned(self) -> set[bytes]:
        """The hashes of all paths that are pinned; cheap to ask again."""
        try:
            return self.files.pinned_hashes(self.namespace)
        except OSError as error:
            log.warning("agents: %s", error)
            return set()

    def settle(self) -> None:
        """Return once everything that was noted is written, or has failed."""
        done: Future[None] = self._writer.submit(lambda: None)
        done.result()

    def close(self) -> None:
        """settle(), and end the thread."""
        self._writer.shutdown()

    def _write(self, name: str) -> None:
        with self._changing:
            hashes, tokens = self._pending.pop(name)
        try:
            self.files.note(name, self.namespace, self.model_id, hashes, tokens)
        except (OSError, BlockpoolError) as error:
            self.failures += 1
            log.warning("agents: the turn of one could not be noted: %s", error)
