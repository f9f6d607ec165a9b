"""What holds for the whole package: its public names, who imports what, and how long things are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import house_map
import pytest

import mlx_blockpool

ROOT = Path(__file__).parent.parent
FILES = sorted(p for folder in ("mlx_blockpool", "plugins") for p in (ROOT / folder).rglob("*.py"))
TREES = {str(p.relative_to(ROOT)): ast.parse(p.read_text(encoding="utf-8")) for p in FILES}

PUBLIC = [
    "BLOCK_TOKENS",
    "BlockPool",
    "BlockPoolBatchEngine",
    "BlockpoolError",
    "ModelCacheSpec",
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


def imports(tree: ast.Module) -> Iterator[str]:
    """Every module and name that a file imports, also inside of functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def test_the_files_were_found() -> None:
    assert {"mlx_blockpool/__init__.py", "mlx_blockpool/kv/pool.py", "plugins/default.py"} <= set(TREES)


def test_all_is_sorted_and_complete() -> None:
    assert mlx_blockpool.__all__ == PUBLIC == sorted(PUBLIC)
    assert set(dir(mlx_blockpool)) == {*PUBLIC, "__version__"}


@pytest.mark.parametrize("name", mlx_blockpool.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    found = getattr(mlx_blockpool, name)
    # mlx-lm saves caches under the name of their class, so that ours have those of its own; not the qualified one.
    assert getattr(found, "__qualname__", name) == name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mlx_blockpool' has no attribute 'BlockPol'"):
        _ = mlx_blockpool.BlockPol


def test_version_is_the_one_of_the_project_file() -> None:
    assert f'\nversion = "{mlx_blockpool.__version__}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "module", ["mlx_blockpool", "mlx_blockpool.kv.pool", "mlx_blockpool.prefix.trie", "mlx_blockpool.plugins"]
)
def test_import_without_mlx(module: str) -> None:
    code = f"import sys, {module}; print([m for m in sys.modules if m.partition('.')[0] in ('mlx', 'mlx_lm')])"
    assert run(code) == "[]"


def test_the_map_of_the_house_is_that_of_the_docstrings() -> None:
    assert house_map.in_document() == house_map.render(), f"run {house_map.COMMAND}"


def test_only_the_server_imports_the_server_of_mlx_lm() -> None:
    found = {f for f, tree in TREES.items() if any(f"{i}.".startswith("mlx_lm.server.") for i in imports(tree))}
    assert found == {f for f in found if f.startswith("mlx_blockpool/server/")}
    assert found


@pytest.mark.parametrize("file", TREES)
def test_files_have_at_most_450_lines(file: str) -> None:
    assert len((ROOT / file).read_text(encoding="utf-8").splitlines()) <= 450


@pytest.mark.parametrize("file", TREES)
def test_functions_have_at_most_40_lines(file: str) -> None:
    functions = [n for n in ast.walk(TREES[file]) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions}
    assert {name: size for name, size in sizes.items() if size > 40} == {}


@pytest.mark.parametrize("file", TREES)
def test_modules_have_a_docstring(file: str) -> None:
    assert ast.get_docstring(TREES[file])


@pytest.mark.parametrize("file", TREES)
def test_nothing_is_global(file: str) -> None:
    assert [n.lineno for n in ast.walk(TREES[file]) if isinstance(n, ast.Global)] == []
