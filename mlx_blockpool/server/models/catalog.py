"""Which models the requests of a server may name, and under which ids: the loaded one, the allowed and the downloaded ones.

A folder's id is its name, so that no answer shows where it lies. Looks at the disk, never at the network. Runs on any thread.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from ...config import ModelsConfig
from ...demo import NAMES, model_path
from ...errors import BlockpoolError, ModelNotFoundError
from ...modelfile import local_folder
from .provider import BlockpoolModelProvider, ModelKey, canonical

log = logging.getLogger(__name__)

DEFAULT = "default_model"
# The bundled models by their folders.
BUNDLED = {canonical(model_path(name)): name for name in NAMES}
# What mlx-lm's server takes for a model that it can serve.
HUB_FILES = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}
# An id of the hub; before the slash stands whose it is, which some old ones have not.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?")
# What makes a folder one that may be named: a model's, or an adapter's.
FOLDER_FILES = ("config.json", "adapter_config.json")
# A folder of models has them in itself or one folder deeper, as in whose/which.
FOLDER_DEPTH = 2
MOST_FOLDERS = 1000
# A folder is looked through again after so many times as long as that took.
SCAN_REST = 20
# What stands in an error for a path of this machine, which is none of a client's business.
PATH = re.compile(r"(?<![\w./:-])(?:/[^/\s'\",:;()\[\]]+)+/([^/\s'\",:;()\[\]]+)")


class Catalog:
    """The models of `config`, and those that the server was started with, which `template` knows."""

    def __init__(self, template: BlockpoolModelProvider, config: ModelsConfig) -> None:
        self._config = config
        # Models by the folder that --allow-models names, and until when they are taken as they are.
        self._scans: dict[str, tuple[list[str], float]] = {}
        self._scanning = threading.Lock()
        self.default = template.default_key()
        draft = template.cli_args.draft_model
        self._default_draft: str | None = draft and canonical(draft)
        self.aliases = dict(config.aliases or ())
        self.takes_any_name = self._takes_any_name()
        self._check_aliases()

    # -- names ---------------------------------------------------------------------------------------------------------

    def key_of(self, wanted: Any, with_aliases: bool = True) -> ModelKey:
        """The key of the model that a request describes: one model has one key, however it is named.

        Raises ModelNotFoundError for one that may not be named, and ValueError where none is named and there is no default.
        """
        model = self._model(wanted.model, with_aliases)
        return ModelKey(model, self._adapter(wanted, model), self._draft(wanted.draft))

    def id_of(self, model: str) -> str:
        """The id under which clients name a folder or a hub id."""
        return next((id for id, found in self.ids().items() if found == model), Path(model).name if is_folder(model) else model)

    def ids(self) -> dict[str, str]:
        """Folder or hub id by the id under which requests name it, in the order in which they are listed."""
        return _named_apart(dict.fromkeys([*self._own(), *self.allowed_models()]))

    def allowed_models(self) -> list[str]:
        """What may be loaded beside the default, and is looked up by its name: all that --allow-models names."""
        with self._scanning:
            return list(dict.fromkeys(model for name in self._config.allowed or () for model in self._behind(name)))

    def listed(self) -> list[str]:
        """Ids for a list of models: those of ids() that are models to ask for, and downloaded ones where they may be named."""
        spare = () if self.default is None else self.default[1:]
        unasked = BUNDLED if self._config.allowed is None else ()
        found = [id for id, model in self.ids().items() if self._is_default(model) or model not in (*spare, *unasked)]
        return list(dict.fromkeys([*found, *(downloaded() if self._config.allowed is None else ())]))

    def may_download(self, model: str) -> bool:
        """Whether a model may be fetched from the hub: where an option says so, and those that the server was started with."""
        return self._config.downloads or model in (self.default or ())

    def log_names(self) -> None:
        """Say once to which names the server answers beside those of its models."""
        if self.takes_any_name and self.default is not None:
            name = self.id_of(self.default.model)
            log.info(
                "Requests for names that nobody knows, such as sonnet, are served by %s; --model-aliases off refuses them", name
            )

    def hide(self, text: str, key: Iterable[str | None] = ()) -> str:
        """A message without this machine's paths: a model's id in place of its folder, a name in place of any other path."""
        for model in (part for part in key if part is not None):
            for path in filter(None, (model, _snapshot(model))):
                text = text.replace(path, self.id_of(model)) if is_folder(path) else text
        return PATH.sub(r"\1", text)

    def _own(self) -> list[str]:
        own = [part for part in self.default or () if part is not None]
        return [*own, *(BUNDLED if self._config.allowed is None else ())]

    def _is_default(self, model: str) -> bool:
        return self.default is not None and self.default.model == model

    def _behind(self, name: str) -> list[str]:
        """The models that a name in --allow-models stands for: one, or all that a folder has."""
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
                raise ValueError("The request names no model and the server was started without --model.")
            return self.default.model
        if with_aliases and name in self.aliases:
            return self._model(self.aliases[name], False)
        try:
            return self._named(str(name), "model")
        except ModelNotFoundError:
            if with_aliases and self.takes_any_name and self.default is not None and may_be_alias(str(name)):
                return self.default.model
            raise

    def _adapter(self, wanted: Any, model: str) -> str | None:
        if self.default is not None and model == self.default.model and (not wanted.adapter or wanted.model in (None, DEFAULT)):
            # As it was started; like mlx-lm's, default_model takes no other adapter.
            return self.default.adapter
        return self._named(wanted.adapter, "adapter") if wanted.adapter else None

    def _draft(self, name: str | None) -> str | None:
        if name in (None, DEFAULT):
            # mlx-lm's server gives its draft to whatever model is asked for.
            return None if name is None else self._default_draft
        return self._named(str(name), "draft model")

    def _named(self, name: str, what: str) -> str:
        """The folder or hub id behind a name. Raises ModelNotFoundError in the same words whether it is there or not."""
        known = self.ids()
        if name in known:
            return known[name]
        path = _path_of(name)
        if path is not None and (path in known.values() or self._has_come(Path(path))):
            return path
        on_hub = self._config.allowed is None and HUB_ID.fullmatch(name) is not None
        if on_hub and (is_downloaded(name) or ("/" in name and self._config.downloads)):
            return name
        raise ModelNotFoundError(f"Found no {what} {name[:200]!r} that requests may name; {self._instead(on_hub)}")

    def _has_come(self, path: Path) -> bool:
        """Whether a folder is one of an allowed folder's models now, also where that was scanned too lately to know it."""
        allowed = (canonical(model_path(name)) for name in self._config.allowed or ())
        return any(_is_found_in(Path(folder), path) for folder in allowed if is_folder(folder))

    def _instead(self, on_hub: bool) -> str:
        there = f"there are {', '.join(self.listed()) or 'none'}."
        if not on_hub:
            return f"{there} The server's --allow-models names others, folders too."
        return f"{there} To have others download them, or start the server with --allow-downloads."

    # -- aliases -------------------------------------------------------------------------------------------------------

    def _takes_any_name(self) -> bool:
        """Names that nobody knows are the default's where it is the only one that is served, unless the options say otherwise."""
        if self.default is None or self._config.aliases is not None or self._config.max_models > 1:
            return False
        return set(self.allowed_models()) <= {part for part in self.default if part is not None}

    def _check_aliases(self) -> None:
        """Raises BlockpoolError for an alias of a model that no request may name."""
        for alias, model in self.aliases.items():
            try:
                self._model(model, False)
            except (ModelNotFoundError, ValueError) as error:
                raise BlockpoolError(f"--model-aliases: {alias} stands for no model of this server. {error}") from error


