"""Prompt-cache files of models that forget: what is exported goes on as stock does, and comes back."""

from __future__ import annotations

import io
import json
import random
import sys
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
from mlx_blockpool.config import KVBits
from mlx_blockpool.kv.attach import bind
from mlx_blockpool.transfer.model_source import Source

TYPES = ["gpt_oss", "gemma3_text", "qwen3_next", "falcon_h1", "mamba", "llama4", "deepseek_v32", "nemotron-nas"]
PROMPT = random.Random(1).choices(range(90), k=600)


def fill(root: Path, folder: Path, tokens: list[int], kv: KVBits | None = None) -> None:
    source = Source(str(folder), root, kv=kv)
    # Only attention that reads blocks reads quantised ones.
    bind(source.model)
    prefix = source.open(1000)
    fetched = prefix.acquire(tokens, 1)
    source.model(mx.array([fetched.rest]), cache=fetched.caches)
    mx.eval([c.state for c in fetched.caches])
    prefix.release(tokens, fetched.caches)
    assert prefix.close()


def run(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> Any:
    capsys.readouterr()
    assert main(["store", *arguments, "--store-dir", str(root), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def greedy(folder: Path, tokens: list[int], caches: list[Any] | None = None) -> list[int]:
    model, *_ = load(str(folder))
    return [int(token) for token, _ in generate_step(mx.array(tokens), model, max_tokens=8, prompt_cache=caches)]


@pytest.mark.parametrize("name", only(TYPES, "gpt_oss", "falcon_h1", "llama4"))
def test_what_was_exported_goes_on_in_stock_and_comes_back(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, root, empty, out = (
        save_architecture(tmp_path / name, name),
        tmp_path / "store",
        tmp_path / "empty",
        tmp_path / "out.safetensors",
    )
    fill(root, folder, PROMPT)
    later = [*PROMPT, 5, 6, 7]
    given = ",".join(map(str, later))
    assert run(capsys, root, "export", "--model", str(folder), "--tokens", given, str(out))["tokens"] == len(PROMPT)
    needed = greedy(folder, later)
    assert greedy(folder, later[len(PROMPT) :], load_prompt_cache(str(out))) == needed
    if name == "llama4":
        # mlx-lm's file has one chunk of it.
        return
    assert run(capsys, root, "import", "--model", str(folder), str(out))["private"] is False
    assert main(["store", "import", "--store-dir", str(empty), "--model", str(folder), str(out)]) == 1
    assert "--agent NAME" in capsys.readouterr().err
    report = run(capsys, empty, "import", "--model", str(folder), "--agent", "one", str(out))
    assert (report["tokens"], report["private"]) == (len(PROMPT), True)
    assert main(["store", "export", "--store-dir", str(empty), "--model", str(folder), "--tokens", given, str(out)]) == 1
    exported = run(capsys, empty, "export", "--model", str(folder), "--agent", "one", "--tokens", given, str(out))
    assert exported["tokens"] == len(PROMPT)
    assert greedy(folder, later[len(PROMPT) :], load_prompt_cache(str(out))) == needed


def refusal(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> str:
    capsys.readouterr()
    assert main(["store", *arguments, "--store-dir", str(root)]) == 1
    return capsys.readouterr().err.removeprefix("mlx-blockpool: ")


def test_quantised_prefixes_go_on_in_stock_and_come_back_as_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, root, out = save_model(tmp_path / "llama", "llama", head_dim=64), tmp_path / "store", tmp_path / "out.safetensors"
    fill(root, folder, PROMPT, KVBits(8, 8))
    model, later, bits = ["--model", str(folder)], [*PROMPT, 5, 6, 7], ["--kv-bits", "8"]
    given = ["--tokens", ",".join(map(str, later)), str(out)]
    assert "has nothing of these" in refusal(capsys, root, "export", *model, *given)
    assert run(capsys, root, "export", *model, *bits, *given)["tokens"] == len(PROMPT)
    caches, metadata = load_prompt_cache(str(out), return_metadata=True)
    assert {(type(c).__name__, c.bits, c.group_size, c.offset) for c in caches} == {("QuantizedKVCache", 8, 64, len(PROMPT))}
    assert metadata["kv_bits"] == "8,8,64"
    stock = [c.to_quantized(64, 8) for c in make_prompt_cache(load(str(folder))[0])]
    assert greedy(folder, later[len(PROMPT) :], caches) == greedy(folder, later, stock)

    assert run(capsys, root, "import", *model, *bits, str(out))["private"] is False
    assert refusal(capsys, root, "import", *model, str(out)) == "The file has 8-bit keys and values. Give --kv-bits 8.\n"
    four = refusal(capsys, root, "import", *model, "--kv-bits", "4", str(out))
    assert four == "The file has 8-bit keys and values. Give --kv-bits 8.\n"
    again, words = tmp_path / "again.safetensors", mx.load(str(out))
    assert run(capsys, tmp_path / "empty", "import", *model, *bits, "--agent", "one", str(out))["private"] is True
    run(capsys, tmp_path / "empty", "export", *model, *bits, "--agent", "one", *given[:-1], str(again))
    found = mx.load(str(again))
    assert found.keys() == words.keys()
    assert all(mx.array_equal(found[name], words[name], equal_nan=True) for name in words)


def test_files_of_mlx_lm_are_taken_in_their_own_bits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, root, path = save_model(tmp_path / "llama", "llama", head_dim=64), tmp_path / "store", str(tmp_path / "s.safetensors")
    arguments = ["import", "--model", str(folder), "--agent", "one", "--tokens", ",".join(map(str, PROMPT)), path]
    model = load(str(folder))[0]
    caches = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=caches)
    save_prompt_cache(path, caches)
    assert "a KVCache where the model has a QuantizedKVCache" in refusal(capsys, root, *arguments, "--kv-bits", "8")
    for bits in (8, 4):
        save_prompt_cache(path, [cache.to_quantized(64, bits) for cache in caches])
        assert "a QuantizedKVCache where the model has a KVCache" in refusal(capsys, root, *arguments)
        other = ("--kv-bits", str(12 - bits))
        assert f"is in {bits} bits and groups of 64, and llama in {12 - bits} bits" in refusal(capsys, root, *arguments, *other)
        assert run(capsys, root, *arguments, "--kv-bits", str(bits))["tokens"] == len(PROMPT)
    wrong = [7, *PROMPT[1:]]
    arguments[arguments.index("--tokens") + 1] = ",".join(map(str, wrong))
    assert "are off by" in refusal(capsys, root, *arguments, "--kv-bits", "4")


@pytest.mark.parametrize(("name", "kv"), [("gemma3_text", KVBits(8, 8)), ("llama", KVBits(8, 4))])
def test_what_mlx_lm_has_no_words_for_is_written_as_numbers_and_belongs_to_one_agent(
    name: str, kv: KVBits, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, root, out = save_model(tmp_path / name, name, head_dim=64), tmp_path / "store", tmp_path / "out.safetensors"
    fill(root, folder, PROMPT, kv)
    bits = kv.options.split()
    model, given = ["--model", str(folder), *bits], ["--tokens", ",".join(map(str, PROMPT)), str(out)]
    assert run(capsys, root, "export", *model, *given)["tokens"] == len(PROMPT)
    caches = load_prompt_cache(str(out))
    assert {type(c).__name__ for c in caches} == (
        {"RotatingKVCache", "QuantizedKVCache"} if name == "gemma3_text" else {"KVCache"}
    )
    assert len(greedy(folder, [5, 6, 7], caches)) == 8
    assert "hold no words of some layers" in refusal(capsys, root, "import", *model, str(out))
    report = run(capsys, root, "import", *model, "--agent", "one", str(out))
    assert (report["tokens"], report["private"]) == (len(PROMPT), True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_export_has_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, root = save_model(tmp_path / "llama", "llama"), tmp_path / "store"
    fill(root, folder, PROMPT)
    export = ["export", "--model", str(folder), "--tokens", ",".join(map(str, PROMPT)), str(tmp_path / "out")]
    for err, bars in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", err)
        assert main(["store", *export, "--store-dir", str(root)]) == 0
        assert [f"{what}:" in err.getvalue() for what in ("reading", "writing")] == [bars, bars]
