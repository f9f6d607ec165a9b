"""A swap gives memory back, to mlx and to the system: a real process after swaps beside one that
has just started.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forks import Program
from models import save_model
from thorough import only

from server.processes import needs_proc, process, send

WITHIN = 0.05
LARGE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4}
ROUNDS = 5
# glibc keeps up to twice the largest array that was freed so far: fixed here, so that it is the
# same in a fresh process.
THRESHOLDS = (
    "import ctypes; mallopt = ctypes.CDLL(None).mallopt; mallopt(-1, 131072); mallopt(-3, 131072)"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [
        save_model(folder / "one", "llama", num_hidden_layers=4, **LARGE),
        save_model(folder / "two", "qwen2", seed=2, num_hidden_layers=5, **LARGE),
    ]


served = functools.partial(process, before=THRESHOLDS)


def memory(port: int, server: Program, model: Path) -> tuple[int, int, int]:
    """Bytes of arrays, bytes that mlx keeps for others, and resident bytes of the process, once
    the model has replied.
    """
    body = {
        "messages": [{"role": "user", "content": "word " * 8}],
        "max_tokens": 2,
        "model": str(model),
    }
    assert send(port, "/v1/chat/completions", body)["choices"]
    while "doing" in send(port, "/health"):
        time.sleep(0.05)
    found = send(port, "/v1/cache")["memory"]
    resident = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * 4096
    return found["active_bytes"], found["cache_bytes"], resident


@needs_proc
@pytest.mark.thorough
def test_memory_after_each_swap_is_that_of_a_fresh_start(
    models: list[Path], tmp_path: Path
) -> None:
    found: dict[Path, list[tuple[int, int, int]]] = {model: [] for model in models}
    with served(models[0], tmp_path, "--allow-models", str(models[0].parent)) as (port, server):
        for model in models * ROUNDS:
            found[model].append(memory(port, server, model))
        assert send(port, "/admin/models")["counts"]["swaps"] == 2 * ROUNDS - 1
    for model in models:
        # On the same store, so that both restore the prefix instead of computing it.
        with served(model, tmp_path) as (port, server):
            active, cache, resident = memory(port, server, model)
        for after in found[model][1:]:
            assert abs(after[0] - active) <= WITHIN * active
            assert after[1] <= cache + WITHIN * active
            assert after[2] <= resident * (1 + WITHIN), (
                f"{found[model]} after swaps, {(active, cache, resident)} fresh"
            )


@needs_proc
@pytest.mark.parametrize("rounds", only([1, 2], 1))
def test_an_unloaded_model_leaves_nothing_behind(
    rounds: int, models: list[Path], tmp_path: Path
) -> None:
    with served(models[0], tmp_path, "--allow-models", str(models[0].parent)) as (port, server):
        for model in models * rounds:
            active, _, resident = memory(port, server, model)
            assert send(port, "/admin/unload", {"model": str(model)})["state"] == "available"
            left = send(port, "/v1/cache")["memory"]
            now = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * 4096
            assert left["active_bytes"] < 10_000
            assert left["cache_bytes"] < 10_000
            # The arrays were resident: as many bytes are not any more.
            assert now <= resident - 0.9 * active


@pytest.mark.thorough
def test_the_new_model_takes_no_memory_before_the_old_one_is_gone(
    models: list[Path], tmp_path: Path
) -> None:
    small = save_model(tmp_path / "small", "llama")
    arguments = [sys.executable, "-m", "server.swap_stages", str(small), str(models[0])]
    ran = subprocess.run(
        arguments, capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    active = json.loads(ran.stdout.splitlines()[-1])
    assert active["new"] > 10_000_000
    assert active["saving"] - active["before"] < 20_000, "checked, and not read"
    assert active["loading"] <= active["before"] - active["old"] + 20_000, "the old one is gone"
    assert active["warming"] - active["loading"] >= 0.99 * active["new"]
