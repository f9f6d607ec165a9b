"""`plugin new`: the package that it writes works as plugins/README.md says, installed into a fresh
environment.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
from documents import section
from testing.runs_pytest import PLUGIN
from thorough import only

from mlx_blockpool import commands
from mlx_blockpool.commands.plugin import write_package
from mlx_blockpool.errors import PluginError
from mlx_blockpool.testing import CHECKS

# Of the installed package, which is a wheel's in CI.
TEMPLATE = Path(commands.__path__[0]) / "plugin_template"
SECTION = section("plugins/README.md", "Write a plugin")
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
    for line in block.splitlines()
]

BROKEN = {
    "raises": ('    raise KeyError("num_heads")', "raised KeyError: 'num_heads'"),
    "returns nonsense": ("    return {'layers': 3}", " returned dict instead of a ModelCacheSpec"),
    "returns a spec of nonsense": (
        "    return ModelCacheSpec(model_id, ('full',) * 3)",
        " returned a spec with 'full' for a layer instead of ",
    ),
    "returns a list of layers": (
        "    return ModelCacheSpec(model_id, [FullLayer(2, 16, 16)])",
        "layers are a list, not a tuple",
    ),
    "cannot describe it": ("    raise SpecError('no heads')", "no heads. Raised by "),
}
HOOK = (
    "from mlx_blockpool.errors import SpecError\n\n@hookimpl\ndef model_cache_spec(config, "
    "model_id):\n"
)
PLAN = next(command for command in COMMANDS if " plan " in command)
MAIN = "from mlx_blockpool.cli import main; raise SystemExit(main())"


class Environment:
    """A fresh environment that also has what this one has, in which a plugin is begun."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False)
        self.python = next((folder / "venv").glob("bin/python"))
        self.site = next((folder / "venv/lib").glob("python*/site-packages"))
        # addsitedir, so that what is installed here by links is found too.
        (self.site / "installed.pth").write_text(
            f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
        )
        self.must(COMMANDS[0])
        self.source = folder / "my-arch/my_arch/__init__.py"

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """A command of the README, with the programs of this environment."""
        program, *arguments = shlex.split(command)
        pip = [sys.executable, "-m", "pip", "--python", str(self.python)]
        offline = (
            ["--no-index", "--no-deps", "--no-build-isolation"]
            if arguments[:1] == ["install"]
            else []
        )
        start = {
            ".venv/bin/pip": [*pip, *arguments[:1], *offline],
            ".venv/bin/pytest": [
                str(self.python),
                "-m",
                "pytest",
                *PLUGIN,
                "-p",
                "no:cacheprovider",
                *arguments[:1],
            ],
            ".venv/bin/mlx-blockpool": [str(self.python), "-c", MAIN, *arguments[:1]],
        }[program]
        # A source that is changed twice in a second would be read from its old bytecode.
        env = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [*start, *arguments[1:]],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def must(self, command: str) -> str:
        ran = self.run(command)
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    def code(self, code: str) -> str:
        return subprocess.run(
            [str(self.python), "-c", code], cwd="/", capture_output=True, text=True, check=True
        ).stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The package, begun and installed as the README says; the commands are the README's."""
    found = Environment(tmp_path_factory.mktemp("plugin"))
    found.must(COMMANDS[1])
    return found


def test_the_readme_shows_files_of_the_package() -> None:
    shown = dict(re.findall(r"```python (\S+)\n(.*?)```", SECTION, re.DOTALL))
    assert len(shown) == 2
    folder = TEMPLATE.as_posix()
    files = {file: Path(file.replace("my-arch", folder, 1)) for file in shown}
    assert shown == {file: path.read_text(encoding="utf-8") for file, path in files.items()}


def test_a_package_is_begun_under_any_name(tmp_path: Path) -> None:
    said = write_package("glm-6-air", tmp_path)
    files = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {
        "glm-6-air/config.json",
        "glm-6-air/glm_6_air/__init__.py",
        "glm-6-air/glm_6_air/model.py",
        "glm-6-air/pyproject.toml",
        "glm-6-air/tests/test_conformance.py",
    }
    text = "".join((tmp_path / file).read_text() for file in files)
    assert "class TestGlm6Air" in text
    assert not re.search("my.?arch", text, re.IGNORECASE)
    assert "pytest" in said


