"""The patch on a copy of the installed mlx-lm, and the patched copy as a real process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata, resources, util
from pathlib import Path

import pytest
from forks import Forks, forks, server_forks

from mlx_blockpool.commands import patch as patcher
from mlx_blockpool.errors import PatchError

VERSION = metadata.version("mlx-lm")
Verb = Callable[[Path], patcher.PatchStatus]

FAKE_BACKEND = """
import json, sys

def main(argv):
    print(json.dumps({"argv": argv}))
    return 7
"""

# Prints what main() hands to ModelProvider, without starting a server.
SHOW_ARGS = """
import json, sys
from mlx_lm import server
server.ModelProvider = lambda args: args
server.run = lambda host, port, args: print(json.dumps(vars(args)))
server.main()
"""

# The same, of the command line.
MODULE = "import runpy; runpy.run_module('mlx_lm', run_name='__main__', alter_sys=True)"

# A file of four lines: a lone carriage return does not end one.
BEFORE = b"1\n2\r\n3\r3\n4\n"
AFTER = b"one\n2\r\n3\r3\n4\nfive\n"
DIFF = b"--- a\n+++ b\n@@ -1,2 +1,2 @@\n-1\n+one\n 2\r\n@@ -4,1 +4,2 @@\n 4\n+five\n"

CRASH_AT_REPLACE = """
import os, sys
from mlx_blockpool.commands import patch as patcher
os.replace = lambda *paths: os._exit(9)
patcher.apply(sys.argv[1])
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return make_copy(tmp_path / "site", "__pycache__", "models", "tuner")


