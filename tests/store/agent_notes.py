"""A child that notes one agent many times: agent_notes.py folder first count."""

from __future__ import annotations

import sys
from pathlib import Path

from mlx_blockpool.store import agent_files as agents_module
from mlx_blockpool.store.agent_files import Agents

if __name__ == "__main__":
    # Who makes no pause may keep others waiting.
    agents_module.LOCK_SECONDS = 60
    agents = Agents(Path(sys.argv[1]))
    first, count = int(sys.argv[2]), int(sys.argv[3])
    for turn in range(count):
        agents.note("shared", "model", "tiny", [bytes([first]) * 32] * (1 + turn % 3), 256 * (1 + turn % 3))
