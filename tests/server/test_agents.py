"""Five agents with one system prompt, some turns each, at the same time: replies, reuse and
memory against mlx-lm's server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer
from models import save_model
from thorough import is_thorough, only

from server.serving import Client, at_once, blockpool_server, cached_tokens, stock_server, text_of

AGENTS, TURNS, REPLY = (5, 4, 20) if is_thorough() else (5, 3, 12)
SYSTEM = "You are one of five agents that share this text. " * 12
TYPES = ["llama", "qwen2", "gemma3_text", "gpt_oss"]


def question(agent: int, turn: int) -> str:
    return f"Agent {agent} asks question {turn}: " + "why? " * (1 + (3 * agent + 5 * turn) % 11)


def converse(client: Client, agent: int) -> list[dict[str, Any]]:
    """All turns of one agent: messages sent, reply, and usage of each."""
    messages = [{"role": "system", "content": SYSTEM}]
    turns = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": question(agent, turn)})
        answer = client.chat(list(messages), max_tokens=REPLY)
        # mlx-lm's server leaves out a space at the very end of a reply, which mlx_lm.generate has.
        reply = (text_of(answer) or "").removesuffix(" ")
        cached = cached_tokens(answer["usage"])
        turn_of = {
            "messages": list(messages),
            "reply": reply,
            "cached": cached,
            "usage": answer["usage"],
        }
        turns.append({**turn_of, "finish_reason": answer["choices"][0]["finish_reason"]})
        messages.append({"role": "assistant", "content": reply})
    return turns


def said(turn: dict[str, Any]) -> tuple[str, int]:
    return turn["reply"], turn["usage"]["completion_tokens"]


@pytest.mark.parametrize("name", only(TYPES, "gpt_oss"))
def test_five_agents_answer_as_stock_and_share_one_prompt(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / name, name)
    tokenizer = load_tokenizer(model)
    with stock_server(model) as stock:
        expected = at_once([lambda a=a: converse(stock, a) for a in range(AGENTS)])
    with blockpool_server(model, "--pool-bytes", "60MB") as ours:
        found = at_once([lambda a=a: converse(ours, a) for a in range(AGENTS)])
        ours.settle()
        report = ours.send("/v1/cache")[1]
    assert [[said(turn) for turn in turns] for turns in expected] == [
        [said(turn) for turn in turns] for turns in found
    ]

    conversations = [[tokens_of(tokenizer, turn) for turn in turns] for turns in found]
    known = cached = 0
    for turns, tokens in zip(found, conversations, strict=True):
        for turn in range(1, TURNS):
            prompt = tokens[turn][: turns[turn]["usage"]["prompt_tokens"]]
            seen = common(prompt, tokens[turn - 1])
            known += seen
            cached += turns[turn]["cached"]
            if name in ("llama", "qwen2"):
                assert turns[turn]["cached"] >= min(seen, len(prompt) - 1)
    assert cached >= 0.95 * known, f"{cached} of {known} known tokens were cached"

    full = next(g for g in report["groups"] if g["group"].startswith("full"))
    assert full["held"] == 0
    assert full["evictable"] == len(edges(conversations)), (
        "every distinct block of 256 tokens is in the pool once"
    )
    assert report["array_bytes"] <= report["pool_bytes"] == 60_000_000


def tokens_of(tokenizer: Any, turn: dict[str, Any]) -> list[int]:
    """The tokens that a turn left in the cache, as far as its text tells: mlx-lm's text lacks a
    reply's leading space.
    """
    prompt = tokenizer.apply_chat_template(turn["messages"], add_generation_prompt=True)
    reply = tokenizer.encode(turn["reply"], add_special_tokens=False)
    reply += [tokenizer.eos_token_id] if turn["finish_reason"] == "stop" else []
    assert turn["usage"]["prompt_tokens"] == len(prompt)
    complete = turn["usage"]["completion_tokens"] == len(reply)
    return (
        [*prompt, *reply]
        if complete
        else [*prompt, *tokenizer.encode(" " + turn["reply"], add_special_tokens=False)]
    )


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def edges(conversations: list[list[list[int]]]) -> set[tuple[int, ...]]:
    """The distinct beginnings that end at a block's end, and the tails that no longer one
    contains.
    """
    found = set()
    for tokens in (turn for turns in conversations for turn in turns):
        found |= {tuple(tokens[:end]) for end in (*range(256, len(tokens), 256), len(tokens))}
    tails = [e for e in found if len(e) % 256]
    return found - {
        tail
        for tail in tails
        for longer in found
        if len(longer) > len(tail) and longer[: len(tail)] == tail
    }
