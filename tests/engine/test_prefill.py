"""Prefill: where chunks end, whose turn it is, and how it shares time with decode."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from engine.engines import Told, assert_nothing_held, assert_stock, drive, make_engine, serve, words
from thorough import only

from mlx_blockpool.engine import engine as engine_module
from mlx_blockpool.engine.request import Request
from mlx_blockpool.engine.scheduler import choose, chunk_end
from mlx_blockpool.engine.sequence import Sequence


def running(
    uid: int, tokens: int, computed: int = 0, breakpoints: tuple[int, ...] = ()
) -> Sequence:
    found = Sequence(
        uid, Request([0] * tokens, breakpoints=[(at, "user") for at in breakpoints]), 0.0
    )
    found.computed = computed
    return found


@pytest.mark.parametrize(
    ("tokens", "computed", "breakpoints", "expected"),
    [
        (1000, 0, (), 128),
        (1000, 128, (), 256),
        (1000, 130, (), 256),
        (1000, 130, (140, 200, 700), 140),
        (1000, 140, (140, 200), 200),
        (1000, 200, (140, 200), 256),
        (1000, 896, (), 999),
        (150, 130, (), 149),
        (150, 130, (150,), 149),
        (150, 0, (0,), 128),
    ],
)
def test_a_chunk_ends_on_the_grid_at_a_breakpoint_or_with_the_prompt(
    tokens: int, computed: int, breakpoints: Any, expected: int
) -> None:
    assert chunk_end(running(1, tokens, computed, breakpoints), 128) == expected


def chosen(
    prefilling: list[Sequence],
    rows: int = 8,
    pads: bool = True,
    seconds: Callable[[int], float] = lambda tokens: 1.0,
) -> list[int]:
    """Who is computed, where a forward costs the same however many tokens it has."""
    return [r.uid for r, _ in choose(prefilling, 128, rows, pads, seconds)]


def test_prompts_go_together_within_the_tokens_of_a_chunk_padding_included() -> None:
    # 30 tokens are left of each but the last, and one of 60 makes the padding of all as long.
    assert chosen([running(i, 31) for i in range(6)]) == [0, 1, 2, 3]
    assert chosen([running(1, 31), running(2, 61), running(3, 31)]) == [1, 2]
    assert chosen([running(1, 31), running(2, 120), running(3, 31)]) == [1, 3]
    assert chosen([running(1, 31, computed=20), running(2, 31, computed=20)]) == [1, 2]
    assert chosen([running(1, 900), running(2, 30)]) == [1]


def test_no_more_rows_than_allowed_go_together() -> None:
    assert chosen([running(i, 11) for i in range(6)], rows=3) == [0, 1, 2]
    assert chosen([running(i, 11) for i in range(6)], rows=1) == [0]


def test_unless_prompts_may_be_padded_only_chunks_of_one_length_go_together() -> None:
    prompts = [running(i, tokens) for i, tokens in enumerate((31, 41, 31, 51))]
    prompts.append(running(4, 100, breakpoints=(30,)))
    assert chosen(prompts, pads=False) == [0, 2, 4]
    assert chosen(prompts, pads=True) == [0, 1, 2]


def test_prompts_go_together_only_where_no_first_token_is_later_for_it_on_average() -> None:
    """A forward costs a part that is the same for all, and a second for each token."""
    prompts = [running(i, 31) for i in range(4)]
    assert chosen(prompts, seconds=float) == [0]
    # In turn both have their tokens after 45 and 90 seconds, together after 75.
    assert chosen(prompts[:2], seconds=lambda tokens: 15 + tokens) == [0]
    assert chosen(prompts[:2], seconds=lambda tokens: 30 + tokens) == [0, 1]
    assert chosen(prompts[:2], seconds=lambda tokens: 29 + tokens) == [0]


# -- in the engine ---------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8])
def test_a_short_prompt_need_not_wait_for_a_long_one(share: float) -> None:
    engine, _ = make_engine("llama", decode_share=share, prefill_tokens=256)
    engine.insert(Request(words(1, 2048), 4))
    drive(engine, after=lambda _: engine.counts["chunks"] == 3)
    late = engine.insert(Request(words(2, 200), 4))
    told = drive(engine, after=lambda told: late in told.tokens)
    assert engine.counts["chunks"] <= 3 + 3
    assert_stock("llama", words(2, 200), told.tokens[late])


class Timed:
    """Time in which a token of a prompt takes a second, and nothing else takes any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.now = 0.0
        self.engine, _ = make_engine("llama", decode_share=0.0, **config)
        self.engine.clock = self.engine.scheduler.clock = self
        self.engine.caches.forward_seconds = float  # type: ignore[method-assign]
        model = self.engine.model

        def computed(tokens: Any, **more: Any) -> Any:
            # The next tokens of replies take no time.
            self.now += max(0, tokens.size - len(self.engine.scheduler.batch))
            return model(tokens, **more)

        self.engine.model = self.engine.scheduler.batch.model = computed
        monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=self))

    def __call__(self) -> float:
        return self.now

    def first_tokens(self, arrivals: list[tuple[float, int]]) -> list[float]:
        """When each prompt of (time, tokens) has its first token."""
        told, left = Told(), sorted(enumerate(arrivals), key=lambda each: each[1][0])
        uids: dict[int, int] = {}
        found: dict[int, float] = {}
        while len(found) < len(arrivals):
            while left and left[0][1][0] <= self.now:
                number, (_, tokens) = left.pop(0)
                uids[self.engine.insert(Request(words(number, tokens), 1))] = number
            if not len(self.engine):
                self.now = left[0][1][0]
                continue
            told.take(self.engine.next())
            for uid in told.tokens:
                found.setdefault(uids[uid], self.now)
        return [found[number] for number in range(len(arrivals))]


