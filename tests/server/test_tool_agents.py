"""Agents that use tools, on architectures that forget: replies of stock, and turns that go on
where the last one ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from architectures.pooled import save_architecture
from mlx_lm import load, stream_generate
from thorough import is_thorough, only

from server.serving import Client, at_once, blockpool_server

TYPES = [
    "qwen3_next",
    "falcon_h1",
    "lfm2",
    "jamba",
    "nemotron_h",
    "llama4",
    "deepseek_v3",
    "gemma3n",
    "gpt_oss",
]
AGENTS = 2
TURNS = 3 if is_thorough() else 2
SYSTEM = "You are an agent that looks things up before it answers. " * 4
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'tool' %}<tool_response>\n{% endif %}{{ m['content'] or '' "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def turn(client: Client, messages: list[dict[str, Any]], agent: int) -> None:
    """A question, and a tool's result."""
    for role, content in (
        ("user", f"Agent {agent} asks about {len(messages)}."),
        ("tool", f"Result {agent}.{len(messages)}"),
    ):
        messages.append({"role": role, "content": content})
        answer = client.chat(messages, tools=TOOLS, max_tokens=12)
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"].get("content") or ""}
        )


def talk(client: Client) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]]]:
    """What agents and a server say to each other, and the server's figures after each turn."""
    talks: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": SYSTEM}] for _ in range(AGENTS)
    ]
    reports = []
    for _ in range(TURNS):
        at_once([lambda a=a: turn(client, talks[a], a) for a in range(AGENTS)])
        reports.append(client.send("/v1/cache")[1] if hasattr(client.generator, "report") else {})
    return talks, reports


@pytest.mark.parametrize("name", only(TYPES, "llama4"))
def test_agents_with_tools_go_on_where_they_were(name: str, tmp_path: Path) -> None:
    model = save_architecture(tmp_path / name, name, TEMPLATE)
    with blockpool_server(model, "--pool-bytes", "60MB") as ours:
        talks, reports = talk(ours)
        ours.settle()
    # From the first token on, alone: mlx-lm's server cuts caches of chunks where they cannot be
    # cut, and replies otherwise then.
    loaded, tokenizer, *_ = load(str(model))
    for agent, said in enumerate(talks):
        for i, message in enumerate(said):
            if message["role"] == "assistant":
                prompt = tokenizer.apply_chat_template(
                    said[:i], tools=TOOLS, add_generation_prompt=True
                )
                answer = "".join(
                    part.text for part in stream_generate(loaded, tokenizer, prompt, max_tokens=12)
                )
                assert message["content"] == answer, f"agent {agent}, message {i}"
    known, cached = (
        reports[-1][figure] - reports[0][figure] for figure in ("known_tokens", "cached_tokens")
    )
    assert cached >= 0.8 * known
    assert known >= 0.8 * (reports[-1]["prompt_tokens"] - reports[0]["prompt_tokens"])


@pytest.mark.parametrize(("size", "warns"), [("60MB", False), ("1MB", True)])
def test_a_pool_that_holds_hardly_a_checkpoint_says_what_to_raise(
    size: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_architecture(tmp_path / "gpt_oss", "gpt_oss", TEMPLATE)
    with blockpool_server(model, "--pool-bytes", size) as ours:
        ours.chat([{"role": "user", "content": "Hello"}], max_tokens=2)
    told = [
        record.getMessage() for record in caplog.records if "checkpoints of" in record.getMessage()
    ]
    assert bool(told) == warns
    assert all("Raise --pool-bytes to" in message for message in told)
