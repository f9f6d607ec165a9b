"""The files of one model: BlockpoolModelProvider reads them into memory, and WeightsHash names
their content.

mlx-lm's ModelProvider loads in one step; ours in two, so that the old model is unloaded only for
one that can be loaded. Owned by the generation thread; the thread of a WeightsHash only reads
files.
"""

from __future__ import annotations

import logging
import threading
import types
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config

from ..demo import NAME, model_path
from ..errors import LoadError, StoreError
from ..kv.prediction_head import drop_head
from ..mlx_lm_compat import ModelProvider, rebind, sharded_load
from ..model_files.loading import load, load_model
from ..model_files.modelfile import local_folder
from ..ranks.group import Ranks, ranks_of
from ..store.identity import Digests, Stamps, check_unchanged, identity, stamps_of

log = logging.getLogger(__name__)

# The names under which attentions in mlx-lm's models have their number of heads.
HEADS = (
    "n_heads",
    "n_kv_heads",
    "num_heads",
    "num_kv_heads",
    "num_attention_heads",
    "num_key_value_heads",
)


class ModelKey(NamedTuple):
    """The parts that are loaded together: folder or id of the model, folder of its adapter,
    folder or id of its draft model.
    """

    model: str
    adapter: str | None = None
    draft: str | None = None


class BlockpoolModelProvider(ModelProvider):  # type: ignore[misc]
    """mlx-lm's provider for one model; the bundled one is named `demo`.

    `ranks`: those that share the model; by default all that were launched together. `stamps`: of
    the files of the weights, taken before mlx-lm opened them.
    """

    def __init__(self, cli_args: Any, ranks: Ranks | None = None) -> None:
        super().__init__(cli_args)
        self.ranks = ranks or ranks_of(
            mx.distributed.init(), "tensor" if self.pipeline_group is None else "pipeline"
        )
        self.config: dict[str, Any] = {}
        self.folder = Path()
        self.stamps: Stamps = {}
        self._model_map[NAME] = model_path()

    @property
    def name(self) -> str:
        """The model's name, for people."""
        return Path(str(self.model_key[0])).name

    @property
    def adapter_folder(self) -> Path | None:
        # A group hashes the weights before mlx-lm has set their key.
        adapter = None if self.model_key is None else self.model_key[1]
        return Path(adapter) if adapter else None

    def default_key(self) -> ModelKey | None:
        """The model that the server was started with, if any."""
        model, adapter, draft = (
            self._model_map["default_model"],
            self.cli_args.adapter_path,
            self.cli_args.draft_model,
        )
        if model is None:
            return None
        return ModelKey(
            canonical(self._model_map.get(model, model)),
            adapter and canonical(adapter),
            draft and canonical(draft),
        )

    def read_config(self, key: ModelKey) -> None:
        """Read the model's config, and note the state of its files. Raises what the files raise."""
        self.folder = local_folder(key.model)
        self.stamps = stamps_of(self.folder, Path(key.adapter) if key.adapter else None)
        self.config = load_config(self.folder)

    def prepare(self, key: ModelKey) -> None:
        """Load config, tokenizer, and the model with all arrays checked and not yet read.

        Raises what mlx-lm and files raise.
        """
        self.read_config(key)
        rebind(ModelProvider._load, load=_load_lazily)(self, *key)

    def load_share(self, key: ModelKey) -> None:
        """Load the tokenizer, and of the model what this rank holds. Raises whatever mlx-lm and the
        model's files raise.

        Nothing is sent to other ranks: one that fails leaves none of them waiting.
        """
        rebind(ModelProvider._load, load=_load_lazily, sharded_load=_load_share)(self, *key)
        mx.eval(self.model.parameters())

    def weights(self) -> list[mx.array]:
        models = [model for model in (self.model, self.draft_model) if model is not None]
        return [array for model in models for _, array in tree_flatten(model.parameters())]

    def read(self, piece_bytes: int) -> Iterator[int]:
        """Read the weights of a prepared model, about `piece_bytes` at a time.

        Yields the bytes read so far.
        """
        done = evaluated = 0
        piece: list[mx.array] = []
        for array in self.weights():
            piece.append(array)
            done += array.nbytes
            if done - evaluated >= piece_bytes:
                mx.eval(piece)
                piece.clear()
                evaluated = done
                yield done
        mx.eval(piece)
        yield done


