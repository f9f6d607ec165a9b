"""Recorded coding sessions over HTTP, against mlx_lm.server: several sessions at a time, each by
its own clock.

All lengths are divided by 16, and the clocks run faster. The model is tiny and has one token a
word, so that prompts have the recorded lengths. Where a recorded request continues a reply, it
continues the reply that the server gave. Both servers run as real processes, in turns, and get the
same bytes for their caches; ours has its store on disk besides. `reuse` is what `cached_tokens`
says, as a part of the ideal: the tokens that earlier requests had too. Requests that end without a
reply are counted as `failed`.

After it, a chat of six turns whose last message, a system message, is replaced in each turn, with
tiny models of several kinds. Its ideal are the tokens up to that message.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from bench_server import COMMANDS, Server
from measure import llama, options, report
from mlx.utils import tree_flatten
from sessions import GRAIN, Blocks, Row, recorded, rows
from tokenizers import Tokenizer, models, pre_tokenizers

from mlx_blockpool.spec import BLOCK_TOKENS
from mlx_blockpool.testing import tiny_model

DIVISOR = 16
# Four of the 14, with 81 requests: most of the others have prompts that take a CPU too long.
SESSIONS = (5, 6, 10, 11)
SPEED = 60
QUICK_DIVISOR, QUICK_SESSIONS, QUICK_REQUESTS, QUICK_SPEED = 64, (10, 11), 5, 600
MARKS = {"system": "<system>", "user": "<user>", "assistant": "<assistant>"}
END = "<end>"
SPECIAL = (*MARKS.values(), END)
WORDS = [f"w{number}" for number in range(2048 - len(SPECIAL))]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZE = (64, 2, 2, 1)
# Keys and values of a token: two layers, one head of 32, float32.
TOKEN_BYTES = 2 * 2 * 32 * 4
# A server that takes longer has lost its generation thread.
TIMEOUT = 120.0

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 65536,
}
# Full attention; states; windows.
KINDS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "lfm2": {
        **SMALL,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 48,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
    },
    "gemma3_text": {
        **SMALL,
        "query_pre_attn_scalar": 16,
        "sliding_window": 1024,
        "sliding_window_pattern": 2,
    },
    "gpt_oss": {
        **SMALL,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    },
}
# Words of the system message, of each turn's question and of the message that is replaced.
TURNS, SIZES, QUICK_SIZES = 6, (1500, 2500, 20), (100, 200, 20)

# A message: its role and its words.
Message = tuple[str, list[str]]


def write_tokenizer(folder: Path) -> list[str]:
    """A tokenizer of WORDS in a new folder. Returns its vocabulary."""
    folder.mkdir()
    vocab = [*SPECIAL, *WORDS]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(vocab)}, unk_token=END)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "unk_token": END,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "clean_up_tokenization_spaces": False})
    )
    return vocab


def make_model(folder: Path) -> None:
    """A random llama that knows WORDS, and never draws a mark."""
    vocab = write_tokenizer(folder)
    model = llama(*SIZE, vocab=len(vocab), tie_word_embeddings=False, max_position_embeddings=65536)
    config = {key: value for key, value in vars(model.args).items() if value is not None}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": vocab.index(END)}))
    weights = {
        name: array * 3 if array.ndim > 1 else array
        for name, array in tree_flatten(model.parameters())
    }
    weights["lm_head.weight"][: len(SPECIAL)] = 0
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def num_tokens(messages: Iterable[Message]) -> int:
    """Tokens of messages, each with a mark before and one behind it."""
    return sum(len(words) + 2 for _, words in messages)


def cut(messages: list[Message], tokens: int) -> list[Message]:
    """The beginning of a prompt as messages of at most `tokens` tokens.

    The last one may be a part of a message.
    """
    kept: list[Message] = []
    for role, words in messages:
        if tokens < 3:
            break
        kept.append((role, words[: tokens - 2]))
        tokens -= len(words) + 2
    return kept


@dataclass
class Turn:
    """A request that was sent, and its reply.

    `known`: tokens of the prompt that earlier requests had too.
    """

    messages: list[Message]
    known: int
    reply: list[str] = field(default_factory=list)
    first: float = 0.0
    prompt_tokens: int = 0
    cached: int = 0


class Client:
    """Sends the requests of several sessions to one server, each at its time, but not before its
    parent has its reply.
    """

    def __init__(self, server: Server, requests: list[Row], speed: float, grain: int) -> None:
        self._server = server
        self._grain = grain
        self._speed = speed
        self._start = time.perf_counter()
        self._heads: set[tuple[int, int]] = set()
        self._ended = {row.key: threading.Event() for row in requests}
        self.turns: dict[tuple[int, int], Turn] = {}
        self.failures: list[str] = []

    def send(self, row: Row) -> None:
        time.sleep(max(0.0, row.at / self._speed - (time.perf_counter() - self._start)))
        if row.parent_key in self._ended:
            self._ended[row.parent_key].wait()
        turn = self.turns[row.key] = self._continued(row)
        try:
            self._ask(row, turn)
        except (OSError, HTTPException, KeyError, ValueError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")
        finally:
            self._ended[row.key].set()

    def _ask(self, row: Row, turn: Turn) -> None:
        messages = [{"role": role, "content": " ".join(words)} for role, words in turn.messages]
        text, turn.first, usage = self._server.chat(messages, row.output, TIMEOUT)
        turn.reply = text.split()
        turn.prompt_tokens = usage["prompt_tokens"]
        turn.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def _continued(self, row: Row) -> Turn:
        """The messages of a request: what it has from its parent, or tools and system text, and
        words of its own.
        """
        parent = self.turns.get(row.parent_key)
        head, known = (row.tools, row.system), True
        if parent is None:
            base: list[Message] = [("system", self._words(head, sum(head)))]
            known = head in self._heads
            self._heads.add(head)
        elif row.shared + self._grain >= num_tokens(parent.messages):
            base = (
                [*parent.messages, ("assistant", parent.reply)] if parent.reply else parent.messages
            )
        else:
            base = cut(parent.messages, row.shared)
        # Room for one more message of a word, and the mark of the reply.
        base = cut(base, row.prompt - 4)
        own = self._words(row.key, row.prompt - num_tokens(base) - 3)
        # The last message may have gone on before, so that its end is not known.
        return Turn([*base, ("user", own)], num_tokens(base) - 1 if known else 0)

    def _words(self, seed: tuple[int, int], count: int) -> list[str]:
        return [
            WORDS[number] for number in np.random.default_rng(seed).integers(0, len(WORDS), count)
        ]


def replay(
    command: list[str], model: Path, requests: list[Row], speed: float, grain: int
) -> tuple[dict[str, Any], Client]:
    """The figures of one server, which is started for it."""
    server = Server(command, model)
    try:
        server.chat([{"role": "user", "content": WORDS[0]}], 2)
        client, start = Client(server, requests, speed, grain), time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as threads:
            list(threads.map(client.send, requests))
        wall = time.perf_counter() - start
    finally:
        server.stop()
    turns = [turn for turn in client.turns.values() if turn.reply]
    first = sorted(turn.first for turn in turns)
    figures = {
        "wall_s": round(wall, 1),
        "ttft_ms": round(statistics.median(first) * 1e3, 1) if first else None,
        "ttft_p95_ms": round(first[int(0.95 * (len(first) - 1))] * 1e3, 1) if first else None,
        "cached_tokens": sum(turn.cached for turn in turns),
        "reuse": round(
            sum(turn.cached for turn in turns) / sum(turn.known for turn in client.turns.values()),
            4,
        ),
        "failed": len(requests) - len(turns),
    }
    return figures, client


def bench(args: Any, model: Path, requests: list[Row], pool_bytes: int) -> None:
    """Both servers with the same bytes, one after the other."""
    divisor, speed = (QUICK_DIVISOR, QUICK_SPEED) if args.quick else (DIVISOR, SPEED)
    with tempfile.TemporaryDirectory() as store:
        ours = [*COMMANDS["ours"][:-3], "--pool-bytes", str(pool_bytes), "--store-dir", store]
        stock = [
            *COMMANDS["stock"],
            "--prompt-cache-bytes",
            str(pool_bytes),
            "--prompt-cache-size",
            "1000",
        ]
        commands = {"stock": stock, "ours": ours}
        found = {
            name: replay(command, model, requests, speed, GRAIN // divisor)
            for name, command in commands.items()
        }
    replies = [
        {key: turn.reply for key, turn in client.turns.items()} for _, client in found.values()
    ]
    figures = {
        f"{name}_{key}": value
        for name in ("ours", "stock")
        for key, value in found[name][0].items()
    }
    turns = found["ours"][1].turns.values()
    report(
        args,
        "sessions_http",
        "100 % of the working set",
        sessions=len({row.session for row in requests}),
        requests=len(requests),
        speed=speed,
        pool_bytes=pool_bytes,
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        known_tokens=sum(turn.known for turn in turns),
        **figures,
        failures=sorted({text for _, client in found.values() for text in client.failures}),
        replies_different=sum(replies[0][key] != replies[1][key] for key in replies[0]),
    )


def words(seed: int, count: int) -> str:
    numbers = np.random.default_rng(seed).integers(0, len(WORDS), count)
    return " ".join(WORDS[number] for number in numbers)


def converse(command: list[str], model: Path, sizes: tuple[int, int, int]) -> Counter[str]:
    """The tokens of the prompts, those of them that were cached, and that could be."""
    server, counts, ideal = Server(command, model), Counter[str](), 0
    system, question, last = sizes
    messages = [{"role": "system", "content": words(0, system)}]
    try:
        for turn in range(1, TURNS + 1):
            messages.append({"role": "user", "content": words(turn, question)})
            replaced = {"role": "system", "content": words(100 + turn, last)}
            reply, _, usage = server.chat([*messages, replaced], 16, TIMEOUT)
            messages.append({"role": "assistant", "content": reply})
            counts["prompt"] += usage["prompt_tokens"]
            counts["cached"] += usage["prompt_tokens_details"]["cached_tokens"]
            counts["ideal"] += ideal
            # Without the replaced message, its marks and the mark of the reply.
            ideal = usage["prompt_tokens"] - (last + 3)
    finally:
        server.stop()
    return counts


def bench_replaced(args: Any, folder: Path) -> None:
    """Each kind of model on both servers."""
    for name, config in KINDS.items():
        model = folder / name
        vocab = write_tokenizer(model)
        config = {
            **config,
            "model_type": name,
            "torch_dtype": "float32",
            "vocab_size": len(vocab),
        }
        weights = dict(tree_flatten(tiny_model(config).parameters()))
        mx.save_safetensors(str(model / "model.safetensors"), weights, {"format": "mlx"})
        (model / "config.json").write_text(json.dumps({**config, "eos_token_id": vocab.index(END)}))
        sizes = QUICK_SIZES if args.quick else SIZES
        ours, stock = (converse(COMMANDS[each], model, sizes) for each in ("ours", "stock"))
        report(
            args,
            "sessions_http",
            f"a last message that is replaced in each turn, {name}",
            turns=TURNS,
            prompt_tokens=ours["prompt"],
            ideal_tokens=ours["ideal"],
            ours_computed=ours["prompt"] - ours["cached"],
            stock_computed=stock["prompt"] - stock["cached"],
            ours_reuse=round(ours["cached"] / ours["ideal"], 4),
            stock_reuse=round(stock["cached"] / stock["ideal"], 4),
        )


def main() -> None:
    args = options(__doc__ or "")
    divisor, sessions = (QUICK_DIVISOR, QUICK_SESSIONS) if args.quick else (DIVISOR, SESSIONS)
    requests = [
        row for row in rows(divisor, sessions) if not args.quick or row.index < QUICK_REQUESTS
    ]
    working_set = Blocks(recorded(sessions, divisor)).working_set
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        bench(args, model, requests, working_set * BLOCK_TOKENS * TOKEN_BYTES)
        bench_replaced(args, Path(folder))


if __name__ == "__main__":
    main()
