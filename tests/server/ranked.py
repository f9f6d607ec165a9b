"""Servers of several ranks: threads of this process, of which each has a whole model, and
processes of a ring with its shares.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from forks import Program
from ranks.rings import free_ports, ring
from ranks.threads import ThreadRanks, joined

from mlx_blockpool.ranks.watchdog import TurnWatchdog
from mlx_blockpool.server import app, options
from mlx_blockpool.server.http import BlockpoolHandler
from mlx_blockpool.server.models.registry import ModelRegistry
from mlx_blockpool.server.provider import BlockpoolModelProvider
from mlx_blockpool.server.ranked.replica import Replica, follow_turns
from server.processes import SERVE
from server.serving import Client, listening, parse


class Group:
    """The ranks of one server: the client of rank 0, and the registries of all ranks."""

    def __init__(self, client: Client, ranks: list[ThreadRanks], followers: list[Follower]) -> None:
        self.client = client
        self.ranks = ranks
        self.registries: list[ModelRegistry] = [
            client.generator.registry,
            *(each.replica.registry for each in followers),
        ]

    def settle(self) -> None:
        """Wait until nothing is left to do; then all ranks hold the same, and no block is in
        use.
        """
        # A request that has ended on rank 0 leaves the engines with the next exchange.
        while any(
            len(model.engine or ())
            for registry in self.registries
            for model in registry.loaded.values()
        ):
            threading.Event().wait(0.01)
        self.client.settle()
        self.exchange()
        found = []
        for registry in self.registries:
            models = {key: model.prefix for key, model in registry.loaded.items()}
            for prefix in models.values():
                assert prefix is not None
                prefix.check()
            found.append(
                {
                    key: (prefix.pool.counts(), len(prefix))
                    for key, prefix in models.items()
                    if prefix is not None
                }
            )
        assert all(each == found[0] for each in found), found

    def exchange(self) -> None:
        """Wait until all ranks have applied what is noted now: the next exchange sends it, and
        the one behind comes after it.
        """
        condition = self.client.generator.step_driver.condition
        until = condition.num_exchanges + 3
        while condition.num_exchanges < until:
            threading.Event().wait(0.005)


class Follower(threading.Thread):
    """A rank behind rank 0. `error`: what has ended it, if it has not followed to the end."""

    def __init__(self, args: Any, ranks: ThreadRanks) -> None:
        super().__init__(name=f"rank {ranks.rank}", daemon=True)
        config = options.server_config(args)
        self.error: Exception | None = None
        registry = ModelRegistry(BlockpoolModelProvider(args, ranks), config)
        self.replica = Replica(ranks, registry, config, TurnWatchdog(1e9, lambda error: None))

    def run(self) -> None:
        try:
            self.replica.agree()
            follow_turns(self.replica)
            self.replica.registry.close()
        except Exception as error:
            self.error = error
            self.replica.ranks.leave()
        finally:
            mx.synchronize()


@contextmanager
def ranked_server(model: Path | str, *arguments: str, size: int = 2) -> Iterator[Group]:
    """A server of `size` ranks that have all of the model each."""
    stored = [] if "--store-dir" in arguments else ["--no-store"]
    args = parse(["--model", str(model), *stored, *arguments])
    ranks = joined(size)
    followers = [Follower(args, each) for each in ranks[1:]]
    for follower in followers:
        follower.start()
    generator = app.make_generator(BlockpoolModelProvider(args, ranks[0]))
    lost: list[BaseException] = []

    def lose(error: BaseException) -> None:
        # It would end the process of all tests.
        lost.append(error)
        raise SystemExit

    generator.step_driver.lose = lose  # type: ignore[method-assign]
    with listening(generator, BlockpoolHandler) as client:
        yield Group(client, ranks, followers)
    for follower in followers:
        follower.join()
    assert not lost, (lost, [follower.error for follower in followers])


@contextmanager
def ring_server(
    model: Path | str, *arguments: str, size: int = 2, before: str = ""
) -> Iterator[tuple[int, list[Program]]]:
    """The port and the ranks of a server on a ring of processes, each with its share of the
    model.
    """
    (port,) = free_ports(1)
    stored = [] if "--store-dir" in arguments else ["--no-store"]
    options = [
        "--model",
        str(model),
        "--port",
        str(port),
        "--pool-bytes",
        "60MB",
        *stored,
        *arguments,
    ]
    with ring(f"{before}\n{SERVE}", *options, size=size) as ranks:
        ranks[0].read_until("Starting httpd at")
        for number, rank in enumerate(ranks):
            # One whose log nobody reads would wait.
            threading.Thread(
                target=_show, args=[f"rank {number}", rank.stderr], daemon=True
            ).start()
        yield port, ranks


def _show(name: str, log: Any) -> None:
    """Print what a rank logs, which pytest shows where a test fails."""
    for line in log:
        sys.stderr.write(f"{name}: {line}")
