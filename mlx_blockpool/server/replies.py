"""Reply: one request on the generation thread, and the queue on which its reply goes to the socket's thread.

The generation thread puts, the socket's thread takes. HangUps watches the sockets of clients that wait, on a thread of its own.
"""

from __future__ import annotations

import select
import socket
import threading
import weakref
from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import accumulate
from queue import Queue
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.generate import StopSequences

from ..config import WHAT_FITS, EngineConfig
from ..drafts.draft import Prediction
from ..drafts.index import SuffixIndex
from ..engine.request import KIND, Request, Token
from ..engine.sequence import Sequence
from ..errors import RequestTooLargeError, TooManyPositionsError
from ..mlx_lm_compat import GenerationContext, Response, make_logits_processors
from ..ranks.group import as_loss
from .explain import Explained
from .live.log import ModelEvents
from .live.watch import RequestWatch
from .sampling import make_sampler

# mlx takes seeds of 64 bits.
SEEDS = 2**64
# How often the connections are checked.
WATCH_SECONDS = 0.25
# Where the system has it, this is reported also while bytes of a next request wait to be read.
READ_HANG_UP: int = getattr(select, "POLLRDHUP", 0)


# Pairs of a choice's index and the next part of its reply.
Choices: TypeAlias = Generator[tuple[int, Any], None, None]


class Reply(Queue[Any]):
    """A request from its arrival at the generation thread to the end of its reply.

    Its items: mlx-lm's GenerationContext, then (done, total) tokens of the prompt and a Response for each token, then None; or
    the exception that ends it.

    request, args: as the socket's thread has prepared them; max_tokens is lowered to what fits when the request starts.
    context:       what mlx-lm's handler reads of the reply; None until the request starts.
    sequence:      where a request that had to leave its engine continues; None for others.
    is_hung_up:    the client is gone.
    watch:         writes its progress into the log.

    With `parts` its items go there instead, each with `index`: one of several choices for a request. The first of them stands
    for the request in its explanation.
    """

    def __init__(
        self, request: Any, args: Any, watch: RequestWatch, index: int = 0, parts: Queue[tuple[int, Any]] | None = None
    ) -> None:
        super().__init__()
        self.request = request
        self.args = args
        self.watch = watch
        self.context: GenerationContext | None = None
        self.sequence: Sequence | None = None
        self.is_hung_up = self.is_begun = False
        self._index, self._parts = index, parts
        self._detokenizer: Any = None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if self._parts is None:
            super().put(item, block, timeout)
        else:
            self._parts.put((self._index, item), block, timeout)

    @property
    def explained(self) -> Explained | None:
        """The explanation in which the use of the cache is written down, if there is one."""
        found: Explained | None = None if self._index else self.request.explained
        return found

    @property
    def is_left(self) -> bool:
        """Return whether no client reads the rest of the reply."""
        return self.is_hung_up or self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Return whether the client's thread has stopped to read the reply."""
        return self.context is not None and self.context._should_stop

    def is_choice_beside(self, item: Any) -> bool:
        """Whether an item of the queue is another choice for the same request."""
        return item is not self and isinstance(item, Reply) and item.request is self.request

    def hang_up(self) -> None:
        """The client is gone: end the wait for this reply, and let the generation thread drop the request."""
        self.is_hung_up = True
        self.put(ConnectionAbortedError("the client hung up"))

    def leave(self) -> None:
        """The generation thread drops the request, because no client reads the rest of its reply."""
        self.watch.ended("abort" if self.is_hung_up else "stop")

    def fail(self, error: Exception) -> None:
        self.watch.ended("abort" if isinstance(error, ConnectionError) else "error")
        # Without its traceback, whose frames hold caches and with them blocks.
        self.put(as_loss(error).with_traceback(None))

    def start(self, tokenizer: Any, text_sm: Any, stop: StopSequences, needs_checkpoints: bool, salt: bytes) -> Request:
        """The request as the engine takes it. `needs_checkpoints`: its caches can be resumed only where a checkpoint was made."""
        options, prepared = self.request.options, self.request.prepared
        self._detokenizer = tokenizer.detokenizer
        self.context = GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_sm,
            initial_state=prepared.initial_state,
            prompt=prepared.tokens,
        )
        form = None if self.request.compiled is None else self.request.compiled.copy()
        if form is not None:
            # A forced token has no logprobs of others.
            form.jumps = not (self.args.logprobs or self.args.top_logprobs > 0)
        breakpoints = list(zip(accumulate(prepared.segments), prepared.types, strict=True))
        if needs_checkpoints:
            breakpoints = sorted({**{end: KIND for end, _ in prepared.breakpoints}, **dict(prepared.checkpoints or ())}.items())
        return Request(
            self.context.prompt,
            self.args.max_tokens,
            make_sampler(self.args, tokenizer),
            make_logits_processors(self.args),
            stop,
            breakpoints,
            options.agent,
            noted_as=options.conversation,
            pins=prepared.breakpoints,
            retention=options.retention,
            group=options.id if self.request.choices > 1 else None,
            priority=options.priority,
            salt=salt,
            form=form,
            prediction=self._prediction(),
        )

    def _prediction(self) -> Prediction | None:
        """What the client expects this choice to be, in one text for all choices; None: it expects nothing."""
        if not self.request.prediction:
            return None
        counted = self.request.predictions
        own = Prediction(counted[0].text if counted else SuffixIndex(self.request.prepared.prediction))
        counted.append(own)
        return own

    def begin(self, cached: int) -> None:
        """Let the client's thread answer: progress and tokens follow. `cached` tokens of the prompt need not be computed."""
        assert self.context is not None
        self.context.prompt_cache_count = cached
        if not self.is_begun:
            self.is_begun = True
            self.put(self.context)

    def emit(self, event: Token) -> None:
        """Send a token to the client, with the text that it adds."""
        logprobs = event.logprobs
        self.put(
            Response(
                text_of(self._detokenizer, event),
                event.token,
                0.0 if logprobs is None else logprobs[event.token].item(),
                event.finish_reason,
                () if logprobs is None else most_likely(logprobs, self.args.top_logprobs),
            )
        )
        if event.finish_reason is not None:
            self.put(None)


