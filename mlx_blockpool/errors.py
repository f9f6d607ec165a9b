"""The whole error tree.

    BlockpoolError
    ├── UnsupportedVersionError      the installed mlx-lm is outside the supported range, or lacks
    │                                a name that is needed
    ├── SpecError                    a model cannot be described, or its spec contradicts it
    │   └── UnknownModelTypeError    neither mlx-lm nor a plugin has the code of a model
    ├── PluginError                  a plugin raised an error or returned something invalid
    ├── PatchError                   an installed file of mlx-lm is not the one that the patch was
    │                                made for
    ├── PoolExhaustedError           the pool has too few blocks; nothing was changed
    ├── ReleasedCacheError           caches were used after their blocks had returned to the pool
    ├── RequestTooLargeError         the request does not fit even in an empty pool
    │   └── TooManyPositionsError    the prompt has more tokens than the model has positions
    ├── FormError                    a reply cannot be held to the requested form
    ├── PromptError                  the prompt cannot be rendered or tokenized within the server's
    │                                limits
    ├── MeasuringStoppedError        something else needs the thread that measures a model
    ├── UnmeasurableError            the speed of a model cannot be measured
    ├── ModelNotFoundError           no model has this name, or it may not be loaded
    ├── BadModelError                mlx-lm cannot load the model's files
    ├── LoadError                    the model could not be loaded now, although its files are right
    ├── TooManyRequestsError         a bounded queue is full; the same request may succeed later
    ├── UnavailableError             the server cannot answer now: it is stopping, or has computed
    │                                nothing for too long
    ├── GroupError                   the ranks of a group cannot work together
    │   ├── GroupLostError           a rank was lost; also an UnavailableError
    │   └── DisagreeError            the ranks have come to different results
    └── StoreError                   the prompt store cannot do what was requested
        └── BadRecordError           a file is not the expected record: a miss, and the file is
                                     quarantined

A message says what is wrong, with its figures, and what to do.
"""

from __future__ import annotations


class BlockpoolError(Exception):
    """The base of all errors that mlx-blockpool raises on purpose."""


class UnsupportedVersionError(BlockpoolError):
    pass


class SpecError(BlockpoolError):
    pass


class UnknownModelTypeError(SpecError, ValueError):
    """Also a ValueError, as mlx-lm raises for it."""


class PluginError(BlockpoolError):
    pass


class PatchError(BlockpoolError):
    pass


class PoolExhaustedError(BlockpoolError):
    """The pool has fewer blocks than needed. All figures are blocks of one layer group, `group`."""

    def __init__(self, needed: int, free: int, evictable: int, group: str, hint: str = "") -> None:
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.group = group
        hint = hint or "Raise --pool-bytes, or lower max_tokens or the number of agents."
        super().__init__(
            f"{needed} blocks of {group} are needed; {free} are free and {evictable} evictable. "
            f"{hint}"
        )


class ReleasedCacheError(BlockpoolError):
    """Caches whose blocks were returned to the pool. `released_by`: the call that returned them."""

    def __init__(self, released_by: str) -> None:
        self.released_by = released_by
        super().__init__(
            f"{released_by} has returned the blocks of these caches to the pool. "
            "Acquire caches for the prompt again, or make a copy.deepcopy() of them before."
        )


class RequestTooLargeError(BlockpoolError):
    """The request does not fit even in an empty pool. Both figures are tokens."""

    def __init__(self, needed: int, capacity: int) -> None:
        self.needed = needed
        self.capacity = capacity
        super().__init__(
            f"The request needs space for {needed} tokens, and the pool holds at most {capacity} "
            "of one sequence. "
            "Shorten the prompt or raise --pool-bytes."
        )

    def __reduce__(self) -> tuple[type[RequestTooLargeError], tuple[int, int]]:
        """Its figures, for a pickle: it comes out of the processes that render prompts."""
        return type(self), (self.needed, self.capacity)


class TooManyPositionsError(RequestTooLargeError):
    """The prompt leaves no position for a reply. Both figures are tokens."""

    def __init__(self, needed: int, capacity: int) -> None:
        self.needed = needed
        self.capacity = capacity
        BlockpoolError.__init__(
            self,
            f"The request needs {needed} positions, and its model has {capacity}. "
            "Shorten the prompt, or start the server with --max-positions if the model can do "
            "more.",
        )


class FormError(BlockpoolError):
    """A form that cannot be enforced, or a reply that broke off in one.

    `place`: the field of the request's body.
    """

    def __init__(self, why: str, place: str = "") -> None:
        self.place = place
        self.why = why
        super().__init__(f"{place}: {why}" if place else why)


class PromptError(BlockpoolError):
    pass


class MeasuringStoppedError(BlockpoolError):
    """Something else needs the thread that measures a model."""


class UnmeasurableError(BlockpoolError):
    """The speed of a model cannot be measured.

    The message is only the reason; callers say what was to be measured.
    """


class ModelNotFoundError(BlockpoolError, FileNotFoundError):
    pass


class BadModelError(BlockpoolError):
    pass


class LoadError(BlockpoolError, RuntimeError):
    pass


class TooManyRequestsError(BlockpoolError):
    pass


class UnavailableError(BlockpoolError, RuntimeError):
    pass


class GroupError(BlockpoolError):
    pass


class GroupLostError(GroupError, UnavailableError):
    """A rank was lost, or has left.

    `rank`: which one, if that is known. `why`: the error, if there was one.
    """

    def __init__(self, rank: int | None = None, why: str = "") -> None:
        self.rank = rank
        which = "A rank" if rank is None else f"Rank {rank}"
        super().__init__(
            f"{which} was lost{f' ({why})' if why else ''}. The server starts again; send the "
            "request again."
        )


class DisagreeError(GroupError):
    pass


class StoreError(BlockpoolError):
    pass


class StateError(BlockpoolError):
    """An adapter of a plugin cannot save or restore a state."""


class BadRecordError(StoreError):
    pass


class OutdatedRecordError(BadRecordError):
    pass