class WeightsHash:
    """Hashes all weights in a model folder and an adapter folder, in the background, while the
    model is loaded.

    `stamps`: of their files, taken before mlx-lm opened them.
    """

    def __init__(self, model: Path, adapter: Path | None, stamps: Stamps, digests: Digests) -> None:
        self._folders = (model, adapter)
        self._stamps = stamps
        self._digests = digests
        self._name: futures.Future[str] = futures.Future()
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._name.done()

    @property
    def read_bytes(self) -> int:
        """Bytes hashed so far; 0 if all digests were remembered."""
        return self._digests.read_bytes

    def wait(self, seconds: float) -> None:
        """Return when the hash is done, or after this many seconds."""
        futures.wait([self._name], seconds)

    def stop(self) -> None:
        """Have the thread end soon, without waiting for it: its disk may hang."""
        self._digests.stop()

    def result(self) -> str:
        """The hash, which is done.

        Raises StoreError if it failed or the files have changed since they were loaded.
        """
        name = self._name.result(0)
        check_unchanged(*self._folders, self._stamps)
        return name

    def _run(self) -> None:
        try:
            self._name.set_result(identity(*self._folders, self._digests))
        except StoreError as error:
            self._name.set_exception(error)
        except Exception as error:
            # The top of the thread: the model is loaded without a store.
            log.exception("the weights were not hashed")
            self._name.set_exception(
                StoreError(f"Cannot hash the weights: {type(error).__name__}: {error}")
            )


def _load_lazily(name: str, **options: Any) -> Any:
    # mlx-lm loads drafts without options; code in their folders is not to be run either.
    options.setdefault("tokenizer_config", {"trust_remote_code": False})
    return load(str(local_folder(name)), lazy=True, **options)


def _load_share(name: str, **options: Any) -> Any:
    # The ranks wait for each other where they agree on the load, which also those reach whose load
    # has failed.
    unsynchronised = types.SimpleNamespace(init=mx.distributed.init, all_sum=lambda x, stream: x)
    known = types.SimpleNamespace(
        eval=mx.eval, array=mx.array, cpu=mx.cpu, distributed=unsynchronised
    )
    group = options["tensor_group"]
    whole: list[dict[tuple[str, str], int]] = []

    def load_whole(*args: Any, **more: Any) -> Any:
        model, config = load_model(*args, **more)
        # Ranks draft nothing, and share no head.
        drop_head(model)
        whole.append(_heads_of(model))
        return model, config

    advice = (
        "Start a number of ranks that divides its heads, or one rank, or add or leave out "
        "--pipeline."
    )
    try:
        loaded = rebind(sharded_load, mx=known, load_model=load_whole)(
            str(local_folder(name)), **options
        )
    except (FileNotFoundError, ValueError) as error:
        raise LoadError(f"mlx-lm cannot share this model: {error}. {advice}") from error
    if group is not None and any(
        each * group.size() < whole[0][where] for where, each in _heads_of(loaded[0]).items()
    ):
        raise LoadError(
            f"The heads of this model cannot be divided by {group.size()} ranks. {advice}"
        )
    return loaded


def _heads_of(model: Any) -> dict[tuple[str, str], int]:
    """How many heads the attentions of a model have."""
    found = (
        (path, name, getattr(each, name, None))
        for path, each in model.named_modules()
        for name in HEADS
    )
    return {(path, name): count for path, name, count in found if isinstance(count, int)}


def canonical(name: str) -> str:
    """The resolved path of a folder; a hub id unchanged."""
    path = Path(name)
    return str(path.resolve()) if path.exists() else name