def may_be_alias(name: str) -> bool:
    """Whether a name is one that clients have for models elsewhere, such as sonnet or gpt-4o: neither a path nor a hub's id."""
    return bool(name.strip(". ")) and not name.startswith("~") and not set(name) & {"/", "\\", "\0"}


def is_folder(model: str) -> bool:
    """Folders have whole paths here; whatever else stands for a model is an id of the hub."""
    return Path(model).is_absolute()


def is_downloaded(name: str) -> bool:
    """Whether the hub's cache has a model."""
    return _snapshot(name) is not None


def downloaded() -> list[str]:
    """Ids of the models in the hub's cache that mlx-lm's server would list."""
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        repo.repo_id
        for repo in repos
        if repo.repo_type == "model"
        and "main" in repo.refs
        and {file.file_path.name for file in repo.refs["main"].files} >= HUB_FILES
    )


def _snapshot(name: str) -> str | None:
    if is_folder(name) or HUB_ID.fullmatch(name) is None:
        return None
    try:
        folder = local_folder(name)
    except (OSError, ValueError):
        return None
    return str(folder) if (folder / "config.json").is_file() else None


def _path_of(name: str) -> str | None:
    """A name as a folder's whole path; None: it is none that could be."""
    if not name or "\0" in name:
        return None
    try:
        path = canonical(name)
    except (OSError, ValueError, RuntimeError):
        return None
    return path if is_folder(path) else None


def _folders_in(folder: Path, depth: int) -> Iterator[str]:
    """The folder itself where it is a model's, or else those in it that are."""
    if _is_model(folder):
        yield str(folder)
        return
    if not depth:
        return
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir())[:MOST_FOLDERS]
    except OSError as error:
        log.warning("--allow-models: cannot read %s: %s", folder, error)
        return
    # Those that lie deeper come last, so that they are the ones whose names need a number.
    models = [[canonical(found) for found in _folders_in(path, depth - 1)] for path in inside]
    direct = {canonical(str(path)) for path in inside}
    yield from sorted((found for own in models for found in own), key=lambda found: found not in direct)


def _is_found_in(folder: Path, path: Path) -> bool:
    """Whether _folders_in() finds `path` in a folder."""
    if not path.is_relative_to(folder) or len(path.relative_to(folder).parts) > FOLDER_DEPTH:
        return False
    return _is_model(path) and not any(_is_model(above) for above in path.parents if above.is_relative_to(folder))


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FOLDER_FILES)


def _named_apart(models: Mapping[str, Any]) -> dict[str, str]:
    """An id for each: a hub's id as it is, a folder's name, and where another has that one already a number behind it."""
    named: dict[str, str] = {}
    for model in models:
        name = model
        if is_folder(model):
            name = BUNDLED.get(model, Path(model).name)
        number = 1
        while (id := name if number == 1 else f"{name}@{number}") in named:
            number += 1
        named[id] = model
    return named
