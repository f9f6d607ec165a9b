"""The demo agent: it follows its script, whatever stands before, in calls that parse."""

from __future__ import annotations

import json
import random
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from benchmarks.demo.agent import FOLDER, load_script, make_weights, replies

SCRIPT = load_script()
STEPS = SCRIPT["steps"]


@pytest.fixture(scope="module")
def agent() -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(str(FOLDER))[:2]
    return model, tokenizer


def offered(*names: str) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in names
    ]


def reply(
    agent: tuple[Any, Any], messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> str:
    model, tokenizer = agent
    prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    return mlx_lm.generate(model, tokenizer, prompt, max_tokens=20)


def answered(agent: tuple[Any, Any], said: str) -> list[dict[str, Any]]:
    """The messages that follow on a reply: itself as a client sends it back, and what its call
    returned.
    """
    tokenizer = agent[1]
    content, start, rest = said.partition(f"\n{tokenizer.tool_call_start}")
    if not start:
        return [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    call = tokenizer.tool_parser(rest.removesuffix(tokenizer.tool_call_end), None)
    return [
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "README.md"},
    ]


@pytest.mark.parametrize("shell", SCRIPT["shells"])
def test_it_follows_the_script_with_the_shell_that_is_offered(
    agent: tuple[Any, Any], shell: str
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is here?"}]
    for step in [*STEPS, STEPS[0]]:
        said = reply(agent, messages, offered("other", shell))
        messages += answered(agent, said)
        if "answer" in step:
            assert said == "".join(step["answer"])
        else:
            call = messages[-2]["tool_calls"][0]["function"]
            arguments = json.dumps(SCRIPT["shells"][shell]).replace("$", step["run"])
            assert (messages[-2]["content"], call) == (
                step["say"],
                {"name": shell, "arguments": json.loads(arguments)},
            )


@pytest.mark.parametrize("tools", [None, offered("look_up")])
def test_without_a_shell_it_says_so(
    agent: tuple[Any, Any], tools: list[dict[str, Any]] | None
) -> None:
    assert reply(agent, [{"role": "user", "content": "Run ls."}], tools) == "".join(
        SCRIPT["without_shell"]
    )


@pytest.mark.parametrize("words", [1, 500, 9000])
def test_no_prompt_leads_it_astray(agent: tuple[Any, Any], words: int) -> None:
    draw = random.Random(words)
    # Its own phrases too.
    known = [phrase for made in replies(SCRIPT) for phrase in made] + [
        "block",
        "pool ",
        "\n",
        "0.5,",
    ]
    text = "".join(draw.choice(known) for _ in range(words))
    assert reply(agent, [{"role": "user", "content": text}], offered("bash")).startswith(
        STEPS[0]["say"]
    )


def test_a_turn_extends_the_tokens_of_the_one_before_with_its_reply(agent: tuple[Any, Any]) -> None:
    model, tokenizer = agent
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is here?"}]
    known: list[int] = []
    for _ in STEPS:
        prompt = tokenizer.apply_chat_template(
            messages, tools=offered("bash"), add_generation_prompt=True
        )
        assert prompt[: len(known)] == known
        said = [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=20)]
        known = [*prompt, *said]
        messages += answered(agent, tokenizer.decode(said[:-1]))


def test_the_bundled_weights_are_those_that_the_script_makes(agent: tuple[Any, Any]) -> None:
    bundled = mx.load(str(FOLDER / "model.safetensors"))
    made = make_weights(agent[1]._tokenizer.backend_tokenizer, SCRIPT)
    assert {name: weight.shape for name, weight in bundled.items()} == {
        name: weight.shape for name, weight in made.items()
    }
    assert [name for name in made if not mx.array_equal(bundled[name], made[name])] == []
