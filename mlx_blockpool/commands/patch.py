"""Puts our patch into the installed mlx-lm, and takes it out again.

Holds the rule that a file is rewritten only when its sha256 is the expected one, and then whole or not at all. Knows
files, hashes and unified diffs. Does not know what the patch does, and imports neither mlx nor mlx_lm.

The diffs are applied here rather than by a library: unidiff parses and does not apply; whatthepatch applies decoded lines and so
loses line endings; patch-ng searches for the place of a hunk and writes files itself, where one must differ in no byte.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Literal

from ..errors import PatchError
from ..store.fs import Disk, temporary_for, write_synced

State = Literal["stock", "patched", "changed", "missing", "unsupported"]

_FOLDER_PREFIX = "mlx-lm-"
_HUNK_HEADER = re.compile(rb"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-blockpool patch`."""
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--status", action="store_const", dest="act", const=status, help="what is installed (default)")
    action.add_argument("--apply", action="store_const", dest="act", const=apply, help="patch the installed mlx-lm")
    action.add_argument("--revert", action="store_const", dest="act", const=revert, help="restore it to the byte")
    parser.set_defaults(run=lambda args: describe((args.act or status)()))


@dataclass(frozen=True)
class PatchStatus:
    """What an mlx-lm `folder` holds; `files` has a state per file of the patch, and is empty when there is no patch."""

    version: str
    folder: Path
    state: State
    files: Mapping[str, State]


@dataclass(frozen=True)
class _FilePatch:
    """One file's way from the sha256 `before` to the sha256 `after`; `removed` and `added` mark the lines of its diff."""

    name: str
    before: str
    after: str
    diff: bytes
    removed: bytes = b"-"
    added: bytes = b"+"

    def reversed(self) -> _FilePatch:
        return _FilePatch(self.name, self.after, self.before, self.diff, self.added, self.removed)

    def apply(self, source: bytes) -> bytes:
        """The source with every hunk applied where its header says, without fuzz. Raises PatchError if a line differs.

        The diff is a unified one of one file whose two sides end with a newline.
        """
        lines, result, done = list(io.BytesIO(source)), list[bytes](), 0
        for header, hunk in _hunks(self.diff):
            old = [line[1:] for line in hunk if line[:1] in (b" ", self.removed)]
            # A side without lines is numbered by the line before it.
            start = int(header[1] if self.removed == b"-" else header[2]) - bool(old)
            if lines[start : start + len(old)] != old:
                raise PatchError(
                    f"{self.name} has other text than the patch expects at line {start + 1}. Reinstall mlx-blockpool."
                )
            result += lines[done:start] + [line[1:] for line in hunk if line[:1] in (b" ", self.added)]
            done = start + len(old)
        return b"".join(result + lines[done:])


def status(mlx_lm_dir: str | Path | None = None) -> PatchStatus:
    """What the folder `mlx_lm_dir` holds, or else this interpreter's mlx-lm. Raises PatchError if there is none."""
    folder = _find_folder() if mlx_lm_dir is None else Path(mlx_lm_dir)
    version = _find_version(folder)
    patches = _load_patches(version)
    if patches is None:
        return PatchStatus(version, folder, "unsupported", {})
    files = {patch.name: _file_state(folder / patch.name, patch) for patch in patches}
    is_one_state = set(files.values()) in ({"stock"}, {"patched"})
    return PatchStatus(version, folder, files[patches[0].name] if is_one_state else "changed", files)


def apply(mlx_lm_dir: str | Path | None = None) -> PatchStatus:
    """Patch the stock files. An unknown file or version is a PatchError, and nothing was changed."""
    found = status(mlx_lm_dir)
    _rewrite(found, _patches_for(found))
    return status(found.folder)


def revert(mlx_lm_dir: str | Path | None = None) -> PatchStatus:
    """Bring the patched files back, byte for byte. An unknown file or version is a PatchError, as in `apply`."""
    found = status(mlx_lm_dir)
    _rewrite(found, [patch.reversed() for patch in _patches_for(found)])
    return status(found.folder)


def describe(status: PatchStatus) -> str:
    """The status in lines for a person, with what can be done about it."""
    lines = [f"mlx-lm {status.version} in {status.folder}: {status.state}"]
    lines += [f"  {name}: {state}" for name, state in status.files.items()]
    return "\n".join([*lines, _advice(status)])


