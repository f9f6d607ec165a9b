"""Where a model's config is found, and what its weights take: from their files, their index, or
an estimate.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from models import CONFIGS, make_model, save_model
from published import LLAMA_8B, write_config

from mlx_blockpool.demo import model_path
from mlx_blockpool.errors import BlockpoolError, SpecError
from mlx_blockpool.model_files import modelfile
from mlx_blockpool.model_files.calculator import Weights
from mlx_blockpool.model_files.modelfile import (
    INDEX,
    find,
    local_folder,
    positions_of,
    spec_of,
    weights_of,
)
from mlx_blockpool.spec import ChunkLayer, CompositeLayer, FullLayer, ModelCacheSpec

ESTIMATE = Weights(16_060_522_496, "estimate", 8_030_261_248, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path / "m", LLAMA_8B)
    return tmp_path / "m"


def save(path: Path, count: int) -> None:
    """A safetensors file with `count` float32 values."""
    mx.save_safetensors(str(path), {"a": mx.zeros((count,))}, {"format": "mlx"})


def index(folder: Path, total: Any, *files: str) -> None:
    content = {
        "metadata": {"total_size": total},
        "weight_map": {f"w{i}": name for i, name in enumerate(files)},
    }
    (folder / INDEX).write_text(json.dumps(content))


def weights(folder: Path) -> Weights:
    return weights_of(find(str(folder)))


def test_a_folder_a_file_and_the_demo_are_found(folder: Path) -> None:
    assert find(str(folder)) == modelfile.ModelFile(str(folder), folder / "config.json", LLAMA_8B)
    assert find(str(folder / "config.json")).config == LLAMA_8B
    assert find("demo").path == Path(model_path()) / "config.json"


def test_a_downloaded_model_is_found_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "models--mlx-community--Llama-3.1-8B-4bit"
    write_config(model / "snapshots/abc", LLAMA_8B)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = find("mlx-community/Llama-3.1-8B-4bit")
    assert (found.name, found.config) == ("mlx-community/Llama-3.1-8B-4bit", LLAMA_8B)
    assert weights_of(found) == ESTIMATE


def test_a_whole_path_is_a_folder_and_anything_else_an_id_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_folder(str(tmp_path / "org/name")) == tmp_path / "org/name"
    with pytest.raises((OSError, ValueError)):
        local_folder("org/name")


@pytest.mark.parametrize("name", ["someone/something", "a--b/c", f"{'long' * 100}/x"])
def test_an_id_that_was_not_downloaded_is_refused_with_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BlockpoolError) as info:
        find(name)
    assert str(info.value) == (
        f"{name} is neither a folder nor the id of a downloaded model. "
        f"To plan before the download, get its config.json: hf download {name} config.json"
    )


def test_a_path_in_a_folder_that_is_there_is_no_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(
        BlockpoolError, match=r"here/none does not exist\. Give --model the path of a model folder"
    ):
        find("here/none")


def test_files_are_counted_without_their_headers(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "llama")
    size = sum(
        array.nbytes for _, array in tree_flatten(make_model("llama", vocab_size=97).parameters())
    )
    # The folder's tokenizer has its own number of tokens.
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert weights(folder) == Weights(size + (vocabulary - 97) * 32 * 4, "files")


def test_files_that_are_all_there_are_counted(folder: Path) -> None:
    save(folder / "model-00001-of-00002.safetensors", 1000)
    save(folder / "model-00002-of-00002.safetensors", 500)
    assert weights(folder) == Weights(6000, "files")
    index(folder, 7000, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert weights(folder) == Weights(6000, "files")


def test_the_index_speaks_for_files_that_are_not_there(folder: Path) -> None:
    index(folder, 7000, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert weights(folder) == Weights(7000, "index")
    save(folder / "model-00001-of-00002.safetensors", 1000)
    assert weights(folder) == Weights(7000, "index")


def test_a_pointer_of_git_lfs_is_no_file(folder: Path) -> None:
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 16060556376\n"
    )
    assert weights(folder) == ESTIMATE


def test_files_beside_a_config_of_another_name_are_not_its_weights(folder: Path) -> None:
    save(folder / "model.safetensors", 1000)
    path = folder / "llama.json"
    path.write_text(json.dumps(LLAMA_8B))
    assert weights(path) == ESTIMATE


def test_a_link_to_nothing_is_no_file(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to(folder / "dropped")
    assert weights(folder) == ESTIMATE


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"metadata": [], "weight_map": []}',
        '{"weight_map": 7}',
        '{"metadata": null}',
        '{"metadata": {"total_size": "7"}, "weight_map": {}}',
    ],
)
def test_an_index_that_says_nothing_is_passed_over(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    assert weights(folder) == ESTIMATE


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "unheard_of"},
        {},
        {**CONFIGS["llama"], "hidden_size": 64, "quantization": {"bits": "four"}},
    ],
)
def test_weights_that_nobody_can_estimate_are_unknown(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    write_config(tmp_path, config)
    assert weights(tmp_path) == Weights(None, "unknown", None, None)


def test_the_config_is_left_as_it_is(folder: Path) -> None:
    found = find(str(folder))
    assert spec_of(found).layers
    assert weights_of(found)
    assert found.config == LLAMA_8B


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (LLAMA_8B, 131_072),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"text_config": None}, None),
        ({"max_position_embeddings": "8192"}, None),
    ],
)
def test_the_longest_context_is_what_config_says(
    tmp_path: Path, config: dict[str, Any], longest: int | None
) -> None:
    write_config(tmp_path, config)
    assert find(str(tmp_path)).longest_context == longest


def test_sizes_inside_composite_and_chunk_layers_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, LLAMA_8B)
    for layer in (CompositeLayer((FullLayer(1, -1, 1),)), ChunkLayer(1, 1, 1, 0)):
        spec = ModelCacheSpec("m", (FullLayer(1, 1, 1), layer))
        monkeypatch.setattr(modelfile, "spec_from_config", lambda *_, spec=spec: spec)
        with pytest.raises(
            SpecError,
            match=r"layer 1: sizes must be positive integers \(got (Full|Chunk|Composite)Layer\(",
        ):
            spec_of(find(str(tmp_path)))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024, "n_ctx": 512}, 1024),
        ({"max_position_embeddings": None, "max_sequence_length": 2048}, 2048),
        (
            {"max_position_embeddings": 100, "text_config": {"max_position_embeddings": 131072}},
            131072,
        ),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 32768, "rope_parameters": YARN}, 131072),
        # Llama 3.1 has been trained for more than factor times original.
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}},
            16384,
        ),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "llama3", "factor": 4.0}},
            4096,
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": {
                    "max_position_embeddings": 131072,
                    "rope_scaling": {"type": "linear", "factor": 8},
                },
            },
            131072,
        ),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": "4"}},
            4096,
        ),
        (
            {
                "max_position_embeddings": 4096,
                "rope_scaling": {"type": "linear", "factor": float("inf")},
            },
            4096,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": [4]}, 4096),
        ({"max_position_embeddings": "many", "text_config": [8192]}, None),
        ({"max_position_embeddings": True}, None),
    ],
)
def test_positions_are_read_with_their_scaling(
    config: dict[str, Any], expected: int | None
) -> None:
    assert positions_of(config) == expected
