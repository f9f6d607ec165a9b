"""Applies our patch to the installed mlx-lm, and reverts it.

A file is rewritten only if its sha256 is the expected one, and then atomically. Knows files, hashes
and unified diffs. Does not know what the patch does, and imports neither mlx nor mlx_lm.

The diffs are applied here rather than by a library, which would decode lines and lose their
endings, or write files itself.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Literal

from ..errors import PatchError
from ..store.fs import Disk, temporary_for, write_synced

State = Literal["stock", "patched", "changed", "missing", "unsupported"]

_FOLDER_PREFIX = "mlx-lm-"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-blockpool patch`."""
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--status",
        action="store_const",
        dest="act",
        const=status,
        help="what is installed (default)",
    )
    action.add_argument(
        "--apply", action="store_const", dest="act", const=apply, help="patch the installed mlx-lm"
    )
    action.add_argument(
        "--revert", action="store_const", dest="act", const=revert, help="restore it to the byte"
    )
    parser.set_defaults(run=lambda args: describe((args.act or status)()))


@dataclass(frozen=True)
class PatchStatus:
    """The state of an mlx-lm `folder`.

    `files`: the state of each file of the patch; empty if this version has no patch.
    """

    version: str
    folder: Path
    state: State
    files: Mapping[str, State]


@dataclass(frozen=True)
class _FilePatch:
    """The change of one file from the sha256 `before` to the sha256 `after`: what its hunks
    replace, and by what.
    """

    name: str
    before: str
    after: str
    hunks: Sequence[tuple[bytes, bytes]]

    def reversed(self) -> _FilePatch:
        return _FilePatch(
            self.name, self.after, self.before, [(new, old) for old, new in self.hunks]
        )

    def apply(self, source: bytes) -> bytes:
        """The source with the first place of each hunk replaced.

        Raises PatchError for another result than `after`.
        """
        for old, new in self.hunks:
            source = source.replace(old, new, 1)
        if (digest := _sha256(source)) != self.after:
            raise PatchError(
                f"The patched {self.name} has sha256 {digest}, not {self.after}. Reinstall "
                "mlx-blockpool."
            )
        return source


def status(mlx_lm_dir: str | Path | None = None) -> PatchStatus:
    """The state of the folder `mlx_lm_dir`, by default that of this interpreter's mlx-lm.

    Raises PatchError without one.
    """
    folder = _find_folder() if mlx_lm_dir is None else Path(mlx_lm_dir)
    version = _find_version(folder)
    patches = _load_patches(version)
    if patches is None:
        return PatchStatus(version, folder, "unsupported", {})
    files = {patch.name: _file_state(folder / patch.name, patch) for patch in patches}
    is_one_state = set(files.values()) in ({"stock"}, {"patched"})
    return PatchStatus(
        version, folder, files[patches[0].name] if is_one_state else "changed", files
    )


def apply(mlx_lm_dir: str | Path | None = None) -> PatchStatus:
    """Patch the stock files.

    Raises PatchError for an unknown file or version, and changes nothing then.
    """
    return _rewrite(status(mlx_lm_dir), lambda patch: patch)


def revert(mlx_lm_dir: str | Path | None = None) -> PatchStatus:
    """Restore the patched files byte for byte. Raises PatchError as apply() does."""
    return _rewrite(status(mlx_lm_dir), _FilePatch.reversed)


def describe(status: PatchStatus) -> str:
    """The status as text, with what to do about it."""
    lines = [f"mlx-lm {status.version} in {status.folder}: {status.state}"]
    lines += [f"  {name}: {state}" for name, state in status.files.items()]
    return "\n".join([*lines, _advice(status)])


def _advice(found: PatchStatus) -> str:
    if found.state == "stock":
        return (
            "`mlx-blockpool patch --apply` gives mlx_lm.server the option --cache-backend "
            "blockpool."
        )
    if found.state == "patched":
        return (
            "mlx_lm.server takes --cache-backend blockpool. `mlx-blockpool patch --revert` "
            "restores the original."
        )
    if found.state == "unsupported":
        return _unsupported(found.version)
    if {"changed", "missing"} & set(found.files.values()):
        return f"Some files are neither mlx-lm's nor patched. {_reinstall(found.version)}"
    return (
        "Only some files are patched. `mlx-blockpool patch` with --apply or --revert finishes the "
        "work."
    )


