"""The prompt store: first token after a restart against prefilling again, restoring against reading
the files, stalls of decode, the start with many records with and without what was noted of their
headers, the listing of many agents, and the hash of weights the first time and remembered.

Each case runs both in this process, in turns. Files are in the page cache for both.
"""

from __future__ import annotations

import functools
import random
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
from measure import interleave, llama, options, report

from mlx_blockpool.config import EngineConfig, KVBits, PoolConfig, StoreConfig
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request, Token
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.attach import bind
from mlx_blockpool.kv.build import describe
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.prefix.trie import Trie
from mlx_blockpool.spec import BLOCK_TOKENS
from mlx_blockpool.store.agents import Agents
from mlx_blockpool.store.hashing import edge_hash
from mlx_blockpool.store.hashing import encode as edge_of
from mlx_blockpool.store.identity import SETTLED_SECONDS, Digests, identity
from mlx_blockpool.store.paths import name_of
from mlx_blockpool.store.prompt_store import PromptStore
from mlx_blockpool.store.record import BLOCK, Part, Record, encode
from mlx_blockpool.tier.agent_records import AgentRecords
from mlx_blockpool.tier.cache import TieredPrefixCache

VOCAB = 2048


def opened(
    model: Any, folder: Path | None, config: PoolConfig | None = None
) -> BlockPoolBatchEngine:
    """An engine over a new pool, with what the store in `folder` knows."""
    bind(model)
    config = config or PoolConfig(2 * 10**9)
    assert config.pool_bytes is not None
    arena = KVArena(describe(model).with_bits(config.bits), config.pool_bytes, config)
    arena.capabilities = RAGGED
    store = None
    if folder is not None:
        store = PromptStore(
            StoreConfig(folder, min_free_bytes=0, flush_seconds=60), "bench", {"model": "bench"}
        )
    prefix = TieredPrefixCache(arena, store=store)
    return BlockPoolBatchEngine(model, PooledCaches(prefix), EngineConfig(decode_share=0))


def stored(engine: BlockPoolBatchEngine) -> Any:
    assert isinstance(engine.caches, PooledCaches)
    return engine.caches.prefix.stored


def first_token(engine: BlockPoolBatchEngine, prompt: list[int]) -> tuple[int, float]:
    """The first token, and the seconds until it is told."""
    start = time.perf_counter()
    engine.insert(Request(prompt, max_tokens=1))
    while True:
        for event in engine.next():
            if isinstance(event, Token):
                return event.token, time.perf_counter() - start


def bench_restart(args: Any, model: Any, length: int, folder: Path) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(VOCAB) for _ in range(length)]
    engine = opened(model, folder)
    expected, cold = first_token(engine, prompt)
    assert stored(engine).close(), "the store could not write everything"
    warm = []
    for _ in range(3):
        start = time.perf_counter()
        again = opened(model, folder)
        scanned = time.perf_counter() - start
        token, seconds = first_token(again, prompt)
        assert token == expected, f"another token after the restart: {token} != {expected}"
        computed = again.counts["prompt_tokens"]
        assert stored(again).restores.num_restored == length, (
            f"{stored(again).restores.num_restored} tokens restored != {length}"
        )
        warm.append(scanned + seconds)
        stored(again).store.close()
    figures = {
        "cold_s": round(cold, 2),
        "warm_s": round(statistics.median(warm), 3),
        "computed_again": computed,
    }
    report(
        args,
        "store",
        f"first token of {length} after a restart",
        **figures,
        ratio=round(cold / statistics.median(warm), 1),
    )


def fill(model: Any, folder: Path, length: int, kv: KVBits | None) -> None:
    """Random keys and values of one sequence, on disk."""
    engine = opened(model, folder, PoolConfig(2 * 10**9, bits=kv))
    assert isinstance(engine.caches, PooledCaches)
    prefix, layer = engine.caches.prefix, engine.caches.prefix.arena.spec.layers[0]
    tokens = [i % VOCAB for i in range(length)]
    caches = prefix.acquire(tokens, 1).caches
    for cache in caches:
        cache.update_and_fetch(
            *mx.random.normal((2, 1, layer.kv_heads, length, layer.key_dim), prefix.arena.dtype)
        )
    prefix.release(tokens, caches)
    assert prefix.close(), "the store could not write everything"


