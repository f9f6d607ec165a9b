"""Agents go on where they were, after a kill -9 and after a clean stop: a real process, real
files.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from mlx_lm import load, stream_generate
from models import save_model
from thorough import is_thorough, only

from mlx_blockpool import StoreConfig, open_prefix
from server.processes import needs_proc, process, turn, written
from server.serving import at_once, blockpool_server, cached_tokens, stock_server

AGENTS, TURNS = (3, 3) if is_thorough() else (2, 2)
SYSTEM = "You are one of some agents, and all of them begin with this text. " * 12


KILL, STOP = "kill -9", "SIGTERM"
ENDINGS = [
    (name, ending, "") for name in ("llama", "gemma3_text", "gpt_oss") for ending in (KILL, STOP)
]
IN_BITS = [
    ("llama", KILL, "--kv-bits 8"),
    ("gpt_oss", KILL, "--kv-bits 8"),
    ("gemma3_text", STOP, "--kv-bits 8 --kv-bits-values 4"),
    ("llama", STOP, "--kv-bits 4"),
]


@pytest.mark.parametrize("case", only([*ENDINGS, *IN_BITS], ENDINGS[0]), ids=" ".join)
@needs_proc
def test_agents_go_on_after_a_restart(case: tuple[str, str, str], tmp_path: Path) -> None:
    name, ending, bits = case
    model = save_model(tmp_path / name, name, **({"head_dim": 64} if bits else {}))
    expected, talks = (
        [[{"role": "system", "content": SYSTEM}] for _ in range(AGENTS)] for _ in range(2)
    )
    if not bits:
        with stock_server(model) as stock:
            for _ in range(TURNS + 1):
                at_once([lambda a=a: turn(stock.port, expected[a], a) for a in range(AGENTS)])
    with process(model, tmp_path / "store", *bits.split()) as (port, server):
        for _ in range(TURNS):
            usage = at_once([lambda a=a: turn(port, talks[a], a) for a in range(AGENTS)])
        if ending == KILL:
            written(port)
            server.kill()
        else:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == (-signal.SIGKILL if ending == KILL else 0)
    with blockpool_server(
        model, "--pool-bytes", "60MB", "--store-dir", str(tmp_path / "store"), *bits.split()
    ) as again:
        later = at_once([lambda a=a: turn(again.port, talks[a], a) for a in range(AGENTS)])
        if bits:
            # Of windows and other bits for values mlx-lm has none to compare with. With a salt
            # nothing of before is known.
            for _ in range(TURNS + 1):
                at_once(
                    [
                        lambda a=a: turn(again.port, expected[a], a, cache_salt="uninterrupted")
                        for a in range(AGENTS)
                    ]
                )
    assert talks == expected, "another reply than without a restart"
    for before, after in zip(usage, later, strict=True):
        # What a finished block held; a clean stop has written the unfinished ones too. Windows
        # resume at a message's end: that of the last question, where the reply's text does not
        # become the same tokens again.
        held = before["total_tokens"] - 1
        needed = held // 256 * 256 if ending == KILL else 0.97 * held
        assert cached_tokens(after) >= needed


def test_a_stored_prefix_is_not_that_of_other_weights(tmp_path: Path) -> None:
    one, two = save_model(tmp_path / "one", "llama"), save_model(tmp_path / "two", "llama", seed=7)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who are you?"}]
    stored = ("--pool-bytes", "60MB", "--store-dir", str(tmp_path / "store"))
    with blockpool_server(one, *stored) as first:
        first.chat(messages, max_tokens=4)
    with blockpool_server(two, *stored) as second:
        assert cached_tokens(second.chat(messages, max_tokens=4)["usage"]) == 0
    (tmp_path / "one").rename(tmp_path / "moved")
    with blockpool_server(tmp_path / "moved", *stored) as third:
        usage = third.chat(messages, max_tokens=4)["usage"]
        assert cached_tokens(usage) == usage["prompt_tokens"] - 1
        third.settle()


def test_a_script_and_a_server_go_on_from_what_the_other_has_kept(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who are you?"}]
    with blockpool_server(
        folder, "--pool-bytes", "60MB", "--store-dir", str(tmp_path / "store")
    ) as server:
        prompt = server.chat(messages, max_tokens=4)["usage"]["prompt_tokens"]
    model, tokenizer = load(str(folder))
    prefix = open_prefix(model, folder, 60_000_000, StoreConfig(tmp_path / "store"))
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert len(tokens) == prompt
    hit = prefix.acquire(tokens, 4)
    assert hit.lookup.hit == len(tokens) - 1
    for response in stream_generate(
        model, tokenizer, hit.rest, max_tokens=4, prompt_cache=hit.caches
    ):
        tokens.append(response.token)
    prefix.release(tokens[:-1], hit.caches)
    assert prefix.close()
    messages += [
        {"role": "assistant", "content": tokenizer.decode(tokens[prompt:])},
        {"role": "user", "content": "And I?"},
    ]
    with blockpool_server(
        folder, "--pool-bytes", "60MB", "--store-dir", str(tmp_path / "store")
    ) as server:
        usage = server.chat(messages, max_tokens=4)["usage"]
        assert cached_tokens(usage) >= len(tokens) - 1
        server.settle()
