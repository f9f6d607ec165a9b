"""The whole error tree.

    BlockpoolError
    ├── UnsupportedVersionError      mlx-lm is outside the supported range
    ├── SpecError                    a model cannot be described, or a spec contradicts its model
    ├── PluginError                  a plugin raised, or returned nonsense
    ├── PatchError                   an installed mlx-lm file is not the one that a patch was made for
    ├── PoolExhaustedError           not enough blocks; nothing was changed
    ├── ReleasedCacheError           caches were used after their blocks went back to the pool
    ├── RequestTooLargeError         a request that could never fit in the pool
    │   └── TooManyPositionsError    a prompt with more tokens than the model has positions
    ├── PromptError                  a prompt that cannot be rendered or tokenized within the server's bounds
    ├── ModelNotFoundError           no model of that name, or none that may be loaded
    ├── BadModelError                a model's files are not what mlx-lm loads
    ├── LoadError                    a model could not be loaded now, though its files are right
    ├── UnavailableError             the server cannot answer now: it stops, or has computed nothing for too long
    └── StoreError                   the prompt store cannot do what it was asked to
        ├── NoRoomError              no room on disk for a file that is on its way; later there may be
        └── BadRecordError           a file is not the record that was wanted: a miss, and the file belongs in quarantine

Each message says what was found, what was needed and what to do.
"""

from __future__ import annotations


class BlockpoolError(Exception):
    """Any error that mlx-blockpool raises on purpose."""


class UnsupportedVersionError(BlockpoolError):
    pass


class SpecError(BlockpoolError):
    pass


class PluginError(BlockpoolError):
    pass


class PatchError(BlockpoolError):
    pass


class PoolExhaustedError(BlockpoolError):
    """Fewer blocks than needed. Counts are blocks of one layer group (`group`)."""

    def __init__(self, needed: int, free: int, evictable: int, group: str, hint: str = "") -> None:
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.group = group
        hint = hint or "Raise --pool-bytes, or lower max_tokens or the number of agents."
        super().__init__(f"Needed {needed} blocks of {group}; {free} free, {evictable} evictable. {hint}")


class ReleasedCacheError(BlockpoolError):
    """Caches whose blocks were given back. `released_by`: what gave them back."""

    def __init__(self, released_by: str) -> None:
        self.released_by = released_by
        super().__init__(
            f"{released_by} has given the blocks of these caches back to the pool: they hold nothing any more. "
            "Fetch caches for the prompt again, or make a copy.deepcopy() of the caches before."
        )


class RequestTooLargeError(BlockpoolError):
    """A prompt that does not fit in an empty pool. Both figures are tokens."""

    def __init__(self, needed: int, capacity: int) -> None:
        self.needed = needed
        self.capacity = capacity
        super().__init__(
            f"The request needs room for {needed} tokens and the pool holds at most {capacity} of one sequence. "
            "Shorten the prompt or raise --pool-bytes."
        )


class TooManyPositionsError(RequestTooLargeError):
    """A prompt that leaves no position for a reply. Both figures are tokens."""

    def __init__(self, needed: int, capacity: int) -> None:
        self.needed = needed
        self.capacity = capacity
        BlockpoolError.__init__(
            self,
            f"The request needs {needed} positions and its model has {capacity}. "
            "Shorten the prompt, or start the server with --max-positions if the model can do more.",
        )


class PromptError(BlockpoolError):
    pass


class ModelNotFoundError(BlockpoolError, FileNotFoundError):
    pass


class BadModelError(BlockpoolError):
    pass


class LoadError(BlockpoolError, RuntimeError):
    pass


class UnavailableError(BlockpoolError, RuntimeError):
    pass


class StoreError(BlockpoolError):
    pass


class NoRoomError(StoreError):
    pass


class BadRecordError(StoreError):
    pass
