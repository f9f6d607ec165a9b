"""open_prefix(): a script's prefix cache over the prompt store, in as many bits as it names."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from models import make_model, save_model

from mlx_blockpool import StoreConfig, open_prefix
from mlx_blockpool.config import KVBits

PROMPT = [i * 7 % 90 for i in range(600)]
EIGHT = KVBits()


def test_a_quantised_prefix_is_found_again_in_its_own_bits_alone(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama", head_dim=64)
    model = make_model("llama", vocab_size=98, head_dim=64)
    replies = {}
    for life, bits, hit in (("first", EIGHT, 0), ("again", EIGHT, 599), ("other", None, 0)):
        prefix = open_prefix(
            model, folder, 20_000_000, StoreConfig(tmp_path / "store", idle_seconds=0), bits=bits
        )
        found = prefix.acquire(PROMPT, 5)
        assert (prefix.arena.spec.bits, prefix.arena.capabilities.ragged, found.lookup.hit) == (
            bits,
            True,
            hit,
        )
        steps = generate_step(mx.array(found.rest), model, max_tokens=5, prompt_cache=found.caches)
        replies[life] = [token for token, _ in steps]
        prefix.release(PROMPT, found.caches)
        assert prefix.close()
    assert replies["first"] == replies["again"]


def test_a_prefix_that_nothing_would_read_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama", head_dim=64)
    with pytest.raises(ValueError, match=r"leave out attach=False, or the bits"):
        open_prefix(make_model("llama", head_dim=64), folder, 20_000_000, attach=False, bits=EIGHT)