def bench_restore(
    args: Any, model: Any, length: int, folder: Path, rounds: int, kv: KVBits | None = None
) -> None:
    """Blocks from disk into the pool, against reading the same files one after the other with a
    checksum.

    `kv`: the bits of keys and values, in the pool and on disk.
    """
    fill(model, folder, length, kv)
    files = sorted((folder / "models").rglob("blocks/*/*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    spec = describe(model).with_bits(kv)
    pool_bytes = (
        2 * length // BLOCK_TOKENS * sum(spec.bytes_per_block(group) for group in spec.groups)
    )

    def restore() -> float:
        # The memory is there already: making it is no part of reading a file either.
        engine = opened(model, folder, PoolConfig(pool_bytes, preallocate=True, bits=kv))
        found = stored(engine)
        caches = engine.caches
        assert isinstance(caches, PooledCaches)
        wanted = caches.prefix.stored.restores.plan(
            caches.prefix.match([*(i % VOCAB for i in range(length)), 0]), length
        )
        assert wanted is not None, "nothing is on disk"
        mx.synchronize()
        start = time.perf_counter()
        for _ in found.restores.run(wanted):
            pass
        mx.eval(found.arena.arrays())
        seconds = time.perf_counter() - start
        assert found.restores.num_restored == length, (
            f"{found.restores.num_restored} tokens restored != {length}"
        )
        found.store.close()
        return seconds

    def plain() -> float:
        start = time.perf_counter()
        for path in files:
            zlib.crc32(path.read_bytes())
        return time.perf_counter() - start

    found = interleave({"ours": restore, "plain": plain}, rounds)
    figures = {f"{name}_mb_s": round(size / seconds / 1e6) for name, seconds in found.items()}
    ratio = round(found["plain"] / found["ours"], 2)
    case = f"restore of {length} tokens, files of {size / len(files) / 1e6:.1f} MB"
    case += "" if kv is None else f", kv bits {kv.keys}"
    report(args, "store", case, mb=round(size / 1e6, 1), **figures, ratio=ratio)


def bench_stall(args: Any, model: Any, folder: Path, context: int, steps: int, rounds: int) -> None:
    """Decode steps of 8 sequences while their blocks are written behind, against no store."""
    engines = {"on": opened(model, folder), "off": opened(model, None)}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        rng = random.Random(1)
        for i in range(8):
            engine.insert(
                Request([rng.randrange(VOCAB) for _ in range(context + 31 * i)], max_tokens=100_000)
            )
        while len(engine.scheduler.waiting) or any(
            running.in_prefill or running.is_new for running in engine.live
        ):
            engine.next()

    def run(name: str) -> float:
        for _ in range(steps):
            start = time.perf_counter()
            engines[name].next()
            times[name].append(time.perf_counter() - start)
        return 0.0

    interleave({name: functools.partial(run, name) for name in engines}, rounds)
    written = stored(engines["on"]).store.report()["written"]
    assert written >= 8, f"only {written} blocks were written: nothing was measured"
    figures = {}
    for name, seconds in times.items():
        ordered = sorted(seconds)
        figures[f"{name}_median_ms"] = round(ordered[len(ordered) // 2] * 1e3, 2)
        figures[f"{name}_p99_ms"] = round(ordered[int(0.99 * len(ordered))] * 1e3, 2)
    ratio = round(figures["on_p99_ms"] / figures["off_p99_ms"], 3)
    report(
        args,
        "store",
        "decode steps of 8 with the store on and off",
        written=written,
        **figures,
        ratio_p99=ratio,
    )
    for engine in engines.values():
        engine.close()
    stored(engines["on"]).store.close()


def place(folder: Path, namespace: str, tokens: list[int], parts: tuple[Part, ...]) -> list[Record]:
    """The records of a sequence, without a server and without a sync."""
    parent, found = Trie(namespace).root.hash, []
    for start in range(0, len(tokens), BLOCK_TOKENS):
        edge = edge_of(tokens[start : start + BLOCK_TOKENS])
        record = Record(
            BLOCK,
            namespace,
            edge_hash(parent, edge),
            parent,
            start,
            edge,
            parts,
            {"kind": "assistant"},
        )
        path = folder / name_of(namespace, record.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            b"".join(
                bytes(buffer) for buffer in encode(record, [bytes(part.nbytes) for part in parts])
            )
        )
        found.append(record)
        parent = record.hash
    return found


def bench_start(args: Any, model: Any, count: int, folder: Path) -> None:
    """Opening a store of `count` records, in paths of 100, until every prefix is known."""
    rng = random.Random(2)
    # As many parts as a model of 28 layers has; what is in them is not read.
    parts = tuple(
        Part(f"layers.{layer}.{what}", "F16", (1,))
        for layer in range(28)
        for what in ("keys", "values")
    )
    for start in range(0, count, 100):
        place(
            folder,
            "bench",
            [rng.randrange(VOCAB) for _ in range(min(100, count - start) * BLOCK_TOKENS)],
            parts,
        )
    figures: dict[str, float] = {}
    for name in ("read", "noted"):
        wall, cpu = time.perf_counter(), time.process_time()
        engine = opened(model, folder)
        figures |= {
            f"{name}_s": round(time.perf_counter() - wall, 2),
            f"{name}_cpu_s": round(time.process_time() - cpu, 2),
        }
        known = sum(1 for _ in stored(engine).index.trie)
        assert known == count, f"{known} prefixes are known, not {count}"
        stored(engine).store.close()
    ratio = round(figures["read_cpu_s"] / figures["noted_cpu_s"], 1)
    report(args, "store", f"start with {count} records", **figures, ratio_cpu=ratio)


def bench_listing(args: Any, count: int, folder: Path) -> None:
    """Agents with one system prompt and an end of their own each: all figures anew, and the
    files alone a second time.
    """
    system = [n % VOCAB for n in range(4 * BLOCK_TOKENS)]
    agents = Agents(folder)
    parts = (Part("data", "F16", (1,)),)
    for number in range(count):
        tokens = [*system, *((number + n) % VOCAB for n in range(20 + number % 200))]
        hashes = [record.hash for record in place(folder, "bench", tokens, parts)]
        agents.note(f"agent {number}", "bench", "bench", hashes, len(tokens))
    times, records = {}, AgentRecords(folder)
    for name, act in (
        ("listed", lambda: len(records.listing()["agents"])),
        ("looked_again", lambda: len(agents.all())),
    ):
        agents.all()
        wall, cpu = time.perf_counter(), time.process_time()
        found = act()
        times |= {
            f"{name}_s": round(time.perf_counter() - wall, 2),
            f"{name}_cpu_s": round(time.process_time() - cpu, 2),
        }
        assert found == count, f"{found} agents were found, not {count}"
    report(args, "store", f"listing of {count} agents", **times)


def bench_weights(args: Any, megabytes: int, rounds: int, folder: Path) -> None:
    """The name of weights in two files: the first time, with every byte hashed, and as it is
    remembered.
    """
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for number in range(2):
        weights = mx.random.normal((megabytes * 125_000,))
        mx.save_safetensors(
            str(model / f"model-{number}.safetensors"), {f"weight {number}": weights}
        )
    # Files that were written just now are not remembered.
    time.sleep(SETTLED_SECONDS + 0.1)
    hashed = {"first": 0, "remembered": 0}

    def run(name: str, root: Path) -> float:
        found, start = Digests(root), time.perf_counter()
        identity(model, None, found)
        seconds = time.perf_counter() - start
        hashed[name] = found.read_bytes
        return seconds

    run("remembered", folder / "remembered")
    roots = (folder / f"first {number}" for number in range(rounds))
    acts = {
        "first": lambda: run("first", next(roots)),
        "remembered": lambda: run("remembered", folder / "remembered"),
    }
    times = interleave(acts, rounds)
    assert hashed["remembered"] == 0 < hashed["first"], f"{hashed} bytes were hashed"
    figures = {"first_s": round(times["first"], 2), "remembered_s": round(times["remembered"], 5)}
    gb_s = round(hashed["first"] / times["first"] / 1e9, 2)
    report(
        args,
        "store",
        f"hash of {megabytes} MB of weights",
        **figures,
        hashed_mb=round(hashed["first"] / 1e6),
        gb_s=gb_s,
    )


if __name__ == "__main__":
    args = options(__doc__ or "")
    model = llama(128, 2, 4, 2) if args.quick else llama(256, 4, 4, 2)
    length, rounds = (1024, 3) if args.quick else (8192, 7)
    with tempfile.TemporaryDirectory() as folder:
        bench_restart(args, model, length, Path(folder) / "restart")
        bench_restore(args, llama(256, 8, 4, 4), length, Path(folder) / "restore", rounds)
        bench_restore(
            args,
            llama(1024, 8, 8, 8, mx.bfloat16),
            length,
            Path(folder) / "restore kv",
            rounds,
            kv=KVBits(),
        )
        # Blocks as large as those of a model with 8 billion parameters.
        bench_restore(
            args, llama(1024, 16, 16, 16), length // 2, Path(folder) / "large blocks", rounds
        )
        context, steps, rounds = (230, 80, 3) if args.quick else (700, 50, 10)
        bench_stall(args, model, Path(folder) / "stall", context, steps, rounds)
        bench_start(args, model, 500 if args.quick else 20_000, Path(folder) / "start")
        bench_weights(args, 64 if args.quick else 1000, 3, Path(folder) / "weights")
        bench_listing(args, 100 if args.quick else 3000, Path(folder) / "listing")
