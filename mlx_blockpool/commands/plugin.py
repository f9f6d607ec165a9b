"""`mlx-blockpool plugin new`: writes a package with a plugin that works, to begin with.

The files of plugin_template/ are such a package, named my-arch; they are copied under another name.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import tempfile
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from ..errors import PluginError

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
TEMPLATE = "plugin_template"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `mlx-blockpool plugin`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "write a package that brings a model, its caches and a test of both"
    new = actions.add_parser("new", help=text, description=f"{text[0].upper()}{text[1:]}.")
    new.add_argument("name", metavar="NAME", help="of the package, such as my-arch")
    new.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="where to write it (default: the current folder)",
    )
    new.set_defaults(run=lambda args: write_package(args.name, args.folder))


def write_package(name: str, folder: Path) -> str:
    """Write the package `name` into a new folder of that name; returns what to do next.

    Raises PluginError for a name that a package cannot have, and if the folder exists or cannot be
    written.
    """
    if NAME.fullmatch(name) is None:
        raise PluginError(
            f"A package cannot be named {name!r}: use lower-case letters, digits and hyphens, with "
            "a letter first."
        )
    package = name.replace("-", "_")
    if package == "tests" or keyword.iskeyword(package) or importlib.util.find_spec(package):
        raise PluginError(
            f"A module {package} exists here, or is a word of Python: choose another name."
        )
    target = folder / name
    try:
        if target.exists():
            raise FileExistsError
        # Whole or absent: a disk may be full.
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as temporary:
            written = Path(temporary) / name
            written.mkdir()
            _copy(resources.files(__package__) / TEMPLATE, written, name)
            written.rename(target)
    except FileExistsError as error:
        raise PluginError(f"{target} exists: choose another name, or remove it.") from error
    except OSError as error:
        raise PluginError(f"{target} cannot be written: {error.strerror or error}.") from error
    return (
        f"{target} has a plugin that works: its model is {package}/model.py, and its caches are "
        f"described in {package}/__init__.py.\n"
        f"  pip install -e {target}\n"
        f"  pytest {target}\n"
        "Then replace the model by yours, and config.json by that of a tiny one."
    )


def _copy(source: Traversable, target: Path, name: str) -> None:
    """Copy a folder of the template, and rename the package in paths and texts."""
    for part in source.iterdir():
        own = target / _renamed(part.name, name)
        if part.is_dir():
            if part.name != "__pycache__":
                own.mkdir()
                _copy(part, own, name)
        else:
            own.write_text(_renamed(part.read_text(encoding="utf-8"), name), encoding="utf-8")


def _renamed(text: str, name: str) -> str:
    words = name.split("-")
    spellings = {
        "my-arch": name,
        "my_arch": "_".join(words),
        "MyArch": "".join(map(str.title, words)),
    }
    for old, new in spellings.items():
        text = text.replace(old, new)
    return text
