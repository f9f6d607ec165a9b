"""Wakes: connections over which rank 0 ends the naps of the other ranks.

A rank that waits in one of mlx's collectives keeps a processor core busy, so ranks without work
sleep until rank 0 has some. Owned by the thread that takes the turns.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .group import Ranks
from .head import Head

log = logging.getLogger(__name__)

# How long it may take to connect the ranks.
CONNECT_SECONDS = 3.0
# A rank whose nap is over waits this much longer for rank 0, which wakes it after each nap.
LATE_SECONDS = 1.0
# What rank 0 sends to the others over mlx's collectives: its port, and the secret that they send
# there.
PORT_BYTES = 2
SECRET_BYTES = 16


class Wakes:
    """One rank's ends of the connections: rank 0 has one to each other rank, and these have one
    each.

    Without connections naps end by time. Rank 0 calls wake() once after each nap, and the others
    call nap() once for each.
    """

    def __init__(self, connections: list[socket.socket] | None = None) -> None:
        self._connections = connections or []
        # The byte that ends a nap may come before the nap has begun, or after it has ended by time.
        self._num_naps = self._num_bytes = 0

    @property
    def are_connected(self) -> bool:
        return bool(self._connections)

    def wake(self) -> None:
        """End the nap of all other ranks."""
        try:
            for connection in self._connections:
                connection.send(b"\0")
        except OSError as error:
            self._give_up(error)

    def nap(self, seconds: float) -> None:
        """Sleep until rank 0 calls wake(), or for `seconds` without a connection to it."""
        self._num_naps += 1
        if not self._connections:
            time.sleep(seconds)
            return
        (connection,) = self._connections
        connection.settimeout(seconds + LATE_SECONDS)
        try:
            while self._num_bytes < self._num_naps:
                found = connection.recv(256)
                if not found:
                    raise ConnectionAbortedError("rank 0 has closed it")
                self._num_bytes += len(found)
        except TimeoutError:
            # The exchange that follows waits for rank 0, and the watchdog for the exchange.
            pass
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []

    def _give_up(self, error: OSError) -> None:
        """Close all connections: where one rank cannot be woken any more, the naps of all have
        to be short.
        """
        log.info("the ranks cannot wake each other any more: %s", error)
        self.close()


def connect(ranks: Ranks, environment: Mapping[str, str] = os.environ) -> Wakes:
    """Connect rank 0 to all other ranks, or to none of them.

    All ranks call this. Raises GroupLostError.
    """
    addresses = addresses_of_rank_0(environment)
    if ranks.rank == 0:
        connections = _accept(ranks, addresses)
    else:
        offer = ranks.exchange(Head())[0].mail
        connections = _reach(addresses, offer[:PORT_BYTES], offer[PORT_BYTES:]) if offer else []
    wakes = Wakes(connections)
    if not ranks.least([len(connections) == (1 if ranks.rank else ranks.size - 1)])[0]:
        wakes.close()
        log.warning(
            "The ranks cannot wake each other, so each of them takes about 5 %% of a processor "
            "core without work."
        )
    return wakes


def addresses_of_rank_0(environment: Mapping[str, str]) -> list[str]:
    """The addresses that mlx reaches rank 0 at, as its launcher has put them into the
    environment; none if it has not.
    """
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        if file := environment.get("MLX_HOSTFILE"):
            return [_host(each) for each in json.loads(Path(file).read_text())[0]]
        if found := environment.get("MLX_JACCL_COORDINATOR"):
            return [_host(found)]
    return []


def _host(address: str) -> str:
    """The host of host:port."""
    return address.rpartition(":")[0].strip("[]")


def _accept(ranks: Ranks, addresses: list[str]) -> list[socket.socket]:
    """On rank 0: offer the other ranks a port in an exchange, and accept the connections that
    send the secret.
    """
    secret, found = secrets.token_bytes(SECRET_BYTES), list[socket.socket]()
    until = time.monotonic() + CONNECT_SECONDS
    try:
        listener = _listener(addresses)
    except OSError as error:
        log.info(
            "rank 0 cannot be reached by the others at %s: %s",
            ", ".join(addresses) or "a known address",
            error,
        )
        ranks.exchange(Head())
        return found
    with listener:
        ranks.exchange(Head(), listener.getsockname()[1].to_bytes(PORT_BYTES, "big") + secret)
        with suppress(OSError):
            while len(found) < ranks.size - 1:
                listener.settimeout(max(0.01, until - time.monotonic()))
                connection = listener.accept()[0]
                connection.settimeout(max(0.01, until - time.monotonic()))
                if hmac.compare_digest(connection.recv(SECRET_BYTES, socket.MSG_WAITALL), secret):
                    found.append(connection)
                else:
                    connection.close()
    for connection in found:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A rank that reads nothing may not hold up rank 0.
        connection.setblocking(False)
    return found


def _listener(addresses: list[str]) -> socket.socket:
    """A listening socket at the address, or at all of this machine's where rank 0 has several.

    Raises OSError.
    """
    if not addresses:
        raise OSError("mlx's launcher has named none")
    host = addresses[0] if len(addresses) == 1 else ""
    return socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    )


def _reach(addresses: list[str], port: bytes, secret: bytes) -> list[socket.socket]:
    """On another rank: a connection to rank 0 at the first address that can be reached; none if
    there is none.
    """
    for address in addresses:
        try:
            connection = socket.create_connection(
                (address, int.from_bytes(port, "big")), CONNECT_SECONDS / len(addresses)
            )
            connection.sendall(secret)
        except OSError as error:
            log.info("rank 0 cannot be reached at %s: %s", address, error)
        else:
            return [connection]
    return []
