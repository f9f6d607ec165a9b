"""Drafting: which members of a batch draft, from which texts; and the memory of agents' replies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thorough import tried

from mlx_blockpool.drafts.curve import CostCurve, TokenCosts
from mlx_blockpool.drafts.draft import NOTHING
from mlx_blockpool.drafts.drafter import Drafter
from mlx_blockpool.drafts.drafting import STEP_TOKENS, Drafting, ReplyMemory
from mlx_blockpool.drafts.text_source import BREAK

STORY = list(range(100, 140))
CHEAP = CostCurve.from_points({1: 1.0, 2: 1.05, 64: 1.1})
DEAR = CostCurve.from_points({1: 1.0, 16: 16.0})


def story_of(drafting: Drafting, repeated: int = 10) -> Drafter:
    """The drafter of a request that was given a story, and has repeated some tokens of it."""
    drafter = drafting.drafter([*STORY, 7])
    drafter.catch_up(STEP_TOKENS)
    drafter.observe(STORY[:repeated])
    return drafter


def test_a_member_that_repeats_drafts_and_another_does_not() -> None:
    drafting = Drafting(curve=CHEAP)
    repeating, other = drafting.drafter([*STORY, 7]), drafting.drafter(STORY)
    assert not drafting.expects([repeating, other, None])
    repeating.observe(STORY[:10])
    assert drafting.expects([repeating, other, None])
    drafts = drafting.propose([repeating, other, None], [STORY[10], 1, 2], [5, 5, 5])
    assert [list(draft.tokens) for draft in drafts] == [STORY[11:16], [], []]


def test_a_draft_is_no_longer_than_its_member_may_still_emit() -> None:
    drafting = Drafting(curve=CHEAP)
    drafter = story_of(drafting, 20)
    assert [
        len(drafting.propose([drafter], [STORY[20]], [most])[0]) for most in (-1, 0, 1, 3, 99)
    ] == [0, 0, 1, 3, 16]


def test_nothing_is_drafted_where_it_does_not_pay_or_nothing_was_measured() -> None:
    for drafting in (Drafting(curve=DEAR), Drafting()):
        drafter = story_of(drafting)
        assert not drafting.expects([drafter])
        assert drafting.propose([drafter], [STORY[10]], [5]) == [NOTHING]


def test_after_a_long_context_less_is_drafted_where_each_row_reads_all_of_it() -> None:
    rows_cost = CostCurve.from_points(dict(CHEAP.rows), token=TokenCosts(row=1e-3))
    members_cost = CostCurve.from_points(dict(CHEAP.rows), token=TokenCosts(member=1e-3))
    for curve, length in ((rows_cost, 0), (members_cost, 5)):
        drafting = Drafting(curve=curve)
        short, long = story_of(drafting), drafting.drafter([*range(1000, 6000), *STORY, 7])
        long.catch_up(STEP_TOKENS)
        long.observe(STORY[:10])
        assert [
            len(drafting.propose([drafter], [STORY[10]], [5])[0]) for drafter in (short, long)
        ] == [5, length]
        assert [drafting.expects([drafter]) for drafter in (short, long)] == [True, length > 0]


def test_a_padded_forward_counts_the_members_without_drafts() -> None:
    curve = CostCurve.from_points({1: 1.0, 8: 1.1, 32: 8.0})
    for padded, length in ((False, 4), (True, 1)):
        drafting = Drafting(curve=curve, padded=padded)
        drafters = [story_of(drafting), None, None, None]
        drafts = drafting.propose(drafters, [STORY[10]] * 4, [5] * 4)
        assert [len(draft) for draft in drafts] == [length, 0, 0, 0]


def test_fixed_drafts_ask_no_curve() -> None:
    drafting = Drafting(3, curve=DEAR)
    drafter = story_of(drafting, 4)
    assert drafting.expects([None, drafter])
    assert [len(draft) for draft in drafting.propose([None, drafter], [1, STORY[4]], [9, 9])] == [
        0,
        3,
    ]
    assert not Drafting(0).expects([drafter])


def test_what_followed_a_prompt_is_drafted_from_the_first_token_on() -> None:
    drafting = Drafting(3)
    drafter = drafting.drafter([1, 2], following=STORY)
    assert drafting.expects([drafter])
    (draft,) = drafting.propose([drafter], STORY[:1], [9])
    assert (draft.source, list(draft.tokens)) == ("prefix", STORY[1:4])
    drafter.observe([*STORY[:1], 5])
    (draft,) = drafting.propose([drafter], STORY[2:3], [9])
    assert (draft.source, list(draft.tokens)) == ("prefix", STORY[3:6])


def test_an_agent_repeats_its_own_replies_and_no_others() -> None:
    drafting = Drafting(3)
    drafting.replies.remember("a", b"", STORY)
    drafters = [
        drafting.drafter([1, 2], agent, salt)
        for agent, salt in (("a", b""), ("b", b""), ("a", b"salt"), (None, b""))
    ]
    # The replies are indexed first.
    assert not drafting.expects(drafters)
    for drafter in drafters:
        drafter.observe(STORY[:4])
    drafts = drafting.propose(drafters, [STORY[4]] * 4, [9] * 4)
    assert [draft.source for draft in drafts] == ["replies", "", "", ""]
    assert list(drafts[0].tokens) == STORY[5:8]


def test_a_draft_ends_where_a_reply_ended() -> None:
    drafting = Drafting(16)
    drafting.replies.remember("a", b"", STORY[:20])
    drafting.replies.remember("a", b"", STORY[20:])
    drafter = drafting.drafter([], "a")
    drafting.expects([drafter])
    drafter.observe(STORY[10:14])
    (draft,) = drafting.propose([drafter], STORY[14:15], [16])
    assert list(draft.tokens) == STORY[15:20]


def test_prompts_are_indexed_within_a_bound_a_step() -> None:
    drafting = Drafting(3)
    long, short = drafting.drafter([1, 2, 3] * STEP_TOKENS), drafting.drafter([*STORY, 7])
    short.observe(STORY[:3])
    drafting.expects([long, short])
    assert (long.text.num_indexed, short.text.num_indexed) == (STEP_TOKENS, 0)
    for _ in range(2):
        drafting.expects([long, short])
    assert (long.text.num_indexed, short.text.num_indexed) == (
        len(long.text),
        len(short.text) - len(STORY) - 4,
    )
    drafting.expects([long, short])
    assert short.text.num_indexed == len(short.text)


def test_what_one_request_learns_the_next_one_starts_from() -> None:
    drafting = Drafting(3)
    story_of(drafting, len(STORY))
    assert story_of(drafting, 3).expects() > story_of(Drafting(3), 3).expects()


# -- the memory of replies -------------------------------------------------------------------------

REPLIES = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from([b"", b"s"]),
        st.lists(st.integers(0, 9), max_size=12),
    )
)


@tried(40, 400)
@given(REPLIES)
def test_the_last_replies_are_remembered_whole_within_the_bounds(
    replies: list[tuple[str, bytes, list[int]]],
) -> None:
    memory = ReplyMemory(most_agents=3, most_tokens=20)
    for number, (agent, salt, reply) in enumerate(replies):
        memory.remember(agent, salt, reply)
        assert len(memory) <= 3
        text = memory.recall(agent, salt)
        assert text is not None
        assert len(text) <= 20
        own = [
            token
            for other, under, each in replies[: number + 1]
            if (other, under) == (agent, salt)
            for token in (BREAK, *each)
        ]
        assert text.tokens == own[len(own) - len(text) :]
        assert text.tokens[0] == BREAK
        assert text.tokens[-len(reply) - 1 :] == [BREAK, *reply]


def test_a_long_reply_is_remembered_by_its_end() -> None:
    memory = ReplyMemory(most_tokens=5)
    memory.remember("a", b"", STORY)
    text = memory.recall("a", b"")
    assert text is not None
    assert text.tokens == [BREAK, *STORY[-4:]]


def test_a_running_request_keeps_the_text_that_it_follows() -> None:
    memory = ReplyMemory(most_tokens=6)
    memory.remember("a", b"", [1, 2, 3])
    before = memory.recall("a", b"")
    memory.remember("a", b"", [4, 5, 6])
    assert before is not None
    assert before.tokens == [BREAK, 1, 2, 3]


@pytest.mark.parametrize("used", [0, 1])
def test_the_least_recently_used_agent_is_forgotten(used: int) -> None:
    memory = ReplyMemory(most_agents=2)
    memory.remember("0", b"", [1])
    memory.remember("1", b"", [1])
    memory.recall(str(used), b"")
    memory.remember("2", b"", [1])
    assert [agent for agent in "012" if memory.recall(agent, b"") is not None] == [str(used), "2"]
