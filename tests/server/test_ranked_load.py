"""Models load on all ranks or on none. Threads as ranks, of which each has a whole model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures.configs import CONFIGS
from models import character_tokenizer, save_model, write_model
from ranks.threads import ThreadRanks, joined, on_ranks

from mlx_blockpool.errors import BlockpoolError, GroupLostError, LoadError
from mlx_blockpool.ranks.watchdog import TurnWatchdog
from mlx_blockpool.server import app, options
from mlx_blockpool.server import model as model_module
from mlx_blockpool.server.model import LoadedModel
from mlx_blockpool.server.models.registry import ModelRegistry
from mlx_blockpool.server.provider import BlockpoolModelProvider
from mlx_blockpool.server.ranked.ending import Loss
from mlx_blockpool.server.ranked.replica import Replica
from mlx_blockpool.testing import tiny_model
from server.ranked import Follower
from server.serving import parse


def load(ranks: ThreadRanks, folder: Path, n_bytes: int = 4_000_000) -> int:
    """The bytes of the pool of a model that is loaded."""
    args = parse(["--model", str(folder), "--no-store", "--pool-bytes", str(n_bytes + ranks.rank)])
    config = options.server_config(args)
    registry = ModelRegistry(BlockpoolModelProvider(args, ranks), config)
    replica = Replica(ranks, registry, config, TurnWatchdog(1e9, lambda error: None))
    assert registry.catalog.default is not None
    model = registry.make(registry.catalog.default)
    try:
        if not ranks.rank:
            model.prepare(None)
        replica.load(model)
        assert model.prefix is not None
        return model.prefix.pool.pool_bytes
    finally:
        model.close()


def test_ranks_measure_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[LoadedModel] = []
    monkeypatch.setattr(
        model_module, "measured", lambda model, caches, *_: measured.append(model) or caches
    )
    folder = save_model(tmp_path / "model", "llama")
    assert on_ranks(2, lambda ranks: load(ranks, folder)) == [4_000_000] * 2
    assert measured == []


def test_a_model_that_one_rank_cannot_load_is_loaded_by_none(tmp_path: Path) -> None:
    folders = [save_model(tmp_path / "whole", "llama"), tmp_path / "damaged"]
    shutil.copytree(*folders)
    (folders[1] / "model.safetensors").unlink()

    def fail(ranks: ThreadRanks) -> str:
        with pytest.raises(LoadError) as error:
            load(ranks, folders[ranks.rank])
        # They are still in step.
        assert load(ranks, folders[0]) == 4_000_000
        return str(error.value)

    first, second = on_ranks(2, fail)
    assert first == "another rank could not load it; its log says why"
    assert second.startswith("FileNotFoundError: No safetensors found")


@pytest.mark.parametrize(
    "difference", [{"rms_norm_eps": 1e-6}, {"seed": 2}], ids=["config", "weights"]
)
def test_ranks_with_different_files_load_nothing(
    difference: dict[str, Any], tmp_path: Path
) -> None:
    folders = [
        save_model(tmp_path / "one", "llama"),
        save_model(tmp_path / "two", "llama", **difference),
    ]

    def fail(ranks: ThreadRanks) -> str:
        with pytest.raises(LoadError) as error:
            load(ranks, folders[ranks.rank])
        return str(error.value)

    assert (
        on_ranks(2, fail)
        == ["the ranks have different files of it: copy the model's folder to all machines"] * 2
    )


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("llama", "pipeline", r"does not support pipelining .* leave out --pipeline"),
        ("phi", "tensor", r"does not support .* or add or leave out --pipeline"),
    ],
)
def test_a_model_that_cannot_be_shared_that_way_says_so(
    name: str, kind: str, says: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / name, name)
    provider = BlockpoolModelProvider(parse(["--model", str(folder)]))
    provider.is_distributed, provider.pipeline_group = True, None
    setattr(provider, f"{kind}_group", mx.distributed.init())
    key = provider.default_key()
    assert key is not None
    with pytest.raises(LoadError, match=says):
        provider.load_share(key)


class Group:
    """As many ranks, of which this is the first."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("name", "kind", "size", "says"),
    [
        ("qwen2", "pipeline", 2, r"model.safetensors.index.json.* leave out --pipeline.$"),
        # The sizes of its matrices cannot be divided, and those of 2 heads can without its heads.
        ("llama", "tensor", 3, r"Start a number of ranks that divides its heads"),
        (
            "llama",
            "tensor",
            4,
            r"cannot be divided by 4 ranks. Start a number of ranks that divides its heads",
        ),
    ],
)
def test_what_a_model_lacks_to_be_shared_is_said_with_a_remedy(
    name: str, kind: str, size: int, says: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / name, name)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    provider = BlockpoolModelProvider(parse(["--model", str(folder)]))
    provider.is_distributed, provider.pipeline_group = True, None
    setattr(provider, f"{kind}_group", Group(size))
    key = provider.default_key()
    assert key is not None
    with pytest.raises(LoadError, match=says):
        provider.load_share(key)


