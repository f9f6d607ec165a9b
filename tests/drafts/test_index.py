"""SuffixIndex against a search through the whole text, and its work within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from thorough import tried

from mlx_blockpool.drafts.index import LONGEST, MOST_PLACES, SHORTEST, SuffixIndex

# Few tokens, so that ends come again; some with more bits than the index gives a token, and image
# patches.
TOKENS = st.sampled_from([1, 2, 3, 1 + (1 << 20), (1 << 40) + 2, -1, -(1 << 60) + 1])
TEXTS = st.lists(TOKENS, max_size=60) | st.lists(st.integers(1, 2), max_size=150)


def index_of(tokens: list[int]) -> SuffixIndex:
    index = SuffixIndex(tokens)
    index.catch_up(len(tokens))
    return index


def common_end(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b), LONGEST) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count


def longest_match(text: list[int], own: list[int]) -> tuple[int, int]:
    """What match() promises, by a search: unlike tokens that share a number take up places too."""

    def key(tokens: list[int]) -> int:
        a, b, c = tokens
        return ((a << 40) ^ (b << 20) ^ c) % (1 << 60)

    if len(own) < SHORTEST:
        return 0, -1
    wanted = key(own[-3:])
    padded = [0, 0, 0, *text]
    places = [place for place in range(len(text)) if key(padded[place : place + 3]) == wanted][
        ::-1
    ][:MOST_PLACES]
    found = [(common_end(text[:place], own), place) for place in places]
    return max((each for each in found if each[0] >= SHORTEST), default=(0, -1))


@tried(80, 600)
@given(TEXTS)
def test_the_match_in_its_own_text_is_the_longest_of_the_latest_places(text: list[int]) -> None:
    assert index_of(text).match(text) == longest_match(text, text)


@tried(80, 600)
@given(TEXTS, TEXTS)
def test_the_match_in_another_text_is_the_longest_of_the_latest_places(
    text: list[int], own: list[int]
) -> None:
    assert index_of(text).match(own) == longest_match(text, own)


def test_of_equally_long_matches_the_latest_is_found() -> None:
    assert index_of([1, 2, 3, 7, 1, 2, 3, 8, 5]).match([9, 1, 2, 3]) == (3, 7)


def test_a_longer_match_goes_before_a_later_one() -> None:
    assert index_of([9, 1, 2, 3, 7, 1, 2, 3, 8, 5]).match([9, 1, 2, 3]) == (4, 4)


def test_a_match_of_its_own_end_has_a_token_after_it() -> None:
    assert index_of([1, 2, 3]).match([1, 2, 3]) == (0, -1)
    assert index_of([1, 2, 3, 1, 2, 3]).match([1, 2, 3, 1, 2, 3]) == (3, 3)


def test_no_more_places_are_compared_than_promised() -> None:
    text = [9, 1, 2, 3, 4, *[1, 2, 3, 5] * MOST_PLACES]
    assert index_of(text).match([9, 1, 2, 3]) == (3, len(text) - 1)
    assert index_of(text[:-4]).match([9, 1, 2, 3]) == (4, 4)


@tried(60, 400)
@given(TEXTS, st.lists(st.integers(0, 20), max_size=10))
def test_a_text_that_is_indexed_in_pieces_is_indexed_as_at_once(
    text: list[int], steps: list[int]
) -> None:
    prompt = text[: len(text) // 2]
    index = SuffixIndex(prompt)
    for token, step in zip(text[len(prompt) :], [*steps, *[0] * len(text)], strict=False):
        assert index.catch_up(step) <= step
        index.append(token)
    assert len(index) == len(text)
    index.catch_up(len(text))
    assert index.num_indexed == len(index)
    assert index.tokens == text
    assert index.match(text) == longest_match(text, text)


def test_what_is_not_indexed_yet_is_not_found() -> None:
    index = SuffixIndex([1, 2, 3, 4, 5, 6])
    assert index.match([1, 2, 3]) == (0, -1)
    assert index.catch_up(4) == 4
    assert index.match([1, 2, 3]) == (3, 3)
    assert index.match([2, 3, 4]) == (0, -1)
