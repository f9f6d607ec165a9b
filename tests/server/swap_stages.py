"""Run as a program: swaps one model for another, and prints how many bytes of arrays there were at
each stage of it.

A process of its own: what mlx counts is counted for all that a process has ever made.
"""

from __future__ import annotations

import json
import os
import sys

import mlx.core as mx

from mlx_blockpool.server.models.registry import ModelSwap
from server.serving import blockpool_server


def main(old: str, new: str) -> None:
    active: dict[str, int] = {}
    enter = ModelSwap._enter

    def entering(self: ModelSwap, stage: str) -> None:
        active.setdefault(stage, mx.get_active_memory())
        enter(self, stage)

    body = {"messages": [{"role": "user", "content": "word " * 100}], "max_tokens": 4}
    with blockpool_server(old, "--allow-models", str(new), "--pool-bytes", "60MB") as ours:
        assert ours.send("/v1/chat/completions", body)[0] == 200
        ours.settle()
        before, own = mx.get_active_memory(), ours.send("/admin/models")[1]["models"][0]
        ModelSwap._enter = entering  # type: ignore[method-assign]
        assert ours.send("/v1/chat/completions", {**body, "model": new})[0] == 200
        weights = ours.send("/admin/models")[1]["models"][0]["weights_bytes"]
    print(
        json.dumps(
            {
                "before": before,
                "old": own["weights_bytes"] + own["array_bytes"],
                "new": weights,
                **active,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
    # As the server leaves: mlx does not survive the interpreter's end once threads have used it.
    os._exit(0)