@pytest.fixture(scope="module")
def patched_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with a patched mlx_lm and a backend named fake."""
    site = tmp_path_factory.mktemp("patched")
    patcher.apply(make_copy(site))
    add_backend(site, "fakebackend", "fake", FAKE_BACKEND)
    return site


def make_copy(site: Path, *left_out: str) -> Path:
    """A stock mlx_lm in `site` with its metadata beside it.

    Without its models it cannot be imported.
    """
    spec = util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = site / "mlx_lm"
    shutil.copytree(
        spec.submodule_search_locations[0], folder, ignore=shutil.ignore_patterns(*left_out)
    )
    write_metadata(site, "mlx_lm", VERSION)
    # The developer's own mlx-lm may be patched.
    patcher.revert(folder)
    return folder


def write_metadata(site: Path, name: str, version: str, **files: str) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for stem, text in files.items():
        (info / f"{stem}.txt").write_text(text)


def add_backend(site: Path, module: str, backend: str, source: str) -> None:
    (site / f"{module}.py").write_text(source)
    entry_points = f"[mlx_lm.cache_backends]\n{backend} = {module}:main\n"
    write_metadata(site, module, "1.0", entry_points=entry_points)


def read_all(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def run_python(*args: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *args],
        env=environment,
        cwd=path,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_patcher_imports_neither_mlx_nor_mlx_lm() -> None:
    code = (
        "import sys; from mlx_blockpool.commands import patch; patch.status(); print({'mlx', "
        "'mlx_lm'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.stderr) == ("set()\n", "")


def test_status_finds_the_mlx_lm_of_this_interpreter() -> None:
    found = patcher.status()
    spec = util.find_spec("mlx_lm")
    assert spec is not None
    assert [str(found.folder)] == list(spec.submodule_search_locations or [])
    assert found.version == VERSION


def test_apply_then_revert_is_byte_identical(copy: Path) -> None:
    before = read_all(copy)
    assert patcher.status(copy).state == "stock"

    applied = patcher.apply(copy)
    assert (applied.state, applied.files) == ("patched", {"server.py": "patched"})
    after = read_all(copy)
    assert [name for name in after if after[name] != before.get(name)] == ["server.py"]

    assert patcher.revert(copy).state == "stock"
    assert read_all(copy) == before


def test_apply_keeps_the_file_mode(copy: Path) -> None:
    (copy / "server.py").chmod(0o640)
    patcher.apply(copy)
    assert (copy / "server.py").stat().st_mode & 0o777 == 0o640


def test_apply_leaves_a_hard_linked_original_alone(copy: Path, tmp_path: Path) -> None:
    cached = tmp_path / "cached.py"
    os.link(copy / "server.py", cached)
    before = cached.read_bytes()
    patcher.apply(copy)
    assert cached.read_bytes() == before


def test_apply_and_revert_twice_write_once(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda old, new: (writes.append(Path(new).name), replace(old, new))
    )
    assert [patcher.apply(copy).state for _ in range(2)] == ["patched", "patched"]
    assert writes == ["server.py"]
    assert [patcher.revert(copy).state for _ in range(2)] == ["stock", "stock"]
    assert writes == ["server.py", "server.py"]


@pytest.mark.parametrize("verb", [patcher.apply, patcher.revert])
def test_changed_file_is_refused_and_left(copy: Path, verb: Verb) -> None:
    with (copy / "server.py").open("ab") as file:
        file.write(b"# mine\n")
    before = read_all(copy)
    assert patcher.status(copy).state == "changed"
    with pytest.raises(
        PatchError, match=r"sha256 is [0-9a-f]{64}, not [0-9a-f]{64}.*pip install .*mlx-lm=="
    ):
        verb(copy)
    assert read_all(copy) == before


def test_other_line_endings_are_a_change(copy: Path) -> None:
    server = copy / "server.py"
    server.write_bytes(server.read_bytes().replace(b"\n", b"\r\n"))
    assert patcher.status(copy).files == {"server.py": "changed"}


def test_missing_file_is_refused(copy: Path) -> None:
    (copy / "server.py").unlink()
    assert patcher.status(copy).files == {"server.py": "missing"}
    with pytest.raises(PatchError, match=r"server\.py is missing"):
        patcher.apply(copy)


@pytest.mark.parametrize("verb", [patcher.apply, patcher.revert])
def test_unknown_version_is_refused_and_left(copy: Path, verb: Verb) -> None:
    shutil.rmtree(copy.parent / f"mlx_lm-{VERSION}.dist-info")
    write_metadata(copy.parent, "mlx_lm", "0.99.0")
    before = read_all(copy)
    assert (patcher.status(copy).version, patcher.status(copy).state) == ("0.99.0", "unsupported")
    with pytest.raises(
        PatchError, match=r"mlx-lm 0\.99\.0 is installed, and there are patches for .*0\.32\.2"
    ):
        verb(copy)
    assert read_all(copy) == before


def test_no_mlx_lm_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patcher.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PatchError, match="mlx-lm is not installed"):
        patcher.status()


def test_failed_replace_leaves_the_original_and_no_litter(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(old: Path, new: Path) -> None:
        assert Path(old).stat().st_size > Path(new).stat().st_size
        raise PermissionError(13, "Permission denied", str(new))

    before = read_all(copy)
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PatchError, match=r"Cannot write in .*Permission denied"):
        patcher.apply(copy)
    assert read_all(copy) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_folder_is_refused(copy: Path) -> None:
    copy.chmod(0o555)
    try:
        with pytest.raises(PatchError, match="Cannot write in"):
            patcher.apply(copy)
    finally:
        copy.chmod(0o755)
    assert patcher.status(copy).state == "stock"


def test_crash_before_replace_leaves_the_original(copy: Path) -> None:
    before = (copy / "server.py").read_bytes()
    child = subprocess.run([sys.executable, "-c", CRASH_AT_REPLACE, str(copy)], timeout=60)
    assert child.returncode == 9
    assert (copy / "server.py").read_bytes() == before
    assert patcher.apply(copy).state == "patched"


def make_patches(folder: Path, files: Mapping[str, tuple[bytes, bytes, bytes]]) -> None:
    """A patch folder for mlx-lm 1.0: file name -> (before, diff, after)."""
    version = folder / "mlx-lm-1.0"
    version.mkdir()
    items = {}
    for name, (before, diff, after) in files.items():
        (version / f"{name}.patch").write_bytes(diff)
        items[name] = {
            "patch": f"{name}.patch",
            "before": patcher._sha256(before),
            "after": patcher._sha256(after),
        }
    (version / "manifest.json").write_text(json.dumps({"mlx_lm": "1.0", "files": items}))


@pytest.fixture
def two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny mlx-lm 1.0 whose patch touches x.py and y.py."""
    make_patches(tmp_path, dict.fromkeys(["x.py", "y.py"], (BEFORE, DIFF, AFTER)))
    folder = tmp_path / "site" / "mlx_lm"
    write_metadata(folder.parent, "mlx_lm", "1.0")
    folder.mkdir()
    for name in ("x.py", "y.py"):
        (folder / name).write_bytes(BEFORE)
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    return folder


def test_all_files_are_patched_and_keep_their_line_endings(two_files: Path) -> None:
    assert patcher.apply(two_files).files == {"x.py": "patched", "y.py": "patched"}
    assert read_all(two_files) == dict.fromkeys(["x.py", "y.py"], AFTER)
    patcher.revert(two_files)
    assert read_all(two_files) == dict.fromkeys(["x.py", "y.py"], BEFORE)


def test_one_changed_file_keeps_the_others_from_being_written(two_files: Path) -> None:
    (two_files / "y.py").write_bytes(b"mine\n")
    with pytest.raises(PatchError, match=r"y\.py"):
        patcher.apply(two_files)
    assert read_all(two_files) == {"x.py": BEFORE, "y.py": b"mine\n"}


def test_half_patched_is_finished_by_apply_or_revert(two_files: Path) -> None:
    (two_files / "x.py").write_bytes(AFTER)
    assert patcher.status(two_files).state == "changed"
    assert "finishes the work" in patcher.describe(patcher.status(two_files))
    assert patcher.apply(two_files).state == "patched"
    (two_files / "x.py").write_bytes(BEFORE)
    assert patcher.revert(two_files).state == "stock"


