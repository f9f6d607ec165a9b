"""What the other ranks do: follow() takes the turns that rank 0 announces, without a port, until it stops."""

from __future__ import annotations

import logging
import time

from ...config import EngineConfig, ServerConfig
from ...errors import DisagreeError, GroupLostError, LoadError
from ...ranks.facts import Fact, Load
from ...ranks.head import Act, Head
from ...ranks.lookout import Lookout
from ..ending import end_on_signals
from ..models.provider import BlockpoolModelProvider
from ..models.registry import ModelRegistry
from .replica import Replica, loss_of

log = logging.getLogger(__name__)


def follow(template: BlockpoolModelProvider, config: ServerConfig) -> None:
    """Serve as a rank without clients until rank 0 stops. Ends the process if the group is lost.

    Raises GroupError if the ranks cannot serve together.
    """
    registry, ranks = ModelRegistry(template, config), template.ranks
    loss = loss_of(registry, config)
    lookout = Lookout(config.ranks.seconds, loss.end)
    replica = Replica(ranks, registry, config, lookout)
    end_on_signals(EngineConfig.exit_seconds, replica.ask_to_stop, hang_up=True)
    lookout.start()
    replica.agree()
    try:
        follow_turns(replica)
        registry.close()
    except (GroupLostError, DisagreeError) as error:
        loss.end(error)


def follow_turns(replica: Replica) -> None:
    """Take the turns of rank 0 until it stops. Raises GroupLostError and DisagreeError."""
    try:
        while True:
            heads, changes = replica.exchange(Head())
            head = heads[0]
            for change in changes:
                _change(replica, *change)
            if head.act == Act.STOP:
                replica.finish()
                return
            replica.run(head)
            replica.rest()
            if head.nap_ms:
                time.sleep(head.nap_ms / 1000)
    except (GroupLostError, DisagreeError):
        raise
    except Exception as error:
        # Rank 0 does not know how far this rank has come.
        log.exception("a turn has failed")
        raise GroupLostError(replica.ranks.rank, f"{type(error).__name__}: {error}") from error


def _change(replica: Replica, name: str, fact: Fact) -> None:
    registry, key = replica.registry, replica.key_of(name)
    if isinstance(fact, Load):
        model = registry.make(key)
        try:
            replica.load(model)
        except LoadError as error:
            log.warning("Cannot load %s: %s", key.model, error)
            model.close()
        else:
            registry.add(model)
    else:
        model = registry.take_out(key)
        model.suspend()
        model.close()
