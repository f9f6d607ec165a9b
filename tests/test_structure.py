"""What holds for the whole package: its public names, and which module imports what."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import module_map
import pytest
from packaging.requirements import Requirement
from stock_names import find

import mlx_blockpool
from mlx_blockpool import mlx_lm_compat

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path
    for folder in ("mlx_blockpool", "plugins")
    for path in (ROOT / folder).rglob("*.py")
    # The files that `plugin new` copies are a package by themselves.
    if "plugin_template" not in path.parts
)
TEXTS = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in FILES}

PUBLIC = [
    "BLOCK_TOKENS",
    "BlockPool",
    "BlockPoolBatchEngine",
    "BlockpoolError",
    "KVBits",
    "ModelCacheSpec",
    "PoolConfig",
    "PoolExhaustedError",
    "PooledKVCache",
    "PooledRotatingKVCache",
    "PrefixCache",
    "Request",
    "StoreConfig",
    "Token",
    "attach",
    "check_spec",
    "detach",
    "from_stock",
    "hookimpl",
    "make_prompt_cache",
    "open_pool",
    "open_prefix",
    "spec_from_config",
]


def test_the_wheel_has_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {
        str(file.parent.relative_to(ROOT)).replace("/", ".")
        for file in FILES
        if file.name == "__init__.py" and file.is_relative_to(ROOT / "mlx_blockpool")
    }
    assert folders <= set(project["tool"]["setuptools"]["packages"])


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {file: ast.parse(text) for file, text in TEXTS.items()}


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """A tree and everything in it."""
    return tuple(ast.walk(tree))


def imports(tree: ast.Module) -> Iterator[str]:
    """Every module and name that a file imports, also inside of functions."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()


def test_the_files_were_found() -> None:
    assert {"mlx_blockpool/__init__.py", "mlx_blockpool/kv/pool.py", "plugins/default.py"} <= set(
        TEXTS
    )


def test_all_is_sorted_and_complete() -> None:
    assert mlx_blockpool.__all__ == PUBLIC == sorted(PUBLIC)
    assert set(dir(mlx_blockpool)) == {*PUBLIC, "__version__"}


