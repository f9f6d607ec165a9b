"""Lives over a store on one folder, and what they bring back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefix import computed
from prefix.computed import family
from prefix.lives import Life

from mlx_blockpool.prefix.cache import lay_out
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, WindowLayer
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.tier.restore import RestorePlan

# A block is 8192 bytes.
SPEC = ModelCacheSpec("m", (FullLayer(1, 2, 2), FullLayer(1, 2, 2)), "float32")
WINDOWED = ModelCacheSpec("m", (WindowLayer(1, 2, 2, 300), FullLayer(1, 2, 2)), "float32")
BLOCK = 256
# Bytes of a file, at most.
FILE = 10_500
ONE, TWO, THREE = (list(family(n, 5 * BLOCK + 30)) for n in (1, 2, 3))


def start(
    folder: Path,
    disk: Disk | None = None,
    pool: int = 100 * 8192,
    spec: ModelCacheSpec = SPEC,
    **config: Any,
) -> Life:
    return Life(spec, folder, disk, pool, **config)


def record_files(folder: Path) -> list[Path]:
    """Records of every kind."""
    return sorted(folder.glob("models/*/*/*/*.safetensors"))


def wanted(life: Life, tokens: Sequence[int]) -> RestorePlan:
    """What a prompt that begins with these tokens would bring back."""
    found = life.prefix.stored.restores.plan(life.prefix.match([*tokens, 1]), len(tokens))
    assert found is not None
    return found


def compute(life: Life, tokens: list[int]) -> None:
    """From the first token on, as somebody does who could not wait."""
    caches = lay_out(
        life.prefix.admission,
        life.prefix.index.trie.match([]),
        0,
        None,
        len(tokens),
        len(tokens) + 20,
    )
    computed.compute(caches, tokens, 0)
    life.prefix.release(tokens, caches)
