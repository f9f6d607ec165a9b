"""Five agents talk to a server at the same time: `mlx-blockpool demo`.

All of them begin with the same system prompt, two with a longer one, and each has its own
conversation. Each line of the output says how much of a prompt was cached: the shared prefix as
soon as one agent has computed it, and after a restart of the server everything on disk. Replies are
greedy, so a second run repeats the same conversations.
"""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

QUESTIONS = (
    "What is a block?",
    "What is a slab?",
    "How does copy-on-write work?",
    "What happens when the pool is full?",
    "What is mlx-blockpool?",
    "What is a prefix?",
)
AGENTS = ("planner", "writer", "reviewer", "coder", "tester")


def load_json(name: str) -> Any:
    return json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


def beginning(agent: str) -> str:
    """The system prompt of an agent: rules, and what the demo model knows."""
    answers = [topic["answer"] for topic in load_json("questions.json")]
    text = " ".join(
        [
            "You are one of five agents that work on a project.",
            *load_json("systems.json"),
            *answers[:10],
        ]
    )
    return " ".join([text, *answers[10:25]]) if agent in ("coder", "tester") else text


def ask(url: str, agent: str, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and how many of them were cached."""
    body = json.dumps({"model": "default_model", "messages": messages, "max_tokens": 80}).encode()
    headers = {"Content-Type": "application/json", "X-Agent-Id": agent}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    ) as response:
        answer = json.loads(response.read())
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def talk(url: str, agent: str, turns: int) -> list[tuple[int, int]]:
    """The tokens of each turn's prompt, and how many of them were cached."""
    counts: list[tuple[int, int]] = []
    messages = [{"role": "system", "content": beginning(agent)}]
    for turn in range(turns):
        question = QUESTIONS[(turn + AGENTS.index(agent)) % len(QUESTIONS)]
        messages.append({"role": "user", "content": question})
        text, tokens, cached = ask(url, agent, messages)
        messages.append({"role": "assistant", "content": text})
        print(
            f"{agent:9} turn {turn + 1}: {cached:5,} of {tokens:5,} tokens cached. {question} "
            f"{text[:60]!r}",
            flush=True,
        )
        counts.append((tokens, cached))
    return counts


def saved(url: str) -> float:
    """The seconds of prefill that reuse has saved since the server's start."""
    with urllib.request.urlopen(f"{url}/v1/cache") as response:
        return float(json.loads(response.read())["seconds_saved"]["since_start"])


def talk_all(url: str, turns: int) -> list[tuple[int, int]]:
    """talk() of all agents."""
    with ThreadPoolExecutor(len(AGENTS)) as threads:
        found = threads.map(lambda agent: talk(url, agent, turns), AGENTS)
        return [counts for each in found for counts in each]
