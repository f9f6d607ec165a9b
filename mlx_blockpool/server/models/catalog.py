"""The models that requests may name, and their ids: the default, the allowed and the downloaded
ones.

The id of a folder is its name, so that no response shows its path. Reads the disk, never the
network. Runs on any thread.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

from ...config import ModelsConfig
from ...demo import NAME, model_path
from ...errors import BlockpoolError, ModelNotFoundError
from ...formatting import nearest
from ...model_files.modelfile import downloaded, local_folder
from ..access import without_folders
from ..provider import BlockpoolModelProvider, ModelKey, canonical

log = logging.getLogger(__name__)

DEFAULT = "default_model"
# The bundled models by their folders.
BUNDLED = {canonical(model_path()): NAME}
# An id of the hub. Some old ones have no owner before a slash.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?")
# A folder with one of these files is a model's or an adapter's.
FOLDER_FILES = ("config.json", "adapter_config.json")
# A folder of models holds them directly or one folder deeper, as in owner/model.
FOLDER_DEPTH = 2
# A folder is scanned again after this many times the duration of its last scan.
SCAN_REST = 20


class Catalog:
    """The models that `config` allows, and the `default` that the server was started with, as
    `template` has it.
    """

    def __init__(self, template: BlockpoolModelProvider, config: ModelsConfig) -> None:
        self._config = config
        # By folder of --allow-models: its models, and until when it is not scanned again.
        self._scans: dict[str, tuple[list[str], float]] = {}
        self._scanning = threading.Lock()
        self.default = template.default_key()
        draft = template.cli_args.draft_model
        self._default_draft: str | None = draft and canonical(draft)
        self.aliases = dict(config.aliases or ())
        self.takes_any_name = self._takes_any_name()
        self._check_aliases()

    # -- names -------------------------------------------------------------------------------------

    def key_of(self, wanted: Any, with_aliases: bool = True) -> ModelKey:
        """The key of the model that a request describes. A model has one key under all of its
        names.

        Raises ModelNotFoundError for a model that requests may not name, and ValueError if neither
        the request nor the server names one.
        """
        model = self._model(wanted.model, with_aliases)
        return ModelKey(model, self._adapter(wanted, model), self._draft(wanted.draft))

    def id_of(self, model: str) -> str:
        """The id under which clients name a folder or a hub id."""
        found = (id for id, known in self.ids().items() if known == model)
        return next(found, Path(model).name if is_folder(model) else model)

    def ids(self) -> dict[str, str]:
        """Folder or hub id of each model by the id that requests use, in the order of the list."""
        own = [part for part in self.default or () if part is not None]
        bundled = BUNDLED if self._config.allowed is None else ()
        return _named_apart(dict.fromkeys([*own, *bundled, *self.allowed_models()]))

    def allowed_models(self) -> list[str]:
        """The models of --allow-models."""
        with self._scanning:
            return list(
                dict.fromkeys(
                    model for name in self._config.allowed or () for model in self._models_of(name)
                )
            )

    def listed(self) -> list[str]:
        """Ids for a list of models: without the default's adapter and draft, and without bundled
        models that are not allowed.
        """
        default, *hidden = self.default or [None]
        others: list[str] = []
        if self._config.allowed is None:
            hidden = [*hidden, *BUNDLED]
            others = downloaded()
        found = [id for id, model in self.ids().items() if model == default or model not in hidden]
        return list(dict.fromkeys([*found, *others]))

    def choices(self) -> str:
        """The models that requests may name, and how there are others."""
        found = ", ".join(self.listed())
        others = "`mlx-blockpool models` lists what fits here and downloads others"
        if found:
            return f"Requests name one of these: {found}; {others}."
        return f"No model is downloaded; {others}, and `serve demo` has the bundled one."

    def may_download(self, model: str) -> bool:
        """Return whether a model may be downloaded: any by an option, and those that the server
        was started with.
        """
        return self._config.downloads or model in (self.default or ())

    def log_names(self) -> None:
        """Log that the default model serves unknown names, if it does."""
        if self.takes_any_name and self.default is not None:
            name = self.id_of(self.default.model)
            log.info(
                "Requests for unknown models, such as sonnet, are served by %s; --model-aliases "
                "off rejects them",
                name,
            )

    def hide(self, text: str, key: Iterable[str | None] = ()) -> str:
        """A message without this machine's paths: a model's id replaces its folder, and the last
        part any other path.
        """
        for model in (part for part in key if part is not None):
            for path in filter(None, (model, _snapshot(model))):
                text = text.replace(path, self.id_of(model)) if is_folder(path) else text
        return without_folders(text)

    def _models_of(self, name: str) -> list[str]:
        """The models that a name in --allow-models stands for: one model, or all models of a
        folder.
        """
        name = canonical(model_path(name))
        if not is_folder(name):
            return [name]
        start = time.monotonic()
        models, until = self._scans.get(name, ([], start))
        if start >= until:
            models = list(_folders_in(Path(name), FOLDER_DEPTH))
            now = time.monotonic()
            self._scans[name] = models, now + SCAN_REST * (now - start)
        return models or [name]

    def _model(self, name: str | None, with_aliases: bool) -> str:
        if name in (None, DEFAULT):
            if self.default is None:
                raise ValueError(
                    "The request names no model and the server was started without --model. "
                    + self.choices()
                )
            return self.default.model
        if with_aliases and name in self.aliases:
            return self._model(self.aliases[name], False)
        try:
            return self._named(str(name), "model")
        except ModelNotFoundError:
            if (
                with_aliases
                and self.takes_any_name
                and self.default is not None
                and may_be_alias(str(name))
            ):
                return self.default.model
            raise

    def _adapter(self, wanted: Any, model: str) -> str | None:
        if (
            self.default is not None
            and model == self.default.model
            and (not wanted.adapter or wanted.model in (None, DEFAULT))
        ):
            # As in mlx-lm, default_model has the adapter that the server was started with and no
            # other.
            return self.default.adapter
        return self._named(wanted.adapter, "adapter") if wanted.adapter else None

    def _draft(self, name: str | None) -> str | None:
        if name in (None, DEFAULT):
            # mlx-lm's server uses its draft with any model.
            return None if name is None else self._default_draft
        return self._named(str(name), "draft model")

    def _named(self, name: str, what: str) -> str:
        """The folder or hub id that a name stands for.

        A ModelNotFoundError does not reveal whether such a folder exists.
        """
        known = self.ids()
        if name in known:
            return known[name]
        path = _path_of(name)
        if path is not None and (path in known.values() or self._is_new(Path(path))):
            return path
        on_hub = self._config.allowed is None and HUB_ID.fullmatch(name) is not None
        if on_hub and (is_downloaded(name) or ("/" in name and self._config.downloads)):
            return name
        advice = "Start the server with --allow-models to allow others, also folders."
        if on_hub:
            advice = "Download others, or start the server with --allow-downloads."
        listed = self.listed()
        models = ", ".join(listed) or "none"
        raise ModelNotFoundError(
            f"There is no {what} {name[:200]!r} that requests may name. {nearest(name, listed)} "
            f"The models are: {models}. {advice}".replace(".  ", ". ")
        )

    def _is_new(self, path: Path) -> bool:
        """Return whether a folder is a model that came into an allowed folder since its last
        scan.
        """
        allowed = (canonical(model_path(name)) for name in self._config.allowed or ())
        return any(_is_found_in(Path(folder), path) for folder in allowed if is_folder(folder))

    # -- aliases -----------------------------------------------------------------------------------

    def _takes_any_name(self) -> bool:
        """Return whether unknown names stand for the default: if it is the only model and no
        option says otherwise.
        """
        if self.default is None or self._config.aliases is not None or self._config.max_models > 1:
            return False
        return set(self.allowed_models()) <= {part for part in self.default if part is not None}

    def _check_aliases(self) -> None:
        """Raises BlockpoolError for an alias of a model that requests may not name."""
        for alias, model in self.aliases.items():
            try:
                self._model(model, False)
            except (ModelNotFoundError, ValueError) as error:
                raise BlockpoolError(
                    f"--model-aliases: {alias} does not name a model of this server. {error}"
                ) from error


def may_be_alias(name: str) -> bool:
    """Return whether a name is neither a path nor a hub's id, such as sonnet or gpt-4o."""
    return bool(name.strip(". ")) and not name.startswith("~") and not set(name) & {"/", "\\", "\0"}


