"""--settings: a TOML file of options.

The command line wins, and a mistake is named with the file.
"""

from __future__ import annotations

import argparse
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
    return parser.parse_args(with_settings([*arguments, "--settings", str(file)]))


def test_options_are_read_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(TEXT)
    args = parsed(file)
    assert (args.decode_share, args.decode_path, args.store_bytes) == (0.7, "ragged", 40 * 10**9)
    assert (args.normalise, args.max_models, args.no_store) == (("date", "replay"), 2, True)


def test_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(TEXT)
    args = parsed(file, "--decode-share", "0.2", "--max-models=3")
    assert (args.decode_share, args.max_models, args.decode_path) == (0.2, 3, "ragged")


def test_arguments_without_a_file_are_unchanged() -> None:
    assert with_settings(["--drafts", "off"]) == ["--drafts", "off"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("drafts = ", "Invalid value"),
        ("drafts = false", "drafts must be"),
        ("[pool]\nbytes = 3", "pool must be"),
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


@pytest.mark.parametrize("text", ["decode-shares = 0.7", "decode-share = 2", 'drafts = "many"'])
def test_an_unknown_option_or_value_ends_with_the_usage(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(SystemExit):
        parsed(file)
    assert text.partition(" ")[0] in capsys.readouterr().err
