"""Acts: what facts change in a loaded model, on every rank alike, and the facts that a rank has about it for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...engine.ranked import RankedEngine
from ...ranks.facts import Fact, Lost
from ...ranks.head import Head
from ...tier.path_acts import PathFact
from ...tier.restore import Restores
from ...tier.write_behind import StoredPrefixes
from ..model import LoadedModel
from .condition import free_mb, problem_of


def engine_of(model: LoadedModel) -> RankedEngine:
    """The engine of a model that several ranks share."""
    assert isinstance(model.engine, RankedEngine), f"{model.key.model} has no engine of a group"
    return model.engine


def outgoing(model: LoadedModel) -> list[Fact]:
    """The facts about a model since the last call: of requests and paths, on rank 0, and records that this rank lacks."""
    of_paths = [] if model.acts is None else model.acts.outgoing()
    lost = [fact for stored in _stored([model]) for fact in stored.ledger.take_lost()]
    return [*engine_of(model).outgoing(), *of_paths, *lost]


def reading(models: Sequence[LoadedModel]) -> Restores | None:
    """The restores of the model of which the ranks finish one next: of the same model on all of them."""
    return next((stored.restores for stored in _stored(models) if stored.restores.restored().number), None)


def reported(models: Sequence[LoadedModel], head: Head) -> Head:
    """The head with what this rank has to say of itself: whether its disk takes records, and how far that restore is."""
    takes = all(stored.store.takes() for stored in _stored(models))
    head = replace(head, takes=takes, problem=problem_of(each.store for each in _stored(models)), free_mb=free_mb())
    restores = reading(models)
    if restores is None:
        return head
    number, records, has_failed = restores.restored()
    return replace(head, restore=number, restored=records, failed=has_failed)


def heed(models: Sequence[LoadedModel], restores: Restores | None, heads: Sequence[Head]) -> None:
    """Act on what the heads of all ranks say of their disks. `restores`: reading() when they were made."""
    for stored in _stored(models):
        stored.ledger.agree(all(head.takes for head in heads))
    if restores is not None:
        restores.commit(heads)


def act(model: LoadedModel, facts: Sequence[Fact]) -> None:
    """Apply the facts of an exchange, in their order."""
    engine_of(model).apply(facts)
    for fact in facts:
        if isinstance(fact, PathFact) and model.acts is not None:
            model.acts.take(fact)
        elif isinstance(fact, Lost):
            for stored in _stored([model]):
                stored.forget(fact)


def _stored(models: Sequence[LoadedModel]) -> list[StoredPrefixes]:
    prefixes = [model.prefix for model in models if model.prefix is not None]
    return [prefix.stored for prefix in prefixes if prefix.stored is not None]
