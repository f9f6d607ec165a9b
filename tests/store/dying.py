"""A child process that commits the new record and dies at the k-th call of the disk: dying.py folder k exit|kill."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from mlx_blockpool.store.fs import write_whole

sys.path.insert(0, str(Path(__file__).parent.parent))
from store.disks import CountedDisk
from store.records import NEW, NEW_FILE


class DyingDisk(CountedDisk):
    def __init__(self, k: int, how: str) -> None:
        super().__init__()
        self.k = k
        self.how = how

    def at(self, call: str) -> None:
        if len(self.calls) == self.k:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(77)
        super().at(call)


if __name__ == "__main__":
    disk = DyingDisk(int(sys.argv[2]), sys.argv[3])
    write_whole(disk, Path(sys.argv[1]) / NEW.file_name, [NEW_FILE])
    assert "mlx" not in sys.modules
    print(*disk.calls)
