"""The name of weights: theirs alone, wherever they lie."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from models import save_model

from mlx_blockpool.errors import StoreError
from mlx_blockpool.store.identity import identity, namespace

TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "copy")


def change_tensor(
    folder: Path, change: Callable[[np.ndarray[Any, Any]], None], tensor: str = TENSOR
) -> None:
    """In its place in the file; nothing else is another."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[tensor]
    start, end = (8 + length + offset for offset in entry["data_offsets"])
    values = np.frombuffer(data[start:end], np.float32).reshape(entry["shape"]).copy()
    change(values)
    data[start:end] = values.tobytes()
    path.write_bytes(data)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def save_adapter(folder: Path, scale: float = 1.0, rank: int = 8) -> Path:
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), {"a": mx.ones((4, 4)) * scale})
    (folder / "adapter_config.json").write_text(json.dumps({"rank": rank}))
    return folder


def test_a_copy_elsewhere_with_other_times_is_the_same(original: Path, model: Path) -> None:
    for path in model.iterdir():
        os.utime(path, (1, 1))
    assert identity(original) == identity(model)


def test_what_lies_beside_the_weights_does_not_matter(original: Path, model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    (model / "README.md").write_text("read me")
    (model / "0000100_adapters.safetensors").write_bytes(b"a training left it")
    assert identity(original) == identity(model)


@pytest.mark.parametrize(
    "key", ["_name_or_path", "architectures", "eos_token_id", "transformers_version", "use_cache"]
)
def test_keys_of_the_instance_do_not_matter(original: Path, model: Path, key: str) -> None:
    change_config(model, **{key: "another"})
    assert identity(original) == identity(model)


@pytest.mark.parametrize(
    "changes",
    [{"rope_theta": 5e5}, {"num_hidden_layers": 1}, {"quantization": {"bits": 4}}, {"new": None}],
)
def test_another_config_is_another_model(
    original: Path, model: Path, changes: dict[str, Any]
) -> None:
    change_config(model, **changes)
    assert identity(original) != identity(model)


@pytest.mark.parametrize("where", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_one_changed_byte_of_a_tensor_is_enough(original: Path, model: Path, where: float) -> None:

    def change(values: np.ndarray[Any, Any]) -> None:
        own = values.reshape(-1).view(np.uint8)
        own[int(where * (own.size - 1))] ^= 1

    change_tensor(model, change)
    assert identity(original) != identity(model)


def test_a_fused_fine_tune_of_one_matrix_is_another_model(original: Path, model: Path) -> None:
    """Of the same shape, name and size: rank 1 and a thousandth of the weights."""
    rng = np.random.default_rng(1)

    def change(values: np.ndarray[Any, Any]) -> None:
        rows, columns = values.shape
        values += 1e-3 * np.outer(rng.normal(size=rows), rng.normal(size=columns)).astype(
            np.float32
        )

    change_tensor(model, change)
    assert (model / "model.safetensors").stat().st_size == (
        original / "model.safetensors"
    ).stat().st_size
    assert identity(original) != identity(model)


def test_tensors_that_change_places_are_another_model(original: Path, model: Path) -> None:
    found: dict[str, Any] = {}
    names = [TENSOR, TENSOR.replace("layers.1", "layers.0")]
    for name in names:
        change_tensor(model, lambda values, name=name: found.update({name: values.copy()}), name)  # type: ignore[misc]
    assert identity(original) == identity(model)
    for name, other in zip(names, names[::-1], strict=True):
        change_tensor(model, lambda values, other=other: np.copyto(values, found[other]), name)  # type: ignore[misc]
    assert identity(original) != identity(model)


def test_an_adapter_matters(original: Path, tmp_path: Path) -> None:
    first = save_adapter(tmp_path / "first")
    found = [
        identity(original),
        identity(original, first),
        identity(original, save_adapter(tmp_path / "other", 2.0)),
        identity(original, save_adapter(tmp_path / "rank", rank=4)),
    ]
    assert len(set(found)) == 4
    assert identity(original, shutil.copytree(first, tmp_path / "same")) == found[1]


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 0.5, -1])
def test_weights_that_are_cut_off_are_no_weights(model: Path, kept: float) -> None:
    path = model / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(StoreError, match=r"model\.safetensors|safetensors files"):
        identity(model)


def test_a_shard_that_is_missing_is_another_model(original: Path, model: Path) -> None:
    shutil.copy(model / "model.safetensors", model / "model-2.safetensors")
    assert identity(model) != identity(original)
    (model / "model-2.safetensors").unlink()
    (model / "model.safetensors").unlink()
    with pytest.raises(StoreError, match=r"has no model\*\.safetensors"):
        identity(model)


def test_an_adapter_without_weights_is_an_error(original: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match=r"has no adapters\.safetensors"):
        identity(original, tmp_path / "empty")


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '"text"'])
def test_a_config_that_is_none_is_an_error(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(StoreError, match=r"config\.json"):
        identity(model)


@pytest.mark.parametrize(
    "header", [b"[]", b"{", b'{"a": {}}', b'{"a": {"data_offsets": 3}}', b"\xff\xff", b"null"]
)
def test_a_header_that_is_none_is_an_error(model: Path, header: bytes) -> None:
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(StoreError, match="safetensors"):
        identity(model)


def test_a_namespace_is_of_all_its_parts() -> None:
    assert namespace("w", "a", "b") != namespace("w", "b", "a") != namespace("v", "b", "a")
    assert namespace("w", "a") != namespace("w")
    assert namespace("w", "a") == namespace("w", "a")
