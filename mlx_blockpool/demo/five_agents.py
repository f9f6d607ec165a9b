"""Five agents talk to a server at the same time: python -m mlx_blockpool.demo.five_agents [--url
URL] [--turns N].

All of them begin with the same system prompt, two with a longer one, and each has its own
conversation. Each line of the output says how much of a prompt was cached: the shared prefix as
soon as one agent has computed it, and after a restart of the server everything on disk. Replies are
greedy, so a second run repeats the same conversations.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..config import check_url
from ..errors import BlockpoolError

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


def talk(url: str, agent: str, turns: int) -> None:
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


def saved(url: str) -> float:
    """The seconds of prefill that reuse has saved since the server's start."""
    with urllib.request.urlopen(f"{url}/v1/cache") as response:
        return float(json.loads(response.read())["seconds_saved"]["since_start"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Five agents talk to a server at the same time.")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the server")
    parser.add_argument("--turns", type=int, default=6, help="questions of each agent")
    args = parser.parse_args()
    try:
        args.url = check_url(args.url)
    except BlockpoolError as error:
        parser.error(str(error))
    before = saved(args.url)
    with ThreadPoolExecutor(len(AGENTS)) as threads:
        list(threads.map(lambda agent: talk(args.url, agent, args.turns), AGENTS))
    print(f"Reuse has saved {saved(args.url) - before:.1f} s of prefill.")


if __name__ == "__main__":
    main()
