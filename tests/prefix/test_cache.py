"""PrefixCache: what is handed out, shared, kept and explained.

Keys are numbered so that a misplaced token can be read.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from kv.arrays import make_slabs, numbered
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_blockpool.errors import PoolExhaustedError, RequestTooLargeError
from mlx_blockpool.kv.capabilities import RAGGED, Capabilities
from mlx_blockpool.prefix.cache import Acquired, PrefixCache
from mlx_blockpool.store.hashing import encode

LONG = list(range(10_000, 10_700))


def prefix_cache(*windows: tuple[int, int], blocks: int = 64) -> PrefixCache:
    slabs = make_slabs(*windows, layers=1, blocks=blocks)
    slabs.capabilities = RAGGED
    return PrefixCache(slabs, "test")


def compute(acquired: Acquired) -> list[Any]:
    """Stands in for the model: writes token i as key i."""
    for cache in acquired.caches:
        cache.update_and_fetch(*numbered(cache.offset, len(acquired.rest)))
    return acquired.caches


def serve(prefix: PrefixCache, tokens: list[int]) -> Acquired:
    """A request from fetch to finish."""
    acquired = prefix.acquire(tokens, 10)
    prefix.release(tokens, compute(acquired))
    prefix.check()
    return acquired


def keys(cache: Any) -> list[float]:
    return cache.keys_and_values()[0][0, 0, :, 0].tolist()  # type: ignore[no-any-return]


def test_second_request_takes_over_all_but_the_last_token() -> None:
    prefix = prefix_cache()
    assert serve(prefix, LONG).lookup.cause == "new"
    acquired = prefix.acquire(LONG, 10)
    assert (acquired.lookup.hit, acquired.rest, acquired.lookup.cause) == (699, LONG[-1:], "all")
    assert keys(acquired.caches[0]) == list(range(699))


def test_a_hit_ends_at_the_exact_token_where_prompts_differ() -> None:
    prefix = prefix_cache()
    serve(prefix, LONG)
    other = [*LONG[:613], 7, 8, 9]
    lookup = prefix.look(other)
    assert (lookup.hit, lookup.cause, lookup.given, lookup.expected[:2]) == (
        613,
        "differs",
        (7, 8, 9),
        (10_613, 10_614),
    )
    acquired = serve(prefix, other)
    assert acquired.lookup == lookup
    assert prefix.look(LONG).hit == 699, "the first is still known"
    assert prefix.nbytes == 4 * prefix.arena.spec.bytes_per_block(prefix.arena.spec.groups[0]), (
        "two shared blocks and two tails"
    )


def test_a_turn_goes_on_in_the_same_partial_block() -> None:
    prefix = prefix_cache()
    serve(prefix, LONG)
    before = prefix.index.nbytes
    longer = prefix.acquire([*LONG, 1, 2, 3], 10)
    assert longer.lookup.cause == "longer"
    prefix.release([*LONG, 1, 2, 3], compute(longer))
    assert prefix.index.nbytes == before
    prefix.check()


def test_a_partial_block_that_somebody_reads_is_copied_before_writing() -> None:
    prefix = prefix_cache()
    serve(prefix, LONG)
    one, two = prefix.acquire([*LONG, 1], 10), prefix.acquire([*LONG, 2], 10)
    assert one.caches[0].sequence.tables[0].ids[:2] == two.caches[0].sequence.tables[0].ids[:2]
    assert one.caches[0].sequence.tables[0].ids[2] != two.caches[0].sequence.tables[0].ids[2]
    for acquired in (one, two):
        compute(acquired)
        assert keys(acquired.caches[0]) == list(range(701))
    prefix.check()


def test_prompts_computed_side_by_side_are_kept_once() -> None:
    prefix = prefix_cache()
    one, two = prefix.acquire(LONG, 10), prefix.acquire(LONG, 10)
    assert one.lookup.hit == two.lookup.hit == 0
    prefix.insert(LONG, compute(one), "system")
    prefix.insert(LONG, compute(two), "system")
    ids = [f.caches[0].sequence.tables[0].ids for f in (one, two)]
    assert ids[0][:2] == ids[1][:2], (
        "the full blocks of the second were exchanged for those of the first"
    )
    assert prefix.pool.settle()[0].held == 4
    assert prefix.stats_by_type()["system"]["n_sequences"] == 1
    prefix.check()


def test_insert_compares_only_what_follows_the_blocks_that_the_sequence_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix = prefix_cache()
    serve(prefix, LONG[:512])
    acquired = prefix.acquire(LONG, 10)
    compared = []
    monkeypatch.setattr(
        "mlx_blockpool.prefix.cache.encode",
        lambda tokens: compared.append(list(tokens)) or encode(tokens),
    )
    prefix.insert(LONG, compute(acquired))
    assert compared == [LONG[512:]]
    ref = prefix.ref_of(acquired.caches)
    assert ref == prefix.match(LONG)
    assert (ref.tokens, ref.token_ids()) == (700, LONG)
    prefix.check()


def test_blocks_that_were_cut_off_and_written_anew_are_compared_again() -> None:
    prefix = prefix_cache()
    serve(prefix, LONG)
    acquired = prefix.acquire([*LONG, 1], 300)
    other = [*LONG[:300], *[7] * 300]
    for cache in acquired.caches:
        cache.trim(400)
        cache.update_and_fetch(*numbered(1300, 300))
    assert prefix.insert(other, acquired.caches) == 600
    assert prefix.match(other).tokens == 600
    assert [prefix.look([*tokens, 9]).hit for tokens in (LONG, other)] == [700, 600]
    assert keys(prefix.acquire([*other, 9], 10).caches[0])[300:] == list(range(1300, 1600))
    assert keys(prefix.acquire([*LONG, 9], 10).caches[0]) == list(range(700))
    prefix.check()


def test_what_was_evicted_since_a_sequence_began_is_inserted_again() -> None:
    prefix = prefix_cache()
    serve(prefix, LONG)
    acquired = prefix.acquire([*LONG, 1], 10)
    prefix.index.clear()
    assert prefix.insert([*LONG, 1], compute(acquired)) == 701
    assert prefix.match([*LONG, 1]).tokens == 701
    prefix.check()


def test_windows_resume_from_the_last_checkpoint_at_or_before() -> None:
    prefix = prefix_cache((300, 0))
    acquired = prefix.acquire(LONG, 10)
    for cache in acquired.caches:
        cache.update_and_fetch(*numbered(0, 500))
    prefix.insert(LONG[:500], acquired.caches, "user")
    for cache in acquired.caches:
        cache.update_and_fetch(*numbered(500, 200))
    prefix.release(LONG, acquired.caches)
    prefix.check()
    assert prefix.look([*LONG, 1]).hit == 700
    lookup = prefix.look([*LONG[:650], 1])
    assert (lookup.hit, lookup.matched, lookup.cause) == (500, 650, "no checkpoint")
    resumed = prefix.acquire([*LONG[:650], 1], 10)
    assert sorted(keys(resumed.caches[1])) == list(range(200, 500))
    assert keys(resumed.caches[0]) == list(range(500))


def test_a_window_that_has_not_wrapped_resumes_at_any_token() -> None:
    prefix = prefix_cache((300, 0))
    serve(prefix, LONG[:280])
    acquired = prefix.acquire([*LONG[:100], 5, 6], 10)
    assert acquired.lookup.hit == 100
    assert keys(acquired.caches[1]) == list(range(100))
    compute(acquired)
    prefix.check()


def test_stock_caches_are_kept_by_copy() -> None:
    prefix = prefix_cache((300, 0))
    stock = [KVCache(), RotatingKVCache(300)]
    for cache in stock:
        cache.update_and_fetch(*numbered(0, 450))
        cache.update_and_fetch(*numbered(450, 1))
    assert prefix.release(LONG[:451], stock) == 451
    acquired = prefix.acquire([*LONG[:451], 1], 10)
    assert acquired.lookup.hit == 451
    assert keys(acquired.caches[0]) == list(range(451))
    assert sorted(keys(acquired.caches[1])) == list(range(151, 451))
    prefix.check()


def test_what_was_not_computed_is_not_kept() -> None:
    prefix = prefix_cache()
    acquired = prefix.acquire(LONG, 10)
    acquired.caches[0].update_and_fetch(*numbered(0, 300))
    assert prefix.release(LONG, acquired.caches) == 300
    assert prefix.look(LONG).hit == 300


def test_eviction_takes_tails_before_what_they_stand_on() -> None:
    prefix = prefix_cache(blocks=8)
    serve(prefix, LONG[:256] + [1] * 256)
    serve(prefix, LONG[:256] + [2] * 256)
    serve(prefix, [3] * 256 * 6)
    assert prefix.look(LONG[:256] + [1] * 256).hit == 256
    lookup = prefix.look(LONG[:256] + [1] * 256 + [9])
    assert lookup.cause == "evicted"
    prefix.check()


def test_pinned_prefixes_stay() -> None:
    prefix = prefix_cache(blocks=8)
    serve(prefix, LONG[:300])
    assert prefix.pin(LONG[:300]) == 300
    serve(prefix, [3] * 256 * 5)
    prefix.trim_to(0)
    assert prefix.look(LONG[:300]).hit == 299
    prefix.unpin(LONG[:300])
    prefix.trim_to(0)
    assert prefix.look(LONG[:300]).cause == "evicted"
    assert prefix.nbytes == 0


def test_what_cannot_fit_is_refused_and_changes_nothing() -> None:
    prefix = prefix_cache(blocks=8)
    serve(prefix, LONG)
    with pytest.raises(RequestTooLargeError) as error:
        prefix.acquire([1] * 2000, 100)
    assert (error.value.needed, error.value.capacity) == (2100, 2048)
    held = prefix.acquire([2] * 1500, 10)
    with pytest.raises(PoolExhaustedError):
        prefix.acquire([4] * 1000, 10)
    assert prefix.pool.settle()[0].held == 6
    del held
    prefix.check()
    assert prefix.acquire([4] * 1000, 10).rest == [4] * 1000


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        prefix_cache().acquire([], 10)


def test_namespaces_do_not_meet() -> None:
    slabs = make_slabs(layers=1)
    one, two = PrefixCache(slabs, "adapter a"), PrefixCache(slabs, "adapter b")
    serve(one, LONG)
    assert one.index.trie.root.hash != two.index.trie.root.hash
    assert two.look(LONG).cause == "new"


def test_without_attach_a_hit_is_one_run_of_its_own() -> None:
    prefix = prefix_cache()
    prefix.arena.capabilities = Capabilities()
    serve(prefix, LONG)
    acquired = prefix.acquire([*LONG[:600], 5], 10)
    table = acquired.caches[0].sequence.tables[0]
    assert len(table.runs) == 1
    assert keys(acquired.caches[0]) == list(range(600))
    mx.eval([c.state for c in acquired.caches])
    prefix.check()


def test_unpin_takes_back_what_pin_took_whatever_was_added_since() -> None:
    prefix = prefix_cache(blocks=8)
    serve(prefix, [1, 2, 3])
    assert prefix.pin([1, 2, 9]) == 2
    serve(prefix, [1, 2, 9])
    serve(prefix, [1, 2, 3, 4])
    assert prefix.unpin([1, 2, 9]) == 3
    prefix.trim_to(0)
    assert prefix.nbytes == 0
    assert prefix.unpin([5]) == 0, "what was not pinned can be unpinned"


def test_a_with_block_caches_what_it_was_given_and_what_was_appended() -> None:
    prefix = prefix_cache()
    tokens = LONG[:600]
    with prefix.use(tokens, 10) as hit:
        compute(hit)
        for cache in hit.caches:
            cache.update_and_fetch(*numbered(600, 1))
        tokens.append(7)
    assert prefix.pool.settle()[0].held == 0
    with prefix.use([*LONG[:600], 7, 8], 10) as hit:
        assert (hit.lookup.hit, hit.rest) == (601, [8])
    prefix.check()


def test_a_with_block_that_fails_caches_nothing_and_holds_nothing() -> None:
    prefix = prefix_cache()

    def fail() -> None:
        with prefix.use(LONG, 10) as hit:
            compute(hit)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert prefix.pool.settle()[0].held == 0
    assert prefix.look(LONG).hit == 0
    prefix.check()


def test_a_with_block_keeps_to_its_salt() -> None:
    prefix = prefix_cache()
    with prefix.use(LONG, 10, salt=bytes(range(32))) as hit:
        compute(hit)
    assert prefix.look(LONG).hit == 0
    with prefix.use(LONG, 10, salt=bytes(range(32))) as hit:
        assert hit.lookup.hit == len(LONG) - 1