@pytest.mark.parametrize(
    "name", ["", "My-Arch", "../up", "a--b", "-a", "a.b", "3d", "mlx-lm", "class", "tests"]
)
def test_names_that_no_package_can_have_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"lower-case|another name"):
        write_package(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("kept")
    with pytest.raises(PluginError, match="exists"):
        write_package("mine", tmp_path)
    with pytest.raises(PluginError, match="cannot be written"):
        write_package("mine", tmp_path / "missing")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes"]


@pytest.mark.parametrize("at", range(6))
def test_nothing_is_left_where_a_disk_is_full(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, rename, done = Path.write_text, Path.rename, iter(range(at))

    def until_full(change: Any) -> Any:
        def changed(*args: Any, **kwargs: Any) -> Any:
            if next(done, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            return change(*args, **kwargs)

        return changed

    monkeypatch.setattr(Path, "write_text", until_full(write))
    monkeypatch.setattr(Path, "rename", until_full(rename))
    with pytest.raises(PluginError, match="mine cannot be written: No space left on device"):
        write_package("mine", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_readme_says_what_each_check_does() -> None:
    rows = re.findall(r"^\| (\w+) \| (.*) \|$", SECTION, re.MULTILINE)
    first = {name: str(check.__doc__).partition("\n\n")[0] for name, check in CHECKS.items()}
    assert rows[1:] == [(name, " ".join(text.split())) for name, text in first.items()]


def test_it_is_found_by_its_entry_point_and_overrides_the_bundled_ones(
    installed: Environment,
) -> None:
    said = installed.code("""
import my_arch
from mlx_blockpool import hookimpl, spec_from_config
from mlx_blockpool.plugins import make_plugin_manager
manager = make_plugin_manager()
print([dist.metadata["Name"] for _, dist in manager.list_plugin_distinfo()])
llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
         "num_hidden_layers": 1, "intermediate_size": 96, "rms_norm_eps": 1e-5, "vocab_size": 90}
print(spec_from_config(llama, "mine").layers)
own = my_arch.model_cache_spec
my_arch.model_cache_spec = hookimpl(lambda config, model_id: own(
    {**config, "model_type": "my_arch", "num_key_value_heads": 4, "head_dim": 8}, model_id))
print(spec_from_config(llama, "mine", make_plugin_manager()).layers)
""")
    assert said.splitlines() == [
        "['my-arch']",
        "(FullLayer(kv_heads=4, key_dim=16, value_dim=16),)",
        "(FullLayer(kv_heads=4, key_dim=8, value_dim=8),)",
    ]


def test_plan_uses_it(installed: Environment) -> None:
    said = installed.must(PLAN)
    assert said.splitlines()[0] == "my-arch/config.json, bfloat16: 2 layers"


@pytest.mark.thorough
def test_its_own_tests_pass(installed: Environment) -> None:
    said = installed.must(next(c for c in COMMANDS if c.endswith("pytest my-arch")))
    assert f"{len(CHECKS) - 1} passed, 1 skipped" in said


@pytest.mark.thorough
def test_the_checks_run_on_its_config(installed: Environment) -> None:
    said = installed.must(next(c for c in COMMANDS if "--blockpool-config" in c))
    assert f"{len(CHECKS) - 1} passed, 1 skipped" in said


@pytest.mark.parametrize("fault", only(BROKEN, "raises"))
def test_a_broken_plugin_names_itself(installed: Environment, fault: str) -> None:
    source = installed.source
    line, said = BROKEN[fault]
    right = source.read_text()
    try:
        source.write_text(f"{right.partition('@hookimpl')[0]}{HOOK}{line}\n")
        ran = installed.run(PLAN)
    finally:
        source.write_text(right)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert f"plugin my-arch 0.1.0 (my_arch, {source})" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_plugin_that_does_not_load_names_itself(installed: Environment) -> None:
    source = installed.source
    right = source.read_text()
    try:
        source.write_text("import a_package_that_is_not_there\n")
        ran = installed.run(PLAN)
    finally:
        source.write_text(right)
    assert ran.returncode == 2
    assert "my-arch 0.1.0: entry point my_arch = my_arch in group mlx_blockpool" in ran.stderr
    assert "No module named 'a_package_that_is_not_there'" in ran.stderr


@pytest.mark.thorough
def test_uninstalled_the_type_is_unknown(installed: Environment) -> None:
    installed.must(COMMANDS[-1])
    ran = installed.run(PLAN)
    # A worker may run other tests of this file after this one.
    installed.must(COMMANDS[1])
    assert ran.returncode == 2
    assert "nor an installed plugin has model_type 'my_arch'" in ran.stderr


@pytest.mark.thorough
def test_it_is_installed_as_a_wheel_too(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.must(".venv/bin/pip install ./my-arch")
    shutil.rmtree(environment.source.parent)
    code = (
        "from mlx_blockpool import plugins; print([d.version for _, d in "
        "plugins.make_plugin_manager().list_plugin_distinfo()])"
    )
    assert environment.code(code) == "['0.1.0']\n"
