"""--kv-bits and its kin: what the options mean, what they warn of, and how a server with them
serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documents import TEXTS
from mlx_lm import generate, load
from mlx_lm.models.cache import make_prompt_cache
from models import make_model, save_model

from mlx_blockpool.config import KVBits, PoolConfig, kv_bits
from mlx_blockpool.errors import BlockpoolError, PoolExhaustedError
from mlx_blockpool.kv.build import describe
from mlx_blockpool.kv.rounded_caches import rounded
from mlx_blockpool.server.model_caches import need_room
from mlx_blockpool.server.options import FOUR_BITS, server_config, warnings
from mlx_blockpool.spec import FullLayer, ModelCacheSpec
from server.serving import Client, blockpool_server, cached_tokens, parse

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
def test_the_options_choose_the_bits_of_the_pool(
    arguments: tuple[str, ...], bits: KVBits | None, words: str
) -> None:
    args = parse(list(arguments))
    assert server_config(args).pool.bits == bits
    assert bits is None or str(bits) == words
    # By its own option mlx-lm would serve one request at a time, and quantise a second time.
    assert args.kv_bits is None


@pytest.mark.parametrize(
    ("option", "number"),
    [
        ("--kv-bits", "3"),
        ("--kv-bits-keys", "2"),
        ("--kv-bits-values", "x"),
        ("--kv-group-size", "48"),
    ],
)
def test_other_numbers_are_argparses_own_error(
    option: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([option, number])
    assert f"argument {option}: invalid" in capsys.readouterr().err


def test_other_numbers_of_a_script_are_an_error() -> None:
    with pytest.raises(BlockpoolError, match="3 bits"):
        kv_bits(3, None, None, 64)
    with pytest.raises(BlockpoolError, match="48 is not a group size"):
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


OPTIONS = {KVBits(8, 8): "--kv-bits 8", KVBits(8, 4): " ".join(K8V4), KVBits(4, 4): "--kv-bits 4"}


@pytest.mark.parametrize("bits", OPTIONS)
def test_the_readme_has_the_bytes_of_the_spec(bits: KVBits) -> None:
    spec = ModelCacheSpec("m", (FullLayer(8, 128, 128),), "bfloat16")
    share = spec.with_bits(bits).bytes_per_token() / spec.bytes_per_token()
    assert (
        f"| `{OPTIONS[bits]}` | {share:.2f} | {1 / share:.2f}x |"
        in TEXTS["mlx_blockpool/server/quantised.md"]
    )


# -- a server --------------------------------------------------------------------------------------

PROMPT = "Common to all agents. " * 18


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose heads can be quantised; the attention of unattachable reads no blocks."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: save_model(folder / name, name, head_dim=32)
        for name in ("llama", "gemma3_text", "gemma2", "unattachable")
    }


@pytest.fixture(scope="module")
def server(models: dict[str, Path]) -> Iterator[Client]:
    beside = ("--allow-models", str(models["llama"].parent), "--pool-bytes", "8MB")
    with blockpool_server(
        models["llama"], *beside, "--kv-bits", "8", "--kv-bits-values", "4"
    ) as running:
        yield running


def complete(client: Client, model: Path, prompt: str, **options: str) -> tuple[str, int]:
    """The reply and the number of cached tokens."""
    status, answer = client.send(
        "/v1/completions", {"model": str(model), "prompt": prompt, "max_tokens": 12, **options}
    )
    assert status == 200, answer
    return answer["choices"][0]["text"], cached_tokens(answer["usage"])


@cache
def loaded_once(model: Path) -> tuple[Any, Any]:
    return load(str(model))[:2]


def expected(model: Path, prompt: str, bits: KVBits | None) -> str:
    """mlx-lm's reply on its own caches, whose keys and values were quantised and dequantised."""
    loaded, tokenizer = loaded_once(model)
    caches = rounded(make_prompt_cache(loaded), describe(loaded).with_bits(bits))
    return generate(loaded, tokenizer, prompt, max_tokens=12, prompt_cache=caches)


def test_several_turns_of_several_models_are_those_of_rounded_caches(
    server: Client, models: dict[str, Path]
) -> None:
    """unattachable has keys and values as it computes them."""
    bits = KVBits(8, 4)
    kept = dict.fromkeys(models, bits) | {"unattachable": None}
    for name, own in kept.items():
        prompt, known = f"{PROMPT} First?", 0
        for turn in range(2):
            reply, cached = complete(server, models[name], prompt)
            assert reply == expected(models[name], prompt, own)
            assert cached > known or not turn
            known, prompt = cached, f"{prompt}{reply} And then?"
        report = server.send("/v1/cache")[1]
        assert report["kv_bits"] == (
            None if own is None else {"keys": 8, "values": 4, "group_size": 64}
        )
    again, _ = complete(server, models["llama"], f"{PROMPT} First?")
    assert again == expected(models["llama"], f"{PROMPT} First?", bits)
    # 2 layers of 2 heads: 32 bytes of keys and 16 of values, and for each a scale and a bias of 4
    # bytes
    (group,) = server.send("/v1/cache")[1]["groups"]
    assert group["bytes_per_block"] == 256 * 2 * 2 * (32 + 16 + 2 * 8)
    assert (
        server.generator.model.how == "pooled caches, 8-bit keys and 4-bit values, ragged batches"
    )


def test_a_draft_is_served_without_and_says_so(
    server: Client, models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    llama, prompt = models["llama"], "Hello, you"
    reply, _ = complete(server, llama, prompt, draft_model=str(llama))
    assert reply == expected(llama, prompt, None)
    assert server.send("/v1/cache")[1]["kv_bits"] is None
    assert (
        "llama: it runs with a draft model. Keys and values stay as the model computes them"
        in caplog.text
    )


def test_a_model_with_windows_runs_without_its_draft_and_says_so(
    server: Client, models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Its windows of 300 tokens are full, and cannot take wrong tokens of a draft back."""
    model, prompt = models["gemma3_text"], f"{PROMPT} Who?"
    reply, _ = complete(server, model, prompt, draft_model=str(models["llama"]))
    assert reply == expected(model, prompt, KVBits(8, 4))
    assert caplog.text.count("gemma3_text runs without its draft model: windows and states") == 1
    assert "it runs with a draft model" not in caplog.text
    assert (
        server.generator.model.how == "pooled caches, 8-bit keys and 4-bit values, ragged batches"
    )


@pytest.mark.parametrize(("name", "is_quantised"), [("llama", True), ("gemma2", True)])
def test_a_pool_is_too_small_before_another_model_is_unloaded_for_it(
    name: str, is_quantised: bool
) -> None:
    model = make_model(name, head_dim=32)
    provider: Any = SimpleNamespace(model=model, draft_model=None)
    spec, config = describe(model), PoolConfig(bits=KVBits(8, 8))
    held = spec.with_bits(config.bits) if is_quantised else spec
    least = sum(held.bytes_per_block(group) for group in held.groups)
    need_room(provider, spec, least, config)
    with pytest.raises(PoolExhaustedError, match=f"takes {least} bytes"):
        need_room(provider, spec, least - 1, config)