def replies_to(request: Any, args: Any, events: ModelEvents, parts: Queue[tuple[int, Any]]) -> list[Reply]:
    """The replies to all choices of a request, which put their items on `parts`. `events`: the log of its model.

    A seed counts up from choice to choice, so that they differ; the ids of the choices behind the first end with their number.
    """
    replies = []
    for index in range(request.choices):
        options, own = request.options, args
        if index:
            options = replace(options, id=f"{options.id}-{index}")
        if index and args.seed is not None:
            seed = args.seed + index
            own = replace(args, seed=seed if seed < SEEDS else seed - SEEDS)
        watch = RequestWatch(events, options, len(request.prepared.tokens))
        replies.append(Reply(request, own, watch, index, parts))
    return replies


def only_choice(parts: Choices) -> Iterator[Any]:
    """The parts of a request's only choice. Raises what has ended it."""
    for _, part in parts:
        if isinstance(part, Exception):
            raise part
        if part is not None:
            yield part


def fit(args: Any, prompt: list[int], capacity: int | None, positions: int | None = None, default: int | None = None) -> Any:
    """The arguments with max_tokens lowered to what fits after the prompt in the pool and in the model's positions.

    `default`: the most for a request that names no max_tokens; None: whatever fits. Raises ValueError for an empty prompt and
    RequestTooLargeError where not one token fits after it.
    """
    if not prompt:
        raise ValueError("The prompt is empty. Send at least one token.")
    if positions is not None and len(prompt) + 1 > positions:
        raise TooManyPositionsError(len(prompt) + 1, positions)
    if capacity is not None and len(prompt) + 1 > capacity:
        raise RequestTooLargeError(len(prompt) + 1, capacity)
    most = [limit - len(prompt) for limit in (capacity, positions) if limit is not None]
    if args.max_tokens >= WHAT_FITS:
        most += [default] if default is not None else [] if most else [EngineConfig.endless_tokens]
    return replace(args, max_tokens=min([args.max_tokens, *most]))


def text_of(detokenizer: Any, response: Token) -> str:
    """The text that a token adds. The token that stops a reply is not part of it."""
    if response.finish_reason != "stop":
        detokenizer.add_token(response.token)
    if response.finish_reason is not None:
        detokenizer.finalize()
    return str(detokenizer.last_segment)


def most_likely(logprobs: mx.array, count: int) -> tuple[dict[str, Any], ...]:
    """The `count` most likely tokens, in no order, in the shape of mlx-lm's top_tokens without their text.

    mlx sorts the whole vocabulary for it: thirty times as long as numpy takes on a CPU, for each token of each reply.
    """
    if count <= 0:
        return ()
    values = np.array(logprobs.astype(mx.float32), copy=False)
    tokens = np.argpartition(values, -min(count, len(values)))[-count:].tolist()
    return tuple({"id": token, "logprob": float(values[token])} for token in tokens)


class HangUps:
    """Watches the connections of clients that wait. Any thread may call watch().

    Its thread runs as long as there is a connection to watch. A reply without references is not watched any more.
    """

    def __init__(self, seconds: float = WATCH_SECONDS) -> None:
        self._seconds = seconds
        self._changing = threading.Lock()
        self._watched: list[tuple[socket.socket, weakref.ref[Reply]]] = []
        self._stopped = threading.Event()
        self._is_running = False

    def watch(self, connection: socket.socket | None, reply: Reply) -> None:
        """Call the reply's hang_up() when its client hangs up. None: a request that came over no connection."""
        if connection is None:
            return
        with self._changing:
            self._watched.append((connection, weakref.ref(reply)))
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="hang-ups", daemon=True).start()

    def look(self) -> int:
        """Hang up the replies whose clients have. Returns how many are still watched."""
        with self._changing:
            watched = [(connection, reply) for connection, waits in self._watched if (reply := waits()) is not None]
        gone = [reply for connection, reply in watched if has_hung_up(connection)]
        for reply in gone:
            reply.hang_up()
        with self._changing:
            self._watched = [each for each in self._watched if each[1]() not in (None, *gone)]
            self._is_running = bool(self._watched)
            return len(self._watched)

    def _run(self) -> None:
        while self.look():
            self._stopped.wait(self._seconds)


def has_hung_up(connection: socket.socket) -> bool:
    """Return whether the other end has closed or reset a connection. Bytes of a next request are no reason to think so."""
    try:
        poll = select.poll()
        poll.register(connection, select.POLLIN | READ_HANG_UP)
        found = [event for _, event in poll.poll(0)]
        if any(event & ~select.POLLIN for event in found):
            return True
        return bool(found) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        # It is closed here too.
        return True
