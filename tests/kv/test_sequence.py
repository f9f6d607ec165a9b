"""What a sequence gives back from whatever thread ends it."""

from __future__ import annotations

import threading

from prefix.lives import SPECS

from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.sequence import SequenceBlocks


def test_states_of_sequences_that_other_threads_let_go_no_longer_count() -> None:
    slabs = KVArena(SPECS["hybrid"], 4_000_000)
    sequence = SequenceBlocks(slabs)
    sequence.state_bytes = 1000
    kept = sequence.fork()
    assert slabs.running_bytes == 2000
    held = [sequence]
    del sequence
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert slabs.running_bytes == 1000
    kept.release()
    del kept
    assert slabs.running_bytes == 0
