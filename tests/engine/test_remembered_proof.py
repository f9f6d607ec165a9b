"""What a model can do with a pool is proven once for its weights, versions, code and device, and
confirmed by one forward pass at later loads.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from architectures.configs import QUICK, RUNNABLE
from architectures.pooled import make_model
from mlx_lm.models import llama
from server.serving import blockpool_server
from thorough import only

from mlx_blockpool import plugins
from mlx_blockpool.config import PoolConfig
from mlx_blockpool.demo import model_path
from mlx_blockpool.engine import measuring
from mlx_blockpool.engine.measuring import remembering
from mlx_blockpool.formatting import count
from mlx_blockpool.kv.attach import detach
from mlx_blockpool.kv.build import describe, open_served
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.probe import confirms
from mlx_blockpool.plugins import code_digest
from mlx_blockpool.store.measurements import Measurements


def counted(model_class: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The forward passes of all models of a class."""
    calls, own = list[Any](), model_class.__call__

    def call(model: Any, *args: Any, **given: Any) -> Any:
        calls.append(args)
        return own(model, *args, **given)

    monkeypatch.setattr(model_class, "__call__", call)
    return calls


def load(model: Any, folder: Path | None, weights: str = "w") -> Capabilities:
    """What a new load of a model finds."""
    detach(model)
    probing = remembering(Measurements(folder), weights, "tiny")
    return open_served(model, describe(model), 60_000_000, PoolConfig(), probe=probing).capabilities


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "stablelm", "mamba2", "baichuan_m1", "longcat_flash_ngram"]
)
def test_a_second_load_takes_one_forward_and_finds_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(name)
    first, attached = load(model, tmp_path), [type(m) for _, m in model.named_modules()]
    spec = describe(model)
    detach(model)
    calls = counted(type(model), monkeypatch)
    probing = remembering(Measurements(tmp_path), "w", "tiny")
    arena = open_served(model, spec, 60_000_000, PoolConfig(), probe=probing)
    assert len(calls) == 1
    assert arena.capabilities == first
    assert [type(m) for _, m in model.named_modules()] == attached
    assert not any(counts.held for counts in arena.pool.settle())


@pytest.mark.parametrize(
    "name", only(RUNNABLE, *QUICK, "phi", "phi3small", "minimax_m3_vl", "longcat_flash_ngram")
)
def test_a_first_load_takes_few_forwards_and_a_later_one_two(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those count that describe a model, of which nothing is evaluated."""
    model = make_model(name)
    calls = counted(type(model), monkeypatch)
    first = load(model, tmp_path)
    assert len(calls) <= 15
    calls.clear()
    assert load(model, tmp_path) == first
    # Three of them show how the states of its class grow.
    assert len(calls) <= (4 if name == "deepseek_v41" else 2)


def test_a_padded_batch_is_tried_from_the_first_token_on() -> None:
    """recurrent_gemma leaves padding out once a sequence has begun, and not before."""
    model = make_model("recurrent_gemma")
    assert load(model, None).ragged
    assert not load(model, None).pads_states
    (why, _) = load(make_model("longcat_flash_ngram"), None).differs
    assert "states that grow" in why


def change_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "device_name", lambda: "another device")


def change_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "version", lambda name: "9")


def change_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "code_digest", lambda modules: "other")


@pytest.mark.parametrize("change", [change_device, change_version, change_code])
def test_what_changes_is_proven_again(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    load(model, tmp_path)
    change(monkeypatch)
    calls = counted(type(model), monkeypatch)
    load(model, tmp_path)
    assert len(calls) > 10


def test_other_weights_and_loads_without_a_folder_are_proven_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    load(model, tmp_path)
    calls = counted(type(model), monkeypatch)
    for folder, weights in ((tmp_path, "others"), (None, "w")):
        calls.clear()
        load(model, folder, weights)
        assert len(calls) > 10


def test_a_model_that_gives_other_logits_is_proven_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    assert load(model, tmp_path).ragged
    own = type(model).__call__
    monkeypatch.setattr(type(model), "__call__", lambda *args, **given: own(*args, **given) * 1.01)
    calls = counted(type(model), monkeypatch)
    assert load(model, tmp_path).ragged
    assert len(calls) > 10


@pytest.mark.parametrize(("has_store", "later"), [(True, 2), (False, 15)])
def test_a_server_computes_few_forwards_until_it_is_healthy(
    has_store: bool,
    later: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line of the log says how many, and what else took how long."""
    caplog.set_level("INFO")
    stored = ["--store-dir", str(tmp_path)] if has_store else []
    calls = counted(llama.Model, monkeypatch)
    found = []
    for most in (15, later):
        calls.clear()
        with blockpool_server(model_path(), "--pool-bytes", "60MB", *stored) as ours:
            ours.generator.wait_until_loaded()
            assert 0 < len(calls) <= most
            # The model was described by a forward that is not evaluated.
            parts = r"imports [\d.]+ s, checking .*, loading .*, warming [\d.]+ s, of which"
            line = (
                rf"loaded .* \({parts} the proof [\d.]+ s with {count(len(calls) - 1, 'forward')}\)"
            )
            assert len(re.findall(line, caplog.text)) == 1
            caplog.clear()
            body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}
            found.append(ours.send("/v1/completions", body)[1]["choices"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "sample",
    [(), ((), ()), (((1_000_000, 0.0),),) * 2, (((-1, 0.0),),) * 2, (((1, float("inf")),),) * 2],
    ids=str,
)
def test_a_damaged_proof_is_proven_again(sample: Any) -> None:
    model = make_model("llama")
    arena = open_served(model, describe(model), 60_000_000, PoolConfig())
    detach(model)
    damaged = replace(arena.capabilities, sample=sample)
    assert not confirms(model, arena, damaged)
    assert confirms(model, arena, arena.capabilities)


def test_a_small_pool_proves_nothing_for_a_large_one(tmp_path: Path) -> None:
    model, probing = make_model("llama"), remembering(Measurements(tmp_path), "w", "tiny")
    spec = describe(model)
    size = sum(map(spec.bytes_per_block, spec.groups))
    found = []
    for blocks in (2, 400):
        detach(model)
        arena = open_served(model, spec, blocks * size, PoolConfig(), probe=probing)
        found.append(arena.capabilities.mixes)
    assert found == [False, True]


def test_code_that_was_written_since_the_process_began_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert code_digest([]) is not None
    monkeypatch.setattr(plugins, "STARTED", 0.0)
    assert code_digest([]) is None
    model = make_model("llama")
    load(model, tmp_path)
    calls = counted(type(model), monkeypatch)
    load(model, tmp_path)
    assert len(calls) > 10