@pytest.mark.parametrize("name", mlx_blockpool.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    found = getattr(mlx_blockpool, name)
    # mlx-lm saves caches under the name of their class, so that ours have those of its own; not the
    # qualified one.
    assert getattr(found, "__qualname__", name) == name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mlx_blockpool' has no attribute 'BlockPol'"):
        _ = mlx_blockpool.BlockPol


def test_version_is_the_one_of_the_project_file() -> None:
    assert f'\nversion = "{mlx_blockpool.__version__}"\n' in (ROOT / "pyproject.toml").read_text(
        encoding="utf-8"
    )


def test_import_without_mlx() -> None:
    modules = (
        "mlx_blockpool, mlx_blockpool.kv.pool, mlx_blockpool.prefix.trie, mlx_blockpool.plugins"
    )
    code = (
        f"import sys, {modules}; print([m for m in sys.modules if m.partition('.')[0] in ('mlx', "
        "'mlx_lm')])"
    )
    assert run(code) == "[]"


def test_the_map_of_the_modules_is_up_to_date() -> None:
    assert module_map.in_document() == module_map.render(), f"run {module_map.COMMAND}"


COMPAT = "mlx_blockpool/mlx_lm_compat.py"


def test_only_the_server_imports_the_server_of_mlx_lm() -> None:
    found = {}
    for file, tree in trees().items():
        picked = [
            n
            for n in nodes(tree)
            if isinstance(n, ast.ImportFrom) and (n.module or "").endswith("mlx_lm_compat")
        ]
        paths = [mlx_lm_compat.EXPORTS.get(alias.name, "") for n in picked for alias in n.names]
        found[file] = [path for path in paths if path.startswith("server.")]
        assert not any(f"{i}.".startswith("mlx_lm.server.") for i in imports(tree)), (
            f"{file}: import it from mlx_lm_compat"
        )
    users = {file for file, paths in found.items() if paths}
    assert users == {file for file in users if file.startswith("mlx_blockpool/server/")}
    assert users


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_private_name_of_mlx_lm_is_imported() -> None:
    found = {
        file: private_names_of_mlx_lm(tree) for file, tree in trees().items() if file != COMPAT
    }
    assert {file: names for file, names in found.items() if names} == {}


def private_names_of_mlx_lm(tree: ast.Module) -> list[str]:
    """The private names of mlx-lm that a file imports, or reads from what it has imported."""
    names = [name for name in imports(tree) if name.partition(".")[0] == "mlx_lm"]
    aliases = {name.rpartition(".")[2] for name in names}
    read = {ast.unparse(n) for n in nodes(tree) if isinstance(n, ast.Attribute) and private(n.attr)}
    imported = [name for name in names if any(map(private, name.split(".")))]
    return imported + sorted(path for path in read if path.partition(".")[0] in aliases)


def own_names(tree: ast.AST) -> set[str]:
    """Functions, classes, fields and attributes that the code of a tree defines; no local
    variables.
    """
    names: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        if isinstance(node, ast.ClassDef | ast.Module):
            stored = (
                n
                for statement in node.body
                if isinstance(statement, ast.Assign | ast.AnnAssign)
                for n in ast.walk(statement)
            )
            names |= {
                n.id for n in stored if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
    return names


@functools.cache
def stock_classes() -> dict[str, set[str]]:
    """What the classes of mlx-lm that ours extend define, by the path that mlx_lm_compat has for
    them.
    """
    classes = (
        "server.ResponseGenerator",
        "server.APIHandler",
        "server.ModelProvider",
        "models.cache.LRUPromptCache",
    )
    return {path: own_names(ast.parse(inspect.getsource(find(path)))) for path in classes}


def subclasses_of(path: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """The classes of the package that extend a class of mlx-lm, directly or not."""
    names = {path.rpartition(".")[2]}
    while True:
        found = [
            (file, n)
            for file, tree in trees().items()
            for n in nodes(tree)
            if isinstance(n, ast.ClassDef)
            and names & {ast.unparse(base).rpartition(".")[2] for base in n.bases}
        ]
        if {n.name for _, n in found} <= names:
            return iter(found)
        names |= {n.name for _, n in found}


@pytest.mark.parametrize("path", stock_classes())
def test_members_that_our_subclasses_share_with_mlx_lm_are_listed(path: str) -> None:
    shared: set[str] = set()
    for _, cls in subclasses_of(path):
        picked = [
            n
            for n in nodes(cls)
            if isinstance(n, ast.Attribute) and ast.unparse(n.value) in ("self", "super()")
        ]
        shared |= {n.attr for n in picked} | {
            n.name for n in cls.body if isinstance(n, ast.FunctionDef)
        }
    members = {
        f"{path}.{name}" for name in shared & stock_classes()[path] if not name.startswith("__")
    }
    assert members
    assert sorted(members - set(mlx_lm_compat.STOCK)) == []


def test_private_members_of_mlx_lm_that_are_read_from_outside_are_listed() -> None:
    modules = ("server", "utils", "tokenizer_utils", "models.cache", "models.base")
    stock = {
        name
        for m in modules
        for name in own_names(ast.parse(inspect.getsource(importlib.import_module(f"mlx_lm.{m}"))))
    }
    ours = {name for tree in trees().values() for name in own_names(tree)}
    listed = {path.rpartition(".")[2] for path in mlx_lm_compat.STOCK}
    read = {
        n.attr
        for tree in trees().values()
        for n in nodes(tree)
        if isinstance(n, ast.Attribute) and private(n.attr)
    }
    assert read & listed
    assert sorted((read & stock) - ours - listed) == []


def test_every_export_of_mlx_lm_compat_is_used() -> None:
    used = {name for file, tree in trees().items() if file != COMPAT for name in names_in(tree)}
    assert sorted(set(mlx_lm_compat.EXPORTS) - used) == []


def names_in(tree: ast.AST) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("mlx_lm_compat"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "mlx_lm_compat":
            yield node.attr


def lines_of(file: str) -> int:
    return len(TEXTS[file].splitlines())


def test_modules_have_a_docstring() -> None:
    assert [file for file, tree in trees().items() if not ast.get_docstring(tree)] == []


def test_nothing_is_global() -> None:
    assert [
        f"{file}:{n.lineno}"
        for file, tree in trees().items()
        for n in nodes(tree)
        if isinstance(n, ast.Global)
    ] == []


OPTIONAL = {
    "completion": {"argcomplete"},
    "images": {"PIL"},
    "kv-events": {"msgpack", "zmq"},
    "test": {"pytest"},
}


def test_every_third_party_import_is_a_declared_dependency() -> None:
    own = {"mlx_blockpool", *sys.stdlib_module_names}
    imported = {name.partition(".")[0] for tree in trees().values() for name in imports(tree)} - own
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = set(modules_of(project["dependencies"]))
    for extra, modules in OPTIONAL.items():
        assert modules <= set(modules_of(project["optional-dependencies"][extra]))
    assert sorted(imported) == sorted(declared.union(*OPTIONAL.values()))


def modules_of(requirements: list[str]) -> Iterator[str]:
    """The modules of distributions. Each has one, which is called like it, except for two."""
    for requirement in requirements:
        name = Requirement(requirement).name.lower().replace("-", "_")
        yield {"pillow": "PIL", "pyzmq": "zmq"}.get(name, name)


# A file of fewer lines than this belongs to its importer if it has only one.
SMALL_LINES = 60


def module_of(file: str) -> str:
    return (
        file.removesuffix("/__init__.py")
        .removesuffix(".py")
        .replace("/", ".")
        .replace("plugins", "mlx_blockpool_plugins", 1)
    )


@functools.cache
def importers() -> dict[str, set[str]]:
    """The files that import each module of the package, also by strings."""
    modules = {module_of(file) for file in TEXTS}
    found: dict[str, set[str]] = {module: set() for module in modules}
    for file, tree in trees().items():
        package = (
            module_of(file) if file.endswith("__init__.py") else module_of(file).rpartition(".")[0]
        )
        for node in nodes(tree):
            for name in imported_by(node, package):
                for module in {name, name.rpartition(".")[0]} & modules:
                    found[module].add(file)
    return found


def imported_by(node: ast.AST, package: str) -> Iterator[str]:
    """Absolute names that an import statement, or a string with the name of a module, stands
    for.
    """
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = (
            importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            if node.level
            else node.module or ""
        )
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def test_a_small_file_has_more_than_one_importer() -> None:
    entry_points = {
        "mlx_blockpool.testing.pytest_plugin",
        "mlx_blockpool.cli",
        "mlx_blockpool.server.app",
    }
    small = {
        file
        for file in TEXTS
        if lines_of(file) < SMALL_LINES
        and not file.endswith("__init__.py")
        and not file.startswith("plugins/")
        and module_of(file) not in entry_points
    }
    assert {file for file in small if len(importers()[module_of(file)]) == 1} == set()


def package_of(file: str) -> str:
    return file.rpartition("/")[0]


def test_no_private_name_is_used_in_another_package() -> None:
    packages: dict[str, set[str]] = {}
    for file, tree in trees().items():
        packages.setdefault(package_of(file), set()).update(filter(private, own_names(tree)))
    listed = {path.rpartition(".")[2] for path in mlx_lm_compat.STOCK}
    found: set[str] = set()
    for file, tree in trees().items():
        own = packages[package_of(file)]
        abroad = (
            set().union(
                *(names for package, names in packages.items() if package != package_of(file))
            )
            - own
            - listed
        )
        for node in nodes(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                found |= {f"{file}: {alias.name}" for alias in node.names if private(alias.name)}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in (
                "self",
                "cls",
                "super()",
            ):
                found |= {f"{file}: {node.attr}"} if node.attr in abroad else set()
    assert found == set()
