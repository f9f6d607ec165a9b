"""Heads for multi-token prediction: replies are those without, and the guesses are the head's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heads
import mlx.core as mx
import pytest
from engine.engines import HEAD, make_engine, serve, words
from engine.schedules import CROWD, CROWDS, SCHEDULES, arrivals
from engine.stored_engines import killed, start, write_all
from engine.test_draft_schedules import DRAFTED, PARTS, run
from hypothesis import given
from hypothesis import strategies as st
from mlx_blockpool_plugins import prediction_heads
from thorough import only, tried

from mlx_blockpool.drafts.curve import CostCurve

NAMES = only(heads.NAMES, "glm4_moe", "qwen3_5")
OWN = {**DRAFTED, "sources": st.just(["own"])}


def simulated(name: str, prompt: tuple[int, ...], reply: list[int], drafts: int) -> list[int]:
    """How many guesses each verification accepts, by the model and its head without caches."""
    model, head = heads.trained(name)
    backbone = prediction_heads._text(model).model
    done, accepted = 1, list[int]()
    while done < len(reply):
        tokens = [*prompt, *reply[:done]]
        hidden = backbone(mx.array([tokens]))
        before = mx.concatenate([mx.zeros_like(hidden[:, :1]), hidden[:, :-1]], axis=1)
        guessed: list[int] = []
        for _ in range(min(drafts, len(reply) - done)):
            out = head._layer(mx.array([[*tokens, *guessed]]), before, None)[:, -1:]
            normed = head.norm(out)
            guessed.append(int(mx.argmax(head._logits(normed)).item()))
            before = mx.concatenate([before, normed if head._chains_norm else out], axis=1)
        right = 0
        while right < len(guessed) and guessed[right] == reply[done + right]:
            right += 1
        accepted.append(right)
        done += 1 + right
    return accepted


@pytest.mark.parametrize("name", only(heads.NAMES, "qwen3_5"))
@pytest.mark.parametrize("drafts", [1, 3])
def test_what_is_accepted_is_what_the_head_guesses_without_caches(name: str, drafts: int) -> None:
    prompt = words(3, 270)
    engine, _ = make_engine(name + HEAD, drafts=drafts)
    (uid,), told = serve(engine, [prompt], max_tokens=30)
    counts = engine.counts
    accepted = simulated(name, prompt, told.tokens[uid], drafts)
    assert counts["drafted context"] == 0
    assert 0 < sum(accepted) < drafts * len(accepted)
    assert (counts["accepted head"], counts["verifications"]) == (sum(accepted), len(accepted))


@pytest.mark.parametrize("name", NAMES)
@tried(2, 60)
@given(**{**SCHEDULES, **OWN, "requests": arrivals(**PARTS)})
def test_replies_of_a_schedule_with_a_head_are_those_without_drafts(
    name: str, requests: list[Any], **more: Any
) -> None:
    run(name + HEAD, requests, **more)


@tried(1, 30)
@given(**{**SCHEDULES, **OWN, "requests": arrivals(**PARTS)})
def test_replies_over_quantised_blocks_are_too(requests: list[Any], **more: Any) -> None:
    run("glm4_moe-wide+head K8V4", requests, **more)


@pytest.mark.parametrize("name", NAMES)
@tried(1, 30)
@given(**{**CROWDS, **OWN, "requests": arrivals(**{**PARTS, **CROWD})})
def test_replies_of_a_swapped_out_crowd_with_a_head_are_too(
    name: str, requests: list[Any], **more: Any
) -> None:
    run(name + HEAD, requests, **more)


def counted(engine: Any, prompt: tuple[int, ...]) -> tuple[list[int], int, int]:
    """A reply, the guesses for it, and how many of them were accepted."""
    before = engine.counts.copy()
    (uid,), told = serve(engine, [prompt], max_tokens=30)
    counts = engine.counts - before
    return told.tokens[uid], counts["guesses"], counts["accepted head"]


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_head_guesses_as_one_that_has_read_the_whole_prompt(
    name: str, tmp_path: Path
) -> None:
    fresh, prefix = make_engine(name + HEAD, drafts=2)
    own: dict[str, Any] = {
        "name": name + HEAD,
        "capabilities": prefix.arena.capabilities,
        "engine": fresh.config,
    }
    first = words(5, 300)
    machine = start(tmp_path / "a", **own)
    reply, *_ = counted(machine.engine, first)
    prompt = (*first, *reply, *words(6, 9))
    write_all(machine)
    restarted = start(killed(machine, tmp_path / "b"), **own)
    expected = counted(fresh, prompt)
    for engine in (machine.engine, restarted.engine):
        computed = engine.counts["prompt_tokens"]
        assert counted(engine, prompt) == expected
        assert 0 < engine.counts["prompt_tokens"] - computed < 100


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seconds", [1.02, 2.0])
def test_the_head_guesses_by_what_forwards_cost(name: str, seconds: float) -> None:
    rows = {1: 1e-3, 2: 1e-3 * seconds, 16: 1e-3 * seconds**4}
    curve = CostCurve.from_points(rows)
    prompts = [words(seed, 20) for seed in range(3)]
    engine, _ = make_engine(name + HEAD, curve=curve)
    plain, _ = make_engine(name + HEAD, drafts="off")
    # A guess takes no time here, so that the test does not depend on the machine.
    assert engine.steps.drafting is not None
    engine.steps.drafting.note_guesses = lambda *_: None  # type: ignore[method-assign]
    _, told = serve(engine, prompts, max_tokens=30)
    assert told.tokens == serve(plain, prompts, max_tokens=30)[1].tokens
    if seconds < 2:
        assert engine.counts["decode_steps"] < plain.counts["decode_steps"]
        assert engine.counts["accepted head"] > 0
    else:
        assert engine.counts["guesses"] == engine.counts["verifications"] == 0
        assert engine.counts["decode_steps"] == plain.counts["decode_steps"]
