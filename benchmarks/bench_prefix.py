"""Looking up a prompt of 100k tokens among 1,000 conversations, against mlx-lm's LRUPromptCache, in
one run.

Both know the same conversations. `lookup` is the search of the trie alone; `fetch` ends in caches
to go on with, as a request needs them, and for ours in blocks for the whole prompt. The arrays
behind them are tiny. The last case has real ones: a fetch in a script whose pool is attached, as
open_pool() does it, beside one that is not and copies what it has found.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from measure import interleave, llama, options, report
from mlx_lm.models.cache import KVCache, LRUPromptCache

from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.prefix.cache import PrefixCache
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, blocks_for

SYSTEM = 4_000


def conversations(count: int, tokens: int) -> list[list[int]]:
    """One long conversation and `count` of 200 tokens behind the same system prompt."""
    rng = random.Random(0)
    system = [rng.randrange(150_000) for _ in range(SYSTEM)]
    short = [system + [rng.randrange(150_000) for _ in range(200)] for _ in range(count)]
    return [system + [rng.randrange(150_000) for _ in range(tokens - SYSTEM)], *short]


Search = Callable[[list[int]], int]


def our_searches(known: list[list[int]], layers: int) -> tuple[Search, Search]:
    """(lookup, fetch): each returns how many tokens it found."""
    spec = ModelCacheSpec("lookup", (FullLayer(1, 1, 1),) * layers, "float16")
    blocks = sum(blocks_for(len(c)) for c in known) + 2000
    prefix = PrefixCache(KVArena(spec, blocks * spec.bytes_per_block(spec.groups[0])))
    prefix.arena.capabilities = RAGGED
    for tokens in known:
        caches = prefix.acquire(tokens, 1).caches
        for cache in caches:
            cache.offset = len(tokens)
        prefix.release(tokens, caches)
    return (
        lambda tokens: prefix.index.trie.match(tokens).tokens,
        lambda tokens: prefix.acquire(tokens, 1).lookup.hit,
    )


def stock_searches(known: list[list[int]], layers: int) -> tuple[Search, Search]:
    stock = LRUPromptCache(len(known) + 1)
    for tokens in known:
        caches = [KVCache() for _ in range(layers)]
        for cache in caches:
            cache.update_and_fetch(*mx.zeros((2, 1, 1, len(tokens), 1), mx.float16))
        mx.eval([c.state for c in caches])
        stock.insert_cache("model", tokens, caches)

    def lookup(tokens: list[int]) -> int:
        found = stock._trie.search("model", tokens)
        return len(found.exact or ()) or found.common_prefix

    return lookup, lambda tokens: len(tokens) - len(stock.fetch_nearest_cache("model", tokens)[1])


def script_fetch(length: int, attach: bool) -> tuple[Callable[[], float], dict[str, Any]]:
    """Seconds of processor time for a fetch of `length` known tokens by a script, and what
    proves how it was done.
    """
    model = llama(256, 4, 4, 2)
    # Twice the keys and values of the prompt, and as much again for a copy.
    prefix = PrefixCache(open_pool(model, 8 * length * 2 * 4 * 2 * 64 * 4, attach=attach))
    rng = random.Random(0)
    known = [rng.randrange(2048) for _ in range(length)]
    caches = prefix.acquire(known, 1).caches
    for cache in caches:
        cache.update_and_fetch(*mx.random.normal((2, 1, 2, length, 64)))
    prefix.release(known, caches)
    prompt = [*known, *range(50)]

    def seconds() -> float:
        start = time.process_time()
        acquired = prefix.acquire(prompt, 1)
        spent = time.process_time() - start
        assert acquired.lookup.hit == length
        prefix.discard(acquired.caches)
        return spent

    before = {block for node in prefix.index.trie for _, block in node.blocks}
    acquired = prefix.acquire(prompt, 1)
    copied = len(set(acquired.caches[0].sequence.tables[0].ids[: blocks_for(length)]) - before)
    prefix.discard(acquired.caches)
    return seconds, {"attached": prefix.arena.capabilities.ragged, "blocks_copied": copied}


def bench_script_fetch(args: Any, length: int, rounds: int) -> None:
    (attached, ours), (copying, theirs) = script_fetch(length, True), script_fetch(length, False)
    assert ours["attached"], "the model was not attached"
    assert ours["blocks_copied"] < theirs["blocks_copied"] == length // 256, f"{ours} and {theirs}"
    median = interleave({"attached": attached, "not_attached": copying}, rounds)
    report(
        args,
        "prefix",
        f"fetch of {length} known tokens in a script, attached and not",
        attached_cpu_ms=round(median["attached"] * 1e3, 3),
        not_attached_cpu_ms=round(median["not_attached"] * 1e3, 3),
        ratio=round(median["not_attached"] / median["attached"], 1),
        blocks_copied_attached=ours["blocks_copied"],
        blocks_copied_not_attached=theirs["blocks_copied"],
    )


def bench(
    args: Any, case: str, prompt: list[int], ours: Search, stock: Search, rounds: int
) -> None:
    # Equal tokens of a new request are other objects.
    prompt = [int(str(token)) for token in prompt]

    def seconds(search: Search) -> float:
        start = time.perf_counter()
        search(prompt)
        return time.perf_counter() - start

    found = {"hit_ours": ours(prompt), "hit_stock": stock(prompt)}
    median = interleave({"ours": lambda: seconds(ours), "stock": lambda: seconds(stock)}, rounds)
    times = {f"{name}_ms": round(value * 1e3, 3) for name, value in median.items()}
    report(args, "prefix", case, **times, ratio=round(median["stock"] / median["ours"], 1), **found)


if __name__ == "__main__":
    args = options(__doc__ or "")
    count, tokens, rounds = (200, 100_000, 5) if args.quick else (1000, 100_000, 15)
    known = conversations(count, tokens)
    systems = zip(
        ("lookup", "acquire"), our_searches(known, 2), stock_searches(known, 2), strict=True
    )
    long = known[0]
    for name, ours, stock in systems:
        bench(
            args,
            f"{name}: {tokens} tokens, the last 10 new, among {count}",
            [*long[:-10], *range(10)],
            ours,
            stock,
            rounds,
        )
        bench(
            args,
            f"{name}: {tokens} tokens and a turn of 50, among {count}",
            [*long, *range(50)],
            ours,
            stock,
            rounds,
        )
        bench(
            args,
            f"{name}: {tokens} tokens, {SYSTEM} known, among {count}",
            [*long[:SYSTEM], *long[::-1]],
            ours,
            stock,
            rounds,
        )
    bench_script_fetch(args, 8192, rounds)