def _advice(found: PatchStatus) -> str:
    if found.state == "stock":
        return "`mlx-blockpool patch --apply` gives mlx_lm.server the option --cache-backend blockpool."
    if found.state == "patched":
        return "mlx_lm.server takes --cache-backend blockpool. `mlx-blockpool patch --revert` restores the original."
    if found.state == "unsupported":
        return _unsupported(found.version)
    if {"changed", "missing"} & set(found.files.values()):
        return f"Some files are neither mlx-lm's nor ours. {_reinstall(found.version)}"
    return "Only some files are patched. `mlx-blockpool patch` with --apply or --revert finishes the work."


def _reinstall(version: str) -> str:
    return f"Reinstall mlx-lm: pip install --force-reinstall --no-deps mlx-lm=={version}"


def _unsupported(version: str) -> str:
    names = sorted(entry.name for entry in resources.files("mlx_blockpool_patches").iterdir())
    known = ", ".join(name.removeprefix(_FOLDER_PREFIX) for name in names if name.startswith(_FOLDER_PREFIX))
    return f"mlx-lm {version} is installed, and there are patches for {known}. `mlx-blockpool serve` needs no patch."


def _find_folder() -> Path:
    # find_spec of a top-level name does not import the package.
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError(
            "mlx-lm is not installed in this Python environment. Install it, or run mlx-blockpool where it is installed."
        )
    return Path(spec.submodule_search_locations[0])


def _find_version(folder: Path) -> str:
    """The version beside the folder; an editable install has its metadata elsewhere, so then the environment's."""
    for distribution in metadata.distributions(name="mlx-lm", path=[str(folder.parent)]):
        return distribution.version
    try:
        return metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        raise PatchError(f"The mlx-lm in {folder} has no metadata with its version. Install it with pip.") from None


def _load_patches(version: str) -> list[_FilePatch] | None:
    folder = resources.files("mlx_blockpool_patches") / f"{_FOLDER_PREFIX}{version}"
    if not folder.is_dir():
        return None
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    assert manifest["mlx_lm"] == version, f"manifest {manifest['mlx_lm']} != folder {version}"
    return [
        _FilePatch(name, item["before"], item["after"], (folder / item["patch"]).read_bytes())
        for name, item in manifest["files"].items()
    ]


def _patches_for(found: PatchStatus) -> list[_FilePatch]:
    patches = _load_patches(found.version)
    if patches is None:
        raise PatchError(_unsupported(found.version))
    return patches


def _hunks(diff: bytes) -> list[tuple[re.Match[bytes], list[bytes]]]:
    """The headers of a unified diff, each with its lines: split at b"\\n" alone, so that other line endings survive as text."""
    parts: list[tuple[re.Match[bytes], list[bytes]]] = []
    for line in io.BytesIO(diff):
        if header := _HUNK_HEADER.match(line):
            parts.append((header, []))
        elif parts:
            parts[-1][1].append(line)
    return parts


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file_state(path: Path, patch: _FilePatch) -> State:
    if not path.is_file():
        return "missing"
    known: dict[str, State] = {patch.before: "stock", patch.after: "patched"}
    return known.get(_sha256(path.read_bytes()), "changed")


def _rewrite(found: PatchStatus, patches: Sequence[_FilePatch]) -> None:
    # Every file is read, checked and patched in memory before the first one is written.
    results = {found.folder / patch.name: _patched(found, patch) for patch in patches}
    try:
        _write_whole({path: data for path, data in results.items() if data is not None})
    except OSError as error:
        raise PatchError(
            f"Cannot write in {found.folder}: {error}. Run as the user who owns the folder, "
            "or install mlx-lm into an environment of your own."
        ) from error


def _patched(found: PatchStatus, patch: _FilePatch) -> bytes | None:
    """The file's new content; None where it has it already."""
    path = found.folder / patch.name
    if not path.is_file():
        raise PatchError(f"{path} is missing. {_reinstall(found.version)}")
    source = path.read_bytes()
    digest = _sha256(source)
    if digest == patch.after:
        return None
    if digest != patch.before:
        raise PatchError(
            f"{path} is not that of mlx-lm {found.version}: "
            f"its sha256 is {digest}, not {patch.before}. {_reinstall(found.version)}"
        )
    result = patch.apply(source)
    if _sha256(result) != patch.after:
        raise PatchError(f"The patched {path} has sha256 {_sha256(result)}, not {patch.after}. Reinstall mlx-blockpool.")
    return result


def _write_whole(contents: Mapping[Path, bytes]) -> None:
    """Replace each file whole or not at all, keeping its mode.

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