@pytest.mark.parametrize(
    ("old", "new"), [(b" 2\r\n", b" 2\n"), (b"+one\n", b"+ONE\n")], ids=["context", "result"]
)
def test_damaged_patch_is_refused(two_files: Path, tmp_path: Path, old: bytes, new: bytes) -> None:
    patch = tmp_path / "mlx-lm-1.0" / "y.py.patch"
    patch.write_bytes(patch.read_bytes().replace(old, new))
    with pytest.raises(PatchError, match=r"not [0-9a-f]{64}\. Reinstall mlx-blockpool"):
        patcher.apply(two_files)
    assert read_all(two_files) == dict.fromkeys(["x.py", "y.py"], BEFORE)


def test_describe_names_version_folder_files_and_what_to_do(copy: Path) -> None:
    stock = patcher.describe(patcher.status(copy))
    assert stock.splitlines()[:2] == [f"mlx-lm {VERSION} in {copy}: stock", "  server.py: stock"]
    assert "--apply" in stock
    assert "--revert" in patcher.describe(patcher.apply(copy))
    (copy / "server.py").write_text("mine")
    assert f"pip install --force-reinstall --no-deps mlx-lm=={VERSION}" in patcher.describe(
        patcher.status(copy)
    )


@pytest.fixture(scope="module")
def server(patched_site: Path) -> Iterator[Forks]:
    """Processes that have imported the patched server."""
    with forks(
        "from mlx_lm import server", patched_site, PYTHONPATH=str(patched_site), COLUMNS="200"
    ) as found:
        yield found


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the patch command")
def test_patch_command_gives_the_same_file(copy: Path) -> None:
    diff = resources.files("mlx_blockpool_patches") / f"mlx-lm-{VERSION}" / "server.py.patch"
    subprocess.run(
        ["patch", "-p1", "-s"], input=diff.read_bytes(), cwd=copy.parent, check=True, timeout=60
    )
    assert patcher.status(copy).state == "patched"


@pytest.mark.parametrize(
    ("args", "argv"),
    [
        pytest.param(
            ["server", "--cache-backend", "fake", "--port", "1"],
            ["--port", "1"],
            marks=pytest.mark.thorough,
        ),
        (
            ["server", "--port", "1", "--cache-backend=fake", "--new", "-x"],
            ["--port", "1", "--new", "-x"],
        ),
        (["server", "--help", "--cache-backend", "fake"], ["--help"]),
        pytest.param(
            [
                "server",
                "--chat-template-args",
                '{"a": 1}',
                "--cache-backend",
                "fake",
                "--seed",
                "-1",
                "--cache",
                "9",
            ],
            ["--chat-template-args", '{"a": 1}', "--seed", "-1", "--cache", "9"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_backend_gets_the_rest_of_the_command_line(
    server: Forks, args: list[str], argv: list[str]
) -> None:
    result = server.run(MODULE, *args)
    assert json.loads(result.stdout.splitlines()[-1]) == {"argv": argv}
    assert result.returncode == 7


def test_first_of_two_distributions_of_one_name_is_called(server: Forks, tmp_path: Path) -> None:
    add_backend(tmp_path, "other", "fake", "def main(argv):\n    print('other')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from mlx_lm.server import main; main()"
    )
    result = server.run(code, "--cache-backend", "fake")
    assert (result.stdout, result.returncode) == ("other\n", 0)


def test_unknown_backend_lists_the_installed_ones(server: Forks, tmp_path: Path) -> None:
    add_backend(tmp_path, "other", "another", FAKE_BACKEND)
    code = f"import sys; sys.path.append({str(tmp_path)!r}); from mlx_lm.server import main; main()"
    result = server.run(code, "--cache-backend", "nope")
    assert result.returncode == 2
    message, _, names = result.stderr.splitlines()[-1].partition("installed: ")
    assert message.endswith("error: unknown cache backend 'nope'; ")
    assert {"another", "fake"} <= set(names.split(", "))
    assert names.split(", ") == sorted(names.split(", "))


def test_no_backend_installed_is_said(server: Forks) -> None:
    code = "from mlx_lm import server; server.entry_points = lambda group: (); server.main()"
    result = server.run(code, "--cache-backend", "nope")
    assert result.stderr.splitlines()[-1].endswith(
        "error: unknown cache backend 'nope'; none installed"
    )
    assert result.returncode == 2


def test_shortened_option_is_refused_rather_than_ignored(server: Forks) -> None:
    result = server.run(SHOW_ARGS, "--cache-back", "fake")
    assert (result.stdout, result.returncode) == ("", 2)
    assert result.stderr.splitlines()[-1].endswith(
        "error: --cache-backend must be written out in full"
    )


def test_help_without_backend_lists_the_option(patched_site: Path) -> None:
    # Really as from the command line.
    result = run_python("-m", "mlx_lm", "server", "--help", path=patched_site)
    assert result.returncode == 0
    assert "--cache-backend NAME" in result.stdout
    assert "MLX Http Server." in result.stdout


def test_without_the_option_arguments_are_as_in_stock(server: Forks) -> None:
    args = [SHOW_ARGS, "--port", "1", "--temp", "0.5"]
    stock = server_forks().run(*args)
    patched = server.run(*args)
    assert json.loads(patched.stdout) == {**json.loads(stock.stdout), "cache_backend": None}
