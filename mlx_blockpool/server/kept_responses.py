"""Stored responses that a client may continue by id.

In memory only, and bounded; any thread may call this.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass

from ..config import HistoryConfig
from .bodies import Json


@dataclass(frozen=True)
class Kept:
    """`response`: as it was sent. `items`: the conversation with it, without instructions, which
    hold for one response only.

    `cache_salt`: of its request; only requests with the same one may continue it.
    """

    response: Json
    items: list[Json]
    characters: int
    owner: str | None = None
    cache_salt: str | None = None


class KeptResponses:
    """The last responses by their ids; the oldest are dropped.

    An owner finds no response of another.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._characters = 0
        self._changing = threading.Lock()

    def keep(
        self,
        response: Json,
        items: list[Json],
        owner: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        kept = Kept(response, items, len(json.dumps([response, items])), owner, cache_salt)
        with self._changing:
            self._kept[response["id"]] = kept
            self._characters += kept.characters
            while (
                len(self._kept) > HistoryConfig.responses
                or self._characters > HistoryConfig.response_characters
            ):
                self._characters -= self._kept.popitem(last=False)[1].characters

    def get(self, name: str, owner: str | None = None) -> Kept | None:
        with self._changing:
            kept = self._kept.get(name)
        return kept if kept is not None and kept.owner == owner else None

    def item(
        self, name: str, owner: str | None = None, cache_salt: str | None = None
    ) -> Json | None:
        """An output item of one of the owner's responses with this cache_salt."""
        with self._changing:
            found = [
                kept
                for kept in reversed(self._kept.values())
                if (kept.owner, kept.cache_salt) == (owner, cache_salt)
            ]
            outputs = [kept.response["output"] for kept in found]
        return next((item for output in outputs for item in output if item["id"] == name), None)
