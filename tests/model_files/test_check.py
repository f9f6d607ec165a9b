"""A model's folder is checked before anything is made of it: only bounded regular files, and no
more layers than tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import CONFIGS, save_model

from mlx_blockpool.cli import main
from mlx_blockpool.errors import BadModelError, BlockpoolError
from mlx_blockpool.model_files import modelfile
from mlx_blockpool.model_files.check import (
    check_config,
    check_folder,
    check_layers,
    count_tensors,
    read_bounded,
    read_json,
)

LLAMA = CONFIGS["llama"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "m", "llama")


# -- files -----------------------------------------------------------------------------------------


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 36)


@pytest.mark.parametrize("spoil", [pipe, endless, sparse])
def test_only_bounded_regular_files_are_read(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder / "config.json")
    with pytest.raises(ValueError, match=r"not a regular file|at most 1000 are read"):
        read_bounded(folder / "config.json", 1000)
    with pytest.raises(BlockpoolError, match=r"config\.json"):
        modelfile.find(str(folder / "config.json") if spoil is sparse else str(folder)).config  # noqa: B018


def test_a_linked_file_is_read(folder: Path, tmp_path: Path) -> None:
    """The hub's cache has nothing else."""
    (tmp_path / "link").symlink_to(folder / "config.json")
    assert read_json(tmp_path / "link", 10_000)["model_type"] == "llama"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 50_000, "{", "9" * 5000])
def test_what_is_no_json_is_a_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match=r"JSON|nested|delimiter|Expecting|Exceeds"):
        read_json(tmp_path / "x", 1 << 20)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "model-2.safetensors",
        "chat_template.jinja",
    ],
)
@pytest.mark.parametrize("spoil", [pipe, endless])
def test_a_folder_with_what_is_no_file_is_refused(
    folder: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    check_folder(folder)
    spoil(folder / name)
    with pytest.raises(BadModelError, match="regular file"):
        check_folder(folder)


def test_a_huge_tokenizer_is_refused(folder: Path) -> None:
    sparse(folder / "tokenizer.json")
    with pytest.raises(BadModelError, match=r"tokenizer\.json"):
        check_folder(folder)


# -- layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [b"[]", b"{", b"[" * 90_000])
def test_files_that_are_not_weights_are_refused(folder: Path, header: bytes) -> None:
    assert count_tensors(folder) == 20
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BadModelError, match=r" as a safetensors file"):
        count_tensors(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**6},
        {"text_config": {"num_hidden_layers": 10**6}},
        {"vision_config": [{"n_layers": int("9" * 4000)}]},
    ],
)
def test_more_layers_than_tensors_are_refused(folder: Path, config: dict[str, Any]) -> None:
    assert check_config(folder, "m")["num_hidden_layers"] == 2
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    with pytest.raises(BadModelError, match="but its weights have 20 tensors"):
        check_config(folder, "m")
    with pytest.raises(BadModelError, match="at most 10000 are possible"):
        check_layers(config, "m")


def test_weights_without_tensors_have_no_layers(folder: Path) -> None:
    header = b"{}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BadModelError, match="its weights have 0 tensors"):
        check_config(folder, "m")
    (folder / "model.safetensors").unlink()
    assert check_config(folder, "m")["model_type"] == "llama"


@pytest.mark.parametrize("name", CONFIGS)
def test_no_small_model_is_refused(name: str, tmp_path: Path) -> None:
    check_config(save_model(tmp_path / name, name), name)


# -- commands --------------------------------------------------------------------------------------


def export_from(folder: Path, tmp_path: Path) -> list[str]:
    """The command that exports two tokens of this model from an empty store."""
    (tmp_path / "store").mkdir(exist_ok=True)
    options = ["--model", str(folder), "--tokens", "1,2", "--store-dir", str(tmp_path / "store")]
    return ["store", "export", *options, "out.safetensors"]


def test_plan_and_export_refuse_too_many_layers(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 10**6}))
    assert main(["plan", "--model", str(folder)]) == 2
    assert "num_hidden_layers 1000000" in capsys.readouterr().err
    assert main(export_from(folder, tmp_path)) == 2
    assert "num_hidden_layers 1000000" in capsys.readouterr().err


def test_code_in_a_folder_is_not_run_by_a_command(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    about = json.loads((folder / "tokenizer_config.json").read_text())
    auto = {"AutoConfig": "own.Config", "AutoTokenizer": ["own.Tokenizer", None]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**about, "tokenizer_class": "Own", "auto_map": auto})
    )
    for changes in ({"auto_map": auto}, {"model_file": "own.py"}):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        assert main(export_from(folder, tmp_path)) == 2
        assert main(["plan", "--model", str(folder)]) in (0, 2)
    assert not ran.exists()
