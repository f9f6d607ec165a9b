"""Requests with several choices beside others: none waits behind all choices of another, and all
replies stay those of stock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.engines import (
    Told,
    assert_nothing_held,
    assert_stock,
    bytes_of,
    drive,
    make_engine,
    words,
)

from mlx_blockpool.engine.request import Request, Started

PROMPT, OTHER = words(3, 40), words(4, 30)


def choices(
    engine: Any, group: str, count: int, prompt: Sequence[int] = PROMPT, **more: Any
) -> list[int]:
    tokens = list(prompt)
    return engine.insert_all([Request(tokens, 12, group=group, **more) for _ in range(count)])


def run_until_full(engine: Any, members: int) -> Told:
    return drive(engine, after=lambda _: len(engine.live) == members)


def places(engine: Any, uids: list[int]) -> int:
    return sum(sequence.uid in uids for sequence in engine.live)


def check(engine: Any, prefix: Any, told: Told, prompts: dict[int, Sequence[int]]) -> None:
    """Nothing failed, and every reply is stock's."""
    assert told.failed == {}
    assert told.reasons.keys() == prompts.keys()
    for uid, prompt in prompts.items():
        assert_stock("llama", prompt, told.tokens[uid])
    assert_nothing_held(prefix)


def test_a_newcomer_starts_at_once_beside_a_request_that_has_all_places() -> None:
    engine, prefix = make_engine("llama", max_members=4)
    many = choices(engine, "many", 6)
    told = run_until_full(engine, 4)
    one = engine.insert(Request(OTHER, 12))
    told.take(engine.next())
    assert one in told.started
    assert places(engine, many) == 3
    told = drive(engine, told)
    check(engine, prefix, told, {one: OTHER, **dict.fromkeys(many, PROMPT)})
    assert engine.counts["swapped_out"] == 1


def test_requests_with_many_choices_share_the_places_evenly() -> None:
    engine, prefix = make_engine("llama", max_members=6)
    first = choices(engine, "first", 8)
    told = run_until_full(engine, 6)
    groups = [first, choices(engine, "second", 8, OTHER), choices(engine, "third", 8, words(5, 25))]
    drive(engine, told, after=lambda _: [places(engine, group) for group in groups] == [2, 2, 2])
    # From then on nobody takes another's place.
    before = engine.counts["swapped_out"]
    told = drive(engine, told)
    assert engine.counts["swapped_out"] == before == 4
    check(
        engine,
        prefix,
        told,
        dict.fromkeys(first, PROMPT)
        | dict.fromkeys(groups[1], OTHER)
        | dict.fromkeys(groups[2], words(5, 25)),
    )


def test_with_one_place_requests_take_turns_choice_by_choice() -> None:
    engine, prefix = make_engine("llama", max_members=1)
    many = choices(engine, "many", 3)
    told = run_until_full(engine, 1)
    others = [engine.insert(Request(OTHER, 3)) for _ in range(2)]
    told = drive(engine, told)
    assert [event.uid for event in told.order if isinstance(event, Started)] == [
        many[0],
        *others,
        *many[1:],
    ]
    check(engine, prefix, told, dict.fromkeys(many, PROMPT) | dict.fromkeys(others, OTHER))


def test_choices_of_an_agent_go_before_its_next_request() -> None:
    engine, prefix = make_engine("llama", max_members=1)
    many = choices(engine, "many", 2, agent="ann")
    told = run_until_full(engine, 1)
    following, other = (engine.insert(Request(OTHER, 3, agent=agent)) for agent in ("ann", "bob"))
    told = drive(engine, told)
    assert [event.uid for event in told.order if isinstance(event, Started)] == [
        many[0],
        other,
        many[1],
        following,
    ]
    check(engine, prefix, told, dict.fromkeys(many, PROMPT) | {following: OTHER, other: OTHER})


def test_choices_give_up_room_too() -> None:
    engine, prefix = make_engine("llama", bytes_of("llama", 256, 3))
    prompt, other = words(6, 30), words(7, 600)
    many = choices(engine, "many", 4, prompt)
    told = drive(engine, after=lambda _: len(engine.live) == 2)
    one = engine.insert(Request(other, 12))
    told.take(engine.next())
    assert one in told.started
    told = drive(engine, told)
    check(engine, prefix, told, {one: other, **dict.fromkeys(many, prompt)})


def test_choices_keep_their_places_before_requests_of_a_higher_value() -> None:
    engine, _ = make_engine("llama", max_members=2)
    many = choices(engine, "many", 2, priority=-1)
    told = run_until_full(engine, 2)
    engine.insert(Request(OTHER, 3))
    told.take(engine.next())
    assert places(engine, many) == 2


def test_waiting_choices_share_the_tokens_of_their_prompt() -> None:
    engine, _ = make_engine("llama", max_members=1)
    tokens = list(PROMPT)
    engine.insert_all([Request(tokens, 4, group="many") for _ in range(3)])
    assert [sequence.tokens is tokens for sequence in engine.scheduler.waiting] == [True] * 3
    drive(engine)
    assert tuple(tokens) == PROMPT


def test_a_list_of_tokens_may_be_used_again() -> None:
    engine, _ = make_engine("llama")
    tokens = list(PROMPT)
    first = engine.insert(Request(tokens, 4))
    tokens[:] = OTHER
    told = drive(engine)
    assert_stock("llama", PROMPT, told.tokens[first])
