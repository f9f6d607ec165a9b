"""--kv-bits and its kin: what the options mean, what they warn of, and how a server with them serves."""

from __future__ import annotations

import pytest

from mlx_blockpool.config import KVBits, kv_bits
from mlx_blockpool.errors import BlockpoolError
from mlx_blockpool.server.options import FOUR_BITS, server_config, warnings
from server.serving import parse

K8V4 = ("--kv-bits-keys", "8", "--kv-bits-values", "4")


@pytest.mark.parametrize(
    ("arguments", "bits", "words"),
    [
        ((), None, ""),
        (("--kv-group-size", "32"), None, ""),
        (("--kv-bits", "8"), KVBits(8, 8, 64), "8-bit keys and values"),
        (("--kv-bits", "4", "--kv-group-size", "128"), KVBits(4, 4, 128), "4-bit keys and values"),
        (K8V4, KVBits(8, 4), "8-bit keys and 4-bit values"),
        (("--kv-bits", "8", "--kv-bits-values", "4"), KVBits(8, 4), "8-bit keys and 4-bit values"),
        (("--kv-bits", "4", "--kv-bits-keys", "16"), KVBits(None, 4), "4-bit values"),
        (("--kv-bits-keys", "8"), KVBits(8, None), "8-bit keys"),
        (("--kv-bits", "8", "--kv-bits-keys", "16", "--kv-bits-values", "16"), None, ""),
    ],
)
def test_the_options_choose_the_bits_of_the_pool(arguments: tuple[str, ...], bits: KVBits | None, words: str) -> None:
    args = parse(list(arguments))
    assert server_config(args).pool.bits == bits
    assert bits is None or str(bits) == words
    # By its own option mlx-lm would serve one request at a time, and quantise a second time.
    assert args.kv_bits is None


@pytest.mark.parametrize(
    ("option", "number"), [("--kv-bits", "3"), ("--kv-bits-keys", "2"), ("--kv-bits-values", "x"), ("--kv-group-size", "48")]
)
def test_other_numbers_are_argparses_own_error(option: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([option, number])
    assert f"argument {option}: invalid" in capsys.readouterr().err


def test_other_numbers_of_a_script_are_an_error() -> None:
    with pytest.raises(BlockpoolError, match="3 bits"):
        kv_bits(3, None, None, 64)
    with pytest.raises(BlockpoolError, match="48 values"):
        kv_bits(8, None, None, 48)


def test_four_bits_without_more_are_warned_of() -> None:
    assert warnings(parse(["--kv-bits", "4"])) == [FOUR_BITS]
    for arguments in ([], ["--kv-bits", "8"], K8V4, ["--kv-bits", "4", "--kv-bits-keys", "8"]):
        assert warnings(parse(list(arguments))) == []


def test_a_start_of_quantisation_is_not_used() -> None:
    assert warnings(parse(["--kv-bits", "8", "--quantized-kv-start", "0"])) == []
    (warning,) = warnings(parse(["--kv-bits", "8", "--quantized-kv-start", "5000"]))
    assert warning.startswith("--quantized-kv-start 5000 is not used")
    assert warnings(parse(["--quantized-kv-start", "5000"])) == []


def test_a_store_is_coarser_than_the_pool() -> None:
    for arguments in (
        ["--kv-bits", "8", "--store-bits", "4"],
        [*K8V4, "--store-bits", "4"],
        ["--kv-bits-keys", "8", "--store-bits", "8"],
    ):
        assert server_config(parse(arguments)).store is not None
    for arguments in (
        ["--kv-bits", "8", "--store-bits", "8"],
        ["--kv-bits", "4", "--store-bits", "8"],
        [*K8V4, "--store-bits", "8"],
    ):
        with pytest.raises(BlockpoolError, match="Leave it out"):
            server_config(parse(arguments))
        server_config(parse([*arguments, "--no-store"]))
