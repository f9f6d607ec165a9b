"""The server with a trained model, SmolLM2-135M-Instruct, and what mlx-lm says on its own caches.

Without the model, which benchmarks/smollm2.py downloads, these tests are skipped.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from documents import ROOT
from mlx_lm import load, stream_generate
from mlx_lm.models.cache import make_prompt_cache
from server.serving import blockpool_server, cached_tokens, text_of

from mlx_blockpool.config import KVBits
from mlx_blockpool.kv.build import describe
from mlx_blockpool.kv.rounded_caches import rounded

sys.path.insert(0, str(ROOT / "benchmarks"))
from smollm2 import MODEL

sys.path.remove(str(ROOT / "benchmarks"))

pytestmark = pytest.mark.skipif(
    not (MODEL / "config.json").exists(),
    reason="needs a trained model: python benchmarks/smollm2.py downloads it",
)
POOL = ("--pool-bytes", "60MB", "--measure", "off")
SYSTEM = {"role": "system", "content": "Answer in a word."}
QUESTIONS = ("The capital of France?", "Three colours:")
PROMPTS = (
    "The capital of France?",
    "Three colours:",
    "How many days has a week?",
    "Translate 'good morning' into Spanish.",
    "Which planet is the largest?",
    "What does a compiler do?",
    "Write a haiku about the sea.",
    "Name a prime number above ten.",
    "Who wrote Hamlet?",
    "What is 12 times 12?",
    "Explain photosynthesis in one sentence.",
    "List the primary colours.",
    "What is the boiling point of water?",
    "Give a synonym of 'quick'.",
    "What is the opposite of 'north'?",
    "Name two programming languages.",
    "What is a variable in Python?",
    "Write a Python function that adds two numbers.",
    "Fix this line: pritn('hello')",
    "What does git commit do?",
    "Name an ocean.",
    "How do I boil an egg?",
    "What is the plural of 'mouse'?",
    "Which metal is liquid at room temperature?",
    "What year did the Second World War end?",
    "Give me a word that rhymes with 'light'.",
    "What is an API?",
    "Name a country in Africa.",
    "What is the square root of 81?",
    "Why is the sky blue?",
    "Summarise: The cat sat on the mat because it was warm.",
    "What is the past tense of 'go'?",
    "What is JSON?",
    "Who painted the Mona Lisa?",
    "What is the currency of Japan?",
    "How many legs has a spider?",
    "What is a leap year?",
    "Name a musical instrument.",
    "Complete: Roses are red,",
    "What is the speed of light?",
    "What is the largest mammal?",
    "Is a tomato a fruit?",
    "What is an integer?",
    "Write a polite email that declines a meeting.",
    "What is the freezing point of water in Fahrenheit?",
    "Name a famous scientist.",
    "What does HTTP stand for?",
    "How many continents are there?",
    "Say hello in French.",
    "What is a stack in computer science?",
)
REPLY = 5
Messages = Sequence[dict[str, str]]


@cache
def loaded() -> tuple[Any, Any]:
    model, tokenizer, *_ = load(str(MODEL))
    return model, tokenizer


def stock(messages: Messages, bits: KVBits | None = None, max_tokens: int = REPLY) -> str:
    """mlx-lm's greedy reply on its own caches, whose keys and values are rounded to `bits`."""
    model, tokenizer = loaded()
    caches = rounded(make_prompt_cache(model), describe(model).with_bits(bits))
    prompt = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
    replied = stream_generate(model, tokenizer, prompt, max_tokens=max_tokens, prompt_cache=caches)
    return "".join(part.text for part in replied)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(client: Any, messages: Messages, **more: Any) -> str:
    body = {"messages": list(messages), "max_tokens": REPLY, **more}
    status, answer = client.send("/v1/chat/completions", body)
    assert status == 200, answer
    return str(text_of(answer))