def test_agents_that_arrive_together_are_served_shortest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = [300, 20, 111, 103, 500, 60, 111, 240]
    found = Timed(monkeypatch).first_tokens([(0.0, tokens) for tokens in lengths])
    ends = list(accumulate(sorted(tokens - 1 for tokens in lengths)))
    assert sum(found) <= 1.1 * sum(ends)


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beginning of the long one, in its middle and close to its end; also one of several
    chunks.
    """
    arrivals = [(t, tokens) for t in (10.0, 700.0, 1600.0, 2300.0) for tokens in (30, 300)]
    found = Timed(monkeypatch).first_tokens([(0.0, 3000), *arrivals])
    # Of two that arrive together the shorter one goes first.
    own = [tokens + 30 * (tokens > 30) for _, tokens in arrivals]
    waits = [end - t for (t, _), end in zip(arrivals, found[1:], strict=True)]
    assert all(wait <= 2 * 128 + n for wait, n in zip(waits, own, strict=True)), waits


def test_the_oldest_prompt_gets_a_chunk_after_four_of_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that started with it do not count."""
    later = Timed(monkeypatch).first_tokens([(0.0, 1025), *((1.0, 257) for _ in range(3))])
    # 128 of the long one before they arrive, four chunks, one of the long one, the last two.
    assert later[1:] == [128 + 256, 128 + 512, 128 + 512 + 128 + 256]
    together = Timed(monkeypatch).first_tokens([(0.0, 1025), *((0.0, 257) for _ in range(3))])
    assert together[1:] == [256, 512, 768]


def test_the_lowest_priority_value_goes_first_whatever_is_left() -> None:
    engine, _ = make_engine("llama", decode_share=0.0)
    for number, (tokens, priority) in enumerate([(40, 1), (400, 0), (60, 0)]):
        engine.insert(Request(words(number, tokens), 1, priority=priority))
    engine.caches.forward_seconds = float  # type: ignore[method-assign]
    assert list(drive(engine).reasons) == [3, 2, 1]


