"""How bench_answers judges answers: its sessions, its verdicts, its divergence, and the model
that calls tools.
"""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from random import Random
from types import ModuleType

import mlx.core as mx
import pytest
from documents import ROOT

from benchmarks.demo.tokenizer import encode


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bench_answers")


def test_a_call_copies_what_was_named_once_before(bench: ModuleType) -> None:
    made = bench.session(Random(0), 20)
    before = made.system
    for turn in made.turns:
        path = json.loads(turn.call)["arguments"]["path"]
        number = path.lstrip("abcdefghijklmnopqrstuvwxyz")
        assert len(number) == 12
        assert before.count(path) == 1
        assert number not in turn.user
        assert path.removesuffix(number) in turn.user
        before += turn.user + turn.result
    assert made == bench.session(Random(0), 20) != bench.session(Random(1), 20)


@pytest.mark.parametrize(
    ("written", "verdict"),
    [
        ('{"name": "send", "arguments": {"path": "acorn123456"}}', (True, True, True)),
        ('{"arguments": {"path": "acorn123456"}, "name": "send"}', (True, True, True)),
        ('{"name": "send", "arguments": {"path": "acorn123465"}}', (True, True, False)),
        ('{"name": "sign", "arguments": {"path": "acorn123456"}}', (True, True, False)),
        ('{"name": "seal", "arguments": {"path": "acorn123456"}}', (True, False, False)),
        ('["send", "acorn123456"]', (True, False, False)),
        ('{"name": ["send"], "arguments": {}}', (True, False, False)),
        ('{"name": "send", "arguments": {"path": "acorn123456"', (False, False, False)),
        ("", (False, False, False)),
    ],
)
def test_a_call_is_judged_by_its_parts(
    bench: ModuleType, written: str, verdict: tuple[bool, ...]
) -> None:
    assert bench.judge(written, '{"name": "send", "arguments": {"path": "acorn123456"}}') == verdict


def test_sessions_are_summed_up(bench: ModuleType) -> None:
    right, wrong, broken = (
        bench.Verdict(True, True, True),
        bench.Verdict(True, True, False),
        bench.Verdict(False, False, False),
    )
    figures = bench.summary(
        [[right, right, right, right], [right, right, wrong, broken], [right, right, right, wrong]]
    )
    shares = {"valid_json": 0.9167, "known_tool": 0.9167, "right": 0.75}
    assert figures == {"sessions": 3, "turns": 4, **shares, "faultless": 1, "first_wrong_turn": 3.5}
    assert bench.summary([[right]])["first_wrong_turn"] is None


def test_divergence_is_from_the_exact_to_the_quantised(bench: ModuleType) -> None:
    exact, other = (
        mx.log(mx.array([[0.4, 0.6], [0.9, 0.1]])),
        mx.log(mx.array([[0.9, 0.1], [0.5, 0.5]])),
    )
    first, second = (
        0.4 * math.log(0.4 / 0.9) + 0.6 * math.log(0.6 / 0.1),
        0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5),
    )
    # Logits may all be larger by the same number.
    assert bench.divergences(exact + 3, other) == pytest.approx([first, second], abs=1e-6)
    compared = bench.Compared()
    compared.add(exact, other)
    compared.add(exact, exact)
    assert compared.figures() == {
        "tokens": 4,
        "kl_mean": 0.28,
        "kl_p99": 0.74,
        "kl_most": 0.75,
        "same_token": 0.75,
    }


def test_the_model_copies_over_blocks_of_8_bits(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "FORMS", {form: bench.FORMS[form] for form in ("off", "8")})
    subject, made = bench.Subject(bench.CALLER), bench.session(Random("held out"), 2)
    assert bench.play(subject, [made], "8") == [[(True, True, True)] * 2]
    # Of the second turn only what is new was computed: the prefix had the rest, in 8 bits.
    tokens = len(subject.tokenizer.encode("".join(text for _, text in made.messages())).ids)
    assert tokens / 2 < subject.engines["8"].counts["prompt_tokens"] < tokens


@pytest.mark.thorough
def test_the_model_can_be_trained_anew(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = importlib.import_module("train_caller")
    monkeypatch.setattr("sys.argv", ["train_caller", "--out", str(tmp_path), "--minutes", "0.1"])
    training.main()
    subject, messages = bench.Subject(tmp_path), training.listing(Random(0), 8)
    tokens, learned = encode(subject.tokenizer, messages)
    written = mx.argmax(subject.logits(tokens[:-1], subject.caches("off")), -1).tolist()
    right = [written[i - 1] == token for i, token in enumerate(tokens) if learned[i] and i > 0]
    # It copies from its first step on, and has yet to learn which file comes next.
    assert sum(right) > len(right) / 3
