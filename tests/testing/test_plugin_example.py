"""The example of plugins/README.md: installed by its pyproject.toml into a fresh environment, it
does what is said there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from documents import section
from forks import server_forks
from testing.runs_pytest import PLUGIN

from mlx_blockpool.testing import CHECKS

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "tests/plugin_example"
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
MAIN = "from mlx_blockpool.cli import main; raise SystemExit(main())"


class Environment:
    """A fresh environment that also has what this one has, and a folder with a copy of the
    example to install.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False)
        self.python = next((folder / "venv").glob("bin/python"))
        self.site = next((folder / "venv/lib").glob("python*/site-packages"))
        # addsitedir, so that what is installed here by links is found too.
        (self.site / "beside.pth").write_text(
            f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
        )
        self.example = folder / "tests/plugin_example"
        shutil.copytree(
            EXAMPLE,
            self.example,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"),
        )

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
            ".venv/bin/mlx-blockpool": [str(self.python), "-c", MAIN, "plan"],
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

    def fork(self, code: str) -> str:
        """code() in a process that has imported the package before it finds what is installed
        here.
        """
        ran = server_forks().run(f"import site; site.addsitedir({str(self.site)!r})\n{code}")
        assert ran.returncode == 0, ran.stderr
        return ran.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The example, installed as the README says; the commands are the README's."""
    found = Environment(tmp_path_factory.mktemp("example"))
    assert COMMANDS[0] == ".venv/bin/pip install -e tests/plugin_example"
    found.must(COMMANDS[0])
    return found


@pytest.mark.parametrize(
    "file",
    sorted(str(p.relative_to(ROOT)) for p in EXAMPLE.rglob("*") if p.suffix in (".py", ".toml")),
)
def test_the_readme_shows_the_files_of_the_example(file: str) -> None:
    shown = dict(re.findall(r"```\w+ (\S+)\n(.*?)```", SECTION, re.DOTALL))
    assert shown.get(file) == (ROOT / file).read_text(encoding="utf-8")


def test_the_readme_shows_no_other_files() -> None:
    named = re.findall(r"```\w+ (\S+)\n", SECTION)
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_readme_says_what_each_check_does() -> None:
    rows = re.findall(r"^\| (\w+) \| (.*) \|$", SECTION, re.MULTILINE)
    first = {name: str(check.__doc__).partition("\n\n")[0] for name, check in CHECKS.items()}
    assert rows[1:] == [(name, " ".join(text.split())) for name, text in first.items()]


def test_it_is_found_by_its_entry_point_and_overrides_the_bundled_one(
    installed: Environment,
) -> None:
    said = installed.code("""
from mlx_blockpool import spec_from_config
from mlx_blockpool.plugins import make_plugin_manager
manager = make_plugin_manager()
print([dist.metadata["Name"] for _, dist in manager.list_plugin_distinfo()])
llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
         "num_hidden_layers": 3, "torch_dtype": "float16",
    "intermediate_size": 96, "rms_norm_eps": 1e-5, "vocab_size": 90, "num_key_value_heads": 4}
print(spec_from_config(llama, "mine"))
types = ["sliding_attention", "sliding_attention", "full_attention"]
print(spec_from_config({**llama, "layer_types": types, "sliding_window": 32}, "mine").layers[0])
print(spec_from_config({**llama, "model_type": "qwen2"}, "mine").model_id)
""")
    layer = "FullLayer(kv_heads=4, key_dim=16, value_dim=16)"
    assert said.splitlines() == [
        "['blockpool-tiny-llama']",
        f"ModelCacheSpec(model_id='mine, by tiny-llama', layers=({layer}, {layer}, {layer}), "
        "dtype='float16', batches=True, "
        "max_kv_size=None, bits=None)",
        "WindowLayer(kv_heads=4, key_dim=16, value_dim=16, max_size=32, keep=0)",
        "mine",
    ]


def test_plan_uses_it(installed: Environment) -> None:
    said = installed.must(next(c for c in COMMANDS if " plan " in c))
    assert (
        said.splitlines()[0]
        == "tests/plugin_example/config.json, by tiny-llama, bfloat16: 3 layers"
    )


@pytest.mark.thorough
def test_its_own_tests_pass(installed: Environment) -> None:
    said = installed.must(next(c for c in COMMANDS if c.endswith("pytest tests/plugin_example")))
    assert f"{len(CHECKS) - 1} passed, 1 skipped" in said


@pytest.mark.thorough
def test_the_checks_run_on_its_config(installed: Environment) -> None:
    said = installed.must(next(c for c in COMMANDS if "--blockpool-config" in c))
    assert f"{len(CHECKS) - 1} passed, 1 skipped" in said


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plugin_names_itself(installed: Environment, fault: str) -> None:
    source = installed.example / "blockpool_tiny_llama/__init__.py"
    line, said = BROKEN[fault]
    right = source.read_text()
    try:
        source.write_text(f"{right.partition('@hookimpl')[0]}{HOOK}{line}\n")
        ran = installed.run(next(c for c in COMMANDS if " plan " in c))
    finally:
        source.write_text(right)
    assert ran.returncode == 1
    assert said in ran.stderr
    assert f"plugin blockpool-tiny-llama 0.1.0 (blockpool_tiny_llama, {source})" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_plugin_that_does_not_load_names_itself(installed: Environment) -> None:
    source = installed.example / "blockpool_tiny_llama/__init__.py"
    right = source.read_text()
    try:
        source.write_text("import a_package_that_is_not_there\n")
        ran = installed.run(next(c for c in COMMANDS if " plan " in c))
    finally:
        source.write_text(right)
    assert ran.returncode == 1
    assert (
        "blockpool-tiny-llama 0.1.0: entry point tiny_llama = blockpool_tiny_llama in group "
        "mlx_blockpool" in ran.stderr
    )
    assert "No module named 'a_package_that_is_not_there'" in ran.stderr


def test_a_plugin_that_contradicts_the_model_is_named(installed: Environment) -> None:
    said = installed.fork("""
from mlx_blockpool.errors import PluginError
from mlx_blockpool.hooks import hookimpl
from mlx_blockpool.plugins import make_plugin_manager, spec_of_model
from mlx_blockpool.testing import tiny_model
config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
          "num_hidden_layers": 1, "vocab_size": 99}
model = tiny_model({**config, "intermediate_size": 96, "rms_norm_eps": 1e-5})
try:
    spec_of_model(model, {**config, "head_dim": 8}, "mine")
except PluginError as error:
    print(error)
""")
    assert "mine, by tiny-llama, layer 0: the spec says FullLayer(kv_heads=4, key_dim=8" in said
    assert "The spec is from plugin blockpool-tiny-llama 0.1.0 (blockpool_tiny_llama, " in said


def test_uninstalled_the_bundled_one_is_back(installed: Environment) -> None:
    assert COMMANDS[-1] == ".venv/bin/pip uninstall -y blockpool-tiny-llama"
    installed.must(COMMANDS[-1])
    said = installed.must(next(c for c in COMMANDS if " plan " in c))
    # A worker may run other tests of this file after this one.
    installed.must(COMMANDS[0])
    assert said.splitlines()[0] == "tests/plugin_example/config.json, bfloat16: 3 layers"


@pytest.mark.thorough
def test_it_is_installed_as_a_wheel_too(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.must(".venv/bin/pip install tests/plugin_example")
    shutil.rmtree(environment.example / "blockpool_tiny_llama")
    code = (
        "from mlx_blockpool import plugins; print([d.version for _, d in "
        "plugins.make_plugin_manager().list_plugin_distinfo()])"
    )
    assert environment.code(code) == "['0.1.0']\n"
