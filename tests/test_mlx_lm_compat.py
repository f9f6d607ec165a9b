"""Which mlx-lm is accepted, and copies of functions that see other names."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import server
from stock_names import problem

from mlx_blockpool import mlx_lm_compat
from mlx_blockpool.errors import UnsupportedVersionError
from mlx_blockpool.mlx_lm_compat import (
    EXPORTS,
    STOCK,
    SUPPORTED,
    StockName,
    add_server_options,
    check_version,
    installed,
    rebind,
)

GREETING = "hello"


def greet(name: str, end: str = ".", *, mark: str = "!") -> str:
    """Greets."""
    return f"{GREETING} {name}{end}{mark}"


def make_counter() -> tuple[types.FunctionType, list[int]]:
    seen: list[int] = []

    def count() -> str:
        seen.append(len(seen))
        return GREETING

    return count, seen  # type: ignore[return-value]


@pytest.mark.parametrize(
    "version", ["0.32.2", "0.32.3", "0.32.10", "0.32.99", "0.32.2+local.1", "0.32.3.dev1"]
)
def test_versions_in_the_range_are_accepted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize(
    "version", ["0.33.0", "0.33", "0.32.1", "0.31.9", "0.4.0", "1.0.0", "0.33.0rc1", "none"]
)
def test_versions_outside_are_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(UnsupportedVersionError) as info:
        check_version(version)
    assert str(info.value) == (
        f"mlx-lm {version} is installed; mlx-blockpool needs >=0.32.2,<0.33. "
        "Install a supported version: pip install 'mlx-lm>=0.32.2,<0.33'."
    )


def test_the_installed_version_is_checked_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    check_version()
    monkeypatch.setattr(metadata, "version", lambda name: {"mlx-lm": "0.31.0"}[name])
    with pytest.raises(UnsupportedVersionError, match=r"mlx-lm 0\.31\.0 is installed"):
        check_version()


def test_a_missing_mlx_lm_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UnsupportedVersionError, match="mlx-lm none is installed"):
        check_version()


def test_rebind_gives_a_copy_that_sees_another_name() -> None:
    copy = rebind(greet, GREETING="good evening")
    assert copy("Ada") == "good evening Ada.!"
    assert copy("Ada", "", mark="?") == "good evening Ada?"
    assert copy.__name__ == "greet"


def test_rebind_leaves_the_original_and_its_module_as_they_are() -> None:
    code, names = greet.__code__, dict(greet.__globals__)
    rebind(greet, GREETING="good evening")
    assert greet("Ada") == "hello Ada.!"
    assert GREETING == "hello"
    assert greet.__code__ is code
    assert greet.__globals__ == names


def test_rebind_keeps_the_closure() -> None:
    count, seen = make_counter()
    copy = rebind(count, GREETING="hi")
    assert [copy(), count(), copy()] == ["hi", "hello", "hi"]
    assert seen == [0, 1, 2]


def test_rebind_refuses_a_name_that_the_module_does_not_have() -> None:
    with pytest.raises(AssertionError, match=r"has no \['GRETING'\]"):
        rebind(greet, GRETING="typo")


def test_rebind_refuses_what_is_not_a_python_function() -> None:
    with pytest.raises(AssertionError, match="not a Python function"):
        rebind(len)


@pytest.mark.parametrize(
    "command", ["import mlx_blockpool.kv", "import mlx_blockpool.server", "SERVE"]
)
def test_another_mlx_lm_is_refused_before_it_is_used(command: str, tmp_path: Path) -> None:
    info = tmp_path / "mlx_lm-0.31.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-lm\nVersion: 0.31.3\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    arguments = (
        ["-m", "mlx_blockpool.cli", "serve", "--model", "demo"]
        if command == "SERVE"
        else ["-c", command]
    )
    ran = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, cwd="/"
    )
    assert ran.returncode == (2 if command == "SERVE" else 1)
    assert "mlx-lm 0.31.3 is installed; mlx-blockpool needs >=0.32.2,<0.33" in ran.stderr
    assert ("Traceback" in ran.stderr) == (command != "SERVE")


def test_the_installed_mlx_lm_has_the_names_and_parameters_that_the_package_needs() -> None:
    assert [found for path, name in STOCK.items() if (found := problem(path, name))] == []


def test_every_export_is_listed_with_a_reason_and_can_be_imported() -> None:
    assert [name for name, path in EXPORTS.items() if not STOCK[path].why] == []
    assert {name: getattr(mlx_lm_compat, name).__name__ for name in EXPORTS} == {
        name: path.rpartition(".")[2] for name, path in EXPORTS.items()
    }


@pytest.mark.parametrize(
    "path",
    ["server._no_such", "no_such_module.name", "server.APIHandler._no_such", "server.NoClass.name"],
)
def test_a_name_that_is_gone_is_reported_with_the_version(path: str) -> None:
    assert (
        problem(path, StockName("a test"))
        == f"mlx-lm {installed()}: {path} is gone. It was needed for this: a test."
    )


def test_a_changed_signature_is_reported_with_the_version() -> None:
    found = problem("server._make_sampler", StockName("a test", "(args)"))
    assert found == (
        f"mlx-lm {installed()}: server._make_sampler takes (args, tokenizer), and took (args). It "
        "is needed for this: a test."
    )


def test_a_function_that_no_longer_reads_what_a_copy_replaces_is_reported() -> None:
    found = problem("server._make_sampler", StockName("a test", None, ("make_sampler", "random")))
    assert found == (
        f"mlx-lm {installed()}: server._make_sampler does not read random any more. A copy of it "
        "replaces them for this: a test."
    )


def test_importing_a_name_that_is_gone_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(EXPORTS, "gone", "server._gone")
    with pytest.raises(UnsupportedVersionError) as info:
        _ = mlx_lm_compat.gone
    assert str(info.value) == (
        f"mlx-lm {installed()} has no server._gone. Install a supported version: pip install "
        "'mlx-lm>=0.32.2,<0.33'."
    )


def test_the_supported_range_is_the_one_of_the_project_file() -> None:
    project = Path(__file__).parent.parent / "pyproject.toml"
    assert f'"mlx-lm{SUPPORTED}"' in project.read_text(encoding="utf-8")


def test_options_that_are_read_are_those_of_the_server() -> None:
    read = argparse.ArgumentParser()
    add_server_options(read)
    own: list[argparse.ArgumentParser] = []

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *_: Any, **__: Any) -> Any:
            own.append(self)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rebind(server.main, argparse=types.SimpleNamespace(ArgumentParser=Parser))()

    def described(parser: argparse.ArgumentParser) -> list[Any]:
        kinds = [getattr(action.type, "__name__", None) for action in parser._actions]
        others = [vars(action) | {"container": None, "type": None} for action in parser._actions]
        return list(zip(kinds, others, strict=True))

    assert described(read) == described(own[0])


def test_another_main_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server.py").write_text("def main():\n    run(parsed())\n")
    spec = importlib.util.spec_from_file_location("mlx_lm", tmp_path / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(UnsupportedVersionError, match=r"no options in server\.main"):
        mlx_lm_compat._server_options.__wrapped__()
