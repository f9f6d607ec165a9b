"""What mlx, safetensors files and numpy call the types of elements: as the three themselves say."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_blockpool.spec import ITEM_BYTES, SAFETENSORS, bytes_of, numpy_name, safetensors_name

DTYPES = {
    "bool": mx.bool_,
    **{name: getattr(mx, name) for name in SAFETENSORS if name not in ("bool", "float64")},
}


@pytest.mark.parametrize("name", DTYPES)
def test_a_type_is_called_as_mlx_writes_it(name: str, tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "a.safetensors"), {"a": mx.zeros((3,), DTYPES[name])})
    found = safetensors_name(DTYPES[name])
    assert f'"dtype":"{found}"'.encode() in (tmp_path / "a.safetensors").read_bytes()
    assert (
        bytes_of(name)
        == ITEM_BYTES[found]
        == DTYPES[name].size
        == np.dtype(numpy_name(found)).itemsize
    )


def test_the_bits_of_bfloat16_are_held_as_uint16() -> None:
    assert numpy_name("BF16") == "uint16"


def test_a_type_that_safetensors_does_not_have_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        safetensors_name(mx.complex64)
    with pytest.raises(KeyError):
        numpy_name("F8_E4M3")
