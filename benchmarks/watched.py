"""A stream read token by token by a process of its own, for as long as its standard input is open.

Run it with python -m benchmarks.watched PORT. For each token after a stream's first it prints when
it came (time.monotonic, in seconds) and how long after the one before. A stream that ends or breaks
is followed by another.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
from contextlib import suppress

BODY = {
    "messages": [{"role": "user", "content": "abc " * 20}],
    "max_tokens": 150,
    "stream": True,
    "temperature": 0,
}


def read(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(BODY), {"Content-Type": "application/json"}
        )
        last = 0.0
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if last:
                    print(f"{now} {now - last}", flush=True)
                last = now
    finally:
        connection.close()


def main() -> None:
    # What this process waits for a core is not the server's: go before other clients where the
    # system allows it.
    with suppress(OSError, AttributeError):
        os.nice(-10)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    while True:
        try:
            read(int(sys.argv[1]))
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)


if __name__ == "__main__":
    main()