def test_a_stream_of_short_prompts_does_not_stop_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short prompts take all of the time, for ever: of each five tokens the long one gets one."""
    short = [(61.0 * i, 62) for i in range(80)]
    found = Timed(monkeypatch).first_tokens([(0.0, 600), *short])
    assert 5 * 128 < found[0] <= 5 * (600 + 128)


def test_short_prompts_that_wait_together_are_one_chunk_where_that_is_cheaper() -> None:
    engine, prefix = make_engine("llama")
    prompts = [words(i, 20 + i) for i in range(4)]
    uids, told = serve(engine, prompts)
    assert engine.counts["chunks"] == 1
    for uid, prompt in zip(uids, prompts, strict=True):
        assert told.progress[uid] == [(len(prompt), len(prompt))]
        assert_stock("llama", prompt, told.tokens[uid])
    assert_nothing_held(prefix)


def test_progress_tells_every_chunk_and_ends_with_the_whole_prompt() -> None:
    engine, _ = make_engine("llama")
    (uid,), told = serve(engine, [words(1, 300)], breakpoints=[(200, "system")])
    assert told.progress[uid] == [(128, 300), (200, 300), (256, 300), (300, 300)]
    assert engine.counts["prompt_tokens"] == 299


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_a_marked_beginning_is_known_before_the_prompt_has_ended(name: str) -> None:
    engine, prefix = make_engine(name)
    engine.insert(Request(words(1, 700), 4, breakpoints=[(350, "system"), (500, "user")]))
    other = (*words(1, 350), *words(2, 40))
    later = (*words(1, 500), *words(3, 40))
    drive(
        engine,
        after=lambda told: any(done == 350 for _, p in told.progress.items() for done, _ in p),
    )
    assert prefix.look(other).hit == 350
    drive(engine)
    assert (prefix.look(other).hit, prefix.look(later).hit) == (350, 500)
    (uid,), told = serve(engine, [other])
    assert told.started[uid].cached == 350
    assert_stock(name, other, told.tokens[uid])
    assert_nothing_held(prefix)


def test_every_chunk_of_a_model_without_windows_is_known_at_once() -> None:
    engine, prefix = make_engine("llama")
    engine.insert(Request(words(1, 700), 4))
    for chunk in range(1, 6):
        engine.next()
        assert prefix.look(words(1, 700)).hit == chunk * 128


def test_a_window_model_keeps_nothing_to_go_on_from_where_there_is_no_mark() -> None:
    """What breakpoints are for: without one the windows of a middle token are gone."""
    engine, prefix = make_engine("gemma3_text")
    serve(engine, [words(1, 700)])
    lookup = prefix.look((*words(1, 350), *words(2, 40)))
    assert (lookup.matched, lookup.hit, lookup.cause) == (350, 0, "no checkpoint")


class Clock:
    """Stands in for time where a chunk takes 8 seconds and a token of the batch takes one. The
    prompts of this model do not mix with replies.
    """

    def __init__(self, model: Any) -> None:
        self.now = 0.0
        self._model = model

    def __call__(self, tokens: Any, **more: Any) -> Any:
        self.now += 8 if tokens.shape[1] > 1 else 1
        return self._model(tokens, **more)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.5, 8), (0.8, 32)])
def test_decode_has_its_share_of_the_time_while_prompts_wait(
    monkeypatch: pytest.MonkeyPatch, share: float, expected: int
) -> None:
    engine, _ = make_engine("lfm2", decode_share=share, prefill_tokens=64)
    clock = Clock(engine.model)
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    engine.model = engine.scheduler.batch.model = clock
    engine.insert(Request(words(1, 30), 400))
    drive(engine, after=lambda told: 1 in told.tokens)
    engine.insert(Request(words(2, 64 * 5 + 1), 1))
    before: dict[int, int] = {}

    def note(_: Told) -> bool:
        before.setdefault(engine.counts["chunks"], engine.counts["decode_steps"])
        return engine.counts["chunks"] == 6

    drive(engine, after=note)
    # A step more where the share is not a sum of binary fractions.
    assert before[6] - before[2] in (4 * expected, 4 * expected + bool(expected))


@pytest.mark.parametrize("name", only(["lfm2", "qwen3_5"], "lfm2"))
def test_prompts_with_states_are_computed_together_up_to_their_own_checkpoints(name: str) -> None:
    """Four prompts after a shared prefix, of which two have a checkpoint within."""
    engine, prefix = make_engine(name, prefill_tokens=512)
    common = words(1, 256)
    serve(engine, [(*common, 5)], max_tokens=1, breakpoints=[(256, "system")])
    before, marks = engine.counts["chunks"], {0: 256 + 25, 2: 256 + 50}
    prompts = [(*common, *words(2 + i, count)) for i, count in enumerate((40, 60, 90, 120))]
    uids = [
        engine.insert(Request(prompt, 8, breakpoints=[(marks[i], "user")] if i in marks else []))
        for i, prompt in enumerate(prompts)
    ]
    told = drive(engine)
    assert [told.started[uid].cached for uid in uids] == [256] * 4
    # One after the other these would be 6 chunks.
    assert engine.counts["chunks"] - before == 2
    for uid, prompt in zip(uids, prompts, strict=True):
        assert_stock(name, prompt, told.tokens[uid])
    others = {i: (*prompts[i][:mark], *words(20 + i, 30)) for i, mark in marks.items()}
    for i, prompt in others.items():
        assert prefix.look(prompt).hit == marks[i]
        (uid,), told = serve(engine, [prompt])
        assert told.started[uid].cached == marks[i]
        assert_stock(name, prompt, told.tokens[uid])
    assert_nothing_held(prefix)
