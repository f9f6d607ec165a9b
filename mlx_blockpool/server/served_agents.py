"""The agents of a loaded model: each is a name for the path of its last turn, noted in memory and,
with a store, on disk.

A writer's thread reads and writes the files; the generation thread, which owns the rest, never
waits for a disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from ..config import StoreConfig
from ..errors import BlockpoolError, LoadError
from ..prefix.trie import PrefixRef
from ..ranks.facts import PinPath, Spare, UnpinPath
from ..store.agents import Agent, Agents, turn_of
from ..store.paths import FOLDERS
from ..store.prompt_store import PromptStore
from ..store.record import Key
from ..tier.path_facts import PathFacts, Then, name_of
from .conversation_id import is_conversation_id

log = logging.getLogger(__name__)
T = TypeVar("T")

# Other processes change agents too: their files are read this often.
LOOK_SECONDS = 1.0
# Turns that are noted in one transaction, for which other processes wait.
NOTED_AT_ONCE = 64


class ServedAgents:
    """Agents of the model `model_id`, in memory and, with a `store`, in its folder.

    noted:     each with its last turn, by name, the least recently used first; the pins of the
               files are in `pinned`.
    pinned:    names, and whether the path of each is pinned in memory.
    """

    def __init__(self, model_id: str, store: PromptStore | None) -> None:
        self.model_id = model_id
        self.noted: OrderedDict[str, Agent] = OrderedDict()
        self.pinned: dict[str, bool] = {}
        self.files = None if store is None else Agents(store.root)
        self._store = store
        self._config = StoreConfig() if store is None else store.config
        self._path_facts: PathFacts | None = None
        # The pinned paths, by the names of their agents.
        self._pinned_paths: dict[str, PrefixRef] = {}
        self._spared: set[bytes] | None = None
        self._pending: dict[str, Agent] = {}
        self._changing = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "agents")
        self._seen: list[Agent] = []
        self._applied: list[Agent] | None = None
        self._is_looking = False
        self._looked = 0.0
        self._look()
        self._spare_pinned()

    @property
    def namespace(self) -> str | None:
        """The namespace of the model's records on disk; None without a store."""
        return None if self._store is None else self._store.namespace

    # -- the generation thread ---------------------------------------------------------------------

    def attend(self, path_facts: PathFacts) -> None:
        """Set what changes the paths of the loaded model."""
        self._path_facts = path_facts
        self._spared = None
        self.follow({})

    def follow(self, turns: Mapping[str, PrefixRef]) -> None:
        """Note the ended turns of agents, move their pins, and apply pins that other processes
        have set in the files.
        """
        for name, path in turns.items():
            self.note(name, path)
        if self._applied is not self._seen:
            self._applied = self._seen
            self._take_over(self._applied)
        self._spare_pinned()
        if (
            self.files is not None
            and not self._is_looking
            and time.monotonic() - self._looked > LOOK_SECONDS
        ):
            self._is_looking = True
            self._writer.submit(self._look)

    def note(self, name: str, path: PrefixRef) -> None:
        """Note an agent's turn.

        Of several turns that wait for the disk only the last is written.
        """
        turn, before = self._turn(name, path), self.noted.pop(name, None)
        self.noted[name] = turn if before is None else replace(turn, created=before.created)
        self._bound_memory()
        if name in self.pinned:
            self.pin(name, path)
        if self.files is None:
            return
        with self._changing:
            is_first = not self._pending
            self._pending[name] = turn
        if is_first:
            self._writer.submit(self._write_pending)

    def known(self) -> list[Agent]:
        """Every agent with its last turn, from memory or else from its file as last read."""
        return list(({agent.name: agent for agent in self._seen} | self.noted).values())

    def path_of(self, name: str) -> PrefixRef | None:
        """The path of an agent's last turn, from memory or else from its file as last read.

        None for an unknown agent.
        """
        noted = self.noted.get(name) or next(
            (agent for agent in self._seen if agent.name == name), None
        )
        return None if noted is None else path_of(noted)

    def pin(self, name: str, path: PrefixRef, then: Then = lambda is_held: None) -> None:
        """Pin an agent's path and those of its later turns.

        `then` is called with whether its blocks are pinned in memory.
        """
        assert self._path_facts is not None
        self.pinned.setdefault(name, False)
        self._pinned_paths[name] = path

        def noted(is_held: bool | None) -> None:
            if self._pinned_paths.get(name) is path:
                self.pinned[name] = bool(is_held)
            if is_held is False:
                log.warning(
                    "agents: no more blocks or states of the pool can be pinned; one agent's path "
                    "may leave memory"
                )
            then(is_held)

        self._path_facts.propose(PinPath(name, name_of(path)), noted)

    def unpin(self, name: str) -> None:
        if self.pinned.pop(name, None) is not None and self._path_facts is not None:
            del self._pinned_paths[name]
            self._path_facts.propose(UnpinPath(name))

    def pinned_hashes(self) -> set[bytes]:
        """The hashes of all pinned paths, from the files as last read and from the last turns."""
        hashes = {digest for agent in self._seen if agent.pinned for digest in agent.hashes}
        return hashes | {
            digest
            for name in self.pinned
            if name in self.noted
            for digest in self.noted[name].hashes
        }

    def fork(self, new: str, path: PrefixRef) -> None:
        """A second agent that continues from the end of a path."""
        self.noted[new] = self._turn(new, path)

    def forget(self, name: str) -> None:
        """Forget an agent in memory. Its file and records stay."""
        self.unpin(name)
        self.noted.pop(name, None)
        with self._changing:
            self._pending.pop(name, None)

    def _turn(self, name: str, path: PrefixRef) -> Agent:
        return turn_of(
            name, self.namespace or "", self.model_id, path.hashes, path.tokens, path.salt
        )

    def _take_over(self, seen: list[Agent]) -> None:
        """Apply the pins that the files have."""
        if self.files is None or self._path_facts is None:
            return
        pinned = {agent.name: agent for agent in seen if agent.pinned}
        for name in self.pinned.keys() - pinned.keys():
            self.unpin(name)
        for name in pinned.keys() - self.pinned.keys():
            self.pin(name, path_of(self.noted.get(name, pinned[name])))

    def _spare_pinned(self) -> None:
        """Exclude the records of pinned agents from the store's budget."""
        if self._store is None:
            return
        pinned = self.pinned_hashes()
        if self._path_facts is None:
            self._store.pinned = {Key(kind, digest) for digest in pinned for kind in FOLDERS}
        elif pinned != self._spared:
            before, self._spared = self._spared or set(), pinned
            self._path_facts.propose(Spare(tuple(pinned - before), tuple(before - pinned)))

    def _bound_memory(self) -> None:
        limits = ((True, self._config.conversations), (False, self._config.agents))
        if len(self.noted) <= min(most for _, most in limits):
            return
        for is_derived, most in limits:
            names = [
                n
                for n in self.noted
                if is_conversation_id(n) == is_derived and n not in self.pinned
            ]
            for name in names[: max(0, len(names) - most)]:
                del self.noted[name]

    # -- any thread --------------------------------------------------------------------------------

    def run(self, act: Callable[[Agents], T]) -> T:
        """Run `act` on the writer's thread, after all earlier notes, and return its result. Raises
        what it raises.

        Raises LoadError once the model has been unloaded.
        """
        files = self.files
        assert files is not None

        def done() -> T:
            try:
                return act(files)
            finally:
                bound_notes(files, self._config, self.noted)
                self._look()

        try:
            future = self._writer.submit(done)
        except RuntimeError as error:
            raise LoadError(f"{self.model_id} was unloaded in the meantime. Try again.") from error
        return future.result()

    def settle(self) -> None:
        """Return once everything that was noted is written, or has failed."""
        with suppress(RuntimeError):
            # Closed: all is written.
            self._writer.submit(lambda: None).result()

    def close(self, seconds: float) -> None:
        """settle() within `seconds`, and end the thread. Notes that take longer are lost."""
        written = self._writer.submit(lambda: None if self.files is None else self.files.close())
        try:
            written.result(seconds)
        except TimeoutError:
            log.warning("agents: the last turns could not be noted within %g seconds", seconds)
        self._writer.shutdown(wait=False)

    # -- the writer's thread -----------------------------------------------------------------------

    def _write_pending(self) -> None:
        """Note every turn that has ended since the last time, in one batch."""
        assert self.files is not None
        with self._changing:
            pending, self._pending = self._pending, {}
        turns, has_new = list(pending.values()), False
        for start in range(0, len(turns), NOTED_AT_ONCE):
            batch = turns[start : start + NOTED_AT_ONCE]
            try:
                agents = self.files.note_all(batch)
            except OSError as error:
                self._report("turns of agents", error)
                continue
            has_new = has_new or any(agent.created == agent.used for agent in agents)
            self._report("turns of agents", None)
        if has_new:
            bound_notes(self.files, self._config, self.noted)

    def _look(self) -> None:
        """Read the agents' files. If the folder cannot be read, the previous result stays."""
        if self.files is not None:
            try:
                seen = [agent for agent in self.files.all() if agent.namespace == self.namespace]
                # The same list as long as nothing changes, so that follow() has nothing to apply.
                self._seen = self._seen if seen == self._seen else seen
                self._report("agents", None)
            except OSError as error:
                self._report("agents", error)
        self._looked, self._is_looking = time.monotonic(), False

    def _report(self, use: str, failed: Exception | None) -> None:
        """Report to the store whether the agents' files could be read or written just now."""
        assert self._store is not None
        if failed is None:
            self._store.problems.report_success(use)
        else:
            self._store.problems.report_failure(use, failed)


def bound_notes(files: Agents, config: StoreConfig, noted: dict[str, Agent]) -> None:
    """Remove the least recently used agents' files beyond the limits.

    `noted` has later times of use than the files.
    """
    try:
        # The generation thread may change it meanwhile.
        used = {name: found.used for name, found in noted.copy().items()}
        files.bound(config.agents, lambda name: not is_conversation_id(name), used)
        files.bound(config.conversations, is_conversation_id, used)
    except (OSError, BlockpoolError) as error:
        log.warning("agents: %s", error)


def path_of(agent: Agent) -> PrefixRef:
    """The path of an agent's last turn, by its hashes alone."""
    return PrefixRef(agent.hashes, agent.tokens, agent.salt)
