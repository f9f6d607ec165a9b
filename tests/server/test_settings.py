"""--config: a TOML file of options.

The command line wins, and a mistake is named with the file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_blockpool.errors import BlockpoolError
from mlx_blockpool.server.options import add_options, with_settings

TEXT = """
decode-share = 0.7
decode_path = "ragged"
store-bytes = "40GB"
normalise = ["date", "replay"]
max-models = 2
no-store = true
"""


def parsed(file: Path, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(with_settings([*arguments, "--config", str(file)], parser))


def test_options_are_read_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(TEXT)
    args = parsed(file)
    assert (args.decode_share, args.decode_path, args.store_bytes) == (0.7, "ragged", 40 * 10**9)
    assert (args.normalise, args.max_models, args.no_store) == (("date", "replay"), 2, True)


def test_an_abbreviated_option_and_a_home_are_read_as_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('store-dir = "~/kv"')
    parser = argparse.ArgumentParser()
    add_options(parser)
    args = parser.parse_args(with_settings(["--conf", str(file)], parser))
    assert args.store_dir == Path.home() / "kv"


def test_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(TEXT)
    args = parsed(file, "--decode-share", "0.2", "--max-models=3")
    assert (args.decode_share, args.max_models, args.decode_path) == (0.2, 3, "ragged")


def test_without_a_file_arguments_are_unchanged_and_the_users_own_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert with_settings(["--drafts", "off"], parser) == ["--drafts", "off"]
    (tmp_path / "mlx-blockpool").mkdir()
    (tmp_path / "mlx-blockpool/config.toml").write_text("max-models = 2")
    assert with_settings(["--drafts", "off"], parser) == ["--max-models=2", "--drafts", "off"]


def test_every_option_of_the_file_is_one_of_the_server(tmp_path: Path) -> None:
    """mlx-lm's options too, and a near name is suggested."""
    file = tmp_path / "settings.toml"
    file.write_text("decode-shares = 0.7")
    with pytest.raises(BlockpoolError, match=r"unknown option decode-shares. Is it decode-share\?"):
        parsed(file)
    ran = subprocess.run(
        [sys.executable, "-m", "mlx_blockpool.cli", "serve", "--config", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert "Is it decode-share?" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("drafts = ", "Invalid value"),
        ("drafts = false", "drafts must be"),
        ("[pool]\nbytes = 3", "unknown option pool"),
        (None, "No such file"),
    ],
)
def test_a_mistake_is_named_with_the_file(tmp_path: Path, text: str | None, named: str) -> None:
    file = tmp_path / "settings.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BlockpoolError, match=named) as caught:
        parsed(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("text", ["decode-share = 2", 'drafts = "many"'])
def test_an_unknown_value_ends_with_the_usage(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(SystemExit):
        parsed(file)
    assert text.partition(" ")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--help", "--pool-bytes SIZE"),
        ("--modle demo", "unrecognized arguments: --modle"),
        ("--port 99999", "--port must be between 0 and 65535"),
    ],
)
def test_help_and_mistakes_are_answered_before_mlx_is_imported(arguments: str, said: str) -> None:
    code = (
        "import sys\n"
        "from mlx_blockpool.cli import main\n"
        f"try: main(['serve', *{arguments.split()}])\n"
        "finally: print('imported', {'mlx.core', 'mlx_lm', 'transformers'} & {*sys.modules})\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said in ended.stdout + ended.stderr
    assert "imported set()" in ended.stdout
