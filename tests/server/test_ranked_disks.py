"""A server of two ranks, each with a folder of records: what one of them cannot read, all
compute, and write again.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from models import save_model
from store.damages import DAMAGES

from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.reader import inspect
from mlx_blockpool.store.record import Record
from server.ranked import ranked_server
from server.serving import cached_tokens, text_of

PROMPT = "All agents begin with this text, which is some blocks long. " * 20


def folder_of(store: Path, rank: int) -> Path:
    """Where a rank has its records."""
    found = {
        json.loads(path.read_text())["ranks"]: path.parent
        for path in store.glob("models/*/model.json")
    }
    return found[f"tensor {rank} of 2"]


def records(folder: Path) -> dict[int, Path]:
    """The records of blocks by their first token."""
    found = {
        path: inspect(Disk(), path, folder.name) for path in folder.glob("blocks/*/*.safetensors")
    }
    return {record.start: path for path, record in found.items() if isinstance(record, Record)}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("blocks/*/*.safetensors")}


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["flip", "delete"])
def test_a_record_that_one_rank_cannot_read_is_computed_and_written_again_by_all(
    how: str, rank: int, tmp_path: Path
) -> None:
    model, store = save_model(tmp_path / "model", "llama"), tmp_path / "store"
    replies: list[Any] = []

    def serve() -> int:
        """The cached tokens of the prompt in a server of its own."""
        with ranked_server(model, "--pool-bytes", "20MB", "--store-dir", str(store)) as group:
            answer = group.client.chat([{"role": "user", "content": PROMPT}], max_tokens=12)
            group.settle()
        replies.append(text_of(answer))
        return cached_tokens(answer["usage"])

    assert serve() == 0
    own, other = folder_of(store, rank), folder_of(store, 1 - rank)
    written = names(own)
    assert len(written) > 3
    assert written == names(other)
    DAMAGES[how](records(own)[256], random.Random(1))
    assert serve() == 256
    assert names(own) == names(other) == written
    assert serve() > 512
    assert replies == replies[:1] * 3
