"""A session of Claude Code, twelve turns with sub-agents between them: what a turn reads of what
the turn before it has left, though the count of tokens after it is another one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.claude_code import BILLING, INSTRUCTIONS, NAMES, Window, tool
from server.scripted import save_agent
from server.serving import Client, blockpool_server

POOL = ("--pool-bytes", "60MB", "--max-positions", "20000")
# The tokens that are read of those that are known. Other architectures than llama read up to where
# a conversation ended, and sub-agents begin alike.
SHARES = {"llama": 0.99, "qwen3_5": 0.97, "gemma3_text": 0.97, "gpt_oss": 0.97, "lfm2": 0.97}


def known_and_cached(server: Client) -> tuple[int, int]:
    figures = server.send("/v1/cache")[1]
    return figures["known_tokens"], figures["cached_tokens"]


# Sub-agents come before the fifth turn.
@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("llama", 5),
        *(pytest.param(n, 12, marks=pytest.mark.thorough) for n in SHARES),
    ],
)
def test_a_session_reads_what_it_has_left(name: str, turns: int, tmp_path: Path) -> None:
    model = save_agent(tmp_path / name, name=name)
    with blockpool_server(model, *POOL) as server:
        window = Window(server, str(model))
        window.run(turns)
        known, cached = known_and_cached(server)
        counted = window.count(window.main_body(without=1))
        server.settle()
    assert cached >= SHARES[name] * known, f"{cached} of {known}"
    assert counted == window.replies[-1].prompt
    # Never a wrong answer: a server that knows nothing replies the same.
    with blockpool_server(model, *POOL) as fresh:
        cold = Window(fresh, str(model), messages=window.messages[:-2])
        again = cold.turn(window.messages[-2]["content"], [])
    assert (again.content, again.read) == (window.replies[-1].content, 0)


@pytest.mark.thorough
def test_another_conversation_of_the_project_reads_all_that_they_have_in_common(
    tmp_path: Path,
) -> None:
    """Their billing lines differ, and stand before everything: it is left out, unless nothing is
    to be.
    """
    model = save_agent(tmp_path / "llama")
    reads = {}
    for options in ((), ("--normalise", "none")):
        with blockpool_server(model, *POOL, *options) as server:
            first, second = (
                Window(server, str(model), reply_tokens=4),
                Window(server, str(model), "Who calls take_3?", reply_tokens=4),
            )
            first.run(turns=2)
            second.run(turns=1)
            reads[options] = second.replies[0]
            status, told = server.send(f"/v1/cache/explain/{second.replies[0].id}")
            assert status == 200, told
            server.settle()
    common = len(INSTRUCTIONS) + sum(len(json.dumps(tool(name))) for name in NAMES)
    assert reads[()].read > common
    told_line, differs = told["difference"]["line"], BILLING.index("{")
    assert reads[("--normalise", "none")].read <= differs + len("<|im_start|>system\n")
    assert (told_line[:differs], told["difference"]["normaliser"]) == (
        BILLING[:differs],
        "vendor-header",
    )
    assert told["why"].endswith(
        "the model's template has the tools after it, which are computed again with it"
    )
