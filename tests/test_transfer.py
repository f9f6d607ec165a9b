"""Prompt-cache files of models that forget: what is exported goes on as stock does, and comes
back.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures.pooled import save_architecture
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load
from models import save_model
from thorough import only

from mlx_blockpool.cli import main
from mlx_blockpool.commands.cache_file import StoredModel
from mlx_blockpool.config import KVBits
from mlx_blockpool.kv.attach import bind
from mlx_blockpool.prefix.retention import RetentionPolicy
from mlx_blockpool.prefix.salts import SHARED, salt_of
from mlx_blockpool.prefix.trie import PrefixRef
from mlx_blockpool.store.agents import Agents

TYPES = [
    "gpt_oss",
    "gemma3_text",
    "qwen3_next",
    "falcon_h1",
    "mamba",
    "llama4",
    "deepseek_v32",
    "nemotron-nas",
]
PROMPT = random.Random(1).choices(range(90), k=600)


def fill(
    root: Path, folder: Path, tokens: list[int], kv: KVBits | None = None, salt: bytes = SHARED
) -> PrefixRef:
    source = StoredModel(str(folder), root, kv=kv)
    # Only attention that reads blocks reads quantised ones.
    bind(source.model)
    prefix = source.open(1000)
    fetched = prefix.acquire(tokens, 1, salt=salt)
    source.model(mx.array([fetched.rest]), cache=fetched.caches)
    mx.eval([c.state for c in fetched.caches])
    prefix.release(tokens, fetched.caches, policy=RetentionPolicy(salt=salt))
    path = prefix.match(tokens, salt).detached()
    assert prefix.close()
    return path


def run(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> Any:
    capsys.readouterr()
    assert main(["store", *arguments, "--store-dir", str(root), "--json"]) == 0, (
        capsys.readouterr().err
    )
    return json.loads(capsys.readouterr().out)


def greedy(folder: Path, tokens: list[int], caches: list[Any] | None = None) -> list[int]:
    model, *_ = load(str(folder))
    return [
        int(token)
        for token, _ in generate_step(mx.array(tokens), model, max_tokens=8, prompt_cache=caches)
    ]


@pytest.mark.parametrize("name", only(TYPES, "gpt_oss", "falcon_h1"))
def test_what_was_exported_goes_on_in_stock_and_comes_back(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, root, empty, out = (
        save_architecture(tmp_path / name, name),
        tmp_path / "store",
        tmp_path / "empty",
        tmp_path / "out.safetensors",
    )
    fill(root, folder, PROMPT)
    later = [*PROMPT, 5, 6, 7]
    given = ",".join(map(str, later))
    assert run(capsys, root, "export", "--model", str(folder), "--tokens", given, str(out))[
        "tokens"
    ] == len(PROMPT)
    needed = greedy(folder, later)
    assert greedy(folder, later[len(PROMPT) :], load_prompt_cache(str(out))) == needed
    if name == "llama4":
        # mlx-lm's file has one chunk of it.
        return
    assert run(capsys, empty, "import", "--model", str(folder), str(out))["tokens"] == len(PROMPT)
    exported = run(capsys, empty, "export", "--model", str(folder), "--tokens", given, str(out))
    assert exported["tokens"] == len(PROMPT)
    assert greedy(folder, later[len(PROMPT) :], load_prompt_cache(str(out))) == needed


def refusal(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> str:
    capsys.readouterr()
    assert main(["store", *arguments, "--store-dir", str(root)]) == 2
    return capsys.readouterr().err.removeprefix("mlx-blockpool: error: ")


def test_quantised_prefixes_go_on_in_stock_and_come_back_as_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, root, out = (
        save_model(tmp_path / "llama", "llama", head_dim=64),
        tmp_path / "store",
        tmp_path / "out.safetensors",
    )
    fill(root, folder, PROMPT, KVBits(8, 8))
    model, later, bits = ["--model", str(folder)], [*PROMPT, 5, 6, 7], ["--kv-bits", "8"]
    given = ["--tokens", ",".join(map(str, later)), str(out)]
    assert "has no prefix of these" in refusal(capsys, root, "export", *model, *given)
    assert run(capsys, root, "export", *model, *bits, *given)["tokens"] == len(PROMPT)
    caches = load_prompt_cache(str(out))
    assert {(type(c).__name__, c.bits, c.group_size, c.offset) for c in caches} == {
        ("QuantizedKVCache", 8, 64, len(PROMPT))
    }
    stock = [c.to_quantized(64, 8) for c in make_prompt_cache(load(str(folder))[0])]
    assert greedy(folder, later[len(PROMPT) :], caches) == greedy(folder, later, stock)

    for other in ([], ["--kv-bits", "4"]):
        assert "other bits than given here" in refusal(
            capsys, root, "import", *model, *other, str(out)
        )
    again, words = tmp_path / "again.safetensors", mx.load(str(out))
    assert run(capsys, tmp_path / "empty", "import", *model, *bits, str(out))["tokens"] == len(
        PROMPT
    )
    run(capsys, tmp_path / "empty", "export", *model, *bits, *given[:-1], str(again))
    found = mx.load(str(again))
    assert found.keys() == words.keys()
    assert all(mx.array_equal(found[name], words[name], equal_nan=True) for name in words)


@pytest.mark.parametrize(("name", "kv"), [("gemma3_text", KVBits(8, 8)), ("llama", KVBits(8, 4))])
def test_what_mlx_lm_has_no_quantised_cache_for_is_written_as_numbers_and_not_imported(
    name: str, kv: KVBits, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, root, out = (
        save_model(tmp_path / name, name, head_dim=64),
        tmp_path / "store",
        tmp_path / "out.safetensors",
    )
    fill(root, folder, PROMPT, kv)
    bits = kv.options.split()
    model, given = (
        ["--model", str(folder), *bits],
        ["--tokens", ",".join(map(str, PROMPT)), str(out)],
    )
    assert run(capsys, root, "export", *model, *given)["tokens"] == len(PROMPT)
    caches = load_prompt_cache(str(out))
    assert {type(c).__name__ for c in caches} == (
        {"RotatingKVCache", "QuantizedKVCache"} if name == "gemma3_text" else {"KVCache"}
    )
    assert len(greedy(folder, [5, 6, 7], caches)) == 8
    assert "cannot hold the quantised keys and values" in refusal(
        capsys, tmp_path / "empty", "import", *model, str(out)
    )
    assert "other bits than given here" in refusal(
        capsys, tmp_path / "empty", "import", *model[:2], str(out)
    )


def test_a_prefix_keeps_its_cache_salt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, root, empty = (
        save_model(tmp_path / "llama", "llama"),
        tmp_path / "store",
        tmp_path / "empty",
    )
    model, out, salt = (
        ["--model", str(folder)],
        str(tmp_path / "out.safetensors"),
        salt_of(None, "ann"),
    )
    path = fill(root, folder, PROMPT, salt=salt)
    given = ["--tokens", ",".join(map(str, PROMPT)), out]
    assert "has no prefix of these" in refusal(capsys, root, "export", *model, *given)
    Agents(root).note("one", "model", "llama", path.hashes, path.tokens, salt)
    assert run(capsys, root, "export", *model, "--agent", "one", *given)["tokens"] == len(PROMPT)
    run(capsys, empty, "import", *model, "--agent", "two", out)
    assert (Agents(empty).need("two").salt, Agents(empty).need("two").hashes) == (salt, path.hashes)
    prefix = StoredModel(str(folder), empty).open(1000)
    assert [prefix.match(PROMPT, each).tokens for each in (salt, SHARED)] == [len(PROMPT), 0]
    prefix.close()


def test_a_file_that_was_cut_off_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, root, out = (
        save_model(tmp_path / "llama", "llama"),
        tmp_path / "store",
        tmp_path / "out.safetensors",
    )
    fill(root, folder, PROMPT)
    run(
        capsys,
        root,
        "export",
        "--model",
        str(folder),
        "--tokens",
        ",".join(map(str, PROMPT)),
        str(out),
    )
    data = out.read_bytes()
    for size in (0, 7, 200, len(data) // 2, len(data) - 20):
        out.write_bytes(data[:size])
        assert refusal(
            capsys, tmp_path / "empty", "import", "--model", str(folder), str(out)
        ).startswith(f"Cannot read {out}: ")


def test_a_token_id_of_more_than_64_bits_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, out = save_model(tmp_path / "llama", "llama"), str(tmp_path / "out.safetensors")
    given = ["--model", str(folder), "--tokens", "1,99999999999999999999", out]
    (tmp_path / "store").mkdir()
    assert "Cannot read the prompt: a token id has more than 64 bits" in refusal(
        capsys, tmp_path / "store", "export", *given
    )


@pytest.mark.parametrize("tokens", ["", "1,x", "1,99999999999999999999"])
def test_a_file_whose_metadata_name_no_tokens_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tokens: str
) -> None:
    folder, root = save_model(tmp_path / "llama", "llama"), tmp_path / "store"
    model, out = ["--model", str(folder)], str(tmp_path / "out.safetensors")
    fill(root, folder, PROMPT)
    run(capsys, root, "export", *model, "--tokens", ",".join(map(str, PROMPT)), out)
    caches, metadata = load_prompt_cache(out, return_metadata=True)
    save_prompt_cache(out, caches, metadata | {"tokens": tokens})
    assert refusal(capsys, tmp_path / "empty", "import", *model, out).startswith(
        f"Cannot read {out}: "
    )
