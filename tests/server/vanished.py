"""Two connections whose network goes away, one idle and one with data under way: python -m
server.vanished SECONDS.

Run in a network namespace of its own. Prints how each ended; one that lasts four times as long is
open.
"""

from __future__ import annotations

import errno
import fcntl
import select
import socket
import struct
import sys

from mlx_blockpool.server.wire import drop_vanished


def set_loopback(is_up: bool) -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x41 if is_up else 0))


def main(seconds: float) -> None:
    set_loopback(True)
    listener = socket.create_server(("127.0.0.1", 0))
    clients = [socket.create_connection(listener.getsockname()) for _ in range(2)]
    served = [listener.accept()[0] for _ in clients]
    for connection in served:
        drop_vanished(connection, seconds)
    set_loopback(False)
    served[0].send(b"an event")
    for connection in served:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        poll.poll(int(seconds * 4000))
        print(
            errno.errorcode.get(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), "open")
        )


if __name__ == "__main__":
    main(float(sys.argv[1]))
