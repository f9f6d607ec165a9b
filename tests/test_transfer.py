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
from mlx_lm.models.cache import load_prompt_cache
from mlx_lm.utils import load
from models import save_model
from thorough import only

from mlx_blockpool.cli import main
from mlx_blockpool.transfer.model_source import Source

TYPES = ["gpt_oss", "gemma3_text", "qwen3_next", "falcon_h1", "mamba", "llama4", "deepseek_v32", "nemotron-nas"]
PROMPT = random.Random(1).choices(range(90), k=600)


def fill(root: Path, folder: Path, tokens: list[int]) -> None:
    source = Source(str(folder), root)
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
