"""`pytest --blockpool-config` and the class Conformance, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from architectures.configs import CONFIGS
from forks import server_forks
from testing.runs_pytest import PLUGIN

from mlx_blockpool.testing import CHECKS

pytest_plugins = ["pytester"]

TESTS = str(Path(__file__).parent.parent)
WRONG = f"""
import sys
sys.path.insert(0, {TESTS!r})
from architectures.configs import CONFIGS
from testing import saboteurs
from mlx_blockpool.testing import Conformance

class TestWrong(Conformance):
    config = CONFIGS["llama"]
    provider = saboteurs.Provider("llama", saboteurs.one_less)

class TestRight(Conformance):
    provider = saboteurs.Provider("mamba2")
    made = 0

    def make_model(self):
        from mlx_blockpool.testing import tiny_model
        type(self).made += 1
        assert self.made == 1
        return tiny_model(CONFIGS["mamba2"])
"""


PYTEST = "import pytest, sys; raise SystemExit(pytest.main(sys.argv[1:]))"
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    def runs(*arguments: str) -> pytest.RunResult:
        ran = server_forks().run(
            PYTEST, *PLUGIN, "-p", "no:cacheprovider", *arguments, folder=pytester.path
        )
        return pytest.RunResult(ran.returncode, ran.stdout.splitlines(), ran.stderr.splitlines(), 0)

    return runs


def run_apart(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess(*PLUGIN, "-p", "no:cacheprovider", *arguments, timeout=60)


def write(pytester: pytest.Pytester, config: Any, name: str = "config.json") -> str:
    path = pytester.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return name


def test_a_config_is_checked_and_other_tests_are_not_run(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile("def test_mine(): assert False")
    ran = run("-v", "-rs", "--blockpool-config", write(pytester, CONFIGS["mamba2"]))
    ran.assert_outcomes(passed=len(CHECKS) - 2, skipped=2)
    ran.stdout.fnmatch_lines(
        [f"config.json::{check} PASSED*" for check in CHECKS if check not in ("wrap", "quantised")]
    )
    ran.stdout.fnmatch_lines(["SKIPPED * No layer has a window or a chunk."])


@pytest.mark.thorough
def test_beside_paths_both_are_run(pytester: pytest.Pytester) -> None:
    mine = pytester.makepyfile("def test_mine(): pass")
    write(pytester, CONFIGS["mamba2"], "model/config.json")
    ran = run_apart(pytester, mine.name, "--blockpool-config", "model")
    ran.assert_outcomes(passed=len(CHECKS) - 1, skipped=2)


def test_what_fails_is_said_without_a_traceback(pytester: pytest.Pytester, run: Run) -> None:
    ran = run("--blockpool-config", write(pytester, {**CONFIGS["llama"], "hidden_size": 65_536}))
    ran.assert_outcomes(failed=len(CHECKS))
    ran.stdout.fnmatch_lines(
        [
            "spec: Got a model of * parameters; expected a tiny one, at most 50,000,000. Lower "
            "hidden_size*"
        ]
    )
    ran.stdout.no_fnmatch_line("*Traceback*")


def test_an_assertion_of_other_code_keeps_its_traceback(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makeconftest("""
        from mlx_blockpool.testing import kit

        def of_a_model(subject):
            assert subject is None, "the model is wrong"

        kit.CHECKS.clear()
        kit.CHECKS["provider"] = of_a_model
    """)
    ran = run("--blockpool-config", write(pytester, CONFIGS["mamba2"]))
    ran.assert_outcomes(failed=1)
    ran.stdout.fnmatch_lines(
        [
            "*def of_a_model(subject):*",
            "*AssertionError: the model is wrong*",
            "*conftest.py:*: AssertionError",
        ]
    )


def test_what_is_no_config_is_said(pytester: pytest.Pytester, run: Run) -> None:
    ran = run("--blockpool-config", write(pytester, "{"))
    assert ran.ret != 0
    ran.stdout.fnmatch_lines(["*Cannot read *config.json: *"])


def test_a_config_that_is_not_there_is_an_error(pytester: pytest.Pytester) -> None:
    ran = run_apart(pytester, "--blockpool-config", "nothing.json")
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    ran.stderr.fnmatch_lines(["*nothing.json*"])


def test_a_class_has_a_test_for_each_check(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(WRONG)
    ran = run("-v")
    right, wrong = len(CHECKS) - 2, len(CHECKS) - 3
    ran.assert_outcomes(passed=right + 2, failed=1, skipped=2 + wrong)
    ran.stdout.fnmatch_lines(["*TestWrong::test_spec FAILED*", "*TestRight::test_restart PASSED*"])
    ran.stdout.fnmatch_lines(
        [
            "*ConformanceError: Got llama: the spec has 3 layers and the model makes 4 caches; "
            "expected *"
        ]
    )
    ran.stdout.no_fnmatch_line("*::test_class*")


def test_without_the_option_nothing_of_ours_is_imported(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import sys
        def test_light():
            loaded = {m.partition(".")[0] for m in sys.modules}
            assert not loaded & {"mlx", "mlx_lm", "numpy"}
            assert {m for m in sys.modules if m.startswith("mlx_blockpool.")} <= {
                "mlx_blockpool.testing", "mlx_blockpool.testing.pytest_plugin"
            }
    """)
    run_apart(pytester).assert_outcomes(passed=1)


def test_the_plugin_is_an_entry_point_of_the_package() -> None:
    project = tomllib.loads((Path(TESTS).parent / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {
        "blockpool": "mlx_blockpool.testing.pytest_plugin"
    }


def test_importing_the_kit_imports_no_mlx() -> None:
    code = (
        "import sys, mlx_blockpool.testing; print({'mlx', 'mlx.core', 'mlx_lm', 'pytest'} & "
        "set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "set()\n"
    )