def test_a_pool_that_is_too_small_is_refused_by_all_ranks(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama")

    def fail(ranks: ThreadRanks) -> str:
        with pytest.raises(LoadError) as error:
            load(ranks, folder, 1000)
        assert load(ranks, folder) == 4_000_000
        return str(error.value)

    first, second = on_ranks(2, fail)
    assert first == second
    assert "Raise --pool-bytes" in first


def test_an_error_of_one_rank_in_the_midst_of_a_load_ends_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "model", "llama")
    opened = LoadedModel.open

    def open_model(model: LoadedModel, pool_bytes: int) -> None:
        if model.ranks.rank == 1:
            raise OSError("no space left")
        opened(model, pool_bytes)

    monkeypatch.setattr(LoadedModel, "open", open_model)

    def fail(ranks: ThreadRanks) -> str:
        with pytest.raises(GroupLostError) as error:
            load(ranks, folder)
        ranks.leave()
        return str(error.value)

    assert on_ranks(2, fail)[1].startswith("Rank 1 was lost (OSError: no space left).")


def test_a_model_with_caches_of_its_own_classes_is_refused_by_all_ranks(tmp_path: Path) -> None:
    config = {**CONFIGS["deepseek_v41"], "vocab_size": character_tokenizer().get_vocab_size()}
    folder = write_model(tmp_path / "model", tiny_model(config), config)

    def fail(ranks: ThreadRanks) -> str:
        with pytest.raises(LoadError) as error:
            load(ranks, folder)
        return str(error.value)

    first, second = on_ranks(2, fail)
    assert first == second
    assert first.startswith(
        "Several ranks serve a model only from a pool; mlx_lm.server serves others. "
    )


def test_a_rank_0_that_fails_in_the_midst_of_the_first_load_meets_no_rank_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, lost = LoadedModel.open, list[BaseException]()

    def open_model(model: LoadedModel, pool_bytes: int) -> None:
        if model.ranks.rank == 0:
            raise OSError("no space left")
        opened(model, pool_bytes)

    monkeypatch.setattr(LoadedModel, "open", open_model)
    monkeypatch.setattr(Loss, "end", lambda loss, error: lost.append(error))
    args, ranks = (
        parse(["--model", str(save_model(tmp_path / "model", "llama")), "--no-store"]),
        joined(2),
    )
    follower = Follower(args, ranks[1])
    follower.start()
    generator = app.make_generator(BlockpoolModelProvider(args, ranks[0]))
    with pytest.raises(BlockpoolError, match="no space left"):
        generator.wait_until_loaded()
    follower.join()
    assert str(lost[0]).startswith("Rank 0 was lost (OSError: no space left).")
    assert isinstance(follower.error, GroupLostError)
