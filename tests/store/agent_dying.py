"""A child that changes agents and dies at the k-th call of the disk: agent_dying.py folder k action name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from store.dying import DyingDisk

from mlx_blockpool.store.agent_files import Agents

OLD_HASHES = [bytes([n]) * 32 for n in range(1, 4)]
NEW_HASHES = [bytes([n]) * 32 for n in range(5, 9)]


def act(agents: Agents, action: str) -> None:
    if action == "note":
        agents.note("Old", "model", "tiny", NEW_HASHES, 1000)
    elif action == "pin":
        agents.pin("Old")
    else:
        getattr(agents, action)("Old", "New")


if __name__ == "__main__":
    disk = DyingDisk(int(sys.argv[2]), "exit")
    act(Agents(Path(sys.argv[1]), disk), sys.argv[3])
    assert "mlx" not in sys.modules
    print(*disk.calls)