def test_a_reply_is_that_of_mlx_lm() -> None:
    with blockpool_server(MODEL, *POOL) as client:
        reply = ask(client, [SYSTEM, user(QUESTIONS[0])])
    assert reply == stock([SYSTEM, user(QUESTIONS[0])])


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_50_prompts_in_batches_resumed_and_after_a_restart_get_mlx_lms_replies(
    tmp_path: Path,
) -> None:
    chats = [[user(text)] for text in PROMPTS]
    assert len(chats) == 50
    expected = [stock(messages) for messages in chats]

    def replies(client: Any) -> tuple[list[str], int]:
        """What all are answered, eight at a time, and how many prompt tokens were cached."""
        with ThreadPoolExecutor(8) as clients:
            found = list(
                clients.map(lambda messages: client.chat(messages, max_tokens=REPLY), chats)
            )
        cached = sum(cached_tokens(answer["usage"]) for answer in found)
        return [str(text_of(answer)) for answer in found], cached

    options = (*POOL[2:], "--pool-bytes", "400MB", "--store-dir", str(tmp_path))
    with blockpool_server(MODEL, *options) as client:
        cold, resumed = replies(client), replies(client)
    with blockpool_server(MODEL, *options) as client:
        restarted = replies(client)
    assert [cold[0], resumed[0], restarted[0]] == [expected] * 3
    # The pool holds fewer blocks than there are prompts; the disk has all.
    assert cold[1] < resumed[1] <= restarted[1]


@pytest.mark.thorough
def test_a_reply_on_quantised_blocks_is_that_on_rounded_caches() -> None:
    with blockpool_server(MODEL, *POOL, "--kv-bits", "8", "--kv-bits-values", "4") as client:
        reply = ask(client, [SYSTEM, user(QUESTIONS[1])])
    assert reply == stock([SYSTEM, user(QUESTIONS[1])], KVBits(8, 4))


@pytest.mark.thorough
def test_8_bits_cost_no_perplexity_and_4_bits_some() -> None:
    """Of a passage of English that the model reads in two chunks, the second after rounded keys
    and values.
    """
    model, tokenizer = loaded()
    tokens = tokenizer.encode((ROOT / "LICENSE").read_text())[60:108]
    found = {}
    for bits in (None, KVBits(8, 8), KVBits(4, 4)):
        caches = rounded(make_prompt_cache(model), describe(model).with_bits(bits))
        model(mx.array([tokens[:24]]), cache=caches)
        logits = model(mx.array([tokens[24:-1]]), cache=caches)[0]
        right = mx.take_along_axis(logits, mx.array(tokens[25:])[:, None], axis=-1)[:, 0]
        found[bits] = math.exp(mx.mean(mx.logsumexp(logits, axis=-1) - right).item())
    exact, eight, four = found.values()
    assert exact < 40
    assert eight == pytest.approx(exact, rel=0.01)
    assert eight < four < 1.6 * exact


@pytest.mark.thorough
def test_a_form_keeps_the_schema_that_the_model_alone_does_not() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    messages = [SYSTEM, user("Describe Paris as JSON.")]
    with blockpool_server(MODEL, *POOL) as client:
        free = ask(client, messages)
        formed = ask(client, messages, max_tokens=24, response_format=form)
    value = json.loads(formed)
    assert value.keys() == {"city", "large"}
    assert isinstance(value["large"], bool)
    assert len(value["city"]) <= 12
    with pytest.raises(json.JSONDecodeError):
        json.loads(free)


FILE = """def area(width, height):
    size = width * height
    return size

def volume(width, height, depth):
    size = width * height * depth
    return size
"""


@pytest.mark.thorough
def test_an_edit_with_drafts_is_that_of_mlx_lm_in_fewer_forwards() -> None:
    work = "Repeat the file exactly, with `size` renamed to `result`."
    messages = [user(f"Here is a file:\n{FILE}\n{work}")]
    with blockpool_server(MODEL, *POOL, "--drafts", "8") as client:
        reply = ask(client, messages, max_tokens=40)
        drafts = client.send("/v1/cache")[1]["drafts"]
    assert reply == stock(messages, max_tokens=40)
    # The model repeats names and lines of the file, and changes others.
    assert 10 <= drafts["accepted"] < drafts["drafted"]


# The model's own template has no tools; this one writes them as Hermes and Qwen do.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall a tool as <tool_call>\n"
    '{"name": ..., "arguments": ...}\n</tool_call>. The tools:\n'
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.tool_calls %}{% for each in message.tool_calls %}"
    "{% set tool_call = each.function %}<tool_call>\n"
    '{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{% else %}{{ message.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.thorough
def test_a_call_that_is_asked_for_names_the_tool_and_has_the_arguments_of_the_question() -> None:
    messages = [user("What is the weather in Paris, in celsius?")]
    with blockpool_server(MODEL, *POOL, "--chat-template", TEMPLATE) as client:
        body = {"messages": messages, "tools": [WEATHER], "tool_choice": "required"}
        body |= {"parallel_tool_calls": False, "max_tokens": 48}
        status, answer = client.send("/v1/chat/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "unit": "celsius"}
