"""What is on the disks of users stays readable: folders and files of models are those of before."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from models import make_model
from prefix.computed import text
from prefix.lives import Life
from tier.lives import record_files

from mlx_blockpool.config import KVBits
from mlx_blockpool.kv.build import describe

# One kv head of 64, as tests/prefix/computed.py fills it and as 8 and 4 bits divide it.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128},
    "gemma3_text": {"head_dim": 64},
    "lfm2": {"hidden_size": 128, "block_dim": 128},
}
KV = [None, KVBits(8, 8, 32), KVBits(8, 4, 32)]
# Made before layers could have other arrays than keys and values: the fingerprint, and a digest of
# all records of a conversation, for each of KV.
MADE = {
    "llama": [
        ("2ca118728fbf3c34f875a53d05b1ff79", "1f8dd7532bc98bd591de5c5adce329be"),
        ("e33cff459c6a6b33bbba2fdfd8cf427f", "fbfdf855875943b8eb085591d8ddf752"),
        ("ce1e96fa39ed9d89df136f578e666c60", "a6d7ad6d9b420835f5423d01846d259b"),
    ],
    "gemma3_text": [
        ("a113b6320b19f0019b9965f64ee5ad54", "c3eb0eabfdebbf8041d5285e0b6dfae6"),
        ("5f8752cfe4e6e3a252a56eb136d5d85d", "8ff46ac468a3ce5870f6c101934effff"),
        ("705d8e9b46d82e99ab30d00f7fa79c4c", "19deb7e80b569801df4b700f0f3ca613"),
    ],
    "lfm2": [
        ("fcd8f291b00dc4c82db9f904740c338c", "7436e1ad15de27799b547b98fa72d6ee"),
        ("47fb02212b260f47fcd4b9911174d8d1", "9b06c9663b3572e0b47193500e4b97cf"),
        ("5527aa1856af42fe2fb1032a812df98b", "22fca8b32e8003af99998a220c873d7e"),
    ],
}


@pytest.mark.parametrize("name", SHAPES)
def test_fingerprints_and_records_of_models_are_byte_for_byte_what_they_were(
    tmp_path: Path, name: str
) -> None:
    own = describe(make_model(name, num_key_value_heads=1, **SHAPES[name]))
    found = []
    for bits in KV:
        spec, folder = own.with_bits(bits), tmp_path / str(len(found))
        # Devices quantise in other last digits.
        with mx.stream(mx.cpu):
            life = Life(spec, folder, pool_bytes=20_000_000)
            life.answer(text(1, 700), [300])
            assert life.prefix.close()
        digest = hashlib.blake2b(digest_size=16)
        for file in record_files(folder):
            digest.update(file.name.encode() + file.read_bytes())
        found.append((spec.fingerprint(), digest.hexdigest()))
    assert found == MADE[name]