def is_folder(model: str) -> bool:
    """Return whether a model is a folder, which has an absolute path here, and not a hub id."""
    return Path(model).is_absolute()


def is_downloaded(name: str) -> bool:
    """Return whether the hub's cache has a model."""
    return _snapshot(name) is not None


def _snapshot(name: str) -> str | None:
    if is_folder(name) or HUB_ID.fullmatch(name) is None:
        return None
    try:
        folder = local_folder(name)
    except (OSError, ValueError):
        return None
    return str(folder) if (folder / "config.json").is_file() else None


def _path_of(name: str) -> str | None:
    """A name as a folder's absolute path, or None if it cannot be one."""
    if not name or "\0" in name:
        return None
    try:
        path = canonical(name)
    except (OSError, ValueError, RuntimeError):
        return None
    return path if is_folder(path) else None


def _folders_in(folder: Path, depth: int) -> Iterator[str]:
    """The folder itself if it is a model's, or else the models in it."""
    if _is_model(folder):
        yield str(folder)
        return
    if not depth:
        return
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir())[: ModelsConfig.folders]
    except OSError as error:
        log.warning("--allow-models: cannot read %s: %s", folder, error)
        return
    # Deeper ones come last, so that of two models of one name they get the number.
    models = [[canonical(found) for found in _folders_in(path, depth - 1)] for path in inside]
    direct = {canonical(str(path)) for path in inside}
    yield from sorted(
        (found for own in models for found in own), key=lambda found: found not in direct
    )


def _is_found_in(folder: Path, path: Path) -> bool:
    """Return whether _folders_in() finds `path` in a folder."""
    if not path.is_relative_to(folder) or len(path.relative_to(folder).parts) > FOLDER_DEPTH:
        return False
    return _is_model(path) and not any(
        _is_model(above) for above in path.parents if above.is_relative_to(folder)
    )


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FOLDER_FILES)


def _named_apart(models: Iterable[str]) -> dict[str, str]:
    """An id for each model: a hub's id as it is, or a folder's name, with a number if another
    model has that id.
    """
    named: dict[str, str] = {}
    for model in models:
        name = BUNDLED.get(model, Path(model).name) if is_folder(model) else model
        numbered = (f"{name}@{number}" for number in count(2))
        named[next(id for id in chain([name], numbered) if id not in named)] = model
    return named
