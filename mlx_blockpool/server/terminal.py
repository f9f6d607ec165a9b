"""What the server shows to the person who has started it: its first words in the log, and bars for long work on a terminal.

The bars' thread looks at figures that any thread may read, and draws; nothing that works knows of it.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import ExitStack
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm  # type: ignore[import-untyped]
from tqdm.contrib.logging import logging_redirect_tqdm  # type: ignore[import-untyped]

from ..clients import settings
from ..errors import BlockpoolError
from ..formatting import count, human_bytes
from ..store.paths import default_folder
from .generator import BlockpoolGenerator
from .model import LoadedModel
from .models.swap import ModelSwap

# Addresses that stand for all of this machine's.
ANYWHERE = ("", "0.0.0.0", "::")

LOOK_SECONDS = 0.1
# Work that ends sooner has no bar.
LONG_SECONDS = 0.5
# What the stages of a swap are called.
STAGES = {"saving": "saving prefixes", "warming": "first pass"}


def first_words(generator: BlockpoolGenerator, host: str, port: int) -> str:
    """The lines for the person who has started the server. `port`: the one on which it listens."""
    name = "127.0.0.1" if host in ANYWHERE else f"[{host}]" if ":" in host else host
    url, model = f"http://{name}:{port}", generator.model
    context = None if model is None else model.positions
    lines = ["The server is ready.", *_of_model(generator, model), _of_store(generator, model), f"  open   {url}/"]
    key = "any" if generator.access.is_open else "KEY"
    lines += [f"  {client}: {line}" for client, line in settings(url, context, key).items()]
    return "\n".join(lines)


def _of_model(generator: BlockpoolGenerator, model: LoadedModel | None) -> list[str]:
    if model is None:
        return ["  model  none yet: requests name one of GET /v1/models"]
    id = generator.registry.catalog.id_of(model.key.model)
    pool = f"{human_bytes(model.pool_bytes)} for keys and values"
    return [f"  model  {id}, {human_bytes(model.weights_bytes)} of weights, with {model.how}", f"  pool   {pool}"]


def _of_store(generator: BlockpoolGenerator, model: LoadedModel | None) -> str:
    config, files = generator.store_config, generator.agent_files
    if config is None or files is None:
        return "  store  none: cached prefixes end with the server"
    text = f"  store  {config.folder or default_folder()}, {human_bytes(config.store_bytes)} at most"
    namespace = None if model is None or model.agents is None else model.agents.namespace
    try:
        own = [agent for agent in files.all() if agent.namespace == namespace]
    except (BlockpoolError, OSError):
        own = []
    if not own:
        return f"{text}; it has nothing of this model" if model is not None else text
    return f"{text}; on it {count(len(own), 'agent')} with {count(sum(agent.tokens for agent in own), 'token')}"


# -- bars --------------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """Work in progress. `total`: None where it is not known. `unit`: B for bytes."""

    name: str
    done: int
    total: int | None
    unit: str


def works(generator: Any) -> list[Work]:
    """The long work in progress: a swap of models, restores, the warm-up, and files on their way in or out."""
    swap = generator.registry.swap
    found = [] if swap is None else [_of_swap(swap)]
    warm_up = None if generator.warm_up is None else generator.warm_up.report()
    if warm_up is not None and warm_up["running"]:
        found.append(Work("warm-up", warm_up["done"] + warm_up["failed"], warm_up["prompts"], "prompts"))
    for model in list(generator.registry.loaded.values()):
        restoring = ((model.report.get("store") or {}).get("restoring")) or ()
        if restoring:
            done, total = (sum(job[key] for job in restoring) for key in ("done", "tokens"))
            found.append(Work("restoring", done, total, "tokens"))
    found += [Work(f"file {i}", done, total, "B") for i, (done, total) in enumerate(generator.spool.progress(), 1)]
    return found


def _of_swap(swap: ModelSwap) -> Work:
    stage, coming = swap.stage, swap.coming
    name = STAGES.get(stage, stage)
    if coming is None or stage not in ("loading", "hashing"):
        return Work(name, 0, None, "")
    hashing = coming.hashing
    done = coming.read_bytes if stage == "loading" else 0 if hashing is None else hashing.read_bytes
    return Work(name, done, coming.weights_bytes or None, "B")


class Bars:
    """The bars of `generator`, from start() to stop()."""

    def __init__(self, generator: Any, out: TextIO | None = None) -> None:
        self._generator = generator
        self._out = sys.stderr if out is None else out
        self._drawn: dict[str, tqdm[Any]] = {}
        # For how many looks in a row each work has been there.
        self._looks: dict[str, int] = {}
        self._stopped = threading.Event()
        self._logging = ExitStack()
        self._thread = threading.Thread(target=self._run, name="bars", daemon=True)

    def start(self) -> None:
        """Draw from now on, if the output is a terminal."""
        if self._out.isatty():
            # By default tqdm has a lock for several processes, which macOS starts one for.
            tqdm.set_lock(threading.RLock())
            # Lines of the log go above the bars.
            self._logging.enter_context(logging_redirect_tqdm([logging.getLogger()]))
            self._thread.start()

    def stop(self) -> None:
        """Take the bars away."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._logging.close()

    def update(self, found: list[Work]) -> None:
        """Draw the work that has been there for a while, and take away the bars of work that has ended."""
        names = {work.name for work in found}
        self._looks = {work.name: self._looks.get(work.name, 0) + 1 for work in found}
        for name in self._drawn.keys() - names:
            self._drawn.pop(name).close()
        for work in found:
            if self._looks[work.name] > LONG_SECONDS / LOOK_SECONDS:
                self._draw(work)

    def _draw(self, work: Work) -> None:
        bar = self._drawn.get(work.name)
        if bar is None:
            is_bytes = work.unit == "B"
            unit = work.unit if is_bytes else f" {work.unit}".rstrip()
            bar = tqdm(total=work.total, desc=work.name, unit=unit, unit_scale=is_bytes, file=self._out, leave=False)
            self._drawn[work.name] = bar
        bar.total, bar.n = work.total, work.done
        bar.refresh()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            self.update(works(self._generator))
        self.update([])