def _reinstall(version: str) -> str:
    return f"Reinstall mlx-lm: pip install --force-reinstall --no-deps mlx-lm=={version}"


def _unsupported(version: str) -> str:
    names = sorted(entry.name for entry in resources.files("mlx_blockpool_patches").iterdir())
    known = ", ".join(
        name.removeprefix(_FOLDER_PREFIX) for name in names if name.startswith(_FOLDER_PREFIX)
    )
    return (
        f"mlx-lm {version} is installed, and there are patches for {known}. `mlx-blockpool serve` "
        "needs no patch."
    )


def _find_folder() -> Path:
    # find_spec of a top-level name does not import the package.
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError(
            "mlx-lm is not installed in this Python environment. Install it, or run mlx-blockpool "
            "where it is installed."
        )
    return Path(spec.submodule_search_locations[0])


def _find_version(folder: Path) -> str:
    """The version by the metadata next to the folder; for an editable install, which has none
    there, the environment's.
    """
    for distribution in metadata.distributions(name="mlx-lm", path=[str(folder.parent)]):
        return distribution.version
    try:
        return metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        raise PatchError(
            f"The mlx-lm in {folder} has no metadata with its version. Install it with pip."
        ) from None


def _load_patches(version: str) -> list[_FilePatch] | None:
    folder = resources.files("mlx_blockpool_patches") / f"{_FOLDER_PREFIX}{version}"
    if not folder.is_dir():
        return None
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    assert manifest["mlx_lm"] == version, f"manifest {manifest['mlx_lm']} != folder {version}"
    return [
        _FilePatch(
            name, item["before"], item["after"], _hunks((folder / item["patch"]).read_bytes())
        )
        for name, item in manifest["files"].items()
    ]


def _hunks(diff: bytes) -> list[tuple[bytes, bytes]]:
    """The old and the new lines of each hunk of a unified diff, split at b"\\n" alone: other
    line endings are text.
    """
    hunks: list[tuple[bytes, bytes]] = []
    for line in io.BytesIO(diff):
        if line.startswith(b"@@"):
            hunks.append((b"", b""))
        elif hunks:
            old, new = hunks[-1]
            hunks[-1] = (
                old if line[:1] == b"+" else old + line[1:],
                new if line[:1] == b"-" else new + line[1:],
            )
    return hunks


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file_state(path: Path, patch: _FilePatch) -> State:
    if not path.is_file():
        return "missing"
    known: dict[str, State] = {patch.before: "stock", patch.after: "patched"}
    return known.get(_sha256(path.read_bytes()), "changed")


def _rewrite(found: PatchStatus, direction: Callable[[_FilePatch], _FilePatch]) -> PatchStatus:
    patches = _load_patches(found.version)
    if patches is None:
        raise PatchError(_unsupported(found.version))
    contents: dict[Path, bytes] = {}
    # Every file is read, checked and patched in memory before the first one is written.
    for patch in map(direction, patches):
        path = found.folder / patch.name
        if not path.is_file():
            raise PatchError(f"{path} is missing. {_reinstall(found.version)}")
        source = path.read_bytes()
        digest = _sha256(source)
        if digest == patch.before:
            contents[path] = patch.apply(source)
        elif digest != patch.after:
            what = (
                f"{path} is not that of mlx-lm {found.version}: its sha256 is {digest}, not "
                f"{patch.before}"
            )
            raise PatchError(f"{what}. {_reinstall(found.version)}")
    try:
        _write_whole(contents)
    except OSError as error:
        raise PatchError(
            f"Cannot write in {found.folder}: {error}. Run as the user who owns the folder, "
            "or install mlx-lm into a virtual environment."
        ) from error
    return status(found.folder)


def _write_whole(contents: Mapping[Path, bytes]) -> None:
    """Replace each file atomically, keeping its mode.

    Never in place: an installer may have hard-linked the file to its download cache.
    """
    temps = {path: temporary_for(path) for path in contents}
    try:
        for path, temp in temps.items():
            write_synced(Disk(), temp, [contents[path]])
            shutil.copymode(path, temp)
        for path, temp in temps.items():
            os.replace(temp, path)
    finally:
        for temp in temps.values():
            temp.unlink(missing_ok=True)
