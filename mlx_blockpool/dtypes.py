"""The names of element types in mlx, safetensors files and numpy. Imports none of the three."""

from __future__ import annotations

from typing import Any

# mlx's name -> the name in safetensors files.
SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
_MLX = {name: mlx for mlx, name in SAFETENSORS.items()}


def bytes_of(dtype: str) -> int:
    """Bytes of one element, by any of the names."""
    return int("".join(filter(str.isdigit, dtype)) or 8) // 8


# By the names in safetensors files.
ITEM_BYTES = {name: bytes_of(name) for name in SAFETENSORS.values()}


def safetensors_name(dtype: Any) -> str:
    """The name of an mx.Dtype in safetensors files. Raises KeyError for a type that they do not have (complex64)."""
    return SAFETENSORS[str(dtype).rpartition(".")[2]]


def numpy_name(safetensors: str) -> str:
    """The numpy type for such elements; uint16 for the bits of BF16. Raises KeyError for other names."""
    return "uint16" if safetensors == "BF16" else _MLX[safetensors]
