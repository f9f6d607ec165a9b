"""The bundled demo model: its size, its template, and whether it says the right things."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from mlx_blockpool.demo import model_path

FOLDER = Path(model_path())
TOPICS = json.loads((FOLDER.parent / "questions.json").read_text(encoding="utf-8"))
LONG_SYSTEM = "You are a helpful assistant that answers questions about mlx-blockpool. " + " ".join(
    json.loads((FOLDER.parent / "systems.json").read_text(encoding="utf-8"))[:20]
)


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(model_path())[:2]
    return model, tokenizer


def ask(demo: tuple[Any, Any], messages: list[dict[str, str]]) -> str:
    model, tokenizer = demo
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return mlx_lm.generate(model, tokenizer, prompt, max_tokens=80)


def test_folder_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 3_500_000


def test_template_renders_a_conversation_without_adding_to_it(demo: tuple[Any, Any]) -> None:
    tokenizer = demo[1]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"name": "read_file", "arguments": {}}],
        },
        {"role": "tool", "content": "1000"},
    ]
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "read_file", "arguments": '
        "{}}\n</tool_call><|im_end|>\n"
        "<|im_start|>tool\n1000<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_names_the_tools_first(demo: tuple[Any, Any]) -> None:
    tokenizer = demo[1]
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("read", "write")
    ]
    chat = [{"role": "user", "content": "Hello"}]
    without, with_tools = (
        tokenizer.apply_chat_template(chat, tools=each, tokenize=False) for each in (None, tools)
    )
    assert with_tools == f"<|im_start|>system\n# Tools\nread\nwrite\n<|im_end|>\n{without}"


def test_a_longer_conversation_extends_the_tokens_of_a_shorter_one(demo: tuple[Any, Any]) -> None:
    tokenizer = demo[1]
    messages = [
        {"role": role, "content": text}
        for role, text in [("user", "Hi"), ("assistant", "Hello!")] * 2
    ]
    whole = tokenizer.apply_chat_template(messages)
    for shorter in range(1, len(messages)):
        tokens = tokenizer.apply_chat_template(messages[:shorter])
        assert tokens == whole[: len(tokens)]


def test_tokenizer_returns_every_text_of_the_dataset(demo: tuple[Any, Any]) -> None:
    tokenizer = demo[1]
    for text in itertools.chain.from_iterable(
        [*topic["questions"], topic["answer"]] for topic in TOPICS
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("What is mlx-blockpool?", ["extension layer", "mlx-lm"]),
        ("What is a block?", ["256 tokens", "keys and values"]),
        ("What is a slab?", ["array", "layer"]),
        ("What is a prefix?", ["beginning of a prompt"]),
        ("What is a checkpoint?", ["window", "state"]),
        ("Why 256 tokens?", ["KVCache"]),
        ("What does evict mean?", ["out of memory"]),
        ("What is copy-on-write?", ["copies that one block"]),
        ("How do I install it?", ["pip install"]),
        ("How do I start the server?", ["mlx-blockpool serve --model"]),
        ("What happens at a restart?", ["loses nothing", "on disk", "kill -9"]),
        ("What is the store?", ["on disk"]),
        ("How do I name an agent?", ["X-Agent-Id"]),
        ("How do I use Claude Code?", ["ANTHROPIC_BASE_URL"]),
        ("Where is the dashboard?", ["http://127.0.0.1:8080/"]),
        ("How do I get metrics?", ["GET /metrics"]),
        ("Who are you?", ["demo model"]),
        ("hello", ["Hello!"]),
    ],
)
def test_answers_a_question(demo: tuple[Any, Any], question: str, words: list[str]) -> None:
    answer = ask(demo, [{"role": "user", "content": question}])
    assert [word for word in words if word not in answer] == []


def test_answers_the_fourth_turn_after_a_long_system_message(demo: tuple[Any, Any]) -> None:
    messages = [{"role": "system", "content": LONG_SYSTEM}]
    questions = ["Hello", "What is a block?", "How do I install it?", "What is a hit?"]
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": ask(demo, messages)})
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    expected = ["Hello!", "256 tokens", "pip install", "already in the pool"]
    assert [
        word for word, answer in zip(expected, answers, strict=True) if word not in answer
    ] == []


@pytest.mark.thorough
def test_answers_most_questions_that_it_was_not_trained_on(demo: tuple[Any, Any]) -> None:
    right = [
        ask(demo, [{"role": "user", "content": topic["questions"][-1]}]) == topic["answer"]
        for topic in TOPICS
    ]
    assert sum(right) / len(right) > 0.85
