"""`pytest --blockpool-config config.json`: the checks for the model of a config, as the installed
plugins describe it.

By itself the option runs only these checks; with paths, both. Imports the rest of the package only
if a config is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

OPTION = "--blockpool-config"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = (
        "check that mlx-blockpool works for the tiny model of this config.json, or folder, as the "
        "installed plugins describe it"
    )
    parser.getgroup("blockpool").addoption(
        OPTION, action="append", default=[], metavar="FILE", help=f"{text}; may be repeated"
    )


def pytest_configure(config: pytest.Config) -> None:
    configs = [str(path) for path in _configs(config)]
    if configs and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
    config.args += configs


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path in _configs(parent.config):
        return ConfigFile.from_parent(parent, path=file_path)
    return None


class ConfigFile(pytest.File):
    """Collects one test for each check of the model of a config.json."""

    def collect(self) -> Iterator[pytest.Item]:
        from .kit import CHECKS

        for check in CHECKS:
            yield CheckItem.from_parent(self, name=check)

    @cached_property
    def subject(self) -> Any:
        """The Subject, made once for all checks."""
        from .subject import Subject

        return Subject(_read(self.path))


class CheckItem(pytest.Item):
    """The test of one check."""

    def runtest(self) -> None:
        from .kit import run_check

        assert isinstance(self.parent, ConfigFile)
        self.add_report_section("call", "checked", run_check(self.name, self.parent.subject))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from .subject import ConformanceError

        if isinstance(excinfo.value, ConformanceError):
            return f"{self.name}: {excinfo.value}"
        return super().repr_failure(excinfo, style)


def _configs(config: pytest.Config) -> list[Path]:
    """The config files that --blockpool-config names."""
    found = [config.invocation_params.dir / given for given in config.getoption(OPTION)]
    return [(path / "config.json" if path.is_dir() else path).resolve() for path in found]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise pytest.UsageError(
            f"Cannot read {path}: {error}. Give the config.json of a tiny model."
        ) from error
    return found
