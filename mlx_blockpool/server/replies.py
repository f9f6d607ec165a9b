"""The queue on which a request's reply comes, and a watch over the sockets of the clients that wait for one.

The generation thread puts, the request's own thread takes; the watch has a thread of its own.
"""

from __future__ import annotations

import select
import socket
import threading
import weakref
from queue import Queue
from typing import Any

# A client that hangs up is noticed after so long.
WATCH_SECONDS = 0.25
# Where the system has it, this is reported also while bytes of a next request wait to be read.
READ_HANG_UP: int = getattr(select, "POLLRDHUP", 0)


class Reply(Queue[Any]):
    """What the generation thread says to one request. `is_hung_up`: nobody waits for it any more."""

    is_hung_up = False

    def hang_up(self) -> None:
        """The client is gone: whoever waits for this reply learns of it, and the generation thread drops the request."""
        self.is_hung_up = True
        self.put(ConnectionAbortedError("the client hung up"))


class HangUps:
    """Watches the connections of clients that wait. Any thread may call watch().

    Its thread runs as long as there is something to watch. A reply that nobody refers to is not watched any more.
    """

    def __init__(self, seconds: float = WATCH_SECONDS) -> None:
        self._seconds = seconds
        self._changing = threading.Lock()
        self._watched: list[tuple[socket.socket, weakref.ref[Reply]]] = []
        self._stopped = threading.Event()
        self._is_running = False

    def watch(self, connection: socket.socket | None, reply: Reply) -> None:
        """From now on a reply whose client hangs up is told. None: a request that came over no connection."""
        if connection is None:
            return
        with self._changing:
            self._watched.append((connection, weakref.ref(reply)))
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="hang-ups", daemon=True).start()

    def look(self) -> int:
        """Tell the replies whose clients have hung up. Returns how many are still watched."""
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
    """Whether the other end has closed or reset a connection. Bytes of a next request are no reason to think so."""
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
